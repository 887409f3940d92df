"""``bench shaped --case models``: training steps of transformers' small models between hosts with slow links.

Hosts are those of ``bench shaped`` (``cases``), with one rank each. What is measured is kept as it is, apart from what
the simulator makes of it (``model_results``), so that a run in parts becomes one page.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from pydantic import TypeAdapter

from benchmarks.harness.contest import of_all_ranks
from benchmarks.shaped.calibration import LinkFigures, link_figures, slowest
from benchmarks.shaped.cases import KEEPING_MEMORY, check_links, share_of_cores
from benchmarks.shaped.host_models import ModelCase, measure
from benchmarks.shaped.host_steps import interrupted_ms
from moesys.balance import warm_up
from moesys.config import ClusterSpec
from moesys.lab.calibrate.measurement import calibrate
from moesys.lab.ranks.pool import LocalRanks, RankTimeouts
from moesys.lab.ranks.torchrun_ranks import Ranks
from moesys.lab.runs.stopwatch import machine_line
from moesys.lab.show.steps import steps_told
from moesys.lab.slow_links.shaped_links import Delay, shaped_links

PACKAGES = ("torch", "transformers")
# A model, and the bandwidths at which it is trained by default.
_MBIT_PER_S = {"olmoe": (200.0, 1000.0), "qwen3-moe": (500.0,), "deepseek-v3": (500.0,)}
# Of a rank: as many as make steps of a second or so on its part of two cores.
_SEQUENCES = {2: 8, 4: 4}
# Repetitions of what is measured of links, for each of a step: they are short, and come out differently.
_OF_LINKS = 5
_RUN_S = 1800.0


@dataclass(frozen=True)
class MeasuredCase:
    """What was seen of a case.

    links: of the case, with the latency that messages have to hosts that compute. parts: what ``bench calibrate`` makes
        of these hosts, of which it sees no model. samples_ms: of the slowest rank, by strategy and piece. plans: of the
        newest step, layer by layer, as ``LayerPlan.to_json``. wrong: why a strategy was not timed.
    """

    case: ModelCase
    repeats: int
    delay: Delay
    cpus_per_host: float | None
    links: LinkFigures
    parts: ClusterSpec
    samples_ms: dict[str, list[float]]
    plans: dict[str, list[str]]
    wrong: dict[str, str]


_KEPT = TypeAdapter(list[MeasuredCase])


def asked_for(
    hosts: Sequence[int] = (2, 4),
    mbit_per_s: Sequence[float] = (),
    latency_us: float | None = None,
    kinds: Sequence[str] = ("models",),
) -> list[ModelCase]:
    """The cases: three models on each number of hosts, one of them over two bandwidths; given ones replace those.

    Raises ValueError for hosts, bandwidths and latencies that ``cases`` refuses, and for ``kinds`` beside models.
    """
    if others := [kind for kind in kinds if kind != "models"]:
        raise ValueError(f"case={others[0]!r} and case='models' are pages of their own; ask for one, then the other")
    check_links(hosts, mbit_per_s, latency_us)
    return [
        ModelCase(model, "skewed", number, mbit, _SEQUENCES[number], latency_us or 0.0)
        for number in hosts
        for model, own in _MBIT_PER_S.items()
        for mbit in mbit_per_s or own
    ]


def kept(path: Path | None) -> list[MeasuredCase]:
    """Returns what an earlier run has left in ``path``. Raises ValueError for a file of another machine, or of none."""
    if path is None or not path.exists():
        return []
    found = json.loads(path.read_text())
    if "measured" not in found:
        raise ValueError(f"{path} has no measured models; give another file, or remove it")
    if found["machine"] != (here := machine_line(1, PACKAGES)):
        raise ValueError(f"{path} was measured on {found['machine']}, and this is {here}; give another file")
    return _KEPT.validate_python(found["measured"])


def measure_cases(
    asked: Sequence[ModelCase],
    repeats: int,
    *,
    shares: bool,
    known: Sequence[MeasuredCase] = (),
    keep: Callable[[Sequence[MeasuredCase]], None] = lambda _: None,
) -> list[MeasuredCase]:
    """Measures those that are not ``known`` from as many repeats and with the same shares; ``keep`` gets all so far,
    where there are any, before and after each. Raises RuntimeError where this machine can make no such hosts.
    """
    found = {
        each.case: each
        for each in known
        if each.case in asked and each.repeats == repeats and (each.cpus_per_host is not None) == shares
    }
    left = [case for case in asked if case not in found]
    if found:
        keep(list(found.values()))
    for strategy in {strategy for case in left for strategy in case.strategies}:
        # Here, and not on all ranks at once.
        warm_up(strategy.balance, strategy.split, late_slots=bool(strategy.late_slots))
    with steps_told("models on shaped links", len(left)) as begin:
        for number, latency_us in dict.fromkeys((case.hosts, case.latency_us) for case in left):
            together = [case for case in left if (case.hosts, case.latency_us) == (number, latency_us)]
            cpus = share_of_cores(number) if shares else None
            with (
                shaped_links(number, together[0].mbit_per_s, latency_us, cpus_per_host=cpus) as links,
                LocalRanks(
                    number,
                    network=links.plan.network(1),
                    timeouts=RankTimeouts(collective_s=300.0),
                    environment=KEEPING_MEMORY,
                    preload=("benchmarks.shaped.host_models",),
                ) as ranks,
            ):
                parts = calibrate(ranks, together[0].links.cluster).cluster
                for case in together:
                    begin(f"{case.hosts} hosts, {case.mbit_per_s:g} Mbit/s, {case.model}")
                    links.reshape(case.mbit_per_s)
                    figures = link_figures(ranks, case.links, repeats * _OF_LINKS)
                    late_ms = _late_ms(ranks, case, repeats)
                    outcomes = of_all_ranks(ranks.run(measure, case, repeats, timeout_s=_RUN_S))
                    found[case] = MeasuredCase(
                        case,
                        repeats,
                        links.plan.delay,
                        cpus,
                        replace(figures, latency_ms=max(figures.latency_ms, late_ms)),
                        parts,
                        {name: of.samples_ms["step"] for name, of in outcomes.items() if of.samples_ms},
                        {name: of.metrics[0] for name, of in outcomes.items() if of.samples_ms},
                        {name: of.wrong for name, of in outcomes.items() if of.wrong},
                    )
                    keep(list(found.values()))
    return [found[case] for case in asked]


def _late_ms(ranks: Ranks, case: ModelCase, repeats: int) -> float:
    """What a message takes to hosts that compute."""
    by_rank = ranks.run(interrupted_ms, case.links.shape, repeats, timeout_s=_RUN_S)
    alone_ms, interrupted = (slowest([rank[which] for rank in by_rank]) for which in (0, 1))
    return interrupted - alone_ms
