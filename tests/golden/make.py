"""Makes the golden files anew: ``python tests/golden/make.py``, from the root of the checkout.

They say what may not change. Whoever changes results on purpose runs this, reads the difference, and says in the commit
why they changed.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from tempfile import TemporaryDirectory

from plan_cases import plan_lines
from step_cases import step_lines
from table_cases import table_files

FILES = Path(__file__).with_name("files")


def golden_files(folder: Path) -> Iterator[tuple[str, str]]:
    """Names and texts of all; ``folder`` for what is run on the way."""
    yield "plans.txt", "\n".join(plan_lines()) + "\n"
    yield "steps.txt", "\n".join(step_lines()) + "\n"
    yield from table_files(folder)


def main() -> None:
    # a terminal's width would cut tables
    os.environ.pop("COLUMNS", None)
    FILES.mkdir(exist_ok=True)
    with TemporaryDirectory() as folder:
        for name, text in golden_files(Path(folder)):
            there = (FILES / name).read_text() if (FILES / name).exists() else ""
            (FILES / name).write_text(text)
            print(f"{name}: {'as it was' if text == there else 'made anew'}")


if __name__ == "__main__":
    main()
