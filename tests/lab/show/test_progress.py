"""Progress: plain lines in a pipe, one display on a terminal, failures above it at once."""

import io
import time

import pytest
from lab_cases import experiment, record
from rich.console import Console

from moesys.lab.runs.records import Samples
from moesys.lab.show import progress
from moesys.lab.show.progress import RunProgress, status_line, steps_told


def with_step_ms(made, *values):
    made.samples["step_ms"] = Samples("ms", "lower", list(values))
    return made


def failed(trial):
    return record(trial, status="failed", samples={}, seconds=2.0, error="ValueError: boom [bold]", trace="...")


def test_a_pipe_gets_one_line_a_trial():
    four = experiment(seeds=(0, 1))
    trials = sorted(four.trials(), key=lambda trial: (trial.seed, trial.strategy.name))
    file = io.StringIO()
    progress = RunProgress(Console(file=file))
    progress.begin(four, [record(trials[0])], 3)
    for made in (
        with_step_ms(record(trials[1]), 3.0, 1.0, 2000.0),
        failed(trials[2]),
        with_step_ms(record(trials[3], repeat=1), 1234.5),
    ):
        progress.start(trials[1])
        progress.finish(made)
    progress.end()
    assert file.getvalue().splitlines() == [
        "tiny: 3 trials to run on 4 ranks, 1 recorded already",
        "[2/4] fsep seed 0: 3.000 ms a step, 1.5 s",
        "[3/4] ep   seed 1: FAILED after 2.0 s: ValueError: boom [bold]",
        "[4/4] fsep seed 1, again: 1234 ms a step, 1.5 s",
    ]


def test_a_terminal_gets_a_bar_the_best_so_far_and_failures_above():
    four = experiment(seeds=(0, 1))
    trials = four.trials()
    console = Console(file=io.StringIO(), force_terminal=True, width=100, color_system=None)
    progress = RunProgress(console)
    progress.begin(four, [], 4)
    progress.start(trials[0])
    progress.finish(with_step_ms(record(trials[0]), 12.0))
    progress.start(trials[1])
    progress.finish(failed(trials[1]))
    progress.start(trials[2])
    display = progress._bars
    assert display is not None
    with console.capture() as shown:
        console.print(*display.get_renderables())
    progress.end()
    text = shown.get()
    assert "2/4" in text
    best = f"best so far: {trials[0].strategy.name}, 12.00 ms a step"
    assert f"{trials[2].strategy.name}, seed {trials[2].seed}; {best}" in text
    printed = console.file.getvalue()
    assert f"{trials[1].strategy.name:4} seed {trials[1].seed}: FAILED after 2.0 s: ValueError: boom [bold]" in printed


def test_an_end_without_a_beginning_is_quiet():
    RunProgress(Console(file=io.StringIO(), force_terminal=True)).end()


@pytest.mark.parametrize(
    ("silent_s", "quiet", "lines"), [(0.0, False, ["a", "b\\x1b"]), (60.0, False, []), (0.0, True, [])]
)
def test_a_pipe_gets_a_line_of_long_work_now_and_then(monkeypatch, capsys, silent_s, quiet, lines):
    monkeypatch.setattr(progress, "_SILENT_S", silent_s)
    with status_line(quiet) as show:
        show("a")
        show("b\x1b")
    assert capsys.readouterr().err.splitlines() == lines


@pytest.mark.parametrize("shown", [status_line, lambda: steps_told("words", 1)])
def test_words_of_users_are_no_markup_in_what_is_redrawn(monkeypatch, capsys, shown):
    monkeypatch.setenv("FORCE_COLOR", "1")
    monkeypatch.setenv("TERM", "xterm")
    with shown() as tell:
        tell("[red]a [/b] :fire:")
        time.sleep(0.5)
    assert "[red]a [/b] :fire:" in capsys.readouterr().err
