"""The fit knows one shape alone, its grid holds 0, and the baselines are what they say."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest

from benchmarks.published.baselines import ClosedForm, copied_row_errors, fitted_closed_form
from benchmarks.published.drawn_steps import StepSeconds, mean_of_seeds, simulate
from benchmarks.published.fit import (
    AS_GOOD,
    DISPATCHERS_MS,
    ROWS_SLOWDOWNS,
    SKEW_GROWTHS,
    UNRESTS,
    Fit,
    Steps,
    as_good,
    figures_of,
    fit,
    misfit,
    row_errors,
    simulate_grid,
    steps_by,
)
from benchmarks.published.held_out import cross_validation
from benchmarks.published.laer_figures import METHODS, ROWS, PublishedRow
from benchmarks.published.laer_setup import CONSTANTS, FITTED_SHAPE, LAER_MODELS, laer_model, laer_scenario

E8K2, E16K4, LARGE_E8K2 = "8x7b-e8k2", "8x7b-e16k4", "8x22b-e8k2"


def told(total, all_to_all=4.0):
    return StepSeconds(total, 12.0, all_to_all, 0.0, total - 20.0, 0.1)


@pytest.fixture
def made_up(monkeypatch):
    """Steps of two routings, quicker and slower by method and shape; a thin grid beside them."""
    monkeypatch.setattr("benchmarks.published.fit.DISPATCHERS_MS", (0.0, 4.0, 8.0, 12.0))
    monkeypatch.setattr("benchmarks.published.baselines.OVERHEADS_MS", (0.0, 10.0))
    return {
        (routing, model.name, method): tuple(
            Steps(told(20 + 3 * place + 5 * method_place + end), told(21 + 5 * method_place + end)) for end in (0, 8)
        )
        for routing in ((0.0, 0.0), (1.0, 1.0))
        for place, model in enumerate(LAER_MODELS)
        for method_place, method in enumerate(reversed(METHODS))
    }


def test_every_grid_holds_zero_and_goes_up():
    for grid in (SKEW_GROWTHS, UNRESTS, ROWS_SLOWDOWNS, DISPATCHERS_MS):
        assert grid[0] == 0
        assert list(grid) == sorted(set(grid))


def test_the_fit_knows_no_row_of_another_shape(made_up):
    fits, held_out = cross_validation(made_up)
    mutated = [replace(row, laer_s=2 * row.laer_s) if row.model.endswith(LARGE_E8K2) else row for row in ROWS]
    others, held_out_then = cross_validation(made_up, mutated)
    for model in LAER_MODELS:
        assert (fits[model.name] == others[model.name]) == (model.name != LARGE_E8K2)
    assert fitted_closed_form(E8K2, figures_of(E8K2, mutated).rows) == fitted_closed_form(E8K2, figures_of(E8K2).rows)
    # What is judged does change.
    assert held_out[0].fitted_on == held_out_then[0].fitted_on == FITTED_SHAPE
    assert held_out_then[0].seconds_median != held_out[0].seconds_median


def test_of_the_fitted_shape_a_row_and_a_breakdown_move_the_fit(made_up):
    figures = figures_of(FITTED_SHAPE)
    assert (len(figures.rows), len(figures.breakdown)) == (8, 3)
    best = fit(made_up, FITTED_SHAPE, figures)[0]
    slower = [replace(row, total_s=row.total_s + 9) for row in figures.breakdown]
    assert fit(made_up, FITTED_SHAPE, replace(figures, breakdown=tuple(slower)))[0] != best
    slower = [replace(row, fsdp_ep_s=row.fsdp_ep_s + 9) for row in figures.rows]
    assert fit(made_up, FITTED_SHAPE, replace(figures, rows=tuple(slower)))[0] != best


def test_what_is_as_published_has_no_misfit_and_each_group_is_as_heavy():
    figures = figures_of(E8K2)
    row = figures.rows[0]
    published = {of.method: of for of in figures.breakdown}
    steps = {
        method: Steps(
            told(row.seconds[method]),
            StepSeconds(of.total_s, of.experts_s, of.all_to_all_s, 0.0, 0.0, of.spread),
        )
        for method, of in published.items()
    }
    one = replace(figures, rows=(row,))
    assert misfit(steps, one) == pytest.approx(0, abs=1e-12)
    # Rows all 10 % late: seconds alone are wrong, one group of four.
    late = {name: replace(of, rows=told(1.1 * of.rows.total)) for name, of in steps.items()}
    assert misfit(late, one) == pytest.approx(0.1 / 2)
    uneven = {
        name: replace(of, breakdown=replace(of.breakdown, spread=of.breakdown.spread + 0.2))
        for name, of in steps.items()
    }
    assert misfit(uneven, one) == pytest.approx(0.2 / 2)


def test_as_good_is_within_a_tenth_of_the_best():
    fits = [Fit(CONSTANTS, misfit) for misfit in (0.05, 0.05 * AS_GOOD, 0.0551, 0.2)]
    assert as_good(fits) == fits[:2]


def test_the_closed_form_by_hand():
    seconds = ClosedForm(growth=2.0, overhead_ms=3.0).seconds(E8K2, replace(CONSTANTS, dispatcher_ms=77.0))
    experts_s = 32_768 * 6 * 4_096 * 14_336 / 237.95e12
    attention_s = 2 * 16_384 * (2 * 4_096**2 + 2 * 4_096 * 1_024 + 8_192 * 4_096) / 95e12
    rows_s = 32_768 * 4_096 * 2 * 7 / 8 / 216.269e9
    head_s = 3 * 2 * 2 * 16_384 * 32_000 * 4_096 / 95e12
    for method, logged in (("FSDP+EP", 1.659), ("FlexMoE", 1.481), ("LAER", 1.381)):
        a_pass = experts_s * (1 + 2 * (logged - 1)) + attention_s + rows_s + 0.003
        assert seconds[method] == pytest.approx(head_s + 4 * 2 * 32 * a_pass)


def test_the_closed_form_finds_its_own_constants():
    form = ClosedForm(growth=1.5, overhead_ms=4.0)
    row = PublishedRow("C4", 0.0, f"mixtral-{E16K4}", *form.seconds(E16K4).values(), megatron_s=1.0)
    found = fitted_closed_form(E16K4, [row])
    assert (found.growth, found.overhead_ms) == pytest.approx((1.5, 4.0))


def test_a_copied_row_by_hand():
    rows = [
        PublishedRow("C4", 0.0, f"mixtral-{E8K2}", 40.0, 32.0, 20.0, 1.0),
        PublishedRow("wikitext", 0.0, f"mixtral-{E8K2}", 44.0, 40.0, 20.0, 1.0),
        PublishedRow("wikitext", 0.1, f"qwen-{E16K4}", 1.0, 1.0, 1.0, 1.0),
    ]
    seconds, speed_ups = copied_row_errors(E8K2, rows)
    assert seconds == pytest.approx([0.1, 0.25, 0.0, 40 / 44 - 1, 0.8 - 1, 0.0])
    # 40/32 and 40/20, copied from 44/40 and 44/20; then the other way round.
    assert speed_ups == pytest.approx([1.1 / 1.25 - 1, 2.2 / 2 - 1, 1.25 / 1.1 - 1, 2 / 2.2 - 1])


def test_row_errors_by_hand():
    row = PublishedRow("C4", 0.0, "m", 40.0, 32.0, 20.0, 1.0)
    seconds, speed_ups = row_errors({"FSDP+EP": 44.0, "FlexMoE": 32.0, "LAER": 22.0}, [row])
    assert seconds == pytest.approx([0.1, 0.0, 0.1])
    assert speed_ups == pytest.approx([0.1, 0.0])


@pytest.mark.slow
def test_between_the_ends_of_the_grid_steps_are_as_simulated():
    model = laer_model("8x22b-e16k4")
    simulated = simulate_grid((model,), (2.0,), (0.5,), seeds=(0,), iterations=(16,))
    constants = replace(CONSTANTS, skew_growth=2.0, unrest=0.5, rows_slowdown=3.0, dispatcher_ms=5.0)
    found = steps_by(simulated, model.name, constants)
    scenarios = {method: laer_scenario(model, method, constants, (16,)) for method in METHODS}
    in_full = simulate(scenarios.values(), (0,), "in full", num_processes=1)
    for method, scenario in scenarios.items():
        seconds = mean_of_seeds(in_full[scenario]).seconds
        for part in ("total", "experts", "all_to_all", "rest"):
            assert getattr(found[method].rows, part) == pytest.approx(getattr(seconds, part), rel=5e-3), part


@pytest.mark.slow
def test_any_number_of_processes_gives_the_same():
    model = laer_model("8x22b-e16k4")
    scenarios = [laer_scenario(model, method, CONSTANTS, (16,)) for method in ("FSDP+EP", "LAER")]
    one, two = (simulate(scenarios, (0, 1), "processes", num_processes=number) for number in (1, 2))
    assert one == two
    assert all(math.isfinite(drawn.seconds.total) for of_seeds in one.values() for drawn in of_seeds)
