"""Readers of what others wrote, on damaged and forged inputs: each returns what the input says, or raises an error that
names the file, the line or the field. None raises anything else, computes for long, or takes much memory.

A reader is a function that makes valid inputs with moesys in a folder, and returns the function that tries one changed
input. MOESYS_SWEEP=1 tries 5,000 of each. A fault names its seed, with which ``test_fuzz.fault`` tries it again.
"""

from __future__ import annotations

import base64
import contextlib
import io
import json
import os
import pickle
import random
import shutil
import struct
import sys
import traceback
import warnings
import zipfile
from collections import Counter
from collections.abc import Callable
from dataclasses import asdict, replace
from pathlib import Path
from random import Random
from typing import Any

import lab_cases
import numpy as np
import pytest
import torch
import typer
import watch_cases
from mutated_inputs import (
    HangError,
    altered,
    json_bytes,
    json_lines,
    json_or_toml,
    mangled,
    memory_limit,
    refused,
    time_limit,
)
from rich.table import Table
from safetensors.torch import load_file, save_file
from torch import Tensor
from torch.distributed.checkpoint.metadata import BytesStorageMetadata

import moesys as ms
from moesys.__main__ import main
from moesys.balance.layout_schedule import LayoutSchedule
from moesys.balance.plan import LayerPlan, StepPlan, plan_layer
from moesys.compiled import cache_dir
from moesys.config.experiment import Experiment
from moesys.config.hub import published_names, read_config
from moesys.files import FolderLock
from moesys.kernels.experts.tile_config import ShapeClass, TileConfig, TileConfigs
from moesys.kernels.experts.tile_tuner import Gpu, _parse, blocks_of, cache_file, read_blocks
from moesys.lab.commands.calibrate import check_ranks
from moesys.lab.commands.compare import compare_command
from moesys.lab.commands.plan import read_layout, read_load
from moesys.lab.commands.report import report_command
from moesys.lab.commands.simulate import _step_plan
from moesys.lab.commands.simulate_model import named_strategy, parallelism_of
from moesys.lab.leaderboard.planners import named_planner
from moesys.lab.ranks.devices import device_of
from moesys.lab.ranks.torchrun_ranks import TorchrunRanks
from moesys.lab.runs.declarations import balance_of, cluster_of, declared_in, predictor_of, split_of
from moesys.lab.runs.environment import Environment, save_environment
from moesys.lab.runs.places import place_for
from moesys.lab.runs.records import RunFolder, record_journal
from moesys.lab.runs.slurm import Slurm, slurm_of
from moesys.lab.runs.watched_run import read_watched_run
from moesys.lab.show.pages import watch_page
from moesys.lab.show.tables import print_full
from moesys.lab.train.text import load_files
from moesys.layout import ExpertLayout
from moesys.load import LoadMatrix
from moesys.moe.arguments import cluster_of as cluster_of_ranks
from moesys.step_lines import read_spans, step_journal, write_spans
from moesys.timeline import Span, Timeline
from moesys.traces import Trace, load_trace, megatron_trace, save_trace, vllm_trace
from moesys.tuner.journal import Entry, TuneJournal
from moesys.tuner.space import Space

Attempt = Callable[[Random], None]
READERS: dict[str, Callable[[Path], Attempt]] = {}
MOST_BYTES, MOST_SECONDS = 3 << 30, 10.0
SWEEPS = os.environ.get("MOESYS_SWEEP") == "1"
BATCHES = [range(first, first + 250) for first in range(0, 5000, 250)] if SWEEPS else [range(12)]


def reader(make: Callable[[Path], Attempt]) -> Callable[[Path], Attempt]:
    READERS[make.__name__] = make
    return make


def fault(attempt: Attempt, name: str, seed: int) -> str:
    """Returns what is wrong with how a reader takes the input of a seed; "" if nothing is."""
    try:
        with time_limit(MOST_SECONDS):
            attempt(random.Random(f"{name} {seed}"))
    except (Exception, HangError) as error:
        root = str(Path(__file__).parents[1])
        frames = [frame for frame in traceback.extract_tb(error.__traceback__) if frame.filename.startswith(root)]
        where = f"{Path(frames[-1].filename).name}:{frames[-1].lineno}"
        return f"{name}, seed {seed}: {where} {type(error).__name__}: {str(error)[:300]!r}"
    return ""


@pytest.mark.parametrize("seeds", BATCHES, ids=lambda seeds: f"{seeds.start}")
@pytest.mark.parametrize("name", READERS)
def test_what_others_wrote_is_read_rightly_or_refused(name: str, seeds: range, tmp_path: Path) -> None:
    attempt = READERS[name](tmp_path)
    with memory_limit(MOST_BYTES):
        faults = [found for seed in seeds if (found := fault(attempt, name, seed))]
    assert not faults, f"{len(faults)} of {len(seeds)}:\n" + "\n".join(faults)


def same(read: Any, said: Any) -> bool:
    """Returns whether what was read is what an input said: numbers may be written as text, and defaults left out."""
    if isinstance(said, dict) and isinstance(read, dict):
        return all(name in read and same(read[name], value) for name, value in said.items())
    if isinstance(said, list | tuple) and isinstance(read, list | tuple):
        return len(read) == len(said) and all(map(same, read, said))
    if isinstance(said, str) and isinstance(read, bool | int | float):
        return str(read).lower() == said.strip().lower() or float(said) == read
    if isinstance(said, int) and isinstance(read, float):
        return float(said) == read
    if isinstance(said, float) and read in ("NaN", "Infinity", "-Infinity"):
        return same(float(read), said)
    # JSON has no nan, and null stands for it.
    return read == said or (read != read and (said is None or said != said))


def known(said: Any, read: Any) -> Any:
    """Returns what an input said, without fields that its reader does not have."""
    both = isinstance(said, dict) and isinstance(read, dict)
    return {name: known(value, read[name]) for name, value in said.items() if name in read} if both else said


def json_said(data: bytes) -> Any:
    """Returns what JSON says by Python's own reader."""
    return json.loads(data.decode("utf-8", "surrogatepass"))


def printed_by(command: Callable[..., Any], *arguments: Any) -> str:
    """Returns what a command prints. Raises ValueError with it where the command refuses its input."""
    told = io.StringIO()
    code = 0
    with contextlib.redirect_stdout(told), contextlib.redirect_stderr(told), warnings.catch_warnings():
        # Of characters that a font does not have.
        warnings.simplefilter("ignore", UserWarning)
        try:
            command(*arguments)
        except typer.Exit as end:
            code = end.exit_code
        except SystemExit as end:
            code = int(end.code or 0)
    text = told.getvalue()
    assert not [each for each in text if each != "\n" and not each.isprintable()], f"it prints {text!r:.300}"
    if code == 2:
        raise ValueError(text)
    assert code in (0, 1)
    return text


