"""Reduction: which bits must agree, and so how sums over rows and ranks are made."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from moesys.config.base import Declared


class Ordered(Declared):
    """The same bits for every overlap: rows of an expert by (source rank, token, k), replicas by rank."""

    kind: Literal["ordered"] = "ordered"

    @property
    def gradient_bytes(self) -> int:
        """Of an element of an expert's gradient, float32."""
        return 4


class LayoutInvariant(Declared):
    """The same bits for every overlap, layout, split and sharding, and for any number of ranks.

    The rows of an expert, by (source rank, token, k) over all ranks, are cut into blocks of ``block_rows`` (the last
    one of half to one and a half of that), and splits give a block to one rank. A block's weight gradient is one
    product; blocks are added in float64 on a grid so coarse that no addition rounds, so that no order shows. On CPUs.
    """

    kind: Literal["layout_invariant"] = "layout_invariant"
    block_rows: int = Field(256, ge=16, le=65536, description="rows of an expert whose gradient is one product")
    token_block: int = Field(
        32, ge=32, multiple_of=32, description="of tokens that do not travel; every rank's are a multiple of it"
    )

    @property
    def gradient_bytes(self) -> int:
        """Of an element of an expert's gradient, float64."""
        return 8


Reduction = Annotated[Ordered | LayoutInvariant, Field(discriminator="kind")]
