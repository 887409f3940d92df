"""A person's own planner: named by import path, told apart by its source, checked, and never imported for a record."""

from __future__ import annotations

import importlib
import json
import pickle
import re
import secrets
import subprocess
import sys
import zipfile
from collections.abc import Iterator
from contextlib import suppress
from hashlib import sha256
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tomli_w
from foreign_planners import FirstHolder, Rotated
from hypothesis import given
from hypothesis import strategies as st
from lab_cases import moesys
from pydantic import BaseModel

import moesys as ms
from moesys.balance.run_planner import checked_layout, checked_split
from moesys.config.member import RECORDED
from moesys.lab.runs.declarations import balance_of, declared_in, import_module_of_user, load_experiment
from moesys.lab.runs.runner import trace_path
from moesys.lab.runs.slurm import Slurm

FSEP = ms.Strategy(name="fsep", sharding=ms.Fsep(slots_per_rank=3))
OWN = FSEP.replace(name="own", balance=Rotated(step=2, shifts=(1, 2)), split=FirstHolder())
CLUSTER = ms.ClusterSpec(num_nodes=2, ranks_per_node=2)
FILE = """
import numpy as np

import moesys as ms

UNUSED = 1
FIRST = 0


def rows(problem):
    S = max(problem.slots_R)
    return (FIRST + np.arange(len(problem.slots_R) * S).reshape(-1, S)) % problem.load.num_experts


class InTurn(ms.Balance):
    turn: int = 0

    def layout(self, problem):
        expert_RS = rows(problem) if not self.turn else rows(problem)[::-1]
        return ms.planning.ExpertLayout(expert_RS, problem.load.num_experts)


def experiment():
    fsep = ms.Strategy(name="fsep", sharding=ms.Fsep(slots_per_rank=3))
    return ms.Experiment(
        name="file",
        model=ms.ModelShape(hidden_size=16, intermediate_size=16, num_experts=5, top_k=2),
        cluster=ms.ClusterSpec(ranks_per_node=2),
        strategies=(fsep, fsep.replace(name="own", balance=InTurn(turn=1))),
        workload=ms.Generated(tokens_per_rank=64, warmup=0, steps=2),
        seeds=(0,),
    )
"""


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "in_turn.py"
    path.write_text(FILE)
    return path


# --- declarations -----------------------------------------------------------------------------------------------------


@given(st.builds(Rotated, step=st.integers(), shifts=st.lists(st.integers()).map(tuple), note=st.none() | st.text()))
def test_it_survives_json_toml_and_pickle(balance: Rotated) -> None:
    strategy = OWN.replace(balance=balance)
    copies = [ms.Strategy.from_json(strategy.to_json()), ms.Strategy.from_toml(strategy.to_toml())]
    copies += [strategy.replace(name="own"), pickle.loads(pickle.dumps(strategy))]
    copies += [ms.Strategy.model_validate_json(strategy.to_json(), context=RECORDED)]
    for copy in copies:
        assert (copy, copy.fingerprint(), hash(copy)) == (strategy, strategy.fingerprint(), hash(strategy))
        assert type(copy.balance) is Rotated
    assert strategy.balance.kind == "foreign_planners:Rotated"


def test_its_fields_count_in_the_fingerprint_and_unions_keep_their_own_members() -> None:
    others = [OWN.replace(balance=Rotated(step=2)), OWN.replace(balance=Rotated(note="name")), OWN, FSEP]
    assert len({strategy.fingerprint() for strategy in others}) == len(others)
    assert ms.Balance.model_validate({"kind": "foreign_planners:Rotated", "step": 3}) == Rotated(step=3)
    assert ms.Split.model_validate({"kind": "flow"}) == ms.FlowSplit()
    schema = ms.Strategy.model_json_schema()["properties"]
    for union in ("balance", "split"):
        pattern = schema[union]["anyOf"][1]["properties"]["kind"]["pattern"]
        assert re.fullmatch(pattern, getattr(OWN, union).kind)


