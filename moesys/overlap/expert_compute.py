"""What is done to rows of experts, apart from when: the schedule (``moesys.schedule``) asks for it chunk by chunk.

Two implementations: ``experts_cpu`` calls a GEMM a slot, on the CPU; ``experts_triton`` has Triton kernels for all
slots at once. Both promise the same: what is computed of a row does not depend on its chunk, and weight gradients sum
rows in expert order, whatever the chunks.

T tokens of this rank, H hidden, I expert width, K top-k, M arrivals, P expert rows.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple, Protocol

import torch
from torch import Tensor

from moesys.kernels.cpu.page_pool import PagePool, Scratch
from moesys.overlap.block_sums import BlockSums
from moesys.overlap.held_experts import ExpertGradients, HeldExperts
from moesys.overlap.routes import ChunkRoutes, Routes

if TYPE_CHECKING:
    from moesys.overlap.single_rank import SingleRankExecutor


@dataclass(frozen=True)
class Arrivals:
    """Rows by arrival. On one rank nothing travels: arrivals are the source's rows themselves, through ``index``."""

    rows: Tensor
    index: Tensor | None
    source: Tensor | None = None
    send_index: Tensor | None = None

    def place(self, arrival_N: Tensor) -> Tensor:
        """Returns which of ``rows`` these arrivals are."""
        return arrival_N if self.index is None else self.index[arrival_N]

    def take(self, arrival_N: Tensor, scratch: Scratch, name: str) -> Tensor:
        """Copies these arrivals into ``scratch``, where they last until the next ones of that name."""
        index = self.place(arrival_N)
        taken = scratch(name, (len(index), *self.rows.shape[1:]), self.rows.dtype)
        return torch.index_select(self.rows, 0, index, out=taken)


class Workplace(NamedTuple):
    """Where the tensors of one pass lie: those that last, and those that are overwritten."""

    memory: PagePool
    scratch: Scratch


class BackwardInputs(NamedTuple):
    """What backward starts from: gradients of the output, tokens and routing weights, float32, by arrival, and
    pre-activations [P, 2I]. ``gradients``: where ``weight_gradients`` will write, None where it will not be called;
    ``sums``: how it sums where layouts may not show, into float64.
    """

    dy: Arrivals
    x: Arrivals
    h_P2I: Tensor
    weight_M: Tensor
    gradients: ExpertGradients | None
    sums: BlockSums | None = None


class ForwardPass(Protocol):
    """Forward of one micro-batch, made when its experts are here; asked for every chunk in turn."""

    def experts(self, chunk: ChunkRoutes) -> Tensor:
        """Returns y [P, H] of the chunk's expert rows, before routing weights."""

    def first_product(self, chunk: ChunkRoutes) -> None:
        """Computes the chunk's pre-activations, instead of ``experts``."""

    def pre_activations(self) -> Tensor:
        """Returns h [P, 2I] of all chunks, after the last."""


class BackwardPass(Protocol):
    """Backward of one micro-batch, made when its experts are here; asked for every chunk in turn."""

    def experts(self, chunk: ChunkRoutes) -> tuple[Tensor, Tensor]:
        """Returns (dx [P, H] of the chunk's expert rows, dweight float32 [M] of its arrivals)."""

    def weight_gradients(self) -> None:
        """Writes those of every held expert, after the last chunk; zeros for one without rows."""


class ExpertCompute(Protocol):
    """A way to compute experts. ``min_rows``: routes are padded to so many rows of a slot (``build_routes``).
    ``by_tables``: whether it needs no ``ChunkRows.slots``, which the host knows, but tables that may be on a device.
    """

    @property
    def min_rows(self) -> int: ...

    @property
    def by_tables(self) -> bool: ...

    def alone(self, expert_TK: Tensor, num_experts: int) -> SingleRankExecutor | None:
        """Returns what runs a micro-batch on one rank without the host knowing counts; None where it must know them."""

    def forward(self, routes: Routes, x: Arrivals, weights: HeldExperts, at: Workplace) -> ForwardPass: ...

    def backward(self, routes: Routes, inputs: BackwardInputs, weights: HeldExperts, at: Workplace) -> BackwardPass: ...

    def combine(
        self, rows_NH: Tensor, place_TK: Tensor, weight_TK: Tensor | None, out_TH: Tensor, scratch: Scratch
    ) -> None:
        """Writes into ``out[t]`` the sum over k = 0..K-1, in that order, of ``rows[place[t, k]]`` times its weight, if
        any; in float32, rounded once.
        """
