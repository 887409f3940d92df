"""The token plan of a micro-batch, made on the device from all ranks' counts: the host launches, and reads nothing."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from moesys.balance.topology import levels_of, link_domains_of, nodes_of
from moesys.config import ClusterSpec, Split
from moesys.config.overlap import MegaKernel
from moesys.frames import call_mismatch
from moesys.kernels.split.tables import SplitTables, entries_of, keep_within, tables_of
from moesys.kernels.symmetric.counts import ReceivedCounts
from moesys.layout import ExpertLayout
from moesys.limits import too_many_words
from moesys.load import IntArray
from moesys.overlap.routes import no_expert


def room_for_rows(overlap: MegaKernel, most_tokens: int, top_k: int, num_ranks: int) -> int:
    """Returns the number of rows for which a rank has memory where devices plan, at most all rows that there may be."""
    choices = most_tokens * top_k
    return min(int(overlap.rows_cap * choices), num_ranks * choices)


class RowLimit:
    """The limit of plans that a device makes. ``note``, ``look`` and ``wait`` report to the host, as those of
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
        # Later micro-batches are not concerned, if the error is caught.
        self._found_9.zero_()
        if self._seen_9 is not None:
            # Copies that are under way would restore the findings.
            torch.cuda.synchronize(self._found_9.device)
            self._seen_9.zero_()
        if stranger:
            raise call_mismatch(self._members[stranger - 1], its_call, call)
        if loser:
            found = f"expert_TK of rank {self._members[loser - 1]} has choices that name no expert ({lost})"
            raise no_expert(found)
        bound = f"the {room} that rows_cap allows for {choices} choices of a rank"
        raise ValueError(too_many_words(self._members[rank], num_rows, choices, bound))


@dataclass(frozen=True)
class DeviceSplit:
    """Makes the plans of a layout's split: ``tokens_RP(tokens_RE, turn)`` is what each source of ``tokens_RE`` int64
    [R, E] sends to each replica, int64 [R, P], as on the host.
    """

    tables: SplitTables
    tokens_RP: Callable[[Tensor, int], Tensor]


@dataclass
class PendingPlan:
    """The plan of a micro-batch, which is on the device once its forward has been launched.

    ``turn``: the micro-batch's number. ``room``: rows for which there is memory on a rank, of ``choices`` that one has
    at most. ``call``: the ``call_bits`` of the forward, 0 if none are compared. ``tokens_RE``, ``tokens_RP`` int64: the
    tokens of each rank for each expert, and for each replica. ``noted``: an event at the end of forward on a GPU.
    """

    split: DeviceSplit
    turn: int
    limit: RowLimit
    room: int
    choices: int
    call: int = 0
    tokens_RE: Tensor | None = field(default=None, init=False)
    tokens_RP: Tensor | None = field(default=None, init=False)
    noted: torch.cuda.Event | None = field(default=None, init=False)

    def check(self) -> None:
        """Waits for forward, and raises the errors of ``RowLimit.wait`` if its plan was refused."""
        if self.noted is not None:
            self.noted.synchronize()
        self.limit.look()

    def make(self, counts: ReceivedCounts) -> Tensor:
        """Returns the plan to run, int64 [R, P]. It has no tokens if a rank would get too many rows, or if the
        ``counts`` do not belong together (``RowLimit``).
        """
        self.tokens_RE, self.tokens_RP = counts.tokens_RE, self.split.tokens_RP(counts.tokens_RE, self.turn)
        bounds = (self.room, self.choices, counts.origin_R2, self.call)
        return self.limit.keep(self.tokens_RP, self.split.tables, *bounds)

    def wanted_RE(self) -> Tensor:
        """Returns ``tokens_RE``, when forward has been launched."""
        assert self.tokens_RE is not None
        return self.tokens_RE

    def counts_RE(self) -> IntArray:
        """Returns ``tokens_RE`` on the host, which waits for the device."""
        return self.wanted_RE().cpu().numpy()

    def entries(self) -> Tensor:
        """Returns rows (source, expert, destination, tokens) int64 [N, 4] of a ``TokenPlan``, for which it waits."""
        assert self.tokens_RP is not None
        return entries_of(self.tokens_RP, self.split.tables)


def split_tables(layout: ExpertLayout, cluster: ClusterSpec, device: torch.device | str) -> SplitTables:
    """Returns index tables on ``device``, which follow from the layout alone, whatever splits over it.

    Raises ValueError when layout and cluster are not for the same ranks.
    """
    if layout.num_ranks != cluster.num_ranks:
        raise ValueError(
            f"the layout is for {layout.num_ranks} ranks, the cluster has {cluster.num_ranks}; "
            "plan both for the same ranks"
        )
    level_LR = levels_of(cluster, nodes_of(cluster))
    return tables_of(layout.expert_RS, layout.num_experts, link_domains_of(cluster), level_LR, device)


def device_split(layout: ExpertLayout, cluster: ClusterSpec, config: Split, device: torch.device | str) -> DeviceSplit:
    """Returns what makes the plans of ``split_tokens`` on ``device``, once per layout, so that the host does not wait
    for counts.

    Raises ValueError as ``split_tables`` does, and for a split that only the host can make.
    """
    tables = split_tables(layout, cluster, device)
    return DeviceSplit(tables, config.device_split(tables, layout, cluster))
