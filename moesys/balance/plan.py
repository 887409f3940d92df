"""The plans of a step: everything that is decided before a micro-batch runs.

A ``LayerPlan`` has the load, the layout and the split of one layer; a ``StepPlan`` has those of all layers of a step.
Both can be printed, and saved and loaded as JSON.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any

import numpy as np
from pydantic import BaseModel, StrictInt

from moesys.balance.planning_problem import PlanningProblem, check_model
from moesys.balance.run_planner import plan_layout, split_tokens
from moesys.config import ClusterSpec, LayoutInvariant, ModelShape, Strategy
from moesys.config.base import in_words, python_value
from moesys.config.member import RECORDED
from moesys.display import Columns, Display, counted
from moesys.layout import ExpertLayout, TokenPlan
from moesys.limits import rank_memory, too_many_rows
from moesys.load import LoadMatrix

if TYPE_CHECKING:
    from moesys.balance.certificate import Certificate


@dataclass(frozen=True, repr=False)
class LayerPlan(Display):
    """One layer's plan for one micro-batch: ``tokens`` holds its load and its layout."""

    tokens: TokenPlan
    turn: int

    @property
    def load(self) -> LoadMatrix:
        return self.tokens.load

    @property
    def layout(self) -> ExpertLayout:
        return self.tokens.layout

    @cached_property
    def certificate(self) -> Certificate:
        """The bounds on the busiest rank's tokens, for splits over this layout and for layouts of as many slots."""
        from moesys.balance.certificate import certify

        return certify(self.tokens, ClusterSpec(ranks_per_node=self.layout.num_ranks))

    def to_json(self) -> str:
        return json.dumps(self._fields(), default=python_value)

    @classmethod
    def from_json(cls, text: str | bytes) -> LayerPlan:
        """Raises ValueError for anything else than a plan."""
        try:
            return _LayerFields.model_validate_json(text).plan()
        except ValueError as error:
            raise ValueError(f"the text is no plan of a layer: {in_words(error)}") from None

    def _fields(self) -> dict[str, Any]:
        return {
            "turn": self.turn,
            "num_experts": self.load.num_experts,
            "tokens_RE": self.load.tokens_RE.tolist(),
            "expert_RS": self.layout.expert_RS.tolist(),
            "entries": self.tokens.entries.tolist(),
        }

    def _facts(self) -> str:
        return f"{self.tokens._facts()}, turn {self.turn}"

    def _columns(self) -> Columns:
        ranks = range(self.layout.num_ranks)
        experts_R = [" ".join(map(str, self.layout.experts_of(rank))) for rank in ranks]
        return {"rank": ranks, "tokens": self.tokens.tokens_R, "experts": experts_R}

    def __str__(self) -> str:
        tokens_R = self.tokens.tokens_R.tolist()
        head = f"{self.load.total} tokens, max/mean {self.tokens.max_over_mean:.3f}, turn {self.turn}"
        ranks = (
            f"rank {rank}: {tokens} tokens, experts {' '.join(map(str, self.layout.experts_of(rank)))}"
            for rank, tokens in enumerate(tokens_R)
        )
        return "\n".join([head, *ranks])


class _LayerFields(BaseModel):
    """The fields of a layer's plan in JSON. Others, such as a certificate, are ignored."""

    turn: StrictInt
    num_experts: StrictInt
    tokens_RE: list[list[StrictInt]]
    expert_RS: list[list[StrictInt]]
    entries: list[list[StrictInt]]

    def plan(self) -> LayerPlan:
        fields: dict[str, Any] = vars(self)
        load, layout = LoadMatrix(fields["tokens_RE"]), ExpertLayout(fields["expert_RS"], self.num_experts)
        # JSON does not say how long the rows of no entries are.
        return LayerPlan(TokenPlan(fields["entries"] or np.zeros((0, 4), dtype=np.int64), load, layout), self.turn)


class _StepFields(BaseModel):
    """The fields of a step's plan in JSON."""

    strategy: Strategy
    model: ModelShape
    cluster: ClusterSpec
    layers: list[_LayerFields]

    def plan(self) -> StepPlan:
        return StepPlan(self.strategy, self.model, self.cluster, tuple(layer.plan() for layer in self.layers))


def plan_layer(
    strategy: Strategy,
    model: ModelShape,
    cluster: ClusterSpec,
    load: LoadMatrix,
    *,
    layout: ExpertLayout | None = None,
    turn: int = 0,
) -> LayerPlan:
    """Returns the plan of ``strategy`` for one layer and micro-batch of load ``load``.

    ``layout``: the one that history gave, without late slots, which are filled here, last. ``layout=None`` plans it on
    ``load`` itself, as an oracle would, and so does ``lag=0``, whatever is given. ``turn``, the micro-batch number,
    rotates remainders. Raises ValueError where load, model, cluster and layout do not fit.
    """
    check_model(load, model)
    if strategy.split.follows_planner:
        problem = PlanningProblem.of_layout(load, cluster, strategy.slots(model, cluster), model)
        return LayerPlan(_in_blocks(strategy.balance.token_plan(problem), strategy), turn)
    if layout is None or strategy.lag == 0:
        slots = strategy.early_slots(model, cluster)
        layout = plan_layout(load, cluster, strategy.balance, slots, model=model, strategy=strategy)
    if late_R := strategy.late_slots_R(model, cluster):
        from moesys.balance.late_slots import fill_late_slots

        layout = fill_late_slots(load, layout, cluster, model, strategy.sharding, late_R)
    tokens = split_tokens(load, layout, cluster, strategy.split, turn, model=model, overlap=strategy.overlap)
    return LayerPlan(_in_blocks(tokens, strategy), turn)


