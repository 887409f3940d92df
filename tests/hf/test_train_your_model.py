"""The page that trains a model of transformers does so, file by file and command by command."""

from __future__ import annotations

import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from pages import Reader, blocks_of, text_of

from moesys.lab.ranks.pool import LocalRanks

TRAIN = "torchrun --nproc-per-node 2 train.py"
PROGRAMS = {"torchrun": "torch.distributed.run", "accelerate": "accelerate.commands.accelerate_cli"}


def test_the_page_trains_a_model(ranks: LocalRanks, tmp_path: Path) -> None:
    reader = Reader(tmp_path, ranks)
    reader.follow("transformers")
    losses = [float(loss) for loss in re.findall(r"'loss': '?([0-9.]+)", reader.printed[TRAIN])]
    assert losses[-1] < 0.8 * losses[0]
    assert reader.printed["python use.py"].startswith("    parser.add_argument(")
    for folder in ("tuned", "again"):
        assert (tmp_path / folder / "config.json").exists()
    for folder in ("checkpoint", "moe-checkpoint", "start"):
        assert (tmp_path / folder / ".metadata").exists()


def trained(command: str, folder: Path) -> bytes:
    program, *arguments = shlex.split(command)
    programs = [sys.executable, "-m", PROGRAMS[program]]
    done = subprocess.run([*programs, *arguments], cwd=folder, capture_output=True, text=True, timeout=250, check=False)
    assert done.returncode == 0, done.stderr
    return (folder / "fine-tuned" / "model.safetensors").read_bytes()


@pytest.mark.slow
def test_the_page_goes_on_and_accelerate_launches_it(ranks: LocalRanks, tmp_path: Path) -> None:
    """All to the same bits."""
    files = {block.title: block.text for block in blocks_of("transformers")}
    for name in ("make_model.py", "train.py"):
        (tmp_path / name).write_text(files[name], encoding="utf-8")
    Reader(tmp_path, ranks).run("python make_model.py")
    wanted = trained(TRAIN, tmp_path)
    shutil.rmtree(tmp_path / "checkpoints")
    (launch,) = re.findall(r"`(accelerate launch [^`]*)`", text_of("transformers"))
    assert trained(launch, tmp_path) == wanted
    for step in (20, 30):
        shutil.rmtree(tmp_path / "checkpoints" / f"checkpoint-{step}")
    assert trained(TRAIN, tmp_path) == wanted
    assert (tmp_path / "checkpoints" / "checkpoint-20").exists()
