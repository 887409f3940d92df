"""TRL's trainers train under a strategy as they do with transformers' own expert parallelism, and GRPO replays routes.

``make hosts`` installs TRL into a folder of the environment, where a process that imports this file finds it.
"""

from __future__ import annotations

import base64
import sys
from collections.abc import Callable, Iterator
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from hf_models import VOCABULARY, drawn, fsep, lent, loaded, text, under_torchrun
from pages import Reader, blocks_of, reading_in
from torch import Tensor, nn

import moesys as ms
from moesys.lab.ranks.pool import LocalRanks

sys.path.append(str(Path(sys.prefix) / "hosts"))

NUM_RANKS, STEPS, ROWS = 2, 4, 64
OPTIONS: dict[str, Any] = {
    "use_cpu": True,
    "bf16": False,
    "max_steps": STEPS,
    "per_device_train_batch_size": 2,
    "gradient_accumulation_steps": 2,
    "learning_rate": 1e-3,
    "adam_epsilon": 1e-3,
    "logging_steps": 1,
    "report_to": [],
    "save_strategy": "steps",
    "save_steps": STEPS // 2,
    "save_only_model": True,
    "disable_tqdm": True,
}

# TRL and transformers warn of what TRL itself uses.
pytestmark = pytest.mark.filterwarnings("ignore")


@pytest.fixture(autouse=True)
def _trl() -> None:
    if find_spec("trl") is None:
        pytest.fail("TRL is not installed; run `make hosts`")


def tokenizer() -> Any:
    from tokenizers import Tokenizer
    from tokenizers.models import WordLevel
    from tokenizers.pre_tokenizers import WhitespaceSplit
    from transformers import PreTrainedTokenizerFast

    words = Tokenizer(WordLevel({str(token): token for token in range(VOCABULARY)}, unk_token="0"))
    words.pre_tokenizer = WhitespaceSplit()
    return PreTrainedTokenizerFast(tokenizer_object=words, pad_token="0", eos_token="1")


def words(row: int, size: int) -> str:
    return " ".join(map(str, text(row, num_rows=1)[0, :size].tolist()))


def evens(completion_ids: list[list[int]], **_: object) -> list[float]:
    """Rewards even tokens, with which completions of one prompt differ."""
    return [sum(token % 2 == 0 for token in each) / len(each) for each in completion_ids]


def trainer_of(kind: str, model: Any, reference: Callable[[], Any], out: Path, **options: Any) -> Any:
    """Returns TRL's trainer of a kind. Rows are of many lengths."""
    import trl
    from datasets import Dataset

    given: dict[str, Any] = {"model": model, "processing_class": tokenizer()}
    if kind == "sft":
        rows = [text(row, num_rows=1)[0, : 8 + row % 12].tolist() for row in range(ROWS)]
        columns: dict[str, Any] = {"input_ids": rows}
    elif kind == "dpo":
        columns = {
            name: [words(row + at, 4 + row % 5) + " " for row in range(ROWS)]
            for at, name in enumerate(("prompt", "chosen", "rejected"))
        }
        given["ref_model"] = reference()
    else:
        columns = {"prompt": [words(row, 4 + row % 5) for row in range(ROWS)]}
        options |= {"num_generations": 2, "max_completion_length": 6, "temperature": 1.0}
        given["reward_funcs"] = evens
    arguments = getattr(trl, f"{kind.upper()}Config")(output_dir=str(out), **OPTIONS | options)

    class Resumable(ms.hf.ResumableTrainer, getattr(trl, f"{kind.upper()}Trainer")):
        pass

    return Resumable(args=arguments, train_dataset=Dataset.from_dict(columns), **given)


