"""How many rows a rank may get: memory is taken for so many before anybody has counted them.

A plan that sends some rank more is refused. Where hosts plan, they see it before anything runs. Where devices do, all
of them make the same plan and see it alike; then no row travels at all, every output is zero, and the host, which waits
for nothing, raises as soon as it hears of it.
"""

from __future__ import annotations

import torch
from torch import Tensor

from moesys.config import MegaKernel
from moesys.kernels.split.limit import keep_within
from moesys.kernels.split.tables import SplitTables
from moesys.layout import TokenPlan
from moesys.overlap.rows_cap import too_many_rows, too_many_words


def require_rows(overlap: MegaKernel, plan: TokenPlan, most_tokens: int, top_k: int) -> None:
    """Raises ValueError where a rank would get more rows than ``overlap.rows_cap``, times the ``most_tokens`` · K
    choices of any rank, allows.
    """
    if words := too_many_rows(overlap, plan, most_tokens, top_k):
        raise ValueError(words)


def room_for_rows(overlap: MegaKernel, most_tokens: int, top_k: int, num_ranks: int) -> int:
    """Rows of a rank for which there is memory where devices plan; all that there may be are never too many."""
    choices = most_tokens * top_k
    return min(int(overlap.rows_cap * choices), num_ranks * choices)


class RowLimit:
    """The limit of plans that a device makes. ``note``, ``look`` and ``wait`` tell the host, as those of
    ``kernels.symmetric.signals.Watch`` do.
    """

    def __init__(self, device: torch.device) -> None:
        # The rank that would have got too many rows, how many, how many there was room for, and the choices of a rank;
        # zeros if none ever would.
        self._found_4 = torch.zeros(4, dtype=torch.int64, device=device)
        self._seen_4 = torch.zeros(4, dtype=torch.int64).pin_memory() if self._found_4.is_cuda else None

    def keep(self, tokens_RP: Tensor, tables: SplitTables, room: int, choices: int) -> Tensor:
        """The plan ``tokens_RP`` int64, or one without a token if it sends any rank more than ``room`` rows, which
        ``rows_cap`` makes of so many ``choices`` of a rank. Nothing waits for the host.
        """
        return keep_within(tokens_RP, tables, room, choices, self._found_4)

    def note(self) -> None:
        """At the end of a direction. On the CPU raises ValueError at once."""
        if self._seen_4 is None:
            _raise_if_found(self._found_4)
        else:
            self._seen_4.copy_(self._found_4, non_blocking=True)

    def look(self) -> None:
        """Raises ValueError if a plan of a direction that has ended by now was refused."""
        if self._seen_4 is not None:
            _raise_if_found(self._seen_4)

    def wait(self) -> None:
        """Raises ValueError if any plan was refused, when the device has made all of them."""
        _raise_if_found(self._found_4.cpu())


def _raise_if_found(found_4: Tensor) -> None:
    rank, num_rows, room, choices = found_4.tolist()
    if num_rows:
        bound = f"the {room} that rows_cap allows for {choices} choices of a rank"
        raise ValueError(too_many_words(rank, num_rows, choices, bound))
