"""What data-parallel ranks send each other: parameters gathered, gradients summed, by rings that go round all of them.

A ring passes all of a group's bytes but its own share through every rank, and through every node that the group spans;
the groups of a node share its NICs.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from moesys.config import ClusterSpec
from moesys.config.model_run import ModelRun
from moesys.cost import LinkLoad


@dataclass(frozen=True)
class Ring:
    """Groups of ``size`` ranks, each ``stride`` apart from its neighbours."""

    size: int
    stride: int

    @classmethod
    def of_dense(cls, run: ModelRun) -> Ring:
        """Ranks of a stage that hold the same dense parameters."""
        return cls(run.groups.stage // run.parallelism.tensor, run.parallelism.tensor)

    @classmethod
    def of_experts(cls, run: ModelRun) -> Ring:
        """Ranks of a stage that hold the same experts."""
        return cls(run.groups.expert_data, run.groups.expert)

    def spans(self, ranks: int) -> bool:
        """Whether a group is on more than ``ranks`` neighbouring ranks."""
        return self.size > 1 and self.size * self.stride > ranks

    def seconds(self, num_bytes: float, cluster: ClusterSpec) -> float:
        """Returns those of one all-gather, or one reduce-scatter, of so many bytes a group."""
        if self.size == 1 or not num_bytes:
            return 0.0
        passed = num_bytes * (self.size - 1) / self.size
        seconds = passed / (cluster.intra_node_gb_per_s * 1e9) if self.stride < cluster.domain_sizes[0] else 0.0
        if self.spans(cluster.domain_sizes[0]):
            groups = min(self.stride, cluster.node_sizes[0])
            seconds = max(seconds, groups * passed / (cluster.inter_node_gb_per_s * 1e9))
        return seconds

    def load(self, num_bytes: float, group: ClusterSpec, whole: ClusterSpec) -> LinkLoad:
        """Returns what such an exchange asks of the links of an expert ``group``, which is a part of the ``whole``."""
        R, N = group.num_ranks, group.num_nodes
        passed = num_bytes * (self.size - 1) / self.size
        seconds_L, used_4R = np.zeros(2 * (R + N)), np.zeros((4, R), dtype=bool)
        if self.size > 1 and self.stride < whole.domain_sizes[0]:
            seconds_L[: 2 * R] = passed / (whole.intra_node_gb_per_s * 1e9)
            used_4R[:2] = True
        if self.spans(whole.domain_sizes[0]):
            groups = min(self.stride, whole.node_sizes[0])
            # Of all groups on the node, those of other expert groups among them.
            seconds_L[2 * R :] = groups * passed / (whole.inter_node_gb_per_s * 1e9)
            used_4R[2:] = True
        return LinkLoad(seconds_L, used_4R)
