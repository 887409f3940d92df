"""The page of a watched training: its cells, curves and tables say what was written."""

from __future__ import annotations

import json
import math
import os
import re
import statistics
from collections.abc import Callable
from dataclasses import replace
from html import unescape
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from matplotlib.figure import Figure
from scipy import stats
from typer.testing import CliRunner
from watch_cases import assert_whole_and_alone, layer_line, step_line, write_lines, write_run

from moesys.__main__ import app
from moesys.lab.runs.watched_run import read_watched_run
from moesys.lab.show import pages
from moesys.lab.show.pages import heat_map, watch_page

HINT = re.compile(
    r'<rect class="hint" x="([\d.]+)" y="([\d.]+)" width="([\d.]+)" height="([\d.]+)"><title>([^<]*)</title></rect>'
)


def section(page: str, title: str) -> str:
    (found,) = re.findall(rf"<section><h2>{re.escape(title)}</h2>(.*?)</section>", page, re.DOTALL)
    return found


def page_of(folder: Path) -> str:
    return watch_page(read_watched_run(folder))


@pytest.fixture
def drawn(monkeypatch: pytest.MonkeyPatch) -> list[Figure]:
    """The figures of a page, in its order."""
    figures: list[Figure] = []
    write = pages.inline_svg
    monkeypatch.setattr(pages, "inline_svg", lambda figure, hints=(): figures.append(figure) or write(figure, hints))
    return figures


def test_every_step_and_layer_is_a_cell_with_its_value(tmp_path: Path, drawn: list[Figure]) -> None:
    page = page_of(write_run(tmp_path, num_steps=20, num_layers=3, num_ranks=2))
    assert_whole_and_alone(page)
    cells = HINT.findall(section(page, "Load by layer over steps"))
    loads_LS = np.array([[layer_line(layer, step).load_p50 for step in range(20)] for layer in range(3)])
    assert [title for *_, title in cells] == [
        f"layer {layer}, step {step}: {load:.4g}" for (layer, step), load in np.ndenumerate(loads_LS)
    ]
    x, y, width, height = (
        np.array([list(map(float, place)) for *place, _ in cells]).reshape(3, 20, 4).transpose(2, 0, 1)
    )
    assert x[:, 1:] == pytest.approx((x + width)[:, :-1], abs=0.1)
    assert y[1:] == pytest.approx((y + height)[:-1], abs=0.1)
    axes, bar = drawn[1].axes
    (mesh,) = axes.collections
    assert np.asarray(mesh.get_array()) == pytest.approx(loads_LS)
    assert [label.get_text() for label in axes.get_yticklabels()] == ["layer 0", "layer 1", "layer 2"]
    assert axes.yaxis_inverted()
    assert (mesh.get_clim()[0], bar.get_ylabel()) == (1.0, "load max/mean")


def test_a_layer_that_did_not_run_has_an_empty_cell_and_small_differences_look_small(drawn: list[Figure]) -> None:
    columns = np.arange(4), ["1", "2", "3"]
    text = heat_map(np.array([[1.0, np.nan, 1.01]]), ["a"], columns, (1.0, 1.2), ("step", "load"))
    mesh = drawn[0].axes[0].collections[0]
    assert mesh.get_array().mask.tolist() == [[False, True, False]]
    assert mesh.get_clim() == (1.0, 1.2)
    assert [title for *_, title in HINT.findall(text)] == ["a, 1: 1", "a, 2: none", "a, 3: 1.01"]


def test_long_runs_are_binned_and_no_step_is_lost(tmp_path: Path, drawn: list[Figure]) -> None:
    num_steps = 1003
    page = page_of(write_run(tmp_path, num_steps=num_steps, num_layers=2))
    assert len(page) < 400_000
    cells = HINT.findall(section(page, "Load by layer over steps"))
    assert len(cells) == 2 * 160
    seen = []
    for *_, title in cells:
        layer, first, last, value = re.fullmatch(r"layer (\d), steps (\d+)–(\d+): (.+)", title).groups()
        steps = range(int(first), int(last) + 1)
        seen += [(int(layer), step) for step in steps]
        assert float(value) == pytest.approx(np.mean([layer_line(int(layer), s).load_p50 for s in steps]), rel=1e-3)
    assert seen == [(layer, step) for layer in range(2) for step in range(num_steps)]
    hints = re.findall(r"<title>steps (\d+)–(\d+): Loss (\S+) \((\S+) to (\S+)\)", section(page, "Loss"))
    assert len(hints) == 160
    for first, last, *shown in hints:
        high, low = (5 / (1 + int(step) / 10) for step in (first, last))
        assert [float(shown[1]), float(shown[2])] == pytest.approx([low, high], rel=1e-3)
        assert low <= float(shown[0]) * 1.001
        assert float(shown[0]) * 0.999 <= high
    (axes,) = drawn[0].axes
    assert axes.lines[0].get_ydata() == pytest.approx([float(mean) for _, _, mean, *_ in hints], rel=1e-3)
    band = axes.collections[0].get_paths()[0].vertices[:, 1]
    assert (band.min(), band.max()) == pytest.approx((5 / (1 + 1002 / 10), 5))


