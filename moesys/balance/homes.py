"""Homes: which rank owns which expert, where experts stay whole."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from moesys.balance.topology import link_domains_of, tokens_by_node
from moesys.config import ClusterSpec
from moesys.layout import EMPTY, ExpertLayout, TokenPlan, owner_of_experts
from moesys.load import IntArray, LoadMatrix, frozen_int64


@dataclass(frozen=True, eq=False)
class Homes:
    """The rank of ``num_ranks`` that owns each expert, ``home_E`` int64 [E]; as many a rank as by ``owner_of_experts``.

    Experts have *numbers*, in the order of their homes and, of one home, in that of the model, so that
    ``owner_of_experts`` of a number is the home. What is planned and where masters lie is in numbers; what a person
    gives and gets is in the model's ids.

    Raises ValueError for a rank that is none, and where a rank has more or fewer experts than by the rule.
    """

    home_E: IntArray
    num_ranks: int

    def __post_init__(self) -> None:
        home_E, R = frozen_int64("homes", self.home_E, num_dims=1), self.num_ranks
        object.__setattr__(self, "home_E", home_E)
        if (outside := (home_E < 0) | (home_E >= R)).any():
            expert = int(np.flatnonzero(outside)[0])
            raise ValueError(f"homes has rank {home_E[expert]} for expert {expert}; ranks are 0..{R - 1}")
        room_R = np.bincount(owner_of_experts(len(home_E), R), minlength=R)
        count_R = np.bincount(home_E, minlength=R)
        if (wrong := count_R != room_R).any():
            rank = int(np.flatnonzero(wrong)[0])
            raise ValueError(
                f"homes has {count_R[rank]} of {len(home_E)} experts on rank {rank}, and each of {R} ranks has "
                f"{room_R.tolist()}; ms.plan_homes makes homes that fit"
            )

    @classmethod
    def by_rule(cls, num_experts: int, num_ranks: int) -> Homes:
        """Returns those of ``owner_of_experts``, whose numbers are the model's ids."""
        return cls(owner_of_experts(num_experts, num_ranks), num_ranks)

    @cached_property
    def expert_E(self) -> IntArray:
        """The model's id of each number."""
        return np.argsort(self.home_E, kind="stable")

    @cached_property
    def number_E(self) -> IntArray:
        """The number of each expert of the model."""
        return np.argsort(self.expert_E)

    @cached_property
    def moved(self) -> bool:
        """Whether any expert is elsewhere than by the rule."""
        return bool((np.diff(self.home_E) < 0).any())

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Homes) and np.array_equal(self.home_E, other.home_E)

    def numbered(self, load: LoadMatrix) -> LoadMatrix:
        """Returns a load in the model's ids in numbers."""
        return LoadMatrix(load.tokens_RE[:, self.expert_E]) if self.moved else load

    def load_by_id(self, load: LoadMatrix) -> LoadMatrix:
        """Returns a load in numbers in the model's ids."""
        return LoadMatrix(load.tokens_RE[:, self.number_E]) if self.moved else load

    def plan_by_id(self, plan: TokenPlan) -> TokenPlan:
        """Returns a plan in numbers in the model's ids."""
        expert_RS, entries = plan.layout.expert_RS, plan.entries.copy()
        layout = ExpertLayout(np.where(expert_RS == EMPTY, EMPTY, self.expert_E[expert_RS]), len(self.home_E))
        entries[:, 1] = self.expert_E[entries[:, 1]]
        in_order = np.lexsort((entries[:, 1], entries[:, 0]))
        return TokenPlan(entries[in_order], self.load_by_id(plan.load), layout)


def plan_homes(loads: Sequence[LoadMatrix], cluster: ClusterSpec) -> list[IntArray]:
    """Returns a home for each expert of each layer, a rank, int64 [E] for each of ``loads``: for ``ms.move_homes``.

    The ranks of a node own what they want themselves, and nodes have equal shares of all that is wanted. Ranks own as
    many experts as without homes: ceil(E / R), the last ones fewer. A pure function: the same loads give the same
    homes on every rank.

    ``loads``: what each layer's routers wanted in micro-batches that are past, of ``ms.gather_loads`` or a trace.
    Raises ValueError for a load of other ranks than those of ``cluster``.
    """
    for layer, load in enumerate(loads):
        if load.num_ranks != cluster.num_ranks:
            raise ValueError(
                f"loads[{layer}] is of {load.num_ranks} ranks and the cluster has {cluster.num_ranks}; give loads of "
                "the ranks that share the experts"
            )
    return [planned_homes(load, cluster) for load in loads]


def planned_homes(load: LoadMatrix, cluster: ClusterSpec) -> IntArray:
    """Returns a rank for each expert, int64 [E], so that nodes are level and have what their own ranks want.

    Ranks own as many experts as by ``owner_of_experts``. The heaviest comes first, to the node that wants it most of
    those with room that have no more than it above the one with least; there to the rank with least. A *node* is a
    domain of the links. Ties go to the lower number.
    """
    R, E, node_R = load.num_ranks, load.num_experts, link_domains_of(cluster)
    supply_NE, tokens_E = tokens_by_node(load.tokens_RE, node_R)
    ranks_N = np.bincount(node_R)
    room_R, load_R = np.bincount(owner_of_experts(E, R), minlength=R), np.zeros(R, np.int64)
    home_E = np.empty(E, np.int64)
    for expert in np.argsort(-tokens_E, kind="stable"):
        # of each rank there, so that nodes of any size compare
        load_N = np.where(np.bincount(node_R, room_R) > 0, np.bincount(node_R, load_R) / ranks_N, np.inf)
        near_N = load_N <= load_N.min() + tokens_E[expert] / ranks_N
        node = np.where(near_N, supply_NE[:, expert], -1).argmax()
        ranks = np.flatnonzero((node_R == node) & (room_R > 0))
        home = ranks[load_R[ranks].argmin()]
        home_E[expert] = home
        room_R[home] -= 1
        load_R[home] += tokens_E[expert]
    return home_E
