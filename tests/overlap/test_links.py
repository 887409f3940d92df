"""Two channels of all-to-alls over shared links: who gets how much, and when each ends."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from moesys.overlap.links import Links


def seconds(*work: float) -> np.ndarray:
    return np.array(work)


def test_an_all_to_all_alone_takes_as_long_as_its_busiest_link():
    links = Links()
    flow = links.issue("tokens", 1.0, seconds(2.0, 3.0, 0.0))
    assert (links.end_of(flow), flow.start) == (4.0, 1.0)


def test_a_channel_runs_one_all_to_all_at_a_time_in_order():
    links = Links()
    first, second = links.issue("tokens", 0.0, seconds(1.0, 0.0)), links.issue("tokens", 0.5, seconds(0.0, 1.0))
    assert (links.end_of(second), second.start, links.end_of(first)) == (2.0, 1.0, 1.0)


def test_channels_with_different_links_do_not_disturb_each_other():
    links = Links()
    tokens, weights = links.issue("tokens", 0.0, seconds(2.0, 0.0)), links.issue("weights", 0.0, seconds(0.0, 3.0))
    assert (links.end_of(tokens), links.end_of(weights)) == (2.0, 3.0)


def test_channels_share_a_link_half_and_half_until_one_is_through():
    links = Links()
    weights = links.issue("weights", 0.0, seconds(10.0))
    tokens = links.issue("tokens", 4.0, seconds(2.0))
    assert links.end_of(tokens) == 8.0
    assert links.end_of(weights) == 12.0


def test_what_one_link_gains_when_the_other_flow_has_left_it_is_not_lost():
    links = Links()
    weights, tokens = links.issue("weights", 0.0, seconds(4.0, 0.0)), links.issue("tokens", 0.0, seconds(1.0, 6.0))
    assert links.end_of(weights) == 5.0
    assert links.end_of(tokens) == 6.0


def test_latency_comes_before_the_first_byte_and_counts_for_each():
    links = Links(latency_seconds=0.25)
    first, second = links.issue("tokens", 0.0, seconds(1.0)), links.issue("tokens", 0.0, seconds(0.0))
    assert links.end_of(second) == 1.5
    assert (first.start, second.start) == (0.0, 1.25)


works = st.lists(st.floats(0, 10), min_size=3, max_size=3).map(np.array)


@given(st.lists(st.tuples(st.sampled_from(["tokens", "weights"]), st.floats(0, 5), works), min_size=1, max_size=8))
def test_nothing_is_faster_than_its_links_or_slower_than_one_after_another(issued):
    links, ready, flows = Links(), 0.0, []
    for channel, pause, work_L in issued:
        ready += pause
        flows.append((channel, ready, links.issue(channel, ready, work_L.copy()), work_L))
    end = max(links.end_of(flow) for *_, flow, _ in flows)
    assert end <= ready + sum(work_L.max() for *_, work_L in flows) + 1e-9
    assert end >= np.sum([work_L for *_, work_L in flows], axis=0).max() - 1e-9
    for which in ("tokens", "weights"):
        last_end = 0.0
        for channel, ready, flow, work_L in flows:
            if channel == which:
                assert flow.start == pytest.approx(max(ready, last_end))
                assert flow.end is not None
                assert flow.end >= flow.start + work_L.max() - 1e-9
                last_end = flow.end
