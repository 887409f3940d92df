"""TokenBlocks: products of the router and the shared experts, whose bits do not depend on how many ranks the tokens
are spread over (``LayoutInvariant``).

The result of a row does not depend on the rows beside it. The gradient of a weight is one product for each block of
tokens, and blocks are added on a grid, over all ranks (``overlap.exact_sum``). So these gradients are sums over the
ranks, as those of experts are.

T tokens of this rank, A and B any widths.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from moesys.frames import Position
from moesys.kernels.cpu.row_invariant_gemm import NARROW, aligned, matmul_rows, projection_rule
from moesys.kernels.first_derivatives import InputGradients, first_derivatives_only
from moesys.overlap.comm.channel import Channel
from moesys.overlap.exact_sum import add_on_grid, grid_below, largest_size
from moesys.torch_private import unseen_by_selective_checkpoints


def check_blocks(tokens_R: Sequence[int], token_block: int, members: Sequence[int]) -> None:
    """Raises ValueError, on all ranks alike, if the tokens of any rank are not whole blocks. ``members``: the ranks of
    ``tokens_R``, as the error names them.
    """
    for rank, tokens in zip(members, tokens_R, strict=True):
        if tokens % token_block:
            raise ValueError(
                f"token_block={token_block} does not divide the {tokens} tokens of rank {rank}, so gradients of router "
                "and shared experts would show where they end; use a divisor, or reduction=Ordered()"
            )


@dataclass(frozen=True)
class TokenBlocks:
    """Blocks of ``num_tokens``, of which T is a multiple in training. ``channel``: that of the ranks whose tokens are
    one batch. ``by_kernels``: Triton kernels compute products, otherwise torch on the CPU. ``learning``: planning has
    checked T; otherwise backward checks it.
    """

    num_tokens: int
    channel: Channel
    by_kernels: bool = False
    learning: bool = True

    @unseen_by_selective_checkpoints
    def linear(self, x_TA: Tensor, *weights: Tensor) -> Tensor:
        """Returns ``x @ weightᵀ`` [T, B] in x's dtype, to which float32 weights [.., A] are cast. All weights together
        are one product, so that their gradients are one sum over the ranks.
        """
        y_TB: Tensor = _BlockLinear.apply(x_TA, self, *weights)
        return y_TB

    def elementwise(self, function: Callable[[Tensor], Tensor], x_TA: Tensor) -> Tensor:
        """Returns ``function(x)``, on the CPU block by block: there torch computes the ends of an array in another way
        than the rest.
        """
        if x_TA.device.type != "cpu":
            return function(x_TA)
        padded = functional.pad(x_TA, (0, 0, 0, -len(x_TA) % self.num_tokens))
        return torch.cat([function(block) for block in padded.split(self.num_tokens)])[: len(x_TA)]

    def _weight_gradient(self, dy_TB: Tensor, x_TA: Tensor) -> Tensor:
        """Returns ``dyᵀ @ x`` summed over the tokens of all ranks, float32 [B, A]. A collective."""
        largest_dy, largest_x = largest_size(dy_TB), largest_size(x_TA)
        sizes_3 = torch.stack([largest_dy, largest_x, torch.full_like(largest_x, len(x_TA))]).double()
        at = Position("bounds of router gradients in backward")
        gathered_R3 = self.channel.all_gather(sizes_3, lane="counts", at=at, read=sizes_3.device.type == "cpu")
        if not self.learning:
            check_blocks(gathered_R3[:, 2].long().tolist(), self.num_tokens, self.channel.members)
        grid = grid_below(gathered_R3[:, :2].amax(dim=0).prod() * gathered_R3[:, 2].sum())
        if self.by_kernels:
            # Here, so that Triton is loaded only where it runs.
            from moesys.overlap.experts_triton import token_gradient

            total_BA = token_gradient(dy_TB, x_TA, self.num_tokens, grid)
        else:
            total_BA = self._total(dy_TB, x_TA, grid.item())
        return self.channel.all_reduce(total_BA, lane="reshard").float()

    def _total(self, dy_TB: Tensor, x_TA: Tensor, grid: float) -> Tensor:
        """Returns the sum over this rank's tokens, float64 [B, A]."""
        total_BA = torch.zeros(dy_TB.shape[1], x_TA.shape[1], dtype=torch.float64)
        part_BA = torch.empty(total_BA.shape, dtype=x_TA.dtype)
        for dy, x in zip(dy_TB.split(self.num_tokens), x_TA.split(self.num_tokens), strict=True):
            add_on_grid(total_BA, torch.mm(aligned(dy).t(), aligned(x), out=part_BA), grid)
        return total_BA

    def _products(self, x_TA: Tensor, weight_BA: Tensor) -> Tensor:
        """Returns ``x @ weightᵀ``, of which no row depends on others; ``weight`` may be a transposed view."""
        transposed = not weight_BA.is_contiguous()
        if self.by_kernels:
            from moesys.overlap.experts_triton import token_product

            return token_product(x_TA, weight_BA.t() if transposed else weight_BA, transposed=not transposed)
        outward, inward = weight_BA.shape
        # A router of few experts is padded, as rows of narrow products are multiplied one by one.
        if min(outward, inward) < NARROW:
            weight_BA = _padded(weight_BA, max(outward, NARROW), max(inward, NARROW))
            transposed = False
        rule = projection_rule(weight_BA.shape[1], len(weight_BA), x_TA.dtype, x_TA.device.type, transposed)
        x_PA = _padded(x_TA, max(len(x_TA), rule.min_rows), weight_BA.shape[1])
        y_PB = x_PA.new_empty(len(x_PA), len(weight_BA))
        matmul_rows(x_PA, weight_BA, y_PB, rule)
        return y_PB[: len(x_TA), :outward].contiguous()


def _padded(matrix_AB: Tensor, rows: int, columns: int) -> Tensor:
    """Returns the matrix padded with zeros, or else aligned as allocations are."""
    missing = (0, columns - matrix_AB.shape[1], 0, rows - matrix_AB.shape[0])
    return functional.pad(matrix_AB, missing) if any(missing) else aligned(matrix_AB.contiguous())


class _BlockLinear(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x_TA: Tensor, blocks: TokenBlocks, *weights: Tensor) -> Tensor:
        ctx.blocks = blocks
        ctx.save_for_backward(x_TA, *weights)
        return blocks._products(x_TA, _side_by_side(weights, x_TA.dtype))

    @staticmethod
    @first_derivatives_only
    def backward(ctx: Any, *grad_outputs: Tensor) -> tuple[InputGradients, Sequence[Tensor]]:
        x_TA, *weights = ctx.saved_tensors
        dy_TB = grad_outputs[0].contiguous()
        dx_TA, dweights = None, (None,) * len(weights)
        if ctx.needs_input_grad[0]:
            dx_TA = ctx.blocks._products(dy_TB, _side_by_side(weights, dy_TB.dtype).t())
        if any(ctx.needs_input_grad[2:]):
            dweights = ctx.blocks._weight_gradient(dy_TB, x_TA.contiguous()).split([len(each) for each in weights])
        return (dx_TA, None, *dweights), (x_TA, *weights)


def _side_by_side(weights: Sequence[Tensor], dtype: torch.dtype) -> Tensor:
    """Returns the rows of all weights in ``dtype``."""
    cast = [weight.to(dtype) for weight in weights]
    return torch.cat(cast) if len(cast) > 1 else cast[0]
