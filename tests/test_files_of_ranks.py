"""Folders that all ranks write: the earlier content stays whole until the new one is, whoever dies or fails."""

from __future__ import annotations

import errno
import os
import signal
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.planner import WriteItem
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

import moesys as ms
from moesys.lab.ranks.pool import LocalRanks, RankError, RankTimeouts


def write(folder: Path, text: str) -> None:
    with ms.whole_folder(folder) as new:
        (new / "a").write_text(text)
        (new / "inside").mkdir()
        (new / "inside" / "b").write_text(text)


def content(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def test_it_takes_the_place_of_the_earlier_one(tmp_path: Path) -> None:
    for text in ("one", "two"):
        write(tmp_path / "folder", text)
        assert content(tmp_path / "folder") == {"a": text.encode(), "inside/b": text.encode()}
        assert [path.name for path in tmp_path.iterdir()] == ["folder"]


@pytest.mark.parametrize(("error", "crashed"), [(ValueError, False), (KeyboardInterrupt, False), (ValueError, True)])
def test_a_block_that_raises_changes_nothing_and_a_crash_between_the_renames_is_put_right(tmp_path, error, crashed):
    write(tmp_path / "folder", "one")
    if crashed:
        (tmp_path / "folder").rename(tmp_path / ".folder.old")
        (tmp_path / ".folder.new").mkdir()
    with pytest.raises(error, match="now"), ms.whole_folder(tmp_path / "folder"):
        raise error("now")
    assert content(tmp_path / "folder") == {"a": b"one", "inside/b": b"one"}
    assert [path.name for path in tmp_path.iterdir()] == ["folder"]


@pytest.mark.parametrize("error", [OSError(errno.EIO, "Input/output error"), KeyboardInterrupt()], ids=["disk", "^C"])
@pytest.mark.parametrize("failing", [[".folder.new"], [".folder.new", ".folder.old"]], ids=["new", "new and old"])
def test_a_rename_that_fails_loses_neither_folder(tmp_path, monkeypatch, error, failing):
    write(tmp_path / "folder", "one")
    rename = Path.rename

    def renamed(self: Path, target: Path) -> Path:
        if self.name in failing:
            raise error
        return rename(self, target)

    with monkeypatch.context() as patched:
        patched.setattr(Path, "rename", renamed)
        with pytest.raises(type(error)):
            write(tmp_path / "folder", "two")
    if ".folder.old" not in failing:
        assert [path.name for path in tmp_path.iterdir()] == ["folder"]
    else:
        assert content(tmp_path / ".folder.new") == {"a": b"two", "inside/b": b"two"}
        assert content(tmp_path / ".folder.old") == {"a": b"one", "inside/b": b"one"}
        with pytest.raises(ValueError, match="now"), ms.whole_folder(tmp_path / "folder"):
            raise ValueError("now")
    assert content(tmp_path / "folder") == {"a": b"one", "inside/b": b"one"}


def test_a_folder_that_somebody_makes_between_the_renames_replaces_nothing(tmp_path, monkeypatch):
    write(tmp_path / "folder", "one")
    rename = Path.rename

    def renamed(self: Path, target: Path) -> Path:
        if self.name == ".folder.new":
            (tmp_path / "folder").mkdir()
            (tmp_path / "folder" / "log").write_text("somebody's")
        return rename(self, target)

    with monkeypatch.context() as patched:
        patched.setattr(Path, "rename", renamed)
        with pytest.raises(FileExistsError, match=r"what it was is .*folder\.old"):
            write(tmp_path / "folder", "two")
    with pytest.raises(ValueError, match="now"), ms.whole_folder(tmp_path / "folder"):
        raise ValueError("now")
    assert content(tmp_path / "folder") == {"log": b"somebody's"}
    assert content(tmp_path / "folder.old") == {"a": b"one", "inside/b": b"one"}


@pytest.mark.timeout(60)
def test_links_and_pipes_stay_what_they_are(tmp_path: Path) -> None:
    with ms.whole_folder(tmp_path / "folder") as new:
        os.mkfifo(new / "pipe")
        for name, target in (("dangling", "step-100"), ("here", "."), ("device", "/dev/zero")):
            (new / name).symlink_to(target)
    assert (tmp_path / "folder" / "pipe").is_fifo()
    assert (tmp_path / "folder" / "dangling").readlink() == Path("step-100")
    assert (tmp_path / "folder" / "here").readlink() == Path()


def test_places_that_cannot_be_replaced_are_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "run").mkdir()
    monkeypatch.chdir(tmp_path / "run")
    (tmp_path / "run" / "file").write_text("mine")
    around = "{} is the current folder or one around it, which .*; give a folder inside it"
    for folder, error, message in (
        (".", ValueError, around.format(tmp_path / "run")),
        (tmp_path, ValueError, around.format(tmp_path)),
        ("/", ValueError, "/ is a mount point, which .*; give a folder inside it"),
        ("file", NotADirectoryError, "give another path, or remove it: '.*/run/file'"),
    ):
        with pytest.raises(error, match=message), ms.whole_folder(folder):
            pass
    assert [path.read_text() for path in (tmp_path / "run").iterdir()] == ["mine"]
    # The current folder may be gone.
    (tmp_path / "gone").mkdir()
    monkeypatch.chdir(tmp_path / "gone")
    (tmp_path / "gone").rmdir()
    write(tmp_path / "folder", "one")
    assert content(tmp_path / "folder") == {"a": b"one", "inside/b": b"one"}


