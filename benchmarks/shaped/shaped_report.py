"""``bench shaped``: what the machine lacks is said first, then cases are run, written and shown."""

from __future__ import annotations

import statistics
import sys
from collections.abc import Sequence
from itertools import combinations
from pathlib import Path

import numpy as np
from scipy.stats import wilcoxon

from benchmarks.shaped.cases import Asked, CaseResult, bench_shaped
from moesys.lab.runs.stopwatch import Spread, machine_line
from moesys.lab.show.reports import Report, publish
from moesys.lab.show.sheets import Sheet
from moesys.lab.slow_links.namespaces import lacks
from moesys.lab.slow_links.processor_shares import lacks_shares

BAR, SIGNIFICANT = 0.15, 0.05
DELAYS = {
    "none": "no latency of their own",
    "netem": "latency by netem",
    "relay": "latency by a delaying relay, as this kernel has no netem",
}


def notes(results: Sequence[CaseResult]) -> list[str]:
    """What the table is of, and what it comes to."""
    settings = [setting for result in results for setting in result.timed]
    repeats = max(len(setting.samples_ms) for setting in settings)
    errors = [abs(setting.error) for setting in settings if setting.error is not None]
    delays = "; ".join(DELAYS[delay] for delay in dict.fromkeys(result.delay for result in results))
    shares = "; ".join(dict.fromkeys(_share_of(result) for result in results))
    right, differ = ranked_pairs(results)
    told = [
        f"{machine_line(1)}. Hosts are network namespaces of this machine with one rank each, or as many as it says; "
        f"{shares}; links are shaped by tbf both ways; {delays}.",
        f"Measured: forward and backward of one layer, the slowest rank's, median [p20, p80] of {repeats} repetitions, "
        "interleaved in shuffled order within a case. Speed-up: over the case's first strategy, paired by repetition. "
        "Blocked: by messages or another rank, mean over ranks. Output and dx have the bits of the first strategy; "
        "where sums of nodes come home they differ by at most 1e-5.",
        "Simulated: by the cost model, on hosts and links calibrated in the same run, interleaved with these steps and "
        "apart from them: all-to-alls as large as theirs by themselves, computing by steps of fewer tokens, evenly "
        "spread. (half): bandwidth chosen so that messages take half of the first strategy's step.",
        f"Simulated within {BAR:.0%} of measured: {sum(error <= BAR for error in errors)} of {len(errors)} settings; "
        f"median of errors {statistics.median(errors):.1%}, worst {max(errors):.1%}.",
        "Pairs of strategies of one case that differ significantly (Wilcoxon signed-rank, paired by repetition, "
        f"p < {SIGNIFICANT}), simulated in their order: {right} of {differ}.",
    ]
    for result in results:
        first, *others = result.timed
        if others and (result.half or result.case.name in ("split", "nodes", "planners")):
            speed_up, best = max(
                ((Spread.of_ratios(first.samples_ms, one.samples_ms), one.strategy.name) for one in others),
                key=lambda one: one[0].median,
            )
            blocked = (first.exposed_ms or 0.0) / statistics.median(first.samples_ms)
            told.append(
                f"{result.links}, {result.case.name}: {blocked:.0%} of the step of '{first.strategy.name}' is blocked; "
                f"'{best}' is {speed_up} times as fast."
            )
    return told


def ranked_pairs(results: Sequence[CaseResult]) -> tuple[int, int]:
    """Returns how many pairs of strategies of one case are simulated in the order in which they were measured, and how
    many differ significantly: by Wilcoxon's signed-rank test over repetitions.
    """
    right = differ = 0
    for result in results:
        for one, other in combinations(result.timed, 2):
            longer_ms = np.asarray(one.samples_ms) - np.asarray(other.samples_ms)
            if not longer_ms.any() or wilcoxon(longer_ms).pvalue >= SIGNIFICANT:
                continue
            assert one.simulated_ms is not None
            assert other.simulated_ms is not None
            differ += 1
            right += bool((np.median(longer_ms) > 0) == (one.simulated_ms > other.simulated_ms))
    return right, differ


def _share_of(result: CaseResult) -> str:
    hosts, cpus = result.case.num_hosts, result.cpus_per_host
    if cpus is None:
        return f"{hosts} of them compete for its cores"
    return f"each of {hosts} has {cpus:.2g} of a processor, by a control group, whether the others compute or wait"


def report(results: Sequence[CaseResult]) -> Report:
    settings = [setting for result in results for setting in result.settings]
    sheets = [
        Sheet("MEASURED beside SIMULATED: steps between hosts with slow links", settings, group_by="links"),
        Sheet("MEASURED: what the simulator was told", results),
    ]
    introduction = ["`python -m benchmarks shaped`: MEASURED, and beside it SIMULATED."]
    data = {"machine": machine_line(1), "cases": results}
    return Report("shaped", "Slow links on one machine", "measured", sheets, notes(results), introduction, data)


def cannot_be_made(shares: bool) -> str:
    """Why this machine can make no such hosts, with the way out; empty where it can."""
    if reason := lacks():
        return f"shaped links cannot be made: {reason}"
    if shares and (reason := lacks_shares()):
        return f"hosts cannot have a share of the processor: {reason}; or use --no-shares"
    return ""


def main(
    asked: Sequence[Asked],
    *,
    repeats: int = 7,
    shares: bool = True,
    out: Path | None = None,
    json_path: Path | None = None,
) -> int:
    """Measure, write, print; the exit code: 1 if a bit was wrong, 2 where no such hosts can be made."""
    if reason := cannot_be_made(shares):
        print(f"error: {reason}", file=sys.stderr)
        return 2
    results = bench_shaped(asked, repeats, shares=shares)
    publish(report(results), page=out, json_path=json_path)
    return int(any(result.timed != result.settings for result in results))
