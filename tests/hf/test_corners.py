"""Corners in which models of transformers once went wrong over ranks: computed right, or refused on every rank."""

from __future__ import annotations

import copy
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from conftest import assert_equal, refusal
from hf_models import drawn, fsep, lent, loaded, text, whole
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict
from torch.distributed.fsdp import MixedPrecisionPolicy

import moesys as ms
from moesys.lab.ranks.pool import LocalRanks
from moesys.moe.experts import experts_of
from moesys.moe.outside import OutsideExperts

EXPERTS = 8


def loss_of(model: Any, rank: int) -> Tensor:
    ids = text(rank)
    return model(input_ids=ids, labels=ids).loss


def mean_gradients(num_ranks: int) -> dict[str, Tensor]:
    """What one process makes of all ranks' batches, in float32."""
    model = drawn("qwen3_moe", EXPERTS)
    (sum(loss_of(model, rank) for rank in range(num_ranks)) / num_ranks).backward()
    return {name: p.grad for name, p in model.named_parameters()}


# --- silent wrong numbers -----------------------------------------------------------------------------------------


def sizes_of_gradients(kind: str) -> dict[str, float]:
    """Each gradient's part along that of one process in float32; 1 where it is right."""
    model, policy = drawn("qwen3_moe", EXPERTS), MixedPrecisionPolicy()
    if kind == "param_dtype":
        policy = MixedPrecisionPolicy(param_dtype=torch.float16)
    elif kind == "output_dtype":
        policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, output_dtype=torch.float32)
    elif kind == "reduce_dtype":
        policy = MixedPrecisionPolicy(reduce_dtype=torch.float16)
    else:
        model = model.to(getattr(torch, kind))
    runtime = ms.parallelize(model, fsep(dist.get_world_size()), policy=policy)
    ids = text(dist.get_rank())
    output = model(input_ids=ids, labels=ids)
    assert policy.output_dtype in (None, output.logits.dtype)
    output.loss.backward()
    runtime.close()
    wanted = mean_gradients(dist.get_world_size())
    found = {name: whole(p.grad).float() for name, p in model.named_parameters()}
    return {name: float((found[name] * each).sum() / each.square().sum()) for name, each in wanted.items()}


@pytest.mark.parametrize(
    "kind",
    [
        "param_dtype",
        "reduce_dtype",
        "output_dtype",
        *(pytest.param(of, marks=pytest.mark.slow) for of in ("float16", "float64")),
    ],
)
@pytest.mark.parametrize("num_ranks", [2, pytest.param(4, marks=pytest.mark.slow)])
def test_one_group_has_gradients_of_the_right_size_in_every_dtype(ranks: LocalRanks, kind: str, num_ranks: int) -> None:
    """FSDP divides twice where it reduces in anything but float32 and bfloat16 and a mesh has one rank. The dtype of
    outputs is that of the model's, not of its blocks'.
    """
    for found in ranks.run(sizes_of_gradients, kind, num_ranks=num_ranks, timeout_s=60.0):
        assert found == pytest.approx(dict.fromkeys(found, 1.0), abs=0.05)


def in_two_dtypes(linked: bool) -> list[Tensor]:
    def layer(index: int, dtype: Any) -> ms.MoELayer:
        shape = ms.ModelShape(hidden_size=32, intermediate_size=16, num_experts=6, top_k=2, dtype=dtype)
        strategy = fsep(dist.get_world_size(), 6, prefetch_layers=1)
        made = ms.MoELayer(shape, strategy, layer_index=index)
        with torch.no_grad():
            made.experts.masters.mul_(20)
        return made

    model = nn.Sequential(layer(0, "bfloat16"), layer(1, "float32"))
    runtime = ms.link(model) if linked else None
    found = []
    for number in range(3):
        x_TH = torch.randn(7, 32, generator=torch.Generator().manual_seed(number + 10 * dist.get_rank()))
        y_TH = model(x_TH)
        y_TH.sum().backward()
        found.append(y_TH.detach())
    if runtime is not None:
        runtime.close()
    return found


