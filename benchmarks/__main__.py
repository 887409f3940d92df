"""The command line of the benchmarks: ``python -m benchmarks NAME`` in the root of a checkout.

``--help`` does not wait for torch: the module of a command is imported when the command is called.
"""

from __future__ import annotations

import importlib
from pathlib import Path
from typing import Annotated, Any, NamedTuple

import typer
from typer.core import TyperGroup
from typer.main import get_command

from benchmarks.harness.options import Repeats
from moesys.lab.commands.options import ResultFile, Wide, in_a_folder, refusing
from moesys.lab.ranks.process_start import sigterm_as_ctrl_c

COMPUTING, LINKS = "Computing, measured here", "Links, measured here"


class Page(NamedTuple):
    """The function of a command as ``module:name``, the heading that lists the command, and its line there."""

    function: str
    heading: str
    summary: str


PAGES = {
    "layer": Page(
        "benchmarks.one_layer:bench_layer", COMPUTING, "Compare one rank of MoELayer with transformers' MoE blocks."
    ),
    "kernels": Page(
        "benchmarks.kernels.command:bench_kernels", COMPUTING, "Check, time, tune or compile the kernels of one GPU."
    ),
    "models": Page(
        "benchmarks.whole_models:bench_models", COMPUTING, "Train transformers' models on ranks, by strategy."
    ),
    "simulate": Page("benchmarks.simulator_speed:bench_simulate", COMPUTING, "Time the simulator."),
    "overlap": Page(
        "benchmarks.paced_overlap:bench_overlap", LINKS, "Compare overlapped with sequential steps over paced links."
    ),
}


class Commands(TyperGroup):
    """Lists all commands under headings, and imports those of ``PAGES`` when they are called."""

    def list_commands(self, ctx: Any) -> list[str]:
        return [*PAGES, *super().list_commands(ctx)]

    def get_command(self, ctx: Any, cmd_name: str) -> Any:
        if cmd_name not in PAGES:
            return super().get_command(ctx, cmd_name)
        module, _, function = PAGES[cmd_name].function.partition(":")
        page = typer.Typer(add_completion=False, rich_markup_mode=None)
        page.command(cmd_name)(getattr(importlib.import_module(module), function))
        return get_command(page)

    def format_commands(self, ctx: Any, formatter: Any) -> None:
        limit = formatter.width - 6 - max(map(len, self.list_commands(ctx)))
        lines = [(page.heading, name, page.summary) for name, page in PAGES.items()]
        lines += [
            (getattr(command, "rich_help_panel", ""), name, command.get_short_help_str(limit))
            for name, command in self.commands.items()
        ]
        for heading in dict.fromkeys(line[0] for line in lines):
            with formatter.section(heading):
                formatter.write_dl([line[1:] for line in lines if line[0] == heading])


app = typer.Typer(
    name="benchmarks",
    help="Measure on this machine.",
    cls=Commands,
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
)


@app.command("planner-scale", rich_help_panel=COMPUTING)
def bench_planner_scale(
    peer_eplb: Annotated[
        Path | None, typer.Option(metavar="DIR", help="Time this checkout of deepseek-ai/EPLB as well.")
    ] = None,
    seeds: Annotated[int, typer.Option(min=1, help="Generated loads of each case.")] = 3,
    repeats: Repeats = 9,
    json: ResultFile = None,
    wide: Wide = False,
) -> None:
    """Time planners and splits for 8 to 1,024 ranks. Which planner is best: moesys leaderboard."""
    from benchmarks import planner_scale

    with refusing():
        raise typer.Exit(
            planner_scale.main(num_seeds=seeds, repeats=repeats, peer=peer_eplb, json_path=json, wide=wide)
        )


@app.command("record-routing", rich_help_panel=COMPUTING)
def bench_record_routing(
    folder: Annotated[Path, typer.Argument(metavar="DIR", help="Folder of the traces.", exists=True, file_okay=False)],
) -> None:
    """Record the routing that moesys leaderboard replays: trains three small models, in a quarter of an hour."""
    from benchmarks import record_routing

    raise typer.Exit(record_routing.main(folder))


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
    wide: Wide = False,
) -> None:
    """Compare measured steps of layers and small models with the steps simulated with a calibration, on CPU ranks.

    For example: moesys calibrate --ranks 2 --out here.toml; python -m benchmarks calibration-check here.toml
    """
    from benchmarks import calibration_check

    with refusing():
        raise typer.Exit(calibration_check.main(file, repeats, out, json, wide))


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
    wide: Wide = False,
) -> None:
    """Measure overlap, splits and layouts between hosts with slow links, beside the simulator. Linux, root.

    Hosts are network namespaces of this machine. All cases take about ten minutes on 2 cores. Exit code 1 if a result
    is wrong. For example: python -m benchmarks shaped --case overlap --hosts 2 --mbit 100 --mbit 500 --out shaped.md

    --case models measures training steps of transformers' small models, in half an hour.
    """
    from benchmarks.shaped import bench, cases

    with refusing():
        asked = cases.asked_for(hosts or (2, 4), mbit or (), latency_us, case or ())
    raise typer.Exit(bench.main(asked, repeats=repeats, shares=shares, out=out, json_path=json, wide=wide))


def main() -> None:
    """Runs a command; SIGTERM ends it as Ctrl-C does."""
    with sigterm_as_ctrl_c():
        app()


if __name__ == "__main__":
    main()
