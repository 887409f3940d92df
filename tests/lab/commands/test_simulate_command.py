"""moesys simulate: its figures are the simulator's, files can be read, what cannot be is refused in words."""

from __future__ import annotations

import errno
import json
import os
import re
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
from lab_cases import experiment, moesys
from typer.testing import CliRunner

from moesys import Experiment, Generated, Greedy, MegaKernel, Replay, Training
from moesys.__main__ import app
from moesys.balance.replay import replay_steps, routing_of
from moesys.config import ClusterSpec, Fsep, ModelShape, Strategy, presets
from moesys.lab.commands import explain, simulate
from moesys.lab.runs.statistics import paired_ratio
from moesys.lab.runs.trials import run_simulated, simulated_workload
from moesys.lab.show.comparisons import ratio_words
from moesys.lab.show.figures import write_chrome_trace
from moesys.lab.show.sheets import figure
from moesys.simulator.rest_of_step import RestOfStep
from moesys.simulator.simulation import PathPart, by_place
from moesys.simulator.step_program import simulation
from moesys.timeline import Span, Timeline
from moesys.traces import Trace, save_trace

MODEL = ModelShape(hidden_size=16, intermediate_size=8, num_experts=4, top_k=2)
CLUSTER = ClusterSpec(num_nodes=2, ranks_per_node=2, inter_node_us=5)
EP = Strategy(name="ep")
FSEP = Strategy(name="fsep", sharding=Fsep(slots_per_rank=2, prefetch_layers=1), balance=Greedy())
WORKLOAD = Generated(warmup=1, steps=3, micro_batches=2, tokens_per_rank=64, other_ms=0.1, recompute="layers")


def declared(**changes) -> Experiment:
    fields = {"model": MODEL, "cluster": CLUSTER, "strategies": (EP, FSEP), "workload": WORKLOAD}
    return experiment(**fields | changes)


def written(folder: Path, of: Experiment) -> Path:
    (folder / "experiment.json").write_text(of.to_json())
    return folder / "experiment.json"


def run(*arguments: object) -> tuple[int, str]:
    result = CliRunner().invoke(app, ["simulate", *map(str, arguments)])
    return result.exit_code, result.output


def rows(output: str) -> dict[str, list[str]]:
    return {line.split()[0]: line.split() for line in output.splitlines() if line.startswith(("  ep", "  fsep"))}


@pytest.mark.parametrize("name", ["ep [/b]", "[red]ep", ":fire:"])
def test_names_are_no_markup(tmp_path, name):
    code, output = run(written(tmp_path, declared(strategies=(EP.replace(name=name),))), "--draws", 1)
    assert code == 0, output
    assert name in output
    (tmp_path / "own.toml").write_text(f'name = "{name}"\n')
    code, output = run("--model", "olmoe-1b-7b", "--cluster", "h100:1", "--strategy", tmp_path / "own.toml")
    assert code == 0, output
    assert name in output


def test_every_figure_is_that_of_the_simulator(tmp_path):
    code, output = run(written(tmp_path, declared()), "--draws", 1)
    assert code == 0
    assert "SIMULATED: tiny, one step of 2 layers on 4 ranks of 2 nodes" in output
    for strategy in (EP, FSEP):
        routing = routing_of(WORKLOAD, MODEL, CLUSTER, seed=0)
        micro_batches = list(replay_steps(strategy, MODEL, CLUSTER, routing.tokens_SLRE))[1:3]
        step = simulation(micro_batches, RestOfStep.of(WORKLOAD))
        trial = run_simulated(strategy, MODEL, CLUSTER, WORKLOAD, seed=0)
        # The critical path, of several words, stands before the other figures.
        step_ms, *_ = rows(output)[strategy.name][1:]
        imbalance, experts_ms, other_ms, exposed_ms, *waits_ms = rows(output)[strategy.name][-7:]
        assert step_ms == figure(trial.samples["step_ms"].values[0]) == figure(1e3 * step.length_seconds)
        assert exposed_ms == figure(trial.samples["exposed_ms"].values[0])
        assert imbalance == f"{trial.samples['load_max_over_mean'].values[0]:.2f}"
        assert sum(map(float, waits_ms)) == pytest.approx(float(exposed_ms), abs=3e-3)
        computed_ms = 1e3 * sum(seconds_R.mean() for seconds_R in step.computed_R.values())
        assert float(experts_ms) + float(other_ms) == pytest.approx(computed_ms, abs=3e-3)
        where, _, share = by_place(step.critical_path)[0]
        assert f"{where} {100 * share:.0f} %" in " ".join(output.split())


