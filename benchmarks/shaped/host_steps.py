"""What one rank of ``bench shaped`` does: steps of MoE layers over a link, and the pieces that a step is made of.

R ranks, E experts, H hidden, I expert width, T tokens of a rank, K top-k.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial

import torch
import torch.distributed as dist
from torch import Tensor

from benchmarks.harness.contest import EqualBits, Outcome, in_words, relative_difference
from benchmarks.harness.layer_steps import LayerSteps, ResidualLayers, hold_steps, rank_generator
from moesys.config import ClusterSpec, ModelShape, Pipelined, Strategy, presets
from moesys.lab.runs.stopwatch import interleave, repeated_ms, wall_ms
from moesys.moe.layer import MoELayer
from moesys.overlap.comm.channel import Channel
from moesys.overlap.comm.messages import exchange
from moesys.overlap.comm.record import Meter, Recorder

# How far a token leans towards the experts that it is to choose: more than initial noise could turn.
_LEANING = 6.0
# Of the steps that calibration looks at: shares of a case's tokens, none of them all, and chunks.
MOST_TOKENS, SOME_TOKENS, CHUNKS = 0.75, 0.375, 4
PIECES = ("most", "some", "chunks")
# Products that are timed beside messages: as many rows as a chunk gives an expert, and milliseconds of them.
_PRODUCT_ROWS, _PRODUCTS = 128, 10
# To see how late they come, for each repetition.
_MESSAGES = 10
# Of float32 results that are summed in another order.
_NEAR = 1e-5


@dataclass(frozen=True)
class ShapedCase:
    """Strategies that do the same work over the same links; the first is the baseline.

    num_tokens: of each rank, [R].
    popularity: share of the choices that each expert has, [E]; empty for equal ones. Tokens of several choices are
        drawn, and choose the popular ones less often than that.
    """

    name: str
    mbit_per_s: float
    latency_us: float
    num_tokens: tuple[int, ...]
    shape: ModelShape
    strategies: tuple[Strategy, ...]
    popularity: tuple[float, ...] = ()
    ranks_per_host: int = 1

    @property
    def num_hosts(self) -> int:
        return len(self.num_tokens) // self.ranks_per_host

    @property
    def cluster(self) -> ClusterSpec:
        """The links as declared, by which layouts are planned; how fast a rank computes is for calibration to say."""
        links = {"inter_node_gb_per_s": self.mbit_per_s / 8e3, "inter_node_us": self.latency_us}
        return presets.cpu(self.ranks_per_host, self.num_hosts).replace(**links)


@dataclass(frozen=True)
class Stepped:
    """Of one rank's steps. blocked_ms: by communication, or by waiting for another rank, in each repetition. plans: of
    each layer in the newest step, as ``LayerPlan.to_json``.
    """

    blocked_ms: list[float]
    plans: list[str]


def steps_of(case: ShapedCase, strategy: Strategy, tokens_share: float = 1.0) -> LayerSteps:
    """Of one strategy, on the input and the gradient that all strategies of a case share."""
    layer = MoELayer(case.shape, strategy, cluster=case.cluster)
    with torch.no_grad():
        layer.router.weight.zero_().fill_diagonal_(1.0)
    generator = rank_generator()
    num_tokens = round(case.num_tokens[dist.get_rank()] * tokens_share)
    x_TH, dy_TH = (torch.randn(num_tokens, case.shape.hidden_size, generator=generator) for _ in range(2))
    for place, expert_T in enumerate(chosen_experts(case, num_tokens, generator)):
        x_TH[torch.arange(num_tokens), expert_T] = 2 * _LEANING - place
    return LayerSteps(ResidualLayers([layer]), x_TH, dy_TH)


def chosen_experts(case: ShapedCase, num_tokens: int, generator: torch.Generator) -> list[Tensor]:
    """K tensors [T]: the experts that each token is to choose; of even choices, and of one a token, in shares as exact
    as whole tokens allow.
    """
    num_experts = case.shape.num_experts
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


def measure(case: ShapedCase, repeats: int) -> dict[str, Outcome]:
    """Every strategy of the case and, interleaved with them, what calibration wants of computing, so that whatever else
    the machine does slows both; a collective of all ranks. ``Outcome.metrics`` are ``Stepped``.
    """
    strategies = {strategy.name: steps_of(case, strategy) for strategy in case.strategies}
    return _held(case, strategies | _pieces(case), repeats)


def measure_pieces(case: ShapedCase, repeats: int) -> dict[str, Outcome]:
    """What calibration wants of computing, by itself; a collective of all ranks."""
    return _held(case, _pieces(case), repeats)


def _held(case: ShapedCase, steps: Mapping[str, LayerSteps], repeats: int) -> dict[str, Outcome]:
    """Output and dx must be those of the first strategy, where sums of nodes come home nearly; pieces are no case's
    own.
    """
    equal_bits, first = EqualBits("output", "dx"), dict[str, Tensor]()
    summed = [strategy.name for strategy in case.strategies if strategy.overlap.sums_by_node(case.num_hosts)]

    def wrong(name: str, results: Mapping[str, Tensor]) -> str:
        if name in PIECES:
            return ""
        if name not in summed:
            first.update(first or results)
            return equal_bits(name, results)
        far = [of for of in ("output", "dx") if relative_difference(results[of], first[of]) > _NEAR]
        return in_words(far)

    def stepped(of: LayerSteps) -> Stepped:
        plans = [layer.last_plan for layer in of.layers]
        return Stepped(of.blocked_ms(repeats), [plan.to_json() for plan in plans if plan is not None])

    return hold_steps(steps, wrong, stepped, repeats)


def _pieces(case: ShapedCase) -> dict[str, LayerSteps]:
    """``PIECES``: steps of even tokens that are none of the case's own: of ``"most"`` of its tokens, of ``"some"``, and
    of most in ``"chunks"``. All ranks compute at once, as in training.
    """
    even = even_case(case)
    sequential = even.strategies[0]
    chunked = sequential.replace(overlap=Pipelined(chunks=CHUNKS))
    wanted = (sequential, MOST_TOKENS), (sequential, SOME_TOKENS), (chunked, MOST_TOKENS)
    return {name: steps_of(even, strategy, share) for name, (strategy, share) in zip(PIECES, wanted, strict=True)}


def computed_ms(outcomes: Mapping[str, Outcome]) -> dict[str, list[float]]:
    """Of each of ``PIECES`` and repetition, the milliseconds in which this rank was not blocked by communication."""
    return {
        name: [
            taken - blocked
            for taken, blocked in zip(outcomes[name].samples_ms["step"], outcomes[name].metrics.blocked_ms, strict=True)
        ]
        for name in PIECES
    }


def even_case(case: ShapedCase) -> ShapedCase:
    """As many tokens of the same shape, every expert's and every rank's the same, so that each computes as many rows as
    it has.
    """
    num_ranks = len(case.num_tokens)
    num_tokens = (sum(case.num_tokens) // num_ranks,) * num_ranks
    return replace(case, num_tokens=num_tokens, popularity=(), strategies=(Strategy(name="sequential"),))


def exchange_ms(num_bytes: int, repeats: int, ranks_per_host: int, inside: bool = False) -> list[float]:
    """Milliseconds of all-to-alls in which this rank sends ``num_bytes`` to ranks of other hosts, or to those of its
    own, and receives as many.
    """
    group = dist.group.WORLD
    assert group is not None
    channel = Channel(group, range(dist.get_world_size()), Recorder(dist.get_rank()), Meter())
    peers = _peers(ranks_per_host, inside)
    rows = max(1, num_bytes // len(peers))
    sent, received = (torch.ones(rows * len(peers), dtype=torch.uint8) for _ in range(2))
    counts = [rows if rank in peers else 0 for rank in range(dist.get_world_size())]

    def exchanged() -> None:
        channel.all_to_all(received, sent, counts, counts, lane="dispatch").wait()

    return repeated_ms(exchanged, repeats, before=dist.barrier)


def _peers(ranks_per_host: int, inside: bool) -> list[int]:
    """Returns the other ranks of this rank's host, or those of all others."""
    mine = dist.get_rank()
    others = (rank for rank in range(dist.get_world_size()) if rank != mine)
    return [rank for rank in others if (rank // ranks_per_host == mine // ranks_per_host) == inside]


def interrupted_ms(shape: ModelShape, repeats: int) -> tuple[list[float], list[float]]:
    """Milliseconds of the same products, alone and with an all-to-all of next to nothing behind each.

    A host with a share of a processor, which has just computed, may have to wait for its next share before it sees a
    message.
    """
    group = dist.group.WORLD
    assert group is not None
    sent = torch.ones(dist.get_world_size(), dtype=torch.uint8)
    received, counts, products = torch.empty_like(sent), [1] * len(sent), _products(shape)

    def interrupted() -> None:
        products()
        exchange(received, sent, counts, counts, group).wait()

    works = {name: partial(wall_ms, work) for name, work in (("alone", products), ("interrupted", interrupted))}
    taken_ms = interleave(works, repeats * _MESSAGES, before=dist.barrier)
    return taken_ms["alone"], taken_ms["interrupted"]


def _products(shape: ModelShape) -> Callable[[], None]:
    x_NH = torch.randn(_PRODUCT_ROWS, shape.hidden_size)
    weight_HI = torch.randn(shape.hidden_size, 2 * shape.intermediate_size)
    out_NI = x_NH @ weight_HI

    def products() -> None:
        for _ in range(_PRODUCTS):
            torch.mm(x_NH, weight_HI, out=out_NI)

    return products


def beside_ms(shape: ModelShape, num_bytes: int, repeats: int, ranks_per_host: int) -> tuple[list[float], list[float]]:
    """Milliseconds of the same products of H by 2I, alone and while an all-to-all of ``num_bytes`` is under way."""
    group = dist.group.WORLD
    assert group is not None
    peers = _peers(ranks_per_host, inside=False)
    sent = torch.ones(len(peers), num_bytes // len(peers), dtype=torch.uint8)
    received = torch.empty_like(sent)
    counts = [int(rank in peers) for rank in range(dist.get_world_size())]
    products, alone_ms, together_ms = _products(shape), [], []
    for _ in range(repeats + 1):
        dist.barrier()
        alone_ms.append(wall_ms(products))
        dist.barrier()
        moving = exchange(received, sent, counts, counts, group)
        together_ms.append(wall_ms(products))
        moving.wait()
    return alone_ms[1:], together_ms[1:]
