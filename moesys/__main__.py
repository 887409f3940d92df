"""The command line: ``python -m moesys``, installed as ``moesys``.

Commands import what they need when they run, so that ``--help`` does not wait for torch.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

import typer

app = typer.Typer(
    name="moesys",
    help="Declare, train and compare strategies for Mixture-of-Experts layers.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    # Plain messages survive a pipe, and --help need not wait for rich.
    rich_markup_mode=None,
)
bench = typer.Typer(help="Measure on this machine.", no_args_is_help=True, rich_markup_mode=None)
app.add_typer(bench, name="bench")

ExperimentFile = Annotated[
    Path,
    typer.Argument(metavar="FILE", help="A .py file with a function that returns an Experiment; or .json, .toml."),
]
Format = Annotated[
    Literal["table", "markdown", "csv", "json", "latex"],
    typer.Option("--format", help="All but table print nothing else to stdout."),
]


def _in_a_folder(path: Path | None) -> Path | None:
    """Refuses what could not be written when all is measured."""
    if path is not None and not path.parent.is_dir():
        raise typer.BadParameter(f"{path.parent} is not a folder; make it, or write elsewhere")
    if path is not None and path.is_dir():
        raise typer.BadParameter(f"{path} is a folder; name a file in it")
    return path


ResultFile = Annotated[
    Path | None, typer.Option(metavar="FILE", help="Write what was measured to this file.", callback=_in_a_folder)
]


@app.command()
def demo(
    out: Annotated[Path, typer.Option(help="Folder of run folders.")] = Path("runs"),
    fresh: Annotated[bool, typer.Option("--fresh", help="Train again, in new run folders.")] = False,
) -> None:
    """Train four strategies here, side by side. Then replay their routing on a cluster of 32 GPUs.

    Under 3 minutes on 2 cores.
    """
    from moesys.lab.demo import demo as run_demo

    raise typer.Exit(run_demo(out, fresh=fresh))


@app.command()
def run(
    file: ExperimentFile,
    out: Annotated[Path, typer.Option(help="Folder of run folders.")] = Path("runs"),
    form: Format = "table",
    seeds: Annotated[int | None, typer.Option(min=1, help="Seeds 0 to N-1 in all, instead of the file's.")] = None,
    threads: Annotated[int, typer.Option(min=1, help="Threads of a rank.")] = 1,
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
    """Run an experiment, or what is left of it. Exit code 1 if a trial failed.

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
def explain(
    file: ExperimentFile,
    strategy: Annotated[
        str | None, typer.Option(help="One by name, or a Strategy's .toml or .json; the last by default.")
    ] = None,
    layer: Annotated[int | None, typer.Option(help="In detail; the least even one by default.")] = None,
    micro_batch: Annotated[int | None, typer.Option(help="From 0; the last one by default.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print data instead of a tree.")] = False,
) -> None:
    """Explain one step's plan. What moved and why, bytes by link, who waits for what."""
    from moesys.lab.explain_tree import explain_command

    raise typer.Exit(explain_command(file, strategy, layer, micro_batch, as_json))


