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

import moesys as ms
from moesys.lab.ranks.pool import LocalRanks

TRAIN = "torchrun --nproc-per-node 2 train.py"
PROGRAMS = {"torchrun": "torch.distributed.run", "accelerate": "accelerate.commands.accelerate_cli"}


def test_the_page_trains_a_model(ranks: LocalRanks, tmp_path: Path) -> None:
    reader = Reader(tmp_path, ranks)
    reader.follow("transformers")
    losses = [float(loss) for loss in re.findall(r"'loss': '?([0-9.]+)", reader.printed[TRAIN])]
    assert losses[-1] < 0.8 * losses[0]
    assert reader.printed["python use.py"].startswith("    parser.add_argument(")
    assert (tmp_path / "adapter" / "adapter_model.safetensors").exists()
    # Continued, under another sharding.
    resumed = reader.printed["torchrun --nproc-per-node 2 resume.py ep"]
    assert re.findall(r"rank 0, step (\d)", resumed) == list("4567")
    assert (tmp_path / "runs" / "loop" / "report.html").exists()
    for folder in ("tuned", "again"):
        assert (tmp_path / folder / "config.json").exists()
    for folder in ("resumable", "start"):
        assert (tmp_path / folder / ".metadata").exists()


def trained(command: str, folder: Path) -> bytes:
    program, *arguments = shlex.split(command)
    programs = [sys.executable, "-m", PROGRAMS[program]]
    done = subprocess.run([*programs, *arguments], cwd=folder, capture_output=True, text=True, timeout=250, check=False)
    assert done.returncode == 0, done.stderr
    return (folder / "fine-tuned" / "model.safetensors").read_bytes()


def reader_with(program: str, folder: Path, ranks: LocalRanks) -> Reader:
    """A reader who has saved ``program`` and made the model."""
    files = {block.title: block.text for block in blocks_of("transformers")}
    for name in ("make_model.py", program):
        (folder / name).write_text(files[name], encoding="utf-8")
    reader = Reader(folder, ranks, slow=True)
    reader.run("python make_model.py")
    return reader


@pytest.mark.slow
def test_the_page_compares_strategies_that_train_the_same_model(ranks: LocalRanks, tmp_path: Path) -> None:
    reader_with("compare.py", tmp_path, ranks).run("moesys run compare.py --seeds 1 --set workload.steps=2")
    (folder,) = (tmp_path / "runs").glob("my-model-*")
    (compared,) = ms.compare(folder)
    assert {row.name: row.agreement.holds for row in compared.rows if row.agreement} == {"lent": True, "unified": True}


@pytest.mark.slow
def test_the_page_goes_on_and_accelerate_launches_it(ranks: LocalRanks, tmp_path: Path) -> None:
    """All to the same bits."""
    reader_with("train.py", tmp_path, ranks)
    wanted = trained(TRAIN, tmp_path)
    shutil.rmtree(tmp_path / "checkpoints")
    (launch,) = re.findall(r"`(accelerate launch [^`]*)`", text_of("transformers"))
    assert trained(launch, tmp_path) == wanted
    for step in (20, 30):
        shutil.rmtree(tmp_path / "checkpoints" / f"checkpoint-{step}")
    assert trained(TRAIN, tmp_path) == wanted
    assert (tmp_path / "checkpoints" / "checkpoint-20").exists()
