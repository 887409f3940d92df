"""The place where a GPU check runs, and how a check says that it cannot run there."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

import torch

from moesys.train.device import DeviceType, device_of


class LeftOutError(Exception):
    """This check cannot be made here; the message says why."""


@dataclass(frozen=True)
class Place:
    """``folder``: for what a check writes down. ``most_gpus``: that ranks of one machine find there; none: checks are
    rehearsed on the CPU in Triton's interpreter, on toys, where times mean nothing. ``rank``, ``num_ranks``: of those
    that make the check, in one process group if they make it together.
    """

    device_type: DeviceType
    folder: Path
    most_gpus: int
    rank: int = 0
    num_ranks: int = 1

    @property
    def rehearsed(self) -> bool:
        return self.device_type == "cpu"

    @property
    def device(self) -> torch.device:
        """This rank's; made the current one."""
        device = device_of(self.device_type, self.rank)
        if device.type == "cuda":
            torch.cuda.set_device(device)
        return device

    @property
    def ranks_of_gpu(self) -> int:
        """How many share a GPU. Kernels of several processes take turns there, as the driver slices its time."""
        local = int(os.environ.get("LOCAL_WORLD_SIZE", self.num_ranks))
        return -(-local // max(1, self.most_gpus))

    def require_gpu(self, what: str) -> None:
        """Raises ``LeftOutError`` in a rehearsal: ``what`` is only there on a GPU."""
        if self.rehearsed:
            raise LeftOutError(f"no GPU here; {what}")


def require(holds: bool, otherwise: str) -> None:
    """Raises RuntimeError, which makes a check fail."""
    if not holds:
        raise RuntimeError(otherwise)
