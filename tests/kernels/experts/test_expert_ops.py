"""Each op of the experts in the interpreter, right against float64 at every edge; and the bits of a layer of them,
which neither tiles nor programs decide, nor ways in which operands come, nor gaps between matrices.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import replace
from functools import cache
from typing import Any

import numpy as np
import pytest
import torch
import triton
import triton.language as tl
from conftest import assert_equal
from expert_ops import (
    BLOCK,
    EDGES,
    IN_FLOAT32,
    OPS,
    Op,
    Rows,
    activation_gradient_of,
    exact_activation_gradient,
    in_turn,
    rows_of,
)
from kernel_references import (
    groups_by_size_reference,
    route_reference,
)
from torch import Tensor

from moesys.kernels.experts import weight_gradient as of_weights
from moesys.kernels.experts.activations import GATED
from moesys.kernels.experts.experts import ExpertMatrices, experts_backward, experts_forward
from moesys.kernels.experts.products import Gather
from moesys.kernels.experts.tile_config import TileConfig, TileConfigs
from moesys.kernels.experts.weight_gradient import (
    OrderedGroups,
    OuterProduct,
    OuterSizes,
    store_outer_product,
    weight_gradient,
)


def assert_right(op: Op, given: Rows) -> None:
    """Within a millionth of what is added up, as float32 rounds sums; and half a place of the dtype."""
    whole = op.found(given, BLOCK)
    found = {name: of if name in IN_FLOAT32 else of[: given.num_rows] for name, of in whole.items()}
    for name, (value, size) in op.exact(given, found).items():
        dtype = torch.float32 if name in IN_FLOAT32 else given.x_TH.dtype
        assert (found[name].dtype, found[name].shape) == (dtype, value.shape)
        assert name in IN_FLOAT32 or len(whole[name]) == len(given.h_PU)
        limits = torch.finfo(dtype)
        most = 1e-6 * size + value.abs() * limits.eps / 2 + limits.smallest_normal
        assert ((found[name].double() - value).abs() <= most).all(), name
    if "dweight" in found:
        assert not found["dweight"][given.routing.row_TK < 0].any()


@pytest.mark.parametrize("op", OPS)
@in_turn("edge", EDGES)
def test_edges(op: str, edge: str, dtype: torch.dtype) -> None:
    assert_right(OPS[op], rows_of(edge, dtype))


@pytest.mark.parametrize("op", ["up", "activation gradient"])
@in_turn("activation", GATED)
def test_every_activation(op: str, activation: str, dtype: torch.dtype) -> None:
    assert_right(OPS[op], rows_of("a partial sum of one column", dtype, activation))


# --- one set of bits --------------------------------------------------------------------------------------------------


def of_layer(given: Rows, block: TileConfig, gap: int | None = None) -> list[Tensor]:
    """Output and all gradients of experts. ``gap``: of elements, behind the parameters of each expert, which are one
    vector then, as are its gradients.
    """
    matrices, G = [given.gate_up_EUH, given.down_EHI], len(given.routing.first_G1) - 1
    out, behind = [torch.full((G, *each.shape[1:]), torch.nan) for each in matrices], None
    if gap is not None:
        matrices, _ = in_one_buffer(*matrices, gap)
        out, behind = in_one_buffer(*out, gap)
    # Narrower tiles of the activation gradient are another class of bits.
    blocks = replace(TileConfigs.all_of(block), activation_gradient=replace(block, columns=max(32, block.columns)))
    experts = ExpertMatrices(*matrices, given.activation)
    y_TH, state = experts_forward(given.x_TH, given.routing, given.weight_TK, experts, blocks)
    found = experts_backward(given.dy_TH, given.x_TH, given.weight_TK, experts, state, blocks, (out[0], out[1]))
    assert behind is None or behind.isnan().all()
    return [y_TH, *found, *out]


def in_one_buffer(gate_up: Tensor, down: Tensor, gap: int) -> tuple[list[Tensor], Tensor]:
    """Both as views of experts' parameters, and what lies behind those."""
    parts = gate_up.flatten(1), down.flatten(1), gate_up.new_full((len(gate_up), gap), torch.nan)
    of_up, of_down, behind = torch.cat(parts, 1).split([part.shape[1] for part in parts], 1)
    return [of_up.unflatten(1, gate_up.shape[1:]), of_down.unflatten(1, down.shape[1:])], behind


