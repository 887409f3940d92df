"""A plan on a device, or none at all where a rank would get more rows than there is room for.

R ranks, P replicas, as in ``tables``.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from moesys.kernels.launch import kernel
from moesys.kernels.split.tables import SplitTables


def keep_within(tokens_RP: Tensor, tables: SplitTables, room: int, choices: int, found_4: Tensor) -> Tensor:
    """The plan ``tokens_RP`` int64, or one without a token if it sends any rank more than ``room`` rows: then
    ``found_4`` int64 is (the first rank that gets most, its rows, ``room``, ``choices``). One launch.
    """
    num_ranks, num_replicas = tokens_RP.shape
    kept_RP = torch.empty_like(tokens_RP)
    lanes = triton.next_power_of_2(num_replicas)
    _keep[(num_ranks,)](tokens_RP, tables, kept_RP, found_4, room, choices, num_replicas, LANES=lanes)
    return kept_RP


@kernel(do_not_specialize=["room", "choices", "num_replicas"])
def _keep(tokens_RP, tables, kept_RP, found_4, room, choices, num_replicas, LANES: tl.constexpr):  # type: ignore[no-untyped-def]
    """A program a source, each of which looks at the whole plan."""
    own, num_ranks = tl.program_id(0), tl.num_programs(0)
    replica = tl.arange(0, LANES)
    inside = replica < num_replicas
    rank = tl.load(tables.rank_P + replica, mask=inside, other=-1)
    tokens = tl.zeros([LANES], tl.int64)
    for source in range(num_ranks):
        tokens += tl.load(tokens_RP + source * num_replicas + replica, mask=inside, other=0)
    most = tl.full([], -1, tl.int64)
    busiest = tl.full([], 0, tl.int64)
    for each in range(num_ranks):
        rows = tl.sum(tl.where(rank == each, tokens, 0), 0)
        busiest = tl.where(rows > most, each, busiest)
        most = tl.maximum(most, rows)
    at = own * num_replicas + replica
    sent = tl.load(tokens_RP + at, mask=inside, other=0)
    tl.store(kept_RP + at, tl.where(most <= room, sent, 0), mask=inside)
    if (own == 0) & (most > room):
        tl.store(found_4, busiest)
        tl.store(found_4 + 1, most)
        tl.store(found_4 + 2, tl.cast(room, tl.int64))
        tl.store(found_4 + 3, tl.cast(choices, tl.int64))
