"""What ``bench shaped`` has to say: a table on a terminal, a page, data."""

from __future__ import annotations

import json
import statistics
from collections.abc import Sequence
from dataclasses import asdict
from datetime import UTC, datetime
from typing import Any

from rich.table import Table

from moesys.bench.harness.stopwatch import machine_line
from moesys.bench.shaped.cases import CaseResult
from moesys.lab.show.console import print_full

COLUMNS = (
    "links",
    "strategy",
    "measured ms",
    "speed-up",
    "blocked ms",
    "max/mean",
    "between hosts",
    "simulated ms",
    "error",
)
_BAR = 0.15
_DELAYS = {
    "none": "no latency of their own",
    "netem": "latency by netem",
    "relay": "latency by a delaying relay, as this kernel has no netem",
}


def rows(result: CaseResult) -> list[tuple[str, ...]]:
    """One a setting, in the order of ``COLUMNS``."""
    found: list[tuple[str, ...]] = []
    for setting in result.settings:
        low, high = (sorted(setting.samples_ms)[place] for place in _near(len(setting.samples_ms)))
        found.append(
            (
                links_of(result),
                setting.strategy.name,
                f"{setting.median_ms:.0f} [{low:.0f}, {high:.0f}]",
                "1" if setting is result.settings[0] else str(result.speed_up(setting)),
                f"{setting.exposed_ms:.0f}",
                f"{setting.max_over_mean:.2f}",
                f"{setting.inter_node_share:.0%}",
                f"{setting.simulated_ms:.0f}",
                f"{setting.error:+.0%}",
            )
        )
    found += [(links_of(result), name, "differs by a bit", *[""] * 6) for name in result.differing]
    return found


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


def calibrations(results: Sequence[CaseResult]) -> list[tuple[str, ...]]:
    """What the simulator was told, under the names of ``CALIBRATED``."""
    found: list[tuple[str, ...]] = []
    for result in results:
        cluster, rest = result.calibration.cluster, result.calibration.rest
        found.append(
            (
                f"{links_of(result)}, {result.case.name}",
                f"{cluster.inter_node_gb_per_s * 8e3:.0f}",
                f"{cluster.inter_node_us / 1e3:.2f}",
                f"{cluster.expert_tflops * 1e3:.1f}",
                f"{cluster.launch_us:.0f}",
                f"{float(rest.other_seconds) * 3e3:.1f}",
                f"{cluster.copy_share:.0%}",
            )
        )
    return found


CALIBRATED = (
    "links",
    "Mbit/s each way",
    "latency ms",
    "GFLOP/s a rank",
    "launch us",
    "rest of a layer ms",
    "copy share",
)


def show(results: Sequence[CaseResult]) -> None:
    table = Table(title="MEASURED beside SIMULATED: steps between hosts with slow links", title_justify="left")
    for place, column in enumerate(COLUMNS):
        table.add_column(column, justify="left" if place < 2 else "right", no_wrap=True)
    for result in results:
        for row in rows(result):
            table.add_row(*row)
        table.add_section()
    told = Table(title="MEASURED: what the simulator was told", title_justify="left")
    for place, column in enumerate(CALIBRATED):
        told.add_column(column, justify="left" if place < 1 else "right", no_wrap=True)
    for row in calibrations(results):
        told.add_row(*row)
    print_full(table, [])
    print_full(told, notes(results))


def markdown(results: Sequence[CaseResult]) -> str:
    date = datetime.now(UTC).date().isoformat()
    return "\n".join(
        [
            f"# Slow links on one machine, {date}",
            "",
            "`python -m moesys bench shaped`: MEASURED, and beside it SIMULATED.",
            "",
            *_table(COLUMNS, [row for result in results for row in rows(result)]),
            "",
            *(line + "\n" for line in notes(results)),
            "What the simulator was told, MEASURED:",
            "",
            *_table(CALIBRATED, calibrations(results)),
            "",
        ]
    )


def to_json(results: Sequence[CaseResult]) -> str:
    """Everything, with all samples."""
    data: dict[str, Any] = {"benchmark": "shaped", "machine": machine_line(1), "cases": []}
    for result in results:
        case = result.case
        data["cases"].append(
            {
                "case": case.name,
                "num_hosts": case.num_hosts,
                "mbit_per_s": case.mbit_per_s,
                "latency_us": case.latency_us,
                "delay": result.delay,
                "cpus_per_host": result.cpus_per_host,
                "num_tokens": case.num_tokens,
                "popularity": case.popularity,
                "model": case.shape.model_dump(mode="json"),
                "cluster": result.calibration.cluster.model_dump(mode="json"),
                "other_seconds": result.calibration.rest.other_seconds,
                "computed_ms": result.calibration.computed_ms,
                "exchange_ms": result.calibration.links.exchange_ms,
                "settings": [
                    {
                        "strategy": setting.strategy.model_dump(mode="json"),
                        "samples_ms": setting.samples_ms,
                        "exposed_ms": setting.exposed_ms,
                        "simulated_ms": setting.simulated_ms,
                        "error": setting.error,
                        "speed_up": asdict(result.speed_up(setting)),
                        "max_over_mean": setting.max_over_mean,
                        "inter_node_share": setting.inter_node_share,
                    }
                    for setting in result.settings
                ],
                "differing": result.differing,
            }
        )
    return json.dumps(data, indent=1) + "\n"


def _table(columns: Sequence[str], body: Sequence[Sequence[str]]) -> list[str]:
    return [f"| {' | '.join(row)} |" for row in (columns, ["---"] * len(columns), *body)]


def _near(count: int) -> tuple[int, int]:
    """Places of the 20th and 80th percentile of so many sorted samples."""
    return round(0.2 * (count - 1)), round(0.8 * (count - 1))
