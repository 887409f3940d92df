"""Extensions of transformers' ``Trainer``: a callback that watches layers, and a trainer that resumes shared models."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from pickle import UnpicklingError
from typing import Any

import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)
from transformers import Trainer, TrainerCallback, TrainerControl, TrainerState, TrainingArguments
from transformers.trainer import TRAINER_STATE_NAME
from transformers.trainer_utils import PREFIX_CHECKPOINT_DIR

from moesys.collectives import silent_ranks_named
from moesys.files import read_json, whole_folder
from moesys.hf.hub_files import errors_of_checkpoints
from moesys.moe.runtime import PlanningState
from moesys.moe.watch import Watch
from moesys.step_lines import StepLine

# The values that the trainer logs of a step, besides its speed.
LOGGED = ("loss", "grad_norm", "learning_rate", "eval_loss")
# The folder in a checkpoint's folder that lies beside the weights in the format of the hub.
FOLDER = "training"
# State is stored by names of parameters, so that the optimizer may have other groups when it is loaded.
BY_NAME = StateDictOptions(flatten_optimizer_state_dict=True)


class WatchCallback(TrainerCallback):
    """A ``Watch`` of the model that a ``Trainer`` trains: ``Trainer(..., callbacks=[ms.hf.WatchCallback(folder)])``.

    Arguments are those of ``Watch``. A step's line has loss, grad_norm, learning_rate and eval_loss where the trainer
    logged them since the line before (``logging_steps``). It is written when the next step begins, or training ends.

    Raises ValueError at the beginning of training, where the model has no experts under a strategy.
    """

    def __init__(self, folder: Path | str, *, every: int = 1, log: Callable[..., object] | None = None) -> None:
        self.folder, self.every, self.log = folder, every, log
        self._watch: Watch | None = None
        self._line: StepLine | None = None
        self._logged: dict[str, float] = {}

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **others: Any
    ) -> None:
        model: nn.Module = others["model"]
        # An earlier training may have raised an error.
        self._close()
        self._watch = Watch(model, self.folder, every=self.every, log=self.log)

    def on_step_begin(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any) -> None:
        self._write()
        if self._watch is not None:
            self._watch.begin()

    def on_step_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any) -> None:
        if self._watch is not None:
            self._line = self._watch.measure(state.global_step)

    def on_log(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **others: Any) -> None:
        logs: dict[str, float] = others.get("logs") or {}
        self._logged |= {name: value for name, value in logs.items() if name in LOGGED}

    def on_train_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any) -> None:
        self._close()

    def _write(self) -> None:
        if self._watch is not None and self._line is not None:
            self._watch.write(self._line, **self._logged)
            self._line, self._logged = None, {}

    def _close(self) -> None:
        self._write()
        if self._watch is not None:
            self._watch.close()
        self._watch = None


class ResumableTrainer(Trainer):
    """A ``Trainer`` whose checkpoints have model, optimizer, schedule, random numbers and what planning has learnt, for
    models of ``from_pretrained(distributed_config=...)``: ``train(resume_from_checkpoint=...)`` goes on from them.

    ``class Mine(ms.hf.ResumableTrainer, SFTTrainer): pass`` makes one of another trainer. Each rank writes and reads
    its own part, into ``checkpoint-N/training``, of a file system that all ranks share; the checkpoint may be resumed
    on other numbers of ranks and groups, where planning begins anew. ``TrainingArguments`` needs
    ``save_only_model=True``: ``Trainer`` refuses these models without, and what it leaves out is written here.
    """

    # None only before training.
    model: Any
    lr_scheduler: Any

    def train(self, *args: Any, **options: Any) -> Any:
        """Trains as ``Trainer.train`` does. Raises ``CollectiveError`` where a collective of ``Trainer`` or FSDP fails,
        such as the gathering of losses, because another rank is gone.
        """
        with silent_ranks_named("Trainer.train()"):
            return super().train(*args, **options)

    def _save_checkpoint(self, model: nn.Module, trial: Any) -> None:
        checkpoint = Path(self._get_output_dir(trial=trial)) / f"{PREFIX_CHECKPOINT_DIR}-{self.state.global_step}"
        state = {
            "model": get_model_state_dict(self.model),
            "optimizer": self._optimizer_state(),
            "scheduler": self.lr_scheduler.state_dict(),
            "planning": PlanningState(self.model).state_dict(),
        }
        with whole_folder(checkpoint / FOLDER) as new, errors_of_checkpoints(new):
            dcp.save(state, checkpoint_id=str(new))
        self._save_scaler(str(checkpoint))
        self._save_rng_state(str(checkpoint))
        # Last, as it removes older checkpoints.
        super()._save_checkpoint(model, trial)

    def _load_from_checkpoint(self, resume_from_checkpoint: str, model: nn.Module | None = None) -> None:
        state = {"model": get_model_state_dict(self.model)}
        _load(state, resume_from_checkpoint)
        set_model_state_dict(self.model, state["model"])

    def _load_best_model(self) -> None:
        self._load_from_checkpoint(str(self.state.best_model_checkpoint))

    def _load_optimizer_and_scheduler(self, checkpoint: str | None) -> None:
        if checkpoint is None:
            return
        state = {"optimizer": self._optimizer_state(), "scheduler": self.lr_scheduler.state_dict()}
        _load(state, checkpoint)
        set_optimizer_state_dict(self.model, self._torch_optimizer(), state["optimizer"], options=BY_NAME)
        self.lr_scheduler.load_state_dict(state["scheduler"])
        # What other groups of ranks have learnt has other names, and is left out.
        planning = {"planning": PlanningState(self.model)}
        _load(planning, checkpoint, DefaultLoadPlanner(allow_partial_load=True))

    def _load_rng_state(self, checkpoint: str | None) -> None:
        rank = f"_{self.args.process_index}" if self.args.world_size > 1 else ""
        with _damage_named(checkpoint, f"rng_state{rank}.pth"):
            super()._load_rng_state(checkpoint)

    def _load_scaler(self, checkpoint: str | None) -> None:
        with _damage_named(checkpoint, "scaler.pt"):
            super()._load_scaler(checkpoint)

    def _optimizer_state(self) -> dict[str, Any]:
        return get_optimizer_state_dict(self.model, self._torch_optimizer(), options=BY_NAME)

    def _torch_optimizer(self) -> Any:
        """Returns the optimizer without what accelerate wraps around it."""
        return getattr(self.optimizer, "optimizer", self.optimizer)


def _load(state: dict[str, Any], checkpoint: str, planner: DefaultLoadPlanner | None = None) -> None:
    folder = Path(checkpoint) / FOLDER
    if not (folder.is_dir() and _has_state(checkpoint)):
        raise ValueError(
            f"{checkpoint} is not of a ResumableTrainer, or was not written to its end: {FOLDER} or "
            f"{TRAINER_STATE_NAME} in it is missing or torn; "
            "resume from an earlier one, or begin anew from its weights by from_pretrained"
        )
    with errors_of_checkpoints(folder):
        dcp.load(state, checkpoint_id=str(folder), planner=planner)


@contextmanager
def _damage_named(checkpoint: str | None, file: str) -> Iterator[None]:
    """Raises ValueError with the file's name in place of the errors of ``torch.load`` on a damaged file."""
    try:
        yield
    except (EOFError, KeyError, OSError, RuntimeError, TypeError, UnpicklingError, ValueError) as error:
        raise ValueError(
            f"{checkpoint}/{file} cannot be read ({(str(error) or repr(error)).splitlines()[0]}); "
            "resume from an earlier checkpoint, or remove the file to go on without it"
        ) from error


def _has_state(checkpoint: str) -> bool:
    """Returns whether the file that ``Trainer`` writes last is there and complete."""
    try:
        read_json(Path(checkpoint) / TRAINER_STATE_NAME)
    except (OSError, ValueError):
        return False
    return True
