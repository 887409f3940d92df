"""LoRA of PEFT itself on the parameters of experts, under strategies: as PEFT trains it in one process."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from conftest import assert_equal, refusal
from hf_models import drawn, fsep, lent, loss_of, text, whole
from peft import LoraConfig, PeftModel, get_peft_model
from peft.tuners.lora.layer import LoraLayer
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

import moesys as ms
from moesys.hf import registration
from moesys.lab.ranks.pool import LocalRanks
from moesys.moe.experts import Experts
from moesys.moe.store import ExpertStore
from moesys.overlap.experts_triton import TritonExperts

BOTH = {"target_parameters": ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"]}
STEPS = 5
EP = ms.Strategy(name="ep", sharding=ms.Ep())
# Most experts have several blocks of rows, of all ranks.
INVARIANT = ms.LayoutInvariant(block_rows=16)
AHEAD = lent(2).replace(sharding=ms.Ep(slots_per_rank=5, prefetch_layers=1))


def adapted(family: str = "qwen3_moe", **config: Any) -> Any:
    model = drawn(family)
    torch.manual_seed(3)
    return get_peft_model(model, LoraConfig(**({"r": 3, "init_lora_weights": False} | BOTH | config)))


def two(**config: Any) -> Any:
    """A model with two adapters, both of them active, which differ in rank and scaling."""
    model = adapted(**config)
    model.add_adapter("second", LoraConfig(r=2, lora_alpha=5, use_rslora=True, init_lora_weights=False, **BOTH))
    model.base_model.set_adapter(["default", "second"])
    return model


def checkpointed(**config: Any) -> Any:
    model = adapted(**config)
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    return model


def one_layer() -> Any:
    """A checkpointed model with LoRA on the experts of the first layer, whose others train themselves."""
    model = checkpointed(target_parameters=[f"layers.0.{each}" for each in BOTH["target_parameters"]])
    for name, each in model.named_parameters():
        each.requires_grad_(each.requires_grad or "layers.1.mlp.experts" in name)
    return model


MODELS: dict[str, Callable[[], Any]] = {
    "qwen3_moe": adapted,
    "gpt_oss": lambda: adapted("gpt_oss"),
    "biases": lambda: adapted("gpt_oss", target_parameters=["gate_up_proj_bias", "down_proj_bias"]),
    "one parameter": lambda: adapted(target_parameters=["mlp.experts.down_proj"]),
    "all": lambda: adapted(target_parameters=None, target_modules="all-linear"),
    "patterns": lambda: adapted(use_rslora=True, rank_pattern={"down_proj": 2}, alpha_pattern={"down_proj": 5}),
    "two": two,
    "checkpointed": checkpointed,
    "one layer": one_layer,
}


def trained(model: Any, strategy: ms.Strategy | None, mesh: Any = None) -> dict[str, Tensor]:
    """Losses, the first step's gradients and the last step's adapters; None is PEFT in one process, on the texts of all
    ranks.
    """
    rank, num_ranks = dist.get_rank(), dist.get_world_size()
    runtime = ms.parallelize(model, strategy, mesh) if strategy else None
    optimizer = torch.optim.AdamW([each for each in model.parameters() if each.requires_grad], lr=1e-2, eps=1e-3)
    found = {}
    for step in range(STEPS):
        seeds = [step * num_ranks + rank] if strategy else range(step * num_ranks, (step + 1) * num_ranks)
        losses = [loss_of(model, seed) for seed in seeds]
        sum(losses).div(len(losses)).backward()
        found |= {f"loss {seed}": loss.detach() for seed, loss in zip(seeds, losses, strict=True)}
        if step == 0:
            found |= {f"grad {name}": whole(each.grad) for name, each in model.named_parameters() if each.requires_grad}
        optimizer.step()
        optimizer.zero_grad()
    if runtime:
        runtime.close()
    return found | {name: whole(each) for name, each in model.named_parameters() if each.requires_grad}


def worst(found: dict[str, Tensor], wanted: dict[str, Tensor]) -> float:
    """Returns the largest relative error."""
    assert any(name.startswith("grad") and "experts" in name for name in found)
    return max(float((each - wanted[name]).norm() / wanted[name].norm()) for name, each in found.items())


def differences(name: str, strategies: list[ms.Strategy], copies: int = 1) -> list[tuple[float, list[str]]]:
    """Returns, for each strategy, the largest relative error, and what differs in bits from the first strategy."""
    mesh = init_device_mesh("cpu", (copies, dist.get_world_size() // copies), mesh_dim_names=("dp", "ep"))
    alone = trained(MODELS[name](), None)
    first, found = None, []
    for strategy in strategies:
        model = MODELS[name]()
        frozen = {name: each for name, each in model.named_parameters() if not each.requires_grad}
        before = {name: each.detach().clone() for name, each in frozen.items() if "gate_up_proj" in name}
        shared = trained(model, strategy, mesh)
        first = first or shared
        assert before
        assert all(torch.equal(whole(model.get_parameter(name)), each) for name, each in before.items())
        found.append((worst(shared, alone), [name for name in shared if not torch.equal(shared[name], first[name])]))
    return found


def overlaps(strategy: ms.Strategy) -> list[ms.Strategy]:
    return [strategy, strategy.replace(overlap=ms.Pipelined(chunks=3))]


def in_blocks(num_ranks: int) -> list[ms.Strategy]:
    strategies = EP, *overlaps(lent(num_ranks)), fsep(num_ranks)
    return [each.replace(reduction=INVARIANT) for each in strategies]


def assert_as_alone(
    ranks: LocalRanks, trains: Callable[..., Any], name: str, strategies: list[ms.Strategy], *copies: int
) -> None:
    """Overlaps of one sharding, and in blocks all layouts, have the same bits too."""
    alike = strategies[0].reduction == INVARIANT or len({each.name for each in strategies}) == 1
    num_ranks = 4 if name == "two" else 2
    for found in ranks.run(trains, name, strategies, *copies, num_ranks=num_ranks, timeout_s=550.0):
        for error, differing in found:
            assert error < 1e-5
            assert not (alike and differing)


ALL = [EP, lent(2), fsep(2)]
# The kind of LoRA, and the strategies.
CASES: dict[str, tuple[str, list[ms.Strategy]]] = {
    **{f"{name}, blocks": (name, in_blocks(2)) for name in ("qwen3_moe", "gpt_oss")},
    **{f"{name}, {each.name}": (name, overlaps(each)) for name in ("qwen3_moe", "gpt_oss") for each in ALL},
    **{name: (name, ALL) for name in MODELS if name not in ("qwen3_moe", "gpt_oss", "two")},
}
ALWAYS = ("qwen3_moe, blocks", "qwen3_moe, fsep")


@pytest.mark.parametrize(
    "case", [case if case in ALWAYS else pytest.param(case, marks=pytest.mark.slow) for case in CASES]
)
def test_lora_on_experts_trains_as_in_one_process(ranks: LocalRanks, case: str) -> None:
    assert_as_alone(ranks, differences, *CASES[case])


@pytest.mark.slow
def test_two_adapters_on_four_ranks_and_in_two_groups_train_as_in_one_process(ranks: LocalRanks) -> None:
    assert_as_alone(ranks, differences, "two", in_blocks(4))
    assert_as_alone(ranks, differences, "two", ALL, 2)


def on_kernels(*given: Any) -> list[tuple[float, list[str]]]:
    """``differences`` where Triton's kernels compute, in its interpreter."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Experts, "computed_by", lambda *_: KERNELS)
        return differences(*given)


