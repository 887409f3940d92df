"""Where groups of ranks lie, as ranks are numbered: what of them fits into domains of the fastest links, and how many
of them share a node's NICs.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache

import numpy as np

from moesys.config import ClusterSpec
from moesys.load import IntArray


@dataclass(frozen=True)
class Placement:
    """Of all groups of a kind, at once. inside: some group has two ranks in one domain. on_nics: of groups that
    straddle domains, how many the NICs of a node carry, the busiest one's; a domain's nodes share them evenly.
    """

    inside: bool
    on_nics: float


@cache
def place_groups(size: int, stride: int, cluster: ClusterSpec) -> Placement:
    """Returns where groups of ``size`` ranks lie, each ``stride`` behind the one before. ``size * stride`` divides the
    ranks.
    """
    return _place(np.arange(cluster.num_ranks).reshape(-1, size, stride).swapaxes(1, 2).reshape(-1, size), cluster)


@cache
def place_pairs(distance: int, count: int, cluster: ClusterSpec) -> Placement:
    """Returns where pairs lie of the first ``count`` ranks and those ``distance`` behind them."""
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
