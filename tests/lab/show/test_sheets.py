"""Tables say what was measured, how sure it is, and keep every name whole in every format."""

from __future__ import annotations

import csv
import io
import json
import math
import os
import re
import subprocess
import sys
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated

import pytest
from lab_cases import EP, FSEP, FSEP_WIDE, MODEL, experiment, record, records, simulated
from rich.console import Console

import moesys as ms
from moesys.config import Oracle
from moesys.config.model_spec import read_config
from moesys.config.workload import ModelTraining
from moesys.lab.runs.comparison import Comparison, compare_records
from moesys.lab.runs.records import Samples, setting_fingerprint
from moesys.lab.runs.statistics import PairedRatio
from moesys.lab.show.comparisons import comparison_sheet, format_comparison, headline, ratio_words
from moesys.lab.show.sheets import (
    Column,
    Sheet,
    WholeTable,
    figure,
    markdown_table,
    print_sheet,
    written_columns,
)

MS = {"ep": 10.0, "fsep": 8.0, FSEP_WIDE.name: 5.0}


def measured(**changes) -> Comparison:
    of = experiment(**{"strategies": (EP, FSEP, FSEP_WIDE), "seeds": tuple(range(8))} | changes)
    return compare_records(of, records(of, MS))


def printed(comparison: Comparison) -> str:
    file = io.StringIO()
    print_sheet(comparison_sheet(comparison, "a machine"), file)
    return file.getvalue()


def printed_sheet(sheet: Sheet) -> str:
    file = io.StringIO()
    print_sheet(sheet, file)
    return file.getvalue()


def cells(comparison: Comparison, name: str) -> dict[str, str]:
    columns = written_columns(comparison_sheet(comparison))
    place = columns[0].cells.index(name)
    return {" ".join(column.header.split()): column.cells[place] for column in columns}


def test_the_title_says_measured_or_simulated():
    assert printed(measured()).startswith("MEASURED: tiny")
    of = simulated()
    assert printed(compare_records(of, records(of, MS))).startswith("SIMULATED: tiny")


def test_a_row_by_hand():
    of = experiment(seeds=(0, 1))
    some = [record(trial, step_ms=MS[trial.strategy.name]) for trial in of.trials()]
    some = [replace(each, samples=each.samples | {"plan_ms": Samples("ms", "lower", [0.25])}) for each in some]
    comparison = compare_records(of, some)
    assert cells(comparison, "fsep") == {
        "strategy": "fsep",
        "step ms": f"{comparison.rows[1].median('step_ms'):.3f}",
        "speed-up [95 %]": "? 1.25 [1.25, 1.25]",
        "exposed ms": "2.100",
        "load max/mean": "1.50",
        "plan ms": "0.250",
        "loss at end": "4.0625",
        "n": "2",
        "agreement": "bit-equal",
    }
    assert cells(comparison, "ep")["speed-up [95 %]"] == "baseline"
    assert cells(comparison, "ep")["agreement"] == "reference"


def test_a_simulated_table_has_no_loss_and_no_agreement():
    of = simulated()
    share = {"inter_node_share": Samples("", "lower", [0.125])}
    some = [replace(each, samples=each.samples | share) for each in records(of, MS)]
    row = cells(compare_records(of, some), "fsep")
    assert "agreement" not in row
    assert row["between nodes %"] == "12.5"
    assert not row.keys() & {"loss at end", "exposed ms", "plan ms"}


def test_trainings_that_part_late_are_told_by_the_step():
    of = experiment(seeds=range(8))
    late = [
        replace(each, losses=[4.0] * 20 + [5.0] * (4 if each.strategy == "fsep" else 0) + [4.0] * 4)
        if each.strategy == "fsep"
        else replace(each, losses=[4.0] * 28)
        for each in records(of, MS)
    ]
    comparison = compare_records(of, late)
    assert cells(comparison, "fsep")["agreement"] == "for 20 of 28 steps"
    assert cells(comparison, "fsep")["speed-up [95 %]"] != "differs"
    assert any("may send a token to another expert" in note for note in legend(comparison))


