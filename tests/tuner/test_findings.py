"""The journal: what it keeps, what it refuses, and what a kill leaves of it."""

from __future__ import annotations

import json
import math
from dataclasses import asdict

import pytest
from tuner_cases import EP

from moesys.tuner.costs import Entry, TuneJournal

SETTING = {"model": "a", "moesys": "b"}


def entry(of="seed 0", ms=1.5) -> Entry:
    return Entry.about(EP, "measured", of, ms)


def test_what_is_added_is_found_by_the_next_one(tmp_path):
    path = tmp_path / "journal.jsonl"
    journal = TuneJournal(path, SETTING)
    journal.add(entry())
    journal.add(entry("seed 1", 2.0))
    again = TuneJournal(path, SETTING)
    assert again.entries() == journal.entries()
    assert again.find(EP.fingerprint(), "seed 1").ms == 2.0
    assert again.find(EP.fingerprint(), "seed 2") is None
    # Anybody can read it.
    fields = [json.loads(line) for line in path.read_text().splitlines()]
    assert fields[0] == {"schema": 1, "setting": SETTING}
    assert (fields[1]["stage"], fields[1]["ms"], fields[1]["strategy"]["name"]) == ("measured", 1.5, "ep")


def test_a_torn_end_is_cut_off(tmp_path):
    path = tmp_path / "journal.jsonl"
    TuneJournal(path, SETTING).add(entry())
    TuneJournal(path, SETTING).add(entry("seed 1"))
    whole = path.read_bytes()
    ends = [end + 1 for end, byte in enumerate(whole) if byte == ord("\n")]
    for end in sorted({cut + off for cut in (0, *ends) for off in (-1, 0, 1)} & set(range(len(whole) + 1))):
        path.write_bytes(whole[:end])
        journal = TuneJournal(path, SETTING)
        kept = sum(cut <= end for cut in ends[1:])
        assert len(journal.entries()) == kept
        journal.add(entry("seed 2"))
        assert len(TuneJournal(path, SETTING).entries()) == kept + 1


def test_costs_of_another_setting_are_not_mixed_in(tmp_path):
    path = tmp_path / "journal.jsonl"
    TuneJournal(path, SETTING)
    with pytest.raises(ValueError, match=r"is of another model and trace.*begin anew with --fresh"):
        TuneJournal(path, SETTING | {"model": "c", "trace": "d"})


WHOLE = asdict(entry())


@pytest.mark.parametrize(
    "fields",
    [
        *({"stage": "simulated"}, [1]),
        *(WHOLE | of for of in ({"stage": "guessed"}, {"ms": "fast"}, {"ms": None}, {"ms": math.nan}, {"ms": -1.0})),
    ],
)
def test_a_damaged_line_is_named(tmp_path, fields):
    path = tmp_path / "journal.jsonl"
    TuneJournal(path, SETTING).add(entry())
    with path.open("ab") as file:
        file.write(json.dumps(fields).encode() + b"\n")
    with pytest.raises(ValueError, match=r"line 3 of .* is no entry of a tuning.*delete the line"):
        TuneJournal(path, SETTING)
