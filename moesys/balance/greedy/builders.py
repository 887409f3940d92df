"""Builders: layouts in one go, of the whole cluster, node by node, node first, or by parts that replicas keep to."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from moesys.balance.greedy.construction import ConstructionProblem, build_best, build_each_node
from moesys.balance.greedy.node_first import deal_to_nodes
from moesys.balance.greedy.numbering import Numbers
from moesys.balance.greedy.pinned import pin_homes
from moesys.balance.greedy.replica_constraints import part_of_experts, spread_replicas
from moesys.balance.greedy.robust_cost import draw_scenarios
from moesys.balance.greedy.spread import spread
from moesys.balance.late_slots import Prices, late_experts
from moesys.layout import EMPTY
from moesys.load import IntArray


class Built(NamedTuple):
    """A layout, and the parts of the cluster that its replicas keep to in search; int64 [R, S] and [R]."""

    expert_RS: IntArray
    part_R: IntArray


class Builders:
    """Builds layouts near ``before_RS``, which may have none. ``part_R``: parts that every expert's ``min_replicas``
    and more must keep to; ``scenarios_each``: how many later loads a layout is built for.
    """

    def __init__(
        self, numbers: Numbers, part_R: IntArray, min_replicas: int, scenarios_each: int, before_RS: IntArray
    ) -> None:
        self.numbers, self.part_R, self.before_RS = numbers, part_R, before_RS
        self.min_replicas, self.scenarios_each = min_replicas, scenarios_each

    def replicas_spread(self, evenly: bool) -> Built:
        """Returns a layout with every expert's replicas on as many nodes as can be (``spread``)."""
        n, expert_RS = self.numbers, self.numbers.empty()
        spread(n.tokens_E, n.slots_R, n.node_R, n.rank_A, evenly, expert_RS)
        return Built(expert_RS, self.part_R)

    def whole(self) -> Built:
        """Returns a layout of the whole cluster at once."""
        n, expert_RS = self.numbers, self.numbers.empty()
        self._build(expert_RS, n.rank_A, n.tokens_E, np.arange(len(n.tokens_E)))
        return Built(expert_RS, self.part_R)

    def at_home(self) -> Built | None:
        """Returns a layout with every expert on its owner, and copies where they are wanted (``pinned``); None where
        owners have no slots for what they own.
        """
        n, expert_RS = self.numbers, self.numbers.empty()
        found = pin_homes(n.supply_NE, n.owner_E, n.slots_R, n.node_R, expert_RS)
        return Built(expert_RS, self.part_R) if found else None

    def copies_that_pay(self, prices: Prices) -> Built | None:
        """Returns a layout with every expert on its owner, and the copies that late slots would get (``late_slots``);
        None where owners have no slots for what they own.
        """
        n = self.numbers
        spare_R = n.slots_R - np.bincount(n.owner_E, minlength=len(n.slots_R))
        if spare_R.min() < 0 or not spare_R.any():
            return None
        num_homes = int((n.slots_R - spare_R).max())
        wide_RS = np.full((len(n.slots_R), num_homes + int(spare_R.max())), EMPTY)
        for rank, row_S in enumerate(wide_RS):
            experts = np.flatnonzero(n.owner_E == rank)
            row_S[: len(experts)] = experts
        parts = n.node_R, n.nics_R
        wide_RS[:, num_homes:] = late_experts(n.tokens_RE, wide_RS, spare_R, n.owner_E, parts, prices)
        expert_RS = n.empty()
        for row_S, wide_S in zip(expert_RS, wide_RS, strict=True):
            experts = wide_S[wide_S != EMPTY]
            row_S[: len(experts)] = experts
        return Built(expert_RS, self.part_R)

    def each_node(self) -> Built | None:
        """Returns a layout of each node for what its ranks send; None where some node cannot hold every expert."""
        n, expert_RS = self.numbers, self.numbers.empty()
        if (np.bincount(n.node_R, n.slots_R) < len(n.tokens_E)).any():
            return None
        if not build_each_node(
            n.slots_R, n.node_R, n.rank_A, n.supply_NE, self.scenarios_each, self.before_RS, expert_RS
        ):
            return None
        return Built(expert_RS, n.node_R)

    def node_first(self, parts: int, group: int) -> Built | None:
        """Returns a layout whose nodes have the experts that their own ranks want most, of all that each ``group`` of
        nodes has between them; None where one of these cannot hold every expert.
        """
        n, expert_RS = self.numbers, self.numbers.empty()
        node_A = n.node_R[n.rank_A]
        ranks_N = np.bincount(node_A, minlength=n.num_nodes)
        slots_N = np.zeros_like(ranks_N)
        np.add.at(slots_N, node_A, n.slots_R[n.rank_A])
        for first in range(0, n.num_nodes, group):
            of_group = slice(first, first + group)
            if slots_N[of_group].sum() < len(n.tokens_E):
                return None
            places_NE, tokens_NE = deal_to_nodes(n.supply_NE[of_group], slots_N[of_group], ranks_N[of_group], parts)
            for node in range(len(places_NE)):
                rank_A, expert_D = n.rank_A[node_A == first + node], np.flatnonzero(places_NE[node])
                if len(rank_A):
                    heaviest_first_D = expert_D[np.argsort(-tokens_NE[node, expert_D], kind="stable")]
                    self._build(expert_RS, rank_A, tokens_NE[node], heaviest_first_D)
        return Built(expert_RS, n.node_R)

    def by_parts(self) -> Built:
        """Returns a layout with every expert in one part of the cluster, with the replicas that it needs."""
        n, expert_RS = self.numbers, self.numbers.empty()
        part_E = part_of_experts(n.tokens_E, n.slots_R, self.part_R, self.min_replicas)
        for part in range(int(self.part_R.max()) + 1):
            rank_A, expert_D = n.rank_A[self.part_R[n.rank_A] == part], np.flatnonzero(part_E == part)
            if not len(expert_D):
                continue
            if self.min_replicas == 1:
                self._build(expert_RS, rank_A, np.where(part_E == part, n.tokens_E, 0), expert_D)
            else:
                self._spread(expert_RS, rank_A, expert_D)
        return Built(expert_RS, self.part_R)

    def _build(self, expert_RS: IntArray, rank_A: IntArray, tokens_E: IntArray, expert_D: IntArray) -> None:
        """Fills the rows of ``rank_A`` with the experts ``expert_D``, balanced for ``tokens_E``."""
        n = self.numbers
        slots_R = np.zeros_like(n.slots_R)
        slots_R[rank_A] = np.minimum(n.slots_R[rank_A], len(expert_D))
        problem = ConstructionProblem(slots_R, n.node_R, rank_A, tokens_E, n.supply_NE, expert_D, self.before_RS)
        found_RS, scenarios = n.empty(), draw_scenarios(tokens_E, self.scenarios_each, self.scenarios_each)
        if build_best(problem, scenarios, found_RS):
            expert_RS[rank_A] = found_RS[rank_A]
        else:
            self._spread(expert_RS, rank_A, expert_D)

    def _spread(self, expert_RS: IntArray, rank_A: IntArray, expert_D: IntArray) -> None:
        n = self.numbers
        rows = spread_replicas(n.tokens_E, n.slots_R, self.min_replicas, expert_D.tolist(), rank_A.tolist())
        for rank, experts in zip(rank_A.tolist(), rows, strict=True):
            expert_RS[rank, : len(experts)] = experts
