"""The pytest plug-in of the GPU checks: the time budget, the order, the ranks, and the report to send back.

A check is a test with the marker ``gpu``, whose arguments are the fields of ``Check``; the marker of a module holds
the fields that its checks share. A check takes ``gpu``, a ``GpuRank``, and returns one line for the report. It runs in
new processes, because a fault on a GPU poisons the process that made it, and a kernel that hangs takes its process
with it. The process of pytest itself never touches a GPU. Without a GPU, checks are rehearsed on small inputs in
Triton's interpreter.
"""

from __future__ import annotations

import io
import re
import socket
import sys
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Any, Literal, get_args

import pytest
import torch
from gpu_ranks import Check, GpuRank, outcome_of_torchrun, outcomes_here

from moesys.files import write_whole
from moesys.lab.ranks.pool import RankError
from moesys.lab.ranks.process import Outcome
from moesys.lab.ranks.process_start import writes
from moesys.lab.ranks.torchrun_ranks import TorchrunRanks, joins
from moesys.lab.show.sheets import Column, Report, Sheet, publish, to_markdown, write

State = Literal["passed", "failed", "skipped", "not run yet"]

PAGE, DATA = "doctor.md", "doctor.json"
# A check does not start with less time than this.
LEAST_S = 5.0
# The pool of ranks ends a check at its limit. pytest-timeout ends it this much later if the pool itself hangs.
POOL_S = 60.0
# Limits are for a GPU; a rehearsal, which shares a few cores with other processes, has this many times as much.
REHEARSAL_FACTOR = 4.0
# Lines of each traceback in the report.
TRACE_LINES = 30


@dataclass(frozen=True)
class CheckResult:
    """A row of the report.

    says: what was observed, or why the check failed or was skipped. traces: tracebacks by rank.
    """

    name: Annotated[str, Column("check", wraps=True)]
    layer: Annotated[str, Column("layer")]
    state: Annotated[State, Column("result", lambda state: "FAILED" if state == "failed" else state, kept=True)]
    says: Annotated[str, Column("observation, or reason", wraps=True, kept=True)]
    seconds: Annotated[float | None, Column("s", ".1f", kept=True)]
    limit_s: Annotated[float, Column("limit, s", ".0f")]
    proves: Annotated[str, Column("what it proves")]
    traces: Mapping[str, str]


