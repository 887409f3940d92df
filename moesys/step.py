"""plan_layer and simulate: the one place where balance and overlap meet; pure functions.

A ``LayerPlan`` is everything that is decided before a micro-batch runs through a layer: who wants what, who holds what,
who goes where; a ``StepPlan`` is that for all layers of a step. Both can be printed, and survive a round trip through
JSON. ``split_tables`` is what the same split of counts on a device needs: balance and kernels meet here too.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any

import numpy as np

from moesys.balance import (
    Certificate,
    PlanningProblem,
    certify,
    fill_late_slots,
    plan_layout,
    plan_quotas,
    split_tokens,
)
from moesys.balance.blocks import by_blocks
from moesys.balance.topology import levels_of, link_domains_of, nodes_of
from moesys.config import (
    ClusterSpec,
    EvenSplit,
    FlowSplit,
    LayoutInvariant,
    MegaKernel,
    ModelShape,
    Proportional,
    Quotas,
    Split,
    Strategy,
    WithQuotas,
)
from moesys.config.member import RECORDED
from moesys.layout import ExpertLayout, TokenPlan
from moesys.load import LoadMatrix
from moesys.simulator.rest_of_step import RestOfStep
from moesys.simulator.simulation import Simulation
from moesys.simulator.step_program import run_step
from moesys.timeline import Timeline

if TYPE_CHECKING:
    import torch

    from moesys.kernels.split.tables import SplitTables
    from moesys.overlap.device_split import DeviceSplit


@dataclass(frozen=True)
class LayerPlan:
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
        """What bounds the busiest rank, of splits over this layout and of layouts with as many slots."""
        return certify(self.tokens, ClusterSpec(ranks_per_node=self.layout.num_ranks))

    def to_json(self) -> str:
        return json.dumps(self._fields())

    @classmethod
    def from_json(cls, text: str) -> LayerPlan:
        return cls._from_fields(json.loads(text))

    def _fields(self) -> dict[str, Any]:
        return {
            "turn": self.turn,
            "num_experts": self.load.num_experts,
            "tokens_RE": self.load.tokens_RE.tolist(),
            "expert_RS": self.layout.expert_RS.tolist(),
            "entries": self.tokens.entries.tolist(),
        }

    @classmethod
    def _from_fields(cls, fields: dict[str, Any]) -> LayerPlan:
        load = LoadMatrix(fields["tokens_RE"])
        layout = ExpertLayout(fields["expert_RS"], fields["num_experts"])
        # JSON does not say how long the rows of no entries are.
        entries = fields["entries"] or np.zeros((0, 4), dtype=np.int64)
        return cls(TokenPlan(entries, load, layout), fields["turn"])

    def __str__(self) -> str:
        tokens_R = self.tokens.tokens_R.tolist()
        head = f"{self.load.total} tokens, max/mean {self.tokens.max_over_mean:.3f}, turn {self.turn}"
        ranks = (
            f"rank {rank}: {tokens} tokens, experts {' '.join(map(str, self.layout.experts_of(rank)))}"
            for rank, tokens in enumerate(tokens_R)
        )
        return "\n".join([head, *ranks])


def plan_layer(
    strategy: Strategy,
    model: ModelShape,
    cluster: ClusterSpec,
    load: LoadMatrix,
    *,
    layout: ExpertLayout | None = None,
    turn: int = 0,
) -> LayerPlan:
    """The plan of ``strategy`` for one layer and micro-batch of load ``load``.

    ``layout``: the one that history gave, without late slots, which are filled here, last. ``layout=None`` plans it on
    ``load`` itself, as an oracle would, and so does ``lag=0``, whatever is given. ``turn``, the micro-batch number,
    rotates remainders. Raises ValueError where load, model, cluster and layout do not fit.
    """
    if load.num_experts != model.num_experts:
        raise ValueError(
            f"the load counts {load.num_experts} experts but num_experts={model.num_experts}; "
            "give one column of tokens_RE an expert"
        )
    if isinstance(strategy.split, Quotas) and isinstance(strategy.balance, WithQuotas):
        problem = PlanningProblem.of_layout(load, cluster, strategy.slots(model, cluster), model)
        return LayerPlan(_in_blocks(plan_quotas(problem, strategy.balance), strategy), turn)
    if layout is None or strategy.lag == 0:
        slots = strategy.early_slots(model, cluster)
        layout = plan_layout(load, cluster, strategy.balance, slots, model=model, strategy=strategy)
    if late := strategy.late_slots:
        slots_R = strategy.slots(model, cluster)
        layout = fill_late_slots(load, layout, cluster, model, strategy.sharding, late, slots_R)
    tokens = split_tokens(load, layout, cluster, strategy.split, turn, model=model, overlap=strategy.overlap)
    return LayerPlan(_in_blocks(tokens, strategy), turn)


def _in_blocks(tokens: TokenPlan, strategy: Strategy) -> TokenPlan:
    reduction = strategy.reduction
    return by_blocks(tokens, reduction.block_rows) if isinstance(reduction, LayoutInvariant) else tokens


def split_tables(
    layout: ExpertLayout, cluster: ClusterSpec, config: FlowSplit, device: torch.device | str
) -> SplitTables:
    """Index tables on ``device``, made once a layout, with which ``kernels.split.split`` gives the plans of
    ``split_tokens`` for counts that are there, and the host waits for none.

    Raises ValueError when layout and cluster are not for the same ranks, for ``traffic="exact"`` and for a cap on
    traffic, which only the host can keep.
    """
    if layout.num_ranks != cluster.num_ranks:
        raise ValueError(
            f"the layout is for {layout.num_ranks} ranks, the cluster has {cluster.num_ranks}; "
            "plan both for the same ranks"
        )
    if config.traffic != "fast":
        raise ValueError(f"traffic={config.traffic!r} is solved on the host only; use traffic='fast', or split_tokens")
    if config.max_inter_node is not None:
        raise ValueError(
            f"max_inter_node={config.max_inter_node} takes a search over limits, which runs on the host only; "
            "use max_inter_node=None, or split_tokens"
        )
    # Here, as plans and simulations do without torch.
    from moesys.kernels.split.tables import tables_of

    level_LR = levels_of(cluster, nodes_of(cluster))
    return tables_of(layout.expert_RS, layout.num_experts, link_domains_of(cluster), level_LR, device)


def split_on_device(config: Split) -> bool:
    """Whether ``device_split`` knows it."""
    match config:
        case FlowSplit():
            return config.traffic == "fast" and config.max_inter_node is None
        case EvenSplit() | Proportional():
            return True
        case Quotas():
            return False
        case _:
            return False


def plans_on_device(strategy: Strategy) -> bool:
    """Whether several ranks plan without a host that waits: what a rank may have is declared beforehand, and the split
    is one that devices make.
    """
    overlap = strategy.overlap
    return isinstance(overlap, MegaKernel) and overlap.most_tokens is not None and split_on_device(strategy.split)


def routes_on_device(strategy: Strategy, num_nodes: int) -> bool:
    """Whether devices can plan and route what travels as messages: a split of theirs, over a layout that does not
    follow from the counts, and rows that go to their experts at once.
    """
    overlap = strategy.overlap
    return (
        not isinstance(overlap, MegaKernel)
        and not overlap.crosses_once(num_nodes)
        and split_on_device(strategy.split)
        and not strategy.plans_on_counts
        and not isinstance(strategy.reduction, LayoutInvariant)
    )


def device_split(layout: ExpertLayout, cluster: ClusterSpec, config: Split, device: torch.device | str) -> DeviceSplit:
    """What makes the plans of ``split_tokens`` on ``device``, once a layout. Raises ValueError as ``split_tables``, and
    for a split of one's own.
    """
    # Here, as plans and simulations do without Triton.
    from moesys.kernels.split.even import even_tables
    from moesys.kernels.split.proportional import proportional_tables
    from moesys.overlap.device_split import DeviceSplit

    # Of the layout alone, whatever splits over it.
    tables = split_tables(layout, cluster, config if isinstance(config, FlowSplit) else FlowSplit(), device)
    match config:
        case EvenSplit():
            return DeviceSplit(tables, even_tables(layout.expert_RS, nodes_of(cluster), device))
        case Proportional():
            return DeviceSplit(tables, proportional_tables(tables, layout.replicas_RE))
        case FlowSplit():
            return DeviceSplit(tables, None)
        case Quotas():
            raise ValueError("split=Quotas() is made by a planner on the hosts; use FlowSplit(), or no most_tokens")
        case _:
            raise ValueError(f"split={config.kind} is a split of one's own, which plans on the host; use split_tokens")


@dataclass(frozen=True)
class StepPlan:
    """All layers of a step: one micro-batch, forward and backward, under ``strategy`` on ``cluster``.

    ``previous``: the layouts of the micro-batch before, layer by layer, for readers who ask what moved. No time depends
    on them: FSEP restores every slot of every layout, and EP's owners, who lend, follow from the ranks.

    Raises ValueError where layers, model and cluster do not fit.
    """

    strategy: Strategy
    model: ModelShape
    cluster: ClusterSpec
    layers: tuple[LayerPlan, ...]
    previous: tuple[ExpertLayout, ...] | None = None

    def __post_init__(self) -> None:
        if not self.layers:
            raise ValueError("layers is empty; a step has at least one layer")
        if self.previous is not None and len(self.previous) != len(self.layers):
            raise ValueError(
                f"previous has {len(self.previous)} layouts for {len(self.layers)} layers; give one a layer, or None"
            )
        expected = (self.cluster.num_ranks, self.model.num_experts)
        named = [(f"layers[{index}]", plan.layout) for index, plan in enumerate(self.layers)]
        named += [(f"previous[{index}]", layout) for index, layout in enumerate(self.previous or ())]
        for name, layout in named:
            if (layout.num_ranks, layout.num_experts) != expected:
                raise ValueError(
                    f"{name} is for {layout.num_ranks} ranks and {layout.num_experts} experts, the step for "
                    f"{expected[0]} and {expected[1]}; plan all for the same cluster and model"
                )

    def to_json(self) -> str:
        fields = {
            "strategy": self.strategy.model_dump(mode="json"),
            "model": self.model.model_dump(mode="json"),
            "cluster": self.cluster.model_dump(mode="json"),
            "layers": [plan._fields() for plan in self.layers],
            "previous": None if self.previous is None else [layout.expert_RS.tolist() for layout in self.previous],
        }
        return json.dumps(fields)

    @classmethod
    def from_json(cls, text: str) -> StepPlan:
        fields: dict[str, Any] = json.loads(text)
        model = ModelShape.model_validate(fields["model"])
        previous = fields["previous"]
        return cls(
            # Its plans are made, so that planners of somebody's own need not be there.
            strategy=Strategy.model_validate(fields["strategy"], context=RECORDED),
            model=model,
            cluster=ClusterSpec.model_validate(fields["cluster"]),
            layers=tuple(LayerPlan._from_fields(plan) for plan in fields["layers"]),
            previous=None if previous is None else tuple(ExpertLayout(rows, model.num_experts) for rows in previous),
        )

    def __str__(self) -> str:
        head = f"{self.strategy.name}: {len(self.layers)} layers on {self.cluster.num_ranks} ranks"
        return "\n".join([head, *(f"layer {index}: {plan}" for index, plan in enumerate(self.layers))])


def simulate(step_plan: StepPlan, *, other_seconds: float = 0.0, latency_seconds: float = 0.0) -> Timeline:
    """``simulation`` of one micro-batch, of which only the timeline is wanted.

    ``other_seconds``: forward of the rest of a layer; ``latency_seconds``: what every all-to-all takes at least.
    """
    return simulation([step_plan], RestOfStep(other_seconds=other_seconds, latency_seconds=latency_seconds)).timeline


def simulation(micro_batches: Sequence[StepPlan], rest: RestOfStep | None = None) -> Simulation:
    """What a step of these micro-batches would do on their cluster, by the cost model: its timeline, and the critical
    path through it. ``simulator.step_program`` says what that knows.

    Raises ValueError for micro-batches of different strategies, models or clusters, and for none.
    """
    if not micro_batches:
        raise ValueError("micro_batches is empty; a step has at least one")
    first = micro_batches[0]
    for index, other in enumerate(micro_batches):
        if (other.strategy, other.model, other.cluster) != (first.strategy, first.model, first.cluster):
            raise ValueError(
                f"micro_batches[{index}] has another strategy, model or cluster than the first; a step has one of each"
            )
    plans = [[plan.tokens for plan in step_plan.layers] for step_plan in micro_batches]
    return run_step(first.strategy, first.model, first.cluster, plans, rest)
