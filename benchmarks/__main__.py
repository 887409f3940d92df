"""The command line of the benchmarks: ``python -m benchmarks NAME`` in the root of a checkout.

Commands import what they need when they run, so that ``--help`` does not wait for torch.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

import typer

from benchmarks.board.command import bench_leaderboard
from benchmarks.harness.grouped_commands import GroupedCommands
from moesys.lab.commands.options import ReportFolder, ResultFile, in_a_folder, options_given, refusing
from moesys.lab.ranks.process_start import sigterm_as_ctrl_c

COMPUTING, LINKS, PUBLISHED = "Computing, measured here", "Links, measured here", "Published, and simulated beside it"


app = typer.Typer(
    name="benchmarks",
    help="Measure on this machine, or simulate what others measured.",
    cls=GroupedCommands,
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
)

app.command("leaderboard", rich_help_panel=COMPUTING)(bench_leaderboard)


Repeats = Annotated[int, typer.Option(min=1, help="Timed repetitions.")]
Threads = Annotated[int, typer.Option(min=1, help="Threads of a rank.")]
Kinds = Annotated[list[str] | None, typer.Option(help="A kind or its JSON, may be repeated.")]


@app.command("layer", rich_help_panel=COMPUTING)
def bench_layer(
    shape: Annotated[str, typer.Option(help="By name, with commas, or all.")] = "all",
    dtype: Annotated[str, typer.Option(help="float32, bfloat16 or all.")] = "all",
    tokens: Annotated[int | None, typer.Option(min=1, help="Tokens, instead of the shape's own number.")] = None,
    repeats: Repeats = 9,
    threads: Annotated[int | None, typer.Option(min=1, help="Threads; torch's own choice by default.")] = None,
    reduction: Annotated[bool, typer.Option("--reduction", help="LayoutInvariant over Ordered instead.")] = False,
    json: ResultFile = None,
) -> None:
    """Compare one rank of MoELayer with transformers' own blocks. Exit code 1 if an output is wrong."""
    from benchmarks import one_layer, reductions

    with refusing():
        cases = one_layer.select(shape, dtype, tokens)
        if reduction:
            raise typer.Exit(reductions.main(cases, repeats=repeats, threads=threads, json_path=json))
    raise typer.Exit(one_layer.main(cases, repeats=repeats, threads=threads, json_path=json))


