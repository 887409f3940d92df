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

import moesys

FILES = Path(__file__).with_name("files")
STUB = Path(moesys.__file__).with_suffix(".pyi")


def golden_files(folder: Path) -> Iterator[tuple[str, str]]:
    """Names and texts of all; ``folder`` for what is run on the way."""
    yield "plans.txt", "\n".join(plan_lines()) + "\n"
    yield "steps.txt", "\n".join(step_lines()) + "\n"
    yield from table_files(folder)


def stub() -> str:
    """Returns what type checkers see of the package: the public names, and where each of them is defined."""
    imports = [f"from {module} import {name} as {name}" for name, module in moesys._MODULE_OF.items()]
    imports += [f"from {module.rpartition('.')[0]} import {name} as {name}" for name, module in moesys._MODULES.items()]
    names = "".join(f'    "{name}",\n' for name in moesys.__all__)
    return "\n".join(sorted(imports)) + f"\n\n__version__: str\n__all__ = [\n{names}]\n"


def main() -> None:
    # a terminal's width would cut tables
    os.environ.pop("COLUMNS", None)
    FILES.mkdir(exist_ok=True)
    STUB.write_text(stub())
    with TemporaryDirectory() as folder:
        for name, text in golden_files(Path(folder)):
            there = (FILES / name).read_text() if (FILES / name).exists() else ""
            (FILES / name).write_text(text)
            print(f"{name}: {'as it was' if text == there else 'made anew'}")


if __name__ == "__main__":
    main()
