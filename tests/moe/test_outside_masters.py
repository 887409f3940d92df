"""Experts without a router, with masters of their own and with somebody else's, over real ranks."""

from __future__ import annotations

import weakref
from itertools import product
from typing import Any

import pytest
import torch
import torch.distributed as dist
from conftest import assert_equal
from harness import summed, whole
from shuffling_planner import ShufflingPlanner
from test_host_forms import batch as batch_of
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Shard, distribute_tensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils.checkpoint import checkpoint

import moesys as ms
from moesys.lab.ranks.pool import LocalRanks
from moesys.moe.masters import ExpertForm, Part
from moesys.moe.outside import OutsideExperts
from moesys.moe.store import ExpertStore, RestoredExperts
from moesys.overlap.executor import ExpertWeights

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


def outside(
    strategy: ms.Strategy, tensors: dict[str, Tensor], cluster: ms.ClusterSpec | None = None, **options: Any
) -> Any:
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


@pytest.mark.parametrize("strategy", [EP, FSEP], ids=["ep", "fsep"])
def test_where_masters_are_kept_changes_no_bit(ranks: LocalRanks, strategy: ms.Strategy) -> None:
    for own, kept_outside in ranks.run(own_and_outside, strategy, num_ranks=2):
        assert_equal(own, kept_outside)


@pytest.mark.parametrize(
    "sharding",
    [
        ms.Ep(slots_per_rank=4, lend="hierarchical"),
        ms.Fsep(slots_per_rank=4, restore="hierarchical", reshard="hierarchical"),
    ],
    ids=["ep", "fsep"],
)
def test_nor_where_experts_travel_node_by_node(ranks: LocalRanks, sharding: ms.Ep | ms.Fsep) -> None:
    nodes = ms.ClusterSpec(num_nodes=2, ranks_per_node=2)
    for own, kept_outside in ranks.run(own_and_outside, EP.replace(sharding=sharding), nodes, timeout_s=240):
        assert_equal(own, kept_outside)


def biased(strategy: ms.Strategy) -> tuple[list[Tensor], list[Tensor]]:
    """Transposed projections with biases, and what plain torch makes of all ranks' tokens."""
    generator = torch.Generator().manual_seed(4)
    shapes = {"gate_up": (H, 2 * I), "down": (I, H), "gate_up_bias": (2 * I,), "down_bias": (H,)}
    tensors = {name: torch.randn(E, *shape, generator=generator) / 5 for name, shape in shapes.items()}
    found = run(*outside(strategy, tensors, transposed=True))
    up, down, up_bias, down_bias = parameters = [tensor.requires_grad_() for tensor in tensors.values()]
    expected = []
    for number in range(3):
        x_TH, expert_TK, weight_TK, dy_TH = batch(number)
        x_TH.requires_grad_(), weight_TK.requires_grad_()
        h_TKU = torch.einsum("th,tkhu->tku", x_TH, up[expert_TK]) + up_bias[expert_TK]
        gate, value = h_TKU.chunk(2, dim=-1)
        y_TKH = torch.einsum("tki,tkih->tkh", nn.functional.silu(gate) * value, down[expert_TK])
        y_TH = ((y_TKH + down_bias[expert_TK]) * weight_TK[..., None]).sum(dim=1)
        y_TH.backward(dy_TH)
        expected += [y_TH.detach(), x_TH.grad, weight_TK.grad]
    return found, [*expected, *(summed(parameter.grad) for parameter in parameters)]


@pytest.mark.parametrize("strategy", [EP, FSEP.replace(overlap=ms.Pipelined(chunks=2))], ids=["ep", "fsep"])
def test_biases_and_transposed_projections(ranks: LocalRanks, strategy: ms.Strategy) -> None:
    for found, expected in ranks.run(biased, strategy, num_ranks=2):
        torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)