def fine_tuned(kind: str, folder: Path, out: Path, strategy: ms.Strategy | None, resumed: bool = False) -> list[float]:
    """Losses and gradient norms of every step, one after another."""
    sizes = {"fsdp_size": dist.get_world_size(), "ep_size": dist.get_world_size()}
    with under_torchrun():
        torch.manual_seed(dist.get_rank())
        model = loaded(folder, strategy, sizes)
        trainer = trainer_of(kind, model, partial(loaded, folder, strategy, sizes), out)
        trainer.train(resume_from_checkpoint=str(out / f"checkpoint-{STEPS // 2}") if resumed else None)
    return numbers_of(trainer)


def numbers_of(trainer: Any) -> list[float]:
    history: list[dict[str, Any]] = trainer.state.log_history
    return [each[name] for each in history if "loss" in each for name in ("loss", "grad_norm")]


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["sft", "dpo", "grpo"])
def test_trainers_train_as_with_all_to_all(ranks: LocalRanks, tmp_path: Path, kind: str) -> None:
    """And go on from a checkpoint as if they had not been stopped."""
    drawn("qwen3_moe").save_pretrained(tmp_path / "model")

    def numbers(strategy: ms.Strategy | None, resumed: bool = False) -> list[float]:
        given = (kind, tmp_path / "model", tmp_path / "out", strategy, resumed)
        return ranks.run(fine_tuned, *given, num_ranks=NUM_RANKS, timeout_s=250.0)[0]

    wanted = numbers(None)
    assert len(wanted) == 2 * STEPS
    for strategy in (lent(NUM_RANKS), fsep(NUM_RANKS)):
        found = numbers(strategy)
        assert found == pytest.approx(wanted, rel=1e-5)
        if kind == "sft":
            assert numbers(strategy, resumed=True) == found


# --- replay of routes -------------------------------------------------------------------------------------------------


def in_base64(rows: Tensor) -> str:
    return base64.b64encode(rows.int().numpy().tobytes()).decode()


def weights_at(logits_TE: Tensor, expert_TK: Tensor) -> Tensor:
    """Those of Qwen3-MoE with norm_topk_prob."""
    weight_TK = logits_TE.softmax(dim=1).gather(1, expert_TK)
    return weight_TK / weight_TK.sum(dim=1, keepdim=True)


def routers(model: Any) -> list[Any]:
    return [layer.mlp.gate for layer in model.model.layers]


