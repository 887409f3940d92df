"""plan_layer: the one place where balance and overlap meet; pure functions.

A ``LayerPlan`` is everything that is decided before a micro-batch runs through a layer: who wants what, who holds what,
who goes where. It can be printed, and survives a round trip through JSON.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any

from moesys.balance import plan_layout, split_tokens
from moesys.config import ClusterSpec, ModelShape, Strategy
from moesys.layout import ExpertLayout, TokenPlan
from moesys.load import LoadMatrix


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

    def to_json(self) -> str:
        return json.dumps(
            {
                "turn": self.turn,
                "num_experts": self.load.num_experts,
                "tokens_RE": self.load.tokens_RE.tolist(),
                "expert_RS": self.layout.expert_RS.tolist(),
                "entries": self.tokens.entries.tolist(),
            }
        )

    @classmethod
    def from_json(cls, text: str) -> LayerPlan:
        fields: dict[str, Any] = json.loads(text)
        load = LoadMatrix(fields["tokens_RE"])
        layout = ExpertLayout(fields["expert_RS"], fields["num_experts"])
        return cls(TokenPlan(fields["entries"], load, layout), fields["turn"])

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

    ``layout=None`` plans the layout on ``load`` itself, as an oracle would. ``turn``, the micro-batch number, rotates
    remainders. Raises ValueError where load, model, cluster and layout do not fit.
    """
    if load.num_experts != model.num_experts:
        raise ValueError(
            f"the load counts {load.num_experts} experts but num_experts={model.num_experts}; "
            "give one column of tokens_RE an expert"
        )
    if layout is None:
        layout = plan_layout(load, cluster, strategy.balance, strategy.slots(model, cluster))
    return LayerPlan(split_tokens(load, layout, cluster, strategy.split, turn), turn)
