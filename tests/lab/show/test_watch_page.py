"""The page of a watched training: its cells, curves and tables say what was written, and a browser shows it."""

from __future__ import annotations

import json
import math
import re
import shutil
import subprocess
import xml.etree.ElementTree as ET
from html import unescape
from html.parser import HTMLParser
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from typer.testing import CliRunner
from watch_cases import layer_line, step_line, write_lines, write_run

from moesys.__main__ import app
from moesys.lab.runs.watched_run import WatchedRun, read_watched_run
from moesys.lab.show.pages import Bins, curves, heat_map, watch_page
from moesys.step_lines import write_spans
from moesys.timeline import Span, Timeline

BROWSER = next(
    filter(None, map(shutil.which, ("chromium-headless-shell", "chromium", "chromium-browser", "google-chrome"))), None
)


def section(page: str, title: str) -> str:
    (found,) = re.findall(rf"<section><h2>{re.escape(title)}</h2>(.*?)</section>", page, re.DOTALL)
    return found


def page_of(folder: Path) -> str:
    return watch_page(read_watched_run(folder))


class WellFormed(HTMLParser):
    """Raises where a tag is closed that is not open; what is left open stays in ``open``."""

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []

    def handle_starttag(self, tag: str, attributes: Any) -> None:
        if tag != "meta":
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag


def assert_whole_and_alone(page: str) -> None:
    """Well-formed, and nothing in it comes from elsewhere."""
    parser = WellFormed()
    parser.feed(re.sub(r"<svg.*?</svg>", "", page, flags=re.DOTALL))
    parser.close()
    assert parser.open == []
    for svg in re.findall(r"<svg.*?</svg>", page, re.DOTALL):
        ET.fromstring(svg)
    # The names of XML's vocabularies are no addresses, and figures refer only to their own parts and pixels.
    text = re.sub(r'xmlns(:\w+)?="[^"]*"', "", page)
    assert not re.search(r"https?:|\bsrc=|@import|<script|\bnan\b|\binf\b", text)
    assert all(of.startswith(("#", "data:image/png;base64,")) for of in re.findall(r'href="([^"]*)"', text))
    assert all(of.startswith("#") for of in re.findall(r"url\(([^)]*)\)", text))


def run_of(folder: Path) -> tuple[WatchedRun, Bins]:
    run = read_watched_run(folder)
    return run, Bins.of(run.steps_S)


def test_every_step_and_layer_is_a_cell_with_its_value(tmp_path: Path) -> None:
    assert_whole_and_alone(page_of(write_run(tmp_path, num_steps=20, num_layers=3, num_ranks=2)))
    run, bins = run_of(tmp_path)
    drawn = heat_map(bins.mean(run.load_p50_SL).T, ["a", "b", "c"], bins.edges, (1.0, 1.2), ("step", "load"))
    axes, bar = drawn.axes
    (mesh,) = axes.collections
    loads_LS = [[layer_line(layer, step).load_p50 for step in range(20)] for layer in range(3)]
    assert np.asarray(mesh.get_array()) == pytest.approx(np.array(loads_LS))
    assert [label.get_text() for label in axes.get_yticklabels()] == ["a", "b", "c"]
    assert axes.yaxis_inverted()
    assert (mesh.get_clim()[0], bar.get_ylabel()) == (1.0, "load")
    assert mesh.get_coordinates()[0, :, 0].tolist() == list(range(21))


def test_a_layer_that_did_not_run_has_an_empty_cell_and_small_differences_look_small() -> None:
    drawn = heat_map(np.array([[1.0, np.nan, 1.01]]), ["a"], np.arange(4), (1.0, 1.2), ("step", "load"))
    mesh = drawn.axes[0].collections[0]
    assert mesh.get_array().mask.tolist() == [[False, True, False]]
    assert mesh.get_clim() == (1.0, 1.2)


