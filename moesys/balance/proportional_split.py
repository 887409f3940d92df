"""Proportional: over all replicas, by the room that the other experts leave."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, ClassVar, Literal

import numpy as np

from moesys.balance.flow.token_routes import list_replicas, route_tokens
from moesys.balance.planning_problem import PlanningProblem, levels_of, nodes_of
from moesys.config import ClusterSpec
from moesys.config.member import Split
from moesys.layout import ExpertLayout, TokenPlan
from moesys.load import IntArray

if TYPE_CHECKING:
    from torch import Tensor

    from moesys.kernels.split.tables import SplitTables


class Proportional(Split):
    """Over all replicas, in proportion to the room that the other experts leave on their ranks."""

    kind: Literal["proportional"] = "proportional"
    on_device: ClassVar[bool] = True

    def device_split(
        self, tables: SplitTables, layout: ExpertLayout, cluster: ClusterSpec
    ) -> Callable[[Tensor, int], Tensor]:
        from moesys.kernels.split.baselines import proportional_split, proportional_tables

        shares = proportional_tables(tables, layout.replicas_RE)
        return lambda tokens_RE, turn: proportional_split(tokens_RE, shares, turn)

    def split(self, problem: PlanningProblem) -> TokenPlan:
        """Gives rank d a quota of expert e in proportion to the room that the other experts leave on d.

        Exactly: every other expert counts for floor(its tokens · its replicas on d / its replicas); the room is what
        that leaves of ceil(all tokens / ranks that hold experts), at least 0. Where no holder has room, replicas count
        alike. Quotas are rounded by largest remainder, ties by rank beginning at the (``turn`` mod holders)-th holder.
        Sources then fill the quotas with as few tokens on wires as can be. One pass, no search: better than even, not
        exact as ``FlowSplit`` is.
        """
        load, layout = problem.load, problem.layout_in_force
        replicas_RE = layout.replicas_RE
        holds_RE = replicas_RE > 0
        even_RE = load.tokens_E * replicas_RE // replicas_RE.sum(axis=0)
        others_RE = even_RE.sum(axis=1, keepdims=True) - even_RE
        mean = -(-load.total // int(holds_RE.any(axis=1).sum()))
        room_RE = np.where(holds_RE, np.maximum(mean - others_RE, 0), 0)
        # rooms lose low bits only where their product with an expert's tokens would not fit int64
        room_RE >>= max(0, mean.bit_length() + int(load.tokens_E.max()).bit_length() - 62)
        weight_RE = np.where(room_RE.any(axis=0), room_RE, replicas_RE)
        assigned_RE = _apportioned(load.tokens_E, weight_RE, holds_RE, problem.turn)
        table = list_replicas(layout.expert_RS, load.num_experts)
        tokens_P = assigned_RE[table.rank_P, table.expert_P]
        level_LR = levels_of(problem.cluster, nodes_of(problem.cluster))
        entries = route_tokens(load.tokens_RE, tokens_P, table, level_LR)
        return TokenPlan.by_construction(entries, load, layout)


def _apportioned(tokens_E: IntArray, weight_RE: IntArray, holds_RE: np.ndarray, turn: int) -> IntArray:
    """Divides ``tokens_E`` in proportion to each column's weights: floors, and one more for the largest remainders."""
    num_ranks = len(holds_RE)
    assigned_RE, remainder_RE = np.divmod(tokens_E * weight_RE, weight_RE.sum(axis=0))
    holders_E = holds_RE.sum(axis=0)
    order_RE = np.where(holds_RE, (np.cumsum(holds_RE, axis=0) - 1 - turn) % holders_E, num_ranks)
    # ranks by remainder, the largest first, then by order; those without the expert have the last order of all
    ranked_RE = np.lexsort((order_RE, -remainder_RE), axis=0)
    place_RE = np.empty_like(ranked_RE)
    np.put_along_axis(place_RE, ranked_RE, np.arange(num_ranks)[:, None], axis=0)
    return assigned_RE + (place_RE < tokens_E - assigned_RE.sum(axis=0))
