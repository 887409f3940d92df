"""Texts to train on, and batches of them: the source code of Python's standard library, which every machine has, or
files of text or tokens.
"""

from __future__ import annotations

import hashlib
import os
import sysconfig
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from moesys.files import opened, read_bytes

Tokens = NDArray[Any]
# Turns the bytes of a text into tokens; the second argument names their source, for errors.
Encode = Callable[[bytes, str], Tokens]

BYTES = "bytes"
MOST_OF_UINT16 = 1 << 16
MAX_BYTES = 4 << 20
HELD_OUT_SHARE = 0.1
# Tests and programs that some distributions leave out, tables of character sets, and what is not of the library.
SKIPPED_FOLDERS = {
    *("test", "tests", "idlelib", "lib2to3", "turtledemo", "encodings"),
    *("site-packages", "dist-packages", "__pycache__"),
}
# These files are written when Python is built or installed, so they differ between machines.
SKIPPED_PREFIXES = ("_sysconfigdata", "sitecustomize", "usercustomize")


@dataclass(frozen=True, eq=False)
class Text:
    """A text and the batches drawn from it. ``tokens_N`` [N] of any integer dtype."""

    tokens_N: Tensor

    @cached_property
    def fingerprint(self) -> str:
        """The sha256 of the tokens, or of evenly spaced tokens of a longer text, as 64 hex digits.

        Trainings with the same fingerprint are comparable.
        """
        every = max(1, len(self.tokens_N) // MAX_BYTES)
        return hashlib.sha256(self.tokens_N[::every].numpy().tobytes()).hexdigest()

    def training_part(self) -> Text:
        """Returns the text without the share at its end that is held out."""
        return Text(self.tokens_N[: round(len(self.tokens_N) * (1 - HELD_OUT_SHARE))])

    def batch(
        self, step: int, micro_batch: int, rank: int, *, seed: int, batch: int, context: int
    ) -> tuple[Tensor, Tensor]:
        """Returns inputs and targets of a micro-batch of one rank, both int64 [B, C]; a target is the next token.

        A pure function of its arguments. Sequences begin anywhere, drawn anew for each (seed, step, micro-batch, rank).
        Raises ValueError where the text is not longer than ``context``.
        """
        num_starts = len(self.tokens_N) - context
        if num_starts < 1:
            shorter = f", or context <= {len(self.tokens_N) - 1}" if len(self.tokens_N) > 2 else ""
            raise ValueError(
                f"context={context} needs {context + 1} tokens of text but there are {len(self.tokens_N)}; "
                f"use a longer text{shorter}"
            )
        start_B = torch.randint(num_starts, (batch,), generator=generator_of("batch", seed, step, micro_batch, rank))
        window_BC = self.tokens_N[start_B[:, None] + torch.arange(context + 1)].long()
        return window_BC[:, :-1], window_BC[:, 1:]


def load_text(library: Path | None = None, max_bytes: int = MAX_BYTES) -> Text:
    """Reads the first ``max_bytes`` of the ``.py`` files of Python's standard library, in the order of their names.

    The same bytes on every machine with the same release of Python. ``library``: another folder than that of the
    running Python. Raises FileNotFoundError where it holds no source code, as where Python comes in one file.
    """
    library = Path(sysconfig.get_path("stdlib")) if library is None else library
    text = bytearray()
    for path in _sources(library):
        text += path.read_bytes()
        if len(text) >= max_bytes:
            break
    if not text:
        raise FileNotFoundError(
            f"no .py files in {library}, where this Python's standard library should be; training needs their text, "
            "so use a Python that is installed with its sources"
        )
    return Text(torch.frombuffer(text, dtype=torch.uint8)[:max_bytes])


def generator_of(*purpose: object) -> torch.Generator:
    """Returns a random generator for the purpose that the arguments name; each purpose has its own."""
    digest = hashlib.sha256(repr(purpose).encode()).digest()
    return torch.Generator().manual_seed(int.from_bytes(digest[:8]) >> 1)


def _sources(library: Path) -> Iterator[Path]:
    """Yields regular .py files, sorted by relative name with forward slashes, because folders on disk have no order."""
    by_name = {}
    for folder, folders, files in os.walk(library):
        folders[:] = [name for name in folders if name not in SKIPPED_FOLDERS]
        paths = [Path(folder, name) for name in files if name.endswith(".py") and not name.startswith(SKIPPED_PREFIXES)]
        by_name.update({path.relative_to(library).as_posix(): path for path in paths})
    for _, path in sorted(by_name.items()):
        if path.is_file() and not path.is_symlink():
            yield path


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
    for file in (file for each in paths for file in _files(Path(os.path.expanduser(each)))):
        if file.suffix == ".bin":
            yield _mapped(file, "<u2" if vocab_size <= MOST_OF_UINT16 else "<u4"), str(file)
            continue
        try:
            text = read_bytes(file)
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
        with opened(path) as file:
            num_bytes = os.fstat(file.fileno()).st_size
            if not num_bytes or num_bytes % size:
                raise ValueError(f"data: {path} has {num_bytes} bytes, which are no whole tokens of {size} bytes each")
            # Nobody writes to it. torch takes no read-only memory, so the mapping copies a page when it is written to.
            return np.memmap(file, dtype, mode="c")
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
    # This import is here because it comes with transformers, which is an extra.
    from tokenizers import Tokenizer

    try:
        known = Tokenizer.from_buffer(read_bytes(Path(os.path.expanduser(tokenizer))))
    # It raises no narrower class.
    except Exception as error:
        raise ValueError(f'tokenizer={tokenizer!r} is neither "bytes" nor a tokenizer.json: {error}') from None
    # A tokenizer may be saved with truncation or padding, which would cut every file, or fill it up.
    known.no_truncation()
    known.no_padding()

    def encode(text: bytes, source: str) -> Tokens:
        try:
            decoded = text.decode()
        except UnicodeDecodeError as error:
            raise ValueError(
                f'data: {source} is no text in UTF-8 ({error}); leave it out, or use tokenizer="bytes"'
            ) from None
        try:
            return np.array(known.encode(decoded, add_special_tokens=False).ids, dtype=np.uint32)
        # It raises no narrower class.
        except Exception as error:
            raise ValueError(f"tokenizer={tokenizer!r} does not encode {source}: {error}") from None

    return encode
