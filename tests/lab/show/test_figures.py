"""Figures say where their numbers come from, hold what they were given, and are the same bytes each time."""

from __future__ import annotations

import matplotlib as mpl
import numpy as np
import pytest
from lab_cases import EP, experiment, record

from moesys.lab.runs.comparison import compare_records
from moesys.lab.runs.statistics import PairedRatio
from moesys.lab.show.comparisons import ratio_words
from moesys.lab.show.figures import (
    TimelinePanel,
    draw_forest,
    draw_speedups,
    draw_timelines,
    placed_rows,
    style,
)
from moesys.lab.show.pages import Bins, curves, inline_svg
from moesys.simulator.simulation import PathPart
from moesys.timeline import Span, Timeline

RATIO = PairedRatio(8, 1.2, 1.1, 1.3)
UNCLEAR = PairedRatio(8, 1.1, 0.9, 1.3)
PATH = (
    PathPart(0, "link out", "dispatch", "layer 0 forward 0", 0.0005, 0.25),
    PathPart(0, "compute", "experts", "layer 0 forward 0", 0.0015, 0.75),
)


def timeline(num_ranks: int = 2, source="simulated") -> Timeline:
    spans = []
    for rank in range(num_ranks):
        late = 500.0 if rank == 0 else 0.0
        spans += [
            Span(rank, "dispatch", 0, 500, "dispatch", "layer 0 forward 0"),
            Span(rank, "compute", 500, 1500 + late, "experts", "layer 0 forward 0"),
        ]
    return Timeline(tuple(spans), source)


PANEL = TimelinePanel("fsep", timeline(), (0, 1), PATH)


def texts(figure) -> list[str]:
    found = [text.get_text() for text in figure.findobj(mpl.text.Text)]
    return [text for text in found if text]


def forest(**ratios: PairedRatio):
    return draw_forest(ratios, title="SIMULATED: tiny", xlabel="speed-up", words=ratio_words)


def draw_all() -> list[str]:
    with style():
        figures = draw_timelines([PANEL], title="SIMULATED: tiny"), forest(**{r"$\frac$ 5 $": RATIO})
    return list(map(inline_svg, figures))


def test_every_figure_is_the_same_svg_each_time():
    before = dict(mpl.rcParams)
    first, again = draw_all(), draw_all()
    assert dict(mpl.rcParams) == before
    assert first == again
    assert all("<svg" in drawn for drawn in first)


def test_the_ratio_of_each_seed_is_a_dot_below_the_interval():
    of = experiment(seeds=(0, 1, 2))
    some = [record(trial, step_ms=10.0 if trial.strategy == EP else 4.0 + trial.seed) for trial in of.trials()]
    lines = draw_speedups(compare_records(of, some)).axes[0].get_lines()
    (dots,) = [line for line in lines if len(line.get_xdata()) == 3]
    assert list(dots.get_xdata()) == pytest.approx([10 / 4, 10 / 5, 10 / 6])
    assert min(dots.get_ydata()) > 0


def test_rows_of_a_timeline_have_passes_the_critical_path_and_idle_time():
    heading, layers, path, first, dispatch, second, _ = PANEL.rows()
    assert (heading.owner, heading.bars) == ("fsep: 2.000 ms", ())
    assert [(bar.kind, bar.words, bar.start_ms, bar.end_ms) for bar in layers.bars] == [
        ("forward", "layer 0 forward", 0.5, 2.0)
    ]
    assert [(bar.kind, bar.start_ms, bar.end_ms) for bar in path.bars] == [("dispatch", 0, 0.5), ("experts", 0.5, 2.0)]
    assert path.bars[1].words == "critical path, 75%: rank 0's experts, experts layer 0 forward 0"
    idle = [(bar.start_ms, bar.end_ms) for row in (first, second) for bar in row.bars if bar.kind == "idle"]
    assert idle == [(0, 0.5), (0, 0.5), (1.5, 2.0)]
    marked = [row.owner for row in (first, dispatch, second) for bar in row.bars if bar.on_path]
    assert marked == ["rank 0", "rank 0"]


def test_times_of_a_measured_timeline_begin_with_its_first_span():
    spans = [Span(0, "compute", 1000, 3000, "experts"), Span(1, "dispatch", 500, 1000, "dispatch")]
    _, first, second = TimelinePanel("step", Timeline(spans, "measured"), (0, 1)).rows()
    assert [(bar.kind, bar.start_ms, bar.end_ms) for bar in (*first.bars, *second.bars)] == [
        ("experts", 0.5, 2.5),
        ("idle", 0.0, 0.5),
        ("dispatch", 0.0, 0.5),
    ]


def test_strategies_are_below_one_another_on_one_scale_and_short_spans_keep_their_colour():
    spans = (Span(0, "compute", 0, 3996, "experts"), Span(0, "compute", 3996, 4000, "experts"))
    slow = TimelinePanel("ep", Timeline(spans, "simulated"), (0,))
    (axes,) = draw_timelines([PANEL, slow], title="SIMULATED: tiny").axes
    assert axes.get_xlim() == (0, 4.0)
    assert axes.yaxis_inverted()
    heights = [at for at, _ in placed_rows([PANEL, slow])]
    assert heights == sorted(heights)
    assert {"fsep: 2.000 ms", "ep: 4.000 ms", "layer 0 forward", "rank 1", "ms"} <= set(texts(axes.figure))
    of_slow = next(found for found in reversed(axes.collections) if len(found.get_paths()) == 2)
    long, short = of_slow.get_edgecolors().tolist()
    assert long == [1, 1, 1, 1]
    assert short == of_slow.get_facecolors()[0].tolist()


def test_a_forest_has_intervals_words_and_grey_for_what_cannot_be_told():
    (axes,) = forest(fsep=RATIO, lent=UNCLEAR).axes
    drawn = axes.lines
    assert {x for line in axes.collections[0].get_segments() for x, _ in line} == {1}
    assert [list(line.get_xdata()) for line in drawn[::2]] == [[1.1, 1.3], [0.9, 1.3]]
    assert [line.get_color() for line in drawn[::2]] == ["#0072B2", "#8A8A8A"]
    assert {"fsep  1.20 [1.10, 1.30]", "lent  ~ 1.10 [0.90, 1.30]"} <= set(texts(axes.figure))


NAMES = ("专家并行", "fast 🚀", "سريع", "तेज़", "e\u0301\u0323", "a$b$", "_private", "n" * 200, "W" * 200)


@pytest.mark.parametrize("name", NAMES)
def test_names_of_any_language_are_text_in_figures_without_a_warning(name):
    # The filter of tests makes a warning an error.
    shown = name if len(name) <= 60 else name[:59] + "…"
    steps = Bins.of(np.arange(3))
    assert shown in curves(steps, {"ep": np.arange(3.0), name: np.arange(3.0) + 1}, "ms")
    with style():
        assert shown in inline_svg(forest(**{name: RATIO}))


def test_a_long_name_is_whole_and_does_not_make_a_forest_narrower():
    figure = forest(**{"eplb(num_groups=8, hierarchical=True) + proportional": RATIO})
    figure.draw_without_rendering()
    (axes,), (name,) = figure.axes, figure.axes[0].texts
    assert name.get_window_extent().x1 < figure.bbox.width
    assert axes.bbox.width > 0.9 * figure.bbox.width