@app.command("kernels", rich_help_panel=COMPUTING)
def bench_kernels(
    aot: Annotated[bool, typer.Option("--aot", help="Compile without a GPU and read the machine code.")] = False,
    tune: Annotated[bool, typer.Option("--tune", help="Find the fastest blocks on this GPU, and keep them.")] = False,
    mega: Annotated[bool, typer.Option(help="With --aot: MegaKernels too.")] = True,
    arch: Annotated[Literal["sm_90", "sm_100"], typer.Option(help="Of --aot: Hopper, or Blackwell.")] = "sm_90",
    size: Annotated[str, typer.Option(help="By name, with commas, or all.")] = "all",
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

    Exit code 1 if a check of ours fails. For example:
    python -m benchmarks kernels --size olmoe,30b --routing zipf --out found
    """
    if aot and tune:
        raise typer.BadParameter("--aot and --tune are two commands; give one of them")
    if json is not None and not aot:
        raise typer.BadParameter("--json is for --aot alone; to keep what is timed give --out DIR")
    if aot or tune:
        from benchmarks.kernels import aot_report, tile_tuning
        from benchmarks.kernels.aot import select

        with refusing():
            sizes = select(size)
        raise typer.Exit(tile_tuning.main(sizes) if tune else aot_report.main(sizes, json, mega, arch))
    from benchmarks.kernels import kernels_contest

    with refusing():
        asked = kernels_contest.asked_for(
            size,
            routing,
            contestants,
            peers=peer or (),
            dtype=dtype,
            repeats=repeats,
            extras=extras,
            device=device,
        )
    raise typer.Exit(kernels_contest.main(asked, out))


@app.command("models", rich_help_panel=COMPUTING)
def bench_models(
    model: Annotated[str, typer.Option(help="olmoe, qwen3-moe, deepseek-v3, with commas, or all.")] = "all",
    routing: Annotated[str, typer.Option(help="balanced, skewed or all.")] = "all",
    sequences: Annotated[int, typer.Option(min=1, help="Of 256 tokens, a rank.")] = 8,
    hidden: Annotated[int, typer.Option(min=64, help="Hidden size; experts are twice as wide.")] = 256,
    ranks: Annotated[int, typer.Option(min=2, help="Local ranks of one thread; they divide 8 experts.")] = 2,
    share: Annotated[
        float | None, typer.Option(help="Of a processor, for each rank; Linux, root. For more ranks than processors.")
    ] = None,
    repeats: Repeats = 9,
    memory: Annotated[
        bool, typer.Option("--memory", help="Peak memory of a rank too, on local ranks of each one's own.")
    ] = False,
    json: ResultFile = None,
) -> None:
    """Train transformers' models under strategies and under its own all_to_all. Exit code 1 if a gradient differs."""
    from benchmarks import whole_models

    with refusing():
        parts = whole_models.select(model, routing, sequences, hidden)
        setting = whole_models.Setting(ranks, repeats, share, memory)
    raise typer.Exit(whole_models.main(parts, setting, json))


@app.command("overlap", rich_help_panel=LINKS)
def bench_overlap(
    part: Annotated[str, typer.Option(help="chunks, experts or all; or mega, MegaKernels on a GPU.")] = "all",
    tokens: Annotated[
        int | None, typer.Option(min=1, help="Tokens of a rank, instead of the part's own number.")
    ] = None,
    repeats: Repeats = 9,
    threads: Threads = 1,
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
        from benchmarks.mega import mega_contest

        with refusing():
            asked = mega_contest.asked_for(
                size, dtype=dtype, gb_per_s=gb_per_s, num_tokens=tokens, repeats=repeats, device=device
            )
        raise typer.Exit(mega_contest.main(asked, out))
    from benchmarks import paced_overlap

    with refusing():
        parts = paced_overlap.select(part, tokens)
    raise typer.Exit(paced_overlap.main(parts, repeats=repeats, threads=threads, json_path=json))


@app.command("reproduce", rich_help_panel=PUBLISHED)
def bench_reproduce(out: ReportFolder = None) -> None:
    """Fit the simulator on one of LAER-MoE's four published shapes, and judge it on the others.

    24 rows of four methods, breakdown, ablation, with the error of every figure; baselines; the constants.
    """
    from benchmarks.published import reproduce

    raise typer.Exit(reproduce.main(out))


@app.command("uniep", rich_help_panel=PUBLISHED)
def bench_uniep(out: ReportFolder = None) -> None:
    """Simulate MegaKernels against one stage after another on Hopper, over a range of rates of fused tiles."""
    from benchmarks.published import uniep

    raise typer.Exit(uniep.main(out))


@app.command("beyond", rich_help_panel=PUBLISHED)
def bench_beyond(out: ReportFolder = None) -> None:
    """Simulate what lies beyond LAER-MoE: on its 24 rows, and on three models and 8 to 1,024 GPUs.

    Stage by stage: static, LAER's layout, flow split, our layout, overlap.
    """
    from benchmarks.published import beyond

    raise typer.Exit(beyond.main(out))


@app.command("throughput", rich_help_panel=PUBLISHED)
def bench_throughput(
    out: ReportFolder = None,
    fit: Annotated[bool, typer.Option("--fit", help="Fit the constants again, for some minutes.")] = False,
    json: ResultFile = None,
) -> None:
    """Simulate whole models beside the tokens a second that Megatron-Bridge published, with the error of every row."""
    from benchmarks.published import throughput

    raise typer.Exit(throughput.main(out, json, with_fit=fit))


# What each way to compare planners takes, besides --json.
_CHOSEN = ("balance", "split", "predictor")
PLANNER_OPTIONS = {
    "--trace": ("ranks_per_node", "slots", "lag", "from_iteration", "to_iteration", "layers", "every", *_CHOSEN),
    "--laer": ("seeds", *_CHOSEN),
    "--scale": ("seeds", "repeats", "peer_eplb"),
    "--seconds": ("seeds", "drift", "behind", "blocks", "page"),
    "--union": ("page",),
}


@app.command("planner", rich_help_panel=COMPUTING)
def bench_planner(
    ctx: typer.Context,
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
    balance: Kinds = None,
    split: Kinds = None,
    predictor: Kinds = None,
    laer: Annotated[bool, typer.Option("--laer", help="LAER-MoE's two settings, on routing like its own.")] = False,
    scale: Annotated[bool, typer.Option("--scale", help="Known loads from 8 to 1024 ranks.")] = False,
    seconds: Annotated[bool, typer.Option("--seconds", help="Simulated steps on 8 to 128 H100, by planner.")] = False,
    union: Annotated[
        int | None, typer.Option(min=1, metavar="N", help="Simulated steps in N drawn settings: is Greedy ever behind?")
    ] = None,
    drift: Annotated[float, typer.Option(min=0, max=1, help="Of --seconds: from the load planned on.")] = 0.0,
    behind: Annotated[
        bool, typer.Option("--behind", help="Of --seconds: sharded experts travel behind other layers.")
    ] = False,
    blocks: Annotated[int | None, typer.Option(min=16, help="Of --seconds: what blocks of so many rows cost.")] = None,
    page: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="Of --seconds and --union: also a page of Markdown.", callback=in_a_folder),
    ] = None,
    peer_eplb: Annotated[
        Path | None, typer.Option(metavar="DIR", help="--scale also times this checkout of deepseek-ai/EPLB.")
    ] = None,
    seeds: Annotated[int, typer.Option(min=1, help="Of drawn loads: --laer, --scale and --seconds.")] = 3,
    repeats: Annotated[int, typer.Option(min=1, help="Timed repetitions of --scale.")] = 9,
    json: ResultFile = None,
) -> None:
    """Compare planners: --trace FILE, --laer, --scale, --seconds or --union N.

    Layouts are planned on the past only, and the tokens of a later micro-batch are split over them. For example:
    python -m benchmarks planner --trace run.npz --ranks-per-node 8 --slots 3 --slots 4 --lag 10
    """
    if (trace is not None) + laer + scale + seconds + (union is not None) != 1:
        raise typer.BadParameter("give one of --trace FILE, --laer, --scale, --seconds and --union N")
    mode = "--union" if union else "--seconds" if seconds else "--scale" if scale else "--laer" if laer else "--trace"
    fits = {"trace", "laer", "scale", "seconds", "union", "json", *PLANNER_OPTIONS[mode]}
    for name, option in options_given(ctx).items():
        if name not in fits:
            raise typer.BadParameter(f"{option} is not for {mode}; leave it out")
    if scale:
        from benchmarks.planner import scale as over_sizes

        with refusing():
            raise typer.Exit(over_sizes.main(num_seeds=seeds, repeats=repeats, peer_path=peer_eplb, json_path=json))
    if union:
        from benchmarks.planner import union as of_union

        with refusing():
            raise typer.Exit(of_union.main(union, out=page, json_path=json))
    if blocks:
        from benchmarks.planner import block_seconds

        with refusing():
            raise typer.Exit(block_seconds.main(seeds, blocks, drift, behind, out=page, json_path=json))
    if seconds:
        from benchmarks.planner import seconds as by_seconds

        with refusing():
            raise typer.Exit(by_seconds.main(seeds, drift, behind, out=page, json_path=json))
    from benchmarks.planner import planner_contest as contest
    from moesys.lab.commands.declarations import balance_of, predictor_of, split_of

    with refusing():
        chosen = contest.contenders(
            [balance_of(text) for text in balance or ()],
            [split_of(text) for text in split or ()],
            [predictor_of(text) for text in predictor or ()],
        )
        if trace is None:
            raise typer.Exit(contest.main_laer(chosen if balance or split or predictor else None, seeds, json))
        options = contest.TraceOptions(
            ranks_per_node, slots or (), lag, from_iteration, to_iteration, layers or (), every
        )
        raise typer.Exit(contest.main_trace(trace, chosen, options, json))


