"""Gradients of blocks of rows in the interpreter: right, and with bits that show neither who had the rows, nor how many
had them.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest
import torch
from conftest import examples
from hypothesis import given
from hypothesis import strategies as st
from kernel_references import groups_by_size_reference
from torch import Tensor

from moesys.kernels.experts.tile_config import TileConfig
from moesys.kernels.experts.weight_gradient import OrderedGroups, RowBlocks, weight_gradient
from moesys.overlap.exact_sum import add_on_grid, grid_below

TILE = TileConfig(rows=16, columns=32, contraction=16)
OTHER_TILES = {
    "wide": TileConfig(rows=32, columns=64, contraction=16),
    "narrow, one program, rasters of one": TileConfig(rows=16, columns=16, contraction=16, raster=1, programs=1),
    "more programs than tiles": TileConfig(rows=32, columns=16, contraction=16, programs=99),
}
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}
# Whose products of 16 rows do not fill a step, fill one, and fill more than two.
BLOCKS = (10, 16, 50)
L, R = 19, 37


class Rows:
    """Rows of experts, by expert and in order, and what they are multiplied with; sizes differ so that sums cancel."""

    def __init__(self, rows_E: Sequence[int], dtype: torch.dtype, seed: int = 0) -> None:
        generator = torch.Generator().manual_seed(seed)
        total = sum(rows_E)
        sizes = torch.randint(-6, 6, (total, 1), generator=generator).float().exp2()
        self.left_PL = (torch.randn(total, L, generator=generator) * sizes).to(dtype)
        self.right_PR = torch.randn(total, R, generator=generator).to(dtype)
        self.experts = np.split(np.arange(total), np.cumsum(rows_E)[:-1])
        bounds = [len(of) * self.largest(self.left_PL, of) * self.largest(self.right_PR, of) for of in self.experts]
        self.grid_E = grid_below(torch.tensor(bounds, dtype=torch.float64))

    @staticmethod
    def largest(rows: Tensor, of: np.ndarray) -> float:
        return float(rows[of].abs().max()) if len(of) else 0.0

    def groups(self, slots: Sequence[np.ndarray], gathered: str) -> tuple[Tensor, Tensor, OrderedGroups]:
        """What kernels take where ``slots`` have these rows, one behind the other: both sides and the groups."""
        order_P = torch.from_numpy(np.concatenate([*slots, np.zeros(0, dtype=np.int64)]))
        first_G1 = torch.tensor([0, *np.cumsum([len(rows) for rows in slots])], dtype=torch.int32)
        groups = OrderedGroups(order_P.int(), first_G1, groups_by_size_reference(first_G1))
        if gathered == "left":
            return self.left_PL, self.right_PR[order_P], groups
        return self.left_PL[order_P], self.right_PR, groups


@pytest.mark.parametrize("block_rows", BLOCKS)
@pytest.mark.parametrize(
    ("dtype", "gathered"), [(torch.float32, "left"), (torch.bfloat16, "right")], ids=["left", "right"]
)
def test_agrees_with_float64(block_rows: int, dtype: torch.dtype, gathered: str) -> None:
    rows = Rows([70, 0, 33, 1], dtype)
    left, right, groups = rows.groups(rows.experts, gathered)
    blocks = RowBlocks(block_rows, rows.grid_E)
    found_ELR = weight_gradient(left, right, groups, 1, gathered, TILE, blocks=blocks)
    assert found_ELR.dtype == torch.float64
    for expert, of in enumerate(rows.experts):
        left_PL, right_PR = rows.left_PL[of].double(), rows.right_PR[of].double()
        # Products of 16 bits are exact in float32, so only float32's own roundings of a few rows are left.
        most = 1e-6 * (left_PL.abs().t() @ right_PR.abs()).max() if len(of) else 0.0
        assert ((found_ELR[expert] - left_PL.t() @ right_PR).abs() <= most).all()
        on_grid_LR = (found_ELR[expert] / rows.grid_E[expert]).round() * rows.grid_E[expert]
        assert torch.equal(on_grid_LR, found_ELR[expert])


def test_small_integers_are_what_the_cpu_adds_up() -> None:
    """Where float32 sums are exact, the two homes have the same bits, on a grid that rounds them."""
    generator = torch.Generator().manual_seed(0)
    left_PL, right_PR = (torch.randint(-9, 10, (45, width), generator=generator).float() for width in (L, R))
    grid = 16.0
    total_LR = torch.zeros(L, R, dtype=torch.float64)
    # What is left behind 40 rows is less than half a block.
    for rows in (slice(0, 20), slice(20, 45)):
        add_on_grid(total_LR, left_PL[rows].t() @ right_PR[rows], grid)
    first_G1 = torch.tensor([0, 45], dtype=torch.int32)
    groups = OrderedGroups(torch.arange(45).int(), first_G1, torch.zeros(1).int())
    blocks = RowBlocks(20, torch.tensor([grid], dtype=torch.float64))
    assert torch.equal(weight_gradient(left_PL, right_PR, groups, 1, "right", TILE, blocks=blocks)[0], total_LR)


def stretches(rng: np.random.Generator, rows: np.ndarray, block_rows: int) -> list[np.ndarray]:
    """An expert's rows in up to four stretches of whole blocks."""
    num_blocks = max(1, (2 * len(rows) + block_rows) // (2 * block_rows))
    cuts = np.sort(rng.integers(0, num_blocks, rng.integers(0, 4)))
    return np.split(rows, cuts * block_rows)


# Programs are slow in the interpreter.
@examples(2, 20)
@given(st.integers(0, 2**32 - 1), st.sampled_from(BLOCKS), st.sampled_from(sorted(DTYPES)))
def test_neither_slots_nor_their_order_nor_ranks_show(seed: int, block_rows: int, dtype: str) -> None:
    rng = np.random.default_rng(seed)
    rows = Rows(rng.integers(0, 90, rng.integers(1, 4)).tolist(), DTYPES[dtype], seed)
    gathered = ("left", "right")[rng.integers(2)]

    def gradients(slots: Sequence[np.ndarray], expert_S: Sequence[int]) -> Tensor:
        left, right, groups = rows.groups(slots, gathered)
        blocks = RowBlocks(block_rows, rows.grid_E[expert_S])
        return weight_gradient(left, right, groups, 1, gathered, TILE, blocks=blocks)

    whole_ELR = gradients(rows.experts, range(len(rows.experts)))
    held = [(expert, part) for expert, of in enumerate(rows.experts) for part in stretches(rng, of, block_rows)]
    held = [held[place] for place in rng.permutation(len(held))]
    total_ELR = torch.zeros_like(whole_ELR)
    for rank in np.array_split(np.arange(len(held)), rng.integers(1, 4)):
        expert_S = [held[place][0] for place in rank]
        if expert_S:
            total_ELR.index_add_(0, torch.tensor(expert_S), gradients([held[place][1] for place in rank], expert_S))
    assert torch.equal(total_ELR, whole_ELR)


@pytest.mark.parametrize("tile", OTHER_TILES.values(), ids=OTHER_TILES)
def test_tiles_and_programs_change_no_bit(tile: TileConfig) -> None:
    rows = Rows([70, 0, 33], torch.float32)
    left, right, groups = rows.groups(rows.experts, "right")
    blocks = RowBlocks(50, rows.grid_E)
    of_tiles = [weight_gradient(left, right, groups, 1, "right", each, blocks=blocks) for each in (tile, TILE)]
    assert torch.equal(*of_tiles)


@pytest.mark.parametrize("block_rows", [16, 49])
def test_other_blocks_have_other_bits(block_rows: int) -> None:
    """Else nothing above would show a block that is cut elsewhere."""
    rows = Rows([90], torch.float32)
    left, right, groups = rows.groups(rows.experts, "right")
    of_blocks = [
        weight_gradient(left, right, groups, 1, "right", TILE, blocks=RowBlocks(each, rows.grid_E))
        for each in (block_rows, 50)
    ]
    assert not torch.equal(*of_blocks)


def test_what_has_no_grid_is_nan_and_no_other_group() -> None:
    rows = Rows([20, 30, 0], torch.float32)
    left, right, groups = rows.groups(rows.experts, "left")
    grid_G = torch.tensor([torch.nan, rows.grid_E[1], torch.nan], dtype=torch.float64)
    found_GLR = weight_gradient(left, right, groups, 1, "left", TILE, blocks=RowBlocks(16, grid_G))
    assert found_GLR[0].isnan().all()
    assert found_GLR[1].isfinite().all()
    assert (found_GLR[2] == 0).all()


def test_results_go_where_there_are_gaps() -> None:
    rows = Rows([20, 30], torch.float32)
    left, right, groups = rows.groups(rows.experts, "left")
    wide_GX = torch.zeros(2, L * R + 5, dtype=torch.float64)
    out_GLR = wide_GX[:, : L * R].view(2, L, R)
    given, blocks = (left, right, groups, 1, "left", TILE), RowBlocks(16, rows.grid_E)
    assert weight_gradient(*given, out_GLR, blocks) is out_GLR
    assert torch.equal(out_GLR, weight_gradient(*given, blocks=blocks))
    assert (wide_GX[:, L * R :] == 0).all()
    with pytest.raises(ValueError, match="sums of blocks are written in"):
        weight_gradient(*given, out_GLR.bfloat16(), blocks)
    assert torch.equal(weight_gradient(*given, out_GLR.float().zero_(), blocks), out_GLR.float())
