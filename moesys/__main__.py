"""The command line: ``python -m moesys``, installed as ``moesys``.

Commands import what they need when they run, so that ``--help`` does not wait for torch.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

import typer

from moesys.lab.commands.options import ResultFile, in_a_folder, options_given, refusing, spec_file
from moesys.lab.ranks.process_start import sigterm_as_ctrl_c

app = typer.Typer(
    name="moesys",
    help="Declare, train and compare strategies for Mixture-of-Experts layers.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    # Plain messages survive a pipe, and --help need not wait for rich.
    rich_markup_mode=None,
)

ExperimentFile = Annotated[
    Path,
    typer.Argument(metavar="FILE", help="A .py file with a function that returns an Experiment; or .json, .toml."),
]
ModelLayers = Annotated[
    int | None, typer.Option(min=1, help="Of the whole model, whose memory counts; the workload's by default.")
]
Jobs = Annotated[
    int | None,
    typer.Option(min=1, help="Processes that simulate; one a core by default, 1: no others. The results are the same."),
]
Format = Annotated[
    Literal["table", "markdown", "csv", "json", "latex"],
    typer.Option("--format", help="All but table print nothing else to stdout."),
]


@app.command()
def demo(
    out: Annotated[Path, typer.Option(help="Folder of run folders.")] = Path("runs"),
    fresh: Annotated[bool, typer.Option("--fresh", help="Train again, in new run folders.")] = False,
) -> None:
    """Train four strategies here, side by side. Then replay their routing on simulated GPUs.

    Under 3 minutes on 2 cores.
    """
    from moesys.lab.commands.demo import demo as run_demo

    raise typer.Exit(run_demo(out, fresh=fresh))


@app.command()
def run(
    file: ExperimentFile,
    out: Annotated[Path, typer.Option(help="Folder of run folders.")] = Path("runs"),
    form: Format = "table",
    seeds: Annotated[int | None, typer.Option(min=1, help="Seeds 0 to N-1 in all, instead of the file's.")] = None,
    threads: Annotated[int, typer.Option(min=1, help="Threads of a rank.")] = 1,
    jobs: Jobs = None,
    slurm: Annotated[
        str | None,
        typer.Option(
            metavar="OPTIONS", help="A job of Slurm for each trial: partition=gpu,time=2:00:00, or a .toml or .json."
        ),
    ] = None,
    fail_fast: Annotated[bool, typer.Option("--fail-fast", help="Stop at the first trial that fails.")] = False,
    retry_failed: Annotated[bool, typer.Option("--retry-failed", help="Run trials again that failed before.")] = False,
    fresh: Annotated[bool, typer.Option("--fresh", help="Begin a new run folder.")] = False,
    record_routing: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="A training's routing; {seed} and {strategy} vary."),
    ] = None,
    interpret: Annotated[
        bool, typer.Option("--interpret", help="Experts by the GPU's kernels, slowly, in Triton's interpreter.")
    ] = False,
    strategy: Annotated[
        list[Path] | None,
        typer.Option(
            metavar="FILE", help="A further Strategy, .toml or .json, as moesys tune writes; may be repeated."
        ),
    ] = None,
) -> None:
    """Run an experiment, or what is left of it. Exit code 1 if a trial failed, or parts from what it must equal.

    A .py file with experiments(), which returns a list, has them all run, one after another; of a sweep over one number
    of the workload a chart is drawn too.
    """
    from moesys.lab.commands.run import run_file

    code = run_file(
        file,
        out,
        form,
        num_seeds=seeds,
        threads=threads,
        jobs=jobs,
        slurm=slurm,
        fail_fast=fail_fast,
        retry_failed=retry_failed,
        fresh=fresh,
        record_routing=record_routing,
        interpret=interpret,
        strategies=strategy or (),
    )
    raise typer.Exit(code)


@app.command()
def compare(
    folders: Annotated[list[Path], typer.Argument(metavar="DIR", help="Run folders, as runs/demo-1234abcd.")],
    form: Format = "table",
    metric: Annotated[str | None, typer.Option(help="One metric's samples, such as router_entropy.")] = None,
) -> None:
    """Compare the strategies of run folders. Those of one model, cluster and workload share a table."""
    from moesys.lab.commands.compare import compare_folders

    raise typer.Exit(compare_folders(folders, form, metric))


@app.command()
def bisect(
    run: Annotated[Path, typer.Argument(metavar="RUN", help="A run folder of a training, as runs/demo-1234abcd.")],
    a: Annotated[str, typer.Argument(metavar="A", help="A strategy by name.")],
    b: Annotated[str, typer.Argument(metavar="B", help="Another one, or the same once more.")],
    seed: Annotated[int | None, typer.Option(help="The one whose losses part first by default.")] = None,
) -> None:
    """Find the first tensor in which two strategies differ. Step, tensor with its layer, rank, and by how much.

    Both are trained again, in turns, on as many ranks as before, and every tensor is compared bit by bit: outputs and
    gradients of all modules on each rank; gradients of parameters, the norm, parameters and optimizer state whole. Exit
    code 1 if a bit differs. For example: moesys bisect runs/convergence-1234abcd ep fsep
    """
    from moesys.lab.commands.bisect import bisect_command

    raise typer.Exit(bisect_command(run, a, b, seed))


@app.command()
def explain(
    file: ExperimentFile,
    strategy: Annotated[
        str | None, typer.Option(help="One by name, or a Strategy's .toml or .json; the last by default.")
    ] = None,
    layer: Annotated[int | None, typer.Option(help="In detail; the least even one by default.")] = None,
    micro_batch: Annotated[int | None, typer.Option(help="From 0; the last one by default.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print data instead of a tree.")] = False,
    model_layers: ModelLayers = None,
) -> None:
    """Explain one step's plan. What moved and why, bytes by link, who waits for what."""
    from moesys.lab.commands.explain import explain_command

    raise typer.Exit(explain_command(file, strategy, layer, micro_batch, as_json, model_layers))


