"""Megatron-Core's GPT model under strategies, in a loop of Megatron's own parts, against its own experts in this loop.

All is float32, so that only the order of sums differs.
"""

from __future__ import annotations

import ast
import importlib
import os
import re
import sys
from collections.abc import Iterator
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from conftest import assert_equal
from megatron_runs import STRATEGIES, Run, Trained, call, train
from pages import blocks_of, commands_of

import moesys as ms
from moesys.lab.ranks.pool import LocalRanks, RankTimeouts

SWEEP = os.environ.get("MOESYS_SWEEP") == "1"
SEVERAL_LOSSES = {
    "moe_router_load_balancing_type": ["aux_loss", "global_aux_loss"],
    "moe_aux_loss_coeff": [0.1, 0.1],
    "moe_z_loss_coeff": 0.1,
}
FULL = {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1}
SELECTIVE = {"recompute_granularity": "selective", "recompute_modules": ["moe"]}
SHARED = {"moe_shared_expert_intermediate_size": 20, "moe_shared_expert_gate": True}
BIAS = {"moe_router_enable_expert_bias": True, "moe_router_score_function": "sigmoid"}
CLAMPED = {"activation_func_clamp_value": 0.1, "glu_linear_offset": 1.0}
PER_TOKEN = {"calculate_per_token_loss": True, "moe_z_loss_coeff": 0.1, "moe_router_topk": 3}
LATENT = {"moe_latent_size": 8}
GROUPS = {"moe_router_num_groups": 2, "moe_router_group_topk": 1, "moe_router_pre_softmax": True}
FUSED = {"gradient_accumulation_fusion": True}
TWO: dict[str, dict[str, Any]] = {
    "losses, shared experts, latent tokens": {"accumulate": 3, "config": SEVERAL_LOSSES | SHARED | LATENT},
    "full recomputation, gradients added in place": {
        "accumulate": 2,
        "config": FULL | SHARED | FUSED,
        "ddp": {"overlap_grad_reduce": True},
    },
    "selective recomputation, groups": {"accumulate": 2, "config": SELECTIVE | BIAS | GROUPS},
    "padding, tokens apart": {"accumulate": 2, "padding": True, "uneven": True, "config": PER_TOKEN},
    "grouped, interleaved": {"config": CLAMPED | {"moe_grouped_gemm": True, "moe_mlp_glu_interleave_size": 4}},
}
EP_ONLY: dict[str, dict[str, Any]] = {
    "biases": {"config": {"add_bias_linear": True, "gated_linear_unit": False}},
    "grouped biases, weighted inputs": {
        "config": {
            "add_bias_linear": True,
            "moe_grouped_gemm": True,
            "moe_router_topk": 1,
            "moe_apply_probs_on_input": True,
            "moe_router_pre_softmax": True,
        }
    },
}
SHARDED = {"use_distributed_optimizer": True, "overlap_grad_reduce": True, "overlap_param_gather": True}
FOUR: dict[str, dict[str, Any]] = {
    "EP 2, DP 2": {"accumulate": 3, "config": BIAS},
    "EP 2, DP 2, distributed optimizer": {"accumulate": 2, "ddp": SHARDED},
    "EP 4": {"parallel": {"expert_model_parallel_size": 4}, "config": SHARED},
    "TP 2, EP 2": {"parallel": {"tensor_model_parallel_size": 2}, "config": SEVERAL_LOSSES | SHARED},
    "PP 2, EP 2": {"accumulate": 4, "parallel": {"pipeline_model_parallel_size": 2}, "config": BIAS},
    "PP 2 in turns, EP 2": {
        "accumulate": 4,
        "parallel": {"pipeline_model_parallel_size": 2, "virtual_pipeline_model_parallel_size": 2},
        "config": {"num_layers": 4} | SELECTIVE | BIAS,
    },
}


@pytest.fixture(scope="module")
def megatron() -> Iterator[LocalRanks]:
    """Ranks of their own, as Megatron and torch are patched there."""
    try:
        version("megatron-core")
    except PackageNotFoundError:
        pytest.fail("Megatron-Core is not installed; run `make hosts`")
    with LocalRanks(4, timeouts=RankTimeouts(run_s=280.0, collective_s=120.0)) as ranks:
        yield ranks


