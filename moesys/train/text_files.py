"""Reads one's own text: files of it, folders of files, or files of tokens."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from moesys.train.text import Text, load_text

Tokens = NDArray[Any]
# The tokens of a text, and where it is from, for errors.
Encode = Callable[[bytes, str], Tokens]

BYTES = "bytes"
MOST_OF_UINT16 = 1 << 16


def load_files(paths: Sequence[str], tokenizer: str, vocab_size: int) -> Text:
    """Returns the tokens of ``paths``, one after the other; of none, those of ``load_text``.

    A file that ends in .bin holds tokens: unsigned, little-endian, uint16 where ``vocab_size`` is up to 65,536 and else
    uint32. One alone is mapped into memory, and read as batches are drawn. Any other is text. Files of a folder are
    taken in the order of their names, hidden ones left out. ``tokenizer``: a tokenizer.json, or "bytes".

    Raises ValueError for a path that cannot be read and for tokens outside of the vocabulary.
    """
    encode = _encoder(tokenizer)
    parts = [_within(vocab_size, *part) for part in _parts(paths, encode, vocab_size)]
    tokens_N = parts[0] if len(parts) == 1 else np.concatenate([part.astype(np.int64) for part in parts])
    return Text(torch.from_numpy(tokens_N))


def _parts(paths: Sequence[str], encode: Encode, vocab_size: int) -> Iterator[tuple[Tokens, str]]:
    """Yields tokens [N] and where they are from."""
    if not paths:
        source = "the built-in text"
        yield encode(load_text().tokens_N.numpy().tobytes(), source), source
    for file in (file for each in paths for file in _files(Path(each).expanduser())):
        if file.suffix == ".bin":
            yield _mapped(file, "<u2" if vocab_size <= MOST_OF_UINT16 else "<u4"), str(file)
            continue
        try:
            text = file.read_bytes()
        except OSError as error:
            raise ValueError(f"data: cannot read {file}: {error.strerror}") from None
        yield encode(text, str(file)), str(file)


def _within(vocab_size: int, tokens_N: Tokens, source: str) -> Tokens:
    if len(tokens_N) and tokens_N.max() >= vocab_size:
        first = int((tokens_N >= vocab_size).argmax())
        raise ValueError(
            f"data: token {first} of {source} is {tokens_N[first]}, and the model's vocab_size is {vocab_size}; take "
            "the tokenizer of this model, or a model with as many tokens"
        )
    return tokens_N


def _mapped(path: Path, dtype: str) -> Tokens:
    size = np.dtype(dtype).itemsize
    try:
        num_bytes = path.stat().st_size
        if not num_bytes or num_bytes % size:
            raise ValueError(f"data: {path} has {num_bytes} bytes, which are no whole tokens of {size} bytes each")
        # Copied where it is written to, which nobody does: torch takes no memory that is read-only.
        return np.memmap(path, dtype, mode="c")
    except OSError as error:
        raise ValueError(f"data: cannot read {path}: {error.strerror}") from None


def _files(path: Path) -> list[Path]:
    if not path.is_dir():
        return [path]
    names = sorted(each.relative_to(path).as_posix() for each in path.rglob("*") if each.is_file())
    if found := [path / name for name in names if not any(part.startswith(".") for part in Path(name).parts)]:
        return found
    raise ValueError(f"data: the folder {path} has no files; name one with text, or leave data out")


def _encoder(tokenizer: str) -> Encode:
    if tokenizer == BYTES:
        return lambda text, _: np.frombuffer(bytearray(text), dtype=np.uint8)
    # Not at the top: it comes with transformers.
    from tokenizers import Tokenizer

    try:
        known = Tokenizer.from_file(str(Path(tokenizer).expanduser()))
    # It raises no narrower class.
    except Exception as error:
        raise ValueError(f'tokenizer={tokenizer!r} is neither "bytes" nor a tokenizer.json: {error}') from None
    # As some are saved: they would cut every file, or fill it up.
    known.no_truncation()
    known.no_padding()

    def encode(text: bytes, source: str) -> Tokens:
        try:
            return np.array(known.encode(text.decode(), add_special_tokens=False).ids, dtype=np.uint32)
        except UnicodeDecodeError as error:
            raise ValueError(
                f'data: {source} is no text in UTF-8 ({error}); leave it out, or use tokenizer="bytes"'
            ) from None

    return encode
