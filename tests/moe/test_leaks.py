"""Memory, open files and threads of a training do not grow with its steps."""

from __future__ import annotations

import ctypes
import gc
import os
import re
import sys
import time
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.distributed as dist
from harness import Stack

import moesys as ms
from moesys.lab.ranks.pool import LocalRanks

# The warm-up makes more than 2,000 collectives: torch's flight recorder keeps the newest 2,000, about 1 KiB each.
WARM_UP = 250
STEPS, EVERY = 1750, 125
SHAPE = ms.ModelShape(hidden_size=16, intermediate_size=16, num_experts=6, top_k=2)
FSEP = ms.Strategy(
    name="fsep",
    sharding=ms.Fsep(slots_per_rank=4, prefetch_layers=1, delay_reshard=True),
    balance=ms.Greedy(),
    split=ms.FlowSplit(),
)
LIBC = ctypes.CDLL(None)


class MallocInfo(ctypes.Structure):
    """The counters of glibc's ``mallinfo2``: bytes that it has mapped are the fifth, other bytes in use the eighth."""

    _fields_ = (("counters", ctypes.c_size_t * 10),)


def usage() -> dict[str, int]:
    """Returns the containers and blocks of Python, bytes of malloc, resident bytes, files and threads of a process."""
    gc.collect()
    LIBC.mallinfo2.restype = MallocInfo
    counters = LIBC.mallinfo2().counters
    LIBC.malloc_trim(0)
    resident = re.search(r"RssAnon:\s+(\d+)", Path("/proc/self/status").read_text())
    assert resident is not None
    return {
        "containers": len(gc.get_objects()),
        "blocks": sys.getallocatedblocks(),
        "allocated": counters[4] + counters[7],
        "resident": 1024 * int(resident[1]),
        "files": len(os.listdir("/proc/self/fd")),
        "threads": len(os.listdir("/proc/self/task")),
    }


def usage_while_training(folder: Path) -> dict[str, list[int]]:
    """Returns the usage every so many steps of a linked and watched training, on one rank."""
    model = Stack(SHAPE, FSEP, num_layers=2)
    runtime = ms.link(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    # Written in place, as what is counted must not grow by counting.
    samples = {name: np.zeros(STEPS // EVERY + 1, dtype=np.int64) for name in usage()}
    with ms.Watch(model, folder) as watch:
        for step in range(WARM_UP + STEPS + 1):
            if step >= WARM_UP and step % EVERY == 0:
                dist.barrier()
                for name, value in usage().items():
                    samples[name][(step - WARM_UP) // EVERY] = value
                dist.barrier()
            x_TH = torch.randn(24, SHAPE.hidden_size, generator=torch.Generator().manual_seed(step))
            loss = model(x_TH).square().mean()
            loss.backward()
            ms.sync_gradients(model)
            norm = ms.clip_grad_norm_(model, 1.0)
            optimizer.step()
            optimizer.zero_grad()
            watch.step(loss=loss, norm=norm)
    runtime.close()
    return {name: values.tolist() for name, values in samples.items()}


def files_and_threads(wanted: set[tuple[int, int]]) -> tuple[int, int]:
    """Returns how many files and threads there are, as soon as they are as ``wanted``: threads take time to end."""
    for _ in range(50 if wanted else 5):
        found = len(os.listdir("/proc/self/fd")), len(os.listdir("/proc/self/task"))
        if found in wanted:
            break
        time.sleep(0.1)
    return found


def drop_linked_models() -> list[tuple[int, int]]:
    """Links and drops a model on one rank after the other, without a call in which they meet, and without Python's
    collector, which may take hours to come.
    """
    found: list[tuple[int, int]] = []
    gc.disable()
    try:
        for _ in range(3):
            model = Stack(SHAPE, FSEP, num_layers=2)
            runtime = ms.link(model)
            model(torch.randn(24, SHAPE.hidden_size)).square().mean().backward()
            assert runtime.layers == [each.experts for each in model.moe]
            del model
            assert runtime.layers == []
            del runtime
            found.append(files_and_threads(set(found)))
            dist.barrier()
    finally:
        gc.enable()
    return found


@pytest.mark.skipif(sys.platform != "linux" or not hasattr(LIBC, "mallinfo2"), reason="reads /proc")
def test_a_linked_model_that_is_dropped_leaves_nothing(ranks: LocalRanks) -> None:
    for found in ranks.run(drop_linked_models, num_ranks=2):
        assert len(set(found)) == 1, found


@pytest.mark.slow
@pytest.mark.timeout(1200)
@pytest.mark.skipif(
    sys.platform != "linux" or not hasattr(LIBC, "mallinfo2"), reason="reads /proc, and what glibc 2.33 counts"
)
def test_nothing_grows_with_the_steps(ranks: LocalRanks, tmp_path: Path) -> None:
    """A number that is kept of each step is a block of Python, and a tensor is some hundred bytes: both are found."""
    for samples in ranks.run(usage_while_training, tmp_path, num_ranks=2, timeout_s=1200.0):
        per_step = {name: np.polyfit(np.arange(len(of)) * EVERY, of, 1)[0] for name, of in samples.items()}
        assert per_step["containers"] < 0.2, samples
        assert per_step["blocks"] < 0.2, samples
        assert per_step["allocated"] < 102, samples
        # This sees pages that are not malloc's, and counts what malloc keeps for itself as well.
        assert per_step["resident"] < 512, samples
        assert len(set(samples["files"])) == len(set(samples["threads"])) == 1, samples