def cells(output: str, name: str) -> list[str]:
    """Of a strategy's row, with what belongs to a cell together."""
    line = next(line for line in output.splitlines() if line.startswith(f"  {name} "))
    return re.split(r"\s{2,}", line.strip())


def test_several_draws_are_other_seeds_and_their_spread_is_shown(tmp_path):
    code, output = run(written(tmp_path, declared(seeds=(3, 5))), "--draws", 4)
    assert code == 0
    # The experiment's seeds first, then those that it has not.
    step_ms = {
        strategy.name: [
            run_simulated(strategy, MODEL, CLUSTER, WORKLOAD, seed).samples["step_ms"].values[0]
            for seed in (3, 5, 0, 1)
        ]
        for strategy in (EP, FSEP)
    }
    for name, of in step_ms.items():
        low, middle, high = (figure(float(value)) for value in np.percentile(of, (10, 50, 90)))
        assert cells(output, name)[1] == f"{middle} [{low}, {high}]"
    ratio = paired_ratio(*({number: [ms] for number, ms in enumerate(of)} for of in step_ms.values()))
    assert cells(output, "fsep")[2] == ratio_words(ratio)
    assert "Draws: routing of other seeds." in output


def test_draws_of_a_single_trace_are_its_steps(tmp_path):
    routing = routing_of(WORKLOAD, MODEL, CLUSTER, seed=0)
    save_trace(routing, tmp_path / "trace.npz")
    replayed = Replay(trace=str(tmp_path / "trace.npz"), warmup=1, micro_batches=2, other_ms=0.1, recompute="layers")
    code, output = run(written(tmp_path, declared(workload=replayed, seeds=(0,))))
    assert code == 0
    step_ms = run_simulated(FSEP, MODEL, CLUSTER, replayed, seed=0).samples["step_ms"].values
    assert len(step_ms) == 3
    assert cells(output, "fsep")[1].startswith(f"{figure(float(np.median(step_ms)))} [")
    assert "Draws: steps of the trace, which" in " ".join(output.split())


def test_what_would_not_run_is_marked_and_says_why(tmp_path):
    fused = EP.replace(name="fused", overlap=MegaKernel())
    file = written(tmp_path, declared(strategies=(fused, EP, FSEP), cluster=CLUSTER.replace(memory_gb=1e-4)))
    code, output = run(file, "--draws", 1, "--model-layers", 5000)
    assert code == 0
    words = " ".join(output.split())
    assert "ep would not run: a rank holds" in words
    assert "of 5000 layers, and has 0.0001." in words
    code, output = run(file, "--draws", 1)
    assert code == 0
    # Ratios are to the first that would run.
    assert "would not run" in next(line for line in output.splitlines() if line.startswith("  fused"))
    assert cells(output, "ep")[2] == "1.00"
    assert "fused would not run: overlap=MegaKernel() reaches the ranks of one domain" in " ".join(output.split())


@pytest.mark.parametrize(
    ("trains", "speeds", "words"),
    [
        (None, {}, "(no speed is declared, so A100-80GB is assumed)"),
        (None, {"expert_tflops": 1.0}, ""),
        (None, {"name": "mine"}, "(mine)"),
        ({}, {}, "(CPU ranks, roughly)"),
        ({}, {"expert_tflops": 1.0}, ""),
        ({"device": "cuda"}, {}, "(no speed is declared, so A100-80GB is"),
    ],
)
def test_the_hardware_that_is_assumed_is_named(tmp_path, trains, speeds, words):
    workload = WORKLOAD if trains is None else Training(warmup=0, steps=1, context=8, batch=1, **trains)
    of = declared(workload=workload, cluster=ClusterSpec(ranks_per_node=2, **speeds))
    code, output = run(written(tmp_path, of), "--draws", 1)
    assert code == 0
    assert f"on 2 ranks of 1 node {words}".rstrip() in output.splitlines()[0]
    assert ("(" in output.splitlines()[0]) == bool(words)
    on_cpus = presets.cpu(2) if "CPU" in words else of.cluster
    expected = run_simulated(EP, MODEL, on_cpus, simulated_workload(workload), 0).samples["step_ms"].values[0]
    assert float(rows(output)["ep"][1]) == pytest.approx(expected, rel=5e-2)
    explained = CliRunner().invoke(app, ["explain", str(tmp_path / "experiment.json")]).output
    assert f"2 ranks of 1 node {words}".rstrip() in explained


