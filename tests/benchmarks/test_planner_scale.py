"""Planning times over sizes: EPLB's own code beside ours, generated loads, one table and all its rows as JSON."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from typer.testing import CliRunner

import moesys as ms
from benchmarks import planner_scale
from benchmarks.__main__ import app
from benchmarks.planner_scale import PEER, SizeCase, TrainingCase, load_peer, measure, measure_training
from moesys.balance.greedy.leader import FIRST_PLANS

CASE = SizeCase(num_experts=16, num_ranks=16, slots=2)
WHOLE_MODEL = TrainingCase("deepseek-v3-small", 8, 2, 0.3, whole=True)


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


@pytest.mark.parametrize("case", [replace(WHOLE_MODEL, whole=False), WHOLE_MODEL], ids=("layer", "model"))
def test_plans_after_the_first_are_timed(case: TrainingCase, monkeypatch: pytest.MonkeyPatch) -> None:
    advanced: list[tuple[str, int, int]] = []

    def walk(name: str) -> Iterator[None]:
        for batch in range(case.micro_batches):
            advanced.append((name, batch, threading.get_ident()))
            yield

    def timed(work: Callable[[], object]) -> float:
        advanced.clear()
        work()
        assert len(advanced) == case.num_layers
        assert (threading.get_ident() in {thread for *_, thread in advanced}) == (not case.whole)
        [(name, batch)] = {(name, batch) for name, batch, _ in advanced}
        return batch * (3.0 if name == "greedy" else 2.0)

    walks = {name: [walk(name) for _ in range(case.num_layers)] for name in ("greedy", "laer")}
    monkeypatch.setattr(TrainingCase, "walks", lambda _: walks)
    monkeypatch.setattr(TrainingCase, "step_ms", lambda _: 50.0)
    monkeypatch.setattr(planner_scale, "wall_ms", timed)
    greedy, laer = measure_training(case)
    first, last = FIRST_PLANS + 1, case.micro_batches - 1
    # 16 slots: a search in 13 plans, of two that take turns.
    assert last - first + 1 == greedy.plan_ms.n == 2 * 2 * 13
    assert (greedy.planner, greedy.worst_ms, greedy.mean_ms) == ("greedy", 3 * last, 1.5 * (first + last))
    assert (laer.planner, laer.worst_ms, laer.mean_ms) == ("laer", 2 * last, first + last)
    assert (greedy.over_laer, laer.over_laer) == (1.5, 1.0)
    assert (greedy.of_step, laer.of_step) == ((greedy.mean_ms / 50, laer.mean_ms / 50) if case.whole else (None, None))


def test_the_step_is_that_of_the_whole_model() -> None:
    cluster = ms.presets.h100(1)
    split = ms.FlowSplit(max_inter_node="seconds")
    strategy = ms.Strategy(name="ours", sharding=ms.Fsep(slots_per_rank=2), balance=ms.Greedy(), split=split)
    model = ms.models.ModelSpec.from_config("deepseek-v3-small")
    run = ms.models.ModelRun(model=model, cluster=cluster, strategy=strategy, micro_batch=2)
    routing = ms.Generated(num_layers=2, tokens_per_rank=8192, warmup=0, steps=20, drift=0.3)
    step = ms.models.simulate_model(run, ms.traces.generate(routing, 8, 8, 2, seed=0), draws=1)
    assert WHOLE_MODEL.step_ms() == pytest.approx(1000 * step.seconds)


def test_a_zipf_load_has_its_exponent_in_an_order_of_its_own() -> None:
    [load] = SizeCase(num_experts=16, num_ranks=8, slots=2, zipf=1.5).loads(0)
    share_E = np.sort(load.tokens_E)[::-1] / load.total
    expected_E = np.arange(1, 17) ** -1.5
    assert np.abs(share_E - expected_E / expected_E.sum()).max() < 0.002
    assert list(load.tokens_E) != sorted(load.tokens_E, reverse=True)


def test_the_command_prints_a_table_and_writes_every_row(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(planner_scale, "CASES", (CASE,))
    monkeypatch.setattr(planner_scale, "TRAINING_CASES", (replace(WHOLE_MODEL, whole=False),))
    arguments = ["planner-scale", "--seeds", "1", "--repeats", "1", "--out", str(tmp_path / "new" / "folder")]
    result = CliRunner().invoke(app, [*arguments, "--peer-eplb", str(fake_eplb(tmp_path))])
    assert result.exit_code == 0, result.output
    assert "MEASURED: planning times over sizes" in result.output
    written = json.loads((tmp_path / "new" / "folder" / "planner-scale.json").read_text())
    assert [row["planner"] for row in written["rows"]] == [*planner_scale.PLANNERS, PEER]
    assert [row["planner"] for row in written["from_history"]] == ["greedy", "laer"]