# What ``simulate`` takes of a file, and of a model.
_OF_FILE = {"layers", "step", "model_layers"}
_OF_MODEL = {"tokens", "micro_batch", "global_batch", "parallel", "skew", "fp8", "optimizer"}


@app.command()
def simulate(
    ctx: typer.Context,
    file: Annotated[
        Path | None,
        typer.Argument(metavar="[FILE]", help="An experiment in .py, .json or .toml; or a StepPlan in .json."),
    ] = None,
    strategy: Annotated[
        list[str] | None,
        typer.Option(
            help="By name, may be repeated; all by default. With --model: ep, fsep:SLOTS, laer:SLOTS, a file."
        ),
    ] = None,
    layers: Annotated[int | None, typer.Option(min=1, help="Draw so many, or take the first of a trace.")] = None,
    cluster: Annotated[
        str | None,
        typer.Option(
            help="Nodes x ranks a node at the experiment's speeds, as 128x8; nodes of a preset, as h100:16; or a "
            "ClusterSpec in a file."
        ),
    ] = None,
    step: Annotated[int, typer.Option(min=0, help="Of the timed steps, from 0; planners have seen those before.")] = 0,
    draws: Annotated[int, typer.Option(min=1, help="Other seeds, or of a single trace further steps.")] = 8,
    model_layers: ModelLayers = None,
    out: Annotated[
        Path | None, typer.Option(metavar="DIR", help="Write a trace for Perfetto and a chart of each strategy there.")
    ] = None,
    model: Annotated[
        str | None,
        typer.Option(help="A config.json, its folder, or a packaged name, instead of FILE."),
    ] = None,
    tokens: Annotated[int, typer.Option(min=1, help="With --model: of a sequence.")] = 4096,
    micro_batch: Annotated[int, typer.Option(min=1, help="With --model: sequences of a rank at once.")] = 1,
    global_batch: Annotated[int | None, typer.Option(min=1, help="With --model: sequences of a step.")] = None,
    parallel: Annotated[
        str,
        typer.Option(help="With --model: sizes of groups and more, as in tp=2,pp=8,vp=4,ep=32,recompute=selective."),
    ] = "",
    skew: Annotated[float, typer.Option(min=0, help="With --model: of drawn routing; 0: even.")] = 0.0,
    fp8: Annotated[bool, typer.Option("--fp8", help="With --model: products with weights in float8.")] = False,
    optimizer: Annotated[str, typer.Option(help="With --model: adam, adam_bf16 or sgd.")] = "adam",
) -> None:
    """Simulate one step of each strategy: how long, what is exposed, and what the step waits for.

    For example: moesys simulate experiments/rebalance_ablation.py --cluster 16x8 --layers 32 --out found; of a whole
    model: moesys simulate --model qwen3-30b-a3b --cluster h100:4 --parallel ep=32,recompute=selective
    """
    if (file is None) == (model is None):
        raise typer.BadParameter("simulate either FILE or --model; give one of them")
    others, of = (_OF_FILE, "FILE") if file is None else (_OF_MODEL, "--model")
    for name, option in options_given(ctx).items():
        if name in others:
            raise typer.BadParameter(f"{option} is for {of}; leave it out")
    if model is not None:
        from moesys.lab.commands.simulate_model import simulate_model_command

        code = simulate_model_command(
            model,
            cluster,
            strategies=strategy or (),
            parallel=parallel,
            skew=skew,
            draws=draws,
            out=out,
            seq_len=tokens,
            micro_batch=micro_batch,
            global_batch=global_batch,
            fp8=fp8,
            optimizer=optimizer,
        )
        raise typer.Exit(code)
    assert file is not None
    from moesys.lab.commands.simulate import simulate_command

    code = simulate_command(
        file,
        strategies=strategy or (),
        layers=layers,
        cluster=cluster,
        step=step,
        draws=draws,
        model_layers=model_layers,
        out=out,
    )
    raise typer.Exit(code)


