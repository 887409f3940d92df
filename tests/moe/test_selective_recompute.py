"""A checkpointed region that ends with a layer runs again only what backward reads, and nothing travels home twice.
Selective activation checkpointing, which keeps what some operations gave, has the gradients of a region that is kept.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from conftest import assert_equal
from harness import small_model, whole
from torch import Tensor, nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, set_checkpoint_early_stop
from torch.utils.checkpoint import create_selective_checkpoint_contexts as selective_contexts
from torch.utils.flop_counter import FlopCounterMode

import moesys as ms
from moesys.lab.ranks.pool import LocalRanks
from moesys.overlap.alone import AloneRun

SHAPE = ms.ModelShape(hidden_size=16, intermediate_size=8, num_experts=6, top_k=3, n_shared_experts=1)
CLUSTER = ms.ClusterSpec(num_nodes=2, ranks_per_node=2)
FSEP = ms.Fsep(slots_per_rank=3, prefetch_layers=1, delay_reshard=True)
STRATEGIES = {
    "ep": ms.Strategy(name="ep"),
    "fsep, chunks": ms.Strategy(name="fsep", sharding=FSEP, balance=ms.Greedy(), overlap=ms.Pipelined(chunks=3)),
    "once a node": ms.Strategy(name="once", overlap=ms.Sequential(node_dispatch="once")),
    "sums a node": ms.Strategy(name="sums", overlap=ms.Pipelined(chunks=2, node_dispatch="once", combine="per_node")),
}
# What a block adds to its input: whether backward reads the output of the experts, for anything but a sum.
BLOCKS: dict[str, tuple[Callable[[Tensor, Tensor], Tensor], bool]] = {
    "residual": (lambda x, y: x + y, False),
    "read": (lambda x, y: x + y * y, True),
}


def gradients(strategy: ms.Strategy, block: str, how: str) -> tuple[list[bytes], dict[str, int]]:
    """Output and gradients of a checkpointed block as bits, and bytes that travelled by lane."""
    cluster = CLUSTER if dist.is_initialized() else None
    layer = ms.MoELayer(SHAPE, strategy, cluster=cluster)
    model = torch.nn.ModuleList([layer])
    ms.link(model)
    finish = BLOCKS[block][0]
    x = torch.randn(11, SHAPE.hidden_size, generator=torch.Generator().manual_seed(3)).requires_grad_()

    def run(x: Tensor) -> Tensor:
        return finish(x, layer(x))

    if how == "kept":
        y = run(x)
    elif how == "context":
        y = checkpoint(run, x, use_reentrant=False, context_fn=ms.recompute)
    else:
        with set_checkpoint_early_stop(how != "to its end"):
            y = checkpoint(run, x, use_reentrant=False)
    layer.experts.meter.clear()
    y.square().sum().backward()
    found = [y.detach(), x.grad, *(p.grad for p in layer.parameters())]
    bits = [(t.full_tensor() if hasattr(t, "full_tensor") else t).numpy().tobytes() for t in found]
    return bits, {lane: layer.experts.meter.bytes_of(lane) for lane in ("dispatch", "combine")}


@pytest.mark.parametrize(
    "name",
    ["fsep, chunks", *(pytest.param(name, marks=pytest.mark.slow) for name in ("sums a node", "ep", "once a node"))],
)
def test_nothing_travels_home_twice(ranks: LocalRanks, name: str) -> None:
    strategy = STRATEGIES[name]
    kept = ranks.run(gradients, strategy, "residual", "kept")
    for how in ("plain", "context"):
        again = ranks.run(gradients, strategy, "residual", how)
        for (bits, sent), (kept_bits, kept_sent) in zip(again, kept, strict=True):
            assert bits == kept_bits
            assert sent["combine"] == kept_sent["combine"]
        # Of all ranks, as one of them owns no expert.
        assert sum(sent["dispatch"] for _, sent in again) > sum(sent["dispatch"] for _, sent in kept)


@pytest.mark.parametrize(("block", "how"), [("read", "plain"), ("residual", "to its end")])
def test_what_is_read_is_computed(ranks: LocalRanks, block: str, how: str) -> None:
    """Where something reads the output, and where checkpoints run all again in any case."""
    strategy = STRATEGIES["ep"]
    kept = ranks.run(gradients, strategy, block, "kept")
    again = ranks.run(gradients, strategy, block, how)
    for (bits, sent), (kept_bits, kept_sent) in zip(again, kept, strict=True):
        assert bits == kept_bits
        assert sent["combine"] > kept_sent["combine"]


def gradients_where_one_rank_reads(who: int) -> list[bytes]:
    """The block of a rank that does more behind the layer than others do, with a checkpoint and without."""
    layer = ms.MoELayer(SHAPE, STRATEGIES["ep"], cluster=CLUSTER)
    found = []
    for checkpointed in (False, True):
        x = torch.randn(11, 16, generator=torch.Generator().manual_seed(dist.get_rank())).requires_grad_()

        def run(x: Tensor) -> Tensor:
            y = layer(x)
            return x + (y * torch.full((SHAPE.hidden_size,), 2.0) if dist.get_rank() == who else y)

        layer.zero_grad()
        (checkpoint(run, x, use_reentrant=False) if checkpointed else run(x)).square().sum().backward()
        found.append(b"".join(t.numpy().tobytes() for t in (x.grad, *(whole(p.grad) for p in layer.parameters()))))
    return found


@pytest.mark.parametrize("who", [0, 3])
def test_ranks_agree_on_what_runs_again(ranks: LocalRanks, who: int) -> None:
    for kept, again in ranks.run(gradients_where_one_rank_reads, who):
        assert again == kept


@pytest.mark.parametrize("wide", [1, 2, 3, 4, 5])
@pytest.mark.parametrize("teacher", [False, True])
def test_a_layer_that_saves_nothing_is_computed(wide: int, teacher: bool) -> None:
    """Frozen, or without gradients, in a region that saves as many tensors behind it as the layer would."""
    torch.manual_seed(0)
    layer = ms.MoELayer(SHAPE, STRATEGIES["ep"])
    tail = nn.Sequential(*[nn.Linear(16, 16) for _ in range(wide)], nn.GELU())
    layer.requires_grad_(teacher)
    x = torch.randn(5, SHAPE.hidden_size)

    def run(x: Tensor) -> Tensor:
        with torch.no_grad():
            y = layer(x)
        return tail(x + y) + (layer(x) if teacher else 0)

    found = []
    for again in (False, True):
        tail.zero_grad()
        (checkpoint(run, x, use_reentrant=False) if again else run(x)).square().sum().backward()
        found.append([p.grad.clone() for p in tail.parameters()])
    assert_equal(*found)


@pytest.mark.parametrize("block", BLOCKS)
def test_on_one_rank(block: str, monkeypatch: pytest.MonkeyPatch) -> None:
    again: list[int] = []
    forward = AloneRun.forward
    monkeypatch.setattr(AloneRun, "forward", lambda *args: (again.append(1), forward(*args))[1])
    kept, _ = gradients(STRATEGIES["ep"], block, "kept")
    assert len(again) == 1
    bits, _ = gradients(STRATEGIES["ep"], block, "plain")
    assert bits == kept
    assert len(again) == (3 if BLOCKS[block][1] else 2)


# --- selective activation checkpointing ---

PRODUCTS = (torch.ops.aten.mm.default, torch.ops.aten.addmm.default, torch.ops.aten.bmm.default)


class EverySecondProduct:
    """torchtitan's default policy. It counts for itself, so that a first pass with more products shows."""

    def __init__(self) -> None:
        self.seen = 0

    def __call__(self, context: Any, op: Any, *_: Any, **__: Any) -> CheckpointPolicy:
        if op not in PRODUCTS:
            return CheckpointPolicy.PREFER_RECOMPUTE
        self.seen += not context.is_recompute
        return CheckpointPolicy.MUST_SAVE if self.seen % 2 else CheckpointPolicy.PREFER_RECOMPUTE


