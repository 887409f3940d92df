"""The command ``overlap``: forward and backward on local ranks over links of a declared pace.

Links are paced such that communication takes a fixed share of the sequential step. There are three parts: one layer
whose tokens are sent in chunks, three layers whose expert weights are gathered ahead, and three whose experts are lent
ahead. ``--part mega`` times MegaKernels on a GPU instead (``benchmarks/mega``).
"""

from __future__ import annotations

import statistics
from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass, replace
from functools import partial
from typing import Annotated

import torch
import torch.distributed as dist
import typer
from torch import nn

from benchmarks.harness.contest import EqualBits, Outcome, of_all_ranks
from benchmarks.harness.layer_steps import LayerSteps, ResidualLayers, hold_steps, rank_generator
from benchmarks.harness.options import Repeats, chosen, machine_line
from benchmarks.harness.paced_link import PacedLink
from benchmarks.harness.stopwatch import repeated_ms
from moesys.config import Ep, Fsep, ModelShape, Strategy
from moesys.config.overlap import Pipelined
from moesys.lab.commands.options import option, refusing
from moesys.lab.ranks.torchrun_ranks import start_ranks
from moesys.lab.runs.statistics import Quantiles
from moesys.lab.show.progress import steps_told
from moesys.lab.show.sheets import AS_TABLES, Column, CommandOutput, Report, Sheet, publish
from moesys.moe.layer import MoELayer

_SHAPE = ModelShape(hidden_size=512, intermediate_size=512, num_experts=8, top_k=2)
_EP = Strategy(name="sequential")
_FSEP = Strategy(name="on demand", sharding=Fsep(slots_per_rank=4))
_PREFETCH = Fsep(slots_per_rank=4, prefetch_layers=1)
_BEHIND = _PREFETCH.replace(delay_reshard=True)
NUM_RANKS = 2
# The share of the first strategy's step that is communication.
COMMUNICATION_SHARE = 0.5
_RANKS_TIMEOUT_S = 1800.0
# A pace at which only gloo's own time is left.
_UNPACED_GB_PER_S = 1e3
_PACING_REPEATS = 5


@dataclass(frozen=True)
class Part:
    """Strategies that do the same work on a model of ``num_layers`` layers; the first one does not overlap."""

    name: str
    num_layers: int
    num_tokens: int
    shape: ModelShape
    strategies: tuple[Strategy, ...]


_CHUNKED = (_EP, *(_EP.replace(name=f"pipelined {each}", overlap=Pipelined(chunks=each)) for each in (2, 4, 8)))
_GATHERED = (
    _FSEP,
    _FSEP.replace(name="prefetch", sharding=_PREFETCH),
    _FSEP.replace(name="prefetch, delay", sharding=_BEHIND),
    _FSEP.replace(name="prefetch, delay, pipelined 4", sharding=_BEHIND, overlap=Pipelined(chunks=4)),
)
_LENT = Ep(slots_per_rank=5)
_COPIED = (
    Strategy(name="lent on demand", sharding=_LENT),
    Strategy(name="lent ahead", sharding=_LENT.replace(prefetch_layers=1)),
    Strategy(name="lent ahead, delay", sharding=_LENT.replace(prefetch_layers=1, delay_reshard=True)),
)
PARTS = (
    Part("chunks", num_layers=1, num_tokens=1024, shape=_SHAPE, strategies=_CHUNKED),
    Part("experts", num_layers=3, num_tokens=512, shape=_SHAPE, strategies=_GATHERED),
    Part("copies", num_layers=3, num_tokens=512, shape=_SHAPE, strategies=_COPIED),
)


@dataclass(frozen=True)
class Pace:
    """The pace of both links, of tokens and of expert weights, and the measurements that it was derived from.

    compute_ms: the first strategy's step without communication. link_mb: 10^6 bytes that a rank receives in it.
    """

    gb_per_s: float
    compute_ms: float
    link_mb: float


