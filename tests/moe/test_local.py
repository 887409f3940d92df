"""One rank on kernels: nothing waits for the device, with the bits of the way that does, and counts when they are read.

The interpreter's tensors are on the CPU; they stand for those of a GPU, where reading one would make the host wait.
"""

from __future__ import annotations

import copy
import json
from typing import Any

import pytest
import torch
from conftest import assert_equal
from harness import Stack
from host_waits import host_waits_refused
from torch import Tensor

import moesys as ms
from moesys.moe.masters import DTYPES
from moesys.overlap.chunked import ChunkedExecutor
from moesys.overlap.experts_triton import TritonExperts

SHAPE = ms.ModelShape(
    hidden_size=20,
    intermediate_size=12,
    num_experts=3,
    top_k=2,
    scoring_func="sigmoid",
    router_bias_update_rate=0.01,
    router_aux_loss_coef=0.1,
)
EP = ms.Strategy(name="ep")
# A layout of its own accord, with two slots for some experts.
LAER = ms.Strategy(name="laer", sharding=ms.Fsep(slots_per_rank=5), balance=ms.Laer(), overlap=ms.Pipelined(chunks=3))
BEHIND = ms.Strategy(
    name="behind", sharding=ms.Fsep(slots_per_rank=3, prefetch_layers=1, delay_reshard=True), balance=ms.Greedy()
)


class ThroughRoutes(TritonExperts):
    """Kernels by ``ChunkedExecutor``, whose plans hosts make."""

    by_tables = False


def checks_copies(frame: Any) -> bool:
    """Returns whether the frame checks a copy, which goes by pinned memory on a GPU and is read when it has arrived."""
    is_copy = frame.f_globals.get("__name__") == "moesys.kernels.launch" and frame.f_back is not None
    return is_copy and frame.f_back.f_code.co_name == "check"


def tokens(count: int, seed: int = 0) -> Tensor:
    return torch.randn(count, SHAPE.hidden_size, generator=torch.Generator().manual_seed(seed))


def stack(strategy: ms.Strategy, dtype: str, compute: TritonExperts) -> Stack:
    model = Stack(SHAPE.replace(dtype=dtype), strategy, num_layers=2)
    for layer in model.moe:
        layer.experts.expert_compute = compute
        if isinstance(compute, ThroughRoutes):
            layer.experts._executors[compute] = ChunkedExecutor(layer.experts.context, compute)
    return model