KERNELS = TritonExperts()
MEGA = [each.replace(overlap=ms.MegaKernel(rows_cap=2.0)) for each in (EP, fsep(2))]


@pytest.mark.slow
@pytest.mark.parametrize(
    "strategies",
    [overlaps(lent(2)), [*overlaps(fsep(2)), *MEGA], in_blocks(2)],
    ids=["lent", "mega", "blocks"],
)
def test_kernels_train_lora_as_in_one_process(ranks: LocalRanks, strategies: list[ms.Strategy]) -> None:
    assert_as_alone(ranks, on_kernels, "qwen3_moe", strategies)


def ahead(name: str) -> tuple[float, list[str], int]:
    """The largest relative error of experts that travel ahead, what differs in bits from those that do not, and how
    often they were there ahead.
    """
    take, num_ahead = ExpertStore.take_prefetched, 0

    def counted(store: ExpertStore, *call: Any) -> Any:
        nonlocal num_ahead
        found = take(store, *call)
        num_ahead += found is not None
        return found

    mesh = init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("ep",))
    # Greedy plans other layouts where experts travel ahead.
    at_once = lent(2).replace(balance=ms.Eplb())
    alone, wanted = trained(MODELS[name](), None), trained(MODELS[name](), at_once, mesh)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ExpertStore, "take_prefetched", counted)
        found = trained(MODELS[name](), at_once.replace(sharding=AHEAD.sharding), mesh)
    return worst(found, alone), [each for each in found if not torch.equal(found[each], wanted[each])], num_ahead


