"""Judges layouts by the seconds of a step: what the best splits of later loads cost, and what products add to that."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cached_property

import numpy as np

from moesys.balance.flow.flow_split import rows_at_least_load, split_costs
from moesys.balance.flow.step_cost import Prices, prices_of, row_seconds, with_experts
from moesys.balance.greedy.numbering import Numbers
from moesys.balance.greedy.robust_cost import MILLION, NO_LIMIT, draw_drifted
from moesys.balance.planning_problem import PlanningProblem
from moesys.config import Fsep, ModelShape
from moesys.cost import ExpertPass, pass_seconds, row_product_seconds
from moesys.layout import EMPTY
from moesys.load import IntArray

# Drift below which a load is judged by itself, and from which on by several; of many slots two must do.
LEAST_DRIFT, MUCH_DRIFT, MANY_SLOTS = 0.005, 0.1, 512


@dataclass(eq=False)
class StepJudge:
    """Costs are integers, in millionths of the mean rank's products. Layouts are in ``numbers``.

    ``drift``: of later loads from this one.
    """

    problem: PlanningProblem
    model: ModelShape
    numbers: Numbers
    drift: float
    _known: dict[bytes, tuple[Prices, int]] = field(default_factory=dict)

    def cost(self, expert_RS: IntArray) -> int:
        """Returns what steps of later loads cost with this layout."""
        prices, gradients = self._prices_with(expert_RS)
        cost = split_costs(self.later_KRE, expert_RS, self.numbers.node_R, prices, NO_LIMIT)
        num_loads = len(self.later_KRE)
        computed = int(prices.row[0]) * self.numbers.mean * num_loads
        return (int(cost) + gradients * num_loads) * MILLION // max(computed, 1)

    def products_beyond_rows(self, expert_RS: IntArray) -> int:
        """Returns what tiles, waves and memory add to the products of the busiest rank, on the first of the loads: it
        depends on how many experts a rank has.
        """
        rows_RE = rows_at_least_load(self.later_KRE[0], expert_RS, self.numbers.node_R)
        rows_RE = (rows_RE << self.numbers.scale) / self.problem.units_per_token
        passes: tuple[ExpertPass, ...] = ("forward", "input_gradients", "weight_gradients")
        cluster = self.problem.cluster
        seconds_R = sum(pass_seconds(rows_RE, self.model, cluster, of) for of in passes)
        of_flops = row_product_seconds(self.model, cluster)
        beyond = np.max(seconds_R) - of_flops * rows_RE.sum(axis=1).max()
        mean = (self.numbers.mean << self.numbers.scale) / self.problem.units_per_token
        return int(beyond / (row_seconds(self.model, cluster) * mean) * MILLION)

    @cached_property
    def later_KRE(self) -> IntArray:
        """Loads to judge by."""
        many = self.numbers.slots_R.sum() > MANY_SLOTS
        num_loads = 1 if self.drift < LEAST_DRIFT else 2 if self.drift < MUCH_DRIFT or many else 4
        tokens_KRE: IntArray = draw_drifted(self.numbers.tokens_RE, self.drift, num_loads)
        tokens_KRE.setflags(write=False)
        return tokens_KRE

    @cached_property
    def _prices(self) -> Prices:
        problem, numbers = self.problem, self.numbers
        units = problem.units_per_token / (1 << numbers.scale)
        return prices_of(self.model, problem.cluster, int(numbers.tokens_RE.sum()), problem.overlap, units)

    def _prices_with(self, expert_RS: IntArray) -> tuple[Prices, int]:
        """Prices of tokens beside the layout's experts on their way, and what their gradients cost; in the load's unit,
        of which a micro-batch's tokens are ``units_per_token``.
        """
        sharding, cluster = self.problem.sharding, self.problem.cluster
        if sharding is None:
            return self._prices, 0
        # a flat restore of different experts depends on their number alone
        flat = isinstance(sharding, Fsep) and sharding.flat
        key = ((expert_RS != EMPTY).sum(axis=1) if flat else expert_RS).tobytes()
        if key not in self._known:
            layout, units, scale = self.numbers.named(expert_RS), self.problem.units_per_token, self.numbers.scale
            self._known[key] = with_experts(self._prices, layout, self.model, cluster, sharding, units, scale)
        return self._known[key]
