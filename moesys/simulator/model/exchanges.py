"""What data-parallel ranks send each other: parameters gathered, gradients summed, by rings that go round all of them.

A ring passes all of a group's bytes but its own share through every rank, and through the NICs of every domain that the
group spans; the groups of a domain share them.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from moesys.config import ClusterSpec
from moesys.config.model_run import ModelRun
from moesys.cost import LinkLoad
from moesys.simulator.model.placement import Placement, place_groups, place_pairs


def passes_of_sum(run: ModelRun) -> int:
    """Returns how often all gradients go round until each rank has the sum of its part: gloo's reduce-scatter is an
    all-reduce (torch, ``ProcessGroupGloo::reduce_scatter_tensor_coalesced``).
    """
    return 2 if run.backend == "gloo" else 1


@dataclass(frozen=True)
class Ring:
    """Groups of ``size`` ranks, and where they lie."""

    size: int
    placement: Placement

    @classmethod
    def of_dense(cls, run: ModelRun) -> Ring:
        """Ranks of a stage that hold the same dense parameters."""
        size, stride = run.groups.stage // run.parallelism.tensor, run.parallelism.tensor
        return cls(size, place_groups(size, stride, run.cluster))

    @classmethod
    def of_experts(cls, run: ModelRun) -> Ring:
        """Ranks of a stage that hold the same experts."""
        size, stride = run.groups.expert_data, run.groups.expert
        return cls(size, place_groups(size, stride, run.cluster))

    @classmethod
    def of_ends(cls, run: ModelRun) -> Ring:
        """Ranks of the first and of the last stage that hold the same part of tied embeddings."""
        stage = run.groups.stage
        return cls(2, place_pairs(run.cluster.num_ranks - stage, stage, run.cluster))

    def seconds(self, num_bytes: float, cluster: ClusterSpec) -> float:
        """Returns those of one all-gather, or one reduce-scatter, of so many bytes a group."""
        return max(self.busy_seconds(num_bytes, cluster))

    def load(self, num_bytes: float, group: ClusterSpec, whole: ClusterSpec) -> LinkLoad:
        """Returns what such an exchange asks of the links of an expert ``group``, which is a part of the ``whole``."""
        R, N = group.num_ranks, group.num_nodes
        busy_s = self.busy_seconds(num_bytes, whole)
        return LinkLoad(
            np.repeat(busy_s, (2 * R, 2 * N)), np.repeat(np.array(busy_s) > 0, 2)[:, None].repeat(R, axis=1)
        )

    def busy_seconds(self, num_bytes: float, cluster: ClusterSpec) -> tuple[float, float]:
        """Returns those of a rank's way inside its domain, and those of a node's NICs, either way; 0 where unused. All
        groups of a node are on its NICs, those of other expert groups among them.
        """
        passed = num_bytes * (self.size - 1) / self.size
        inside = passed / (cluster.intra_node_gb_per_s * 1e9) if self.placement.inside else 0.0
        return inside, self.placement.on_nics * passed / (cluster.inter_node_gb_per_s * 1e9)
