"""The environment that numbers were measured in: code, interpreter, libraries, machine, variables."""

from __future__ import annotations

import json
import math
import os
import platform
import subprocess
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import asdict, dataclass
from hashlib import sha256
from pathlib import Path
from typing import Any

from moesys.display import counted, version_of
from moesys.files import read_bytes, write_whole
from moesys.frames import flat_fields
from moesys.lab.ranks.process_start import LOOPBACK

_PACKAGES = ("torch", "numpy", "scipy", "ortools", "triton")
_VARIABLES = ("OMP_", "MKL_", "OPENBLAS_", "TORCH_", "CUDA_", "NCCL_", "GLOO_")
# Variables that the runner and torchrun set for ranks, each in its own way, though the ranks run alike. The number of
# threads has a field of its own.
_SET_FOR_RANKS = {"OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS", "TORCH_NCCL_ASYNC_ERROR_HANDLING"}
_ONE_HOST = ("GLOO_SOCKET_IFNAME", LOOPBACK)


@dataclass(frozen=True)
class Environment:
    """Everything that can change a measured number while all fields of the experiment stay the same.

    git_commit: of the checkout that moesys runs from, followed by ``+`` and a digest of the source if that has
        uncommitted changes; empty where it does not run from one.
    cpu_capability: the instructions that torch chose, such as AVX512; with threads and dtype the CPU's numerics class.
    torch_threads: of each rank. variables: those set that steer BLAS, torch, CUDA, NCCL and gloo, less what is set for
        ranks by whatever starts them; the home folder in them is written ``~``.
    """

    git_commit: str
    python: str
    packages: dict[str, str]
    platform: str
    cpu: str
    cpu_capability: str
    cores: int
    torch_threads: int
    gpus: list[str]
    gpu_driver: str
    variables: dict[str, str]

    @property
    def id(self) -> str:
        """8 hex digits; the same machine in the same state has the same."""
        return sha256(json.dumps(asdict(self), sort_keys=True).encode()).hexdigest()[:8]

    @property
    def machine_line(self) -> str:
        """The environment in one line, for the foot of a table."""
        parts = [self.cpu, counted(self.cores, "core"), f"{counted(self.torch_threads, 'thread')} per rank"]
        parts += [f"{self.gpus.count(gpu)} × {gpu}" for gpu in dict.fromkeys(self.gpus)]
        parts.append(f"Python {self.python}")
        parts += [f"torch {self.packages['torch']}"] if "torch" in self.packages else []
        if self.git_commit:
            commit, changed, _ = self.git_commit.partition("+")
            parts.append(f"moesys {commit[:8]}{' with uncommitted changes' if changed else ''}")
        return ", ".join(parts)


def collect_environment(torch_threads: int | None = None) -> Environment:
    """Returns the environment of this process. ``torch_threads``: by default torch's own number."""
    # This import is here because reading environments does not need torch.
    import torch

    gpus = [torch.cuda.get_device_name(index) for index in range(torch.cuda.device_count())]
    driver = output_of("nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader") if gpus else ""
    return Environment(
        git_commit=_git_state(Path(__file__).parents[2]),
        python=platform.python_version(),
        packages={package: found for package in _PACKAGES if (found := version_of(package))},
        platform=platform.platform(),
        cpu=cpu_name(),
        cpu_capability=torch.backends.cpu.get_cpu_capability(),
        cores=available_cores(),
        torch_threads=torch_threads or torch.get_num_threads(),
        gpus=gpus,
        gpu_driver=driver.partition("\n")[0],
        variables={
            name: value.replace(os.path.expanduser("~"), "~")
            for name, value in sorted(os.environ.items())
            if name.startswith(_VARIABLES) and name not in _SET_FOR_RANKS and (name, value) != _ONE_HOST
        },
    )


def source_digest(counts: Callable[[str], bool] = lambda _: True) -> str:
    """Returns 12 hex digits of the source of moesys: committed or not, in a checkout or installed. ``counts`` is asked
    for each file, by its path in the package, such as ``lab/runs/environment.py``.
    """
    package, digest = Path(__file__).parents[2], sha256()
    for file in sorted(package.rglob("*.py")):
        if counts(name := file.relative_to(package).as_posix()):
            source = file.read_bytes()
            digest.update(f"{name} {len(source)}\n".encode() + source)
    return digest.hexdigest()[:12]


