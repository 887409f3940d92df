"""Small exact helpers that the planners share: comparing shares of tokens, and rows of experts into a layout."""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Iterable, Sequence

import numpy as np

from moesys.layout import EMPTY, ExpertLayout


def share_key(tokens: int, replicas: int, most_replicas: int) -> int:
    """An integer that orders like ``tokens / replicas``, exactly, whenever ``replicas <= most_replicas``.

    Two different fractions whose denominators are at most B lie at least 1/B² apart, so that after scaling by B² their
    floors differ too; equal fractions have equal floors.
    """
    return tokens * most_replicas**2 // replicas


def common_shares(tokens_E: Sequence[int], replicas_E: Sequence[int]) -> list[int]:
    """Tokens a replica of each expert gets under an equal split, times one common factor that makes all of them whole.

    ``common_shares([5, 4], [2, 1]) == [5, 8]``: in halves of a token.
    """
    factor = math.lcm(*replicas_E)
    return [tokens * (factor // replicas) for tokens, replicas in zip(tokens_E, replicas_E, strict=True)]


def usable_slots(slots_R: Iterable[int], num_experts: int) -> list[int]:
    """Slots of each rank that can hold different experts: never more than there are experts.

    The cap loses no expert: a rank with S_r >= E still holds all E, and without such a rank nothing is capped.
    """
    return [min(slots, num_experts) for slots in slots_R]


def experts_with_room(replicas: int, slots_R: Sequence[int], num_experts: int) -> int:
    """How many experts fit on these ranks with so many replicas each, no two of an expert on one rank.

    k of them do if and only if min(S_r, k) over the ranks sum to k · ``replicas`` (Gale and Ryser), and then fewer do.
    """
    return bisect_right(
        range(1, num_experts + 1), 0, key=lambda k: replicas * k > sum(min(each, k) for each in slots_R)
    )


def layout_from_rows(
    experts_by_rank: Iterable[Sequence[int]], slots_R: Sequence[int], num_experts: int
) -> ExpertLayout:
    """The layout whose ranks hold these experts, in this order, each row filled up with ``EMPTY``."""
    expert_RS = np.full((len(slots_R), max(slots_R)), EMPTY, dtype=np.int64)
    for rank, experts in enumerate(experts_by_rank):
        assert len(experts) <= slots_R[rank], "a planner overfilled a rank"
        expert_RS[rank, : len(experts)] = experts
    return ExpertLayout(expert_RS, num_experts)
