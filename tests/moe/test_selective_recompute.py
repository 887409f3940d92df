"""A checkpointed region that ends with a layer runs again only what backward reads, and nothing travels home twice."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.distributed as dist
from harness import whole
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint, set_checkpoint_early_stop

import moesys as ms
from moesys.lab.ranks.pool import LocalRanks
from moesys.overlap.chunked import ChunkedExecutor

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


@pytest.mark.parametrize("name", STRATEGIES)
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
        x = torch.randn(
            11, SHAPE.hidden_size, generator=torch.Generator().manual_seed(dist.get_rank())
        ).requires_grad_()

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
    layer, tail = (
        ms.MoELayer(SHAPE, STRATEGIES["ep"]),
        nn.Sequential(*[nn.Linear(16, 16) for _ in range(wide)], nn.GELU()),
    )
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
    for kept, recomputed in zip(*found, strict=True):
        assert torch.equal(kept, recomputed)


@pytest.mark.parametrize("block", BLOCKS)
def test_on_one_rank(block: str, monkeypatch: pytest.MonkeyPatch) -> None:
    again: list[int] = []
    forward = ChunkedExecutor.forward
    monkeypatch.setattr(ChunkedExecutor, "forward", lambda *args: (again.append(1), forward(*args))[1])
    kept, _ = gradients(STRATEGIES["ep"], block, "kept")
    assert len(again) == 1
    bits, _ = gradients(STRATEGIES["ep"], block, "plain")
    assert bits == kept
    assert len(again) == (3 if BLOCKS[block][1] else 2)
