"""Errors have their texts, and the ways out that they offer lead out: each is followed, and what it names exists."""

# Names that only ways_out.txt uses are imported too.
# ruff: noqa: F401

from __future__ import annotations

import ast
import base64
import inspect
import io
import json
import re
import shutil
import tomllib
from collections.abc import Callable, Iterator
from functools import cache
from operator import attrgetter
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import typer
from foreign_planners import Rotated
from lab_cases import PRETRAIN, moesys
from small_models import SMALL
from torch import nn
from typer.testing import CliRunner

import moesys as ms
from benchmarks.__main__ import app as benchmarks
from benchmarks.harness.paced_link import PacedLink
from benchmarks.leaderboard.planners import named_planner
from benchmarks.leaderboard.workloads import recorded_in, settings
from benchmarks.planner_scale import load_peer
from benchmarks.seconds_certificate import certify_seconds
from benchmarks.shaped import cases as shaped
from moesys import verify
from moesys.__main__ import COMMANDS
from moesys.balance.flow.max_load import min_max_load
from moesys.balance.replay import routing_of
from moesys.config.member import RECORDED
from moesys.config.model_spec import read_config
from moesys.journal import Journal
from moesys.kernels.experts.experts import moe_experts
from moesys.kernels.experts.tile_config import TileConfig, TileConfigs
from moesys.kernels.routing import route
from moesys.kernels.split import flow
from moesys.lab.commands.host_config import read_host
from moesys.lab.commands.options import file_to_write, folder_to_write
from moesys.lab.commands.plan_load import read_layout, read_load
from moesys.lab.commands.whole_model import named_strategy, parallelism_of
from moesys.lab.runs.declarations import (
    balance_of,
    changed,
    cluster_of,
    declared_in,
    import_module_of_user,
    load_experiment,
    load_experiments,
    predictor_of,
    split_of,
    strategy_in,
)
from moesys.lab.runs.environment import load_environments
from moesys.lab.runs.places import num_workers, place_for
from moesys.lab.runs.records import RunFolder
from moesys.lab.runs.runner import RunResult
from moesys.lab.runs.slurm import slurm_of
from moesys.lab.runs.statistics import paired_ratio
from moesys.lab.runs.tuning import JOURNAL, tune
from moesys.lab.runs.watched_run import read_watched_run
from moesys.lab.show.figures import TimelinePanel, draw_timelines
from moesys.lab.train.text import Text, load_files
from moesys.moe.masters import Part
from moesys.overlap.device_routes import device_split, split_tables
from moesys.simulator.mega_pass import TileSizes
from moesys.simulator.model.model_cost import model_flops_per_token
from moesys.simulator.model.simulate_model import split_evenly
from moesys.step_lines import StepLine
from moesys.timeline import Timeline
from moesys.tuner.costs import Entry, TuneJournal
from moesys.tuner.timing import Clock

ROOT = Path(__file__).parents[1]
TWO_STEPS = ms.Generated(tokens_per_rank=16, num_layers=1, warmup=1, steps=2)

# --- what errors are provoked with ------------------------------------------------------------------------------------


def shape(**changes: Any) -> ms.ModelShape:
    return ms.ModelShape(**{"hidden_size": 16, "intermediate_size": 16, "num_experts": 8, "top_k": 2} | changes)


def cluster(*sizes: int, **fields: Any) -> ms.ClusterSpec:
    return ms.ClusterSpec(num_nodes=len(sizes), ranks_per_node=sizes, **fields)


def strategy(**fields: Any) -> ms.Strategy:
    return ms.Strategy(**{"name": "one"} | fields)


def fsep(slots: Any = 4, **fields: Any) -> ms.Strategy:
    return strategy(sharding=ms.Fsep(slots_per_rank=slots), **fields)


def experiment(**changes: Any) -> ms.Experiment:
    fields: dict[str, Any] = {
        "name": "small",
        "model": shape(),
        "cluster": cluster(2),
        "strategies": (strategy(name="ep"),),
        "workload": ms.Generated(tokens_per_rank=16, num_layers=1, warmup=1, steps=1),
        "seeds": (0,),
    }
    return ms.Experiment(**fields | changes)


