"""A watched training: what stands in its lines is what the layers did, on every rank and over crashes."""

from __future__ import annotations

import json
import math
import resource
import shutil
import signal
import warnings
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import nn

import moesys as ms
from moesys.balance.layout_schedule import PlanEvent
from moesys.lab.ranks.pool import LocalRanks
from moesys.lab.runs.watched_run import read_watched_run
from moesys.step_lines import step_journal

H, NUM_RANKS, MICRO_BATCHES = 16, 2, 3
SHAPE = ms.ModelShape(hidden_size=H, intermediate_size=16, num_experts=6, top_k=2)
FSEP = ms.Strategy(name="fsep", sharding=ms.Fsep(slots_per_rank=4), balance=ms.Greedy(), split=ms.FlowSplit())
EP = ms.Strategy(name="ep")


def two_layers(strategy: ms.Strategy) -> nn.Module:
    return nn.Sequential(*(ms.MoELayer(SHAPE, strategy, layer_index=index) for index in range(2)))


def lines_of(folder: Path, rank: int = 0) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / f"rank-{rank:04d}.jsonl").read_text().splitlines()]


def x_of(step: int, micro_batch: int, rank: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(1000 * step + 10 * micro_batch + rank)
    return torch.randn(24, H, generator=generator) + torch.arange(H) / H


Plans = list[list[dict[int, ms.planning.LayerPlan]]]
Logged = list[tuple[int, dict[str, float]]]


def train_watched(folder: Path, strategy: ms.Strategy, checkpointed: bool) -> tuple[Plans, Logged]:
    """Three steps, and an evaluation after each. Returns plans by step, micro-batch and layer, and what was logged."""
    model = two_layers(strategy)
    runtime = ms.link(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, foreach=False)
    plans: Plans = []
    logged: Logged = []
    with ms.Watch(model, folder, log=lambda numbers, step: logged.append((step, numbers))) as watch:
        for step in range(3):
            plans.append([])
            for micro_batch in range(MICRO_BATCHES):
                x = x_of(step, micro_batch, dist.get_rank())
                if checkpointed:
                    y = torch.utils.checkpoint.checkpoint(model, x, use_reentrant=False, context_fn=ms.recompute)
                else:
                    y = model(x)
                y.square().mean().backward()
                plans[-1].append({layer.experts.layer_index: layer.last_plan for layer in model})
            ms.sync_gradients(model)
            optimizer.step()
            optimizer.zero_grad()
            watch.step(loss=y.square().mean(), broken=float("nan"))
            with torch.no_grad():
                model.eval()(x)
            model.train()
            watch.begin()
    runtime.close()
    return plans, logged


@pytest.mark.parametrize(
    ("strategy", "checkpointed"),
    [(EP, False), pytest.param(FSEP, False, marks=pytest.mark.slow), (FSEP, True)],
    ids=["ep", "fsep", "fsep recomputed"],
)
def test_lines_say_what_plans_were(ranks: LocalRanks, tmp_path: Path, strategy: Any, checkpointed: bool) -> None:
    """And rank 0 logs their numbers."""
    of_ranks = ranks.run(train_watched, tmp_path, strategy, checkpointed, num_ranks=NUM_RANKS)
    for rank, (plans, logged) in enumerate(of_ranks):
        lines = lines_of(tmp_path, rank)
        assert [step for step, _ in logged] == ([] if rank else [0, 1, 2])
        for (_, numbers), line in zip(logged, lines, strict=rank == 0):
            assert {type(number) for number in numbers.values()} == {float}
            assert (numbers["step_ms"], numbers["loss"]) == (line["step_ms"], line["numbers"]["loss"])
            assert numbers["load_p95/layer_01"] == line["layers"][1]["load_p95"]
        assert [(line["step"], line["num_ranks"]) for line in lines] == [(0, 2), (1, 2), (2, 2)]
        for line, micro_batches in zip(lines, plans, strict=True):
            assert line["numbers"]["loss"] > 0
            assert line["numbers"]["broken"] is None
            assert [layer["layer"] for layer in line["layers"]] == [0, 1]
            for layer in line["layers"]:
                step_plans = [by_layer[layer["layer"]] for by_layer in micro_batches]
                over_mean = [plan.tokens.max_over_mean for plan in step_plans]
                tokens_E = sum(plan.load.tokens_E for plan in step_plans)
                assert layer["micro_batches"] == MICRO_BATCHES
                assert layer["load_p50"] == round(sorted(over_mean)[1], 6)
                assert layer["load_p95"] == round(float(np.percentile(over_mean, 95)), 6)
                assert layer["load_max"] == round(max(over_mean), 6)
                assert layer["experts_without_tokens"] == (tokens_E == 0).sum()
                assert layer["tokens_E"] == (tokens_E.tolist() if rank == 0 else [])
                assert sum(tokens_E) == NUM_RANKS * MICRO_BATCHES * 24 * SHAPE.top_k
                assert layer["exposed_ms"] > 0
                assert (layer["restored_mib"] > 0) == (strategy is FSEP)


def train_with_a_fault(folder: Path, place: str, value: float) -> None:
    """Four steps, of which Watch writes every other one. In the second one, rank 1 has ``value`` in layer 1."""
    model = two_layers(EP)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, foreach=False)

    def spoil(tensor: torch.Tensor) -> torch.Tensor:
        spoilt = tensor.clone()
        spoilt[3, 2] = value
        return spoilt

    with ms.Watch(model, folder, every=2) as watch:
        for step in range(4):
            here = step == 1 and dist.get_rank() == 1
            if here and place == "the parameters of experts":
                with torch.no_grad():
                    model[1].experts.masters.to_local()[0, 0] = value
            x = model[0](x_of(step, 0, dist.get_rank()))
            y = model[1](spoil(x) if here and place == "the input" else x)
            if here and place == "the gradient of the output":
                y.register_hook(spoil)
            y.square().mean().backward()
            ms.sync_gradients(model)
            optimizer.step()
            optimizer.zero_grad()
            watch.step()