@cache
def usual_bits(edge: str, dtype: torch.dtype, activation: str) -> list[Tensor]:
    return of_layer(rows_of(edge, dtype, activation), BLOCK)


FLOAT32, BFLOAT16, HALF = torch.float32, torch.bfloat16, torch.float16
# TMA reads rows of whole 16 bytes in 16 bits. In the interpreter numpy adds products of tiles that lie turned in
# another order, which shows in float16. Each case: (edge, dtype, activation, gap, changes of the tile).
SAME_BITS: dict[str, tuple[str, torch.dtype, str, int | None, dict[str, Any]]] = {
    "once more": ("odd widths", FLOAT32, "swiglu", None, {}),
    "narrow tiles, one program": ("odd widths", FLOAT32, "swiglu", None, {"columns": 16, "raster": 1, "programs": 1}),
    "high and wide": ("odd widths", BFLOAT16, "relu2", None, {"rows": 32, "columns": 64, "raster": 8, "programs": 7}),
    "more programs than tiles": ("dropped choices", HALF, "geglu", None, {"rows": 64, "columns": 128, "programs": 99}),
    "stages": ("empty groups, first, between and last", BFLOAT16, "swiglu", None, {"rows": 64, "stages": 5}),
    "TMA": ("whole tiles", BFLOAT16, "gelu", None, {"operands": "tma"}),
    "TMA of rows too": ("whole tiles", BFLOAT16, "swiglu", None, {"operands": "specialised"}),
    "TMA of nothing": ("no tokens", BFLOAT16, "swiglu", None, {"operands": "tma"}),
    "TMA of no rows": ("no tokens", BFLOAT16, "swiglu", None, {"operands": "specialised"}),
    "rows that TMA cannot read": ("odd widths", BFLOAT16, "relu2", None, {"operands": "specialised"}),
    "float32 by TMA": ("dropped choices", FLOAT32, "swiglu", None, {"operands": "tma"}),
    "neighbours": ("dropped choices", FLOAT32, "swiglu", 0, {}),
    "a gap of 5": ("dropped choices", FLOAT32, "swiglu", 5, {}),
    "a gap of 1 in 16 bits": ("dropped choices", BFLOAT16, "swiglu", 1, {}),
    "a gap by TMA": ("dropped choices", BFLOAT16, "swiglu", 8, {"operands": "tma"}),
    "a gap by TMA of rows too": ("dropped choices", BFLOAT16, "swiglu", 8, {"operands": "specialised"}),
    "a stride that TMA cannot have": ("dropped choices", BFLOAT16, "swiglu", 3, {"operands": "tma"}),
}


@pytest.mark.parametrize("case", SAME_BITS)
def test_nothing_else_changes_a_bit(case: str) -> None:
    edge, dtype, activation, gap, changes = SAME_BITS[case]
    expected = usual_bits(edge, dtype, activation)
    assert_equal(of_layer(rows_of(edge, dtype, activation), replace(BLOCK, **changes), gap), expected)


def test_narrow_tiles_change_the_routing_weights_gradient_alone() -> None:
    """Below 32 columns its partial sums are as wide as a tile, which is another order."""
    given = rows_of("odd widths", BFLOAT16)
    expected, found = (activation_gradient_of(given, each) for each in (BLOCK, replace(BLOCK, columns=16)))
    assert_equal([found["dh"][: given.num_rows], found["wa"]], [expected["dh"][: given.num_rows], expected["wa"]])
    value, size = exact_activation_gradient(given, found)["dweight"]
    assert ((found["dweight"].double() - value).abs() <= 1e-6 * size).all()