# --- traces -------------------------------------------------------------------------------------------------------

TRACE = ms.generate(ms.Generated(num_layers=2, tokens_per_rank=40, warmup=0, steps=3), 2, 6, 2, seed=3)


@reader
def trace_of_moesys(folder: Path) -> Attempt:
    path, again = folder / "trace.npz", folder / "again.npz"
    save_trace(TRACE, path)
    whole = path.read_bytes()
    header = {"version": 1, "top_k": 2, "name": "x", "meta": {"from": "here"}}

    def attempt(draw: Random) -> None:
        tokens, iterations, fields = TRACE.tokens_SLRE, np.array([3, 5, 8]), header
        if damaged := draw.random() < 0.4:
            path.write_bytes(mangled(draw, whole))
        else:
            text = json_bytes(draw, header) if draw.random() < 0.5 else json.dumps(header).encode()
            tokens, iterations = other_counts(draw, tokens), other_counts(draw, iterations)
            arrays = {"tokens_SLRE.npy": npy(draw, tokens), "iterations_S.npy": npy(draw, iterations)}
            arrays["header.npy"] = npy(draw, np.array(text.decode("utf-8", "surrogateescape")))
            if draw.random() < 0.1:
                del arrays[draw.choice(list(arrays))]
            write_zip(draw, path, arrays)
        with refused("trace.npz"):
            found = load_trace(path)
            if damaged:
                # Its parts have checksums.
                assert same_trace(found, TRACE)
            else:
                fields = json_said(text)
                assert (found.tokens_SLRE == tokens).all()
                assert same(vars(found), {name: fields[name] for name in ("top_k", "name", "meta")})
                assert "iterations_S.npy" not in arrays or found.iterations == tuple(iterations.tolist())
            save_trace(found, again)
            assert same_trace(load_trace(again), found)

    return attempt


def same_trace(one: Trace, other: Trace) -> bool:
    names = ("digest", "top_k", "name", "meta", "iterations")
    return all(getattr(one, name) == getattr(other, name) for name in names)


def other_counts(draw: Random, array: Any) -> Any:
    """Returns an array with another dtype, shape or value, or as it is."""
    array = array.astype(np.int64)
    match draw.randrange(14):
        case 0:
            return array.astype(draw.choice((np.float64, np.bool_, np.uint8, np.uint64, np.int8, "m8[s]", "c16", "S5")))
        case 1:
            return array.reshape(draw.choice(((-1,), (*array.shape, 1), (1, *array.shape)))).squeeze()
        case 2:
            return array[..., :0] if draw.random() < 0.5 else array[:0]
        case 3:
            array.flat[draw.randrange(array.size)] = draw.choice((-1, 0, 10**6, 2**62, 2**63 - 1, -(2**63)))
        case 4:
            return array.astype(np.float64) + draw.choice((0.5, np.nan, np.inf))
        case 5:
            return array.astype(np.uint64) + np.uint64(draw.choice((2**63, 2**64 - 200)))
        case 6:
            return np.asfortranarray(array).astype(draw.choice((">i8", ">u2", "<i4")))
        case 7:
            return array.swapaxes(0, -1)
    return array


def npy(draw: Random, array: Any) -> bytes:
    """Returns an array as .npy, whose head may be a lie."""
    buffer = io.BytesIO()
    np.lib.format.write_array(buffer, np.asanyarray(array), allow_pickle=False)
    data = buffer.getvalue()
    if draw.random() < 0.15:
        head = 10 + int.from_bytes(data[8:10], "little")
        wrong = mangled(draw, data[10:head])[: head - 10].ljust(head - 10)
        if draw.random() < 0.5:
            shape = draw.choice(
                ("(99999999999,)", "(1, 1, 9999999, 99999999)", "(-1,)", "(0,)", "((((1,),),),)", "(2.5,)")
            )
            wrong = f"{{'descr': '<i8', 'fortran_order': False, 'shape': {shape}}}".encode().ljust(head - 10)
        data = data[:10] + wrong + data[head:]
    return data


def write_zip(draw: Random, path: Path, members: dict[str, bytes]) -> None:
    with warnings.catch_warnings(), zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as file:
        # Of names that are there twice.
        warnings.simplefilter("ignore")
        for name, data in members.items():
            file.writestr(name, data)
        if draw.random() < 0.05:
            file.writestr(
                draw.choice((*members, "further.npy", "x.txt", "a/")), draw.choice((b"", b"x", *members.values()))
            )
    if draw.random() < 0.1:
        path.write_bytes(mangled(draw, path.read_bytes()))


def megatron_lines(rank: int) -> list[dict[str, Any]]:
    ids = Random(rank)
    return [
        {
            "step": step,
            "block": block,
            "layer": layer,
            "rank": rank,
            "topk": 2,
            **({"mtp_idx": 0} if block == "mtp" else {}),
        }
        | {"top_indices": [ids.sample(range(6), 2) for _ in range(4)]}
        for step in (3, 7)
        for block, layer in (("decoder", 1), ("decoder", 2), ("mtp", 0))
    ]


@reader
def trace_of_megatron(folder: Path) -> Attempt:
    paths = [folder / f"router_trace_rank{rank}.jsonl" for rank in range(2)]
    lines = [megatron_lines(rank) for rank in range(2)]
    wholes = ["".join(json.dumps(line) + "\n" for line in of_rank).encode() for of_rank in lines]

    def attempt(draw: Random) -> None:
        wrong = draw.randrange(2)
        for rank, path in enumerate(paths):
            path.write_bytes(json_lines(draw, lines[rank]) if rank == wrong else wholes[rank])
        with refused("rank", folder.name):
            found = megatron_trace(folder, 6)
            for rank, path in enumerate(paths):
                read = [json_said(line) for line in path.read_bytes().split(b"\n") if line]
                counted = Counter(
                    expert for line in read for ids in line["top_indices"] for expert in np.atleast_1d(ids)
                )
                counted.pop(-1, None)
                tokens_E = found.tokens_SLRE[:, :, rank].sum(axis=(0, 1))
                assert tokens_E.tolist() == [counted[expert] for expert in range(6)]
                assert set(found.iterations) == {line["step"] for line in read}
                assert found.num_layers == len(
                    {(each["block"], each.get("mtp_idx", 0), each["layer"]) for each in read}
                )

    return attempt


