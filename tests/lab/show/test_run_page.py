"""The page of a run holds the table, the winner and the timelines of all strategies, and nothing from elsewhere."""

from __future__ import annotations

import re
from html import unescape
from pathlib import Path

import pytest
from lab_cases import EP, FSEP, FSEP_WIDE, experiment, moesys, records
from test_watch_page import HINT, section
from watch_cases import assert_whole_and_alone, write_run

from moesys import Experiment, Generated, run
from moesys.lab.runs.comparison import compare_records
from moesys.lab.runs.records import RunFolder
from moesys.lab.show.comparisons import headline
from moesys.lab.show.run_page import index_page, run_page, write_page
from moesys.simulator.step_program import simulated_steps


@pytest.fixture(scope="module")
def small() -> Experiment:
    return experiment(workload=Generated(steps=2, tokens_per_rank=4096, other_ms=0.1))


def written(of: Experiment, out: Path, **step_ms: float) -> Path:
    """A run folder with made-up records."""
    with RunFolder.open(of, out) as folder:
        for record in records(of, step_ms, noise=0.001):
            folder.append(record)
    return folder.path


def test_a_simulated_run_has_its_table_winner_loads_and_timelines_on_one_scale(small, tmp_path):
    result = run(small, tmp_path, jobs=1)
    page = run_page(RunFolder(result.path))
    assert page == run_page(RunFolder(result.path))
    assert_whole_and_alone(page)
    comparison = compare_records(small, result.records)
    assert headline(comparison) in unescape(page)
    assert f"{comparison.rows[1].speedup.estimate:.2f} times as fast as ep" in headline(comparison)
    rows = re.findall(r"<td class=\"left\">(\w+)</td><td>([\d.]+)</td>", section(page, "SIMULATED: tiny"))
    assert [(name, float(ms)) for name, ms in rows] == [
        (row.name, pytest.approx(row.median("step_ms"), rel=1e-3)) for row in comparison.rows
    ]
    assert "<svg" in section(page, "Speed-up")
    loads = section(page, "Load of ranks and experts")
    names = [row.name for row in comparison.rows[:2]]
    assert [text for text in re.findall(r">([^<>]+)</text>", loads) if text.startswith("rank, under")] == [
        f"rank, under {name}" for name in names
    ]
    step = next(
        simulated_steps(comparison.rows[1].strategy, small.model, small.cluster, small.workload, small.seeds[0])
    )
    counts = step.plans[0].layers[0].tokens.computed_RE
    hints = [unescape(title) for *_, title in HINT.findall(loads)][counts.size :]
    assert hints == [
        f"expert {expert}, rank {rank}: {counts[rank, expert]:.4g}"
        for expert in range(counts.shape[1])
        for rank in range(counts.shape[0])
    ]
    drawn = section(page, "Timelines")
    assert len(re.findall("<svg", drawn)) == 1
    texts = re.findall(r">([^<>]+)</text>", drawn)
    assert {"forward", "backward", "idle", "critical path", "outline: on the critical path"} <= set(texts)
    for row in comparison.rows:
        first_ms = row.samples["step_ms"][0][0]
        (shown,) = [text for text in texts if text.startswith(f"{row.name}: ")]
        assert float(shown.split()[1]) == pytest.approx(first_ms, rel=1e-3)
    hints = [unescape(title) for *_, title in HINT.findall(drawn)]
    assert any(re.match(r"layer 0 forward, .* ms", hint) for hint in hints)
    assert any(re.match(r"layer 1 backward, .* ms", hint) for hint in hints)
    shares = [int(found[1]) for hint in hints if (found := re.match(r"critical path, (\d+)%", hint))]
    assert sum(shares) == pytest.approx(200, abs=0.5 * len(shares))


def test_a_trained_run_has_its_losses_loads_and_step_times(tmp_path):
    page = run_page(RunFolder(written(experiment(), tmp_path, ep=10.0, fsep=5.0)))
    assert_whole_and_alone(page)
    assert "The losses of fsep have the same bits as those of ep." in section(page, "Loss")
    assert "stroke-dasharray" in section(page, "Step time"), "a curve hides none that it lies on"
    first_steps = [HINT.search(section(page, title)).groups()[-1].partition(":")[0] for title in ("Loss", "Step time")]
    assert first_steps == ["step 0", f"step {experiment().workload.warmup}"]
    titles = ["Speed-up", "Loss", "Load of experts", "Step time", "About this run"]
    assert re.findall("<h2>(.*?)</h2>", page)[1:] == titles
    assert "expert 3: 1.6" in section(page, "Load of experts")
    assert "MEASURED: tiny, 4 experts with top-2 on 4 ranks of 1 node" in page


