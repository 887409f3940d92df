"""Slurm: what a trial's job asks of a cluster, in the words of ``sbatch``."""

from __future__ import annotations

import re
from typing import Annotated, Literal

from pydantic import Field, PositiveInt, field_validator

from moesys.config import Declared

_TIME = re.compile(r"(?:(\d+)-)?(\d+)(?::(\d+))?(?::(\d+))?")


class Slurm(Declared):
    """A job for each trial, in one array: a task of a simulated one, a task for each rank of a training.

    Fields that are None are left to the cluster. The run folder must be on a file system that its hosts share.
    """

    cluster: Annotated[
        Literal["slurm", "local"],
        Field(description="local: processes of this machine, all at once, to try out what would be submitted"),
    ] = "slurm"
    partition: Annotated[str | None, Field(description="--partition")] = None
    account: Annotated[str | None, Field(description="--account")] = None
    qos: Annotated[str | None, Field(description="--qos")] = None
    constraint: Annotated[str | None, Field(description="--constraint")] = None
    time: Annotated[int | str, Field(description="of a job: minutes, or as sbatch takes it, 2:00:00 or 1-12")] = 60
    mem_gb: Annotated[float | None, Field(gt=0, description="--mem, of a node, in GB")] = None
    cpus_per_task: Annotated[PositiveInt | None, Field(description="None: the threads of a rank, or 1")] = None
    gpus_per_node: Annotated[
        int | None, Field(ge=0, description="None: one a rank where a training runs on GPUs, else none")
    ] = None
    at_once: Annotated[PositiveInt, Field(description="jobs of the array that may run at once")] = 256
    setup: Annotated[tuple[str, ...], Field(description="lines of shell before the trial, such as module load")] = ()
    further: Annotated[
        dict[str, str],
        Field(default_factory=dict, description='other options of sbatch, {"reservation": "ours"}; "" for a switch'),
    ]

    @field_validator("time")
    @classmethod
    def _is_a_time(cls, value: int | str) -> int | str:
        if minutes_of(value) < 1:
            raise ValueError(f"time={value!r} is no time; use minutes, 1 or more, or as sbatch takes it, 2:00:00")
        return value

    @property
    def minutes(self) -> int:
        """``time``, rounded up."""
        return minutes_of(self.time)


def minutes_of(time: int | str) -> int:
    """Of minutes, minutes:seconds, hours:minutes:seconds, days-hours, days-hours:minutes[:seconds]; 0 for no time."""
    if not (match := _TIME.fullmatch(str(time))):
        return 0
    days, *rest = match.groups()
    numbers = [int(part) for part in rest if part is not None]
    if days is None:
        numbers = [0] * (3 - len(numbers)) + numbers if len(numbers) > 1 else [0, *numbers, 0]
    hours, minutes, seconds = [*numbers, 0, 0][:3]
    return int(days or 0) * 1440 + hours * 60 + minutes + -(-seconds // 60)
