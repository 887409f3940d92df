"""transformers' ``Trainer`` that resumes models which ranks share, on as many ranks as there are then."""

from __future__ import annotations

import json
from pathlib import Path
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
from transformers import Trainer
from transformers.trainer import TRAINER_STATE_NAME
from transformers.trainer_utils import PREFIX_CHECKPOINT_DIR

from moesys.moe.runtime import PlanningState
from moesys.whole_folders import whole_folder

# In a checkpoint's folder, beside the weights as the hub has them.
FOLDER = "training"
# By names of parameters, so that groups of the optimizer may be others when it is loaded.
BY_NAME = StateDictOptions(flatten_optimizer_state_dict=True)


class ResumableTrainer(Trainer):
    """A ``Trainer`` whose checkpoints have model, optimizer, schedule, random numbers and what planning has learnt, for
    models of ``from_pretrained(distributed_config=...)``: ``train(resume_from_checkpoint=...)`` goes on from them.

    Of other trainers make one by ``class Mine(ms.hf.ResumableTrainer, SFTTrainer): pass``. Each rank writes and reads
    its own part, into ``checkpoint-N/training``, of a file system that all ranks share; the checkpoint may be resumed
    on other numbers of ranks and groups, where planning begins anew. ``TrainingArguments`` needs
    ``save_only_model=True``: ``Trainer`` refuses these models without, and what it leaves out is written here.
    """

    # None only before training.
    model: Any
    lr_scheduler: Any

    def _save_checkpoint(self, model: nn.Module, trial: Any) -> None:
        checkpoint = Path(self._get_output_dir(trial=trial)) / f"{PREFIX_CHECKPOINT_DIR}-{self.state.global_step}"
        state = {
            "model": get_model_state_dict(self.model),
            "optimizer": self._optimizer_state(),
            "scheduler": self.lr_scheduler.state_dict(),
            "planning": PlanningState(self.model).state_dict(),
        }
        with whole_folder(checkpoint / FOLDER) as new:
            dcp.save(state, checkpoint_id=str(new))
        self._save_scaler(str(checkpoint))
        self._save_rng_state(str(checkpoint))
        # Last, as it removes older checkpoints.
        super()._save_checkpoint(model, trial)

    def _load_from_checkpoint(self, resume_from_checkpoint: str, model: nn.Module | None = None) -> None:
        state = {"model": get_model_state_dict(self.model)}
        dcp.load(state, checkpoint_id=_training_folder(resume_from_checkpoint))
        set_model_state_dict(self.model, state["model"])

    def _load_best_model(self) -> None:
        self._load_from_checkpoint(str(self.state.best_model_checkpoint))

    def _load_optimizer_and_scheduler(self, checkpoint: str | None) -> None:
        if checkpoint is None:
            return
        folder = _training_folder(checkpoint)
        state = {"optimizer": self._optimizer_state(), "scheduler": self.lr_scheduler.state_dict()}
        dcp.load(state, checkpoint_id=folder)
        set_optimizer_state_dict(self.model, self._torch_optimizer(), state["optimizer"], options=BY_NAME)
        self.lr_scheduler.load_state_dict(state["scheduler"])
        # What other groups of ranks have learnt has other names, and is left out.
        planning = {"planning": PlanningState(self.model)}
        dcp.load(planning, checkpoint_id=folder, planner=DefaultLoadPlanner(allow_partial_load=True))

    def _optimizer_state(self) -> dict[str, Any]:
        return get_optimizer_state_dict(self.model, self._torch_optimizer(), options=BY_NAME)

    def _torch_optimizer(self) -> Any:
        """Returns the optimizer without what accelerate wraps around it."""
        return getattr(self.optimizer, "optimizer", self.optimizer)


def _training_folder(checkpoint: str) -> str:
    folder = Path(checkpoint) / FOLDER
    if not (folder.is_dir() and _has_state(checkpoint)):
        raise ValueError(
            f"{checkpoint} is not of a ResumableTrainer, or was not written to its end: {FOLDER} or "
            f"{TRAINER_STATE_NAME} in it is missing or torn; "
            "resume from an earlier one, or begin anew from its weights by from_pretrained"
        )
    return str(folder)


def _has_state(checkpoint: str) -> bool:
    """Whether what ``Trainer`` writes last is there, whole."""
    try:
        json.loads((Path(checkpoint) / TRAINER_STATE_NAME).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return False
    return True
