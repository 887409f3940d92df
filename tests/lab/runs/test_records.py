"""Records outlive the process that writes them, and a run folder never mixes two experiments."""

from __future__ import annotations

import json
import math
import os
import re
import shutil
import signal
import socket
from dataclasses import replace
from pathlib import Path

import pytest
from lab_cases import CLUSTER, EP, FSEP, FSEP_WIDE, MODEL, experiment, record, simulated

from moesys import Experiment, Fsep, Training
from moesys.lab.ranks.pool import LocalRanks
from moesys.lab.runs.records import Record, RunFolder, latest, record_journal, setting_fingerprint

LINES = record_journal(Path())


def some_records(of: Experiment) -> list[Record]:
    return [record(trial) for trial in of.trials()]


def filled(out: Path, count: int = 3) -> tuple[RunFolder, list[Record]]:
    """A closed run folder with some records."""
    written = some_records(experiment())[:count]
    with RunFolder.open(experiment(), out) as folder:
        for each in written:
            folder.append(each)
    return folder, written


def refusal(of: Experiment, out: Path) -> str:
    with pytest.raises(ValueError) as error:  # noqa: PT011  the caller looks at the whole message
        RunFolder.open(of, out)
    return str(error.value)


def test_a_folder_gives_back_what_was_appended_in_json_that_anyone_can_read(tmp_path):
    folder, written = filled(tmp_path)
    assert folder.path == tmp_path / f"tiny-{setting_fingerprint(experiment())}"
    assert RunFolder(folder.path).records() == written
    assert RunFolder(folder.path).experiment() == experiment()
    line, *_ = (folder.path / "records.jsonl").read_text().splitlines()
    values = written[0].samples["step_ms"].values
    assert json.loads(line)["schema"] == 1
    assert json.loads(line)["samples"]["step_ms"] == {"unit": "ms", "better": "lower", "values": values}
    fields = json.loads((folder.path / "experiment.json").read_text())
    assert (fields["strategies"][0]["split"], fields["workload"]["learning_rate"]) == ({"kind": "even"}, 1e-3)


def test_losses_that_are_no_numbers_survive_in_plain_json():
    odd = replace(some_records(experiment())[0], losses=[math.inf, -math.inf, math.nan, 0.1 + 0.2])
    line = LINES.to_line(odd)
    json.loads(line, parse_constant=lambda name: pytest.fail(f"{name} is not JSON"))
    back = LINES.from_line(line)
    assert repr(back.losses) == repr(odd.losses)
    assert replace(back, losses=[]) == replace(odd, losses=[])


@pytest.mark.parametrize("keep", [1, 20, -2, -1])
@pytest.mark.parametrize("count", [0, 3])
def test_a_torn_last_line_is_ignored_and_cut_off(tmp_path, count, keep):
    folder, written = filled(tmp_path, count)
    path, line = folder.path / "records.jsonl", LINES.to_line(some_records(experiment())[2])
    whole = path.read_bytes() if count else b""
    path.write_bytes(whole + line[:keep])
    assert RunFolder(folder.path).records() == written
    with RunFolder.open(experiment(), tmp_path) as folder:
        assert folder.records() == written
        folder.append(some_records(experiment())[2])
    assert path.read_bytes() == whole + line


OTHER = "and this moesys reads schema 1; use the moesys that wrote it, or another folder"


@pytest.mark.parametrize(
    ("line", "reason"),
    [
        (b'{"schema":1,"ident', "EOF while parsing a string at line 1 column 18"),
        (b"", "EOF while parsing a value at line 1 column 0"),
        (b"[1]", "it is not a JSON object"),
        (b'{"schema":2}', f"it has schema 2, {OTHER}"),
        (b'{"identity":"a"}', f"it has schema None, {OTHER}"),
    ],
)
def test_a_broken_line_in_the_middle_is_named(tmp_path, line, reason):
    folder, _ = filled(tmp_path)
    path = folder.path / "records.jsonl"
    first, _, *others = path.read_bytes().split(b"\n")
    path.write_bytes(b"\n".join([first, line, *others]))
    way_out = "delete the line to run its trial again, the other lines are complete"
    with pytest.raises(ValueError, match=re.escape(f"line 2 of {path} is not a record: {reason}; {way_out}")):
        folder.records()


def test_a_field_of_the_wrong_kind_is_named():
    line = LINES.to_line(some_records(experiment())[0])
    for there, wrong, message in (
        (b'"seed":', b'"seed":"x","sead":', r"seed=.x. .*valid integer[\s\S]*sead=0: "),
        (b'"better":"lower"', b'"better":"less"', r"samples.step_ms.better='\w+' should be 'lower', 'higher' or ''"),
    ):
        with pytest.raises(ValueError, match=message):
            LINES.from_line(line.replace(there, wrong))


def test_the_last_record_of_a_trial_holds():
    first = some_records(experiment())[0]
    failed = replace(first, status="failed", error="RuntimeError: rank 2 died")
    assert latest([failed, first]) == {first.identity: first}


