"""A language model with two MoE layers in plain torch, and its training by DDP: right, or with a fault.

T tokens, E experts, K choices, H width.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, one_hot
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint

from moesys import verify

VOCABULARY, E, K, H, I = 64, 8, 2, 32, 24
COEFFICIENT = 0.1


class Router(nn.Module):
    """Returns the scores [T, E], the weights [T, K] and the choices [T, K] of tokens."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(E, H))
        self.register_buffer("bias", torch.zeros(E))
        self.register_buffer("tokens", torch.zeros(E))

    def forward(self, tokens_TH: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        scores_TE = (tokens_TH @ self.weight.T).sigmoid()
        choices_TK = (scores_TE + self.bias).topk(K).indices
        weights_TK = scores_TE.gather(-1, choices_TK)
        if self.training:
            self.tokens += one_hot(choices_TK, E).sum((0, 1))
        return scores_TE, weights_TK / weights_TK.sum(-1, keepdim=True), choices_TK


class Experts(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Parameter(torch.empty(E, H, I))
        self.down = nn.Parameter(torch.empty(E, I, H))

    def forward(self, tokens_TH: Tensor, weights_TK: Tensor, choices_TK: Tensor) -> Tensor:
        result = torch.zeros_like(tokens_TH)
        for expert in range(E):
            token, k = (choices_TK == expert).nonzero(as_tuple=True)
            rows = (tokens_TH[token] @ self.up[expert]).relu() @ self.down[expert]
            result = result.index_add(0, token, rows * weights_TK[token, k, None])
        return result


class Block(nn.Module):
    def __init__(self, dropout: float) -> None:
        super().__init__()
        self.norm, self.gate, self.experts = nn.LayerNorm(H), Router(), Experts()
        self.mix, self.dropout = nn.Linear(H, H, bias=False), nn.Dropout(dropout)
        self.scores_TE: Tensor | None = None

    def forward(self, tokens_BSH: Tensor) -> Tensor:
        rows = self.norm(tokens_BSH.cumsum(1) / 4).flatten(0, 1)
        self.scores_TE, weights_TK, choices_TK = self.gate(rows)
        moved = self.dropout(self.mix(rows) + self.experts(rows, weights_TK, choices_TK))
        return tokens_BSH + moved.view_as(tokens_BSH)


class SmallMoE(nn.Module):
    def __init__(self, situation: verify.Situation) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, H)
        self.layers = nn.ModuleList(Block(0.1 if situation.dropout else 0.0) for _ in range(2))
        self.head = nn.Linear(H, VOCABULARY, bias=False)
        verify.draw(self, deviation=0.3)
        if situation.tied:
            self.head.weight = self.embed.weight
        self.recomputes = bool(situation.recomputation)

    def forward(self, ids: Tensor) -> Tensor:
        tokens = self.embed(ids)
        for layer in self.layers:
            tokens = checkpoint(layer, tokens, use_reentrant=False) if self.recomputes else layer(tokens)
        return self.head(tokens)

    def auxiliary_loss(self, mask: Tensor) -> Tensor:
        """Returns the sum over the layers of E · Σ fᵢ pᵢ of the tokens that are no padding."""
        total = self.head.weight.new_zeros(())
        for layer in self.layers:
            scores_TE = layer.scores_TE[mask.flatten().bool()]
            probabilities_TE = scores_TE / scores_TE.sum(-1, keepdim=True)
            share_E = one_hot((scores_TE + layer.gate.bias).topk(K).indices, E).sum((0, 1)) / scores_TE.shape[0]
            total = total + E * (share_E * probabilities_TE.mean(0)).sum()
        return total


@verify.check(supports=("recomputation", "selective", "accumulation", "frozen", "tied", "two_forwards", "dropout"))
def small_moe(world: verify.World, fault: str = "") -> verify.Setup:
    """Builds a training by DDP, with a fault on several ranks."""
    situation, planted = world.situation, fault if world.size > 1 else ""
    plain = SmallMoE(situation)
    frozen = {"experts": ".experts.", "routers": ".gate.", "all but routers": ".gate."}.get(situation.frozen, "")
    for name, parameter in plain.named_parameters() if frozen else ():
        parameter.requires_grad_((frozen in name) == (situation.frozen == "all but routers"))
    model: Any = DistributedDataParallel(plain, broadcast_buffers=False) if world.size > 1 else plain
    if situation.dropout:
        torch.manual_seed(0 if planted == "equal masks" else world.rank)
    switch = [COEFFICIENT]
    counts = [layer.gate.tokens.clone() for layer in plain.layers]

    def loss_of(batch: verify.Batch, tokens: Tensor, micro_batches: int) -> tuple[Tensor, Tensor]:
        logits = model(batch["input_ids"])
        nll = cross_entropy(logits[:, :-1].flatten(0, 1), batch["labels"][:, 1:].flatten(), reduction="sum") / tokens
        return nll, switch[0] * plain.auxiliary_loss(batch["attention_mask"]) / (micro_batches * world.size)

    def step(batches: list[verify.Batch]) -> dict[str, Tensor]:
        tokens = torch.tensor(float(sum(int((b["labels"][:, 1:] != -100).sum()) for b in batches)))
        if world.size > 1:
            dist.all_reduce(tokens)
        logged, waiting = torch.zeros(2), []
        for index, batch in enumerate(batches):
            last = index == len(batches) - 1
            model.require_backward_grad_sync = planted != "never synchronised" and (situation.sync or last)
            nll, auxiliary = loss_of(batch, tokens, len(batches))
            logged += torch.stack([nll.detach(), auxiliary.detach()])
            waiting.append((nll + auxiliary) * world.size)
            if not situation.two_forwards or last:
                torch.stack(waiting).sum().backward()
                waiting.clear()
            if planted == "bias in each micro-batch":
                move_bias()
        if world.size > 1:
            dist.all_reduce(logged)
        return {"loss": logged.sum(), "auxiliary loss": logged[1]}

    def clip() -> Tensor:
        return nn.utils.clip_grad_norm_(model.parameters(), 1.0)

    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-2, foreach=False)

    def move_bias() -> None:
        for layer, before in zip(plain.layers, counts, strict=True):
            new = layer.gate.tokens - before
            if world.size > 1:
                dist.all_reduce(new)
            layer.gate.bias += 1e-4 * (new.mean() - new).sign()

    class Both:
        def step(self) -> None:
            optimizer.step()
            if planted != "bias in each micro-batch":
                move_bias()
            for layer, before in zip(plain.layers, counts, strict=True):
                new = layer.gate.tokens - before
                if world.size > 1:
                    dist.all_reduce(new)
                layer.gate.tokens.copy_(before + new / (2.0 if situation.recomputation and not planted else 1.0))
                before.copy_(layer.gate.tokens)

        def zero_grad(self) -> None:
            optimizer.zero_grad()

    def save(folder: Path) -> None:
        state = {"model": plain.state_dict(), "optimizer": optimizer.state_dict()}
        if planted == "bias lost on resume":
            state["model"] = {name: each for name, each in state["model"].items() if "gate.bias" not in name}
        if world.rank == 0:
            folder.mkdir()
            torch.save(state, folder / "state.pt")
        if world.size > 1:
            dist.barrier()

    def load(folder: Path) -> None:
        state = torch.load(folder / "state.pt")
        plain.load_state_dict(state["model"], strict=False)
        optimizer.load_state_dict(state["optimizer"])
        for layer, before in zip(plain.layers, counts, strict=True):
            before.copy_(layer.gate.tokens)

    def evaluate(batch: verify.Batch) -> Tensor:
        if planted != "evaluation in training mode":
            plain.eval()
        loss = cross_entropy(plain(batch["input_ids"])[:, :-1].flatten(0, 1), batch["input_ids"][:, 1:].flatten())
        plain.train()
        return loss

    return verify.Setup(
        model,
        step,
        Both(),
        clip,
        terms={"auxiliary loss": lambda on: switch.__setitem__(0, COEFFICIENT * on)},
        evaluate=evaluate,
        save=save,
        load=load,
    )
