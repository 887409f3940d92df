"""Declarations, options, plans, blocks, texts, locks and variables, damaged and forged."""

from __future__ import annotations

import io
import json
import sys
import warnings
from collections.abc import Callable
from pathlib import Path
from random import Random
from typing import Any

import lab_cases
import numpy as np
import pytest
import torch
from mutated_inputs import (
    DEEP,
    Attempt,
    Reader,
    check_refusal,
    every_reader,
    faults,
    json_bytes,
    json_or_toml,
    json_said,
    mangled,
    npy,
    other_counts,
    printed_by,
    refused,
    same,
    written,
)
from rich.table import Table

import moesys as ms
from benchmarks.leaderboard.planners import named_planner
from moesys.__main__ import main
from moesys.balance.plan import LayerPlan, StepPlan, plan_layer
from moesys.compiled import code_folders
from moesys.config.model_spec import published_names, read_config
from moesys.files import FolderLock
from moesys.kernels.experts.tile_config import ShapeClass, TileConfig, TileConfigs
from moesys.kernels.experts.tile_tuner import Gpu, blocks_of, cache_file, kept_blocks, read_blocks
from moesys.lab.commands.calibrate import check_ranks
from moesys.lab.commands.plan_load import read_layout, read_load
from moesys.lab.commands.whole_model import named_strategy, parallelism_of
from moesys.lab.ranks.process import device_of
from moesys.lab.ranks.torchrun_ranks import TorchrunRanks
from moesys.lab.runs.declarations import balance_of, cluster_of, declared_in, predictor_of, split_of
from moesys.lab.runs.places import place_for
from moesys.lab.runs.slurm import Slurm, slurm_of
from moesys.lab.show.sheets import print_full
from moesys.lab.train.text import load_files
from moesys.load import LoadMatrix
from moesys.moe.arguments import cluster_of as cluster_of_ranks
from moesys.tuner.space import Space

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
    model = ms.models.ModelSpec.from_config("olmoe-1b-7b")
    model = model.replace(layers=model.layers[:2])
    cluster = ms.presets.h100(2)
    training = ms.models.ModelTraining(model="olmoe-small")
    return [
        *(strategy, mega, cluster, model, lab_cases.experiment(strategies=(strategy, mega))),
        ms.models.ModelRun(model=model, cluster=cluster, strategy=strategy.replace(sharding=ms.Fsep(slots_per_rank=8))),
        *(lab_cases.experiment(workload=training, model=training.shape), lab_cases.simulated()),
        Slurm(partition="gpu", further={"a": "b"}),
        Space({"sharding": ("ep", "fsep"), "sharding.fsep.slots_per_rank": (2, 3), "split": ("even", strategy.split)}),
    ]


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
    (slurm_of, ("partition=gpu,time=120", "time=12,mem_gb=3.5", "slurm.json")),
    (parallelism_of, ("tp=2,pp=8,vp=4,ep=32,recompute=full", "cp=1")),
    (named_strategy, ("ep", "fsep:3", "laer:2", "strategy.toml")),
    (named_planner, ('{"kind": "greedy"}', "moesys.balance.greedy.greedy:Greedy", "planner.py:Own")),
]


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


def model_config(folder: Path) -> Attempt:
    path = folder / "config.json"
    configs = [read_config(name) for name in published_names()]

    def attempt(draw: Random) -> None:
        path.write_bytes(json_bytes(draw, draw.choice(configs)))
        with refused("config.json"):
            found = ms.models.ModelSpec.from_config(path)
            said = json_said(path.read_bytes())
            assert same(found.hidden_size, said.get("hidden_size", found.hidden_size))
            assert same(found.vocab_size, said.get("vocab_size", found.vocab_size))
            assert found.num_layers == said.get("num_hidden_layers", found.num_layers)
            assert ms.models.ModelSpec.from_json(found.to_json()) == found
        with refused("config.json"):
            workload = ms.models.ModelTraining(model=str(path))
            assert json.loads(workload.config) == json_said(path.read_bytes())
            assert workload.num_layers <= json_said(path.read_bytes())["num_hidden_layers"]

    return attempt


# --- plans, blocks, texts, locks and variables ---------------------------------------------------------------------