def trained(**changes: Any) -> ms.Experiment:
    return experiment(**{"workload": ms.Training(num_layers=1, context=16, batch=1, warmup=0, steps=1)} | changes)


def layer(num_heads: int = 4, num_kv_heads: int = 4, mlp: Any = None) -> ms.models.LayerSpec:
    attention = ms.models.Gqa(num_heads=num_heads, num_kv_heads=num_kv_heads, head_dim=4)
    return ms.models.LayerSpec(attention=attention, mlp=mlp or ms.models.MoeMlp(shape=shape()))


def model_run(num_layers: int = 4, of: ms.models.LayerSpec | None = None, **changes: Any) -> ms.models.ModelRun:
    layers = (of or layer(),) * num_layers
    model = ms.models.ModelSpec(name="m", hidden_size=16, vocab_size=32, dtype="float32", layers=layers)
    fields: dict[str, Any] = {"model": model, "cluster": cluster(4), "seq_len": 16}
    parallel = {name: changes.pop(name) for name in list(changes) if name in ms.models.Parallelism.model_fields}
    return ms.models.ModelRun(**fields | {"parallelism": ms.models.Parallelism(**parallel)} | changes)


def load(num_ranks: int = 4, num_experts: int = 8, tokens: int = 3) -> ms.planning.LoadMatrix:
    return ms.planning.LoadMatrix(np.full((num_ranks, num_experts), tokens))


def layout(num_ranks: int = 4, num_slots: int = 3, num_experts: int = 8) -> ms.planning.ExpertLayout:
    return ms.planning.ExpertLayout(np.arange(num_ranks * num_slots).reshape(num_ranks, -1) % num_experts, num_experts)


def plan(num_ranks: int = 4, **sizes: int) -> ms.planning.TokenPlan:
    return ms.planning.split_tokens(load(num_ranks), layout(num_ranks, **sizes), cluster(num_ranks), ms.EvenSplit())


def of_experts(x: Any = None, weight: Any = None, activation: str = "swiglu") -> torch.Tensor:
    """Of two experts, five tokens, hidden size 3 and width 4."""
    x, weight = torch.zeros(5, 3) if x is None else x, torch.ones(5, 1) if weight is None else weight
    return moe_experts(x, torch.zeros(5, 1).int(), weight, torch.zeros(2, 8, 3), torch.zeros(2, 3, 4), activation)


def laid(balance: ms.Balance, of: ms.ClusterSpec, slots: Any, **options: Any) -> ms.planning.ExpertLayout:
    return ms.plan_layout(load(of.num_ranks), of, balance, slots, **options)


def trace(*sizes: int, top_k: int = 2) -> ms.traces.Trace:
    """Of [S, L, R, E]."""
    return ms.traces.Trace(np.full(sizes, 2), top_k)


def megatron(*records: dict[str, Any], rank: int = 0, num_experts: int = 8) -> ms.traces.Trace:
    usual = {"step": 0, "block": "decoder", "layer": 0, "top_indices": [[0, 1]]}
    written(f"megatron/router_trace_rank{rank}.jsonl", *(json.dumps(usual | record) for record in records or [{}]))
    return ms.traces.megatron_trace("megatron", num_experts)


def vllm(routed: Any, *others: Any, num_experts: int = 8, num_ranks: int = 1, each: int = 1) -> ms.traces.Trace:
    lines = [json.dumps({"choices": [{} if one is None else {"routed_experts": one}]}) for one in (routed, *others)]
    return ms.traces.vllm_trace(written("vllm.jsonl", *lines), num_experts, num_ranks, each)


def written(path: str | Path, *lines: str) -> str:
    Path(path).parent.mkdir(parents=True, exist_ok=True)
    Path(path).write_text("\n".join(lines) + "\n")
    return str(path)


