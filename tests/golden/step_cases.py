"""Golden steps: what the cost model says of all overlaps and shardings, on several clusters."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import product
from zlib import crc32

import numpy as np
from plan_cases import drawn_load

import moesys as ms
from moesys.simulator import step_program
from moesys.simulator.rest_of_step import RestOfStep
from moesys.timeline import Timeline

MODEL = ms.ModelShape(hidden_size=512, intermediate_size=768, num_experts=16, top_k=2, dtype="bfloat16")
CLUSTERS = {
    "1x4 without latencies": ms.ClusterSpec(ranks_per_node=4),
    "2x4, slow between": ms.ClusterSpec(
        num_nodes=2, ranks_per_node=4, inter_node_gb_per_s=5.0, intra_node_us=3.0, inter_node_us=20.0, launch_us=2.0
    ),
    "3+1+2 in tiles": ms.ClusterSpec(
        num_nodes=3,
        ranks_per_node=(3, 1, 2),
        memory_gb_per_s=1500.0,
        multiprocessors=20,
        tile_rows=64,
        tile_columns=128,
        copy_share=0.15,
        flag_us=1.0,
    ),
    "2x8 H100": ms.presets.h100(2),
}
EP, LENT, FSEP = ms.Ep(), ms.Ep(slots_per_rank=6), ms.Fsep(slots_per_rank=6)
GREEDY = {"balance": ms.Greedy(), "split": ms.FlowSplit()}
STRATEGIES = {
    "ep": {"sharding": EP},
    "ep pipelined": {"sharding": EP, "overlap": ms.Pipelined(chunks=2)},
    "ep mega": {"sharding": EP, "overlap": ms.MegaKernel()},
    "lent": {"sharding": LENT, **GREEDY},
    "lent by node": {"sharding": LENT.replace(lend="hierarchical"), **GREEDY},
    "lent pipelined": {"sharding": LENT, **GREEDY, "overlap": ms.Pipelined(chunks=4)},
    "lent mega slots": {
        "sharding": LENT,
        **GREEDY,
        "overlap": ms.MegaKernel(fused="combine", combine_share=0.5, tile_order="slots", granularity="expert"),
    },
    "fsep static": {"sharding": FSEP},
    "fsep": {"sharding": FSEP, **GREEDY},
    "fsep eager": {"sharding": FSEP.replace(prefetch_layers=1, delay_reshard=True), **GREEDY},
    "fsep kept pipelined": {
        "sharding": FSEP.replace(prefetch_layers=2, reshard_after_forward=False),
        **GREEDY,
        "overlap": ms.Pipelined(chunks=3),
    },
    "fsep hierarchical": {
        "sharding": FSEP.replace(restore="hierarchical", prefetch_layers=1, delay_reshard=True),
        **GREEDY,
        "overlap": ms.Pipelined(chunks=8),
    },
    "fsep summed at nodes": {"sharding": FSEP.replace(reshard="hierarchical"), **GREEDY},
    "fsep summed at nodes eager": {
        "sharding": FSEP.replace(restore="hierarchical", reshard="hierarchical", prefetch_layers=1, delay_reshard=True),
        **GREEDY,
        "overlap": ms.Pipelined(chunks=2),
    },
    "fsep laer": {"sharding": FSEP, "balance": ms.Laer(), "split": ms.EvenSplit(), "overlap": ms.Pipelined(chunks=2)},
    "fsep mega": {"sharding": FSEP.replace(prefetch_layers=1), **GREEDY, "overlap": ms.MegaKernel()},
    "fsep mega eager": {
        "sharding": FSEP.replace(prefetch_layers=1, delay_reshard=True),
        **GREEDY,
        "overlap": ms.MegaKernel(deduplicate=True, dispatch_share=1.0, reduce_share=0.5, fetch_rows=16),
    },
    "fsep mega apart": {
        "sharding": FSEP.replace(restore="hierarchical"),
        "balance": ms.Eplb(),
        "split": ms.Proportional(),
        "overlap": ms.MegaKernel(fused="none", overlap_weight_gradients=False, tile_rows=64, tile_columns=64),
    },
}
# micro-batches, and what else a step does
RESTS = (
    (1, RestOfStep()),
    (1, RestOfStep(other_seconds=2e-4, latency_seconds=1e-5, optimizer_seconds=1e-4)),
    (2, RestOfStep()),
    (1, RestOfStep(other_seconds=1e-4, recompute="layers")),
    (1, RestOfStep(other_seconds=1e-4, recompute="computing", travel_behind_rest=True, every_slot_travels=True)),
)
NUM_LAYERS = 2


def step_lines() -> Iterator[str]:
    """A step: its length, when each rank is through, what ranks compute and wait for; then its critical path, one part
    a line, with the rank (of a NIC, the node). Milliseconds with 12 digits.
    """
    for cluster_name, name in product(CLUSTERS, STRATEGIES):
        cluster = CLUSTERS[cluster_name]
        strategy = ms.Strategy(name=name, **STRATEGIES[name])
        # by the name, so that a new strategy moves no other step
        num_micro_batches, rest = RESTS[crc32(f"{cluster_name} | {name}".encode()) % len(RESTS)]
        simulation = step_program.simulation(
            [_plan(strategy, cluster, turn) for turn in range(num_micro_batches)], rest
        )
        yield f"{cluster_name} | {name} | {_words(rest, num_micro_batches)}: {_ms(simulation.length_seconds)} ms"
        yield f"  ranks end {' '.join(_ms(1e-6 * end_us) for end_us in _ends_us(simulation.timeline, cluster))}"
        yield f"  computing {_by_kind(simulation.computed_R)}"
        yield f"  waiting {_by_kind(simulation.waited_R)}"
        for part in simulation.critical_path:
            yield f"    {part.rank} {part.kind} {_ms(part.seconds)} {part.lane.removeprefix('compute')}".rstrip()


def _plan(strategy: ms.Strategy, cluster: ms.ClusterSpec, turn: int) -> ms.planning.StepPlan:
    loads = [drawn_load(cluster, MODEL.num_experts, seed=10 * turn + layer) for layer in range(NUM_LAYERS)]
    layers = tuple(ms.planning.plan_layer(strategy, MODEL, cluster, load, turn=turn) for load in loads)
    return ms.planning.StepPlan(strategy, MODEL, cluster, layers)


def _ends_us(timeline: Timeline, cluster: ms.ClusterSpec) -> list[float]:
    return [max(span.end_us for span in timeline.spans if span.rank == rank) for rank in range(cluster.num_ranks)]


def _by_kind(seconds_R_of: dict[str, np.ndarray]) -> str:
    """Sums over ranks."""
    return ", ".join(f"{kind} {_ms(seconds_R.sum())}" for kind, seconds_R in seconds_R_of.items())


def _ms(seconds: float) -> str:
    return f"{1e3 * seconds:.12g}"


def _words(rest: RestOfStep, num_micro_batches: int) -> str:
    said = [f"{num_micro_batches} micro-batches"] * (num_micro_batches > 1)
    said += [f"other {_ms(rest.other_seconds)} ms"] * (rest.other_seconds > 0)
    said += [f"recomputes {rest.recompute}"] * (rest.recompute != "none")
    return ", ".join(said) or "nothing else"
