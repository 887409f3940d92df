"""The runner: every trial once, failures kept, and the same records from spawned ranks as from torchrun's."""

from __future__ import annotations

import errno
import re
import subprocess
import sys
from contextlib import closing
from pathlib import Path

import numpy as np
import pytest
from lab_cases import moesys
from runner_cases import EP, FSEP, PIPELINED, partly_failing, simulation, torchrun, training

import moesys as ms
from moesys import ClusterSpec, Replay, Static, plan_layout, run
from moesys.lab.commands import compare as compare_module
from moesys.lab.commands.compare import print_locations
from moesys.lab.commands.run import run_command
from moesys.lab.ranks.pool import LocalRanks
from moesys.lab.runs.environment import collect_environment, load_environments
from moesys.lab.runs.places import RankTrials
from moesys.lab.runs.records import RunFolder
from moesys.lab.runs.runner import QuietProgress, RunInterruption, trace_path
from moesys.lab.runs.trials import run_measured
from moesys.lab.show import run_page
from moesys.lab.show.sheets import CommandOutput
from moesys.traces import Trace, load_trace, save_trace


class Listener(QuietProgress):
    """Notes what it is told; stops the run, as Ctrl-C does, when ``stop_at`` trials are finished."""

    def __init__(self, stop_at: int | None = None) -> None:
        self.told, self.started, self.ended, self.stop_at = [], [], False, stop_at

    def begin(self, experiment, recorded, num_left):
        self.told.append(f"{len(recorded)} recorded, {num_left} left")

    def start(self, trial):
        self.started.append(trial.identity)

    def finish(self, record):
        self.told.append(f"{record.strategy} {record.seed} {record.status}")
        if len(self.started) == self.stop_at:
            raise KeyboardInterrupt

    def end(self):
        self.ended = True


def identities(folder):
    return [record.identity for record in RunFolder(folder).records()]


def test_trials_run_in_the_order_of_the_experiment_and_only_once_and_seeds_are_the_total(tmp_path):
    experiment = simulation()
    result = run(experiment, tmp_path)
    order = [trial.identity for trial in experiment.trials()]
    assert identities(result.path) == order == [record.identity for record in result.records]
    assert (result.summary, result.exit_code) == ("6 run: 6 of 6 trials are recorded", 0)
    again = run(experiment, tmp_path)
    assert (again.summary, again.num_run) == ("nothing to do: 6 of 6 trials are recorded", 0)
    assert again.records == result.records
    more = run(simulation(seeds=(0, 1, 2)), tmp_path)
    assert (more.num_run, more.path, len(more.records)) == (3, result.path, 9)
    assert identities(more.path)[:6] == order
    fresh = run(simulation(seeds=(0,)), tmp_path, fresh=True)
    assert (fresh.num_run, fresh.path == result.path) == (3, False)


def test_a_failed_trial_is_kept_and_run_again_where_that_is_asked_and_the_last_record_counts(tmp_path, monkeypatch):
    listener = Listener()
    result = run(partly_failing(), tmp_path, progress=listener)
    assert sorted(listener.told[1:]) == ["ep 0 ok", "ep 1 ok", "failing 0 failed", "failing 1 failed"]
    assert len(result.failed) == 2
    for record in result.failed:
        assert record.error.startswith("ValueError: ")
        assert "\n" not in record.error
        assert "Traceback" in record.trace
        assert record.trace.rstrip().endswith(record.error)
    told = "4 run: 4 of 4 trials are recorded, 2 of them failed (--retry-failed runs those again)"
    assert (result.exit_code, result.summary) == (1, told)
    again = run(partly_failing(), tmp_path)
    assert (again.num_run, again.exit_code) == (0, 1)

    def mended(load, cluster, config, *rest, **options):
        return plan_layout(load, cluster, Static(), *rest, **options)

    monkeypatch.setattr("moesys.balance.layout_schedule.plan_layout", mended)
    monkeypatch.setattr("moesys.balance.layout_schedule.planned", lambda problem, _: Static().plan(problem))
    retried = run(partly_failing(), tmp_path, retry_failed=True, progress=(listener := Listener()))
    assert listener.told[0] == "2 recorded, 2 left"
    assert (retried.num_run, retried.exit_code) == (2, 0)
    assert sorted(record.status for record in RunFolder(retried.path).records()) == ["failed"] * 2 + ["ok"] * 4


def test_ctrl_c_keeps_what_is_finished_and_says_how_to_go_on(tmp_path):
    experiment = simulation()
    listener = Listener(stop_at=2)
    with pytest.raises(RunInterruption) as stop:
        run(experiment, tmp_path, progress=listener)
    folder = next(tmp_path.iterdir())
    assert str(stop.value) == (f"stopped: 2 of 6 trials are recorded in {folder}; the same command goes on from there")
    assert listener.ended
    rest = Listener()
    assert run(experiment, tmp_path, progress=rest).num_run == 4
    assert listener.started + rest.started == [trial.identity for trial in experiment.trials()]