@pytest.mark.parametrize(
    ("place", "value"),
    [
        *(("the input", math.nan), ("the input", -math.inf)),
        *(("the parameters of experts", math.nan), ("the gradient of the output", -math.inf)),
    ],
)
def test_the_first_layer_and_rank_with_nan_or_infinity_are_named(
    ranks: LocalRanks, tmp_path: Path, place: str, value: float
) -> None:
    ranks.run(train_with_a_fault, tmp_path, place, value, num_ranks=2)
    of_ranks = [[event for line in lines_of(tmp_path, rank) for event in line["events"]] for rank in range(2)]
    # Each rank writes one event, although all later steps are not finite either.
    assert [len(events) for events in of_ranks] == [1, 1]
    assert of_ranks[1] == [{"layer": 1, "micro_batch": 1, "what": f"rank 1: NaN or infinity in {place}"}]
    assert of_ranks[0][0]["what"].startswith("rank 0: NaN or infinity in ")
    events = read_watched_run(tmp_path).events
    assert {event.event.what for event in events} == {event["what"] for events in of_ranks for event in events}


# --- one rank -------------------------------------------------------------------------------------------------


def step_of(model: nn.Module, num_micro_batches: int = 1) -> None:
    for micro_batch in range(num_micro_batches):
        model(x_of(0, micro_batch, 0)).sum().backward()


def test_a_layer_that_did_not_run_is_not_in_the_line(tmp_path: Path) -> None:
    model = two_layers(EP)
    with ms.Watch(model, tmp_path) as watch:
        model[1](x_of(0, 0, 0)).sum().backward()
        watch.step()
    assert [layer["layer"] for layer in lines_of(tmp_path)[0]["layers"]] == [1]


def test_every_so_many_steps_one_is_written_with_all_events_since_the_last(tmp_path: Path) -> None:
    model = two_layers(EP)
    with ms.Watch(model, tmp_path, every=2) as watch:
        for step in range(5):
            step_of(model, num_micro_batches=step + 1)
            if step in (1, 3):
                model[1].experts.schedule.events.append(PlanEvent(1, step, f"late at {step}"))
            watch.step(loss=step)
    lines = lines_of(tmp_path)
    assert [(line["step"], line["layers"][0]["micro_batches"]) for line in lines] == [(0, 1), (2, 3), (4, 5)]
    assert [line["numbers"] for line in lines] == [{"loss": 0.0}, {"loss": 2.0}, {"loss": 4.0}]
    found = [line["events"] for line in lines_of(tmp_path)]
    told = [[{"layer": 1, "micro_batch": step, "what": f"late at {step}"}] for step in (1, 3)]
    assert found == [[], *told]