@dataclass(frozen=True)
class Row:
    """The result of one strategy.

    wrong: the results (output, dx or gradients) whose bits differ from the first strategy's on some rank.
    samples_ms: the slowest rank's step, forward and backward, by repetition; empty if bits differ. first_ms: the same
    of the part's first strategy. exposed_ms: time during which rank 0 waited for communication, by lane, median.
    """

    part: Annotated[str, Column("part")]
    strategy: Annotated[Strategy, Column("strategy", lambda strategy: strategy.name)]
    samples_ms: list[float]
    first_ms: list[float]
    exposed_ms: dict[str, float]
    wrong: Annotated[str, Column("bits", wraps=True)]

    @property
    def step_ms(self) -> Annotated[float | None, Column("step", ".1f", after="samples_ms")]:
        return statistics.median(self.samples_ms) if self.samples_ms else None

    @property
    def ratio(self) -> Annotated[Quantiles | None, Column("/ first", after="first_ms")]:
        return Quantiles.of_ratios(self.samples_ms, self.first_ms) if self.samples_ms else None

    @property
    def blocked_ms(self) -> Annotated[float | None, Column("exposed", ".1f", after="exposed_ms")]:
        return sum(self.exposed_ms.values()) if self.samples_ms else None

    @property
    def lanes(self) -> Annotated[str, Column("by lane", after="blocked_ms")]:
        lanes = sorted(self.exposed_ms.items(), key=lambda lane: -lane[1])
        return ", ".join(f"{lane} {exposed_ms:.0f}" for lane, exposed_ms in lanes if exposed_ms >= 0.5)


def bench_overlap(
    part: Annotated[str, option("NAME", "chunks, experts, copies, all, or mega: MegaKernels on a GPU.")] = "all",
    tokens: Annotated[int | None, option("N", "Tokens per rank, instead of the part's own.", min=1)] = None,
    repeats: Repeats = 9,
    threads: Annotated[int, option("N", "Threads per rank.", min=1)] = 1,
    size: Annotated[str, option("NAME", "Name of a layer (with --part mega).")] = "qwen3-30b",
    dtype: Annotated[str, option("DTYPE", "bfloat16, float16 or float32 (with --part mega).")] = "bfloat16",
    gb_per_s: Annotated[float, option("GB", "Link bandwidth per rank in GB/s (with --part mega).")] = 100.0,
    device: Annotated[
        str, option("DEVICE", "cuda, or cpu for a rehearsal on a toy layer (with --part mega).")
    ] = "cuda",
    output: CommandOutput = AS_TABLES,
) -> None:
    """Compares overlapped with sequential steps over paced links."""
    if part == "mega":
        from benchmarks.mega import mega_contest

        with refusing():
            asked = mega_contest.asked_for(size, dtype, gb_per_s, num_tokens=tokens, repeats=repeats, device=device)
        raise typer.Exit(mega_contest.main(asked, output))
    with refusing():
        names = chosen("part", part, [known.name for known in PARTS])
    parts = [replace(known, num_tokens=tokens or known.num_tokens) for known in PARTS if known.name in names]
    rows, paces = measure(parts, repeats, threads, output.quiet)
    machine = f"{machine_line(threads)}; {NUM_RANKS} ranks"
    notes = [
        machine,
        "A paced link completes one all-to-all after the other, each no earlier than its bytes / bandwidth. Tokens and "
        "expert weights have a link each.",
        *(_note(part, pace, rows) for part, pace in zip(parts, paces, strict=True)),
        f"/ first: the time divided by that of the part's first strategy, below 1 is faster; median [p20, p80] of "
        f"{repeats} paired repetitions in random order. A step takes as long as on the slowest rank.",
        "exposed: time during which rank 0 waits for communication, which includes waiting for the other rank.",
        "A speed is shown only if output, dx and all gradients have the bits of the first strategy in the same run.",
    ]
    title = "MEASURED: overlap over paced links, forward + backward, ms (median)"
    data = {"machine": machine, "num_ranks": NUM_RANKS, "parts": parts, "paces": paces, "rows": rows}
    sheet = Sheet(title, rows, notes, "part")
    publish(Report("overlap", title, "measured", [sheet], data=data), output)
    raise typer.Exit(int(any(row.wrong for row in rows)))


def _note(part: Part, pace: Pace, rows: Sequence[Row]) -> str:
    first = next(row for row in rows if row.part == part.name)
    share = first.blocked_ms / first.step_ms if first.blocked_ms and first.step_ms else None
    became = f"communication took {share:.0%} of the step of '{first.strategy.name}'" if share else "not timed"
    return (
        f"{part.name}: {part.num_layers} layer{'s' * (part.num_layers > 1)} of {part.shape!r}, {part.num_tokens} "
        f"tokens per rank. Links of {pace.gb_per_s * 1e3:.0f} MB/s, for {pace.compute_ms:.0f} ms of computing and "
        f"{pace.link_mb:.1f} MB; {became}."
    )


