"""``bench shaped``: what the machine lacks is said first, then cases are run, written and shown."""

from __future__ import annotations

import statistics
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

from moesys.bench.harness.reports import Report, publish
from moesys.bench.harness.sheets import Column, Sheet
from moesys.bench.harness.stopwatch import Spread, machine_line
from moesys.bench.shaped.cases import Asked, CaseResult, bench_shaped
from moesys.lab.slow_links.namespaces import lacks
from moesys.lab.slow_links.processor_shares import lacks_shares

_BAR = 0.15
_DELAYS = {
    "none": "no latency of their own",
    "netem": "latency by netem",
    "relay": "latency by a delaying relay, as this kernel has no netem",
}


@dataclass(frozen=True)
class SettingRow:
    """A setting beside its case's first; of one that differs by a bit nothing else is known."""

    links: Annotated[str, Column("links")]
    strategy: Annotated[str, Column("strategy")]
    measured_ms: Annotated[Spread | None, Column("measured ms", ".0f")] = None
    speed_up: Annotated[Spread | None, Column("speed-up")] = None
    blocked_ms: Annotated[float | None, Column("blocked ms", ".0f")] = None
    max_over_mean: Annotated[float | None, Column("max/mean", ".2f")] = None
    between_hosts: Annotated[float | None, Column("between hosts", ".0%")] = None
    simulated_ms: Annotated[float | None, Column("simulated ms", ".0f")] = None
    error: Annotated[float | None, Column("error", "+.0%")] = None
    bits: Annotated[str, Column("bits")] = ""


def rows(result: CaseResult) -> list[SettingRow]:
    """One a setting."""
    found = [
        SettingRow(
            links_of(result),
            setting.strategy.name,
            measured_ms=Spread.of(setting.samples_ms, method="nearest"),
            speed_up=result.speed_up(setting),
            blocked_ms=setting.exposed_ms,
            max_over_mean=setting.max_over_mean,
            between_hosts=setting.inter_node_share,
            simulated_ms=setting.simulated_ms,
            error=setting.error,
        )
        for setting in result.settings
    ]
    return found + [SettingRow(links_of(result), name, bits="differs by a bit") for name in result.differing]


@dataclass(frozen=True)
class ToldRow:
    """What the simulator was told of a case."""

    links: Annotated[str, Column("links")]
    mbit_per_s: Annotated[float, Column("Mbit/s each way", ".0f")]
    latency_ms: Annotated[float, Column("latency ms", ".2f")]
    gflops: Annotated[float, Column("GFLOP/s a rank", ".1f")]
    launch_us: Annotated[float, Column("launch us", ".0f")]
    rest_ms: Annotated[float, Column("rest of a layer ms", ".1f")]
    copy_share: Annotated[float, Column("copy share", ".0%")]

    @staticmethod
    def of(result: CaseResult) -> ToldRow:
        cluster, rest = result.calibration.cluster, result.calibration.rest
        return ToldRow(
            f"{links_of(result)}, {result.case.name}",
            cluster.inter_node_gb_per_s * 8e3,
            cluster.inter_node_us / 1e3,
            cluster.expert_tflops * 1e3,
            cluster.launch_us,
            float(rest.other_seconds) * 3e3,
            cluster.copy_share,
        )


def links_of(result: CaseResult) -> str:
    case = result.case
    latency = f", {case.latency_us:g} us" if case.latency_us else ""
    return f"{case.num_hosts} x {case.mbit_per_s:g} Mbit/s{latency}{' (half)' if result.half else ''}"


def notes(results: Sequence[CaseResult]) -> list[str]:
    """What the table is of, and what it comes to."""
    repeats = max(len(setting.samples_ms) for result in results for setting in result.settings)
    settings = [setting for result in results for setting in result.settings]
    errors = [abs(setting.error) for setting in settings]
    delays = "; ".join(_DELAYS[delay] for delay in dict.fromkeys(result.delay for result in results))
    shares = "; ".join(dict.fromkeys(_share_of(result) for result in results))
    told = [
        f"{machine_line(1)}. Hosts are network namespaces of this machine with one rank each; {shares}; "
        f"links are shaped by tbf both ways; {delays}.",
        f"Measured: forward and backward of one layer, the slowest rank's, median [p20, p80] of {repeats} repetitions, "
        "interleaved in shuffled order within a case. Speed-up: over the case's first strategy, paired by repetition. "
        "Blocked: by messages or another rank, mean over ranks. Output and dx have the bits of the first strategy.",
        "Simulated: by the cost model, on hosts and links calibrated in the same run, interleaved with these steps and "
        "apart from them: all-to-alls as large as theirs by themselves, computing by steps of fewer tokens, evenly "
        "spread. (half): bandwidth chosen so that messages take half of the first strategy's step.",
        f"Simulated within {_BAR:.0%} of measured: {sum(error <= _BAR for error in errors)} of {len(errors)} settings; "
        f"median of errors {statistics.median(errors):.1%}, worst {max(errors):.1%}.",
    ]
    for result in results:
        best = max(result.settings[1:], key=lambda setting: result.speed_up(setting).median, default=None)
        if best is not None and (result.half or result.case.name == "split"):
            told.append(
                f"{links_of(result)}, {result.case.name}: {result.communication_share:.0%} of the step of "
                f"'{result.settings[0].strategy.name}' is blocked; '{best.strategy.name}' is "
                f"{result.speed_up(best)} times as fast."
            )
    return told


def _share_of(result: CaseResult) -> str:
    hosts, cpus = result.case.num_hosts, result.cpus_per_host
    if cpus is None:
        return f"{hosts} of them compete for its cores"
    return f"each of {hosts} has {cpus:.2g} of a processor, by a control group, whether the others compute or wait"


def report(results: Sequence[CaseResult]) -> Report:
    settings = [row for result in results for row in rows(result)]
    told = [ToldRow.of(result) for result in results]
    sheets = [
        Sheet("MEASURED beside SIMULATED: steps between hosts with slow links", settings, group_by="links"),
        Sheet("MEASURED: what the simulator was told", told),
    ]
    introduction = ["`python -m moesys bench shaped`: MEASURED, and beside it SIMULATED."]
    data = {"machine": machine_line(1), "cases": results, "rows": settings}
    return Report("shaped", "Slow links on one machine", "measured", sheets, notes(results), introduction, data)


def main(
    asked: Sequence[Asked],
    *,
    repeats: int = 7,
    shares: bool = True,
    out: Path | None = None,
    json_path: Path | None = None,
) -> int:
    """Measure, write, print; the exit code: 1 if a bit was wrong, 2 where no such hosts can be made."""
    if reason := lacks():
        print(f"error: shaped links cannot be made: {reason}", file=sys.stderr)
        return 2
    if shares and (reason := lacks_shares()):
        print(f"error: hosts cannot have a share of the processor: {reason}; or use --no-shares", file=sys.stderr)
        return 2
    results = bench_shaped(asked, repeats, shares=shares)
    publish(report(results), page=out, json_path=json_path)
    return int(any(result.differing for result in results))
