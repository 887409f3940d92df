"""What the tuner's clock runs: the five GEMMs on operands that fit each other, with values or without."""

from __future__ import annotations

import pytest
import torch

from benchmarks.kernels import gemm_timer
from benchmarks.kernels.gemm_timer import META, GemmTimer, Operands
from moesys.kernels.experts.tile_config import ShapeClass, TileConfig
from moesys.kernels.experts.tile_tuner import OPS

SHAPE = ShapeClass(32, 16, 4, 2, "swiglu", "float16", 8)
CPU = torch.device("cpu")


@pytest.mark.parametrize("skewed", [False, True], ids=["even", "skewed"])
def test_every_op_runs(skewed: bool) -> None:
    operands, block = Operands(SHAPE, CPU), TileConfig(16, 32, 16)
    operands = operands.skewed() if skewed else operands
    assert operands.num_rows == 32
    assert int(operands.routing.first_G1[-1]) == operands.num_rows
    for op in OPS:
        operands.launch(op, block, operands.tiles(block))


def test_a_skewed_routing_has_large_and_small_experts() -> None:
    torch.manual_seed(0)
    shape = ShapeClass(8, 8, 16, 1, "swiglu", "float16", 64)
    even = Operands(shape, CPU)
    skewed = even.skewed()
    rows_E = skewed.routing.first_G1.diff()
    assert rows_E.max() > 3 * rows_E.min()
    even_E = even.routing.first_G1.diff()
    assert even_E.max() < 3 * even_E.min()
    assert skewed.order_E[0] == rows_E.argmax()


def test_both_routings_share_their_tensors_and_operands_without_values_have_the_same_shapes(monkeypatch):
    monkeypatch.setattr(gemm_timer, "FLUSH_BYTES", 16)
    even, skewed = (vars(operands) for operands in GemmTimer(SHAPE, CPU)._routings)
    apart = [name for name, found in even.items() if isinstance(found, torch.Tensor) and found is not skewed[name]]
    assert apart == ["order_E"]
    here, there = (vars(Operands(SHAPE, device)) for device in (CPU, META))
    for name, tensor in here.items():
        if isinstance(tensor, torch.Tensor):
            assert (there[name].shape, there[name].dtype) == (tensor.shape, tensor.dtype), name


class Event:
    """Time stands still while nothing runs, and a run takes as many milliseconds as its tile has columns."""

    now_ms = 0.0

    def __init__(self, enable_timing: bool) -> None:
        self.at_ms = 0.0

    def record(self) -> None:
        self.at_ms = Event.now_ms

    def synchronize(self) -> None:
        pass

    def elapsed_time(self, end: Event) -> float:
        return end.at_ms - self.at_ms


def test_the_clock_interleaves_sums_medians_of_both_routings_and_drops_what_fails(monkeypatch):
    blocks = [TileConfig(16, columns, 16) for columns in (16, 32, 64, 128)]
    run: list[int] = []

    def launch(operands: Operands, op: str, block: TileConfig, tiles: object) -> None:
        run.append(block.columns)
        if block.columns == 64:
            raise RuntimeError("out of resources")
        Event.now_ms += block.columns

    monkeypatch.setattr(Operands, "launch", launch)
    monkeypatch.setattr(torch.cuda, "Event", Event)
    monkeypatch.setattr(gemm_timer, "FLUSH_BYTES", 16)
    monkeypatch.setattr(GemmTimer, "_compiles", lambda self, op, block: block.columns != 128)
    assert GemmTimer(SHAPE, CPU)("up", blocks) == [32.0, 64.0, None, None]
    assert run[:7] == [16, 32, 64, 16, 32, 16, 32]