@app.command()
def simulate(
    file: Annotated[
        Path, typer.Argument(metavar="FILE", help="An experiment in .py, .json or .toml; or a StepPlan in .json.")
    ],
    strategy: Annotated[list[str] | None, typer.Option(help="By name, may be repeated; all by default.")] = None,
    layers: Annotated[int | None, typer.Option(min=1, help="Draw so many, or take the first of a trace.")] = None,
    cluster: Annotated[
        str | None,
        typer.Option(
            help="Nodes x ranks a node at the experiment's speeds, as 128x8; nodes of a preset, as h100:16; or a "
            "ClusterSpec in a file."
        ),
    ] = None,
    step: Annotated[int, typer.Option(min=0, help="Of the timed steps, from 0; planners have seen those before.")] = 0,
    out: Annotated[
        Path | None, typer.Option(metavar="DIR", help="Write a trace for Perfetto and a chart of each strategy there.")
    ] = None,
) -> None:
    """Simulate one step of each strategy: how long, what is exposed, and what the step waits for.

    For example: moesys simulate experiments/rebalance_ablation.py --cluster 16x8 --layers 32 --out found
    """
    from moesys.lab.commands.simulate import simulate_command

    code = simulate_command(file, strategies=strategy or (), layers=layers, cluster=cluster, step=step, out=out)
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
    seeds: Annotated[int | None, typer.Option(min=1, help="Of the file's, for the cost model; 2 by default.")] = None,
    memory_gb: Annotated[
        float | None, typer.Option("--memory-gb", min=0, help="Of a rank, 1e9 bytes; enough by default.")
    ] = None,
    seed: Annotated[int, typer.Option(min=0, help="Of what the search draws.")] = 0,
    threads: Annotated[int, typer.Option(min=1, help="Threads of a rank in timed trials.")] = 1,
    fresh: Annotated[bool, typer.Option("--fresh", help="Begin anew, and keep the old journal beside.")] = False,
) -> None:
    """Search the fastest strategy for an experiment, and say why each of its fields is what it is.

    Closed forms rule points out, the cost model ranks the rest; a training's best are timed on real ranks. The same
    command goes on where it was stopped. For example: moesys tune experiments/skew_sweep.py --memory-gb 80
    """
    from moesys.lab.commands.tune import tune_file

    code = tune_file(
        file,
        space,
        out,
        budget=budget,
        timed=timed,
        num_seeds=seeds,
        memory_gb=memory_gb,
        seed=seed,
        threads=threads,
        fresh=fresh,
    )
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
    from moesys.lab.commands.plan import plan_command

    code = plan_command(
        load,
        cluster,
        slots=slots,
        balance=balance,
        split=split,
        previous=previous,
        out=out,
        micro_batch=micro_batch,
        layer=layer,
    )
    raise typer.Exit(code)


@app.command()
def doctor(as_json: Annotated[bool, typer.Option("--json", help="Print data instead of a table.")] = False) -> None:
    """Say what this machine has, and what it lacks. Exit code 1 if something is broken."""
    from moesys.lab.doctor import doctor_command

    raise typer.Exit(doctor_command(as_json))


@bench.command("layer")
def bench_layer(
    shape: Annotated[str, typer.Option(help="One shape by name, or all.")] = "all",
    dtype: Annotated[str, typer.Option(help="float32, bfloat16 or all.")] = "all",
    tokens: Annotated[int | None, typer.Option(min=1, help="Tokens, instead of the shape's own number.")] = None,
    repeats: Annotated[int, typer.Option(min=1, help="Timed repetitions.")] = 9,
    threads: Annotated[int | None, typer.Option(min=1, help="Threads; torch's own choice by default.")] = None,
    json: ResultFile = None,
) -> None:
    """Compare one rank of MoELayer with transformers' own blocks. Exit code 1 if an output is wrong."""
    from moesys.lab.bench import layer

    try:
        layer.select(shape, dtype)
    except ValueError as error:
        raise typer.BadParameter(str(error)) from None
    code = layer.main(shape, dtype, num_tokens=tokens, repeats=repeats, threads=threads, json_path=json)
    raise typer.Exit(code)


