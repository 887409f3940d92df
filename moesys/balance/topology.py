"""Parts of a cluster: the node and the domain of each rank, as planners and splits need them."""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Iterable, Sequence

import numpy as np

from moesys.compiled import compiled
from moesys.config import ClusterSpec, Within
from moesys.layout import EMPTY, ExpertLayout
from moesys.load import IntArray


def nodes_of(cluster: ClusterSpec) -> IntArray:
    """Returns the node of each rank, int64 [R]: ``node_of_rank``, but fast enough for every micro-batch."""
    return np.repeat(np.arange(cluster.num_nodes), cluster.ranks_per_node)


def link_domains_of(cluster: ClusterSpec) -> IntArray:
    """Returns the domain of fast links of each rank, int64 [R]; like ``domain_of_rank``, but faster."""
    return np.repeat(np.arange(len(cluster.domain_sizes)), cluster.domain_sizes)


def levels_of(cluster: ClusterSpec, node_R: IntArray) -> IntArray:
    """Returns the part of the cluster that each rank is in, int64 [L, R]: domains and nodes, the finest first.

    ``node_R``: the node of each rank, ``nodes_of(cluster)``.
    """
    if cluster.ranks_per_domain is None or cluster.domain_sizes == cluster.node_sizes:
        return node_R[None]
    domain_R = link_domains_of(cluster)
    return np.stack([domain_R, node_R] if domain_R[-1] > node_R[-1] else [node_R, domain_R])


def blocks_of_nodes(node_R: IntArray) -> IntArray:
    """Returns the block that each rank is in, int64 [L, R], of 2 nodes, of 4, and so on, as long as there are several.

    Where a token crosses to a node once, rows that keep to near nodes share its crossing.
    """
    num_levels = max(int(node_R[-1]).bit_length() - 1, 0)
    blocks = [node_R >> level for level in range(1, num_levels + 1)]
    return np.array(blocks, dtype=np.int64).reshape(num_levels, len(node_R))


def domains_of(cluster: ClusterSpec, replicas_within: Within) -> tuple[int, ...]:
    """Returns for each rank, [R], the number of the part of the cluster that an expert's replicas may not leave."""
    match replicas_within:
        case "cluster":
            return (0,) * cluster.num_ranks
        case "node":
            return cluster.node_of_rank
        case "domain":
            return cluster.domain_of_rank


@compiled
def tokens_by_node(tokens_RE, node_R):  # type: ignore[no-untyped-def]
    """Returns the tokens of each expert by their source's node, int64 [N, E], and in all, int64 [E]."""
    num_ranks, num_experts = tokens_RE.shape
    supply_NE = np.zeros((node_R[num_ranks - 1] + 1, num_experts), np.int64)
    tokens_E = np.zeros(num_experts, np.int64)
    for rank in range(num_ranks):
        supply_E = supply_NE[node_R[rank]]
        for expert in range(num_experts):
            supply_E[expert] += tokens_RE[rank, expert]
    for node in range(supply_NE.shape[0]):
        for expert in range(num_experts):
            tokens_E[expert] += supply_NE[node, expert]
    return supply_NE, tokens_E


def share_key(tokens: int, replicas: int, most_replicas: int) -> int:
    """Returns an integer that orders like ``tokens / replicas``, exactly, whenever ``replicas <= most_replicas``.

    Two different fractions whose denominators are at most B lie at least 1/B² apart, so that after scaling by B² their
    floors differ too; equal fractions have equal floors.
    """
    return tokens * most_replicas**2 // replicas


def common_shares(tokens_E: Sequence[int], replicas_E: Sequence[int]) -> list[int]:
    """Returns the tokens per replica of each expert under an equal split, times one factor that makes all of them
    whole.

    ``common_shares([5, 4], [2, 1]) == [5, 8]``: in halves of a token.
    """
    factor = math.lcm(*replicas_E)
    return [tokens * (factor // replicas) for tokens, replicas in zip(tokens_E, replicas_E, strict=True)]


def usable_slots(slots_R: Iterable[int], num_experts: int) -> list[int]:
    """Returns the slots of each rank that can hold different experts: never more than there are experts.

    The cap loses no expert: a rank with S_r >= E still holds all E, and without such a rank nothing is capped.
    """
    return [min(slots, num_experts) for slots in slots_R]


def experts_with_room(replicas: int, slots_R: Sequence[int], num_experts: int) -> int:
    """Returns how many experts fit on these ranks with ``replicas`` replicas each, no two of an expert on one rank.

    k experts fit if and only if the sum of min(S_r, k) over the ranks is at least k · ``replicas`` (Gale and Ryser),
    and then fewer fit too.
    """
    return bisect_right(
        range(1, num_experts + 1), 0, key=lambda k: replicas * k > sum(min(each, k) for each in slots_R)
    )


def layout_from_rows(
    experts_by_rank: Iterable[Sequence[int]], slots_R: Sequence[int], num_experts: int
) -> ExpertLayout:
    """Returns the layout whose ranks hold these experts, in this order, each row filled up with ``EMPTY``."""
    expert_RS = np.full((len(slots_R), max(slots_R)), EMPTY, dtype=np.int64)
    for rank, experts in enumerate(experts_by_rank):
        assert len(experts) <= slots_R[rank], "a planner overfilled a rank"
        expert_RS[rank, : len(experts)] = experts
    return ExpertLayout(expert_RS, num_experts)
