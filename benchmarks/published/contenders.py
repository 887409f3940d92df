"""A planner, a predictor and a split that are compared, and the layouts that they give on a layer's routing."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from moesys.balance import split_tokens
from moesys.config import Balance, ClusterSpec, Eplb, EvenSplit, Fsep, ModelShape, Predictor, Split, Strategy
from moesys.layout import ExpertLayout, TokenPlan
from moesys.layout_schedule import PlanSource
from moesys.load import IntArray, LoadMatrix
from moesys.replay import Moment, Replayed, replay_layer


@dataclass(frozen=True)
class Contender:
    """A layout planner, the split that its layouts are used with, and the predictor of the load that it plans for."""

    balance: Balance
    split: Split
    predictor: Predictor

    def split_over(self, load: LoadMatrix, layout: ExpertLayout, cluster: ClusterSpec, turn: int) -> TokenPlan:
        """Returns ``split_tokens``, except that the even split that goes with EPLB ignores nodes."""
        if isinstance(self.balance, Eplb) and isinstance(self.split, EvenSplit):
            cluster = ClusterSpec(ranks_per_node=cluster.num_ranks)
        return split_tokens(load, layout, cluster, self.split, turn)


def layouts_of(
    contender: Contender,
    tokens_SRE: IntArray,
    when: Iterable[Moment] | None,
    cluster: ClusterSpec,
    slots: int,
    planner: PlanSource | None = None,
) -> Iterator[Replayed]:
    """Replays a layer, planned anew with every load; each layout is planned on the loads that are known by then."""
    model = ModelShape(hidden_size=1, intermediate_size=1, num_experts=tokens_SRE.shape[2], top_k=1)
    strategy = Strategy(
        name="contender",
        sharding=Fsep(slots_per_rank=slots),
        balance=contender.balance,
        predictor=contender.predictor,
        split=contender.split,
    )
    return replay_layer(strategy, model, cluster, tokens_SRE, moments=when, planner=planner)
