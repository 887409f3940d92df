"""The routing that the leaderboard's planners plan for: recorded and generated, on models and clusters.

Arrays are indexed by S micro-batches, of which planners see the first ``warm_up`` before any is scored, R source ranks
and E experts.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib.resources import as_file, files
from pathlib import Path

import numpy as np

from moesys.config import ClusterSpec, ModelShape, presets
from moesys.config.workload import Generated
from moesys.load import IntArray
from moesys.traces import Trace, generate, load_trace

WARM_UP, SCORED = 3, 3
TOKENS_PER_RANK = 8192

MODELS = {
    "Qwen3-30B-A3B": presets.QWEN3_30B_A3B,
    "DeepSeek-V3": presets.DEEPSEEK_V3,
    "OLMoE-1B-7B": presets.OLMOE_1B_7B,
    "Mixtral-8x7B": presets.MIXTRAL_8X7B,
    "e16k4": presets.LAER_E16K4,
}
CLUSTERS = {
    "2 x 8 H100": presets.h100(2),
    "4 x 8 H100": presets.h100(4),
    "4 x 8 H100, NICs of a tenth": presets.h100(4).replace(inter_node_gb_per_s=36.0),
    "72 GB200, a rack": presets.gb200(18),
}
_RECORDED_ON = ("2 x 8 H100", "4 x 8 H100")
_GENERATED_ON = (
    ("Mixtral-8x7B", "2 x 8 H100"),
    ("Qwen3-30B-A3B", "2 x 8 H100"),
    ("Qwen3-30B-A3B", "4 x 8 H100"),
    ("OLMoE-1B-7B", "4 x 8 H100, NICs of a tenth"),
    ("DeepSeek-V3", "4 x 8 H100"),
)
# 72 ranks take as long as all other settings together, so only the first workload runs on them.
_ON_A_RACK = ("DeepSeek-V3", "72 GB200, a rack")
_QUICK = ("skewed", "bursts")


@dataclass(frozen=True)
class GeneratedRouting:
    """Routing that is drawn, a pure function of the sample; ``about`` is a sentence for the page.

    The s-th micro-batch is that of the draw ``turns[s]``; a longer warm-up goes through the turns again. With
    ``by_node``, all ranks of a node want the same.
    """

    name: str
    about: str
    draws: tuple[Generated, ...]
    turns: tuple[int, ...] = (0,) * (WARM_UP + SCORED)
    by_node: bool = False

    def tokens_SRE(self, model: ModelShape, cluster: ClusterSpec, sample: int, warm_up: int = WARM_UP) -> IntArray:
        sources, first = cluster.num_nodes if self.by_node else cluster.num_ranks, sample * len(self.draws)
        draws = [draw.replace(warmup=warm_up) for draw in self.draws]
        traces = [
            generate(draw, sources, model.num_experts, model.top_k, seed) for seed, draw in enumerate(draws, first)
        ]
        turns = [self.turns[(step - warm_up + WARM_UP) % len(self.turns)] for step in range(warm_up + SCORED)]
        tokens_SRE = np.stack([traces[turn].tokens_SLRE[step, 0] for step, turn in enumerate(turns)])
        return tokens_SRE[:, list(cluster.node_of_rank)] if self.by_node else tokens_SRE


@dataclass(frozen=True)
class RecordedRouting:
    """A trace, scaled to as many tokens per rank as generated routing has. A sample is a layer; further samples are
    later micro-batches.

    A cluster with fewer ranks than the trace gets the first of them; for one with more ranks the trace is folded.
    """

    name: str
    about: str
    trace: Trace

    def fits(self, model: ModelShape) -> bool:
        return (model.num_experts, model.top_k) == (self.trace.num_experts, self.trace.top_k)

    def tokens_SRE(self, model: ModelShape, cluster: ClusterSpec, sample: int, warm_up: int = WARM_UP) -> IntArray:
        """Raises ValueError if the trace has too few micro-batches for the sample."""
        R, trace = cluster.num_ranks, self.trace
        if trace.num_ranks < R:
            trace = trace.fold(R)
        window, layer = divmod(sample, trace.num_layers)
        # Parts of a layer have no scored micro-batch in common.
        if window >= (trace.num_micro_batches - warm_up) // SCORED:
            raise ValueError(
                f"seeds={sample + 1} is more than {self.name} has on {R} ranks: {trace.num_layers} layers of "
                f"{trace.num_micro_batches} micro-batches, and a seed takes {SCORED} of a layer after {warm_up}; use "
                "fewer seeds"
            )
        first = window * SCORED
        return trace.scaled(TOKENS_PER_RANK).tokens_SLRE[first : first + warm_up + SCORED, layer, :R]


def packaged_recordings() -> tuple[RecordedRouting, ...]:
    """Returns the recordings of the package, by name; ``benchmarks/record_routing.py`` made them."""
    recordings = []
    for file in sorted((files("moesys.lab.leaderboard") / "recorded").iterdir(), key=lambda each: each.name):
        with as_file(file) as path:
            trace = load_trace(path)
        shape = f"{trace.num_experts} experts, top {trace.top_k}"
        about = f"recorded from a small model of transformers' code while it was trained; {shape}"
        recordings.append(RecordedRouting(f"{trace.name}, recorded", about, trace))
    return tuple(recordings)


def recorded_in(path: Path) -> RecordedRouting:
    """Returns a user's trace. Raises ValueError if the file is not a trace."""
    return RecordedRouting(f"{path.stem}, given", path.name, load_trace(path))


