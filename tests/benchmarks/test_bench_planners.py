"""The benchmark of planners on drawn sequences: what it draws, how it judges, and how a stopped run goes on."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from typer.testing import CliRunner

from benchmarks import planners
from benchmarks.__main__ import app
from benchmarks.planners import DrawnSequence, SequenceRatio, key_of, layer_seconds, score, strategies_of, summary
from moesys.balance.greedy.leader import _costs
from moesys.balance.planning_problem import PlanningProblem
from moesys.balance.replay import replay_layer
from moesys.config import presets

MS = {"greedy": 6.0, "laer": 1.5}
SMALL = {"8 ranks": presets.h100(2).replace(ranks_per_node=4)}


@pytest.fixture(autouse=True)
def _few_micro_batches(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(planners, "MICRO_BATCHES", 6)
    monkeypatch.setattr(planners, "CLUSTERS", SMALL)
    monkeypatch.setattr(planners, "MODELS", ("MIXTRAL_8X7B",))


def run(folder: Path, *more: str) -> dict[str, Any]:
    result = CliRunner().invoke(app, ["planners", "--sequences", "2", "--jobs", "1", "--out", str(folder), *more])
    assert result.exit_code == 0, result.output
    assert "greedy / best" in result.output
    found: dict[str, Any] = json.loads((folder / "planners.json").read_text())
    for name in ("summary", "sequences"):
        for row in found[name]:
            for timed in ("planning_ms", "greedy_ms", "laer_ms"):
                row.pop(timed, None)
    return found


@pytest.mark.slow
def test_a_stopped_run_goes_on_to_the_same_results(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    whole = run(tmp_path / "whole")
    scored: list[tuple[str, int]] = []

    def counted(part: str, sequence: DrawnSequence, micro_batches: int) -> planners.SequenceScores:
        if len(scored) == 3:
            raise KeyboardInterrupt
        scored.append((part, sequence.index))
        return score(part, sequence, micro_batches)

    monkeypatch.setattr(planners, "score", counted)
    halted = CliRunner().invoke(app, ["planners", "--sequences", "2", "--jobs", "1", "--out", str(tmp_path / "halted")])
    assert halted.exit_code != 0
    assert len(scored) == 3
    # A killed process may leave a part of a line.
    with (tmp_path / "halted" / f"{scored[-1][0]}.jsonl").open("ab") as file:
        file.write(b'{"key": "torn')
    scored.clear()
    assert run(tmp_path / "halted") == whole
    assert len(scored) == 1
    scored.clear()
    assert run(tmp_path / "halted") == whole
    assert not scored


def test_layouts_are_judged_as_greedy_judges_its_candidates() -> None:
    for index in range(8):
        sequence = DrawnSequence.draw(0, index)
        model, cluster = sequence.shape
        strategy = strategies_of(sequence, "greedy")["greedy"]
        costs, seconds = [], []
        for one in replay_layer(strategy, model, cluster, sequence.tokens_SRE(5)):
            problem = PlanningProblem.of_layout(
                one.load, cluster, strategy.early_slots(model, cluster), model, None, strategy
            )
            costs += _costs(problem, one.load, one.layout.expert_RS[None].astype(np.int32))
            seconds.append(layer_seconds(strategy, model, cluster, one.load, one.layout))
        np.testing.assert_allclose(np.array(costs) / costs[0], np.array(seconds) / seconds[0], rtol=1e-12)


def test_the_oracle_is_not_told_of_the_past_and_is_best_on_loads_that_jump() -> None:
    sequence = replace(DrawnSequence.draw(0, 0), routing="steady", skew=1.5, drift=1.0, sharding="fsep")
    seconds = score("greedy", sequence, 24).seconds
    assert set(seconds) == {"greedy", "oracle"}
    assert seconds["oracle"] < 0.95 * seconds["greedy"]


def test_loads_are_what_the_settings_say() -> None:
    base = replace(DrawnSequence.draw(0, 0), routing="steady", skew=1.0, drift=0.0)
    still = base.tokens_SRE(12).sum(axis=1)
    assert np.abs(still / still[0] - 1).max() < 0.1
    assert not base.moves
    moving = replace(base, drift=0.5)
    assert moving.moves
    assert np.abs(moving.tokens_SRE(12).sum(axis=1)[-1] / still[0] - 1).max() > 0.3
    turns = replace(base, routing="domains", domain_batches=2)
    assert turns.moves
    share_SE = turns.tokens_SRE(12).sum(axis=1) / base.shape[1].num_ranks
    same = np.array([np.corrcoef(share_SE[0], share_E)[0, 1] > 0.9 for share_E in share_SE])
    assert same.tolist() == [*[True] * 2, *[False] * 4] * 2
    local_RE = replace(base, routing="node-local").tokens_SRE(1)[0]
    assert np.corrcoef(local_RE[0], local_RE[3])[0, 1] > 0.99 > np.corrcoef(local_RE[0], local_RE[4])[0, 1]


def test_scores_of_fixed_planners_outlive_a_change_of_greedy(monkeypatch: pytest.MonkeyPatch) -> None:
    """A digest asks for the files that count, so what is asked tells which changes make results old."""
    files = {"balance/greedy/leader.py": "x", "balance/laer.py": "x", "balance/certificate.py": "x"}
    monkeypatch.setattr(
        planners, "source_digest", lambda counts: repr(sorted((k, v) for k, v in files.items() if counts(k)))
    )
    sequence = DrawnSequence.draw(0, 0)

    def keys() -> tuple[str, str]:
        planners._source.cache_clear()
        return key_of("fixed", sequence, 7), key_of("greedy", sequence, 7)

    fixed, greedy = keys()
    files["balance/greedy/leader.py"] = "y"
    assert keys()[0] == fixed
    assert keys()[1] != greedy
    greedy = keys()[1]
    files["balance/certificate.py"] = "y"
    assert keys() == (fixed, greedy)
    files["balance/laer.py"] = "y"
    assert keys()[0] != fixed
    planners._source.cache_clear()


def test_the_summary_counts_what_is_slower() -> None:
    sequence = replace(DrawnSequence.draw(0, 0), routing="steady", drift=0.0)
    found = [SequenceRatio(sequence, "laer, last", ratio, 0.8, MS) for ratio in (0.9, 0.94, 1.004, 1.02)]
    found.append(SequenceRatio(replace(sequence, drift=0.1), "laer, last", 1.5, 1.5, MS))
    row = summary(found, moves=False)
    assert (row.number, row.worst, row.slower, row.oracle) == (4, 1.02, 0.25, 0.8)
    assert row.median == pytest.approx(0.972)
    assert (row.greedy_ms, row.laer_ms) == (6.0, 1.5)
    assert summary(found, moves=True).worst == 1.5