def test_where_numbers_differ_no_speed_is_shown():
    of = experiment(seeds=range(8))
    wrong = [replace(each, losses=[9.0] * 4) if each.strategy == "fsep" else each for each in records(of, MS)]
    comparison = compare_records(of, wrong)
    assert cells(comparison, "fsep")["speed-up [95 %]"] == "differs"
    assert cells(comparison, "fsep")["agreement"] == "1.2e+00"
    assert any(
        "at most 0.0001 (float32) within the first 10 steps, else no speed is shown." in note
        for note in legend(comparison)
    )
    assert comparison.best == frozenset()


def legend(comparison: Comparison, machine: str = "") -> list[str]:
    return list(comparison_sheet(comparison, machine).notes)


def test_the_legend_names_source_machine_fingerprint_and_seeds():
    comparison = measured()
    notes = "\n".join(legend(comparison, "two cores"))
    assert "Measured on 4 ranks on 1 node: two cores." in notes
    assert f"Fingerprint {setting_fingerprint(comparison.experiment)} " in notes
    assert "8 requested, 3 steps each" in notes
    # A mark is explained where it is shown.
    assert "?: " not in notes
    assert "~: " not in notes
    of = experiment()
    shown = {
        "? ": compare_records(of, records(of, MS)),
        "~ ": compare_records(of, records(of, {**MS, "fsep": 10.0}, 0.1)),
    }
    for mark, comparison in shown.items():
        assert cells(comparison, "fsep")["speed-up [95 %]"].startswith(mark)
        assert (" ?: fewer than 6 seeds." in legend(comparison)[1]) == (mark == "? ")
        assert (" ~: the interval contains 1." in legend(comparison)[1]) == (mark == "~ ")
    of = simulated()
    assert "nothing was measured" in legend(compare_records(of, records(of, MS)))[-1]


def test_failures_and_starved_experts_are_told():
    of = experiment()
    some = records(of, MS)
    first = of.trials()[0]
    some[0] = replace(some[0], status="failed", error="RuntimeError: [red]rank 2 died")
    some[1] = replace(some[1], samples=some[1].samples | {"starved_experts": Samples("", "lower", [0.0, 3.0])})
    comparison = compare_records(of, some)
    text = printed(comparison)
    assert f"Failed: {first.strategy.name}, seed {first.seed}: RuntimeError: [red]rank 2 died\n" in text
    assert "1 (1 failed)" in text
    # Starved experts have no line of their own, but a column for who asks.
    assert "starved" not in text
    asked = comparison_sheet(comparison, "", ["starved_experts"])
    (column,) = [each for each in written_columns(asked) if each.name == "starved_experts"]
    assert "1.500" in column.cells


def test_the_verdict_stands_below_the_table():
    comparison = measured()
    assert f"\n{headline(comparison)}\n" in printed(comparison)


def test_an_oracle_is_a_bound_and_never_the_fastest():
    oracle = FSEP_WIDE.replace(name="oracle", balance=ms.Greedy(), predictor=Oracle())
    of = simulated(strategies=(EP, FSEP, oracle), seeds=tuple(range(6)))
    comparison = compare_records(of, records(of, {"ep": 10.0, "fsep": 8.0, "oracle": 5.0}))
    assert [row.name for row in comparison.rows] == ["ep", "oracle", "fsep"]
    assert headline(comparison).startswith("fsep is the fastest: 1.25 times as fast as ep")
    assert comparison.best == {"fsep"}
    assert "oracle: a bound that no run can reach, as its planner knows the load in advance." in legend(comparison)


@pytest.mark.parametrize(("busy", "told"), [(1.1, False), (6.0, True)])
def test_a_busy_machine_is_named(busy: float, told: bool):
    of = experiment()
    found = [
        replace(one, samples=one.samples | {"processes_per_core": Samples("", "lower", [busy])})
        for one in records(of, MS)
    ]
    words = (
        "The machine was busy: 6.0 runnable processes per core, so steps take longer and vary more than on an idle one."
    )
    assert (words in legend(compare_records(of, found))) == told