@reader
def trace_of_vllm(folder: Path) -> Attempt:
    path, ids = folder / "responses.jsonl", Random(0)
    routed = [[[ids.sample(range(6), 2) for _ in range(2)] for _ in range(3)] for _ in range(4)]

    def attempt(draw: Random) -> None:
        coded = [base64.b64encode(npy(draw, other_counts(draw, np.array(each, np.uint8)))).decode() for each in routed]
        parts: list[Any] = coded if draw.random() < 0.5 else routed
        lines = [{"prompt_routed_experts": part, "choices": [{"routed_experts": part, "text": "x"}]} for part in parts]
        path.write_bytes(json_lines(draw, lines))
        with refused("responses.jsonl"):
            found = vllm_trace(path, 6, 2, 1)
            counted: Counter[int] = Counter()
            for line in path.read_bytes().split(b"\n")[: found.num_micro_batches * 2]:
                read = json_said(line)
                for part in (
                    read.get("prompt_routed_experts"),
                    *(each.get("routed_experts") for each in read["choices"]),
                ):
                    counted.update(np.ravel(uncoded(part) if part is not None else []).tolist())
            counted.pop(-1, None)
            assert found.tokens_SLRE.sum(axis=(0, 1, 2)).tolist() == [counted[expert] for expert in range(6)]

    return attempt


def uncoded(part: Any) -> Any:
    return np.load(io.BytesIO(base64.b64decode(part))) if isinstance(part, str) else part


# --- watched trainings --------------------------------------------------------------------------------------------


@reader
def watched_training(folder: Path) -> Attempt:
    watch_cases.write_run(folder, 3, 2, 2)
    for rank in range(2):
        write_spans(
            Timeline([Span(rank, "a", 0.0, 2.0, "k", "d"), Span(rank, "b", 1.0, 3.0, "k")], "measured"), folder, rank
        )
    wholes = {path: path.read_bytes() for path in folder.iterdir()}

    def attempt(draw: Random) -> None:
        for path, whole in wholes.items():
            path.write_bytes(whole)
        wrong = draw.choice(list(wholes))
        lines = [json.loads(line) for line in wholes[wrong].splitlines()]
        wrong.write_bytes(json_lines(draw, lines) if wrong.suffix == ".jsonl" else json_bytes(draw, lines[0]))
        with refused("rank-000", "spans-000"):
            if wrong.suffix == ".json":
                timeline = read_spans(folder)
                assert timeline is not None
                spans = [
                    [of.lane, of.start_us, of.end_us, of.kind, of.detail]
                    for of in timeline.spans
                    if str(of.rank) in wrong.stem[-1]
                ]
                assert same(sorted(spans), sorted(json_said(wrong.read_bytes())))
            else:
                found = list(step_journal(wrong).read())
                said = [json_said(line) for line in wrong.read_bytes().split(b"\n")[:-1]]
                assert same([asdict(line) for line in found], said)
            if draw.random() < (0.1 if SWEEPS else 0.5):
                printed_by(report_command, folder, folder / "report.html")
                page = (folder / "report.html").read_text()
                assert page.count("<script>") == 1
                assert not [each for each in page if not each.isprintable() and each not in "\n\t"]

    return attempt


# --- run folders --------------------------------------------------------------------------------------------------

ENVIRONMENT = Environment(
    *(
        "0123abcd",
        "",
        "3.11",
        {"torch": "2.13", "numpy": "2.0"},
        "Linux",
        "a processor",
        "AVX2",
        2,
        1,
        [],
        "",
        {"OMP_X": "1"},
    )
)


@reader
def run_folder(folder: Path) -> Attempt:
    experiments = [lab_cases.experiment(), lab_cases.simulated(strategies=(lab_cases.EP, lab_cases.FSEP_WIDE))]
    paths: list[dict[Path, bytes]] = []
    for experiment in experiments:
        with RunFolder.open(experiment, folder / experiment.source) as run:
            environment = save_environment(ENVIRONMENT, "", run.path)
            for record in lab_cases.records(experiment, {"ep": 10.0, "fsep": 8.0, "fsep_wide|a&b": 9.0}):
                run.append(replace(record, environment=environment))
        paths.append({path: path.read_bytes() for path in run.path.iterdir() if path.suffix in (".json", ".jsonl")})

    def attempt(draw: Random) -> None:
        wholes = draw.choice(paths)
        for path, whole in wholes.items():
            path.write_bytes(whole)
        wrong = draw.choice(list(wholes))
        if wrong.suffix == ".jsonl":
            wrong.write_bytes(json_lines(draw, [json.loads(line) for line in wholes[wrong].splitlines()]))
        else:
            wrong.write_bytes(json_bytes(draw, json.loads(wholes[wrong])))
        run = RunFolder(wrong.parent)
        with refused(wrong.name):
            if wrong.suffix == ".jsonl":
                journal = record_journal(wrong.parent)
                found = [json.loads(journal.to_line(record)) for record in run.records()]
                assert same(found, [json_said(line) for line in wrong.read_bytes().split(b"\n")[:-1]])
            elif wrong.name == "experiment.json":
                read = run.experiment()
                assert same(read.model_dump(mode="json"), json_said(wrong.read_bytes()))
                assert Experiment.model_validate_json(read.to_json(), context={"recorded": True}) == read
        with refused(wrong.name, "seed", "strateg", "compar"):
            printed_by(
                compare_command, [wrong.parent], draw.choice(("table", "csv", "json", "latex", "markdown")), None
            )

    return attempt


@reader
def tune_journal(folder: Path) -> Attempt:
    path, setting = folder / "journal.jsonl", {"model": "a", "moesys": "b"}
    journal = TuneJournal(path, setting)
    for seed in range(3):
        journal.add(Entry.about(lab_cases.FSEP, "measured", f"seed {seed}", 1.5 + seed))
    journal.add(Entry("0" * 64, "x", "simulated", "2 steps of seeds 0", 1.5, "", {}, {"0": [1.0, 2.0]}))
    journal.add(Entry.about(lab_cases.EP, "pruned", "memory 80 GB", None, "too large"))
    lines = [json.loads(line) for line in path.read_text().splitlines()]

    def attempt(draw: Random) -> None:
        path.write_bytes(json_lines(draw, lines))
        with refused("journal.jsonl"):
            found = TuneJournal(path, setting)
            said = [json_said(line) for line in path.read_bytes().split(b"\n")[1:-1]]
            newest = {(each["fingerprint"], each["of"], each["stage"] == "pruned"): each for each in said}
            assert same([vars(entry) for entry in found.entries()], list(newest.values()))

    return attempt


# --- declarations -------------------------------------------------------------------------------------------------


def declared() -> list[Any]:
    strategy = ms.Strategy(
        name="both",
        sharding=ms.Fsep(slots_per_rank=3, prefetch_layers=1),
        balance=ms.Greedy(),
        split=ms.FlowSplit(max_inter_node=0.1),
        predictor=ms.Adaptive(),
        overlap=ms.Pipelined(chunks=2),
    )
    mega = ms.Strategy(name="mega", overlap=ms.MegaKernel(), balance=ms.Static())
    model = ms.ModelSpec.from_config("olmoe-1b-7b")
    model = model.replace(layers=model.layers[:2])
    cluster = ms.presets.h100(2)
    training = ms.ModelTraining(model="olmoe-small")
    return [
        *(strategy, mega, cluster, model, lab_cases.experiment(strategies=(strategy, mega))),
        ms.ModelRun(model=model, cluster=cluster, strategy=strategy.replace(sharding=ms.Fsep(slots_per_rank=8))),
        *(lab_cases.experiment(workload=training, model=training.shape), lab_cases.simulated()),
        Slurm(partition="gpu", further={"a": "b"}),
        Space({"sharding": ("ep", "fsep"), "sharding.fsep.slots_per_rank": (2, 3), "split": ("even", strategy.split)}),
    ]


