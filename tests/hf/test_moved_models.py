"""transformers' models whose experts move home: trained as one process trains them, saved and resumed at any homes."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import test_parallelize
import torch
import torch.distributed.checkpoint as dcp
from conftest import assert_equal
from hf_models import drawn, lent, loaded, text, under_torchrun
from safetensors.torch import load_file
from test_parallelize import alone, assert_as_alone, steps
from test_resumable_trainer import trainer_of
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.tensor import DTensor
from transformers import TrainerCallback

import moesys as ms
from moesys.hf.convert import convert
from moesys.lab.ranks.pool import LocalRanks
from moesys.moe.experts import experts_of

# Uneven on four ranks, in groups of two, and over the copies of such a group.
EXPERTS = 10
EP = ms.Strategy(name="ep")
GROUPS = (2, 2)


def made(strategy: ms.Strategy, sizes: tuple[int, ...]) -> tuple[Any, torch.optim.Optimizer, ms.MoERuntime]:
    return test_parallelize.made(drawn("qwen3_moe", EXPERTS), strategy, sizes)


def move(model: nn.Module, seed: int | None, *optimizers: torch.optim.Optimizer) -> None:
    """To homes drawn by ``seed``, or back."""
    experts = experts_of(model)
    homes = [np.random.default_rng(seed).permutation(each.homes.home_E) for each in experts]
    ms.move_homes(model, None if seed is None else homes, *optimizers)


def state_of(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Tensor]:
    """Parameters and moments, whole, as they are saved."""
    model_state, optimizer_state = get_state_dict(model, optimizer)
    moments = {f"{name}/exp_avg": each["exp_avg"] for name, each in optimizer_state["state"].items()}
    return {name: each.full_tensor() for name, each in (model_state | moments).items() if isinstance(each, DTensor)}


def trained(strategy: ms.Strategy, sizes: tuple[int, ...], moved: bool) -> dict[str, Any]:
    model, optimizer, runtime = made(strategy, sizes)
    found = []
    for number in range(4):
        if moved:
            move(model, (7, 8, 8, None)[number], optimizer)
        found += steps(model, optimizer, range(number, number + 1))
    if moved:
        move(model, 9, optimizer)
    state = state_of(model, optimizer)
    runtime.close()
    return {"steps": found, "state": state}


def both(strategy: ms.Strategy, sizes: tuple[int, ...]) -> list[dict[str, Any]]:
    return [trained(strategy, sizes, moved) for moved in (False, True)]


def trained_at_planned_homes() -> dict[str, Any]:
    """Homes from the routing of the first step, the same in both groups."""
    model, optimizer, runtime = made(lent(2, EXPERTS), GROUPS)
    with ms.record_routing(model) as expert_LTK:
        found = steps(model, optimizer, range(1))
    loads = ms.gather_loads(model, expert_LTK)
    ms.move_homes(model, ms.plan_homes(loads, experts_of(model)[0].cluster), optimizer)
    assert [load.total for load in loads] == [4 * text(0).numel() * 3] * 2
    assert any(each.homes.moved for each in experts_of(model))
    found += steps(model, optimizer, range(1, 4))
    state = state_of(model, optimizer)
    runtime.close()
    return {"steps": found, "state": state}


# A layer shows so always: tests/moe/test_moved_homes.py.
@pytest.mark.slow
@pytest.mark.parametrize("sizes", [(2,), GROUPS], ids=["one group", "two groups"])
def test_homes_change_no_bit_where_nothing_is_lent(ranks: LocalRanks, sizes: tuple[int, ...]) -> None:
    for unmoved, moved in ranks.run(both, EP, sizes, num_ranks=math.prod(sizes), timeout_s=150.0):
        assert moved["steps"] == unmoved["steps"]
        assert_equal(moved["state"], unmoved["state"])


# A loaded model moves always, and layers: tests/moe/test_moved_homes.py.
@pytest.mark.slow
def test_lent_experts_at_planned_homes_train_as_one_process_does(ranks: LocalRanks) -> None:
    """transformers' own experts, in one process, are the oracle."""
    wanted = alone(drawn("qwen3_moe", EXPERTS), 4, num_steps=4)
    for found in ranks.run(trained_at_planned_homes, timeout_s=150.0):
        found["state"] = {name: found["state"][name] for name in wanted["state"]}
        assert_as_alone(found, wanted)


# --- checkpoints ------------------------------------------------------------------------------------------------


def save_and_go_on(folder: Path) -> dict[str, Any]:
    model, optimizer, runtime = made(EP, GROUPS)
    steps(model, optimizer, range(1))
    move(model, 7, optimizer)
    steps(model, optimizer, range(1, 2))
    state = state_of(model, optimizer)
    model_state, optimizer_state = get_state_dict(model, optimizer)
    planning = ms.PlanningState(model)
    dcp.save({"model": model_state, "optimizer": optimizer_state, "planning": planning}, checkpoint_id=folder / "dcp")
    ms.hf.save_pretrained(model, folder / "ours")
    found = steps(model, optimizer, range(2, 4))
    runtime.close()
    return {"state": state, "steps": found}