@pytest.mark.parametrize("name", ["checkpointed", pytest.param("one layer", marks=pytest.mark.slow)])
def test_lora_and_checkpoints_train_alike_where_experts_travel_ahead(ranks: LocalRanks, name: str) -> None:
    for error, differing, num_ahead in ranks.run(ahead, name, num_ranks=2, timeout_s=150.0):
        assert error < 1e-5
        assert not differing
        # Adapters do not travel with their experts, which are sent as they are.
        assert num_ahead > 0


def outputs(model: Any) -> dict[str, Tensor]:
    model.eval()
    with torch.no_grad():
        found = {"active": model(input_ids=text(0)).logits}
        with model.disable_adapter():
            found["disabled"] = model(input_ids=text(0)).logits
        model.set_adapter("second")
        return found | {"second": model(input_ids=text(0)).logits}


def switched(
    strategy: ms.Strategy, folder: Path
) -> tuple[dict[str, Tensor], dict[str, Tensor], dict[str, Tensor], Tensor]:
    """Outputs of a model under a strategy, of one in one process, of what PEFT saved of the first, loaded there, and of
    that once both adapters are merged.
    """
    model, alone = two(), two()
    ms.parallelize(model, strategy)
    options = StateDictOptions(full_state_dict=True, cpu_offload=True, ignore_frozen_params=True)
    state = get_model_state_dict(model, options=options)
    if dist.get_rank() == 0:
        model.save_pretrained(folder, state_dict=state)
    dist.barrier()
    loaded = PeftModel.from_pretrained(drawn("qwen3_moe"), folder)
    loaded.load_adapter(folder / "second", "second")
    loaded.base_model.set_adapter(["default", "second"])
    found = outputs(model), outputs(alone), outputs(loaded)
    loaded.base_model.set_adapter(["default", "second"])
    with torch.no_grad():
        return *found, loaded.merge_and_unload()(input_ids=text(0)).logits


@pytest.mark.parametrize("strategy", [lent(2), fsep(2)], ids=lambda each: each.name)
def test_adapters_are_switched_and_saved_by_peft(ranks: LocalRanks, tmp_path: Path, strategy: ms.Strategy) -> None:
    for found, wanted, loaded, merged in ranks.run(switched, strategy, tmp_path, num_ranks=2, timeout_s=150.0):
        assert not torch.equal(wanted["active"], wanted["second"])
        torch.testing.assert_close(found, wanted, atol=1e-5, rtol=1e-5)
        assert_equal(loaded, wanted)
        torch.testing.assert_close(merged, found["active"], atol=1e-5, rtol=1e-5)