@reader
def declaration(folder: Path) -> Attempt:
    values = declared()
    trees = [json.loads(value.to_json()) for value in values]

    def attempt(draw: Random) -> None:
        which = draw.randrange(len(values))
        kind = type(values[which])
        path = json_or_toml(draw, trees[which], folder / "declared")
        with refused(path.name):
            found = declared_in(path, kind)
            if kind is not Space:
                assert kind.from_toml(found.to_toml()).fingerprint() == found.fingerprint()
            assert kind.from_toml(found.to_toml()) == found
            assert kind.from_json(found.to_json()) == found
            if path.suffix == ".json" and kind is not Space:
                assert same(found.model_dump(mode="json"), json_said(path.read_bytes()))

    return attempt


TEXTS: list[tuple[Callable[[str], Any], tuple[str, ...]]] = [
    (cluster_of, ("4x8", "h100:4", "2x2", "cluster.toml")),
    (balance_of, ("greedy", '{"kind": "greedy", "effort": 4}', "eplb", "json:JSONDecoder")),
    (split_of, ("flow", '{"kind": "flow", "max_inter_node": 0.1}')),
    (predictor_of, ("last", '{"kind": "ema", "decay": 0.9}', '{"kind": "adaptive"}')),
    (slurm_of, ("partition=gpu,time=2:00:00", "time=1-12,mem_gb=3.5", "slurm.json")),
    (parallelism_of, ("tp=2,pp=8,vp=4,ep=32,recompute=full", "cp=1")),
    (named_strategy, ("ep", "fsep:3", "laer:2", "strategy.toml")),
    (named_planner, ('{"kind": "greedy"}', "moesys.balance.greedy.greedy:Greedy", "planner.py:Own")),
]


@reader
def option(folder: Path) -> Attempt:
    """Texts that are given on the command line."""

    def attempt(draw: Random) -> None:
        read, texts = draw.choice(TEXTS)
        text = mangled(draw, draw.choice(texts).encode()).decode("utf-8", "surrogateescape")
        if json_texts := [each for each in texts if each.startswith("{") and draw.random() < 0.5]:
            text = json_bytes(draw, json.loads(draw.choice(json_texts))).decode("utf-8", "surrogateescape")
        with refused("cluster=", "balance=", "split=", "predictor=", "slurm=", "parallel=", "strategy=", "planner="):
            read(text)

    return attempt


@reader
def model_config(folder: Path) -> Attempt:
    path = folder / "config.json"
    configs = [read_config(name) for name in published_names()]

    def attempt(draw: Random) -> None:
        path.write_bytes(json_bytes(draw, draw.choice(configs)))
        with refused("config.json"):
            found = ms.ModelSpec.from_config(path)
            said = json_said(path.read_bytes())
            assert same(found.hidden_size, said.get("hidden_size", found.hidden_size))
            assert same(found.vocab_size, said.get("vocab_size", found.vocab_size))
            assert found.num_layers == said.get("num_hidden_layers", found.num_layers)
            assert ms.ModelSpec.from_json(found.to_json()) == found
        with refused("config.json"):
            workload = ms.ModelTraining(model=str(path))
            assert json.loads(workload.config) == json_said(path.read_bytes())
            assert workload.num_layers <= json_said(path.read_bytes())["num_hidden_layers"]

    return attempt


# --- checkpoints --------------------------------------------------------------------------------------------------


def small_checkpoint(folder: Path) -> None:
    """Writes a model in the hub's format, in one file, and sharded beside it."""
    from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

    sizes = {
        "vocab_size": 8,
        "hidden_size": 8,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
    }
    sizes |= {
        "head_dim": 4,
        "num_experts": 2,
        "num_experts_per_tok": 1,
        "moe_intermediate_size": 4,
        "intermediate_size": 4,
    }
    config = Qwen3MoeConfig(**sizes, pad_token_id=None, bos_token_id=None, eos_token_id=None)
    torch.manual_seed(0)
    model = Qwen3MoeForCausalLM(config)
    model.save_pretrained(folder / "one")
    model.save_pretrained(folder / "sharded", max_shard_size="1KB")


def tensors_in(folder: Path) -> dict[str, Tensor]:
    return {name: tensor for path in sorted(folder.glob("*.safetensors")) for name, tensor in load_file(path).items()}


def converted(source: Path, out: Path) -> None:
    from moesys.hf.convert import convert

    if out.exists():
        shutil.rmtree(out)
    with warnings.catch_warnings():
        # Of tensors that the model does not have.
        warnings.simplefilter("ignore", UserWarning)
        convert(source, out, None, lambda done, total: None)
    assert sorted(path.name for path in out.parent.iterdir() if path.name.startswith(".")) == []


def equal(one: Tensor, other: Tensor) -> bool:
    """Returns whether values are equal, of any dtype, NaN too."""
    one, other = one.to(torch.float64), other.to(torch.float64)
    return one.shape == other.shape and bool(((one == other) | (one.isnan() & other.isnan())).all())


@reader
def hub_checkpoint(folder: Path) -> Attempt:
    small_checkpoint(folder)
    (folder / "out").mkdir()
    sources = [{path: path.read_bytes() for path in (folder / name).iterdir()} for name in ("one", "sharded")]

    def attempt(draw: Random) -> None:
        wholes = draw.choice(sources)
        for path, whole in wholes.items():
            path.write_bytes(whole)
        source = next(iter(wholes)).parent
        wrong = draw.choice([path for path in wholes if path.name != "generation_config.json"])
        wrong.write_bytes(
            safetensors_bytes(draw, wholes[wrong])
            if wrong.suffix == ".safetensors"
            else json_bytes(draw, json.loads(wholes[wrong]))
        )
        if draw.random() < 0.02:
            wrong.unlink()
        with refused(wrong.name, source.name, "config.json"):
            converted(source, folder / "out" / "dcp")
            converted(folder / "out" / "dcp", folder / "out" / "back")
            before, after = tensors_in(source), tensors_in(folder / "out" / "back")
            tied = json.loads((folder / "out" / "back" / "config.json").read_text()).get("tie_word_embeddings")
            for name, tensor in before.items():
                assert equal(tensor, after[name]) if name in after else tied, name

    return attempt