@pytest.mark.parametrize(
    ("seeds", "fsep_ms", "words"),
    [
        (6, 5.0, "fsep is the fastest: 2.00 times as fast as ep (95 % interval 2.00 to 2.00, n = 6 seeds)."),
        (6, 20.0, "ep, the baseline, is the fastest. The next one, fsep, is 0.50 times as fast as ep"),
        (6, 10.0, "Inconclusive: no strategy is clearly faster than ep. fsep is 1.00 times as fast as ep"),
        (2, 5.0, "Inconclusive: n = 2 seeds, and 6 are needed. So far fsep is 2.00 times as fast as ep"),
    ],
)
def test_the_headline_names_the_winner_or_says_that_there_is_none(seeds, fsep_ms, words):
    of = experiment(seeds=tuple(range(seeds)))
    noise = 0.001 if fsep_ms == 10.0 else 0.0
    assert headline(compare_records(of, records(of, {"ep": 10.0, "fsep": fsep_ms}, noise))).startswith(words)


def test_the_headline_names_those_that_the_fastest_cannot_be_told_from():
    of = experiment(strategies=(EP, FSEP, FSEP_WIDE), seeds=tuple(range(6)))
    found = records(of, {"ep": 10.0, "fsep": 5.0, FSEP_WIDE.name: 5.0}, noise=0.001)
    words = headline(compare_records(of, found))
    pattern = r"is 2.00 times as fast as ep .*, but it is not distinguishable from (fsep|fsep_wide\|a&b)\.$"
    assert re.search(pattern, words)


def test_report_takes_any_folder_and_names_what_it_cannot_read(tmp_path, capsys):
    runs = tmp_path / "runs"
    folder = written(experiment(), runs, ep=10.0, fsep=5.0)
    torn = written(experiment(name="torn"), runs, ep=10.0, fsep=5.0)
    (torn / "records.jsonl").write_text("{}\n")
    write_run(runs / "watched", num_steps=3, num_layers=1)
    write_run(runs / "seeds" / "seed-0", num_steps=3, num_layers=1)
    (runs / "photos").mkdir()
    (runs / "begun").mkdir()
    (runs / "begun" / "rank-0000.jsonl").touch()
    for path, page in ((folder, "report.html"), (runs / "watched", "report.html"), (runs, "index.html")):
        assert moesys("report", path) == 0
        assert capsys.readouterr().out == f"{path / page}\n"
    page = (runs / "index.html").read_text()
    assert page == index_page(runs)
    rows = re.findall(r"<tr><td class=\"left\">(.*?)</tr>", page)
    text = " ".join(re.sub("<[^>]*>+", " ", row) for row in rows)
    links = [link for row in rows for link in re.findall(r'href="([^"]*)"', row)]
    assert links[:2] == [f"{folder.name}/report.html", "watched/report.html"]
    assert set(links[2:]) == {f"{torn.name}/", "begun/"}
    for words in (
        "2026-01-02 03:04",
        "times as fast as ep",
        "step 2, loss 4.167",
        "cannot be read: no step has been written yet",
        "records.jsonl",
    ):
        assert words in text
    assert "photos: not written by moesys; seeds: a folder of watched trainings, which moesys report lists." in page
    (runs / "index.html").write_text("<title>Home</title>")
    for path, message in (
        (torn, "records.jsonl"),
        (runs / "photos", "photos has neither a run nor a watched training"),
        (runs, "is of another program and is kept"),
    ):
        assert moesys("report", path) == 2
        assert message in capsys.readouterr().err


def test_a_run_writes_its_page_and_the_list_and_again_when_it_is_resumed(small, tmp_path, capsys):
    file = tmp_path / "small.json"
    file.write_text(small.replace(seeds=(0,)).to_json())
    assert moesys("run", file, "--out", tmp_path / "runs", "--jobs", "1") == 0
    (page,) = tmp_path.glob("runs/*/report.html")
    assert f"Results: {page.parent}" in capsys.readouterr().out
    first = page.read_text()
    assert "n = 1 seed, and 6 are needed" in first
    assert moesys("run", file, "--out", tmp_path / "runs", "--jobs", "1", "--seeds", "2") == 0
    assert "n = 2 seeds, and 6 are needed" in page.read_text()
    assert "n = 2 seeds, and 6 are needed" in (tmp_path / "runs" / "index.html").read_text()
    assert page.read_text() == write_page(page.parent).read_text()
