"""fill_late_slots: what it may hold, that it saves more seconds than it costs, and what it does to a drifting load.

Seconds are counted here by ``cost`` and OR-Tools' minimum cut, which the choice does not use.
"""

from itertools import pairwise

import numpy as np
import pytest
from balance_cases import instances
from hypothesis import given
from hypothesis import strategies as st

from moesys.balance.eplb import Eplb
from moesys.balance.flow.flow_split import FlowSplit
from moesys.balance.flow.max_load import min_max_load
from moesys.balance.greedy.greedy import Greedy
from moesys.balance.late_slots import fill_late_slots
from moesys.balance.run_planner import plan_layout, split_tokens
from moesys.config import ClusterSpec, Ep, Fsep, ModelShape
from moesys.cost import expert_seconds, restore_bytes, transfer_seconds
from moesys.layout import EMPTY, ExpertLayout
from moesys.load import LoadMatrix

# All but the late fetch itself travels behind other layers.
AHEAD = Fsep(slots_per_rank=1, prefetch_layers=1, delay_reshard=True)
CHEAP = {"intra_node_gb_per_s": 1e9, "inter_node_gb_per_s": 1e9}


def shape(num_experts):
    return ModelShape(hidden_size=64, intermediate_size=96, num_experts=num_experts, top_k=1, dtype="bfloat16")


def token_seconds(model, cluster):
    return sum(expert_seconds(1.0, model, cluster, backward) for backward in (False, True))


@given(data=st.data(), instance=instances(), late=st.integers(1, 3), gb_per_s=st.sampled_from([1e-3, 1.0, 50.0, 1e6]))
def test_what_late_slots_hold_and_what_they_cost(data, instance, late, gb_per_s):
    load, slots_R = instance.load, instance.slots
    lent = Ep(slots_per_rank=1)
    sharding = data.draw(st.sampled_from([AHEAD, lent, lent.replace(prefetch_layers=1, delay_reshard=True)]))
    # One node: all that is weighed is the busiest rank and the busiest link.
    cluster = ClusterSpec(ranks_per_node=load.num_ranks, intra_node_gb_per_s=gb_per_s, expert_tflops=1)
    model = shape(load.num_experts)
    layout = plan_layout(load, cluster, Eplb(), slots_R)
    now = LoadMatrix(np.roll(load.tokens_RE, data.draw(st.integers(0, 3)), axis=1))
    late_R = tuple(late * (slots > 0) for slots in slots_R)
    filled = fill_late_slots(now, layout, cluster, model, sharding, late_R)

    assert filled == fill_late_slots(now, layout, cluster, model, sharding, late_R)
    assert filled.without_last(late) == layout
    late_RL = filled.expert_RS[:, layout.num_slots :]
    assert filled.num_duplicates == layout.num_duplicates
    assert (late_RL[np.array(slots_R) == 0] == EMPTY).all()

    price = token_seconds(model, cluster)
    fetch = [transfer_seconds(each, cluster) for each in restore_bytes(filled, model, cluster, sharding, here=layout)]
    gradients = 1 + 2  # of bfloat16 weights, in float32
    gain = price * (min_max_load(now, layout) - min_max_load(now, filled))
    assert gain >= gradients * sum(fetch) * (1 - 1e-9)
    if (late_RL != EMPTY).any():
        assert gain > 0


