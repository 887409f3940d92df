"""A simulated step of a whole model, and of its parts: seconds, tokens, utilisation, memory, and what takes the time.

A part of the model runs one micro-batch in ``simulator.step_program``: its units in order, on the ranks of an expert
group.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING, Literal

import numpy as np

from moesys.config import BYTES_PER_GB, MoeMlp
from moesys.config.model_run import ModelRun
from moesys.config.workload import Recompute
from moesys.cost import memory_seconds
from moesys.display import Columns, Display, by_column, counted, draw_bars
from moesys.layout import TokenPlan
from moesys.simulator.model.model_cost import Operations, model_flops_per_token
from moesys.simulator.model.model_units import Ring, StageMemory, Unit, passes_of_sum, place_pairs
from moesys.simulator.model.pipeline import PartSeconds, PassSeconds, PipelineRun, run_pipeline
from moesys.simulator.rest_of_step import RestOfStep, RestUnit
from moesys.simulator.simulation import Simulation
from moesys.simulator.step_program import run_step

if TYPE_CHECKING:
    from matplotlib.axes import Axes


@dataclass(frozen=True)
class SimulatedPart:
    """One part of the model and one micro-batch.

    busy: the seconds of the busiest link inside domains, and of the busiest NIC. shares: mean seconds of a rank, by
    what it does or waits for.
    """

    seconds: PartSeconds
    busy: tuple[PartSeconds, PartSeconds]
    shares: dict[str, float]


_RECOMPUTED: dict[str, Recompute] = {"none": "none", "selective": "selective", "full": "layers"}


def simulate_part(run: ModelRun, units: Sequence[Unit], plans: Sequence[TokenPlan]) -> SimulatedPart:
    """Simulates ``units`` on one micro-batch. ``plans``: those of the units with experts."""
    passed = [_passed(run, unit) for unit in units]
    row_share, cast_bytes = _narrowing(run, units)
    around = RestOfStep(
        recompute=_RECOMPUTED[run.parallelism.recompute],
        units_block=run.backend == "gloo",
        row_share=row_share,
        cast_bytes=cast_bytes,
        units=passed,
    )
    found = run_step(run.strategy, run.shape, run.expert_cluster, [plans], around)
    forward, backward = found.forward_seconds, found.length_seconds - found.forward_seconds
    of_experts = float(np.mean(found.computed_R.get("weight_gradients", 0.0)))
    host, shares, busy = _host_seconds(run, units), _shares(found), _busy(found)
    waits = max(0.0, host.forward - forward), max(0.0, host.backward - backward)
    shares["host"] = sum(waits)
    weight_gradients = of_experts + sum(unit.rest.weight_gradients for unit in units)
    lanes = _lanes(run, found, host, busy)
    whole = PartSeconds(forward + waits[0], backward + waits[1], weight_gradients, lanes)
    return SimulatedPart(whole, busy, shares)


def _narrowing(run: ModelRun, units: Sequence[Unit]) -> tuple[float, tuple[float, float]]:
    """Returns the bytes of a row that is sent to experts, divided by those of a row that is sent back; and the bytes
    read and written per row to narrow operands of experts' products, forward and backward.
    """
    found = next((unit.operations for unit in units if unit.has_experts), None)
    if found is None:
        return 1.0, (0.0, 0.0)
    sent = {each.name: each.sent_bytes for each in found.operations}
    products = Operations(run.seq_len, tuple(each for each in found.of("experts").operations if each.flops))
    rows = run.seq_len * run.shape.top_k
    return sent["dispatch"] / sent["combine"], (products.forward_bytes / rows, products.backward_bytes / rows)


def _lanes(
    run: ModelRun, found: Simulation, host: PartSeconds, busy: tuple[PartSeconds, PartSeconds]
) -> tuple[PassSeconds, PassSeconds]:
    """Returns what forward and backward compute and exchange, on the rank that computes most. A pass exchanges what it
    does not hide already, and no less than the busiest link; computing is slower while messages move.
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
        # No more than the pass takes by itself, in which messages slow it too.
        max(started, min(whole, own + share * min(sent, own / (1 - share))))
        for started, whole, own, sent in zip((host.forward, host.backward), alone, computed, exchanged, strict=True)
    ]
    return PassSeconds(slowed[0], exchanged[0]), PassSeconds(slowed[1], exchanged[1])