def test_strategies_and_clusters_are_chosen(tmp_path):
    file, chosen = written(tmp_path, declared()), ("--strategy", "fsep", "--draws", 1, "--cluster")
    code, output = run(file, *chosen, "3x2")
    assert (code, list(rows(output))) == (0, ["fsep"])
    assert "one step of 2 layers on 6 ranks of 3 nodes" in output
    # The speeds are the experiment's, so that a file that says the same gives the same.
    (tmp_path / "six.json").write_text(CLUSTER.replace(num_nodes=3).to_json())
    assert run(file, *chosen, tmp_path / "six.json") == (code, output)


def test_traces_are_written_and_files_of_strategies_whose_names_look_alike_are_numbered(tmp_path):
    alike = tuple(FSEP.replace(name=name, lag=lag) for lag, name in enumerate(("a/b", "a_b-2", "a_b"), start=1))
    code, output = run(written(tmp_path, declared(strategies=alike)), "--draws", 1, "--out", tmp_path / "found")
    assert code == 0
    names = {path.name for path in (tmp_path / "found").iterdir()}
    assert names == {f"{stem}.trace.json" for stem in ("a_b", "a_b-2", "a_b-3")}
    assert "\nWritten to " in output
    assert all(name in output.replace("\n", "") for name in names)
    trace = json.loads((tmp_path / "found" / "a_b.trace.json").read_text())
    assert trace["otherData"] == {"source": "SIMULATED"}
    parts = [event for event in trace["traceEvents"] if event["pid"] == -1 and event["ph"] == "X"]
    assert sum(event["args"]["share"] for event in parts) == pytest.approx(1, abs=1e-4)
    assert {event["pid"] for event in trace["traceEvents"]} == {-1, 0, 1, 2, 3}


def test_events_of_a_lane_do_not_overlap_in_nanoseconds(tmp_path):
    ends_us = np.cumsum(np.random.default_rng(0).random(1000))
    spans = [Span(0, "compute", start, end, "experts") for start, end in pairwise([0.0, *ends_us.tolist()])]
    path = [PathPart(0, "compute", "experts", "", 1e-6 * span.duration_us, 1e-3) for span in spans]
    trace = write_chrome_trace(Timeline(spans, "simulated"), tmp_path / "trace.json", path)
    events = json.loads(trace.read_text())["traceEvents"]
    for process in (-1, 0):
        of_lane = [event for event in events if event["pid"] == process and event["ph"] == "X"]
        assert len(of_lane) == 1000
        for before, after in pairwise(of_lane):
            assert 1000 * after["ts"] - 1000 * (before["ts"] + before["dur"]) == pytest.approx(0, abs=1e-6)


def test_a_reader_who_has_enough_is_no_error_and_a_full_disk_is_one(tmp_path, monkeypatch, capsys):
    file = written(tmp_path, declared())

    def fails(*_: object, **__: object) -> None:
        raise OSError(number, os.strerror(number))

    for command, prints in ((simulate, "publish"), (explain, "print_full")):
        name = command.__name__.rpartition(".")[2]
        monkeypatch.setattr(command, prints, fails)
        number = errno.ENOSPC
        assert moesys(name, file) == 2
        assert "Error: [Errno 28] No space left on device" in capsys.readouterr().err
        number = errno.EPIPE
        assert moesys(name, file) == 1
        assert not capsys.readouterr().err
    assert moesys("simulate", file, "--strategy", "ep", "--draws", 1, "--out", tmp_path / "found") == 1
    assert (tmp_path / "found" / "ep.trace.json").is_file()


def test_of_many_ranks_some_are_drawn_and_those_on_the_path_first(tmp_path):
    """Rank 70 of 80 has all tokens, for two experts."""
    load = np.zeros((1, 1, 80, 4), dtype=int)
    load[0, 0, 70, 2:] = 1000
    save_trace(Trace(load, top_k=2), tmp_path / "trace.npz")
    ranks = ClusterSpec(num_nodes=10, ranks_per_node=8)
    replay = Replay(trace=str(tmp_path / "trace.npz"))
    one = declared(cluster=ranks, workload=replay, strategies=(EP,), seeds=(0,))
    assert run(written(tmp_path, one), "--out", tmp_path / "found")[0] == 0
    events = json.loads((tmp_path / "found" / "ep.trace.json").read_text())["traceEvents"]
    drawn = {event["pid"] for event in events} - {-1}
    assert len(drawn) == 64
    assert {2, 3} <= drawn, "ranks 2 and 3, which have these experts, alone compute"
