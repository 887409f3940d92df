"""Corners in which models of transformers once went wrong over ranks: computed right, or refused on every rank."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from conftest import on_ranks, refusal
from hf_models import drawn, fsep, lent, loaded, loss_of, mean_gradients, text, whole
from torch import Tensor, nn
from torch.distributed.fsdp import MixedPrecisionPolicy

import moesys as ms
from moesys.lab.ranks.pool import LocalRanks
from moesys.moe.experts import experts_of

EXPERTS = 8


# --- silent wrong numbers -----------------------------------------------------------------------------------------


def sizes_of_gradients(kind: str, folder: Path | None, strategy: ms.Strategy) -> dict[str, float]:
    """Each gradient's part along that of one process in float32; 1 where it is right. ``folder``: transformers loads
    the model on ranks.
    """
    policy, R = MixedPrecisionPolicy(), dist.get_world_size()
    if kind == "param_dtype":
        policy = MixedPrecisionPolicy(param_dtype=torch.float16)
    elif kind == "output_dtype":
        policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, output_dtype=torch.float32)
    elif kind == "reduce_dtype":
        policy = MixedPrecisionPolicy(reduce_dtype=torch.float16)
    if folder is None:
        model = drawn("qwen3_moe", EXPERTS).to(getattr(torch, kind, torch.float32))
        runtime = ms.parallelize(model, strategy, policy=policy)
    else:
        model = loaded(folder, strategy, {"fsdp_size": R, "ep_size": R}, dtype=getattr(torch, kind))
        runtime = ms.link(model)
    ids = text(dist.get_rank())
    output = model(input_ids=ids, labels=ids)
    assert policy.output_dtype in (None, output.logits.dtype)
    output.loss.backward()
    runtime.close()
    wanted = mean_gradients(drawn("qwen3_moe", EXPERTS))
    found = {name: whole(p.grad).double() for name, p in model.named_parameters()}
    return {name: float((found[name] * each).sum() / each.double().square().sum()) for name, each in wanted.items()}


@pytest.mark.parametrize(
    ("kind", "num_ranks"),
    [
        *((kind, 2) for kind in ("param_dtype", "reduce_dtype", "output_dtype", "float16", "float64")),
        *(pytest.param(kind, 4, marks=pytest.mark.slow) for kind in ("param_dtype", "reduce_dtype", "float64")),
    ],
)
def test_one_group_has_gradients_of_the_right_size_in_every_dtype(
    ranks: LocalRanks, tmp_path: Path, kind: str, num_ranks: int
) -> None:
    """FSDP divides twice where it reduces in anything but float32 and bfloat16 and a mesh has one rank. The dtype of
    outputs is that of the model's, not of its blocks'.
    """
    folder = tmp_path if "float" in kind and num_ranks == 2 else None
    if folder:
        drawn("qwen3_moe", EXPERTS).save_pretrained(folder)
    arguments = (kind, folder, lent(2) if folder else fsep(num_ranks))
    for found in ranks.run(sizes_of_gradients, *arguments, num_ranks=num_ranks, timeout_s=60.0):
        assert found == pytest.approx(dict.fromkeys(found, 1.0), abs=0.05)


# The changes of rank 1, by the name of the tensor that differs then.
DIFFER: dict[str, Callable[[Any], object]] = {
    "lm_head.weight": lambda model: model.lm_head.weight[3, 5].add_(1e-4),
    "model.layers.1.mlp.experts.down_proj": lambda model: (
        model.model.layers[1].mlp.experts.down_proj.requires_grad_(False)[7].mul_(2)
    ),
    "model.layers.1.mlp.gate.e_score_correction_bias": lambda model: (
        model.model.layers[1].mlp.gate.e_score_correction_bias[0].add_(1)
    ),
    # Zeros have the same bits in either dtype.
    "model.layers.0.self_attn.q_proj.weight": lambda model: model.model.layers[0].self_attn.q_proj.to(torch.bfloat16),
    "model.norm.scale": lambda model: setattr(model.model.norm, "scale", nn.Parameter(torch.zeros(3))),
}


@torch.no_grad()
def differing_models(sizes: tuple[int, int]) -> list[str]:
    mesh = dist.init_device_mesh("cpu", sizes, mesh_dim_names=("dp", "ep"))
    said = []
    for change in DIFFER.values():
        model = drawn("deepseek_v3", EXPERTS)
        model.model.layers[0].self_attn.q_proj = nn.Linear(3, 2, bias=False)
        model.model.layers[0].self_attn.q_proj.weight.zero_()
        if dist.get_rank() == 1:
            change(model)
        said.append(refusal(ms.parallelize, model, lent(sizes[1]), mesh))
    return said


@pytest.mark.parametrize("sizes", [(1, 2), (2, 1)], ids=["one group", "two copies"])
def test_models_that_differ_between_ranks_are_refused(ranks: LocalRanks, sizes: tuple[int, int]) -> None:
    """Not: sharded into a mixture of both."""
    for said in ranks.run(differing_models, sizes, num_ranks=2, timeout_s=60.0):
        for name, message in zip(DIFFER, said, strict=True):
            assert message.startswith(f"RankMismatchError: parallelize(): ranks 0 and 1 differ in {name}, which")


# --- hangs --------------------------------------------------------------------------------------------------------


def unevenly() -> None:
    model = drawn("qwen3_moe", 5)
    runtime = ms.parallelize(model, lent(4, 5))
    try:
        loss_of(model, dist.get_rank()).backward()
    finally:
        runtime.close()


def test_a_rank_without_experts_is_computed_or_refused_everywhere(ranks: LocalRanks) -> None:
    """Not: raised by FSDP on the last rank alone, in backward, for which the others wait."""
    outcomes = ranks.outcomes(unevenly, timeout_s=30.0, grace_s=3.0)
    kinds = {outcome.kind for outcome in outcomes}
    assert kinds == {"returned"} or all("ValueError" in str(outcome) for outcome in outcomes), outcomes


def generated(folder: Path, how: str) -> Tensor:
    """Rank 0 ends first."""
    rank, strategy = dist.get_rank(), lent(2) if how == "loaded" else fsep(2)
    if how == "loaded":
        model, runtime = loaded(folder, strategy, {"fsdp_size": 2, "ep_size": 2}), None
    else:
        model = drawn("qwen3_moe", EXPERTS)
        runtime = ms.parallelize(model, strategy)
    prompt = text(rank)[: 1 + rank, : 4 + rank]
    found = model.eval().generate(prompt, max_new_tokens=2 + 3 * rank, do_sample=False, pad_token_id=0)
    if runtime is not None:
        runtime.close()
    return found


@pytest.mark.parametrize("how", ["loaded", "parallelized"])
def test_ranks_may_generate_for_different_lengths(ranks: LocalRanks, tmp_path: Path, how: str) -> None:
    """A rank that is done goes on with the others, which gather parameters from it and send it tokens."""
    model = drawn("qwen3_moe", EXPERTS).eval()
    model.save_pretrained(tmp_path / "model")
    for rank, found in enumerate(ranks.run(generated, tmp_path / "model", how, num_ranks=2, timeout_s=60.0)):
        prompt = text(rank)[: 1 + rank, : 4 + rank]
        wanted = model.generate(prompt, max_new_tokens=2 + 3 * rank, do_sample=False, pad_token_id=0)
        assert torch.equal(found, wanted)


# --- unclear messages -----------------------------------------------------------------------------------------------


REFUSED: dict[str, tuple[Any, str]] = {
    "slots": (lambda: {"strategy": fsep(2).replace(sharding=ms.Fsep(slots_per_rank=1))}, "use at least 4"),
    "cluster": (
        lambda: {"strategy": fsep(2), "cluster": ms.ClusterSpec(num_nodes=1, ranks_per_node=3)},
        "cluster has 3 ranks but the group has 2",
    ),
    "late slots": (lambda: {"strategy": lent(2, late_slots=5)}, "late_slots"),
}


def refused_and_then_not(kind: str) -> tuple[str, str, dict[str, Tensor]]:
    model = drawn("qwen3_moe", EXPERTS)
    whole_down = model.model.layers[1].mlp.experts.down_proj
    if kind == "second layer":
        # Experts of an odd width, which Fsep cannot cut.
        model.model.layers[1].mlp.experts.down_proj = nn.Parameter(whole_down[:, :-1].clone())
    arguments = REFUSED[kind][0]() if kind in REFUSED else {"strategy": fsep(2)}
    message = refusal(partial(ms.parallelize, model, **arguments))
    model.model.layers[1].mlp.experts.down_proj = whole_down
    runtime = ms.parallelize(model, fsep(2))
    again = refusal(ms.parallelize, model, fsep(2))
    loss_of(model, dist.get_rank()).backward()
    runtime.close()
    return message, again, {name: whole(p.grad) for name, p in model.named_parameters()}


@pytest.mark.parametrize("kind", [*REFUSED, "second layer"])
def test_a_refused_parallelize_changes_nothing(ranks: LocalRanks, kind: str) -> None:
    """A refused call shards nothing, so the next call succeeds; one after that is refused too, and harms nothing."""
    expected = REFUSED[kind][1] if kind in REFUSED else "is cut by Fsep in dimension 1 over 2 ranks"
    wanted = mean_gradients(drawn("qwen3_moe", EXPERTS), 2)
    for message, again, found in ranks.run(refused_and_then_not, kind, num_ranks=2, timeout_s=60.0):
        assert expected in message
        assert again.startswith("ValueError")
        torch.testing.assert_close(found, wanted, rtol=1e-4, atol=1e-6)


# Bytes of a number in computation, by how a model gets its dtype: from transformers or by ``ms.parallelize``.
MADE: tuple[tuple[int, Callable[[Path, ms.Strategy], Any]], ...] = (
    (4, lambda folder, strategy: loaded(folder, strategy, TWO)),
    (2, lambda folder, strategy: loaded(folder, strategy, TWO, fsdp_mixed_precision=True)),
    (4, lambda _, strategy: parallelized(torch.float32, strategy)),
    (2, lambda _, strategy: parallelized(torch.bfloat16, strategy)),
    (2, lambda _, strategy: parallelized(torch.float32, strategy, MixedPrecisionPolicy(param_dtype=torch.float16))),
)
TWO = {"fsdp_size": 2, "ep_size": 2}


def parallelized(dtype: torch.dtype, strategy: ms.Strategy, policy: MixedPrecisionPolicy | None = None) -> Any:
    model = drawn("qwen3_moe", EXPERTS).to(dtype)
    ms.parallelize(model, strategy, policy=policy).close()
    return model


def slots_in_memory(folder: Path) -> list[tuple[int, ...]]:
    found = []
    for num_bytes, make in MADE:
        sharding = ms.Ep(slot_gb_per_rank=5 * 3 * 48 * 24 * num_bytes / 1e9)
        model = make(folder, ms.Strategy(name="memory", sharding=sharding, balance=ms.Eplb()))
        found.append(tuple(experts_of(model)[0].schedule.slots_R))
    return found


def test_slots_in_memory_are_of_what_fsdp_computes_in(ranks: LocalRanks, tmp_path: Path) -> None:
    drawn("qwen3_moe", EXPERTS).save_pretrained(tmp_path / "model")
    found = ranks.run(slots_in_memory, tmp_path / "model", num_ranks=2, timeout_s=60.0)
    assert found == [[(5, 5)] * len(MADE)] * 2


@pytest.mark.parametrize("given", [[1], "a model", (each for each in ())], ids=lambda given: type(given).__name__)
def test_what_is_no_model_is_named(given: Any, tmp_path: Path) -> None:
    message = f"model is a {type(given).__name__}; give the torch.nn.Module itself"
    for call in (ms.record_routing, lambda model: ms.replay_routing(model, torch.zeros(1, 2, 2, dtype=torch.int64))):
        with pytest.raises(TypeError, match=message), call(given):
            pass
    with pytest.raises(TypeError, match=message):
        ms.hf.save_pretrained(given, tmp_path / "out")
    if not isinstance(given, str):
        with pytest.raises(TypeError, match=f"folder is a {type(given).__name__}; give the path of a folder"):
            ms.hf.check_checkpoint(given)


@on_ranks(2)
def test_planning_of_another_number_of_experts_is_refused_where_it_is_loaded() -> None:
    """Not: at the next forward, as tensors of other sizes."""
    texts = {}
    for num_experts in (EXPERTS, EXPERTS + 2):
        model = drawn("qwen3_moe", num_experts)
        runtime = ms.parallelize(model, fsep(2, num_experts))
        loss_of(model, dist.get_rank()).backward()
        planning = ms.PlanningState(model)
        texts[num_experts] = planning.state_dict()
        runtime.close()
    assert refusal(planning.load_state_dict, texts[EXPERTS]).startswith("ValueError: ")


def planning_of_a_second_model(folder: Path) -> None:
    sizes = {"fsdp_size": 2, "ep_size": 2}
    first, second = (loaded(folder, lent(2), sizes) for _ in range(2))
    assert [e.layer_index for e in experts_of(first)] == [e.layer_index for e in experts_of(second)]
    ms.PlanningState(second).load_state_dict(ms.PlanningState(first).state_dict())


def test_planning_is_known_by_the_place_in_the_model(ranks: LocalRanks, tmp_path: Path) -> None:
    """Not by how many layers were made before in this process."""
    drawn("qwen3_moe", EXPERTS).save_pretrained(tmp_path / "model")
    ranks.run(planning_of_a_second_model, tmp_path / "model", num_ranks=2, timeout_s=60.0)