def misfitting() -> None:
    whole_ones = {part.name: torch.zeros(E, *part.shape) for part in ExpertForm.of(SHAPE).parts}
    ms.Experts(SHAPE, EP, outside=OutsideExperts(lambda: whole_ones))(*batch(1)[:3])


def test_masters_of_another_shape_are_refused(ranks: LocalRanks) -> None:
    with pytest.raises(
        Exception, match=r"'gate_up' of shape \(6, 32, 24\), .* this rank's part of the experts, \(3, 32, 24\); shard"
    ):
        ranks.run(misfitting, num_ranks=2)


ALONE = ms.Strategy(name="ep")
UP, DOWN = torch.zeros(E, I, H), torch.zeros(E, H, I)
FUSED: dict[str, Any] = {"gate_up": torch.zeros(E, 2 * I, H), "down": DOWN}
MEGA = ALONE.replace(overlap=ms.MegaKernel())


@pytest.mark.parametrize(
    ("parts", "options", "strategy", "message"),
    [
        (
            {"w1": UP, "w2": DOWN},
            {},
            ALONE,
            "have the parts \\['w1', 'w2'\\] and cannot have 'w1'; read.. gives down and",
        ),
        (FUSED | {"up": UP}, {}, ALONE, "the parts \\['gate_up', 'down', 'up'\\] and cannot have 'up'; read"),
        ({"gate": UP, "up": UP}, {}, ALONE, "and miss 'down'"),
        (FUSED | {"gate_bias": UP[:, :, 0]}, {}, ALONE, "and cannot have 'gate_bias'"),
        ({"gate": UP, "up": UP, "down": DOWN, "up_bias": UP[:, :, 0]}, {}, ALONE, "and miss 'gate_bias'"),
        ({"up": UP, "down": DOWN}, {}, ALONE, r"no gate, which SwiGLU needs; give OutsideExperts\(activation="),
        ({"gate": UP, "up": UP, "down": DOWN}, {"transposed": True}, ALONE, r"let read\(\) give .mT of each matrix"),
        (
            FUSED | {"down": DOWN.mT},
            {},
            ALONE,
            r"'down' of shape \(6, 16, 24\), not .* \(6, 24, 16\); declare .*transposed=True",
        ),
        (
            FUSED | {"down": DOWN[:, 1:]},
            {},
            ALONE,
            r"'down' of shape \(6, 23, 16\), not .*; give tensors of \(24, 16\) for each",
        ),
        (
            FUSED | {"down": DOWN[:5]},
            {},
            ALONE,
            r"'down' of shape \(5, 24, 16\), not .* \(6, 24, 16\); shard them over exactly",
        ),
        (
            FUSED | {"down": [*DOWN][:5]},
            {},
            ALONE,
            r"'down' of shape \(5, 24, 16\), not .* \(6, 24, 16\); shard them over",
        ),
        (FUSED | {"down": []}, {}, ALONE, "no tensor of 'down' on this rank; use fewer ranks"),
        (
            FUSED | {"down": DOWN.bfloat16()},
            {},
            ALONE,
            "several dtypes, gate_up of torch.float32, down of torch.bfloat16; give",
        ),
        (
            FUSED,
            {"weights_on": "inputs"},
            ALONE,
            "weights_on='inputs': .* another function, .*; multiply \"outputs\" or",
        ),
        (
            FUSED | {"down_bias": DOWN[:, :, 0]},
            {},
            MEGA,
            "MegaKernel, whose kernels .*, and these experts have biases; use",
        ),
        (FUSED, {"activation": torch.relu}, MEGA, "and these experts have another activation; use Sequential"),
        (
            {name: part.mT for name, part in FUSED.items()},
            {"transposed": True},
            MEGA,
            r"and these experts have matrices \[in, out\]; let read\(\) give .mT of each and leave transposed out, or",
        ),
        (
            FUSED,
            {},
            FSEP.replace(sharding=ms.Fsep(slots_per_rank=E, delay_reshard=True)),
            "'fsep' has delay_reshard=True, and who keeps .*; use delay_reshard=False, or give OutsideExperts",
        ),
    ],
)
def test_what_does_not_fit_is_refused_when_experts_are_made(
    parts: Any, options: dict[str, Any], strategy: ms.Strategy, message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        ms.Experts(SHAPE, strategy, outside=OutsideExperts(lambda: parts, **options))


def test_parts_that_have_changed_since_are_refused() -> None:
    parts = dict(FUSED)
    experts = ms.Experts(SHAPE, ms.Strategy(name="ep"), outside=OutsideExperts(lambda: parts))
    inputs = torch.zeros(3, H), torch.zeros(3, K, dtype=torch.int64), torch.ones(3, K)
    parts["down_bias"] = DOWN[:, :, 0]
    with pytest.raises(ValueError, match=r"have the parts .*'down_bias'.* now, and were made of"):
        experts(*inputs)
    del parts["down_bias"]
    parts["down"] = DOWN[:3]
    with pytest.raises(
        ValueError, match=r"'down' of shape \(3, 24, 16\), not this rank's part of the experts, \(6, 24"
    ):
        experts(*inputs)


def test_mega_kernels_compute_in_the_dtype_of_the_shape() -> None:
    strategy = ms.Strategy(name="mega", overlap=ms.MegaKernel())
    experts = ms.Experts(SHAPE, strategy, outside=OutsideExperts(lambda: FUSED))
    with pytest.raises(
        ValueError, match=r"x is bfloat16 and strategy 'mega' has .* rows of float32; give x in that dtype"
    ):
        experts(torch.zeros(3, H).bfloat16(), torch.zeros(3, K, dtype=torch.int64), torch.ones(3, K))


@pytest.mark.parametrize(("num_ranks", "dim"), [(3, 0), (5, 1)])
def test_a_tensor_that_ranks_do_not_divide_is_refused(num_ranks: int, dim: int) -> None:
    with pytest.raises(ValueError, match=r"which do not divide .*; use ranks that do, or Ep"):
        Part("up", (32, 24), dim).sliced_shape(num_ranks)


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
def test_computed_masters_are_not_kept_where_a_checkpoint_computes_them_again(
    ranks: LocalRanks, strategy: ms.Strategy
) -> None:
    for (wanted, kept), (found, kept_by_checkpoint) in ranks.run(both_computed, strategy, num_ranks=2):
        assert kept
        assert not kept_by_checkpoint
        assert_equal(found, wanted)


def switched(strategy: ms.Strategy, ahead: int) -> tuple[list[Tensor], int]:
    """Outputs and gradients of two layers whose experts are computed or not, as a switch says that is turned between
    evaluation, both layers and backward; and how often experts were there ahead.
    """
    on, num_ahead, take = False, 0, ExpertStore.take_prefetched

    def counted(store: ExpertStore, *call: Any) -> Any:
        nonlocal num_ahead
        found = take(store, *call)
        num_ahead += found is not None
        return found

    def layer(index: int) -> tuple[ms.Experts, list[nn.Parameter]]:
        def read() -> dict[str, Tensor]:
            return {name: 2 * each if on else each for name, each in parts.items()}

        generator = torch.Generator().manual_seed(index)
        tensors = {
            "gate_up": torch.randn(E, 2 * I, H, generator=generator) / 5,
            "down": torch.randn(E, H, I, generator=generator) / 5,
        }
        dims = {"gate_up": 1, "down": 0} if isinstance(strategy.sharding, ms.Fsep) else {}
        rank, R = dist.get_rank(), dist.get_world_size()
        parts = {
            name: nn.Parameter(each.chunk(R, dim=1 + dims[name] if dims else 0)[rank].clone())
            for name, each in tensors.items()
        }
        outside = OutsideExperts(read)
        sharding = strategy.sharding.replace(prefetch_layers=ahead)
        made = ms.Experts(SHAPE, strategy.replace(sharding=sharding), layer_index=index, outside=outside)
        return made, [*parts.values()]

    layers, parameters = zip(*map(layer, range(2)), strict=True)
    runtime = ms.link(nn.ModuleList(layers))
    found = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ExpertStore, "take_prefetched", counted)
        for number, switches in enumerate(product([False, True], repeat=4)):
            x_TH, expert_TK, weight_TK, dy_TH = batch(number)
            on = switches[0]
            with torch.no_grad():
                found.append(layers[1](layers[0](x_TH, expert_TK, weight_TK), expert_TK, weight_TK))
            y_TH = x_TH.requires_grad_()
            for each, switch in zip(layers, switches[1:], strict=False):
                on = switch
                y_TH = y_TH + each(y_TH, expert_TK, weight_TK)
            on = switches[3]
            y_TH.backward(dy_TH)
            found += [y_TH.detach(), x_TH.grad]
    runtime.close()
    return [*found, *(each.grad for of_layer in parameters for each in of_layer)], num_ahead