def test_a_split_of_ones_own_is_planned_on_hosts() -> None:
    mega = OWN.replace(overlap=ms.MegaKernel(most_tokens=8))
    assert (mega.plans_on_device, mega.replace(split=ms.FlowSplit()).plans_on_device) == (False, True)


def test_classes_that_could_not_be_told_apart_are_refused() -> None:
    with pytest.raises(TypeError, match="class Mine extends Greedy, which moesys plans by itself; extend Balance, and"):

        class Mine(ms.Greedy):
            pass

    with pytest.raises(TypeError, match="class Named has a field kind or source_digest"):

        class Named(ms.Split):
            kind: str = "named"
            source_digest: str = ""

    taken = pytest.raises(TypeError, match=r"class Tabled has a field table, which ms\.Balance uses itself")
    with pytest.warns(UserWarning, match="shadows an attribute"), taken:

        class Tabled(ms.Balance):
            table: int = 3


def test_a_class_of_no_file_plans_and_cannot_be_recorded() -> None:
    class Here(Rotated):
        pass

    load = ms.planning.LoadMatrix(np.ones((4, 5), dtype=int))
    assert ms.plan_layout(load, CLUSTER, Here(), 2) == ms.plan_layout(load, CLUSTER, Rotated(), 2)
    for use in (OWN.replace(balance=Here()).fingerprint, lambda: pickle.dumps(Here())):
        with pytest.raises(ValueError, match="is defined inside a function, where neither records nor other processes"):
            use()


# --- what it is made of -----------------------------------------------------------------------------------------------


def fingerprint(path: Path, text: str) -> str:
    path.write_text(text)
    return load_experiment(path).strategies[1].fingerprint()


def test_a_planner_of_a_changed_file_is_another_one_and_what_it_extends_counts(file: Path) -> None:
    first = load_experiment(file).strategies[1]
    assert first.model_dump()["balance"]["source_digest"] == sha256(FILE.encode()).hexdigest()[:16]
    assert fingerprint(file, FILE) == first.fingerprint() != fingerprint(file, FILE.replace("[::-1]", "[::+1]"))
    own, base = FILE.replace("(ms.Balance)", "(Base)"), file.parent / "base_of_one.py"
    own, prints = own.replace("import numpy", "from base_of_one import Base\nimport numpy"), set()
    # Byte code is that of a file of the same second and length.
    for word in ("one", "three"):
        base.write_text(f"import moesys as ms\nclass Base(ms.Balance):\n    word: str = '{word}'\n")
        sys.modules.pop("base_of_one", None)
        prints.add(fingerprint(file, own.replace("turn: int = 0", "turn: int = 0\n    word: str = ''")))
    assert len(prints) == 2


def pickled(folder: Path, load: str) -> bytes:
    """Pickles a ``planners:Mine`` of the folder, in another process, where ``load`` imports it."""
    code = f"import pickle, sys\n{load}\nsys.stdout.buffer.write(pickle.dumps(Mine()))"
    return subprocess.run([sys.executable, "-c", code], cwd=folder, check=True, stdout=subprocess.PIPE).stdout


MINE = "import moesys as ms\n\n\nclass Mine(ms.Balance):\n    def layout(self, problem):\n        return problem.{}\n"


def test_a_class_whose_base_was_edited_is_not_made_under_the_old_identity(tmp_path: Path) -> None:
    base = f"base_{secrets.token_hex(4)}"
    (tmp_path / f"{base}.py").write_text(MINE.format("old"))
    (tmp_path / "planners.py").write_text(f"import {base}\n\n\nclass Mine({base}.Mine):\n    pass\n")
    sent = pickled(tmp_path, "from planners import Mine")
    (tmp_path / f"{base}.py").write_text(MINE.format("new"))
    with pytest.raises(ValueError, match=r"planners:Mine extends a class whose file has changed .* restore that file"):
        pickle.loads(sent)
    del sys.modules[base]
    (tmp_path / f"{base}.py").write_text(MINE.format("old"))
    assert pickle.loads(sent).kind == "planners:Mine"


