"""Rows multiplied in company have the bits of rows multiplied alone, from the probed number of rows on."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from moesys.kernels.cpu import row_invariant_gemm
from moesys.kernels.cpu.row_invariant_gemm import RowRule, matmul_rows, row_rule

# Each case says which edge it is: (contraction, columns).
SIZES = {
    "an expert's up projection": (256, 192),
    "an expert's down projection": (96, 256),
    "odd in both": (37, 45),
    "as narrow as is probed": (64, 16),
    "too narrow to be probed": (64, 7),
    "short rows": (5, 64),
    "LoRA's outer product": (16, 192),
}
MOST_ROWS = 150
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


# Two threads cut rows between them, which only wide matrices are worth.
THREADS_AND_SIZES = [
    *((1, name) for name in SIZES),
    (2, "an expert's up projection"),
    pytest.param(2, "an expert's down projection", marks=pytest.mark.slow),
]


@pytest.fixture(scope="module")
def threads(request: pytest.FixtureRequest) -> Iterator[int]:
    before = torch.get_num_threads()
    torch.set_num_threads(request.param)
    yield request.param
    torch.set_num_threads(before)


def product(x_MK: torch.Tensor, weight_NK: torch.Tensor, rule: RowRule, added: bool = False) -> torch.Tensor:
    out_MN = torch.full((len(x_MK), len(weight_NK)), 2.0**-3 if added else torch.nan, dtype=x_MK.dtype)
    matmul_rows(x_MK, weight_NK, out_MN, rule, add=added)
    return out_MN


@pytest.mark.parametrize("added", [False, True], ids=["written", "added"])
@pytest.mark.parametrize("transposed", [True, False], ids=["x @ w.T", "x @ w"])
@pytest.mark.parametrize("dtype", DTYPES.values(), ids=DTYPES)
@pytest.mark.parametrize(("threads", "size"), THREADS_AND_SIZES, indirect=["threads"])
def test_rows_have_the_same_bits_in_any_company(
    threads: int, size: str, dtype: torch.dtype, transposed: bool, added: bool
) -> None:
    contraction, columns = SIZES[size]
    rule = row_rule(contraction, columns, dtype, transposed, "cpu", added)
    generator = torch.Generator().manual_seed(contraction * columns)
    weight = torch.randn(columns, contraction, generator=generator).to(dtype)
    weight_NK = weight if transposed else weight.t().contiguous().t()
    x_MK = torch.randn(MOST_ROWS, contraction, generator=generator).to(dtype)
    together = product(x_MK, weight_NK, rule, added)
    some_counts = torch.randint(rule.min_rows, MOST_ROWS + 1, (5,), generator=generator).tolist()
    for count in (*range(rule.min_rows, rule.min_rows + 7), *some_counts):
        first = int(torch.randint(MOST_ROWS - count + 1, (), generator=generator))
        alone = product(x_MK[first : first + count].clone(), weight_NK, rule, added)
        assert torch.equal(alone, together[first : first + count]), (count, first)


@pytest.mark.parametrize("dtype", DTYPES.values(), ids=DTYPES)
@pytest.mark.parametrize(("contraction", "columns"), SIZES.values(), ids=SIZES)
@pytest.mark.parametrize(
    "rule", [RowRule(), RowRule(tile_rows=1), RowRule(tile_rows=64)], ids=["calls", "rows", "tiles"]
)
def test_product_is_right(contraction: int, columns: int, dtype: torch.dtype, rule: RowRule) -> None:
    generator = torch.Generator().manual_seed(columns)
    x_MK = torch.randn(130, contraction, generator=generator).to(dtype)
    weight_NK = torch.randn(columns, contraction, generator=generator).to(dtype)
    expected = x_MK.double() @ weight_NK.double().t()
    for added in (False, True):
        error = (product(x_MK, weight_NK, rule, added).double() - expected - added * 2.0**-3).norm() / expected.norm()
        assert error <= (1e-6 if dtype == torch.float32 else 4e-3)


@pytest.mark.parametrize("added", [False, True], ids=["written", "added"])
@pytest.mark.parametrize("transposed", [True, False], ids=["x @ w.T", "x @ w"])
def test_probe_finds_calls_that_are_too_short(transposed: bool, added: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """A product that goes another way below six rows, as BLAS libraries do, has a minimum of six."""

    def multiply(x_MK: torch.Tensor, weight_NK: torch.Tensor, out_MN: torch.Tensor, add: bool) -> None:
        exact = x_MK.double() @ weight_NK.t().double() + (out_MN if add else 0)
        out_MN.copy_(exact if len(x_MK) >= 6 else exact + 2**-20)

    monkeypatch.setattr("moesys.kernels.cpu.row_invariant_gemm._multiply", multiply)
    # A size that no other test has probed, since the probe remembers.
    assert row_rule(71, 33, torch.float32, transposed, "cpu", added) == RowRule(min_rows=6)


def raises_runtime_error() -> Path:
    raise RuntimeError("Could not determine home directory.")


def test_a_machine_probes_a_size_once(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Each process would measure again, a minute on a machine whose cores are busy."""
    (tmp_path / "file").write_text("")
    size = 72, 34, torch.float32, True, "cpu"

    def as_another_process(folder: str) -> RowRule:
        monkeypatch.setenv("MOESYS_CACHE", str(tmp_path / folder) if folder else "")
        for remembered in (row_invariant_gemm._probe, row_invariant_gemm._folder_of_machine):
            remembered.cache_clear()
        return row_rule(*size)

    measured: list[RowRule] = []
    monkeypatch.setattr(row_invariant_gemm, "_measured_rule", lambda *_: measured.append(RowRule(7)) or measured[-1])
    assert [as_another_process("cache") for _ in range(3)] == [RowRule(7)] * 3
    assert len(measured) == 1
    (file,) = (tmp_path / "cache").glob("*/*")
    file.write_text("7 tor")
    assert as_another_process("cache") == RowRule(7)
    assert len(measured) == 2
    # Where nothing can be kept, the rule is measured.
    assert as_another_process("file") == RowRule(7)
    assert len(measured) == 3
    monkeypatch.setenv("MKL_CBWR", "COMPATIBLE")
    assert as_another_process("cache") == RowRule(7)
    assert len(measured) == 4
    # A user without a home keeps nothing, also not in a folder named "~".
    monkeypatch.setattr(Path, "home", raises_runtime_error)
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    monkeypatch.chdir(tmp_path)
    assert as_another_process("") == RowRule(7)
    assert len(measured) == 5
    assert not list(tmp_path.glob("~"))
    monkeypatch.setattr(row_invariant_gemm, "_measured_rule", lambda *_: RowRule(tile_rows=1))
    assert [as_another_process("tiles") for _ in range(2)] == [RowRule(tile_rows=1)] * 2
    row_invariant_gemm._folder_of_machine.cache_clear()
    row_invariant_gemm._probe.cache_clear()