@pytest.mark.slow
def test_linking_layers_of_two_dtypes_changes_no_bit(ranks: LocalRanks) -> None:
    """The layer before brings experts ahead in its own dtype, not in that of the layer that computes with them."""
    alone, linked = (ranks.run(in_two_dtypes, each, num_ranks=2, timeout_s=60.0) for each in (False, True))
    assert_equal(linked, alone)


SHAPE = ms.ModelShape(hidden_size=8, intermediate_size=4, num_experts=4, top_k=2)


class Block(nn.Module):
    """Keeps parameters of its own, which its experts read."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Parameter(torch.randn(4, 8, 8)), nn.Parameter(torch.randn(4, 8, 4))
        held = OutsideExperts(lambda: {"gate_up": self.up, "down": self.down})
        self.experts = ms.Experts(SHAPE, ms.Strategy(name="ep"), outside=held)

    def forward(self, x_TH: Tensor) -> Any:
        T = len(x_TH)
        return self.experts(x_TH, torch.tensor([[0, 1]] * T), torch.ones(T, 2))


def test_copies_of_experts_with_outside_masters_read_their_own_or_are_refused() -> None:
    block = Block()
    try:
        copied = copy.deepcopy(block)
    except (TypeError, ValueError):
        return
    x_TH = torch.randn(3, 8)
    with torch.no_grad():
        wanted = block(x_TH)
        block.up.zero_()
    assert torch.equal(copied(x_TH), wanted)


def head(model: Any) -> None:
    model.lm_head.weight[3, 5] += 1e-4


def expert(model: Any) -> None:
    model.model.layers[1].mlp.experts.down_proj.requires_grad_(False)[7] *= 2


def bias(model: Any) -> None:
    model.model.layers[1].mlp.gate.e_score_correction_bias[0] += 1


def in_half(model: Any) -> None:
    """Zeros have the same bits in either dtype."""
    model.model.layers[0].self_attn.q_proj.to(torch.bfloat16)


def extra(model: Any) -> None:
    model.model.norm.scale = nn.Parameter(torch.zeros(3))


# The changes of rank 1, each with the name of the tensor that differs then.
DIFFER: dict[Any, str] = {
    head: "lm_head.weight",
    expert: "model.layers.1.mlp.experts.down_proj",
    bias: "model.layers.1.mlp.gate.e_score_correction_bias",
    in_half: "model.layers.0.self_attn.q_proj.weight",
    extra: "model.norm.scale",
}


@torch.no_grad()
def differing_models(sizes: tuple[int, int]) -> list[str]:
    mesh = dist.init_device_mesh("cpu", sizes, mesh_dim_names=("dp", "ep"))
    said = []
    for change in DIFFER:
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
        for name, message in zip(DIFFER.values(), said, strict=True):
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
    rank, strategy = dist.get_rank(), lent(2)
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


# --- crashes ------------------------------------------------------------------------------------------------------


def checkpointed(folder: Path, out: Path, strategy: ms.Strategy) -> list[str]:
    """Parameters that a distributed checkpoint does not bring back."""
    sizes = {"fsdp_size": dist.get_world_size(), "ep_size": dist.get_world_size()}
    model = loaded(folder, strategy, sizes)
    before = {name: whole(p).clone() for name, p in model.named_parameters()}
    dcp.save(get_model_state_dict(model), checkpoint_id=str(out))
    with torch.no_grad():
        for p in model.parameters():
            p.zero_()
    state = get_model_state_dict(model)
    dcp.load(state, checkpoint_id=str(out))
    model.load_state_dict(state)
    return [name for name, p in model.named_parameters() if not torch.equal(whole(p), before[name])]


@pytest.mark.parametrize("strategy", [lent(2), fsep(2)], ids=["lent", "fsep"])
def test_distributed_checkpoints_of_transformers_models(
    ranks: LocalRanks, tmp_path: Path, strategy: ms.Strategy
) -> None:
    """Of Fsep, gate and up in one tensor lie as a strided shard, which distributed checkpoints cannot save."""
    drawn("qwen3_moe", EXPERTS).save_pretrained(tmp_path / "model")
    found = ranks.run(checkpointed, tmp_path / "model", tmp_path / "out", strategy, num_ranks=2, timeout_s=60.0)
    assert found == [[], []]


def saved(out: Path) -> None:
    """As docs/transformers.md says."""
    model = drawn("qwen3_moe", EXPERTS)
    runtime = ms.parallelize(model, fsep(2))
    state = get_model_state_dict(model, options=StateDictOptions(full_state_dict=True, cpu_offload=True))
    if dist.get_rank() == 0:
        model.save_pretrained(out, state_dict=state)
    runtime.close()


def test_save_pretrained_after_parallelize(ranks: LocalRanks, tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM

    ranks.run(saved, tmp_path / "out", num_ranks=2, timeout_s=60.0)
    after = AutoModelForCausalLM.from_pretrained(tmp_path / "out").state_dict()
    assert_equal(after, drawn("qwen3_moe", EXPERTS).state_dict())


def gemma4() -> None:
    from transformers import Gemma4ForCausalLM, Gemma4TextConfig

    shape = {"vocab_size": 96, "hidden_size": 48, "intermediate_size": 40, "num_hidden_layers": 2, "head_dim": 12}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size_per_layer_input": 96}
    experts = {"enable_moe_block": True, "num_experts": 8, "top_k_experts": 2, "moe_intermediate_size": 24}
    model = Gemma4ForCausalLM(Gemma4TextConfig(**shape, **heads, **experts))
    ms.parallelize(model, lent(1)).close()


def test_gemma4_says_how_many_experts_a_token_has(ranks: LocalRanks) -> None:
    """Its configuration calls it top_k_experts."""
    ranks.run(gemma4, num_ranks=1, timeout_s=60.0)


def turned_weights() -> None:
    experts = ms.Experts(SHAPE, lent(2, 4))
    index_TK = torch.tensor([[0, 1]] * 3)
    weight_TK = torch.ones(2, 3, requires_grad=True).T
    experts(torch.randn(3, 8), index_TK, weight_TK).sum().backward()


def test_routing_weights_may_lie_either_way_round(ranks: LocalRanks) -> None:
    ranks.run(turned_weights, num_ranks=2, timeout_s=60.0)


# --- unclear messages -----------------------------------------------------------------------------------------------


def twice() -> tuple[str, float]:
    model = drawn("qwen3_moe", EXPERTS)
    runtime = ms.parallelize(model, fsep(2))
    try:
        ms.parallelize(model, fsep(2))
    except Exception as error:
        message = f"{type(error).__name__}: {error}"
    try:
        return message, loss_of(model, dist.get_rank()).item()
    finally:
        runtime.close()


def test_parallelize_twice_is_refused_and_harms_nothing(ranks: LocalRanks) -> None:
    """Not: refused by FSDP when the experts have lost their memory."""
    for message, _ in ranks.run(twice, num_ranks=2, timeout_s=60.0):
        assert message.startswith("ValueError")


REFUSED: dict[str, tuple[Any, str]] = {
    "slots": (lambda: {"strategy": fsep(2).replace(sharding=ms.Fsep(slots_per_rank=1))}, "use at least 4"),
    "cluster": (
        lambda: {"strategy": fsep(2), "cluster": ms.ClusterSpec(num_nodes=1, ranks_per_node=3)},
        "cluster has 3 ranks but the group has 2",
    ),
    "late slots": (lambda: {"strategy": lent(2, late_slots=5)}, "late_slots"),
}


def second_layer_does_not_fit(model: Any) -> None:
    """Experts of an odd width, which Fsep cannot cut."""
    experts = model.model.layers[1].mlp.experts
    experts.down_proj = nn.Parameter(experts.down_proj[:, :-1].clone())


def refused_and_then_not(kind: str) -> tuple[str, dict[str, Tensor]]:
    model = drawn("qwen3_moe", EXPERTS)
    whole_down = model.model.layers[1].mlp.experts.down_proj
    if kind == "second layer":
        second_layer_does_not_fit(model)
    arguments = REFUSED[kind][0]() if kind in REFUSED else {"strategy": fsep(2)}
    message = refusal(partial(ms.parallelize, model, **arguments))
    model.model.layers[1].mlp.experts.down_proj = whole_down
    runtime = ms.parallelize(model, fsep(2))
    loss_of(model, dist.get_rank()).backward()
    runtime.close()
    return message, {name: whole(p.grad) for name, p in model.named_parameters()}


@pytest.mark.parametrize("kind", [*REFUSED, "second layer"])
def test_a_refused_parallelize_changes_nothing(ranks: LocalRanks, kind: str) -> None:
    """A refused call shards nothing, so the next call succeeds."""
    expected = REFUSED[kind][1] if kind in REFUSED else "is cut by Fsep in dimension 1 over 2 ranks"
    wanted = mean_gradients(2)
    for message, found in ranks.run(refused_and_then_not, kind, num_ranks=2, timeout_s=60.0):
        assert expected in message
        torch.testing.assert_close(found, wanted, rtol=1e-4, atol=1e-6)


def slots_of_a_loaded_model(folder: Path, mixed: bool) -> tuple[int, ...]:
    expert_bytes = 3 * 48 * 24 * (2 if mixed else 4)
    strategy = ms.Strategy(name="memory", sharding=ms.Ep(slot_gb_per_rank=5 * expert_bytes / 1e9), balance=ms.Eplb())
    model = loaded(folder, strategy, {"fsdp_size": 2, "ep_size": 2}, fsdp_mixed_precision=mixed)
    return tuple(experts_of(model)[0].schedule.slots_R)


@pytest.mark.parametrize("mixed", [False, True], ids=["float32", "mixed precision"])
def test_slots_in_memory_are_of_what_fsdp_computes_in(ranks: LocalRanks, tmp_path: Path, mixed: bool) -> None:
    drawn("qwen3_moe", EXPERTS).save_pretrained(tmp_path / "model")
    assert ranks.run(slots_of_a_loaded_model, tmp_path / "model", mixed, num_ranks=2, timeout_s=60.0) == [(5, 5)] * 2


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


def planning_of_other_experts() -> str:
    texts = {}
    for num_experts in (EXPERTS, EXPERTS + 2):
        model = drawn("qwen3_moe", num_experts)
        runtime = ms.parallelize(model, fsep(2, num_experts))
        loss_of(model, dist.get_rank()).backward()
        planning = ms.PlanningState(model)
        texts[num_experts] = planning.state_dict()
        runtime.close()
    return refusal(planning.load_state_dict, texts[EXPERTS])


def test_planning_of_another_number_of_experts_is_refused_where_it_is_loaded(ranks: LocalRanks) -> None:
    """Not: at the next forward, as tensors of other sizes."""
    for message in ranks.run(planning_of_other_experts, num_ranks=2, timeout_s=60.0):
        assert message.startswith("ValueError: ")


def planning_of_a_second_model(folder: Path) -> None:
    sizes = {"fsdp_size": 2, "ep_size": 2}
    first, second = (loaded(folder, lent(2), sizes) for _ in range(2))
    assert [e.layer_index for e in experts_of(first)] == [e.layer_index for e in experts_of(second)]
    ms.PlanningState(second).load_state_dict(ms.PlanningState(first).state_dict())


def test_planning_is_known_by_the_place_in_the_model(ranks: LocalRanks, tmp_path: Path) -> None:
    """Not by how many layers were made before in this process."""
    drawn("qwen3_moe", EXPERTS).save_pretrained(tmp_path / "model")
    ranks.run(planning_of_a_second_model, tmp_path / "model", num_ranks=2, timeout_s=60.0)