def test_a_class_that_only_a_script_defines_is_refused_where_it_arrives(tmp_path: Path) -> None:
    script = "if __name__ == '__main__':\n    " + MINE.format("none").replace("\n", "\n    ")
    (tmp_path / "planners.py").write_text(script)
    sent = pickled(tmp_path, "import runpy\nMine = runpy.run_path('planners.py', run_name='__main__')['Mine']")
    with pytest.raises(ValueError, match=r"planners:Mine is defined under a condition, .* at the top level"):
        pickle.loads(sent)


def test_a_class_of_an_archive_plans_and_cannot_be_recorded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    name = f"zipped_{secrets.token_hex(4)}"
    with zipfile.ZipFile(tmp_path / "all.zip", "w") as archive:
        archive.writestr(f"{name}.py", MINE.format("load"))
    monkeypatch.syspath_prepend(tmp_path / "all.zip")
    mine = importlib.import_module(name).Mine()
    assert OWN.replace(balance=mine).balance == mine
    with pytest.raises(ValueError, match=r"Mine is defined in no file, .* at the top level of a \.py file"):
        pickle.dumps(mine)


@pytest.mark.ranks
def test_other_processes_make_the_very_class_whatever_its_file_says_by_now(file: Path) -> None:
    strategy = load_experiment(file).strategies[1]
    sent = file.with_suffix(".pickle")
    sent.write_bytes(pickle.dumps(strategy))
    file.write_text("an experiment that is being edited")
    code = f"""
import pickle, moesys as ms
strategy = pickle.loads(open({str(sent)!r}, "rb").read())
assert pickle.loads(pickle.dumps(strategy)) == strategy
load = ms.planning.LoadMatrix([[1] * 5] * 2)
print(strategy.fingerprint(), ms.plan_layout(load, ms.ClusterSpec(ranks_per_node=2), strategy.balance, 3).experts_of(0))
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == f"{strategy.fingerprint()} (3, 4, 0)\n"


# --- what it returns --------------------------------------------------------------------------------------------------


class Returns(ms.Balance):
    rows: tuple[tuple[int, ...], ...]

    def layout(self, problem: ms.planning.PlanningProblem) -> ms.planning.ExpertLayout:
        return ms.planning.ExpertLayout(self.rows, problem.load.num_experts)


slots = st.lists(st.integers(0, 3), min_size=1, max_size=3).filter(lambda slots_R: sum(slots_R) >= 3)


@given(slots, st.data())
def test_a_layout_is_taken_where_it_is_one_of_these_slots(slots_R: list[int], data: st.DataObject) -> None:
    row = st.lists(st.integers(-1, 2), min_size=max(slots_R), max_size=max(slots_R) + data.draw(st.integers(0, 1)))
    rows = data.draw(st.lists(row, min_size=len(slots_R), max_size=len(slots_R)))
    held = [[expert for expert in of_rank if expert >= 0] for of_rank in rows]
    is_one = all(len(of_rank) == max(slots_R) for of_rank in rows)
    is_one &= all(len(set(of_rank)) == len(of_rank) <= slots for of_rank, slots in zip(held, slots_R, strict=True))
    is_one &= {expert for of_rank in held for expert in of_rank} == {0, 1, 2}
    load, cluster = (
        ms.planning.LoadMatrix(np.ones((len(slots_R), 3), dtype=int)),
        ms.ClusterSpec(ranks_per_node=len(slots_R)),
    )
    problem = ms.planning.PlanningProblem.of_layout(load, cluster, slots_R)
    balance = Returns(rows=tuple(map(tuple, rows)))
    if is_one:
        assert checked_layout(problem, balance).expert_RS.tolist() == rows
    else:
        with pytest.raises(ValueError, match=r"^balance=test_own_planners:Returns: layout"):
            checked_layout(problem, balance)


class Sends(ms.Split):
    entries: tuple[tuple[int, int, int, int], ...]

    def split(self, problem: ms.planning.PlanningProblem) -> ms.planning.TokenPlan:
        return ms.planning.TokenPlan.by_construction(
            np.array(self.entries).reshape(-1, 4), problem.load, problem.layout_in_force
        )


@given(st.lists(st.tuples(st.integers(0, 1), st.integers(0, 1), st.integers(0, 1)), unique=True, max_size=6), st.data())
def test_a_split_is_taken_where_every_token_goes_to_a_holder(routes: list[tuple[int, int, int]], data) -> None:
    entries = tuple((*route, data.draw(st.integers(1, 2))) for route in sorted(routes))
    layout, load = ms.planning.ExpertLayout([[0, 1], [0, -1]], 2), ms.planning.LoadMatrix([[2, 1], [0, 2]])
    sent = [[sum(n for s, e, _, n in entries if (s, e) == (source, expert)) for expert in (0, 1)] for source in (0, 1)]
    is_one = sent == load.tokens_RE.tolist() and not any((expert, rank) == (1, 1) for _, expert, rank in routes)
    problem = ms.planning.PlanningProblem.of_split(load, layout, ms.ClusterSpec(ranks_per_node=2))
    if is_one:
        assert checked_split(problem, Sends(entries=entries)) == ms.planning.TokenPlan(entries, load, layout)
    else:
        with pytest.raises(ValueError, match=r"^split=test_own_planners:Sends: split"):
            checked_split(problem, Sends(entries=entries))


# --- where it runs ----------------------------------------------------------------------------------------------------


def test_it_is_trained_with_replayed_explained_simulated_and_shown(file, tmp_path, capsys):
    experiment = load_experiment(file)
    training = experiment.replace(workload=ms.Training(num_layers=1, context=16, batch=1, warmup=0, steps=2))
    file.write_text("an experiment that is being edited")
    trained = ms.run(training, tmp_path)
    assert trained.exit_code == 0
    routing = trace_path(trained.path, training.trials()[0])
    result = ms.run(experiment.replace(name="replay", workload=ms.Replay(trace=str(routing))), tmp_path)
    assert (result.exit_code, result.num_run) == (0, 2)
    file.write_text(FILE)
    for line in (("explain", file, "--strategy", "own"), ("simulate", file), ("compare", result.path)):
        assert moesys(*line) == 0
    shown = capsys.readouterr().out
    assert "SIMULATED: own of file" in shown
    assert len(re.findall(r"^ +own ", shown, re.MULTILINE)) == 2


def test_the_tuner_tries_those_that_a_space_lists(file: Path, tmp_path: Path) -> None:
    experiment = load_experiment(file)
    own = experiment.strategies[1].balance
    space = ms.Space({"sharding": (ms.Fsep(slots_per_rank=3),), "balance": ("in_turn:InTurn", own, "static")})
    assert ms.Space.from_toml(space.to_toml()) == space
    assert [member.turn for member in space.by_kind("balance")["in_turn:InTurn"]] == [0, 1]
    result = ms.tune(experiment, space, out=tmp_path)
    names = {entry.strategy.name for entry in result.tuned.search.ranking}
    assert names == {"fsep", "own", "fsep(slots_per_rank=3) + in_turn:InTurn + last + even + sequential"}
    assert declared_in(result.path / "tuned.toml", ms.Strategy).balance.kind in ("in_turn:InTurn", "static")


@pytest.fixture
def eager(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """Gives the name of a module that makes the file ``imported`` when it is imported. It lies in the current folder,
    where Python looks for modules too.
    """
    # Classes of earlier tests may still be there.
    name = f"eager_{secrets.token_hex(4)}"
    (tmp_path / f"{name}.py").write_text(f"import pathlib\npathlib.Path('imported').touch()\n{FILE}")
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    yield name
    sys.modules.pop(name, None)


def in_file(path: str, fields: dict[str, Any]) -> Path:
    Path(path).write_text(json.dumps(fields) if path.endswith(".json") else tomli_w.dumps(fields))
    return Path(path)


@pytest.mark.parametrize("suffix", [".toml", ".json"])
def test_reading_a_file_imports_nothing(eager: str, suffix: str, file: Path) -> None:
    planner = {"balance": {"kind": f"{eager}:InTurn", "turn": 1}}
    strategy = FSEP.model_dump(mode="json", exclude_none=True) | planner
    experiment = load_experiment(file).replace(strategies=(FSEP,)).model_dump(mode="json", exclude_none=True)
    path = f"declared{suffix}"
    declared: list[tuple[type[BaseModel], dict[str, Any]]] = [
        (ms.Experiment, experiment | {"strategies": [strategy]}),
        (ms.Space, {"balance": ["static", f"{eager}:InTurn"]}),
        (ms.Space, {"balance": [planner["balance"]]}),
        (Slurm, {"further": {"balance": f"{eager}:InTurn"}}),
        (Slurm, planner),
        (ms.Strategy, strategy | {"lags": 3}),
        (ms.Strategy, strategy),
    ]
    for kind, fields in declared:
        with suppress(ValueError):
            declared_in(in_file(path, fields), kind)
        assert not Path("imported").exists()
    way_out = f"names a module that is not imported, .*; import {eager} first, in a command by --import {eager}, or"
    with pytest.raises(ValueError, match=way_out):
        declared_in(Path(path), ms.Strategy)
    import_module_of_user(eager)
    assert Path("imported").exists()
    assert declared_in(Path(path), ms.Strategy).balance.turn == 1
    in_file(path, strategy | {"balance": {"kind": f"{eager}:InTurns"}})
    with pytest.raises(ValueError, match=r":InTurns' is no class of your own that extends ms\.Balance; name one, or"):
        declared_in(Path(path), ms.Strategy)


COMMANDS = (
    *("explain", "simulate --draws 1", "run --jobs 1"),
    "tune --jobs 1 --budget 1 --seeds 1 --timed 0 --space space.toml",
)


@pytest.mark.parametrize("command", COMMANDS)
def test_a_command_imports_what_its_line_names(eager, file, command, capsys):
    """By the name of a module or, in one command, of its file."""
    own = FSEP.model_dump(mode="json", exclude_none=True) | {"name": "own", "balance": {"kind": f"{eager}:InTurn"}}
    small = load_experiment(file).replace(strategies=(FSEP,)).model_dump(mode="json", exclude_none=True)
    line = [*command.split(), in_file("small.toml", small | {"strategies": [*small["strategies"], own]})]
    Path("space.toml").write_text(ms.Space({"sharding": ("ep",)}).to_toml())
    assert moesys(*line) == 2
    assert f"in a command by --import {eager}, or" in capsys.readouterr().err
    assert not Path("imported").exists()
    assert moesys(*line, "--import", eager + ".py" * (command == "explain")) == 0


def test_a_module_that_cannot_be_imported_is_named(eager: str, capsys: pytest.CaptureFixture[str]) -> None:
    Path("folder").mkdir()
    Path("folder", "broken.py").write_text("raise SystemExit(3)")
    Path("folder", "bare.py").write_text("import moesys as ms\n\nclass Bare(ms.Balance):\n    extra = 3\n")
    Path("folder", f"{eager}.py").write_text(FILE)
    for name, words in (
        ("folder/nowhere.py", "folder/nowhere.py is not a file; give the file or the module that defines the planners"),
        ("nowhere", "nowhere cannot be imported: ModuleNotFoundError: No module named 'nowhere'; modules are looked"),
        ("folder/broken.py", "SystemExit: 3"),
        ("folder/bare.py", "`extra = 3`. All model fields require a type annotation"),
        ("folder/bare.py", 'bare.py", line 3, in <module>\n    class Bare(ms.Balance):\n'),
        (f"folder/{eager}.py", f"/{eager}.py already; give one of the files another name"),
    ):
        assert moesys("explain", "none.toml", "--import", f"{eager}.py", "--import", name) == 2
        error = capsys.readouterr().err
        assert words in error
        assert ("PYTHONPATH" in error) == (name == "nowhere")


def test_the_command_line_names_it_by_import_path(file, monkeypatch, capsys):
    monkeypatch.chdir(file.parent)
    named = file.parent / "named_on_the_command_line.py"
    named.write_text(FILE)
    (file.parent / "load.csv").write_text("1,2,3,4\n4,3,2,1\n")
    name = "named_on_the_command_line:InTurn"
    planners = ("--balance", name, "--split", "foreign_planners:FirstHolder")
    assert moesys("plan", "--load", "load.csv", "--cluster", "1x2", "--slots", 3, *planners) == 0
    assert f"{name} + foreign_planners:FirstHolder" in capsys.readouterr().out
    (file.parent / "s.toml").write_text(FSEP.replace(balance=balance_of(name)).to_toml())
    assert declared_in(Path("s.toml"), ms.Strategy).balance == balance_of(name)


# --- records ----------------------------------------------------------------------------------------------------------


def test_a_run_goes_on_with_its_planner_and_not_with_a_changed_one(file: Path, tmp_path: Path) -> None:
    experiment = load_experiment(file)
    first, again = ms.run(experiment, tmp_path), load_experiment(file)
    assert (again, hash(again)) == (experiment, hash(experiment))
    assert ms.run(again, tmp_path).num_run == ms.run(experiment, tmp_path).num_run == 0
    assert ms.run(load_experiment(file, ["seeds=0,1"]), tmp_path).num_run == 2
    file.write_text(FILE.replace("[::-1]", "[1:] + rows(problem)[:1]"))
    words = r"strategies\[own\].balance.source_digest: [0-9a-f]{16} there, [0-9a-f]{16} here"
    with pytest.raises(ValueError, match=words):
        ms.run(load_experiment(file), tmp_path)
    # Who only reads needs no file: as many rows as trials that it finds again.
    file.unlink()
    code = f"import moesys as ms; print([(row.name, row.n) for row in ms.compare([{str(first.path)!r}])[0].rows])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert sorted(eval(done.stdout)) == [("fsep", 2), ("own", 2)]


def test_nothing_is_imported_for_a_record(file, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    experiment = load_experiment(file)
    folder = ms.run(experiment, tmp_path).path
    trace = tmp_path / "was here"
    (tmp_path / "hostile.py").write_text(f"import pathlib\npathlib.Path({str(trace)!r}).touch()\n{FILE}")
    recorded = folder / "experiment.json"
    recorded.write_text(recorded.read_text().replace('"in_turn:', '"hostile:'))
    assert moesys("compare", folder) == moesys("compare", folder, "--json") == 0
    assert '"hostile:InTurn"' in capsys.readouterr().out
    assert [row.strategy.balance.kind for row in ms.compare([folder])[0].rows] == ["static", "hostile:InTurn"]
    for changed in (experiment, experiment.replace(seeds=(0, 1))):
        with pytest.raises(ValueError, match=r"balance.kind: hostile:InTurn there, in_turn:InTurn here"):
            ms.run(changed, tmp_path)
    step = ms.planning.StepPlan.from_json(one_step(experiment).to_json().replace("in_turn:", "hostile:"))
    assert ms.simulate(step).length_us == ms.simulate(one_step(experiment)).length_us
    with pytest.raises(ValueError, match="hostile:InTurn is named by a record, and a record is run by nobody"):
        ms.plan_layout(step.layers[0].load, step.cluster, step.strategy.balance, 3)
    assert not trace.exists()
    # Whoever names it on the command line has it imported.
    balance_of("hostile:InTurn")
    assert trace.exists()


def one_step(experiment: ms.Experiment) -> ms.planning.StepPlan:
    strategy, load = experiment.strategies[1], ms.planning.LoadMatrix([[9, 1, 1, 3, 2]] * 2)
    plan = ms.planning.plan_layer(strategy, experiment.model, experiment.cluster, load)
    return ms.planning.StepPlan(strategy, experiment.model, experiment.cluster, (plan,))
