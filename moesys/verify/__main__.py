"""``python -m moesys.verify``: the same command as ``moesys verify``, which needs torch alone."""

from __future__ import annotations

import argparse
import re
import sys
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import torch

from moesys.kinds import did_you_mean
from moesys.verify.hosts import transformers_check
from moesys.verify.runs import checks_in, run

HOSTS = ("all_to_all", "all_reduce", "tp", "ddp", "fsdp")
# Options, their defaults, and what they are; the type of a value is that of its default.
OPTIONS: dict[str, tuple[Any, str]] = {
    "model": ("", "a model type of transformers, instead of a file"),
    "parallel": ("fsdp=2", "with --model: sizes of fsdp, tp and ep"),
    "implementation": ("all_to_all", f"with --model: one of {', '.join(HOSTS)}"),
    "situations": ("", "names with commas (default: plain,uneven,padding,recomputation)"),
    "all": (False, "all situations that the check supports"),
    "ranks": (0, "number of ranks (default: that of the check)"),
    "dtype": ("", "float64 or float32 (default: that of the check)"),
    "seed": (0, "seed of the batches"),
    "timeout": (300.0, "seconds of one run of ranks"),
    "json": (False, "print the reports as JSON"),
    "quiet": (False, "print only the reports and errors"),
}


def verify(given: argparse.Namespace, strategies: Mapping[str, Callable[[Any], Any]] | None = None) -> int:
    """Runs the checks of a file, or that of a model, and prints the reports. Returns the exit code: 1 if a training is
    wrong, 2 if one could not be checked.

    given: the file as ``target``, and ``OPTIONS``. strategies: functions that make a model parallel, by implementation.

    Raises ValueError for values that are not allowed.
    """
    if bool(given.target) == bool(given.model):
        raise ValueError("give one of a file, such as check.py, and --model, such as qwen3_moe")
    checks, ranks = _check_of_model(given, strategies or {}) if given.model else (checks_in(given.target), given.ranks)
    reports = [
        run(
            build,
            situations="all" if given.all else list(filter(None, given.situations.split(","))),
            ranks=ranks,
            dtype=given.dtype and getattr(torch, given.dtype, given.dtype),
            seed=given.seed,
            timeout_s=given.timeout,
            progress=lambda line: None if given.quiet else print(line, file=sys.stderr, flush=True),
        )
        for build in checks
    ]
    texts = [report.to_json() if given.json else str(report) for report in reports]
    print(f"[{','.join(texts)}]" if given.json else "\n\n".join(texts), flush=True)
    return min({report.exit_code for report in reports} - {0}, default=0)


def _check_of_model(given: argparse.Namespace, strategies: Mapping[str, Any]) -> tuple[list[Any], int]:
    parallel, implementation = given.parallel, given.implementation
    if implementation not in (known := [*HOSTS, *strategies]):
        hint = did_you_mean(implementation, known)
        raise ValueError(f"implementation={implementation} must be one of {', '.join(known)}{hint}")
    if not re.fullmatch(r"((fsdp|tp|ep)=[1-9]\d*(,|$))+", parallel):
        raise ValueError(f"parallel has {parallel!r}; give sizes of fsdp, tp and ep, such as fsdp=2,ep=2")
    sizes = {"fsdp": 1, "tp": 1, "ep": 1} | {name: int(size) for name, size in re.findall(r"(\w+)=(\d+)", parallel)}
    ranks = sizes["fsdp"] * sizes["tp"]
    if ranks < 2 or ranks % sizes["ep"]:
        raise ValueError(f"fsdp · tp of {parallel} is {ranks} ranks, which must be 2 or more, and divisible by ep")
    options: dict[str, Any] = {"parallelize": strategies.get(implementation), **sizes}
    return [partial(transformers_check, model=given.model, implementation=implementation, **options)], ranks


def main(arguments: Sequence[str] | None = None) -> int:
    """Parses a command line, runs it, and returns the exit code."""
    parser = argparse.ArgumentParser("python -m moesys.verify", description=(__doc__ or "").strip())
    parser.add_argument("target", nargs="?", default="", help="check.py, or check.py:NAME for one of its checks")
    for name, (default, text) in OPTIONS.items():
        kind: dict[str, Any] = {"type": type(default)} if default is not False else {"action": "store_true"}
        parser.add_argument(f"--{name}", default=default, help=text, **kind)
    try:
        return verify(parser.parse_args(arguments))
    except ValueError as error:
        print(f"Error: {error}", file=sys.stderr)
        return 2


if __name__ == "__main__":
    sys.exit(main())
