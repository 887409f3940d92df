"""``moesys convert``: checkpoints of the hub's format and distributed ones, each from the other."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

import typer

from moesys.lab.commands.options import refusing
from moesys.lab.show.progress import bytes_progress


@refusing()
def convert_command(
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
    """Converts ``source`` to the other format, and prints the new folder."""
    from moesys.hf.registration import check_transformers

    try:
        check_transformers()
    except ImportError as error:
        raise ValueError(str(error)) from None
    # Not at the top: it imports transformers, which may be missing.
    from moesys.hf.convert import convert

    with bytes_progress(sys.stderr) as tick:
        convert(source, out, config, tick)
    print(out)
