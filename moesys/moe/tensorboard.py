"""Lines of steps as scalars of TensorBoard."""

from __future__ import annotations

import math
from pathlib import Path

from moesys.step_lines import SCALARS, StepLine


class TensorBoard:
    """Writes scalars into ``folder``: a step's numbers by their names, what layers did by number and layer, such as
    ``load_p95/layer_03``.

    Raises ImportError without TensorBoard, which is no package that moesys needs.
    """

    def __init__(self, folder: Path) -> None:
        try:
            from torch.utils.tensorboard import SummaryWriter
        except ImportError as error:
            raise ImportError(
                "tensorboard=True needs TensorBoard: pip install 'moesys[tensorboard]', or leave it out"
            ) from error
        self._writer = SummaryWriter(folder)

    def write(self, line: StepLine) -> None:
        for name, value in {"step_ms": line.step_ms, **line.numbers}.items():
            if math.isfinite(value):
                self._writer.add_scalar(name, value, line.step)
        for layer in line.layers:
            for name in SCALARS:
                self._writer.add_scalar(f"{name}/layer_{layer.layer:02d}", getattr(layer, name), line.step)
        self._writer.flush()

    def close(self) -> None:
        self._writer.close()
