"""The tuner: the fastest blocks of a layer on this GPU, found when asked for, kept on disk, and never changed silently.

What a layer uses, the first that there is: blocks that its caller gives; the file that ``MOESYS_BLOCKS`` names; what
``tune_blocks`` has found for the shape class on such a GPU with these versions; the model's choice (``tile_space``).
Nothing is tuned in a step of training. No choice changes a bit (``tile_space``).
"""

from __future__ import annotations

import fcntl
import json
import os
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache, lru_cache
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import torch
import triton

from moesys.kernels.experts.tile_config import ShapeClass, TileConfig, TileConfigs
from moesys.kernels.experts.tile_space import HOPPER, MULTIPROCESSORS, OPS, blocks_for, candidates

PINNED = "MOESYS_BLOCKS"
CACHE = "MOESYS_CACHE"
# The interpreter's time goes by elements; small tiles waste few.
INTERPRETED = TileConfig(rows=32, columns=32, contraction=32)

# Milliseconds of each block for an op, None for one that does not compile, spills, or does not run.
Timer = Callable[[str, Sequence[TileConfig]], Sequence[float | None]]


@dataclass(frozen=True)
class Gpu:
    """What a tuned choice holds for, besides versions. ``capability``: as in ``sm_90``."""

    name: str = "H100"
    multiprocessors: int = MULTIPROCESSORS
    capability: int = HOPPER

    @staticmethod
    def of(device: torch.device) -> Gpu:
        """Of a CUDA device."""
        properties = torch.cuda.get_device_properties(device)
        return Gpu(properties.name, properties.multi_processor_count, capability_of(device))


def capability_of(device: torch.device) -> int:
    """As in ``sm_90``; that of a Hopper GPU where there is none."""
    if device.type != "cuda" or not torch.cuda.is_available():
        return HOPPER
    major, minor = torch.cuda.get_device_capability(device)
    return 10 * major + minor


def blocks_of(shape: ShapeClass, device: torch.device, capability: int = HOPPER) -> TileConfigs:
    """What a layer uses whose caller gives no blocks. ``capability``: of the GPU that ``device`` stands for, if it is
    none.

    Raises ValueError where ``MOESYS_BLOCKS`` names a file without blocks, or with some that would change bits.
    """
    if pinned := os.environ.get(PINNED):
        blocks = read_blocks(Path(pinned))
        blocks.require_warpgroups(getattr(torch, shape.dtype), device)
        return blocks
    if device.type == "cpu":
        return TileConfigs.all_of(INTERPRETED)
    if device.type != "cuda":
        return blocks_for(shape, capability=capability)
    gpu = Gpu.of(device)
    return _cached(gpu).get(shape.key) or blocks_for(shape, gpu.multiprocessors, gpu.capability)


def read_blocks(path: Path) -> TileConfigs:
    """Configurations from a JSON file. Raises ValueError, which names it."""
    try:
        return TileConfigs.from_json(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ValueError(f"{PINNED}={path}: {error}") from None


def tune_blocks(shape: ShapeClass, timer: Timer, gpu: Gpu) -> TileConfigs:
    """The fastest candidate of each op by ``timer``, one op after another; kept for ``blocks_of``.

    Of equally fast ones the model's favourite, which is also what an op gets all of whose candidates failed. Raises
    OSError, before anything is timed, where nothing can be kept.
    """
    path, best = cache_file(gpu), {}
    # Nothing new, but what cannot be kept later is known before minutes of timing.
    _keep(path, {})
    for op in OPS:
        blocks = candidates(op, shape, gpu.multiprocessors, gpu.capability)
        taken_ms = timer(op, blocks)
        timed = [(ms, place) for place, ms in enumerate(taken_ms) if ms is not None]
        best[op] = blocks[min(timed)[1]] if timed else blocks[0]
    found = TileConfigs(**best)
    _keep(path, {shape.key: found})
    return found


# --- on disk ----------------------------------------------------------------------------------------------------


def cache_file(gpu: Gpu) -> Path:
    """In the folder that ``MOESYS_CACHE`` names, else the user's: one file for a GPU, its number of multiprocessors and
    the versions of torch, Triton and moesys. Raises OSError where neither is known.
    """
    name = f"blocks-{gpu.name}-{gpu.multiprocessors}-{_versions()}"
    return _folder() / (re.sub(r"[^\w.+-]", "_", name) + ".json")


def _folder() -> Path:
    if named := os.environ.get(CACHE):
        return Path(named)
    try:
        return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "moesys"
    except RuntimeError:
        # As in a container whose user is but a number.
        raise OSError(f"this user has no home folder to keep blocks in; name a folder by {CACHE}") from None


@cache
def _versions() -> str:
    """Read from disk once, as every forward and backward asks for blocks."""
    try:
        moesys = version("moesys")
    except PackageNotFoundError:
        moesys = "-not-installed"
    return f"torch{torch.__version__}-triton{triton.__version__}-moesys{moesys}"


def _cached(gpu: Gpu) -> Mapping[str, TileConfigs]:
    try:
        path = cache_file(gpu)
        return _read(path, path.stat().st_mtime_ns)
    except OSError:
        return {}


@lru_cache(maxsize=8)
def _read(path: Path, changed_ns: int) -> Mapping[str, TileConfigs]:
    return _parse(path)


def _parse(path: Path) -> Mapping[str, TileConfigs]:
    """Configurations by shape class; none where the file is damaged, which the next tuning writes anew."""
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
        return {key: TileConfigs.from_json(json.dumps(blocks)) for key, blocks in found.items()}
    except (AttributeError, OSError, ValueError):
        return {}


def _keep(path: Path, found: Mapping[str, TileConfigs]) -> None:
    """Adds to the file, which is complete at any time, and loses nothing that others add meanwhile."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with _alone(path.with_suffix(".lock")):
            kept = {**_parse(path), **found}
            try:
                temporary.write_text(json.dumps({key: json.loads(of.to_json()) for key, of in kept.items()}, indent=1))
                os.replace(temporary, path)
            finally:
                temporary.unlink(missing_ok=True)
    except OSError as error:
        raise OSError(f"blocks cannot be kept: {error}; name a folder that can be written to by {CACHE}") from None


@contextmanager
def _alone(path: Path) -> Iterator[None]:
    """One process at a time."""
    with path.open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield
