"""Cost formulas against numbers done by hand, and bytes against what the layers really put on the wire."""

from __future__ import annotations

from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import moesys as ms
from moesys import cost
from moesys.config import presets
from moesys.moe.sharded_experts import ShardedExperts
from moesys.moe.store import ExpertTransfer
from moesys.moe.whole_experts import WholeExperts

# P_e = 3·7·5 = 105 elements divide by none of 2 and 4, so slices are padded on the wire.
SHAPE = ms.ModelShape(hidden_size=7, intermediate_size=5, num_experts=6, top_k=2, dtype="bfloat16")
CLUSTER = ms.ClusterSpec(num_nodes=2, ranks_per_node=2, intra_node_gb_per_s=100, inter_node_gb_per_s=10)


def test_experts_that_leave_after_forward_are_restored_again_for_backward():
    shardings = (ms.Fsep(slots_per_rank=2), ms.Fsep(slots_per_rank=2, reshard_after_forward=False), ms.Ep())
    assert [cost.restores_per_step(sharding) for sharding in shardings] == [2, 1, 1]


# --- expert GEMMs ---


def test_one_token_in_mixtrals_expert_takes_laers_time():
    """LAER's planner: 1.484375 us a token and expert on an A100 (reference in ``presets``)."""
    seconds = cost.expert_seconds(1.0, presets.LAER_E8K2, presets.LAER_A100, backward=False)
    assert seconds == pytest.approx(1.484375e-6, rel=2e-3)
    assert cost.expert_seconds(1.0, presets.LAER_E16K4, presets.LAER_A100, backward=False) == pytest.approx(seconds / 2)


def test_backward_takes_twice_as_long_and_rows_may_be_an_array():
    rows_R = np.array([0.0, 1.0, 1000.0])
    forward_R, backward_R = (cost.expert_seconds(rows_R, SHAPE, CLUSTER, backward) for backward in (False, True))
    assert backward_R.tolist() == (2 * forward_R).tolist()
    assert forward_R.tolist() == [0.0, 6 * 7 * 5 / 237e12, 6000 * 7 * 5 / 237e12]


@given(st.integers(0, 2**32), st.floats(0.01, 100))
def test_gradients_take_their_own_rate(seed, slower):
    """Where nothing but flops counts: backward is so much longer, forward is what it was, and None is forward's."""
    own = CLUSTER.replace(backward_tflops=237.0 / slower)
    rows_RE = np.random.default_rng(seed).integers(0, 300, (4, 6)).astype(float)
    for of, factor in zip(PASSES, (1, slower, slower), strict=True):
        before_R = cost.pass_seconds(rows_RE, SHAPE, CLUSTER, of)
        assert cost.pass_seconds(rows_RE, SHAPE, own, of) == pytest.approx(factor * before_R)
    assert cost.expert_seconds(3.0, SHAPE, own, False) == cost.expert_seconds(3.0, SHAPE, CLUSTER, False)
    assert cost.expert_seconds(3.0, SHAPE, own, True) == pytest.approx(
        cost.expert_seconds(3 * slower, SHAPE, CLUSTER, True)
    )
    assert cost.row_product_seconds(SHAPE, own) == pytest.approx(
        (1 + 2 * slower) / 3 * cost.row_product_seconds(SHAPE, CLUSTER)
    )


def test_a_rate_that_is_not_declared_is_the_next_more_general_one():
    assert [cost.attention_rate(CLUSTER, backward) for backward in (False, True)] == [237e12, 237e12]
    forward = CLUSTER.replace(attention_tflops=100, backward_tflops=50)
    assert [cost.attention_rate(forward, backward) for backward in (False, True)] == [100e12, 100e12]
    both = forward.replace(attention_backward_tflops=70)
    assert [cost.attention_rate(both, backward) for backward in (False, True)] == [100e12, 70e12]
    assert [cost.product_rate(both, backward) for backward in (False, True)] == [237e12, 50e12]


# --- links ---


def test_links_carry_what_crosses_them():
    bytes_RR = np.zeros((4, 4))
    bytes_RR[0, 1], bytes_RR[0, 2], bytes_RR[1, 3], bytes_RR[3, 2] = 1e9, 2e9, 3e9, 4e9
    assert cost.link_seconds(bytes_RR, CLUSTER).tolist() == [
        *(0.01, 0.0, 0.0, 0.04),  # out of ranks, inside nodes
        *(0.0, 0.01, 0.04, 0.0),  # into ranks, inside nodes
        *(0.5, 0.0),  # out of nodes: both ranks of node 0 share its link
        *(0.0, 0.5),
    ]
    assert cost.transfer_seconds(bytes_RR, CLUSTER) == 0.5


