"""A check of ``ms.MoELayer``: bias, shared expert, auxiliary and z-loss, in float32, which its kernels need."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

import moesys as ms
from moesys import verify
from moesys.verify.setup import CheckOptions, batch_of, count_labels

SHAPE = ms.ModelShape(
    hidden_size=32,
    intermediate_size=24,
    num_experts=8,
    top_k=2,
    scoring_func="sigmoid",
    n_shared_experts=1,
    router_aux_loss_coef=0.1,
    router_z_loss_coef=0.05,
    router_bias_update_rate=0.01,
    routed_scaling_factor=1.5,
    initializer_range=0.1,
)
PLANNED: dict[str, Any] = {"balance": ms.Greedy(), "split": ms.FlowSplit()}
STRATEGIES: dict[str, dict[str, Any]] = {
    "ep": {},
    "lent": {"sharding": ms.Ep(slots_per_rank=5), **PLANNED},
    "fsep": {"sharding": ms.Fsep(slots_per_rank=5), **PLANNED},
    "delayed": {"sharding": ms.Fsep(slots_per_rank=5, delay_reshard=True, prefetch_layers=1), **PLANNED},
    "layout": {"sharding": ms.Fsep(slots_per_rank=5), "reduction": ms.LayoutInvariant(), **PLANNED},
    "pipelined": {"sharding": ms.Ep(slots_per_rank=5), "overlap": ms.Pipelined(chunks=2), **PLANNED},
}


class Blocks(nn.Module):
    def __init__(self, strategy: ms.Strategy) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(64, 32), nn.Linear(32, 64, bias=False)
        self.blocks = nn.ModuleList(ms.MoELayer(SHAPE, strategy, layer_index=layer) for layer in range(2))
        random = torch.Generator().manual_seed(5)
        with torch.no_grad():
            for parameter in (self.embed.weight, self.head.weight):
                parameter.copy_(0.3 * torch.randn(parameter.shape, generator=random))

    def forward(self, ids: Tensor, mask: Tensor) -> Tensor:
        x = self.embed(ids)
        for block in self.blocks:
            x = x + block(x, mask.bool())
        return self.head(x)


def of_64_tokens(situation: verify.Situation, part: int, micro_batch: int, step: int) -> verify.Batch:
    """Returns a micro-batch whose tokens are whole blocks of ``LayoutInvariant``."""
    return batch_of(CheckOptions(), replace(situation, length=32), part, micro_batch, step)


@verify.check(ranks=2, dtype=torch.float32, batches=of_64_tokens)
def layer(world: verify.World, name: str = "fsep", over: str = "micro_batch") -> verify.Setup:
    model = Blocks(ms.Strategy(name=name, **(STRATEGIES[name] if world.size > 1 else {}))).train()
    ms.link(model)
    switch = [1.0]

    def step(batches: list[verify.Batch]) -> dict[str, Tensor]:
        tokens = torch.tensor(float(sum(map(count_labels, batches))))
        if world.size > 1:
            dist.all_reduce(tokens)
        logged = torch.zeros(2)
        for batch in batches:
            logits = model(batch["input_ids"], batch["attention_mask"])
            nll = cross_entropy(logits[:, :-1].flatten(0, 1), batch["labels"][:, 1:].flatten(), reduction="sum")
            auxiliary = ms.router_loss(model, over=over) / (len(batches) * world.size)
            (nll / tokens + switch[0] * auxiliary).backward()
            logged += torch.stack([(nll / tokens + auxiliary).detach(), auxiliary.detach()])
        ms.sync_gradients(model)
        if world.size > 1:
            dist.all_reduce(logged)
        return {"loss": logged[0], "auxiliary loss": logged[1]}

    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, foreach=False)

    class Both:
        def step(self) -> None:
            optimizer.step()
            ms.update_router_bias(model)

        def zero_grad(self) -> None:
            optimizer.zero_grad()

    setup = verify.Setup(model, step, Both(), lambda: ms.clip_grad_norm_(model, 1.0))
    setup.terms = {"router losses": lambda on: switch.__setitem__(0, float(on))}
    return setup
