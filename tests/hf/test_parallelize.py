"""Models of transformers in one's own loop: parallelized, trained, clipped, saved and resumed on other ranks."""

from __future__ import annotations

import os
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from conftest import assert_equal, refusal
from hf_models import drawn, loss_of, text
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy
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


def assert_as_alone(found: dict[str, Any], wanted: dict[str, Any]) -> None:
    for one, other in zip(found["steps"], wanted["steps"], strict=True):
        assert one == pytest.approx(other, rel=1e-5)
    torch.testing.assert_close(found["state"], wanted["state"], rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(
    ("family", "strategy", "sizes"),
    [
        pytest.param("qwen3_moe", LENT, (2, 2), marks=pytest.mark.slow),
        ("gpt_oss", FSEP, (2, 2)),
        pytest.param("deepseek_v3", FSEP.replace(overlap=ms.Pipelined(chunks=2)), None, marks=pytest.mark.slow),
    ],
    ids=["lent, two groups", "fsep, two groups", "fsep, one group"],
)
def test_trains_as_one_process_does(ranks: LocalRanks, family: str, strategy: ms.Strategy, sizes: Any) -> None:
    """Losses, norms over all meshes, and three clipped AdamW steps: gradients of replicas count once."""
    wanted = alone(drawn(family, EXPERTS), 4)
    assert wanted["steps"][0][1] > CLIP
    for found in ranks.run(trained, family, strategy, sizes, timeout_s=150.0):
        assert_as_alone(found, wanted)


ONCE = ms.Pipelined(chunks=2, node_dispatch="once", combine="per_node")


@pytest.mark.parametrize(
    "strategy",
    [
        LENT.replace(sharding=ms.Ep(slots_per_rank=7, lend="hierarchical"), overlap=ONCE, late_slots=1),
        pytest.param(
            FSEP.replace(sharding=FSEP.sharding.replace(restore="hierarchical", reshard="hierarchical"), overlap=ONCE),
            marks=pytest.mark.slow,
        ),
        pytest.param(LENT.replace(balance=ms.MoonEp(), split=ms.Quotas(), lag=0), marks=pytest.mark.slow),
    ],
    ids=["lent, hierarchical, late slots", "fsep, hierarchical", "quotas"],
)
def test_trains_on_two_nodes_as_one_process_does(ranks: LocalRanks, strategy: ms.Strategy) -> None:
    """Strategies that look at nodes, or plan from the current counts."""
    nodes = ms.ClusterSpec(num_nodes=2, ranks_per_node=2)
    wanted = alone(drawn("qwen3_moe", EXPERTS), 4)
    for found in ranks.run(trained, "qwen3_moe", strategy, None, nodes, timeout_s=150.0):
        assert_as_alone(found, wanted)


# One dimension, and two of two; the sweep has two with one rank in either.
NUM_MESHES = 10 if os.environ.get("MOESYS_SWEEP") == "1" else 4


def on_random_meshes(folder: Path, num_meshes: int) -> list[str]:
    """Returns the refusal of each mesh with ranks in random order, or an empty string."""
    generator, refused = torch.Generator().manual_seed(0), []
    wanted = drawn("qwen3_moe", EXPERTS)
    losses = [wanted(input_ids=text(rank), labels=text(rank)).loss for rank in range(4)]
    (sum(losses) / 4).backward()
    norm = nn.utils.get_total_norm([each.grad for each in wanted.parameters()])
    delayed = FSEP.replace(sharding=FSEP.sharding.replace(delay_reshard=True))
    for number in range(num_meshes):
        strategy = (LENT, FSEP, delayed)[number % 3]
        sizes = [(4,), (2, 2), (2, 2), (4, 1), (1, 4)][number // 2]
        order = torch.randperm(4, generator=generator).view(sizes)
        mesh = DeviceMesh("cpu", order, mesh_dim_names=("dp", "ep")[-len(sizes) :])
        model = drawn("qwen3_moe", EXPERTS)
        try:
            sharding = strategy.sharding.replace(slots_per_rank=12)
            runtime = ms.parallelize(model, strategy.replace(sharding=sharding), mesh)
        except ValueError as error:
            refused.append(str(error))
            continue
        refused.append("")
        loss = model(input_ids=text(dist.get_rank()), labels=text(dist.get_rank())).loss
        loss.backward()
        runtime.close()
        torch.testing.assert_close(loss, losses[dist.get_rank()], rtol=1e-5, atol=0)
        torch.testing.assert_close(ms.clip_grad_norm_(model, 1e6), norm, rtol=1e-5, atol=0)
        for name, parameter in model.named_parameters():
            each = wanted.get_parameter(name)
            torch.testing.assert_close(parameter.grad.full_tensor(), each.grad, rtol=1e-4, atol=1e-6)
            assert torch.equal(parameter.full_tensor(), each)
        ms.hf.save_pretrained(model, folder / "hub")
        again = AutoModelForCausalLM.from_pretrained(folder / "hub")
        assert all(torch.equal(each, wanted.get_parameter(name)) for name, each in again.named_parameters())
    return refused


# tests/moe/test_meshes.py always checks it for a layer.
@pytest.mark.slow
def test_ranks_of_a_mesh_may_be_in_any_order(ranks: LocalRanks, tmp_path: Path) -> None:
    """Every rank refuses groups that cannot be put in ascending order, such as [0, 3] and [1, 2]."""
    generator, crossed = torch.Generator().manual_seed(0), []
    for number in range(NUM_MESHES):
        order = torch.randperm(4, generator=generator).view(2, 2).sort(dim=1).values.tolist()
        crossed.append(number // 2 in (1, 2) and sorted(order) == [[0, 3], [1, 2]])
    assert 0 < sum(crossed) < 4
    for refused in ranks.run(on_random_meshes, tmp_path, NUM_MESHES, timeout_s=100.0):
        assert ["cannot be put in an order in which ranks ascend" in each for each in refused] == crossed
        assert [bool(each) for each in refused] == crossed


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


def slots_in_memory(dtype: torch.dtype, policy: MixedPrecisionPolicy | None) -> tuple[Any, ...]:
    model = drawn("qwen3_moe", EXPERTS).to(dtype)
    computed = (policy and policy.param_dtype) or dtype
    sharding = ms.Ep(slot_gb_per_rank=8 * 3 * 48 * 24 * computed.itemsize / 1e9)
    strategy = LENT.replace(balance=ms.Eplb(), sharding=sharding)
    ms.parallelize(model, strategy, policy=policy).close()
    return experts_of(model)[0].schedule.slots_R


@pytest.mark.parametrize(
    ("dtype", "policy"),
    [(torch.float32, None), (torch.bfloat16, None), (torch.float32, MixedPrecisionPolicy(param_dtype=torch.float16))],
    ids=["float32", "bfloat16", "float16 by policy"],
)
def test_memory_is_as_many_slots_as_experts_in_the_compute_dtype(
    ranks: LocalRanks, dtype: torch.dtype, policy: MixedPrecisionPolicy | None
) -> None:
    assert ranks.run(slots_in_memory, dtype, policy, num_ranks=2) == [(8, 8)] * 2


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
