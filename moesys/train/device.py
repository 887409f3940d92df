"""Where ranks train: on the CPU, or on the GPUs of their hosts, of which several ranks may share one."""

from __future__ import annotations

import os
from typing import Literal

import torch

DeviceType = Literal["cpu", "cuda"]


def best_device() -> DeviceType:
    """``cuda`` where torch finds a GPU: for experiments that show MegaKernels where they can."""
    return "cuda" if torch.cuda.is_available() else "cpu"


def gpu_backend(ranks_of_host: int) -> str:
    """Of the process group of ranks that train on GPUs: what is planned and told travels by gloo, tokens and experts by
    NCCL. NCCL takes one rank a GPU, so where ranks share them gloo carries all that MegaKernels do not.

    Raises ValueError where torch finds no GPU.
    """
    return "cpu:gloo,cuda:nccl" if ranks_of_host <= _num_gpus() else "gloo"


def device_of(device: DeviceType, rank: int) -> torch.device:
    """This rank's. GPUs of a host are dealt in turn to its ranks, by torchrun's LOCAL_RANK where there is one.

    Raises ValueError for GPUs where torch finds none.
    """
    if device == "cpu":
        return torch.device("cpu")
    return torch.device("cuda", int(os.environ.get("LOCAL_RANK", rank)) % _num_gpus())


def _num_gpus() -> int:
    num_gpus = torch.cuda.device_count()
    if not num_gpus:
        raise ValueError("device='cuda' trains on GPUs, and torch finds none here; use device='cpu'")
    return num_gpus