def _in_blocks(tokens: TokenPlan, strategy: Strategy) -> TokenPlan:
    if not isinstance(strategy.reduction, LayoutInvariant):
        return tokens
    from moesys.balance.row_blocks import by_blocks

    return by_blocks(tokens, strategy.reduction.block_rows)


@dataclass(frozen=True, repr=False)
class StepPlan(Display):
    """All layers of a step: one micro-batch, forward and backward, under ``strategy`` on ``cluster``.

    Raises ValueError where layers, model and cluster do not fit.
    """

    strategy: Strategy
    model: ModelShape
    cluster: ClusterSpec
    layers: tuple[LayerPlan, ...]

    def __post_init__(self) -> None:
        if not self.layers:
            raise ValueError("layers is empty; a step has at least one layer")
        expected = (self.cluster.num_ranks, self.model.num_experts)
        for index, plan in enumerate(self.layers):
            if (found := plan.load.tokens_RE.shape) != expected:
                raise ValueError(
                    f"layers[{index}] is for {found[0]} ranks and {found[1]} experts, the step for "
                    f"{expected[0]} and {expected[1]}; plan all for the same cluster and model"
                )

    def to_json(self) -> str:
        fields = {
            "strategy": self.strategy.model_dump(mode="json"),
            "model": self.model.model_dump(mode="json"),
            "cluster": self.cluster.model_dump(mode="json"),
            "layers": [plan._fields() for plan in self.layers],
        }
        return json.dumps(fields, default=python_value)

    @classmethod
    def from_json(cls, text: str | bytes) -> StepPlan:
        """Raises ValueError for anything else than a plan."""
        try:
            # The plans in it are finished, so the classes of users' own planners need not be imported.
            return _StepFields.model_validate_json(text, context=RECORDED).plan()
        except ValueError as error:
            raise ValueError(f"the text is no plan of a step: {in_words(error)}") from None

    def _facts(self) -> str:
        worst = max(plan.tokens.max_over_mean for plan in self.layers)
        return (
            f"{self.strategy.name!r}, {counted(len(self.layers), 'layer')} of {self.model.num_experts} experts on "
            f"{counted(self.cluster.num_ranks, 'rank')}, {self.layers[0].load.total:,} tokens per layer, busiest rank "
            f"of the worst layer {worst:.3f} × the mean"
        )

    def _columns(self) -> Columns:
        each_L = [plan._columns() for plan in self.layers]
        layers = [layer for layer, columns in enumerate(each_L) for _ in columns["rank"]]
        return {"layer": layers, **{name: [cell for each in each_L for cell in each[name]] for name in each_L[0]}}


# --- plans that could not run ----------------------------------------------------------------------


def out_of_rows(strategy: Strategy, model: ModelShape, plans: Iterable[LayerPlan]) -> str:
    """Returns why the first plan with too many rows or tokens for a rank of a MegaKernel cannot run, or ""."""
    overlap = strategy.overlap
    if not overlap.reaches_memory:
        return ""
    declared = overlap.most_tokens if strategy.plans_on_device else None
    for plan in plans:
        most_tokens = int(plan.load.tokens_RE.sum(axis=1).max()) // model.top_k
        if declared is not None and most_tokens > declared:
            return (
                f"{most_tokens} tokens of a rank, but most_tokens={declared}; use MegaKernel(most_tokens={most_tokens})"
            )
        most_tokens = most_tokens if declared is None else declared
        if words := too_many_rows(overlap, plan.tokens, most_tokens, model.top_k):
            return words
    return ""


def why_not(
    micro_batches: Sequence[StepPlan], *, num_layers: int | None = None, recompute: bool = False
) -> tuple[str, ...]:
    """Returns all reasons why a step of these plans cannot run. ``num_layers``: the layers of the whole model, whose
    memory counts; None: those that are planned. ``recompute``: only one layer's rows are kept for backward.
    """
    return tuple(reason for reason in _reasons(micro_batches, num_layers, recompute) if reason)


def _reasons(micro_batches: Sequence[StepPlan], num_layers: int | None, recompute: bool) -> Iterator[str]:
    first = micro_batches[0]
    strategy, model, cluster = first.strategy, first.model, first.cluster
    plans = [plan for step in micro_batches for plan in step.layers]
    tokens_per_rank = max(plan.load.total for plan in plans) // (model.top_k * cluster.num_ranks)
    layers = num_layers or len(first.layers)
    yield strategy.overlap.out_of_reach(cluster)
    yield out_of_rows(strategy, model, plans)
    memory = rank_memory(strategy, model, cluster, layers, tokens_per_rank, recompute=recompute)
    yield memory.shortage(cluster, layers)
