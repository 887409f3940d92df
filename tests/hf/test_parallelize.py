"""Models of transformers in one's own loop: parallelized, trained, clipped, saved and resumed on other ranks."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from conftest import assert_equal, refusal
from hf_models import drawn, errors_on_ranks, loss_of, text
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from transformers import AutoModelForCausalLM

import moesys as ms
from moesys.hf import expert_parallel
from moesys.lab.ranks.pool import LocalRanks
from moesys.moe.experts import experts_of
from moesys.moe.masters import local_part
from moesys.moe.runtime import MoERuntime

EXPERTS = 12
GREEDY: dict[str, Any] = {"balance": ms.Greedy(), "split": ms.FlowSplit()}
LENT = ms.Strategy(name="lent", sharding=ms.Ep(slots_per_rank=7), **GREEDY)
FSEP = ms.Strategy(name="fsep", sharding=ms.Fsep(slots_per_rank=7, prefetch_layers=1), **GREEDY)
CLIP = 0.5


def steps(model: nn.Module, optimizer: Any, numbers: range) -> list[tuple[float, float]]:
    """Mean losses over all ranks, and gradient norms before they are clipped."""
    found = []
    for number in numbers:
        ids = text(100 * number + dist.get_rank())
        loss = model(input_ids=ids, labels=ids).loss
        loss.backward()
        norm = ms.clip_grad_norm_(model, CLIP)
        optimizer.step()
        optimizer.zero_grad()
        mean = loss.detach().clone()
        dist.all_reduce(mean)
        found.append((mean.item() / dist.get_world_size(), norm.item()))
    return found


def made(
    model: nn.Module, strategy: ms.Strategy, sizes: tuple[int, ...] | None, cluster: ms.ClusterSpec | None = None
) -> tuple[Any, Any, MoERuntime]:
    mesh = None if sizes is None else init_device_mesh("cpu", sizes, mesh_dim_names=("dp", "ep")[-len(sizes) :])
    runtime = ms.parallelize(model, strategy, mesh, cluster=cluster)
    return model, torch.optim.AdamW(model.parameters(), lr=1e-3, eps=1e-3), runtime


def whole(model: nn.Module) -> dict[str, Tensor]:
    return {name: p.full_tensor().detach() for name, p in model.named_parameters() if isinstance(p, DTensor)}


def layouts(model: nn.Module) -> list[list[list[int]]]:
    return [experts.schedule.layout.expert_RS.tolist() for experts in experts_of(model)]


def trained(
    family: str, strategy: ms.Strategy, sizes: tuple[int, ...] | None, cluster: ms.ClusterSpec | None = None
) -> dict[str, Any]:
    model, optimizer, runtime = made(drawn(family, EXPERTS), strategy, sizes, cluster)
    found = steps(model, optimizer, range(3))
    runtime.close()
    return {"steps": found, "state": whole(model), "layouts": layouts(model)}


def alone(model: nn.Module, num_ranks: int, num_steps: int = 3) -> dict[str, Any]:
    """What one process makes of the batches of all ranks, with transformers' own experts and torch's clipping."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, eps=1e-3)
    found = []
    for number in range(num_steps):
        batches = [text(100 * number + rank) for rank in range(num_ranks)]
        loss = sum(model(input_ids=ids, labels=ids).loss for ids in batches) / num_ranks
        loss.backward()
        norm = nn.utils.clip_grad_norm_(model.parameters(), CLIP)
        optimizer.step()
        optimizer.zero_grad()
        found.append((loss.item(), norm.item()))
    return {"steps": found, "state": dict(model.named_parameters())}


