"""Which blocks the grouped GEMMs of a layer use where nobody has tuned them."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from moesys.kernels.tiles import Block


@dataclass(frozen=True)
class Blocks:
    """How each grouped GEMM is cut. Their ``contraction`` is part of the numerics class, and so are
    ``activation_gradient.columns`` below 32; all else changes no bit.
    """

    up: Block
    down: Block
    activation_gradient: Block
    input_gradient: Block
    weight_gradient: Block

    @staticmethod
    def all_of(block: Block) -> Blocks:
        """The same for every one."""
        return Blocks(block, block, block, block, block)


WIDE = Block(rows=128, columns=256, contraction=64, warps=8, stages=4)
# A gated tile has as many columns of the gate again; and gelu in an epilogue leaves registers for no more.
SQUARE = Block(rows=128, columns=128, contraction=64, warps=8, stages=4)
# float32 has no tensor-core product here, and its operands take twice the shared memory.
SINGLE = Block(rows=64, columns=64, contraction=32, warps=8, stages=3)


def blocks_for(activation: str, dtype: torch.dtype) -> Blocks:
    """The largest blocks that compile for ``sm_90`` without spills (``moesys bench kernels --aot``)."""
    if dtype == torch.float32:
        return Blocks.all_of(SINGLE)
    return Blocks(
        up=WIDE if activation == "relu2" else SQUARE,
        down=WIDE,
        activation_gradient=SQUARE if activation == "gelu" else WIDE,
        input_gradient=WIDE,
        weight_gradient=WIDE,
    )
