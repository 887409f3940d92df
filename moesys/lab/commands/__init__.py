"""The functions behind the command line.

Exit codes: 0, success; 1, a trial failed, or has different bits than it must have; 2, the arguments cannot be met, and
a message says why; 130, Ctrl-C; 143, SIGTERM.
"""

from __future__ import annotations

import sys
from typing import Literal

from moesys.lab.runs.experiment_files import in_words

Format = Literal["table", "markdown", "csv", "json", "latex"]


def refused(error: ValueError | OSError) -> int:
    """Prints why the arguments cannot be met, and returns the exit code.

    A reader that closes the pipe, such as ``head``, is no error: it is raised again, and ``typer`` ends in silence.
    """
    if isinstance(error, BrokenPipeError):
        raise error
    what = f"{error.strerror}: {error.filename}" if isinstance(error, OSError) and error.filename else in_words(error)
    print(f"Error: {what}", file=sys.stderr)
    return 2
