"""A small experiment and records of it, made up so that every figure is known."""

from __future__ import annotations

import random

import pytest

from moesys import ClusterSpec, Experiment, Fsep, Generated, ModelShape, Strategy, Training
from moesys.__main__ import app
from moesys.config.experiment import Trial
from moesys.lab.runs.records import Record, Samples

MODEL = ModelShape(hidden_size=16, intermediate_size=8, num_experts=4, top_k=2)
CLUSTER = ClusterSpec(num_nodes=1, ranks_per_node=4)
EP = Strategy(name="ep")
FSEP = Strategy(name="fsep", sharding=Fsep(slots_per_rank=2))
# A training of Megatron-LM, for --from.
PRETRAIN = (
    "pretrain_gpt.py --num-layers 2 --hidden-size 256 --num-attention-heads 4 --swiglu --disable-bias-linear "
    "--num-experts 8 --moe-ffn-hidden-size 128 --seq-length 512 --micro-batch-size 2 --bf16 "
    "--expert-model-parallel-size 4"
)
FSEP_WIDE = Strategy(name="fsep_wide|a&b", sharding=Fsep(slots_per_rank=3))


def experiment(**changes) -> Experiment:
    fields = {
        "name": "tiny",
        "model": MODEL,
        "cluster": CLUSTER,
        "strategies": (EP, FSEP),
        "workload": Training(steps=3, warmup=1),
        "seeds": (0, 1),
    }
    return Experiment(**fields | changes)


def simulated(**changes) -> Experiment:
    return experiment(workload=Generated(steps=3), **changes)


def record(trial: Trial, source: str = "measured", step_ms: float = 10.0, **changes) -> Record:
    """A trial of three timed steps around ``step_ms``, shaken by its seed but not by its strategy."""
    shake = random.Random(trial.seed).uniform(0.9, 1.1)
    samples = {
        "step_ms": Samples("ms", "lower", [step_ms * shake * factor for factor in (0.99, 1.0, 1.02)]),
        "load_max_over_mean": Samples("", "lower", [1.5, 1.4, 1.6]),
    }
    if source == "measured":
        samples["exposed_ms"] = Samples("ms", "lower", [2.0, 2.1, 2.2])
    fields = {"identity": trial.identity, "strategy": trial.strategy.name, "seed": trial.seed, "repeat": trial.repeat}
    fields |= {"source": source, "status": "ok", "started": "2026-01-02T03:04:05+00:00", "seconds": 1.5}
    fields |= {"environment": "0123abcd", "samples": samples, "tokens_LE": [[1, 2, 3, 4]]}
    fields |= {"losses": [5.5, 5.0, 4.5, 4.0 + trial.seed / 8] if source == "measured" else []}
    return Record(**fields | changes)


def records(of: Experiment, step_ms: dict[str, float], noise: float = 0.0) -> list[Record]:
    """One record a trial; ``step_ms`` by strategy, each trial off by up to the share ``noise``."""
    shaken = random.Random(0)
    return [
        record(trial, of.source, step_ms[trial.strategy.name] * shaken.uniform(1 - noise, 1 + noise))
        for trial in of.trials()
    ]


def moesys(*arguments: object) -> int:
    """Runs a command in this process, as the command line does, and returns its exit code."""
    with pytest.raises(SystemExit) as end:
        app([*map(str, arguments)])
    assert isinstance(end.value.code, int)
    return end.value.code
