"""Random cases of ``LayoutInvariant``: the same training, cut over two numbers of ranks under two strategies.

R ranks, E experts.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any
from unittest.mock import patch

import numpy as np
import torch
import torch.distributed as dist
from harness import whole
from layout_mutants import mutated
from shuffling_planner import ShufflingPlanner
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import moesys as ms
from moesys.lab.ranks.pool import LocalRanks
from moesys.overlap import exact_sum

TOKEN_BLOCK = 32
# Few, as how a product must be called is probed for each; one is so narrow that its rows are multiplied one by one.
WIDTHS = ((7, 5), (16, 24), (24, 56), (37, 17), (64, 48), (33, 40))
# Bits of a grid so coarse that results show which one was used, of every other case.
COARSE_BITS = 30
MEGA = ms.MegaKernel(programs=1, deduplicate=True, keep_x=False, overlap_weight_gradients=False)


@dataclass(frozen=True)
class Variant:
    """How a case is trained. ``cuts``: where the tokens of ranks begin and end, [R + 1]."""

    strategy: ms.Strategy
    cluster: ms.ClusterSpec
    cuts: tuple[int, ...]
    linked: bool
    checkpointed: bool
    shuffled: bool


@dataclass(frozen=True)
class LayoutCase:
    seed: int
    kernels: bool
    layers: int
    steps: int
    grid_bits: int
    shape: ms.ModelShape
    skew: float
    variants: tuple[Variant, Variant]


def draw(seed: int, kernels: bool = False) -> LayoutCase:
    """``kernels``: computed by Triton's, which are slow in its interpreter, so on one rank and on two, and little."""
    rng = np.random.default_rng(seed)
    numbers, most_blocks, sizes = ([1, 2], 3, (16, 16, 50)) if kernels else ([1, 2, 3, 4], 12, (16, 50, 256))
    H, I = WIDTHS[rng.integers(len(WIDTHS))]
    E = int(rng.integers(2, 10))
    shape = ms.ModelShape(
        hidden_size=H,
        intermediate_size=I,
        num_experts=E,
        top_k=int(rng.integers(1, min(E, 3) + 1)),
        dtype=("float32", "bfloat16")[rng.integers(2)],
        scoring_func=("softmax", "sigmoid")[rng.integers(2)],
        n_shared_experts=int(rng.integers(3)) // 2,
    )
    num_blocks, block_rows = int(rng.integers(2, most_blocks + 1)), sizes[rng.integers(3)]
    variants = []
    for ranks in rng.permutation(numbers)[:2].tolist():
        inner = sorted(rng.integers(0, num_blocks + 1, size=ranks - 1).tolist())
        nodes = [size for size in range(1, ranks + 1) if ranks % size == 0]
        # MegaKernels reach one node.
        ranks_per_node = ranks if kernels else nodes[rng.integers(len(nodes))]
        variants.append(
            Variant(
                _strategy(rng, ranks, E, block_rows, MEGA if kernels else ms.Sequential(node_dispatch="once")),
                ms.ClusterSpec(num_nodes=ranks // ranks_per_node, ranks_per_node=ranks_per_node),
                tuple(TOKEN_BLOCK * block for block in (0, *inner, num_blocks)),
                *(bool(rng.integers(2)) for _ in range(3)),
            )
        )
    steps, bits = 1 if kernels else (2, 1, 1, 1)[seed % 4], (exact_sum.GRID_BITS, COARSE_BITS)[seed % 2]
    return LayoutCase(
        seed,
        kernels,
        1 if kernels else 2,
        steps,
        bits,
        shape,
        float(rng.choice([0.0, 0.5, 3.0])),
        (variants[0], variants[1]),
    )


def _strategy(
    rng: np.random.Generator, ranks: int, num_experts: int, block_rows: int, third: ms.Sequential | ms.MegaKernel
) -> ms.Strategy:
    """``third``: an overlap beside those that all homes have."""
    slots = -(-num_experts // ranks) + int(rng.integers(3))
    sharding = [
        ms.Ep(),
        ms.Ep(slots_per_rank=slots),
        ms.Ep(slots_per_rank=slots, lend="hierarchical"),
        ms.Fsep(slots_per_rank=slots),
        ms.Fsep(slots_per_rank=slots, restore="hierarchical", reshard="hierarchical"),
        ms.Fsep(slots_per_rank=slots, prefetch_layers=1, delay_reshard=True, reshard_after_forward=False),
    ][rng.integers(6)]
    balance = [ms.Greedy(drift=0), ms.Laer(), ms.Eplb()][rng.integers(3)]
    overlaps = [ms.Sequential(), ms.Pipelined(chunks=3), third]
    return ms.Strategy(
        name="drawn",
        sharding=sharding,
        balance=ms.Static() if sharding == ms.Ep() else balance,
        split=[ms.EvenSplit(), ms.Proportional(), ms.FlowSplit()][rng.integers(3)],
        overlap=overlaps[rng.integers(3)],
        reduction=ms.LayoutInvariant(block_rows=block_rows, token_block=TOKEN_BLOCK),
    )


def differing(ranks: LocalRanks, seeds: Sequence[int], mutant: str = "", kernels: bool = False) -> dict[int, list[str]]:
    """Returns what differs by a bit between the variants of each case, by seed; nothing where all is right."""
    cases = [draw(seed, kernels) for seed in seeds]
    trained: dict[tuple[int, int], dict[str, Any]] = {}
    for num_ranks in sorted({len(variant.cuts) - 1 for case in cases for variant in case.variants}):
        here = [
            (place, number)
            for place, case in enumerate(cases)
            for number, variant in enumerate(case.variants)
            if len(variant.cuts) == num_ranks + 1
        ]
        asked = [(cases[place], cases[place].variants[number]) for place, number in here]
        by_rank = ranks.run(train_all, asked, mutant, num_ranks=num_ranks, timeout_s=600)
        trained |= zip(here, map(_together, zip(*by_rank, strict=True)), strict=True)
    found = {}
    for place, seed in enumerate(seeds):
        first, second = trained[place, 0], trained[place, 1]
        if names := [name for name in first if first[name] != second[name]]:
            found[seed] = names
    return found


def _together(of_ranks: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Joins what ranks have of tokens, in rank order; everything else must be alike on all."""
    together = {}
    for name, first in of_ranks[0].items():
        if isinstance(first, list):
            together[name] = [digest for of_rank in of_ranks for digest in of_rank[name]]
        else:
            assert all(of_rank[name] == first for of_rank in of_ranks), f"ranks differ in {name}"
            together[name] = first
    return together


# --- on a rank --------------------------------------------------------------------------------------------------------


def train_all(asked: Sequence[tuple[LayoutCase, Variant]], mutant: str) -> list[dict[str, Any]]:
    trained = []
    with mutated(mutant):
        for case, variant in asked:
            with patch.object(exact_sum, "GRID_BITS", case.grid_bits):
                trained.append(train(case, variant))
    return trained


def train(case: LayoutCase, variant: Variant) -> dict[str, Any]:
    """Digests of clipped steps of layers: of tokens a block, of everything else a tensor."""
    shape, rank = case.shape, dist.get_rank() if dist.is_initialized() else 0
    mine = slice(variant.cuts[rank], variant.cuts[rank + 1])
    options = {"cluster": variant.cluster, "seed": case.seed}
    layers = nn.ModuleList(ms.MoELayer(shape, variant.strategy, layer_index=n, **options) for n in range(case.layers))
    if case.kernels:
        # Here, so that ranks without such a case do not load Triton.
        from moesys.overlap.experts_triton import TritonExperts

        for layer in layers:
            layer.experts.expert_compute = TritonExperts()
    runtime = ms.link(layers) if variant.linked else None
    if variant.shuffled and variant.strategy.sharding.kind == "fsep":
        for layer in layers:
            layer.experts.schedule.source = ShufflingPlanner()
    optimizer = torch.optim.AdamW(layers.parameters(), lr=1e-2)
    generator, found = torch.Generator().manual_seed(case.seed), {}
    for step in range(case.steps):
        x_TH, dy_TH = (torch.randn(variant.cuts[-1], shape.hidden_size, generator=generator) for _ in range(2))
        x_TH = x_TH + case.skew * torch.randn(shape.hidden_size, generator=generator)
        # Zeros, whose signs show what they were added to, of every third case.
        x_TH = (x_TH.relu() if case.seed % 3 == 0 else x_TH)[mine].requires_grad_()
        y_TH = x_TH
        for layer in layers:
            if variant.checkpointed:
                y_TH = y_TH + checkpoint(layer, y_TH, use_reentrant=False, context_fn=ms.recompute)
            else:
                y_TH = y_TH + layer(y_TH)
        y_TH.backward(dy_TH[mine])
        ms.sync_gradients(layers)
        found |= {f"gradient {step} {name}": digest(whole(p.grad)) for name, p in layers.named_parameters()}
        found[f"norm {step}"] = ms.clip_grad_norm_(layers, 1.0).item()
        optimizer.step()
        optimizer.zero_grad()
        found |= {f"y {step}": list(_by_block(y_TH)), f"dx {step}": list(_by_block(x_TH.grad))}
    found |= {f"parameter {name}": digest(whole(p)) for name, p in layers.named_parameters()}
    if runtime is not None:
        runtime.close()
    return found


def _by_block(rows: Tensor) -> Iterator[str]:
    bounds = range(0, len(rows) + 1, TOKEN_BLOCK)
    return (digest(rows[first:last]) for first, last in pairwise(bounds))


def digest(tensor: Tensor) -> str:
    return hashlib.sha256(tensor.detach().contiguous().view(torch.uint8).numpy().tobytes()).hexdigest()[:16]
