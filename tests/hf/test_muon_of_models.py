"""``ms.Muon`` trains models of transformers, sharded in every way, as torch's own Muon does matrix by matrix."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from conftest import SWEEP, assert_equal
from hf_models import drawn, fsep, lent, text, whole
from muon_oracle import Cut, Oracle, of_transformers
from peft import LoraConfig, get_peft_model
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh

import moesys as ms
from moesys.lab.ranks.pool import LocalRanks
from moesys.moe.experts import experts_of

# gpt-oss has [in, out], gate and up in turns, and biases of experts, which are two-dimensional.
CUTS: dict[str, Cut] = {
    "qwen3_moe": of_transformers(),
    "mixtral": of_transformers(),
    "gpt_oss": of_transformers(interleaved=True, transposed=True),
}
ADAMW = {"lr": 1e-3, "eps": 1e-3}
STEPS = 10 if SWEEP else 4


def adapted() -> Any:
    torch.manual_seed(3)
    of_experts = ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"]
    config = LoraConfig(r=3, init_lora_weights=False, target_modules=["q_proj"], target_parameters=of_experts)
    return get_peft_model(drawn("qwen3_moe"), config)


def of_adapters(name: str, tensor: Tensor) -> list[Tensor] | None:
    """PEFT's A has the rows of an expert together, and B has those of eight experts in turns."""
    if "lora" not in name:
        return None
    if "experts" not in name:
        return [tensor]
    return [*tensor.chunk(8)] if "lora_A" in name else [tensor[:, expert::8] for expert in range(8)]


CUTS["lora"] = of_adapters


def trained(family: str, strategy: ms.Strategy, sizes: tuple[int, ...] | None, steps: int) -> dict[str, float]:
    model = adapted() if family == "lora" else drawn(family)
    mesh = None if sizes is None else init_device_mesh("cpu", sizes, mesh_dim_names=("dp", "ep"))
    runtime = ms.parallelize(model, strategy, mesh)
    if family == "lora":
        others = ms.Muon(model, muon=lambda name, _: False if "lora_A" in name else None).summary().split("AdamW:")[1]
        assert "experts.lora_A.default.weight: [24, " in others
    optimizer = ms.Muon(model, lr=0.01, adamw=ADAMW)
    oracle = Oracle(model, CUTS[family], ADAMW, torch.float32, lr=0.01)
    for step in range(steps):
        ids = text(100 * step + dist.get_rank())
        model(input_ids=ids, labels=ids).loss.backward()
        ms.clip_grad_norm_(model, 1.0)
        oracle.step()
        optimizer.step()
        optimizer.zero_grad()
    runtime.close()
    return oracle.errors()


def case(family: str, name: str, ranks: int, sizes: tuple[int, ...] | None = None, *marks: Any) -> Any:
    of_group = ranks if sizes is None else sizes[1]
    strategy = {"ep": ms.Strategy(name="ep"), "lent": lent(of_group), "fsep": fsep(of_group)}[name]
    where = f"{ranks} ranks" if sizes is None else f"{sizes[0]} groups of {sizes[1]}"
    return pytest.param(family, strategy, ranks, sizes, id=f"{family}, {name}, {where}", marks=marks)


QUICK = [case("qwen3_moe", "fsep", 4, (2, 2)), case("gpt_oss", "fsep", 2), case("lora", "lent", 2)]
OTHERS = [
    case(family, name, ranks, sizes, pytest.mark.slow)
    for family in CUTS
    for name in ("ep", "lent", "fsep")
    for ranks, sizes in ((1, None), (2, None), (4, None), (4, (2, 2)))
]


@pytest.mark.parametrize(("family", "strategy", "num_ranks", "sizes"), [*QUICK, *OTHERS])
def test_every_sharding_does_what_torch_does_of_each_matrix(
    ranks: LocalRanks, family: str, strategy: ms.Strategy, num_ranks: int, sizes: tuple[int, ...] | None
) -> None:
    for errors in ranks.run(trained, family, strategy, sizes, STEPS, num_ranks=num_ranks, timeout_s=150.0):
        assert max(errors.values()) < 1e-6, errors


def gradients_of(delayed: bool, muon: bool) -> dict[str, Any]:
    """Two micro-batches, and a step of AdamW, in a model of which a ``Muon`` was made or not."""
    model = drawn("qwen3_moe")
    runtime = ms.parallelize(model, fsep(2, prefetch_layers=int(delayed), delay_reshard=delayed))
    optimizer = ms.Muon(model) if muon else None
    down, calls = experts_of(model)[1].outside.read()["down"], []
    down.register_hook(lambda gradient: calls.append("gradient"))
    down.register_post_accumulate_grad_hook(lambda parameter: calls.append("accumulated"))
    for batch in range(2):
        ids = text(10 * batch + dist.get_rank())
        model(input_ids=ids, labels=ids).loss.backward()
    norm = ms.clip_grad_norm_(model, 1.0)
    found = {
        "gradient": whole(down.grad).clone(),
        "norm": norm,
        "calls": calls,
        "placements": str(down.grad.placements),
    }
    torch.optim.AdamW(model.parameters(), lr=1e-3, foreach=False).step()
    found["parameter"] = whole(down)
    # A backward that ends in one part of the experts only.
    model.zero_grad()
    model(input_ids=ids, labels=ids).loss.backward(inputs=[down])
    found["of one part"], found["other"] = whole(down.grad), experts_of(model)[1].outside.read()["gate_up"].grad
    del optimizer
    runtime.close()
    return found


@pytest.mark.parametrize("delayed", [False, True])
def test_gradients_of_whole_experts_are_those_of_slices(ranks: LocalRanks, delayed: bool) -> None:
    slices = ranks.run(gradients_of, delayed, False, num_ranks=2)
    wholes = ranks.run(gradients_of, delayed, True, num_ranks=2)
    for found, wanted in zip(wholes, slices, strict=True):
        assert (found["placements"], wanted["placements"]) == ("(Shard(dim=0),)", "(Shard(dim=1),)")
        for what in ("gradient", "norm", "parameter", "of one part"):
            assert_equal(found[what], wanted[what], what)
        assert found["calls"] == wanted["calls"] == ["gradient", "accumulated"] * 3
        assert found["other"] is None
