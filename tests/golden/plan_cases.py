"""Golden plans: every balancer and every split, on several clusters, with and without a layout in force."""

from __future__ import annotations

from collections.abc import Iterator
from hashlib import sha256
from importlib.metadata import version
from itertools import product
from zlib import crc32

import numpy as np

import moesys as ms

# (cluster, E, slots of a rank)
SETTINGS = {
    "1x4": (ms.ClusterSpec(ranks_per_node=4), 8, 4),
    "2x4": (ms.ClusterSpec(num_nodes=2, ranks_per_node=4), 16, 4),
    "2x4, no slot to spare": (ms.ClusterSpec(num_nodes=2, ranks_per_node=4), 8, 1),
    "3+1+2": (ms.ClusterSpec(num_nodes=3, ranks_per_node=(3, 1, 2)), 10, 4),
    "3+3, uneven slots": (ms.ClusterSpec(num_nodes=2, ranks_per_node=3), 7, (4, 2, 1, 3, 2, 2)),
    "4x2 in domains of 4": (ms.ClusterSpec(num_nodes=4, ranks_per_node=2, ranks_per_domain=4), 12, 3),
    "4x8": (ms.ClusterSpec(num_nodes=4, ranks_per_node=8), 32, 2),
}
BALANCERS = {
    "static": ms.Static(),
    "eplb": ms.Eplb(),
    "eplb hierarchical": ms.Eplb(hierarchical=True, num_groups=4),
    "laer": ms.Laer(),
    "laer even": ms.Laer(candidates=("even",)),
    "flex_moe": ms.FlexMoe(),
    "flex_moe 3 moves": ms.FlexMoe(max_moves=3),
    "greedy": ms.Greedy(),
    "greedy effort 0": ms.Greedy(effort=0),
    "greedy effort 3": ms.Greedy(effort=3),
    "greedy 2 replicas": ms.Greedy(min_replicas=2),
    "greedy within node": ms.Greedy(replicas_within="node"),
    "greedy 2 within domain": ms.Greedy(min_replicas=2, replicas_within="domain"),
    "greedy 4 moves": ms.Greedy(max_moves=4),
    "greedy dear moves": ms.Greedy(move_tokens=40),
    "cp_sat": ms.CpSat(deterministic_time=0.005),
}
SPLITS = {
    "even": ms.EvenSplit(),
    "proportional": ms.Proportional(),
    "flow": ms.FlowSplit(),
    "flow exact": ms.FlowSplit(traffic="exact"),
    "flow capped": ms.FlowSplit(max_inter_node=0.3),
    "flow exact capped": ms.FlowSplit(traffic="exact", max_inter_node=0.3),
}


def drawn_load(cluster: ms.ClusterSpec, num_experts: int, seed: int) -> ms.planning.LoadMatrix:
    """Few experts with most of the tokens, others each node's own, some without any. Integers only: no machine rounds
    them in its own way.
    """
    rng = np.random.default_rng(seed)
    popularity_E = rng.integers(0, 8, num_experts) ** 2
    popularity_NE = rng.integers(1, 4, (cluster.num_nodes, num_experts))
    draw_RE = rng.integers(0, 16, (cluster.num_ranks, num_experts))
    return ms.planning.LoadMatrix(draw_RE * popularity_E * popularity_NE[list(cluster.node_of_rank)])


def plan_lines() -> Iterator[str]:
    """The release of OR-Tools, which searches for ``CpSat``; then one line a plan.

    A balancer that refuses a setting, as for want of slots, has no line there. Load and split of a case follow from its
    name, so that a new balancer moves no other line, and a new split only those that it takes.
    """
    yield f"OR-Tools {version('ortools')}"
    for setting, balancer, after in product(SETTINGS, BALANCERS, ("", " after another")):
        cluster, num_experts, slots = SETTINGS[setting]
        case = f"{setting} | {balancer}{after}"
        seed = crc32(case.encode())
        split = max(SPLITS, key=lambda name: crc32(f"{case} | {name}".encode()))
        load = drawn_load(cluster, num_experts, seed)
        try:
            layout = None
            if after:
                layout = ms.plan_layout(drawn_load(cluster, num_experts, seed + 1), cluster, BALANCERS[balancer], slots)
            layout = ms.plan_layout(load, cluster, BALANCERS[balancer], slots, previous=layout)
        except ValueError:
            continue
        plan = ms.planning.split_tokens(load, layout, cluster, SPLITS[split], turn=seed % 7)
        yield (
            f"{case} | {split}: "
            f"layout {_digest(layout.expert_RS)} tokens {_digest(plan.entries)} "
            f"busiest {plan.tokens_R.max()} between nodes {plan.inter_node_tokens(cluster.domain_of_rank)}"
        )


def _digest(integers: np.ndarray) -> str:
    """12 hex digits of the shape and the values as int64."""
    return sha256(repr(integers.shape).encode() + integers.astype("<i8").tobytes()).hexdigest()[:12]
