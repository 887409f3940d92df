"""``moesys convert``: checkpoints of the hub's format and distributed ones, each from the other."""

from __future__ import annotations

import sys
from pathlib import Path

from moesys.lab.commands import refused
from moesys.lab.show.steps import bytes_progress


def convert_command(source: Path, out: Path, config: Path | None = None) -> int:
    """Converts ``source`` to the other format. Returns the exit code, 2 if ``source`` or ``out`` is refused."""
    from moesys.hf.registration import check_transformers

    try:
        check_transformers()
        from moesys.hf.convert import convert

        with bytes_progress(sys.stderr) as tick:
            convert(source, out, config, tick)
    except ImportError as error:
        print(f"Error: {error}", file=sys.stderr)
        return 2
    except (ValueError, OSError) as error:
        return refused(error)
    print(out)
    return 0
