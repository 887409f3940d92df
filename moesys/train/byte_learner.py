"""ByteLearner: moesys' own small language model, whose dense parameters are replicated."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional

from moesys.config import ClusterSpec, ModelShape, Strategy
from moesys.config.workload import Training
from moesys.moe.gradients import sync_gradients
from moesys.moe.router import router_loss
from moesys.moe.runtime import MoERuntime, link
from moesys.train.language_model import LanguageModel
from moesys.train.text import load_text


class ByteLearner:
    """A ``LanguageModel`` on the source code of Python's standard library."""

    def __init__(
        self,
        shape: ModelShape,
        strategy: Strategy,
        cluster: ClusterSpec,
        workload: Training,
        seed: int,
        group: dist.ProcessGroup | None,
        device: torch.device,
    ) -> None:
        self.text = load_text()
        self.model: nn.Module = LanguageModel(
            shape, strategy, workload, seed, cluster=cluster, group=group, device=device
        )

    def link(self) -> MoERuntime:
        return link(self.model)

    def losses(self, inputs_BC: Tensor, targets_BC: Tensor) -> tuple[Tensor, Tensor]:
        logits_BCV = self.model(inputs_BC)
        nats_N = functional.cross_entropy(logits_BCV.flatten(0, 1), targets_BC.flatten(), reduction="none")
        return nats_N, router_loss(self.model)

    def backward(self, loss: Tensor) -> None:
        loss.backward()

    def sync_gradients(self) -> None:
        sync_gradients(self.model)
