"""Exchanges of data-parallel ranks: rings that gather parameters and sum gradients.

A ring passes all of a group's bytes but its own share through every rank, and through the NICs of every domain that the
group spans; the groups of a domain share the NICs.

``Placement`` says which groups fit into domains of the fastest links, and how many share a node's NICs; ranks are
numbered in order.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache

import numpy as np

from moesys.config import ClusterSpec
from moesys.config.model_run import ModelRun
from moesys.cost import LinkLoad
from moesys.load import IntArray


@dataclass(frozen=True)
class Placement:
    """The place of all groups of a kind. ``inside``: whether some group has two ranks in one domain. ``on_nics``: the
    number of groups across domains that the busiest node's NICs carry; the nodes of a domain share them evenly.
    """

    inside: bool
    on_nics: float


@cache
def place_groups(size: int, stride: int, cluster: ClusterSpec) -> Placement:
    """Returns the place of groups of ``size`` ranks, each ``stride`` after the one before. ``size * stride`` divides
    the number of ranks.
    """
    return _place(np.arange(cluster.num_ranks).reshape(-1, size, stride).swapaxes(1, 2).reshape(-1, size), cluster)


@cache
def place_pairs(distance: int, count: int, cluster: ClusterSpec) -> Placement:
    """Returns the place of the pairs of the first ``count`` ranks and those ``distance`` after them."""
    first = np.arange(count)
    return _place(np.stack([first, first + distance], axis=1), cluster)


def _place(ranks_GS: IntArray, cluster: ClusterSpec) -> Placement:
    domain_R, node_R = np.asarray(cluster.domain_of_rank), np.asarray(cluster.node_of_rank)
    domain_GS = np.sort(domain_R[ranks_GS], axis=1)
    in_domain_GD = np.zeros((len(ranks_GS), domain_R[-1] + 1), dtype=bool)
    np.put_along_axis(in_domain_GD, domain_GS, True, axis=1)
    groups_D = in_domain_GD[in_domain_GD.sum(axis=1) > 1].sum(axis=0)
    ranks_DN = np.zeros((domain_R[-1] + 1, node_R[-1] + 1))
    np.add.at(ranks_DN, (domain_R, node_R), 1)
    groups_N = groups_D @ (ranks_DN / ranks_DN.sum(axis=1, keepdims=True))
    return Placement(bool((np.diff(domain_GS, axis=1) == 0).any()), float(groups_N.max()))


def passes_of_sum(run: ModelRun) -> int:
    """Returns how often all gradients go round until each rank has the sum of its part: gloo's reduce-scatter is an
    all-reduce (torch, ``ProcessGroupGloo::reduce_scatter_tensor_coalesced``).
    """
    return 2 if run.backend == "gloo" else 1


@dataclass(frozen=True)
class Ring:
    """Groups of ``size`` ranks that exchange by rings, and their place."""

    size: int
    placement: Placement

    @classmethod
    def of_dense(cls, run: ModelRun) -> Ring:
        """Returns the groups of a stage's ranks that hold the same dense parameters."""
        size, stride = run.groups.stage // run.parallelism.tp, run.parallelism.tp
        return cls(size, place_groups(size, stride, run.cluster))

    @classmethod
    def of_experts(cls, run: ModelRun) -> Ring:
        """Returns the groups of a stage's ranks that hold the same experts."""
        size, stride = run.groups.expert_data, run.groups.expert
        return cls(size, place_groups(size, stride, run.cluster))

    @classmethod
    def of_ends(cls, run: ModelRun) -> Ring:
        """Returns the pairs of ranks of the first and the last stage that hold the same part of tied embeddings."""
        stage = run.groups.stage
        return cls(2, place_pairs(run.cluster.num_ranks - stage, stage, run.cluster))

    def load(self, num_bytes: float, group: ClusterSpec, whole: ClusterSpec) -> LinkLoad:
        """Returns the load of such an exchange on the links of an expert ``group``, which is part of ``whole``."""
        R, N = group.num_ranks, group.num_nodes
        busy_s = self.busy_seconds(num_bytes, whole)
        return LinkLoad(
            np.repeat(busy_s, (2 * R, 2 * N)), np.repeat(np.array(busy_s) > 0, 2)[:, None].repeat(R, axis=1)
        )

    def busy_seconds(self, num_bytes: float, cluster: ClusterSpec) -> tuple[float, float]:
        """Returns the seconds of one all-gather, or one reduce-scatter, of so many bytes per group: of a rank's link
        inside its domain, and of a node's NICs, in either direction; 0 if unused. All groups of a node share its NICs,
        also those of other expert groups.
        """
        passed = num_bytes * (self.size - 1) / self.size
        inside = passed / (cluster.intra_node_gb_per_s * 1e9) if self.placement.inside else 0.0
        return inside, self.placement.on_nics * passed / (cluster.inter_node_gb_per_s * 1e9)