def safetensors_bytes(draw: Random, data: bytes) -> bytes:
    """Returns a changed safetensors file: its header's fields, their length, or any bytes."""
    if draw.random() < 0.4:
        return mangled(draw, data)
    length = int.from_bytes(data[:8], "little")
    text = json_bytes(draw, json.loads(data[8 : 8 + length]), share=0.9)
    return (
        struct.pack("<Q", len(text) if draw.random() < 0.9 else draw.choice((0, 2**31, 2**63, length)))
        + text
        + data[8 + length :]
    )


CALLS: list[str] = []


class Running:
    """A pickle that runs code where it is read."""

    def __reduce__(self) -> Any:
        return CALLS.append, ("run",)


@reader
def distributed_checkpoint(folder: Path) -> Attempt:
    small_checkpoint(folder)
    source = folder / "one.dcp"
    converted(folder / "one", source)
    (folder / "out").mkdir()
    wholes = {path: path.read_bytes() for path in source.iterdir()}
    right = tensors_in(folder / "one")

    def attempt(draw: Random) -> None:
        for path, whole in wholes.items():
            path.write_bytes(whole)
        wrong = draw.choice([path for path in wholes if path.name != "generation_config.json"])
        forged = wrong.name == ".metadata" and draw.random() < 0.7
        if forged:
            metadata = pickle.loads(wholes[wrong])
            forge(draw, metadata)
            wrong.write_bytes(pickle.dumps(metadata))
        elif wrong.name == "config.json":
            wrong.write_bytes(json_bytes(draw, json.loads(wholes[wrong])))
        else:
            wrong.write_bytes(mangled(draw, wholes[wrong]))
        with refused(wrong.name, source.name, "config.json"):
            converted(source, folder / "out" / "hub")
            found = tensors_in(folder / "out" / "hub")
            assert found.keys() <= right.keys() or wrong.name == ".metadata"
            if wrong.name == "config.json":
                assert all(equal(found[name], right[name]) for name in found)
        assert not CALLS

    return attempt


def forge(draw: Random, metadata: Any) -> None:
    """Changes fields of a checkpoint's metadata."""
    weird = (
        None,
        -1,
        0,
        1,
        2**40,
        2**62,
        2**70,
        1.5,
        "x",
        "../x",
        [],
        (),
        torch.Size([]),
        torch.Size([2**40]),
        Running(),
    )
    name = draw.choice(list(metadata.state_dict_metadata))
    tensor = metadata.state_dict_metadata[name]
    index = draw.choice(list(metadata.storage_data))
    chunk, info = draw.choice(tensor.chunks), metadata.storage_data[index]
    properties = tensor.properties
    places = [(chunk, "offsets"), (chunk, "sizes"), (tensor, "size"), (tensor, "chunks"), (properties, "dtype")]
    places += [(info, field) for field in ("relative_path", "offset", "length", "transform_descriptors")]
    places += [(metadata, field) for field in ("state_dict_metadata", "storage_data", "planner_data", "storage_meta")]
    places += [(metadata.state_dict_metadata, name), (metadata.storage_data, index)]
    at, field = draw.choice(places)
    value = draw.choice((*weird, chunk.sizes, tensor.size, torch.float16, torch.int64, BytesStorageMetadata()))
    if isinstance(getattr(at, field, None) if not isinstance(at, dict) else None, torch.Size) and draw.random() < 0.7:
        sizes = list(getattr(at, field))
        sizes[draw.randrange(len(sizes))] = draw.choice((0, 1, 2, 3, 2**33))
        value = torch.Size(sizes)
    if isinstance(at, dict):
        if draw.random() < 0.5:
            del at[field]
        else:
            at[field] = value
    else:
        object.__setattr__(at, field, value)


@reader
def planning_state(folder: Path) -> Attempt:
    """What a layer's state dict has of load history and layouts."""
    cluster = ms.ClusterSpec(num_nodes=2, ranks_per_node=2)
    model = ms.ModelShape(hidden_size=8, intermediate_size=8, num_experts=6, top_k=2)
    loads = [LoadMatrix(np.random.default_rng(step).integers(0, 50, (4, 6))) for step in range(6)]
    predictors = (ms.Last(), ms.WindowMean(steps=3), ms.Ema(), ms.Adaptive())
    strategies = [
        ms.Strategy(name="x", sharding=ms.Fsep(slots_per_rank=3), balance=ms.Eplb(), predictor=predictor, lag=2)
        for predictor in predictors
    ]
    states = []
    for strategy in strategies:
        schedule = LayoutSchedule(0, strategy, model, cluster)
        for load in loads[:3]:
            schedule.commit(agreed=True)
            schedule.observe(load)
        states.append(json.loads(json.dumps(schedule.state_dict(0.0))))

    def attempt(draw: Random) -> None:
        which = draw.randrange(len(states))
        schedule = LayoutSchedule(0, strategies[which], model, cluster)
        state = altered(draw, states[which])
        # Texts stand for raw JSON, of which there is none in a dict.
        if not isinstance(state, dict) or "\\u0001" in json.dumps(state):
            return
        with refused("state"):
            schedule.load_state_dict(state)
            again = json.loads(json.dumps(schedule.state_dict(0.0)))
            assert schedule.events or same(again, known(state, again))
            for load in loads[3:]:
                schedule.commit(agreed=schedule.ready(0.0))
                schedule.observe(load)

    return attempt


@reader
def layer_state(folder: Path) -> Attempt:
    """What ``Experts`` of one rank load as their extra state, and ``MoELayer`` as its tensors."""
    shape = ms.ModelShape(hidden_size=8, intermediate_size=8, num_experts=4, top_k=2)
    layer = ms.MoELayer(shape, ms.Strategy(name="ep"))
    text, tensors = layer.experts.get_extra_state(), layer.full_state_dict()

    def attempt(draw: Random) -> None:
        if draw.random() < 0.7:
            state: Any = json_bytes(draw, json.loads(text)).decode("utf-8", "surrogateescape")
            with refused("state"):
                layer.experts.set_extra_state(state)
                assert layer.experts.counted_E.tolist() == json.loads(state)["counted"]
            return
        changed: dict[Any, Any] = dict(tensors)
        name = draw.choice(list(changed))
        tensor = changed[name]
        others = (tensor[:1], tensor.to(torch.int64), tensor.mT, tensor.flatten(), None, 3, "x", tensor.tolist())
        changed[name] = draw.choice((*others, tensor * float("nan"), torch.empty(0), tensor.to(torch.complex64)))
        if draw.random() < 0.2:
            del changed[name]
            changed[draw.choice(("x", 3, None))] = tensor
        with refused(*map(str, tensors), kinds=(ValueError, KeyError, TypeError)):
            layer.load_full_state_dict(changed)
            assert all(
                torch.equal(value, torch.as_tensor(changed[name]).to(value.dtype)) or name
                for name, value in layer.full_state_dict().items()
            )

    return attempt


