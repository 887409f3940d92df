"""Tables say what was measured, how sure it is, and keep every name whole in every format."""

from __future__ import annotations

import io
import json
import math
import re
from dataclasses import dataclass, replace
from typing import Annotated

import pytest
from lab_cases import EP, FSEP, FSEP_WIDE, MODEL, experiment, records, simulated
from rich.console import Console

import moesys as ms
from moesys import Oracle
from moesys.config.model_spec import read_config
from moesys.config.workload import ModelTraining
from moesys.lab.runs.comparison import Comparison, compare_records
from moesys.lab.runs.records import Samples
from moesys.lab.runs.statistics import PairedRatio
from moesys.lab.show.comparisons import comparison_json, comparison_sheet, headline, ratio_words
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


def printed(comparison):
    return printed_sheet(comparison_sheet(comparison, "a machine"))


def printed_sheet(sheet):
    file = io.StringIO()
    print_sheet(sheet, file)
    return file.getvalue()


def cells(comparison, name):
    columns = written_columns(comparison_sheet(comparison))
    place = columns[0].cells.index(name)
    return {" ".join(column.header.split()): column.cells[place] for column in columns}


def test_trainings_that_part_late_are_told_by_the_step():
    of = experiment(seeds=range(8))
    apart = {"ep": [4.0] * 28, "fsep": [4.0] * 20 + [5.0] * 4 + [4.0] * 4}
    comparison = compare_records(of, [replace(each, losses=apart[each.strategy]) for each in records(of, MS)])
    assert cells(comparison, "fsep")["agreement"] == "for 20 of 28 steps"
    assert cells(comparison, "fsep")["speed-up [95 %]"] != "differs"
    assert "may send a token to another expert" in str(legend(comparison))


def legend(comparison: Comparison, machine: str = "") -> list[str]:
    return list(comparison_sheet(comparison, machine).notes)


def test_a_mark_is_explained_where_it_is_shown_and_the_tolerance_is_that_of_the_dtype():
    """The golden tables have all other words of a legend."""
    notes = str(legend(measured(model=MODEL.replace(dtype="bfloat16"))))
    assert "at most 0.02 (bfloat16)" in notes
    assert "?: " not in notes
    assert "~: " not in notes
    of = experiment()
    assert "~: " not in str(legend(compare_records(of, records(of, MS))))
    of = experiment(seeds=(0, 1, 2))
    assert "?: " not in str(legend(compare_records(of, records(of, MS | {"fsep": 10.0}, 0.1))))


def test_starved_experts_have_no_line_of_their_own_but_a_column_for_who_asks():
    of = experiment()
    some = records(of, MS)
    some[1] = replace(some[1], samples=some[1].samples | {"starved_experts": Samples("", "lower", [0.0, 3.0])})
    comparison = compare_records(of, some)
    assert "starved" not in printed(comparison)
    (column,) = [
        each
        for each in written_columns(comparison_sheet(comparison, "", ["starved_experts"]))
        if each.name == "starved_experts"
    ]
    assert "1.500" in column.cells


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
        (PairedRatio(8, 1.234, 1.1, 1.38), "1.23 [1.10, 1.38]"),
        (PairedRatio(8, 1.02, 0.95, 1.09), "~ 1.02 [0.95, 1.09]"),
        (PairedRatio(3, 1.02, 0.95, 1.09), "~ 1.02 [0.95, 1.09]"),
        (PairedRatio(3, 1.23, 1.1, 1.38), "? 1.23 [1.10, 1.38]"),
        (PairedRatio(1, 1.23, None, None), "? 1.23"),
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


@pytest.mark.parametrize("columns", ["", "0", "60", "wide"])
def test_what_is_written_is_as_wide_as_its_content_whatever_columns_says(monkeypatch, columns):
    monkeypatch.setenv("COLUMNS", columns)
    name = "a-strategy-with-a-name-as-long-as-" + "x" * 60
    of = experiment(strategies=(EP, FSEP.replace(name=name)))
    text = printed(compare_records(of, records(of, {"ep": 10.0, name: 8.0})))
    assert re.search(f"{name} .* bit-equal", text)
    assert not set("…\x1b") & set(text)


@dataclass(frozen=True)
class Word:
    word: Annotated[str, Column("word")]


@pytest.mark.parametrize("form", [markdown_table, lambda sheet: printed_sheet(sheet)])
@pytest.mark.parametrize("text", ["\x1b[31mred", "a\nforged line", "a\0b", "a\u202eb", "a\x9b31m"])
def test_control_characters_are_escaped(form, text):
    shown = form(Sheet(text, [Word(text)], notes=[text]))
    assert not set(shown.replace("\n", "")) & set("\x1b\0\u202e\x9b")
    assert not [line for line in shown.splitlines() if line.startswith("forged")]


def test_words_of_users_are_no_markup():
    names = (":fire: [/b]", "[bold]fsep[/nothing]")
    of = experiment(strategies=(EP.replace(name=names[0]), FSEP.replace(name=names[1])))
    some = records(of, dict(zip(names, (2.0, 1.0), strict=True)))
    some[0] = replace(some[0], status="failed", error="RuntimeError: [red]rank 2 died")
    text = printed(compare_records(of, some))
    assert "Speed-up: the step time of :fire: [/b] divided" in text
    assert f"  {names[1]} " in text
    assert "RuntimeError: [red]rank 2 died\n" in text


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


def test_json_holds_losses_that_are_no_numbers():
    of = experiment()
    some = [replace(each, losses=[math.nan, math.inf]) for each in records(of, MS)]
    text = comparison_json(compare_records(of, some))
    fields = json.loads(text, parse_constant=lambda name: pytest.fail(f"{name} is not JSON"))
    assert fields["rows"][0]["losses_by_seed"]["0"] == ["NaN", "Infinity"]


def test_both_forms_show_an_experiment_without_records():
    compared = compare_records(experiment(), [])
    for text in (printed_sheet(comparison_sheet(compared)), comparison_json(compared)):
        assert text.endswith("\n")
        assert "fsep" in text


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
