"""Homes that move: the same bits as without, whatever moves when; loads by the model's ids; and what is refused."""

from __future__ import annotations

import copy
import gc
import re
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from conftest import refusal
from harness import Stack, tokens_of, whole
from test_checkpoint import EP, SHAPE
from torch import Tensor
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_state_dict

import moesys as ms
from moesys.lab.ranks.pool import LocalRanks

LENT = EP.replace(
    name="lent",
    sharding=ms.Ep(slots_per_rank=3),
    balance=ms.Eplb(),
    split=ms.FlowSplit(),
    predictor=ms.WindowMean(steps=3),
)
LATE = LENT.replace(name="late", sharding=ms.Ep(slots_per_rank=4), late_slots=1)
# Of two layers, by the number of ranks.
HOMES: dict[int, list[list[int]]] = {
    2: [[1, 0, 1, 0, 0, 1], [1, 1, 1, 0, 0, 0]],
    4: [[2, 0, 1, 0, 2, 1], [1, 1, 2, 2, 0, 0]],
}


def homes(reverse: bool = False) -> list[np.ndarray]:
    found = [np.array(each) for each in HOMES[dist.get_world_size()]]
    return [each[::-1] for each in found] if reverse else found


def build(strategy: ms.Strategy = EP, seed: int = 0) -> tuple[Stack, torch.optim.Optimizer]:
    model = Stack(SHAPE, strategy, num_layers=2, seed=seed)
    return model, torch.optim.Adam(model.parameters(), lr=1e-2)


def step(
    model: Stack, optimizer: torch.optim.Optimizer, number: int, between: Callable[[], None] | None = None
) -> dict[str, Any]:
    """Two micro-batches: losses, dx, and gradients by the model's ids. ``between`` is called between them."""
    losses, dxs, wanted = [], [], []
    for batch in (2 * number, 2 * number + 1):
        if between is not None and batch % 2:
            between()
        x_TH = tokens_of(batch, SHAPE.hidden_size).requires_grad_()
        loss = model(x_TH).square().sum()
        loss.backward()
        losses.append(loss.item())
        dxs.append(x_TH.grad)
        wanted.append([moe.last_plan.load.tokens_RE.tolist() for moe in model.moe])
    ms.sync_gradients(model)
    gradients = {name: whole(p.grad).clone() for name, p in model.named_parameters()}
    for layer, moe in enumerate(model.moe):
        gradients[f"moe.{layer}.experts.masters"] = gradients[f"moe.{layer}.experts.masters"][
            torch.from_numpy(moe.experts.homes.number_E)
        ]
    optimizer.step()
    optimizer.zero_grad()
    if number % 2:
        ms.update_router_bias(model)
    return {"losses": losses, "dx": dxs, "wanted": wanted, "gradients": gradients}


