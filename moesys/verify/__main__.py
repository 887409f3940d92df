"""``python -m moesys.verify``: the same command as ``moesys verify``, which needs torch alone."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch

from moesys.kinds import did_you_mean
from moesys.verify.hosts import transformers_check
from moesys.verify.runs import checks_in, run

DTYPES = {"": None, "float64": torch.float64, "float32": torch.float32}
HOSTS = ("all_to_all", "all_reduce", "tp", "ddp", "fsdp")


def verify(
    target: str = "",
    model: str = "",
    parallel: str = "",
    implementation: str = "all_to_all",
    situations: str = "",
    every: bool = False,
    ranks: int | None = None,
    dtype: str = "",
    seed: int = 0,
    timeout: float = 300.0,
    as_json: bool = False,
    quiet: bool = False,
    strategies: Mapping[str, Callable[[Any], Any]] | None = None,
) -> int:
    """Runs the checks of a file, or that of a model, and prints the reports. Returns the exit code: 1 if a training is
    wrong, 2 if one could not be checked. strategies: functions that make a model parallel, by implementation.

    Raises ValueError for values that are not allowed.
    """
    if bool(target) == bool(model):
        raise ValueError("give one of a file, such as check.py, and --model, such as qwen3_moe")
    if dtype not in DTYPES:
        raise ValueError(f"dtype={dtype} must be float64 or float32")
    checks = [] if model else _checks_of(target)
    if model:
        build, ranks = _model_check(model, parallel, implementation, strategies or {})
        checks = [build]
    reports = [
        run(
            build,
            situations="all" if every else situations.split(",") if situations else None,
            ranks=ranks,
            dtype=DTYPES[dtype],
            seed=seed,
            timeout_s=timeout,
            progress=lambda line: None if quiet else print(line, file=sys.stderr, flush=True),
        )
        for build in checks
    ]
    texts = [report.to_json() if as_json else str(report) for report in reports]
    print(f"[{','.join(texts)}]" if as_json else "\n\n".join(texts), flush=True)
    codes = {report.exit_code for report in reports}
    return 1 if 1 in codes else max(codes)


def _checks_of(target: str) -> list[Any]:
    file, _, name = target.partition(":")
    checks = checks_in(Path(file))
    if name and name not in checks:
        raise ValueError(f"{file} has no check {name!r}; it has {', '.join(checks)}{did_you_mean(name, checks)}")
    return [build for each, build in checks.items() if name in ("", each)]


def _model_check(model: str, parallel: str, implementation: str, strategies: Mapping[str, Any]) -> tuple[Any, int]:
    if implementation not in (known := [*HOSTS, *strategies]):
        hint = did_you_mean(implementation, known)
        raise ValueError(f"implementation={implementation} must be one of {', '.join(known)}{hint}")
    sizes = dict.fromkeys(("fsdp", "tp", "ep"), 1)
    for part in filter(None, parallel.split(",")):
        name, _, size = part.partition("=")
        if name not in sizes or not size.isdecimal() or size == "0":
            raise ValueError(f"parallel has {part!r}; give sizes of fsdp, tp and ep, such as fsdp=2,ep=2")
        sizes[name] = int(size)
    ranks = sizes["fsdp"] * sizes["tp"]
    if ranks < 2 or ranks % sizes["ep"]:
        raise ValueError(
            f"parallel={parallel} is fsdp · tp = {ranks} ranks, which must be 2 or more, and divisible by ep"
        )
    options: dict[str, Any] = {"model": model, **sizes, "implementation": implementation}
    return partial(transformers_check, **options, parallelize=strategies.get(implementation)), ranks


def main(arguments: Sequence[str] | None = None) -> int:
    """Parses a command line, runs it, and returns the exit code."""
    parser = argparse.ArgumentParser("python -m moesys.verify", description=(__doc__ or "").strip())
    parser.add_argument("target", nargs="?", default="", help="check.py, or check.py:NAME for one of its checks")
    parser.add_argument("--model", default="", help="a model type of transformers, instead of a file")
    parser.add_argument("--parallel", default="fsdp=2", help="with --model: sizes of fsdp, tp and ep")
    parser.add_argument("--implementation", default="all_to_all", help=f"with --model: one of {', '.join(HOSTS)}")
    parser.add_argument(
        "--situations", default="", help="names with commas (default: plain,uneven,padding,recomputation)"
    )
    parser.add_argument("--all", dest="every", action="store_true", help="all situations that the check supports")
    parser.add_argument("--ranks", type=int, help="number of ranks (default: that of the check)")
    parser.add_argument("--dtype", default="", help="float64 or float32 (default: that of the check)")
    parser.add_argument("--seed", type=int, default=0, help="seed of the batches")
    parser.add_argument("--timeout", type=float, default=300.0, help="seconds of one run of ranks")
    parser.add_argument("--json", dest="as_json", action="store_true", help="print the reports as JSON")
    parser.add_argument("--quiet", action="store_true", help="print only the reports and errors")
    try:
        return verify(**vars(parser.parse_args(arguments)))
    except ValueError as error:
        print(f"Error: {error}", file=sys.stderr)
        return 2


if __name__ == "__main__":
    sys.exit(main())