@bench.command("kernels")
def bench_kernels(
    aot: Annotated[bool, typer.Option("--aot", help="Compile for a Hopper GPU and read the machine code.")] = False,
    tune: Annotated[bool, typer.Option("--tune", help="Find the fastest blocks on this GPU, and keep them.")] = False,
    mega: Annotated[bool, typer.Option(help="With --aot: MegaKernels too.")] = True,
    size: Annotated[str, typer.Option(help="By name, with commas; one with --aot or --tune; or all.")] = "all",
    routing: Annotated[str, typer.Option(help="uniform, balanced, zipf, k-experts, router, or all.")] = "all",
    contestants: Annotated[str, typer.Option(help="moesys, grouped_mm, 'grouped_mm compiled', transformers.")] = "all",
    peer: Annotated[
        list[str] | None,
        typer.Option(metavar="NAME=DIR", help="scattermoe, liger or sonicmoe in DIR; may be repeated."),
    ] = None,
    dtype: Annotated[str, typer.Option(help="bfloat16, float16 or float32.")] = "bfloat16",
    repeats: Annotated[int, typer.Option(min=0, help="Timed repetitions; 0 only checks.")] = 15,
    device: Annotated[str, typer.Option(help="cuda; or cpu, which rehearses a toy in Triton's interpreter.")] = "cuda",
    extras: Annotated[bool, typer.Option(help="Check graphs, compile, checkpoints and large offsets too.")] = True,
    out: Annotated[Path | None, typer.Option(metavar="DIR", help="Write kernels.json and kernels.md there.")] = None,
    json: ResultFile = None,
) -> None:
    """Check and time the kernels of one device beside others', on a GPU; read them with --aot, tune them with --tune.

    Exit code 1 if a check of ours fails. For example: moesys bench kernels --size olmoe,30b --routing zipf --out found
    """
    if aot and tune:
        raise typer.BadParameter("--aot and --tune are two commands; give one of them")
    if json is not None and not aot:
        raise typer.BadParameter("--json is for --aot alone; to keep what is timed give --out DIR")
    if aot or tune:
        from moesys.lab.bench import kernels_aot_report, kernels_tune

        try:
            kernels_aot_report.select(size)
        except ValueError as error:
            raise typer.BadParameter(str(error)) from None
        raise typer.Exit(kernels_tune.main(size) if tune else kernels_aot_report.main(size, json, mega))
    from moesys.lab.bench import kernels

    try:
        plan = kernels.plan(
            size,
            routing,
            contestants,
            peers=peer or (),
            dtype=dtype,
            repeats=repeats,
            extras=extras,
            device=device,
        )
    except ValueError as error:
        raise typer.BadParameter(str(error)) from None
    raise typer.Exit(kernels.main(plan, out))


@bench.command("overlap")
def bench_overlap(
    part: Annotated[str, typer.Option(help="chunks, experts or all; or mega, MegaKernels on a GPU.")] = "all",
    tokens: Annotated[
        int | None, typer.Option(min=1, help="Tokens of a rank, instead of the part's own number.")
    ] = None,
    repeats: Annotated[int, typer.Option(min=1, help="Timed repetitions.")] = 9,
    threads: Annotated[int, typer.Option(min=1, help="Threads of a rank.")] = 1,
    size: Annotated[str, typer.Option(help="Of --part mega: a layer by name.")] = "qwen3-30b",
    dtype: Annotated[str, typer.Option(help="Of --part mega: bfloat16, float16 or float32.")] = "bfloat16",
    gb_per_s: Annotated[float, typer.Option("--gb-per-s", help="Of --part mega: the pace of a rank's link.")] = 100.0,
    device: Annotated[str, typer.Option(help="Of --part mega: cuda; or cpu, which rehearses a toy.")] = "cuda",
    out: Annotated[
        Path | None, typer.Option(metavar="DIR", help="Of --part mega: overlap_mega.json and .md there.")
    ] = None,
    json: ResultFile = None,
) -> None:
    """Compare sequential with overlapped runs over paced links. Exit code 1 if a bit differs."""
    if part == "mega":
        from moesys.lab.bench import mega

        try:
            asked = mega.plan(size, dtype=dtype, gb_per_s=gb_per_s, num_tokens=tokens, repeats=repeats, device=device)
        except ValueError as error:
            raise typer.BadParameter(str(error)) from None
        raise typer.Exit(mega.main(asked, out))
    from moesys.lab.bench import overlap

    try:
        overlap.select(part)
    except ValueError as error:
        raise typer.BadParameter(str(error)) from None
    raise typer.Exit(overlap.main(part, num_tokens=tokens, repeats=repeats, threads=threads, json_path=json))


ReportFolder = Annotated[
    Path | None,
    typer.Option(
        "--out", metavar="DIR", help="Write the tables as a dated page into this folder.", exists=True, file_okay=False
    ),
]


@bench.command("reproduce")
def bench_reproduce(
    out: ReportFolder = None,
    planners: Annotated[bool, typer.Option(help="Time planners too, the one part that is measured.")] = True,
    fit: Annotated[bool, typer.Option("--fit", help="Fit the free constants again, for minutes.")] = False,
) -> None:
    """Simulate LAER-MoE's published measurements, with the error of every figure.

    24 rows of three methods, breakdown, ablation; the constants and their sources.
    """
    from moesys.lab.bench import reproduce_main

    raise typer.Exit(reproduce_main.main(out, with_planners=planners, with_fit=fit))


