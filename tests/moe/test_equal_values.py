"""Values that every rank should have alike, parameters and biases of routers, are compared, and differences named."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from functools import partial

import numpy as np
import pytest
import torch
import torch.distributed as dist
from conftest import assert_equal, on_ranks
from test_mismatch import EP, SHAPE, refused, tokens
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.nn.parameter import is_lazy
from torch.utils.checkpoint import checkpoint

import moesys as ms
from moesys.lab.ranks.pool import LocalRanks
from moesys.overlap.comm.channel import _digest

BIASED = SHAPE.replace(scoring_func="sigmoid")


def beside_experts(seed: int) -> nn.ModuleDict:
    """A model whose head is drawn with ``seed``."""
    torch.manual_seed(seed)
    return nn.ModuleDict({"head": nn.Linear(16, 3), "moe": ms.MoELayer(BIASED, EP)})


def differ(call: Callable[[nn.Module], object], model: nn.Module, name: str = "head.weight") -> None:
    refused(partial(call, model), f"ranks 0 and 1 differ in {name}, which every rank should have alike")


@on_ranks(2)
def test_values_that_differ_are_noticed_in_the_first_call() -> None:
    rank = dist.get_rank()
    for call in (ms.sync_gradients, ms.link):
        differ(call, beside_experts(rank))
    # One rank has loaded other values, or has moved a bias, or replicas of a sharded tensor differ.
    model = beside_experts(0)
    with torch.no_grad():
        model.moe.router.weight.mul_(1 + rank)
    differ(ms.sync_gradients, model, "moe.router.weight")
    model = beside_experts(0)
    model.moe.router.e_score_correction_bias[3] = rank / 8
    differ(ms.sync_gradients, model, "moe.router.e_score_correction_bias")
    model = beside_experts(0)
    mesh = init_device_mesh("cpu", (2, 1), mesh_dim_names=("replicate", "shard"))
    local = model.head.weight.detach() + torch.tensor(1e-7 * rank)
    model.head.weight = nn.Parameter(DTensor.from_local(local, mesh, [Replicate(), Shard(0)], run_check=False))
    differ(ms.sync_gradients, model)
    # The second call has a head that the first had not; then a router of another library has a bias.
    model = beside_experts(rank)
    ms.sync_gradients(model.moe)
    differ(ms.sync_gradients, model)
    differ(partial(ms.update_router_bias, rate=0.1), model)
    model = beside_experts(0)
    model.head.register_buffer("expert_bias", torch.tensor([1.0, rank]))
    differ(ms.link, model, "head.expert_bias")
    # A lazy parameter gets its values behind the first call.
    model = beside_experts(0)
    model["late"] = nn.LazyLinear(3)
    ms.sync_gradients(model)
    torch.manual_seed(rank)
    model.late(torch.ones(1, 16))
    differ(ms.sync_gradients, model, "late.weight")


@on_ranks(2)
def test_values_that_are_equal_or_sharded_pass() -> None:
    """Calls that must pass: shards that differ by right, and values that change after the first call."""
    model = beside_experts(0)
    for _ in range(3):
        model.moe(tokens(dist.get_rank())).sum().backward()
        ms.sync_gradients(model)
    mesh = init_device_mesh("cpu", (2,))
    local = model.head.weight.detach() + dist.get_rank()
    model.head.weight = nn.Parameter(DTensor.from_local(local, mesh, [Shard(0)], run_check=False))
    # Parts that ranks have by right: of FSDP's first version, and under Megatron's mark.
    model["wrapped"] = FullyShardedDataParallel(nn.Linear(16, 4), device_id=torch.device("cpu"), use_orig_params=True)
    model["part"] = nn.Linear(2, 3 + dist.get_rank(), bias=False)
    model.part.weight.tensor_model_parallel = True
    ms.link(model, plan_timeout_s=np.float32(5)).close()
    # Only one rank has values of what is new in the second call.
    model["late"] = nn.Linear(2, 3, bias=False, device="meta" if dist.get_rank() else "cpu")
    ms.link(model).close()
    ms.link(model).close()
    beside = ["wrapped._fsdp_wrapped_module.weight", "wrapped._fsdp_wrapped_module.bias", "part.weight", "late.weight"]
    assert [name for name, each in model.named_parameters() if each.grad is None] == [
        "head.weight",
        "head.bias",
        *beside,
    ]


# The dtypes of parameters and of what is kept beside them.
KEPT = (torch.float64, torch.complex64, torch.complex128, torch.int64, torch.int32, torch.bfloat16, torch.bool)


@on_ranks(2)
def test_a_comparison_of_values_changes_none() -> None:
    model = beside_experts(0)
    generator = torch.Generator().manual_seed(0)
    drawn = [torch.randn(5, 3, generator=generator).mul(9).to(dtype) for dtype in KEPT]
    model["kept"] = nn.ParameterList(nn.Parameter(each, requires_grad=False) for each in drawn)
    model.kept.append(nn.Parameter(drawn[0].to_sparse(), requires_grad=False))
    model["lazy"] = nn.LazyLinear(3)
    model.kept.register_buffer("expert_bias", torch.arange(4, dtype=torch.float64))
    tensors = [each for each in (*model.parameters(), *model.buffers()) if not is_lazy(each)]
    before = [each.detach().clone() for each in tensors]
    ms.link(model).close()
    ms.sync_gradients(model)
    ms.update_router_bias(model, rate=0)
    whole = [each.full_tensor() if isinstance(each, DTensor) else each.to_dense() for each in before]
    now = [each.full_tensor() if isinstance(each, DTensor) else each.to_dense() for each in tensors]
    assert len(now) > len(KEPT)
    assert_equal(now, whole)


def forgotten(synchronised: bool) -> list[str]:
    """Returns the warnings of a training of five micro-batches, two to a step."""
    layer, rank = ms.MoELayer(SHAPE, EP), dist.get_rank()
    optimizer = torch.optim.SGD(layer.parameters(), lr=0.1)
    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always")
        for number in range(5):
            checkpoint(layer, tokens(rank + 10 * number), use_reentrant=False).square().sum().backward()
            if number % 2:
                if synchronised:
                    ms.sync_gradients(layer)
                optimizer.step()
                optimizer.zero_grad()
    return [str(each.message) for each in found]


def test_gradients_that_nobody_sums_are_noticed(ranks: LocalRanks) -> None:
    assert ranks.run(forgotten, True, num_ranks=2) == [[], []]
    for said in ranks.run(forgotten, False, num_ranks=2):
        assert len(said) == 2  # in micro-batches 2 and 4
        assert all("ranks 0 and 1 have other values of gate.weight of layer 0" in text for text in said)
        assert all("call ms.sync_gradients(model) between backward and the optimizer's step" in text for text in said)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64, torch.complex64], ids=str)
def test_a_digest_depends_on_all_bits_and_not_on_where_they_lie(dtype: torch.dtype) -> None:
    for size in (1, 2, 3, 8, 13):
        memory = torch.randn(size + 1).to(dtype)
        x, elsewhere = memory[1:], memory[1:].clone()
        assert _digest(x) == _digest(elsewhere)
        for others in ([0], [size - 1], [0, size - 1], range(size)):
            changed = x.clone()
            changed[[*others]] *= -1
            assert _digest(changed) != _digest(x)
        if size > 1:
            assert _digest(x.flip(0)) != _digest(x)
    assert _digest(torch.zeros(0, 3, dtype=dtype)) == 0
    # An integer with all bits set is not digested as 0 is.
    assert _digest(torch.full((2,), -1)) != _digest(torch.zeros(2, dtype=torch.int64))