def test_dispatch_moves_the_plans_rows():
    load = ms.planning.LoadMatrix([[5, 0, 0, 0, 0, 2], [0, 0, 3, 0, 0, 0], [0] * 6, [0, 0, 0, 1, 0, 0]])
    layout = ms.planning.ExpertLayout([[0, 1], [2, 3], [4, -1], [5, -1]], 6)
    plan = ms.planning.split_tokens(load, layout, CLUSTER, ms.EvenSplit())
    expected_RR = np.zeros((4, 4))
    expected_RR[0, 3], expected_RR[3, 1] = 2 * 2 * 7, 1 * 2 * 7
    assert np.array_equal(cost.dispatch_bytes(plan, SHAPE), expected_RR)
    assert cost.transfer_seconds(expected_RR, CLUSTER) == 28 / 10e9


@st.composite
def cases(draw: st.DrawFn) -> tuple[ms.ClusterSpec, ms.planning.ExpertLayout]:
    """A cluster of uneven nodes and a layout with empty slots and duplicates."""
    sizes = draw(st.lists(st.integers(1, 4), min_size=1, max_size=3))
    R, E = sum(sizes), SHAPE.num_experts
    rng = np.random.default_rng(draw(st.integers(0, 2**32)))
    slots = draw(st.integers(-(-E // R), 6))
    expert_RS = rng.integers(-1, E, (R, slots))
    expert_RS.flat[rng.choice(R * slots, E, replace=False)] = np.arange(E)
    return ms.ClusterSpec(num_nodes=len(sizes), ranks_per_node=tuple(sizes)), ms.planning.ExpertLayout(expert_RS, E)


# --- bytes of restore and reshard: formulas, and what the layers send ---


def test_with_messages_of_every_slot_an_expert_held_twice_travels_twice():
    layout = ms.planning.ExpertLayout([[0, 0], [1, 2]], num_experts=3)
    cluster, sharding = ms.ClusterSpec(ranks_per_node=2), ms.Fsep(slots_per_rank=2)
    slice_bytes = -(-SHAPE.expert_parameters // 2)
    for every_slot, slots_of_first in ((False, 1), (True, 2)):
        (restored_RR,) = cost.restore_bytes(layout, SHAPE, cluster, sharding, every_slot)
        assert restored_RR.tolist() == [[0, 2 * 2 * slice_bytes], [2 * slots_of_first * slice_bytes, 0]]
        (home_RR,) = cost.reshard_bytes(layout, SHAPE, cluster, sharding, 2, every_slot)
        assert (home_RR == restored_RR.T).all()


class RecordingChannel:
    """Stands for a ``Channel``: writes down what every all-to-all sends to each rank, and delivers nothing."""

    def __init__(self) -> None:
        self.sent_bytes: list[list[int]] = []

    def all_to_all(
        self,
        rows_out: torch.Tensor,
        rows_in: torch.Tensor,
        out_counts: Sequence[int],
        in_counts: Sequence[int],
        *,
        lane: str,
        detail: str,
    ) -> Any:
        row_bytes = rows_in.shape[1] * rows_in.element_size()
        self.sent_bytes.append([count * row_bytes for count in in_counts])
        return SimpleNamespace(wait=lambda: None)


def sent_by_layers(
    cluster: ms.ClusterSpec, layout: ms.planning.ExpertLayout, sharding: ms.Fsep | ms.Ep
) -> list[np.ndarray]:
    """``bytes_RR`` of each all-to-all of a restore and of the reshard after it, as every rank's shards would send."""
    R = cluster.num_ranks
    by_rank = []
    for rank in range(R):
        shards: WholeExperts | ShardedExperts
        if isinstance(sharding, ms.Ep):
            shards = WholeExperts(SHAPE, rank, cluster.node_of_rank, sharding.lend == "hierarchical")
            local = torch.zeros(len(shards.owned()), SHAPE.expert_parameters)
        else:
            shards = ShardedExperts(SHAPE, rank, cluster.node_of_rank, sharding)
            local = torch.zeros(SHAPE.num_experts, len(shards.owned()))
        channel, held = RecordingChannel(), layout.held_by_rank
        if not shards.keeps_all(held):
            steps = shards.restore([local], torch.bfloat16, held, channel, "")  # type: ignore[arg-type]
            ExpertTransfer(steps).finish()
        gradients = torch.zeros(len(held[rank]), shards.padded_parameters)
        ExpertTransfer(shards.reshard(gradients, layout, channel, "")).start()  # type: ignore[arg-type]
        by_rank.append(channel.sent_bytes)
    sent = [np.array(rows, dtype=float) for rows in zip(*by_rank, strict=True)]
    for bytes_RR in sent:
        np.fill_diagonal(bytes_RR, 0)
    return sent


SHARDINGS = [
    ms.Fsep(slots_per_rank=6),
    ms.Fsep(slots_per_rank=6, restore="hierarchical"),
    ms.Fsep(slots_per_rank=6, reshard="hierarchical"),
    ms.Ep(slots_per_rank=6),
    ms.Ep(slots_per_rank=6, lend="hierarchical"),
]


@pytest.mark.parametrize("sharding", SHARDINGS, ids=["flat", "restore", "reshard", "ep", "ep by node"])
@given(cases())
def test_bytes_are_what_the_layers_send_from_each_rank_to_each(sharding, case):
    cluster, layout = case
    expected = [
        *cost.restore_bytes(layout, SHAPE, cluster, sharding),
        *cost.reshard_bytes(layout, SHAPE, cluster, sharding),
    ]
    assert [bytes_RR.tolist() for bytes_RR in sent_by_layers(cluster, layout, sharding)] == [
        bytes_RR.tolist() for bytes_RR in expected
    ]


def test_a_lent_expert_travels_whole_and_its_gradient_in_float32():
    layout = ms.planning.ExpertLayout([[0, 1], [2, 3], [4, 5], [0, -1]], 6)
    sharding = ms.Ep(slots_per_rank=2)
    (lent_RR,) = cost.restore_bytes(layout, SHAPE, CLUSTER, sharding)
    assert cost.transfer_seconds(lent_RR, CLUSTER) == 2 * 105 / 10e9
    assert cost.reshard_seconds(layout, SHAPE, CLUSTER, sharding) == 4 * 105 / 10e9


def test_laers_restore_is_that_of_its_report():
    """e8k2 on 32 ranks: 682.6 MB a rank, 528.5 MB of it between nodes, in one all-to-all."""
    strategy, model, cluster = presets.fsep(2), presets.LAER_E8K2, presets.LAER_A100
    layout = ms.planning.ExpertLayout([[2 * (rank % 4), 2 * (rank % 4) + 1] for rank in range(32)], 8)
    (bytes_RR,) = cost.restore_bytes(layout, model, cluster, strategy.sharding)
    assert bytes_RR.sum(axis=0) == pytest.approx(682.6e6, rel=1e-4)
    assert cost.link_seconds(bytes_RR, cluster)[-1] == pytest.approx(8 * 528.5e6 / 88.9539e9, rel=1e-4)


# --- products in tiles and waves ---

PASSES: tuple[cost.ExpertPass, ...] = ("forward", "input_gradients", "weight_gradients")
TILED = CLUSTER.replace(multiprocessors=10, tile_rows=16, tile_columns=4)


@given(st.integers(0, 2**32))
def test_without_tiles_waves_and_memory_only_flops_count(seed):
    rows_RE = np.random.default_rng(seed).integers(0, 300, (4, 6)).astype(float)
    forward_R, inputs_R, weights_R = (cost.pass_seconds(rows_RE, SHAPE, CLUSTER, of) for of in PASSES)
    assert forward_R == pytest.approx(cost.expert_seconds(rows_RE.sum(1), SHAPE, CLUSTER, backward=False), rel=1e-12)
    assert inputs_R == pytest.approx(forward_R, rel=1e-12)
    assert weights_R == pytest.approx(forward_R, rel=1e-12)


def test_rows_fill_tiles_and_tiles_fill_waves():
    """17 and 1 rows are 2 + 1 tiles of 16; 10 columns, 3 of 4: 9 tiles, one wave of 10; 40 columns: 30 tiles, 3."""
    rows_RE = np.array([[17.0, 1.0, 0.0, 0.0, 0.0, 0.0]])
    tile = 2 * 16 * 4 * 7 / (237e12 / 10)
    assert cost.product_seconds(rows_RE, 10, 7, 0, 0, TILED).tolist() == [tile]
    assert cost.product_seconds(rows_RE, 40, 7, 0, 0, TILED).tolist() == [3 * tile]
    late = TILED.replace(launch_us=5)
    assert cost.product_seconds(rows_RE, 40, 7, 0, 0, late) == pytest.approx([3 * tile + 5e-6])


def test_a_wave_of_weight_gradients_is_no_shorter_than_its_longest_tile():
    """32 by 4 elements are two tiles an expert: of 30 rows and of 10, beside one another on 10 multiprocessors."""
    rows_RE = np.array([[30.0, 10.0, 0.0, 0.0, 0.0, 0.0], [20.0] * 6])
    row = 2 * 16 * 4 / (237e12 / 10)
    # twelve tiles of 20 rows are two waves
    assert cost.weight_gradient_seconds(rows_RE, 32, 4, 2, TILED) == pytest.approx([30 * row, 40 * row])


def test_few_rows_take_as_long_as_their_experts_take_to_be_read():
    slow = CLUSTER.replace(memory_gb_per_s=1e-3)
    rows_RE = np.array([[3.0, 0.0, 1.0, 0.0, 0.0, 0.0]])
    # x, h and a of four rows with both experts' up projections; a and y with both down projections
    num_bytes = 4 * 2 * (7 + 15) + 2 * 2 * (2 * 7 * 5) + 4 * 2 * (7 + 5) + 2 * 2 * 7 * 5
    assert cost.pass_seconds(rows_RE, SHAPE, slow, "forward") == pytest.approx([num_bytes / 1e6])
    assert cost.gather_seconds(4.0, SHAPE, slow) == pytest.approx(4 * 2 * 2 * 7 / 1e6)
    assert cost.sum_seconds(4.0, SHAPE, slow) == pytest.approx((4 + 2) * 2 * 7 / 1e6)
    assert cost.gather_seconds(4.0, SHAPE, CLUSTER) == 0


@given(cases(), st.integers(0, 2**32))
def test_rows_and_tokens_between_nodes_are_those_of_the_plan(case, seed):
    cluster, layout = case
    load = ms.planning.LoadMatrix(np.random.default_rng(seed).integers(0, 99, (cluster.num_ranks, SHAPE.num_experts)))
    plan = ms.planning.split_tokens(load, layout, cluster, ms.EvenSplit())
    assert plan.computed_RE.tolist() == plan.tokens_RER.sum(axis=0).T.tolist()
    node_R = np.array(cluster.node_of_rank)
    crossing = cost.dispatch_bytes(plan, SHAPE)[node_R[:, None] != node_R].sum()
    assert crossing == plan.inter_node_tokens(cluster.node_of_rank) * 2 * SHAPE.hidden_size


@given(cases(), st.integers(0, 2**32), st.sampled_from(["nodes", "ranks", "all"]))
def test_links_are_those_of_a_sum_message_by_message(case, seed, domains):
    cluster, _ = case
    R, N, node_R = cluster.num_ranks, cluster.num_nodes, cluster.node_of_rank
    cluster = cluster.replace(ranks_per_domain={"nodes": None, "ranks": 1, "all": R}[domains])
    domain_R = {"nodes": node_R, "ranks": range(R), "all": [0] * R}[domains]
    bytes_RR = np.random.default_rng(seed).integers(0, 2, (R, R)) * 1e9
    np.fill_diagonal(bytes_RR, 0)
    seconds_L, used_4R = np.zeros(2 * R + 2 * N), np.zeros((4, R), dtype=bool)
    for source, destination in np.argwhere(bytes_RR):
        inside = domain_R[source] == domain_R[destination]
        out, into = (source, R + destination) if inside else (2 * R + node_R[source], 2 * R + N + node_R[destination])
        seconds_L[[out, into]] += 1 / (cluster.intra_node_gb_per_s if inside else cluster.inter_node_gb_per_s)
        used_4R[0 if inside else 2, source] = used_4R[1 if inside else 3, destination] = True
    load = cost.link_load(bytes_RR, cluster)
    assert load.seconds_L == pytest.approx(seconds_L)
    assert load.used_4R.tolist() == used_4R.tolist()
    home = cost.link_load(bytes_RR.T, cluster)
    assert load.reversed().seconds_L.tolist() == home.seconds_L.tolist()
    assert load.reversed().used_4R.tolist() == home.used_4R.tolist()
