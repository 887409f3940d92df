"""Index tables of a layout, by which the splits on a device find replicas: made on the host, once a layout.

A *replica* is an expert on a rank that holds it, by expert, then rank; a second slot of a rank for the same expert is
none. A *group* is an expert's replicas on one node. R ranks, E experts, P replicas, L levels of parts of the cluster.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from moesys.kernels.host_copies import to_device

IntArray = npt.NDArray[np.int64]


class SplitTables(NamedTuple):
    """All int32, on one device.

    - ``expert_P``, ``rank_P``: whose a replica is;
    - ``replica_ER`` [E, R]: the replica of an expert on a rank, -1 where there is none;
    - ``first_E1`` [E + 1]: expert e's replicas are ``first_E1[e]`` up to ``first_E1[e + 1]``;
    - ``group_first_P``, ``group_last_P``: the first and the last replica of a replica's group;
    - ``by_rank_P``: replicas by rank, then expert; ``first_R1`` [R + 1]: those of rank r are at ``first_R1[r]`` up to
      ``first_R1[r + 1]`` there;
    - ``node_first_R``, ``node_last_R``: the first and the last rank of a rank's node;
    - ``part_first_LR``, ``part_last_LR``: those of its part of the cluster at each level. Parts of the first level are
      ranks, that of the last is everything.
    """

    expert_P: Tensor
    rank_P: Tensor
    replica_ER: Tensor
    first_E1: Tensor
    group_first_P: Tensor
    group_last_P: Tensor
    by_rank_P: Tensor
    first_R1: Tensor
    node_first_R: Tensor
    node_last_R: Tensor
    part_first_LR: Tensor
    part_last_LR: Tensor


def tables_of(
    expert_RS: IntArray, num_experts: int, node_R: IntArray, part_LR: IntArray, device: torch.device | str
) -> SplitTables:
    """The tables of ``expert_RS`` [R, S], the expert in every slot, -1 for none; every expert has a slot.

    ``node_R``: each rank's node; ``part_LR``: its part of the cluster at each level between ranks and everything, the
    finest first. Neither falls from one rank to the next.
    """
    num_ranks = len(expert_RS)
    held_ER = np.zeros((num_experts, num_ranks), dtype=bool)
    for rank in range(num_ranks):
        held_ER[expert_RS[rank][expert_RS[rank] >= 0], rank] = True
    expert_P, rank_P = np.nonzero(held_ER)
    replica_ER = np.full(held_ER.shape, -1)
    replica_ER[expert_P, rank_P] = np.arange(len(rank_P))
    by_rank_P = np.argsort(rank_P, kind="stable")
    group_first_P, group_last_P = _ends_of(expert_P * num_ranks + node_R[rank_P])
    node_first_R, node_last_R = _ends_of(node_R)
    ranks = np.arange(num_ranks)
    part_ends = [_ends_of(part_R) for part_R in (ranks, *part_LR, np.zeros_like(ranks))]
    part_first_LR, part_last_LR = (np.stack(ends) for ends in zip(*part_ends, strict=True))
    tables = (
        expert_P,
        rank_P,
        replica_ER,
        np.searchsorted(expert_P, np.arange(num_experts + 1)),
        group_first_P,
        group_last_P,
        by_rank_P,
        np.searchsorted(rank_P[by_rank_P], np.arange(num_ranks + 1)),
        node_first_R,
        node_last_R,
        part_first_LR,
        part_last_LR,
    )
    return SplitTables(*(to_device(table, device, torch.int32) for table in tables))


def entries_of(tokens_RP: Tensor, tables: SplitTables) -> Tensor:
    """Returns rows (source, expert, destination, tokens) int64 [N, 4] of the plan ``tokens_RP`` int64, sorted, on the
    host, which waits for them.
    """
    tokens_RP = tokens_RP.cpu()
    source, replica = tokens_RP.nonzero(as_tuple=True)
    expert, destination = (of_P.cpu()[replica].long() for of_P in (tables.expert_P, tables.rank_P))
    return torch.stack([source, expert, destination, tokens_RP[source, replica]], dim=1)


def _ends_of(of_N: IntArray) -> tuple[IntArray, IntArray]:
    """The first and the last place of the value at each place; values never fall."""
    return np.searchsorted(of_N, of_N), np.searchsorted(of_N, of_N, side="right") - 1
