"""The benchmarks that run after the GPU checks. They write into the folder of the report."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

import pytest
from gpu_ranks import GpuRank

pytestmark = pytest.mark.gpu(layer="measured")

ROOT = Path(__file__).parents[2]
# Peers of the kernels benchmark, and the packages that they are imported as. It always times torch's grouped_mm.
PEERS = {"scattermoe": "scattermoe", "liger": "liger_kernel", "sonicmoe": "sonicmoe"}
# The options limit each command to a part of ten minutes; without them the same commands measure everything.
KERNELS = ("benchmarks", "kernels", "--size", "qwen3-30b", "--routing", "uniform", "--repeats", "5", "--no-extras")
OVERLAP = ("benchmarks", "overlap", "--part", "mega", "--repeats", "3")
CALIBRATE = ("moesys", "calibrate", "--device", "cuda", "--repeats", "2")
MODELS = ("benchmarks", "models", "--model", "qwen3-moe", "--routing", "skewed", "--sequences", "2", "--repeats", "3")
LAST_LINES = 12


@pytest.mark.gpu(limit_s=120, ranks="first", after=("experts",))
def test_bench_kernels(gpu: GpuRank) -> str:
    """The time of experts on this GPU, beside grouped_mm and the peers that are installed."""
    gpu.require_gpu("rehearse it by TRITON_INTERPRET=1 python -m benchmarks kernels --device cpu")
    found = installed_peers()
    peers = [option for name, folder in found.items() for option in ("--peer", f"{name}={folder}")]
    _run([*KERNELS, *peers, "--out", str(gpu.folder)])
    missing = [name for name in PEERS if name not in found]
    says = f"kernels.md: beside {', '.join(['grouped_mm', *found])}"
    return says + (f"; not installed: {', '.join(missing)}" if missing else "")


@pytest.mark.gpu(limit_s=120, ranks="first", after=("experts", "rounds on one gpu"))
def test_bench_overlap(gpu: GpuRank) -> str:
    """The communication that MegaKernels hide, on virtual ranks of one GPU over paced links."""
    gpu.require_gpu("rehearse it by TRITON_INTERPRET=1 python -m benchmarks overlap --part mega --device cpu")
    _run([*OVERLAP, "--out", str(gpu.folder)])
    return "overlap_mega.md: virtual ranks over paced links"


@pytest.mark.gpu(limit_s=180, ranks="together", after=("device",))
def test_bench_calibrate(gpu: GpuRank) -> str:
    """The speeds of GPUs and links, which simulations of this machine need."""
    gpu.require_gpu("measure this machine's CPU ranks by moesys calibrate")
    # Ranks that share a GPU would measure each other.
    alone = gpu.num_gpus == 1 and "WORLD_SIZE" not in os.environ
    if alone and gpu.rank:
        return "only the first rank measures"
    _run([*CALIBRATE, "--out", str(gpu.folder)], _torchrun_variables(gpu, 1 if alone else gpu.num_ranks))
    return "cluster.toml: a ClusterSpec, for simulations of this machine"


@pytest.mark.gpu(limit_s=90, ranks="first")
def test_bench_models(gpu: GpuRank) -> str:
    """The time of a step of small models, on CPU ranks of this machine."""
    gpu.require_gpu("it trains small models on CPU ranks: python -m benchmarks models")
    _run([*MODELS, "--out", str(gpu.folder)])
    return "models.json: small models on CPU ranks beside transformers' own all_to_all"


def installed_peers() -> dict[str, Path]:
    """Returns the folder that holds each peer's package."""
    specs = {name: importlib.util.find_spec(package) for name, package in PEERS.items()}
    return {
        name: Path(spec.submodule_search_locations[0]).parent
        for name, spec in specs.items()
        if spec is not None and spec.submodule_search_locations
    }


def _torchrun_variables(gpu: GpuRank, num_ranks: int) -> Mapping[str, str]:
    """Returns the variables by which torchrun tells a rank who it is."""
    return {
        "RANK": str(gpu.rank),
        "WORLD_SIZE": str(num_ranks),
        "LOCAL_RANK": os.environ.get("LOCAL_RANK", str(gpu.rank)),
        "LOCAL_WORLD_SIZE": os.environ.get("LOCAL_WORLD_SIZE", str(num_ranks)),
        "MASTER_ADDR": os.environ.get("MASTER_ADDR", "127.0.0.1"),
        "MASTER_PORT": str(int(os.environ.get("MASTER_PORT", "29511")) + 1),
        "TORCHELASTIC_USE_AGENT_STORE": "False",
    }


def _run(words: list[str], variables: Mapping[str, str] | None = None) -> None:
    """Runs a command in the checkout; what it prints goes into the log of the check."""
    done = subprocess.run(
        [sys.executable, "-m", *words],
        cwd=ROOT,
        env={**os.environ, **(variables or {})},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        check=False,
    )
    print(done.stdout)
    last = "\n".join(done.stdout.rstrip().splitlines()[-LAST_LINES:])
    assert done.returncode == 0, f"python -m {' '.join(words[:2])} ended with code {done.returncode}:\n{last}"