ONCE = ms.Pipelined(chunks=2, node_dispatch="once", combine="per_node")
NODES = ms.ClusterSpec(num_nodes=2, ranks_per_node=2)
BY_NODE = FSEP.sharding.replace(restore="hierarchical", reshard="hierarchical")
LENT_BY_NODE = LENT.replace(sharding=ms.Ep(slots_per_rank=7, lend="hierarchical"), overlap=ONCE, late_slots=1)
# A family, a strategy, sizes of a mesh, and nodes.
TRAINED: dict[str, tuple[Any, ...]] = {
    "fsep, two groups": ("gpt_oss", FSEP, (2, 2)),
    "lent, hierarchical, late slots": ("qwen3_moe", LENT_BY_NODE, None, NODES),
    "lent, two groups": ("qwen3_moe", LENT, (2, 2)),
    "fsep, one group": ("deepseek_v3", FSEP.replace(overlap=ms.Pipelined(chunks=2)), None),
    "fsep, hierarchical": ("qwen3_moe", FSEP.replace(sharding=BY_NODE, overlap=ONCE), None, NODES),
    "quotas": ("qwen3_moe", LENT.replace(balance=ms.MoonEp(), split=ms.Quotas(), lag=0), None, NODES),
}


@pytest.mark.parametrize(
    "case", [*TRAINED][:2] + [pytest.param(case, marks=pytest.mark.slow) for case in [*TRAINED][2:]]
)
def test_trains_as_one_process_does(ranks: LocalRanks, case: str) -> None:
    """Losses, norms over all meshes, and three clipped AdamW steps: gradients of replicas count once."""
    wanted = alone(drawn(TRAINED[case][0], EXPERTS), 4)
    assert wanted["steps"][0][1] > CLIP
    for found in ranks.run(trained, *TRAINED[case], timeout_s=150.0):
        for one, other in zip(found["steps"], wanted["steps"], strict=True):
            assert one == pytest.approx(other, rel=1e-5)
        torch.testing.assert_close(found["state"], wanted["state"], rtol=1e-4, atol=1e-5)


def on_other_meshes(folder: Path) -> tuple[list[dict[str, float]], str]:
    """Returns errors on meshes whose ranks do not ascend, and the refusal of groups that cannot be put in order."""

    def mesh_of(order: Any) -> DeviceMesh:
        return DeviceMesh("cpu", torch.tensor(order), mesh_dim_names=("dp", "ep")[-torch.tensor(order).ndim :])

    errors, wanted = [], drawn("qwen3_moe", EXPERTS)
    for sharding, order in (
        (LENT.sharding, [2, 0, 3, 1]),
        (FSEP.sharding, [[3, 1], [0, 2]]),
        (FSEP.sharding.replace(delay_reshard=True), [[2, 3], [1, 0]]),
    ):
        strategy, plain, model = FSEP.replace(sharding=sharding), *(drawn("qwen3_moe", EXPERTS) for _ in range(2))
        errors.append(errors_on_ranks(plain, model, strategy, mesh=mesh_of(order)))
        norms = ms.clip_grad_norm_(model, CLIP), nn.utils.clip_grad_norm_(plain.parameters(), CLIP)
        errors[-1]["norm"] = abs(norms[0].item() / norms[1].item() - 1)
        ms.hf.save_pretrained(model, folder / "hub")
        again = AutoModelForCausalLM.from_pretrained(folder / "hub")
        assert all(torch.equal(each, wanted.get_parameter(name)) for name, each in again.named_parameters())
    return errors, refusal(ms.parallelize, wanted, LENT, mesh_of([[0, 3], [2, 1]]))


# tests/moe/test_meshes.py always checks it for a layer.
@pytest.mark.slow
def test_ranks_of_a_mesh_may_be_in_any_order(ranks: LocalRanks, tmp_path: Path) -> None:
    """Every rank refuses groups that cannot be put in ascending order, such as [0, 3] and [1, 2]."""
    for errors, refused in ranks.run(on_other_meshes, tmp_path, timeout_s=100.0):
        assert max(each.pop(name) for each in errors for name in ("loss", "norm")) < 1e-5
        assert max(max(each.values()) for each in errors) < 1e-4
        assert "cannot be put in an order in which ranks ascend" in refused


def trained_with_late_gradients(strategies: list[ms.Strategy], sizes: tuple[int, ...]) -> list[dict[str, Any]]:
    """What each strategy makes, and how many layers' gradients came late."""
    found, add = [], expert_parallel.add_late
    for strategy in strategies:
        with pytest.MonkeyPatch.context() as patched:
            late: list[int] = []
            patched.setattr(expert_parallel, "add_late", lambda *args, late=late: (late.append(1), add(*args)))
            found.append(trained("qwen3_moe", strategy, sizes) | {"late": len(late)})
    return found


