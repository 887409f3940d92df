"""Watch: what the MoE layers of a model do in each step of a training, written down while it runs."""

from __future__ import annotations

import time
import warnings
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import torch.distributed as dist
from torch import Tensor, nn

from moesys.files import Closing, FolderLock
from moesys.moe.experts import Experts, experts_of, require_own_indices
from moesys.moe.metrics import FiniteChecks, LoadLog
from moesys.step_lines import SCALARS, EventLine, LayerLine, NumberLog, StepLine, step_file, step_journal


def _scalars(line: StepLine) -> dict[str, float]:
    """Returns the numbers of a step by name, and those of its layers by name and layer."""
    of_layers = {
        f"{name}/layer_{layer.layer:02d}": float(getattr(layer, name)) for layer in line.layers for name in SCALARS
    }
    return {"step_ms": line.step_ms, **line.numbers, **of_layers}


# Digits behind the point of what is written: a ratio's, a time's or a size's.
_DIGITS = 6


@contextmanager
def _disk_errors_as_warnings(folder: Path) -> Iterator[None]:
    """Warns of a disk that is full or gone, which must not end the training that is watched."""
    try:
        yield
    except OSError as error:
        warnings.warn(f"steps of the training are missing in {folder}: {error}", stacklevel=4)


class Watch(Closing):
    """Writes a line of JSON a step to ``folder``, which ``moesys report`` makes a page of.

    Every rank watches its own ``model`` and has its own file there, ``rank-0000.jsonl`` and so on: loads and events are
    those of all ranks, bytes and milliseconds the rank's. No rank waits for another. A run that is resumed with the
    same folder appends. A disk that is full or gone is a warning, and its steps are missing. An event names the first
    layer of a rank in which a value is NaN or infinite, in the first step that has one. In one's own loop:

    ```python
    with ms.Watch(model, "runs/first") as watch:
        for batch in batches:
            ...
            optimizer.step()
            watch.step(loss=loss)
    ```

    ``model`` has ``Experts``, also those of transformers' models. ``every``: of so many steps one is written.
    ``log``: rank 0 calls ``log(numbers, step=step)`` with a dict of floats, such as {"step_ms": 5.1,
    "load_p95/layer_03": 1.2}: ``wandb.log``, ``trackio.log``, ``mlflow.log_metrics`` or a function. If it raises, the
    first error is a warning.

    It reads the counters of ``metrics``, which then begin anew for all other readers. ``close`` ends it, as does
    the end of a ``with`` block. Raises ValueError for a model without experts, with layers of one ``layer_index``, or
    that is watched already, and for a folder that another watch of the rank writes.
    """

    def __init__(
        self, model: nn.Module, folder: Path | str, *, every: int = 1, log: Callable[..., object] | None = None
    ) -> None:
        if every < 1:
            raise ValueError(f"every={every} must be at least 1, which writes every step")
        self.layers = _watchable(model)
        self.folder, self.every = Path(folder), every
        self.rank = dist.get_rank() if dist.is_initialized() else 0
        self._log = NumberLog(log) if log and self.rank == 0 else None
        if self.folder.exists() and not self.folder.is_dir():
            raise ValueError(f"{self.folder} is a file; give a folder for the steps, or remove it")
        self.folder.mkdir(parents=True, exist_ok=True)
        lock = FolderLock(self.folder, self.folder / f".rank-{self.rank:04d}.lock")
        # A watch that is dropped without ``close`` keeps no other from the folder. A forked process does not end it.
        self._unlock = weakref.finalize(self, lock.remove)
        self._unlock.atexit = False
        self._journal = step_journal(step_file(self.folder, self.rank))
        try:
            last = self._journal.last()
        except BaseException:
            self._unlock()
            raise
        self._next = 0 if last is None else last.step + 1
        self._num_events = dict.fromkeys(self.layers, 0)
        self._checks, self._is_finite = FiniteChecks(), True
        self._not_finite: list[EventLine] = []
        self._logs = {layer: LoadLog(self._checks) for layer in self.layers}
        for layer, load_log in self._logs.items():
            layer.load_log = load_log
        self.begin()

    def begin(self) -> None:
        """Begins a step: what layers did before it, as in an evaluation, is not counted. The end of a step begins the
        next.
        """
        for layer, log in self._logs.items():
            layer.meter.clear()
            log.clear()
        self._checks.clear()
        self._begin_s = time.perf_counter()

    def step(self, step: int | None = None, /, **numbers: float | Tensor) -> None:
        """Writes what was done since the step began, to be called after the optimizer's step.

        ``step``: its number, by default one more than the last; say it where a run is resumed from an older
        checkpoint. Lines of a file from that number on count no more. ``numbers``: what to write beside it, such as
        ``loss=loss``.
        """
        if (line := self.measure(step)) is not None:
            self.write(line, **numbers)

    def measure(self, step: int | None = None, /) -> StepLine | None:
        """Returns the line of a step and begins the next one; None for a step that is not to be written."""
        step = self._next if step is None else step
        self._next = step + 1
        self._look_for_non_finite()
        line = self._step_line(step) if step % self.every == 0 else None
        self.begin()
        return line

    def write(self, line: StepLine, **numbers: float | Tensor) -> None:
        """Writes a line, with ``numbers``."""
        for name, number in numbers.items():
            try:
                line.numbers[name] = float(number.item() if isinstance(number, Tensor) else number)
            except (RuntimeError, TypeError, ValueError):
                raise ValueError(f"{name}={number!r} is no number; give one, or a tensor with one element") from None
        with _disk_errors_as_warnings(self.folder):
            self._journal.append(line, sync=False)
        if self._log is not None:
            self._log(_scalars(line), step=line.step)

    def close(self) -> None:
        """Stops watching. Lines stand already."""
        for layer, log in self._logs.items():
            if layer.load_log is log:
                layer.load_log = None
        with _disk_errors_as_warnings(self.folder):
            self._unlock()

    def _step_line(self, step: int) -> StepLine:
        step_ms = 1000 * (time.perf_counter() - self._begin_s)
        layers = tuple(line for layer in self.layers if (line := self._layer_line(layer)) is not None)
        num_ranks = dist.get_world_size() if dist.is_initialized() else 1
        return StepLine(
            step, num_ranks, round(time.time(), 3), round(step_ms, 3), {}, layers, tuple(self._new_events())
        )

    def _layer_line(self, layer: Experts) -> LayerLine | None:
        loads = self._logs[layer].take()
        if not loads:
            return None
        over_mean_M = [load.max_over_mean for load in loads]
        tokens_E = np.sum([load.tokens_E for load in loads], axis=0)
        p50, p95, most = np.percentile(over_mean_M, (50, 95, 100)).round(_DIGITS).tolist()
        return LayerLine(
            layer=layer.layer_index,
            micro_batches=len(loads),
            load_p50=p50,
            load_p95=p95,
            load_max=most,
            experts_without_tokens=int((tokens_E == 0).sum()),
            exposed_ms=round(sum(layer.meter.exposed_ms.values()), _DIGITS),
            plan_ms=round(layer.meter.plan_ms, _DIGITS),
            restored_mib=round(layer.meter.bytes_of("restore") / 2**20, _DIGITS),
            tokens_E=tuple(tokens_E.tolist()) if layer.token_channel.rank == 0 else (),
        )

    def _look_for_non_finite(self) -> None:
        """Keeps an event for the next line that is written, where the values of this step are the first that are not
        finite.
        """
        value = self._checks.first()
        if value is not None and self._is_finite:
            what = f"rank {self.rank}: NaN or infinity in {value.what}"
            self._not_finite.append(EventLine(value.layer, value.micro_batch, what))
        self._is_finite = value is None

    def _new_events(self) -> list[EventLine]:
        found, self._not_finite = self._not_finite, []
        for layer in self.layers:
            events = layer.schedule.events
            found += [
                EventLine(event.layer, event.micro_batch, event.what) for event in events[self._num_events[layer] :]
            ]
            self._num_events[layer] = len(events)
        return found


def _watchable(model: nn.Module) -> list[Experts]:
    """Returns the experts of a model. Raises ValueError if there are none, or if a ``Watch`` has them already."""
    layers = experts_of(model)
    if not layers:
        raise ValueError(
            "the model has no ms.Experts, so there is nothing to watch; build it of ms.MoELayer, or have a model of "
            "transformers run under a strategy, as docs/transformers.md says"
        )
    require_own_indices(layers)
    for layer in layers:
        layer.require_group(learning=False)
    if watched := [layer.layer_index for layer in layers if layer.load_log is not None]:
        raise ValueError(f"layer {watched[0]} of this model is watched already; close its Watch first")
    return layers