@pytest.mark.parametrize("target", ["{tmp_path}/disk/big", "disk/big"])
def test_the_folder_that_a_link_names_is_replaced_each_time(tmp_path: Path, target: str) -> None:
    (tmp_path / "disk" / "big").mkdir(parents=True)
    (tmp_path / "link").symlink_to(target.format(tmp_path=tmp_path))
    for text in ("one", "two", "three"):
        write(tmp_path / "link", text)
        assert (tmp_path / "link").is_symlink()
        assert content(tmp_path / "disk" / "big") == {"a": text.encode(), "inside/b": text.encode()}
    assert [path.name for path in (tmp_path / "disk").iterdir()] == ["big"]


def test_the_mode_of_the_earlier_folder_is_kept(tmp_path: Path) -> None:
    write(tmp_path / "folder", "one")
    (tmp_path / "folder").chmod(0o700)
    write(tmp_path / "folder", "two")
    assert (tmp_path / "folder").stat().st_mode & 0o777 == 0o700


def test_a_second_writer_is_refused_and_changes_nothing(tmp_path: Path) -> None:
    folder = tmp_path / "folder"
    with ms.whole_folder(folder) as new:
        (new / "a").write_text("first")
        with pytest.raises(ValueError, match=f"{folder} is being written by process {os.getpid()}"):
            write(folder, "second")
        (new / "b").write_text("first")
    assert content(folder) == {"a": b"first", "b": b"first"}
    assert [path.name for path in tmp_path.iterdir()] == ["folder"]


class Dying(DefaultSavePlanner):
    """Kills its process when it has written some tensors."""

    def __init__(self, after: int) -> None:
        super().__init__()
        self.left = after

    def resolve_data(self, write_item: WriteItem) -> Tensor:
        self.left -= 1
        if self.left < 0:
            os.kill(os.getpid(), signal.SIGKILL)
        found = super().resolve_data(write_item)
        assert isinstance(found, Tensor)
        return found


def save(folder: Path, value: float, victim: int | None) -> None:
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    state = {str(layer): distribute_tensor(torch.full((8, 5), value + layer), mesh, [Shard(0)]) for layer in range(4)}
    planner = Dying(2) if dist.get_rank() == victim else None
    with ms.whole_folder(folder) as new:
        dcp.save(state, checkpoint_id=new, planner=planner)


def load(folder: Path) -> dict[str, Tensor]:
    found = {str(layer): torch.zeros(8, 5) for layer in range(4)}
    dcp.load(found, checkpoint_id=folder)
    return found


@pytest.mark.parametrize("victim", [0, pytest.param(2, marks=pytest.mark.slow)])
def test_a_rank_killed_while_it_saves_leaves_the_earlier_checkpoint_whole(tmp_path: Path, victim: int) -> None:
    folder = tmp_path / "checkpoint"
    with LocalRanks(3, timeouts=RankTimeouts(collective_s=20.0, grace_s=2.0)) as ranks:
        ranks.run(save, folder, 1.0, None)
        earlier = content(folder)
        with pytest.raises(RankError, match=f"rank {victim} was killed by signal 9"):
            ranks.run(save, folder, 2.0, victim, timeout_s=40.0)
        assert content(folder) == earlier
        ranks.run(save, folder, 3.0, None)
        for found in ranks.run(load, folder):
            assert all(torch.equal(found[str(layer)], torch.full((8, 5), 3.0 + layer)) for layer in range(4))
    assert [path.name for path in tmp_path.iterdir()] == ["checkpoint"]


def fail_on(folder: Path, rank: int) -> None:
    with ms.whole_folder(folder) as new:
        (new / str(dist.get_rank())).write_text("new")
        if dist.get_rank() == rank:
            raise OSError("no room")


def test_an_error_of_one_rank_is_one_of_all_and_so_is_what_is_in_the_way(ranks: LocalRanks, tmp_path: Path) -> None:
    write(tmp_path / "folder", "one")
    (tmp_path / "file").write_text("")
    for rank, told in enumerate(ranks.run(fail_twice, tmp_path, num_ranks=3)):
        assert ("rank 0 failed, and nothing is written: FileExistsError" in told[0]) == (rank > 0)
        assert ("no room" if rank == 1 else "rank 1 failed, and nothing is written: OSError: no room") in told[1]
    assert content(tmp_path / "folder") == {"a": b"one", "inside/b": b"one"}
    assert sorted(path.name for path in tmp_path.iterdir()) == ["file", "folder"]


def fail_twice(folder: Path) -> list[str]:
    told = []
    for place in (folder / "file" / "folder", folder / "folder"):
        try:
            fail_on(place, 1)
        except (OSError, RuntimeError) as error:
            told.append(f"{type(error).__name__}: {error}")
    return told
