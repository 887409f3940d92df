"""The token plan of a micro-batch, made on the device from all ranks' counts: the host launches, and reads nothing."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import torch
from torch import Tensor

from moesys.balance.topology import levels_of, link_domains_of, nodes_of
from moesys.config import ClusterSpec, Split
from moesys.kernels.split.tables import IntArray, SplitTables, entries_of, tables_of
from moesys.kernels.symmetric.counts import ReceivedCounts
from moesys.layout import ExpertLayout
from moesys.overlap.row_limit import RowLimit


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
        """``tokens_RE``, when forward has been launched."""
        assert self.tokens_RE is not None
        return self.tokens_RE

    def counts_RE(self) -> IntArray:
        """``tokens_RE`` on the host, which waits for the device."""
        return self.wanted_RE().cpu().numpy()

    def entries(self) -> Tensor:
        """Rows (source, expert, destination, tokens) int64 [N, 4] of a ``TokenPlan``. The host waits for it."""
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
