"""Experiments that run in a second or two, and one whose second strategy fails."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from moesys import CpSat, Experiment, FlowSplit, Generated, Greedy, Pipelined, Training
from moesys.config import ClusterSpec, Fsep, ModelShape, Strategy

EP = Strategy(name="ep")
PIPELINED = EP.replace(name="ep+pipelined", overlap=Pipelined(chunks=2))
FSEP = Strategy(name="fsep", sharding=Fsep(slots_per_rank=5), balance=Greedy(), split=FlowSplit())
# CP-SAT refuses so many experts when it plans, not before.
# two ranks cannot hold three replicas of an expert; only planning finds out
FAILING = Strategy(name="failing", sharding=Fsep(slots_per_rank=4), balance=CpSat(min_replicas=3))


def training(**changes) -> Experiment:
    fields = {
        "name": "trained",
        "model": ModelShape(hidden_size=16, intermediate_size=16, num_experts=8, top_k=2),
        "cluster": ClusterSpec(ranks_per_node=2),
        "strategies": (EP, FSEP),
        "workload": Training(num_layers=1, context=16, batch=1, warmup=1, steps=2),
        "seeds": (0,),
    }
    return Experiment(**fields | changes)


def simulation(**changes) -> Experiment:
    return training(
        **{
            "name": "simulated",
            "strategies": (EP, PIPELINED, FSEP),
            "workload": Generated(warmup=1, steps=2, tokens_per_rank=64),
            "seeds": (0, 1),
        }
        | changes
    )


def partly_failing(**changes) -> Experiment:
    return simulation(**{"name": "partly_failing", "strategies": (EP, FAILING)} | changes)


def torchrun(folder: Path, script: str) -> None:
    """Runs a script on two ranks of torchrun in ``folder``."""
    (folder / "script.py").write_text(script)
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", "script.py"]
    done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, timeout=100)
    assert done.returncode == 0, done.stderr
