"""Instances that the tests of balance share: any nodes, slots and loads, and one fixed skewed load."""

from dataclasses import dataclass
from itertools import product

import numpy as np
from hypothesis import strategies as st

from moesys.config import ClusterSpec
from moesys.layout import EMPTY, ExpertLayout
from moesys.load import LoadMatrix


@dataclass(frozen=True)
class Instance:
    load: LoadMatrix
    cluster: ClusterSpec
    slots: tuple[int, ...]


@st.composite
def instances(draw, max_ranks=9, max_experts=24, max_tokens=400, spare_slots=3):
    """Unequal nodes, unequal slots (0 allowed) that hold every expert, and loads: none, flat, sparse or skewed."""
    node_sizes = draw(
        st.lists(st.integers(1, max_ranks), min_size=1, max_size=4).filter(lambda sizes: sum(sizes) <= max_ranks)
    )
    num_ranks, num_experts = sum(node_sizes), draw(st.integers(1, max_experts))
    cluster = ClusterSpec(num_nodes=len(node_sizes), ranks_per_node=tuple(node_sizes))
    fair = -(-num_experts // num_ranks)
    slots = draw(st.lists(st.integers(0, fair + spare_slots), min_size=num_ranks, max_size=num_ranks))
    slots[draw(st.integers(0, num_ranks - 1))] += max(0, num_experts - sum(slots))
    rng = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    shape = (num_ranks, num_experts)
    match draw(st.sampled_from(["none", "flat", "sparse", "skewed"])):
        case "none":
            tokens_RE = np.zeros(shape, dtype=np.int64)
        case "flat":
            tokens_RE = rng.integers(0, max_tokens, shape)
        case "sparse":
            tokens_RE = rng.integers(1, max_tokens, shape) * (rng.random(shape) < 0.2)
        case _:
            share_E = rng.permutation(1.0 / np.arange(1, num_experts + 1) ** 1.5)
            tokens_RE = rng.poisson(max_tokens * share_E * rng.lognormal(0, 0.5, shape))
    return Instance(LoadMatrix(tokens_RE), cluster, tuple(slots))


@st.composite
def layouts(draw, instance):
    """Any legal layout of an instance's ranks and experts, duplicates and empty slots included."""
    num_ranks, num_experts = instance.load.num_ranks, instance.load.num_experts
    num_slots = -(-num_experts // num_ranks) + draw(st.integers(0, 3))
    cells = num_ranks * num_slots
    extra = draw(
        st.lists(st.integers(EMPTY, num_experts - 1), min_size=cells - num_experts, max_size=cells - num_experts)
    )
    order = np.random.default_rng(draw(st.integers(0, 2**32 - 1))).permutation(cells)
    return ExpertLayout(np.array([*range(num_experts), *extra])[order].reshape(num_ranks, num_slots), num_experts)


def zipf_load(num_ranks, num_experts, exponent, tokens_per_rank=4096):
    """The same skew from every rank, in an order of experts that is fixed but not sorted."""
    share_E = np.random.default_rng(1).permutation(1.0 / np.arange(1, num_experts + 1) ** exponent)
    rng = np.random.default_rng(2)
    return LoadMatrix(np.stack([rng.multinomial(tokens_per_rank, share_E / share_E.sum()) for _ in range(num_ranks)]))


def every_layout(num_ranks, num_slots, num_experts):
    """All layouts whose ranks hold ``num_slots`` different experts, or fewer."""
    rows = [[e for e in range(num_experts) if held >> e & 1] for held in range(1 << num_experts)]
    rows = [row + [-1] * (num_slots - len(row)) for row in rows if len(row) <= num_slots]
    for cells in product(rows, repeat=num_ranks):
        if len(set(np.ravel(cells)) - {-1}) == num_experts:
            yield ExpertLayout(np.array(cells), num_experts)
