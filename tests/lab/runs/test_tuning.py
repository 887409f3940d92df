"""``moesys tune`` from end to end: simulated and timed, killed and resumed, and what it leaves for other commands."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from pathlib import Path

import pytest
from lab_cases import moesys
from runner_cases import EP, FSEP, simulation, torchrun, training

from moesys import ClusterSpec, Ep, Experiment, Fsep, Generated, Replay, SearchBounds, Space, Strategy, tune
from moesys.lab.commands.tune import tune_sheets
from moesys.lab.ranks.process_start import RunInterruption
from moesys.lab.runs import environment
from moesys.lab.runs.declarations import load_experiment
from moesys.lab.runs.trials import run_simulated
from moesys.lab.runs.tuning import Silence, decision
from moesys.traces import generate, save_trace
from moesys.tuner.pick import Choice
from moesys.tuner.timing import TimedStrategy, TimingResult

SPACE = Space(
    {
        "sharding": ("ep", "fsep"),
        "sharding.fsep.slots_per_rank": (4, 5),
        "sharding.prefetch_layers": (0, 1),
        "balance": ("static", "greedy"),
        "split": ("flow",),
        "overlap": ("sequential", "pipelined"),
        "overlap.chunks": (2,),
    }
)


def written(tmp_path: Path, experiment: Experiment, space: Space | None = None) -> tuple[Path, Path | None]:
    file = tmp_path / "experiment.json"
    file.write_text(experiment.to_json())
    if space is None:
        return file, None
    (tmp_path / "space.toml").write_text(space.to_toml())
    return file, tmp_path / "space.toml"


def journal_of(folder: Path) -> list[dict]:
    (path,) = folder.glob("*-tuned/journal.jsonl")
    return [json.loads(line) for line in path.read_bytes().split(b"\n")[1:-1]]


@pytest.fixture(scope="module")
def searched(tmp_path_factory):
    """The result of a search of six points. It stays as it is."""
    return tune(simulation(), SPACE, SearchBounds(6), out=tmp_path_factory.mktemp("searched"))


def test_what_is_found_can_be_run_and_explained(tmp_path, capsys):
    file, space = written(tmp_path, simulation(strategies=(EP, FSEP)), SPACE)
    assert moesys("tune", file, "--space", space, "--budget", 6, "--out", tmp_path) == 0
    told = capsys.readouterr().out
    assert "SIMULATED: simulated, tuning" in told
    assert "MEASURED" not in told
    assert "Decided by simulated times" in told
    (folder,) = tmp_path.glob("simulated-*-tuned")
    text = (folder / "tuned.toml").read_text()
    tuned = Strategy.from_toml(text)
    # Above is a reason for every field that the space has other values for.
    reasons = [line for line in text.splitlines() if line.startswith("# ") and " would cost " in line]
    assert any(line.startswith("# sharding.kind = ") for line in reasons)
    experiment = load_experiment(folder / "experiment.toml")
    assert experiment.strategies[-1] == tuned
    assert moesys("run", file, "--out", tmp_path / "runs", "--strategy", folder / "tuned.toml") == 0
    assert moesys("run", folder / "experiment.toml", "--out", tmp_path / "runs") == 0
    assert moesys("explain", folder / "experiment.toml") == 0
    assert "tuned" in capsys.readouterr().out
    # Under another name it is there already.
    (tmp_path / "ep.toml").write_text(EP.replace(name="again").to_toml())
    assert moesys("run", file, "--out", tmp_path / "runs", "--strategy", tmp_path / "ep.toml") == 0
    (tmp_path / "ep.toml").write_text(FSEP.replace(name="ep", lag=3).to_toml())
    assert moesys("run", file, "--out", tmp_path / "runs", "--strategy", tmp_path / "ep.toml") == 2
    assert "strategies share the name 'ep'" in capsys.readouterr().err


def test_a_start_that_does_not_fit_is_the_baseline_and_never_the_pick(tmp_path):
    wide = EP.replace(name="wide", sharding=Fsep(slots_per_rank=8, reshard_after_forward=False))
    plain = training().model.expert_parameters
    workload = simulation().workload.replace(tokens_per_rank=1, num_layers=8)
    experiment = simulation(strategies=(wide, EP), workload=workload)
    # Room for a rank's 4 experts and their optimizer in 8 layers, and not for 8 more in each.
    result = tune(experiment, SPACE, SearchBounds(6, memory_gb=8 * 4 * plain * 20 / 1e9), out=tmp_path)
    assert result.tuned.search.baseline.strategy.name == "wide"
    assert all(one.strategy.name != "wide" for one in result.tuned.search.ranking)


def test_the_result_is_what_run_simulates_and_has_intervals_over_draws(searched):
    tuned, ranking, of = searched.tuned, searched.tuned.search.ranking, simulation()
    assert tuned.decided_by == "simulated"
    assert tuned.strategy.fingerprint() == ranking[0].strategy.fingerprint()
    trials = [run_simulated(tuned.strategy, of.model, of.cluster, of.workload, seed) for seed in (0, 1)]
    values = [value for trial in trials for value in trial.samples["step_ms"].values]
    assert ranking[0].ms == pytest.approx(sum(values) / len(values))
    for draws in tuned.draws:
        assert set(draws.own_ms) == set(draws.baseline_ms) == {0, 1}
        assert {len(draws.own_ms[seed]) for seed in draws.own_ms} == {len(ms) for ms in draws.baseline_ms.values()}
    drawn = tune_sheets(tuned, "x")[1]
    assert len(drawn.rows) == len(tuned.draws) > 0
    assert all("[" in row.paired for row in drawn.rows)
    assert "seeds" in drawn.notes[0]


def test_another_folder_gives_the_same_and_a_journal_that_breaks_off_goes_on_where_it_was(searched, tmp_path):
    """Processes that are struck are in tests/faults."""
    whole = tune(simulation(), SPACE, SearchBounds(6), out=tmp_path)
    assert whole.tuned == searched.tuned
    lines, journal = journal_of(tmp_path), whole.path / "journal.jsonl"
    for path in whole.path.iterdir():
        if path != journal:
            path.unlink()
    written = journal.read_bytes()
    journal.write_bytes(written[: len(written) // 3])
    assert 0 < len(journal_of(tmp_path)) < len(lines) - 1
    resumed = tune(simulation(), SPACE, SearchBounds(6), out=tmp_path)
    # No cost was found out twice, and the end is the same.
    assert journal_of(tmp_path) == lines
    assert resumed.tuned == whole.tuned


def test_a_training_is_timed_and_clocks_decide(tmp_path, capsys):
    experiment = training(workload=training().workload.replace(steps=3))
    file, space = written(tmp_path, experiment, SPACE)
    assert moesys("tune", file, "--space", space, "--budget", 4, "--out", tmp_path, "--timed", 6) == 0
    told = capsys.readouterr().out
    assert "MEASURED: trained, tuning" in told
    assert "SIMULATED: trained, tuning" in told
    assert re.search("(Dec|Undec)ided by measured times: ", told)
    entries = journal_of(tmp_path)
    timed = [entry for entry in entries if entry["stage"] == "measured"]
    assert 2 <= len(timed) <= 6
    assert timed[0]["name"] == "ep"
    # The second time there is nothing left to find out.
    assert moesys("tune", file, "--space", space, "--budget", 4, "--out", tmp_path, "--timed", 6) == 0
    assert journal_of(tmp_path) == entries
    (folder,) = tmp_path.glob("trained-*-tuned")
    (folder / "routing.npz").unlink()
    assert moesys("tune", file, "--space", space, "--budget", 4, "--out", tmp_path, "--timed", 6) == 2
    assert "routing.npz is gone, on which its journal stands" in capsys.readouterr().err


def test_a_journal_is_of_one_source_and_of_times_of_one_number_of_threads(tmp_path, monkeypatch):
    experiment = training(workload=training().workload.replace(steps=1))
    tune(experiment, SPACE, SearchBounds(2), out=tmp_path, timed=2)
    # Whatever torch has in this process.
    monkeypatch.setattr("torch.get_num_threads", lambda: 7)
    tune(experiment, SPACE, SearchBounds(2), out=tmp_path, timed=2)
    with pytest.raises(ValueError, match=r"is of another machine, under which .* begin anew with --fresh"):
        tune(experiment, SPACE, SearchBounds(2), out=tmp_path, timed=2, threads=2)
    monkeypatch.setattr(environment, "source_digest", lambda: "0123456789ab")
    with pytest.raises(ValueError, match=r"is of another moesys, under which .* begin anew with --fresh"):
        tune(experiment, SPACE, SearchBounds(2), out=tmp_path, timed=2)


UNDER_TORCHRUN = """
import os
from pathlib import Path
import torch.distributed as dist
from moesys.lab.runs import places
from moesys.lab.runs.declarations import load_experiment
from moesys.lab.runs.tuning import decision, tune
from moesys.tuner.space import SearchBounds, Space

