"""Layers on meshes and groups whose ranks are in any order: the numbers of one process, or an error on every rank."""

from __future__ import annotations

import inspect
import re
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from conftest import SWEEP, on_ranks, refusal
from harness import whole
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Shard, distribute_tensor

import moesys as ms
from moesys.lab.ranks.pool import LocalRanks
from moesys.moe.outside import OutsideExperts

SHAPE = ms.ModelShape(hidden_size=16, intermediate_size=8, num_experts=8, top_k=2)
GREEDY: dict[str, Any] = {"balance": ms.Greedy(), "split": ms.FlowSplit()}
STRATEGIES = (
    ms.Strategy(name="ep"),
    ms.Strategy(name="lent", sharding=ms.Ep(slots_per_rank=5), **GREEDY),
    ms.Strategy(name="fsep", sharding=ms.Fsep(slots_per_rank=5), **GREEDY),
)


def tokens(rank: int) -> Tensor:
    return torch.randn(5 + rank, 16, generator=torch.Generator().manual_seed(rank))


def mesh_in_order(order: Tensor, ndim: int) -> DeviceMesh:
    """Returns the mesh of experts: of all ranks, or of this rank's pair."""
    if ndim == 1:
        return DeviceMesh("cpu", order, mesh_dim_names=("ep",))
    return DeviceMesh("cpu", order.view(2, 2), mesh_dim_names=("dp", "ep"))["ep"]


def gradients(layer: ms.MoELayer, ranks: list[int]) -> dict[str, Tensor]:
    layer.zero_grad()
    for rank in ranks:
        x_TH = tokens(rank)
        layer(x_TH).square().sum().backward()
    found = {name: whole(parameter.grad) for name, parameter in layer.named_parameters()}
    return found | {"y": layer(tokens(dist.get_rank())).detach()}


@on_ranks(4, 100.0)
def test_random_orders_of_ranks_compute_and_save_what_one_process_does(tmp_path: Path) -> None:
    alone, _ = dist.new_subgroups(group_size=1)
    rank, generator = dist.get_rank(), torch.Generator().manual_seed(0)
    for number in range(6 if SWEEP else 4):
        ndim, strategy = 1 + number % 2, STRATEGIES[number % 3]
        order, other = (torch.randperm(4, generator=generator) for _ in range(2))
        mesh = mesh_in_order(order, ndim)
        members = mesh.mesh.tolist()
        layer = ms.MoELayer(SHAPE, strategy, mesh, seed=number)
        reference = ms.MoELayer(SHAPE, ms.Strategy(name="ep"), alone, seed=number)
        wanted = gradients(reference, members)
        found = gradients(layer, [rank])
        # The router's is that of this rank's tokens.
        router = found.pop("router.weight")
        dist.all_reduce(router, group=layer.experts.group)
        assert found.keys() | {"router.weight"} == wanted.keys()
        torch.testing.assert_close(found | {"router.weight": router}, wanted, rtol=1e-4, atol=1e-5)
        before = reference.full_state_dict()
        dcp.save({"m": layer.state_dict()}, checkpoint_id=tmp_path / str(number))
        resumed = ms.MoELayer(SHAPE, strategy, mesh_in_order(other, 1 + number // 2 % 2), seed=100)
        state = {"m": {name: each for name, each in resumed.state_dict().items() if "extra" not in name}}
        dcp.load(state, checkpoint_id=tmp_path / str(number))
        resumed.load_state_dict(state["m"], strict=False)
        assert all(torch.equal(each, before[name]) for name, each in resumed.full_state_dict().items())


def refused(kind: str) -> None:
    rank = dist.get_rank()
    turned = DeviceMesh("cpu", torch.tensor([1, 0]))
    if kind.startswith("outside"):
        shapes = {"gate_up": (16, 16), "down": (16, 8)}
        parts = {name: distribute_tensor(torch.zeros(8, *of), turned, [Shard(0)]) for name, of in shapes.items()}
        group = None if kind == "outside" else turned
        ms.Experts(SHAPE, STRATEGIES[0], group, outside=OutsideExperts(lambda: parts))
    elif kind == "group":
        ms.MoELayer(SHAPE, STRATEGIES[0], dist.new_group([1, 0], sort_ranks=False))
    elif kind == "another's mesh":
        meshes = [DeviceMesh("cpu", torch.tensor([each])) for each in range(2)]
        ms.MoELayer(SHAPE, STRATEGIES[0], meshes[1 - rank])
    elif kind == "another's group":
        groups = [dist.new_group([each]) for each in range(2)]
        ms.MoELayer(SHAPE, STRATEGIES[0], groups[1 - rank])
    elif kind == "devices":
        ms.MoELayer(SHAPE, STRATEGIES[0], DeviceMesh("cuda", torch.arange(2)))


sorts = pytest.mark.skipif(
    "sort_ranks" not in inspect.signature(dist.new_group).parameters, reason="this torch sorts the ranks of all groups"
)


@pytest.mark.parametrize(
    ("kind", "message"),
    [
        ("outside", r"experts lie on a mesh of ranks \[1, 0\], which do not ascend .*; shard them over a mesh whose"),
        ("outside's group", r"group is a mesh of ranks \[1, 0\], whose process group has .* \[0, 1\], .*; give the"),
        pytest.param(
            "group", r"group has its ranks in the order \[1, 0\], .*; give a group whose ranks as", marks=sorts
        ),
        ("another's mesh", r"rank \d is not in group, a mesh of ranks \[\d\]; make the layer on the ranks of the mesh"),
        ("another's group", r"rank \d is not in group; make the layer on the ranks of the group only"),
        ("devices", 'group is a DeviceMesh of "cuda" devices, and the experts are on "cpu"; give device="cuda"'),
    ],
)
def test_groups_and_meshes_that_do_not_fit_are_refused(ranks: LocalRanks, kind: str, message: str) -> None:
    assert all(re.search(message, told) for told in ranks.run(refusal, refused, kind, num_ranks=2))
