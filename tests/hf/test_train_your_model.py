"""The page that trains a model of transformers does so, file by file and command by command."""

from __future__ import annotations

import contextlib
import io
import re
import runpy
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch.distributed as dist
from hf_models import under_torchrun

from moesys.lab.ranks.pool import LocalRanks

PAGE = Path(__file__).parents[2] / "docs" / "train-your-model.md"


def run(command: str, folder: Path) -> str:
    """What a command of the page prints, with the programs of this Python; here, where that is loaded already."""
    program, *arguments = command.removeprefix(".venv/bin/").split()
    if program == "python":
        printed = io.StringIO()
        with contextlib.chdir(folder), contextlib.redirect_stdout(printed):
            runpy.run_path(*arguments, run_name="__main__")
        return printed.getvalue()
    programs = {
        "torchrun": [sys.executable, "-m", "torch.distributed.run"],
        "accelerate": [sys.executable, "-m", "accelerate.commands.accelerate_cli"],
    }
    done = subprocess.run(
        [*programs[program], *arguments], cwd=folder, capture_output=True, text=True, timeout=250, check=False
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def files_and_commands(folder: Path) -> dict[str, str]:
    """Writes the files of the page, and gives its commands by program and file."""
    page = PAGE.read_text(encoding="utf-8")
    files = re.findall(r"`(\w+\.py)`[^`]*:\n\n```python\n(.*?)^```", page, re.MULTILINE | re.DOTALL)
    assert [name for name, _ in files] == ["make_model.py", "train.py", "use.py"]
    for name, source in files:
        (folder / name).write_text(source, encoding="utf-8")
    commands = re.findall(r"^```sh\n(.venv/bin/(\w+) [^\n]*?(\w+\.py))\n```", page, re.MULTILINE)
    return {f"{program} {name}": command for command, program, name in commands}


def train_here(folder: Path) -> str:
    """Runs ``train.py`` on ranks that are there, and returns what it prints."""
    printed = io.StringIO()
    with (
        under_torchrun(),
        contextlib.chdir(folder),
        contextlib.redirect_stdout(printed),
        pytest.MonkeyPatch.context() as patch,
    ):
        for name in ("init_process_group", "destroy_process_group"):
            patch.setattr(dist, name, lambda *_: None)
        runpy.run_path("train.py", run_name="__main__")
    return printed.getvalue()


def test_the_page_trains_a_model(ranks: LocalRanks, tmp_path: Path) -> None:
    """On two rows at a time. The next test starts its commands, with all rows."""
    commands = files_and_commands(tmp_path)
    source = (tmp_path / "train.py").read_text(encoding="utf-8")
    few, changed = re.subn(r"per_device_train_batch_size=\d+", "per_device_train_batch_size=2", source)
    assert changed == 1
    (tmp_path / "train.py").write_text(few, encoding="utf-8")
    run(commands["python make_model.py"], tmp_path)
    printed = ranks.run(train_here, tmp_path, num_ranks=2, timeout_s=200.0)[0]
    losses = [float(loss) for loss in re.findall(r"'loss': '?([0-9.]+)", printed)]
    assert losses[-1] < 0.8 * losses[0]
    assert run(commands["python use.py"], tmp_path).startswith("    parser.add_argument(")


def trained(command: str, folder: Path) -> bytes:
    run(command, folder)
    return (folder / "fine-tuned" / "model.safetensors").read_bytes()


@pytest.mark.slow
def test_the_page_goes_on_and_accelerate_launches_it(tmp_path: Path) -> None:
    """All to the same bits."""
    commands = files_and_commands(tmp_path)
    run(commands["python make_model.py"], tmp_path)
    wanted = trained(commands["torchrun train.py"], tmp_path)
    page = PAGE.read_text(encoding="utf-8")
    (ending,) = re.findall(r"ends like this, from `arguments =` on:\n\n```python\n(.*?)^```", page, re.M | re.S)
    start, _, _ = (tmp_path / "train.py").read_text(encoding="utf-8").partition("arguments = ")
    (tmp_path / "train.py").write_text(start + ending, encoding="utf-8")
    assert trained(commands["accelerate train.py"], tmp_path) == wanted
    for step in (20, 30):
        shutil.rmtree(tmp_path / "checkpoints" / f"checkpoint-{step}")
    assert trained(commands["torchrun train.py"], tmp_path) == wanted
    assert (tmp_path / "checkpoints" / "checkpoint-20").exists()