def measure(parts: Sequence[Part], repeats: int, threads: int, quiet: bool = False) -> tuple[list[Row], list[Pace]]:
    """Measures each part on ``NUM_RANKS`` local ranks of ``threads`` threads.

    The pace of the links is chosen in the same run, such that ``COMMUNICATION_SHARE`` of the first strategy's step is
    communication. Outputs and gradients are compared first, and a strategy with a different bit is not timed.
    """
    rows, paces = [], []
    ranks, _ = start_ranks(NUM_RANKS, threads=threads)
    with closing(ranks), steps_told("overlap", len(parts), quiet) as tell:
        for part in parts:
            tell(part.name)
            by_rank = ranks.run(measure_on_rank, part, repeats, timeout_s=_RANKS_TIMEOUT_S)
            outcomes = of_all_ranks([found for _, found in by_rank])
            paces.append(by_rank[0][0])
            first_ms = outcomes[part.strategies[0].name].samples_ms.get("step", [])
            for strategy in part.strategies:
                outcome = outcomes[strategy.name]
                samples_ms, exposed_ms = outcome.samples_ms.get("step", []), outcome.metrics[0] or {}
                rows.append(Row(part.name, strategy, samples_ms, first_ms, exposed_ms, outcome.wrong))
    return rows, paces


# --- on a rank --------------------------------------------------------------------------------------------------------


def measure_on_rank(part: Part, repeats: int) -> tuple[Pace, Mapping[str, Outcome]]:
    """Chooses the pace of the links and measures all strategies of ``part``; all ranks call it at once."""
    pace = _chosen_pace(part)
    with _paced_links(pace.gb_per_s) as links:
        steps = {strategy.name: paced_steps(part, strategy, links) for strategy in part.strategies}
        return pace, hold_steps(steps, EqualBits(), lambda of: of.exposed_ms(repeats), repeats)


@contextmanager
def _paced_links(gb_per_s: float) -> Iterator[tuple[PacedLink, PacedLink]]:
    """Yields the link of tokens and the link of expert weights between all ranks."""
    assert dist.group.WORLD is not None
    with (
        closing(PacedLink(dist.group.WORLD, gb_per_s)) as tokens,
        closing(PacedLink(dist.group.WORLD, gb_per_s)) as experts,
    ):
        yield tokens, experts


def paced_steps(part: Part, strategy: Strategy, links: tuple[PacedLink, PacedLink]) -> LayerSteps:
    """Returns the steps of one strategy, on the input and the output gradient that all strategies share."""
    generator = rank_generator()
    x_TH, dy_TH = (torch.randn(part.num_tokens, part.shape.hidden_size, generator=generator) for _ in range(2))
    layers = [MoELayer(part.shape, strategy, layer_index=index) for index in range(part.num_layers)]
    steps = LayerSteps(ResidualLayers(layers, partial(nn.RMSNorm, part.shape.hidden_size)), x_TH, dy_TH)
    for layer in layers:
        # Linked layers have channels of their own for experts.
        layer.experts.token_channel.link, layer.experts.store.channel.link = links
    return steps


def _chosen_pace(part: Part) -> Pace:
    """Returns the pace that the first strategy's step asks for, the same on every rank.

    A first pace follows from the bytes and from a step over links as fast as gloo, the second from a step at the first
    pace, because a rank computes faster while it waits for a slow link than beside gloo's threads. The fastest of
    several steps counts, because other work on the machine can only add time.
    """
    gb_per_s = _UNPACED_GB_PER_S
    agreed = torch.zeros(3, dtype=torch.float64)
    for paced in (False, True):
        with _paced_links(gb_per_s) as links:
            steps = paced_steps(part, part.strategies[0], links)
            steps.prepare()
            steps.step()
            steps_ms = repeated_ms(steps.step, _PACING_REPEATS, before=steps.prepare)
            waits_ms = steps.blocked_ms(_PACING_REPEATS)
            computes_ms = [step_ms - waited_ms for step_ms, waited_ms in zip(steps_ms, waits_ms, strict=True)]
            # Received from other ranks since the last ``prepare``.
            num_bytes = sum(sum(layer.experts.meter.wire_bytes.values()) for layer in steps.layers)
            agreed[:] = torch.tensor([min(computes_ms), min(waits_ms), num_bytes / 1e6])
            dist.all_reduce(agreed, dist.ReduceOp.MAX)
            steps.close()
        compute_ms, waited_ms, received_mb = agreed.tolist()
        wanted_ms = compute_ms * COMMUNICATION_SHARE / (1 - COMMUNICATION_SHARE)
        gb_per_s = gb_per_s * waited_ms / wanted_ms if paced else received_mb / wanted_ms
    return Pace(gb_per_s, compute_ms, received_mb)