def every(policy: CheckpointPolicy, *_: Any, **__: Any) -> CheckpointPolicy:
    return policy


POLICIES: dict[str, Callable[[], Any]] = {
    "products": lambda: list(PRODUCTS),
    "every second product": EverySecondProduct,
    "nothing": list,
    "everything": lambda: partial(every, CheckpointPolicy.MUST_SAVE),
}


def selective(policy: str) -> tuple[AbstractContextManager[None], AbstractContextManager[None]]:
    """``context_fn`` of a checkpoint, with a policy of its own in each region."""
    contexts: Any = selective_contexts(POLICIES[policy]())
    return contexts


def gradients_of_block(strategy: ms.Strategy, policy: str | None, early_stop: bool, recorded: bool) -> list[Tensor]:
    torch.manual_seed(0)
    shape = SHAPE.replace(router_aux_loss_coef=0.01, router_z_loss_coef=0.01)
    before, layer, behind = nn.Linear(16, 16), ms.MoELayer(shape, strategy), nn.Linear(16, 16)
    x = torch.randn(32, 16).requires_grad_()

    def run(x: Tensor) -> Tensor:
        return x + behind(layer(before(x)).relu())

    with set_checkpoint_early_stop(early_stop), ms.record_routing(layer) if recorded else nullcontext():
        y = checkpoint(run, x, use_reentrant=False, context_fn=partial(selective, policy)) if policy else run(x)
        (y.square().sum() + ms.router_loss(layer)).backward()
    return [x.grad, *(each.grad for module in (before, layer, behind) for each in module.parameters())]


