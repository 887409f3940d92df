"""``moesys convert``: checkpoints of the hub's format and distributed ones, each from the other."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

from moesys.lab.commands.options import Quiet, argument, option, refusing
from moesys.lab.show.progress import status_line


@refusing()
def convert_command(
    source: Annotated[Path, argument("SOURCE", "Folder of a checkpoint, in the hub's format or distributed.")],
    out: Annotated[Path, argument("OUT", "Folder that is created, in the other format.")],
    config: Annotated[Path | None, option("FILE", "config.json, or its folder, if SOURCE has none.")] = None,
    quiet: Quiet = False,
) -> None:
    """Converts ``source`` to the other format, and prints the new folder."""
    # Paths are checked here, because transformers and torch take seconds to import.
    for path, what in ((source, "give the folder of a checkpoint"), (config, "give the config.json of the model")):
        if path is not None and not path.exists():
            raise ValueError(f"{path} does not exist; {what}")
    from moesys.hf.registration import check_transformers

    try:
        check_transformers()
    except ImportError as error:
        raise ValueError(str(error)) from None
    # This import is here because it imports transformers, which may be missing.
    from moesys.hf.convert import convert

    with status_line(quiet) as show:
        convert(source, out, config, lambda done, total: show(f"{done / 1e6:,.1f} of {total / 1e6:,.1f} MB"))
    print(out)