@pytest.mark.parametrize("sizes", [pytest.param((4,), marks=pytest.mark.slow), (2, 2)], ids=["one group", "two groups"])
@pytest.mark.parametrize("strategy", [FSEP, pytest.param(LENT, marks=pytest.mark.slow)], ids=["fsep", "lent"])
def test_delayed_gradients_have_the_same_bits(ranks: LocalRanks, strategy: ms.Strategy, sizes: tuple[int, ...]) -> None:
    """FSDP is past a layer when its gradients come home; replicas of its group are added up then."""
    # Greedy plans other layouts where gradients are delayed, and so other sums over replicas.
    at_once = strategy.replace(balance=ms.Eplb())
    delayed = at_once.replace(sharding=strategy.sharding.replace(prefetch_layers=1, delay_reshard=True))
    for prompt, late in ranks.run(trained_with_late_gradients, [at_once, delayed], sizes, timeout_s=150.0):
        # Two layers, three steps; the first waits for none.
        assert prompt["late"] == 0
        assert late["late"] >= 4
        assert late["steps"] == prompt["steps"]
        assert_equal(late["state"], prompt["state"])


def save_and_go_on(folder: Path, strategy: ms.Strategy) -> dict[str, Any]:
    model, optimizer, runtime = made(drawn("qwen3_moe", EXPERTS), strategy, (2, 2))
    steps(model, optimizer, range(1))
    before, optimizer_before = get_state_dict(model, optimizer)
    planning = ms.PlanningState(model)
    dcp.save({"model": before, "optimizer": optimizer_before, "planning": planning}, checkpoint_id=str(folder))
    state = whole(model)
    found = steps(model, optimizer, range(1, 3))
    runtime.close()
    return {"state": state, "steps": found, "layouts": layouts(model)}


def resume(folder: Path, strategy: ms.Strategy, sizes: tuple[int, ...]) -> dict[str, Any]:
    model, optimizer, runtime = made(drawn("qwen3_moe", EXPERTS), strategy, sizes)
    into, optimizer_into = get_state_dict(model, optimizer)
    planning = {"planning": ms.PlanningState(model)} if len(sizes) == 2 else {}
    dcp.load({"model": into, "optimizer": optimizer_into, **planning}, checkpoint_id=str(folder))
    set_state_dict(model, optimizer, model_state_dict=into, optim_state_dict=optimizer_into)
    state = whole(model)
    values = zip(state, optimizer.state.values(), strict=True)
    moments = {name: value["exp_avg"].full_tensor() for name, value in values}
    found = steps(model, optimizer, range(1, 3)) if len(sizes) == 2 else []
    runtime.close()
    return {"state": state, "moments": moments, "steps": found, "layouts": layouts(model)}


@pytest.mark.parametrize("strategy", [pytest.param(LENT, marks=pytest.mark.slow), FSEP], ids=["lent", "fsep"])
def test_resumes_on_other_ranks(ranks: LocalRanks, tmp_path: Path, strategy: ms.Strategy) -> None:
    """Two groups of two save; the same and three ranks load every bit, and the same go on as if nothing was."""
    saved = ranks.run(save_and_go_on, tmp_path, strategy, timeout_s=100.0)[0]
    again = ranks.run(resume, tmp_path, strategy, (2, 2), timeout_s=100.0)[0]
    assert again["steps"] == saved["steps"]
    assert again["layouts"] == saved["layouts"]
    other = ranks.run(resume, tmp_path, strategy, (3,), num_ranks=3, timeout_s=100.0)[0]
    assert_equal(other["state"], saved["state"])
    assert_equal(other["moments"], again["moments"])


class Copies(TorchDispatchMode):
    """Counts copies of at least so many numbers, which messages are not: these are bytes."""

    def __init__(self, least: int) -> None:
        super().__init__()
        self.least, self.number = least, 0

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = function(*args, **(kwargs or {}))
        if re.search("copy|clone|cat", str(function)):
            tensors = [each for each in tree_leaves((args, kwargs, out)) if isinstance(each, Tensor)]
            sizes = [local_part(each).numel() for each in tensors if each.is_floating_point()]
            self.number += max(sizes, default=0) >= self.least
        return out


