"""torchtitan's models under strategies, in torchtitan's own trainer, against its own experts in the same loop.

Its experts compute in bfloat16; here they are made float32 (``cpu_trainer``), so that only the order of sums differs.
"""

from __future__ import annotations

import importlib
import shlex
import sys
from collections.abc import Iterator
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import assert_equal
from pages import blocks_of, commands_of, is_run
from safetensors.torch import load_file
from titan_runs import STRATEGIES, Run, Trained, call, ours, train
from torch import Tensor

import moesys as ms
from moesys.lab.ranks.pool import LocalRanks, RankTimeouts

OVERLAPS = {"sequential": ms.Sequential(), "pipelined": ms.Pipelined(chunks=3)}


@pytest.fixture(scope="module")
def titan() -> Iterator[LocalRanks]:
    """Ranks of their own, as torchtitan switches Python's collection of garbage off, and is patched there."""
    try:
        version("torchtitan")
    except PackageNotFoundError:
        pytest.fail("torchtitan is not installed; run `make hosts`")
    with LocalRanks(4, timeouts=RankTimeouts(run_s=250.0, collective_s=120.0)) as ranks:
        yield ranks


@pytest.fixture(scope="module")
def theirs(titan: LocalRanks) -> Any:
    """Runs with torchtitan's own experts, each trained once."""
    return cache(lambda num_ranks, **options: titan.run(train, Run(**options), num_ranks=num_ranks))


def same_training(found_R: list[Trained], wanted_R: list[Trained], tolerance: float = 1e-5) -> None:
    """Asserts that ranks chose the same experts, and had the same losses and norms within ``tolerance``, and the same
    first gradients.
    """
    for found, wanted in zip(found_R, wanted_R, strict=True):
        assert_equal(found.choices, wanted.choices)
    found, wanted = found_R[0], wanted_R[0]
    assert found.losses == pytest.approx(wanted.losses, rel=tolerance)
    assert found.norms == pytest.approx(wanted.norms, rel=tolerance)
    assert found.gradients.keys() == wanted.gradients.keys()
    for name, gradient in wanted.gradients.items():
        error = (found.gradients[name] - gradient).abs().max() / gradient.abs().max()
        assert error < 1e-5, name


def same_bits(found: Trained, wanted: Trained) -> None:
    assert found.losses == wanted.losses
    assert_equal(found.parameters, wanted.parameters)


def test_a_step_with_a_strategy_from_a_file_is_that_of_torchtitan(
    titan: LocalRanks, theirs: Any, tmp_path: Path
) -> None:
    file = tmp_path / "lent.toml"
    file.write_text(STRATEGIES["lent"].to_toml())
    overrides = (f'moesys.torchtitan.experts={{"strategy": "{file}"}}',)
    same_training(titan.run(train, Run(overrides, steps=1), num_ranks=2), theirs(2, steps=1))


MUON = 'moesys.torchtitan.muon={"lr": 0.01, "adamw": {"lr": 0.003, "eps": 0.001}}'


@pytest.mark.parametrize(
    ("name", "num_ranks"),
    [("fsep", 2), *(pytest.param(*each, marks=pytest.mark.slow) for each in (("fsep", 4), ("ep", 2), ("lent", 2)))],
)
def test_muon_trains_each_matrix_as_torch_does(titan: LocalRanks, name: str, num_ranks: int) -> None:
    run = Run((*ours(STRATEGIES[name]), MUON), steps=10)
    for errors in titan.run(call, "errors_under_muon", run, num_ranks=num_ranks):
        assert max(errors.values()) < 1e-6, errors


def test_without_torchtitan_an_error_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "torchtitan", None)
    with pytest.raises(ImportError, match=r"torchtitan 0\.3 or newer, and found is .*; install moesys\[torchtitan\]"):
        importlib.import_module("moesys.torchtitan")


def test_tokens_may_be_flat_and_unknown_modules_are_refused(titan: LocalRanks) -> None:
    assert titan.run(call, "same_outputs_of_flat_tokens", num_ranks=1) == [True]
    ((packed, balanced),) = titan.run(call, "messages_of_models", num_ranks=1)
    assert "cpu_trainer.PackedExperts keeps experts in a layout that moesys does not know; it runs those of" in packed
    assert "MoE has routers of torchtitan, which QuantileBalancer does not balance: torchtitan's optimizers" in balanced


@pytest.mark.slow
@pytest.mark.parametrize("name", STRATEGIES)
def test_strategies_train_as_torchtitan_does_with_the_same_bits_for_every_overlap(
    titan: LocalRanks, theirs: Any, name: str
) -> None:
    runs = [
        titan.run(train, Run(ours(STRATEGIES[name].replace(overlap=overlap))), num_ranks=2)
        for overlap in OVERLAPS.values()
    ]
    same_training(runs[0], theirs(2))
    same_bits(runs[1][0], runs[0][0])
    # Layouts follow the load.
    layouts = {layers[0].tobytes() for layers in runs[0][0].held}
    assert (len(layouts) > 1) == (name != "ep")