class GpuRun:
    """The checks of one run of pytest: which ones ran, what they found, and how much time is left."""

    def __init__(self, minutes: float, folder: Path) -> None:
        self._minutes, self._folder = minutes, folder.absolute()
        self._checks: dict[str, Check] = {}
        self._results: dict[str, CheckResult] = {}

    def pytest_collection_finish(self, session: pytest.Session) -> None:
        items = [item for item in session.items if item.get_closest_marker("gpu")]
        if not items or session.config.option.collectonly:
            return
        self._checks = {item.nodeid: Check.of(item) for item in items}
        self._here = GpuRank(self._folder, torch.cuda.device_count() if torch.cuda.is_available() else 0)
        self._factor = REHEARSAL_FACTOR if self._here.rehearsed else 1.0
        self._joined = TorchrunRanks() if joins() else None
        for item in items:
            item.add_marker(pytest.mark.timeout(self._factor * self._checks[item.nodeid].limit_s + POOL_S))
        self._folder.mkdir(parents=True, exist_ok=True)
        self._end_s = time.monotonic() + 60 * self._minutes

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtest_setup(self, item: pytest.Item) -> None:
        if (check := self._checks.get(item.nodeid)) is None:
            return
        if obstacle := next(filter(None, map(self._obstacle, check.after)), None):
            pytest.skip(obstacle)
        self._left_s = self._of_all(self._end_s - time.monotonic())[0]
        if self._left_s < LEAST_S:
            pytest.skip(f"no time was left; run it by itself, pytest -m gpu {item.nodeid}, or increase --gpu-minutes")

    @pytest.hookimpl(tryfirst=True)
    def pytest_pyfunc_call(self, pyfuncitem: pytest.Function) -> object | None:
        if (check := self._checks.get(pyfuncitem.nodeid)) is None:
            return None
        outcomes = self._outcomes(check, min(self._factor * check.limit_s, self._left_s))
        if check.dies:
            outcomes = [outcome for outcome in outcomes if outcome.rank < len(outcomes) - 1]
        if any(outcome.kind != "returned" for outcome in outcomes):
            error = RankError(outcomes)
            traces = {f"rank {rank}": trace for rank, trace in error.failures.items()}
            pyfuncitem.user_properties.append(("traces", traces))
            pytest.fail(str(error), pytrace=False)
        ran = [outcome.result for outcome in outcomes]
        if reason := next((reason for reason, _ in ran if reason), ""):
            pytest.skip(reason)
        pyfuncitem.user_properties.append(("says", ran[0][1]))
        return True

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if (check := self._checks.get(report.nodeid)) is None or (report.passed and report.when != "call"):
            return
        says = report.longreprtext.partition("\n")[0]
        if report.skipped:
            says = report.longrepr[2].removeprefix("Skipped: ")
        found: dict[str, Any] = {"says": says, **dict(report.user_properties)}
        seconds = report.duration if report.when == "call" else None
        self._results[check.name] = _row(check, report.outcome, seconds, **found)
        if writes():
            self._write()

    def pytest_terminal_summary(self) -> None:
        if self._results and writes():
            publish(self._report(without=("proves", "limit_s")))
            print(f"Report to send back: {self._folder / PAGE}")

    def _obstacle(self, name: str) -> str:
        """Why a check that depends on ``name`` would prove nothing, or "".

        A check that ran and was skipped because this machine lacks something is no obstacle.
        """
        result = self._results.get(name)
        if result is None or result.state == "passed" or (result.state == "skipped" and result.seconds is not None):
            return ""
        if result.says.startswith("depends on "):
            # The first cause is named, and not each check between.
            return result.says
        return f"depends on '{name}', which {'failed' if result.state == 'failed' else 'was skipped'}"

    def _of_all(self, own: Any) -> list[Any]:
        """Returns the values of all of torchrun's ranks, which call this together."""
        return [own] if self._joined is None else self._joined.gather(own)

    def _outcomes(self, check: Check, limit_s: float) -> list[Outcome]:
        """Returns the outcome of each rank. Torchrun's ranks run the same checks, each in a process of its own."""
        if self._joined is None:
            return outcomes_here(check, self._here, limit_s)
        own: list[Outcome] = []
        with closing(socket.socket()) as free:
            free.bind(("", 0))
            port = self._of_all(free.getsockname()[1])[0]
        if check.ranks in ("alone", "together"):
            own = [outcome_of_torchrun(check, self._here, limit_s, port)]
        elif writes():
            own = outcomes_here(check, replace(self._here, num_gpus=min(1, self._here.num_gpus)), limit_s)
        return [outcome for outcomes in self._of_all(own) for outcome in outcomes]

    def _report(self, without: Sequence[str] = ()) -> Report:
        checks = self._checks.values()
        rows = [self._results.get(check.name) or _row(check, "not run yet") for check in checks]
        first = next((row for row in rows if row.state == "failed"), None)
        counts = Counter(row.state for row in rows)
        notes = [
            ", ".join(f"{counts[state]} {state}" for state in get_args(State) if counts[state]),
            f"First failure: '{first.name}', in the layer '{first.layer}'." if first else "No check failed.",
            f"torch {torch.__version__}, CUDA {torch.version.cuda or 'none'}",
        ]
        if self._here.rehearsed:
            notes.append("REHEARSED without a GPU, in Triton's interpreter on small inputs: no GPU was tested.")
        source = "rehearsed" if self._here.rehearsed else "measured"
        sheet = Sheet("Checks", rows, notes, without=without)
        return Report("doctor gpu", f"GPU checks, {source}", source, [sheet], data={"checks": rows})

    def _write(self) -> None:
        """Writes the table, the tracebacks, and the pages that checks wrote into the folder."""
        report = self._report()
        write(report, json_path=self._folder / DATA)
        parts = [to_markdown(report)]
        for result in self._results.values():
            for rank, trace in result.traces.items():
                last = "\n".join(trace.rstrip().splitlines()[-TRACE_LINES:])
                parts.append(f"## {result.name}, {rank}\n\n```\n{last}\n```\n")
        pages = sorted(page for page in self._folder.rglob("*.md") if page != self._folder / PAGE)
        parts += [re.sub(r"^(#+ )", r"#\1", page.read_text(encoding="utf-8"), flags=re.MULTILINE) for page in pages]
        write_whole(self._folder / PAGE, "\n".join(parts))


def pytest_addoption(parser: pytest.Parser) -> None:
    group = parser.getgroup("gpu", "GPU checks, pytest -m gpu tests/gpu")
    group.addoption("--gpu-minutes", type=float, default=10.0, help="Checks that have not started by then are skipped.")
    group.addoption("--gpu-report", metavar="DIR", type=Path, default=Path("doctor"), help="Folder of the report.")


def pytest_configure(config: pytest.Config) -> None:
    config.pluginmanager.register(GpuRun(config.getoption("--gpu-minutes"), config.getoption("--gpu-report")))
    if not writes():
        # pytest's reporter, which is configured next, keeps the stdout of this moment: only the first rank prints.
        sys.stdout = io.StringIO()


@pytest.fixture
def gpu() -> None:
    """The rank that a check runs on; the plug-in passes it to the check in the rank's process."""


def _row(
    check: Check, state: State, seconds: float | None = None, says: str = "", traces: Mapping[str, str] | None = None
) -> CheckResult:
    proves = (check.function.__doc__ or "").partition("\n")[0]
    return CheckResult(check.name, check.layer, state, says, seconds, check.limit_s, proves, traces or {})
