"""A small byte-level language model with real attention, whose feed-forward layers are mixtures of experts.

B sequences, C bytes of context, H hidden size, V vocabulary.
"""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

from moesys.config import ClusterSpec, ModelShape, Strategy
from moesys.config.workload import Training
from moesys.lab.train.text import generator_of, load_text
from moesys.moe.call import recompute
from moesys.moe.gradients import sync_gradients
from moesys.moe.layer import MoELayer
from moesys.moe.router import router_loss
from moesys.moe.runtime import MoERuntime, link

VOCABULARY = 256

# The dtype does not depend on torch's default.
PARAMETER_DTYPE = torch.float32


class LanguageModel(nn.Module):
    """Logits of the next byte, float32 [B, C, V], from bytes, int64 [B, C].

    Embeddings of bytes and places, ``num_layers`` blocks, a norm and a head of its own; pre-norm residual blocks of
    causal attention and a ``MoELayer`` of ``model`` under ``strategy``. ``cluster``, ``group`` and ``device``
    are those of ``MoELayer``. With ``workload.recompute`` blocks keep their inputs only and run again in backward.

    Parameters are float32 and start from ``seed`` and their names alone: not from ranks, not from the strategy. All
    but the experts are replicated on every rank.
    """

    def __init__(
        self,
        model: ModelShape,
        strategy: Strategy,
        workload: Training,
        seed: int,
        *,
        cluster: ClusterSpec | None = None,
        group: dist.ProcessGroup | DeviceMesh | None = None,
        device: torch.device | None = None,
    ) -> None:
        super().__init__()
        H = model.hidden_size
        self.workload = workload
        self.embedding = nn.Embedding(VOCABULARY, H, dtype=PARAMETER_DTYPE)
        self.place = nn.Embedding(workload.context, H, dtype=PARAMETER_DTYPE)
        self.blocks = nn.ModuleList(
            DecoderBlock(
                workload.num_heads,
                MoELayer(model, strategy, group, cluster=cluster, layer_index=index, seed=seed, device=device),
            )
            for index in range(workload.num_layers)
        )
        self.norm = nn.RMSNorm(H, dtype=PARAMETER_DTYPE)
        self.head = nn.Linear(H, VOCABULARY, bias=False, dtype=PARAMETER_DTYPE)
        self._draw(model.initializer_range, seed)
        # Weights are drawn on the CPU, so that every device starts from the same ones.
        if device is not None and device.type != "cpu":
            self.to(device)

    @torch.no_grad()
    def _draw(self, std: float, seed: int) -> None:
        """Draws the initial weights of all modules except MoE layers and norms."""
        drawn = {weight for module in self.modules() if isinstance(module, MoELayer) for weight in module.parameters()}
        for name, parameter in self.named_parameters():
            if parameter not in drawn and parameter.dim() > 1:
                parameter.normal_(std=std, generator=generator_of("weights", seed, name))

    def forward(self, bytes_BC: Tensor) -> Tensor:
        x_BCH = self.embedding(bytes_BC) + self.place.weight[: bytes_BC.shape[1]]
        for block in self.blocks:
            if self.workload.recompute and torch.is_grad_enabled():
                x_BCH = checkpoint(block, x_BCH, use_reentrant=False, context_fn=recompute, preserve_rng_state=False)
            else:
                x_BCH = block(x_BCH)
        return self.head(self.norm(x_BCH))


class DecoderBlock(nn.Module):
    """x + attention(norm(x)), and then x + experts(norm(x)), on [B, C, H]."""

    def __init__(self, num_heads: int, moe: MoELayer) -> None:
        super().__init__()
        H = moe.shape.hidden_size
        self.attention_norm = nn.RMSNorm(H, dtype=PARAMETER_DTYPE)
        self.attention = Attention(H, num_heads)
        self.moe_norm = nn.RMSNorm(H, dtype=PARAMETER_DTYPE)
        self.moe = moe

    def forward(self, x_BCH: Tensor) -> Tensor:
        x_BCH = x_BCH + self.attention(self.attention_norm(x_BCH))
        return x_BCH + self.moe(self.moe_norm(x_BCH))


class Attention(nn.Module):
    """Causal self-attention of ``num_heads`` heads, [B, C, H] to [B, C, H], without biases."""

    def __init__(self, hidden_size: int, num_heads: int) -> None:
        super().__init__()
        self.num_heads = num_heads
        self.qkv = nn.Linear(hidden_size, 3 * hidden_size, bias=False, dtype=PARAMETER_DTYPE)
        self.out = nn.Linear(hidden_size, hidden_size, bias=False, dtype=PARAMETER_DTYPE)

    def forward(self, x_BCH: Tensor) -> Tensor:
        # Heads come before positions: [B, heads, C, H / heads].
        query, key, value = (
            part_BCH.unflatten(2, (self.num_heads, -1)).transpose(1, 2) for part_BCH in self.qkv(x_BCH).chunk(3, dim=2)
        )
        y = functional.scaled_dot_product_attention(query, key, value, is_causal=True)
        return self.out(y.transpose(1, 2).flatten(2))


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
