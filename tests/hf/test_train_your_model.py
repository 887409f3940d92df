"""The page that trains a model of transformers does so, file by file and command by command."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

PAGE = Path(__file__).parents[2] / "docs" / "train-your-model.md"


def run(command: str, folder: Path) -> str:
    """What a command of the page prints, with the programs of this Python."""
    program, *arguments = command.removeprefix(".venv/bin/").split()
    programs = {"python": [sys.executable], "torchrun": [sys.executable, "-m", "torch.distributed.run"]}
    done = subprocess.run(
        [*programs[program], *arguments], cwd=folder, capture_output=True, text=True, timeout=250, check=False
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_the_page_trains_a_model(tmp_path: Path) -> None:
    page = PAGE.read_text(encoding="utf-8")
    files = re.findall(r"`(\w+\.py)`[^`]*:\n\n```python\n(.*?)^```", page, re.MULTILINE | re.DOTALL)
    assert [name for name, _ in files] == ["make_model.py", "train.py", "use.py"]
    for name, source in files:
        (tmp_path / name).write_text(source, encoding="utf-8")
    commands = re.findall(r"^```sh\n(.venv/bin/(?:python|torchrun) [^\n]*)\n```", page, re.MULTILINE)
    assert len(commands) == 3
    run(commands[0], tmp_path)
    losses = [float(loss) for loss in re.findall(r"'loss': '?([0-9.]+)", run(commands[1], tmp_path))]
    assert losses[-1] < 0.8 * losses[0]
    assert run(commands[2], tmp_path).startswith("    parser.add_argument(")