def _passed(run: ModelRun, unit: Unit) -> RestUnit:
    """Returns a unit for the simulator, with its gathers and reductions if all dense parameters are sharded."""
    rest, ring = unit.rest, Ring.of_dense(run)
    if run.parallelism.dense != "full" or ring.size == 1:
        return RestUnit(rest.forward, rest.backward, rest.again, unit.has_experts)
    held = unit.parameters / run.parallelism.tp
    gathered, reduced = held * run.model.bytes_per_element, held * run.gradient_bytes
    # Parameters are copied out of the gathered buffer, and gradients into the one that is reduced.
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
    """Returns the seconds of the busiest link inside domains, and of the busiest NIC."""
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
    """Returns the seconds in which the host starts all operations of a part."""
    recompute = run.parallelism.recompute
    all_of = [unit.operations for unit in units]
    forward = sum(len(each.operations) for each in all_of)
    # Neither the embedding nor the head runs again.
    again = sum(len(unit.operations.again(recompute).operations) for unit in units if unit.rest.again)
    backward = sum(one.backward_kernels for each in all_of for one in each.operations)
    return PartSeconds(forward * run.host_us * 1e-6, (again + backward) * run.host_us * 1e-6)


# The names of what a simulated rank computes and waits for.
_PARAMETERS = "dense parameters and gradients"
_NAMES = {
    "experts": "experts",
    "weight_gradients": "experts",
    "gather": "permute",
    "sum": "permute",
    "other": "attention and dense layers",
    "counts": "token all-to-all",
    "dispatch": "token all-to-all",
    "combine": "token all-to-all",
    "restore": "expert weights and gradients",
    "reshard": "expert weights and gradients",
    "all_gather": _PARAMETERS,
    "reduce_scatter": _PARAMETERS,
    "mega_kernel": "token all-to-all",
}
_SLOWER = "waiting for slower ranks"
WAITS = frozenset({"token all-to-all", "expert weights and gradients", _PARAMETERS, _SLOWER})


def _shares(found: Simulation) -> dict[str, float]:
    """Returns the mean seconds of a rank, by what it does or waits for; they add up to the length."""
    shares: dict[str, float] = {}
    for kind, seconds_R in (*found.computed_R.items(), *found.waited_R.items()):
        name = _NAMES.get(kind, _SLOWER)
        shares[name] = shares.get(name, 0.0) + float(np.mean(seconds_R))
    shares[_SLOWER] = shares.get(_SLOWER, 0.0) + found.length_seconds - sum(shares.values())
    return shares


@dataclass(frozen=True)
class DrawnStep:
    """A step with one draw of the routing. ``shares``: mean seconds of a rank, by part; they add up to ``seconds``."""

    seconds: float
    shares: dict[str, float]
    max_over_mean: float
    pipeline: PipelineRun = field(repr=False)
    parts: tuple[tuple[SimulatedPart, ...], ...] = field(repr=False)