def same_training(found: Trained, wanted: Trained, gradients: bool = True, tolerance: float = 1e-5) -> None:
    """Asserts that losses, norms, and the gradients of the first step are the same within ``tolerance``, and that
    biases of routers are the same.
    """
    assert found.losses == pytest.approx(wanted.losses, rel=tolerance)
    assert found.norms == pytest.approx(wanted.norms, rel=tolerance)
    assert_equal(found.biases, wanted.biases)
    assert found.gradients.keys() == wanted.gradients.keys()
    if gradients:
        for name, gradient in wanted.gradients.items():
            error = (found.gradients[name] - gradient).abs().max()
            assert error <= tolerance * gradient.abs().max(), name


def compare(megatron: LocalRanks, num_ranks: int, table: dict[str, dict[str, Any]], *names: str) -> None:
    """Trains cases of a table with Megatron's own experts and under a strategy, of which each has another in turn; with
    MOESYS_SWEEP under all, and compares.
    """
    strategies = ["ep", "lent"] if table is EP_ONLY else [*STRATEGIES]
    turn = {name: strategies if SWEEP else [strategies[at % len(strategies)]] for at, name in enumerate(table)}
    wanted = [(name, each) for name in names or table for each in [None, *turn[name]]]
    runs = [Run(None if each is None else STRATEGIES[each], 2, **table[name]) for name, each in wanted]
    for trained in megatron.run(train, *runs, num_ranks=num_ranks):
        found = dict(zip(wanted, trained, strict=True))
        for name, each in wanted:
            gradients = "use_distributed_optimizer" not in table[name].get("ddp", {})
            same_training(found[name, each], found[name, None], gradients)


@pytest.mark.parametrize("name", STRATEGIES)
def test_strategies_train_as_megatron_does_with_the_same_bits_for_every_overlap(
    megatron: LocalRanks, name: str
) -> None:
    overlaps = [STRATEGIES[name].replace(overlap=overlap) for overlap in (ms.Sequential(), ms.Pipelined(chunks=3))]
    for wanted, *found in megatron.run(train, *map(Run, [None, *overlaps]), num_ranks=2):
        same_training(found[0], wanted)
        assert found[1].losses == found[0].losses
        assert_equal(found[1].parameters, found[0].parameters)
        # Layouts follow the load.
        layouts = {layers[0].tobytes() for layers in found[0].held}
        assert (len(layouts) > 1) == (name != "ep")


@pytest.mark.parametrize("recompute", [{}, FULL], ids=["kept", "recomputed"])
def test_layers_are_linked_and_send_experts_ahead_but_not_while_they_are_recomputed(
    megatron: LocalRanks, recompute: dict[str, Any]
) -> None:
    on_demand = STRATEGIES["fsep"]
    ahead = on_demand.replace(sharding=ms.Fsep(slots_per_rank=5, prefetch_layers=1))
    for found, wanted in megatron.run(
        train, *(Run(each, 3, accumulate=2, config=recompute) for each in (ahead, on_demand)), num_ranks=2
    ):
        assert found.linked == wanted.linked == [True, True]
        assert found.losses == wanted.losses
        assert_equal(found.parameters, wanted.parameters)
        # Experts that were sent for nothing would be bytes more.
        assert found.restored == wanted.restored
        assert min(found.restored) > 0


def test_two_ranks_train_as_megatron_does(megatron: LocalRanks) -> None:
    compare(megatron, 2, TWO)
    compare(megatron, 2, EP_ONLY)


@pytest.mark.parametrize("name", FOUR)
def test_four_ranks_train_as_megatron_does(megatron: LocalRanks, name: str) -> None:
    compare(megatron, 4, FOUR, name)


def test_checkpoints_are_those_of_megatron_on_other_ranks_and_for_other_strategies(
    megatron: LocalRanks, tmp_path: Path
) -> None:
    folders = [tmp_path / name for name in ("ep", "fsep", "theirs")]
    for folder in folders:
        folder.mkdir()
    first, second, third = map(str, folders)
    (saved,) = megatron.run(train, Run(STRATEGIES["ep"], 2, save=first), num_ranks=2)[0]
    on_four: dict[str, Any] = {"first": 2, "parallel": {"expert_model_parallel_size": 4}}
    theirs, ours, sliced = megatron.run(
        train,
        *(Run(each, 2, load=first, **on_four) for each in (None, STRATEGIES["fsep"])),
        Run(STRATEGIES["fsep"], 0, load=first, save=second, **on_four),
    )[0]
    same_training(ours, theirs)
    back, again, wanted = megatron.run(
        train,
        Run(None, 0, load=second, save=third),
        *(Run(None, 2, first=2, load=folder) for folder in (third, first)),
        num_ranks=2,
    )[0]
    assert_equal(sliced.parameters, saved.parameters)
    assert_equal(back.parameters, saved.parameters)
    # The state of the optimizer came back, too.
    assert_equal(again.parameters, wanted.parameters)


