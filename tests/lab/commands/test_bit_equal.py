"""Strategies with the baseline's ``LayoutInvariant``: a loss of other bits is an error in tables, words, exit codes."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path

import pytest
from lab_cases import EP, FSEP, experiment, record
from typer.testing import CliRunner

import moesys as ms
from moesys.__main__ import app
from moesys.config import Reduction
from moesys.lab.runs.comparison import JUDGED_STEPS, Comparison, compare_records
from moesys.lab.runs.records import Record, RunFolder
from moesys.lab.show.comparisons import comparison_sheet

STEPS = 2 * JUDGED_STEPS
LOSSES = [5.0 - step / 8 for step in range(STEPS)]


def invariant(*reductions: Reduction) -> ms.Experiment:
    """``ep``, ``fsep`` and ``plain`` with these, as many."""
    plain = EP.replace(name="plain")
    strategies = (of.replace(reduction=reduction) for of, reduction in zip((EP, FSEP, plain), reductions, strict=False))
    return experiment(strategies=tuple(strategies), workload=ms.Training(steps=STEPS, warmup=0))


EXACT = invariant(ms.LayoutInvariant(), ms.LayoutInvariant())


def records(of: ms.Experiment, step: int | None = None) -> list[Record]:
    """``step``: from which on ``fsep`` is one unit in the last place off, under seed 1."""
    found = [record(trial, losses=list(LOSSES)) for trial in of.trials()]
    for number, each in enumerate(found):
        if step is not None and (each.strategy, each.seed) == ("fsep", 1):
            found[number] = replace(each, losses=[*LOSSES[:step], math.nextafter(LOSSES[step], 9), *LOSSES[step + 1 :]])
    return found


def agreement_cells(comparison: Comparison) -> list[str]:
    return [row.agreement for row in comparison_sheet(comparison).rows]


@pytest.mark.parametrize("step", [0, JUDGED_STEPS - 1, STEPS - 2])
def test_one_bit_in_whichever_step_is_a_row_that_is_unequal_and_shows_no_speed(step: int) -> None:
    comparison = compare_records(EXACT, records(EXACT, step))
    (row,) = comparison.unequal
    assert (row.name, row.speedup, row.agreement.steps_within, row.agreement.seed) == ("fsep", None, step, 1)
    assert agreement_cells(comparison) == ["reference", f"DIVERGES at step {step}"]


def test_what_is_equal_is_no_error() -> None:
    comparison = compare_records(EXACT, records(EXACT))
    assert comparison.rows[1].agreement.exact
    assert comparison.unequal == ()
    assert agreement_cells(comparison) == ["reference", "bit-equal"]
    not_numbers = [replace(each, losses=[math.nan, math.inf]) for each in records(EXACT)]
    assert compare_records(EXACT, not_numbers).unequal == ()


@pytest.mark.parametrize(
    "reductions",
    [
        (ms.LayoutInvariant(), ms.Ordered()),
        (ms.Ordered(), ms.Ordered()),
        (ms.LayoutInvariant(), ms.LayoutInvariant(block_rows=512)),
    ],
)
def test_other_reductions_promise_nothing(reductions: tuple[Reduction, ...]) -> None:
    of = invariant(*reductions)
    comparison = compare_records(of, records(of, 3))
    assert not comparison.rows[1].agreement.exact
    assert comparison.unequal == ()
    assert agreement_cells(comparison) == ["reference", "1.9e-16"]


def test_a_strategy_that_promises_nothing_takes_no_promise_from_others() -> None:
    of = invariant(ms.LayoutInvariant(), ms.LayoutInvariant(), ms.Ordered())
    comparison = compare_records(of, records(of, 3))
    assert [(row.name, row.agreement.exact) for row in comparison.unequal] == [("fsep", True)]
    assert sorted(agreement_cells(comparison)) == ["DIVERGES at step 3", "bit-equal", "reference"]


def test_records_of_two_machines_are_promised_nothing() -> None:
    first, *rest = records(EXACT, 3)
    comparison = compare_records(EXACT, [replace(first, environment="another"), *rest])
    assert comparison.unequal == ()


def moesys(*arguments):
    result = CliRunner().invoke(app, [*map(str, arguments)])
    return result.exit_code, result.stderr, result.stdout


def recorded(out: Path, of: list[Record]) -> Path:
    with RunFolder.open(EXACT, out) as folder:
        for each in of:
            folder.append(each)
        return folder.path


def test_commands_say_which_strategy_from_which_step_and_what_to_do_and_fail(tmp_path: Path) -> None:
    path = recorded(tmp_path, records(EXACT, 3))
    said = (
        "Error: fsep is not bit-equal to ep: their losses differ from step 3 of seed 1 on; to find the tensor, layer "
        f"and rank: moesys bisect {path} ep fsep --seed 1\n"
    )
    *compared, table = moesys("compare", path)
    assert compared == [1, said]
    assert "DIVERGES at step 3" in table
    # All that it would run is recorded.
    (tmp_path / "it.json").write_text(EXACT.to_json())
    assert moesys("run", tmp_path / "it.json", "--out", tmp_path)[:2] == (1, said)
    assert moesys("compare", recorded(tmp_path / "well", records(EXACT)))[:2] == (0, "")
