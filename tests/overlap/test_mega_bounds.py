"""How much memory a MegaKernel may take, said before anything runs."""

from __future__ import annotations

import re
import weakref
from types import SimpleNamespace

import numpy as np
import pytest
import torch

import moesys as ms
from moesys.kernels.mega.arguments import MegaMemory
from moesys.kernels.mega.exchange import regions
from moesys.kernels.mega.point import blocks_at
from moesys.kernels.symmetric.counts import count_regions
from moesys.kernels.symmetric.heap import ArenaLayout, Heap
from moesys.limits import too_many_rows
from moesys.overlap.device_routes import room_for_rows
from moesys.overlap.experts_triton import ACTIVATION
from moesys.overlap.mega_executor import MegaHeaps, _blocks_and_flags, plan_mega
from moesys.simulator.mega_pass import RASTER, TileSizes

# Every token of four ranks wants experts 0 and 1, which rank 0 holds.
SKEWED = np.array([[8, 8, 0, 0]] * 4)
SHAPE = ms.ModelShape(hidden_size=1536, intermediate_size=768, num_experts=128, top_k=8, dtype="bfloat16")
SMALL = ms.ModelShape(hidden_size=8, intermediate_size=8, num_experts=4, top_k=2)


def plan(tokens_RE) -> ms.planning.TokenPlan:
    strategy = ms.Strategy(name="ep", sharding=ms.Ep(slots_per_rank=2))
    return ms.planning.plan_layer(
        strategy, SMALL, ms.ClusterSpec(ranks_per_node=4), ms.planning.LoadMatrix(tokens_RE)
    ).tokens


def test_rows_beyond_the_cap_are_refused_with_the_cap_that_would_do():
    tokens = plan(SKEWED)
    rows_R = tokens.tokens_R
    enough = float(rows_R.max() / 16)
    assert enough > 1
    words = (
        f"rank {rows_R.argmax()} would get {rows_R.max()} rows, more than rows_cap=1 times 16 choices of a rank; "
        f"use MegaKernel(rows_cap={enough:g})"
    )
    assert words in too_many_rows(ms.MegaKernel(rows_cap=1.0), tokens, 8, 2)
    heaps = SimpleNamespace(members=[0, 1, 2, 3])
    with pytest.raises(ValueError, match=re.escape(words)):
        plan_mega(ms.MegaKernel(rows_cap=1.0), SMALL, heaps, torch.zeros(8, 2), tokens, 0, 8)
    assert too_many_rows(ms.MegaKernel(rows_cap=enough), tokens, 8, 2) == ""


def test_what_the_error_names_is_enough_when_it_is_rounded():
    """16 rows over 3 choices: 5.333... would round down to a cap that is still too low."""
    tokens = plan([[3, 3, 0, 0], [3, 2, 0, 0], [3, 2, 0, 0], [0, 0, 0, 0]])
    refused = too_many_rows(ms.MegaKernel(rows_cap=1.0), tokens, 3, 1)
    named = float(refused.partition("MegaKernel(rows_cap=")[2].partition(")")[0])
    assert too_many_rows(ms.MegaKernel(rows_cap=named), tokens, 3, 1) == ""


def test_no_tokens_anywhere_are_within_any_cap():
    assert too_many_rows(ms.MegaKernel(rows_cap=1.0), plan(np.zeros((4, 4), dtype=int)), 0, 2) == ""


def test_symmetric_memory_is_at_most_a_quarter_of_unieps():
    """T=32768, H=1536, K=8 in 16 bits, for which UniEP (arXiv 2604.19241) says 7.7 GB."""
    _, flags = _blocks_and_flags(ms.MegaKernel(), SHAPE, 32768, 128, torch.device("cuda"))
    shared = regions(32768, SHAPE.top_k, SHAPE.hidden_size, torch.bfloat16, 8, flags)
    found = ArenaLayout.of({**shared, **count_regions(8, SHAPE.num_experts)}).num_bytes
    # Those of x, once more for backward, and eight that come home.
    rows = 2 * 32768 * 1536 * (2 + 8)
    assert rows < found <= 7.7e9 / 4
    # Flags, choices and weights are a small part.
    assert found - rows < 0.01 * found


# --- growth -------------------------------------------------------------------------------------------------------

CPU = torch.device("cpu")


def capturing(monkeypatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)


