"""Ranks' clocks on lanes: how long computing takes beside messages."""

from __future__ import annotations

import numpy as np
import pytest

import moesys as ms
from moesys.cost import link_load
from moesys.overlap.lanes import Lanes

PAIR = ms.ClusterSpec(num_nodes=2, ranks_per_node=1, inter_node_gb_per_s=1.0)
# One second on the way.
MESSAGE = link_load(np.array([[0.0, 1e9], [0.0, 0.0]]), PAIR)


@pytest.mark.parametrize("seed", range(100))
def test_computing_beside_messages_loses_its_share_and_no_more(seed):
    # By chance and not by hypothesis, whose numbers are round: what is lost in rounding shows in others.
    seconds, copy_share, before = np.random.default_rng(seed).uniform((0.0, 0.01, 0.0), (2.0, 0.6, 0.3))
    lanes = Lanes(PAIR, copy_share)
    lanes.send("tokens", "dispatch", MESSAGE, "")
    lanes.compute(before, "gather", "")
    began = lanes.now_R
    lanes.compute(seconds, "experts", "")
    beside = 1.0 - began
    slowed = seconds / (1 - copy_share)
    alone = np.where(slowed <= beside, slowed, beside + seconds - beside * (1 - copy_share))
    expected = np.where(began < 1.0, alone, seconds)
    assert lanes.now_R - began == pytest.approx(expected, rel=1e-9)