def test_long_runs_are_binned_and_no_step_is_lost(tmp_path: Path) -> None:
    num_steps = 1003
    page = page_of(write_run(tmp_path, num_steps=num_steps, num_layers=2))
    assert len(page) < 300_000
    run, bins = run_of(tmp_path)
    mean_B, (low_B, high_B) = bins.mean(run.numbers["loss"]), bins.range(run.numbers["loss"])
    assert len(mean_B) == 160
    for place, (first, after) in enumerate(pairwise(bins.edges.tolist())):
        losses = [5 / (1 + step / 10) for step in range(first, after)]
        assert (low_B[place], high_B[place]) == pytest.approx((min(losses), max(losses)))
        assert mean_B[place] == pytest.approx(np.mean(losses))
        for layer in range(2):
            loads = [layer_line(layer, step).load_p50 for step in range(first, after)]
            assert bins.mean(run.load_p50_SL)[place, layer] == pytest.approx(np.mean(loads))
    (axes,) = curves(bins, {"loss": run.numbers["loss"]}, "loss").axes
    assert axes.lines[0].get_ydata() == pytest.approx(mean_B)
    band = axes.collections[0].get_paths()[0].vertices[:, 1]
    assert (band.min(), band.max()) == pytest.approx((low_B.min(), high_B.max()))


def test_the_curve_goes_through_the_losses(tmp_path: Path) -> None:
    """A step without a finite loss has no point."""
    losses = [4.0, 3.0, math.nan, 2.0]
    write_lines(tmp_path, [step_line(step, [0], loss=loss) for step, loss in enumerate(losses)])
    run, bins = run_of(tmp_path)
    (axes,) = curves(bins, {"loss": run.numbers["loss"]}, "loss").axes
    assert np.array_equal(axes.lines[0].get_ydata(), losses, equal_nan=True)
    assert axes.lines[0].get_xdata().tolist() == [0, 1, 2, 3]
    assert axes.get_ylabel() == "loss"
    assert ">loss</text>" in section(page_of(tmp_path), "loss")


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
    for title in ("Tokens of experts by layer", "Load by layer over steps"):
        texts = re.findall(r">(layer \d)</text>", section(page, title))
        assert texts == ["layer 0", "layer 1"]
    assert "plan <due> at 1 & late" in unescape(section(page, "Events"))


def test_spans_are_drawn_where_there_are_some(tmp_path: Path) -> None:
    write_run(tmp_path, num_steps=1, num_layers=1)
    assert "<h2>Timeline</h2>" not in page_of(tmp_path)
    for rank in range(2):
        spans = [
            Span(rank, "compute", 1000.0, 3000.0, "experts"),
            Span(rank, "dispatch", 0.0, 1000.0, "dispatch", "c 0"),
        ]
        write_spans(Timeline(spans, "measured"), tmp_path, rank)
    page = page_of(tmp_path)
    assert_whole_and_alone(page)
    texts = re.findall(r">([^<>]+)</text>", section(page, "Timeline"))
    assert {"rank 0", "rank 1", "compute", "dispatch", "experts", "ms"} <= set(texts)


@pytest.mark.parametrize(("num_steps", "num_layers"), [(1, 1), (1, 100), (2, 3)])
def test_pages_of_any_size_are_whole(tmp_path: Path, num_steps: int, num_layers: int) -> None:
    assert_whole_and_alone(page_of(write_run(tmp_path, num_steps, num_layers)))


def test_a_run_without_layers_or_finite_losses_has_a_page(tmp_path: Path) -> None:
    write_lines(tmp_path, [step_line(step, [], loss=math.nan) for step in range(3)])
    page = page_of(tmp_path)
    assert_whole_and_alone(page)
    assert "no finite number was written" in section(page, "loss")


@pytest.mark.parametrize("num_steps", [1, 159, 160, 161, 100_000])
def test_bins_hold_every_step_once(num_steps: int) -> None:
    bins = Bins.of(np.arange(num_steps))
    sizes = np.diff(np.append(bins.first_B, num_steps))
    assert len(sizes) == min(num_steps, 160)
    assert sizes.sum() == num_steps
    assert sizes.max() - sizes.min() <= 1


