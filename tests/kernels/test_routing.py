"""Routing metadata: the rows of a stable sort, from kernels, whatever the sizes of their blocks."""

from __future__ import annotations

import pytest
import torch
from conftest import assert_equal
from hypothesis import example, given
from hypothesis import strategies as st
from kernel_references import route_reference
from torch import Tensor

from moesys.kernels import routing as module
from moesys.kernels.routing import route


def choices(T: int, K: int, low: int, high: int, seed: int = 0) -> Tensor:
    """[T, K] in low..high-1; tokens may choose a group twice."""
    return torch.randint(low, high, (T, K), generator=torch.Generator().manual_seed(seed))


def experts(T: int, K: int, E: int) -> Tensor:
    """[T, K] without repetition in a row, as routers choose."""
    return torch.rand(T, E, generator=torch.Generator().manual_seed(T)).argsort(dim=1)[:, :K]


# Each case says which edge it is: (choices, groups).
EDGES = {
    "no tokens": (choices(0, 4, 0, 3), 3),
    "one token": (choices(1, 3, 0, 5), 5),
    "one choice of one group": (torch.zeros(1, 1, dtype=torch.int64), 1),
    "one choice a token": (choices(70, 1, 0, 6), 6),
    "every group chosen by every token": (experts(40, 6, 6), 6),
    "a block exactly full": (choices(module.BLOCK_CHOICES // 4, 4, 0, 7), 7),
    "one choice behind a full block": (choices(module.BLOCK_CHOICES + 1, 1, 0, 7), 7),
    "several blocks": (experts(150, 3, 11), 11),
    "all tokens to one group": (torch.full((90, 2), 4), 9),
    "groups in falling order": (torch.arange(199, -1, -1).view(100, 2) // 7, 29),
    "empty groups at both ends and between": (2 * choices(60, 3, 1, 4), 12),
    "more groups than choices": (choices(5, 2, 0, 50), 50),
    "some dropped by the id of expert parallelism": (choices(100, 2, 0, 5), 4),
    "some dropped on either side": (choices(100, 2, -3, 7), 4),
    "all dropped": (torch.full((70, 2), 4), 4),
    "a thousand groups": (experts(60, 8, 1000), 1000),
    "choices that are not contiguous": (choices(4, 40, 0, 6).t(), 6),
    "a first block without any choice kept": (torch.arange(300).view(150, 2) // 150 - 1, 2),
    "ids at the ends of int32": (torch.tensor([[-(2**31), 2**31 - 1], [0, -1], [2, 1]]), 2),
}


@pytest.mark.parametrize(("group_TK", "G"), EDGES.values(), ids=EDGES)
def test_edges_agree_with_the_reference(group_TK: Tensor, G: int) -> None:
    group_TK = group_TK.to((torch.int32, torch.int64)[G % 2])
    before = group_TK.clone()
    routing = route(group_TK, G)
    assert_equal(routing, route_reference(group_TK, G))
    assert torch.equal(group_TK, before)


def test_by_hand() -> None:
    routing = route(torch.tensor([[1, 0], [3, 1], [1, 2]]), 3)
    assert routing.first_G1.tolist() == [0, 1, 4, 5]
    assert routing.entry_P.tolist() == [1, 0, 3, 4, 5, -1]
    assert routing.row_TK.tolist() == [[1, 0], [-1, 2], [3, 4]]


@given(
    T=st.integers(0, 60),
    K=st.integers(1, 7),
    G=st.integers(1, 40),
    low=st.integers(-2, 0),
    beyond=st.integers(0, 2),
    narrow=st.booleans(),
    seed=st.integers(0, 1 << 16),
    block=st.sampled_from([16, 32, 128]),
    scanned=st.sampled_from([4, 16, 1024]),
)
# Ten blocks and ten groups are three steps of a prefix sum each.
@example(T=80, K=2, G=10, low=0, beyond=0, narrow=False, seed=0, block=16, scanned=4)
def test_any_choices_in_blocks_of_any_size(
    T: int, K: int, G: int, low: int, beyond: int, narrow: bool, seed: int, block: int, scanned: int
) -> None:
    group_TK = choices(T, K, low, G + beyond, seed)
    # Some of the groups only, so that a few are crowded.
    group_TK = group_TK // 3 if narrow else group_TK
    with pytest.MonkeyPatch.context() as patch:
        for name, size in {"BLOCK_CHOICES": block, "SCANNED": scanned}.items():
            patch.setattr(module, name, size)
        assert_equal(route(group_TK, G), route_reference(group_TK, G))


def test_ids_are_compared_before_they_are_narrowed() -> None:
    group_TK = torch.tensor([[2**32, 1], [0, 2**33 + 1], [-(2**32), -(2**63)]])
    assert route(group_TK, 2).row_TK.tolist() == [[-1, 1], [0, -1], [-1, -1]]
