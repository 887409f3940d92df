"""The benchmark of planners on drawn sequences: what it draws, how it judges, and how a stopped run goes on."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from benchmarks import planners
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
    seconds = score("greedy", sequence, 12).seconds
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
    sequence, found = DrawnSequence.draw(0, 0), []
    for changed in ("", "balance/greedy/leader.py", "balance/certificate.py", "balance/laer.py"):
        monkeypatch.setattr(
            planners, "source_digest", lambda counts, changed=changed: str(bool(changed) and counts(changed))
        )
        planners._source.cache_clear()
        found.append([key_of(part, sequence, 7) for part in ("fixed", "greedy")])
    planners._source.cache_clear()
    whole, leader, certificate, laer = found
    assert (leader[0] == whole[0], leader[1] == whole[1]) == (True, False)
    assert certificate == whole
    assert laer[0] != whole[0]


def test_the_summary_counts_what_is_slower() -> None:
    sequence = replace(DrawnSequence.draw(0, 0), routing="steady", drift=0.0)
    found = [SequenceRatio(sequence, "laer, last", ratio, 0.8, MS) for ratio in (0.9, 0.94, 1.004, 1.02)]
    found.append(SequenceRatio(replace(sequence, drift=0.1), "laer, last", 1.5, 1.5, MS))
    row = summary(found, moves=False)
    assert (row.number, row.worst, row.slower, row.oracle) == (4, 1.02, 0.25, 0.8)
    assert row.median == pytest.approx(0.972)
    assert (row.greedy_ms, row.laer_ms) == (6.0, 1.5)
    assert summary(found, moves=True).worst == 1.5