def saved(of: ms.traces.Trace, path: str = "routing.npz") -> str:
    ms.traces.save_trace(of, path)
    return path


def replay(of: ms.traces.Trace, num_ranks: int = 4, **fields: Any) -> ms.traces.Trace:
    return routing_of(ms.Replay(trace=saved(of), **fields), shape(), cluster(num_ranks), 0)


def python(text: str) -> tuple[ms.Experiment, ...]:
    """Experiments of a file in which ``small`` is one."""
    head = "import moesys as ms\nfrom moesys import Experiment\n"
    body = f"small = ms.Experiment.from_json({experiment().to_json()!r})\n"
    return load_experiments(Path(written("written.py", head + body + text)))


def hub(**changes: Any) -> ms.models.ModelSpec:
    return ms.models.ModelSpec.from_config(read_config("mixtral-8x7b") | changes)


def tuned(of: ms.Experiment | None = None, space: ms.Space | None = None, **options: Any) -> Any:
    bounds = {name: options.pop(name) for name in list(options) if name in vars(ms.SearchBounds())}
    small = {"budget": 2, "seeds": 1, "jobs": 1}
    space = space or ms.Space({"sharding": ("ep",)})
    return tune(of or experiment(), space, ms.SearchBounds(**small | bounds), **options)


def moe(**options: Any) -> ms.MoELayer:
    return ms.MoELayer(shape(dtype="float32"), strategy(), **options)


# The router of five tokens gives these to experts; the next two lines have the experts of a host.
X, IDS, WEIGHTS = torch.ones(5, 16), torch.tensor([[0, 1]] * 5), torch.ones(5, 2)
UP, DOWN = torch.zeros(8, 12, 16), torch.zeros(8, 16, 12)
FUSED: dict[str, Any] = {"gate_up": torch.zeros(8, 24, 16), "down": DOWN}
APART: dict[str, Any] = {"gate": UP, "up": UP, "down": DOWN}
MEGA = ms.MegaKernel()


def experts(parts: dict[str, Any] | None = None, of: ms.Strategy | None = None, **options: Any) -> ms.Experts:
    """Experts of their own, or those that a host holds as ``parts``."""
    outside = None if parts is None else ms.OutsideExperts(lambda: parts, **options)
    return ms.Experts(shape(intermediate_size=12, dtype="float32"), of or strategy(), outside=outside)


def muon(of: Any = None, **options: Any) -> ms.Muon:
    return ms.Muon(of or nn.Linear(4, 4), **options)


def linear() -> nn.Module:
    """A model whose only parameter has a gradient."""
    module = nn.Linear(2, 1, bias=False)
    module(torch.ones(2)).sum().backward()
    return module


def run_twice(first: ms.Experiment, second: ms.Experiment, out: str = "runs", **options: Any) -> RunResult:
    ms.run(first, "runs", jobs=1)
    return ms.run(second, out, jobs=1, **options)


def replayed_again(**options: Any) -> RunResult:
    """A run folder that goes on with another trace."""
    of = experiment(workload=ms.Replay(trace="routing.npz"))
    saved(trace(2, 1, 2, 8))
    ms.run(of, "replayed", jobs=1)
    saved(ms.traces.Trace(np.full((2, 1, 2, 8), 4), 2))
    return ms.run(of, "replayed", jobs=1, **options)


class Idle(ms.Balance):
    """A planner without a method."""


class Written(ms.Balance):
    """A planner of a user's own."""

    def layout(self, problem: ms.planning.PlanningProblem) -> ms.planning.ExpertLayout:
        return ms.plan_layout(problem.load, problem.cluster, ms.Static(), problem.slots_R)


def local_planner() -> ms.Balance:
    class Local(Written):
        pass

    return Local()


def recorded(module: str) -> ms.Strategy:
    """A strategy as a record has it, whose balance is a class of that module."""
    balance = {"balance": {"kind": f"{module}:Written"}, "sharding": {"kind": "fsep", "slots_per_rank": 4}}
    return ms.Strategy.model_validate({"name": "own", **balance}, context=RECORDED)