# --- plans, blocks, texts, locks and variables ---------------------------------------------------------------------


@reader
def load_file_of_plan(folder: Path) -> Attempt:
    """The matrix that ``moesys plan --load`` reads, and the plan of ``--previous``."""
    load = LoadMatrix([[4, 0, 1], [2, 3, 0]])
    cluster = ms.ClusterSpec(ranks_per_node=2)
    model = ms.ModelShape(hidden_size=8, intermediate_size=8, num_experts=3, top_k=1)
    strategy = ms.Strategy(name="ep", sharding=ms.Ep(slots_per_rank=2), balance=ms.Eplb())
    plan = plan_layer(strategy, model, cluster, load)
    step = StepPlan(strategy, model, cluster, (plan, plan), (plan.layout, plan.layout))

    def attempt(draw: Random) -> None:
        match draw.randrange(6):
            case 0:
                path = folder / "load.npy"
                array = other_counts(draw, load.tokens_RE)
                path.write_bytes(npy(draw, array))
                with refused("load.npy"):
                    assert (read_load(path).tokens_RE == array).all()
            case 1:
                path = folder / "load.csv"
                path.write_bytes(mangled(draw, b"4, 0, 1\n2, 3, 0\n" * draw.choice((1, 1, 5))))
                with refused("load.csv"), warnings.catch_warnings():
                    # Of a file without rows.
                    warnings.simplefilter("ignore", UserWarning)
                    rows = [line.partition(b"#")[0] for line in path.read_bytes().splitlines()]
                    found = read_load(path).tokens_RE.tolist()
                    assert found == [[int(each) for each in row.split(b",")] for row in rows if row.strip()]
            case 2:
                path = folder / "load.json"
                path.write_bytes(json_bytes(draw, draw.choice((load.tokens_RE.tolist(), json.loads(plan.to_json())))))
                with refused("load.json"):
                    found = read_load(path).tokens_RE.tolist()
                    said = json_said(path.read_bytes())
                    assert found == (said["tokens_RE"] if isinstance(said, dict) else said)
            case 3:
                path = folder / "plan.json"
                path.write_bytes(json_bytes(draw, json.loads(plan.to_json())))
                with refused("plan.json"):
                    assert read_layout(path).expert_RS.tolist() == json_said(path.read_bytes())["expert_RS"]
            case 4:
                path = folder / "plan.json"
                path.write_bytes(json_bytes(draw, json.loads(plan.to_json())))
                with refused("no plan of a layer"):
                    said = path.read_bytes().decode("utf-8", "surrogateescape")
                    made = LayerPlan.from_json(said)
                    assert same(json.loads(made.to_json()), json.loads(said))
            case _:
                path = folder / "step.json"
                path.write_bytes(json_bytes(draw, json.loads(step.to_json())))
                with refused("step.json"):
                    made = _step_plan(path)
                    if made is not None:
                        assert same(json.loads(made.to_json()), json_said(path.read_bytes()))

    return attempt


@reader
def blocks_file(folder: Path) -> Attempt:
    path = folder / "blocks.json"
    blocks = json.loads(TileConfigs.all_of(TileConfig()).to_json())

    def attempt(draw: Random) -> None:
        path.write_bytes(json_bytes(draw, blocks))
        with refused("blocks.json"):
            assert same(json.loads(read_blocks(path).to_json()), json_said(path.read_bytes()))
        # The cache of tuned blocks, which is tuned again where it is damaged.
        path.write_bytes(json_bytes(draw, {"a": blocks, "b": blocks}))
        kept = _parse(path)
        assert not kept or kept.keys() == json_said(path.read_bytes()).keys()

    return attempt


@reader
def texts_and_tokens(folder: Path) -> Attempt:
    from tokenizers import Tokenizer, models, pre_tokenizers

    known = Tokenizer(models.WordLevel({"a": 0, "b": 1, "[UNK]": 2}, unk_token="[UNK]"))
    known.pre_tokenizer = pre_tokenizers.Whitespace()
    tree = json.loads(known.to_str())
    tokens, text, tokenizer = folder / "tokens.bin", folder / "text.txt", folder / "tokenizer.json"

    def attempt(draw: Random) -> None:
        text.write_bytes(draw.choice((b"a b c a", mangled(draw, b"a b c"), "é\ud800".encode("utf-8", "surrogatepass"))))
        tokenizer.write_bytes(draw.choice((json.dumps(tree).encode(), json_bytes(draw, tree))))
        tokens.write_bytes(mangled(draw, np.arange(20, dtype=draw.choice(("<u2", "<u4"))).tobytes()))
        vocab_size = draw.choice((3, 20, 300, 70_000))
        paths = draw.choice(([str(tokens)], [str(text)], [str(folder)], [str(text), str(tokens)]))
        with refused("tokens.bin", "text.txt", "tokenizer.json", str(folder)):
            found = load_files(paths, str(tokenizer), vocab_size).tokens_N
            assert not len(found) or 0 <= int(found.long().min()) <= int(found.long().max()) < vocab_size
            if paths == [str(tokens)]:
                wide = np.fromfile(tokens, "<u2" if vocab_size <= 65_536 else "<u4")
                assert found.tolist() == wide.tolist()

    return attempt


@reader
def lock_file(folder: Path) -> Attempt:
    def attempt(draw: Random) -> None:
        (folder / ".lock").write_bytes(mangled(draw, b"process 3 on host"))
        with FolderLock(folder), refused(folder.name):
            held = (folder / ".lock").read_bytes()
            (folder / ".lock").write_bytes(mangled(draw, held))
            FolderLock(folder)
            raise AssertionError("two have the lock")

    return attempt


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def print_on_terminal() -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "argv", ["moesys", "--help"])
        printed_by(main)
    print_full(Table("a", "b"), ["note"], Terminal())


VALUES = ("", "0", "1", "-1", "2", "x", "2.0", " 3", "²", "1e3", "9" * 5000, "0x2", "٣", "~", "\x1b", "/dev/full/x")
SHAPE_CLASS = ShapeClass(8, 8, 4, 2, "silu", "float32", 1)
# Variables that launchers and people set, and what reads them.
VARIABLES: list[tuple[tuple[str, ...], Callable[[], Any]]] = [
    (("LOCAL_WORLD_SIZE",), lambda: cluster_of_ranks(8, "cpu")),
    (("RANK", "WORLD_SIZE"), lambda: check_ranks(5, "cpu")),
    (("RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE"), lambda: place_for(lab_cases.experiment(), 1)),
    (("LOCAL_RANK",), lambda: device_of("cuda", 0)),
    (("COLUMNS", "LINES", "TERM"), print_on_terminal),
    (("MOESYS_BLOCKS",), lambda: blocks_of(SHAPE_CLASS, torch.device("cpu"))),
    (("MOESYS_CACHE", "XDG_CACHE_HOME"), lambda: cache_file(Gpu("a gpu", 8, 90))),
    (("XDG_CACHE_HOME", "NUMBA_CACHE_DIR"), lambda: cache_dir(Path(ms.balance.__file__).parent)),
]