def train(model: Stack, counts: list[int], checkpointed: bool = False) -> list[Tensor]:
    """A step of so many tokens in each micro-batch: outputs, dx, gradients, and parameters and buffers after it."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    found = []
    for seed, count in enumerate(counts):
        x = tokens(count, seed).requires_grad_()
        y = model(x, checkpointed)
        (y.square().sum() + ms.router_loss(model)).backward()
        found += [y.detach(), x.grad]
    found += [parameter.grad for parameter in model.parameters()]
    ms.clip_grad_norm_(model, 1.0)
    optimizer.step()
    ms.update_router_bias(model)
    return found + [tensor.detach().clone() for tensor in (*model.parameters(), *model.buffers())]


@pytest.mark.parametrize(
    ("strategy", "dtype", "counts", "linked", "checkpointed"),
    [
        pytest.param(EP, "float32", [9, 4], False, False, marks=pytest.mark.slow),
        (EP, "bfloat16", [13], False, False),
        (LAER, "bfloat16", [7], False, True),
        (BEHIND, "float32", [7, 7], True, False),
        (EP, "bfloat16", [0], False, False),
    ],
    ids=["float32", "casts kept", "duplicates, chunks, recomputed", "linked, gradients come later", "no tokens"],
)
def test_the_host_never_waits_and_no_bit_changes(
    strategy: ms.Strategy, dtype: str, counts: list[int], linked: bool, checkpointed: bool
) -> None:
    results = []
    for compute in (TritonExperts(), ThroughRoutes()):
        model = stack(strategy, dtype, compute)
        runtime = ms.link(model) if linked else None
        if type(compute) is TritonExperts:
            with host_waits_refused(checks_copies):
                results.append(train(model, counts, checkpointed))
        else:
            results.append(train(model, counts, checkpointed))
        if runtime is not None:
            runtime.close()
    if strategy is LAER:
        assert model.moe[0].experts.schedule.layout.num_duplicates == 2
    assert_equal(*results)


def test_the_host_waits_where_it_plans() -> None:
    waits = r"moesys\.(moe\.planners|overlap)\S* line \d+, calls \w+, which waits for the device"
    with host_waits_refused(checks_copies), pytest.raises(RuntimeError, match=waits):
        train(stack(EP, "float32", ThroughRoutes()), [5])


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize(
    "strategy", [EP, LAER, EP.replace(reduction=ms.LayoutInvariant())], ids=["ep", "laer", "invariant"]
)
def test_the_short_way_on_a_cpu_has_the_bits_of_routes(strategy: ms.Strategy, dtype: str) -> None:
    results = []
    for through_routes in (False, True):
        model = Stack(SHAPE.replace(dtype=dtype), strategy, num_layers=2)
        for layer in model.moe if through_routes else ():
            compute = layer.experts.computed_by(DTYPES[dtype], "cpu")
            layer.experts._executors[compute] = ChunkedExecutor(layer.experts.context, compute)
        results.append(train(model, [32, 0, 64], checkpointed=strategy is LAER))
    assert_equal(*results)


def layers(strategy: ms.Strategy = EP) -> tuple[ms.MoELayer, ms.MoELayer]:
    """One on kernels, one that counts on the host."""
    on_kernels, on_slots = (ms.MoELayer(SHAPE, strategy) for _ in range(2))
    on_kernels.expert_compute = TritonExperts()
    return on_kernels, on_slots


def test_counts_are_read_late_and_are_those_of_the_host() -> None:
    on_kernels, on_slots = layers()
    for seed in range(3):
        for layer in (on_kernels, on_slots):
            layer(tokens(5 + seed, seed))
    copied = copy.deepcopy(on_kernels)
    for layer in (on_kernels, copied):
        assert layer.last_plan == on_slots.last_plan
        assert layer.last_plan is layer.last_plan
        assert layer.metrics().tokens_E == on_slots.metrics().tokens_E
        assert layer.experts.get_extra_state() == on_slots.experts.get_extra_state()
        assert layer.experts.counted_E.tolist() == on_slots.experts.counted_E.tolist()
    assert json.loads(on_kernels.experts.get_extra_state())["micro_batch"] == 3
    for layer in (on_kernels, on_slots):
        ms.update_router_bias(layer)
        assert layer.experts.counted_E.count_nonzero() == 0
    assert torch.equal(on_kernels.router.e_score_correction_bias, on_slots.router.e_score_correction_bias)


def test_a_state_of_either_is_taken_up_by_the_other() -> None:
    on_kernels, on_slots = layers(LAER)
    for layer in (on_kernels, on_slots):
        layer(tokens(5))
    for source, target in ((on_kernels, on_slots), (on_slots, on_kernels)):
        resumed = copy.deepcopy(target)
        resumed.experts.set_extra_state(source.experts.get_extra_state())
        resumed(tokens(6, seed=1))
        assert resumed.last_plan.turn == 1
        assert int(resumed.experts.counted_E.sum()) == 22
        assert resumed.experts.schedule.events == []


def test_evaluation_counts_nothing() -> None:
    on_kernels, _ = layers()
    on_kernels.eval()(tokens(5))
    with torch.no_grad():
        on_kernels.train()(tokens(5))
    assert on_kernels.experts.schedule.micro_batch == 0
    assert on_kernels.experts.counted_E.count_nonzero() == 0
    assert on_kernels.last_plan.load.total == 10


def test_x_and_h_are_saved_for_backward() -> None:
    """Besides what lives anyway: masters and routing weights."""
    kept: list[Tensor] = []
    layer = ms.MoELayer(SHAPE.replace(dtype="bfloat16"), EP)
    layer.experts.expert_compute = TritonExperts()
    x = tokens(7)
    with torch.autograd.graph.saved_tensors_hooks(lambda tensor: (kept.append(tensor), tensor)[1], lambda t: t):
        layer(x)
    H, I, rows = SHAPE.hidden_size, SHAPE.intermediate_size, 7 * SHAPE.top_k
    assert sorted(t.shape for t in kept if t.dtype == torch.bfloat16) == sorted([(7, H), (rows, 2 * I)])