def resume(folder: Path, sizes: tuple[int, ...], seed: int | None) -> dict[str, Any]:
    model, optimizer, runtime = made(EP, sizes)
    move(model, seed, optimizer)
    into, optimizer_into = get_state_dict(model, optimizer)
    dcp.load({"model": into, "optimizer": optimizer_into}, checkpoint_id=folder / "dcp")
    set_state_dict(model, optimizer, model_state_dict=into, optim_state_dict=optimizer_into)
    state = state_of(model, optimizer)
    found = steps(model, optimizer, range(2, 4)) if sizes == GROUPS else []
    runtime.close()
    return {"state": state, "steps": found}


@pytest.mark.slow
def test_resumes_at_other_homes_and_on_other_ranks(ranks: LocalRanks, tmp_path: Path) -> None:
    saved = ranks.run(save_and_go_on, tmp_path, timeout_s=150.0)[0]
    for seed in (None, 11):
        again = ranks.run(resume, tmp_path, GROUPS, seed, timeout_s=100.0)[0]
        assert again["steps"] == saved["steps"]
        assert_equal(again["state"], saved["state"])
    other = ranks.run(resume, tmp_path, (3,), 11, num_ranks=3, timeout_s=100.0)[0]
    assert_equal(other["state"], saved["state"])
    drawn("qwen3_moe", EXPERTS).config.save_pretrained(tmp_path / "config")
    assert convert(tmp_path / "dcp", tmp_path / "converted", tmp_path / "config", lambda *_: None) == "hub"
    plain = drawn("qwen3_moe", EXPERTS)
    plain.load_state_dict({name: saved["state"].get(name, tensor) for name, tensor in plain.state_dict().items()})
    plain.save_pretrained(tmp_path / "plain")
    wanted = load_file(tmp_path / "plain" / "model.safetensors")
    for folder in ("converted", "ours"):
        assert_equal(load_file(tmp_path / folder / "model.safetensors"), wanted)


def load_move_and_save(folder: Path, out: Path, sizes: list[dict[str, int]]) -> list[Tensor]:
    """Logits of models that moved after they were loaded, and what they save."""
    logits = []
    for index, each in enumerate(sizes):
        model = loaded(folder, lent(each["ep_size"], EXPERTS), each).eval()
        for block in model.model.layers:
            block.mlp.experts.unshard()
        move(model, index)
        with torch.no_grad(), ms.record_routing(model) as expert_LTK:
            logits.append(model(input_ids=text(7)).logits)
        # Of replicas too.
        assert {load.total for load in ms.gather_loads(model, expert_LTK)} == {4 * text(7).numel() * 3}
        ms.hf.save_pretrained(model, out / str(index))
        model.save_pretrained(out / f"theirs {index}")
    return logits


def test_models_of_from_pretrained_move_and_save_what_they_loaded(ranks: LocalRanks, tmp_path: Path) -> None:
    plain = drawn("qwen3_moe", EXPERTS).eval()
    plain.save_pretrained(tmp_path / "plain")
    with torch.no_grad():
        wanted = plain(input_ids=text(7)).logits
    sizes = [
        {"fsdp_size": 4, "ep_size": 2},
        {"fsdp_size": 2, "dp_replicate_size": 2, "ep_size": 2},
    ]
    for found in ranks.run(load_move_and_save, tmp_path / "plain", tmp_path, sizes, timeout_s=150.0):
        for logits in found:
            torch.testing.assert_close(logits, wanted, rtol=1e-4, atol=1e-5)
    weights = load_file(tmp_path / "plain" / "model.safetensors")
    for index in range(len(sizes)):
        for out in (str(index), f"theirs {index}"):
            assert_equal(load_file(tmp_path / out / "model.safetensors"), weights)


# --- a Trainer --------------------------------------------------------------------------------------------------


class Move(TrainerCallback):
    """As docs/transformers.md says."""

    def __init__(self, seed: int) -> None:
        self.seed = seed

    def on_train_begin(self, args: Any, state: Any, control: Any, **others: Any) -> None:
        move(others["model"], self.seed, others["optimizer"])


def trainer_losses(folder: Path, out: Path, seed: int | None, resumed: bool) -> list[float]:
    model = loaded(folder, EP, {"fsdp_size": 2, "ep_size": 2})
    with under_torchrun():
        trainer = trainer_of(model, out, max_grad_norm=0.0)
        if seed is not None:
            trainer.add_callback(Move(seed))
        trainer.train(resume_from_checkpoint=str(out / "checkpoint-3") if resumed else None)
        trainer.save_model(str(out / "final"))
    return [each["loss"] for each in trainer.state.log_history if "loss" in each]


@pytest.mark.slow
def test_a_trainer_resumes_at_other_homes_with_the_same_bits(ranks: LocalRanks, tmp_path: Path) -> None:
    drawn("qwen3_moe", EXPERTS).save_pretrained(tmp_path / "model")
    runs = [(None, False), (7, False), (11, True)]
    outs = [tmp_path / "unmoved", tmp_path / "moved", tmp_path / "moved"]
    weights, losses = [], []
    for out, (seed, resumed) in zip(outs, runs, strict=True):
        losses.append(
            ranks.run(trainer_losses, tmp_path / "model", out, seed, resumed, num_ranks=2, timeout_s=150.0)[0]
        )
        weights.append(load_file(out / "final" / "model.safetensors"))
    assert losses[1] == losses[2] == losses[0]
    for each in weights[1:]:
        assert_equal(each, weights[0])
