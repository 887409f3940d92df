"""Overlap on local ranks, forward and backward, over links paced so that communication is a set share of the step.

Two parts: one layer whose tokens travel in chunks, and a few layers whose experts travel behind one another.
"""

from __future__ import annotations

import json
import statistics
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from rich.table import Table

from moesys.bench.harness.stopwatch import Spread, machine_line
from moesys.bench.overlap.rank import Part, measure
from moesys.config import Fsep, ModelShape, Pipelined, Strategy
from moesys.lab.ranks.pool import LocalRanks
from moesys.lab.show.console import print_full

_SHAPE = ModelShape(hidden_size=512, intermediate_size=512, num_experts=8, top_k=2)
_EP = Strategy(name="sequential")
_FSEP = Strategy(name="on demand", sharding=Fsep(slots_per_rank=4))
_PREFETCH = Fsep(slots_per_rank=4, prefetch_layers=1)
_BEHIND = _PREFETCH.replace(delay_reshard=True)

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
class Result:
    """One strategy of a part.

    same_bits: whether output, dx and all gradients are those of the part's first strategy, on every rank.
    samples_ms: the slowest rank's step, forward and backward, by repetition; empty where bits differ.
    exposed_ms: how long rank 0 was blocked by communication, by lane; the median over repetitions.
    """

    strategy: str
    same_bits: bool
    samples_ms: list[float]
    exposed_ms: dict[str, float]

    @property
    def median_ms(self) -> float:
        return statistics.median(self.samples_ms)


@dataclass(frozen=True)
class PartResult:
    """What was measured of one part; ``results`` are in its strategies' order.

    gb_per_s: the pace of both links, of tokens and of experts.
    compute_ms, link_mb: what it was chosen from: the first strategy's step without communication, and the 10^6 bytes
        that a rank receives in it.
    """

    part: Part
    gb_per_s: float
    compute_ms: float
    link_mb: float
    results: list[Result]

    @property
    def communication_share(self) -> float:
        """How much of the first strategy's step communication turned out to be."""
        first = self.results[0]
        return sum(first.exposed_ms.values()) / first.median_ms

    def ratio(self, result: Result) -> Spread:
        """Its time over the first strategy's: below 1, it is faster."""
        return Spread.of_ratios(result.samples_ms, self.results[0].samples_ms)


def select(name: str = "all", num_tokens: int | None = None) -> list[Part]:
    """The parts of this name. Raises ValueError for a name that is not there."""
    names = [part.name for part in PARTS]
    if name not in ("all", *names):
        raise ValueError(f"part={name!r} is none of {', '.join(names)}; 'all' runs every one")
    return [
        Part(part.name, part.num_layers, num_tokens or part.num_tokens, part.shape, part.strategies)
        for part in PARTS
        if name in ("all", part.name)
    ]


def bench_overlap(
    parts: Sequence[Part] = PARTS,
    *,
    repeats: int = 9,
    num_ranks: int = 2,
    threads: int = 1,
    communication_share: float = 0.5,
    seed: int = 0,
) -> list[PartResult]:
    """Measure each part on ``num_ranks`` local ranks of ``threads`` threads.

    The pace of the links is chosen in the same run, such that ``communication_share`` of the first strategy's step is
    communication. Outputs and gradients are compared first, and where they differ by a bit nothing is timed.
    """
    if not 0 < communication_share < 1:
        raise ValueError(f"communication_share={communication_share} must lie between 0 and 1")
    measured = []
    with LocalRanks(num_ranks, threads=threads) as ranks:
        for part in parts:
            by_rank = ranks.run(measure, part, repeats, communication_share, seed, timeout_s=1800.0)
            results = [
                Result(
                    strategy=strategy.name,
                    same_bits=all(rank.same_bits[strategy.name] for rank in by_rank),
                    samples_ms=[
                        max(of_ranks) for of_ranks in zip(*(r.samples_ms[strategy.name] for r in by_rank), strict=True)
                    ],
                    exposed_ms=by_rank[0].exposed_ms[strategy.name],
                )
                for strategy in part.strategies
            ]
            first = by_rank[0]
            measured.append(PartResult(part, first.gb_per_s, first.compute_ms, first.link_mb, results))
    return measured


