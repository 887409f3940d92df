"""The benchmark of MegaKernels, rehearsed on a toy with one process per rank: first the bits, then the times."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor

from benchmarks.harness.contest import Outcome
from benchmarks.kernels.drawn_layer import Size
from benchmarks.mega import mega_contest as contest
from benchmarks.mega.mega_contest import SEQUENTIAL, STAND_ALONE, WHOLE, link_ms, rows_of
from benchmarks.mega.ranks_layer import draw_layer
from moesys.config.overlap import MegaKernel
from moesys.lab.show.sheets import CommandOutput

CPU = torch.device("cpu")
TINY = Size("tiny", 6, 16, 16, 2, 1)
# A link that takes 0.2 ms for the half of 6 rows that leaves.
POINTS = {SEQUENTIAL: contest.UNFUSED, "fused": MegaKernel(), contest.ON_DEVICE: MegaKernel()}
PLAN = contest.MegaContest(TINY, 2, torch.float32, POINTS, 1e-3, repeats=1, bit_runs=1, device=CPU)


@pytest.mark.slow
def test_the_whole_path_on_a_toy(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert contest.main(PLAN, CommandOutput(tmp_path)) == 0
    told = capsys.readouterr().out
    assert "REHEARSED: MegaKernels over paced links" in told
    page = (tmp_path / "overlap_mega.md").read_text()
    assert page.startswith("# MegaKernels over paced links, rehearsed: ")
    assert "It does not show NVLink's latency" in page
    data = json.loads((tmp_path / "overlap_mega.json").read_text())
    assert [row["name"] for row in data["contestants"]] == [STAND_ALONE, *POINTS]
    assert [row["wrong"] for row in data["contestants"]] == [""] * 4
    assert [sorted(row["samples_ms"]) for row in data["contestants"][1:]] == [["backward", "forward"]] * 3


@pytest.mark.slow
def test_what_differs_by_a_bit_is_told_and_not_timed(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    results = contest._Together.results

    def off_by_a_bit(self: contest._Together, *first_rank: int) -> dict[str, Tensor]:
        found = results(self, *first_rank)
        return found | {"dx of rank 1": found["dx of rank 1"].nextafter(torch.tensor(1e9))}

    monkeypatch.setattr(contest._Together, "results", off_by_a_bit)
    assert contest.main(replace(PLAN, points={"fused": MegaKernel()}), CommandOutput(tmp_path)) == 1
    _, fused = json.loads((tmp_path / "overlap_mega.json").read_text())["contestants"]
    assert (fused["name"], fused["wrong"], fused["samples_ms"]) == ("fused", "dx of rank 1 differs", {})
    assert fused["ms"] == fused["x"] == {}


def test_all_programs_of_all_ranks_are_resident_together() -> None:
    for share in (1, 33):
        programs = {name: point.programs for name, point in contest.points_of(share).items()}
        assert set(contest.POINTS) < set(programs)
        assert programs.pop(contest.PAIRS) == 2 * share
        assert all(1 <= number <= share for number in programs.values())
        assert programs[SEQUENTIAL] == share


def test_every_rank_draws_the_same_layer() -> None:
    one, two = (draw_layer(TINY, 2, torch.float32, CPU) for _ in range(2))
    assert all(torch.equal(*pair) for pair in zip(one.x_RTH, two.x_RTH, strict=True))
    rows_from_others = sum(one.away_bytes(rank) for rank in (0, 1)) / (TINY.H * 4)
    assert rows_from_others == one.plan.tokens_RER.sum() - sum(one.plan.tokens_RER[r, :, r].sum() for r in (0, 1))
    with pytest.raises(ValueError, match="3 ranks do not divide 2 experts"):
        draw_layer(TINY, 3, torch.float32, CPU)


def test_a_report_compares_with_the_best_of_sequential() -> None:
    rows = rows_of(
        {
            STAND_ALONE: Outcome(),
            SEQUENTIAL: Outcome("", {"forward": [4.0, 6.0], "backward": [6.0, 6.0]}),
            f"{SEQUENTIAL}, 1/2 of programs": Outcome("", {"forward": [3.0, 6.0], "backward": [3.0, 3.0]}),
            "fused": Outcome("", {"forward": [1.5, 3.0], "backward": [1.5, 1.5]}),
            "other": Outcome("dx differs"),
        }
    )
    speedups = {row.name: row.x.get(WHOLE) for row in rows}
    assert speedups[f"{SEQUENTIAL}, 1/2 of programs"].median == 1.0
    assert speedups["fused"].median == 2.0
    assert speedups["other"] is None
    assert link_ms(4_000_000, 2.0) == 2.0
    assert [bool(row.wrong) for row in rows] == [False] * 4 + [True]
