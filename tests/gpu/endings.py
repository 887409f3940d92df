"""Checks that end in every way that a check can. ``test_gpu_plugin.py`` runs this file in a pytest of its own."""

from __future__ import annotations

import os
import signal
import time

import pytest
from gpu_plugin import PAGE
from gpu_ranks import GpuRank

pytestmark = pytest.mark.gpu(layer="planted", limit_s=60)


def test_passes(gpu: GpuRank) -> str:
    print("printed by a check")
    return f"rank {gpu.rank} of {gpu.num_ranks}"


@pytest.mark.gpu(layer="layer of raises", after=("passes",))
def test_raises(gpu: GpuRank) -> str:
    raise RuntimeError("planted: a wrong kernel\nand more")


def test_segfaults(gpu: GpuRank) -> str:
    os.kill(os.getpid(), signal.SIGSEGV)
    return "lives"


@pytest.mark.gpu(limit_s=0.5)
def test_hangs(gpu: GpuRank) -> str:
    time.sleep(600)
    return "woke up"


@pytest.mark.gpu(after=("passes",))
def test_cannot(gpu: GpuRank) -> str:
    pytest.skip("planted: nothing to see")


@pytest.mark.gpu(ranks="together", after=("passes",))
def test_second_fails(gpu: GpuRank) -> str:
    if gpu.rank == 1:
        raise RuntimeError("planted: the second rank")
    return "the first is well"


@pytest.mark.gpu(ranks="together", dies=True)
def test_last_is_killed(gpu: GpuRank) -> str:
    if gpu.rank == gpu.num_ranks - 1:
        os.kill(os.getpid(), signal.SIGKILL)
    return "the first goes on"


@pytest.mark.gpu(after=("passes",))
def test_reads_page(gpu: GpuRank) -> str:
    """Returns the results that the page shows while this check runs."""
    page = (gpu.folder / PAGE).read_text()
    return "; ".join(line.split("|")[3].strip() for line in page.splitlines() if line.startswith("| "))


@pytest.mark.gpu(after=("raises",))
def test_after_raises(gpu: GpuRank) -> str:
    return "never runs"


@pytest.mark.gpu(after=("after raises",))
def test_after_after(gpu: GpuRank) -> str:
    return "never runs"


@pytest.mark.gpu(after=("cannot",))
def test_after_cannot(gpu: GpuRank) -> str:
    return f"rank {gpu.rank} of {gpu.num_ranks}"