def test_a_resumed_run_appends_behind_whole_lines(tmp_path: Path) -> None:
    model = two_layers(EP)
    path = tmp_path / "rank-0000.jsonl"
    with ms.Watch(model, tmp_path) as watch:
        for _ in range(3):
            step_of(model)
            watch.step()
            # On the disk of a process that dies now.
            assert path.read_bytes().endswith(b"\n")
    whole = path.read_bytes()
    path.write_bytes(whole + whole[: len(whole) // 2 + 7])
    assert [line.step for line in step_journal(path).read()][:3] == [0, 1, 2]
    with ms.Watch(model, tmp_path) as watch:
        step_of(model)
        watch.step()
        step_of(model)
        watch.step(1)
        step_of(model)
        watch.step()
    steps = [line["step"] for line in lines_of(tmp_path)]
    assert steps[:3] == [0, 1, 2]
    assert steps[-3:] == [steps[-4] + 1, 1, 2]


def test_lines_survive_a_round_trip_and_long_ones_are_gone_on_from(tmp_path: Path) -> None:
    model = two_layers(EP)
    with ms.Watch(model, tmp_path) as watch:
        step_of(model)
        watch.step(7, loss=1.5, lost=math.inf, **{"x" * 300_000: 1.0})
    journal = step_journal(tmp_path / "rank-0000.jsonl")
    (line,) = journal.read()
    assert journal.to_line(line) == (tmp_path / "rank-0000.jsonl").read_bytes()
    assert math.isnan(line.numbers["lost"])
    with ms.Watch(model, tmp_path) as watch:
        watch.step()
    assert lines_of(tmp_path)[-1]["step"] == 8


def test_what_is_watched_already_is_refused(tmp_path: Path) -> None:
    model = two_layers(EP)
    with ms.Watch(model, tmp_path), pytest.raises(ValueError, match="watched already; close its Watch first"):
        ms.Watch(model, tmp_path)


def test_a_folder_has_one_watch_of_a_rank(tmp_path: Path) -> None:
    # A killed writer leaves the file of its lock.
    (tmp_path / ".rank-0000.lock").write_text("process 1 on elsewhere")
    first, second = two_layers(EP), two_layers(EP)
    with ms.Watch(first, tmp_path), pytest.raises(ValueError, match=rf"{tmp_path} is being written by process \d+ on "):
        ms.Watch(second, tmp_path)
    assert second[0].experts.load_log is None
    watch = ms.Watch(second, tmp_path)
    # One that is dropped keeps no other from the folder.
    del watch
    with ms.Watch(first, tmp_path) as watch:
        step_of(first)
        watch.step()
    assert len(lines_of(tmp_path)) == 1
    assert not list(tmp_path.glob(".*"))


def test_errors_name_the_file_and_the_way_out(tmp_path: Path) -> None:
    model = two_layers(EP)
    (tmp_path / "file").touch()
    with pytest.raises(ValueError, match=r"/file is a file; give a folder for the steps, or remove it"):
        ms.Watch(model, tmp_path / "file")
    (tmp_path / "rank-0000.jsonl").write_text("[1]\n")
    whole = r"the last line of .*/rank-0000\.jsonl is not a step of a training: .*; delete the line"
    with pytest.raises(ValueError, match=whole):
        ms.Watch(model, tmp_path)
    (tmp_path / "rank-0000.jsonl").unlink()
    with ms.Watch(model, tmp_path) as watch, pytest.raises(ValueError, match=r"loss=tensor.* is no number; give one"):
        watch.step(loss=torch.ones(2))


def test_a_full_disk_is_a_warning_and_the_lines_around_it_are_whole(tmp_path: Path) -> None:
    model = two_layers(EP)
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    handler = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    try:
        with ms.Watch(model, tmp_path) as watch:
            watch.step(loss=1.0)
            path = tmp_path / "rank-0000.jsonl"
            resource.setrlimit(resource.RLIMIT_FSIZE, (path.stat().st_size + 20, limits[1]))
            with pytest.warns(UserWarning, match=f"are missing in {tmp_path}: .*disk may be full"):
                watch.step(loss=2.0)
            resource.setrlimit(resource.RLIMIT_FSIZE, limits)
            watch.step(loss=3.0)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
        signal.signal(signal.SIGXFSZ, handler)
    assert [line["numbers"]["loss"] for line in lines_of(tmp_path)] == [1.0, 3.0]


def test_a_folder_that_is_removed_is_a_warning(tmp_path: Path) -> None:
    with ms.Watch(two_layers(EP), tmp_path / "watched") as watch:
        watch.step()
        shutil.rmtree(tmp_path / "watched")
        with pytest.warns(UserWarning, match="steps of the training are missing"):
            watch.step()


def test_an_error_of_the_callable_is_one_warning(tmp_path: Path) -> None:
    def log(numbers: dict[str, float], step: int) -> None:
        raise ConnectionError("no route")

    model = two_layers(EP)
    with ms.Watch(model, tmp_path, log=log) as watch, warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter("always")
        for _ in range(3):
            step_of(model)
            watch.step()
    (warning,) = warned
    assert str(warning.message).startswith("log raised ConnectionError in step 0: no route; ")
    assert len(lines_of(tmp_path)) == 3


def test_a_backward_in_evaluation_mode_warns_where_something_would_follow_the_load(tmp_path: Path) -> None:
    """Models of ``from_pretrained`` are in evaluation mode until ``train()``."""
    shape = ms.ModelShape(hidden_size=16, intermediate_size=8, num_experts=4, top_k=2)
    follows = ms.Strategy(name="follows", sharding=ms.Ep(slots_per_rank=4), balance=ms.Greedy(), split=ms.FlowSplit())
    still = ms.Strategy(name="still")

    def warned(strategy: ms.Strategy, training: bool, watched: bool = False, frozen: bool = False) -> int:
        layer = ms.MoELayer(shape, strategy).train(training)
        layer.requires_grad_(not frozen)
        with ExitStack() as opened, warnings.catch_warnings(record=True) as found:
            warnings.simplefilter("always")
            if watched:
                opened.enter_context(ms.Watch(layer, tmp_path))
            layer(torch.randn(5, 16, requires_grad=True)).sum().backward()
        return sum("layer 0 trains in evaluation mode" in str(each.message) for each in found)

    assert warned(follows, training=False) == warned(still, training=False, watched=True) == 1
    assert warned(follows, training=True) == warned(still, training=False) == 0
    assert warned(follows, training=False, frozen=True) == 0
