"""Parameters that data-parallel ranks shard: closed forms where only links or only products take time, and any units
against a simulation of two queues.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import moesys as ms
from moesys.config.model_run import ModelRun, Parallelism
from moesys.cost import LinkLoad
from moesys.simulator.model.model_units import Ring, Units
from moesys.simulator.model.simulate_model import simulate_model
from moesys.simulator.rest_of_step import RestOfStep, RestUnit
from moesys.simulator.step_program import run_step

SMALL = ms.models.ModelSpec.from_config("qwen3-moe-small")
DENSE_FIRST = ms.models.ModelSpec.from_config("deepseek-v3-small")
# Only links take time, and each rank has all experts.
LINKS = ms.ClusterSpec(num_nodes=2, ranks_per_node=2, intra_node_gb_per_s=10, inter_node_gb_per_s=5, expert_tflops=1e12)
ALONE = Parallelism(dense="full", ep=1)
GB = 1e9


def run_of(model: ms.models.ModelSpec, cluster: ms.ClusterSpec, parallel: Parallelism = ALONE) -> ModelRun:
    return ModelRun(model=model, cluster=cluster, parallelism=parallel, seq_len=256, global_batch=8)


def seconds_of_one(run: ModelRun) -> float:
    """Of a micro-batch, without the end of the step."""
    (draw,) = simulate_model(run).draws
    return draw.pipeline.seconds / run.num_micro_batches


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("model", [SMALL, DENSE_FIRST])
def test_all_that_is_sharded_travels(model: ms.models.ModelSpec, tied: bool) -> None:
    """Twice gathered and once reduced: the embedding and every layer; the head, and what is tied to it, gathered once.
    Four ranks pass three quarters through the NICs of each node.
    """
    model = model.replace(tied_embeddings=tied)
    H, V = model.hidden_size, model.vocab_size
    layers = sum(layer.num_parameters(H) for layer in model.layers)
    layers -= sum(
        layer.mlp.shape.num_experts * layer.mlp.expert_parameters for layer in model.layers if layer.has_experts
    )
    head = H if tied else H + V * H
    once, twice = (head + V * H, layers) if tied else (head, layers + V * H)
    gathered, reduced = 2 * (once + 2 * twice), 4 * (once + twice)
    found = seconds_of_one(run_of(model, LINKS))
    assert found == pytest.approx(0.75 * (gathered + reduced) / (5 * GB), rel=1e-6)


def test_a_stage_of_its_own_gathers_its_copy_of_tied_weights() -> None:
    model = SMALL.replace(tied_embeddings=True)
    units = Units.of(run_of(model, LINKS, Parallelism(dense="full", pp=2)))
    assert units.head.parameters == model.hidden_size * (model.vocab_size + 1)
    assert units.embedding.parameters == model.hidden_size * model.vocab_size
    assert not units.embedding.kept


@pytest.mark.parametrize("model", [SMALL, DENSE_FIRST])
def test_behind_long_products_only_the_first_and_the_last_show(model: ms.models.ModelSpec) -> None:
    slow = LINKS.replace(expert_tflops=1e-6)
    run = run_of(model, slow)
    alone = run.replace(parallelism=ALONE.replace(dense="replicated"))
    # The embedding has no product, so that the first layer's parameters and gradients hide behind nothing either.
    units = Units.of(run)
    first = units.embedding.parameters + units.layers[0].parameters
    ring = Ring.of_dense(run)
    shown = max(ring.busy_seconds(2 * first, slow)) + max(ring.busy_seconds(4 * first, slow))
    assert seconds_of_one(run) - seconds_of_one(alone) == pytest.approx(shown, rel=1e-3)


@pytest.mark.parametrize("model", [SMALL, DENSE_FIRST])
def test_over_gloo_nothing_hides_and_gradients_go_round_twice(model: ms.models.ModelSpec) -> None:
    run = run_of(model, LINKS.replace(expert_tflops=1e-6))
    hidden = run.replace(parallelism=ALONE.replace(dense="replicated"))
    units, ring = Units.of(run), Ring.of_dense(run)
    all_of = sum(unit.parameters for unit in (units.embedding, *units.layers, units.head))
    twice = all_of - units.head.parameters
    gather_s, scatter_s = (max(ring.busy_seconds(size, run.cluster)) for size in (2 * (all_of + twice), 4 * all_of))
    shown = gather_s + 2 * scatter_s
    found = seconds_of_one(run.replace(backend="gloo")) - seconds_of_one(hidden)
    assert found == pytest.approx(shown, rel=1e-3)


@pytest.mark.parametrize("dense", ["replicated", "optimizer"])
def test_what_gloo_sums_at_the_end_of_a_step_goes_round_as_often_as_a_sum_everywhere(dense: str) -> None:
    # Of dense parameters alone, which hide behind next to nothing.
    run = run_of(SMALL, LINKS, Parallelism(dense=dense, ep=4))
    draws = [simulate_model(run.replace(backend=backend)).draws[0] for backend in ("nccl", "gloo")]
    times = [draw.seconds - draw.pipeline.seconds for draw in draws]
    units = Units.of(run)
    all_of = sum(unit.parameters for unit in (units.embedding, *units.layers, units.head))
    more = max(Ring.of_dense(run).busy_seconds(4 * all_of, run.cluster)) if dense == "optimizer" else 0.0
    assert times[1] - times[0] == pytest.approx(more, rel=0.05)


def test_copies_of_what_is_gathered_take_the_memorys_time() -> None:
    """Read and written: parameters in both passes, but for the head; gradients, which are wider."""
    fast = ms.ClusterSpec(
        num_nodes=1, ranks_per_node=4, intra_node_gb_per_s=1e9, inter_node_gb_per_s=1e9, expert_tflops=1e9
    ).replace(memory_gb_per_s=100.0)
    run = run_of(SMALL, fast)
    alone = run.replace(parallelism=ALONE.replace(dense="replicated"))
    units = Units.of(run)
    all_of = sum(unit.parameters for unit in (units.embedding, *units.layers, units.head))
    num_bytes = 2 * 4 * all_of - 4 * units.head.parameters + (2 + 4) * all_of
    assert seconds_of_one(run) - seconds_of_one(alone) == pytest.approx(num_bytes / (100 * GB), rel=1e-3)


UNITS = st.lists(
    st.tuples(*[st.integers(0, 4).map(float)] * 4, st.booleans()).map(lambda drawn: drawn), min_size=1, max_size=6
)


@given(UNITS)
def test_any_units_are_one_ahead(drawn: list[tuple[float, float, float, float, bool]]) -> None:
    cluster = ms.ClusterSpec(
        num_nodes=1, ranks_per_node=2, intra_node_gb_per_s=1, inter_node_gb_per_s=1, expert_tflops=1.0
    )
    used_4R = np.zeros((4, 2), dtype=bool)
    used_4R[:2] = True

    def load(seconds: float) -> LinkLoad:
        return LinkLoad(np.repeat([seconds, 0.0], [4, 2]), used_4R)

    units = [
        RestUnit(forward, backward, has_experts=False, gathered=load(gathered), reduced=load(reduced), kept=kept)
        for forward, backward, gathered, reduced, kept in drawn
    ]
    shape = ms.ModelShape(hidden_size=8, intermediate_size=8, num_experts=2, top_k=1)
    found = run_step(ms.Strategy(name="ep"), shape, cluster, [[]], RestOfStep(units=units))
    forward, whole = two_queues(drawn)
    assert found.forward_seconds == pytest.approx(forward)
    assert found.length_seconds == pytest.approx(whole)
    without = [replace(unit, gathered=None, reduced=None) for unit in units]
    free = run_step(ms.Strategy(name="ep"), shape, cluster, [[]], RestOfStep(units=without))
    assert free.length_seconds == pytest.approx(sum(forward + backward for forward, backward, *_ in drawn))
    # Where nothing is under way beside computing, all is one after another.
    blocking = run_step(ms.Strategy(name="ep"), shape, cluster, [[]], RestOfStep(units=units, units_block=True))
    forward = sum(forward + gathered for forward, _, gathered, _, _ in drawn)
    assert blocking.forward_seconds == pytest.approx(forward)
    again = sum(gathered for *_, gathered, _, kept in drawn if not kept)
    assert blocking.length_seconds == pytest.approx(
        forward + again + sum(backward + reduced for _, backward, _, reduced, _ in drawn)
    )


def two_queues(drawn: list[tuple[float, float, float, float, bool]]) -> tuple[float, float]:
    """A queue of what is sent, in the order in which passes ask for it, and one of what is computed."""
    last = len(drawn) - 1
    passes = [("forward", place) for place in range(last + 1)] + [("backward", place) for place in range(last, -1, -1)]
    now = link = forward_end = 0.0
    there: dict[tuple[str, int], float] = {}
    for way, place in passes:
        step = 1 if way == "forward" else -1
        for one in (place, place + step):
            if not 0 <= one <= last or (way, one) in there:
                continue
            if way == "backward" and drawn[one][4]:
                there[way, one] = 0.0
                continue
            link = there[way, one] = max(link, now) + drawn[one][2]
        now = max(now, there[way, place]) + drawn[place][0 if way == "forward" else 1]
        if way == "forward":
            forward_end = now
        else:
            link = max(link, now) + drawn[place][3]
    return forward_end, max(now, link)
