"""Which blocks the grouped GEMMs of a layer use: all five together, as JSON, and for which layers a choice holds."""

from __future__ import annotations

import json
import math
from dataclasses import asdict, dataclass, fields

from torch import Tensor

from moesys.kernels.experts.tiles import Block


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

    def to_json(self) -> str:
        return json.dumps(asdict(self), indent=1)

    @staticmethod
    def from_json(text: str) -> Blocks:
        """Raises ValueError for anything that ``to_json`` does not write."""
        try:
            blocks = {name: Block(**block) for name, block in json.loads(text).items()}
            return Blocks(**blocks)
        except (AttributeError, TypeError, ValueError) as error:
            names = ", ".join(field.name for field in fields(Blocks))
            raise ValueError(f"these are no blocks: {error}; write an object of {names} by Blocks.to_json()") from None


@dataclass(frozen=True)
class ShapeClass:
    """Layers that share a choice of blocks. ``rows_of_expert``: T·K / E, rounded to a power of two, at least 1."""

    hidden: int
    width: int
    experts: int
    top_k: int
    activation: str
    dtype: str
    rows_of_expert: int

    @staticmethod
    def of(x_TH: Tensor, down_EHI: Tensor, num_rows: int, activation: str) -> ShapeClass:
        """Of ``num_rows`` = T·K rows of x."""
        E, H, I = down_EHI.shape
        nearest = 1 << max(0, round(math.log2(max(1, num_rows) / max(1, E))))
        top_k = max(1, num_rows // max(1, len(x_TH)))
        return ShapeClass(H, I, E, top_k, activation, str(x_TH.dtype).removeprefix("torch."), nearest)

    @property
    def key(self) -> str:
        """A name for files: one a class."""
        return "-".join(str(value) for value in asdict(self).values())