@pytest.mark.parametrize("by_verl", [False, True], ids=["Megatron", "verl"])
def test_routes_are_replayed_as_megatron_and_verl_replay_them(megatron: LocalRanks, by_verl: bool) -> None:
    ((given, planned, seen),) = megatron.run(call, "replayed", by_verl, num_ranks=1)
    wanted = [each.flatten().bincount(minlength=8) for each in given]
    assert_equal(planned, wanted)
    assert_equal(seen, wanted)


def test_gradients_added_in_place_are_not_rounded(megatron: LocalRanks) -> None:
    assert megatron.run(call, "rounded", num_ranks=2) == [[True, False]] * 2


def test_what_a_layer_cannot_run_is_refused(megatron: LocalRanks) -> None:
    ((part, copied, sharded, three, packed),) = megatron.run(call, "messages_of_layers", num_ranks=1)
    assert "a part of a MoE layer was called alone, as CUDA graphs do; set cuda_graph_impl='none'" in part
    assert "tensor_model_parallel_size=2 without sequence_parallel, " in copied
    assert "set sequence_parallel=True" in copied
    assert "set use_megatron_fsdp=False, and choose Fsep for experts in slices" in sharded
    assert "8" in three
    assert "PackedExperts keeps experts in a layout that moesys does not know; it runs those of SequentialMLP" in packed


def test_specifications_are_changed_in_a_copy_or_refused(megatron: LocalRanks) -> None:
    ((changed, original, without, of_text),) = megatron.run(call, "messages_for_specs", num_ranks=1)
    assert (changed, original) == ("StrategyMoELayer", "MoELayer")
    assert "spec, a ModuleSpec, has no MoELayer of Megatron-Core; give the specification of a layer" in without
    assert of_text == "strategy is a str; give a moesys.Strategy"


def test_the_page_is_followed(megatron: LocalRanks) -> None:
    spec, install = blocks_of("megatron")
    assert commands_of(install) == ["pip install '.[megatron]'"]
    for found, wanted in megatron.run(call, "followed", spec.text, num_ranks=2):
        same_training(found, wanted)


def test_the_engine_of_verl_runs_experts_under_a_strategy(megatron: LocalRanks) -> None:
    """With a stand-in for the engine, which needs GPUs: that of verl makes its provider where the page changes it."""
    (program,) = [block.text for block in blocks_of("rl") if block.title == "moe_strategy.py"]
    for found, wanted, parameters in megatron.run(call, "with_verl", program, num_ranks=2):
        same_training(found, wanted)
        assert parameters == ["config", "vp_stage"]
    source = Path(sys.prefix, "hosts", "verl", "workers", "engine", "megatron", "transformer_impl.py").read_text()
    (engine,) = [each for each in ast.parse(source).body if getattr(each, "name", "") == "MegatronEngine"]
    (build,) = [each for each in engine.body if getattr(each, "name", "") == "_build_tf_config"]
    assigned = [ast.unparse(each) for each in ast.walk(build) if isinstance(each, ast.Assign)]
    assert "self.provider = provider" in assigned
    assert "provider = bridge.to_megatron_provider(load_weights=False)" in assigned


@pytest.mark.slow
@pytest.mark.interpreter
@pytest.mark.parametrize("name", ["lent", "fsep"])
def test_mega_kernels_train_as_megatron_does_by_the_bits_of_messages(megatron: LocalRanks, name: str) -> None:
    strategy = STRATEGIES[name].replace(overlap=ms.MegaKernel(programs=1, rows_cap=2.0))
    others = [strategy.replace(overlap=overlap) for overlap in (ms.Sequential(), ms.Pipelined(chunks=3))]
    sizes = {"config": {"hidden_size": 32, "moe_ffn_hidden_size": 16}}
    runs = [Run(each, 2, by_triton=each in others, **sizes) for each in (strategy, None, *others)]
    found, wanted, *in_messages = megatron.run(train, *runs, num_ranks=2)[0]
    same_training(found, wanted)
    for other in in_messages:
        assert_equal(
            [other.losses, other.gradients, other.parameters], [found.losses, found.gradients, found.parameters]
        )


