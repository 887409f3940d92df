"""What may not change: plans, simulated steps and tables are those of the golden files, floats to 12 digits.

Who changes them on purpose runs ``python tests/golden/make.py``.
"""

from __future__ import annotations

import math
import re
from itertools import zip_longest
from pathlib import Path

import pytest
from make import STUB, stub
from plan_cases import plan_lines
from step_cases import step_lines
from table_cases import table_files

FILES = Path(__file__).with_name("files")
FRACTION = re.compile(r"\d+\.\d+(?:e[-+]?\d+)?")
# the 12th digit may be rounded either way
TOLERANCE = 1e-11


def same(line: str, golden: str) -> bool:
    """The same words, and fractions equal to 12 digits: another machine may round a sum's 16th in its own way."""
    if line == golden:
        return True
    here, there = FRACTION.findall(line), FRACTION.findall(golden)
    close = all(
        math.isclose(float(a), float(b), rel_tol=TOLERANCE) for a, b in zip_longest(here, there, fillvalue="nan")
    )
    return close and FRACTION.sub("", line) == FRACTION.sub("", golden)


def assert_golden(name: str, text: str, leave_out: str = "(nothing)") -> None:
    """``leave_out``: what lines hold that are not compared."""
    both = ([line for line in of.splitlines() if leave_out not in line] for of in (text, (FILES / name).read_text()))
    pairs = zip_longest(*both, fillvalue="(no line)")
    differing = [f"golden  {b}\n   now  {a}" for a, b in pairs if not same(a, b)]
    shown = "\n".join(differing[:10])
    assert not differing, f"{len(differing)} lines of {name} differ; see tests/golden/make.py\n{shown}"


def test_plans_are_golden():
    lines = list(plan_lines())
    release = (FILES / "plans.txt").read_text().partition("\n")[0]
    if lines[0] == release:
        assert_golden("plans.txt", "\n".join(lines))
    else:
        # another release of OR-Tools may find another layout as good
        lines[0] = release
        assert_golden("plans.txt", "\n".join(lines), leave_out="| cp_sat")


def test_simulated_steps_are_golden():
    assert_golden("steps.txt", "\n".join(step_lines()) + "\n")


def test_tables_of_recorded_experiments_are_golden(tmp_path: Path):
    for name, text in table_files(tmp_path):
        assert_golden(name, text)


@pytest.mark.parametrize(
    ("line", "golden", "is_same"),
    [
        ("a 1.23456789012 b", "a 1.23456789013 b", True),
        ("a 1.23456789012 b", "a 1.23456789112 b", False),
        ("a 1.5 b", "a 1.5 c", False),
        ("a 1.5", "a 1.5 1.5", False),
        ("layout 12e4", "layout 12e5", False),
    ],
)
def test_golden_lines_are_compared_to_12_digits(line: str, golden: str, is_same: bool):
    assert same(line, golden) is is_same


def test_type_checkers_see_the_public_names() -> None:
    assert STUB.read_text() == stub()
