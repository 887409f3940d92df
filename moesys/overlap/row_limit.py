"""How many rows a rank may get: memory is taken for so many before anybody has counted them.

A plan that sends some rank more is refused, and so is one that was made from counts that do not belong together. Where
hosts plan, they see it before anything runs. Where devices do, all of them make the same plan and see it alike; then no
row travels at all, every output is zero, and the host raises as soon as it hears of it.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from moesys.config import MegaKernel
from moesys.kernels.split.limit import keep_within
from moesys.kernels.split.tables import SplitTables
from moesys.layout import TokenPlan
from moesys.limits import too_many_rows, too_many_words
from moesys.overlap.comm.frames import call_mismatch
from moesys.overlap.routes import no_expert


def require_rows(
    overlap: MegaKernel, plan: TokenPlan, most_tokens: int, top_k: int, members: Sequence[int] | None = None
) -> None:
    """Raises ValueError where a rank would get more rows than ``overlap.rows_cap``, times the ``most_tokens`` · K
    choices of any rank, allows. ``members``: the ranks of the plan, as errors name them.
    """
    if words := too_many_rows(overlap, plan, most_tokens, top_k, members):
        raise ValueError(words)


def room_for_rows(overlap: MegaKernel, most_tokens: int, top_k: int, num_ranks: int) -> int:
    """Rows of a rank for which there is memory where devices plan; all that there may be are never too many."""
    choices = most_tokens * top_k
    return min(int(overlap.rows_cap * choices), num_ranks * choices)


class RowLimit:
    """The limit of plans that a device makes. ``note``, ``look`` and ``wait`` tell the host, as those of
    ``kernels.symmetric.signals.TimeoutWatch`` do. ``members``: the ranks of the group, as errors name them.
    """

    def __init__(self, device: torch.device, members: Sequence[int]) -> None:
        # The findings of ``keep_within``, which are zeros as long as there are none.
        self._found_9 = torch.zeros(9, dtype=torch.int64, device=device)
        self._seen_9 = torch.zeros(9, dtype=torch.int64).pin_memory() if self._found_9.is_cuda else None
        self._members = members

    def keep(
        self, tokens_RP: Tensor, tables: SplitTables, room: int, choices: int, origin_R2: Tensor, call: int
    ) -> Tensor:
        """Returns the plan ``tokens_RP`` int64, or a plan without tokens if it sends any rank more than ``room`` rows
        (``rows_cap`` times the ``choices`` of a rank), or if the counts that it was made from do not belong together
        (``keep_within``). Nothing waits for the host.
        """
        return keep_within(tokens_RP, tables, room, choices, origin_R2, call, self._found_9)

    def note(self) -> torch.cuda.Event | None:
        """Records the findings at the end of a direction. On the CPU it raises the errors of ``wait`` at once. On a GPU
        it returns an event after which ``look`` knows of this direction, or None while a CUDA graph is captured.
        """
        if self._seen_9 is None:
            self._raise_if_found(self._found_9)
            return None
        self._seen_9.copy_(self._found_9, non_blocking=True)
        if torch.cuda.is_current_stream_capturing():
            return None
        noted = torch.cuda.Event()
        noted.record()
        return noted

    def look(self) -> None:
        """Raises the errors of ``wait`` if a plan of a direction that has ended by now was refused."""
        if self._seen_9 is not None:
            self._raise_if_found(self._seen_9)

    def wait(self) -> None:
        """Raises ``RankMismatchError`` if any plan was refused because ranks were in different calls, and ValueError
        if one had too many rows or choices of no expert, when the device has made all of them.
        """
        self._raise_if_found(self._found_9.cpu())

    def _raise_if_found(self, found_9: Tensor) -> None:
        rank, num_rows, room, choices, stranger, its_call, loser, lost, call = found_9.tolist()
        if not (num_rows or stranger or loser):
            return
        # Micro-batches after one whose error was caught are as good as any.
        self._found_9.zero_()
        if self._seen_9 is not None:
            # Copies that are under way would bring the findings back.
            torch.cuda.synchronize(self._found_9.device)
            self._seen_9.zero_()
        if stranger:
            raise call_mismatch(self._members[stranger - 1], its_call, call)
        if loser:
            found = f"expert_TK of rank {self._members[loser - 1]} has choices that name no expert ({lost})"
            raise no_expert(found)
        bound = f"the {room} that rows_cap allows for {choices} choices of a rank"
        raise ValueError(too_many_words(self._members[rank], num_rows, choices, bound))
