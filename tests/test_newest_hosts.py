"""The script that tests moesys with the newest releases of trainers tells what broke from what did not."""

from __future__ import annotations

import re
from pathlib import Path

import newest_hosts
import pytest

TESTS = """
import fakehost
import pytest


def test_of_either_release() -> None:
    assert fakehost.__file__.startswith({folder!r})


@pytest.mark.parametrize("name", ["old"])
def test_of_the_old_release(name: str) -> None:
    fakehost.old()
"""
SOURCE = "def new() -> None: ..."


def main(folder: Path, *arguments: str) -> int:
    return newest_hosts.main(["--folder", str(folder / "newest"), *arguments])


@pytest.fixture
def hosts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "test_fakehost.py").write_text(TESTS.format(folder=str(tmp_path / "newest" / "fakehost")))
    found = {"fakehost": (str(tmp_path / "test_fakehost.py"),), "greedyhost": ()}
    monkeypatch.setattr(newest_hosts, "HOSTS", found)


def test_what_broke_is_told_from_what_did_not(hosts, tmp_path, monkeypatch, capfd):
    def install(host: str, newest: str, folder: Path) -> None:
        if host == "greedyhost":
            raise ValueError("it wants torch 99")
        folder.mkdir(parents=True, exist_ok=True)
        (folder / f"{host}.py").write_text(SOURCE)

    monkeypatch.setattr(newest_hosts, "install", install)
    monkeypatch.setattr(newest_hosts, "newest_release", lambda host: "2.0")
    assert main(tmp_path) == 1
    told = capfd.readouterr().out
    assert re.search(
        r"FAILED .*::test_of_the_old_release\[old\] - AttributeError: module 'fakehost' has no .* 'old'", told
    )
    assert told.splitlines()[-2:] == [
        "fakehost, of which none is pinned: tests of 2.0 failed, and pytest ended with 1",
        "greedyhost, of which none is pinned: the newest release is not installed: it wants torch 99",
    ]
    assert main(tmp_path, "--host", "fakehost", "--", "-k", "either") == 0
    assert "tests of 2.0 passed" in capfd.readouterr().out
    # Of no tests, none can pass.
    assert main(tmp_path, "--host", "fakehost", "--", "-k", "other") == 1