@app.command("calibration-check", rich_help_panel=COMPUTING)
def bench_calibration_check(
    file: Annotated[
        Path,
        typer.Argument(
            metavar="FILE", help="A ClusterSpec that moesys calibrate wrote here.", exists=True, dir_okay=False
        ),
    ],
    repeats: Repeats = 7,
    out: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Write a page there, in Markdown.", callback=in_a_folder)
    ] = None,
    json: ResultFile = None,
) -> None:
    """Compare measured steps of layers and small models with the steps simulated with a calibration, on CPU ranks.

    For example: moesys calibrate --ranks 2 --out here.toml; python -m benchmarks calibration-check here.toml
    """
    from benchmarks import calibration_check

    with refusing():
        raise typer.Exit(calibration_check.main(file, repeats, out, json))


@app.command("shaped", rich_help_panel=LINKS)
def bench_shaped(
    hosts: Annotated[list[int] | None, typer.Option(help="2 or 4, may be repeated; both by default.")] = None,
    case: Annotated[
        list[str] | None,
        typer.Option(
            help="overlap, split, nodes or planners, may be repeated; all of these by default. Or models, alone."
        ),
    ] = None,
    mbit: Annotated[
        list[float] | None, typer.Option(help="Of each link, may be repeated; instead of the cases' own.")
    ] = None,
    latency_us: Annotated[
        float | None, typer.Option("--latency-us", help="Between hosts, one way; instead of the cases' own.")
    ] = None,
    repeats: Repeats = 7,
    shares: Annotated[
        bool, typer.Option(help="Each host has its share of the processor; without, hosts compete for it.")
    ] = True,
    out: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Write a page there, in Markdown.", callback=in_a_folder)
    ] = None,
    json: ResultFile = None,
) -> None:
    """Measure overlap, splits and layouts between hosts with slow links, and see how far the simulator is. Linux, root.

    Hosts are network namespaces of this machine. All cases take about ten minutes on 2 cores. Exit code 1 if a bit
    differs. For example: python -m benchmarks shaped --case overlap --hosts 2 --mbit 100 --mbit 500 --out shaped.md

    --case models: training steps of transformers' small models, in half an hour; what the file of --json has already is
    not measured again.
    """
    from benchmarks.shaped import cases, model_cases, models_report, shaped_report

    if case and "models" in case:
        with refusing():
            models = model_cases.asked_for(hosts or (2, 4), mbit or (), latency_us, case)
            known = model_cases.kept(json)
        code = models_report.main(models, repeats=repeats, shares=shares, known=known, out=out, json_path=json)
        raise typer.Exit(code)
    with refusing():
        asked = cases.asked_for(hosts or (2, 4), mbit or (), latency_us, case or ())
    raise typer.Exit(shaped_report.main(asked, repeats=repeats, shares=shares, out=out, json_path=json))