def rounds(router: Any, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Chooses experts as an engine does whose logits have few digits."""
    logits_TE, _, live_TK = type(router).forward(router, x)
    expert_TK = (2 * logits_TE).round().topk(live_TK.shape[1], dim=1).indices
    return logits_TE, weights_at(logits_TE, expert_TK), expert_TK


def fixed(router: Any, given_TK: Tensor, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Chooses the given experts, and its own for tokens with -1."""
    logits_TE, _, live_TK = type(router).forward(router, x)
    expert_TK = torch.where(given_TK < 0, live_TK, given_TK)
    return logits_TE, weights_at(logits_TE, expert_TK), expert_TK


@pytest.fixture
def page(tmp_path: Path) -> Iterator[dict[str, Any]]:
    """What the files of the page define."""
    for block in blocks_of("rl"):
        if block.title:
            (tmp_path / block.title).write_text(block.text, encoding="utf-8")
    with reading_in(tmp_path):
        import replay_trainer
        import rollout

        yield vars(replay_trainer) | vars(rollout)


def replaying_trainer(page: dict[str, Any], form: Callable[[Tensor], Any], out: Path) -> Any:
    """Returns a trainer of the page that has trained for one step, with what it saw: ``inputs``, ``gradients`` and
    ``ratios`` of the probabilities of its policy and of the rollout. Rollouts have other experts than the policy, and
    hand over their routes in a ``form`` (all forms: tests/hf/test_aligned_routing.py).
    """
    from datasets import Dataset
    from trl import GRPOConfig

    class Observed(page["ReplayTrainer"]):  # type: ignore[misc]
        def _generate_and_score_completions(self, inputs: Any) -> Any:
            found = super()._generate_and_score_completions(inputs)
            return found | {"old_per_token_logps": found["sampling_per_token_logps"]}

        def _get_per_token_logps_and_entropies(self, *args: Any, **options: Any) -> Any:
            found = super()._get_per_token_logps_and_entropies(*args, **options)
            self.logps = found[0].detach()
            return found

        def _compute_loss(self, model: Any, inputs: Any) -> Tensor:
            loss = super()._compute_loss(model, inputs)
            self.inputs = inputs
            self.ratios = (self.logps - inputs["old_per_token_logps"]).exp()[inputs["completion_mask"].bool()]
            return loss

        def training_step(self, *args: Any, **options: Any) -> Tensor:
            loss = super().training_step(*args, **options)
            self.gradients = {name: p.grad.clone() for name, p in self.model.named_parameters()}
            return loss

    def from_an_engine(prompts: Any, trainer: Any) -> Any:
        for router in routers(trainer.model):
            router.forward = partial(rounds, router)
        found = page["rollout"](prompts, trainer)
        for router in routers(trainer.model):
            del router.forward
        return found | {"routes": [form(rows) for rows in found["routes"]]}

    model = drawn("qwen3_moe", experts_implementation=ms.hf.register())
    for router in routers(model):
        nn.init.normal_(router.weight, generator=torch.Generator().manual_seed(2))
    options = {"gradient_accumulation_steps": 1, "per_device_train_batch_size": 6, "num_generations": 3, "max_steps": 1}
    options |= {"learning_rate": 0.0, "save_strategy": "no", "beta": 0.0}
    trainer = Observed(
        model=model,
        args=GRPOConfig(output_dir=str(out), **OPTIONS | options),
        reward_funcs=evens,
        train_dataset=Dataset.from_dict({"prompt": [words(row, 4 + row % 5) for row in range(ROWS)]}),
        processing_class=tokenizer(),
        rollout_func=from_an_engine,
    )
    trainer.train()
    return trainer


def test_without_replay_it_has_others(page: dict[str, Any], tmp_path: Path) -> None:
    trainer = replaying_trainer(page, lambda rows: None, tmp_path)
    assert (trainer.ratios - 1).abs().max() > 0.01


def test_under_replay_probabilities_are_those_of_the_rollout_and_gradients_of_routers_fixed_by_hand(
    page: dict[str, Any], tmp_path: Path
) -> None:
    from trl import GRPOTrainer

    trainer = replaying_trainer(page, in_base64, tmp_path)
    assert len(trainer.ratios) == 6 * page["NEW"]
    assert (trainer.ratios - 1).abs().max() <= 1e-5
    inputs, model = trainer.inputs, trainer.model
    mask = torch.cat([inputs["prompt_mask"], inputs["completion_mask"]], dim=1).tolist()
    found = [np.frombuffer(base64.b64decode(each), np.int32).reshape(-1, 2, 3) for each in inputs["routes"]]
    for layer, router in enumerate(routers(model)):
        given = []
        for routes, real in zip(found, mask, strict=True):
            left = iter(routes[:, layer].tolist())
            given += [next(left, [-1] * 3) if each else [-1] * 3 for each in real]
        router.forward = partial(fixed, router, torch.tensor(given))
    model.zero_grad()
    # Without the trainer of the page, which replays.
    trainer._get_per_token_logps_and_entropies = partial(GRPOTrainer._get_per_token_logps_and_entropies, trainer)
    GRPOTrainer._compute_loss(trainer, model, inputs).backward()
    assert max(gradient.abs().max() for gradient in trainer.gradients.values()) > 0.01
    for name, parameter in model.named_parameters():
        gradient = trainer.gradients[name]
        assert (parameter.grad - gradient).norm() <= 1e-6 * gradient.norm(), name


def test_the_page_on_reinforcement_learning_is_followed(ranks: LocalRanks, tmp_path: Path) -> None:
    reader = Reader(tmp_path, ranks)
    reader.follow("rl")
    assert reader.printed["python grpo.py"].count("'loss'") == 4
