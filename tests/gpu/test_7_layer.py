"""GPU checks of layers over ranks, as in a training: other overlaps, growing arenas, late ranks and a killed one."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Sequence

import pytest
from gpu_layers import (
    inputs_of,
    layer_of,
    planned_on_devices,
    run_step,
    run_without_waiting,
    synchronize_ranks,
    tokens_of,
)
from gpu_ranks import GpuRank
from torch import Tensor

from benchmarks.harness.contest import differing, in_words
from moesys.collectives import CollectiveError
from moesys.config.overlap import MegaKernel, Overlap, Pipelined, Sequential
from moesys.kernels.symmetric.signals import PeerTimeoutError

pytestmark = pytest.mark.gpu(layer="layer", ranks="together")

# The sizes of micro-batches, in multiples of the usual number of tokens: arenas grow twice, and are kept.
GROWING, REHEARSED_GROWING = (0.25, 1.0, 0.5, 3.0), (0.5, 1.5)
LATE_S, REHEARSED_LATE_S = (40.0, 120.0), (0.5, 1.0)
# The most rows that a rank receives, in multiples of the rows that a rank sends: routing is random, and not balanced.
MOST_ROWS = 4.0
# The time after which a rank counts as dead. A step that is compiled and warm takes milliseconds.
DEAD_S, REHEARSED_DEAD_S = 10.0, 2.0


@pytest.mark.gpu(limit_s=180, after=("mega points", "collectives"))
def test_layer(gpu: GpuRank) -> str:
    """A layer has Sequential's bits under every overlap, planned by hosts and by devices."""
    overlaps: tuple[Overlap, ...] = (MegaKernel(rows_cap=MOST_ROWS), planned_on_devices(gpu), Pipelined(chunks=2))
    if gpu.rehearsed:
        overlaps = overlaps[1:2]
    expected = _results(gpu, Sequential(), (1.0,))
    for overlap in overlaps:
        _check_bits(f"{overlap!r}", _results(gpu, overlap, (1.0,)), expected)
    return f"{gpu.num_ranks} ranks: {len(overlaps)} overlaps have Sequential's bits"


@pytest.mark.gpu(limit_s=90, after=("no waiting", "mega points"))
def test_planned_without_waiting(gpu: GpuRank) -> str:
    """A step over all ranks, planned on devices, never makes the host wait for the device."""
    return run_without_waiting(gpu, planned_on_devices(gpu))


@pytest.mark.gpu(limit_s=120, after=("layer",))
def test_growth(gpu: GpuRank) -> str:
    """Arenas grow between micro-batches, and no bit differs."""
    sizes = REHEARSED_GROWING if gpu.rehearsed else GROWING
    grown, expected = (_results(gpu, overlap, sizes) for overlap in (MegaKernel(rows_cap=MOST_ROWS), Sequential()))
    _check_bits("MegaKernel()", grown, expected)
    tokens = ", ".join(str(int(tokens_of(gpu) * size)) for size in sizes)
    return f"micro-batches of {tokens} tokens: Sequential's bits"


@pytest.mark.gpu(limit_s=120, after=("mega points",), dies=True)
def test_killed_rank(gpu: GpuRank) -> str:
    """When a rank is killed between two steps, all others end, and name the rank that is missing."""
    victim, timeout_s = gpu.num_ranks - 1, REHEARSED_DEAD_S if gpu.rehearsed else DEAD_S
    layer = layer_of(gpu, planned_on_devices(gpu).replace(timeout_s=timeout_s))
    inputs = inputs_of(gpu, tokens_of(gpu), 0)
    run_step(layer, *inputs)
    layer.experts.check()
    synchronize_ranks(gpu)
    if gpu.rank == victim:
        os.kill(os.getpid(), signal.SIGKILL)
    begin_s, found = time.monotonic(), dict[str, Tensor]()
    try:
        found = run_step(layer, *inputs)
        layer.experts.check()
    except PeerTimeoutError as error:
        missing: Sequence[int] = (error.peer,)
    except CollectiveError as error:
        missing = error.silent_ranks
    else:
        raise AssertionError(f"rank {victim} was killed, and the step ended as if it had not been")
    assert victim in missing, f"rank {victim} was killed, and ranks {list(missing)} were named"
    # On a GPU the host learns of it after it has launched further kernels.
    finite = [name for name, of in found.items() if not of.isnan().any()]
    assert not finite, f"{', '.join(finite)} of a step that was given up have no NaN in them"
    return f"rank {victim} was killed; others said so within {time.monotonic() - begin_s:.0f} s"


@pytest.mark.gpu(limit_s=260, after=("mega points",))
def test_late_ranks(gpu: GpuRank) -> str:
    """Kernels wait on the device for a rank whose host is 40 s and 120 s late."""
    late_s = REHEARSED_LATE_S if gpu.rehearsed else LATE_S
    layer, inputs = layer_of(gpu, planned_on_devices(gpu)), inputs_of(gpu, tokens_of(gpu), 0)
    expected = run_step(layer, *inputs)
    for seconds in late_s:
        synchronize_ranks(gpu)
        if gpu.rank == gpu.num_ranks - 1:
            time.sleep(seconds)
        found = run_step(layer, *inputs)
        layer.experts.check()
        differ = differing(found, expected)
        assert not differ, f"{in_words(differ)} after a rank was {seconds:g} s late"
    return f"a rank was {' and '.join(f'{seconds:g}' for seconds in late_s)} s late: equal bits"


def _results(gpu: GpuRank, overlap: Overlap, sizes: Sequence[float]) -> dict[str, Tensor]:
    """Runs micro-batches one after another; ``sizes`` are in multiples of the usual number of tokens."""
    layer = layer_of(gpu, overlap)
    found: dict[str, Tensor] = {}
    for number, size in enumerate(sizes):
        results = run_step(layer, *inputs_of(gpu, int(tokens_of(gpu) * size), number))
        found |= {f"{name} of micro-batch {number}": of.clone() for name, of in results.items()}
    layer.experts.check()
    return found


def _check_bits(name: str, found: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    differ = differing(found, expected)
    assert not differ, f"{name}: {in_words(differ)} from Sequential"