@bench.command("uniep")
def bench_uniep(out: ReportFolder = None) -> None:
    """Simulate MegaKernels against one stage after another on Hopper, beside the range that UniEP published."""
    from moesys.lab.bench import uniep_report

    raise typer.Exit(uniep_report.main(out))


@bench.command("beyond")
def bench_beyond(out: ReportFolder = None) -> None:
    """Simulate what lies beyond LAER-MoE: on its 24 rows, and on three models and 8 to 1,024 GPUs.

    Stage by stage: static, LAER's layout, flow split, our layout, overlap.
    """
    from moesys.lab.bench import beyond_report

    raise typer.Exit(beyond_report.main(out))


@bench.command("planner")
def bench_planner(
    trace: Annotated[Path | None, typer.Option(help="Replay this trace; docs/traces.md says how to make one.")] = None,
    ranks_per_node: Annotated[int | None, typer.Option(min=1, help="Of the trace's ranks; all by default.")] = None,
    slots: Annotated[
        list[int] | None, typer.Option(min=1, help="Slots a rank, may be repeated; one more than needed by default.")
    ] = None,
    lag: Annotated[int, typer.Option(min=1, help="Iterations from the newest load planned on to the one scored.")] = 10,
    from_iteration: Annotated[int | None, typer.Option(help="Score from this iteration on.")] = None,
    to_iteration: Annotated[int | None, typer.Option(help="Score up to this iteration.")] = None,
    layers: Annotated[list[int] | None, typer.Option(help="Of the trace, may be repeated; all by default.")] = None,
    every: Annotated[int, typer.Option(min=1, help="Score every N-th micro-batch.")] = 1,
    balance: Annotated[list[str] | None, typer.Option(help="A kind or its JSON, may be repeated.")] = None,
    split: Annotated[list[str] | None, typer.Option(help="A kind or its JSON, may be repeated.")] = None,
    predictor: Annotated[list[str] | None, typer.Option(help="A kind or its JSON, may be repeated.")] = None,
    laer: Annotated[bool, typer.Option("--laer", help="LAER-MoE's two settings, on routing like its own.")] = False,
    scale: Annotated[bool, typer.Option("--scale", help="Known loads from 8 to 1024 ranks.")] = False,
    peer_eplb: Annotated[
        Path | None, typer.Option(metavar="DIR", help="--scale also times this checkout of deepseek-ai/EPLB.")
    ] = None,
    seeds: Annotated[int, typer.Option(min=1, help="Of drawn loads: --laer and --scale.")] = 3,
    repeats: Annotated[int, typer.Option(min=1, help="Timed repetitions of --scale.")] = 9,
    json: ResultFile = None,
) -> None:
    """Compare planners: --trace FILE, --laer or --scale.

    Layouts are planned on the past only, and the tokens of a later micro-batch are split over them. For example:
    moesys bench planner --trace run.npz --ranks-per-node 8 --slots 3 --slots 4 --lag 10
    """
    from moesys.lab.bench import planner
    from moesys.lab.choices import balance_of, predictor_of, split_of

    if (trace is not None) + laer + scale != 1:
        raise typer.BadParameter("give one of --trace FILE, --laer and --scale")
    for_traces = {
        "--ranks-per-node": ranks_per_node is not None,
        "--slots": bool(slots),
        "--lag": lag != 10,
        "--from-iteration": from_iteration is not None,
        "--to-iteration": to_iteration is not None,
        "--layers": bool(layers),
        "--every": every != 1,
    }
    chosen_from = {"--balance": bool(balance), "--split": bool(split), "--predictor": bool(predictor)}
    for_scale = {"--peer-eplb": peer_eplb is not None, "--repeats": repeats != 9}
    if scale:
        mode, refused = "--scale", for_traces | chosen_from
    elif laer:
        mode, refused = "--laer", for_traces | for_scale
    else:
        mode, refused = "--trace", for_scale | {"--seeds": seeds != 3}
    if unused := [name for name, given in refused.items() if given]:
        raise typer.BadParameter(f"{unused[0]} is not for {mode}; leave it out")
    try:
        if scale:
            from moesys.lab.bench import planner_scale

            raise typer.Exit(planner_scale.main(num_seeds=seeds, repeats=repeats, peer_path=peer_eplb, json_path=json))
        chosen = planner.contenders(
            [balance_of(text) for text in balance or ()],
            [split_of(text) for text in split or ()],
            [predictor_of(text) for text in predictor or ()],
        )
        if laer:
            raise typer.Exit(planner.main_laer(chosen if balance or split or predictor else None, seeds, json))
        assert trace is not None
        code = planner.main_trace(
            trace,
            ranks_per_node=ranks_per_node,
            slots=slots or (),
            chosen=chosen,
            lag=lag,
            from_iteration=from_iteration,
            to_iteration=to_iteration,
            layers=layers or (),
            every=every,
            json_path=json,
        )
    except ValueError as error:
        raise typer.BadParameter(str(error)) from None
    raise typer.Exit(code)