@pytest.mark.filterwarnings("ignore::RuntimeWarning")
def test_a_token_that_is_not_finite_stays_alone() -> None:
    """Neither do other tokens see it, nor do columns behind the width make NaN of its infinity."""
    given = rows_of("odd widths", FLOAT32)
    given.down_EHI[:-1] = given.down_EHI[:-1].abs() + 0.1
    given.h_PU.abs_().add_(0.1)
    clean = activation_gradient_of(given, BLOCK)
    given.dy_TH[3, 5] = torch.inf
    found = activation_gradient_of(given, BLOCK)
    assert (found["dweight"][3] == torch.inf).all()
    others = torch.arange(len(given.dy_TH)) != 3
    assert torch.equal(found["dweight"][others], clean["dweight"][others])
    rows = torch.ones(len(found["dh"]), dtype=torch.bool)
    rows[given.routing.row_TK[3].long()] = False
    assert torch.equal(found["dh"][rows], clean["dh"][rows])
    assert torch.equal(found["wa"], clean["wa"])


@pytest.mark.parametrize("order", [(4, 3, 2, 1, 0), (2, 0, 4, 1, 3)], ids=["from behind", "mixed"])
def test_the_order_of_groups_changes_no_bit(order: tuple[int, ...]) -> None:
    given = rows_of("empty groups, first, between and last", FLOAT32)
    groups = OrderedGroups(given.routing.entry_P, given.routing.first_G1, torch.tensor(order, dtype=torch.int32))
    found = weight_gradient(given.dy_TH, given.a_PI, groups, given.top_k, "left", BLOCK)
    assert torch.equal(found, OPS["weight gradient of down"].found(given, BLOCK)["dW"])


@pytest.mark.parametrize("dtype", [HALF, BFLOAT16], ids=str)
def test_a_weight_gradient_in_16_bits_is_the_float32_sum_rounded_once(dtype: torch.dtype) -> None:
    given = rows_of("dropped choices", dtype)
    in_float32 = OPS["weight gradient of up"].found(given, BLOCK)["dW"]
    groups = OrderedGroups(*given.routing[::2], groups_by_size_reference(given.routing.first_G1))
    operands = (given.h_PU, given.x_TH, groups, given.top_k, "right", BLOCK)
    assert torch.equal(weight_gradient(*operands, torch.empty_like(in_float32, dtype=dtype)), in_float32.to(dtype))
    for wrong_GLR in (in_float32.new_zeros(4, 48, 16), in_float32.new_zeros(3, 16, 48).mT):
        with pytest.raises(ValueError, match=r"give contiguous matrices of shape \(3, 48, 16\)"):
            weight_gradient(*operands, wrong_GLR)


