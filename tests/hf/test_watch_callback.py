"""The Trainer of transformers, watched while it trains over two ranks under a strategy."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM, Trainer, TrainingArguments

import moesys as ms
from moesys.lab.ranks.pool import LocalRanks

STEPS, ACCUMULATED, NUM_RANKS, EXPERTS, TOP_K = 3, 2, 2, 4, 2
BATCH, CONTEXT = 2, 12


class Text(torch.utils.data.Dataset[dict[str, Tensor]]):
    def __len__(self) -> int:
        return 64

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        ids = torch.randint(96, (CONTEXT,), generator=torch.Generator().manual_seed(index))
        return {"input_ids": ids, "labels": ids}


def small_model() -> Qwen3MoeForCausalLM:
    config = Qwen3MoeConfig(
        vocab_size=96,
        hidden_size=32,
        intermediate_size=32,
        moe_intermediate_size=16,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=8,
        num_experts=EXPERTS,
        num_experts_per_tok=TOP_K,
    )
    return Qwen3MoeForCausalLM(config)


def arguments(folder: Path, **changes: Any) -> TrainingArguments:
    options = {
        "output_dir": str(folder),
        "use_cpu": True,
        "report_to": [],
        "max_steps": STEPS,
        "per_device_train_batch_size": BATCH,
        "gradient_accumulation_steps": ACCUMULATED,
        "logging_steps": 1,
        "save_strategy": "no",
        "disable_tqdm": True,
        "dataloader_pin_memory": False,
    }
    return TrainingArguments(**options | changes)


def train_watched(checkpoint: Path, folder: Path) -> list[dict[str, float]]:
    """Trains under a strategy with an evaluation after every step, and returns what the trainer logged."""
    from transformers.distributed import DistributedConfig

    strategy = ms.Strategy(name="fsep", sharding=ms.Fsep(slots_per_rank=3), split=ms.FlowSplit())
    distributed = DistributedConfig(fsdp_size=NUM_RANKS, ep_size=NUM_RANKS, ep_implementation=ms.hf.register(strategy))
    model = Qwen3MoeForCausalLM.from_pretrained(checkpoint, distributed_config=distributed)
    reported = {"report_to": ["tensorboard"]}
    watch = ms.hf.WatchCallback(folder / "watched")
    trainer = Trainer(
        model,
        arguments(folder / f"trainer-{dist.get_rank()}", eval_strategy="steps", eval_steps=1, **reported),
        train_dataset=Text(),
        eval_dataset=Text(),
        callbacks=[watch],
    )
    watch.report_with(trainer)
    trainer.train()
    return trainer.state.log_history


def scalars(folder: Path) -> dict[str, list[float]]:
    """What TensorBoard has, by name and step."""
    event_accumulator = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    (file,) = folder.rglob("events.out.tfevents.*")
    events = event_accumulator.EventAccumulator(str(file))
    events.Reload()
    return {name: [event.value for event in events.Scalars(name)] for name in events.Tags()["scalars"]}


def test_the_trainer_is_watched(ranks: LocalRanks, tmp_path: Path) -> None:
    torch.manual_seed(0)
    small_model().save_pretrained(tmp_path / "checkpoint")
    logs, _ = ranks.run(train_watched, tmp_path / "checkpoint", tmp_path, num_ranks=NUM_RANKS, timeout_s=120.0)
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
                tokens = NUM_RANKS * ACCUMULATED * BATCH * CONTEXT * TOP_K
                assert sum(layer["tokens_E"]) == (tokens if rank == 0 else 0)

    first = [json.loads(line) for line in (tmp_path / "watched/rank-0000.jsonl").read_text().splitlines()]
    trained = [log for log in logs if "loss" in log]
    for name, together in (("load_p95", max), ("restored_mib", sum), ("experts_without_tokens", sum)):
        wanted = [together(layer[name] for layer in line["layers"]) for line in first]
        assert [log[f"moe_{name}"] for log in trained] == wanted
        # What any integration of report_to sees.
        assert scalars(tmp_path / "trainer-0")[f"train/moe_{name}"] == pytest.approx(wanted)
    assert not any("moe_load_p95" in log for log in logs if "loss" not in log)


def test_a_model_without_a_strategy_is_refused(tmp_path: Path) -> None:
    trainer = Trainer(
        small_model(),
        arguments(tmp_path),
        train_dataset=Text(),
        callbacks=[ms.hf.WatchCallback(tmp_path / "watched")],
    )
    with pytest.raises(ValueError, match="there is nothing to watch"):
        trainer.train()


def test_an_unknown_name_is_refused_with_those_that_there_are() -> None:
    with pytest.raises(AttributeError, match=r"'moesys\.hf' has no attribute 'absent'; it has ResumableTrainer, Watch"):
        ms.hf.absent  # noqa: B018
