"""Experts without a router, with masters of their own and with somebody else's, over real ranks."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import torch.distributed as dist
from conftest import assert_equal
from harness import whole
from shuffling_planner import ShufflingPlanner
from test_host_forms import batch as batch_of
from torch import Tensor, nn
from torch.distributed.tensor import Shard, distribute_tensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils.checkpoint import checkpoint

import moesys as ms
from moesys.lab.ranks.pool import LocalRanks
from moesys.moe.masters import ExpertForm
from moesys.moe.outside import OutsideExperts

H, I, E, K = 24, 16, 6, 2
SHAPE = ms.ModelShape(hidden_size=H, intermediate_size=I, num_experts=E, top_k=K)
GREEDY: dict[str, Any] = {"balance": ms.Greedy(), "split": ms.FlowSplit()}
EP = ms.Strategy(name="ep", sharding=ms.Ep(slots_per_rank=4), **GREEDY)
FSEP = ms.Strategy(name="fsep", sharding=ms.Fsep(slots_per_rank=4), **GREEDY)


def batch(number: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    return batch_of(number, dist.get_rank(), dist.get_world_size())


def run(experts: ms.Experts, parameters: list[nn.Parameter]) -> list[Tensor]:
    """Outputs and all gradients of three batches."""
    experts.schedule.source = ShufflingPlanner()
    found = []
    for number in range(3):
        x_TH, expert_TK, weight_TK, dy_TH = batch(number)
        inputs = x_TH.requires_grad_(), weight_TK.requires_grad_()
        y_TH = experts(inputs[0], expert_TK, inputs[1])
        y_TH.backward(dy_TH)
        found += [y_TH.detach(), *(each.grad for each in inputs)]
    return [*found, *(whole(parameter.grad) for parameter in parameters)]


def outside(strategy: ms.Strategy, tensors: dict[str, Tensor], cluster: Any = None, **options: Any) -> Any:
    """Experts whose parameters are ``tensors``, sharded as ``strategy`` does, and those parameters."""
    mesh = dist.device_mesh.init_device_mesh("cpu", (dist.get_world_size(),))
    parameters = {}
    for name, tensor in tensors.items():
        placement = Shard(0)
        if isinstance(strategy.sharding, ms.Fsep):
            placement = Shard(2 if name == "gate_up" and not options.get("transposed") else 1)
        parameters[name] = nn.Parameter(distribute_tensor(tensor, mesh, [placement]))
    held = OutsideExperts(lambda: parameters, **options)
    return ms.Experts(SHAPE, strategy, mesh, cluster=cluster, outside=held), [*parameters.values()]


def own_and_outside(strategy: ms.Strategy, cluster: ms.ClusterSpec | None = None) -> tuple[list[Tensor], list[Tensor]]:
    experts = ms.Experts(SHAPE, strategy, cluster=cluster, seed=3)
    found = run(experts, [experts.masters])
    parts = ExpertForm.of(SHAPE).views(whole(experts.masters).detach())
    parts = {name: each.contiguous() for name, each in parts.items()}
    *others, dgate_up, ddown = run(*outside(strategy, parts, cluster))
    return found, [*others, torch.cat([dgate_up.flatten(1), ddown.flatten(1)], dim=1)]


NODES = ms.ClusterSpec(num_nodes=2, ranks_per_node=2)


@pytest.mark.parametrize(
    ("sharding", "cluster"),
    [
        (EP.sharding, None),
        (FSEP.sharding, None),
        (ms.Ep(slots_per_rank=4, lend="hierarchical"), NODES),
        (ms.Fsep(slots_per_rank=4, restore="hierarchical", reshard="hierarchical"), NODES),
    ],
    ids=["ep", "fsep", "ep by node", "fsep by node"],
)
def test_where_masters_are_kept_changes_no_bit(
    ranks: LocalRanks, sharding: ms.Ep | ms.Fsep, cluster: ms.ClusterSpec | None
) -> None:
    strategy, num_ranks = EP.replace(sharding=sharding), 4 if cluster else 2
    for own, kept_outside in ranks.run(own_and_outside, strategy, cluster, num_ranks=num_ranks, timeout_s=240):
        assert_equal(own, kept_outside)


DOWN = torch.zeros(E, H, I)
FUSED: dict[str, Any] = {"gate_up": torch.zeros(E, 2 * I, H), "down": DOWN}


def test_parts_that_have_changed_since_are_refused() -> None:
    parts = dict(FUSED)
    experts = ms.Experts(SHAPE, ms.Strategy(name="ep"), outside=OutsideExperts(lambda: parts))
    inputs = torch.zeros(3, H), torch.zeros(3, K, dtype=torch.int64), torch.ones(3, K)
    parts["down_bias"] = DOWN[:, :, 0]
    with pytest.raises(ValueError, match=r"have the parts .*'down_bias'.* now, and were made of"):
        experts(*inputs)
    del parts["down_bias"]
    parts["down"] = DOWN[:3]
    with pytest.raises(ValueError, match=r"'down' of shape \(3, 24, 16\), not this rank's part of the exp"):
        experts(*inputs)


def test_outside_masters_are_read_where_they_lie() -> None:
    gate_up, down = (torch.nn.Parameter(torch.randn(*sizes)) for sizes in ((E, 2 * I, H), (E, H, I)))
    held = OutsideExperts(lambda: {"gate_up": gate_up, "down": down})
    for strategy in (ms.Strategy(name="ep"), FSEP.replace(sharding=ms.Fsep(slots_per_rank=E))):
        experts = ms.Experts(SHAPE, strategy, outside=held)
        for dtype in (torch.float32, torch.bfloat16):
            stacked = experts.store.start_restore(experts.schedule.layout, dtype, 1).finish().stacked()
            is_master = stacked.gate_up.data_ptr() == gate_up.data_ptr() and stacked.down.data_ptr() == down.data_ptr()
            assert is_master == (dtype == torch.float32)
            assert torch.equal(stacked.gate_up, gate_up.to(dtype))
            assert torch.equal(stacked.down, down.to(dtype))
        assert experts.store.masters.at_hand
        with pytest.raises(TypeError, match="a copy would read the parameters of the original"):
            copy.deepcopy(experts)


def test_computed_masters_are_not_read_ahead() -> None:
    """Backward would have those of another moment than its forward. Nor are they computed to see where they are."""
    factor = nn.Parameter(torch.ones(()))
    gate_up, down = torch.randn(E, 2 * I, H), torch.randn(E, H, I)
    times_read = []

    def read() -> dict[str, Tensor]:
        times_read.append(len(times_read))
        return {"gate_up": gate_up * factor, "down": down * factor}

    experts = ms.Experts(SHAPE, ms.Strategy(name="ep"), outside=OutsideExperts(read))
    experts(torch.randn(3, H), torch.zeros(3, K, dtype=torch.int64) + torch.arange(K), torch.ones(3, K))
    times_read.clear()
    assert not experts.store.masters.at_hand
    assert experts.store.masters.device == gate_up.device
    assert not times_read


def computed(strategy: ms.Strategy, checkpointed: bool) -> tuple[list[Tensor], int]:
    """Outputs and gradients of experts that are computed from a factor, and how many experts are kept for backward
    besides those that were lent.
    """
    parts = {"gate_up": torch.randn(E, 2 * I, H), "down": torch.randn(E, H, I)}
    mesh = dist.device_mesh.init_device_mesh("cpu", (dist.get_world_size(),))
    local = {name: distribute_tensor(part, mesh, [Shard(0)]).to_local() for name, part in parts.items()}
    factor, kept = nn.Parameter(torch.full((), 0.3)), []

    def read() -> dict[str, Tensor]:
        now = {name: part * factor for name, part in local.items()}
        kept.extend(StorageWeakRef(part.untyped_storage()) for part in now.values())
        return now

    experts = ms.Experts(SHAPE, strategy, mesh, outside=OutsideExperts(read))
    experts.schedule.source = ShufflingPlanner()
    found, alive = [], 0
    for number in range(3):
        x_TH, expert_TK, weight_TK, dy_TH = batch(number)
        x_TH.requires_grad_()
        if checkpointed:
            y_TH = checkpoint(experts, x_TH, expert_TK, weight_TK, use_reentrant=False)
        else:
            y_TH = experts(x_TH, expert_TK, weight_TK)
        alive += sum(not each.expired() for each in kept)
        y_TH.backward(dy_TH)
        found += [y_TH.detach(), x_TH.grad, factor.grad.clone()]
    return found, alive


def both_computed(strategy: ms.Strategy) -> list[tuple[list[Tensor], int]]:
    found = []
    for checkpointed in (False, True):
        torch.manual_seed(0)
        found.append(computed(strategy, checkpointed))
    return found


@pytest.mark.parametrize("strategy", [ms.Strategy(name="ep"), EP], ids=["ep", "lent"])
def test_computed_masters_are_not_kept_where_checkpoints_are(ranks: LocalRanks, strategy: ms.Strategy) -> None:
    for (wanted, kept), (found, kept_by_checkpoint) in ranks.run(both_computed, strategy, num_ranks=2):
        assert kept
        assert not kept_by_checkpoint
        assert_equal(found, wanted)