@app.command("simulate", rich_help_panel=COMPUTING)
def bench_simulate(
    overlap: Annotated[str, typer.Option(help="sequential, pipelined, mega_kernel or all.")] = "sequential",
    most_ranks: Annotated[int, typer.Option(min=1, help="Leave larger clusters out.")] = 1024,
    repeats: Repeats = 3,
    json: ResultFile = None,
) -> None:
    """Time the simulator: one layer on 32 ranks, 32 layers on up to 1,024."""
    from benchmarks import simulator_speed

    with refusing():
        overlaps = simulator_speed.select(overlap)
    raise typer.Exit(simulator_speed.main(overlaps, most_ranks=most_ranks, repeats=repeats, json_path=json))


@app.command("doctor", rich_help_panel=COMPUTING)
def doctor(
    only: Annotated[str, typer.Option(help="Checks by name, with commas, or all.")] = "all",
    minutes: Annotated[float, typer.Option(min=0, help="Checks that have not begun by then are left out.")] = 10.0,
    out: Annotated[
        Path, typer.Option(metavar="DIR", help="The folder for the page to send back, and for all results.")
    ] = Path("doctor"),
) -> None:
    """Test this machine's GPUs layer by layer, and then measure them. Exit code 1 if a check failed.

    The first failure names the layer that it is in. The checks run in one process, or as one of torchrun's ranks;
    without a GPU, those that can are rehearsed.
    """
    from benchmarks.doctor import examination

    with refusing():
        asked = examination.asked_for(only, minutes, out)
    raise typer.Exit(examination.main(asked))


def main() -> None:
    """Runs a command; SIGTERM ends it as Ctrl-C does."""
    with sigterm_as_ctrl_c():
        app()


if __name__ == "__main__":
    main()
