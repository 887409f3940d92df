"""Ranks' clocks on lanes: how long computing takes beside messages."""

from __future__ import annotations

import numpy as np
import pytest

import moesys as ms
from moesys.cost import link_load
from moesys.simulator.simulation import Lanes

PAIR = ms.ClusterSpec(num_nodes=2, ranks_per_node=1, inter_node_gb_per_s=1.0)
# One second on the way.
MESSAGE = link_load(np.array([[0.0, 1e9], [0.0, 0.0]]), PAIR)


@pytest.mark.parametrize("copy_share", [24 / 132, 24 / 148, 0.3, 0.5])
def test_computing_beside_messages_loses_its_share_and_no_more(copy_share):
    # Many, as what is lost in rounding shows in few.
    for seconds in np.random.default_rng(0).uniform(0.0, 1.5, 1000):
        lanes = Lanes(PAIR, copy_share)
        lanes.send("tokens", "dispatch", MESSAGE, "")
        lanes.compute(seconds, "experts", "")
        expected = min(seconds / (1 - copy_share), seconds + copy_share)
        assert lanes.now_R == pytest.approx([expected] * 2, rel=1e-9)


def test_waiting_for_another_node_is_told_where_messages_stay_inside_nodes():
    nodes = ms.ClusterSpec(num_nodes=2, ranks_per_node=2, intra_node_gb_per_s=1.0, inter_node_gb_per_s=1.0)
    inside_RR = np.zeros((4, 4))
    inside_RR[0, 1] = inside_RR[2, 3] = 1e9
    across_RR = np.zeros((4, 4))
    across_RR[0, 2] = 1e9
    for bytes_RR, expected in ((inside_RR, [0, 0, 3, 3]), (across_RR, [0, 0, 0, 0])):
        lanes = Lanes(nodes, copy_share=0.0)
        lanes.compute(np.array([5.0, 4.0, 2.0, 1.0]), "experts", "")
        lanes.wait(lanes.send("tokens", "combine", link_load(bytes_RR, nodes), ""))
        assert lanes.other_domains_R == pytest.approx(np.array(expected, dtype=float))
