"""What one rank does for the cases of one layer: steps of the layer, and the even steps that calibration looks at.

R ranks, E experts, H hidden, T tokens of a rank, K top-k.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import torch
import torch.distributed as dist
from torch import Tensor

from benchmarks.harness.contest import EqualBits, Outcome, in_words, relative_difference
from benchmarks.harness.layer_steps import LayerSteps, ResidualLayers, hold_steps, rank_generator
from benchmarks.shaped.cases import NOT_TIMED, SEQUENTIAL, ShapedCase
from moesys.balance.plan import LayerPlan
from moesys.config import Strategy
from moesys.config.overlap import Pipelined
from moesys.moe.layer import MoELayer

# How far a token leans towards its experts: farther than initial noise could turn it.
_LEANING = 6.0
# The even steps that calibration looks at have these shares of a case's tokens, neither of them all, and these chunks.
MOST_TOKENS, SOME_TOKENS, CHUNKS = 0.75, 0.375, 4
PIECES = ("most", "some", "chunks")
# The tolerance for float32 results that are summed in another order.
_NEAR = 1e-5


@dataclass(frozen=True)
class StepMetrics:
    """Further results of one rank's steps.

    Attributes:
        blocked_ms: the time in each repetition for which communication, or another rank, blocked the step.
        plans: the plan of each layer, as ``LayerPlan.to_json``, in each repetition, or only in the last one.
    """

    blocked_ms: list[float]
    plans: list[list[str]]


class BatchSteps(LayerSteps):
    """Steps of one layer on the micro-batches ``x_STH`` in turn, with the same gradient. plans: of each step."""

    def __init__(self, layer: MoELayer, x_STH: Sequence[Tensor], dy_TH: Tensor) -> None:
        super().__init__(ResidualLayers([layer]), x_STH[0], dy_TH)
        self._x_STH, self.plans = x_STH, list[LayerPlan]()

    def step(self) -> Tensor:
        self.x_TH = self._x_STH[len(self.plans) % len(self._x_STH)].requires_grad_()
        y_TH = super().step()
        self.plans += [layer.last_plan for layer in self.layers if layer.last_plan is not None]
        return y_TH


def measure(case: ShapedCase, repeats: int) -> dict[str, Outcome]:
    """Times every strategy of the case and, interleaved with them, the even steps, so that other load on the machine
    slows all of them. All ranks call it together. ``Outcome.metrics`` are ``StepMetrics``. Moving loads have one
    repetition for each micro-batch that is timed.

    Output and dx must have the bits of the first strategy's, or be near them where nodes send sums.
    """
    steps = {strategy.name: layer_steps(case, strategy) for strategy in case.strategies} | _even_steps(case)
    if case.routing:
        repeats = len(case.tokens_SRE) - NOT_TIMED
    equal_bits, first = EqualBits("output", "dx"), dict[str, Tensor]()
    summed = [strategy.name for strategy in case.strategies if strategy.overlap.sums_by_node(case.num_hosts)]

    def wrong(name: str, results: Mapping[str, Tensor]) -> str:
        if name in PIECES:
            return ""
        if name not in summed:
            first.update(first or results)
            return equal_bits(name, results)
        return in_words([of for of in ("output", "dx") if relative_difference(results[of], first[of]) > _NEAR])

    def metrics(of: BatchSteps) -> StepMetrics:
        timed = of.plans[-repeats:] if case.routing else of.plans[-1:]
        return StepMetrics(of.blocked_ms(repeats), [[plan.to_json()] for plan in timed])

    return hold_steps(steps, wrong, metrics, repeats)


def layer_steps(case: ShapedCase, strategy: Strategy, tokens_share: float = 1.0) -> BatchSteps:
    """Returns the steps of one strategy, on the input and the gradient that all strategies of a case share."""
    layer = MoELayer(case.shape, strategy, cluster=case.cluster)
    with torch.no_grad():
        layer.router.weight.zero_().fill_diagonal_(1.0)
    generator = rank_generator()
    num_tokens = round(case.num_tokens[dist.get_rank()] * tokens_share)
    x_TH, dy_TH = (torch.randn(num_tokens, case.shape.hidden_size, generator=generator) for _ in range(2))
    leaning_K = 2 * _LEANING - torch.arange(case.shape.top_k)
    chosen_STK = [
        torch.stack(chosen_experts(case, num_tokens, generator, batch), dim=1)
        for batch in range(len(case.tokens_SRE) if case.routing else 1)
    ]
    return BatchSteps(layer, [x_TH.scatter(1, at_TK, leaning_K.expand(at_TK.shape)) for at_TK in chosen_STK], dy_TH)


def chosen_experts(case: ShapedCase, num_tokens: int, generator: torch.Generator, batch: int = 0) -> list[Tensor]:
    """Returns the experts that each token is to choose in a micro-batch, K tensors [T]. Even choices, single ones and
    those of ``routing`` have shares as exact as whole tokens allow.
    """
    num_experts = case.shape.num_experts
    if case.routing:
        # Row by row, so that the tokens of an expert, at most T, are distinct.
        tokens_E = torch.from_numpy(case.tokens_SRE[batch, dist.get_rank()].copy())
        order_E = torch.randperm(num_experts, generator=generator)
        return list(order_E.repeat_interleave(tokens_E[order_E]).view(-1, num_tokens))
    if case.popularity and case.shape.top_k > 1:
        noise_TE = -torch.empty(num_tokens, num_experts).exponential_(generator=generator).log()
        preferred_TE = (torch.tensor(case.popularity).log() + noise_TE).argsort(dim=1, descending=True)
        return list(preferred_TE[:, : case.shape.top_k].T)
    order_T = torch.randperm(num_tokens, generator=generator)
    if case.popularity:
        bounds = torch.tensor(case.popularity, dtype=torch.float64).cumsum(0)[:-1] * num_tokens
        return [torch.bucketize(order_T.double(), bounds, right=True)]
    step = 1 + order_T // num_experts % max(1, num_experts - 1)
    return [(order_T + place * step) % num_experts for place in range(case.shape.top_k)]


def _even_steps(case: ShapedCase) -> dict[str, BatchSteps]:
    """Returns the steps of even tokens: ``"most"`` of the case's tokens, ``"some"``, and most of them in ``"chunks"``.
    All ranks compute at once, as in training.
    """
    chunked = SEQUENTIAL.replace(overlap=Pipelined(chunks=CHUNKS))
    wanted = (SEQUENTIAL, MOST_TOKENS), (SEQUENTIAL, SOME_TOKENS), (chunked, MOST_TOKENS)
    even = even_case(case)
    return {name: layer_steps(even, strategy, share) for name, (strategy, share) in zip(PIECES, wanted, strict=True)}


def even_case(case: ShapedCase) -> ShapedCase:
    """Returns the case with the same tokens, as many for every expert and rank, so that ranks compute equally much."""
    num_ranks = len(case.num_tokens)
    num_tokens = (sum(case.num_tokens) // num_ranks,) * num_ranks
    return replace(case, num_tokens=num_tokens, popularity=(), routing="", strategies=(SEQUENTIAL,))
