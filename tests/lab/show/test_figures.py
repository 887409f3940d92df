"""Figures say where their numbers come from, hold what they were given, and are the same bytes each time."""

from __future__ import annotations

import math
from pathlib import Path

import matplotlib as mpl
import numpy as np
import pytest

from moesys.balance.greedy.greedy import Greedy
from moesys.balance.plan import plan_layer
from moesys.balance.static import Static
from moesys.config import ClusterSpec, ModelShape
from moesys.config.presets import laer
from moesys.lab.runs.statistics import PairedRatio
from moesys.lab.show import figures
from moesys.lab.show.figures import computed_tokens, load_heat_map, loss_chart, speedup_chart, timeline_chart
from moesys.load import LoadMatrix
from moesys.timeline import Span, Timeline

BEFORE = np.array([[7, 0, 0], [0, 1, 0]])
AFTER = np.array([[4, 0, 0], [3, 1, 0]])
RATIO = PairedRatio(8, 1.2, 1.1, 1.3, 0.01)


def timeline(num_ranks: int = 2, source="simulated") -> Timeline:
    spans = []
    for rank in range(num_ranks):
        late = 900.0 if rank == num_ranks - 2 else 0.0
        spans += [
            Span(rank, "dispatch", 0, 500, "dispatch"),
            Span(rank, "compute", 500, 1500 + late, "experts"),
            Span(rank, "compute", 1500 + late, 1700 + late, "other"),
        ]
    return Timeline(tuple(spans), source)


@pytest.fixture
def saved(monkeypatch):
    """The figures that are drawn, instead of their files."""
    kept = []
    monkeypatch.setattr(
        figures, "_save", lambda figure, _: kept.append(figure) or figure.draw_without_rendering() or []
    )
    return kept


def texts(figure) -> list[str]:
    found = [text.get_text() for text in figure.findobj(mpl.text.Text)]
    return [text for text in found if text]


def draw_all(folder: Path) -> list[Path]:
    losses = {"ep": {0: [5.0, 4.0]}, "fsep": {0: [5.0, 4.1]}}
    return [
        *load_heat_map(BEFORE, AFTER, folder / "load", name="tiny, layer 0", source="measured"),
        *timeline_chart(timeline(), folder / "time", name="tiny"),
        *speedup_chart(
            "skew", [0, 1], {"fsep": [RATIO, None]}, folder / "speed", name="t", source="simulated", baseline="ep"
        ),
        *loss_chart(losses, folder / "loss", name="tiny"),
    ]


def test_every_figure_is_svg_and_png_and_the_same_svg_each_time(tmp_path):
    before = dict(mpl.rcParams)
    paths, again = draw_all(tmp_path / "new" / "folder"), draw_all(tmp_path / "b")
    assert dict(mpl.rcParams) == before
    assert [path.name for path in paths] == [
        f"{stem}.{form}" for stem in ("load", "time", "speed", "loss") for form in ("svg", "png")
    ]
    for path in paths:
        assert path.read_bytes().startswith(b"\x89PNG" if path.suffix == ".png" else b"<?xml")
    assert [path.read_bytes() for path in paths] == [path.read_bytes() for path in again]


def test_a_dot_in_a_name_is_kept(tmp_path):
    svg, png = timeline_chart(timeline(), tmp_path / "fsep-v1.5", name="tiny")
    assert (svg.name, png.name) == ("fsep-v1.5.svg", "fsep-v1.5.png")


def test_dollars_in_a_name_are_no_formula(tmp_path):
    svg, _ = timeline_chart(timeline(), tmp_path / "time", name=r"$\frac$, 5 $ a rank")
    assert svg.read_bytes().startswith(b"<?xml")
    losses = {r"$\frac$": {0: [5.0, 4.0]}, "fsep": {0: [5.0, 4.1]}}
    assert loss_chart(losses, tmp_path / "loss", name="tiny")[0].exists()


def test_no_label_holds_a_formula(tmp_path, saved):
    draw_all(tmp_path)
    apart = {"ep": {0: [5.0, 4.0, 3.0]}, "far": {0: [5.0, 4.1, 3.0001]}, "near": {0: [5.0, 4.000004, 3.000004]}}
    loss_chart(apart, tmp_path / "wide", name="tiny")
    loss_chart({"ep": apart["ep"], "near": apart["near"]}, tmp_path / "narrow", name="tiny")
    assert len(saved) == 6
    assert [text for figure in saved for text in texts(figure) if "$" in text or "\\" in text] == []
    for number, figure in enumerate(saved):
        svg = tmp_path / f"{number}.svg"
        figure.savefig(svg)
        # Texts are drawn as paths, and stand in a comment before them.
        assert "$" not in svg.read_text(encoding="utf-8")


