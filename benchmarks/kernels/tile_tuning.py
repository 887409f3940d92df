"""The tile tuner: the fastest tile configurations of a shape class on this GPU, kept on disk for its layers."""

from __future__ import annotations

import fcntl
import json
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path

from moesys.kernels.cpu.row_invariant_gemm import CACHE
from moesys.kernels.experts.tile_config import ShapeClass, TileConfig, TileConfigs
from moesys.kernels.experts.tile_tuner import OPS, Gpu, blocks_on_gpu, cache_file, candidates, kept_blocks

# Milliseconds of each block for an op, None for one that does not compile, spills, or does not run.
Timer = Callable[[str, Sequence[TileConfig]], Sequence[float | None]]


def tune_blocks(shape: ShapeClass, timer: Timer, gpu: Gpu) -> TileConfigs:
    """Returns the fastest candidate of each op by ``timer``, one op after another, and keeps them for ``blocks_of``.

    Of equally fast candidates it takes the first, which the model ranks best; an op all of whose candidates failed gets
    the first too. Raises OSError, before anything is timed, if results cannot be kept.
    """
    path, best = cache_file(gpu), {}
    # This writes nothing new, but raises its error before minutes of timing if results cannot be written.
    keep_blocks(path, {})
    for op in OPS:
        blocks = candidates(op, shape, gpu.multiprocessors, gpu.capability)
        taken_ms = timer(op, blocks)
        timed = [(ms, place) for place, ms in enumerate(taken_ms) if ms is not None]
        best[op] = blocks[min(timed)[1]] if timed else blocks[0]
    found = TileConfigs(**best)
    keep_blocks(path, {shape.key: found})
    blocks_on_gpu.cache_clear()
    return found


def keep_blocks(path: Path, found: Mapping[str, TileConfigs]) -> None:
    """Adds to the file, which is complete at any time, and loses nothing that others add meanwhile."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with _alone(path.with_suffix(".lock")):
            kept = {**kept_blocks(path), **found}
            try:
                temporary.write_text(json.dumps({key: json.loads(of.to_json()) for key, of in kept.items()}, indent=1))
                os.replace(temporary, path)
            finally:
                temporary.unlink(missing_ok=True)
    except OSError as error:
        raise OSError(f"blocks cannot be kept: {error}; name a folder that can be written to by {CACHE}") from None


@contextmanager
def _alone(path: Path) -> Iterator[None]:
    """Lets one process at a time run the block."""
    with path.open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield
