"""A Trainer goes on from its checkpoint, on these ranks and others, as if it had not been stopped."""

from __future__ import annotations

import os
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from conftest import assert_equal, refusal
from hf_models import Rows, drawn, loaded, under_torchrun, whole
from transformers import TrainerCallback, TrainingArguments

import moesys as ms
from moesys.hf import trainer
from moesys.lab.ranks.pool import LocalRanks
from moesys.moe.experts import experts_of

# What 2, 3 and 4 ranks divide.
EXPERTS, BATCH = 12, 12
GREEDY: dict[str, Any] = {"balance": ms.Greedy(), "split": ms.FlowSplit()}
SAVED_AT, STEPS = 2, 3
LENT = ms.Strategy(name="lent", sharding=ms.Ep(slots_per_rank=7), **GREEDY)
FSEP = ms.Strategy(name="fsep", sharding=ms.Fsep(slots_per_rank=7), overlap=ms.Pipelined(chunks=2), **GREEDY)


class Snapshot(TrainerCallback):
    """Parameters and moments of the optimizer where a checkpoint is written, and where training begins; layouts of
    every step.
    """

    def __init__(self) -> None:
        self.layouts: list[list[list[list[int]]]] = []

    def on_step_end(self, args: Any, state: Any, control: Any, **others: Any) -> None:
        self.layouts.append([each.last_plan.layout.expert_RS.tolist() for each in experts_of(others["model"])])

    def on_save(self, args: Any, state: Any, control: Any, **others: Any) -> None:
        if state.global_step == SAVED_AT:
            self.take(**others)

    def on_train_begin(self, args: Any, state: Any, control: Any, **others: Any) -> None:
        self.take(**others)

    def take(self, model: Any, optimizer: Any, **_: Any) -> None:
        self.weights = {name: whole(p).clone() for name, p in model.named_parameters()}
        states = {name: optimizer.state[p] for name, p in model.named_parameters() if p in optimizer.state}
        moments = {name: of.get("exp_avg_sq", of.get("momentum_buffer")) for name, of in states.items()}
        self.moments = {name: whole(moment).clone() for name, moment in moments.items()}


def trainer_of(model: Any, out: Path, muon: bool = False, **options: Any) -> ms.hf.ResumableTrainer:
    given: dict[str, Any] = {
        "output_dir": str(out),
        "use_cpu": True,
        "max_steps": STEPS,
        "per_device_train_batch_size": BATCH // dist.get_world_size(),
        "learning_rate": 1e-3,
        "adam_epsilon": 1e-3,
        "logging_steps": 1,
        "report_to": [],
        "save_strategy": "steps",
        "save_steps": SAVED_AT,
        "save_only_model": True,
        "disable_tqdm": True,
    }
    arguments = TrainingArguments(**(given | options))
    optimizers = (ms.Muon(model, lr=1e-3, adjust_lr_fn="match_rms_adamw") if muon else None, None)
    rows = {"train_dataset": Rows(), "eval_dataset": Rows()}
    return ms.hf.ResumableTrainer(model=model, args=arguments, optimizers=optimizers, **rows)


def trained(
    folder: Path, out: Path, strategy: ms.Strategy | None, sizes: dict[str, int], resumed: bool, **options: Any
) -> dict[str, Any]:
    model, snapshot = loaded(folder, strategy, sizes), Snapshot()
    with under_torchrun():
        trainer = trainer_of(model, out, **options)
        trainer.add_callback(snapshot)
        trainer.train(resume_from_checkpoint=str(out / f"checkpoint-{SAVED_AT}") if resumed else None)
    history = trainer.state.log_history
    return {
        "steps": [(each["loss"], each["grad_norm"], each["learning_rate"]) for each in history if "loss" in each],
        "weights": snapshot.weights,
        "moments": snapshot.moments,
        "state": {name: whole(p) for name, p in model.named_parameters()},
        "layouts": snapshot.layouts,
    }


GROUPS, TWO, THREE = {"fsdp_size": 4, "ep_size": 2}, {"fsdp_size": 2, "ep_size": 2}, {"fsdp_size": 3, "ep_size": 3}
SLOW = [pytest.param(each, False, GROUPS, (TWO, THREE), marks=pytest.mark.slow) for each in (None, LENT, FSEP)]