def test_a_missing_trace_is_refused_before_anything_is_written(tmp_path):
    experiment = simulation(workload=Replay(trace=str(tmp_path / "nowhere.npz")), seeds=(0,))
    with pytest.raises(ValueError, match=r"nowhere\.npz does not exist"):
        run(experiment, tmp_path / "runs")
    assert not (tmp_path / "runs").exists()


@pytest.mark.parametrize(
    ("field", "value"), [("data", "nowhere.txt"), ("data", ("~/nowhere",)), ("tokenizer", "no-tokenizer.json")]
)
def test_text_that_is_not_there_is_refused_before_a_trial_starts(tmp_path, monkeypatch, field, value):
    monkeypatch.setattr(RankTrials, "_local_ranks", lambda _: pytest.fail("ranks start"))
    workload = ms.models.ModelTraining(model="olmoe-small", context=64, steps=1, **{field: value})
    of = ms.Experiment(name="text", cluster=ClusterSpec(ranks_per_node=2), strategies=(EP,), workload=workload)
    words = rf"^{field}='.*(nowhere|no-token).*' does not exist; correct the path, or leave"
    with pytest.raises(ValueError, match=words):
        run(of, tmp_path)
    (folder,) = tmp_path.glob("text-*")
    assert RunFolder(folder).records() == []


def test_experts_without_memory_are_refused_before_a_trial_starts(tmp_path, monkeypatch):
    monkeypatch.setattr(RankTrials, "_local_ranks", lambda _: pytest.fail("ranks start"))
    large = ms.ModelShape(hidden_size=8192, intermediate_size=65536, num_experts=64, top_k=2)
    words = (
        r"experts of strategy 'ep' need at least [\d,]+\.\d GB, on 2 ranks and in 1 layer, and [\d,.]+ GB are free; "
        r"use a smaller model, or simulate this one \(moesys simulate\)"
    )
    with pytest.raises(ValueError, match=words):
        run(training(strategies=(EP,), model=large), tmp_path)
    # The cost model is not of this machine.
    assert run(simulation(seeds=(0,)), tmp_path).exit_code == 0


def test_a_trace_that_changed_is_refused(tmp_path):
    path, of = tmp_path / "trace.npz", {"cluster": ClusterSpec(), "strategies": (EP,), "seeds": (0,)}
    save_trace(Trace([[[[3, 1]]], [[[2, 2]]]], top_k=1), path)
    small = simulation().model.replace(num_experts=2, top_k=1)
    replay = simulation(model=small, workload=Replay(trace=str(path)), **of)
    assert [run(replay, tmp_path / "runs").num_run for _ in range(2)] == [1, 0]
    save_trace(Trace([[[[4, 0]]], [[[2, 2]]]], top_k=1), path)
    with pytest.raises(ValueError, match="the trace of seed 0 is another one than"):
        run(replay, tmp_path / "runs")
    assert run(replay, tmp_path / "runs", fresh=True).num_run == 1


def test_spawned_ranks_train_record_routing_and_live_through_a_failure(tmp_path):
    experiment = partly_failing(name="trained", workload=training().workload, seeds=(0,))
    result = run(experiment, tmp_path)
    by_name = {record.strategy: record for record in result.records}
    failed, ep = by_name["failing"], by_name["ep"]
    assert re.match("2 of 2 ranks failed: ranks (0, 1|1, 0) raised ValueError: min_replicas=3 needs", failed.error)
    assert "rank 1:\nTraceback" in failed.trace
    assert (ep.status, len(ep.losses)) == ("ok", 3)
    for trial in experiment.trials():
        assert trace_path(result.path, trial).exists() == (trial.strategy.name == "ep")
    routing = load_trace(trace_path(result.path, experiment.trial(EP, 0)))
    assert routing.tokens_SLRE.sum(axis=(0, 2)).tolist() == ep.tokens_LE
    assert (result.path / f"environment-{ep.environment}.json").exists()


UNDER_TORCHRUN = """
import os
from pathlib import Path
import torch.distributed as dist
from moesys import collectives
from moesys.lab.runs import places
from moesys.lab.runs.declarations import load_experiment
from moesys.lab.runs.runner import run
# On both ranks at once, and not on one when the other has failed.
import moesys.lab.train.loop

# How long the other one waits for the reason.
collectives._MOST_PATIENCE_S = 0.0
collectives.FAILURE_GRACE_S = 1.0
measured = places.run_measured

def fails_on_rank_1(*arguments):
    if dist.get_rank() == 1:
        raise RuntimeError("only here")
    return measured(*arguments)

experiment = load_experiment(Path("experiment.json"))
places.run_measured = fails_on_rank_1
first = run(experiment, "runs")
places.run_measured = measured
second = run(experiment, "runs", retry_failed=True)
Path("runs", os.environ["RANK"]).write_text(f"{first.failed[0].error}|{second.summary}")
"""


