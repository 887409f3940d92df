"""transformers' Trainer trains under a strategy as it does with transformers' own expert parallelism."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from hf_models import FAMILIES, drawn, text, under_torchrun
from torch.nn.utils.rnn import pad_sequence
from torch.utils.data import Dataset
from transformers import AutoModelForCausalLM, Trainer, TrainingArguments
from transformers.distributed import DistributedConfig

import moesys as ms
from moesys.lab.ranks.pool import LocalRanks
from moesys.moe.experts import experts_of

STEPS = 6
GREEDY: dict[str, Any] = {"balance": ms.Greedy(), "split": ms.FlowSplit()}
EP = ms.Strategy(name="ep")
LENT = ms.Strategy(name="lent", sharding=ms.Ep(slots_per_rank=3), **GREEDY)
FSEP = ms.Strategy(name="fsep", sharding=ms.Fsep(slots_per_rank=3), **GREEDY)
STRATEGIES = (EP, LENT.replace(overlap=ms.Pipelined(chunks=2)), FSEP)
EVERY_OVERLAP = tuple(
    each.replace(overlap=way) for each in (EP, LENT, FSEP) for way in (ms.Sequential(), ms.Pipelined(chunks=3))
)


class Rows(Dataset):
    """Rows of text, each its own."""

    def __len__(self) -> int:
        return 256

    def __getitem__(self, row: int) -> dict[str, Any]:
        ids = text(row, num_rows=1)[0]
        return {"input_ids": ids, "labels": ids}


class ShortRows(Rows):
    """Rows of many lengths."""

    def __getitem__(self, row: int) -> dict[str, Any]:
        return {name: ids[: 3 + 7 * row % 17] for name, ids in super().__getitem__(row).items()}


def with_padding(rows: list[dict[str, Any]]) -> dict[str, Any]:
    ids, labels = ([row[name] for row in rows] for name in ("input_ids", "labels"))
    mask = [torch.ones_like(each) for each in ids]
    columns = {"input_ids": (ids, 7), "labels": (labels, -100), "attention_mask": (mask, 0)}
    return {name: pad_sequence(column, True, value) for name, (column, value) in columns.items()}


def trainer_of(
    folder: Path, out: Path, strategy: ms.Strategy | None, ep_size: int, data: Any = None, **options: Any
) -> Trainer:
    name = "all_to_all" if strategy is None else ms.hf.register(strategy)
    sizes = DistributedConfig(fsdp_size=dist.get_world_size(), ep_size=ep_size, ep_implementation=name)
    model = AutoModelForCausalLM.from_pretrained(folder, distributed_config=sizes, attn_implementation="eager")
    usual = {"max_steps": STEPS, "per_device_train_batch_size": 2, "gradient_accumulation_steps": 2}
    arguments = TrainingArguments(
        output_dir=str(out),
        use_cpu=True,
        gradient_checkpointing=True,
        max_grad_norm=1.0,
        learning_rate=1e-3,
        adam_epsilon=1e-3,
        logging_steps=1,
        report_to=[],
        save_strategy="no",
        disable_tqdm=True,
        **(usual | options),
    )
    return Trainer(model=model, args=arguments, train_dataset=data or Rows(), data_collator=with_padding)


def trained(
    folder: Path, out: Path, strategies: Sequence[ms.Strategy], ep_size: int
) -> list[list[tuple[float, float]]]:
    """Losses and gradient norms of every step, of transformers' own and of each strategy."""
    return [steps_of(end_of(folder, out, strategy, ep_size)) for strategy in (None, *strategies)]


def end_of(*given: Any, **options: Any) -> Trainer:
    torch.manual_seed(0)
    with under_torchrun():
        trainer = trainer_of(*given, **options)
        assert trainer.args.world_size == dist.get_world_size()
        trainer.train()
    return trainer


def steps_of(trainer: Trainer) -> list[tuple[float, float]]:
    return [(each["loss"], each["grad_norm"]) for each in trainer.state.log_history if "loss" in each]


def trained_on_short_rows(folder: Path, out: Path, strategies: Sequence[ms.Strategy]) -> list[Any]:
    """Steps on single rows, which have no padding, of transformers' own; then on pairs of them, of each strategy."""
    usual = {"data": ShortRows(), "max_steps": 3, "include_num_input_tokens_seen": "non_padding"}
    alone = usual | {"per_device_train_batch_size": 1, "gradient_accumulation_steps": 2}
    pairs = usual | {"per_device_train_batch_size": 2, "gradient_accumulation_steps": 1}
    found = [steps_of(end_of(folder, out, None, 2, **alone))]
    for strategy in strategies:
        trainer = end_of(folder, out, strategy, 2, **pairs)
        chosen = 3 * trainer.state.num_input_tokens_seen
        assert [int(each.take_counts().sum()) for each in experts_of(trainer.model)] == [chosen, chosen]
        found.append(steps_of(trainer))
    return found


def assert_agree(found: list[list[tuple[float, float]]], oracle: list[tuple[float, float]]) -> None:
    for steps in found:
        for one, wanted in zip(steps, oracle, strict=True):
            assert one == pytest.approx(wanted, rel=1e-5)


# What ``register`` does is tested in seconds too (``test_expert_parallel``), and the page's own Trainer.
@pytest.mark.slow
@pytest.mark.parametrize(
    ("family", "strategies"),
    [(each, STRATEGIES if each == "qwen3_moe" else EVERY_OVERLAP) for each in FAMILIES],
)
def test_the_trainer_trains_as_with_all_to_all(
    ranks: LocalRanks, tmp_path: Path, family: str, strategies: Sequence[ms.Strategy]
) -> None:
    """With accumulation, clipping, AdamW and activation checkpointing as its argument alone gives it."""
    drawn(family).save_pretrained(tmp_path / "model")
    oracle, *found = ranks.run(trained, tmp_path / "model", tmp_path / "out", strategies, 4, timeout_s=550.0)[0]
    assert len(oracle) == STEPS
    assert_agree(found, oracle)


WIDE = tuple(each.replace(sharding=each.sharding.replace(slots_per_rank=5)) for each in (LENT, FSEP))


# Models do so always: tests/hf/test_padded_models.py.
@pytest.mark.slow
def test_padded_batches_of_the_trainer_train_as_their_rows_alone(ranks: LocalRanks, tmp_path: Path) -> None:
    drawn("qwen3_moe").save_pretrained(tmp_path / "model")
    given = (tmp_path / "model", tmp_path / "out", WIDE)
    oracle, *found = ranks.run(trained_on_short_rows, *given, num_ranks=2, timeout_s=250.0)[0]
    assert len({loss for loss, _ in oracle}) == 3
    assert_agree(found, oracle)


@pytest.mark.slow
def test_groups_of_the_trainer_train_as_with_all_to_all(ranks: LocalRanks, tmp_path: Path) -> None:
    """Two groups of two ranks, each with all experts."""
    drawn("qwen3_moe").save_pretrained(tmp_path / "model")
    oracle, *found = ranks.run(trained, tmp_path / "model", tmp_path / "out", WIDE, 2, timeout_s=250.0)[0]
    assert_agree(found, oracle)


@pytest.mark.slow
def test_two_groups_of_four_of_the_trainer_train_as_with_all_to_all(tmp_path: Path) -> None:
    """Eight ranks, each with rows of its own."""
    drawn("qwen3_moe").save_pretrained(tmp_path / "model")
    with LocalRanks(8) as ranks:
        oracle, *found = ranks.run(trained, tmp_path / "model", tmp_path / "out", (LENT, FSEP), 4, timeout_s=290.0)[0]
    assert_agree(found, oracle)