@pytest.mark.parametrize(
    ("strategy", "muon", "sizes", "others"),
    [*SLOW, (FSEP, True, TWO, (THREE,))],
    ids=["all_to_all", "lent", "fsep", "muon"],
)
def test_goes_on_as_if_it_had_not_been_stopped(
    ranks: LocalRanks, tmp_path: Path, strategy: ms.Strategy | None, muon: bool, sizes: dict[str, int], others: Any
) -> None:
    """The same ranks go on with the same bits. Others begin with the same bits, Muon's under another sharding."""
    drawn("qwen3_moe", EXPERTS).save_pretrained(tmp_path / "model")
    folders = (tmp_path / "model", tmp_path / "out")

    def run(strategy: ms.Strategy | None, sizes: dict[str, int], resumed: bool) -> dict[str, Any]:
        num_ranks = sizes["fsdp_size"]
        return ranks.run(of_trainer, *folders, strategy, sizes, resumed, muon, num_ranks=num_ranks, timeout_s=250.0)[0]

    through, again = (run(strategy, sizes, resumed) for resumed in (False, True))
    assert len(again["steps"]) == STEPS
    assert again["steps"] == through["steps"]
    assert again["layouts"] == through["layouts"][SAVED_AT:]
    if strategy is not None and not muon:
        assert through["layouts"][SAVED_AT] != through["layouts"][0]
    for what in ("weights", "moments", "state"):
        assert_equal(again[what], through[what], what)
    for each in others:
        other = run(LENT if muon else strategy, each, True)
        for what in ("weights", "moments"):
            assert_equal({name: other[what][name] for name in through[what]}, through[what], what)
        for one, wanted in zip(other["steps"], through["steps"], strict=True):
            assert one == pytest.approx(wanted, rel=1e-5)


def of_trainer(*given: Any) -> dict[str, Any]:
    return trained(*given[:-1], muon=given[-1])


def trained_for_the_worst(folder: Path) -> dict[str, Any]:
    """The highest loss, as one that is not the last."""
    worst = {"eval_strategy": "steps", "eval_steps": SAVED_AT, "greater_is_better": True}
    options = {"load_best_model_at_end": True, "metric_for_best_model": "loss", **worst}
    return trained(folder, folder.parent / "out", FSEP, {"fsdp_size": 2, "ep_size": 2}, False, **options)


@pytest.mark.slow
def test_the_best_model_is_loaded_at_the_end(ranks: LocalRanks, tmp_path: Path) -> None:
    drawn("qwen3_moe", EXPERTS).save_pretrained(tmp_path / "model")
    found = ranks.run(trained_for_the_worst, tmp_path / "model", num_ranks=2, timeout_s=250.0)[0]
    assert all(torch.equal(found["state"][name], tensor) for name, tensor in found["weights"].items())


def resumed_from_weights_alone(folder: Path) -> None:
    model = loaded(folder, LENT, {"fsdp_size": 2, "ep_size": 2})
    with under_torchrun():
        trainer_of(model, folder.parent / "out").train(resume_from_checkpoint=str(folder))


def test_weights_alone_are_refused(ranks: LocalRanks, tmp_path: Path) -> None:
    drawn("qwen3_moe", EXPERTS).save_pretrained(tmp_path / "model")
    for told in ranks.run(refusal, resumed_from_weights_alone, tmp_path / "model", num_ranks=2, timeout_s=60.0):
        assert "model is not of a ResumableTrainer, or was not written to its end" in told


@pytest.mark.parametrize(
    "state", [None, '{"global_step": 4, "log_his', "[" * 100_000], ids=["missing", "torn", "too deep"]
)
def test_a_checkpoint_that_was_not_written_to_its_end_says_so(tmp_path: Path, state: str | None) -> None:
    (tmp_path / "training").mkdir()
    if state is not None:
        (tmp_path / "trainer_state.json").write_text(state, encoding="utf-8")
    with pytest.raises(ValueError, match=r"training or trainer_state\.json in it is missing or torn"):
        trainer._load({}, str(tmp_path))


@pytest.mark.parametrize("length", [0, 700])
@pytest.mark.parametrize(("file", "load"), [("rng_state_1.pth", "_load_rng_state"), ("scaler.pt", "_load_scaler")])
def test_a_torn_file_of_the_trainer_is_named(tmp_path: Path, file: str, load: str, length: int) -> None:
    torch.save({"cpu": torch.random.get_rng_state()}, tmp_path / file)
    os.truncate(tmp_path / file, length)
    resumed = object.__new__(ms.hf.ResumableTrainer)
    resumed.args = SimpleNamespace(world_size=2, process_index=1)  # type: ignore[assignment]
    resumed.accelerator = SimpleNamespace(scaler=torch.amp.GradScaler("cpu"))  # type: ignore[assignment]
    with pytest.raises(ValueError, match=rf"{tmp_path}/{file} cannot be read .* resume from an earlier checkpoint"):
        getattr(resumed, load)(str(tmp_path))
