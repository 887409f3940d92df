"""``moesys doctor``: what this machine has, and what each thing that is missing would enable.

Every check stands alone: one that fails is a row of the table and not the end of it. So whatever may be missing or
broken is imported inside the check that is about it.
"""

from __future__ import annotations

import json
import platform
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from importlib.metadata import PackageNotFoundError, requires
from importlib.util import find_spec
from pathlib import Path
from typing import Annotated, Literal

import typer
from rich.console import Console

from moesys.display import counted, version_of
from moesys.lab.commands.options import AsJson, Quiet, Wide, flag
from moesys.lab.runs.environment import available_cores, cpu_name
from moesys.lab.show.sheets import Column, Sheet, print_sheet

State = Literal["ok", "slow", "missing", "broken"]

RANKS_TIMEOUT_S = 60.0
GIB = 2**30
OLDEST_PYTHON, OLDEST_TORCH = (3, 11), (2, 11)
# How to run the GPU checks after an installation from a wheel.
GPU_COMMANDS = ("git clone REPOSITORY moesys && cd moesys", "pip install -e '.[test]'", "python -m moesys doctor --gpu")


@dataclass(frozen=True)
class Check:
    """The result of one check.

    state: ``broken`` if the default install cannot do without it, ``missing`` if it can, ``slow`` if it works but
    not as fast as it could. hint: what it would enable, or what to do; may be empty.
    """

    name: Annotated[str, Column("check", align="left", wraps=True)]
    found: Annotated[str, Column("found", align="left", wraps=True, kept=True)]
    state: Annotated[State, Column("state", kept=True)]
    hint: Annotated[str, Column("what to do", align="left", wraps=True, kept=True)] = ""


def _check(name: str, found: str, good: bool, state: State, hint: str) -> Check:
    """Returns a check that is ok if it is ``good``, and else has ``state`` and ``hint``."""
    return Check(name, found, "ok") if good else Check(name, found, state, hint)


def examine() -> list[Check]:
    """Runs all checks of this machine, in the order in which one thing needs another."""
    checks: list[Check] = []
    for about, look in _CHECKS.items():
        try:
            checks += look()
        except Exception as error:
            checks.append(Check(about, f"{type(error).__name__}: {error}".partition("\n")[0], "broken", _REINSTALL))
    return checks


def doctor_command(
    gpu: Annotated[bool, flag("Test the GPUs of this machine layer by layer, then time them.", "--gpu")] = False,
    as_json: AsJson = False,
    quiet: Quiet = False,
    wide: Wide = False,
) -> int:
    """Prints what works, what is missing, and all checks. Returns 1 if something that every use needs is broken."""
    if gpu and as_json:
        raise typer.BadParameter(
            "--json prints what this machine has; --gpu writes doctor/doctor.json; give one of them"
        )
    if gpu:
        return gpu_command()
    with Console(stderr=True, quiet=quiet).status("examining this machine"):
        checks = examine()
    if as_json:
        print(json.dumps([asdict(check) for check in checks], indent=2))
    else:
        print(_verdict(checks))
        lacks = [check for check in checks if check.state != "ok"]
        has = [check for check in checks if check.state == "ok"]
        if lacks:
            print_sheet(Sheet("Missing, or slower than it could be", lacks), wide=wide)
        print_sheet(Sheet("Found", has, without=("state",)), wide=wide)
    return int(any(check.state == "broken" for check in checks))


def gpu_command() -> int:
    """Runs the GPU checks of this checkout. Where there is no checkout or no pytest, it prints the commands that do.

    Returns the exit code of pytest, or 2; or 0 if there is no GPU to test.
    """
    import torch

    if not torch.cuda.is_available():
        print("No GPU found, so there is nothing to test. To rehearse the checks on the CPU: pytest -m gpu tests/gpu")
        return 0
    checks = Path(__file__).parents[3] / "tests" / "gpu"
    if not checks.is_dir() or find_spec("pytest_timeout") is None:
        print("The GPU checks run in a checkout of moesys, with pytest. To run them:", *GPU_COMMANDS, sep="\n  ")
        return 2
    return subprocess.run([sys.executable, "-m", "pytest", "-vv", "-m", "gpu", str(checks)], check=False).returncode


def _verdict(checks: list[Check]) -> str:
    broken = [check.name for check in checks if check.state == "broken"]
    if broken:
        return f"moesys does not work here: {', '.join(broken)} must be repaired first."
    gpus = [check.found for check in checks if check.name == "GPU" and check.state == "ok"]
    train = f"training on CPU ranks and on {' and '.join(gpus)}" if gpus else "training on CPU ranks"
    missing = [check.name for check in checks if check.state == "missing"]
    others = f"\nOptional and missing: {', '.join(missing)}." if missing else ""
    return f"moesys works here: {train}, simulation and planning.{others}"


# --- software -------------------------------------------------------------------------------------------------------