def imported_again(module: str) -> ms.Strategy:
    """The same, read before its module is imported."""
    found = recorded(module)
    text = inspect.getsource(Written)
    import_module_of_user(written(f"{module}.py", "import moesys as ms", text))
    return found


def observed(predictor: Any, *loads: ms.planning.LoadMatrix) -> ms.planning.LoadHistory:
    history = ms.planning.LoadHistory(predictor)
    for one in loads:
        history.observe(one)
    return history


def watched() -> Path:
    """A folder of a watched training, after a step."""
    model = moe()
    watch = ms.Watch(model, "watched")
    model(torch.ones(2, 16)).sum().backward()
    watch.step()
    watch.close()
    return Path("watched")


def tuned_after(head: str | None, *lines: str, repair: Callable[[str], str], out: str = "tuned") -> Any:
    """Tunes again in a folder whose journal has another head, or further lines, and was repaired then."""
    shutil.rmtree("tuned", ignore_errors=True)
    path = tuned(out="tuned").path / JOURNAL
    first = path.read_text().splitlines()[0]
    path.write_text(repair("".join(f"{line}\n" for line in (head or first, *lines))))
    return tuned(out=out)


def tuned_again(**options: Any) -> Any:
    """Tunes again in a folder of another source of moesys."""
    shutil.rmtree("tuned", ignore_errors=True)
    path = tuned(out="tuned").path / JOURNAL
    path.write_text(re.sub(r'"moesys": "\w+"', '"moesys": "another"', path.read_text()))
    return tuned(**{"out": "tuned"} | options)


def lines_after(repair: Callable[[str], str], *lines: str) -> list[Any]:
    """Entries of the journal whose text is repaired first."""
    path = Path(written("journal.jsonl", *lines))
    path.write_text(repair(path.read_text()))
    return list(Journal(path, StepLine).read())


def entry(**changes: Any) -> Any:
    """Reads a journal of a tuning with this entry."""
    found = vars(Entry.about(strategy(), "measured", "seed 0", 1.0)) | changes
    return TuneJournal(Path(written("journal.jsonl", '{"schema": 1, "setting": {}}', json.dumps(found))), {})


def npz(arrays: dict[str, Any] | None = None, **header: Any) -> ms.traces.Trace:
    """Reads a file with changed parts, and fields of its header."""
    head = {"version": 1, "top_k": 2, "name": "", "meta": {}} | header
    parts = {"header": np.array(json.dumps(head)), "tokens_SLRE": np.full((1, 1, 1, 3), 2)} | (arrays or {})
    np.savez("a.npz", **parts)
    return ms.traces.load_trace("a.npz")


def lying() -> bytes:
    """Returns an array whose head says that it is larger."""
    np.save(file := io.BytesIO(), np.zeros(1, np.int64))
    return file.getvalue().replace(b"(1,), }         ", b"(99999999999,), }")


DEEP = "[" * 100_000 + "]" * 100_000
# Those of a plan that is right.
ENTRIES = np.array([[0, 0, 0, 1], [0, 0, 1, 3], [0, 2, 1, 1], [1, 0, 1, 2], [1, 1, 0, 3]])


def token_plan(entries: Any, expert_RS: Any = ((0, 1), (2, 0))) -> ms.planning.TokenPlan:
    load = ms.planning.LoadMatrix([[4, 0, 1], [2, 3, 0]])
    return ms.planning.TokenPlan(np.array(entries), load, ms.planning.ExpertLayout(expert_RS, 3))


STEP_LINE = json.dumps({"step": 0, "num_ranks": 1, "time_s": 0.0, "step_ms": 1.0, "numbers": {}, "layers": []})