measured = places.run_measured

def fails_on_rank_1(strategy, *arguments):
    if strategy.name == "fsep" and dist.get_rank() == 1:
        raise RuntimeError("only here")
    return measured(strategy, *arguments)

class Told:
    stages = 0
    def stage(self, words, num_points): self.stages += 1
    def point(self, entry): pass

told, places.run_measured = Told(), fails_on_rank_1
asked = load_experiment(Path("experiment.json")), Space.from_toml(Path("space.toml").read_text()), SearchBounds(2)
result = tune(*asked, out="runs", timed=5, told=told)
failed = [f"{strategy.name}: {reason}" for strategy, reason in result.tuned.timing.failed]
# Nothing is left to find out.
again = tune(*asked, out="runs", timed=5).tuned == result.tuned
toml = result.tuned.to_toml(decision(result.tuned))
Path(os.environ["RANK"]).write_text(f"{toml}|{failed}|{again}|{told.stages > 0}")
"""


@pytest.mark.timeout(120)
@pytest.mark.slow
def test_under_torchrun_all_ranks_end_with_what_one_writes_also_where_one_fails(tmp_path):
    written(tmp_path, training(), SPACE)
    torchrun(tmp_path, UNDER_TORCHRUN)
    (*first, speaks), (*second, listens) = ((tmp_path / rank).read_text().split("|") for rank in "01")
    assert first == second
    toml, failed, again = first
    assert (speaks, listens, again) == ("True", "False", "True")
    assert "fsep: 2 of 2 ranks failed: rank 1 raised RuntimeError: only here; rank 0 raised" in failed
    (folder,) = (tmp_path / "runs").glob("trained-*-tuned")
    assert (folder / "tuned.toml").read_text() == toml
    entries = journal_of(tmp_path / "runs")
    assert 2 <= [entry["stage"] for entry in entries].count("measured") <= 5
    assert [entry["name"] for entry in entries if entry["stage"] == "refused"] == ["fsep"]
    assert len({(entry["fingerprint"], entry["of"], entry["stage"]) for entry in entries}) == len(entries)


def test_a_journal_is_of_the_traces_of_all_seeds_that_are_looked_at(tmp_path):
    def record(seed: int, skew: float) -> None:
        drawn = Generated(steps=3, tokens_per_rank=32, skew=skew)
        save_trace(generate(drawn, num_ranks=2, num_experts=8, top_k=2, seed=seed), tmp_path / f"{seed}.npz")

    experiment = simulation(workload=Replay(trace=str(tmp_path / "{seed}.npz"), warmup=1))
    for seed in (0, 1):
        record(seed, skew=1.0)
    first = tune(experiment, SPACE, SearchBounds(3), out=tmp_path)
    record(1, skew=2.0)
    with pytest.raises(ValueError, match=r"is of another trace, under which .* begin anew with --fresh"):
        tune(experiment, SPACE, SearchBounds(3), out=tmp_path)
    assert tune(experiment, SPACE, SearchBounds(3), out=tmp_path, fresh=True).tuned != first.tuned


def test_a_space_of_one_point_is_that_point_and_has_no_alternatives(tmp_path):
    result = tune(simulation(strategies=(FSEP, EP)), Space(), out=tmp_path)
    text = (result.path / "tuned.toml").read_text()
    assert Strategy.from_toml(text).fingerprint() in {EP.fingerprint(), FSEP.fingerprint()}
    result = tune(simulation(strategies=(EP,)), Space(), out=tmp_path)
    text = (result.path / "tuned.toml").read_text()
    assert Strategy.from_toml(text).fingerprint() == EP.fingerprint()
    assert len(result.tuned.choices) == 14
    assert all(choice.next_best is None for choice in result.tuned.choices)
    assert "no other value" not in text


def test_muon_makes_fsep_dearer_by_the_messages_of_updates(tmp_path):
    """Products take no time here. A rank sends half of the updates of its half of the experts, in two layers."""
    cluster = ClusterSpec(ranks_per_node=2, intra_node_gb_per_s=1.0, expert_tflops=1e12)
    adam = simulation(strategies=(FSEP, EP), cluster=cluster)
    space = Space({"sharding": ("ep", "fsep"), "sharding.fsep.slots_per_rank": (4,)})
    found = []
    for name in ("adam", "muon"):
        experiment = adam.replace(workload=adam.workload.replace(optimizer=name))
        ranking = tune(experiment, space, out=tmp_path).tuned.search.ranking
        found.append({type(one.strategy.sharding): one.ms for one in ranking})
    assert found[1][Ep] == pytest.approx(found[0][Ep])
    assert found[1][Fsep] - found[0][Fsep] == pytest.approx(2 * (3 * 8 * 16 * 16 * 4) / 2 / 2 / 1e9 * 1e3)


def test_a_folder_of_another_workload_is_another_folder_and_fresh_keeps_the_old(tmp_path):
    tune(simulation(), SPACE, SearchBounds(3), out=tmp_path)
    tune(simulation(workload=simulation().workload.replace(skew=0.2)), SPACE, SearchBounds(3), out=tmp_path)
    folders = sorted(tmp_path.glob("simulated-*-tuned"))
    assert len(folders) == 2
    before = (folders[0] / "journal.jsonl").read_bytes()
    experiment = load_experiment(folders[0] / "experiment.toml")
    tune(simulation(workload=experiment.workload), SPACE, SearchBounds(3), out=tmp_path, fresh=True)
    assert (folders[0] / "before" / "journal.jsonl").read_bytes() == before


def test_a_strategy_that_is_called_tuned_keeps_its_name(tmp_path):
    named = FSEP.replace(name="tuned", sharding=Fsep(slots_per_rank=8))
    result = tune(simulation(strategies=(EP, named)), SPACE, SearchBounds(4), out=tmp_path)
    assert [strategy.name for strategy in result.experiment.strategies] == ["ep", "tuned", "tuned-2"]
    assert Strategy.from_toml((result.path / "tuned.toml").read_text()) == result.tuned.strategy


def test_ctrl_c_keeps_what_was_found_and_the_same_call_goes_on(searched, tmp_path):
    class Stopping(Silence):
        points = 0

        def point(self, entry):
            self.points += 1
            if self.points == 3:
                raise KeyboardInterrupt

    with pytest.raises(RunInterruption, match="what was found out is in the journal"):
        tune(simulation(), SPACE, SearchBounds(6), out=tmp_path, told=Stopping())
    whole = journal_of(searched.path.parent)
    assert journal_of(tmp_path) == whole[:3]
    assert tune(simulation(), SPACE, SearchBounds(6), out=tmp_path).tuned == searched.tuned
    # Nothing was found out twice.
    assert journal_of(tmp_path) == whole


@pytest.mark.parametrize(
    ("pick_ms", "mark", "words"),
    [
        ({0: 7.0}, "? ", "Undecided by measured times: 1.43 x as fast as ep, n = 1: too few for an interval; moesys"),
        ({0: 7.0, 1: 11.0}, "~ ", "Undecided by measured times: 1.14 [0.06, 20.13] x as fast as ep, n = 2: the 95 %"),
        ({0: 5.0, 1: 5.1}, "? ", "Decided by measured times: 1.98 [1.75, 2.25] x as fast as ep, n = 2, with a 95 %"),
    ],
)
def test_few_trials_do_not_decide(searched, pick_ms, mark, words):
    pick, baseline = searched.tuned.strategy.replace(name="pick"), searched.tuned.baseline
    timed = TimedStrategy(pick, pick_ms, 0.7), TimedStrategy(baseline, {0: 10.0, 1: 10.0}, 1.0)
    clocked = replace(searched.tuned, decided_by="measured", timing=TimingResult(timed, (), 4))
    assert decision(clocked).startswith(words)
    assert [row.paired[:2] for row in tune_sheets(clocked, "x")[-2].rows] == [mark, "ba"]
    of_baseline = "Decided by measured times: ep, the baseline, is the"
    assert decision(replace(clocked, strategy=baseline)).startswith(of_baseline)


def test_fields_without_another_value_share_a_line(searched):
    choices = (*searched.tuned.choices[:2], *(Choice(f"split.{name}", "1") for name in "abc"))
    fields = tune_sheets(replace(searched.tuned, choices=choices), "x")[-1]
    assert len(fields.rows) == sum(choice.next_best is not None for choice in choices)
    assert "split.a = 1, split.b = 1, split.c = 1" in fields.notes[0]


def test_memory_is_that_of_the_cluster_unless_it_is_said_and_of_the_whole_model(tmp_path):
    small = simulation().replace(cluster=simulation().cluster.replace(memory_gb=1e-2))
    assert not tune(small, SPACE, SearchBounds(3), out=tmp_path / "fits").tuned.search.refused
    for bounds, layers in ((SearchBounds(3, model_layers=9000), 9000), (SearchBounds(3, memory_gb=1e-6), 2)):
        with pytest.raises(ValueError, match=f"a rank holds .* GB at least, of {layers} layers, and has"):
            tune(small, SPACE, bounds, out=tmp_path / str(layers))
    roomy = SearchBounds(3, memory_gb=80.0, model_layers=9000)
    assert tune(small, SPACE, roomy, out=tmp_path / "said").tuned.search.ranking
