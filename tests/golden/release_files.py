"""Writes the files of a release that later releases must read: run folders, a trace, a plan, a journal, a checkpoint.

``PYTHONPATH=CHECKOUT python tests/golden/release_files.py FOLDER`` writes those of the release in CHECKOUT.
``files/4f9672e`` has those of the commit 4f9672e.
"""

from __future__ import annotations

import shutil
import sys
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from typer.testing import CliRunner

import moesys as ms
from moesys.__main__ import app
from moesys.lab.ranks.pool import LocalRanks

SHAPE = ms.ModelShape(hidden_size=12, intermediate_size=8, num_experts=4, top_k=2)
FSEP = ms.Strategy(name="fsep", sharding=ms.Fsep(slots_per_rank=3), balance=ms.Greedy(), split=ms.FlowSplit())
SAVED_STEPS, STEPS = 3, 5


def simulated() -> ms.Experiment:
    return ms.Experiment(
        name="simulated",
        model=SHAPE.replace(hidden_size=256, intermediate_size=256),
        cluster=ms.ClusterSpec(num_nodes=2, ranks_per_node=2),
        strategies=(ms.Strategy(name="ep"), FSEP),
        workload=ms.Generated(warmup=2, steps=2, tokens_per_rank=256, skew=1.0),
        seeds=(0, 1, 2),
    )


def trained() -> ms.Experiment:
    return simulated().replace(
        name="trained",
        model=SHAPE,
        cluster=ms.ClusterSpec(ranks_per_node=2),
        workload=ms.Training(num_layers=2, num_heads=2, context=16, batch=2, warmup=1, steps=4),
        seeds=(0,),
    )


class Model(nn.Module):
    def __init__(self, strategy: ms.Strategy) -> None:
        super().__init__()
        self.moe = nn.ModuleList(ms.MoELayer(SHAPE, strategy, layer_index=layer, seed=1) for layer in range(2))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.moe:
            x = x + layer(x)
        return x


def model_and_optimizer(strategy: ms.Strategy) -> tuple[Model, torch.optim.Optimizer]:
    model = Model(strategy)
    return model, torch.optim.Adam(model.parameters(), lr=1e-2)


def tokens_of(step: int, rank: int) -> Tensor:
    return torch.randn(9 + rank, SHAPE.hidden_size, generator=torch.Generator().manual_seed(10 * step + rank))


def train(model: Model, optimizer: torch.optim.Optimizer, steps: range) -> list[float]:
    """Returns this rank's losses."""
    losses = []
    for step in steps:
        loss = model(tokens_of(step, dist.get_rank())).square().mean()
        loss.backward()
        ms.sync_gradients(model)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def save_checkpoint(folder: str) -> list[float]:
    """Saves after ``SAVED_STEPS`` steps, and returns the losses of all ``STEPS``."""
    model, optimizer = model_and_optimizer(FSEP)
    losses = train(model, optimizer, range(SAVED_STEPS))
    state, optimizer_state = get_state_dict(model, optimizer)
    dcp.save({"model": state, "optimizer": optimizer_state}, checkpoint_id=folder)
    return losses + train(model, optimizer, range(SAVED_STEPS, STEPS))


def load_checkpoint(folder: str, strategy: ms.Strategy) -> tuple[Model, torch.optim.Optimizer]:
    model, optimizer = model_and_optimizer(strategy)
    model_state, optimizer_state = get_state_dict(model, optimizer)
    state = {"model": model_state, "optimizer": optimizer_state}
    dcp.load(state, checkpoint_id=folder)
    set_state_dict(model, optimizer, model_state_dict=state["model"], optim_state_dict=state["optimizer"])
    return model, optimizer


def command(*arguments: object) -> str:
    """Returns what a command prints; raises RuntimeError if it fails."""
    result = CliRunner().invoke(app, [*map(str, arguments)])
    if result.exit_code:
        raise RuntimeError(f"{arguments} failed: {result.output}")
    return result.stdout


def main(folder: Path) -> None:
    folder.mkdir()
    (folder / "fsep.toml").write_text(FSEP.to_toml())
    for experiment in (simulated(), trained()):
        file = folder / f"{experiment.name}.json"
        file.write_text(experiment.to_json())
        command("run", file, "--out", folder / "runs")
    command("tune", folder / "simulated.json", "--out", folder / "tuned", "--budget", 8, "--jobs", 1)
    (run,) = (folder / "runs").glob("simulated-*")
    (folder / "compared.json").write_text(command("compare", run, "--json"))
    np.save(folder / "load.npy", np.arange(1, 17).reshape(4, 4) ** 2)
    plan = ("plan", "--load", folder / "load.npy", "--cluster", "2x2", "--slots", 2)
    command(*plan, "--out", folder / "plan.json")
    with LocalRanks(2) as ranks:
        losses = ranks.run(save_checkpoint, str(folder / "checkpoint"))
    (folder / "losses.txt").write_text("\n".join(value.hex() for rank in losses for value in rank) + "\n")
    for path in folder.rglob("*"):
        if path.suffix in (".svg", ".png", ".html"):
            path.unlink()


if __name__ == "__main__":
    target = Path(sys.argv[1])
    shutil.rmtree(target, ignore_errors=True)
    main(target)
