"""torch's utilities over all parameters, some of which are ``DTensor``s: ``GradScaler``, clipping, averages."""

from __future__ import annotations

from itertools import product
from typing import Any

import pytest
import torch
import torch.distributed as dist
from conftest import assert_equal, refusal
from harness import small_model
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor

import moesys as ms
from moesys.lab.ranks.pool import LocalRanks
from moesys.moe.masters import local_part

# Under Ep, the last of 4 ranks has no expert.
SHAPE = ms.ModelShape(hidden_size=16, intermediate_size=8, num_experts=6, top_k=2, n_shared_experts=1, dtype="float16")
EP = ms.Strategy(name="ep")
FSEP = ms.Strategy(name="fsep", sharding=ms.Fsep(slots_per_rank=3))
SCALE, BOTH = 64.0, (EP, FSEP)
OPTIMIZERS = {
    "one group": (1, {"foreach": False}),
    "two groups": (2, {}),
    "foreach": (2, {"foreach": True}),
    "fused": (2, {"fused": True}),
}


def step(strategy: ms.Strategy, how: str, infinite: str | None, clipped: bool) -> dict[str, Any]:
    """One step; ``infinite``: the parameters of which the first has an infinite gradient on rank 1."""
    layer = ms.MoELayer(SHAPE, strategy)
    experts = [each for each in layer.parameters() if isinstance(each, DTensor)]
    others = [each for each in layer.parameters() if not isinstance(each, DTensor)]
    num_groups, options = OPTIMIZERS[how]
    groups: Any = [{"params": experts}, {"params": others}] if num_groups == 2 else layer.parameters()
    optimizer = torch.optim.AdamW(groups, lr=1e-2, eps=1e-3, **options)
    scaler = torch.amp.GradScaler("cpu", init_scale=SCALE)
    before = bits(layer)
    x = torch.randn(8, 16, generator=torch.Generator().manual_seed(dist.get_rank()))
    scaler.scale(layer(x).square().sum()).backward()
    ms.sync_gradients(layer)
    scaled = [local_part(each.grad).clone() for each in layer.parameters()]
    if infinite is not None and dist.get_rank() == 1:
        local_part({"experts": experts, "others": others}[infinite][0].grad).view(-1)[0] = torch.inf
    if clipped:
        scaler.unscale_(optimizer)
        ms.clip_grad_norm_(layer, 1e6)
    scaler.step(optimizer)
    scaler.update()
    unscaled = [local_part(each.grad) for each in layer.parameters()]
    return {
        "changed": bits(layer) != before,
        "scale": scaler.get_scale(),
        "others": [each.detach() for each in others],
        "stepped": [local_part(each.detach()) for each in layer.parameters()],
        "unscaled": all(torch.equal(a / SCALE, b) for a, b in zip(scaled, unscaled, strict=True)),
    }


def bits(model: nn.Module) -> list[bytes]:
    return [local_part(each.detach()).numpy().tobytes() for each in model.parameters()]


Case = tuple[ms.Strategy, str, str | None, bool]


def steps(cases: list[Case]) -> list[dict[str, Any]]:
    return [step(*case) for case in cases]


def test_steps_are_scaled(ranks: LocalRanks) -> None:
    """With every optimizer, clipped or not, and to the same parameters, however they are grouped."""
    cases = [(strategy, how, None, clipped) for how, strategy, clipped in product(OPTIMIZERS, BOTH, (False, True))]
    first: dict[tuple[str, bool], list[Any]] = {}
    for (strategy, how, _, clipped), *results in zip(cases, *ranks.run(steps, cases), strict=True):
        assert [(each["changed"], each["scale"], each["unscaled"]) for each in results] == [(True, SCALE, True)] * 4
        for result in results[1:]:
            assert_equal(result["others"], results[0]["others"])
        stepped = [each["stepped"] for each in results]
        if how != "fused":
            assert_equal(stepped, first.setdefault((strategy.name, clipped), stepped), how)


def test_all_ranks_leave_out_a_step_that_is_infinite_on_one(ranks: LocalRanks) -> None:
    places = [*(("experts", how) for how in OPTIMIZERS), ("others", next(iter(OPTIMIZERS)))]
    cases = [(strategy, how, infinite, False) for strategy, (infinite, how) in product(BOTH, places)]
    for results in zip(*ranks.run(steps, cases), strict=True):
        assert [(each["changed"], each["scale"]) for each in results] == [(False, SCALE / 2)] * 4


def step_of_model(sizes: tuple[int, int], infinite: str | None) -> tuple[bool, float]:
    """Returns whether a step changes a parallelized model (``DTensor``s on two meshes), and the scale."""
    model = small_model()
    runtime = ms.parallelize(model, EP, init_device_mesh("cpu", sizes, mesh_dim_names=("dp", "ep")))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, foreach=False)
    scaler = torch.amp.GradScaler("cpu", init_scale=SCALE)
    before = bits(model)
    ids = torch.arange(40).view(2, 20)
    scaler.scale(model(input_ids=ids, labels=ids, use_cache=False).loss).backward()
    if infinite is not None and dist.get_rank() == 1:
        gradient = next(each.grad for name, each in model.named_parameters() if infinite in name)
        local_part(gradient).view(-1)[0] = torch.inf
    scaler.step(optimizer)
    scaler.update()
    runtime.close()
    return bits(model) != before, scaler.get_scale()


@pytest.mark.parametrize(
    ("sizes", "infinite"), [((1, 4), None), *(((2, 2), infinite) for infinite in (None, "experts", "q_proj"))]
)
def test_a_model_on_two_meshes_is_scaled(ranks: LocalRanks, sizes: tuple[int, int], infinite: str | None) -> None:
    wanted = (True, SCALE) if infinite is None else (False, SCALE / 2)
    assert ranks.run(step_of_model, sizes, infinite) == [wanted] * 4


def use_other_utilities() -> dict[str, str]:
    """Does what docs/transformers.md advises, and returns the errors of torch's own utilities."""
    layer = ms.MoELayer(SHAPE, FSEP)
    layer(torch.randn(8, 16)).square().sum().backward()
    ms.sync_gradients(layer)
    said = {
        "norm": refusal(nn.utils.clip_grad_norm_, layer.parameters(), 1.0),
        "value": refusal(nn.utils.clip_grad_value_, layer.parameters(), 1e-3),
        "average": refusal(torch.optim.swa_utils.AveragedModel, layer),
        "step": refusal(torch.optim.AdamW(layer.parameters(), foreach=True).step),
    }
    nn.utils.clip_grad_value_(layer.parameters(), 1e-3, foreach=False)
    assert max(local_part(each.grad).abs().max().item() for each in layer.parameters()) <= 1e-3
    averages = {name: each.detach().clone() for name, each in layer.named_parameters()}
    before = {name: local_part(each).clone() for name, each in averages.items()}
    torch.optim.SGD(layer.parameters(), lr=10.0, foreach=False).step()
    for name, parameter in layer.named_parameters():
        averages[name].lerp_(parameter.detach(), 0.25)
        expected = before[name].lerp(local_part(parameter.detach()), 0.25)
        assert torch.equal(local_part(averages[name]), expected)
    return said


def test_other_utilities_do_what_the_documentation_says(ranks: LocalRanks) -> None:
    for said in ranks.run(use_other_utilities):
        # When torch can do these, docs/transformers.md need not advise against them.
        for name in ("norm", "value", "step"):
            assert "mixed torch.Tensor and DTensor" in said[name]
        assert "can be copied or pickled" in said["average"]
