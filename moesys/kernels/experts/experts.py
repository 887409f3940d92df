"""The experts of a layer on one device: routed rows through up, activation and down and back, forward and backward.

Only x and the pre-activations h are kept for backward, which computes activations anew (SonicMoE's dataflow, arXiv
2512.14080): 2·T·H + 4·T·K·I bytes in 16 bits, gated, and the routing. Everything runs on the device; the host never
reads how many rows an expert has.

T tokens, H hidden, K choices of a token, P = T·K rows, E experts, I their width, U = 2·I where they are gated, else I.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, NamedTuple, cast

import torch
import triton
from torch import Tensor

from moesys.kernels.experts.activation_gradient import activation_gradient
from moesys.kernels.experts.activations import GATED
from moesys.kernels.experts.grouped_gemm import grouped_gemm
from moesys.kernels.experts.products import INTERPRETED, LowRankRows
from moesys.kernels.experts.tile_config import LEAST, WARPGROUP, ShapeClass, TileConfig, TileConfigs
from moesys.kernels.experts.tile_tuner import blocks_of
from moesys.kernels.experts.tiles import RowGroups, RowTiles, groups_by_size, tile_table
from moesys.kernels.experts.token_rows import combine
from moesys.kernels.experts.up import up
from moesys.kernels.experts.weight_gradient import OrderedGroups, RowBlocks, WeightGradients, weight_gradient
from moesys.kernels.first_derivatives import InputGradients, first_derivatives_only
from moesys.kernels.routing import SortedRouting, route
from moesys.kernels.torch_internals import refuse_function_transforms


class ForwardState(NamedTuple):
    """The state that backward needs besides the arguments of forward: pre-activations h [P, U], and the routing."""

    h_PU: Tensor
    routing: SortedRouting


# The factors of LoRA on a projection, of each group (slot): [E, r, in] and [E, out, r], contiguous.
Pair = tuple[Tensor, Tensor]
NUM_FACTORS = 4
# The choices of rows, by which they are gathered, and K; None where rows lie in order of groups.
Entries = tuple[Tensor, int] | None


class ExpertMatrices(NamedTuple):
    """The matrices of experts, one for each group (slot), and what stands between both products. ``low_rank``: what
    LoRA adds to gate_up, and to down.
    """

    gate_up_EUH: Tensor
    down_EHI: Tensor
    activation: str
    low_rank: tuple[Pair | None, Pair | None] = (None, None)


def low_rank_rows(
    pair: Pair | None, rows: Tensor, groups: RowGroups, block: TileConfig, entries: Entries, *, back: bool
) -> LowRankRows | None:
    """Returns what LoRA adds to the product of ``rows`` with a projection or, going ``back``, of gradients with it."""
    if pair is None:
        return None
    return LowRankRows(_by_factor(pair, rows, groups, block, entries, back), pair[0 if back else 1])


def _by_factor(pair: Pair, rows: Tensor, groups: RowGroups, block: TileConfig, entries: Entries, back: bool) -> Tensor:
    """Returns rows [P, r] by the inward factor of their group or, going ``back``, by its outward one."""
    thin, factor = _as_thin(block, pair), pair[1 if back else 0]
    return grouped_gemm(rows, factor, *groups, thin, transposed=not back, gather=entries)


def _as_thin(block: TileConfig, pair: Pair) -> TileConfig:
    """Returns the block of a product with as many columns as a factor has."""
    columns = min(block.columns, max(LEAST["columns"], triton.next_power_of_2(pair[0].shape[1])))
    return replace(block, columns=columns, operands="pointers")


def experts_forward(
    x_TH: Tensor, routing: SortedRouting, weight_TK: Tensor, experts: ExpertMatrices, blocks: TileConfigs
) -> tuple[Tensor, ForwardState]:
    """Returns the output [T, H] in x's dtype.

    ``routing``: the rows of each group (slot) that choices of tokens go to (``routing.route``); a choice that it drops
    adds nothing. ``weight_TK`` float32.
    """
    h_PU, a_PI, tiles = first_product(x_TH, routing, weight_TK.shape[1], experts, blocks)
    y_PH = second_product(a_PI, routing, tiles, experts, blocks)
    return combine(y_PH, routing.row_TK, weight_TK, x_TH.dtype), ForwardState(h_PU, routing)


def first_product(
    x_TH: Tensor, routing: SortedRouting, top_k: int, experts: ExpertMatrices, blocks: TileConfigs
) -> tuple[Tensor, Tensor, RowTiles]:
    """Returns pre-activations h [P, U], the activations [P, I] and the tiles of the rows."""
    if x_TH.device.type == "cpu" and not INTERPRETED.value:
        raise RuntimeError("x is on the CPU, where these kernels do not run; move it to a GPU")
    block, tiles = blocks.up, RowTiles(routing.first_G1, len(routing.entry_P))
    groups = RowGroups(routing.first_G1, tiles.of(block))
    low_rank = low_rank_rows(experts.low_rank[0], x_TH, groups, block, (routing.entry_P, top_k), back=False)
    h_PU, a_PI = up(x_TH, experts.gate_up_EUH, routing, groups.tiles, top_k, experts.activation, block, low_rank)
    return h_PU, a_PI, tiles


def second_product(
    a_PI: Tensor, routing: SortedRouting, tiles: RowTiles, experts: ExpertMatrices, blocks: TileConfigs
) -> Tensor:
    """Returns the outputs [P, H] of the rows, before routing weights."""
    block, groups = blocks.down, RowGroups(routing.first_G1, tiles.of(blocks.down))
    low_rank = low_rank_rows(experts.low_rank[1], a_PI, groups, block, None, back=False)
    return grouped_gemm(a_PI, experts.down_EHI, *groups, block, transposed=True, low_rank=low_rank)


def experts_backward(
    dy_TH: Tensor,
    x_TH: Tensor,
    weight_TK: Tensor,
    experts: ExpertMatrices,
    state: ForwardState,
    blocks: TileConfigs,
    out: tuple[Tensor | None, Tensor | None] | None,
    write: Callable[[OrderedGroups, WeightGradients], object] | None = None,
) -> tuple[Tensor, Tensor]:
    """Returns (dx [T, H] in x's dtype, dweight float32 [T, K]).

    ``out``: where the gradients of gate_up and down are written, one for each group, or None for each; None where
    ``write`` is not to be called, which is ``weight_gradients`` of rows and their groups.
    """
    routing, K = state.routing, weight_TK.shape[1]
    dh_PU, wa_PI, dweight_TK, tiles = hidden_gradients(dy_TH, weight_TK, experts, state, blocks)
    if out is not None:
        groups = OrderedGroups(routing.entry_P, routing.first_G1, groups_by_size(routing.first_G1))
        sides = WeightGradients(dh_PU, x_TH, out[0], dy_TH, wa_PI, out[1])
        weight_gradients(groups, sides, K, experts, blocks) if write is None else write(groups, sides)
        del sides
    # Before the gradient of the rows of x is made, so that memory never holds both.
    del wa_PI
    dx_PH = input_gradient(dh_PU, routing, tiles, experts, blocks)
    return combine(dx_PH, routing.row_TK, None, dh_PU.dtype), dweight_TK


def weight_gradients(
    groups: OrderedGroups,
    sides: WeightGradients,
    top_k: int,
    experts: ExpertMatrices,
    blocks: TileConfigs,
    row_blocks: Sequence[RowBlocks | None] = (None,) * 6,
) -> list[Tensor | None]:
    """Writes the gradients of gate_up and down of each group, where there are any. Returns those of the factors of
    both, inward and outward; None of those that are not there. ``row_blocks``: by which all of these are summed, in
    this order (``weight_gradient``).
    """
    dh, x, dgate_up, dy, wa, ddown = sides
    tile, entry_P = blocks.weight_gradient, groups.entry_P
    if dgate_up is not None:
        weight_gradient(dh, x, groups, top_k, "right", tile, dgate_up, row_blocks[0])
    if ddown is not None:
        weight_gradient(dy, wa, groups, top_k, "left", tile, ddown, row_blocks[1])
    up, down = experts.low_rank
    if up is None and down is None:
        return [None] * 4
    in_order = groups._replace(entry_P=torch.arange(len(entry_P), dtype=torch.int32, device=entry_P.device))
    of_up = _factor_gradients(up, (dh, in_order, 1), (x, groups, top_k), blocks, row_blocks[2:4])
    return of_up + _factor_gradients(down, (dy, groups, top_k), (wa, in_order, 1), blocks, row_blocks[4:])


# One side of a gradient: rows, and the groups and K by which they are gathered.
Side = tuple[Tensor, OrderedGroups, int]


def _factor_gradients(
    pair: Pair | None, dy: Side, x: Side, blocks: TileConfigs, row_blocks: Sequence[RowBlocks | None]
) -> list[Tensor | None]:
    if pair is None:
        return [None, None]
    tile, first_G1, block = blocks.weight_gradient, x[1].first_G1, blocks.down
    rows = RowGroups(first_G1, tile_table(first_G1, len(x[1].entry_P), block.rows))
    inner_PR = _by_factor(pair, x[0], rows, block, (x[1].entry_P, x[2]), False)
    outer_PR = _by_factor(pair, dy[0], rows, block, (dy[1].entry_P, dy[2]), True)
    flat, thin = replace(tile, rows=min(tile.rows, WARPGROUP["rows"])), _as_thin(tile, pair)
    inward = weight_gradient(outer_PR, *x, "right", flat, blocks=row_blocks[0])
    return [inward, weight_gradient(dy[0], inner_PR, *dy[1:], "left", thin, blocks=row_blocks[1])]


def hidden_gradients(
    dy_TH: Tensor, weight_TK: Tensor, experts: ExpertMatrices, state: ForwardState, blocks: TileConfigs
) -> tuple[Tensor, Tensor, Tensor, RowTiles]:
    """Returns the gradient of h [P, U], the weighted activations [P, I], dweight float32 [T, K] and the tiles of the
    rows.
    """
    routing, block = state.routing, blocks.activation_gradient
    tiles = RowTiles(routing.first_G1, len(routing.entry_P))
    groups, entries = RowGroups(routing.first_G1, tiles.of(block)), (routing.entry_P, weight_TK.shape[1])
    low_rank = low_rank_rows(experts.low_rank[1], dy_TH, groups, block, entries, back=True)
    dh_PU, wa_PI, dweight_TK = activation_gradient(
        dy_TH, experts.down_EHI, state.h_PU, weight_TK, routing, groups, experts.activation, block, low_rank
    )
    return dh_PU, wa_PI, dweight_TK, tiles


def input_gradient(
    dh_PU: Tensor, routing: SortedRouting, tiles: RowTiles, experts: ExpertMatrices, blocks: TileConfigs
) -> Tensor:
    """Returns the gradient [P, H] of the rows of x."""
    block, groups = blocks.input_gradient, RowGroups(routing.first_G1, tiles.of(blocks.input_gradient))
    low_rank = low_rank_rows(experts.low_rank[0], dh_PU, groups, block, None, back=True)
    return grouped_gemm(dh_PU, experts.gate_up_EUH, *groups, block, transposed=False, low_rank=low_rank)


# --- as one op that autograd, torch.compile and checkpoints know ------------------------------------------------


def moe_experts(
    x_TH: Tensor,
    expert_TK: Tensor,
    weight_TK: Tensor,
    gate_up_EUH: Tensor,
    down_EHI: Tensor,
    activation: str = "swiglu",
    blocks: TileConfigs | None = None,
    factors: Sequence[Tensor | None] = (None,) * NUM_FACTORS,
) -> Tensor:
    """Returns Σ_k weight · expert(x), differentiable in x, the routing weights, both matrices and the factors.

    Args:
        x_TH: float32, float16 or bfloat16, like the matrices.
        expert_TK: int32 or int64; a choice outside of 0..E-1 adds nothing.
        weight_TK: any float dtype; used in float32.
        gate_up_EUH: gate above up, as in transformers; ``down_EHI`` [E, H, I].
        activation: swiglu or geglu, gated; gelu or relu2, with U = I.
        blocks: instead of what was tuned, or else is likely fast (``tile_tuner.blocks_of``).
        factors: LoRA on gate_up, [E, r, H] and [E, U, r], then on down, [E, r, I] and [E, H, r]; None for a matrix
            without LoRA. r is a multiple of 16.

    Returns:
        [T, H] in x's dtype. Gradients have their arguments' dtypes.

    Raises:
        ValueError: shapes or dtypes that do not go together. RuntimeError: tensors on the CPU, transforms of
            ``torch.func``, forward-mode differentiation.
    """
    # torch would lose tangents without an error; a compiler has none.
    if not torch.compiler.is_compiling():
        refuse_function_transforms(x_TH, weight_TK, gate_up_EUH, down_EHI)
    _check_arguments(x_TH, expert_TK, weight_TK, gate_up_EUH, down_EHI, activation)
    for name, matrix, pair in (("gate_up", gate_up_EUH, factors[:2]), ("down", down_EHI, factors[2:])):
        _check_factors(name, matrix, pair)
    given = blocks.to_json() if blocks else ""
    y_TH, *_ = _experts(x_TH, expert_TK, weight_TK.float(), gate_up_EUH, down_EHI, activation, given, *factors)
    return y_TH


def _check_arguments(
    x_TH: Tensor, expert_TK: Tensor, weight_TK: Tensor, gate_up_EUH: Tensor, down_EHI: Tensor, activation: str
) -> None:
    if activation not in GATED:
        raise ValueError(f"activation={activation!r} is not known; use one of {', '.join(GATED)}")
    E, H, I = down_EHI.shape
    wanted = {
        "x_TH": (x_TH, (x_TH.shape[0], H)),
        "expert_TK": (expert_TK, (x_TH.shape[0], expert_TK.shape[-1])),
        "weight_TK": (weight_TK, tuple(expert_TK.shape)),
        "gate_up_EUH": (gate_up_EUH, (E, 2 * I if GATED[activation] else I, H)),
    }
    for name, (tensor, shape) in wanted.items():
        if tuple(tensor.shape) != shape:
            raise ValueError(f"{name} is of shape {tuple(tensor.shape)}; with down_EHI {(E, H, I)} it must be {shape}")
    if not x_TH.dtype == gate_up_EUH.dtype == down_EHI.dtype:
        raise ValueError(
            f"x_TH, gate_up_EUH and down_EHI are {x_TH.dtype}, {gate_up_EUH.dtype} and {down_EHI.dtype}; use one dtype"
        )


def _check_factors(name: str, matrix_EBA: Tensor, pair: Sequence[Tensor | None]) -> None:
    found = [None if each is None else (tuple(each.shape), each.dtype) for each in pair]
    (E, B, A), r = matrix_EBA.shape, 0 if pair[0] is None else pair[0].shape[1]
    if found != [None, None] and (r % 16 or found != [((E, *of), matrix_EBA.dtype) for of in ((r, A), (B, r))]):
        raise ValueError(
            f"factors of {name} are {found}; with {name} {(E, B, A)} of {matrix_EBA.dtype} they must be of its dtype, "
            f"{(E, 'r', A)} and {(E, B, 'r')}, where 16 divides r, or both None"
        )


@torch.library.custom_op("moesys::experts", mutates_args=())
def _experts(
    x_TH: Tensor,
    expert_TK: Tensor,
    weight_TK: Tensor,
    gate_up_EUH: Tensor,
    down_EHI: Tensor,
    activation: str,
    blocks: str,
    up_inward: Tensor | None,
    up_outward: Tensor | None,
    down_inward: Tensor | None,
    down_outward: Tensor | None,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    y_TH, state = experts_forward(
        x_TH.contiguous(),
        route(expert_TK, len(down_EHI)),
        weight_TK.contiguous(),
        _matrices(gate_up_EUH, down_EHI, activation, (up_inward, up_outward, down_inward, down_outward)),
        _blocks(blocks, x_TH, down_EHI, expert_TK.numel(), activation),
    )
    return y_TH, state.h_PU, *state.routing


@_experts.register_fake
def _experts_fake(x_TH: Tensor, expert_TK: Tensor, _: Tensor, gate_up_EUH: Tensor, *__: object) -> tuple[Tensor, ...]:
    T, K = expert_TK.shape
    return (
        x_TH.new_empty(x_TH.shape),
        x_TH.new_empty(T * K, gate_up_EUH.shape[1]),
        expert_TK.new_empty(T * K, dtype=torch.int32),
        expert_TK.new_empty(T, K, dtype=torch.int32),
        expert_TK.new_empty(gate_up_EUH.shape[0] + 1, dtype=torch.int32),
    )


@torch.library.custom_op("moesys::experts_backward", mutates_args=())
def _experts_backward(
    dy_TH: Tensor, saved: Sequence[Tensor | None], activation: str, blocks: str, of_matrices: bool
) -> list[Tensor]:
    """Returns the gradients of x, routing weights, both matrices and all factors, without elements where none is
    computed.
    """
    x_TH, weight_TK, gate_up_EUH, down_EHI, h_PU, *routing = cast(list[Tensor], saved[:-NUM_FACTORS])
    experts = _matrices(gate_up_EUH, down_EHI, activation, factors := saved[-NUM_FACTORS:])
    configs = _blocks(blocks, x_TH, down_EHI, weight_TK.numel(), activation)
    dgate_up, ddown, *dfactors = _new_gradients(saved, of_matrices)

    def write(groups: OrderedGroups, sides: WeightGradients) -> None:
        found = weight_gradients(groups, sides, weight_TK.shape[1], experts, configs)
        dfactors[:] = [out if each is None else each.to(out.dtype) for out, each in zip(dfactors, found, strict=True)]

    state, out = ForwardState(h_PU, SortedRouting(*routing)), None
    if of_matrices or any(each is not None for each in factors):
        out = (dgate_up, ddown) if of_matrices else (None, None)
    rows = dy_TH.contiguous(), x_TH.contiguous(), weight_TK.contiguous()
    return [*experts_backward(*rows, experts, state, configs, out, write), dgate_up, ddown, *dfactors]


@_experts_backward.register_fake
def _experts_backward_fake(
    dy_TH: Tensor, saved: Sequence[Tensor], activation: str, blocks: str, of_matrices: bool
) -> list[Tensor]:
    return [*(each.new_empty(each.shape) for each in saved[:2]), *_new_gradients(saved, of_matrices)]


def _new_gradients(saved: Sequence[Tensor | None], of_matrices: bool) -> list[Tensor]:
    """Returns memory for the gradients of both matrices and all factors, without elements where none is computed."""
    wanted, x_TH = (*(saved[2:4] if of_matrices else (None, None)), *saved[-NUM_FACTORS:]), cast(Tensor, saved[0])
    return [x_TH.new_empty(0) if each is None else each.new_empty(each.shape) for each in wanted]


def _matrices(
    gate_up_EUH: Tensor, down_EHI: Tensor, activation: str, factors: Sequence[Tensor | None]
) -> ExpertMatrices:
    pairs = zip(factors[::2], factors[1::2], strict=True)
    up, down = (None if a is None or b is None else (a.contiguous(), b.contiguous()) for a, b in pairs)
    return ExpertMatrices(gate_up_EUH.contiguous(), down_EHI.contiguous(), activation, (up, down))


def _blocks(given: str, x_TH: Tensor, down_EHI: Tensor, num_rows: int, activation: str) -> TileConfigs:
    if given:
        return TileConfigs.from_json(given)
    return blocks_of(ShapeClass.of(x_TH, down_EHI, num_rows, activation), x_TH.device)


def _keep_for_backward(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    x_TH, _, weight_TK, gate_up_EUH, down_EHI, ctx.activation, ctx.blocks, *factors = inputs
    ctx.mark_non_differentiable(*output[1:])
    # Otherwise autograd makes gradients of zeros for them, as large as h.
    ctx.set_materialize_grads(False)
    ctx.save_for_backward(x_TH, weight_TK, gate_up_EUH, down_EHI, *output[1:], *factors)


@first_derivatives_only
def _differentiate(ctx: Any, dy_TH: Tensor | None, *_: None) -> tuple[InputGradients, Sequence[Tensor]]:
    saved = list(ctx.saved_tensors)
    # x, the routing weights and both matrices are the first four.
    learnt = [*saved[:4], *(each for each in saved[-NUM_FACTORS:] if each is not None)]
    if dy_TH is None:
        return (None,) * 11, learnt
    of_matrices = ctx.needs_input_grad[3] or ctx.needs_input_grad[4]
    dx_TH, dweight_TK, *found = _experts_backward(dy_TH, saved, ctx.activation, ctx.blocks, of_matrices)
    dgate_up, ddown, *dfactors = (each if each.numel() else None for each in found)
    return (dx_TH, None, dweight_TK, dgate_up, ddown, None, None, *dfactors), learnt


_experts.register_autograd(_differentiate, setup_context=_keep_for_backward)