def test_traces_of_megatron_are_the_loads_of_plans(megatron: LocalRanks, tmp_path: Path) -> None:
    """By Megatron's own recorder, which ``--moe-routing-trace-path`` switches on."""
    theirs = tmp_path / "theirs"
    megatron.run(call, "traced", str(theirs), None, num_ranks=2)
    wanted = ms.traces.megatron_trace(theirs, 8)
    for name in [*STRATEGIES] if SWEEP else ["fsep"]:
        loads = megatron.run(call, "traced", str(tmp_path / name), STRATEGIES[name], num_ranks=2)[0]
        found = ms.traces.megatron_trace(tmp_path / name, 8)
        assert np.array_equal(found.tokens_SLRE, wanted.tokens_SLRE)
        assert np.array_equal(found.tokens_SLRE, loads)


def test_each_option_of_moe_is_in_one_table(megatron: LocalRanks) -> None:
    ((named, read),) = megatron.run(call, "options_of_moe", num_ranks=1)
    ((refused, used, without_effect),) = megatron.run(call, "tables", num_ranks=1)
    assert len(named) > 60
    assert len(read) > 60
    # Megatron's linear layers read this one.
    assert refused | used | without_effect == named | read | {"gradient_accumulation_fusion"}
    assert not refused & used
    assert not refused & without_effect
    assert not used & without_effect


EP, FSEP = STRATEGIES["ep"], STRATEGIES["fsep"]
LATE = FSEP.replace(sharding=ms.Fsep(slots_per_rank=5, prefetch_layers=1, delay_reshard=True))
REFUSALS: list[tuple[ms.Strategy, dict[str, Any], dict[str, Any], str]] = [
    (EP, {"moe_expert_capacity_factor": 1.0}, {}, "moe_expert_capacity_factor=1.0: tokens .* set .*=None"),
    (EP, {"moe_token_dropping": True}, {}, "moe_token_dropping=True: tokens beyond a capacity .*; set .*=False"),
    (EP, {"moe_paged_stash": True}, {}, "moe_paged_stash=True: .*; set moe_paged_stash=False"),
    (EP, {"overlap_moe_expert_parallel_comm": True}, {}, "choose the strategy's overlap; set .*=False"),
    (EP, {"moe_shared_expert_overlap": True}, {}, "shared experts would run inside of .*; set .*overlap=False"),
    (EP, {"delay_wgrad_compute": True}, {}, "gradients would be computed after backward, .*; set .*compute=False"),
    (EP, {"moe_single_grouped_weight": True}, {}, "all experts would be in one tensor, .*; set .*weight=False"),
    (
        EP,
        {"cuda_graph_impl": "transformer_engine", "cuda_graph_modules": ["moe_router"]},
        {},
        'set cuda_graph_modules=."attn"',
    ),
    (EP, {"fp8": "hybrid"}, {}, "fp8='hybrid': experts would be quantized, .*; set fp8=None"),
    (EP, {"fp4": "e2m1"}, {}, "fp4='e2m1': experts would be quantized, .*; set fp4=None"),
    (EP, {"expert_tensor_parallel_size": 2}, {}, "expert_tensor_parallel_size=2: .*; choose Fsep; set .*=1"),
    (EP, {"moe_token_dispatcher_type": "flex"}, {}, "set moe_token_dispatcher_type='alltoall'"),
    (EP, {"fine_grained_activation_offloading": True, "offload_modules": ["moe_act"]}, {}, "leave out moe_act"),
    (FSEP, {"add_bias_linear": True}, {}, "set add_bias_linear=False, or choose Ep"),
    (LATE, {}, {}, "delay_reshard=True, .* takes no gradient later than from backward; use delay_reshard=False"),
    (
        FSEP,
        {"hidden_size": 18},
        {"parallel": {"expert_model_parallel_size": 4}},
        "expert_model_parallel_size=4 does not divide the width 18 of experts",
    ),
]


def test_what_moesys_does_not_run_is_refused_by_name(megatron: LocalRanks) -> None:
    found = megatron.run(call, "messages", [case[:3] for case in REFUSALS], num_ranks=4)[0]
    for message, (*_, wanted) in zip(found, REFUSALS, strict=True):
        assert re.search(wanted, message), message


def test_without_megatron_an_error_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "megatron", None)
    with pytest.raises(ImportError, match=r"megatron-core 0\.19 or newer, and found is .*; install moesys\[megatron\]"):
        importlib.import_module("moesys.megatron")
