"""Flags in turn: every one is waited for, and ranks that do not play are not held up."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist

from benchmarks.calibrate.ping_pong import PingPong
from moesys.kernels.symmetric.signals import PeerTimeoutError
from moesys.lab.ranks.pool import LocalRanks


def plays(pair: tuple[int, int]) -> tuple[int, int]:
    """The last epoch of this rank's own flag, and how many flags it has raised."""
    game = PingPong(dist.group.WORLD, pair, torch.device("cpu"))
    game.play(3)
    game.play(2)
    dist.barrier()
    return int(game._heap.own("flag")[0]), game._epoch


@pytest.mark.parametrize("pair", [(0, 1), (2, 0)])
def test_two_ranks_answer_each_other_and_others_do_not_wait(ranks: LocalRanks, pair: tuple[int, int]) -> None:
    flags = ranks.run(plays, pair, num_ranks=3)
    assert flags == [(5 if rank in pair else 0, 5) for rank in range(3)]


def gives_up(pair: tuple[int, int]) -> str:
    game = PingPong(dist.group.WORLD, pair, torch.device("cpu"))
    game._heap.world[2] = 10
    said = ""
    if dist.get_rank() == pair[0]:
        with pytest.raises(PeerTimeoutError) as raised:
            game.play(1)
        said = str(raised.value)
    dist.barrier()
    return said


def test_who_plays_alone_gives_up(ranks: LocalRanks) -> None:
    said, _ = ranks.run(gives_up, (0, 1), num_ranks=2)
    assert "for rank 1 in publish: flag 0 is at epoch 0, not 1" in said
