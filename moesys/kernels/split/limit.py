"""A plan on a device, which has no tokens if a rank would get more rows than its memory holds, or if the counts of the
ranks do not belong together.

R ranks, P replicas, as in ``tables``.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from moesys.kernels.launch import kernel
from moesys.kernels.split.tables import SplitTables


def keep_within(
    tokens_RP: Tensor, tables: SplitTables, room: int, choices: int, origin_R2: Tensor, call: int, found_9: Tensor
) -> Tensor:
    """Returns the plan ``tokens_RP`` int64, or a plan without tokens if it cannot be run; the reason is written into
    ``found_9`` int64. Takes one launch.

    If the plan sends a rank more than ``room`` rows, ``found_9[:4]`` is (the first rank that gets most rows, its rows,
    ``room``, ``choices``). If the counts of a rank belong to another call than ``call`` (``origin_R2``: the ``Origin``
    of each rank), or if some of its choices name no expert, ``found_9[4:]`` is (the first rank in another call + 1, its
    call, the first rank with choices that name no expert + 1, the number of these choices, ``call``).
    """
    num_ranks, num_replicas = tokens_RP.shape
    kept_RP = torch.empty_like(tokens_RP)
    lanes = triton.next_power_of_2(num_replicas)
    bounds = (room, choices, call, num_replicas)
    _keep[(num_ranks,)](tokens_RP, tables, kept_RP, found_9, origin_R2, *bounds, LANES=lanes)
    return kept_RP


@kernel(do_not_specialize=["room", "choices", "call", "num_replicas"])
def _keep(  # type: ignore[no-untyped-def]
    tokens_RP, tables, kept_RP, found_9, origin_R2, room, choices, call, num_replicas, LANES: tl.constexpr
):
    """Keeps the plan of one source per program; each program reads the whole plan."""
    own, num_ranks = tl.program_id(0), tl.num_programs(0)
    replica = tl.arange(0, LANES)
    inside = replica < num_replicas
    rank = tl.load(tables.rank_P + replica, mask=inside, other=-1)
    tokens = tl.zeros([LANES], tl.int64)
    stranger = tl.full([], 0, tl.int64)
    strangers_call = tl.full([], 0, tl.int64)
    loser = tl.full([], 0, tl.int64)
    lost = tl.full([], 0, tl.int64)
    for source in range(num_ranks):
        sent = tl.load(tokens_RP + source * num_replicas + replica, mask=inside, other=0)
        tokens += sent
        its_call, its_choices = tl.load(origin_R2 + source * 2), tl.load(origin_R2 + source * 2 + 1)
        other = (its_call != call) & (its_call != 0) & (stranger == 0)
        stranger = tl.where(other, source + 1, stranger)
        strangers_call = tl.where(other, its_call, strangers_call)
        missing = its_choices - tl.sum(sent, 0)
        loses = (its_choices >= 0) & (missing != 0) & (loser == 0)
        loser = tl.where(loses, source + 1, loser)
        lost = tl.where(loses, missing, lost)
    most = tl.full([], -1, tl.int64)
    busiest = tl.full([], 0, tl.int64)
    for each in range(num_ranks):
        rows = tl.sum(tl.where(rank == each, tokens, 0), 0)
        busiest = tl.where(rows > most, each, busiest)
        most = tl.maximum(most, rows)
    at = own * num_replicas + replica
    sent = tl.load(tokens_RP + at, mask=inside, other=0)
    together = (stranger == 0) & (loser == 0)
    tl.store(kept_RP + at, tl.where((most <= room) & together, sent, 0), mask=inside)
    if own == 0:
        if most > room:
            tl.store(found_9, busiest)
            tl.store(found_9 + 1, most)
            tl.store(found_9 + 2, tl.cast(room, tl.int64))
            tl.store(found_9 + 3, tl.cast(choices, tl.int64))
        if not together:
            tl.store(found_9 + 4, stranger)
            tl.store(found_9 + 5, strangers_call)
            tl.store(found_9 + 6, loser)
            tl.store(found_9 + 7, lost)
            tl.store(found_9 + 8, tl.cast(call, tl.int64))
