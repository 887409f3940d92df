"""The report of ``bench shaped --case models``: settings measured beside simulated, and what was told."""

from __future__ import annotations

import statistics
import sys
from collections.abc import Callable, Sequence
from itertools import combinations
from pathlib import Path

import numpy as np
from scipy.stats import wilcoxon

from benchmarks.harness.model_steps import LENGTH, TOLERANCE, ZIPF
from benchmarks.shaped.host_models import ModelCase
from benchmarks.shaped.model_cases import PACKAGES, MeasuredCase, measure_cases
from benchmarks.shaped.model_results import ModelResult, ModelSetting, result_of
from benchmarks.shaped.shaped_report import BAR, DELAYS, SIGNIFICANT, cannot_be_made
from moesys.lab.runs.stopwatch import machine_line
from moesys.lab.show.reports import Report, publish, write
from moesys.lab.show.sheets import Sheet

_WAYS: dict[str, Callable[[ModelSetting], float | None]] = {
    "simulated": lambda setting: setting.simulated_ms,
    "fitted": lambda setting: setting.fitted_ms,
    "closed form": lambda setting: setting.closed_ms,
}


def notes(results: Sequence[ModelResult]) -> list[str]:
    """What the table is of, and what it comes to."""
    cases = [result.measured for result in results]
    repeats = max(case.repeats for case in cases)
    delays = "; ".join(DELAYS[delay] for delay in dict.fromkeys(case.delay for case in cases))
    shares = "; ".join(dict.fromkeys(map(_share_of, cases)))
    sizes = "; ".join(dict.fromkeys(f"{case.case.sequences} on each of {case.case.hosts}" for case in cases))
    told = [
        f"{machine_line(1, PACKAGES)}. Hosts are network namespaces of this machine with one rank each; {shares}; "
        f"links are shaped by tbf both ways; {delays}.",
        "Measured: forward, backward and AdamW of transformers' small models under FSDP2 (`ms.hf.parallelize`), "
        f"float32, sequences of {LENGTH} tokens ({sizes}), the slowest rank's step, median [p20, p80] of {repeats} "
        "repetitions, interleaved in shuffled order within a case. Routing is replayed: experts drawn by "
        f"1 / n^{ZIPF}, the order of experts by layer. Loss and all gradients are those of transformers' own code on "
        f"each rank, to {TOLERANCE:g}.",
        "Simulated: `ms.simulate_model` with the plans that the steps had, on links measured by themselves (bandwidth "
        "by all-to-alls, latency by all-to-alls of a byte behind products) and hosts that `bench calibrate` measured, "
        "of which no step of a model was looked at.",
        "Fitted: the same, with two constants fitted to even steps of three quarters and a quarter of the sequences, "
        "interleaved with these: how fast a model computes, and what a message takes before its first byte.",
        "Closed form: the line through those even steps, at the tokens of the busiest rank, and experts at the rate of "
        "the links. Speed-up: over the case's first strategy, paired by repetition, and simulated.",
    ]
    for name, way in _WAYS.items():
        errors = [abs(way_ms / s.measured_ms.median - 1) for s, way_ms in _told(results, way) if s.measured_ms]
        if not errors:
            continue
        right, differ = ranked_pairs(results, way)
        within = sum(error <= BAR for error in errors)
        told.append(
            f"{name.capitalize()}: {within} of {len(errors)} settings within {BAR:.0%} of measured; median of errors "
            f"{statistics.median(errors):.1%}, worst {max(errors):.1%}. Pairs of strategies of one case that differ "
            f"significantly (Wilcoxon signed-rank, paired by repetition, p < {SIGNIFICANT}), in their order: "
            f"{right} of {differ}."
        )
    return told


def _told(
    results: Sequence[ModelResult], way: Callable[[ModelSetting], float | None]
) -> list[tuple[ModelSetting, float]]:
    settings = [setting for result in results for setting in result.timed]
    return [(setting, way_ms) for setting in settings if (way_ms := way(setting)) is not None]


def ranked_pairs(results: Sequence[ModelResult], way: Callable[[ModelSetting], float | None]) -> tuple[int, int]:
    """Returns how many pairs of strategies of one case ``way`` has in the order in which they were measured, and how
    many differ significantly.
    """
    right = differ = 0
    for result in results:
        for one, other in combinations(_told([result], way), 2):
            longer_ms = np.asarray(one[0].samples_ms) - np.asarray(other[0].samples_ms)
            if not longer_ms.any() or wilcoxon(longer_ms).pvalue >= SIGNIFICANT:
                continue
            differ += 1
            right += bool((np.median(longer_ms) > 0) == (one[1] > other[1]))
    return right, differ


def _share_of(measured: MeasuredCase) -> str:
    hosts, cpus = measured.case.hosts, measured.cpus_per_host
    if cpus is None:
        return f"{hosts} of them compete for its cores"
    return f"each of {hosts} has {cpus:.2g} of a processor, by a control group, whether the others compute or wait"


def report(results: Sequence[ModelResult]) -> Report:
    settings = [setting for result in results for setting in result.settings]
    sheets = [
        Sheet("MEASURED beside SIMULATED: training steps of whole models", settings, group_by="links"),
        Sheet("MEASURED: what the simulator was told", [result.told for result in results]),
    ]
    introduction = ["`python -m benchmarks shaped --case models`: MEASURED, and beside it SIMULATED."]
    measured = [result.measured for result in results]
    data = {"machine": machine_line(1, PACKAGES), "measured": measured, "settings": settings}
    title = "Whole models between hosts with slow links"
    return Report("shaped", title, "measured", sheets, notes(results), introduction, data)


def main(
    asked: Sequence[ModelCase],
    *,
    repeats: int = 7,
    shares: bool = True,
    known: Sequence[MeasuredCase] = (),
    out: Path | None = None,
    json_path: Path | None = None,
) -> int:
    """Measure what is not ``known`` yet, write after each case, print; the exit code: 1 if a loss or a gradient was
    wrong, 2 where no such hosts can be made.
    """
    if reason := cannot_be_made(shares):
        print(f"error: {reason}", file=sys.stderr)
        return 2

    def keep(measured: Sequence[MeasuredCase]) -> None:
        write(report([result_of(each) for each in measured]), page=out, json_path=json_path)

    results = [result_of(each) for each in measure_cases(asked, repeats, shares=shares, known=known, keep=keep)]
    publish(report(results), page=out, json_path=json_path)
    return int(any(result.timed != result.settings for result in results))