@pytest.mark.slow
@pytest.mark.interpreter
@pytest.mark.parametrize("name", ["lent", "fsep"])
def test_mega_kernels_train_as_torchtitan_does(titan: LocalRanks, name: str) -> None:
    few: dict[str, Any] = {"steps": 2, "sequences": 1, "settings": {"training.seq_len": 8}}
    strategy = STRATEGIES[name].replace(overlap=ms.MegaKernel(programs=1, rows_cap=2.0))
    found, wanted = (titan.run(train, Run(overrides, **few), num_ranks=2) for overrides in (ours(strategy), ()))
    same_training(found, wanted)


def parallel(num_ranks: int, sharing: int = 1, **settings: Any) -> tuple[int, dict[str, Any]]:
    """``sharing``: ranks that have the same sequences, as those of a tensor-parallel group do."""
    paths = {f"parallelism.{field}": value for field, value in settings.items()}
    return num_ranks, {"settings": paths | {"training.global_batch_size": 2 * num_ranks // sharing}}


CASES: dict[str, tuple[int, dict[str, Any]]] = {
    "expert groups smaller than the world": (4, {}),
    "accumulation": (2, {"accumulate": 3}),
    "tensor parallelism": parallel(2, 2, tensor_parallel_degree=2),
    "replicas": parallel(4, data_parallel_replicate_degree=2),
    "full DTensor": parallel(2, spmd_backend="full_dtensor"),
    **{model: (2, {"model": model, "eps": 1e-3}) for model in ("deepseek_v3", "gpt_oss")},
}


@pytest.mark.slow
@pytest.mark.parametrize("case", CASES)
def test_other_runs_train_as_in_torchtitan(titan: LocalRanks, case: str) -> None:
    num_ranks, options = CASES[case]
    wanted = titan.run(train, Run(**options), num_ranks=num_ranks)
    for name in ["lent", "fsep"] if options else STRATEGIES:
        found = titan.run(train, Run(ours(STRATEGIES[name]), **options), num_ranks=num_ranks)
        # Models of full width: Adam multiplies what the order of sums changes in small gradients, until a token of
        # gpt-oss chooses another expert in the sixth step.
        same_training(found, wanted, tolerance=1e-4 if "model" in options else 1e-5)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["lent", "fsep"])
def test_activation_checkpointing_changes_no_bit(titan: LocalRanks, name: str) -> None:
    kept, *recomputed = (
        titan.run(train, Run(ours(STRATEGIES[name]), settings=settings), num_ranks=2)[0]
        for settings in ({}, *({"activation_checkpoint": policy} for policy in ("selective", "full")))
    )
    for found in recomputed:
        same_bits(found, kept)


@pytest.mark.slow
@pytest.mark.parametrize(("name", "others"), [("lent", ()), ("fsep", ()), ("fsep", (MUON,))])
def test_a_run_is_resumed_from_torchtitans_checkpoints_as_if_it_had_not_stopped(
    titan: LocalRanks, tmp_path: Path, name: str, others: tuple[str, ...]
) -> None:
    overrides, folder = (*ours(STRATEGIES[name]), "moesys.torchtitan.planning", *others), str(tmp_path)
    whole = titan.run(train, Run(overrides, folder=folder), num_ranks=2)
    resumed = titan.run(train, Run(overrides, folder=folder, settings={"checkpoint.load_step": 3}), num_ranks=2)
    assert_equal(resumed[0].choices[0], whole[0].choices[3])
    assert resumed[0].losses == whole[0].losses[3:]
    assert_equal(resumed[0].held, whole[0].held[3:])
    assert_equal(resumed[0].parameters, whole[0].parameters)


@pytest.mark.slow
@pytest.mark.parametrize("name", STRATEGIES)
def test_a_run_on_four_ranks_is_resumed_on_two(titan: LocalRanks, theirs: Any, tmp_path: Path, name: str) -> None:
    overrides, folder = (*ours(STRATEGIES[name]), "moesys.torchtitan.planning"), str(tmp_path)
    titan.run(train, Run(overrides, sequences=1, folder=folder), num_ranks=4)
    # Histories belong to the ranks that have saved them.
    settings = {"checkpoint.load_step": 3, "checkpoint.exclude_from_loading": ["moesys"]}
    resumed = titan.run(train, Run(overrides, folder=folder, settings=settings), num_ranks=2)
    whole = theirs(2)
    assert resumed[0].losses == pytest.approx(whole[0].losses[3:], rel=1e-5)
    assert resumed[0].norms == pytest.approx(whole[0].norms[3:], rel=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["lent", "fsep"])
def test_weights_are_exported_in_the_format_of_the_hub(titan: LocalRanks, tmp_path: Path, name: str) -> None:
    hub = {"last_save_model_only": True, "last_save_in_hf": True, "export_dtype": "float32"}
    settings = {f"checkpoint.{key}": value for key, value in hub.items()}
    run = Run(ours(STRATEGIES[name]), steps=1, folder=str(tmp_path), settings=settings)
    parameters = titan.run(train, run, num_ranks=4)[0].parameters
    (file,) = (tmp_path / "checkpoint" / "step-1").glob("*.safetensors")
    exported = load_file(file)
    for part, own in (("gate_proj", "w1_EFD"), ("down_proj", "w2_EDF"), ("up_proj", "w3_EFD")):
        for expert, weight in enumerate(parameters[f"layers.1.moe.routed_experts.inner_experts.{own}"]):
            assert torch.equal(exported[f"model.layers.1.mlp.experts.{expert}.{part}.weight"], weight)


@pytest.mark.slow
def test_what_cannot_run_is_refused_on_all_ranks_with_a_way_out(titan: LocalRanks, tmp_path: Path) -> None:
    late = STRATEGIES["fsep"].replace(sharding=ms.Fsep(slots_per_rank=5, prefetch_layers=1, delay_reshard=True))
    ep, mega = ours(STRATEGIES["ep"]), ours(ms.Strategy(name="mega", overlap=ms.MegaKernel()))
    (tmp_path / "latin.toml").write_bytes("name = 'é'".encode("latin-1"))
    named = {
        '"nowhere.toml"': "nowhere.toml",
        f'"{tmp_path}/latin.toml"': "cannot be read on rank 0",
        '"ep"': "path that ends in .toml or .json",
        '{"name": "ep", "sharding": {"kind": "epp"}}': "epp",
    }
    degree = "parallelism.expert_parallel_degree"
    compiled = {"compile.enable": True, "compile.components": ["model"], "compile.backend": "eager"}
    refused = [
        *((Run((f'moesys.torchtitan.experts={{"strategy": {name}}}',)), said) for name, said in named.items()),
        (Run(ours(late)), "delay_reshard=True"),
        (Run(ep, settings={degree: 1}), "expert_parallel_degree=1"),
        (Run(ep, settings={"parallelism.pipeline_parallel_degree": 2}), "pipeline_parallel_degree=2"),
        (Run(ep, settings={degree: 4}, sizes={"num_experts": 6}), "does not divide the 6 experts"),
        (Run(ep, sizes={"moe_comm_backend": "deepep"}), "DeepEPTokenDispatcher"),
        (Run(mega, "gpt_oss"), "overlap=MegaKernel, whose kernels compute SwiGLU without biases"),
        (Run(ep, settings=compiled), 'leave "model" out of compile.components'),
    ]
    for rank in titan.run(call, "messages", [run for run, _ in refused], num_ranks=4):
        for message, (_, said) in zip(rank, refused, strict=True):
            assert said in message


@pytest.mark.slow
def test_the_page_is_followed(titan: LocalRanks, tmp_path: Path) -> None:
    """Every block: files are saved, commands train a step, and the function makes a configuration of the same run."""
    blocks = blocks_of("torchtitan")
    (tmp_path / "lent.toml").write_text(next(block.text for block in blocks if block.title == "lent.toml"))
    (made,) = [block.text for block in blocks if block.language == "python"]
    (tmp_path / "made_config").mkdir()
    (tmp_path / "made_config" / "config_registry.py").write_text(made)
    commands = [each for block in blocks if block.language == "sh" for each in commands_of(block) if is_run(each)]
    assert len(commands) == 3
    head = "torchrun --nproc-per-node 4 -m torchtitan.train "
    commands.append(f"{head}--module made_config --config qwen3_moe_lent")
    losses = []
    for command in commands:
        assert command.startswith(head)
        arguments = tuple(shlex.split(command.removeprefix(head)))
        run = Run(command=arguments, steps=1, folder=str(tmp_path))
        losses.append(titan.run(call, "train_in", str(tmp_path), run, num_ranks=4)[0].losses)
    assert losses == [losses[0]] * len(commands)


@pytest.mark.slow
def test_bfloat16_is_as_exact_as_torchtitans(titan: LocalRanks, theirs: Any) -> None:
    """By the first gradient of each tensor of experts, against torchtitan's own step in float64."""
    forced = theirs(2)

    def gradients(dtype: str, overrides: tuple[str, ...] = ()) -> dict[str, Tensor]:
        found = titan.run(train, Run(overrides, steps=1, dtype=dtype, forced=forced), num_ranks=2)[0].gradients
        return {name: each for name, each in found.items() if "experts" in name}

    exact = gradients("float64")
    assert len(exact) == 6

    def errors(overrides: tuple[str, ...]) -> dict[str, float]:
        found = gradients("bfloat16", overrides)
        return {name: float((found[name] - each).norm() / each.norm()) for name, each in exact.items()}

    wanted = errors(())
    for strategy in STRATEGIES.values():
        for name, error in errors(ours(strategy)).items():
            assert 0 < error <= 1.5 * wanted[name], (strategy.name, name)