@app.command()
def tune(
    file: ExperimentFile,
    space: Annotated[
        Path | None, typer.Option(metavar="SPACE", help="A Space in .json or .toml; by default all that may pay.")
    ] = None,
    out: Annotated[Path, typer.Option(help="Folder of run folders.")] = Path("runs"),
    budget: Annotated[int, typer.Option(min=1, help="Points to look at in the cost model, before neighbours.")] = 256,
    timed: Annotated[
        int | None, typer.Option(min=0, max=30, help="Timed trials; 30 of a training by default, else 0.")
    ] = None,
    seeds: Annotated[int, typer.Option(min=1, help="Of the file's, for the cost model.")] = 2,
    memory_gb: Annotated[
        float | None, typer.Option("--memory-gb", min=0, help="Of a rank, 1e9 bytes; the cluster's by default.")
    ] = None,
    model_layers: ModelLayers = None,
    seed: Annotated[int, typer.Option(min=0, help="Of what the search draws.")] = 0,
    minutes: Annotated[
        float | None, typer.Option(help="Answer after so many with the best until then; when through by default.")
    ] = None,
    threads: Annotated[int, typer.Option(min=1, help="Threads of a rank in timed trials.")] = 1,
    jobs: Jobs = None,
    fresh: Annotated[bool, typer.Option("--fresh", help="Begin anew, and keep the old journal beside.")] = False,
) -> None:
    """Search the fastest strategy for an experiment, and say why each of its fields is what it is.

    Closed forms rule points out, the cost model ranks the rest; a training's best are timed on real ranks. The same
    command goes on where it was stopped. For example: moesys tune experiments/skew_sweep.py --memory-gb 80
    """
    from moesys.lab.commands.tune import tune_file
    from moesys.tuner.space import SearchBounds

    bounds = SearchBounds(budget, seeds, memory_gb, model_layers, seed, minutes, jobs)
    code = tune_file(file, space, bounds, out, timed=timed, threads=threads, fresh=fresh)
    raise typer.Exit(code)


