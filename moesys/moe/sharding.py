"""Which shards of a layer's experts a strategy asks for."""

from __future__ import annotations

import torch.distributed as dist

from moesys.config import ClusterSpec, Ep, Fsep, MegaKernel, ModelShape, Strategy
from moesys.moe.expert_parameters import DTYPES
from moesys.moe.sharded_experts import ShardedExperts
from moesys.moe.shards import ExpertShards
from moesys.moe.whole_experts import WholeExperts


def shards_of(
    strategy: Strategy, shape: ModelShape, cluster: ClusterSpec, rank: int, group: dist.ProcessGroup | None
) -> ExpertShards:
    """This rank's. ``group``: the ranks of ``cluster``; None for one rank alone."""
    dtype = DTYPES[shape.dtype]
    match strategy.sharding:
        case Ep():
            return WholeExperts(shape, dtype, rank, cluster.num_ranks)
        case Fsep(restore=restore):
            overlap, hierarchical = strategy.overlap, restore == "hierarchical"
            if isinstance(overlap, MegaKernel) and group is not None and not hierarchical:
                # Here, so that Triton is loaded only where it runs.
                from moesys.moe.pulled_experts import PulledExperts

                return PulledExperts(shape, dtype, rank, cluster.node_of_rank, group, overlap.timeout_s)
            return ShardedExperts(shape, dtype, rank, cluster.num_ranks, cluster.node_of_rank, hierarchical)