def test_the_curve_goes_through_the_losses(tmp_path: Path, drawn: list[Figure]) -> None:
    """A step without a finite loss has no point."""
    losses = [4.0, 3.0, math.nan, 2.0]
    write_lines(tmp_path, [step_line(step, [0], loss=loss) for step, loss in enumerate(losses)])
    text = section(page_of(tmp_path), "Loss")
    (axes,) = drawn[0].axes
    assert axes.lines[0].get_ydata().tolist() == [4.0, 3.0, 2.0]
    assert axes.lines[0].get_xdata().tolist() == [0, 1, 3]
    assert axes.get_ylabel() == "Loss"
    assert ">Loss</text>" in text
    assert "step 2: Loss none" in text


def test_a_value_in_few_steps_is_seen_and_is_not_said_to_be_in_every_step(tmp_path: Path, drawn: list[Figure]) -> None:
    lines = [replace(step_line(step, [0]), numbers={}) for step in range(500)]
    lines[30].numbers["loss"] = 3.245
    assert "Loss: 3.245 at step 30<" in section(page_of(write_lines(tmp_path / "one", lines).parent), "Loss")
    for step in range(0, 500, 10):
        lines[step].numbers["loss"] = 4.0 - step / 500
    drawn.clear()
    page_of(write_lines(tmp_path / "few", lines).parent)
    line = drawn[0].axes[0].lines[0]
    # In other steps, lines would end at nan.
    assert len(line.get_ydata()) == 50
    assert np.isfinite(line.get_ydata()).all()


def test_what_never_changes_is_a_line_of_text_and_the_warm_up_does_not_flatten_the_times(tmp_path, drawn):
    lines = [replace(step_line(step, [0], loss=2.0), step_ms=60_000.0 if step == 0 else 100.0) for step in range(100)]
    page = page_of(write_lines(tmp_path, lines).parent)
    assert "Loss: 2 in every step" in section(page, "Loss")
    assert "<svg" not in section(page, "Loss")
    assert "1 value above 115, up to 60,000, not shown." in section(page, "Step time")
    (times,) = [axes for figure in drawn for axes in figure.axes if axes.get_ylabel() == "ms"]
    assert times.get_ylim() == pytest.approx((0, 115))


def test_the_table_has_a_row_for_each_layer(tmp_path: Path) -> None:
    page = page_of(write_run(tmp_path, num_steps=30, num_layers=2, num_ranks=2))
    rows = [re.findall(r"<td>([^<]*)</td>", row) for row in re.findall(r"<tr><td>.*?</tr>", section(page, "By layer"))]
    for layer, row in enumerate(rows):
        lines = [layer_line(layer, step) for step in range(30)]
        wanted = [
            np.median([line.load_p50 for line in lines]),
            np.quantile([line.load_p95 for line in lines], 0.95),
            max(line.load_max for line in lines),
            np.mean([line.experts_without_tokens for line in lines]),
            max(line.experts_without_tokens for line in lines),
            lines[0].exposed_ms + 0.5,
            lines[0].exposed_ms + 1,
            1.0,
            5.0,
        ]
        assert row == [str(layer), *(f"{value:.4g}" for value in wanted)]
    assert len(rows) == 2


def test_experts_layers_and_events_are_shown(tmp_path: Path) -> None:
    write_lines(tmp_path, [step_line(0, [0, 1]), step_line(1, [0], events=["plan <due> at 1 & late"])])
    page = page_of(tmp_path)
    assert_whole_and_alone(page)
    experts = [title for *_, title in HINT.findall(section(page, "Tokens of experts by layer"))]
    assert experts[:4] == [f"layer 0, expert {expert}: {expert / 1.5:.4g}" for expert in range(4)]
    assert len(experts) == 8
    cells = [title for *_, title in HINT.findall(section(page, "Load by layer over steps"))]
    assert cells[3] == "layer 1, step 1: none"
    assert "plan <due> at 1 & late" in unescape(section(page, "Events"))


def test_pages_of_any_size_are_whole(tmp_path: Path) -> None:
    for num_layers in (1, 100):
        page = page_of(write_run(tmp_path / str(num_layers), 1, num_layers))
        assert_whole_and_alone(page)
        assert len(HINT.findall(section(page, "Load by layer over steps"))) == num_layers
    # A run without layers or finite losses has a page.
    page = page_of(write_lines(tmp_path / "none", [step_line(step, [], loss=math.nan) for step in range(3)]).parent)
    assert_whole_and_alone(page)
    assert "no finite number was written" in section(page, "Loss")


