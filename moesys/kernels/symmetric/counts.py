"""Counts of all ranks' choices, exchanged through the symmetric heap, for plans that devices make.

A rank writes its row into every peer's table and then publishes its epoch (``arguments.publish``): one flag says that
its tokens may be pulled and that its counts are there, so counts cost no wait between ranks of their own.

There are two tables, used in turn, as a fast rank may be one exchange ahead: its flag is enough to let it go on, and
where it sends no rows to a slow peer, and gets none, it may publish again before that has read its first counts. It is
never two ahead. It writes for exchange n + 2 after it has seen all peers publish n + 1, and a peer publishes that
behind its own reading of n, on one stream. Which table it is, each rank counts on its device, so that a captured graph
goes on alternating when it is replayed; all ranks make the same exchanges, in the same order.

Each rank also writes the call that its counts belong to (``Origin``), so that ranks in different calls do not plan
together.

R ranks, E experts of a layer, at most as many as the tables have columns beside those of ``Origin``.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

import torch
import triton.language as tl
from torch import Tensor

from moesys.kernels.launch import kernel
from moesys.kernels.symmetric.heap import RANK, Heap, Region, at, flag_of
from moesys.kernels.symmetric.signals import PUBLISH, wait

BLOCK_EXPERTS = 256


class Origin(NamedTuple):
    """The call that a rank's counts belong to. ``call``: 31 bits that identify the call, the same on all ranks; 0 is
    not compared. ``choices``: the number of choices of its tokens, valid or not; -1 is not compared.
    """

    call: int = 0
    choices: int = -1


class ReceivedCounts(NamedTuple):
    """The counts of all ranks. ``tokens_RE`` int64: the tokens of each rank for each expert. ``origin_R2`` int64: the
    ``Origin`` of each rank, which is (0, -1) for a rank that was given up.
    """

    tokens_RE: Tensor
    origin_R2: Tensor


def count_regions(num_ranks: int, num_experts: int) -> Mapping[str, Region]:
    """Returns the regions that ranks share: both tables."""
    return {"counts": Region((2, num_ranks, num_experts + 2), torch.int64)}


def send_counts(heap: Heap, exchanges_R: Tensor, first_E1: Tensor, origin: Origin) -> None:
    """Writes this rank's counts, which are the differences of ``first_E1`` int32 [E + 1], and their ``origin`` into
    every rank's table; to be published. ``exchanges_R`` int32 [R]: how many there have been.
    """
    _send[(heap.num_ranks,)](
        heap.world,
        heap.offset("counts"),
        exchanges_R,
        first_E1,
        *origin,
        heap.num_ranks,
        len(first_E1) - 1,
        heap.layout.regions["counts"].shape[2],
        BLOCK_EXPERTS,
    )


@kernel(do_not_specialize=["call", "choices", "num_ranks", "num_experts", "num_columns"])
def _send(  # type: ignore[no-untyped-def]
    world, counts, exchanges_R, first_E1, call, choices, num_ranks, num_experts, num_columns, BLOCK: tl.constexpr
):
    """Sends the counts to one peer per program."""
    peer = tl.program_id(0)
    table = tl.load(exchanges_R + peer) % 2
    row = (table * num_ranks + tl.load(world + RANK)) * num_columns
    for start in range(0, num_experts, BLOCK):
        expert = start + tl.arange(0, BLOCK)
        inside = expert < num_experts
        first = tl.load(first_E1 + expert, mask=inside, other=0)
        count = tl.load(first_E1 + expert + 1, mask=inside, other=0) - first
        tl.store(at(world, peer, counts, tl.int64) + row + expert, count.to(tl.int64), mask=inside)
    behind = at(world, peer, counts, tl.int64) + row + num_columns - 2
    tl.store(behind, tl.cast(call, tl.int64))
    tl.store(behind + 1, tl.cast(choices, tl.int64))


def receive_counts(heap: Heap, epoch_1: Tensor, exchanges_R: Tensor, num_experts: int) -> ReceivedCounts:
    """Returns the counts of all ranks, when all have published ``epoch_1``; zeros for a rank that was given up."""
    tokens_RE = torch.empty(heap.num_ranks, num_experts, dtype=torch.int64, device=epoch_1.device)
    origin_R2 = torch.empty(heap.num_ranks, 2, dtype=torch.int64, device=epoch_1.device)
    _receive[(heap.num_ranks,)](
        heap.world,
        CountOffsets(heap.offset("published"), heap.offset("counts")),
        epoch_1,
        exchanges_R,
        tokens_RE,
        origin_R2,
        num_experts,
        heap.layout.regions["counts"].shape[2],
        BLOCK_EXPERTS,
    )
    return ReceivedCounts(tokens_RE, origin_R2)


class CountOffsets(NamedTuple):
    """The places where regions begin in every arena, in bytes."""

    published: int
    counts: int


@kernel(do_not_specialize=["num_experts", "num_columns"])
def _receive(  # type: ignore[no-untyped-def]
    world, offsets, epoch_ptr, exchanges_R, tokens_RE, origin_R2, num_experts, num_columns, BLOCK: tl.constexpr
):
    """Receives the counts of one source per program, which also counts the exchange."""
    source, num_ranks = tl.program_id(0), tl.num_programs(0)
    own, epoch = tl.load(world + RANK), tl.load(epoch_ptr)
    peer = source + tl.arange(0, 1)
    flag = flag_of(world, own, offsets.published, peer)
    # The table of a rank that was given up holds counts of another exchange, perhaps of another layer.
    came = wait(flag, peer < num_ranks, epoch, peer, -1, peer, PUBLISH, world)
    exchange = tl.load(exchanges_R + source)
    row = at(world, own, offsets.counts, tl.int64) + (exchange % 2 * num_ranks + source) * num_columns
    for start in range(0, num_experts, BLOCK):
        expert = start + tl.arange(0, BLOCK)
        count = tl.where(came, tl.load(row + expert, mask=expert < num_experts, other=0), 0)
        tl.store(tokens_RE + source * num_experts + expert, count, mask=expert < num_experts)
    behind = row + num_columns - 2 + tl.arange(0, 2)
    unknown = tl.arange(0, 2).to(tl.int64) * -1
    tl.store(origin_R2 + source * 2 + tl.arange(0, 2), tl.where(came, tl.load(behind), unknown))
    # The counter is raised only when all threads have read it, because each of them reads some of the counts.
    tl.debug_barrier()
    tl.store(exchanges_R + source, exchange + 1)
