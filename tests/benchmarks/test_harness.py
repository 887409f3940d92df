"""The benches' harness: tables come from rows, contestants are checked before they are timed."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import pytest
import torch
from torch import Tensor

from benchmarks.harness.contest import Case, Contestant, EqualBits, Outcome, hold, of_all_ranks
from moesys.config import ClusterSpec
from moesys.lab.runs.statistics import Quantiles
from moesys.lab.show import sheets
from moesys.lab.show.sheets import Column, CommandOutput, Report, Sheet, markdown_table, publish, written_columns


def megabytes(num_bytes: int) -> str:
    return f"{num_bytes / 1e6:.1f}"


@dataclass(frozen=True)
class Sent:
    link: Annotated[str, Column("link")]
    num_bytes: Annotated[int, Column("bytes", ","), Column("MB", lambda num_bytes: megabytes(num_bytes))]
    took: Annotated[Quantiles | None, Column("us", ".1f")]
    by_way: Annotated[dict[str, float], Column("{}, ms", ".2f")]
    samples: list[float]
    remark: Annotated[str, Column("remark")] = ""

    @property
    def lost(self) -> Annotated[float, Column("lost %", ".0f", 100, after="link")]:
        return 0.25

    @property
    def known(self) -> Annotated[bool, Column("")]:
        return True


ROWS = [
    Sent("a|b", 1_500_000, Quantiles.of([1.0, 2.0, 3.0]), {"up": 1.0}, [1.0]),
    Sent("c", 20, None, {"down": 2.0}, []),
]


def test_a_table_follows_from_its_rows() -> None:
    """Columns in which nobody has anything to say are left out."""
    assert markdown_table(Sheet("", ROWS)).splitlines() == [
        "| link | lost % | bytes | MB | us | up, ms | down, ms |",
        "| :-- | --: | --: | --: | --: | --: | --: |",
        "| a\\|b | 25 | 1,500,000 | 1.5 | 2.0 [1.4, 2.6] | 1.00 |  |",
        "| c | 25 | 20 | 0.0 |  |  | 2.00 |",
    ]
    assert [column.header for column in written_columns(Sheet("", ROWS, without=("num_bytes", "by_way")))] == [
        *("link", "lost %", "us")
    ]


def test_a_report_is_written_whatever_becomes_of_its_reader(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def closed(*_: object, **__: object) -> None:
        raise BrokenPipeError

    monkeypatch.setattr(sheets, "print_sheet", closed)
    data = {"rows": ROWS, "cluster": ClusterSpec(ranks_per_node=3)}
    report = Report("sent", "What was sent", "measured", [Sheet("MEASURED: sent", ROWS, ["a note"])], data=data)
    with pytest.raises(BrokenPipeError):
        publish(report, CommandOutput(tmp_path))
    page, found = (tmp_path / "sent.md").read_text(), json.loads((tmp_path / "sent.json").read_text())
    assert page.startswith("# What was sent, ")
    assert "\n\n- a note\n" in page
    assert (found["benchmark"], found["source"], found["cluster"]["ranks_per_node"]) == ("sent", "measured", 3)
    assert found["rows"][0]["took"] == {"median": 2.0, "p20": 1.4, "p80": 2.6, "n": 3}
    assert (found["rows"][0]["samples"], found["rows"][0]["known"]) == ([1.0], True)


def contestant(value: float, *, fails: bool = False) -> Contestant:
    def work() -> None:
        if fails:
            raise RuntimeError("no room\nat all")

    return Contestant(lambda: {"y": torch.tensor([value])}, {"forward": work, "backward": work}, lambda: value)


def held(setups: Mapping[str, Contestant], **options: bool) -> dict[str, Outcome]:
    makers = {name: (lambda made=made: made) for name, made in setups.items()}
    return hold(Case(makers, EqualBits(), **options), repeats=3)


def test_who_is_wrong_gets_no_speed_and_the_rest_goes_on() -> None:
    found = held({"first": contestant(1.0), "other": contestant(2.0), "falls": contestant(1.0, fails=True)})
    assert [outcome.wrong for outcome in found.values()] == ["", "y differs", "RuntimeError: no room"]
    assert [{name: len(of) for name, of in outcome.samples_ms.items()} for outcome in found.values()] == [
        {"forward": 3, "backward": 3},
        *({}, {}),
    ]
    assert found["first"].metrics == 1.0
    together = held({"first": contestant(1.0), "other": contestant(2.0)}, all_or_none=True)
    assert together["first"].samples_ms == {}


def test_the_slowest_rank_counts() -> None:
    by_rank = [{"a": Outcome("", {"step": [1.0, 4.0]}, 5)}, {"a": Outcome("dx differs", {"step": [2.0, 3.0]}, 6)}]
    assert of_all_ranks(by_rank) == {"a": Outcome("dx differs", {"step": [2.0, 4.0]}, [5, 6])}


def test_bits_that_are_missing_differ() -> None:
    right: dict[str, Tensor] = {"y": torch.ones(1), "dx": torch.ones(1)}
    check = EqualBits("dx")
    assert check("", right) == ""
    assert check("", {"dx": torch.ones(1)}) == ""
    assert check("", {"y": torch.ones(1)}) == "dx differs"
