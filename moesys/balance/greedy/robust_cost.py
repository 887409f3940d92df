"""Robust cost: how well a layout will do on later counts, measured on scenarios; compiled.

*Scenarios* are the load that a layout is planned for, and loads around it. On each, a layout costs what the best split
leaves above the mean on the busiest rank, and, so that a step towards that counts, on all ranks together, divided by
their number; in millionths of the mean. The robust cost is the weighted sum. Perfection on the load itself is easy and
fragile; what later counts ask for is paths on which tokens can give way, and scenarios measure it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import NamedTuple

import numpy as np

from moesys.balance.flow.flow_split import rows_at_least_load, split_costs
from moesys.balance.flow.max_load import min_max_flow, new_flow
from moesys.balance.flow.step_cost import Prices, prices_of, row_seconds, with_experts
from moesys.balance.flow.token_routes import list_replicas
from moesys.balance.greedy.numbering import Numbers
from moesys.balance.planning_problem import PlanningProblem
from moesys.compiled import borrowing, compiled
from moesys.config import Fsep, ModelShape
from moesys.cost import ExpertPass, pass_seconds, row_product_seconds
from moesys.layout import EMPTY
from moesys.load import IntArray

MILLION = 1_000_000
NO_LIMIT = 1 << 60

# Standard deviations of experts' loads, in percent: a later sample's, and where they jump.
DRIFT_PERCENT = 15
JUMP_PERCENT = 45
# What the load itself costs comes first; then a jump counts a quarter of a drift.
WEIGHTS = (1000, 4, 1)


class Scenarios(NamedTuple):
    """Loads to be ready for: ``tokens_KE`` int64 [K, E], the first one the load itself, and ``weight_K`` int64."""

    tokens_KE: IntArray
    weight_K: IntArray


@compiled
def draw_scenarios(tokens_E, expert_D, num_near, num_far):  # type: ignore[no-untyped-def]
    """Draws the load of some experts, ``num_near`` loads that drifted, and ``num_far`` that jumped; a pure function, in
    integers.

    Every expert's tokens are multiplied by 1 + σ·z, at least 0, with a roughly normal z from a hash.
    """
    tokens_KD = np.empty((1 + num_near + num_far, expert_D.size), np.int64)
    weight_K = np.empty(1 + num_near + num_far, np.int64)
    tokens_KD[0] = tokens_E[expert_D]
    weight_K[0] = WEIGHTS[0]
    for scenario in range(1, 1 + num_near + num_far):
        near = scenario <= num_near
        weight_K[scenario] = WEIGHTS[1] if near else WEIGHTS[2]
        percent = DRIFT_PERCENT if near else JUMP_PERCENT
        for place, expert in enumerate(expert_D):
            factor = max(147_800 + _bell(mixed_bits(scenario, expert)) * percent * 10, 0)
            tokens_KD[scenario, place] = tokens_E[expert] * factor // 147_800
    return Scenarios(tokens_KD, weight_K)


@compiled
def draw_drifted(tokens_RE, drift, num_loads):  # type: ignore[no-untyped-def]
    """Returns loads [K, R, E], int64, as they may be when a share ``drift`` of experts' popularity has been drawn anew,
    as in ``moesys.traces.generate``: its logarithm comes nearer to the mean of all, and gets noise of its own.

    Of two loads that follow one another one has the other's noise, with the other sign. All have as many tokens.
    """
    num_ranks, num_experts = tokens_RE.shape
    log_E = np.log(tokens_RE.sum(axis=0) + 1.0)
    mean, deviation = log_E.mean(), np.sqrt(drift * (2 - drift)) * log_E.std()
    tokens_KRE = np.empty((num_loads, num_ranks, num_experts), np.int64)
    factor_E = np.empty(num_experts)
    for load in range(num_loads):
        total = drifted = 0.0
        for expert in range(num_experts):
            z = _bell(mixed_bits(load // 2, expert)) / 147.8 * (1 - 2 * (load % 2))
            nearer = (1 - drift) * log_E[expert] + drift * mean
            factor_E[expert] = np.exp(nearer + deviation * z - log_E[expert])
            for rank in range(num_ranks):
                total += tokens_RE[rank, expert]
                drifted += tokens_RE[rank, expert] * factor_E[expert]
        for rank in range(num_ranks):
            for expert in range(num_experts):
                tokens = tokens_RE[rank, expert] * factor_E[expert] * total / max(drifted, 1.0)
                tokens_KRE[load, rank, expert] = np.int64(tokens + 0.5)
    return tokens_KRE


@borrowing
def _bell(bits):  # type: ignore[no-untyped-def]
    """Returns a roughly normal number of mean 0 and standard deviation 147.8: the sum of the lowest four bytes, less
    510.
    """
    total = np.int64(0)
    for _ in range(4):
        total += np.int64(bits & np.uint64(255))
        bits >>= np.uint64(8)
    return total - 510


@borrowing
def mixed_bits(scenario, expert):  # type: ignore[no-untyped-def]
    """Returns 64 well-mixed bits (the finaliser of SplitMix64)."""
    bits = np.uint64(scenario) * np.uint64(0x9E3779B97F4A7C15) + np.uint64(expert + 1) * np.uint64(0xD1B54A32D192ED03)
    bits = (bits ^ (bits >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    bits = (bits ^ (bits >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return bits ^ (bits >> np.uint64(31))


@compiled
def robust_cost(scenarios, expert_RS, limit, cost_K):  # type: ignore[no-untyped-def]
    """Returns the weighted sum of what the layout costs in each scenario, and writes these to ``cost_K``.

    Scenarios are given up where the sum exceeds ``limit``.
    """
    num_experts = scenarios.tokens_KE.shape[1]
    table = list_replicas(expert_RS, num_experts)
    flow = new_flow(table)
    num_ranks = table.holds_R.sum()
    cost = 0
    for scenario in range(cost_K.size):
        total = 0
        for expert in range(num_experts):
            total += scenarios.tokens_KE[scenario, expert]
        mean = -(-total // num_ranks)
        above = min_max_flow(scenarios.tokens_KE[scenario], table, flow) - mean
        cost_K[scenario] = (above + -(-flow.overflow[0] // num_ranks)) * MILLION // max(mean, 1)
        cost += cost_K[scenario] * scenarios.weight_K[scenario]
        if cost > limit:
            break
    return cost


# Drift below which a load is judged by itself, and from which on by several; of many slots two must do.
LEAST_DRIFT, MUCH_DRIFT, MANY_SLOTS = 0.005, 0.1, 512


@dataclass(eq=False)
class StepJudge:
    """Costs are integers, in millionths of the mean rank's products. Layouts are in ``numbers``.

    ``drift``: of later loads from this one; ``later``: loads to judge by instead of such, int64 [R, E], in the caller's
    numbers and the problem's units.
    """

    problem: PlanningProblem
    model: ModelShape
    numbers: Numbers
    drift: float
    later: Sequence[IntArray] = ()
    _known: dict[bytes, tuple[Prices, int]] = field(default_factory=dict)

    def cost(self, expert_RS: IntArray, most: int = NO_LIMIT) -> int:
        """Returns what steps of later loads cost with this layout; if that is ``most`` or more, anything from there."""
        prices, gradients = self._prices_with(expert_RS)
        num_loads = len(self.later_KRE)
        computed = max(int(prices.row[0]) * self.numbers.mean * num_loads, 1)
        limit = min(most * computed // MILLION + 1 - gradients * num_loads, NO_LIMIT)
        cost = split_costs(self.later_KRE, expert_RS, self.numbers.node_R, prices, limit)
        return (int(cost) + gradients * num_loads) * MILLION // computed

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
        mean_tokens = (self.numbers.mean << self.numbers.scale) / self.problem.units_per_token
        return int(beyond / (row_seconds(self.model, cluster) * mean_tokens) * MILLION)

    @cached_property
    def later_KRE(self) -> IntArray:
        """Loads to judge by."""
        n, later = self.numbers, [self.numbers.of_load(tokens_RE) for tokens_RE in self.later]
        many = n.slots_R.sum() > MANY_SLOTS
        num_loads = 1 if self.drift < LEAST_DRIFT else 2 if self.drift < MUCH_DRIFT or many else 4
        tokens_KRE = np.stack(later) if later else draw_drifted(n.tokens_RE, self.drift, num_loads)
        # compiled loops are compiled anew for arrays that may be written
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
            how = (layout, self.model, cluster, sharding, units, scale)
            self._known[key] = with_experts(self._prices, *how)
        return self._known[key]
