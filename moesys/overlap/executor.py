"""What runs one micro-batch of one layer on one rank, whatever its overlap: what ``moe`` asks of it.

T tokens of this rank, H hidden, I expert width, K top-k, M arrivals, P expert rows.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

from torch import Tensor

from moesys.overlap.held_experts import ExpertGradients, HeldExperts


@dataclass(frozen=True)
class Saved:
    """What backward needs: arrived rows of x [M, H] (x itself on one rank, and where it is pulled again),
    pre-activations h [P, 2I], and routing weights float32 [T, K].
    """

    arrivals_MH: Tensor
    h_P2I: Tensor
    weight_TK: Tensor


WaitForExperts = Callable[[], HeldExperts]


class Executor(Protocol):
    """Made for one routing: forward, recomputed or not, and then backward."""

    def forward(self, x_TH: Tensor, weight_TK: Tensor, wait_for_experts: WaitForExperts) -> tuple[Tensor, Saved]:
        """Returns the output [T, H] in x's dtype, of routing weights float32 [T, K]. ``wait_for_experts`` is called
        once, when they are needed.
        """

    def recompute(
        self, x_TH: Tensor, weight_TK: Tensor, wait_for_experts: WaitForExperts, *, read: bool
    ) -> tuple[Tensor | None, Saved]:
        """Returns what ``forward`` returns of the same arguments; None for the output where no rank says that it is
        ``read``. A collective: ranks may say different things.
        """

    def backward(
        self, dy_TH: Tensor, saved: Saved, wait_for_experts: WaitForExperts, gradients: ExpertGradients | None
    ) -> tuple[Tensor, Tensor]:
        """Returns (dx [T, H], dweight float32 [T, K]); each held expert's weight gradients are written into
        ``gradients``, or not computed where that is None.
        """
