"""The experts that a rank holds, and where their gradients go, whatever computes with them.

S slots, H hidden, I expert width.
"""

from __future__ import annotations

from typing import NamedTuple, Protocol

from torch import Tensor


class ExpertWeights(NamedTuple):
    """One expert: ``gate_up`` [2I, H], ``down`` [H, I]; or several, stacked: [S, 2I, H], [S, H, I].

    Experts of other libraries may have projections the other way round, no gate, and biases [2I] and [H]: ``stacked``
    is not asked for those.
    """

    gate_up: Tensor
    down: Tensor
    gate_up_bias: Tensor | None = None
    down_bias: Tensor | None = None


class HeldExperts(Protocol):
    """A rank's experts by slot index; float32 masters are cast just before each use."""

    def __len__(self) -> int: ...

    def __getitem__(self, slot: int) -> ExpertWeights: ...

    def stacked(self) -> ExpertWeights:
        """All of them in the compute dtype. Each matrix is contiguous, but between two of them may be others."""


class ExpertGradients(NamedTuple):
    """Where the weight gradients of all held experts are written, float32: [S, 2I, H] and [S, H, I], each matrix
    contiguous, but between two of them may be others. Biases as in ``ExpertWeights``.
    """

    gate_up: Tensor
    down: Tensor
    gate_up_bias: Tensor | None = None
    down_bias: Tensor | None = None