@pytest.mark.timeout(120)
def test_torchrun_gives_what_spawned_ranks_give_also_after_a_failure(tmp_path: Path, ranks: LocalRanks):
    experiment = training(strategies=(FSEP,))
    (tmp_path / "experiment.json").write_text(experiment.to_json())
    out = tmp_path / "runs"
    arguments = (FSEP, experiment.model, experiment.cluster, experiment.workload, 0)
    spawned = ranks.run(run_measured, *arguments, num_ranks=2)[0]
    assert spawned is not None
    torchrun(tmp_path, UNDER_TORCHRUN)
    for rank in "01":
        error, second = (out / rank).read_text().split("|")
        assert error.startswith("2 of 2 ranks failed: rank 1 raised RuntimeError: only here; rank 0 raised ")
        assert second == "1 run: 1 of 1 trials are recorded"
    (folder,) = out.glob("trained-*")
    _, record = RunFolder(folder).records()
    here = collect_environment(torch_threads=1)
    assert load_environments(folder)[record.environment].variables == here.variables
    assert record.losses == spawned.losses
    assert record.tokens_LE == spawned.tokens_LE


@pytest.mark.parametrize(
    ("experiment", "message"),
    [
        (
            training(),
            r"^torchrun started 3 ranks but the experiment's cluster has 2; start 2 in all .*, or leave",
        ),
        (simulation(), r"^this experiment runs in the cost model, which needs no ranks; leave torchrun out$"),
    ],
    ids=["other number", "no ranks needed"],
)
def test_ranks_of_torchrun_that_do_not_suit_are_refused(tmp_path, monkeypatch, experiment, message):
    monkeypatch.setenv("RANK", "1")
    monkeypatch.setenv("WORLD_SIZE", "3")
    with pytest.raises(ValueError, match=message):
        run(experiment, tmp_path / "runs")
    assert not (tmp_path / "runs").exists()


def test_what_strategies_need_is_compiled_before_the_first_trial(tmp_path, monkeypatch):
    events = []
    monkeypatch.setattr("moesys.balance.run_planner.warm_up", lambda balance, split, **_: events.append(split.kind))
    monkeypatch.setattr(RankTrials, "run", lambda self, trial, *_: events.append(trial.strategy.name))
    experiment = training()
    with closing(RankTrials(experiment, threads=1)) as place:
        for _ in place.run_all(experiment.trials(), experiment, lambda _: None, tmp_path):
            pass
    # The even split has no loops to compile.
    assert events == ["flow", *(trial.strategy.name for trial in experiment.trials())]


def test_numbers_of_each_trial_are_logged_and_an_error_of_the_logger_is_one_warning(tmp_path):
    logged = []

    def log(numbers, *, step):
        logged.append((step, numbers))
        raise ConnectionError("no route")

    with pytest.warns(UserWarning, match=r"^log raised ConnectionError in step 1: no route; ") as warned:
        result = run(simulation(), tmp_path, log=log)
    assert len(warned) == 1
    assert [step for step, _ in logged] == list(range(1, len(result.records) + 1))
    for (_, numbers), record in zip(logged, result.records, strict=True):
        assert numbers[f"{record.strategy}/step_ms"] == float(np.median(record.samples["step_ms"].values))
    assert run(simulation(), tmp_path, log=log).num_run == 0
    assert len(logged) == len(result.records)


def test_what_shows_a_run_may_fail_without_it(tmp_path, monkeypatch, capsys):
    def full(path, *_):
        raise OSError(errno.ENOSPC, "No space left on device", str(path))

    for module in (compare_module, run_page):
        monkeypatch.setattr(module, "write_whole", full)
    result = run(simulation(seeds=(0,)), tmp_path, jobs=1)
    compare_module.report(result, as_json=False)
    print_locations([result.path], sys.stdout)
    told = capsys.readouterr()
    assert "SIMULATED: simulated" in told.out
    assert len(re.findall("Warning: .*: .*No space left on device", told.err)) == 3