@triton.jit
def one_by_one(left_ptr, right_ptr, groups, out_ptr, num_tiles, sizes: tl.constexpr, tiling: tl.constexpr):
    """A loop over steps for each tile, as MegaKernels have it."""
    along_L: tl.constexpr = (sizes.L + tiling.rows - 1) // tiling.rows
    along_R: tl.constexpr = (sizes.R + tiling.columns - 1) // tiling.columns
    product = OuterProduct(left_ptr, right_ptr, out_ptr, sizes.L, sizes.R, sizes.matrix_stride)
    for task in range(num_tiles):
        group, tile = task // (along_L * along_R), task % (along_L * along_R)
        tile = (tile // along_R, tile % along_R)
        store_outer_product(product, groups.entry_P, groups.first_G1, None, group, tile, sizes.gather, 0, tiling)


def of_random_loops(seed: int) -> tuple[Tensor, Tensor]:
    """The weight gradients of random rows by one loop over the steps of all tiles, and by one for each tile."""
    rng = np.random.default_rng(seed)
    num_groups, top_k = rng.integers(1, 6), int(rng.integers(1, 4))
    rows_G = rng.integers(0, 50, num_groups) * (rng.random(num_groups) < 0.7)
    tile = TileConfig(
        *rng.choice([(16, 16), (32, 64), (16, 128)]).tolist(),
        contraction=16,
        warps=1,
        raster=int(rng.integers(1, 4)),
        programs=int(rng.choice([1, 2, 3, 7, 99])),
    )
    L, R = (
        int(rng.integers(1, 3)) * wide - int(rng.integers(wide) * rng.integers(2)) for wide in (tile.rows, tile.columns)
    )
    dropped = int(rng.integers(3))
    num_rows, (dtype, out_dtype) = int(rows_G.sum()), rng.permutation([torch.float32, torch.bfloat16])
    generator = torch.Generator().manual_seed(seed)
    tokens = -(-(num_rows + dropped) // top_k)
    first_G1 = torch.tensor([0, *np.cumsum(rows_G)], dtype=torch.int32)
    # The entries behind the last row belong to no group.
    entry_P = torch.randperm(max(1, tokens * top_k), generator=generator)[: num_rows + dropped].int()
    entry_P[num_rows:] = -1
    groups = OrderedGroups(entry_P, first_G1, groups_by_size_reference(first_G1))
    gathered = ("left", "right")[seed % 2]
    sides = [(tokens if gathered == side else num_rows + dropped, width) for side, width in (("left", L), ("right", R))]
    left, right = (torch.randn(max(1, rows), width, generator=generator).to(dtype) for rows, width in sides)
    found, wanted = (torch.full((num_groups, L, R), torch.nan, dtype=out_dtype) for _ in range(2))
    weight_gradient(left, right, groups, top_k, gathered, tile, found)
    sizes = OuterSizes(L, R, L * R, Gather(gathered == "left", top_k), 0, 1)
    num_tiles = int(num_groups) * -(-L // tile.rows) * -(-R // tile.columns)
    one_by_one[(1,)](left, right, groups, wanted, num_tiles, sizes, tile.tiling)
    return found, wanted


NUM_LOOPS = 200 if os.environ.get("MOESYS_SWEEP") == "1" else 20


def test_one_loop_over_all_tiles_has_the_bits_of_one_for_each() -> None:
    """With empty groups, dropped choices, uneven sizes, and fewer and more programs than tiles."""
    for seed in range(NUM_LOOPS):
        assert torch.equal(*of_random_loops(seed)), seed


def without_the_last_step(usual: Any) -> Any:
    return lambda *args: usual(*args) - 1


def one_tile_late(usual: Any) -> Any:
    totals: list[Any] = []

    def store(matrix: Any, total: Any, *args: Any) -> None:
        totals.append(total)
        usual(matrix, totals[-2:][0], *args)

    return store


@pytest.mark.parametrize(
    ("name", "fault"), [("_own_steps", without_the_last_step), ("_store_in_slices", one_tile_late)]
)
def test_faults_of_the_loop_show(name: str, fault: Callable[[Any], Any], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(of_weights, name, fault(getattr(of_weights, name)))
    assert not all(torch.equal(*of_random_loops(seed)) for seed in range(NUM_LOOPS))


@pytest.mark.parametrize(("order", "left_over"), [((0, 1, 2), 0.0), ((1, 0, 2), 0.0), ((0, 2, 1), 1.0)])
def test_steps_of_a_weight_gradient_are_summed_in_order(order: tuple[int, ...], left_over: float) -> None:
    """Steps of rows that hold a large, a small and a minus large value: what is left depends on the order."""
    rows = 3 * BLOCK.contraction
    left_P1 = torch.zeros(rows, 1)
    for step, value in zip(order, (2.0**24, 1.0, -(2.0**24)), strict=True):
        left_P1[step * BLOCK.contraction] = value
    routing = route_reference(torch.zeros(rows, 1, dtype=torch.int64), 1)
    groups = OrderedGroups(routing.entry_P, routing.first_G1, torch.zeros(1).int())
    assert weight_gradient(left_P1, torch.ones(rows, 1), groups, 1, "right", BLOCK).item() == left_over


@pytest.mark.parametrize("op", [*OPS][:4])
def test_gaps_within_a_matrix_and_tiles_of_another_height_are_refused(op: str, monkeypatch: pytest.MonkeyPatch) -> None:
    given = rows_of("dropped choices", FLOAT32)
    gate_up, down = (matrices.mT.contiguous().mT for matrices in (given.gate_up_EUH, given.down_EHI))
    with pytest.raises(ValueError, match="each matrix"):
        OPS[op].found(given._replace(gate_up_EUH=gate_up, down_EHI=down), BLOCK)
    groups = given.groups(BLOCK)
    monkeypatch.setattr(Rows, "groups", lambda given, block: groups)
    with pytest.raises(ValueError, match="tiles of 16 rows for blocks of 32"):
        OPS[op].found(given, replace(BLOCK, rows=32))
