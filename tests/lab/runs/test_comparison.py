"""What records mean: rows in order, ties, agreement with the baseline, and no mixture of sources."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
from lab_cases import EP, FSEP, FSEP_WIDE, MODEL, experiment, record, records, simulated

from moesys.lab.runs.comparison import agreement, compare_records
from moesys.lab.show.comparisons import comparison_sheet

MS = {"ep": 10.0, "fsep": 8.0, FSEP_WIDE.name: 5.0}
THREE = {"strategies": (EP, FSEP, FSEP_WIDE), "seeds": tuple(range(8))}


def test_the_baseline_is_first_and_then_the_fastest():
    of = experiment(**THREE, repeat_baseline=True)
    comparison = compare_records(of, records(of, MS))
    assert [row.name for row in comparison.rows] == ["ep", "ep (again)", FSEP_WIDE.name, "fsep"]
    assert comparison.source == "measured"
    assert comparison.n == 8
    assert comparison.baseline.speedup is None
    again, wide, fsep = (row.speedup for row in comparison.rows[1:])
    assert (again.estimate, wide.estimate, fsep.estimate) == pytest.approx((1.0, 2.0, 1.25))


def test_what_would_not_run_comes_last_and_is_never_the_best():
    of = simulated(**THREE)
    of_all = records(of, MS)
    marked = [replace(one, would_not_run="no room") if one.strategy == FSEP_WIDE.name else one for one in of_all]
    comparison = compare_records(of, marked)
    assert [row.name for row in comparison.rows] == ["ep", "fsep", FSEP_WIDE.name]
    assert comparison.best == {"fsep"}
    assert ", fastest 'fsep', " in repr(comparison)
    assert compare_records(of, of_all).best == {FSEP_WIDE.name}
    sheet = comparison_sheet(comparison)
    assert [row.would_run for row in sheet.rows] == ["yes", "yes", "no"]
    assert f"Would not run: {FSEP_WIDE.name}: no room." in sheet.notes
    assert {row.would_run for row in comparison_sheet(compare_records(of, of_all)).rows} == {""}


def test_simulated_and_measured_never_mix():
    of = experiment()
    measured = records(of, MS)
    last = of.trials()[-1]
    way_out = rf"{last.strategy.name} with seed {last.seed} was simulated, .* measured; compare .* side by side, in two"
    with pytest.raises(ValueError, match=way_out):
        compare_records(of, [*measured[:-1], replace(measured[-1], source="simulated")])


def test_records_of_other_experiments_are_left_alone():
    of = experiment()
    others = records(experiment(seeds=(7,)), MS) + records(simulated(), MS)
    assert compare_records(of, records(of, MS) + others) == compare_records(of, records(of, MS))


def test_a_failed_trial_is_counted_and_named_until_it_is_run_again():
    of = experiment()
    well = records(of, MS)
    trial = of.trials()[0]
    failed = record(trial, status="failed", samples={}, losses=[], error="RuntimeError: rank 2 died")
    row = next(row for row in compare_records(of, [failed, *well[1:]]).rows if row.strategy.name == trial.strategy.name)
    assert row.n == 1
    assert row.failed == {trial.seed: "RuntimeError: rank 2 died"}
    assert compare_records(of, [failed, *well]) == compare_records(of, well)


def test_without_records_every_row_is_empty():
    comparison = compare_records(experiment(), [])
    assert [(row.n, row.speedup, row.agreement, row.final_loss) for row in comparison.rows] == 2 * [(0, *[None] * 3)]
    assert comparison.best == frozenset()


def test_a_baseline_that_failed_leaves_no_speedup():
    of = experiment()
    comparison = compare_records(of, [each for each in records(of, MS) if each.strategy != "ep"])
    assert comparison.rows[1].speedup is None
    assert comparison.rows[1].median("step_ms") is not None


@pytest.mark.parametrize(
    ("step_ms", "best"),
    [
        ({"fsep": 8.0, FSEP_WIDE.name: 5.0}, {FSEP_WIDE.name}),
        ({"fsep": 5.0, FSEP_WIDE.name: 5.0}, set()),
        ({"fsep": 20.0, FSEP_WIDE.name: 20.0}, {"ep"}),
        ({"fsep": 10.0, FSEP_WIDE.name: 20.0}, set()),
        ({"fsep": 10.0, FSEP_WIDE.name: 10.0}, set()),
    ],
)
def test_the_best_is_faster_than_every_other(step_ms, best):
    of = experiment(**THREE, repeat_baseline=True)
    comparison = compare_records(of, records(of, {"ep": 10.0} | step_ms, noise=0.0))
    assert comparison.best == best
    assert not best or f", fastest {min(best)!r}, " in repr(comparison)


def test_the_runner_up_is_compared_directly_and_not_by_its_own_interval():
    """Each is as noisy against the baseline as can be, yet one is always a tenth faster than the other."""
    of = experiment(**THREE)
    noisy = [0.5, 0.9, 1.3, 1.7, 0.7, 1.1, 1.5, 1.9]
    of_records = [
        record(trial, step_ms=10.0 if trial.strategy == EP else MS[trial.strategy.name] * noisy[trial.seed])
        for trial in of.trials()
    ]
    comparison = compare_records(of, of_records)
    _, first, second = comparison.rows
    assert first.speedup.low < second.speedup.high
    assert second.name not in comparison.best


def test_too_few_seeds_make_no_best():
    of = experiment(seeds=range(5))
    comparison = compare_records(of, records(of, MS))
    assert comparison.rows[1].speedup.verdict == "too few seeds to tell"
    assert comparison.best == frozenset()


@pytest.mark.parametrize(("dtype", "tolerance"), [("float32", 1e-4), ("bfloat16", 2e-2), ("float16", 5e-3)])
@pytest.mark.parametrize(("share", "holds"), [(0.9, True), (1.1, False)])
def test_no_speed_is_shown_where_losses_differ(dtype, tolerance, share, holds):
    of = experiment(model=MODEL.replace(dtype=dtype))
    off = 1 + share * tolerance
    near = [
        replace(each, losses=[*each.losses[:-1], each.losses[-1] * (off if each.strategy == "fsep" else 1)])
        for each in records(of, MS)
    ]
    row = compare_records(of, near).rows[1]
    assert row.agreement.difference == pytest.approx(share * tolerance)
    assert (row.agreement.bit_equal, row.agreement.holds, row.speedup is not None) == (False, holds, holds)


def test_trainings_that_part_late_show_their_speed_and_the_step():
    reference = [4.0] * 40
    for first_off, holds in ((9, False), (10, True), (39, True)):
        losses = [loss * (1.5 if step >= first_off else 1 + 1e-8) for step, loss in enumerate(reference)]
        parted = agreement({0: reference, 1: reference}, {0: losses, 1: reference}, 1e-4)
        assert (parted.difference, parted.steps_within, parted.num_steps) == (0.5, first_off, 40)
        assert parted.holds is holds


def test_measured_rows_without_losses_show_no_speed():
    of = experiment()
    row = compare_records(of, [replace(each, losses=[]) for each in records(of, MS)]).rows[1]
    assert (row.agreement, row.speedup) == (None, None)


@pytest.mark.parametrize(
    ("losses", "reference", "difference"),
    [
        ([1.0, 2.0], [1.0, 2.0], 0.0),
        ([1.0, 2.5], [1.0, 2.0], 0.25),
        ([1.0, math.nan], [1.0, math.nan], math.inf),
        ([1.0, math.inf], [1.0, math.inf], math.inf),
        ([1.0, 0.0], [1.0, 0.0], 0.0),
        ([1.0, 2.0], [1.0, math.nan], math.inf),
        ([1.0, math.inf], [1.0, 2.0], math.inf),
        ([1.0, 2.0], [1.0, 0.0], math.inf),
        ([1.0], [1.0, 2.0], math.inf),
        ([], [1.0], math.inf),
    ],
)
def test_the_largest_relative_difference(losses, reference, difference):
    assert agreement({0: [3.0], 1: reference, 2: [9.0]}, {0: [3.0], 1: losses}, 1e-4).difference == difference


def test_the_environments_of_the_records_are_listed():
    of = experiment()
    first, *rest = records(of, MS)
    assert compare_records(of, [first, *rest]).environments == ("0123abcd",)
    assert set(compare_records(of, [replace(first, environment="f"), *rest]).environments) == {"f", "0123abcd"}
