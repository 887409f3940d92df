"""A part of a model and one micro-batch in the simulator: its units in their order, on the ranks of an expert group."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from moesys.config.model_run import ModelRun
from moesys.config.workload import Recompute
from moesys.cost import FloatArray, memory_seconds
from moesys.layout import TokenPlan
from moesys.simulator.model.exchanges import Ring, passes_of_sum
from moesys.simulator.model.model_step import SimulatedPart
from moesys.simulator.model.operations import Operations
from moesys.simulator.model.pipeline import Lanes, PartSeconds
from moesys.simulator.model.units import Unit
from moesys.simulator.rest_of_step import RestOfStep, RestUnit
from moesys.simulator.simulation import Simulation
from moesys.simulator.step_program import run_step

_RECOMPUTED: dict[str, Recompute] = {"none": "none", "selective": "selective", "full": "layers"}


def simulate_part(run: ModelRun, units: Sequence[Unit], plans: Sequence[TokenPlan]) -> SimulatedPart:
    """Returns what ``units`` take. ``plans``: of those with experts."""
    passed = [_passed(run, unit) for unit in units]
    around = RestOfStep(
        recompute=_RECOMPUTED[run.parallelism.recompute],
        units_block=run.backend == "gloo",
        row_share=_row_share(units),
        cast_bytes=_cast_bytes(run, units),
        units=passed,
    )
    found = run_step(run.strategy, run.shape, run.expert_cluster, [plans], around)
    forward, backward = found.forward_seconds, found.length_seconds - found.forward_seconds
    of_experts = float(np.mean(found.computed_R.get("weight_gradients", 0.0)))
    # Faster experts neither shorten the rest nor bring parameters earlier.
    before, behind = _waited(found.forward_waited_R), _waited(found.waited_R)
    moe = PartSeconds(
        forward - before - float(np.sum([each.forward_seconds for each in passed])),
        backward - (behind - before) - float(np.sum([each.again_seconds + each.backward_seconds for each in passed])),
        of_experts,
    )
    host, shares, busy = _host_seconds(run, units), _shares(found), _busy(found)
    waits = max(0.0, host.forward - forward), max(0.0, host.backward - backward)
    shares["host"] = sum(waits)
    weight_gradients = of_experts + sum(unit.rest.weight_gradients for unit in units)
    lanes = _lanes(run, found, host, busy)
    whole = PartSeconds(forward + waits[0], backward + waits[1], weight_gradients, lanes)
    return SimulatedPart(whole, moe, host, busy, shares)


def _row_share(units: Sequence[Unit]) -> float:
    """Returns bytes of a row on its way to experts over those of it at home."""
    for unit in units:
        sent = {each.name: each.sent_bytes for each in unit.operations.operations if each.sent_bytes}
        if sent:
            return sent["dispatch"] / sent["combine"]
    return 1.0


def _cast_bytes(run: ModelRun, units: Sequence[Unit]) -> tuple[float, float]:
    """Returns what experts' products narrow of a row, forward and backward, in bytes read and written."""
    for unit in units:
        products = [each for each in unit.operations.of("experts").operations if each.flops]
        if products:
            moved = Operations(run.seq_len, tuple(products))
            rows = run.seq_len * run.shape.top_k
            return moved.forward_bytes / rows, moved.backward_bytes / rows
    return 0.0, 0.0


def _lanes(
    run: ModelRun, found: Simulation, host: PartSeconds, busy: tuple[PartSeconds, PartSeconds]
) -> tuple[Lanes, Lanes]:
    """Returns what each pass computes and exchanges, of the rank that computes most. It exchanges what it does not hide
    already, and no less than the busiest link; computing is slower while messages move beside it.
    """
    all_R = np.sum(list(found.computed_R.values()), axis=0)
    waited_R = np.sum(list(found.forward_waited_R.values()), axis=0)
    forward = float(np.max(found.forward_R - waited_R))
    computed = forward, float(np.max(all_R)) - forward
    alone = found.forward_seconds, found.length_seconds - found.forward_seconds
    links = [max(each) for each in zip(*((one.forward, one.backward) for one in busy), strict=True)]
    exchanged = [max(link, whole - own) for link, whole, own in zip(links, alone, computed, strict=True)]
    share = run.cluster.copy_share
    slowed = [
        # No more than by itself, where messages slow it too.
        max(started, min(whole, own + share * min(sent, own / (1 - share))))
        for started, whole, own, sent in zip((host.forward, host.backward), alone, computed, exchanged, strict=True)
    ]
    return Lanes(slowed[0], exchanged[0]), Lanes(slowed[1], exchanged[1])


