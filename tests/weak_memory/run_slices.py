"""Runs schedules by seed, as many as there is time for, or a table of mutants: from the root,

python tests/weak_memory/run_slices.py --seeds 0 100
python tests/weak_memory/run_slices.py --mutants 10
"""

from __future__ import annotations

import argparse
import os
import sys
import time
from collections.abc import Sequence
from pathlib import Path

TESTS = Path(__file__).parents[1]
os.environ["TRITON_INTERPRET"] = "1"
sys.path[:0] = [str(TESTS), str(TESTS / "overlap"), str(TESTS.parent)]

import torch  # noqa: E402  # as kernels are imported once the interpreter is chosen
from conftest import fill_new_memory, quicken_interpreter  # noqa: E402
from interleaved_interpreter import interleaved  # noqa: E402
from mutants import Found, Hunt, all_mutants  # noqa: E402
from weak_cases import all_cases, run_once  # noqa: E402

# Seconds between two lines of progress.
PROGRESS_S = 20.0


def run_slice(first: int, last: int, names: Sequence[str]) -> int:
    cases, began, said, schedules, steps, failures = all_cases(), time.monotonic(), 0.0, 0, 0, 0
    with interleaved():
        for seed in range(first, last):
            for name in names or cases:
                shown = run_once(cases[name], seed)
                schedules, steps, found = schedules + 1, steps + shown.steps, [*shown.by_memory, *shown.by_result]
                if found:
                    failures += 1
                    print(f"seed {seed} of {name}: {found[0]} … {found[-1]}", flush=True)
                if time.monotonic() - said > PROGRESS_S:
                    said = time.monotonic()
                    took = f"{said - began:.0f} s"
                    print(f"{schedules} schedules, {steps} steps, {failures} failures, {took}, seed {seed}", flush=True)
    print(f"in all {schedules} schedules, {steps} steps, {failures} failures, {time.monotonic() - began:.0f} s")
    return failures


def run_mutants(seeds: int, part: str) -> int:
    missed = 0
    with interleaved():
        hunt = Hunt(all_cases())
        for mutant in all_mutants():
            if part in mutant.name:
                found = hunt.find(mutant, seeds, seeds)
                missed += found == Found()
                print(f"{mutant.name} | {found.case} | {found.by_memory} | {found.by_result}", flush=True)
    return missed


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seeds", type=int, nargs=2, default=(0, 10), help="the first, and the one behind the last")
    parser.add_argument("--cases", nargs="*", default=(), help="their names; all without")
    parser.add_argument("--mutants", type=int, default=0, help="seeds of each case to find each mutant by")
    parser.add_argument("--part", default="", help="of the names of mutants")
    chosen = parser.parse_args()
    torch.set_num_threads(1)
    quicken_interpreter()
    fill_new_memory()
    if chosen.mutants:
        return run_mutants(chosen.mutants, chosen.part)
    return run_slice(*chosen.seeds, chosen.cases)


if __name__ == "__main__":
    sys.exit(bool(main()))
