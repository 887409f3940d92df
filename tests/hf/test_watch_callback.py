"""The Trainer of transformers, watched while it trains over two ranks under a strategy."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist
from hf_models import Rows, drawn, loaded
from torch.utils.data import Subset
from transformers import Trainer, TrainingArguments

import moesys as ms
from moesys.lab.ranks.pool import LocalRanks

STEPS, ACCUMULATED, NUM_RANKS, TOP_K = 3, 2, 2, 3


def trainer_of(model: Any, out: Path, watch: ms.hf.WatchCallback, **changes: Any) -> Trainer:
    options = {"use_cpu": True, "report_to": [], "logging_steps": 1, "save_strategy": "no", "disable_tqdm": True}
    options |= {"max_steps": STEPS, "per_device_train_batch_size": 2, "gradient_accumulation_steps": ACCUMULATED}
    arguments = TrainingArguments(output_dir=str(out), dataloader_pin_memory=False, **options | changes)
    rows = Subset(Rows(), range(16))
    return Trainer(model, arguments, train_dataset=Rows(), eval_dataset=rows, callbacks=[watch])


def train_watched(checkpoint: Path, folder: Path) -> tuple[list[dict[str, float]], list[dict[str, float]]]:
    """Trains under a strategy with an evaluation after every step; returns what trainer and callback logged."""
    strategy = ms.Strategy(name="fsep", sharding=ms.Fsep(slots_per_rank=3), split=ms.FlowSplit())
    model = loaded(checkpoint, strategy, {"fsdp_size": NUM_RANKS, "ep_size": NUM_RANKS})
    sent: list[dict[str, float]] = []
    watch = ms.hf.WatchCallback(folder / "watched", log=lambda numbers, step: sent.append(numbers | {"step": step}))
    evaluated = {"eval_strategy": "steps", "eval_steps": 1}
    trainer = trainer_of(model, folder / f"trainer-{dist.get_rank()}", watch, **evaluated)
    trainer.train()
    return trainer.state.log_history, sent


def test_the_trainer_is_watched(ranks: LocalRanks, tmp_path: Path) -> None:
    drawn("qwen3_moe", 4).save_pretrained(tmp_path / "checkpoint")
    (logs, sent), (_, sent_by_others) = ranks.run(
        train_watched, tmp_path / "checkpoint", tmp_path, num_ranks=NUM_RANKS, timeout_s=120.0
    )
    logged = {name: [log[name] for log in logs if name in log] for name in ("loss", "grad_norm", "eval_loss")}
    for rank in range(NUM_RANKS):
        lines = [json.loads(line) for line in (tmp_path / f"watched/rank-{rank:04d}.jsonl").read_text().splitlines()]
        assert [line["step"] for line in lines] == [1, 2, 3]
        for name, values in logged.items():
            assert [line["numbers"][name] for line in lines] == values
        for line in lines:
            assert len(line["layers"]) == 2
            for layer in line["layers"]:
                assert layer["micro_batches"] == ACCUMULATED
                # The same in every step, whose layouts are one: evaluations between them are not counted.
                assert layer["restored_mib"] == lines[0]["layers"][0]["restored_mib"] > 0
                tokens = NUM_RANKS * ACCUMULATED * 2 * 20 * TOP_K
                assert sum(layer["tokens_E"]) == (tokens if rank == 0 else 0)
    assert [numbers["step"] for numbers in sent] == [1, 2, 3]
    assert [numbers["loss"] for numbers in sent] == logged["loss"]
    assert sent_by_others == []


def test_a_model_without_a_strategy_is_refused(tmp_path: Path) -> None:
    trainer = trainer_of(drawn("qwen3_moe"), tmp_path, ms.hf.WatchCallback(tmp_path / "watched"))
    with pytest.raises(ValueError, match="there is nothing to watch"):
        trainer.train()


def test_an_unknown_name_is_refused_with_those_that_there_are() -> None:
    with pytest.raises(AttributeError, match=r"'moesys\.hf' has no attribute 'absent'; it has ResumableTrainer, Watch"):
        ms.hf.absent  # noqa: B018
