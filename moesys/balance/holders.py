"""Holders: which ranks hold which experts, listed both ways, for compiled loops."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from moesys.balance.compiled import compiled
from moesys.layout import EMPTY
from moesys.load import IntArray


class Holders(NamedTuple):
    """The replicas of a layout: pairs of an expert and a rank that holds it, by expert, then rank. P of them.

    A second slot of a rank for the same expert is no second replica. All fields are int64.

    - ``first_E`` [E + 1]: expert e's replicas are ``first_E[e]`` up to ``first_E[e + 1]``;
    - ``rank_P``, ``expert_P`` [P]: whose they are;
    - ``first_R`` [R + 1], ``replica_P`` [P]: rank r's replicas are ``replica_P[first_R[r]:first_R[r + 1]]``, by expert.
    """

    first_E: IntArray
    rank_P: IntArray
    expert_P: IntArray
    first_R: IntArray
    replica_P: IntArray


@compiled
def list_holders(expert_RS, num_experts):  # type: ignore[no-untyped-def]
    """The ``Holders`` of ``expert_RS`` int64 [R, S], -1 for an empty slot."""
    num_ranks, num_slots = expert_RS.shape
    first_E = np.zeros(num_experts + 1, np.int64)
    last_rank_E = np.full(num_experts, -1, np.int64)
    for rank in range(num_ranks):
        for slot in range(num_slots):
            expert = expert_RS[rank, slot]
            if expert != EMPTY and last_rank_E[expert] != rank:
                last_rank_E[expert] = rank
                first_E[expert + 1] += 1
    for expert in range(num_experts):
        first_E[expert + 1] += first_E[expert]
    num_replicas = first_E[num_experts]

    rank_P = np.empty(num_replicas, np.int64)
    expert_P = np.empty(num_replicas, np.int64)
    first_R = np.zeros(num_ranks + 1, np.int64)
    next_E = first_E[:-1].copy()
    last_rank_E[:] = -1
    for rank in range(num_ranks):
        for slot in range(num_slots):
            expert = expert_RS[rank, slot]
            if expert != EMPTY and last_rank_E[expert] != rank:
                last_rank_E[expert] = rank
                rank_P[next_E[expert]] = rank
                expert_P[next_E[expert]] = expert
                next_E[expert] += 1
                first_R[rank + 1] += 1
    for rank in range(num_ranks):
        first_R[rank + 1] += first_R[rank]
    replica_P = np.empty(num_replicas, np.int64)
    next_R = first_R[:-1].copy()
    for replica in range(num_replicas):
        rank = rank_P[replica]
        replica_P[next_R[rank]] = replica
        next_R[rank] += 1
    return Holders(first_E, rank_P, expert_P, first_R, replica_P)


@compiled
def num_holding(holders):  # type: ignore[no-untyped-def]
    """Ranks with a replica."""
    return np.count_nonzero(holders.first_R[1:] > holders.first_R[:-1])
