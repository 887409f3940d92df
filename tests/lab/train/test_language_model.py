"""LanguageModel: real attention, and initial weights that depend on the seed alone."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

import moesys as ms
from moesys.config.workload import Training
from moesys.lab.ranks.pool import LocalRanks
from moesys.lab.train.language_model import LanguageModel

SHAPE = ms.ModelShape(hidden_size=32, intermediate_size=32, num_experts=8, top_k=2, initializer_range=0.1)
WORKLOAD = Training(num_layers=2, num_heads=2, context=32, batch=2)
EP = ms.Strategy(name="ep")
FSEP = ms.Strategy(name="fsep", sharding=ms.Fsep(slots_per_rank=8), balance=ms.Greedy(), split=ms.FlowSplit())


def some_bytes(num_sequences: int = 2) -> Tensor:
    return torch.randint(256, (num_sequences, 32), generator=torch.Generator().manual_seed(0))


def test_every_byte_gets_logits_and_every_parameter_a_gradient() -> None:
    model = LanguageModel(SHAPE, EP, WORKLOAD, seed=0)
    logits_BCV = model(some_bytes())
    assert (logits_BCV.shape, logits_BCV.dtype) == ((2, 32, 256), torch.float32)
    assert model(some_bytes()[:, :5]).shape == (2, 5, 256)
    logits_BCV.logsumexp(dim=2).sum().backward()
    for name, parameter in model.named_parameters():
        assert parameter.dtype == torch.float32
        assert parameter.grad.isfinite().all(), name
        assert parameter.grad.any(), name


@pytest.mark.parametrize("place", [1, 20, 31])
def test_a_later_byte_changes_no_earlier_logit(place: int) -> None:
    model = LanguageModel(SHAPE, EP, WORKLOAD, seed=0)
    bytes_BC = some_bytes()
    before = model(bytes_BC)
    bytes_BC[0, place] = (bytes_BC[0, place] + 1) % 256
    after = model(bytes_BC)
    assert torch.equal(before[0, :place], after[0, :place])
    assert torch.equal(before[1], after[1])
    assert (before[0, place:] != after[0, place:]).any(dim=1).all()


def initial_weights(strategy: ms.Strategy, seed: int) -> dict[str, Tensor]:
    model = LanguageModel(SHAPE, strategy, WORKLOAD, seed)
    return {
        name: (p.full_tensor() if isinstance(p, DTensor) else p).detach().clone()
        for name, p in model.named_parameters()
    }


def test_initial_weights_depend_on_the_seed_and_on_nothing_else(ranks: LocalRanks) -> None:
    torch.manual_seed(7)
    alone = initial_weights(EP, 0)
    own = [weight for name, weight in alone.items() if ".moe." not in name and weight.std() > 0]
    assert len({tuple(weight.flatten()[:4].tolist()) for weight in own}) == len(own) == 7
    others = [initial_weights(FSEP, 0), *(ranks.run(initial_weights, strategy, 0)[3] for strategy in (EP, FSEP))]
    for weights in others:
        assert weights.keys() == alone.keys()
        assert all(torch.equal(weights[name], alone[name]) for name in alone)
    assert not any(torch.equal(weight, alone[name]) for name, weight in initial_weights(EP, 1).items() if weight.std())
