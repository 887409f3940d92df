"""Planning times over sizes: EPLB's own code beside ours, generated loads, one table and all its rows as JSON."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from typer.testing import CliRunner

from benchmarks import planner_scale
from benchmarks.__main__ import app
from benchmarks.planner_scale import PEER, SizeCase, load_peer, measure

CASE = SizeCase(num_experts=16, num_ranks=16, slots=2)


def fake_eplb(folder: Path) -> Path:
    """Answers as the peer does: experts in turn over the replicas, whatever the load."""
    (folder / "eplb.py").write_text(
        "import torch\n"
        "def rebalance_experts(weight, num_replicas, num_groups, num_nodes, num_gpus):\n"
        "    experts = torch.arange(num_replicas).remainder(weight.shape[1])\n"
        "    return experts.repeat(weight.shape[0], 1), None, None\n"
    )
    return folder


def test_a_case_is_measured_with_the_peer_beside_ours(tmp_path: Path) -> None:
    peer = load_peer(fake_eplb(tmp_path))
    greedy, eplb, theirs = (
        measure(CASE, planner, num_seeds=2, repeats=1, peer=peer if planner == PEER else None)
        for planner in ("greedy + flow", "eplb + even", PEER)
    )
    assert 1 <= greedy.max_over_mean <= eplb.max_over_mean < theirs.max_over_mean
    assert greedy.gap == pytest.approx(0)
    assert all(row.layout_ms > 0 and row.split_ms > 0 for row in (greedy, eplb, theirs))


def test_a_layered_case_is_measured_whole() -> None:
    case = SizeCase(num_experts=8, num_ranks=8, slots=2, num_layers=3)
    row = measure(case, "greedy, effort 0 + flow", num_seeds=1, repeats=1)
    assert 1 <= row.max_over_mean <= row.worst
    assert row.case == "8 experts, 8 ranks x 2 slots, 3 layers, Zipf 1.0"


def test_a_zipf_load_has_its_exponent_in_an_order_of_its_own() -> None:
    [load] = SizeCase(num_experts=16, num_ranks=8, slots=2, zipf=1.5).loads(0)
    share_E = np.sort(load.tokens_E)[::-1] / load.total
    expected_E = np.arange(1, 17) ** -1.5
    assert np.abs(share_E - expected_E / expected_E.sum()).max() < 0.002
    assert list(load.tokens_E) != sorted(load.tokens_E, reverse=True)


def test_the_command_prints_a_table_and_writes_every_row(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(planner_scale, "CASES", (CASE,))
    arguments = ["planner-scale", "--seeds", "1", "--repeats", "1", "--out", str(tmp_path / "new" / "folder")]
    result = CliRunner().invoke(app, [*arguments, "--peer-eplb", str(fake_eplb(tmp_path))])
    assert result.exit_code == 0, result.output
    assert "MEASURED: planning times over sizes" in result.output
    rows = json.loads((tmp_path / "new" / "folder" / "planner-scale.json").read_text())["rows"]
    assert [row["planner"] for row in rows] == [*planner_scale.PLANNERS, PEER]


def test_a_peer_that_is_not_there_is_named(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"has no eplb\.py; give a folder that deepseek-ai/EPLB was checked out to"):
        load_peer(tmp_path)
    (tmp_path / "eplb.py").write_text("")
    with pytest.raises(ValueError, match="has no rebalance_experts"):
        load_peer(tmp_path)
