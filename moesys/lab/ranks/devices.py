"""The devices of ranks: the CPU, or the GPUs of their host, of which several ranks may share one."""

from __future__ import annotations

from typing import Literal

import torch
import torch.distributed as dist

from moesys.files import number_set

DeviceType = Literal["cpu", "cuda"]


def best_device() -> DeviceType:
    """Returns ``cuda`` if torch finds a GPU: for experiments that show MegaKernels where they can."""
    return "cuda" if torch.cuda.is_available() else "cpu"


def gpu_backend(ranks_of_host: int) -> str:
    """Returns the backend of a process group whose ranks use GPUs: gloo carries counts and plans, NCCL tokens and
    experts. NCCL needs a GPU for each rank, so gloo carries everything where ranks share GPUs, except for what
    MegaKernels send.

    Raises ValueError if torch finds no GPU.
    """
    return "cpu:gloo,cuda:nccl" if ranks_of_host <= _num_gpus() else "gloo"


def device_of(device: str, rank: int) -> torch.device:
    """Returns the device of ``rank``. The GPUs of a host are dealt to its ranks in turn, by torchrun's LOCAL_RANK where
    it is set.

    Raises ValueError for GPUs if torch finds none.
    """
    if device == "cpu":
        return torch.device("cpu")
    return torch.device("cuda", number_set("LOCAL_RANK", rank) % _num_gpus())


def rank_device(device: str) -> torch.device:
    """Returns the device of the calling rank, and makes it the current one."""
    found = device_of(device, dist.get_rank() if dist.is_initialized() else 0)
    if found.type == "cuda":
        torch.cuda.set_device(found)
    return found


def _num_gpus() -> int:
    num_gpus = torch.cuda.device_count()
    if not num_gpus:
        raise ValueError("device='cuda' trains on GPUs, and torch finds none here; use device='cpu'")
    return num_gpus