def _draw(**fields: float) -> Generated:
    shape = {"num_layers": 1, "tokens_per_rank": TOKENS_PER_RANK, "warmup": WARM_UP, "steps": SCORED}
    return Generated.model_validate(shape | fields)


GENERATED = (
    GeneratedRouting("skewed", "a few experts are hot and stay hot", (_draw(skew=1.5),)),
    GeneratedRouting("drifting", "0.3 of the popularity is drawn anew in every micro-batch", (_draw(drift=0.3),)),
    GeneratedRouting("node-local", "every node has its own hot experts", (_draw(skew=0.5, spread=1.0),), by_node=True),
    GeneratedRouting(
        "bursts",
        "nearly even, but in two of six micro-batches other experts are suddenly hot",
        (_draw(skew=0.4), _draw(skew=1.5)),
        turns=(0, 1, 0, 0, 1, 0),
    ),
    GeneratedRouting(
        "prompts by domain",
        "as in reinforcement learning: every two micro-batches the prompts come from another domain, with its own hot "
        "experts, and the prompts of a rank are alike",
        tuple(_draw(skew=1.2, drift=0.02, concentration=300.0) for _ in range(3)),
        turns=(0, 0, 1, 1, 2, 2),
    ),
)


@dataclass(frozen=True)
class RoutingSetting:
    """Routing for a model on a cluster. Planners see ``warm_up`` micro-batches before the first scored one."""

    routing: GeneratedRouting | RecordedRouting
    model_name: str
    model: ModelShape
    cluster_name: str
    cluster: ClusterSpec
    warm_up: int = WARM_UP

    @property
    def name(self) -> str:
        return f"{self.routing.name}: {self.model_name} on {self.cluster_name}"

    def tokens_SRE(self, sample: int) -> IntArray:
        return self.routing.tokens_SRE(self.model, self.cluster, sample, self.warm_up)


def settings(
    given: Sequence[RecordedRouting] = (),
    *,
    models: Mapping[str, ModelShape],
    clusters: Mapping[str, ClusterSpec],
    quick: bool = False,
    traces_only: bool = False,
    warm_up: int = WARM_UP,
) -> list[RoutingSetting]:
    """Returns the settings of a leaderboard.

    ``given`` are traces besides the leaderboard's own workloads, or with ``traces_only`` in their place. ``models`` and
    ``clusters``, by name, replace the leaderboard's own unless they are empty. ``quick`` takes two generated workloads
    in one setting each.

    Raises ValueError for a trace whose number of experts or top-k fits no model, and for two traces of one name.
    """
    names = [one.name for one in given]
    if len(set(names)) < len(names):
        raise ValueError(f"trace: {', '.join(names)} have a name in common, which tables need; rename a file")
    if traces_only and not given:
        raise ValueError("traces_only leaves out all workloads but traces, and no trace is given; add --trace FILE")
    fitting, on = models or MODELS, clusters or {name: CLUSTERS[name] for name in _RECORDED_ON}
    for one in given:
        if not any(map(one.fits, fitting.values())):
            known = ", ".join(f"{name} ({model.num_experts}, top {model.top_k})" for name, model in fitting.items())
            raise ValueError(
                f"trace: {one.name}: its {one.trace.num_experts} experts, top {one.trace.top_k}, fit none of {known}; "
                "give the model that it was recorded from as --model"
            )
    own = not (models or clusters)
    pairs = _GENERATED_ON if own else [(model, cluster) for model in fitting for cluster in on]
    recorded = [*(() if quick or traces_only else packaged_recordings()), *given]
    places: list[tuple[GeneratedRouting | RecordedRouting, str, str]] = [
        (one, name, place) for one in recorded for name in fitting if one.fits(fitting[name]) for place in on
    ]
    if quick and not traces_only:
        places += [(one, *pairs[0]) for one in GENERATED if one.name in _QUICK]
    elif not traces_only:
        places += [(one, *pair) for one in GENERATED for pair in pairs]
        places += [(GENERATED[0], *_ON_A_RACK)] if own else []
    by_name = CLUSTERS | dict(on)
    return [
        RoutingSetting(routing, model, fitting[model], cluster, by_name[cluster], warm_up)
        for routing, model, cluster in places
    ]