@pytest.mark.parametrize(
    ("ratio", "words"),
    [
        (PairedRatio(8, 1.234, 1.1, 1.38, 0.01), "1.23 [1.10, 1.38]"),
        (PairedRatio(8, 1.02, 0.95, 1.09, 0.4), "~ 1.02 [0.95, 1.09]"),
        (PairedRatio(3, 1.02, 0.95, 1.09, 0.4), "~ 1.02 [0.95, 1.09]"),
        (PairedRatio(3, 1.23, 1.1, 1.38, 0.25), "? 1.23 [1.10, 1.38]"),
        (PairedRatio(1, 1.23, None, None, 1.0), "? 1.23"),
    ],
)
def test_a_ratio_says_how_sure_it_is(ratio, words):
    assert ratio_words(ratio) == words


@pytest.mark.parametrize(
    ("value", "words"),
    [
        (0.0, "0.000"),
        (0.0123, "0.012"),
        (1.2345, "1.234"),
        (12.345, "12.35"),
        (123.45, "123.5"),
        (12345.6, "12346"),
        (0.00012, "1.20e-04"),
        (2e7, "2.00e+07"),
        (math.inf, "inf"),
        (math.nan, "nan"),
    ],
)
def test_figures_keep_four_digits(value, words):
    assert figure(value) == words


def test_only_the_winner_is_bold_green_and_what_is_unclear_is_grey():
    file = io.StringIO()
    Console(file=file, force_terminal=True, width=200, color_system="standard").print(
        WholeTable(comparison_sheet(measured(repeat_baseline=True)))
    )
    rows = [line for line in file.getvalue().splitlines() if "bit-equal" in line]
    assert [re.search(r"\x1b\[[\d;]+m", row)[0] if "\x1b" in row else "" for row in rows] == [
        *("\x1b[2m", "\x1b[1;32m", ""),
    ]


def test_a_pipe_gets_the_full_width():
    code = (
        "from test_sheets import *; name = 'a-strategy-with-a-name-as-long-as-' + 'x' * 60\n"
        "of = experiment(strategies=(EP, FSEP.replace(name=name)))\n"
        "print_sheet(comparison_sheet(compare_records(of, records(of, {'ep': 10.0, name: 8.0}))))"
    )
    here = Path(__file__).parent
    env = {"PYTHONPATH": os.pathsep.join([str(here), str(here.parent)]), "PYTHONIOENCODING": "utf-8"}
    text = subprocess.run([sys.executable, "-c", code], env=env, capture_output=True, text=True, check=True).stdout
    assert "-as-long-as-" + "x" * 60 + " " in text
    assert "…" not in text
    assert "\x1b" not in text


@pytest.mark.parametrize("columns", ["0", "60", "wide"])
def test_what_is_written_is_as_wide_as_its_content_whatever_columns_says(monkeypatch, columns):
    wanted = printed(measured())
    monkeypatch.setenv("COLUMNS", columns)
    assert printed(measured()) == wanted


@dataclass(frozen=True)
class Word:
    word: Annotated[str, Column("word")]


@pytest.mark.parametrize("form", [markdown_table, lambda sheet: printed_sheet(sheet)])
@pytest.mark.parametrize("text", ["\x1b[31mred", "a\nforged line", "a\0b", "a\u202eb", "a\x9b31m"])
def test_control_characters_are_escaped(form, text):
    shown = form(Sheet(text, [Word(text)], notes=[text]))
    assert not set(shown.replace("\n", "")) & set("\x1b\0\u202e\x9b")
    assert not [line for line in shown.splitlines() if line.startswith("forged")]


def test_brackets_in_names_are_no_markup():
    of = experiment(strategies=(EP, FSEP.replace(name="[bold]fsep[/nothing]")))
    assert "[bold]fsep[/nothing]" in printed(compare_records(of, records(of, {"ep": 1.0, "[bold]fsep[/nothing]": 2.0})))