@given(data=st.data(), num_ranks=st.integers(2, 6), tokens=st.integers(1, 400))
def test_one_hot_expert_is_copied_as_often_as_it_pays(data, num_ranks, tokens):
    """All tokens are one expert's, and every rank may fetch it: n copies leave tokens / (n + 1) on each."""
    model, gb_per_s = shape(num_ranks), data.draw(st.sampled_from([0.01, 0.1, 1.0, 1e6]))
    cluster = ClusterSpec(ranks_per_node=num_ranks, intra_node_gb_per_s=gb_per_s, expert_tflops=1)
    tokens_RE = np.zeros((num_ranks, num_ranks), dtype=np.int64)
    tokens_RE[0, 0] = tokens
    layout = plan_layout(LoadMatrix(tokens_RE), cluster, Eplb(), 1)
    filled = fill_late_slots(LoadMatrix(tokens_RE), layout, cluster, model, AHEAD, (1,) * num_ranks)
    # A copy brings a slice from every other rank; a slice's way out carries each copy, and a way in R - 1 slices.
    slice_seconds = (2 + 4) * model.expert_parameters / num_ranks / (gb_per_s * 1e9)
    seconds = [
        token_seconds(model, cluster) * -(-tokens // (copies + 1))
        + slice_seconds * (max(num_ranks - 1, copies) if copies else 0)
        for copies in range(num_ranks)
    ]
    copies = int((filled.expert_RS[:, 1:] != EMPTY).sum())
    assert seconds[copies] == pytest.approx(min(seconds), rel=1e-9)


def test_a_drifting_load_is_balanced_with_few_fetches():
    """A hot expert that another takes over, 16 ranks, 3 + 1 slots, planned on the load before."""
    cluster = ClusterSpec(num_nodes=2, ranks_per_node=8, **CHEAP)
    rng, model, before, after, used = np.random.default_rng(0), shape(32), [], [], []
    popular_E = rng.lognormal(0, 1.2, 32)
    drawn = []
    for _ in range(12):
        popular_E *= rng.lognormal(0, 0.4, 32)
        # Drawn back, so that no expert takes all.
        popular_E **= 0.93
        share_RE = popular_E * rng.lognormal(0, 0.2, (16, 32))
        drawn.append(np.stack([rng.multinomial(4096, share_E / share_E.sum()) for share_E in share_RE]))
    for earlier, tokens_RE in pairwise(drawn):
        now, layout = LoadMatrix(tokens_RE), plan_layout(LoadMatrix(earlier), cluster, Greedy(), 3, model=model)
        filled = fill_late_slots(now, layout, cluster, model, AHEAD, (1,) * 16)
        before.append(split_tokens(now, layout, cluster, FlowSplit()).max_over_mean)
        after.append(split_tokens(now, filled, cluster, FlowSplit()).max_over_mean)
        used.append((filled.expert_RS[:, 3:] != EMPTY).mean())
    assert np.mean(before) > 1.1
    assert np.mean(after) <= 1.02
    assert np.mean(used) <= 0.25


@pytest.mark.parametrize("source", [1, 2])
def test_a_copy_goes_where_its_tokens_are(source):
    """Ranks 1 and 2 are equally idle, one of them has all the tokens, and a second copy would not pay."""
    cluster = ClusterSpec(num_nodes=3, ranks_per_node=1, inter_node_gb_per_s=33, expert_tflops=1)
    tokens_RE = np.zeros((3, 3), dtype=np.int64)
    tokens_RE[source, 0] = 100
    layout = ExpertLayout([[0], [1], [2]], 3)
    filled = fill_late_slots(LoadMatrix(tokens_RE), layout, cluster, shape(3), Ep(slots_per_rank=2), (1,) * 3)
    assert np.argwhere(filled.expert_RS[:, 1:] == 0).tolist() == [[source, 0]]


@pytest.mark.parametrize(("ranks_per_domain", "fetched"), [(None, 0), (2, 1)])
def test_a_domain_of_several_nodes_is_one_to_its_ranks(ranks_per_domain, fetched):
    """Between nodes a copy is too dear, and inside what joins them it is not."""
    links = {"intra_node_gb_per_s": 1e3, "inter_node_gb_per_s": 1e-3, "expert_tflops": 1}
    cluster = ClusterSpec(num_nodes=2, ranks_per_node=1, ranks_per_domain=ranks_per_domain, **links)
    load, layout = LoadMatrix([[900, 0], [100, 0]]), ExpertLayout([[0], [1]], 2)
    filled = fill_late_slots(load, layout, cluster, shape(2), Ep(slots_per_rank=2), (1, 1))
    assert (filled.expert_RS[:, 1:] != EMPTY).sum() == fetched


@pytest.mark.parametrize(("sharding", "gb_per_s", "flat"), [(Ep(slots_per_rank=2), 1.67, 2), (AHEAD, 0.33, 4)])
def test_a_second_late_copy_in_a_node_comes_from_inside(sharding, gb_per_s, flat):
    """All tokens of node 0 are for the expert of rank 0. Copies in its node come first, and the last of those in the
    other node only pays where one transfer between nodes brings all three.
    """
    by_node = {"lend": "hierarchical"} if isinstance(sharding, Ep) else {"restore": "hierarchical"}
    links = {"inter_node_gb_per_s": gb_per_s, "intra_node_gb_per_s": 1e6}
    cluster = ClusterSpec(num_nodes=2, ranks_per_node=3, expert_tflops=1, **links)
    tokens_RE, model = np.zeros((6, 6), dtype=np.int64), shape(6).replace(intermediate_size=10**5)
    tokens_RE[:3, 0] = 2000
    layout = ExpertLayout(np.arange(6)[:, None], 6)
    for how, copies in ((sharding, flat), (sharding.replace(**by_node), 5)):
        filled = fill_late_slots(LoadMatrix(tokens_RE), layout, cluster, model, how, (1,) * 6)
        assert (filled.expert_RS[:, 1] == 0).tolist() == [False, *(rank <= copies for rank in range(1, 6))]
