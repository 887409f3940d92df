"""What would not run: MegaKernels on several domains, plans above ``rows_cap``, strategies beyond memory."""

from __future__ import annotations

import numpy as np
import pytest

import moesys as ms
from moesys.balance.plan import LayerPlan, StepPlan, out_of_rows, plan_layer, why_not
from moesys.limits import rank_memory, too_many_rows

MODEL = ms.ModelShape(hidden_size=64, intermediate_size=32, num_experts=8, top_k=2, dtype="bfloat16")
EP = ms.Strategy(name="ep")
MEGA = EP.replace(name="mega", overlap=ms.MegaKernel())


def plan(cluster: ms.ClusterSpec, strategy: ms.Strategy = MEGA, skewed: bool = False) -> LayerPlan:
    tokens_RE = np.zeros((cluster.num_ranks, 8), dtype=np.int64)
    tokens_RE[:, : 2 if skewed else 8] = 16 if skewed else 4
    return plan_layer(strategy, MODEL, cluster, ms.planning.LoadMatrix(tokens_RE))


@pytest.mark.parametrize(
    ("cluster", "domains"),
    [
        (ms.ClusterSpec(num_nodes=2, ranks_per_node=2), 2),
        (ms.ClusterSpec(ranks_per_node=4, ranks_per_domain=2), 2),
        (ms.ClusterSpec(ranks_per_node=4), 1),
        (ms.presets.gb200(18), 1),
        (ms.presets.gb200(19), 2),
        (ms.presets.h100(2), 2),
    ],
)
def test_a_mega_kernel_reaches_one_domain(cluster, domains):
    reason = MEGA.overlap.out_of_reach(cluster)
    assert bool(reason) == (domains > 1)
    assert reason == "" or f"the {cluster.num_ranks} ranks are in {domains}; use Sequential()" in reason
    assert EP.overlap.out_of_reach(cluster) == ""


@pytest.mark.parametrize("cap", [1.0, 2.0, 4.0])
def test_rows_are_refused_where_the_layer_refuses_and_in_its_words(cap):
    cluster, strategy = ms.ClusterSpec(ranks_per_node=4), MEGA.replace(overlap=ms.MegaKernel(rows_cap=cap))
    skewed = plan(cluster, strategy, skewed=True)
    reason = out_of_rows(strategy, MODEL, [plan(cluster), skewed])
    assert bool(reason) == (cap < 4)
    assert reason == too_many_rows(strategy.overlap, skewed.tokens, 16, 2)
    assert out_of_rows(EP, MODEL, [skewed]) == ""


def test_tokens_beyond_those_declared_are_refused():
    cluster = ms.ClusterSpec(ranks_per_node=4)
    for most, words in ((8, "16 tokens of a rank, but most_tokens=8"), (16, "")):
        strategy = MEGA.replace(overlap=ms.MegaKernel(most_tokens=most))
        assert out_of_rows(strategy, MODEL, [plan(cluster, strategy)]).startswith(words)


def test_memory_is_that_of_the_cluster_and_of_the_whole_model():
    needed_gb = rank_memory(EP, MODEL, ms.ClusterSpec(ranks_per_node=4), 4, 100).gb
    for memory_gb, fits in ((None, True), (needed_gb * 1.01, True), (needed_gb * 0.99, False)):
        cluster = ms.ClusterSpec(ranks_per_node=4, memory_gb=memory_gb)
        assert (rank_memory(EP, MODEL, cluster, 4, 100).shortage(cluster, 4) == "") == fits
    of_model = rank_memory(EP, MODEL, cluster, 48, 100)
    assert "GB at least, of 48 layers, and has" in of_model.shortage(cluster, 48)


def test_all_reasons_are_given():
    cluster = ms.ClusterSpec(num_nodes=2, ranks_per_node=2, memory_gb=1e-6)
    strategy = MEGA.replace(overlap=ms.MegaKernel(rows_cap=1.0))
    step = StepPlan(strategy, MODEL, cluster, (plan(cluster, strategy, skewed=True),))
    reach, rows, memory = why_not([step])
    assert reach.startswith("overlap=MegaKernel()")
    assert rows.startswith("rank 0 would get 128 rows")
    assert memory.startswith("a rank holds")
    assert why_not([StepPlan(EP, MODEL, cluster.replace(memory_gb=80), step.layers)], num_layers=48) == ()
