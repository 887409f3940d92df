"""Trainings that cannot be checked: each breaks in its own way."""

from __future__ import annotations

import os
import time
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from moesys import verify


class Lines(nn.Module):
    def __init__(self, dropout: float) -> None:
        super().__init__()
        self.embed, self.noise, self.head = nn.Embedding(64, 8), nn.Dropout(dropout), nn.Linear(8, 64)
        verify.draw(self)

    def forward(self, ids: Tensor) -> Tensor:
        return self.head(self.noise(self.embed(ids)))


@verify.check(ranks=2)
def broken(world: verify.World, how: str = "") -> verify.Setup:
    """Builds a training whose ranks do not talk to each other, which breaks as ``how`` says."""
    on_rank = world.size > 1 and world.rank == 1
    if how == "build raises" and on_rank:
        raise RuntimeError("no such mesh")
    if how == "returns a model":
        return nn.Linear(2, 2)  # type: ignore[return-value]
    model = Lines(0.5 if how == "draws" else 0.0)
    renamed: Any = nn.ModuleDict({"inner": model}) if how == "renamed" and world.size > 1 else model

    def step(batches: list[verify.Batch]) -> dict[str, Any]:
        if how == "hangs" and on_rank:
            time.sleep(1000)
        if how == "dies" and on_rank:
            os._exit(3)
        if how == "refuses float64" and world.dtype == torch.float64:
            raise TypeError("expected float32")
        total = 0.0
        for batch in batches:
            loss = cross_entropy(model(batch["input_ids"]).flatten(0, 1), batch["input_ids"].flatten())
            (loss * (0.0 if how == "does not train" else 1.0)).backward()
            total += float(loss)
        if how == "no loss":
            return {"l": total}
        return {"loss": total, **({"rank 1": 1.0} if how == "other numbers" and on_rank else {})}

    parts = {"other parts": 2 + on_rank, "missing part": 2}.get(how)
    return verify.Setup(
        renamed,
        step,
        torch.optim.SGD([] if how == "no parameters" else model.parameters(), lr=0.1),
        part=0 if how == "missing part" else None,
        parts=parts if world.size > 1 else None,
    )


drawn = iter(range(1000))


def impure(situation: verify.Situation, part: int, micro_batch: int, step: int) -> verify.Batch:
    ids = torch.full((2, 8), next(drawn) % 64)
    return {"input_ids": ids, "labels": ids, "attention_mask": torch.ones_like(ids)}
