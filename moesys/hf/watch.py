"""transformers' ``Trainer`` watched."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from torch import nn
from transformers import Trainer, TrainerCallback, TrainerControl, TrainerState, TrainingArguments

from moesys.moe.watch import Watch
from moesys.step_lines import StepLine

# What the trainer logs of a step, besides its speed.
LOGGED = ("loss", "grad_norm", "learning_rate", "eval_loss")


class WatchCallback(TrainerCallback):
    """A ``Watch`` of the model that a ``Trainer`` trains: ``Trainer(..., callbacks=[ms.hf.WatchCallback(folder)])``.

    Arguments are those of ``Watch``. A step's line has loss, grad_norm, learning_rate and eval_loss where the trainer
    logged them since the line before (``logging_steps``). It is written when the next step begins, or training ends.
    ``report_with`` has the trainer log what layers did.

    Raises ValueError at the beginning of training, where the model has no experts under a strategy.
    """

    def __init__(self, folder: Path | str, *, every: int = 1, tensorboard: bool = False) -> None:
        self.folder, self.every, self.tensorboard = folder, every, tensorboard
        self._watch: Watch | None = None
        self._line: StepLine | None = None
        self._logged: dict[str, float] = {}
        self._reports = False

    def report_with(self, trainer: Trainer) -> None:
        """Adds ``moe_load_p95`` and the like, of all layers together (``StepLine.of_all_layers``), to what ``trainer``
        logs of a step with its loss: to its ``log_history``, and wherever ``report_to`` says.

        It becomes the first of the callbacks, as those of ``report_to`` are called before all that a person adds.
        """
        callbacks = trainer.callback_handler.callbacks
        if self in callbacks:
            callbacks.remove(self)
        callbacks.insert(0, self)
        self._reports = True

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **others: Any
    ) -> None:
        model: nn.Module = others["model"]
        # A training before this one may have raised.
        self._close()
        self._watch = Watch(model, self.folder, every=self.every, tensorboard=self.tensorboard)

    def on_step_begin(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any) -> None:
        self._write()
        if self._watch is not None:
            self._watch.begin()

    def on_step_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any) -> None:
        if self._watch is not None:
            self._line = self._watch.measure(state.global_step)

    def on_log(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        **others: Any,
    ) -> None:
        logs: dict[str, float] = others.get("logs") or {}
        if self._reports and self._line is not None and "loss" in logs:
            of_layers = {f"moe_{name}": value for name, value in self._line.of_all_layers().items()}
            logs |= of_layers
            # A copy of what is logged, made before.
            state.log_history[-1] |= of_layers
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
