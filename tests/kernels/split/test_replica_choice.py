"""Replicas of choices: the host's routes, token for token, and each edge of the search."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from flow_reference import split_reference
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from moesys.balance import split_tokens
from moesys.config import ClusterSpec, FlowSplit
from moesys.kernels.routing.routing import Routing, route
from moesys.kernels.split.replica_choice import Destinations, choose_replicas, choose_replicas_reference
from moesys.kernels.split.tables import SplitTables, tables_of
from moesys.layout import ExpertLayout
from moesys.load import LoadMatrix
from moesys.overlap.routes import build_routes
from moesys.step import split_tables


def of_one_node(expert_RS: list[list[int]], num_experts: int) -> SplitTables:
    node_R = np.zeros(len(expert_RS), np.int64)
    return tables_of(np.array(expert_RS), num_experts, node_R, node_R[None], "cpu")


def assert_same(actual: Destinations, expected: Destinations) -> None:
    for name, value in expected._asdict().items():
        assert getattr(actual, name).dtype == torch.int32, name
        assert torch.equal(getattr(actual, name), value), name


# Expert 0 on ranks 0, 1, 2; expert 1 on ranks 0 and 2, in slots that duplicates push back; expert 2 on rank 1.
LAYOUT = [[0, 0, 1], [2, 0, -1], [1, 1, 0]]
# Each case says which edge it is: (choices, tokens of each replica).
EDGES = {
    "no tokens": (torch.zeros(0, 2, dtype=torch.int64), [0, 0, 0, 0, 0, 0]),
    "one choice": (torch.tensor([[2]]), [0, 0, 0, 0, 0, 1]),
    "the first replica gets nothing": (torch.tensor([[0, 1], [1, 0]]), [0, 1, 1, 0, 2, 0]),
    "the one in the middle gets nothing": (torch.tensor([[0, 1], [1, 0]]), [1, 0, 1, 1, 1, 0]),
    "the last one gets all": (torch.tensor([[0, 1], [1, 0]]), [0, 0, 2, 0, 2, 0]),
    "experts without a choice": (torch.tensor([[2], [2], [2]]), [0, 0, 0, 0, 0, 3]),
    "some are no experts": (torch.tensor([[-1, 0], [3, 2], [0, 2**32]]), [1, 1, 0, 0, 0, 1]),
    "more choices than a program has": (torch.arange(900).view(300, 3) % 3, [100, 50, 150, 299, 1, 300]),
    "fewer tokens than choices": (torch.tensor([[0, 1], [0, 1], [0, 2]]), [1, 0, 1, 0, 0, 1]),
    "more tokens than choices": (torch.tensor([[0, 1], [0, 2]]), [1, 9, 9, 0, 2**40, 7]),
}


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64], ids=["int32", "int64"])
@pytest.mark.parametrize(("expert_TK", "tokens_P"), EDGES.values(), ids=EDGES)
def test_edges_agree_with_the_reference(expert_TK: Tensor, tokens_P: list[int], dtype: torch.dtype) -> None:
    if dtype == torch.int32:
        # what int32 does not hold is no expert there either
        expert_TK = expert_TK.clamp(max=2**31 - 1).to(dtype)
    arguments = (expert_TK, route(expert_TK, 3), torch.tensor(tokens_P), of_one_node(LAYOUT, 3))
    assert_same(choose_replicas(*arguments), choose_replicas_reference(*arguments))


def test_by_hand() -> None:
    """Rank 0 computes one token of expert 0, rank 1 two, rank 2 one; the last choice is one too many."""
    expert_TK = torch.tensor([[0, 1], [0, 2], [9, 0], [1, 0], [0, -1]])
    found = choose_replicas(expert_TK, route(expert_TK, 3), torch.tensor([1, 2, 1, 0, 2, 1]), of_one_node(LAYOUT, 3))
    assert found.replica_TK.tolist() == [[0, 4], [1, 5], [-1, 1], [4, 2], [-1, -1]]
    assert found.rank_TK.tolist() == [[0, 2], [1, 1], [-1, 1], [2, 2], [-1, -1]]
    assert found.slot_TK.tolist() == [[0, 1], [0, 1], [-1, 0], [1, 0], [-1, -1]]


@settings(max_examples=15)
@given(
    nodes=st.lists(st.integers(1, 3), min_size=1, max_size=3),
    num_experts=st.integers(1, 12),
    spare_slots=st.integers(0, 3),
    num_tokens=st.integers(0, 40),
    seed=st.integers(0, 2**32 - 1),
)
def test_both_homes_send_the_same_rows(
    nodes: list[int], num_experts: int, spare_slots: int, num_tokens: int, seed: int
) -> None:
    """Sorted by (destination, slot there, token, k), the choices are the host's rows in wire order."""
    rng, num_ranks = np.random.default_rng(seed), sum(nodes)
    cluster = ClusterSpec(num_nodes=len(nodes), ranks_per_node=tuple(nodes))
    num_slots = -(-num_experts // num_ranks) + spare_slots
    extra = rng.integers(-1, num_experts, num_ranks * num_slots - num_experts)
    cells = rng.permutation(np.append(np.arange(num_experts), extra))
    layout = ExpertLayout(cells.reshape(num_ranks, num_slots), num_experts)
    taste = rng.lognormal(0, 1.5, (num_ranks, 1, num_experts))
    top_k = min(3, num_experts)
    expert_RTK = np.argsort(-taste * rng.random((num_ranks, num_tokens, num_experts)), axis=2)[:, :, :top_k]
    tokens_RE = np.stack([np.bincount(expert_TK.ravel(), minlength=num_experts) for expert_TK in expert_RTK])
    plan = split_tokens(LoadMatrix(tokens_RE), layout, cluster, FlowSplit(), turn=seed % 4)
    tables = split_tables(layout, cluster, FlowSplit(), "cpu")
    tokens_RP = split_reference(torch.from_numpy(tokens_RE), tables, seed % 4).tokens_RP
    for source, expert_TK in enumerate(torch.from_numpy(np.ascontiguousarray(expert_RTK))):
        arguments = (expert_TK, route(expert_TK, num_experts), tokens_RP[source], tables)
        found = choose_replicas(*arguments)
        assert_same(found, choose_replicas_reference(*arguments))
        wire_order = np.lexsort((found.slot_TK.flatten(), found.rank_TK.flatten()))
        [routes] = build_routes(expert_TK, tokens_RE[None], plan, source, min_rows=1).chunks
        home_N = routes.home_TK.numpy()
        assert np.array_equal(home_N[wire_order], np.arange(len(wire_order)))
        sent_R = np.bincount(found.rank_TK.flatten(), minlength=num_ranks)
        assert tuple(sent_R) == routes.send_counts_R


EXPERT_TK = torch.zeros(5, 2, dtype=torch.int64)
ROUTED = route(EXPERT_TK, 3)


@pytest.mark.parametrize(
    ("expert_TK", "routing", "tokens_P", "message"),
    [
        (
            EXPERT_TK.float(),
            ROUTED,
            torch.zeros(6).long(),
            "choices are torch.float32 [5, 2], the routing is for [5, 2",
        ),
        (EXPERT_TK[:4], ROUTED, torch.zeros(6).long(), "choices are torch.int64 [4, 2], the routing is for [5, 2]; "),
        (
            EXPERT_TK,
            route(EXPERT_TK, 4),
            torch.zeros(6).long(),
            "the routing has 4 groups, the layout 3 experts; route",
        ),
        (EXPERT_TK, ROUTED, torch.zeros(5).long(), "tokens_P is torch.int64 [5], the layout needs int64 [6]; give the"),
        (EXPERT_TK, ROUTED, torch.zeros(6), "tokens_P is torch.float32 [6], the layout needs int64 [6]; give the"),
    ],
    ids=["floats", "other choices", "other groups", "another layout's", "floats of tokens"],
)
def test_what_is_refused(expert_TK: Tensor, routing: Routing, tokens_P: Tensor, message: str) -> None:
    with pytest.raises(ValueError) as error:  # noqa: PT011
        choose_replicas(expert_TK, routing, tokens_P, of_one_node(LAYOUT, 3))
    assert str(error.value).startswith(message)
