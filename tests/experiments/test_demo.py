"""The demo, in small: both tables, the figures, and nothing to do the second time."""

from __future__ import annotations

import json
import re

import pytest
import typer

from experiments import demo


def ended_well(*arguments: object) -> bool:
    """Runs the demo in this process, as the command line does."""
    app = typer.Typer()
    app.command()(demo.main)
    with pytest.raises(SystemExit) as end:
        app([*map(str, arguments)])
    return end.value.code == 0


@pytest.fixture
def _in_small(monkeypatch):
    """Small experts, and one seed of as many steps as make one micro-batch of the cluster."""
    training, replay = demo.training_experiment, demo.replay_experiment

    def short_training():
        whole = training()
        config = json.dumps(whole.workload.config_fields | {"intermediate_size": 64})
        workload = whole.workload.replace(warmup=0, steps=demo.FOLD, batch=4, config=config)
        return whole.replace(seeds=(0,), model=workload.shape, workload=workload)

    def short_replay(traces):
        whole = replay(traces)
        return whole.replace(seeds=(0,), workload=whole.workload.replace(warmup=0))

    monkeypatch.setattr(demo, "training_experiment", short_training)
    monkeypatch.setattr(demo, "replay_experiment", short_replay)


@pytest.mark.usefixtures("_in_small")
def test_the_demo_trains_replays_draws_and_resumes(tmp_path, capsys):
    assert ended_well("--out", tmp_path / "runs")
    printed = capsys.readouterr().out
    assert printed.index("MEASURED: demo") < printed.index("SIMULATED: demo-cluster")
    trained, replayed = (path.read_text() for path in sorted(tmp_path.glob("runs/*/report.html")))
    for name in ("ep", "ep+pipelined", "ep+lent", "fsep"):
        measured, _ = re.findall(rf"^ +{re.escape(name)} .*", printed, re.MULTILINE)
        assert ("reference" if name == "ep" else "bit-equal") in measured
        assert re.search(rf">{re.escape(name)}: [\d.]+ ms</text>", replayed)
    assert "have the same bits as those of ep" in trained
    told = [line for line in printed.splitlines() if line.startswith("All runs")]
    assert told == [f"All runs: {tmp_path}/runs/index.html"]

    assert ended_well("--out", tmp_path / "runs")
    again = capsys.readouterr().out
    assert again.count("nothing to do: 4 of 4 trials are recorded") == 2
    # What is recorded is what is shown, whenever it is shown.
    tables = [[line for line in of.splitlines() if "[" in line and line[0] != "["] for of in (printed, again)]
    assert tables[0] == tables[1]


def test_full_size_experiments_can_be_told_apart_and_paired(tmp_path):
    training, replay = demo.training_experiment(), demo.replay_experiment(tmp_path)
    assert [s.name for s in training.strategies][:4] == [s.name for s in replay.strategies]
    assert training.model.num_experts == replay.model.num_experts
    folded = training.workload.steps * training.workload.micro_batches // demo.FOLD
    assert replay.cluster.num_ranks == demo.FOLD * training.cluster.num_ranks
    assert folded > replay.workload.warmup
