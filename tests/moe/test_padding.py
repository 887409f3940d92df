"""Tokens that a mask leaves out: a layer computes, counts and learns what it does without them."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from harness import gradients_of
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import moesys as ms
from moesys.lab.ranks.pool import LocalRanks

SHAPE = ms.ModelShape(
    hidden_size=16,
    intermediate_size=8,
    num_experts=6,
    top_k=2,
    scoring_func="sigmoid",
    n_shared_experts=1,
    router_bias_update_rate=0.01,
    router_aux_loss_coef=0.1,
    router_z_loss_coef=0.1,
)
EP = ms.Strategy(name="ep")
GREEDY: dict[str, Any] = {"balance": ms.Greedy(), "split": ms.FlowSplit()}
STRATEGIES = {
    "lent, in chunks": EP.replace(sharding=ms.Ep(slots_per_rank=4), overlap=ms.Pipelined(chunks=2), **GREEDY),
    "fsep": EP.replace(sharding=ms.Fsep(slots_per_rank=4), **GREEDY),
    "layout-invariant": EP.replace(reduction=ms.LayoutInvariant(token_block=32)),
}


class Blocks(nn.Module):
    def __init__(self, strategy: ms.Strategy) -> None:
        super().__init__()
        self.moe = nn.ModuleList(ms.MoELayer(SHAPE, strategy, layer_index=layer) for layer in range(2))

    def forward(self, x: Tensor, mask: Tensor | None, checkpointed: bool) -> Tensor:
        for moe in self.moe:
            block = partial(_block, moe)
            x = checkpoint(block, x, mask, use_reentrant=False) if checkpointed else block(x, mask)
        return x


def _block(moe: nn.Module, x: Tensor, mask: Tensor | None) -> Tensor:
    # What stands in the place of padding is as bad as it can be.
    return x + moe(x if mask is None else x.masked_fill(~mask[..., None], torch.nan), mask)


def batch(micro_batch: int) -> tuple[Tensor, Tensor, Tensor]:
    """(x, dy, mask) of [4, 8]; a rank has no tokens in one micro-batch, and no padding in the other."""
    generator = torch.Generator().manual_seed(10 * micro_batch + dist.get_rank())
    x, dy = (torch.randn(4, 8, SHAPE.hidden_size, generator=generator) for _ in range(2))
    mask = torch.rand(4, 8, generator=generator) < 0.6
    return x, dy, mask if dist.get_rank() else torch.full_like(mask, bool(micro_batch))


def trained(strategy: ms.Strategy, padded: bool, checkpointed: bool) -> dict[str, Any]:
    """Two micro-batches, both under way before the first backward, and an update of the biases."""
    model, runs = Blocks(strategy), []
    found: dict[str, Any] = {"loads": [], "outputs": [], "dx": []}
    for micro_batch in range(2):
        x, dy, mask = batch(micro_batch)
        x = (x if padded else x[mask]).requires_grad_()
        y = model(x, mask if padded else None, checkpointed)
        loss = ms.router_loss(model)
        found["loads"].append([moe.last_plan.load.tokens_RE.tolist() for moe in model.moe])
        found["outputs"] += [y[mask] if padded else y, loss]
        runs.append((x, mask, loss + (y[mask] * dy[mask] if padded else y * dy[mask]).sum()))
    for x, mask, loss in runs:
        loss.backward()
        if padded:
            assert not x.grad[~mask].any()
        found["dx"].append(x.grad[mask] if padded else x.grad)
    ms.sync_gradients(model)
    counts_E = [moe.experts.counted_E.tolist() for moe in model.moe]
    ms.update_router_bias(model)
    biases = [moe.router.e_score_correction_bias.tolist() for moe in model.moe]
    found["outputs"] = [each.detach() for each in found["outputs"]]
    return found | {"counts": counts_E, "biases": biases, "gradients": gradients_of(model)}


@pytest.fixture(scope="module")
def unpadded(ranks: LocalRanks) -> list[dict[str, Any]]:
    return ranks.run(trained, EP, False, False, num_ranks=2)


@pytest.mark.parametrize("checkpointed", [False, True], ids=["plain", "recomputed"])
@pytest.mark.parametrize(
    "strategy",
    [*STRATEGIES.values(), pytest.param(EP.replace(overlap=ms.MegaKernel()), marks=pytest.mark.slow)],
    ids=[*STRATEGIES, "MegaKernel"],
)
def test_padding_is_neither_computed_nor_counted(
    ranks: LocalRanks, unpadded: list[dict[str, Any]], strategy: ms.Strategy, checkpointed: bool
) -> None:
    for found, without in zip(ranks.run(trained, strategy, True, checkpointed, num_ranks=2), unpadded, strict=True):
        for name in ("loads", "counts", "biases"):
            assert found[name] == without[name]
        for name in ("outputs", "dx", "gradients"):
            torch.testing.assert_close(found[name], without[name], rtol=1e-5, atol=1e-6)


def test_output_and_gradients_of_padding_are_zeros_on_one_rank_too() -> None:
    layer, alone = (ms.MoELayer(SHAPE, EP) for _ in range(2))
    x, mask = torch.randn(2, 5, SHAPE.hidden_size), torch.arange(10).view(2, 5) % 3 > 0
    x_TH, weight_TK = x.flatten(0, 1).requires_grad_(), torch.rand(10, 2, requires_grad=True)
    # Ids of padding may be anything.
    expert_TK = torch.tensor([[1, 3]]).repeat(10, 1).masked_fill(~mask.view(-1, 1), 99)
    y = layer(x, mask)
    assert not y[~mask].any()
    # A library's product over other rows may be of other bits.
    torch.testing.assert_close(y[mask], alone(x[mask]), rtol=1e-5, atol=1e-8)
    layer.experts(x_TH, expert_TK, weight_TK, mask.flatten()).sum().backward()
    for gradient in (x_TH.grad, weight_TK.grad):
        assert (gradient.count_nonzero(dim=1) > 0).tolist() == mask.flatten().tolist()
    full = torch.ones(2, 5, dtype=torch.bool)
    torch.testing.assert_close(layer(x, full), layer(x), rtol=1e-5, atol=1e-8)


def test_what_stands_in_padding_is_no_event(tmp_path: Path) -> None:
    experts, mask_T = ms.Experts(SHAPE, EP), torch.tensor([True, False, True])
    x_TH = torch.randn(3, SHAPE.hidden_size).masked_fill(~mask_T[:, None], torch.nan)
    with ms.Watch(experts, tmp_path) as watch:
        experts(x_TH, torch.tensor([[0, 1]]).repeat(3, 1), torch.ones(3, 2), mask_T).sum().backward()
        line = watch.measure()
    assert line.events == ()
    assert line.layers[0].tokens_E == (2, 2, 0, 0, 0, 0)


def test_ids_of_padding_are_recorded_and_replayed_as_minus_one() -> None:
    layer = ms.MoELayer(SHAPE, EP.replace(predictor=ms.Oracle()))
    x, mask = torch.randn(2, 5, SHAPE.hidden_size), torch.arange(10).view(2, 5) % 3 > 0
    with torch.no_grad(), ms.record_routing(layer) as recorded:
        wanted = layer(x, mask)
    assert recorded[0].dtype == torch.int16
    assert ((recorded[0] == -1).all(dim=2) == ~mask.flatten()).all()
    # Any experts may stand there too.
    others = torch.where(recorded[0] < 0, torch.tensor([4, 5]), recorded[0])
    for ids in (recorded, others):
        with ms.replay_routing(layer, ids):
            assert torch.equal(layer(x, mask), wanted)
    for given in (None, torch.ones(2, 5, dtype=torch.bool)):
        message = r"-1 for token 0 in micro-batch 0, which router routes; only padding .* or run the model with"
        with pytest.raises(ValueError, match=message), ms.replay_routing(layer, recorded):
            layer(x, given)
    recorded[0][0, 1, 0] = -1
    with pytest.raises(ValueError, match=r"expert_LTK\[0\]\[0, 1\] has -1"), ms.replay_routing(layer, recorded):
        layer(x, mask)