SCRIPT = """
import moesys as ms
model = ms.ModelShape(hidden_size=32, intermediate_size=64, num_experts=4, top_k=1)
workload = ms.Training(context=32, batch=4, warmup=1, steps=1)
experiment = ms.Experiment(
    name="script", model=model, cluster=ms.ClusterSpec(ranks_per_node=2), strategies=(ms.Strategy(name="ep"),),
    workload=workload, seeds=(0,),
)
"""
GUARD = 'if __name__ == "__main__":\n    '
RUN = "print(ms.run(experiment, out='runs').summary)\n"


@pytest.mark.parametrize(
    ("arguments", "script", "runs"),
    [
        pytest.param(["script.py"], SCRIPT + RUN, False, id="no guard"),
        pytest.param(["script.py"], SCRIPT + GUARD + RUN, True, id="guard", marks=pytest.mark.slow),
        pytest.param(["-"], SCRIPT + GUARD + RUN, False, id="standard input", marks=pytest.mark.slow),
        pytest.param(["-c", SCRIPT + RUN], "", True, id="command", marks=pytest.mark.slow),
    ],
)
def test_a_script_that_ranks_cannot_import_is_refused_before_a_trial(arguments, script, runs, tmp_path):
    (tmp_path / "script.py").write_text(script)
    ended = subprocess.run(
        [sys.executable, *arguments], cwd=tmp_path, input=script, capture_output=True, text=True, timeout=240
    )
    [folder] = (tmp_path / "runs").iterdir()
    assert [record.status for record in RunFolder(folder).records()] == ["ok"] * runs, ended.stderr
    assert (ended.returncode, "1 run: 1 of 1 trials are recorded" in ended.stdout) == (int(not runs), runs)
    refusal = 'ValueError: a process ended while it started; a script needs `if __name__ == "__main__":` around'
    assert (refusal in ended.stderr) == (not runs)


OTHERS = {
    "board": ("leaderboard.html", "a leaderboard, whose page is leaderboard.html"),
    "tuned": ("journal.jsonl", "a tuning, whose experiment.toml is for moesys run and explain"),
    "watched": ("rank-0000.jsonl", "a watched training, which moesys report reads"),
    "step": ("ep.trace.json", "simulated steps, which ui.perfetto.dev opens"),
    "model": ("model.json", "a simulated model, whose steps are in its model.json"),
    "machine": ("cluster.toml", "a calibration, whose cluster.toml is for moesys simulate --cluster"),
    "more": ("index.html", "a folder of several, which moesys report lists"),
    "begun": (".lock", "a run that was stopped before it began, or begins now"),
}


def test_compare_leaves_out_what_other_commands_write_beside_runs(tmp_path, capsys):
    run(simulation(), tmp_path, jobs=1)
    for name, (file, _) in OTHERS.items():
        (tmp_path / name).mkdir()
        (tmp_path / name / file).touch()
    (tmp_path / "index.html").touch()
    assert moesys("compare", *tmp_path.iterdir()) == 0
    told = capsys.readouterr()
    assert "SIMULATED: simulated" in told.out
    lines = [f"Left out: {tmp_path / name}, {words}" for name, (_, words) in OTHERS.items()]
    assert sorted(told.err.splitlines()) == sorted(lines)
    for name, (_, words) in OTHERS.items():
        assert moesys("compare", tmp_path / name) == 2
        assert f"{tmp_path / name} is not a run folder: it is {words}; give one" in capsys.readouterr().err
    (tmp_path / "photos").mkdir()
    assert moesys("compare", *tmp_path.iterdir()) == 2
    assert "photos is not a run folder: it has no experiment.json" in capsys.readouterr().err


class FirstRankError(Exception):
    """The first trial would run on its ranks now."""


def test_a_run_enters_few_files_until_the_first_rank(tmp_path, monkeypatch):
    """Declarations check themselves, so the files of ``config`` are not counted."""
    package, entered, at_ranks = f"{Path(ms.__file__).parent}/", [], 0

    def note(frame, event, _):
        file = frame.f_code.co_filename
        if event == "call" and file.startswith(package) and (not entered or entered[-1] != file):
            entered.append(file)

    def first_rank(*_, **__):
        nonlocal at_ranks
        sys.setprofile(None)
        at_ranks += 1
        raise FirstRankError

    path = tmp_path / "small.toml"
    path.write_text(training(strategies=(EP, PIPELINED)).to_toml())
    monkeypatch.setattr(LocalRanks, "call", first_rank)
    # The first run imports what the second one enters.
    for out in (tmp_path / "first", tmp_path / "second"):
        entered.clear()
        sys.setprofile(note)
        with pytest.raises(FirstRankError):
            run_command(path, out=out, output=CommandOutput(quiet=True))
    files = {file.removeprefix(package) for file in entered}
    config = {file for file in files if file.startswith("config/")}
    assert at_ranks == 2
    assert len(files - config) <= 15, sorted(files)
    assert len(config) <= 9
