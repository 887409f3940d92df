"""One's own text: files, folders, tokens, and what is wrong with them."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from moesys.lab.train.text import load_files, load_text

tokenizers = pytest.importorskip("tokenizers")


def tokens(*paths: Path, tokenizer: str = "bytes", vocab_size: int = 256) -> list[int]:
    text = load_files([str(path) for path in paths], tokenizer, vocab_size)
    return text.batch(0, 0, 0, seed=0, batch=1, context=len(text.tokens_N) - 1)[0][0].tolist()


def test_no_path_is_the_built_in_text() -> None:
    assert load_files((), "bytes", 256).fingerprint == load_text().fingerprint


def test_files_and_folders_follow_one_another_in_order(tmp_path: Path) -> None:
    files = {"f/b.txt": "2", "f/a/c.md": "1", "f/.git/x": "no", "f/.x": "no", "z.txt": "0.", "e.txt": ""}
    for name, content in files.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(content)
    assert bytes(tokens(*(tmp_path / name for name in ("z.txt", "e.txt", "f", "z.txt")))) == b"0.120"


@pytest.mark.parametrize(("vocab_size", "dtype"), [(65536, "<u2"), (65537, "<u4")])
def test_tokens_are_read_as_wide_as_the_vocabulary_needs(tmp_path: Path, vocab_size: int, dtype: str) -> None:
    np.array([1, 300, 65535, 7], dtype).tofile(tmp_path / "t.bin")
    assert tokens(tmp_path / "t.bin", vocab_size=vocab_size) == [1, 300, 65535]
    assert tokens(tmp_path / "t.bin", tmp_path / "t.bin", vocab_size=vocab_size) == [1, 300, 65535, 7, 1, 300, 65535]
    assert tokens(tmp_path, vocab_size=vocab_size) == [1, 300, 65535]


def test_a_tokenizer_encodes_text(tmp_path: Path) -> None:
    words = tokenizers.Tokenizer(tokenizers.models.WordLevel({"a": 0, "bc": 1, "?": 2}, unk_token="?"))
    words.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    words.enable_truncation(2)
    words.enable_padding(length=9)
    words.save(str(tmp_path / "tokenizer.json"))
    (tmp_path / "text").write_text("bc a x a bc")
    assert tokens(tmp_path / "text", tokenizer=str(tmp_path / "tokenizer.json"), vocab_size=3) == [1, 0, 2, 0]
    (tmp_path / "text").write_bytes(b"bc \xff")
    with pytest.raises(ValueError, match=r"text is no text in UTF-8 .*; leave it out, or use tokenizer=\"bytes\""):
        tokens(tmp_path / "text", tokenizer=str(tmp_path / "tokenizer.json"), vocab_size=3)