def switched_ahead(strategy: ms.Strategy) -> list[tuple[list[Tensor], int]]:
    return [switched(strategy, ahead) for ahead in (0, 1)]


# Experts of loaded models do so always: tests/hf/test_lora_on_experts.py.
@pytest.mark.slow
@pytest.mark.parametrize("strategy", [EP, FSEP], ids=["lent", "fsep"])
def test_experts_that_travel_ahead_are_those_of_the_pass(ranks: LocalRanks, strategy: ms.Strategy) -> None:
    """Whatever is computed, with or without gradients, when the layer before, an evaluation or backward runs."""
    # Greedy plans other layouts where experts travel ahead.
    strategy = strategy.replace(balance=ms.Eplb())
    for (wanted, none), (found, num_ahead) in ranks.run(switched_ahead, strategy, num_ranks=2, timeout_s=120.0):
        assert none == 0
        assert num_ahead > 0
        assert_equal(found, wanted)


@pytest.mark.parametrize("listed", [False, True])
def test_only_gate_and_up_are_joined_and_only_as_long_as_a_pass_runs(
    monkeypatch: pytest.MonkeyPatch, listed: bool
) -> None:
    parts = {
        name: nn.Parameter(torch.randn(E, *size)) for name, size in (("gate", (I, H)), ("up", (I, H)), ("down", (H, I)))
    }
    if listed:
        parts = {name: [nn.Parameter(each.detach().clone()) for each in part] for name, part in parts.items()}
    experts = ms.Experts(SHAPE, ms.Strategy(name="ep"), outside=OutsideExperts(lambda: parts))
    joined, usable = [], RestoredExperts._usable

    def noted(restored: RestoredExperts, masters: Any) -> ExpertWeights:
        weights = usable(restored, masters)
        joined.append(weakref.ref(weights.gate_up))
        assert weights.down.data_ptr() in {each.data_ptr() for each in parts["down"]}
        return weights

    monkeypatch.setattr(RestoredExperts, "_usable", noted)
    x_TH, expert_TK = torch.randn(E, H, requires_grad=True), torch.arange(E)[:, None].repeat(1, K)
    y_TH = experts(x_TH, expert_TK, torch.ones(E, K))
    assert len(joined) == E
    assert not any(each() is not None for each in joined)
    y_TH.sum().backward()
    assert len(joined) == 2 * E


def test_masters_are_parameters_and_x_may_be_of_any_float() -> None:
    experts = ms.Experts(SHAPE, ms.Strategy(name="ep"))
    assert [name for name, _ in experts.named_parameters()] == ["masters"]
    assert not isinstance(experts.masters, DTensor)
    x_TH, expert_TK, weight_TK = torch.randn(5, H).bfloat16(), torch.rand(5, E).topk(K).indices, torch.rand(5, K)
    assert experts(x_TH, expert_TK, weight_TK.bfloat16()).dtype == torch.bfloat16
