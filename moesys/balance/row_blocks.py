"""by_blocks: a plan whose ranks compute whole blocks of an expert's rows, so that a block's gradient is one product.

The rows of an expert, ordered by (source rank, token, k), are cut every ``block_rows``, wherever a source ends. A
remainder of less than half a block belongs to the last block, because small products cost almost as much as whole ones.
"""

from __future__ import annotations

import numpy as np

from moesys.compiled import borrowing
from moesys.layout import TokenPlan


def by_blocks(plan: TokenPlan, block_rows: int) -> TokenPlan:
    """Returns the plan nearest to ``plan``, as far as a look ahead of one block finds it, in which every block of
    ``block_rows`` is computed by one rank; an expert's last block may have half of that to half more, or be its only
    one.

    A source's tokens for an expert go to a destination in one stretch, as in every plan, but in the order of
    destinations that blocks shared with its neighbours allow. What a rank gets more or less of one expert it gets less
    or more of the next.
    """
    load, layout = plan.load, plan.layout
    R, E = load.num_ranks, load.num_experts
    rows_E = load.tokens_RE.sum(axis=0)
    blocks_E = np.maximum((2 * rows_E + block_rows) // (2 * block_rows), rows_E > 0)
    owner_N = np.zeros(int(blocks_E.sum()), dtype=np.int64)
    by_expert = plan.entries[np.argsort(plan.entries[:, 1], kind="stable")]
    first_entry_E1 = np.searchsorted(by_expert[:, 1], np.arange(E + 1))
    scratch = np.zeros((R + 1, R), dtype=np.int64), np.zeros(R, dtype=np.int64), np.zeros(R, dtype=np.int64)
    held_ER = np.ascontiguousarray(layout.replicas_RE.T > 0)
    _assign_blocks(load.tokens_RE, held_ER, by_expert, first_entry_E1, block_rows, owner_N, *scratch)
    # All experts' lines, one behind the other, cut where sources and where blocks end.
    source_stop = np.cumsum(load.tokens_RE.T.ravel())
    expert_N = np.repeat(np.arange(E), blocks_E)
    number_N = np.arange(len(expert_N)) - np.repeat(np.cumsum(blocks_E) - blocks_E, blocks_E)
    before_E = np.cumsum(rows_E) - rows_E
    is_last_N = number_N == blocks_E[expert_N] - 1
    block_stop = before_E[expert_N] + np.where(is_last_N, rows_E[expert_N], (number_N + 1) * block_rows)
    stop = np.union1d(source_stop, block_stop)
    tokens = np.diff(stop, prepend=0)
    stop, tokens = stop[tokens > 0], tokens[tokens > 0]
    line = np.searchsorted(source_stop, stop)
    cut = np.column_stack([line % R, line // R, owner_N[np.searchsorted(block_stop, stop)]])
    begins = np.r_[True, (np.diff(cut, axis=0) != 0).any(axis=1)][: len(cut)]
    entries = np.column_stack([cut[begins], np.add.reduceat(tokens, np.flatnonzero(begins))]) if len(cut) else cut
    entries = entries.reshape(-1, 4)[np.lexsort((entries[:, 1], entries[:, 0]))]
    return TokenPlan.by_construction(np.ascontiguousarray(entries), load, layout)


@borrowing
def _assign_blocks(tokens_RE, held_ER, entries, first_entry_E1, block_rows, owner_N, want_SR, left_R, used_R):  # type: ignore[no-untyped-def]
    """Writes the rank of each block, expert by expert. ``entries``: those of the plan, by expert. Scratch, zeros:
    ``want_SR`` [R + 1, R], the rest of the plan of an expert; ``left_R``: rows that each rank was planned to get from
    earlier sources and did not; ``used_R``: the last source of which it has had rows.
    """
    R, E = tokens_RE.shape
    block = 0
    for expert in range(E):
        want_SR[:] = 0
        rows = 0
        for entry in range(first_entry_E1[expert], first_entry_E1[expert + 1]):
            want_SR[entries[entry, 0], entries[entry, 2]] = entries[entry, 3]
            rows += entries[entry, 3]
        used_R[:] = -1
        # ``rest``: rows of ``source`` that are not in a block yet.
        source, rest, current = 0, tokens_RE[0, expert], -1
        while rows > 0:
            while rest == 0:
                left_R += want_SR[source]
                source, current = source + 1, -1
                rest = tokens_RE[source, expert]
            room = rows if 2 * rows < 3 * block_rows else block_rows
            current = _chosen(
                held_ER[expert], want_SR, left_R, used_R, source, current, rest, room, tokens_RE[:, expert]
            )
            owner_N[block] = current
            block, rows = block + 1, rows - room
            while room > 0:
                while rest == 0:
                    left_R += want_SR[source]
                    source += 1
                    rest = tokens_RE[source, expert]
                taken = min(room, rest)
                want_SR[source, current] -= taken
                used_R[current] = source
                room, rest = room - taken, rest - taken
        for behind in range(source, R):
            left_R += want_SR[behind]


@borrowing
def _chosen(held_R, want_SR, left_R, used_R, source, current, rest, room, tokens_R):  # type: ignore[no-untyped-def]
    """Returns the rank that computes a block of ``room`` rows that begins in ``source``, of which ``rest`` are left. A
    rank that has had rows of this source, and is not the ``current`` one, gets no second range of them.
    """
    best, chosen = -np.inf, current
    inside = min(room, rest)
    for rank in range(len(held_R)):
        if not held_R[rank] or (used_R[rank] == source and rank != current):
            continue
        value = min(want_SR[source, rank] + left_R[rank], inside)
        after, more = source + 1, room - inside
        while more > 0:
            rows = min(more, tokens_R[after])
            value += min(want_SR[after, rank], rows)
            after, more = after + 1, more - rows
        if rank == current and 2 * value >= room:
            # The current rank continues, because it gets no second range of this source.
            return rank
        # A rank that the next source wants too is preferably the last one of this source.
        later = 0.25 * min(want_SR[after, rank], room) if room == inside else 0.0
        if value - later > best:
            best, chosen = value - later, rank
    return chosen