@pytest.mark.parametrize(
    ("apart", "labels"),
    [
        ([0.0, 2e-7, 3e-6], ["10⁻⁷", "10⁻⁶", "10⁻⁵"]),
        ([0.0, 3e-7, 3.1e-7], ["10⁻⁷", "10⁻⁶"]),
        ([0.0, 9.5, 95.0], ["10⁰", "10¹", "10²"]),
    ],
)
def test_differences_of_losses_stand_between_powers_of_ten(tmp_path, saved, apart, labels):
    loss_chart({"ep": {0: [1.0] * 3}, "fsep": {0: [1 + one for one in apart]}}, tmp_path / "loss", name="tiny")
    axis = saved[0].axes[1].yaxis
    low, high = axis.get_view_interval()
    shown = [tick.label1.get_text() for tick in axis.get_major_ticks() if low <= tick.get_loc() <= high]
    assert shown == labels
    assert {tick.label1.get_text() for tick in axis.get_minor_ticks()} <= {""}


def test_a_difference_in_one_step_is_seen(tmp_path, saved):
    loss_chart({"ep": {0: [4.0] * 5}, "fsep": {0: [4.0, 4.0, 4.1, 4.0, 4.0]}}, tmp_path / "loss", name="tiny")
    assert saved[0].axes[1].lines[0].get_marker() == "."


def test_short_spans_have_their_own_colour_to_the_edge(tmp_path, saved):
    spans = (Span(0, "compute", 0, 9990, "experts"), Span(0, "compute", 9990, 9991, "experts"))
    timeline_chart(Timeline(spans, "measured"), tmp_path / "time", name="tiny")
    long, short = saved[0].axes[0].collections[0].get_edgecolors()
    face = saved[0].axes[0].collections[0].get_facecolors()[0]
    assert long.tolist() == [1, 1, 1, 1]
    assert short.tolist() == face.tolist()


@pytest.mark.parametrize("source", ["measured", "simulated"])
def test_every_title_says_the_source(tmp_path, saved, source):
    load_heat_map(BEFORE, AFTER, tmp_path / "a", name="tiny", source=source)
    timeline_chart(timeline(source=source), tmp_path / "b", name="tiny")
    speedup_chart("skew", [1], {"fsep": [RATIO]}, tmp_path / "c", name="tiny", source=source, baseline="ep")
    for figure in saved:
        assert any(text.startswith(f"{source.upper()}: tiny") for text in texts(figure))


def test_the_heat_map_counts_and_sums(tmp_path, saved):
    load_heat_map(BEFORE, AFTER, tmp_path / "load", name="tiny", source="measured")
    written = texts(saved[0])
    assert "before: max/mean 1.75" in written
    assert "after: max/mean 1.00" in written
    images = [image for axes in saved[0].axes for image in axes.get_images()]
    assert [image.get_clim() for image in images[:2]] == [(0, 7), (0, 7)]
    assert images[1].get_array().filled(0).T.tolist() == AFTER.tolist()
    assert images[1].get_array().mask.T.tolist() == (AFTER == 0).tolist()


@pytest.mark.parametrize(("ranks", "written"), [(4, True), (16, True), (32, False)])
def test_counts_that_would_run_into_each_other_are_not_written(tmp_path, saved, ranks, written):
    tokens_RE = np.full((ranks, 4), 12345)
    load_heat_map(tokens_RE, tokens_RE, tmp_path / "map", name="wide", source="simulated")
    assert ("12345" in texts(saved[0])) == written


def test_maps_of_different_layers_are_refused(tmp_path):
    with pytest.raises(ValueError, match=r"before has shape \(2, 3\) and after \(3, 2\); give \[R, E\] of one layer"):
        load_heat_map(BEFORE, AFTER.T, tmp_path / "load", name="tiny", source="measured")


def test_an_idle_layer_is_drawn(tmp_path):
    load_heat_map(BEFORE * 0, BEFORE * 0, tmp_path / "load", name="tiny", source="measured")


