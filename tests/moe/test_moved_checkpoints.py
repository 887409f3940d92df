"""Checkpoints of experts that moved home: in the model's order, and so for any homes, ranks and forms."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from harness import Stack
from test_moved_homes import EP, LENT, assert_same, build, homes, state_of, step
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
    set_state_dict,
)

import moesys as ms
from moesys.lab.ranks.pool import LocalRanks


def save(path: Path, strategy: ms.Strategy) -> dict[str, Any]:
    """Two steps, the second at other homes; saved, and another."""
    model, optimizer = build(strategy)
    steps = []
    for number in range(3):
        if number == 1:
            ms.move_homes(model, homes(), optimizer)
        if number == 2:
            state = state_of(model, optimizer)
            model_state, optimizer_state = get_state_dict(model, optimizer)
            dcp.save({"model": model_state, "optimizer": optimizer_state}, checkpoint_id=path)
            planning = [moe.experts.get_extra_state() for moe in model.moe]
        steps.append(step(model, optimizer, number))
    return {"state": state, "steps": steps[2:], "planning": planning}


def resume(path: Path, strategy: ms.Strategy, when: str, reverse: bool) -> dict[str, Any]:
    model, optimizer = build(strategy, seed=1)
    if when == "moved before":
        step(model, optimizer, 0)
        ms.move_homes(model, homes(reverse), optimizer)
    model_state, optimizer_state = get_state_dict(model, optimizer)
    dcp.load({"model": model_state, "optimizer": optimizer_state}, checkpoint_id=path)
    set_state_dict(model, optimizer, model_state_dict=model_state, optim_state_dict=optimizer_state)
    state = state_of(model, optimizer)
    planning = [moe.experts.get_extra_state() for moe in model.moe]
    events = [event.what for moe in model.moe for event in moe.experts.schedule.events]
    if when == "moved after":
        ms.move_homes(model, homes(reverse), optimizer)
    return {
        "state": state,
        "planning": planning,
        "events": events,
        "steps": [step(model, optimizer, 2)] if dist.get_world_size() == 4 else None,
    }


def resume_all(path: Path, strategy: ms.Strategy, ways: list[tuple[str, bool]]) -> list[dict[str, Any]]:
    return [resume(path, strategy, when, reverse) for when, reverse in ways]


@pytest.mark.parametrize(
    "ways",
    [
        [("moved before", True)],
        pytest.param([("not moved", False), ("moved after", True)], marks=pytest.mark.slow),
    ],
    ids=["moved before", "not moved, moved after"],
)
def test_a_run_resumes_at_other_homes_with_the_same_bits(
    ranks: LocalRanks, tmp_path: Path, ways: list[tuple[str, bool]]
) -> None:
    """Or at none, or on other ranks: parameters and moments are each expert's own."""
    saved = ranks.run(save, tmp_path, EP)
    for rank, found in enumerate(ranks.run(resume_all, tmp_path, EP, ways)):
        for way, each in zip(ways, found, strict=True):
            assert_same(each["state"], saved[rank]["state"], f"{way} on rank {rank}")
            assert_same(each["steps"], saved[rank]["steps"], f"{way} on rank {rank}")
    for (found,) in ranks.run(resume_all, tmp_path, EP, [("moved before", True)], num_ranks=2):
        assert_same(found["state"], saved[0]["state"], "on two ranks")


def test_planning_goes_on_at_the_same_homes_and_keeps_its_history_at_others(ranks: LocalRanks, tmp_path: Path) -> None:
    saved = ranks.run(save, tmp_path, LENT)
    for rank, (same, others) in enumerate(
        ranks.run(resume_all, tmp_path, LENT, [("moved before", False), ("moved before", True)])
    ):
        moved = "homes moved: layouts begun anew"
        assert same["events"] == [moved] * 2
        assert same["planning"] == saved[rank]["planning"]
        assert_same(same["steps"], saved[rank]["steps"], f"rank {rank}")
        assert others["events"] == [moved, "history is of other homes: layouts begun anew"] * 2
        for found, wanted in zip(others["planning"], saved[rank]["planning"], strict=True):
            assert history_of(found) == history_of(wanted)
        for one, other in zip(others["steps"], saved[rank]["steps"], strict=True):
            assert one["losses"] == pytest.approx(other["losses"], rel=1e-4)


def history_of(planning: str) -> str:
    begin = planning.index('"history"')
    return planning[begin : planning.index('"pending"')]


def through_every_form() -> list[dict[str, Any]]:
    """A moved model's state, and that of models at other homes that took it over in the forms that trainers use."""
    model, optimizer = build()
    step(model, optimizer, 0)
    ms.move_homes(model, homes(), optimizer)
    step(model, optimizer, 1)
    found = [state_of(model, optimizer)]

    def fresh() -> tuple[Stack, torch.optim.Optimizer]:
        model, optimizer = build(seed=1)
        ms.move_homes(model, homes(reverse=True), optimizer)
        return model, optimizer

    # A module's and an optimizer's own calls.
    other, other_optimizer = fresh()
    other.load_state_dict(model.state_dict())
    other_optimizer.load_state_dict(optimizer.state_dict())
    found.append(state_of(other, other_optimizer))
    # Whole tensors on the first rank alone.
    gathered = get_state_dict(model, optimizer, options=StateDictOptions(full_state_dict=True, cpu_offload=True))
    other, other_optimizer = fresh()
    from_first = StateDictOptions(full_state_dict=True, broadcast_from_rank0=True)
    set_model_state_dict(other, gathered[0], options=from_first)
    set_optimizer_state_dict(other, other_optimizer, gathered[1], options=from_first)
    found.append(state_of(other, other_optimizer))
    # The layer's own, and an optimizer's by names.
    other, other_optimizer = fresh()
    flat = StateDictOptions(flatten_optimizer_state_dict=True)
    for one, layer in zip(other.moe, model.moe, strict=True):
        one.load_full_state_dict(layer.full_state_dict())
    other.mixers.load_state_dict(model.mixers.state_dict())
    optimizer_state = get_state_dict(model, optimizer, options=flat)[1]
    set_optimizer_state_dict(other, other_optimizer, optimizer_state, options=flat)
    found.append(state_of(other, other_optimizer))
    return found


def test_every_form_of_state_is_in_the_models_order(ranks: LocalRanks) -> None:
    for wanted, *others in ranks.run(through_every_form, num_ranks=2):
        for index, found in enumerate(others):
            assert_same(found, wanted, str(index))
