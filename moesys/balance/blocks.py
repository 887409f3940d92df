"""by_blocks: a plan whose ranks compute whole blocks of an expert's rows, so that a block's gradient is one product.

The rows of an expert form one line, by (source rank, token, k). Its holders, by rank, each take one stretch of it that
begins and ends at a block's end. So neighbours in rank, who share nodes, serve each other, and what a rank gets of an
expert is blocks whoever else holds it.
"""

from __future__ import annotations

import numpy as np

from moesys.compiled import borrowing
from moesys.layout import TokenPlan


def by_blocks(plan: TokenPlan, block_rows: int) -> TokenPlan:
    """Returns the plan in which every rank gets of each expert about what it has in ``plan``, in whole blocks of
    ``block_rows``; an expert's last block may be short.

    Where a stretch ends is rounded up or down, so that what ranks get more or less than in ``plan`` adds up to little.
    """
    load, layout = plan.load, plan.layout
    R, E = load.num_ranks, load.num_experts
    _, expert, destination, tokens = plan.entries.T
    tokens_ER = np.zeros((E, R), dtype=np.int64)
    np.add.at(tokens_ER, (expert, destination), tokens)
    _round_to_blocks(tokens_ER, layout.replicas_RE, block_rows, np.zeros(R, dtype=np.int64))
    # All experts' lines, one behind the other, cut where sources and where destinations change.
    source_stop = np.cumsum(load.tokens_RE.T.ravel())
    destination_stop = np.cumsum(tokens_ER.ravel())
    stop = np.union1d(source_stop, destination_stop)
    tokens = np.diff(stop, prepend=0)
    stop, tokens = stop[tokens > 0], tokens[tokens > 0]
    of_source, of_destination = (np.searchsorted(each, stop) for each in (source_stop, destination_stop))
    entries = np.column_stack([of_source % R, of_source // R, of_destination % R, tokens])
    order = np.lexsort(entries[:, 2::-1].T)
    return TokenPlan.by_construction(np.ascontiguousarray(entries[order]), load, layout)


@borrowing
def _round_to_blocks(tokens_ER, held_RE, block_rows, excess_R):  # type: ignore[no-untyped-def]
    """Writes stretches of whole blocks. ``excess_R``: zeros; what each rank gets more than it had, so far."""
    for expert in range(len(tokens_ER)):
        rows = 0
        for rank in range(len(excess_R)):
            rows += tokens_ER[expert, rank]
        last = -1
        wanted_stop, stop = 0, 0
        for rank in range(len(excess_R)):
            if held_RE[rank, expert] == 0:
                continue
            if last >= 0:
                # The stretch of the holder before ends here; what it does not take is for this one.
                before = wanted_stop // block_rows * block_rows
                behind = min(before + block_rows, rows)
                least, chosen = -1, stop
                for end in (before, behind):
                    more = end - wanted_stop
                    error = (excess_R[last] + more) ** 2 + (excess_R[rank] - more) ** 2
                    if end >= stop and (least < 0 or error < least):
                        least, chosen = error, end
                excess_R[last] += chosen - wanted_stop
                excess_R[rank] -= chosen - wanted_stop
                tokens_ER[expert, last], stop = chosen - stop, chosen
            wanted_stop += tokens_ER[expert, rank]
            last = rank
        tokens_ER[expert, last] = rows - stop
