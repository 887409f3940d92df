"""GPU checks of the kernels of one device, against references in plain torch and against themselves.

T tokens, H hidden size, K choices per token, E experts, I their width, P = T·K rows, R ranks.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import NamedTuple

import numpy as np
import pytest
import torch
from gpu_ranks import GpuRank
from kernel_references import (
    gather_rows_reference,
    groups_by_size_reference,
    ordered_sum_reference,
    route_reference,
    tile_table_reference,
)
from torch import Tensor

from benchmarks.kernels.checks import (
    far_offsets,
    ours_on,
    same_bits,
    same_bits_in_other_blocks,
    wrong_errors,
)
from benchmarks.kernels.drawn_layer import SIZES, Layer, Size, draw_layer, relative_errors
from benchmarks.kernels.kernels_contest import IN_INTERPRETER, ON_GPU, TOY
from moesys.balance.even_split import EvenSplit
from moesys.balance.flow.flow_split import FlowSplit
from moesys.balance.proportional_split import Proportional
from moesys.balance.run_planner import split_tokens
from moesys.config import ClusterSpec
from moesys.config.member import Split
from moesys.kernels.experts.tiles import groups_by_size, tile_table
from moesys.kernels.experts.token_rows import gather_rows
from moesys.kernels.routing import route
from moesys.kernels.symmetric.pulls import ordered_sum
from moesys.layout import ExpertLayout
from moesys.load import LoadMatrix
from moesys.moe.router import topk_by_index
from moesys.overlap.device_routes import device_split
from moesys.overlap.mega_executor import tokens_by_replica

pytestmark = pytest.mark.gpu(layer="kernels of one device")

DTYPE = torch.bfloat16
# A layer of Qwen3-30B-A3B with fewer tokens, because references compute it expert by expert.
REAL = Size("real", 8192, 2048, 768, 128, 8)
RANKS, REHEARSED_RANKS, SLOTS = 8, 4, 3
# float32 gradients that owners add up: as wide as Mixtral's experts on two ranks, beyond 65,535 blocks of columns.
PARTS, REAL_COLUMNS, TOY_COLUMNS = 3, 88_080_384, 3000
ROUTING, BIT_RUNS = "zipf", 5
# The memory for far offsets in 16 bits, with the reference and the gradients.
FAR_BYTES = 70e9


class Op(NamedTuple):
    """``found`` and ``expected`` return the same tensors, to the bit."""

    name: str
    found: Callable[[], tuple[Tensor, ...]]
    expected: Callable[[], tuple[Tensor, ...]]


@pytest.mark.gpu(limit_s=60, after=("device",))
def test_ops(gpu: GpuRank) -> str:
    """Each op on integers, and each ordered sum, has the bits of its reference in plain torch, twice."""
    device = gpu.device
    layer = draw_layer(TOY if gpu.rehearsed else REAL, ROUTING, DTYPE, device)
    wrong, names = [], []
    for op in (*_routing_ops(layer), *_rank_ops(device, gpu.rehearsed)):
        names.append(op.name)
        found, again = op.found(), op.found()
        if any(not torch.equal(one, other) for one, other in zip(found, again, strict=True)):
            wrong.append(f"{op.name} gives other bits the second time")
        for one, right in zip(found, op.expected(), strict=True):
            if not torch.equal(one, right):
                wrong.append(f"{op.name} differs from its reference")
    assert not wrong, "; ".join(dict.fromkeys(wrong))
    return f"{len(names)} ops: {', '.join(names)}"


@pytest.mark.gpu(limit_s=90, after=("ops",))
def test_experts(gpu: GpuRank) -> str:
    """Experts at real sizes agree with float32 in both directions, and have the same bits again and in other tiles."""
    size = IN_INTERPRETER.small if gpu.rehearsed else SIZES[0]
    layer = draw_layer(size, ROUTING, DTYPE, gpu.device)
    errors = relative_errors(layer, ours_on(layer).results())
    wrong = wrong_errors(errors, DTYPE)
    assert not wrong, f"{size.name}: {wrong}"
    says = [f"{size.name}: errors to {max(errors.values()):.1e}"]
    again = same_bits(layer, IN_INTERPRETER.bit_runs if gpu.rehearsed else BIT_RUNS)
    for verdict in (again, same_bits_in_other_blocks(layer)):
        assert verdict.holds, verdict.says
        says.append(verdict.says)
    return "; ".join(says)


@pytest.mark.gpu(limit_s=90, ranks="first", after=("experts",))
def test_offsets(gpu: GpuRank) -> str:
    """Rows, matrices and gradients beyond 2³¹ elements are where they belong."""
    if not gpu.rehearsed:
        total = torch.cuda.get_device_properties(gpu.device).total_memory
        if total < FAR_BYTES:
            pytest.skip(f"it takes {FAR_BYTES / 1e9:.0f} GB of GPU memory, and this GPU has {total / 1e9:.0f} GB")
    verdict = far_offsets((IN_INTERPRETER if gpu.rehearsed else ON_GPU).far, DTYPE, gpu.device)
    assert verdict.holds, verdict.says
    return verdict.says


def _routing_ops(layer: Layer) -> Iterator[Op]:
    E, P = layer.size.E, layer.expert_TK.numel()
    routing = route_reference(layer.expert_TK, E)
    first_G1, rows = routing.first_G1, 64
    # Few values, so that many are equal.
    score_TE = torch.randint(-3, 4, (layer.size.T, E), device=layer.x_TH.device).float()
    yield Op(
        "topk",
        lambda: (topk_by_index(score_TE, layer.size.K),),
        lambda: (score_TE.sort(dim=1, descending=True, stable=True).indices[:, : layer.size.K],),
    )
    yield Op("route", lambda: tuple(route(layer.expert_TK, E)), lambda: tuple(routing))
    yield Op(
        "tiles",
        lambda: tuple(tile_table(first_G1, P, rows)[:3]),
        lambda: tuple(tile_table_reference(first_G1, P, rows)[:3]),
    )
    yield Op("groups", lambda: (groups_by_size(first_G1),), lambda: (groups_by_size_reference(first_G1),))
    given = (layer.x_TH, routing.entry_P, first_G1, layer.size.K)
    yield Op("gather", lambda: (gather_rows(*given),), lambda: (gather_rows_reference(*given),))


def _rank_ops(device: torch.device, rehearsed: bool) -> Iterator[Op]:
    """Yields the ops on the numbers of several ranks: plans from all counts, and sums on owners."""
    num_ranks = REHEARSED_RANKS if rehearsed else RANKS
    num_experts, numbers = 2 * num_ranks, np.random.default_rng(0)
    load = LoadMatrix(numbers.poisson(40, (num_ranks, num_experts)))
    layout = ExpertLayout(np.arange(num_ranks * SLOTS).reshape(num_ranks, SLOTS) % num_experts, num_experts)
    cluster = ClusterSpec(num_nodes=2, ranks_per_node=num_ranks // 2)
    counts = torch.from_numpy(load.tokens_RE.copy()).to(device)
    splits: tuple[Split, ...] = (EvenSplit(), Proportional(), FlowSplit())
    for config in splits:
        plan = split_tokens(load, layout, cluster, config)
        yield Op(
            f"{config.kind} split",
            lambda config=config: (device_split(layout, cluster, config, device).tokens_RP(counts, 0),),
            lambda plan=plan: (tokens_by_replica(plan, device),),
        )
    parts_NP = torch.randn(PARTS, TOY_COLUMNS if rehearsed else REAL_COLUMNS, device=device)
    row_N = torch.tensor([1, 0, 1], device=device)
    yield Op(
        "ordered sum",
        lambda: (ordered_sum(parts_NP, row_N, 2),),
        lambda: (ordered_sum_reference(parts_NP, row_N, 2),),
    )