def test_the_command_writes_the_page_and_says_where(tmp_path: Path) -> None:
    page = page_of(write_run(tmp_path, num_steps=2, num_layers=1))
    for options, path in (([], tmp_path / "report.html"), (["--out", str(tmp_path / "a.html")], tmp_path / "a.html")):
        done = CliRunner().invoke(app, ["report", str(tmp_path), *options])
        assert (done.exit_code, done.stdout) == (0, f"{path}\n")
        assert path.read_text(encoding="utf-8") == page
    os.mkfifo(tmp_path / "rank-0007.jsonl")
    waiting = CliRunner().invoke(app, ["report", str(tmp_path)])
    assert (waiting.exit_code, "rank-0007.jsonl is no regular file" in waiting.stderr) == (2, True)


def with_step_ms(folder: Path, step_ms: Callable[[int], float], **changes: Any) -> None:
    lines = [replace(step_line(step, [0, 1], **changes), step_ms=step_ms(step)) for step in range(100)]
    write_lines(folder, lines)


def compared(*folders: Path | str) -> Any:
    result = CliRunner().invoke(app, ["compare", *map(str, folders), "--json"])
    assert result.exit_code == 0, result.output
    (table,) = json.loads(result.stdout)["tables"]
    return table


def test_two_watched_trainings_are_compared_over_blocks_of_steps(tmp_path: Path) -> None:
    """Against statistics.fmean and scipy, on blocks cut here: the first tenth, with its warm-up, counts nowhere."""
    with_step_ms(tmp_path / "ep", lambda step: 9000.0 if step < 10 else 100.0)
    with_step_ms(tmp_path / "fsep", lambda step: 80.0 + step // 9 % 2)
    ep, fsep = compared(tmp_path / "ep", tmp_path / "fsep")["rows"]
    assert (ep["speedup"], ep["step_ms"], ep["agreement"], ep["n"]) == ("baseline", 100.0, "reference", "10")
    logs = [
        math.log(100 / (80 + statistics.median(step // 9 % 2 for step in range(at, at + 9))))
        for at in range(10, 100, 9)
    ]
    half = stats.t.ppf(0.975, 9) * statistics.stdev(logs) / 10**0.5
    low, middle, high = (math.exp(statistics.fmean(logs) + shift) for shift in (-half, 0, half))
    assert fsep["speedup"] == f"{middle:.2f} [{low:.2f}, {high:.2f}]"
    assert (fsep["agreement"], fsep["exposed_ms"], fsep["n"]) == ("bit-equal", 30.0, "10")


def test_trainings_of_several_seeds_are_paired_by_the_names_of_their_folders(tmp_path: Path) -> None:
    for seed, slow in enumerate((1.0, 3.0, 2.0)):
        with_step_ms(tmp_path / "ep" / f"seed-{seed}", lambda _, slow=slow: 100 * slow)
        with_step_ms(tmp_path / "fsep" / f"seed-{seed}", lambda _, slow=slow: 50 * slow, loss=2.0)
    with_step_ms(tmp_path / "fsep" / "seed-9", lambda _: 1.0)
    table = compared(tmp_path / "ep", tmp_path / "fsep")
    assert [row["speedup"] for row in table["rows"]] == ["baseline", "? 2.00 [2.00, 2.00]"]
    assert table["rows"][1]["n"] == "3"
    assert table["rows"][1]["agreement"] == "3.4e+00"
    assert "one model, data, batch and machine" in table["notes"][-1]


def test_trainings_of_two_seeds_have_no_interval(tmp_path: Path) -> None:
    """Student's would go from 0.00 to 1,241 here."""
    for seed, slow in enumerate((1.0, 3.0)):
        with_step_ms(tmp_path / "ep" / f"seed-{seed}", lambda _: 100.0)
        with_step_ms(tmp_path / "fsep" / f"seed-{seed}", lambda _, slow=slow: 50 * slow)
    table = compared(tmp_path / "ep", tmp_path / "fsep")
    assert [row["speedup"] for row in table["rows"]] == ["baseline", "? 1.15"]
    assert "?: n is below 6, so undecided." in table["notes"][0]


def test_what_is_no_pair_of_watched_trainings_is_refused_in_words(tmp_path: Path) -> None:
    with_step_ms(tmp_path / "ep", lambda _: 1.0)
    alone = CliRunner().invoke(app, ["compare", str(tmp_path / "ep")])
    assert (alone.exit_code, "is not a run folder" in alone.stderr) == (2, True)
    both = [str(tmp_path / "ep"), str(tmp_path / "ep")]
    refused = CliRunner().invoke(app, ["compare", *both, "--metric", "plan_ms"])
    assert (refused.exit_code, "--metric is for run folders" in refused.stderr) == (2, True)