def copies_of_experts(
    strategy: ms.Strategy, sizes: tuple[int, int], dtype: torch.dtype
) -> tuple[int, dict[str, Tensor], dict[str, Tensor]]:
    """The copies of the second step, and the gradients of experts in one step of two micro-batches, of which FSDP sums
    both, or the second only.
    """
    model, *_ = made(drawn("qwen3_moe", 32).to(dtype), strategy, sizes)
    masters = {name: each for name, each in model.named_parameters() if "experts" in name}
    copies = Copies(min(local_part(each).numel() for each in masters.values()))
    loss_of(model, 0).backward()
    model.zero_grad()
    with copies:
        loss_of(model, dist.get_rank()).backward()
    found = []
    for syncs in (True, False):
        model.zero_grad()
        for number, last in enumerate((False, True)):
            model.set_requires_gradient_sync(last or syncs)
            loss_of(model, number + dist.get_rank()).backward()
        assert all(local_part(each.grad).is_contiguous() for each in masters.values())
        found.append({name: each.grad.full_tensor() for name, each in masters.items()})
    return copies.number, *found


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_experts_of_one_group_are_not_copied_and_those_of_two_are(ranks: LocalRanks, dtype: torch.dtype) -> None:
    """FSDP neither gathers nor reduces them: products read the masters, and gradients are written where they stay."""
    ep = ms.Strategy(name="ep", sharding=ms.Ep())
    for strategy, num_ranks in ((ep, 2), (ep, 1), (FSEP.replace(sharding=ms.Fsep(slots_per_rank=32)), 1)):
        for copies, *found in ranks.run(copies_of_experts, strategy, (1, num_ranks), dtype, num_ranks=num_ranks):
            assert copies == 0
            assert_equal(*found)
    assert all(copies > 0 for copies, *_ in ranks.run(copies_of_experts, ep, (2, 1), dtype, num_ranks=2))


def mesh(sizes: tuple[int, ...], *names: str) -> DeviceMesh:
    return init_device_mesh("cpu", sizes, mesh_dim_names=names)


def with_a_norm() -> Any:
    model = drawn("olmoe")
    model.model.layers[1].mlp.experts.post_expert_norm = nn.RMSNorm(48)
    return model


# What each is given, and words of the error.
REFUSED: dict[str, tuple[Callable[[], tuple[Any, ...]], str]] = {
    "no experts": (lambda: (nn.Linear(3, 3), LENT), "Linear has no MoE blocks with experts as transformers has them"),
    "no ep": (lambda: (drawn("olmoe"), LENT, mesh((2,), "dp")), r"dimensions \('dp',\); its last must be named \"ep\""),
    "a batch for two": (lambda: (drawn("olmoe"), LENT, mesh((2, 1), "tp", "ep")), 'mesh has a dimension "tp", whose'),
    "a norm": (lambda: (with_a_norm(), LENT), "OlmoeExperts has post_expert_norm.weight beside its projections and b"),
    "too small": (lambda: (drawn("olmoe"), LENT, mesh((2, 1), "dp", "ep")["ep"]), "mesh has 1 ranks, and there are 2"),
    "a generator": (
        lambda: (drawn("olmoe").parameters(), LENT),
        "TypeError: model is a generator; give the torch.nn.M",
    ),
    "swapped": (lambda: (drawn("olmoe"), mesh((2,), "ep"), LENT), "TypeError: strategy is a DeviceMesh; give a ms.Str"),
    "a group": (lambda: (drawn("olmoe"), LENT, dist.group.WORLD), "TypeError: mesh is a ProcessGroup; give a DeviceM"),
}


def refusals() -> list[str]:
    return [refusal(ms.parallelize, *given()) for given, _ in REFUSED.values()]


def test_what_does_not_fit_is_refused(ranks: LocalRanks) -> None:
    of_ranks = ranks.run(refusals, num_ranks=2)
    for (_, message), *errors in zip(REFUSED.values(), *of_ranks, strict=True):
        assert any(re.search(message, error) for error in errors), errors