def test_a_long_probe_says_so_once(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    seconds = itertools.count(0.0, 0.5)
    monkeypatch.setattr(row_invariant_gemm, "time", SimpleNamespace(monotonic=lambda: next(seconds)))
    row_invariant_gemm._say_once.cache_clear()
    for _ in range(2):
        row_invariant_gemm._measured_rule(64, 32, torch.float32, True, False)
    assert [record.message for record in caplog.records] == [
        "moesys measures how many rows BLAS needs for equal bits, once per machine and size of expert"
    ]


def test_probe_finds_that_mkl_multiplies_single_rows_another_way(monkeypatch: pytest.MonkeyPatch) -> None:
    """The known case: float32 in MKL has the same bits only from 4 rows on with one thread, and oneDNN from 2."""
    if not torch.backends.mkl.is_available():
        pytest.skip("this torch has no MKL, whose kernels the test is about")
    monkeypatch.setattr("moesys.kernels.cpu.row_invariant_gemm.HAS_ONEDNN", False)
    rule = row_rule(1000, 520, torch.float32, True, "cpu")
    assert rule.tile_rows is not None or rule.min_rows > 1


def test_one_rule_keeps_them_all() -> None:
    assert RowRule.all_of([RowRule(4), RowRule(2)]) == RowRule(4)
    assert RowRule.all_of([RowRule(4), RowRule(tile_rows=1), RowRule(tile_rows=64)]) == RowRule(4, tile_rows=1)