def state_of(model: Stack, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    """All that is saved, whole."""
    model_state, optimizer_state = get_state_dict(model, optimizer, options=StateDictOptions(full_state_dict=True))
    return copy.deepcopy({"model": model_state, "moments": optimizer_state["state"]})


def assert_same(found: Any, wanted: Any, where: str = "") -> None:
    assert type(found) is type(wanted), where
    if isinstance(wanted, dict):
        assert found.keys() == wanted.keys(), where
        for name, value in wanted.items():
            assert_same(found[name], value, f"{where}/{name}")
    elif isinstance(wanted, list):
        for index, (one, other) in enumerate(zip(found, wanted, strict=True)):
            assert_same(one, other, f"{where}[{index}]")
    elif isinstance(wanted, Tensor):
        assert torch.equal(found, wanted), where
    elif not where.endswith("_extra_state"):
        assert found == wanted, where


# --- bits -------------------------------------------------------------------------------------------------------


def trained(moves: dict[float, str], strategy: ms.Strategy = EP) -> dict[str, Any]:
    """Four steps, with experts that move to homes before some of them, or in their midst."""
    model, optimizer = build(strategy)
    runtime = ms.link(model)
    steps, owned = [], []

    def move(when: float) -> None:
        if when in moves:
            to = {"there": homes(), "elsewhere": homes(reverse=True), "back": None}[moves[when]]
            ms.move_homes(model, to, optimizer)

    for number in range(4):
        move(number)
        owned.append([moe.experts.homes.home_E.tolist() for moe in model.moe])
        steps.append(step(model, optimizer, number, partial(move, number + 0.5)))
    state = state_of(model, optimizer)
    full = [moe.full_state_dict() for moe in model.moe]
    runtime.close()
    return {"steps": steps, "state": state, "full": full, "owned": owned}


def several_trainings(cases: list[dict[float, str]], strategy: ms.Strategy) -> list[dict[str, Any]]:
    return [trained(moves, strategy) for moves in cases]


@pytest.mark.parametrize(
    ("num_ranks", "strategy"),
    [(2, EP), pytest.param(4, EP.replace(overlap=ms.Pipelined(chunks=2)), marks=pytest.mark.slow)],
    ids=["2", "4"],
)
def test_homes_change_no_bit_where_nothing_is_lent(ranks: LocalRanks, num_ranks: int, strategy: ms.Strategy) -> None:
    """Losses, dx, gradients, masters, moments, router biases, loads: by the model's ids, from start or in between."""
    cases = [{}, {0: "there"}, {1: "there", 1.5: "elsewhere", 3: "back"}]
    for rank, (unmoved, *moved) in enumerate(ranks.run(several_trainings, cases, strategy, num_ranks=num_ranks)):
        assert unmoved["owned"][0] != moved[0]["owned"][0]
        assert moved[1]["owned"][1] != moved[1]["owned"][2] != moved[1]["owned"][3] == unmoved["owned"][0]
        for each in moved:
            assert each.pop("owned")
            assert_same(each, {name: value for name, value in unmoved.items() if name != "owned"}, f"rank {rank}")


# A model of transformers does so always: tests/hf/test_moved_models.py.
@pytest.mark.slow
@pytest.mark.parametrize(
    "strategy",
    [LENT, LATE, LENT.replace(lag=0, balance=ms.Llep(), split=ms.Quotas())],
    ids=["lent", "late", "on the counts"],
)
def test_lent_experts_train_as_well_at_other_homes(ranks: LocalRanks, strategy: ms.Strategy) -> None:
    """Sums over replicas round otherwise, as layouts are others."""
    for unmoved, moved in ranks.run(several_trainings, [{}, {1: "there"}], strategy):
        for one, other in zip(moved["steps"], unmoved["steps"], strict=True):
            assert one["losses"] == pytest.approx(other["losses"], rel=1e-4)
        torch.testing.assert_close(moved["full"], unmoved["full"], rtol=1e-2, atol=1e-3)


# --- loads, and homes planned from them -----------------------------------------------------------------------


def planned(folder: Path) -> dict[str, Any]:
    """Recorded, planned, moved, and watched at the new homes."""
    model, optimizer = build(LENT)
    with ms.record_routing(model) as expert_LTK:
        before = [step(model, optimizer, number) for number in range(2)]
    loads = ms.gather_loads(model, expert_LTK)
    cluster = ms.ClusterSpec(num_nodes=2, ranks_per_node=2)
    homes = ms.plan_homes(loads, cluster)
    ms.move_homes(model, homes, optimizer)
    seen = []
    with ms.Watch(model, folder) as watch, ms.record_routing(model) as expert_LTK:
        model(tokens_of(9, SHAPE.hidden_size)).sum().backward()
        line = watch.measure()
        seen = [layer.tokens_E for layer in line.layers]
    return {
        "before": [wanted for each in before for wanted in each["wanted"]],
        "loads": [load.tokens_RE for load in loads],
        "homes": homes,
        "owned": [moe.experts.homes.home_E for moe in model.moe],
        "seen": seen,
        "last": [moe.last_plan.load.tokens_E.tolist() for moe in model.moe],
        "counted": [load.tokens_E.tolist() for load in ms.gather_loads(model, expert_LTK)],
    }


def test_homes_are_planned_from_recorded_routing_and_loads_are_told_by_the_models_ids(
    ranks: LocalRanks, tmp_path: Path
) -> None:
    found = ranks.run(planned, tmp_path)
    for layer in range(2):
        wanted_RE = np.sum([np.array(each[layer]) for each in found[0]["before"]], axis=0)
        for each in found:
            assert each["loads"][layer].tolist() == wanted_RE.tolist()
            assert each["owned"][layer].tolist() == found[0]["homes"][layer].tolist()
            assert each["last"][layer] == each["counted"][layer]
    assert [list(tokens_E) for tokens_E in found[0]["seen"]] == found[0]["counted"]
    assert any((np.diff(home_E) < 0).any() for home_E in found[0]["owned"]), "nothing moved"


# --- what does not fit ----------------------------------------------------------------------------------------


class Odd(torch.optim.SGD):
    """Keeps something that is of no single expert."""

    def step(self, closure: Any = None) -> Any:
        for group in self.param_groups:
            for parameter in group["params"]:
                self.state[parameter]["blocks"] = torch.zeros(7)
        return super().step(closure)


def refused(kind: str) -> None:
    model, optimizer = build(EP if kind != "fsep" else EP.replace(sharding=ms.Fsep(slots_per_rank=6)))
    wanted: list[Any] = homes()
    optimizers = [optimizer]
    if kind == "layers":
        wanted = wanted[:1]
    elif kind == "experts":
        wanted[1] = wanted[1][:5]
    elif kind == "too many" or (kind == "one rank" and dist.get_rank() == 1):
        wanted[1] = [0, 0, 0, 0, 1, 1]
    elif kind == "differ" and dist.get_rank() == 1:
        wanted = homes(reverse=True)
    elif kind == "another optimizer":
        optimizers = [torch.optim.SGD(model.mixers.parameters(), lr=0.1)]
    elif kind == "odd state":
        optimizers = [Odd(model.parameters(), lr=0.1)]
        step(model, optimizers[0], 0)
    elif kind == "none":
        optimizers = []
    elif kind == "an id":
        ms.move_homes(model, wanted, optimizer)
        invalid = torch.tensor([[0, 6 * dist.get_rank()]])
        model.moe[0].experts(torch.zeros(1, 25), invalid, torch.ones(1, 2))
    elif kind == "routers":
        ms.gather_loads(model, [torch.zeros(1, 3, 2, dtype=torch.int64)])
    before = [whole(moe.experts.masters.detach()).clone() for moe in model.moe]
    try:
        ms.move_homes(model, wanted, *optimizers)
    except (ValueError, RuntimeError):
        assert all(
            torch.equal(whole(moe.experts.masters.detach()), b) for moe, b in zip(model.moe, before, strict=True)
        )
        raise
    step(model, optimizer, 0)


REFUSED = {
    "fsep": "strategy 'ep' has sharding=Fsep, where every rank has a slice of each expert and none has a home",
    "layers": r"homes is of 1 layers and the model has 2; give ranks \[E\] of each",
    "experts": r"homes\[1\] is of 5 experts and the layer has 6",
    "too many": r"layer 1: homes has 4 of 6 experts on rank 0, and each of 2 ranks has \[3, 3\]",
    "one rank": "move_homes failed on rank 1: ValueError: layer 1: homes has 4 of 6 experts on rank 0",
    "differ": "ranks 0 and 1 have different homes for the same experts",
    "another optimizer": "none of the optimizers given trains the experts of layer 0",
    "odd state": r"Odd keeps blocks \[7\] for experts of layer 0, \[6, 1275\], which is no row an expert",
    "none": "layer 0 trains experts whose homes were moved without an optimizer",
    "an id": "expert_TK of rank 1 has the id 6, and the 6 experts of layer 0 have ids from 0 to 5",
    "routers": "expert_LTK has 1 routers and the model 2 layers of experts",
}


def refusals(kinds: list[str]) -> list[str]:
    return [refusal(refused, kind) for kind in kinds]


def test_what_does_not_fit_is_an_error_on_every_rank_and_moves_nothing(ranks: LocalRanks) -> None:
    of_ranks = ranks.run(refusals, [*REFUSED], num_ranks=2)
    for (kind, message), *errors in zip(REFUSED.items(), *of_ranks, strict=True):
        assert any(re.search(message, error) for error in errors), (kind, errors)


def evaluated_and_trained_again() -> tuple[Tensor, Tensor, str]:
    """Experts that nobody trains move without an optimizer; one that is gone is missed; the next one may be given."""
    model, optimizer = build()
    with torch.no_grad():
        before = model(tokens_of(0, SHAPE.hidden_size))
        ms.move_homes(model, homes())
        after = model(tokens_of(0, SHAPE.hidden_size))
    ms.move_homes(model, homes(), optimizer)
    step(model, optimizer, 0)
    del optimizer
    gc.collect()
    another = torch.optim.Adam(model.parameters(), lr=1e-2)
    with pytest.raises(RuntimeError, match="or with one that is gone") as error:
        step(model, another, 1)
    ms.move_homes(model, homes(), another)
    step(model, another, 1)
    return before, after, str(error.value)


def test_who_trains_moved_experts_must_be_known(ranks: LocalRanks) -> None:
    for before, after, message in ranks.run(evaluated_and_trained_again, num_ranks=2):
        assert torch.equal(after, before)
        assert "call ms.move_homes(model, homes, optimizer) again" in message


def moved_between_layers() -> tuple[Tensor, Tensor]:
    """The second layer's output, whose copies are on their way when homes move, and what it was before."""
    ahead = LENT.replace(sharding=ms.Ep(slots_per_rank=4, prefetch_layers=1), balance=ms.Static())
    model, _ = build(ahead)
    runtime = ms.link(model)
    tokens = tokens_of(0, SHAPE.hidden_size)
    with torch.no_grad():
        before = [moe(tokens) for moe in model.moe][1]
        model.moe[0](tokens)
        ms.move_homes(model, homes())
        after = model.moe[1](tokens)
    runtime.close()
    return before, after


def test_copies_that_were_sent_ahead_are_not_used_at_other_homes(ranks: LocalRanks) -> None:
    for before, after in ranks.run(moved_between_layers, num_ranks=2):
        assert torch.equal(after, before)


def test_one_rank_has_all_homes() -> None:
    model, optimizer = build()
    ms.move_homes(model, [np.zeros(6, int)] * 2, optimizer)
    assert not model.moe[0].experts.homes.moved
    # With a padded token.
    recorded = torch.tensor([[[0, 1], [-1, -1]], [[2, 3], [-1, -1]]])
    assert ms.gather_loads(model, [recorded])[1].tokens_RE.tolist() == [[0, 0, 1, 1, 0, 0]]