def available_cores() -> int:
    """Returns the number of cores that this process may use: those of its affinity, or as many as the limits on its
    processor time amount to, rounded up, if these are fewer.
    """
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return max(1, math.ceil(min([cores, *_core_limits()])))


def _core_limits(root: Path = Path("/")) -> Iterator[float]:
    """Yields the limits, in cores, that containers and batch systems set: that of this process' control
    group and those of all groups around it, in either version of cgroups.
    """
    for line in _lines(root / "proc/self/cgroup"):
        _, controllers, path = line.split(":", 2)
        if not controllers or "cpu" in controllers.split(","):
            group = root / "sys/fs/cgroup" / ("cpu" if controllers else "") / path.lstrip("/")
            names = ("cpu.cfs_quota_us", "cpu.cfs_period_us") if controllers else ("cpu.max",)
            for folder in (group, *group.parents):
                # In a container the path may be that of the host. A group without a limit has "max", or -1.
                with suppress(OSError, ValueError):
                    quota, period = (float(text) for name in names for text in (folder / name).read_text().split())
                    if quota > 0:
                        yield quota / period


def save_environment(environment: Environment, folder: Path) -> str:
    """Writes ``environment-<id>.json``, unless it exists. Returns the id."""
    path = folder / f"environment-{environment.id}.json"
    if not path.exists():
        write_whole(path, json.dumps(asdict(environment), indent=2) + "\n")
    return environment.id


def load_environments(folder: Path) -> dict[str, Environment]:
    """Returns the environments of a run folder, by id. Raises ValueError for a file that is none."""
    # This import is here because doctor reads versions where a package may be missing.
    from pydantic import TypeAdapter, ValidationError

    from moesys.config.base import in_words

    environments, adapter = {}, TypeAdapter(Environment)
    for file in sorted(folder.glob("environment-*.json")):
        try:
            environments[file.stem.removeprefix("environment-")] = adapter.validate_json(read_bytes(file))
        except ValidationError as error:
            raise ValueError(f"{file} describes no environment: {in_words(error)}") from None
    return environments


def differences(a: Environment, b: Environment) -> dict[str, tuple[str, str]]:
    """Returns the fields in which two environments differ, by dotted path, with both values; "" for a missing one.

    ``{"variables.OMP_NUM_THREADS": ("1", "")}``
    """
    left, right = ({path: _words(value) for path, value in flat_fields("", asdict(each))} for each in (a, b))
    paths = dict.fromkeys([*left, *right])
    return {
        path: (left.get(path, ""), right.get(path, "")) for path in paths if left.get(path, "") != right.get(path, "")
    }


def cpu_name() -> str:
    """Returns the name of the processor."""
    lines = _lines(Path("/proc/cpuinfo"))
    names = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    return next(names, platform.processor() or platform.machine())


def _lines(file: Path) -> list[str]:
    return file.read_text(encoding="utf-8").splitlines() if os.access(file, os.R_OK) else []


def _words(value: Any) -> str:
    return ", ".join(value) if isinstance(value, list) else str(value)


def _git_state(package: Path) -> str:
    """Returns the commit of the checkout that holds a package, with a digest of the source if that is changed.

    "" where git does not know the package: one installed into an environment inside somebody's checkout is not of that
    checkout.
    """
    git = ("git", "-C", str(package))
    if not output_of(*git, "ls-files", "__init__.py"):
        return ""
    commit = output_of(*git, "rev-parse", "HEAD").strip()
    return f"{commit}+{source_digest()}" if output_of(*git, "status", "--porcelain", ".") else commit


def output_of(*command: str) -> str:
    """Returns what a command prints, whatever its exit code; "" if it is not installed."""
    try:
        return subprocess.run(command, capture_output=True, errors="replace", check=False).stdout
    except OSError:
        return ""