def test_flags_double_and_what_a_graph_may_hold_lives_on():
    memory = MegaMemory(Heap.virtual({}, 1, CPU)[0])
    memory.require(10, 2, 3, 4)
    held = weakref.ref(memory.flags.arrived)
    memory.require(11, 2, 3, 4)
    assert (len(memory.flags.arrived), len(memory.flags.multiplied)) == (20, 12)
    assert held() is not None
    grown = memory.flags.arrived
    memory.require(20, 2, 3, 4)
    assert memory.flags.arrived is grown


def test_the_heap_doubles_only_what_was_too_little():
    heaps = MegaHeaps(None, CPU, 1.0)

    def tokens(asked: int, flags: int = 5) -> tuple[int, int]:
        regions = heaps.memory(SMALL, asked, flags).heap.layout.regions
        return regions["x"].shape[0], regions["combined"].shape[-1]

    first = tokens(10)
    assert first[0] == 10
    assert tokens(11) == (20, first[1])
    assert tokens(20) == (20, first[1])
    assert tokens(50) == (50, first[1])
    assert tokens(1, flags=6)[0] == 50
    assert tokens(1, flags=6)[1] > first[1]


def test_nothing_grows_while_a_graph_is_captured(monkeypatch):
    heaps = MegaHeaps(None, CPU, 1.0)
    memory = heaps.memory(SMALL, 10, 5)
    memory.require(10, 2, 3, 4)
    capturing(monkeypatch)
    assert heaps.memory(SMALL, 10, 5) is memory
    memory.require(10, 2, 3, 4)
    words = "would have to grow while a CUDA graph is captured; run a micro-batch of this size once"
    with pytest.raises(RuntimeError, match=f"flags of a MegaKernel {words}"):
        memory.require(11, 2, 3, 4)
    with pytest.raises(RuntimeError, match=f"the arena of a MegaKernel {words}"):
        heaps.memory(SMALL, 11, 5)
    assert heaps.memory(SMALL, 10, 5) is memory


@pytest.mark.parametrize(
    ("point", "words"),
    [
        (ms.MegaKernel(tile_rows=32), "rows=32 of a tile of up in torch.bfloat16: fewer than 64 are multiplied by"),
        (ms.MegaKernel(warps=2), "warps=2 of a tile of up in torch.bfloat16: fewer than 4 are multiplied by"),
    ],
    ids=["rows", "warps"],
)
def test_tiles_that_a_gpu_would_multiply_in_another_way_are_refused(point, words):
    """By where tensors are: the interpreter has one kind of product, and plans with any tile."""
    model, expert_TK = SMALL.replace(dtype="bfloat16"), torch.zeros(8, 2, dtype=torch.int64)
    heaps = SimpleNamespace(members=[0])
    heaps.memory = lambda *_: None
    with pytest.raises(ValueError, match=f"{words} another kind"):
        plan_mega(point, model, heaps, expert_TK.to("meta"), plan(SKEWED // 4), 0, 8)
    assert plan_mega(point, model, heaps, expert_TK, plan(SKEWED // 4), 0, 8).point == point
    # It has no tensor-core product.
    single = model.replace(dtype="float32")
    assert plan_mega(point, single, heaps, expert_TK.to("meta"), plan(SKEWED // 4), 0, 8).point == point


def test_private_rows_of_a_layer_of_qwen3_30b_are_fewer_than_twice_what_comes():
    """x and h, kept until backward where devices plan, on 8 ranks of 8,192 tokens: 0.94 GB with a cap of 2."""
    room = room_for_rows(ms.MegaKernel(), 8192, SHAPE.top_k, 8)
    assert room == 81_920
    assert room * (2048 + 2 * 768) * 2 == 587_202_560


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("declared", [{}, {"tile_rows": 64, "tile_columns": 32}])
def test_tiles_of_simulations_are_as_large_as_those_of_a_gpu(dtype, declared):
    overlap = ms.MegaKernel(**declared)
    model = ms.ModelShape(hidden_size=64, intermediate_size=48, num_experts=4, top_k=2, dtype=dtype)
    blocks = blocks_at(overlap, ACTIVATION, getattr(torch, dtype), torch.device("cuda"))
    sizes = TileSizes.of(overlap, model)
    assert (blocks.down.rows, blocks.down.columns, blocks.up.columns) == (sizes.rows, sizes.columns, sizes.halves)
    for block in (blocks.activation_gradient, blocks.input_gradient, blocks.weight_gradient):
        assert (block.rows, block.columns, block.raster) == (sizes.rows, sizes.columns, RASTER)
