"""The even split of counts that are on a device: one kernel, on tables of R·Q numbers.

It is ``EvenSplit`` (docs/balance.md), LAER-MoE's lite routing, to the byte: a source's tokens for an expert go evenly
over the slots that hold it on the source's node, or over all slots where its node has none; what is left over goes one
each to consecutive slots, the first of which ``turn`` moves.

R ranks, E experts, P replicas, as in ``tables``; Q filled slots, by expert, then rank.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch
import triton
import triton.language as tl
from torch import Tensor

from moesys.kernels.host_copies import to_device
from moesys.kernels.launch import kernel
from moesys.kernels.split.tables import IntArray


class EvenTables(NamedTuple):
    """All int64, on one device, made once a layout.

    ``expert_Q``: what a slot holds. ``sharing_RQ``: over how many slots a source's tokens for that expert go;
    ``place_RQ``: the slot's place among them, -1 where it is none of them. ``last_P``: the last slot of a replica.
    """

    expert_Q: Tensor
    sharing_RQ: Tensor
    place_RQ: Tensor
    last_P: Tensor


def even_tables(expert_RS: IntArray, node_R: IntArray, device: torch.device | str) -> EvenTables:
    """The tables of ``expert_RS`` [R, S], the expert in every slot, -1 for none; ``node_R``: each rank's node."""
    rank_Q, slot_Q = np.nonzero(expert_RS >= 0)
    expert_Q = expert_RS[rank_Q, slot_Q]
    by_expert_Q = np.argsort(expert_Q, kind="stable")
    expert_Q, rank_Q = expert_Q[by_expert_Q], rank_Q[by_expert_Q]
    near_RQ = node_R[:, None] == node_R[rank_Q]
    open_RQ = near_RQ | (_counted(near_RQ, expert_Q)[1] == 0)
    place_RQ, sharing_RQ = _counted(open_RQ, expert_Q)
    last_Q = np.r_[(np.diff(expert_Q) != 0) | (np.diff(rank_Q) != 0), True]
    tables = (expert_Q, sharing_RQ, np.where(open_RQ, place_RQ, -1), np.flatnonzero(last_Q))
    return EvenTables(*(to_device(table, device) for table in tables))


def _counted(chosen_RQ: npt.NDArray[np.bool_], expert_Q: IntArray) -> tuple[IntArray, IntArray]:
    """[R, Q] both: of the chosen slots of a slot's expert, how many come before it, and how many there are."""
    up_to_RQ = chosen_RQ.cumsum(1)
    first_Q, last_Q = np.searchsorted(expert_Q, expert_Q), np.searchsorted(expert_Q, expert_Q, side="right") - 1
    before_RQ = (up_to_RQ - chosen_RQ)[:, first_Q]
    return up_to_RQ - chosen_RQ - before_RQ, up_to_RQ[:, last_Q] - before_RQ


def even_split(tokens_RE: Tensor, tables: EvenTables, turn: int) -> Tensor:
    """``tokens_RP`` int64: what each source of ``tokens_RE`` int64 [R, E] sends to each replica. One launch."""
    (num_ranks, num_experts), num_slots = tokens_RE.shape, len(tables.expert_Q)
    num_replicas = len(tables.last_P)
    tokens_RP = tokens_RE.new_empty(num_ranks, num_replicas)
    lanes = triton.next_power_of_2(num_slots)
    _split_evenly[(num_ranks,)](
        tokens_RE.contiguous(), tables, tokens_RP, turn, num_experts, num_slots, num_replicas, LANES=lanes
    )
    return tokens_RP


@kernel(do_not_specialize=["turn", "num_experts", "num_slots", "num_replicas"])
def _split_evenly(  # type: ignore[no-untyped-def]
    tokens_RE, tables, tokens_RP, turn, num_experts, num_slots, num_replicas, LANES: tl.constexpr
):
    """One source a program, one slot a lane, and then one replica."""
    source, lane = tl.program_id(0).to(tl.int64), tl.arange(0, LANES)
    inside = lane < num_slots
    expert = tl.load(tables.expert_Q + lane, mask=inside, other=0)
    place = tl.load(tables.place_RQ + source * num_slots + lane, mask=inside, other=-1)
    sharing = tl.load(tables.sharing_RQ + source * num_slots + lane, mask=inside, other=1)
    tokens = tl.load(tokens_RE + source * num_experts + expert, mask=inside, other=0)
    # The remainder of a negative number is negative here.
    behind = ((place - turn) % sharing + sharing) % sharing
    share = tokens // sharing + (behind < tokens % sharing).to(tl.int64)
    up_to = tl.cumsum(tl.where(place >= 0, share, 0), 0)
    real = lane < num_replicas
    last = tl.load(tables.last_P + lane, mask=real, other=0).to(tl.int32)
    before = tl.load(tables.last_P + lane - 1, mask=real & (lane > 0), other=0).to(tl.int32)
    end, begin = tl.gather(up_to, last, 0), tl.where(lane > 0, tl.gather(up_to, before, 0), 0)
    tl.store(tokens_RP + source * num_replicas + lane, end - begin, mask=real)