def test_new_seeds_strategies_and_display_names_resume_in_the_same_folder(tmp_path):
    folder, written = filled(tmp_path)
    renamed = experiment(description="again", strategies=(EP, FSEP.replace(name="ours")))
    assert {trial.identity for trial in renamed.trials()} == {trial.identity for trial in experiment().trials()}
    for of in (experiment(seeds=(0, 1, 2), strategies=(EP, FSEP, FSEP_WIDE)), renamed, experiment()):
        with RunFolder.open(of, tmp_path) as resumed:
            assert (resumed.path, resumed.records()) == (folder.path, written)
        assert resumed.experiment() == of


def test_a_changed_experiment_is_refused_with_the_differing_fields(tmp_path):
    folder, _ = filled(tmp_path)
    changed = experiment(
        model=MODEL.replace(top_k=1),
        cluster=CLUSTER.replace(name="laptop", ranks_per_node=2),
        workload=Training(steps=4, warmup=1),
        strategies=(EP, FSEP.replace(sharding=Fsep(slots_per_rank=3))),
    )
    assert refusal(changed, tmp_path) == (
        f"{folder.path} holds another experiment of the name 'tiny':\n"
        "  model.top_k: 2 there, 1 here\n"
        "  cluster.ranks_per_node: 4 there, 2 here\n"
        "  workload.steps: 3 there, 4 here\n"
        "  strategies[fsep].sharding.slots_per_rank: 2 there, 3 here\n"
        "Give the experiment another name or out folder, or start a folder beside it with --fresh (fresh=True)"
    )
    assert "\n  workload.kind: training there, generated here\n" in refusal(simulated(), tmp_path)
    assert folder.experiment() == experiment()


def test_fresh_starts_a_folder_beside_and_each_experiment_finds_its_own(tmp_path):
    folder, _ = filled(tmp_path)
    wider = experiment(strategies=(EP, FSEP.replace(sharding=Fsep(slots_per_rank=3))))
    longer = experiment(workload=Training(steps=4, warmup=1))
    with RunFolder.open(wider, tmp_path, fresh=True) as beside, RunFolder.open(longer, tmp_path, fresh=True) as other:
        assert beside.path.name == f"{folder.path.name}-2"
        assert len({folder.path, beside.path, other.path}) == 3
    for of, path in ((experiment(), folder.path), (wider, beside.path), (longer, other.path)):
        with RunFolder.open(of, tmp_path) as found:
            assert found.path == path
    # folder and other are equally near
    assert re.search(
        r"\n  workload.steps: [34] there, 5 here\n", refusal(experiment(workload=Training(steps=5, warmup=1)), tmp_path)
    )


def test_names_that_begin_alike_do_not_meet(tmp_path):
    filled(tmp_path)
    with RunFolder.open(experiment(name="tiny-00000000", workload=Training(steps=9)), tmp_path) as folder:
        assert folder.path.name.startswith("tiny-00000000-")
    with RunFolder.open(experiment(), tmp_path) as folder:
        assert folder.experiment() == experiment()


def test_a_second_writer_is_told_who_is_first(tmp_path):
    with RunFolder.open(experiment(), tmp_path) as folder:
        assert refusal(experiment(), tmp_path) == (
            f"{folder.path} is being written by process {os.getpid()} on {socket.gethostname()}; "
            "wait until it ends, or use another name or out folder"
        )
        assert folder.records() == []
    RunFolder.open(experiment(), tmp_path).close()


def write_and_die(out: Path) -> None:
    RunFolder.open(experiment(), out).append(record(experiment().trials()[0]))
    os.kill(os.getpid(), signal.SIGKILL)


def test_a_writer_that_is_killed_lets_go(ranks: LocalRanks, tmp_path: Path) -> None:
    (died,) = ranks.outcomes(write_and_die, tmp_path, num_ranks=1)
    assert died.reason == "was killed by signal 9"
    with RunFolder.open(experiment(), tmp_path) as folder:
        assert folder.records() == [record(experiment().trials()[0])]


@pytest.mark.parametrize("value", [math.nan, math.inf, 0.0, -1.0])
def test_a_step_that_took_no_time_is_named_by_line_strategy_and_seed(tmp_path, value):
    folder, written = filled(tmp_path, 2)
    fields = json.loads(LINES.to_line(written[1]))
    fields["samples"]["step_ms"]["values"] = [1.0, value if math.isfinite(value) else str(value)]
    lines = (folder.path / "records.jsonl").read_text().splitlines()
    (folder.path / "records.jsonl").write_text(f"{lines[0]}\n{json.dumps(fields)}\n")
    named = rf"line 2 of .*records\.jsonl .*step_ms of {written[1].strategy}, seed {written[1].seed}"
    with pytest.raises(ValueError, match=named):
        RunFolder(folder.path).records()


@pytest.mark.parametrize("made_anew", [False, True])
def test_a_folder_that_was_removed_takes_no_more_records(tmp_path, made_anew):
    written = some_records(experiment())
    with RunFolder.open(experiment(), tmp_path) as folder:
        folder.append(written[0])
        shutil.rmtree(folder.path)
        if made_anew:
            filled(tmp_path, 1)
        with pytest.raises(ValueError, match=f"{folder.path} was removed or made anew while this process wrote it"):
            folder.append(written[1])
    if made_anew:
        assert RunFolder(folder.path).records() == written[:1]
