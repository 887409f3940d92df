"""What one rank of ``bench shaped`` does: steps of MoE layers over a link, and the pieces that a step is made of.

R ranks, E experts, H hidden, I expert width, T tokens of a rank, K top-k.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace

import torch
import torch.distributed as dist
from torch import Tensor, nn

from moesys.bench.harness.stopwatch import interleave
from moesys.config import ClusterSpec, ModelShape, Pipelined, Strategy
from moesys.moe.layer import MoELayer
from moesys.moe.runtime import link
from moesys.overlap.comm.channel import Channel
from moesys.overlap.comm.messages import exchange
from moesys.overlap.comm.record import Meter, Recorder

# How far a token leans towards the experts that it is to choose: more than initial noise could turn.
_LEANING = 6.0
# Of the steps that calibration looks at: shares of a case's tokens, none of them all, and chunks.
MOST_TOKENS, SOME_TOKENS, CHUNKS = 0.75, 0.375, 4
# Products that are timed beside messages: as many rows as a chunk gives an expert, and milliseconds of them.
_PRODUCT_ROWS, _PRODUCTS = 128, 10


@dataclass(frozen=True)
class Case:
    """Strategies that do the same work over the same links, one rank a host; the first is the baseline.

    num_tokens: of each rank, [R].
    popularity: share of the tokens that each expert is chosen by, [E]; empty for equal ones. K = 1 with it.
    """

    name: str
    mbit_per_s: float
    latency_us: float
    num_tokens: tuple[int, ...]
    shape: ModelShape
    strategies: tuple[Strategy, ...]
    popularity: tuple[float, ...] = ()
    num_layers: int = 1

    @property
    def num_hosts(self) -> int:
        return len(self.num_tokens)

    @property
    def cluster(self) -> ClusterSpec:
        """The links as declared; how fast a rank computes is for calibration to say."""
        return ClusterSpec(
            num_nodes=self.num_hosts,
            ranks_per_node=1,
            inter_node_gb_per_s=self.mbit_per_s / 8e3,
            inter_node_us=self.latency_us,
        )


@dataclass(frozen=True)
class Measured:
    """Of one rank; dictionaries are by strategy.

    same_bits: whether output and dx are those of the first strategy.
    samples_ms: of each repetition; none where bits differ.
    exposed_ms: blocked by communication, or by waiting for another rank, median.
    plans: of each layer, as ``LayerPlan.to_json``.
    computed_ms: of each repetition of the steps that calibration looks at (``Pieces``).
    """

    same_bits: dict[str, bool]
    samples_ms: dict[str, list[float]]
    exposed_ms: dict[str, float]
    plans: dict[str, list[str]]
    computed_ms: dict[str, list[float]]


class Layers(nn.Module):
    """MoE layers with residuals."""

    def __init__(self, case: Case, strategy: Strategy, seed: int) -> None:
        super().__init__()
        self.moe = nn.ModuleList(
            MoELayer(case.shape, strategy, cluster=case.cluster, layer_index=index, seed=seed)
            for index in range(case.num_layers)
        )
        with torch.no_grad():
            for layer in self.moe:
                layer.router.weight.zero_()  # type: ignore[operator, union-attr]
                layer.router.weight.fill_diagonal_(1.0)  # type: ignore[operator, union-attr]

    def forward(self, x_TH: Tensor) -> Tensor:
        for moe in self.moe:
            x_TH = x_TH + moe(x_TH)
        return x_TH


class Step:
    """One strategy: its layers, and the input and the gradient that all strategies of a case share."""

    def __init__(self, case: Case, strategy: Strategy, seed: int, tokens_share: float = 1.0) -> None:
        rank = dist.get_rank()
        generator = torch.Generator().manual_seed(seed * 1000 + rank)
        num_tokens = round(case.num_tokens[rank] * tokens_share)
        x_TH, self.dy_TH = (torch.randn(num_tokens, case.shape.hidden_size, generator=generator) for _ in range(2))
        for place, expert_T in enumerate(chosen_experts(case, num_tokens, generator)):
            x_TH[torch.arange(num_tokens), expert_T] = 2 * _LEANING - place
        self.x_TH = x_TH.requires_grad_()
        self.model = Layers(case, strategy, seed)
        self.layers = [layer for layer in self.model.moe if isinstance(layer, MoELayer)]
        self._runtime = link(self.model)
        self.exposed_ms: list[float] = []

    def prepare(self) -> None:
        """Forget the last step, and line up with the other ranks."""
        self.x_TH.grad = None
        self.model.zero_grad(set_to_none=True)
        for layer in self.layers:
            layer.meter.clear()
        dist.barrier()

    def run(self) -> Tensor:
        """Forward and backward."""
        y_TH: Tensor = self.model(self.x_TH)
        y_TH.backward(self.dy_TH)
        self.exposed_ms.append(sum(sum(layer.meter.exposed_ms.values()) for layer in self.layers))
        return y_TH

    def results(self) -> tuple[Tensor, Tensor]:
        """Output and dx of the second step, for which layouts have settled."""
        for _ in range(2):
            self.prepare()
            y_TH = self.run()
        assert self.x_TH.grad is not None
        return y_TH.detach(), self.x_TH.grad.clone()

    def plans(self) -> list[str]:
        """Of the newest step."""
        plans = [layer.last_plan for layer in self.layers]
        return [plan.to_json() for plan in plans if plan is not None]

    def close(self) -> None:
        self._runtime.close()


def chosen_experts(case: Case, num_tokens: int, generator: torch.Generator) -> list[Tensor]:
    """K tensors [T]: the experts that each token is to choose, in shares as exact as whole tokens allow."""
    num_experts = case.shape.num_experts
    order_T = torch.randperm(num_tokens, generator=generator)
    if case.popularity:
        bounds = torch.tensor(case.popularity, dtype=torch.float64).cumsum(0)[:-1] * num_tokens
        return [torch.bucketize(order_T.double(), bounds, right=True)]
    step = 1 + order_T // num_experts % max(1, num_experts - 1)
    return [(order_T + place * step) % num_experts for place in range(case.shape.top_k)]


def measure(case: Case, repeats: int, seed: int) -> Measured:
    """Every strategy of the case and, interleaved with them, what calibration wants of computing, so that whatever else
    the machine does slows both; a collective of all ranks.
    """
    steps = {strategy.name: Step(case, strategy, seed) for strategy in case.strategies}
    results = {name: step.results() for name, step in steps.items()}
    first = next(iter(results.values()))
    same = torch.tensor(
        [all(torch.equal(a, b) for a, b in zip(result, first, strict=True)) for result in results.values()],
        dtype=torch.int64,
    )
    # All ranks time the same strategies, or they would wait for one another for ever.
    dist.all_reduce(same, dist.ReduceOp.MIN)
    same_bits = {name: bool(verdict) for name, verdict in zip(steps, same.tolist(), strict=True)}
    timed = {name: step for name, step in steps.items() if same_bits[name]}
    pieces = Pieces(case, seed)

    def prepare() -> None:
        for step in (*timed.values(), *pieces.steps.values()):
            step.prepare()

    contestants: dict[str, Callable[[], object]] = {name: step.run for name, step in (timed | pieces.steps).items()}
    all_ms = interleave(contestants, repeats, before=prepare, seed=seed)
    exposed_ms = {name: statistics.median(step.exposed_ms[-repeats:]) for name, step in timed.items()}
    plans = {name: step.plans() for name, step in timed.items()}
    computed_ms = pieces.computed_ms(all_ms)
    for step in (*steps.values(), *pieces.steps.values()):
        step.close()
    dist.barrier()
    return Measured(same_bits, {name: all_ms[name] for name in timed}, exposed_ms, plans, computed_ms)


def compute_ms(case: Case, repeats: int, seed: int) -> dict[str, list[float]]:
    """What calibration wants of computing, by itself; a collective of all ranks."""
    pieces = Pieces(case, seed)

    def prepare() -> None:
        for step in pieces.steps.values():
            step.prepare()

    contestants: dict[str, Callable[[], object]] = {name: step.run for name, step in pieces.steps.items()}
    computed_ms = pieces.computed_ms(interleave(contestants, repeats, before=prepare, seed=seed))
    for step in pieces.steps.values():
        step.close()
    dist.barrier()
    return computed_ms


class Pieces:
    """Steps of even tokens that are none of the case's own: of ``"most"`` of its tokens, of ``"some"``, and of most in
    ``"chunks"``. All ranks compute at once, as in training.
    """

    def __init__(self, case: Case, seed: int) -> None:
        even = even_case(case)
        sequential = even.strategies[0]
        chunked = sequential.replace(overlap=Pipelined(chunks=CHUNKS))
        self.steps = {
            "piece: most": Step(even, sequential, seed, MOST_TOKENS),
            "piece: some": Step(even, sequential, seed, SOME_TOKENS),
            "piece: chunks": Step(even, chunked, seed, MOST_TOKENS),
        }
        for step in self.steps.values():
            step.results()

    def computed_ms(self, steps_ms: Mapping[str, list[float]]) -> dict[str, list[float]]:
        """Of each repetition, the milliseconds in which this rank was not blocked by communication."""
        return {
            name.removeprefix("piece: "): [
                taken - exposed
                for taken, exposed in zip(steps_ms[name], step.exposed_ms[-len(steps_ms[name]) :], strict=True)
            ]
            for name, step in self.steps.items()
        }


def even_case(case: Case) -> Case:
    """As many tokens of the same shape, every expert's and every rank's the same, so that each computes as many rows as
    it has.
    """
    num_tokens = (sum(case.num_tokens) // case.num_hosts,) * case.num_hosts
    return replace(case, num_tokens=num_tokens, popularity=(), strategies=(Strategy(name="sequential"),))


def exchange_ms(num_bytes: int, repeats: int) -> list[float]:
    """Milliseconds of all-to-alls in which this rank sends ``num_bytes`` to others and receives as many."""
    group = dist.group.WORLD
    assert group is not None
    num_ranks = dist.get_world_size()
    channel = Channel(group, range(num_ranks), Recorder(dist.get_rank()), Meter())
    rows = max(1, num_bytes // (num_ranks - 1))
    sent, received = (torch.ones(rows * (num_ranks - 1), dtype=torch.uint8) for _ in range(2))
    counts = [0 if rank == dist.get_rank() else rows for rank in range(num_ranks)]
    taken_ms = []
    for _ in range(repeats + 1):
        dist.barrier()
        begin_s = time.perf_counter()
        channel.all_to_all(received, sent, counts, counts, lane="dispatch").wait()
        taken_ms.append((time.perf_counter() - begin_s) * 1e3)
    return taken_ms[1:]


def beside_ms(shape: ModelShape, num_bytes: int, repeats: int) -> tuple[list[float], list[float]]:
    """Milliseconds of the same products of H by 2I, alone and while an all-to-all of ``num_bytes`` is under way."""
    group = dist.group.WORLD
    assert group is not None
    num_ranks, rank = dist.get_world_size(), dist.get_rank()
    sent = torch.ones(num_ranks, num_bytes // (num_ranks - 1), dtype=torch.uint8)
    received = torch.empty_like(sent)
    counts = [0 if other == rank else 1 for other in range(num_ranks)]
    sent, received = sent[1:], received[1:]
    x_NH = torch.randn(_PRODUCT_ROWS, shape.hidden_size)
    weight_HI = torch.randn(shape.hidden_size, 2 * shape.intermediate_size)
    out_NI = x_NH @ weight_HI

    def products_ms() -> float:
        begin_s = time.perf_counter()
        for _ in range(_PRODUCTS):
            torch.mm(x_NH, weight_HI, out=out_NI)
        return (time.perf_counter() - begin_s) * 1e3

    alone_ms, together_ms = [], []
    for _ in range(repeats + 1):
        dist.barrier()
        alone_ms.append(products_ms())
        dist.barrier()
        moving = exchange(received, sent, counts, counts, group)
        together_ms.append(products_ms())
        moving.wait()
    return alone_ms[1:], together_ms[1:]