def _passed(run: ModelRun, unit: Unit) -> RestUnit:
    """Returns a unit as the simulator has it: with its parameters and gradients, where all of them are sharded."""
    rest, ring = unit.rest, Ring.of_dense(run)
    if run.parallelism.dense != "full" or ring.size == 1:
        return RestUnit(rest.forward, rest.backward, rest.again, unit.has_experts)
    held = unit.parameters / run.parallelism.tensor
    gathered, reduced = held * run.model.bytes_per_element, held * run.gradient_bytes
    # Out of what was gathered, and into what is to be reduced, is a copy.
    placed_s = memory_seconds(2 * gathered, run.cluster)
    given_s = memory_seconds(gathered + reduced, run.cluster)
    group, whole = run.expert_cluster, run.cluster
    return RestUnit(
        rest.forward + placed_s,
        rest.backward + (0.0 if unit.kept else placed_s) + given_s,
        rest.again,
        unit.has_experts,
        ring.load(gathered, group, whole),
        ring.load(reduced * passes_of_sum(run), group, whole),
        unit.kept,
    )


def _busy(found: Simulation) -> tuple[PartSeconds, PartSeconds]:
    """Returns seconds of the busiest link: of ranks inside their domains, and of nodes."""
    forward_L, all_L = (
        np.sum([np.zeros(2 * found.cluster.num_ranks + 2 * found.cluster.num_nodes), *moved.values()], axis=0)
        for moved in (found.forward_moved_L, found.moved_L)
    )
    inside, nics = (
        PartSeconds(float(forward_L[links].max()), float((all_L - forward_L)[links].max()))
        for links in (slice(2 * found.cluster.num_ranks), slice(2 * found.cluster.num_ranks, None))
    )
    return inside, nics


def _host_seconds(run: ModelRun, units: Sequence[Unit]) -> PartSeconds:
    """Returns what the host takes to start all operations of a part."""
    recompute = run.parallelism.recompute
    all_of = [unit.operations for unit in units]
    forward = sum(len(each.operations) for each in all_of)
    # Neither end runs again.
    again = sum(len(unit.operations.again(recompute).operations) for unit in units if unit.rest.again)
    backward = sum(one.backward_kernels for each in all_of for one in each.operations)
    return PartSeconds(forward * run.host_us * 1e-6, (again + backward) * run.host_us * 1e-6)


# Of what a simulated rank computes and waits for.
_PARAMETERS = "dense parameters on their way"
_NAMES = {
    "experts": "experts",
    "weight_gradients": "experts",
    "gather": "rows put in order",
    "sum": "rows put in order",
    "other": "rest of layers",
    "counts": "rows on their way",
    "dispatch": "rows on their way",
    "combine": "rows on their way",
    "restore": "experts on their way",
    "reshard": "experts on their way",
    "all_gather": _PARAMETERS,
    "reduce_scatter": _PARAMETERS,
    "mega_kernel": "rows on their way",
}
_SLOWER = "slower ranks"
WAITS = frozenset({"rows on their way", "experts on their way", _PARAMETERS, _SLOWER})


def _waited(waited_R: Mapping[str, FloatArray]) -> float:
    """Returns mean seconds of a rank for parameters of the rest and their gradients."""
    return sum(float(np.mean(each)) for kind, each in waited_R.items() if _NAMES.get(kind) == _PARAMETERS)


def _shares(found: Simulation) -> dict[str, float]:
    """Returns mean seconds of a rank, by what it does or waits for; they add up to the length."""
    shares: dict[str, float] = {}
    for kind, seconds_R in (*found.computed_R.items(), *found.waited_R.items()):
        name = _NAMES.get(kind, _SLOWER)
        shares[name] = shares.get(name, 0.0) + float(np.mean(seconds_R))
    shares[_SLOWER] = shares.get(_SLOWER, 0.0) + found.length_seconds - sum(shares.values())
    return shares