@app.command()
def calibrate(
    ranks: Annotated[int | None, typer.Option(min=1, help="Local ranks; one per core by default, at most 8.")] = None,
    device: Annotated[
        Literal["cpu", "cuda"], typer.Option(help="cuda measures the ranks that torchrun started, one per GPU.")
    ] = "cpu",
    threads: Annotated[int, typer.Option(min=1, help="Threads per rank.")] = 1,
    repeats: Annotated[int, typer.Option(min=1, help="Timed windows of everything.")] = 7,
    out: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="Write the ClusterSpec to this .toml or .json file.", callback=spec_file),
    ] = None,
    page: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Write a page of Markdown to this file.", callback=in_a_folder)
    ] = None,
    json: ResultFile = None,
) -> None:
    """Measure this machine or cluster, and write it as a ClusterSpec for simulations.

    It measures experts forward and backward, attention, norms, the optimizer, and links inside and between nodes; on
    GPUs also fused tiles and flags. It takes about two minutes on 2 cores. Under torchrun it measures the ranks that
    torchrun started. For example: moesys calibrate --ranks 2 --out here.toml
    """
    from moesys.lab.commands.calibrate import calibrate_command

    code = calibrate_command(ranks, device, threads=threads, repeats=repeats, out=out, page=page, json_path=json)
    raise typer.Exit(code)


@app.command()
def plan(
    load: Annotated[
        Path, typer.Option(metavar="FILE", help="Tokens [rank, expert] as .npy, .csv or .json; or a trace, .npz.")
    ],
    cluster: Annotated[
        str,
        typer.Option(
            help="Nodes x ranks a node, as 4x8; nodes of a preset, as h100:4; or a ClusterSpec in .json or .toml."
        ),
    ],
    slots: Annotated[int | None, typer.Option(min=1, help="Slots a rank; one more than needed by default.")] = None,
    balance: Annotated[str, typer.Option(help='A kind, or its JSON: {"kind": "greedy", "effort": 4}.')] = "greedy",
    split: Annotated[str, typer.Option(help='A kind, or its JSON: {"kind": "flow", "max_inter_node": 0.1}.')] = "flow",
    previous: Annotated[Path | None, typer.Option(help="A plan that --out wrote: the layout in force.")] = None,
    out: Annotated[Path | None, typer.Option(help="Write plan and certificate to this file, as JSON.")] = None,
    micro_batch: Annotated[int | None, typer.Option(help="Of the trace, from 0; the last by default.")] = None,
    layer: Annotated[int | None, typer.Option(help="Of the trace; the first by default.")] = None,
) -> None:
    """Plan one layer: who holds which expert, who computes what, and how far that can be from the best.

    For example: moesys plan --load load.csv --cluster 4x8 --slots 3 --out plan.json
    """
    from moesys.lab.commands.plan import LoadFile, plan_command

    code = plan_command(
        LoadFile(load, micro_batch, layer),
        cluster,
        slots=slots,
        balance=balance,
        split=split,
        previous=previous,
        out=out,
    )
    raise typer.Exit(code)


@app.command()
def leaderboard(
    out: Annotated[
        Path, typer.Option(metavar="DIR", help="Folder of pages and results; the same folder resumes a stopped run.")
    ] = Path("leaderboard"),
    planner: Annotated[
        list[str] | None,
        typer.Option(
            metavar="PLANNER",
            help="A planner of yours as FILE.py:CLASS or module:CLASS, or a kind with fields as JSON; may be repeated.",
        ),
    ] = None,
    trace: Annotated[
        list[Path] | None, typer.Option(metavar="FILE", help="A recorded trace as a workload; may be repeated.")
    ] = None,
    traces_only: Annotated[bool, typer.Option("--traces-only", help="No workloads except --trace.")] = False,
    model: Annotated[
        str | None, typer.Option(help="A config.json, its folder or a packaged name; default: models by workload.")
    ] = None,
    cluster: Annotated[
        str | None, typer.Option(help="As 2x8 or h100:4, or a ClusterSpec in a file; default: clusters by workload.")
    ] = None,
    slots: Annotated[
        int | None, typer.Option(min=1, help="Slots per rank; default: a rule for each group of planners.")
    ] = None,
    lag: Annotated[
        int, typer.Option(min=1, help="Micro-batches from the newest load that a layout is planned on to its use.")
    ] = 1,
    predictor: Annotated[str, typer.Option(help="A kind or its JSON: the load that layouts are planned on.")] = "last",
    seeds: Annotated[
        int, typer.Option(min=1, help="Draws of each workload, and parts of each recording; packaged ones have 4.")
    ] = 3,
    quick: Annotated[bool, typer.Option("--quick", help="Two small settings, in seconds.")] = False,
) -> None:
    """Rank all planners on recorded and generated routing by the simulated seconds of a layer, and write pages.

    The default settings take about ten minutes on one core. A planner of yours is a class that extends ms.Balance or
    ms.Split (docs/leaderboard.md). For example: moesys leaderboard --quick --planner my_planners.py:Heaviest; on your
    own routing: moesys leaderboard --trace run.npz --traces-only --model mixtral-8x7b --cluster h100:2 --lag 10
    """
    from moesys.lab.commands.leaderboard import LeaderboardOptions, leaderboard_command

    options = LeaderboardOptions(
        seeds, quick, planner or (), trace or (), traces_only, model, cluster, slots, lag, predictor
    )
    with refusing():
        code = leaderboard_command(out, options)
    raise typer.Exit(code)


