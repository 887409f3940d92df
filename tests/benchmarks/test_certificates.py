"""The benchmark of certificates: what it draws and plans, and one table with all of its rows as JSON."""

from __future__ import annotations

import json
from dataclasses import asdict, replace
from pathlib import Path

import numpy as np
import pytest
from typer.testing import CliRunner

import moesys as ms
from benchmarks import certificates
from benchmarks.__main__ import app
from benchmarks.certificates import CaseRatios, Distance, PlannedCase, certify_case, row_of
from benchmarks.seconds_certificate import certify_seconds

CASE = PlannedCase("MIXTRAL_8X7B", 16, 2)


def test_a_case_is_certified_as_users_do_it() -> None:
    model, cluster = ms.presets.MIXTRAL_8X7B, ms.presets.h100(2)
    before, later = map(ms.planning.LoadMatrix, CASE.loads(1))
    flat, lent = ms.Fsep(slots_per_rank=2), ms.Ep(slots_per_rank=2)
    found, us = certify_case(CASE, 1), {}
    greedy = {"balance": ms.Greedy(drift=0.0), "split": ms.FlowSplit(max_inter_node="seconds")}
    declared: dict[str, dict[str, object]] = {
        "direct": {"sharding": flat},
        "pinned_once": {"sharding": lent, "overlap": ms.Sequential(node_dispatch="once", combine="per_node")},
        "laer": {"sharding": flat, "balance": ms.Laer(), "split": ms.EvenSplit()},
    }
    for name, more in declared.items():
        strategy = ms.Strategy.model_validate({"name": name} | greedy | more)
        layout = ms.plan_layout(before, cluster, strategy.balance, 2, model=model, strategy=strategy)
        plan = ms.planning.plan_layer(strategy, model, cluster, later, layout=layout)
        us[name] = ms.simulate(ms.planning.StepPlan(strategy, model, cluster, (plan,))).length_us
        gap = certify_seconds(plan.tokens, cluster, model, strategy).gap
        assert (1 / found.least_over_laer if name == "laer" else found.over[name]) == pytest.approx(1 + gap)
    assert found.over_laer == pytest.approx(us["direct"] / us["laer"])
    assert len({round(ratio, 6) for ratio in found.over.values()}) == len(found.over) == 5


@pytest.mark.parametrize("hot", [False, True])
def test_loads_differ_by_chance_only_and_hot_nodes_want_experts_of_their_own(hot: bool) -> None:
    before_RE, later_RE = PlannedCase("QWEN3_30B_A3B", 16, 10, hot).loads(0)
    assert before_RE.sum(axis=1).tolist() == [8192 * 8] * 16
    nodes_2NE = np.stack([before_RE, later_RE]).reshape(2, 2, 8, 128).sum(axis=2)
    # As many tokens as chance moves between two draws of 8 ranks, in which a count has the variance of its mean.
    moved = np.abs(nodes_2NE[0] - nodes_2NE[1]).sum() / nodes_2NE.sum()
    by_chance = np.sqrt(2 * 2 / np.pi * nodes_2NE.mean(axis=0)).sum() / nodes_2NE.sum()
    assert 0.8 < moved / by_chance < 1.2
    alike = np.corrcoef(np.log1p(nodes_2NE[0]))[0, 1]
    assert alike < 0.8 if hot else alike > 0.97


def test_a_row_has_medians_and_the_largest() -> None:
    found = [CaseRatios({"direct": over}, over / 2, over / 4) for over in (1.0, 3.0, 1.5)]
    names = ("by_node", "once", "pinned", "pinned_once")
    row = row_of(CASE, [replace(each, over=each.over | dict.fromkeys(names, 1.0)) for each in found])
    assert (row.direct, row.once) == (Distance(1.5, 3.0), Distance(1.0, 1.0))
    assert (row.over_laer, row.least_over_laer) == (0.75, 0.375)
    assert str(row.direct) == "1.500 (3.000)"


def test_the_command_prints_a_table_and_writes_every_row(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    small = replace(CASE, num_ranks=8)
    monkeypatch.setattr(certificates, "CASES", (small,))
    arguments = ["certificates", "--seeds", "1", "--jobs", "1", "--out", str(tmp_path)]
    result = CliRunner().invoke(app, arguments)
    assert result.exit_code == 0, result.output
    assert "SIMULATED: how far planned layers are from their bounds" in result.output
    [row] = json.loads((tmp_path / "certificates.json").read_text())["rows"]
    assert row == json.loads(json.dumps(asdict(row_of(small, [certify_case(small, 0)]))))