@reader
def variable(folder: Path) -> Attempt:
    def attempt(draw: Random) -> None:
        names, read = draw.choice(VARIABLES)
        with pytest.MonkeyPatch.context() as patch, refused(*names, "device=", "torchrun"):
            for name in names:
                patch.setenv(name, draw.choice(VALUES))
            read()

    return attempt


# --- faults that were found ----------------------------------------------------------------------------------------

DEEP = "[" * 100_000 + "]" * 100_000
LIE = npy(Random(0), np.zeros(1, np.int64)).replace(b"(1,), }         ", b"(99999999999,), }")
LINE = vars(Entry.about(lab_cases.EP, "measured", "seed 0", 1.0))
SETTING = {"model": "a"}
MODEL = {"model_type": "olmoe", "num_hidden_layers": 10**12}


def written(folder: Path, name: str, text: str | bytes | list[Any] | dict[str, Any]) -> Path:
    path = folder / name
    text = text if isinstance(text, str | bytes) else json.dumps(text)
    path.write_bytes(text.encode("utf-8", "surrogateescape") if isinstance(text, str) else text)
    return path


def megatron(folder: Path, **fields: Any) -> Trace:
    record = {"step": 1, "block": "decoder", "layer": 0, "topk": 2, "top_indices": [[0, 1]]}
    written(folder, "router_trace_rank0.jsonl", record | fields)
    return megatron_trace(folder, 4)


def journal(folder: Path, head: Any, *lines: Any) -> TuneJournal:
    text = "".join((line if isinstance(line, str) else json.dumps(line)) + "\n" for line in (head, *lines))
    return TuneJournal(written(folder, "journal.jsonl", text), SETTING)


def planned(predictor: Any, **fields: Any) -> None:
    """Loads a state with changed ``fields`` of its history."""
    cluster = ms.ClusterSpec(ranks_per_node=2)
    strategy = lab_cases.FSEP.replace(balance=ms.Eplb(), predictor=predictor)
    schedule = LayoutSchedule(0, strategy, lab_cases.MODEL, cluster)
    schedule.observe(LoadMatrix([[1, 2, 3, 4], [4, 3, 2, 1]]))
    state = schedule.state_dict(0.0)
    if isinstance(memory := fields.get("memory"), dict):
        fields["memory"] = state["history"]["memory"] | memory
    state["history"] |= fields
    schedule.load_state_dict(state)


def tokens_of_lines(folder: Path, *counts: tuple[int, ...]) -> None:
    lines = [replace(watch_cases.step_line(step, [0]), step=step) for step in range(len(counts))]
    layers = [replace(line.layers[0], tokens_E=tokens_E) for line, tokens_E in zip(lines, counts, strict=True)]
    watch_cases.write_lines(folder, [replace(line, layers=(layer,)) for line, layer in zip(lines, layers, strict=True)])
    read_watched_run(folder)


def with_tokenizer(folder: Path) -> None:
    from tokenizers import Tokenizer, models

    Tokenizer(models.WordLevel({"a": 0}, unk_token="[UNK]")).save(str(folder / "tokenizer.json"))
    load_files([str(written(folder, "text.txt", "b"))], str(folder / "tokenizer.json"), 3)


def fewer_layers_than_none(folder: Path) -> None:
    small_checkpoint(folder)
    config = json.loads((folder / "one" / "config.json").read_text())
    written(folder / "one", "config.json", config | {"num_hidden_layers": -1})
    converted(folder / "one", folder / "out")


def expert_of_no_number(folder: Path) -> None:
    small_checkpoint(folder)
    path = folder / "one" / "model.safetensors"
    tensors = {name.replace("experts.0", "experts.-1"): tensor for name, tensor in load_file(path).items()}
    save_file(tensors, path, {"format": "pt"})
    converted(folder / "one", folder / "out")


def load_layer(tensors: dict[str, Any]) -> None:
    layer = ms.MoELayer(lab_cases.MODEL, lab_cases.EP)
    layer.load_full_state_dict(layer.full_state_dict() | tensors)


def overlapping_spans(folder: Path) -> None:
    written(folder, "spans-0000.json", [["a", 0.0, 2.0, "k", ""], ["a", 1.0, 3.0, "k", ""]])
    read_spans(folder)


