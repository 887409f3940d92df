"""Counts of all ranks come to every rank, exchange after exchange, and a fast rank overwrites none that is unread."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from moesys.kernels.mega.arguments import publish
from moesys.kernels.mega.exchange import regions
from moesys.kernels.symmetric.counts import BLOCK_EXPERTS, Origin, count_regions, receive_counts, send_counts
from moesys.kernels.symmetric.heap import Heap
from moesys.kernels.symmetric.signals import PeerTimeoutError, raise_if_given_up

COLUMNS = BLOCK_EXPERTS + 9


class Sender:
    """One rank of an exchange; ``counts``: of each expert."""

    def __init__(self, heap: Heap) -> None:
        self.heap = heap
        self.epoch_1 = torch.zeros(1, dtype=torch.int32)
        self.exchanges_R = torch.zeros(heap.num_ranks, dtype=torch.int32)

    def send(self, counts_E: np.ndarray) -> None:
        first_E1 = torch.from_numpy(np.r_[0, counts_E.cumsum()]).int()
        send_counts(self.heap, self.exchanges_R, first_E1, Origin())
        publish(self.heap, self.epoch_1, {})

    def receive(self, num_experts: int) -> list[list[int]]:
        return receive_counts(self.heap, self.epoch_1, self.exchanges_R, num_experts).tokens_RE.tolist()


def virtual(num_ranks: int, timeout_s: float = 30.0) -> list[Sender]:
    wanted = {**regions(1, 1, 1, torch.float32, num_ranks, 1), **count_regions(num_ranks, COLUMNS)}
    return [Sender(heap) for heap in Heap.virtual(wanted, num_ranks, "cpu", timeout_s)]


@pytest.mark.parametrize("num_ranks", [1, 3])
def test_everybody_gets_everybodys_row(num_ranks: int) -> None:
    """Of layers with more and fewer experts in turn, beyond what int32 can hold nowhere."""
    senders = virtual(num_ranks)
    numbers = np.random.default_rng(0)
    for num_experts in (COLUMNS, 1, 7, COLUMNS):
        counts_RE = numbers.integers(0, 5, (num_ranks, num_experts))
        for sender, counts_E in zip(senders, counts_RE, strict=True):
            sender.send(counts_E)
        for sender in senders:
            assert sender.receive(num_experts) == counts_RE.tolist()


def test_nobody_counts_for_one_that_was_given_up() -> None:
    dead, left = virtual(2, timeout_s=0.01)
    for sender in (dead, left):
        sender.send(np.array([1, 2]))
    for sender in (dead, left):
        sender.receive(2)
    left.send(np.array([5, 6]))
    assert left.receive(2) == [[0, 0], [5, 6]]
    with pytest.raises(PeerTimeoutError, match=r"waited 0\.01 s for rank 0 in publish: flag 0 is at epoch 1, not 2"):
        raise_if_given_up(left.heap)
