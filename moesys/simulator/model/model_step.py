"""What a simulated step of a whole model comes to: seconds, tokens, utilisation, memory, and what takes the time."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property

import numpy as np

from moesys.config import MoeMlp
from moesys.config.model_run import ModelRun
from moesys.simulator.model.exchanges import place_pairs
from moesys.simulator.model.memory import StageMemory
from moesys.simulator.model.model_cost import model_flops_per_token
from moesys.simulator.model.pipeline import PartSeconds, PipelineRun, run_pipeline


@dataclass(frozen=True)
class SimulatedPart:
    """One part of the model and one micro-batch. ``moe``: what of ``seconds`` its layers with experts take beside the
    rest of them. ``host``: of the host to start its operations, the least that it takes. ``busy``: of the busiest of
    ranks' links inside domains, and of nodes' NICs. ``shares``: mean seconds of a rank, by what it does or waits for.
    """

    seconds: PartSeconds
    moe: PartSeconds
    host: PartSeconds
    busy: tuple[PartSeconds, PartSeconds]
    shares: dict[str, float]

    def with_faster_experts(self, factor: float) -> PartSeconds:
        saved = 1 - 1 / factor
        forward = max(self.host.forward, self.seconds.forward - saved * self.moe.forward)
        backward = max(self.host.backward, self.seconds.backward - saved * self.moe.backward)
        lanes = None
        if self.seconds.lanes is not None:
            one, other = self.seconds.lanes
            # Both lanes of a pass, alike.
            lanes = one.times(forward / self.seconds.forward), other.times(backward / self.seconds.backward)
        weight_gradients = self.seconds.weight_gradients - saved * self.moe.weight_gradients
        return PartSeconds(forward, backward, weight_gradients, lanes)


@dataclass(frozen=True)
class DrawnStep:
    """A step under one draw of the routing. ``shares``: mean seconds of a rank, by part; they add up to ``seconds``."""

    seconds: float
    shares: dict[str, float]
    max_over_mean: float
    pipeline: PipelineRun = field(repr=False)
    parts: tuple[tuple[SimulatedPart, ...], ...] = field(repr=False)
    end_seconds: float


@dataclass(frozen=True)
class ModelStep:
    """A simulated step of ``run``. ``memory``: of a rank of each stage. ``reasons``: against it, beside memory."""

    run: ModelRun
    draws: tuple[DrawnStep, ...]
    memory: tuple[StageMemory, ...]
    reasons: tuple[str, ...] = ()

    @cached_property
    def seconds(self) -> float:
        """Expected, of the slowest of all groups that hold the same experts: each is like one of the draws."""
        return self._slowest([draw.seconds for draw in self.draws])

    @property
    def interval(self) -> tuple[float, float]:
        """The tenth and ninetieth percentile of ``seconds``: of the slowest of all groups."""
        places = 100 * np.array([0.1, 0.9]) ** (1 / self.run.groups.expert_data)
        low, high = np.percentile([draw.seconds for draw in self.draws], places)
        return float(low), float(high)

    @property
    def tokens_per_second(self) -> float:
        """Of a rank."""
        return self.run.tokens_per_step / (self.seconds * self.run.cluster.num_ranks)

    @property
    def mfu(self) -> float | None:
        """Model flops utilisation, of the data sheet's rate in 16 bits; None where the cluster does not declare it."""
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
        """Of the stage that holds most."""
        return max(self.memory, key=lambda each: each.gb)

    @property
    def verdict(self) -> str:
        """Why it does not run; empty where it does, as far as is counted."""
        have, reasons = self.run.cluster.memory_gb, list(self.reasons)
        if have is not None and self.peak.gb > have:
            stage = self.memory.index(self.peak)
            reasons.append(f"out of memory: a rank of stage {stage} holds {self.peak.gb:.1f} GB, and has {have:g}")
        return "; ".join(reasons)

    @property
    def remark(self) -> str:
        """What some code that runs it does not do; empty where nothing is known."""
        shared = any(isinstance(layer.mlp, MoeMlp) and layer.mlp.shared is not None for layer in self.run.model.layers)
        if self.run.parallelism.recompute != "selective" or not shared:
            return ""
        return (
            "recompute='selective' ends at the experts; blocks of transformers compute a shared expert behind them and "
            "run all of a layer again, as recompute='full' does"
        )

    def speed_up(self, factor: float) -> float:
        """Returns how much faster the step is with layers of experts ``factor`` times as fast."""
        faster = []
        for draw in self.draws:
            parts = [[part.with_faster_experts(factor) for part in stage] for stage in draw.parts]
            faster.append(run_parts(self.run, parts).seconds + draw.end_seconds)
        return self.seconds / self._slowest(faster)

    def _slowest(self, seconds: Sequence[float]) -> float:
        groups, among = self.run.groups.expert_data, np.sort(seconds)
        places = np.arange(len(among) + 1) / len(among)
        return float(np.diff(places**groups) @ among)


def run_parts(run: ModelRun, parts: Sequence[Sequence[PartSeconds]]) -> PipelineRun:
    """Runs ``parts[stage][chunk]`` as the schedule of ``run`` says; rows go on in the model's dtype."""
    parallel, cluster = run.parallelism, run.cluster
    hop_s = 0.0
    if parallel.pipeline > 1:
        num_bytes = run.tokens_per_rank * run.model.hidden_size * run.model.bytes_per_element
        hop_s = num_bytes / (cluster.intra_node_gb_per_s * 1e9) + cluster.intra_node_us * 1e-6
        stage = run.groups.stage
        if place_pairs(stage, cluster.num_ranks - stage, cluster).on_nics:
            # All of a stage set off at once.
            at_once = min(stage, cluster.node_sizes[0])
            hop_s = at_once * num_bytes / (cluster.inter_node_gb_per_s * 1e9) + cluster.inter_node_us * 1e-6
    overlap = parallel.overlap_micro_batches
    return run_pipeline(parts, run.num_micro_batches, parallel.schedule, hop_s, overlap=overlap)