def _python() -> Iterator[Check]:
    found, hint = platform.python_version(), f"install Python {OLDEST_PYTHON[0]}.{OLDEST_PYTHON[1]} or newer"
    yield _check("Python", found, sys.version_info >= OLDEST_PYTHON, "broken", hint)


def _packages() -> Iterator[Check]:
    try:
        declared = requires("moesys") or []
    except PackageNotFoundError:
        yield Check("packages", "moesys is not installed, so nothing says which", "missing", _REINSTALL)
        return
    names = [line.split(";")[0].rstrip("0123456789.,<>=!~ ") for line in declared if "extra ==" not in line]
    there = {name: version_of(name) for name in names}
    if absent := [name for name, found in there.items() if not found]:
        yield Check("packages", f"no {', '.join(absent)}", "broken", _REINSTALL)
    else:
        yield Check("packages", ", ".join(f"{name} {found}" for name, found in sorted(there.items())), "ok")


def _torch() -> Iterator[Check]:
    import torch

    build = f"CUDA {torch.version.cuda}" if torch.version.cuda else "ROCm" if torch.version.hip else "CPU only"
    good = tuple(int(part) for part in torch.__version__.split(".")[:2]) >= OLDEST_TORCH
    hint = f"install torch {OLDEST_TORCH[0]}.{OLDEST_TORCH[1]} or newer"
    yield _check("torch", f"{torch.__version__}, {build}", good, "broken", hint)


def _gpus() -> Iterator[Check]:
    import torch

    if not torch.cuda.is_available():
        why = "torch is built for the CPU only" if not torch.version.cuda else "torch finds none; is a driver missing?"
        yield Check("GPU", f"none ({why})", "missing", "to train on GPUs: an NVIDIA GPU, and a CUDA build of torch")
        return
    devices = [torch.cuda.get_device_properties(index) for index in range(torch.cuda.device_count())]
    for name in dict.fromkeys(device.name for device in devices):
        alike = [device for device in devices if device.name == name]
        yield Check("GPU", f"{len(alike)} × {name}, {alike[0].total_memory / GIB:.0f} GiB", "ok")


def _optional() -> Iterator[Check]:
    cupy = next((name for name in ("cupy-cuda12x", "cupy-cuda13x", "cupy") if version_of(name)), "cupy")
    for title, package, hint in (
        ("Triton", "triton", "for GPU kernels: CUDA builds of torch for Linux include it"),
        ("CuPy", cupy, "for CUDA copy engines: pip install 'moesys[cuda12]' or 'moesys[cuda13]'"),
    ):
        found = version_of(package)
        yield _check(title, found or "not installed", found != "", "missing", hint)


def _local_ranks() -> Iterator[Check]:
    from time import perf_counter

    from moesys.lab.ranks.pool import LocalRanks, RankTimeouts

    start_s = perf_counter()
    with LocalRanks(2, timeouts=RankTimeouts(run_s=RANKS_TIMEOUT_S)) as ranks:
        sums = ranks.run(_sum_of_ranks)
    if sums != [3.0, 3.0]:
        raise RuntimeError(f"two ranks added 1 and 2 to {sums}")
    found = f"2 started and added a tensor in {perf_counter() - start_s:.1f} s"
    yield Check("local ranks", found, "ok", "to simulate them: moesys calibrate --out here")


def _sum_of_ranks() -> float:
    import torch
    import torch.distributed as dist

    value_1 = torch.tensor([1.0 + dist.get_rank()])
    dist.all_reduce(value_1)
    return value_1.item()


# --- machine --------------------------------------------------------------------------------------------------------


def _machine() -> Iterator[Check]:
    import psutil

    cores, memory = counted(available_cores(), "core"), psutil.virtual_memory()
    yield Check("CPU", f"{cpu_name()}, {cores}", "ok", "for timings, start at most a rank of one thread a core")
    yield Check("memory", f"{memory.total / GIB:.1f} GiB, {memory.available / GIB:.1f} GiB of it free", "ok")


def _half_precision() -> Iterator[Check]:
    import torch

    has = torch.cpu.get_capabilities() if hasattr(torch.cpu, "get_capabilities") else {}
    units = [name for name in ("avx512_bf16", "amx_bf16", "bf16") if has.get(name)]
    capability = torch.backends.cpu.get_cpu_capability()
    found = f"{capability}, {', '.join(units) or 'no instructions for it'}"
    yield _check("bfloat16", found, bool(units), "slow", "use dtype='float32' on this CPU")


# --- helpers ----------------------------------------------------------------------------------------------------------

_REINSTALL = "install moesys again: pip install -e ."

_CHECKS: dict[str, Callable[[], Iterator[Check]]] = {
    "Python": _python,
    "packages": _packages,
    "torch": _torch,
    "GPU": _gpus,
    "GPU kernels": _optional,
    "local ranks": _local_ranks,
    "machine": _machine,
    "bfloat16": _half_precision,
}
