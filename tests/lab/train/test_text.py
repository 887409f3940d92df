"""Text: the same bytes everywhere, and batches that depend on nothing but what names them."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from moesys.lab.train.text import Text, load_text


def test_the_standard_library_is_the_same_text_every_time() -> None:
    text = load_text()
    assert text.tokens_N.dtype == torch.uint8
    assert 1 << 20 <= len(text.tokens_N) <= 4 << 20
    assert load_text().fingerprint == text.fingerprint
    assert load_text(max_bytes=1000).fingerprint != text.fingerprint
    assert bytes(text.tokens_N.tolist()).count(b"def ") > 1000


def test_files_come_in_the_order_of_their_names_and_only_those_of_the_library(tmp_path: Path) -> None:
    others = ("z/test/a.py", "test/a.py", "site-packages/a.py", "_sysconfigdata__linux.py", "a.txt")
    files = {"b.py": b"2", "a/c.py": b"1", "a.py": b"0", "z/a.py": b"\xff"} | dict.fromkeys(others, b"x")
    for name, content in files.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_bytes(content)
    (tmp_path / "link.py").symlink_to(tmp_path / "b.py")
    assert bytes(load_text(tmp_path).tokens_N.tolist()) == b"012\xff"
    assert bytes(load_text(tmp_path, max_bytes=3).tokens_N.tolist()) == b"012"


def test_a_python_without_sources_is_told_so(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match=r"no \.py files in .*; training needs their text, so use a Python"):
        load_text(tmp_path)


def test_a_tenth_is_held_out() -> None:
    text = Text(torch.arange(100, dtype=torch.uint8))
    assert torch.equal(text.training_part().tokens_N, text.tokens_N[:90])


def test_a_batch_depends_on_its_names_alone() -> None:
    text = load_text(max_bytes=1 << 16)
    first, _ = text.batch(3, 1, 2, seed=5, batch=4, context=16)
    torch.manual_seed(1)
    again, _ = text.batch(3, 1, 2, seed=5, batch=4, context=16)
    assert torch.equal(first, again)
    for step, micro_batch, rank, seed in ((4, 1, 2, 5), (3, 2, 2, 5), (3, 1, 3, 5), (3, 1, 2, 6), (1, 3, 2, 5)):
        other, _ = text.batch(step, micro_batch, rank, seed=seed, batch=4, context=16)
        assert not torch.equal(first, other), (step, micro_batch, rank, seed)


def test_a_target_is_the_byte_behind_its_input() -> None:
    text = Text(torch.arange(20, dtype=torch.uint8))
    starts = set()
    for step in range(50):
        inputs_BC, targets_BC = text.batch(step, 0, 0, seed=0, batch=3, context=17)
        assert inputs_BC.dtype == targets_BC.dtype == torch.int64
        assert inputs_BC.shape == (3, 17)
        assert torch.equal(targets_BC, inputs_BC + 1)
        assert torch.equal(inputs_BC, inputs_BC[:, :1] + torch.arange(17))
        starts |= set(inputs_BC[:, 0].tolist())
    assert starts == {0, 1, 2}
