"""What routers did, recorded, simulates as it did when it was drawn; what does not fit is refused."""

from __future__ import annotations

import numpy as np

import moesys as ms
from moesys.balance.plan import LayerPlan
from moesys.config.model_run import ModelRun
from moesys.config.workload import Generated
from moesys.simulator.model.simulate_model import drawn_plans, simulate_model
from moesys.traces import Trace, generate

MODEL = ms.models.ModelSpec.from_config("deepseek-v3-small")
LENT = ms.Strategy(name="lent", sharding=ms.Ep(slots_per_rank=4), balance=ms.Greedy(), split=ms.FlowSplit())
RUN = ModelRun(model=MODEL, cluster=ms.presets.h100(2).replace(ranks_per_node=2, name=""), strategy=LENT, seq_len=512)
# Drifting, so that it matters which micro-batches came before.
DRAWN = Generated(skew=1.0, drift=0.5, warmup=3)


def trace_of(seed: int, steps: int = 1, **changes: int) -> Trace:
    sizes = {"num_layers": len(MODEL.moe_layers), "tokens_per_rank": RUN.tokens_per_rank} | changes
    workload = DRAWN.replace(**sizes, steps=steps, micro_batches=1)
    return generate(workload, RUN.cluster.num_ranks, RUN.shape.num_experts, RUN.shape.top_k, seed)


def plans_of(routing: Generated | Trace) -> list[LayerPlan]:
    return list(next(drawn_plans(RUN, routing, 1, seed=7)).values())


def test_a_recorded_trace_and_recorded_plans_simulate_as_what_they_recorded() -> None:
    # One micro-batch before, as layouts of a walk through more depend on each other.
    before = DRAWN.replace(warmup=1)
    for recorded, of in ((trace_of(7, warmup=1), before), (plans_of(DRAWN), DRAWN)):
        drawn = simulate_model(RUN, of, draws=1, seed=7)
        found = simulate_model(RUN, recorded, draws=1)
        assert found.seconds == drawn.seconds
        assert found.draws[0].max_over_mean == drawn.draws[0].max_over_mean
    drawn = simulate_model(RUN, DRAWN, draws=1, seed=7)
    assert drawn.seconds != simulate_model(RUN, trace_of(8), draws=1).seconds


def test_draws_of_a_trace_are_its_newest_micro_batches_with_all_of_the_history() -> None:
    trace = trace_of(7, steps=3)
    found = simulate_model(RUN, trace, draws=2)
    for micro_batch, draw in zip((4, 5), found.draws, strict=True):
        until = Trace(trace.tokens_SLRE[: micro_batch + 1], trace.top_k)
        assert simulate_model(RUN, until, draws=1).seconds == draw.seconds
    alone = Trace(trace.tokens_SLRE[-1:], trace.top_k)
    assert simulate_model(RUN, alone, draws=1).seconds != found.draws[-1].seconds
    assert len(simulate_model(RUN, trace, draws=99).draws) == trace.num_micro_batches


def test_each_layer_has_its_own_routing() -> None:
    layers = list(MODEL.moe_layers)
    plans = next(drawn_plans(RUN, trace_of(7), 1, seed=0))
    assert list(plans) == layers
    for place, layer in enumerate(layers):
        assert np.array_equal(plans[layer].load.tokens_RE, trace_of(7).tokens_SLRE[-1, place])
