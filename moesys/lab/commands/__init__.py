"""What commands do behind the command line.

Exit codes: 0, all is well; 1, a trial failed, or has other bits than it must have; 2, what was asked for cannot be
done, and a message says why; 130, Ctrl-C; 143, SIGTERM.
"""

from __future__ import annotations

import sys
from typing import Literal

from moesys.lab.runs.experiment_files import in_words

Format = Literal["table", "markdown", "csv", "json", "latex"]


def refused(error: ValueError | OSError) -> int:
    """Say why; the exit code. What the system refuses is mostly a folder that cannot be written, or a full disk.

    A reader who has enough, such as ``head``, is no error: raised again, ``typer`` ends in silence.
    """
    if isinstance(error, BrokenPipeError):
        raise error
    what = f"{error.strerror}: {error.filename}" if isinstance(error, OSError) and error.filename else in_words(error)
    print(f"Error: {what}", file=sys.stderr)
    return 2