@dataclass(frozen=True, repr=False)
class ModelStep(Display):
    """A simulated step of ``run``. ``memory``: of a rank of each stage. ``reasons``: why it would not run, apart from
    memory.
    """

    run: ModelRun
    draws: tuple[DrawnStep, ...]
    memory: tuple[StageMemory, ...]
    reasons: tuple[str, ...] = ()

    @cached_property
    def seconds(self) -> float:
        """The expected seconds of the slowest of all groups that hold the same experts; each group is like one draw."""
        return self._slowest([draw.seconds for draw in self.draws])

    @property
    def interval(self) -> tuple[float, float]:
        """The tenth and ninetieth percentile of the slowest group's seconds."""
        places = 100 * np.array([0.1, 0.9]) ** (1 / self.run.groups.expert_data)
        low, high = np.percentile([draw.seconds for draw in self.draws], places)
        return float(low), float(high)

    @property
    def tokens_per_second(self) -> float:
        """Tokens per second and rank."""
        return self.run.tokens_per_step / (self.seconds * self.run.cluster.num_ranks)

    @property
    def mfu(self) -> float | None:
        """Model flops utilisation relative to the data sheet's rate in 16 bits; None if it is not declared."""
        peak = self.run.cluster.peak_tflops
        if peak is None:
            return None
        return model_flops_per_token(self.run.model, self.run.seq_len) * self.tokens_per_second / (peak * 1e12)

    @property
    def shares(self) -> dict[str, float]:
        """Mean seconds of a rank by part, over draws; they add up to ``seconds``."""
        names = dict.fromkeys(name for draw in self.draws for name in draw.shares)
        found = {name: float(np.mean([draw.shares.get(name, 0.0) for draw in self.draws])) for name in names}
        if len(self.draws) > 1 and self.run.groups.expert_data > 1:
            found["slowest expert group"] = self.seconds - sum(found.values())
        return found

    @property
    def peak(self) -> StageMemory:
        """The memory of the stage that holds most."""
        return max(self.memory, key=lambda each: each.gb)

    @property
    def verdict(self) -> str:
        """Why it does not run; empty if it does, as far as is counted."""
        have, reasons = self.run.cluster.memory_gb, list(self.reasons)
        if have is not None and self.peak.gb > have:
            stage = self.memory.index(self.peak)
            reasons.append(f"out of memory: a rank of stage {stage} holds {self.peak.gb:.1f} GB, and has {have:g}")
        return "; ".join(reasons)

    @property
    def remark(self) -> str:
        """A difference to code that trains such models; empty if none is known."""
        shared = any(isinstance(layer.mlp, MoeMlp) and layer.mlp.shared is not None for layer in self.run.model.layers)
        if self.run.parallelism.recompute != "selective" or not shared:
            return ""
        return (
            "recompute='selective' ends at the experts; blocks of transformers compute a shared expert behind them and "
            "run all of a layer again, as recompute='full' does"
        )

    def plot(self, what: Literal["time", "memory"] = "time", ax: Axes | None = None) -> Axes:
        """Draws the time of a rank by part, or the memory of the rank that holds most."""
        title = f"SIMULATED: {self.run.model.name}, {self.run.strategy.name}"
        if what == "time":
            by_part = {part: 1e3 * seconds for part, seconds in self.shares.items()}
            return draw_bars(by_part, f"{title}: {1e3 * self.seconds:,.1f} ms per step", "ms, mean of ranks", ax)
        by_part = {part: num_bytes / BYTES_PER_GB for part, num_bytes in self.peak.parts.items()}
        return draw_bars(by_part, f"{title}: {self.peak.gb:.1f} GB", "GB of the rank that holds most", ax)

    def _facts(self) -> str:
        mfu = "" if self.mfu is None else f", MFU {self.mfu:.1%}"
        return (
            f"{self.run.model.name!r} with {self.run.strategy.name!r} on "
            f"{counted(self.run.cluster.num_ranks, 'rank')}, {1e3 * self.seconds:,.1f} ms per step, "
            f"{self.tokens_per_second:,.0f} tokens/s per rank{mfu}, {self.peak.gb:.1f} GB, "
            f"{'fits' if not self.verdict else 'would not run'}"
        )

    def _columns(self) -> Columns:
        rows: list[tuple[str, int | None, str, float, str]] = [
            ("time", None, part, seconds, "s") for part, seconds in self.shares.items()
        ]
        for stage, memory in enumerate(self.memory):
            rows += [("memory", stage, part, num_bytes, "bytes") for part, num_bytes in memory.parts.items()]
        return by_column(("what", "stage", "part", "value", "unit"), rows)

    def _shown(self) -> Columns:
        rows = [("time", part, f"{1e3 * s:,.2f} ms", f"{s / self.seconds:.0%}") for part, s in self.shares.items()]
        rows += [
            ("memory", part, f"{num_bytes / BYTES_PER_GB:,.2f} GB", f"{num_bytes / BYTES_PER_GB / self.peak.gb:.0%}")
            for part, num_bytes in self.peak.parts.items()
        ]
        return by_column(("of a rank", "part", "value", "share"), rows)

    def _slowest(self, seconds: Sequence[float]) -> float:
        groups, among = self.run.groups.expert_data, np.sort(seconds)
        places = np.arange(len(among) + 1) / len(among)
        return float(np.diff(places**groups) @ among)


def run_parts(run: ModelRun, parts: Sequence[Sequence[PartSeconds]]) -> PipelineRun:
    """Runs ``parts[stage][chunk]`` as the schedule of ``run`` says; rows travel in the model's dtype."""
    parallel, cluster = run.parallelism, run.cluster
    hop_s = 0.0
    if parallel.pp > 1:
        num_bytes = run.tokens_per_rank * run.model.hidden_size * run.model.bytes_per_element
        hop_s = num_bytes / (cluster.intra_node_gb_per_s * 1e9) + cluster.intra_node_us * 1e-6
        stage = run.groups.stage
        if place_pairs(stage, cluster.num_ranks - stage, cluster).on_nics:
            # All ranks of a stage send at once.
            at_once = min(stage, cluster.node_sizes[0])
            hop_s = at_once * num_bytes / (cluster.inter_node_gb_per_s * 1e9) + cluster.inter_node_us * 1e-6
    overlap = parallel.overlap_micro_batches
    return run_pipeline(parts, run.num_micro_batches, parallel.schedule, hop_s, overlap=overlap)
