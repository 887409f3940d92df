"""``python -m benchmarks doctor``: every check in turn, and after each the page to send back."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from benchmarks.doctor.checks import CHECKS, Check
from benchmarks.doctor.crews import Crew, LocalCrew, TorchrunCrew
from benchmarks.doctor.doctor_page import PAGE, report_of, write_page
from benchmarks.doctor.place import Place
from benchmarks.doctor.verdicts import Verdict, verdict, verdict_of, why_not
from benchmarks.harness.options import chosen
from moesys.lab.ranks.torchrun_ranks import joins
from moesys.lab.show.reports import publish
from moesys.lab.show.steps import steps_told

# Several ranks on one GPU may map each other's memory; heeded before torch is loaded.
ON_GPU = {"TORCH_SYMM_MEM_ALLOW_OVERLAPPING_DEVICES": "1"}
ON_CPU = {"TRITON_INTERPRET": "1"}
# A check with less left than this is not begun.
LEAST_S = 5.0
# Budgets are a GPU's; a rehearsal, which shares few cores with others, gets so many times as much.
REHEARSED_TIMES = 4.0


@dataclass(frozen=True)
class Examination:
    """``checks`` in their order, all within ``minutes``; ``folder``: for what they find, and the page."""

    checks: Sequence[Check]
    minutes: float
    folder: Path


def asked_for(only: str, minutes: float, folder: Path) -> Examination:
    """From the words of a command line. Raises ValueError for a check that is not known."""
    by_name = {check.name: check for check in CHECKS}
    return Examination([by_name[name] for name in chosen("only", only, by_name)], minutes, folder)


def main(asked: Examination) -> int:
    """Examines, writes, prints; 1 if a check failed."""
    most_gpus = torch.cuda.device_count() if torch.cuda.is_available() else 0
    asked.folder.mkdir(parents=True, exist_ok=True)
    place = Place("cuda" if most_gpus else "cpu", asked.folder.resolve(), most_gpus)
    environment = ON_GPU if most_gpus else ON_CPU
    longest_s = REHEARSED_TIMES * max(check.budget_s for check in asked.checks)
    crew: Crew = TorchrunCrew(environment, longest_s) if joins() else LocalCrew(environment)
    verdicts = examine(asked, crew, place)
    if crew.rank == 0:
        publish(report_of(verdicts, place.rehearsed, without=("proves", "budget_s")))
        print(f"to send back: {asked.folder / PAGE}")
    return int(any(of.state == "failed" for of in verdicts))


def examine(asked: Examination, crew: Crew, place: Place) -> list[Verdict]:
    """The verdict of each check; those that depend on one that failed are left out, others go on."""
    end_s = time.monotonic() + 60 * asked.minutes
    done: dict[str, Verdict] = {}
    with steps_told("doctor", len(asked.checks)) as tell:
        for check in asked.checks:
            if crew.rank == 0:
                tell(check.name)
            done[check.name] = _verdict(check, done, crew, place, end_s)
            if crew.rank == 0:
                to_come = [verdict(other, "to come", "") for other in asked.checks[len(done) :]]
                write_page(place.folder, [*done.values(), *to_come], place.rehearsed)
    return list(done.values())


def _verdict(check: Check, done: dict[str, Verdict], crew: Crew, place: Place, end_s: float) -> Verdict:
    if reason := why_not(check, done):
        return verdict(check, "left out", reason)
    left_s = crew.agreed(end_s - time.monotonic())
    if left_s < LEAST_S:
        return verdict(check, "left out", f"its time was up; ask for --only '{check.name}', or for more --minutes")
    begin_s = time.monotonic()
    budget_s = check.budget_s * (REHEARSED_TIMES if place.rehearsed else 1.0)
    outcomes = crew.run(check, place, min(budget_s, left_s))
    return verdict_of(check, outcomes, time.monotonic() - begin_s)