def load_file_of_plan(folder: Path) -> Attempt:
    """The matrix that ``moesys plan --load`` reads, and the plan of ``--previous``."""
    load = LoadMatrix([[4, 0, 1], [2, 3, 0]])
    cluster = ms.ClusterSpec(ranks_per_node=2)
    model = ms.ModelShape(hidden_size=8, intermediate_size=8, num_experts=3, top_k=1)
    strategy = ms.Strategy(name="ep", sharding=ms.Ep(slots_per_rank=2), balance=ms.Eplb())
    plan = plan_layer(strategy, model, cluster, load)
    step = StepPlan(strategy, model, cluster, (plan, plan))
    of_layer, of_step = json.loads(plan.to_json()), json.loads(step.to_json())

    def said_in(path: Path) -> Any:
        return json_said(path.read_bytes())

    def has_matrix(path: Path) -> bool:
        found, said = read_load(path).tokens_RE.tolist(), said_in(path)
        return found == (said["tokens_RE"] if isinstance(said, dict) else said)

    def is_whole(found: LayerPlan | StepPlan, path: Path) -> bool:
        return same(json.loads(found.to_json()), said_in(path))

    def text_in(path: Path) -> str:
        return path.read_bytes().decode("utf-8", "surrogateescape")

    files: list[tuple[str, Any, Callable[[Path], bool]]] = [
        *(("load.json", tree, has_matrix) for tree in (load.tokens_RE.tolist(), of_layer)),
        ("plan.json", of_layer, lambda path: read_layout(path).expert_RS.tolist() == said_in(path)["expert_RS"]),
        ("plan of a layer", of_layer, lambda path: is_whole(LayerPlan.from_json(text_in(path)), path)),
        ("plan of a step", of_step, lambda path: is_whole(StepPlan.from_json(text_in(path)), path)),
    ]

    def attempt(draw: Random) -> None:
        match draw.randrange(6):
            case 0:
                path, array = folder / "load.npy", other_counts(draw, load.tokens_RE)
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
                    assert read_load(path).tokens_RE.tolist() == [
                        [int(each) for each in row.split(b",")] for row in rows if row.strip()
                    ]
            case _:
                name, tree, is_read = draw.choice(files)
                path = folder / name
                path.write_bytes(json_bytes(draw, tree))
                with refused(name):
                    assert is_read(path)

    return attempt


def blocks_file(folder: Path) -> Attempt:
    path = folder / "blocks.json"
    blocks = json.loads(TileConfigs.all_of(TileConfig()).to_json())

    def attempt(draw: Random) -> None:
        path.write_bytes(json_bytes(draw, blocks))
        with refused("blocks.json"):
            assert same(json.loads(read_blocks(path).to_json()), json_said(path.read_bytes()))
        # The cache of tuned blocks, which is tuned again where it is damaged.
        path.write_bytes(json_bytes(draw, {"a": blocks, "b": blocks}))
        kept = kept_blocks(path)
        assert not kept or kept.keys() == json_said(path.read_bytes()).keys()

    return attempt


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
    (
        ("XDG_CACHE_HOME", "NUMBA_CACHE_DIR", "TMPDIR", "HOME"),
        lambda: code_folders.__wrapped__(Path(ms.balance.__file__).parent),
    ),
]


def variable(folder: Path) -> Attempt:
    def attempt(draw: Random) -> None:
        names, read = draw.choice(VARIABLES)
        with pytest.MonkeyPatch.context() as patch, refused(*names, "device=", "torchrun"):
            for name in names:
                patch.setenv(name, draw.choice(VALUES))
            read()

    return attempt


@every_reader(declaration, option, model_config, load_file_of_plan, blocks_file, texts_and_tokens, lock_file, variable)
def test_what_others_wrote_is_read_rightly_or_refused(reader: Reader, seeds: range, tmp_path: Path) -> None:
    assert not faults(reader, seeds, tmp_path)


# --- faults that were found -----------------------------------------------------------------------------------------


def with_tokenizer(folder: Path) -> None:
    from tokenizers import Tokenizer, models

    Tokenizer(models.WordLevel({"a": 0}, unk_token="[UNK]")).save(str(folder / "tokenizer.json"))
    load_files([str(written(folder, "text.txt", "b"))], str(folder / "tokenizer.json"), 3)


def test_a_text_that_a_tokenizer_cannot_encode_is_named(tmp_path: Path) -> None:
    check_refusal(with_tokenizer, "tokenizer=.* does not encode .*text.txt", tmp_path)


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
def test_variables_that_are_no_numbers_are_named(variables, read, message, monkeypatch):
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(ValueError, match=message):
        read()


@pytest.mark.parametrize("columns", ["²", "9" * 5000, "0"])
def test_a_width_that_is_none_does_not_end_a_command(columns: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", columns)
    print_on_terminal()


def test_damaged_blocks_that_are_kept_are_none(tmp_path: Path) -> None:
    assert kept_blocks(written(tmp_path, "blocks.json", DEEP)) == {}
