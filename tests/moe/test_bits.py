"""Overlap changes no bit: output, dx, router gradient, dW1, dW2 are equal for every chunk count, and run to run."""

from __future__ import annotations

import os
from itertools import chain, islice, product

import pytest
import torch
from harness import Case, run_cases

import moesys as ms
from moesys.lab.ranks.pool import LocalRanks

# The sweep tries all counts of chunks, and each case twice; random sizes at random chunk counts are in test_matrix.py.
SWEEP = os.environ.get("MOESYS_SWEEP") == "1"
CHUNKS = (1, 2, 3, 5, 16)
# Both dtypes, on few ranks and on many; the slow ones are all others. One rank computes without any overlap.
FEW = [("bfloat16", 2), ("float32", 4)]
ALL = product(("float32", "bfloat16"), (1, 2, 3, 4))
HOMES = [*FEW, *(pytest.param(*home, marks=pytest.mark.slow) for home in ALL if home not in FEW)]
PARTS = ("outputs", "dx")


def shape(dtype: str, H: int = 40, I: int = 24, E: int = 7, K: int = 2, **changes: object) -> ms.ModelShape:
    return ms.ModelShape(hidden_size=H, intermediate_size=I, num_experts=E, top_k=K, dtype=dtype, **changes)


# Each case says which edge it is for: (id, shape changes, tokens of each rank, skew).
EDGES = [
    ("one token a rank", {}, [1, 1, 1, 1], 0.0),
    ("ragged", {}, [37, 5, 64, 18], 0.0),
    ("empty ranks", {}, [0, 23, 0, 9], 0.0),
    ("all ranks empty", {}, [0, 0, 0, 0], 0.0),
    ("empty experts", {"E": 23, "K": 1}, [6, 3, 5, 4], 0.0),
    ("all tokens to one expert", {"K": 1}, [33, 20, 41, 8], 50.0),
    ("every expert chosen", {"E": 4, "K": 4}, [9, 14, 3, 30], 0.0),
    ("odd sizes", {"H": 37, "I": 13, "E": 5, "K": 3}, [50, 61, 7, 29], 1.0),
    ("many rows", {"H": 64, "I": 48, "E": 6}, [301, 200, 255, 128], 0.3),
]


def overlaps(strategy: ms.Strategy, place: int) -> list[ms.Strategy]:
    """Sequential, and one count of chunks in turn or Sequential again; all of them in the sweep."""
    others = [strategy, *(strategy.replace(overlap=ms.Pipelined(chunks=chunks)) for chunks in CHUNKS)]
    return [strategy, *(others if SWEEP else [others[place % len(others)]])]


def strategies(num_experts: int, num_ranks: int) -> list[ms.Strategy]:
    slots = -(-num_experts // num_ranks) + 1
    fsep = ms.Strategy(name="fsep", sharding=ms.Fsep(slots_per_rank=slots), balance=ms.Greedy(), split=ms.FlowSplit())
    return [ms.Strategy(name="ep"), fsep]


def assert_same_bits(results: list[dict], what: str) -> None:
    first, *others = results
    for index, other in enumerate(others):
        for part in PARTS:
            for batch, (a, b) in enumerate(zip(first[part], other[part], strict=True)):
                assert torch.equal(a, b), f"{what}: {part} of micro-batch {batch}, variant {index}"
        assert torch.equal(first["local_router_gradient"], other["local_router_gradient"]), f"{what}: router, {index}"
        assert torch.equal(first["gradients"]["experts.masters"], other["gradients"]["experts.masters"]), (
            f"{what}: experts, {index}"
        )
        assert not first["gradients"]["experts.masters"].isnan().any()


@pytest.mark.parametrize(("dtype", "num_ranks"), HOMES)
def test_overlap_changes_no_bit(ranks: LocalRanks, dtype: str, num_ranks: int) -> None:
    cases, names = [], []
    for name, changes, tokens, skew in EDGES:
        model = shape(dtype, **changes)
        for strategy in strategies(model.num_experts, num_ranks):
            counts = [tokens[:num_ranks], tokens[-num_ranks:]]
            variants = overlaps(strategy, len(names))
            cases.append([Case(model, each, counts, skew=skew, shuffle_layouts=True) for each in variants])
            names.append(f"{name}, {strategy.name}")
    by_rank = ranks.run(run_cases, list(chain(*cases)), num_ranks=num_ranks, timeout_s=240)
    for rank, results in enumerate(by_rank):
        of_rank = iter(results)
        for variants, name in zip(cases, names, strict=True):
            assert_same_bits(list(islice(of_rank, len(variants))), f"rank {rank}, {name}")
