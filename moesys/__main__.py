"""The command line: ``python -m moesys``, installed as ``moesys``.

A command is imported when it is called, so that ``--help`` does not wait for torch.
"""

from __future__ import annotations

import io
import os
import re
import sys
from importlib import import_module
from typing import Any

import typer
from typer.core import TyperGroup
from typer.main import get_command

from moesys.lab.ranks.process_start import sigterm_as_ctrl_c

# The help of each command, which is the function NAME_command of moesys.lab.commands.NAME.
COMMANDS = {
    "demo": """Train four strategies here, side by side. Then replay their routing on simulated GPUs.

    Under 3 minutes on 2 cores.""",
    "run": """Run an experiment, or what is left of it. Exit code 1 if a trial failed, or parts from what it must
    equal.

    A .py file with experiments(), which returns a list, has them all run, one after another; of a sweep over one number
    of the workload a chart is drawn too.""",
    "compare": "Compare the strategies of run folders. Those of one model, cluster and workload share a table.",
    "bisect": """Find the first tensor in which two strategies differ. Step, tensor with its layer, rank, and by how
    much.

    Both are trained again, in turns, on as many ranks as before, and every tensor is compared bit by bit: outputs and
    gradients of all modules on each rank; gradients of parameters, the norm, parameters and optimizer state whole. Exit
    code 1 if a bit differs. For example: moesys bisect runs/convergence-1234abcd ep fsep""",
    "explain": "Explain one step's plan. What moved and why, bytes by link, who waits for what.",
    "simulate": """Simulate one step of each strategy: how long, what is exposed, and what the step waits for.

    For example: moesys simulate experiments/rebalance_ablation.py --cluster 16x8 --layers 32 --out found; of a whole
    model: moesys simulate --model qwen3-30b-a3b --cluster h100:4 --parallel ep=32,recompute=selective""",
    "tune": """Search the fastest strategy for an experiment, and say why each of its fields is what it is.

    Closed forms rule points out, the cost model ranks the rest; a training's best are timed on real ranks. The same
    command goes on where it was stopped. For example: moesys tune experiments/skew_sweep.py --memory-gb 80""",
    "calibrate": """Measure this machine or cluster, and write it as a ClusterSpec for simulations.

    It measures experts forward and backward, attention, norms, the optimizer, and links inside and between nodes; on
    GPUs also fused tiles and flags. It takes about two minutes on 2 cores. Under torchrun it measures the ranks that
    torchrun started. For example: moesys calibrate --ranks 2 --out here.toml""",
    "plan": """Plan one layer: who holds which expert, who computes what, and how far that can be from the best.

    For example: moesys plan --load load.csv --cluster 4x8 --slots 3 --out plan.json""",
    "leaderboard": """Rank all planners on recorded and generated routing by the simulated seconds of a layer, and write
    pages.

    The default settings take about ten minutes on one core. A planner of yours is a class that extends ms.Balance or
    ms.Split (docs/planners.md). For example: moesys leaderboard --quick --planner my_planners.py:Heaviest; on your
    own routing: moesys leaderboard --trace run.npz --traces-only --model mixtral-8x7b --cluster h100:2 --lag 10""",
    "report": """Make a page of a watched training. Losses, loads by layer, waiting, events; one file, to open in a
    browser.

    It may be asked for while the training runs.""",
    "convert": """Convert a model's checkpoint: of the hub's format to a distributed one, or back.

    The first is what from_pretrained reads, the second what dcp.load reads on any number of ranks, as {"model": ...}.
    Config and tokenizer go along, an optimizer does not. OUT is there when all of it is. For example: moesys convert
    checkpoints/last tuned --config Qwen3-30B-A3B""",
    "doctor": """Check what this machine has and what it lacks. Exit code 1 if something is broken.

    --gpu runs pytest -m gpu tests/gpu of a checkout within ten minutes, alone or as one of torchrun's ranks, and writes
    a report to send back into doctor/. The first failure names the layer that it is in. Without a GPU, the checks that
    can be are rehearsed.""",
}


class Commands(TyperGroup):
    """Lists all commands by the first sentences of their help, and imports the one that is called."""

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        name, command, rest = super().resolve_command(ctx, args)
        return name, imported(name) if name in COMMANDS else command, rest


def imported(name: str) -> Any:
    """Returns the command of ``COMMANDS``, with its options."""
    page = typer.Typer(add_completion=False, rich_markup_mode=None)
    page.command(name, help=COMMANDS[name])(getattr(import_module(f"moesys.lab.commands.{name}"), f"{name}_command"))
    return get_command(page)


def _end(code: int | None, **_: Any) -> None:
    raise typer.Exit(code or 0)


app = typer.Typer(
    name="moesys",
    help="Declare, train and compare strategies for Mixture-of-Experts layers.",
    cls=Commands,
    no_args_is_help=True,
    result_callback=_end,
    pretty_exceptions_enable=False,
    # Plain messages survive a pipe, and --help need not wait for rich.
    rich_markup_mode=None,
)
for _name, _help in COMMANDS.items():
    app.command(_name, help=_help)(lambda: None)


@app.command(
    hidden=True,
    help="Print where the benchmarks are.",
    context_settings={"allow_extra_args": True, "ignore_unknown_options": True},
)
def bench() -> int:
    """Prints where the benchmarks are."""
    print("The benchmarks run from a checkout of moesys: python -m benchmarks --help")
    return 2


def main() -> None:
    """Runs a command. SIGTERM ends it as Ctrl-C does, but with exit code 143 instead of 130: 128 and the signal."""
    for stream in (sys.stdout, sys.stderr):
        # A terminal that is not UTF-8 shows another character for a line of a table, rather than nothing.
        if isinstance(stream, io.TextIOWrapper) and stream.errors == "strict":
            stream.reconfigure(errors="replace")
    for name in ("COLUMNS", "LINES"):
        # Rich takes for a number what is none, and believes 0.
        if not re.fullmatch("[1-9][0-9]{0,3}", os.environ.get(name, "1")):
            del os.environ[name]
    with sigterm_as_ctrl_c() as terminated:
        try:
            app()
        except SystemExit as end:
            if end.code == 130 and terminated.is_set():
                raise SystemExit(143) from None
            raise


if __name__ == "__main__":
    main()