def _spec_file(path: Path | None) -> Path | None:
    if path is not None and path.suffix not in (".toml", ".json"):
        raise typer.BadParameter(f"{path} is neither .toml nor .json; name a file of one of these kinds")
    return _in_a_folder(path)


@bench.command("calibrate")
def bench_calibrate(
    ranks: Annotated[int | None, typer.Option(min=1, help="Local ranks; one a core by default, at most 8.")] = None,
    device: Annotated[Literal["cpu", "cuda"], typer.Option(help="cuda takes the ranks of torchrun.")] = "cpu",
    threads: Annotated[int, typer.Option(min=1, help="Threads of a rank.")] = 1,
    repeats: Annotated[int, typer.Option(min=1, help="Timed windows of everything.")] = 7,
    out: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="Write the ClusterSpec there, .toml or .json.", callback=_spec_file),
    ] = None,
    json: ResultFile = None,
) -> None:
    """Measure this machine or cluster, and write it down as a ClusterSpec for simulations.

    Under torchrun it measures the ranks that torchrun started, links inside hosts and between them apart. For example:
    moesys bench calibrate --ranks 2 --out here.toml
    """
    from moesys.lab.bench import calibrate_report

    try:
        calibrate_report.check(ranks, device)
    except ValueError as error:
        raise typer.BadParameter(str(error)) from None
    code = calibrate_report.main(ranks, device, threads=threads, repeats=repeats, out=out, json_path=json)
    raise typer.Exit(code)


@bench.command("shaped")
def bench_shaped(
    hosts: Annotated[list[int] | None, typer.Option(help="2 or 4, may be repeated; both by default.")] = None,
    mbit: Annotated[
        list[float] | None, typer.Option(help="Of each link, may be repeated; instead of the cases' own.")
    ] = None,
    latency_us: Annotated[
        float | None, typer.Option("--latency-us", help="Between hosts, one way; instead of the cases' own.")
    ] = None,
    repeats: Annotated[int, typer.Option(min=1, help="Timed repetitions.")] = 7,
    out: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Write a page there, in Markdown.", callback=_in_a_folder)
    ] = None,
    json: ResultFile = None,
) -> None:
    """Measure overlap and splits between hosts with slow links, and see how far the simulator is. Linux, root.

    Hosts are network namespaces of this machine. All cases take about six minutes on 2 cores. Exit code 1 if a bit
    differs. For example: moesys bench shaped --hosts 2 --mbit 100 --mbit 500 --out shaped.md
    """
    from moesys.lab.bench import shaped

    try:
        asked = shaped.plan(hosts or (2, 4), mbit or (), latency_us)
    except ValueError as error:
        raise typer.BadParameter(str(error)) from None
    raise typer.Exit(shaped.main(asked, repeats=repeats, out=out, json_path=json))


@bench.command("simulate")
def bench_simulate(
    overlap: Annotated[str, typer.Option(help="sequential, pipelined, mega_kernel or all.")] = "sequential",
    most_ranks: Annotated[int, typer.Option(min=1, help="Leave larger clusters out.")] = 1024,
    repeats: Annotated[int, typer.Option(min=1, help="Timed repetitions.")] = 3,
    json: ResultFile = None,
) -> None:
    """Time the simulator: one layer on 32 ranks, 32 layers on up to 1,024."""
    from moesys.lab.bench import simulate as bench_of

    try:
        bench_of.select(overlap)
    except ValueError as error:
        raise typer.BadParameter(str(error)) from None
    raise typer.Exit(bench_of.main(overlap, most_ranks=most_ranks, repeats=repeats, json_path=json))


def main() -> None:
    app()


if __name__ == "__main__":
    main()
