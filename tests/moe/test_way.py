"""The way of a batch: how many files of the package one forward enters, and how often it goes from one to another."""

from __future__ import annotations

import sys
from pathlib import Path
from types import FrameType
from typing import Any

import pytest
import torch

import moesys as ms
from moesys.lab.ranks.pool import LocalRanks

PACKAGE = f"{Path(ms.__file__).parent}/"
SHAPE = ms.ModelShape(hidden_size=64, intermediate_size=32, num_experts=8, top_k=2)
EP = ms.Strategy(name="ep")
FSEP = ms.Strategy(name="fsep", sharding=ms.Fsep(slots_per_rank=5), balance=ms.Eplb(), split=ms.EvenSplit())


def entered(strategy: ms.Strategy, num_warm_up: int = 3) -> tuple[set[str], int]:
    """Returns the files that one forward enters after some micro-batches, and how often it enters one from another: one
    in which ranks do not compare their routers too, as in micro-batches 1, 2 and 4.
    """
    layer = ms.MoELayer(SHAPE, strategy)
    # How many experts have rows is a part of the way.
    torch.manual_seed(0)
    for _ in range(num_warm_up):
        layer(torch.randn(32, SHAPE.hidden_size)).sum().backward()
    x, files, entries = torch.randn(32, SHAPE.hidden_size), set(), 0

    def note(frame: FrameType, event: str, _: Any) -> None:
        nonlocal entries
        name = frame.f_code.co_filename
        if event != "call" or not name.startswith(PACKAGE):
            return
        files.add(name.removeprefix(PACKAGE))
        caller = frame.f_back
        # Constructors of data classes have no file, and tests fill new memory in between.
        while caller is not None and (caller.f_code.co_filename[0] == "<" or caller.f_code.co_name == "filled"):
            caller = caller.f_back
        entries += caller is None or caller.f_code.co_filename != name

    sys.setprofile(note)
    try:
        layer(x)
    finally:
        sys.setprofile(None)
    return files, entries


def test_one_rank_alone_has_a_short_way() -> None:
    files, entries = entered(EP)
    assert len(files) <= 20, sorted(files)
    assert entries <= 120


@pytest.mark.parametrize(("strategy", "most"), [(EP, 25), (FSEP, 26)], ids=["ep", "fsep"])
def test_two_ranks_enter_few_files(ranks: LocalRanks, strategy: ms.Strategy, most: int) -> None:
    for files, entries in ranks.run(entered, strategy, num_ranks=2):
        assert len(files) <= most, sorted(files)
        assert entries <= 121