class ComputedShapes(TorchDispatchMode):
    """The shapes of all that is computed on this rank, but for views of what is ``given``."""

    def __init__(self, given: list[Tensor]) -> None:
        super().__init__()
        self.given = {each.untyped_storage().data_ptr() for each in given}
        self.found: set[torch.Size] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        computed = func(*args, **(kwargs or {}))
        found = [each for each in tree_leaves(computed) if type(each) is Tensor]
        self.found |= {each.shape for each in found if each.untyped_storage().data_ptr() not in self.given}
        return computed


def shapes_of_parameters(strategy: ms.Strategy | None, name: str) -> set[torch.Size]:
    """Returns the shapes of frozen matrices that a step computes: of gate_up of all experts, and with Ep of this rank's
    matrices. With Fsep a rank copies its slices to send them, and those of gate_up have the shape of all of down.
    """
    model = MODELS[name]()
    if strategy:
        ms.parallelize(model, strategy)
    frozen = [each for name, each in model.named_parameters() if name.endswith(("gate_up_proj", "down_proj"))]
    local = [each.to_local() if isinstance(each, DTensor) else each for each in frozen]
    with ComputedShapes(local) as shapes:
        loss_of(model, dist.get_rank()).backward()
    own = local if strategy and isinstance(strategy.sharding, ms.Ep) else []
    return shapes.found & {each.shape for each in (frozen[0], *own)}


@pytest.mark.parametrize("name", ["qwen3_moe", "gpt_oss"])
def test_no_rank_computes_adapted_parameters(ranks: LocalRanks, name: str) -> None:
    assert all(ranks.run(shapes_of_parameters, None, name, num_ranks=2, timeout_s=150.0))
    for strategy in (EP, EP.replace(reduction=INVARIANT), lent(2), fsep(2)):
        assert not any(ranks.run(shapes_of_parameters, strategy, name, num_ranks=2, timeout_s=150.0))