@pytest.fixture(scope="module")
def prepared(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What commands read."""
    folder = tmp_path_factory.mktemp("prepared")
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        small = experiment(strategies=(strategy(name="ep"), fsep(name="fsep")), workload=TWO_STEPS)
        written("small.toml", small.to_toml())
        written("mine.toml", fsep(5, name="mine").to_toml())
        experiments = "[small, small.replace(name='other')]"
        written("two.py", f"import moesys as ms\nsmall = ms.Experiment.from_json({small.to_json()!r})")
        with Path("two.py").open("a") as file:
            file.write(f"\ndef experiments(): return {experiments}\n")
        ms.run(small, "runs", jobs=1).path.rename("run_folder")
        ms.run(small.replace(model=shape(hidden_size=32)), "runs", jobs=1).path.rename("other_folder")
        written("load.csv", "1,2,3", "3,2,1")
        written("train.sh", PRETRAIN)
        watched()
    return folder


# --- ways out that are followed ---------------------------------------------------------------------------------------


def cases() -> Iterator[Any]:
    """The cases of ways_out.txt: what is wrong, words of its error, and what follows each way out, if there are any."""
    text = Path(__file__).with_name("ways_out.txt").read_text(encoding="utf-8")
    for block in text.split("\n\n"):
        lines = [line for line in block.splitlines() if not line.startswith("#")]
        if lines:
            wrong, words, *ways = lines
            assert words.startswith("  ")
            assert all(way.startswith("> ") for way in ways)
            yield pytest.param(wrong, words.strip(), [way.removeprefix("> ") for way in ways], id=wrong[:60])


@pytest.mark.parametrize(("wrong", "words", "ways"), [*cases()])
def test_a_way_out_leads_out(wrong, words, ways, prepared, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    if wrong.startswith("$ benchmarks "):
        result = CliRunner().invoke(benchmarks, wrong.split()[2:])
        assert result.exit_code == 2
        said = " ".join(result.output.replace("│", " ").split())
    elif wrong.startswith("$ "):
        shutil.copytree(prepared, tmp_path, dirs_exist_ok=True)
        assert moesys(*wrong.split()[2:]) == 2
        said = " ".join(capsys.readouterr().err.replace("│", " ").split())
    else:
        with pytest.raises((ValueError, TypeError, KeyError, RuntimeError, typer.BadParameter)) as error:
            eval(wrong, globals())
        said = str(error.value)
    assert words in said
    for way in ways:
        if way.startswith("$ "):
            assert moesys(*way.split()[2:]) == 0, capsys.readouterr()
        else:
            eval(way, globals())


# --- names that errors have -------------------------------------------------------------------------------------------

# Options, functions and fields of other programs, which errors name too.
OTHERS = {
    *("--enable-return-routed-experts", "--moe-routing-trace-path", "--nproc-per-node", "--nnodes", "--mem"),
    *("DistributedConfig", "Embedding", "StateDictOptions"),
    *("ep_implementation", "experts_implementation", "distributed_config", "tp_size", "modules_to_save"),
    *("context_fn", "use_reentrant", "mesh_dim_names", "sort_ranks", "is_grads_batched", "vectorize", "sparse"),
    *("full_state_dict", "cpu_offload", "options", "state_dict", "persistent"),
    # PEFT's and transformers'
    *("LoraConfig", "target_parameters", "output_router_logits"),
    # options of Megatron-LM and torchtitan, and of trainers of transformers
    *("--num-experts", "--parallelism", "model_name_or_path"),
    # fields of torchtitan
    *("expert_parallel_degree", "pipeline_parallel_degree", "moe_comm_backend"),
    # options of Megatron-Core
    *("add_bias_linear", "cuda_graph_impl", "cuda_graph_modules", "expert_model_parallel_size", "offload_modules"),
    *("sequence_parallel", "tensor_model_parallel_size", "use_megatron_fsdp"),
    # fields of files that others write
    *("architectures", "model_type", "num_hidden_layers", "block", "partition", "source_digest"),
}


@cache
def sources() -> dict[Path, ast.Module]:
    # The texts of pages are HTML.
    paths = sorted(path for path in (ROOT / "moesys").rglob("*.py") if path.stem != "pages")
    return {path.relative_to(ROOT): ast.parse(path.read_text(encoding="utf-8")) for path in paths}


def sentences(of: ast.AST) -> Iterator[str]:
    """Yields the strings of more than a word, without docstrings, with … for what is formatted into them."""
    documented = [node for node in ast.walk(of) if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef)]
    skipped = {id(node.body[0].value) for node in documented if node.body and isinstance(node.body[0], ast.Expr)}
    for node in ast.walk(of):
        if id(node) in skipped:
            continue
        match node:
            case ast.JoinedStr(values=values):
                skipped |= set(map(id, values))
                text = "".join(str(each.value) if isinstance(each, ast.Constant) else "…" for each in values)
            case ast.Constant(value=str(text)):
                pass
            case _:
                continue
        if " " in text:
            yield text


@cache
def all_sentences() -> list[tuple[Path, str]]:
    return [(path, text) for path, tree in sources().items() for text in sentences(tree)]


def named(pattern: str) -> dict[str, Path]:
    """Returns what the first group of ``pattern`` finds in sentences of the package, each with a file that has it."""
    return {found: path for path, text in all_sentences() for found in re.findall(pattern, text)}


def test_options_that_are_named_exist() -> None:
    options = {opt for name in COMMANDS for option in COMMANDS[name].load(name).params for opt in option.opts} | {
        "--help"
    }
    found = named(r"(?<![\w-])(--[a-z][a-z-]+)")
    assert len(found) > 20
    assert {name: path for name, path in found.items() if name not in options | OTHERS} == {}


def test_commands_extras_and_pages_that_are_named_exist() -> None:
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]["optional-dependencies"]
    before = "to|by|for|with|run|call|see|is|example:|routing:|-m"
    for pattern, exists in (
        (rf"\b(?:{before}) moesys ([a-z]+)\b", lambda name: name in COMMANDS),
        (r"moesys\[(\w+)\]", lambda name: name in extras),
        (r"((?:docs|experiments)/\w[\w/.-]*\.(?:md|py))", lambda name: (ROOT / name).is_file()),
    ):
        found = named(pattern)
        assert found, pattern
        assert {name: path for name, path in found.items() if not exists(name)} == {}


def test_public_names_that_are_named_exist() -> None:
    found = named(r"\b((?:ms|moesys)\.[A-Za-z_][\w.]*[\w])")
    assert len(found) > 15
    for name, path in found.items():
        if name.startswith(("moesys.megatron", "moesys.torchtitan")):
            # They need their hosts.
            assert (ROOT / "moesys" / name.split(".")[1]).is_dir()
            continue
        value: Any = ms
        for part in name.split(".")[1:]:
            assert hasattr(value, part), f"{name} in {path}"
            value = getattr(value, part)


def test_calls_that_are_named_have_their_arguments() -> None:
    found = named(r"\b((?:ms\.[a-z]+\.)?[A-Z]\w+\([^()]*\))")
    assert len(found) > 30
    for call, path in found.items():
        name, _, arguments = call.removesuffix(")").partition("(")
        if name in OTHERS:
            continue
        called = attrgetter(name.removeprefix("ms."))(ms)
        known = getattr(called, "model_fields", None) or inspect.signature(called).parameters
        for argument in re.findall(r"(\w+)=", arguments):
            assert argument in known, f"{call} in {path}"


def test_fields_that_errors_name_exist() -> None:
    """A name before an equals sign is that of a field, or of a parameter, somewhere in the package."""
    known = set(OTHERS)
    for tree in sources().values():
        for node in ast.walk(tree):
            match node:
                case ast.arg(arg=name) | ast.AnnAssign(target=ast.Name(id=name)):
                    known.add(name)
    raised = [
        (path, text)
        for path, tree in sources().items()
        for node in ast.walk(tree)
        if isinstance(node, ast.Raise | ast.Return)
        for text in sentences(node)
        if not text.startswith("<")
    ]
    found = {name: path for path, text in raised for name in re.findall(r"(?<![\w-])([a-z_]{2,})=(?!=)", text)}
    assert len(found) > 100
    assert {name: path for name, path in found.items() if name not in known} == {}
