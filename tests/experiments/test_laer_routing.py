"""Drawn routing has the statistics of LAER-MoE's, and its planner does on it what its log says."""

from __future__ import annotations

import numpy as np
import pytest

from experiments.published.drawn_steps import Planning
from experiments.published.laer_routing import LAER_E8K2_ROUTING, LAER_E16K4_ROUTING
from experiments.published.laer_setup import planner_strategy
from moesys.config import presets
from moesys.traces import generate

NUM_NODES, RANKS_PER_NODE, NUM_GROUPS = 4, 8, 4


def group_counts(routing, num_experts, top_k, num_micro_batches, seed):
    """Tokens of each node for each group {e = g mod 4}, [S, L, N, G]."""
    drawn = routing.replace(num_layers=16, warmup=0, steps=num_micro_batches)
    tokens_SLRE = generate(drawn, NUM_NODES * RANKS_PER_NODE, num_experts, top_k, seed).tokens_SLRE
    S, L, _, E = tokens_SLRE.shape
    by_node = tokens_SLRE.reshape(S, L, NUM_NODES, RANKS_PER_NODE, E).sum(axis=3)
    return np.stack([by_node[..., group::NUM_GROUPS].sum(axis=-1) for group in range(NUM_GROUPS)], axis=-1)


def statistics(counts_SLNG):
    share_SLNG = counts_SLNG / counts_SLNG.mean(axis=-1, keepdims=True)
    around_mean = share_SLNG - share_SLNG.mean(axis=0)

    def after_a_step(values):
        return np.corrcoef(values[1:].ravel(), values[:-1].ravel())[0, 1]

    return {
        "max / mean": share_SLNG.max(axis=-1).mean(),
        "over nodes": (counts_SLNG.std(axis=2) / counts_SLNG.mean(axis=2)).mean(),
        "one step": np.abs(np.diff(share_SLNG, axis=0)).mean(),
        "persistence": after_a_step(share_SLNG),
        "around the mean": after_a_step(around_mean),
    }


@pytest.mark.parametrize(
    ("routing", "num_experts", "top_k", "num_micro_batches", "published", "tolerance"),
    [
        (LAER_E8K2_ROUTING, 8, 2, 9, (1.513, 0.122, 0.155, 0.868, 0.07), (0.06, 0.01, 0.01, 0.03, 0.1)),
        (LAER_E16K4_ROUTING, 16, 4, 29, (1.637, 0.106, 0.113, 0.954, 0.83), (0.08, 0.018, 0.01, 0.015, 0.2)),
    ],
    ids=["e8k2", "e16k4"],
)
def test_statistics_are_the_published_ones(routing, num_experts, top_k, num_micro_batches, published, tolerance):
    drawn = [statistics(group_counts(routing, num_experts, top_k, num_micro_batches, seed)) for seed in range(3)]
    for name, expected, off in zip(drawn[0], published, tolerance, strict=True):
        assert np.mean([one[name] for one in drawn]) == pytest.approx(expected, abs=off), name


def test_laer_moe_is_as_uneven_on_it_as_in_its_own_log():
    found = {}
    for routing, num_experts, top_k in ((LAER_E8K2_ROUTING, 8, 2), (LAER_E16K4_ROUTING, 16, 4)):
        strategy, cluster = planner_strategy("LAER", top_k), presets.LAER_A100
        few, plans = routing.replace(warmup=5, steps=3, num_layers=10), []
        planning = Planning(few, num_experts, top_k, strategy, cluster)
        for seed in range(6):
            tokens_SLRE = generate(few, cluster.num_ranks, num_experts, top_k, seed).tokens_SLRE
            plans += [plan for of in planning.plans(tokens_SLRE, {5, 6, 7}).values() for plan in of]
        found[num_experts] = np.mean([plan.max_over_mean for plan in plans])
        # The split never leaves a node: every expert has a replica on each.
        assert max(plan.inter_node_tokens(cluster.node_of_rank) / plan.load.total for plan in plans) < 0.02
    assert found == pytest.approx({8: 1.38, 16: 1.27}, abs=0.05)