def step_in_one_process(implementation: str, config: dict[str, Any]) -> tuple[set[int], dict[str, Tensor]]:
    """Bytes of copies of frozen parameters that are kept for backward, and losses and adapters of some steps."""
    model = adapted(**config)
    model.base_model.model.set_experts_implementation(implementation)
    frozen = {each.data_ptr(): each.nbytes for name, each in model.named_parameters() if name.endswith("_proj")}
    kept = set()

    def keep(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        kept.update({storage.nbytes()} if storage.data_ptr() not in frozen else ())
        return tensor

    optimizer = torch.optim.AdamW([each for each in model.parameters() if each.requires_grad], lr=1e-2, eps=1e-3)
    found = {}
    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        for step in range(STEPS):
            loss = loss_of(model, step)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            found[f"loss {step}"] = loss.detach()
    assert frozen
    adapters = {name: each.detach() for name, each in model.named_parameters() if each.requires_grad}
    return kept & {*frozen.values()}, found | adapters


@pytest.mark.filterwarnings("ignore:.is_gradient_checkpointing.:FutureWarning")
@pytest.mark.parametrize(
    ("config", "way"),
    [
        ({}, "_by_rows"),
        ({"r": 16, "use_rslora": True}, "_by_rows"),
        ({"family": "gpt_oss"}, "_by_rows"),
        ({}, "_by_kernels"),
    ],
    ids=["r=3", "rsLoRA", "biases", "kernels"],
)
def test_lora_in_one_process_is_two_products_beside_frozen_experts(
    config: dict[str, Any], way: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No copy of a frozen parameter is kept, and results are those of PEFT on transformers' own code; also where the
    kernels of a GPU compute, in Triton's interpreter.
    """
    monkeypatch.setattr(registration, "_by_rows", getattr(registration, way))
    ms.hf.register()
    copies, found = step_in_one_process("moesys", config)
    copies_of_peft, wanted = step_in_one_process("eager", config)
    assert copies_of_peft
    assert not copies
    for name, each in found.items():
        assert float((each - wanted[name]).norm() / wanted[name].norm()) < 1e-6, name


def with_disabled(model: Any, seeds: list[int]) -> Tensor:
    """Backward is outside of what its forward was inside of."""
    with model.disable_adapter():
        loss = sum(loss_of(model, seed) for seed in seeds) / len(seeds)
    loss.backward()
    return whole(model.get_input_embeddings().weight.grad)


def with_reference(model: Any, seeds: list[int]) -> Tensor:
    """Backward is beside a reference without the adapter, as a preference loss has it."""
    loss = sum(loss_of(model, seed) for seed in seeds) / len(seeds)
    with model.disable_adapter():
        with torch.no_grad():
            loss_of(model, seeds[0])
        loss.backward()
    return whole(model.get_input_embeddings().weight.grad)


def error_of_backward(gradient: Callable[[Any, list[int]], Tensor], strategy: ms.Strategy) -> float:
    """Returns the largest error of gradients where backward has other adapters than its forward."""
    model, alone = adapted(), adapted()
    for each in (model, alone):
        each.get_input_embeddings().requires_grad_(True)
    ms.parallelize(model, strategy)
    wanted = gradient(alone, [0, 1])
    return float((gradient(model, [dist.get_rank()]) - wanted).norm() / wanted.norm())


@pytest.mark.parametrize(
    "strategy", [fsep(2), fsep(2, prefetch_layers=1), AHEAD], ids=["fsep", "fsep ahead", "lent ahead"]
)
@pytest.mark.parametrize("gradient", [pytest.param(with_disabled, marks=pytest.mark.slow), with_reference])
def test_backward_has_the_experts_of_its_forward(
    ranks: LocalRanks, gradient: Callable[[Any, list[int]], Tensor], strategy: ms.Strategy
) -> None:
    assert max(ranks.run(error_of_backward, gradient, strategy, num_ranks=2, timeout_s=150.0)) < 1e-5


class OtherLora(nn.Module, LoraLayer):
    """LoRA of a user on experts, as PEFT makes it where it is registered."""

    def __init__(self, base_layer: nn.Module, adapter_name: str, **_options: Any) -> None:
        super().__init__()
        LoraLayer.__init__(self, base_layer)

    def forward(self, *inputs: Tensor) -> Tensor:
        return self.base_layer(*inputs)


def refusals() -> dict[str, str]:
    found = {}
    model = drawn("qwen3_moe")
    config = LoraConfig(target_modules=["experts"])
    config._register_custom_module({type(model.model.layers[0].mlp.experts): OtherLora})
    other = get_peft_model(model, config)
    found["another class"] = refusal(ms.parallelize, other, EP)
    found["late gradients"] = refusal(ms.parallelize, MODELS["biases"](), fsep(2, delay_reshard=True))
    late = AHEAD.replace(sharding=AHEAD.sharding.replace(delay_reshard=True))
    found["late gradients of copies"] = refusal(ms.parallelize, MODELS["biases"](), late)
    model = adapted()
    ms.parallelize(model, EP)
    found["merge"] = refusal(model.merge_adapter)
    found["merge and unload"] = refusal(model.merge_and_unload)
    found["unload"] = refusal(model.unload)
    merged = adapted()
    merged.merge_adapter()
    ms.parallelize(merged, EP)
    loss_of(merged, dist.get_rank())
    with merged.disable_adapter():
        found["unmerge"] = refusal(loss_of, merged, dist.get_rank())
    return found


def test_what_lora_on_experts_cannot_do_over_ranks_is_refused_on_every_rank(ranks: LocalRanks) -> None:
    wanted = dict.fromkeys(
        ("merge", "merge and unload", "unload", "unmerge"),
        r"(gate_up|down)_proj of experts is sharded over ranks, .*; save the adapter, load it in one process",
    ) | {
        "late gradients of copies": "delay_reshard=True, .* use delay_reshard=False",
        "another class": r"Qwen3MoeExperts has an adapter of type OtherLora, .*; use LoraConfig\(target_parameters",
        "late gradients": "delay_reshard=True, .* use delay_reshard=False",
    }
    for found in ranks.run(refusals, num_ranks=2, timeout_s=150.0):
        assert found.keys() == wanted.keys()
        for name, message in wanted.items():
            assert re.search(message, found[name]), (name, found[name])
