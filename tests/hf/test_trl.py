"""TRL's SFTTrainer trains under a strategy as it does with transformers' own expert parallelism.

``make hosts`` installs TRL into a folder of the environment, where a process that imports this file finds it.
"""

from __future__ import annotations

import sys
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist
from hf_models import VOCABULARY, drawn, fsep, lent, loaded, text, under_torchrun

import moesys as ms
from moesys.lab.ranks.pool import LocalRanks

sys.path.append(str(Path(sys.prefix) / "hosts"))

NUM_RANKS, STEPS, ROWS = 2, 4, 64


def fine_tuned(folder: Path, out: Path, strategy: ms.Strategy | None, resumed: bool = False) -> list[float]:
    """Losses and gradient norms of every step, one after another. Rows are of many lengths."""
    from datasets import Dataset
    from tokenizers import Tokenizer
    from tokenizers.models import WordLevel
    from transformers import PreTrainedTokenizerFast
    from trl import SFTConfig, SFTTrainer

    words = Tokenizer(WordLevel({str(token): token for token in range(VOCABULARY)}, unk_token="0"))
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=words, pad_token="0", eos_token="1")
    rows = Dataset.from_dict({"input_ids": [text(row, num_rows=1)[0, : 8 + row % 12].tolist() for row in range(ROWS)]})

    class Resumable(ms.hf.ResumableTrainer, SFTTrainer):
        pass

    with under_torchrun():
        arguments = SFTConfig(
            output_dir=str(out),
            use_cpu=True,
            bf16=False,
            max_steps=STEPS,
            per_device_train_batch_size=2,
            gradient_accumulation_steps=2,
            learning_rate=1e-3,
            adam_epsilon=1e-3,
            logging_steps=1,
            report_to=[],
            save_strategy="steps",
            save_steps=STEPS // 2,
            save_only_model=True,
            disable_tqdm=True,
        )
        model = loaded(folder, strategy, {"fsdp_size": dist.get_world_size(), "ep_size": dist.get_world_size()})
        trainer = Resumable(model=model, args=arguments, train_dataset=rows, processing_class=tokenizer)
        trainer.train(resume_from_checkpoint=str(out / f"checkpoint-{STEPS // 2}") if resumed else None)
    history: list[dict[str, Any]] = trainer.state.log_history
    return [each[name] for each in history if "loss" in each for name in ("loss", "grad_norm")]


@pytest.mark.slow
def test_answers_are_learnt_as_with_all_to_all(ranks: LocalRanks, tmp_path: Path) -> None:
    """And go on from a checkpoint as if they had not been stopped."""
    if find_spec("trl") is None:
        pytest.fail("TRL is not installed; run `make hosts`")
    drawn("qwen3_moe").save_pretrained(tmp_path / "model")

    def numbers(strategy: ms.Strategy | None, resumed: bool = False) -> list[float]:
        given = (tmp_path / "model", tmp_path / "out", strategy, resumed)
        return ranks.run(fine_tuned, *given, num_ranks=NUM_RANKS, timeout_s=250.0)[0]

    wanted = numbers(None)
    assert len(wanted) == 2 * STEPS
    for strategy in (lent(NUM_RANKS), fsep(NUM_RANKS)):
        found = numbers(strategy)
        assert found == pytest.approx(wanted, rel=1e-5)
        assert numbers(strategy, resumed=True) == found
