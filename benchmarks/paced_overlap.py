"""The command ``overlap``: forward and backward on local ranks, over links paced so that communication is a set share
of the step.

Two parts: one layer whose tokens travel in chunks, and a few layers whose experts travel behind one another.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Annotated

import torch
import torch.distributed as dist
from torch import nn

from benchmarks.harness.contest import EqualBits, Outcome, of_all_ranks
from benchmarks.harness.layer_steps import LayerSteps, ResidualLayers, hold_steps, rank_generator
from benchmarks.harness.names import chosen
from moesys.config import Fsep, ModelShape, Pipelined, Strategy
from moesys.lab.ranks.torchrun_ranks import start_ranks
from moesys.lab.runs.stopwatch import Spread, machine_line, repeated_ms
from moesys.lab.show.reports import Report, publish
from moesys.lab.show.sheets import Column, Sheet
from moesys.lab.show.steps import steps_told
from moesys.moe.layer import MoELayer
from moesys.overlap.comm.paced_link import PacedLink

_SHAPE = ModelShape(hidden_size=512, intermediate_size=512, num_experts=8, top_k=2)
_EP = Strategy(name="sequential")
_FSEP = Strategy(name="on demand", sharding=Fsep(slots_per_rank=4))
_PREFETCH = Fsep(slots_per_rank=4, prefetch_layers=1)
_BEHIND = _PREFETCH.replace(delay_reshard=True)
NUM_RANKS = 2
# Of the first strategy's step.
COMMUNICATION_SHARE = 0.5
_RANKS_TIMEOUT_S = 1800.0
# So fast that only gloo's own time is left.
_UNPACED_GB_PER_S = 1e3
_PACING_REPEATS = 5


@dataclass(frozen=True)
class Part:
    """Strategies that do the same work, the first of them without overlap, on a model of ``num_layers`` layers."""

    name: str
    num_layers: int
    num_tokens: int
    shape: ModelShape
    strategies: tuple[Strategy, ...]


PARTS = (
    Part(
        "chunks",
        num_layers=1,
        num_tokens=1024,
        shape=_SHAPE,
        strategies=(
            _EP,
            *(_EP.replace(name=f"pipelined {chunks}", overlap=Pipelined(chunks=chunks)) for chunks in (2, 4, 8)),
        ),
    ),
    Part(
        "experts",
        num_layers=3,
        num_tokens=512,
        shape=_SHAPE,
        strategies=(
            _FSEP,
            _FSEP.replace(name="prefetch", sharding=_PREFETCH),
            _FSEP.replace(name="prefetch, delay", sharding=_BEHIND),
            _FSEP.replace(name="prefetch, delay, pipelined 4", sharding=_BEHIND, overlap=Pipelined(chunks=4)),
        ),
    ),
)


@dataclass(frozen=True)
class Pace:
    """``gb_per_s`` of both links, of tokens and of experts; and what it was chosen from: the first strategy's step
    without communication, and the 10^6 bytes that a rank receives in it.
    """

    gb_per_s: float
    compute_ms: float
    link_mb: float


@dataclass(frozen=True)
class Result:
    """One strategy of a part.

    wrong: which of output, dx and gradients have other bits than the first strategy's, on some rank.
    samples_ms: the slowest rank's step, forward and backward, by repetition; empty where bits differ. first_ms: of the
    part's first strategy. exposed_ms: how long rank 0 was blocked by communication, by lane; the median over
    repetitions.
    """

    part: Annotated[str, Column("part")]
    strategy: Annotated[Strategy, Column("strategy", lambda strategy: strategy.name)]
    samples_ms: list[float]
    first_ms: list[float]
    exposed_ms: dict[str, float]
    wrong: Annotated[str, Column("bits")]

    @property
    def step_ms(self) -> Annotated[float | None, Column("step", ".1f", after="samples_ms")]:
        return statistics.median(self.samples_ms) if self.samples_ms else None

    @property
    def ratio(self) -> Annotated[Spread | None, Column("/ first", after="first_ms")]:
        return Spread.of_ratios(self.samples_ms, self.first_ms) if self.samples_ms else None

    @property
    def blocked_ms(self) -> Annotated[float | None, Column("exposed", ".1f", after="exposed_ms")]:
        return sum(self.exposed_ms.values()) if self.samples_ms else None

    @property
    def lanes(self) -> Annotated[str, Column("of which by lane", after="blocked_ms")]:
        lanes = sorted(self.exposed_ms.items(), key=lambda lane: -lane[1])
        return ", ".join(f"{lane} {exposed_ms:.0f}" for lane, exposed_ms in lanes if exposed_ms >= 0.5)


@dataclass(frozen=True)
class PartResult:
    """``results`` in the order of the part's strategies. communication_share: what it became of the first's step."""

    part: Part
    pace: Pace
    results: list[Result]

    @property
    def communication_share(self) -> Annotated[float | None, Column("")]:
        first = self.results[0]
        return first.blocked_ms / first.step_ms if first.blocked_ms is not None and first.step_ms else None

    @property
    def note(self) -> str:
        part, pace, share = self.part, self.pace, self.communication_share
        became = (
            f"communication became {share:.0%} of the step of '{self.results[0].strategy.name}'"
            if share
            else "not timed"
        )
        return (
            f"{part.name}: {part.num_layers} layer{'s' * (part.num_layers > 1)} of {part.shape!r}, {part.num_tokens} "
            f"tokens a rank. Links of {pace.gb_per_s * 1e3:.0f} MB/s, for {pace.compute_ms:.0f} ms of computing and "
            f"{pace.link_mb:.1f} MB; {became}."
        )


def select(name: str = "all", num_tokens: int | None = None) -> list[Part]:
    """The parts of this name. Raises ValueError for a name that is not there."""
    names = chosen("part", name, [part.name for part in PARTS])
    return [replace(part, num_tokens=num_tokens or part.num_tokens) for part in PARTS if part.name in names]


def main(parts: Sequence[Part], *, repeats: int = 9, threads: int = 1, json_path: Path | None = None) -> int:
    """Measure, write, print; the exit code: 1 if a bit was wrong."""
    measured = bench_overlap(parts, repeats, threads)
    rows = [result for of_part in measured for result in of_part.results]
    machine = f"{machine_line(threads)}; {NUM_RANKS} ranks"
    notes = [
        machine,
        "A paced link completes each all-to-all, one after the other, only after its bytes / bandwidth. Tokens and "
        "experts have one each.",
        *(of_part.note for of_part in measured),
        f"/ first: over the time of the part's first strategy, below 1 is faster; median [p20, p80] of {repeats} "
        "repetitions, paired, in shuffled order. A step is that of the slowest rank.",
        "Exposed: rank 0 blocked by communication, which includes waiting for the other rank.",
        "A speed is shown where output, dx and all gradients have the bits of the first strategy, in the same run.",
    ]
    title = "MEASURED: overlap over paced links, forward + backward, ms (median)"
    data = {"machine": machine, "num_ranks": NUM_RANKS, "parts": measured}
    publish(Report("overlap", title, "measured", [Sheet(title, rows, notes, "part")], data=data), json_path=json_path)
    return int(any(row.wrong for row in rows))


def bench_overlap(parts: Sequence[Part], repeats: int, threads: int) -> list[PartResult]:
    """Measure each part on ``NUM_RANKS`` local ranks of ``threads`` threads.

    The pace of the links is chosen in the same run, such that ``COMMUNICATION_SHARE`` of the first strategy's step is
    communication. Outputs and gradients are compared first, and where they differ by a bit nothing is timed.
    """
    measured = []
    ranks, _ = start_ranks(NUM_RANKS, threads=threads)
    with closing(ranks), steps_told("overlap", len(parts)) as tell:
        for part in parts:
            tell(part.name)
            by_rank = ranks.run(measure, part, repeats, timeout_s=_RANKS_TIMEOUT_S)
            outcomes = of_all_ranks([found for _, found in by_rank])
            samples_ms = {name: outcome.samples_ms.get("step", []) for name, outcome in outcomes.items()}
            first_ms, results = samples_ms[part.strategies[0].name], []
            for strategy in part.strategies:
                outcome = outcomes[strategy.name]
                exposed_ms = outcome.metrics[0] or {}
                results.append(
                    Result(part.name, strategy, samples_ms[strategy.name], first_ms, exposed_ms, outcome.wrong)
                )
            measured.append(PartResult(part, by_rank[0][0], results))
    return measured


# --- on a rank --------------------------------------------------------------------------------------------------------


def measure(part: Part, repeats: int) -> tuple[Pace, Mapping[str, Outcome]]:
    """All strategies of ``part``, called on all ranks at once, over links at a pace by which ``COMMUNICATION_SHARE`` of
    the first one's step is communication.
    """
    pace = _chosen_pace(part)
    with _paced_links(pace.gb_per_s) as links:
        steps = {strategy.name: _steps(part, strategy, links) for strategy in part.strategies}
        return pace, hold_steps(steps, EqualBits(), lambda of: of.exposed_ms(repeats), repeats)


@contextmanager
def _paced_links(gb_per_s: float) -> Iterator[tuple[PacedLink, PacedLink]]:
    """Of all ranks: tokens travel on one, experts on the other."""
    assert dist.group.WORLD is not None
    with (
        closing(PacedLink(dist.group.WORLD, gb_per_s)) as tokens,
        closing(PacedLink(dist.group.WORLD, gb_per_s)) as experts,
    ):
        yield tokens, experts


def _steps(part: Part, strategy: Strategy, links: tuple[PacedLink, PacedLink]) -> LayerSteps:
    """Of one strategy, on the input and the gradient that all strategies share."""
    generator = rank_generator()
    x_TH, dy_TH = (torch.randn(part.num_tokens, part.shape.hidden_size, generator=generator) for _ in range(2))
    layers = [MoELayer(part.shape, strategy, layer_index=index) for index in range(part.num_layers)]
    for layer in layers:
        layer.experts.token_channel.link, layer.experts.store.channel.link = links
    return LayerSteps(ResidualLayers(layers, partial(nn.RMSNorm, part.shape.hidden_size)), x_TH, dy_TH)


def _chosen_pace(part: Part) -> Pace:
    """From the first strategy's step; the same on every rank.

    The first pace follows from the bytes and a step over links as fast as gloo, the second from a step at the first
    pace: beside a slow link a rank computes faster than beside gloo's threads. Of some steps the quickest counts, as
    whatever else runs on the machine only adds.
    """
    gb_per_s, received_mb = _UNPACED_GB_PER_S, 0.0
    agreed = torch.zeros(3, dtype=torch.float64)
    for paced in (False, True):
        with _paced_links(gb_per_s) as links:
            steps = _steps(part, part.strategies[0], links)
            steps.prepare()
            steps.step()
            steps_ms = repeated_ms(steps.step, _PACING_REPEATS, before=steps.prepare)
            waits_ms = steps.blocked_ms(_PACING_REPEATS)
            computes_ms = [step_ms - waited_ms for step_ms, waited_ms in zip(steps_ms, waits_ms, strict=True)]
            agreed[:] = torch.tensor([min(computes_ms), min(waits_ms), steps.received_bytes / 1e6])
            dist.all_reduce(agreed, dist.ReduceOp.MAX)
            steps.close()
        compute_ms, waited_ms, received_mb = agreed.tolist()
        wanted_ms = compute_ms * COMMUNICATION_SHARE / (1 - COMMUNICATION_SHARE)
        gb_per_s = gb_per_s * waited_ms / wanted_ms if paced else received_mb / wanted_ms
    return Pace(gb_per_s, compute_ms, received_mb)