def test_words_between_colons_are_no_symbols_of_rich():
    of = experiment(strategies=(EP.replace(name=":fire: [/b]"), FSEP))
    text = printed(compare_records(of, records(of, {":fire: [/b]": 2.0, "fsep": 1.0})))
    assert "Speed-up: the step time of :fire: [/b] divided" in text


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("[a](http://b)", "[a\\](http://b)"),
        ("~~a~~ ~ b", "\\~~a\\~~ ~ b"),
        ("&lt;b&gt; a&b", "\\&lt;b\\&gt; a&b"),
        ("$a$", "\\$a\\$"),
        ("~ 1.20 [1.10, 1.30]", "~ 1.20 [1.10, 1.30]"),
    ],
)
def test_markdown_shows_words_of_users_as_they_are(text, shown):
    assert markdown_table(Sheet("words", [Word(text)])).splitlines()[-1] == f"| {shown} |"


def test_markdown_keeps_names_and_cells_apart():
    text = format_comparison(measured(), "markdown", "two cores")
    head, rule, *rows = [line for line in text.splitlines() if line.startswith("|")]
    assert head.startswith("| strategy | step ms | speed-up [95 %] |")
    assert rule.count("|") == head.count("|")
    assert rows[1].startswith("| **fsep\\_wide\\|a&b** | **")
    assert all(row.replace("\\|", "").count("|") == head.count("|") for row in rows)
    assert text.startswith("### MEASURED: tiny\n\n|")
    assert text.endswith("of model, cluster and workload.\n")


def test_csv_has_one_row_a_strategy_with_unrounded_figures():
    comparison = measured()
    rows = list(csv.DictReader(io.StringIO(format_comparison(comparison, "csv"))))
    assert [row["strategy"] for row in rows] == ["ep", FSEP_WIDE.name, "fsep"]
    assert float(rows[1]["step_ms"]) == comparison.rows[1].median("step_ms")
    for name in ("estimate", "low", "high", "p"):
        assert float(rows[1][name]) == getattr(comparison.rows[1].speedup, name)
    assert rows[1]["verdict"] == "faster"
    assert rows[0]["estimate"] == ""
    assert rows[1]["source"] == "measured"


def test_json_holds_every_sample_and_the_experiment():
    comparison = measured()
    fields = json.loads(format_comparison(comparison, "json", "two cores"))
    assert fields["source"] == "measured"
    assert fields["best"] == [FSEP_WIDE.name]
    assert fields["experiment"] == comparison.experiment.model_dump(mode="json")
    row = fields["rows"][1]
    assert row["samples"]["step_ms"]["values_by_seed"]["3"] == comparison.rows[1].samples["step_ms"][3]
    assert row["speedup"]["verdict"] == "faster"
    assert row["agreement"]["bit_equal"] is True


def test_json_holds_losses_that_are_no_numbers():
    of = experiment()
    some = [replace(each, losses=[math.nan, math.inf]) for each in records(of, MS)]
    text = format_comparison(compare_records(of, some), "json")
    fields = json.loads(text, parse_constant=lambda name: pytest.fail(f"{name} is not JSON"))
    assert fields["rows"][0]["losses_by_seed"]["0"] == ["NaN", "Infinity"]


@pytest.mark.parametrize("form", ["markdown", "csv", "json"])
def test_every_format_shows_an_experiment_without_records(form):
    text = format_comparison(compare_records(experiment(), []), form)
    assert text.endswith("\n")
    assert "fsep" in text


def test_the_dtype_is_in_the_legend():
    comparison = measured(model=MODEL.replace(dtype="bfloat16"))
    assert any("at most 0.02 (bfloat16)" in note for note in legend(comparison))


@pytest.mark.parametrize(
    ("fields", "told"),
    [({}, True), ({"data": ("a.bin", "b.txt")}, True), ({"data": ("a.bin",)}, False), ({"tokenizer": "t.json"}, False)],
)
def test_bytes_in_place_of_tokens_are_named(fields: dict, told: bool):
    config = read_config("olmoe-small")
    for vocab_size, is_told in ((32_000, told), (256, False)):
        workload = ModelTraining(model="m", config=json.dumps(config | {"vocab_size": vocab_size}), **fields)
        of = experiment(model=workload.shape, workload=workload)
        assert ("Tokens are bytes, 256 of the model's 32,000" in str(legend(compare_records(of, [])))) == is_told