def test_the_command_writes_the_page_and_says_where(tmp_path: Path) -> None:
    write_run(tmp_path, num_steps=2, num_layers=1)
    for options, path in (([], tmp_path / "report.html"), (["--out", str(tmp_path / "a.html")], tmp_path / "a.html")):
        done = CliRunner().invoke(app, ["report", str(tmp_path), *options])
        assert (done.exit_code, done.stdout) == (0, f"{path}\n")
        assert path.read_text(encoding="utf-8") == page_of(tmp_path)
    missing = CliRunner().invoke(app, ["report", str(tmp_path / "nowhere")])
    assert missing.exit_code == 2
    assert missing.stderr.startswith("Error: ")
    assert "nowhere is not a folder" in missing.stderr


# --- in a browser ----------------------------------------------------------------------------------------------

# Asks the browser what it drew, and leaves the answer in the page.
PROBE = """<script>
const of = (selector) => [...document.querySelectorAll(selector)];
const box = (element) => element.getBoundingClientRect();
const section = (title) => of("section").find((found) => found.querySelector("h2").textContent === title);
const svgs = of("svg");
const inside = of("svg text").every((element) => {
  const a = box(element), b = box(element.ownerSVGElement);
  return a.left >= b.left - 1 && a.right <= b.right + 1 && a.top >= b.top - 1 && a.bottom <= b.bottom + 1;
});
const map = section("Load by layer over steps").querySelector("image");
const answer = {
  svgs: svgs.length,
  wide: svgs.every((svg) => box(svg).width > 700 && box(svg).height > 80),
  map: [box(map).width, box(map).height],
  text: getComputedStyle(of("svg text")[0]).fill,
  paper: getComputedStyle(document.body).backgroundColor,
  ink: getComputedStyle(document.body).color,
  inside: inside,
  scrolls: document.documentElement.scrollWidth > document.documentElement.clientWidth,
  requests: performance.getEntriesByType("resource").filter((found) => !found.name.startsWith("data:")).length,
};
const output = document.createElement("output");
output.textContent = JSON.stringify(answer);
document.body.append(output);
</script>"""


@pytest.fixture(scope="module", params=["light", "dark"])
def shown(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """What a browser says of a page, on light and on dark paper."""
    if BROWSER is None:
        pytest.skip("no browser here: apt-get install chromium-headless-shell")
    folder = tmp_path_factory.mktemp("shown")
    page = page_of(write_run(folder, num_steps=300, num_layers=12, num_ranks=2))
    probed = folder / "probed.html"
    probed.write_text(page.replace("</body>", PROBE + "</body>"), encoding="utf-8")
    scheme = {"dark": 0, "light": 1}[request.param]
    options = ["--headless", "--no-sandbox", "--disable-gpu", f"--user-data-dir={folder / 'profile'}"]
    options += [f"--blink-settings=preferredColorScheme={scheme}", "--window-size=1000,800", "--dump-dom"]
    done = subprocess.run(
        [BROWSER, *options, probed.as_uri()], capture_output=True, text=True, timeout=120, check=True, encoding="utf-8"
    )
    (answer,) = re.findall(r"<output>(.*?)</output>", done.stdout)
    return {"scheme": request.param, **json.loads(unescape(answer))}


def test_a_browser_draws_the_page(shown: dict[str, Any]) -> None:
    assert shown["svgs"] == 7
    assert shown["wide"]
    assert min(shown["map"]) > 100
    assert shown["inside"]
    assert not shown["scrolls"]
    assert shown["requests"] == 0


def test_ink_stands_out_from_the_paper(shown: dict[str, Any]) -> None:
    def brightness(colour: str) -> float:
        return sum(map(int, re.findall(r"\d+", colour)[:3])) / 765

    paper, ink = brightness(shown["paper"]), brightness(shown["ink"])
    assert shown["text"] == shown["ink"], "figures have the page's colour of text"
    assert (paper > 0.9 and ink < 0.2) if shown["scheme"] == "light" else (paper < 0.2 and ink > 0.8)
