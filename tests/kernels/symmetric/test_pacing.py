"""A link of a declared pace: messages follow one another, and tell no sooner than they would be through."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
import triton
import triton.language as tl

from benchmarks.mega.pacing import paced_copies, paced_link
from moesys.kernels.symmetric import signals
from moesys.kernels.symmetric.signals import arrive, now_ns, set_off

CPU = torch.device("cpu")
# 20 KB on a link of 2 MB/s: 10 ms.
ROWS, ROW_BYTES, GB_PER_S, MESSAGE_NS = 16, 1250, 2e-3, 10_000_000
BEGIN_NS, POLL_NS = 5_000, 1_000


@pytest.fixture
def clock(monkeypatch):
    """One that only goes on while somebody waits."""
    clock = SimpleNamespace(ns=BEGIN_NS)

    def nap():
        clock.ns += POLL_NS

    monkeypatch.setattr(signals, "host_ns", lambda: clock.ns)
    monkeypatch.setattr(signals, "nap", nap)
    return clock


@triton.jit
def _message(link_ptr, num_away, row_bytes, ROWS: tl.constexpr):
    """Of so many of its rows, from each program; all set off before the first arrives."""
    away = tl.arange(0, ROWS) < num_away
    first = set_off(link_ptr, away, row_bytes)
    second = set_off(link_ptr, away, row_bytes)
    arrive(link_ptr, first)
    tl.store(link_ptr + 2, now_ns())
    arrive(link_ptr, second)


@pytest.mark.parametrize("num_away", [ROWS, ROWS // 2, 0], ids=["all rows leave", "half", "none"])
def test_messages_follow_one_another_at_the_pace(clock, num_away):
    paced = torch.cat([paced_link(GB_PER_S, CPU), torch.zeros(1, dtype=torch.int64)])
    _message[(1,)](paced, num_away, ROW_BYTES, ROWS)
    took_ns = MESSAGE_NS * num_away // ROWS
    assert int(paced[0]) == BEGIN_NS + 2 * took_ns
    assert int(paced[2]) == BEGIN_NS + took_ns
    assert clock.ns == BEGIN_NS + 2 * took_ns


def test_a_link_that_was_idle_has_saved_nothing(clock):
    paced = paced_link(GB_PER_S, CPU)
    clock.ns += MESSAGE_NS
    with paced_copies(paced, ROWS * ROW_BYTES):
        pass
    assert clock.ns == BEGIN_NS + 2 * MESSAGE_NS


@pytest.mark.parametrize(("copying_ns", "took_ns"), [(MESSAGE_NS // 2, MESSAGE_NS), (2 * MESSAGE_NS, 2 * MESSAGE_NS)])
def test_copies_of_others_take_the_links_time_or_their_own(clock, copying_ns, took_ns):
    with paced_copies(paced_link(GB_PER_S, CPU), ROWS * ROW_BYTES):
        clock.ns += copying_ns
    assert clock.ns == BEGIN_NS + took_ns


def test_without_a_link_nothing_waits(clock):
    with paced_copies(None, ROWS * ROW_BYTES):
        pass
    assert clock.ns == BEGIN_NS
