"""Layers over ranks, as a training has them: against Sequential, through growing arenas, late ranks and a dead one."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from benchmarks.doctor.layers import inputs_at, layer_at, planned_on_devices, step, tokens_at
from benchmarks.doctor.place import Place, require
from benchmarks.harness.contest import differing, in_words
from moesys.collectives import CollectiveError
from moesys.config import MegaKernel, Pipelined, Sequential
from moesys.config.overlap import Overlap
from moesys.kernels.symmetric.signals import PeerTimeoutError

# Of micro-batches, times the usual number of tokens: arenas grow twice, and are kept.
GROWING, REHEARSED_GROWING = (0.25, 1.0, 0.5, 3.0), (0.5, 1.5)
LATE_S, REHEARSED_LATE_S = (40.0, 120.0), (0.5, 1.0)
# Of a rank, in multiples of what comes from one: routing is drawn, and nothing balances it.
MOST_ROWS = 4.0
# After which a rank is dead; compiled and warm, a step takes milliseconds.
DEAD_S, REHEARSED_DEAD_S = 10.0, 2.0


def layer_agrees(place: Place) -> str:
    """All overlaps; MegaKernels planned by hosts and by devices."""
    overlaps: tuple[Overlap, ...] = (MegaKernel(rows_cap=MOST_ROWS), planned_on_devices(place), Pipelined(chunks=2))
    if place.rehearsed:
        overlaps = overlaps[1:2]
    expected = _steps(place, Sequential(), (1.0,))
    for overlap in overlaps:
        _require_same(f"{overlap!r}", _steps(place, overlap, (1.0,)), expected)
    return f"{place.num_ranks} ranks: {len(overlaps)} overlaps have Sequential's bits"


def arenas_grow(place: Place) -> str:
    sizes = REHEARSED_GROWING if place.rehearsed else GROWING
    _require_same(
        "MegaKernel()", _steps(place, MegaKernel(rows_cap=MOST_ROWS), sizes), _steps(place, Sequential(), sizes)
    )
    tokens = ", ".join(str(int(tokens_at(place) * size)) for size in sizes)
    return f"micro-batches of {tokens} tokens: Sequential's bits"


def late_ranks_are_waited_for(place: Place) -> str:
    """By kernels, which wait on the device while the last rank's host sleeps."""
    late_s = REHEARSED_LATE_S if place.rehearsed else LATE_S
    layer, given = layer_at(place, planned_on_devices(place)), inputs_at(place, tokens_at(place), 0)
    expected = step(layer, *given)
    for seconds in late_s:
        _meet(place)
        if place.rank == place.num_ranks - 1:
            time.sleep(seconds)
        found = step(layer, *given)
        layer.experts.check()
        require(not (differ := differing(found, expected)), f"{in_words(differ)} after a rank was {seconds:g} s late")
    return f"a rank was {' and '.join(f'{seconds:g}' for seconds in late_s)} s late: equal bits"


def dead_rank_is_named(place: Place) -> str:
    """The last rank is killed between two steps; all others must end, and say whom they miss."""
    victim, timeout_s = place.num_ranks - 1, REHEARSED_DEAD_S if place.rehearsed else DEAD_S
    layer = layer_at(place, planned_on_devices(place).replace(timeout_s=timeout_s))
    given = inputs_at(place, tokens_at(place), 0)
    step(layer, *given)
    layer.experts.check()
    _meet(place)
    if place.rank == victim:
        os.kill(os.getpid(), signal.SIGKILL)
    begin_s, found = time.monotonic(), dict[str, Tensor]()
    try:
        found = step(layer, *given)
        layer.experts.check()
    except PeerTimeoutError as error:
        missed: Sequence[int] = (error.peer,)
    except CollectiveError as error:
        missed = error.silent_ranks
    else:
        raise RuntimeError(f"rank {victim} was killed, and the step ended as if it had not been")
    require(victim in missed, f"rank {victim} was killed, and ranks {list(missed)} were missed")
    # On a GPU the host learns of it behind what it has launched.
    garbage = [name for name, of in found.items() if not of.isnan().any()]
    require(not garbage, f"{', '.join(garbage)} of a step that was given up have no NaN in them")
    return f"rank {victim} was killed; others said so within {time.monotonic() - begin_s:.0f} s"


def _steps(place: Place, overlap: Overlap, sizes: Sequence[float]) -> dict[str, Tensor]:
    """Micro-batches of so many times the usual tokens, one after another."""
    layer = layer_at(place, overlap)
    found: dict[str, Tensor] = {}
    for number, size in enumerate(sizes):
        results = step(layer, *inputs_at(place, int(tokens_at(place) * size), number))
        found |= {f"{name} of micro-batch {number}": of.clone() for name, of in results.items()}
    layer.experts.check()
    return found


def _require_same(name: str, found: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    require(not (differ := differing(found, expected)), f"{name}: {in_words(differ)} from Sequential")


def _meet(place: Place) -> None:
    if not place.rehearsed:
        torch.cuda.synchronize()
    dist.barrier()
