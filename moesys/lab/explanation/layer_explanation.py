"""Holds what is said of one layer: its load, what moved in its layout, who goes where, bytes and times."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from moesys.balance.seconds_certificate import SecondsCertificate


@dataclass(frozen=True)
class ExpertChange:
    """An expert whose replicas moved. ``load_over_mean``: its tokens over the mean's, in the load planned for."""

    expert: int
    replicas_before: int
    replicas_after: int
    gained_ranks: list[int]
    lost_ranks: list[int]
    load_over_mean: float


@dataclass(frozen=True)
class LayoutChange:
    """The newest plan that moved anything, against the layout that it replaced.

    since: the micro-batch from which on it is in use. history: the first and last micro-batch that it was planned on,
    which with ``Oracle`` is the one to come.
    max_over_mean_before, max_over_mean_after: the busiest rank over the mean, on the load that it was planned for.
    """

    since: int
    history: tuple[int, int]
    max_over_mean_before: float
    max_over_mean_after: float
    experts: list[ExpertChange]


@dataclass(frozen=True)
class Traffic:
    """All-to-alls of one kind: bytes of one, over all ranks, by link class; how many a step has; the milliseconds that
    one takes where it has the links for itself.
    """

    kind: str
    intra_node_bytes: int
    inter_node_bytes: int
    times: int
    alone_ms: float


@dataclass(frozen=True)
class LayerExplanation:
    """One layer.

    tokens_E: of each expert. experts_R: in each rank's slots; late_experts_R: in late ones, among them.
    change: None where the layout is still the first one. num_kept: plans after it that moved nothing.
    tokens_R: that each rank computes. busiest_rank: who has most; ``busiest_tokens`` says of its heaviest experts.
    max_over_mean: of ranks; under ``EvenSplit``; and what no split over this layout can be below.
    seconds: what a sequential step of this plan takes, and what that of no other takes less than.
    on_rank, within_node, between_nodes: tokens whose expert is on their own rank, on another of its node, elsewhere.
    mean_ms, critical_ms: the layer's share of ``StepExplanation``'s.
    """

    layer: int
    tokens_E: list[int]
    experts_R: list[list[int]]
    late_experts_R: list[list[int]]
    change: LayoutChange | None
    num_kept: int
    tokens_R: list[int]
    max_over_mean: float
    even_max_over_mean: float
    least_max_over_mean: float
    seconds: SecondsCertificate
    on_rank: int
    within_node: int
    between_nodes: int
    busiest_rank: int
    busiest_tokens: dict[int, int]
    traffic: list[Traffic]
    critical_ms: dict[str, float]
    mean_ms: dict[str, float]

    @property
    def expert_max_over_mean(self) -> float:
        return max(self.tokens_E) / np.mean(self.tokens_E).item() if any(self.tokens_E) else 1.0

    @property
    def num_tokens(self) -> int:
        return sum(self.tokens_E)

    def hottest(self, count: int) -> list[int]:
        """Experts with most tokens, the lower of equals first."""
        return sorted(range(len(self.tokens_E)), key=lambda expert: (-self.tokens_E[expert], expert))[:count]

    @property
    def starved(self) -> list[int]:
        """Experts without tokens."""
        return [expert for expert, tokens in enumerate(self.tokens_E) if not tokens]