FOUND: list[tuple[Callable[[Path], object], str]] = [
    (lambda _: LayerPlan.from_json(DEEP), "the text is no plan of a layer: "),
    (lambda _: LayerPlan.from_json('{"turn": 0}'), "no plan of a layer: num_experts is missing"),
    (lambda _: StepPlan.from_json("[]"), "no plan of a step: "),
    (lambda folder: _step_plan(written(folder, "step.json", DEEP)), r"step\.json is no StepPlan and no experiment"),
    (lambda folder: read_layout(written(folder, "plan.json", DEEP)), r"plan\.json: the text is no plan of a layer"),
    (
        lambda folder: read_load(written(folder, "load.npy", LIE)),
        r"load\.npy: it is no array of \.npy: .* its head says",
    ),
    (lambda folder: read_load(written(folder, "load.json", DEEP)), r"load\.json is not JSON"),
    (
        lambda _: ExpertLayout(np.array([[2**64 - 1, 0]], np.uint64), 1),
        "expert_RS has 18446744073709551615; use integers below",
    ),
    (lambda _: LoadMatrix(np.array([[2**63, 0]], np.uint64)), "tokens_RE has 9223372036854775808; use integers below"),
    (lambda _: LoadMatrix([[1], [1, 2]]), "tokens_RE: rank 0 has 1 of 2 entries$"),
    (lambda _: ExpertLayout([[0, 1], [1]], 2), "expert_RS: rank 1 has 1 of 2 entries; fill the row with -1"),
    (
        lambda folder: megatron(folder, step=1.5),
        r"line 1 of .*rank0\.jsonl holds no routing: step=1.5 is no whole number",
    ),
    (lambda folder: megatron(folder, layer=True), "layer=True is no whole number"),
    (lambda folder: megatron(folder, top_indices=[[2**64 - 1, 2**64 - 2]]), r"a token has 18446744073709551615; use"),
    (lambda folder: megatron(folder, top_indices=[], topk=7), r"test_.*: top_k=7 does not fit 4 experts"),
    (
        lambda folder: vllm_trace(
            written(folder, "x.jsonl", {"choices": [{"routed_experts": base64.b64encode(LIE).decode()}]}), 4, 1, 1
        ),
        r"line 1 of .*x\.jsonl holds no routing: it is no array of \.npy: .* its head says shape \(99999999999,\)",
    ),
    (lambda folder: journal(folder, {"schema": 1, "setting": [1]}), "is no journal of a tuning"),
    (lambda folder: journal(folder, DEEP), "is no journal of a tuning"),
    (
        lambda folder: journal(folder, {"schema": 1, "setting": SETTING}, LINE | {"fingerprint": []}),
        "line 2.*fingerprint",
    ),
    (
        lambda folder: journal(folder, {"schema": 1, "setting": SETTING}, LINE | {"steps_ms": {"0": ["x"]}}),
        "steps_ms.0.0",
    ),
    (lambda folder: journal(folder, {"schema": 1, "setting": SETTING}, DEEP), "line 2 of .* is no entry of a tuning"),
    (lambda _: Space.from_toml(f"overlap = {DEEP}"), "nested too deeply"),
    (lambda _: TileConfigs.from_json(DEEP), "these are no blocks"),
    (lambda _: balance_of('{"kind": "\udc80"}'), "balance=.* is not JSON"),
    (lambda _: named_planner(f'{{"kind": {DEEP}}}'), "planner=.* is not JSON"),
    (lambda _: named_planner("a\0b.py:Own"), "planner=.* is not a file"),
    (
        lambda folder: ms.ModelSpec.from_config(written(folder, "c.json", MODEL)),
        "num_hidden_layers=1000000000000; use at",
    ),
    (
        lambda folder: ms.ModelSpec.from_config(MODEL | {"num_hidden_layers": 3, "mlp_layer_types": ["sparse"]}),
        "num_hidden_layers=3 and 1 mlp_layer_types; give one a layer",
    ),
    (lambda folder: ms.ModelSpec.from_config(written(folder, "c.json", DEEP)), r"c\.json is not JSON"),
    (lambda _: ms.ModelSpec.from_config("a\0b"), "cannot read"),
    (lambda _: load_layer({"gate.weight": None}), "gate.weight is of NoneType; give a tensor"),
    (
        lambda _: load_layer({"gate.weight": torch.zeros(4, 16, dtype=torch.complex64)}),
        "gate.weight is of torch.complex64",
    ),
    (lambda _: ms.MoELayer(lab_cases.MODEL, lab_cases.EP).experts.set_extra_state("[]"), "none of a layer's experts"),
    (lambda _: planned(ms.Last(), shape=[3, 4]), "the state of layer 0 is damaged: history is of loads of shape"),
    (lambda _: planned(ms.Last(), memory=[[[1, 2, 3, 4]]]), "the state of a load history is damaged"),
    (lambda _: planned(ms.Ema(), memory={"weight": -1}), "the state of a load history is damaged: .*weight=-1"),
    (lambda _: planned(ms.Ema(), memory={"mean": [[-1, 2, 3, 4], [1, 2, 3, 4]]}), "load history is damaged"),
    (lambda _: planned(ms.Adaptive(), memory={"errors": [0.5]}), "load history is damaged: .*errors are"),
    (lambda folder: tokens_of_lines(folder, (1, 2, 3), (1,)), r"rank-0000\.jsonl: step 1 has 1 experts in layer 0"),
    (
        lambda _: ms.Ep(slot_gb_per_rank=1e308),
        "slot_gb_per_rank.*less than or equal to 1000000000",
    ),
    (overlapping_spans, r"spans-0000\.json has no spans of a rank: spans overlap"),
    (with_tokenizer, "tokenizer=.* does not encode .*text.txt"),
    (fewer_layers_than_none, "num_hidden_layers=-1"),
    (expert_of_no_number, "belongs to expert 1, and no file has expert 0"),
]


@pytest.mark.parametrize(("read", "message"), FOUND, ids=lambda value: value[:40] if isinstance(value, str) else None)
def test_what_was_once_believed_is_refused_by_name(
    read: Callable[[Path], object], message: str, tmp_path: Path
) -> None:
    with memory_limit(MOST_BYTES), time_limit(MOST_SECONDS), pytest.raises(ValueError, match=message):
        read(tmp_path)


@pytest.mark.parametrize(
    ("variables", "read", "message"),
    [
        ({"LOCAL_WORLD_SIZE": "x"}, lambda: cluster_of_ranks(8, "cpu"), "LOCAL_WORLD_SIZE='x' is no number"),
        ({"RANK": "0", "WORLD_SIZE": ""}, lambda: check_ranks(5, "cpu"), "WORLD_SIZE='' is no number"),
        ({"RANK": "0", "WORLD_SIZE": "²"}, lambda: place_for(lab_cases.experiment(), 1), "WORLD_SIZE='²' is no number"),
        ({"RANK": "2", "WORLD_SIZE": "2"}, TorchrunRanks, "RANK=2 is not one of WORLD_SIZE=2 ranks"),
        ({"RANK": "-1", "WORLD_SIZE": "2"}, TorchrunRanks, "RANK='-1' is no number"),
    ],
)
def test_variables_that_are_no_numbers_are_named(
    variables: dict[str, str], read: Callable[[], object], message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(ValueError, match=message):
        read()


@pytest.mark.parametrize("columns", ["²", "9" * 5000, "0"])
def test_a_width_that_is_none_does_not_end_a_command(columns: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", columns)
    print_on_terminal()


def test_damage_that_needs_no_refusal_is_passed_over(tmp_path: Path) -> None:
    from transformers.trainer import TRAINER_STATE_NAME

    from moesys.hf.trainer import _has_state

    assert "torch" not in replace(ENVIRONMENT, packages={}).machine_line
    assert _parse(written(tmp_path, "blocks.json", DEEP)) == {}
    written(tmp_path, TRAINER_STATE_NAME, DEEP)
    assert not _has_state(str(tmp_path))


def test_control_characters_of_spans_do_not_reach_the_page(tmp_path: Path) -> None:
    watch_cases.write_run(tmp_path, 1, 1)
    written(tmp_path, "spans-0000.json", [["a", 0.0, 2.0, "k\0", "d\0"]])
    with warnings.catch_warnings():
        # Of characters that a font does not have.
        warnings.simplefilter("ignore", UserWarning)
        page = watch_page(read_watched_run(tmp_path))
    assert "\0" not in page
    assert "d\\x00" in page


def test_a_trace_without_iterations_is_not_numbered(tmp_path: Path) -> None:
    header = np.array(json.dumps({"version": 1, "top_k": 2, "name": "", "meta": {}}))
    np.savez(tmp_path / "trace.npz", header=header, tokens_SLRE=TRACE.tokens_SLRE, iterations_S=np.zeros(0, int))
    with pytest.raises(ValueError, match=r"trace\.npz is no trace: its top_k or iterations are no whole numbers"):
        load_trace(tmp_path / "trace.npz")
