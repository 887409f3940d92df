"""The token plan of a micro-batch, made on the device from all ranks' counts: the host launches, and reads nothing."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor

from moesys.balance.topology import levels_of, link_domains_of, nodes_of
from moesys.config import ClusterSpec, EvenSplit, FlowSplit, Proportional, Quotas, Split
from moesys.kernels.split.baselines import (
    EvenTables,
    ProportionalTables,
    even_split,
    even_tables,
    proportional_split,
    proportional_tables,
)
from moesys.kernels.split.flow import split
from moesys.kernels.split.tables import IntArray, SplitTables, entries_of, tables_of
from moesys.kernels.symmetric.counts import ReceivedCounts
from moesys.layout import ExpertLayout
from moesys.overlap.row_limit import RowLimit


@dataclass(frozen=True)
class DeviceSplit:
    """What a layout's splits are made by: ``shares`` are the tables of ``EvenSplit`` or ``Proportional``; None is
    ``FlowSplit(traffic="fast")``.
    """

    tables: SplitTables
    shares: EvenTables | ProportionalTables | None

    def tokens_RP(self, tokens_RE: Tensor, turn: int) -> Tensor:
        """What each source of ``tokens_RE`` int64 [R, E] sends to each replica, int64 [R, P]: the host's plan."""
        match self.shares:
            case EvenTables():
                return even_split(tokens_RE, self.shares, turn)
            case ProportionalTables():
                return proportional_split(tokens_RE, self.shares, turn)
            case None:
                return split(tokens_RE, self.tables, turn).tokens_RP


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


def split_tables(
    layout: ExpertLayout, cluster: ClusterSpec, config: FlowSplit, device: torch.device | str
) -> SplitTables:
    """Returns index tables on ``device``, made once per layout, with which ``kernels.split.split`` makes the plans of
    ``split_tokens`` from counts on the device, so that the host does not wait.

    Raises ValueError when layout and cluster are not for the same ranks, for ``traffic="exact"`` and for a cap on
    traffic, which only the host can keep.
    """
    if layout.num_ranks != cluster.num_ranks:
        raise ValueError(
            f"the layout is for {layout.num_ranks} ranks, the cluster has {cluster.num_ranks}; "
            "plan both for the same ranks"
        )
    if config.traffic != "fast":
        raise ValueError(f"traffic={config.traffic!r} is solved on the host only; use traffic='fast', or split_tokens")
    if config.max_inter_node is not None:
        raise ValueError(
            f"max_inter_node={config.max_inter_node} takes a search over limits, which runs on the host only; "
            "use max_inter_node=None, or split_tokens"
        )
    level_LR = levels_of(cluster, nodes_of(cluster))
    return tables_of(layout.expert_RS, layout.num_experts, link_domains_of(cluster), level_LR, device)


def device_split(layout: ExpertLayout, cluster: ClusterSpec, config: Split, device: torch.device | str) -> DeviceSplit:
    """Returns what makes the plans of ``split_tokens`` on ``device``, once per layout. Raises ValueError as
    ``split_tables`` does, and for a split of the user's own.
    """
    # These tables follow from the layout alone, whatever splits over it.
    tables = split_tables(layout, cluster, config if isinstance(config, FlowSplit) else FlowSplit(), device)
    match config:
        case EvenSplit():
            return DeviceSplit(tables, even_tables(layout.expert_RS, nodes_of(cluster), device))
        case Proportional():
            return DeviceSplit(tables, proportional_tables(tables, layout.replicas_RE))
        case FlowSplit():
            return DeviceSplit(tables, None)
        case Quotas():
            raise ValueError("split=Quotas() is made by a planner on the hosts; use FlowSplit(), or no most_tokens")
        case _:
            raise ValueError(f"split={config.kind} is a split of one's own, which plans on the host; use split_tokens")
