"""Links: who gets how much of what, against a scalar simulation of each link by itself."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import moesys as ms
from moesys.cost import LinkLoad, link_load
from moesys.simulator.links import Flow, Links

FOUR = ms.ClusterSpec(num_nodes=2, ranks_per_node=2, intra_node_gb_per_s=4, inter_node_gb_per_s=1)


def load(*messages: tuple[int, int, float]) -> LinkLoad:
    """(source, destination, GB)."""
    bytes_RR = np.zeros((4, 4))
    for source, destination, gigabytes in messages:
        bytes_RR[source, destination] += gigabytes * 1e9
    return link_load(bytes_RR, FOUR)


@dataclass
class Job:
    channel: str
    begin: float
    left: float
    end: float = -1.0


def shared(jobs: list[Job]) -> None:
    """One link that gives every channel with work half of itself, or all where the other has none; in tiny events."""
    clock = 0.0
    while waiting := [job for job in jobs if job.end < 0]:
        active = [job for job in waiting if job.begin <= clock]
        for job in active:
            if job.left <= 0:
                job.end = clock
        active = [job for job in active if job.end < 0]
        later = [job.begin for job in waiting if job.begin > clock]
        if not active:
            if not later:
                return
            clock = min(later)
            continue
        rate = 1 / len(active)
        step = min(min(job.left for job in active) / rate, *(begin - clock for begin in later), np.inf)
        for job in active:
            job.left = 0.0 if job.left / rate <= step else job.left - step * rate
        clock += step


@given(st.integers(0, 2**32))
def test_every_link_serves_its_flows_as_it_would_alone(seed):
    rng = np.random.default_rng(seed)
    cluster = FOUR.replace(intra_node_us=float(rng.choice([0, 2e5])), inter_node_us=float(rng.choice([0, 1e6])))
    links, flows, channels, now = Links(cluster), [], [], 0.0
    for _ in range(8):
        bytes_RR = rng.integers(0, 5, (4, 4)) * rng.integers(0, 2, (4, 4)) * 1e9
        np.fill_diagonal(bytes_RR, 0)
        channels.append(str(rng.choice(["tokens", "weights"])))
        flows.append(links.issue(channels[-1], now, link_load(bytes_RR, cluster)))  # type: ignore[arg-type]
        now += float(rng.choice([0.0, 0.3, 2.0]))
        if rng.random() < 0.4:
            awaited = flows[rng.integers(len(flows))]
            now = max(now, float(links.end_of(awaited).max()))
    for flow in flows:
        links.end_of(flow)
    for link in range(12):
        latency = (cluster.intra_node_us if link < 8 else cluster.inter_node_us) * 1e-6
        jobs = [
            Job(channel, flow.start + latency, flow.load.seconds_L[link])
            for channel, flow in zip(channels, flows, strict=True)
        ]
        shared(jobs)
        for flow, job in zip(flows, jobs, strict=True):
            assert flow.end_L is not None
            assert flow.end_L[link] == pytest.approx(job.end)
    for channel in ("tokens", "weights"):
        own = [f for f, of in zip(flows, channels, strict=True) if of == channel and f.load.used_4R.any()]
        for before, after in pairwise(own):
            assert after.start >= links.end_of(before).max()


def test_a_rank_is_through_with_its_own_messages():
    links = Links(FOUR)
    # 4 GB inside node 0 take a second; 3 GB between nodes take three.
    flow = links.issue("tokens", 1.0, load((0, 1, 4), (1, 2, 3)))
    assert links.end_of(flow).tolist() == [2.0, 4.0, 4.0, -np.inf]


def test_what_sends_nothing_is_through_at_once():
    links = Links(FOUR.replace(intra_node_us=1e6))
    links.issue("tokens", 0.0, load((0, 1, 4)))
    nothing = links.issue("tokens", 0.0, load())
    assert links.end_of(nothing).tolist() == [-np.inf] * 4
    links.issue("weights", 0.5, load((0, 1, 4)))


def test_the_ranks_of_a_node_share_its_way_out():
    links = Links(FOUR)
    assert links.end_of(links.issue("tokens", 0.0, load((0, 2, 1), (1, 3, 2)))).tolist() == [3.0, 3.0, 3.0, 3.0]


def test_two_channels_share_a_link_and_others_do_not_wait():
    links = Links(FOUR)
    tokens = links.issue("tokens", 0.0, load((0, 1, 4)))
    weights = links.issue("weights", 0.5, load((0, 1, 4), (2, 3, 4)))
    # Alone for half a second; then each has half of the link, until the first is through.
    assert links.end_of(tokens).tolist() == [1.5, 1.5, -np.inf, -np.inf]
    assert links.end_of(weights).tolist() == [2.0, 2.0, 1.5, 1.5]


def test_messages_set_off_at_once_and_a_channel_takes_one_flow_after_another():
    late = Links(FOUR.replace(intra_node_us=1e5, inter_node_us=5e5))
    first = late.issue("tokens", 0.0, load((0, 1, 4), (1, 2, 1)))
    second = late.issue("tokens", 0.0, load((0, 1, 4)).messages())
    assert late.end_of(first).tolist() == [1.1, 1.5, 1.5, -np.inf]
    assert late.end_of(second).tolist() == [1.6, 1.6, -np.inf, -np.inf]


def test_what_would_be_if_nothing_followed_changes_nothing():
    links = Links(FOUR)
    first: Flow = links.issue("tokens", 0.0, load((0, 1, 4)))
    links.issue("tokens", 0.0, load((0, 1, 8)))
    assert [(start, end_R[0]) for start, end_R in links.if_nothing_follows()] == [(0.0, 1.0), (1.0, 3.0)]
    links.issue("weights", 0.0, load((0, 1, 1)))
    assert links.end_of(first)[0] == 1.25
    assert Links(FOUR).if_nothing_follows() == []