SELECTED = STRATEGIES["ep"], ms.Strategy(name="invariant", reduction=ms.LayoutInvariant(token_block=32))


@pytest.mark.parametrize("recorded", [False, True], ids=["", "recorded"])
@pytest.mark.parametrize("early_stop", [True, False], ids=["early", "to its end"])
@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("strategy", SELECTED, ids=lambda each: each.name)
def test_selective_checkpoints_change_no_bit(strategy: Any, policy: str, early_stop: bool, recorded: bool) -> None:
    """Recorded: hooks on routers do in the first pass what they do not in the second."""
    kept = gradients_of_block(strategy, None, early_stop, recorded)
    assert_equal(kept, gradients_of_block(strategy, policy, early_stop, recorded))


def test_other_dispatch_modes_see_a_layer() -> None:
    """They count its products, once kept and in a selective checkpoint twice as far as backward reads them."""
    layer = ms.MoELayer(SHAPE, STRATEGIES["ep"])
    counted = []
    for policy in (None, "nothing"):
        x = torch.randn(11, 16).requires_grad_()
        with FlopCounterMode(display=False) as flops:
            if policy is None:
                y = layer(x)
            else:
                y = checkpoint(layer, x, use_reentrant=False, context_fn=partial(selective, policy))
            y.sum().backward()
        counted.append(flops.get_total_flops())
    assert 0 < counted[0] < counted[1]


def train_model(policy: str | None, where: str, strategy: ms.Strategy | None) -> list[bytes]:
    """The bits of all gradients of a model of transformers, checkpointed block by block, under a strategy or alone. Its
    routing is recorded, by hooks on routers that do in the first pass what they do not in the second.
    """
    # In bfloat16 casts follow each other, so that one more in the first pass shows.
    model = small_model().bfloat16()
    if strategy is None:
        model.set_experts_implementation(ms.hf.register())
    if policy is not None and where == "torchtitan":
        for index, block in enumerate(model.model.layers):
            model.model.layers[index] = checkpoint_wrapper(block, context_fn=partial(selective, policy))
    elif policy is not None and where == "one region":
        whole = partial(checkpoint, use_reentrant=False, context_fn=partial(selective, policy))
        model.model.forward = partial(whole, model.model.forward)
    elif policy is not None:
        model.gradient_checkpointing_enable({"use_reentrant": False, "context_fn": partial(selective, policy)})
    runtime = None if strategy is None else ms.parallelize(model, strategy)
    ids = torch.arange(40).view(2, 20)
    with ms.record_routing(model):
        model(input_ids=ids, labels=ids).loss.backward()
    if runtime is not None:
        runtime.close()
    found = (getattr(each.grad, "_local_tensor", each.grad) for each in model.parameters())
    return [each.float().numpy().tobytes() for each in found]


@pytest.mark.filterwarnings("ignore:.gradient_checkpointing_enable. is deprecated:FutureWarning")
@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("where", ["torchtitan", "transformers", "one region"])
def test_selective_checkpoints_of_a_model_on_one_rank(where: str, policy: str) -> None:
    assert train_model(policy, where, None) == train_model(None, where, None)
