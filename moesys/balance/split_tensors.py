"""FlowSplit for counts that are on a device: the same plan as on the host, without a host synchronisation.

Layout, nodes and domains are known on the host, so ``SplitTensors`` is made once a layout. Its ``split`` is a fixed
list of torch ops, whose shapes do not depend on the counts and of which none waits for them.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from moesys.balance.holders import list_holders
from moesys.balance.push_tensors import PushTensors, Queues, sum_before
from moesys.balance.quotas import levels_of
from moesys.config import ClusterSpec, FlowSplit
from moesys.layout import ExpertLayout
from moesys.load import IntArray

# To find the least load of the busiest rank, and then the least traffic: twice what the wildest loads tried took.
PHASES = 96


class TensorPlan(NamedTuple):
    """A ``TokenPlan`` as tensors on a device, for R sources and P replicas by expert, then rank.

    - ``tokens_RP`` int64: what each source sends to each replica;
    - ``rank_P``, ``expert_P`` int64: whose replica it is;
    - ``limit_tokens`` int64 []: the least load of the busiest rank, if ``converged``;
    - ``converged`` bool []: the plan is the host's, byte for byte. If not, every token still goes to a holder of its
      expert, but some rank is above the limit: there were too few phases.
    """

    tokens_RP: Tensor
    rank_P: Tensor
    expert_P: Tensor
    limit_tokens: Tensor
    converged: Tensor

    def to_entries(self) -> IntArray:
        """Rows (source, expert, destination, tokens) int64 [N, 4] of a ``TokenPlan``, sorted. The host waits for it."""
        tokens_RP = self.tokens_RP.cpu().numpy()
        source, replica = tokens_RP.nonzero()
        rank_P, expert_P = self.rank_P.cpu().numpy(), self.expert_P.cpu().numpy()
        return np.stack([source, expert_P[replica], rank_P[replica], tokens_RP[source, replica]], axis=1)


class _Level(NamedTuple):
    """Parts of the cluster: ``first_R`` a part's first rank, ``first_P`` the first replica of an expert in a part,
    ``same_RP`` bool: source and replica are in one part.
    """

    first_R: Tensor
    first_P: Tensor
    same_RP: Tensor


class SplitTensors:
    """The split of one layout. ``split`` gives what ``split_tokens`` with ``FlowSplit`` gives.

    ``phases`` is the work: each is a search for cheapest paths, of 8·R³ bytes up to 128 MiB, and ``push.STEPS`` steps
    along them, in all some 550 small kernels. Ordinary loads of 64 ranks take 10 to 30 of them.
    """

    def __init__(
        self,
        layout: ExpertLayout,
        cluster: ClusterSpec,
        config: FlowSplit,
        device: torch.device | str,
        phases: int = PHASES,
    ) -> None:
        """Raises ValueError when layout and cluster are not for the same ranks, for ``traffic="exact"`` and for a cap
        on traffic, which only the host can keep, and for no phases.
        """
        if layout.num_ranks != cluster.num_ranks:
            raise ValueError(
                f"the layout is for {layout.num_ranks} ranks, the cluster has {cluster.num_ranks}; "
                "plan both for the same ranks"
            )
        if config.traffic != "fast":
            raise ValueError(
                f"traffic={config.traffic!r} is solved on the host only; use traffic='fast', or split_tokens"
            )
        if config.max_inter_node is not None:
            raise ValueError(
                f"max_inter_node={config.max_inter_node} takes a search over limits, which runs on the host only; "
                "use max_inter_node=None, or split_tokens"
            )
        if phases < 1:
            raise ValueError(f"phases={phases} leaves no push; use at least 1")
        self.device, self.phases = torch.device(device), phases
        self._shape = (layout.num_ranks, layout.num_experts)
        holders = list_holders(layout.expert_RS, layout.num_experts)
        self._node_R = torch.as_tensor(np.asarray(cluster.node_of_rank), device=self.device)
        self._num_nodes = cluster.num_nodes
        self._push = PushTensors(holders, np.asarray(cluster.node_of_rank), self.device)
        # every rank by itself, the parts of the cluster, and all of it
        ranks = np.arange(layout.num_ranks)
        self._levels = [
            self._level(part_R, holders.rank_P, holders.expert_P)
            for part_R in (ranks, *levels_of(cluster), np.zeros_like(ranks))
        ]

    def split(self, tokens_RE: Tensor, turn: int | Tensor = 0) -> TensorPlan:
        """The plan for ``tokens_RE`` int64 [R, E] on this split's device. ``turn``, the number of the micro-batch or a
        tensor int64 [] of it, rotates remainders. The host does not wait.

        Raises ValueError when the counts have another shape or dtype, or are elsewhere.
        """
        if tuple(tokens_RE.shape) != self._shape or tokens_RE.dtype != torch.int64:
            raise ValueError(
                f"tokens_RE is {tokens_RE.dtype} {list(tokens_RE.shape)}, the layout needs int64 {list(self._shape)}; "
                "count tokens by source rank and expert"
            )
        if tokens_RE.device.type != self.device.type:
            raise ValueError(f"tokens_RE is on {tokens_RE.device}, the split on {self.device}; make one on its device")
        push = self._push
        supply_NE = tokens_RE.new_zeros(self._num_nodes, self._shape[1]).index_add(0, self._node_R, tokens_RE)
        supply_G = supply_NE[push.node_G, push.groups_of_expert.queue_N]
        home = push.share_out(tokens_RE, supply_G, turn)
        quotas, limit, converged = push.push_down(home, supply_G, push.lower_bound(tokens_RE.sum(0)), self.phases)
        tokens_RP = self._fill_quotas(tokens_RE, quotas.tokens_P)
        return TensorPlan(tokens_RP, push.rank_P, push.expert_P, limit, converged)

    def _level(self, part_R: IntArray, rank_P: IntArray, expert_P: IntArray) -> _Level:
        part_P = part_R[rank_P]
        # replicas of an expert are in rank order, and parts are too
        parts = Queues.of(np.unique(expert_P * len(part_R) + part_P, return_inverse=True)[1].reshape(-1), self.device)
        first_R = torch.as_tensor(np.searchsorted(part_R, part_R), device=self.device)
        same_RP = torch.as_tensor(part_R[:, None] == part_P, device=self.device)
        return _Level(first_R, parts.first_N, same_RP)

    def _fill_quotas(self, tokens_RE: Tensor, tokens_P: Tensor) -> Tensor:
        """What each source sends to each replica, int64 [R, P], as ``quotas.fill_quotas`` has it.

        In each part of the cluster, an expert's sources lie on a line one after another, each as long as its tokens,
        and so do its replicas: what a source sends to a replica is where the two overlap.
        """
        expert_P = self._push.expert_P
        supply_RE, demand_P = tokens_RE, tokens_P
        tokens_RP = torch.zeros_like(self._levels[0].same_RP, dtype=torch.int64)
        for level in self._levels:
            begin_RE = sum_before(supply_RE, level.first_R)
            begin_P = sum_before(demand_P, level.first_P)
            end_RP = (begin_RE + supply_RE)[:, expert_P].minimum(begin_P + demand_P)
            overlap_RP = (end_RP - begin_RE[:, expert_P].maximum(begin_P)).clamp(min=0) * level.same_RP
            tokens_RP = tokens_RP + overlap_RP
            demand_P = demand_P - overlap_RP.sum(0)
            supply_RE = supply_RE.index_add(1, expert_P, overlap_RP, alpha=-1)
        return tokens_RP