@app.command()
def report(
    folder: Annotated[Path, typer.Argument(metavar="DIR", help="What ms.Watch or ms.hf.WatchCallback wrote to.")],
    out: Annotated[
        Path | None, typer.Option(metavar="FILE", help="The page; report.html in the folder by default.")
    ] = None,
) -> None:
    """Make a page of a watched training. Losses, loads by layer, waiting, events; one file, to open in a browser.

    It may be asked for while the training runs.
    """
    from moesys.lab.commands.report import report_command

    raise typer.Exit(report_command(folder, out))


@app.command()
def convert(
    source: Annotated[
        Path,
        typer.Argument(
            metavar="SOURCE", help="A model's folder as from the hub; or a checkpoint of torch.distributed.checkpoint."
        ),
    ],
    out: Annotated[Path, typer.Argument(metavar="OUT", help="The folder to make: of the other format.")],
    config: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="The model's config.json, or its folder, where SOURCE does not have it."),
    ] = None,
) -> None:
    """Convert a model's checkpoint: of the hub's format to a distributed one, or back.

    The first is what from_pretrained reads, the second what dcp.load reads on any number of ranks, as {"model": ...}.
    Config and tokenizer go along, an optimizer does not. OUT is there when all of it is. For example: moesys convert
    checkpoints/last tuned --config Qwen3-30B-A3B
    """
    from moesys.lab.commands.convert import convert_command

    raise typer.Exit(convert_command(source, out, config))


@app.command()
def doctor(
    as_json: Annotated[bool, typer.Option("--json", help="Print data instead of a table.")] = False,
    gpu: Annotated[
        bool, typer.Option("--gpu", help="Test this machine's GPUs layer by layer, then time them.")
    ] = False,
) -> None:
    """Check what this machine has and what it lacks. Exit code 1 if something is broken.

    --gpu runs pytest -m gpu tests/gpu of a checkout within ten minutes, alone or as one of torchrun's ranks, and writes
    a report to send back into doctor/. The first failure names the layer that it is in. Without a GPU, the checks that
    can be are rehearsed.
    """
    from moesys.lab.commands.doctor import doctor_command, gpu_command

    if gpu and as_json:
        raise typer.BadParameter(
            "--json prints what this machine has; --gpu writes doctor/doctor.json; give one of them"
        )
    raise typer.Exit(gpu_command() if gpu else doctor_command(as_json))


@app.command(hidden=True, context_settings={"allow_extra_args": True, "ignore_unknown_options": True})
def bench() -> None:
    """Print where the benchmarks are."""
    print("The benchmarks run from a checkout of moesys: python -m benchmarks --help")
    raise typer.Exit(2)


def main() -> None:
    """Runs a command. SIGTERM ends it as Ctrl-C does, but with exit code 143 instead of 130: 128 and the signal."""
    with sigterm_as_ctrl_c() as terminated:
        try:
            app()
        except SystemExit as end:
            if end.code == 130 and terminated.is_set():
                raise SystemExit(143) from None
            raise


if __name__ == "__main__":
    main()
