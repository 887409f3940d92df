"""GPU checks of launches: the device that kernels run on, waits of the host, and CUDA graphs."""

from __future__ import annotations

import pytest
import torch
from gpu_layers import run_without_waiting
from gpu_ranks import GpuRank

from benchmarks.kernels.checks import different, graph_replayed, ours_on
from benchmarks.kernels.drawn_layer import draw_layer
from benchmarks.kernels.kernels_contest import ON_GPU
from moesys.config.overlap import Sequential

pytestmark = pytest.mark.gpu(layer="launch", after=("experts",))

DTYPE = torch.bfloat16


@pytest.mark.gpu(limit_s=30, ranks="first")
def test_other_device(gpu: GpuRank) -> str:
    """Tensors on a GPU that is not the current one are computed there, with the same bits."""
    gpu.require_gpu("the CPU is one device")
    last = torch.cuda.device_count() - 1
    if last < 1:
        pytest.skip("it takes two GPUs, and there is one")
    layer = draw_layer(ON_GPU.small, "uniform", DTYPE, torch.device("cuda", last))
    with torch.cuda.device(last):
        expected = ours_on(layer).results()
        torch.cuda.synchronize()
    with torch.cuda.device(0):
        found = ours_on(layer).results()
        torch.cuda.synchronize()
    differs = different(found, expected)
    assert not differs, f"{differs} differ where cuda:0 is current and tensors are on cuda:{last}"
    return f"tensors of cuda:{last} while cuda:0 is current: equal bits"


@pytest.mark.gpu(limit_s=45)
def test_no_waiting(gpu: GpuRank) -> str:
    """A step of a layer on one rank never makes the host wait for the device."""
    return run_without_waiting(gpu, Sequential())


@pytest.mark.gpu(limit_s=45)
def test_graph(gpu: GpuRank) -> str:
    """Forward and backward are captured in a CUDA graph and replayed on new data with the same bits."""
    gpu.require_gpu("the CPU has no CUDA graphs")
    layers = [draw_layer(ON_GPU.small, "uniform", DTYPE, gpu.device, seed) for seed in range(2)]
    verdict = graph_replayed(*layers)
    assert verdict.holds, verdict.says
    return verdict.says
