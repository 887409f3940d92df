"""The command line: ``python -m moesys``, installed as ``moesys``.

Commands import what they need when they run, so that ``--help`` does not wait for torch.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

app = typer.Typer(
    name="moesys",
    help="Declare, train and compare strategies for Mixture-of-Experts layers.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
)
bench = typer.Typer(help="Measure on this machine.", no_args_is_help=True)
app.add_typer(bench, name="bench")


@app.callback()
def _root() -> None:
    """Keeps ``bench`` a command of its own while it is the only group."""


@bench.command("layer")
def bench_layer(
    shape: Annotated[str, typer.Option(help="One shape by name, or all.")] = "all",
    dtype: Annotated[str, typer.Option(help="float32, bfloat16 or all.")] = "all",
    tokens: Annotated[int | None, typer.Option(min=1, help="Tokens, instead of the shape's own number.")] = None,
    repeats: Annotated[int, typer.Option(min=1, help="Timed repetitions.")] = 9,
    threads: Annotated[int | None, typer.Option(min=1, help="Threads; torch's own choice by default.")] = None,
    json: Annotated[Path | None, typer.Option(help="Write every sample to this file.")] = None,
) -> None:
    """Compare one rank of MoELayer with transformers' own blocks; exit code 1 if an output is wrong."""
    from moesys.lab.bench import layer

    try:
        layer.select(shape, dtype)
    except ValueError as error:
        raise typer.BadParameter(str(error)) from None
    code = layer.main(shape, dtype, num_tokens=tokens, repeats=repeats, threads=threads, json_path=json)
    raise typer.Exit(code)


@bench.command("overlap")
def bench_overlap(
    part: Annotated[str, typer.Option(help="chunks, experts or all.")] = "all",
    tokens: Annotated[
        int | None, typer.Option(min=1, help="Tokens of a rank, instead of the part's own number.")
    ] = None,
    repeats: Annotated[int, typer.Option(min=1, help="Timed repetitions.")] = 9,
    threads: Annotated[int, typer.Option(min=1, help="Threads of a rank.")] = 1,
    json: Annotated[Path | None, typer.Option(help="Write every sample to this file.")] = None,
) -> None:
    """Compare sequential with overlapped runs over paced links; exit code 1 if a bit differs."""
    from moesys.lab.bench import overlap

    try:
        overlap.select(part)
    except ValueError as error:
        raise typer.BadParameter(str(error)) from None
    raise typer.Exit(overlap.main(part, num_tokens=tokens, repeats=repeats, threads=threads, json_path=json))


def main() -> None:
    app()


if __name__ == "__main__":
    main()
