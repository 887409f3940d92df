"""The command line: ``python -m moesys``, installed as ``moesys``.

A command is imported when it is called, so that ``--help`` does not wait for torch.
"""

from __future__ import annotations

import io
import os
import re
import sys
from importlib.metadata import version
from typing import Annotated

import typer

from moesys.lab.commands.options import CommandPage, command_line
from moesys.lab.ranks.process_start import sigterm_as_ctrl_c

RUN, SIMULATE = "Run and compare", "Simulate and plan"
CHECKPOINTS, MACHINE = "Checkpoints", "This machine"

COMMANDS = {
    "run": CommandPage(
        "moesys.lab.commands.run:run_command",
        RUN,
        "Run an experiment, or the trials of it that are left.",
        "If FILE has a function experiments() that returns a list, all of them run one after another.\n\n"
        "Exit code 1: a trial failed, or has other bits than it must have.",
        (
            "moesys run experiments/overlap_ablation.py",
            "moesys run experiments/skew_sweep.py --seeds 2 --out sweeps",
            "moesys run first.py --set strategies.1.overlap.chunks=2,4",
        ),
    ),
    "compare": CommandPage(
        "moesys.lab.commands.compare:compare_command",
        RUN,
        "Compare the strategies of run folders in a table.",
        "Run folders with the same model, cluster and workload share a table. Folders of ms.Watch, or folders with "
        "one of these for each seed, are compared with the first one.",
        (
            "moesys compare runs/demo-1234abcd",
            "moesys compare runs/first-1234abcd runs/more-1234abcd --json",
            "moesys compare runs/demo-1234abcd --metric router_entropy",
            "moesys compare watched/ep watched/fsep",
        ),
    ),
    "bisect": CommandPage(
        "moesys.lab.commands.bisect:bisect_command",
        RUN,
        "Find the first tensor in which two strategies differ.",
        "Both strategies are trained again, and every tensor is compared bit by bit. The result names the step, the "
        "tensor with its layer, and the rank.\n\n"
        "Exit code 1: a bit differs.",
        ("moesys bisect runs/convergence-1234abcd ep fsep", "moesys bisect runs/demo-1234abcd ep ep --seed 0"),
    ),
    "verify": CommandPage(
        "moesys.lab.commands.verify:verify_command",
        RUN,
        "Check that a training on ranks computes what one process does.",
        "CHECK builds your training, whatever you train with, for one process and for ranks. Losses, chosen experts, "
        "gradients, norm, updates, buffers and checkpoints are compared; what differs is named with its factor, its "
        "cause and a way out. python -m moesys.verify is the same command, and needs torch alone.\n\n"
        "Exit code 1: the training is wrong. 2: it could not be checked.",
        ("moesys verify check.py", "moesys verify --model qwen3_moe --parallel fsdp=2,ep=2 --situations plain"),
    ),
    "report": CommandPage(
        "moesys.lab.commands.compare:report_command",
        RUN,
        "Write the page of a run or a watched training, or list several.",
        "The page is one HTML file, which needs no other. That of a training can be written while it runs.",
        ("moesys report runs/first", "moesys report runs/first --out page.html"),
    ),
    "simulate": CommandPage(
        "moesys.lab.commands.simulate:simulate_command",
        SIMULATE,
        "Simulate one step of each strategy, or of a whole model.",
        "The tables show how long the step takes, which communication is exposed, and what the step waits for.",
        (
            "moesys simulate experiments/rebalance_ablation.py --cluster 16x8 -o found",
            "moesys simulate --model qwen3-30b-a3b --cluster h100:4 --parallel ep=32",
        ),
    ),
    "tune": CommandPage(
        "moesys.lab.commands.tune:tune_command",
        SIMULATE,
        "Search for the fastest strategy, with reasons for each field.",
        "The best ones for a training are also timed on ranks. The same command continues a search that was stopped.",
        (
            "moesys tune experiments/skew_sweep.py --memory-gb 80",
            "moesys tune experiments/skew_sweep.py --budget 32 --jobs 1",
        ),
    ),
    "explain": CommandPage(
        "moesys.lab.commands.explain:explain_command",
        SIMULATE,
        "Explain the plan of one step: moves, traffic, critical path.",
        "The tree shows what moved and why, the bytes on each kind of link, and which rank waits for what.",
        (
            "moesys explain experiments/rebalance_ablation.py",
            "moesys explain experiments/rebalance_ablation.py --strategy greedy --layer 0",
        ),
    ),
    "plan": CommandPage(
        "moesys.lab.commands.plan_load:plan_command",
        SIMULATE,
        "Plan one layer, and bound how far the plan is from the best.",
        "The tree shows which rank holds which experts and how many tokens it computes.",
        (
            "moesys plan --load load.csv --cluster 4x8 --slots 3 --out plan.json",
            "moesys plan --load trace.npz --cluster h100:4 --layer 2 --previous plan.json",
        ),
    ),
    "convert": CommandPage(
        "moesys.lab.commands.convert_checkpoint:convert_command",
        CHECKPOINTS,
        "Convert a checkpoint: the hub's format to torch's, or back.",
        "from_pretrained reads the hub's format, dcp.load the other one, on any number of ranks, under the key "
        '"model". Config and tokenizer are copied, the optimizer is not.',
        ("moesys convert Qwen3-30B-A3B start", "moesys convert checkpoints/last tuned --config Qwen3-30B-A3B"),
    ),
    "doctor": CommandPage(
        "moesys.lab.commands.doctor:doctor_command",
        MACHINE,
        "Say what works on this machine, and how to get the rest.",
        "With --gpu it runs the GPU checks of a checkout (pytest -m gpu tests/gpu) within ten minutes, alone or as one "
        "of torchrun's ranks, and writes a report into doctor/. The first failure names the layer that it is "
        "in.\n\n"
        "Exit code 1: something is broken, or a GPU check failed.",
        ("moesys doctor", "moesys doctor --gpu", "torchrun --nproc-per-node 8 -m moesys doctor --gpu"),
    ),
    "calibrate": CommandPage(
        "moesys.lab.commands.calibrate:calibrate_command",
        MACHINE,
        "Measure this machine or cluster for simulations.",
        "On 2 cores it takes about two minutes. Under torchrun it measures the ranks that torchrun started.",
        (
            "moesys calibrate --ranks 2 --out here",
            "moesys simulate experiments/skew_sweep.py --cluster here/cluster.toml",
        ),
    ),
}

app = command_line("moesys", "Declare, train and compare strategies for Mixture-of-Experts layers.", COMMANDS)


def _print_version(asked: bool) -> None:
    if asked:
        print(f"moesys {version('moesys')}")
        raise typer.Exit


@app.callback()
def options(
    _version: Annotated[
        bool, typer.Option("--version", help="Print the version and exit.", callback=_print_version, is_eager=True)
    ] = False,
) -> None:
    """Takes the options of moesys itself."""


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
        except BaseException as end:
            # Python 3.11 makes a RuntimeError of an interruption while it defines some classes, as imports do.
            if KeyboardInterrupt in (type(end), type(end.__cause__)) or getattr(end, "code", 0) == 130:
                raise SystemExit(143 if terminated.is_set() else 130) from None
            raise


if __name__ == "__main__":
    main()
