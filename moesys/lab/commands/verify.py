"""``moesys verify``: the command of ``moesys.verify``, with moesys' strategies among its implementations."""

from __future__ import annotations

from argparse import Namespace
from functools import partial
from typing import Annotated, Literal

from moesys.lab.commands.options import AsJson, Quiet, argument, flag, option, refusing


@refusing()
def verify_command(
    target: Annotated[str, argument("CHECK", "check.py, or check.py:NAME for one of its checks.")] = "",
    model: Annotated[str, option("TYPE", "A model type of transformers instead, such as qwen3_moe.")] = "",
    parallel: Annotated[str, option("SIZES", "With --model: sizes of fsdp, tp and ep.")] = "fsdp=2",
    implementation: Annotated[
        str, option("NAME", "With --model: all_to_all, all_reduce, tp, ddp, fsdp; moesys' ep, lent, fsep.")
    ] = "all_to_all",
    situations: Annotated[str, option("NAMES", "With commas (default: plain,uneven,padding,recomputation).")] = "",
    every: Annotated[bool, flag("Run all situations that the check supports.", "--all")] = False,
    ranks: Annotated[int | None, option("N", "Number of ranks (default: that of the check).")] = None,
    dtype: Annotated[Literal["", "float64", "float32"], option("DTYPE", "float64 or float32.")] = "",
    seed: Annotated[int, option("N", "Seed of the batches.")] = 0,
    timeout: Annotated[float, option("SECONDS", "The most that one run of ranks may take.")] = 300.0,
    as_json: AsJson = False,
    quiet: Quiet = False,
) -> int:
    """Runs checks and prints their reports; returns the exit code."""
    given = Namespace(**locals(), all=every, json=as_json)
    # These imports are here because they import torch, and strategies transformers.
    from moesys.config import Ep, Fsep, Strategy
    from moesys.hf.parallelize import parallelize
    from moesys.verify.__main__ import verify

    shardings = {"ep": Ep(), "lent": Ep(slots_per_rank=5), "fsep": Fsep(slots_per_rank=5)}
    strategies = {
        name: partial(parallelize, strategy=Strategy(name=name, sharding=sharding))
        for name, sharding in shardings.items()
    }
    return verify(given, strategies)
