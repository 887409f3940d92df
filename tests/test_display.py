"""Results in interactive sessions: a line, a table, HTML, a data frame, a plot; and declarations that read back."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import matplotlib
import matplotlib.pyplot as plt
import numpy as np
import pytest
from rich.console import Console
from runner_cases import EP, FSEP, simulation

import moesys as ms
from moesys.simulator import step_program
from moesys.timeline import Timeline

ODD = "<b>[red]"
CLUSTER = ms.ClusterSpec(ranks_per_node=2)
MODEL = ms.ModelShape(hidden_size=16, intermediate_size=16, num_experts=8, top_k=2)
STRATEGY = FSEP.replace(name=ODD)
EXPERIMENT = simulation(name="tour", strategies=(EP, STRATEGY))
TRACE = ms.traces.Trace(np.arange(64).reshape(2, 2, 2, 8) % 5 + 4, top_k=2, name=ODD)
LOAD = ms.planning.LoadMatrix(TRACE.tokens_SLRE[0, 0])
PLAN = ms.planning.plan_layer(STRATEGY, MODEL, CLUSTER, LOAD)
STEP = ms.planning.StepPlan(STRATEGY, MODEL, CLUSTER, (PLAN, PLAN))
SIMULATION = step_program.simulation([STEP])
SPEC = ms.models.ModelSpec.from_config("qwen3-moe-small").replace(name=ODD)
COST = ms.models.count_model(SPEC, 128)
RESULTS: dict[str, Any] = {
    "Trace": TRACE,
    "LoadMatrix": LOAD,
    "PlanningProblem": ms.planning.PlanningProblem.of_layout(LOAD, CLUSTER, 5),
    "LayerPlan": PLAN,
    "StepPlan": STEP,
    "ExpertLayout": PLAN.layout,
    "TokenPlan": PLAN.tokens,
    "Certificate": PLAN.certificate,
    "Simulation": SIMULATION,
    "Timeline": SIMULATION.timeline,
    "measured Timeline": Timeline(SIMULATION.timeline.spans, "measured"),
    "ModelSpec": SPEC,
    "ModelCost": COST,
}
# Results that are made in a folder or take longer, so that only tests that need them make them.
MADE = ("RunResult", "Comparison", "TuneResult", "StepExplanation", "ModelStep")
# A column whose sum is known, and the sum.
SUMS = {
    "Trace": ("tokens", TRACE.tokens_SLRE.sum()),
    "LoadMatrix": ("tokens", LOAD.total),
    "PlanningProblem": ("slots", 10),
    "LayerPlan": ("tokens", LOAD.total),
    "StepPlan": ("tokens", 2 * LOAD.total),
    "ExpertLayout": ("expert", sum(sum(PLAN.layout.experts_of(rank)) for rank in range(2))),
    "TokenPlan": ("tokens", LOAD.total),
    "Certificate": ("total", LOAD.total),
    "Simulation": ("ms", 2 * 1000 * SIMULATION.length_seconds),
    "Timeline": ("end_us", sum(span.end_us for span in SIMULATION.timeline.spans)),
    "ModelSpec": ("parameters", SPEC.num_parameters - 2 * SPEC.embedding_parameters - SPEC.hidden_size),
    "ModelCost": ("backward_flops", COST.backward_flops),
}
PLOTTED = ("LoadMatrix", "ExpertLayout", "ModelCost", "ModelStep", "RunResult", "Comparison", "Timeline")
ON_AXES = PLOTTED[:4]


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    run_result = ms.run(EXPERIMENT, tmp_path_factory.mktemp("runs"), jobs=1)
    bounds = ms.SearchBounds(budget=6, seeds=1, jobs=1)
    return {
        "RunResult": run_result,
        "Comparison": run_result.comparison,
        "TuneResult": ms.tune(EXPERIMENT, bounds=bounds, out=tmp_path_factory.mktemp("tuned")),
        "StepExplanation": ms.explain(STRATEGY, EXPERIMENT),
        "ModelStep": ms.models.simulate_model(
            ms.models.ModelRun(model=SPEC, cluster=CLUSTER, strategy=EP, seq_len=128)
        ),
    }


class PublicNames(dict[str, Any]):
    """Imports a public name when it is read."""

    def __missing__(self, name: str) -> Any:
        return getattr(ms, name)


def result(name: str, request: pytest.FixtureRequest) -> Any:
    return RESULTS[name] if name in RESULTS else request.getfixturevalue("made")[name]


def texts(html: str) -> Iterator[str]:
    """Yields the cells of a table in HTML, which has to be well formed."""
    yield from (cell.text or "" for cell in ElementTree.fromstring(html).iter("td"))


@pytest.mark.parametrize("name", [*RESULTS, *MADE])
def test_a_result_is_one_line_a_table_and_a_data_frame(name: str, request: pytest.FixtureRequest) -> None:
    shown = result(name, request)
    line = repr(shown)
    assert line.startswith(f"<{type(shown).__name__}: ")
    assert len(line) < 200
    assert line.isprintable()
    html = f"<div>{shown._repr_html_()}</div>"
    assert any(texts(html))
    assert "<b>" not in html
    assert not {"script", "link", "img"} & {each.tag for each in ElementTree.fromstring(html).iter()}
    console = Console(width=500, color_system=None)
    with console.capture() as printed:
        console.print(shown)
    assert printed.get().split() == str(shown).split()
    frame = shown.to_pandas()
    assert len(frame) > 0
    assert frame.columns.is_unique
    if name in SUMS:
        column, total = SUMS[name]
        assert frame[column].sum() == pytest.approx(total)


@pytest.mark.parametrize("name", ["RunResult", "Comparison"])
def test_a_comparison_prints_its_table_and_has_a_row_for_each_step(name: str, request: pytest.FixtureRequest) -> None:
    shown = result(name, request)
    assert str(shown).startswith("SIMULATED: tour")
    assert "baseline" in str(shown)
    assert {"ep", ODD, "baseline"} <= set(texts(f"<div>{shown._repr_html_()}</div>"))
    frame = shown.to_pandas()
    by_seed = frame.groupby(["strategy", "seed"])["step_ms"].median()
    assert list(frame.columns[:5]) == ["strategy", "repeat", "seed", "step", "step_ms"]
    assert len(frame) == 2 * 2 * 2
    comparison = result("Comparison", request)
    assert by_seed.groupby("strategy").median()[ODD] == comparison.rows[1].median("step_ms")
    assert repr(comparison.rows[1]).startswith(f"<Row: {ODD!r}, ")


def test_the_parts_of_a_models_step_add_up_to_it_and_a_tuning_has_the_time_of_each_point(made) -> None:
    step, tuned = made["ModelStep"], made["TuneResult"]
    sums = step.to_pandas().groupby("what")["value"].sum()
    assert sums["time"] == pytest.approx(step.seconds)
    assert sums["memory"] == pytest.approx(1e9 * sum(memory.gb for memory in step.memory))
    frame = tuned.to_pandas()
    assert set(frame["source"]) == {"simulated"}
    assert list(frame["step_ms"]) == [one.ms for one in tuned.tuned.search.ranking]


@pytest.mark.parametrize("name", PLOTTED)
def test_a_plot_is_a_figure_of_pyplot_or_is_on_the_given_axes(name: str, request: pytest.FixtureRequest) -> None:
    shown = result(name, request)
    with matplotlib.rc_context({"backend": "agg"}):
        axes = shown.plot()
        axes.figure.canvas.draw()
        assert plt.fignum_exists(axes.figure.number)
        plt.close(axes.figure)
        if name in ON_AXES:
            given = plt.figure().subplots()
            assert shown.plot(ax=given) is given
            plt.close(given.figure)


def test_a_large_table_says_what_it_left_out_and_a_long_name_is_cut(made, monkeypatch) -> None:
    load = ms.planning.LoadMatrix(np.ones((30, 40), dtype=np.int64))
    assert str(load).endswith("20 of 30 rows, 20 of 41 columns")
    assert "20 of 30 rows, 20 of 41 columns" in load._repr_html_()
    line = repr(replace(STEP, strategy=STRATEGY.replace(name=200 * "x")))
    assert (len(line) < 200, line[-2:]) == (True, "…>")
    assert r"in a\x1b[31m, " in repr(replace(made["RunResult"], path=Path("a\x1b[31m")))
    monkeypatch.setitem(sys.modules, "pandas", None)
    words = r"to_pandas\(\) needs pandas, which is not installed; run pip install pandas"
    with pytest.raises(ImportError, match=words):
        LOAD.to_pandas()


@pytest.mark.parametrize(
    ("declared", "line"),
    [
        (ms.Strategy(name="ep"), "Strategy(name='ep')"),
        (FSEP, "Strategy(name='fsep', sharding=Fsep(slots_per_rank=5), balance=Greedy(), split=FlowSplit())"),
        (EP.replace(overlap=ms.Pipelined(chunks=4)), "Strategy(name='ep', overlap=Pipelined(chunks=4))"),
        (ms.presets.laer(2).replace(name="a"), None),
        (ms.ClusterSpec(), "ClusterSpec()"),
        (EXPERIMENT, None),
    ],
)
def test_a_declaration_shows_what_differs_from_its_defaults_and_reads_back(declared: Any, line: str | None) -> None:
    assert line is None or repr(declared) == line
    assert eval(repr(declared), {}, PublicNames()) == declared