def test_computed_tokens_are_the_plans(tmp_path):
    model = ModelShape(hidden_size=8, intermediate_size=8, num_experts=6, top_k=2)
    cluster = ClusterSpec(num_nodes=2, ranks_per_node=2)
    load = LoadMatrix(np.random.default_rng(0).integers(0, 50, (4, 6)))
    for balance in (Static(), Greedy()):
        plan = plan_layer(laer(2).replace(balance=balance), model, cluster, load).tokens
        computed_RE = computed_tokens(plan)
        assert computed_RE.tolist() == plan.tokens_RER.sum(0).T.tolist()
        assert computed_RE.sum(1).tolist() == plan.tokens_R.tolist()


def test_computation_is_above_communication_and_times_are_ms(tmp_path, saved):
    timeline_chart(timeline(), tmp_path / "time", name="tiny")
    (axes,) = saved[0].axes
    assert [label.get_text() for label in axes.get_yticklabels()] == ["compute", "dispatch"] * 2
    assert axes.yaxis_inverted()
    assert axes.get_xlabel() == "ms"
    assert axes.get_xlim() == (0, 2.6)
    bars = [path.get_extents().x1 for path in axes.collections[0].get_paths()]
    assert bars == pytest.approx([2.4, 2.6])
    assert {"rank 0", "rank 1", "experts", "other", "dispatch"} <= set(texts(saved[0]))


def test_of_many_ranks_some_are_drawn_and_the_last_to_end_among_them(tmp_path, saved):
    timeline_chart(timeline(32), tmp_path / "some", name="tiny")
    timeline_chart(timeline(32), tmp_path / "two", name="tiny", ranks=[3, 5])
    assert "SIMULATED: tiny, 8 of 32 ranks" in texts(saved[0])
    drawn = [[text for text in texts(figure) if text.startswith("rank ")] for figure in saved]
    assert len(drawn[0]) == 8
    assert "rank 30" in drawn[0]
    assert drawn[1] == ["rank 3", "rank 5"]


def test_an_empty_timeline_is_refused(tmp_path):
    with pytest.raises(ValueError, match="the timeline has no spans; record or simulate a step first"):
        timeline_chart(Timeline((), "measured"), tmp_path / "time", name="tiny")


def test_speedups_have_a_line_a_band_and_gaps(tmp_path, saved):
    single = PairedRatio(1, 1.5, None, None, 1.0)
    speedup_chart(
        "skew",
        [0, 1, 2],
        {"fsep": [RATIO, None, single]},
        tmp_path / "a",
        name="tiny",
        source="simulated",
        baseline="ep",
    )
    (axes,) = saved[0].axes
    line = axes.lines[1].get_ydata()
    assert line[0] == 1.2
    assert math.isnan(line[1])
    assert line[2] == 1.5
    band = axes.collections[0].get_paths()[0].vertices[:, 1]
    assert (band.min(), band.max()) == (1.1, 1.3)
    assert "SIMULATED: tiny\nband: 95 % interval, paired by seed, n = 1 to 8" in texts(saved[0])


def test_a_ratio_for_every_value(tmp_path):
    with pytest.raises(ValueError, match="fsep has 1 ratios for 2 values of skew"):
        speedup_chart("skew", [0, 1], {"fsep": [RATIO]}, tmp_path / "a", name="t", source="simulated", baseline="ep")


def test_losses_show_their_mean_and_their_distance(tmp_path, saved):
    losses = {
        "ep": {0: [4.0, 2.0], 1: [6.0, 4.0], 2: [9.0, 9.0]},
        "pipelined": {0: [4.0, 2.0], 1: [6.0, 4.0]},
        "fsep": {0: [4.0, 2.0], 1: [6.0, 5.0]},
    }
    loss_chart(losses, tmp_path / "loss", name="tiny")
    top, bottom = saved[0].axes
    assert [list(line.get_ydata()) for line in top.lines] == [[5.0, 3.0], [5.0, 3.0], [5.0, 3.5]]
    assert [line.get_label() for line in bottom.lines] == ["fsep"]
    assert bottom.lines[0].get_ydata()[1] == 0.25
    assert "largest of all seeds; bit-equal: pipelined" in texts(saved[0])
    assert "MEASURED: tiny, mean of 2 seeds" in texts(saved[0])


def test_losses_that_are_no_numbers_are_drawn(tmp_path):
    loss_chart({"ep": {0: [4.0, math.nan]}, "fsep": {0: [math.inf, 1.0]}}, tmp_path / "loss", name="tiny")


def test_losses_without_a_shared_seed_are_refused(tmp_path):
    with pytest.raises(ValueError, match="the strategies share no seed with losses; run the same seeds of each"):
        loss_chart({"ep": {0: [1.0]}, "fsep": {1: [1.0]}}, tmp_path / "loss", name="tiny")
