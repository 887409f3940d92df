"""Experiments that run in a second or two, and one whose second strategy fails."""

from __future__ import annotations

from moesys.config import ClusterSpec, CpSat, FlowSplit, Fsep, Greedy, ModelShape, Pipelined, Strategy
from moesys.experiment import Experiment, Generated, Training

EP = Strategy(name="ep")
PIPELINED = EP.replace(name="ep+pipelined", overlap=Pipelined(chunks=2))
FSEP = Strategy(name="fsep", sharding=Fsep(slots_per_rank=5), balance=Greedy(), split=FlowSplit())
# CP-SAT refuses so many experts when it plans, not before.
TOO_MANY_EXPERTS = 130
FAILING = Strategy(name="failing", sharding=Fsep(slots_per_rank=TOO_MANY_EXPERTS), balance=CpSat())


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
    many = ModelShape(hidden_size=8, intermediate_size=8, num_experts=TOO_MANY_EXPERTS, top_k=2)
    return simulation(**{"name": "partly_failing", "model": many, "strategies": (EP, FAILING)} | changes)
