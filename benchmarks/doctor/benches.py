"""The measurements after the checks: other benchmarks, each into the folder, with the peers that are installed."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from benchmarks.doctor.place import Place, require

# Peers of ``bench kernels``, by the package that they are imported as; torch's grouped_mm is a contestant anyhow.
PEERS = {"scattermoe": "scattermoe", "liger": "liger_kernel", "sonicmoe": "sonicmoe"}
# What a GPU gets of ten minutes; without these options the same commands measure everything.
KERNELS = ("kernels", "--size", "qwen3-30b", "--routing", "uniform", "--repeats", "5", "--no-extras")
OVERLAP = ("overlap", "--part", "mega", "--repeats", "3")
CALIBRATE = ("calibrate", "--device", "cuda", "--repeats", "2")
MODELS = ("models", "--model", "qwen3-moe", "--routing", "skewed", "--sequences", "2", "--repeats", "3")
LAST_LINES = 12


def kernels_are_timed(place: Place) -> str:
    place.require_gpu("rehearse it by TRITON_INTERPRET=1 python -m benchmarks kernels --device cpu")
    found = installed_peers()
    peers = [option for name, folder in found.items() for option in ("--peer", f"{name}={folder}")]
    _bench([*KERNELS, *peers, "--out", str(place.folder)])
    missing = [name for name in PEERS if name not in found]
    beside = ", ".join(["grouped_mm", *found])
    return f"kernels.md: beside {beside}" + f"; not installed: {', '.join(missing)}" * bool(missing)


def overlap_is_timed(place: Place) -> str:
    place.require_gpu("rehearse it by TRITON_INTERPRET=1 python -m benchmarks overlap --part mega --device cpu")
    _bench([*OVERLAP, "--out", str(place.folder)])
    return "overlap_mega.md: virtual ranks over paced links"


def links_are_calibrated(place: Place) -> str:
    """Of all ranks that have a GPU each; of one alone where ranks would share it."""
    place.require_gpu("measure this machine's CPU ranks by moesys calibrate")
    alone = place.most_gpus == 1 and "WORLD_SIZE" not in os.environ
    if alone and place.rank:
        return "left to the first rank"
    outputs = [option for name in ("out", "page", "json") for option in (f"--{name}", str(_calibrated(place, name)))]
    _bench([*CALIBRATE, *outputs], _as_rank(place, 1 if alone else place.num_ranks), module="moesys")
    return f"{_calibrated(place, 'out').name}: a ClusterSpec, for simulations of this machine"


def models_are_timed(place: Place) -> str:
    place.require_gpu("it trains small models on CPU ranks: python -m benchmarks models")
    _bench([*MODELS, "--json", str(place.folder / "models.json")])
    return "models.json: small models on CPU ranks beside transformers' own all_to_all"


def installed_peers() -> dict[str, Path]:
    """The folder that each peer's package lies in."""
    specs = {name: importlib.util.find_spec(package) for name, package in PEERS.items()}
    return {
        name: Path(spec.submodule_search_locations[0]).parent
        for name, spec in specs.items()
        if spec is not None and spec.submodule_search_locations
    }


def _calibrated(place: Place, option: str) -> Path:
    return place.folder / {"out": "cluster.toml", "page": "calibrate.md", "json": "calibrate.json"}[option]


def _as_rank(place: Place, num_ranks: int) -> Mapping[str, str]:
    """What torchrun would have told a rank: ``moesys calibrate`` takes those that it finds."""
    meeting = os.environ.get("MASTER_PORT", "29511")
    return {
        "RANK": str(place.rank),
        "WORLD_SIZE": str(num_ranks),
        "LOCAL_RANK": os.environ.get("LOCAL_RANK", str(place.rank)),
        "LOCAL_WORLD_SIZE": os.environ.get("LOCAL_WORLD_SIZE", str(num_ranks)),
        "MASTER_ADDR": os.environ.get("MASTER_ADDR", "127.0.0.1"),
        "MASTER_PORT": str(int(meeting) + 1),
        "TORCHELASTIC_USE_AGENT_STORE": "False",
    }


def _bench(options: Sequence[str], variables: Mapping[str, str] | None = None, module: str = "benchmarks") -> None:
    """Raises RuntimeError with the command's last lines where it fails. What it prints is this check's log."""
    command = [sys.executable, "-m", module, *options]
    done = subprocess.run(
        command, env={**os.environ, **(variables or {})}, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )
    print(done.stdout)
    last = "\n".join(done.stdout.rstrip().splitlines()[-LAST_LINES:])
    require(done.returncode == 0, f"python -m {module} {options[0]} ended with code {done.returncode}:\n{last}")
