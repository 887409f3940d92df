"""Learner: a model under a strategy as the training loop meets it."""

from __future__ import annotations

from typing import Protocol

from torch import Tensor, nn

from moesys.moe.runtime import MoERuntime
from moesys.train.text import Text


class Learner(Protocol):
    """A model and the text that it learns. All methods are collectives of the ranks that train; to make one is none, so
    that ranks can meet first.

    B sequences, C tokens of context, N = B·C tokens.
    """

    model: nn.Module
    text: Text

    def link(self) -> MoERuntime:
        """Joins the model's layers, and shards what is to be sharded."""

    def losses(self, inputs_BC: Tensor, targets_BC: Tensor) -> tuple[Tensor, Tensor]:
        """Returns each token's cross entropy, float32 [N] nats, and what the routers ask for, a mean over tokens."""

    def backward(self, loss: Tensor) -> None:
        """Adds the gradient of the sum of all ranks' ``loss``."""

    def sync_gradients(self) -> None:
        """Ends what ``backward`` leaves for the end of a step."""