def report(measured: Sequence[PartResult], num_ranks: int, threads: int) -> tuple[Table, list[str]]:
    """The table and its legend."""
    table = Table(title="MEASURED: overlap over paced links, forward + backward, ms (median)", title_justify="left")
    for column in ("part", "strategy"):
        table.add_column(column, no_wrap=True)
    for column in ("step", "/ first", "exposed", "of which by lane"):
        table.add_column(column, justify="right", no_wrap=True)
    for part in measured:
        for result in part.results:
            if not result.samples_ms:
                table.add_row(part.part.name, result.strategy, "differs by a bit" if not result.same_bits else "")
                continue
            lanes = sorted(result.exposed_ms.items(), key=lambda lane: -lane[1])
            table.add_row(
                part.part.name,
                result.strategy,
                f"{result.median_ms:.1f}",
                str(part.ratio(result)),
                f"{sum(result.exposed_ms.values()):.1f}",
                ", ".join(f"{lane} {exposed_ms:.0f}" for lane, exposed_ms in lanes if exposed_ms >= 0.5),
            )
        table.add_section()
    repeats = max((len(result.samples_ms) for part in measured for result in part.results), default=0)
    legend = [
        f"{machine_line(threads)}; {num_ranks} ranks",
        "A paced link is a process group over gloo that completes each collective, one after the other, only after its "
        "bytes / bandwidth. Tokens and experts have one each.",
        *(
            f"{part.part.name}: {part.part.num_layers} layer{'s' * (part.part.num_layers > 1)} of "
            f"{part.part.shape!r}, {part.part.num_tokens} tokens a rank. Links of {part.gb_per_s * 1e3:.0f} MB/s, for "
            f"{part.compute_ms:.0f} ms of computing and {part.link_mb:.1f} MB; "
            + (
                f"communication became {part.communication_share:.0%} of the step of '{part.results[0].strategy}'."
                if part.results[0].samples_ms
                else "not timed."
            )
            for part in measured
        ),
        f"/ first: over the time of the part's first strategy, below 1 is faster; median [p20, p80] of {repeats} "
        "repetitions, paired, in shuffled order. A step is that of the slowest rank.",
        "Exposed: rank 0 blocked by communication, which includes waiting for the other rank.",
        "A speed is shown where output, dx and all gradients have the bits of the first strategy, in the same run.",
    ]
    return table, legend


def to_json(measured: Sequence[PartResult], num_ranks: int, threads: int) -> dict[str, Any]:
    """Everything that was measured, with all samples."""
    return {
        "benchmark": "overlap",
        "source": "measured",
        "machine": machine_line(threads),
        "num_ranks": num_ranks,
        "parts": [
            {
                "part": part.part.name,
                "num_layers": part.part.num_layers,
                "num_tokens": part.part.num_tokens,
                "model": part.part.shape.model_dump(mode="json"),
                "gb_per_s": part.gb_per_s,
                "compute_ms": part.compute_ms,
                "link_mb": part.link_mb,
                "communication_share": part.communication_share if part.results[0].samples_ms else None,
                "results": [
                    {
                        **asdict(result),
                        "model": strategy.model_dump(mode="json"),
                        "ratio": asdict(part.ratio(result)) if result.samples_ms else None,
                    }
                    for strategy, result in zip(part.part.strategies, part.results, strict=True)
                ],
            }
            for part in measured
        ],
    }


def main(
    part: str = "all",
    *,
    num_tokens: int | None = None,
    repeats: int = 9,
    num_ranks: int = 2,
    threads: int = 1,
    json_path: Path | None = None,
) -> int:
    """Measure, write, print; the exit code: 1 if a bit was wrong."""
    measured = bench_overlap(select(part, num_tokens), repeats=repeats, num_ranks=num_ranks, threads=threads)
    table, legend = report(measured, num_ranks, threads)
    if json_path is not None:
        json_path.write_text(json.dumps(to_json(measured, num_ranks, threads), indent=1) + "\n")
    print_full(table, legend)
    return 0 if all(result.same_bits for part_result in measured for result in part_result.results) else 1
