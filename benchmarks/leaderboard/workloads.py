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
from moesys.kinds import did_you_mean
from moesys.layout import owner_of_experts
from moesys.load import IntArray
from moesys.traces import FloatArray, Trace, draw_counts, generate, load_trace

WARM_UP, SCORED = 4, 28
TOKENS_PER_RANK = 8192

MODELS = {
    "Qwen3-30B-A3B": presets.QWEN3_30B_A3B,
    "DeepSeek-V3": presets.DEEPSEEK_V3,
    "OLMoE-1B-7B": presets.OLMOE_1B_7B,
    "Mixtral-8x7B": presets.MIXTRAL_8X7B,
    "e16k4": presets.LAER_E16K4,
}
CLUSTERS = {
    "8 H100": presets.h100(1),
    "2 x 8 H100": presets.h100(2),
    "4 x 8 H100": presets.h100(4),
    "4 x 8 H100, NICs of a tenth": presets.h100(4).replace(inter_node_gb_per_s=36.0),
    "72 GB200, a rack": presets.gb200(18),
}
_RECORDED_ON = ("2 x 8 H100",)
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
# One NVLink domain, for which UltraEP publishes its share of forced balance, and two.
_FURTHER_ON = (("Qwen3-30B-A3B", "8 H100"), ("Qwen3-30B-A3B", "2 x 8 H100"))


def balanced_tokens(num_routed: int, num_ranks: int, num_experts: int) -> IntArray:
    """Returns ``num_routed`` tokens dealt to experts in turn, rank after rank, int64 [R, E]: the tokens of two ranks,
    and those of two experts, differ by one at most.
    """
    end_R1 = np.arange(num_ranks + 1)[:, None] * num_routed // num_ranks
    # The tokens of each expert among the first so many.
    before_RE = (end_R1 + num_experts - 1 - np.arange(num_experts)) // num_experts
    return np.diff(before_RE, axis=0)


@dataclass(frozen=True)
class GeneratedRouting:
    """Routing that is drawn, a pure function of the sample; ``about`` is a sentence for the page.

    Micro-batches take the draws ``turns`` in turn; a longer warm-up takes earlier turns. With ``by_node``, all ranks of
    a node want the same. With ``prompts``, each micro-batch has so many prompts, each for as many ranks as another, one
    after the other, and each of one of the ``turns``, chosen at random.
    """

    name: str
    about: str
    draws: tuple[Generated, ...]
    turns: tuple[int, ...] = (0,)
    by_node: bool = False
    prompts: int = 0

    def tokens_SRE(self, model: ModelShape, cluster: ClusterSpec, sample: int, warm_up: int = WARM_UP) -> IntArray:
        sources, first = cluster.num_nodes if self.by_node else cluster.num_ranks, sample * len(self.draws)
        draws = [draw.replace(warmup=warm_up) for draw in self.draws]
        traces = [
            generate(draw, sources, model.num_experts, model.top_k, seed) for seed, draw in enumerate(draws, first)
        ]
        step_S, source_R = np.arange(warm_up + SCORED), np.arange(sources)
        turn_SR = (step_S[:, None] - warm_up + WARM_UP) % len(self.turns)
        if prompts := min(self.prompts, sources):
            rng = np.random.default_rng(sample)
            turn_SR = rng.integers(len(self.turns), size=(len(step_S), prompts))[:, source_R * prompts // sources]
        tokens_DSRE = np.stack([trace.tokens_SLRE[:, 0] for trace in traces])
        tokens_SRE = tokens_DSRE[np.array(self.turns)[turn_SR], step_S[:, None], source_R]
        return tokens_SRE[:, list(cluster.node_of_rank)] if self.by_node else tokens_SRE


@dataclass(frozen=True)
class ImbalanceRouting:
    """A workload of the token-imbalance benchmark for Megatron-LM, a pure function of the sample (NVIDIA/Megatron-LM,
    pull request 7488, benchmarks/moe/token_imbalance, September 2026). ``name`` begins with its number, W0 to W7.

    There, three of four tokens choose their top-k in a hot set of a quarter of the experts, and the others among all,
    so that a hot expert has 3.25 of the mean load. Here counts are drawn from the popularity of experts that this
    makes. Three workloads follow the description where the published program does not: the hot experts of W2 are those
    of one rank, and as hot as those of W1; the hot set of W3 is as large as that of W1; and in W4 ranks have a half to
    one and a half of the mean number of tokens.
    """

    name: str
    about: str

    def tokens_SRE(self, model: ModelShape, cluster: ClusterSpec, sample: int, warm_up: int = WARM_UP) -> IntArray:
        R, number = cluster.num_ranks, int(self.name[1])
        if number == 0:
            balanced_RE = balanced_tokens(R * TOKENS_PER_RANK * model.top_k, R, model.num_experts)
            return np.tile(balanced_RE, (warm_up + SCORED, 1, 1))
        drawn = []
        for turn in range(warm_up + SCORED):
            rng = np.random.default_rng((sample, number, turn))
            tokens_R = _ragged(rng, R) if number == 4 else np.full(R, TOKENS_PER_RANK)
            with np.errstate(divide="ignore"):
                log_E = np.log(self.popularity_E(model, R, sample, turn - warm_up + WARM_UP))
            drawn.append(draw_counts(rng, np.tile(log_E, (R, 1)), tokens_R, model.top_k))
        return np.stack(drawn)

    def popularity_E(self, model: ModelShape, num_ranks: int, sample: int, step: int) -> FloatArray:
        """Returns the popularity of experts, 1 in the mean; the first scored micro-batch is step ``WARM_UP``."""
        E, K = model.num_experts, model.top_k
        width, share = max(K, E // 4), 0.75
        match self.name[:2]:
            case "W1":
                hot = np.random.default_rng(sample).permutation(E)[:width]
            case "W2":
                hot = np.flatnonzero(owner_of_experts(E, num_ranks) == 0)
            case "W3":
                hot = np.arange(width) * E // width
            case "W5":
                return np.where(np.arange(E) < min(E // 2, E - K), 0.0, 2.0)
            case "W6":
                hot = (np.arange(width) + step // 3 * width) % E
            case "W7" if step % 4 == 3:
                hot, share = np.arange(width), 0.5
            case _:
                return np.ones(E)
        heat = share * E / width + 1 - share
        cold = max(1 - share, (E - heat * len(hot)) / max(E - len(hot), 1))
        return np.where(np.isin(np.arange(E), hot), heat, cold)


def _ragged(rng: np.random.Generator, num_ranks: int) -> IntArray:
    """Draws the tokens of each rank, from a half to one and a half of the mean, which is ``TOKENS_PER_RANK``."""
    end_R = np.cumsum(rng.uniform(0.5, 1.5, num_ranks))
    return np.diff(np.floor(end_R / end_R[-1] * num_ranks * TOKENS_PER_RANK).astype(np.int64), prepend=0)


@dataclass(frozen=True)
class RecordedRouting:
    """A trace, scaled to as many tokens per rank as generated routing has.

    For a cluster with more ranks than the trace has, the trace is folded. For one with fewer, it has several groups of
    as many ranks. A sample is a layer of a group, and further samples are later micro-batches. A short trace has fewer
    than ``SCORED`` micro-batches to score.
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
        groups = trace.num_ranks // R
        num_scored = min(SCORED, max(trace.num_micro_batches - warm_up, 1))
        # Parts of a layer have no scored micro-batch in common.
        num_windows = max(trace.num_micro_batches - warm_up, 0) // num_scored
        if sample >= (most := num_windows * groups * trace.num_layers):
            raise ValueError(
                f"seeds={sample + 1} is more than the {most} that {self.name} has on {R} ranks: {trace.num_layers} "
                f"layers of {trace.num_micro_batches} micro-batches and {groups * R} ranks, and a seed takes up to "
                f"{SCORED} after {warm_up}; use fewer seeds, or record more micro-batches"
            )
        window, sample = divmod(sample, groups * trace.num_layers)
        group, layer = divmod(sample, trace.num_layers)
        first, ranks = window * SCORED, slice(group * R, group * R + R)
        return trace.scaled(TOKENS_PER_RANK).tokens_SLRE[first : first + warm_up + num_scored, layer, ranks]


Routing = GeneratedRouting | ImbalanceRouting | RecordedRouting


def packaged_recordings() -> tuple[RecordedRouting, ...]:
    """Returns the recordings of the package, by name; ``benchmarks/record_routing.py`` made them."""
    recordings = []
    for file in sorted((files("benchmarks.leaderboard") / "recorded").iterdir(), key=lambda each: each.name):
        with as_file(file) as path:
            trace = load_trace(path)
        shape = f"{trace.num_experts} experts, top {trace.top_k}"
        when = trace.meta.get("about", "while it was trained")
        about = f"recorded from a small model of transformers' code {when}; {shape}"
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
        "nearly even, but in a third of the micro-batches, at random, other experts are suddenly hot",
        (_draw(skew=0.4), _draw(skew=1.5)),
        turns=(0, 0, 1),
        prompts=1,
    ),
    GeneratedRouting(
        "prompts by domain",
        "as in reinforcement learning: every two micro-batches the prompts come from another domain, with its own hot "
        "experts, and the prompts of a rank are alike",
        tuple(_draw(skew=1.2, drift=0.02, concentration=300.0) for _ in range(3)),
        turns=(0, 0, 1, 1, 2, 2),
    ),
)
# Workloads of single parts of imbalance, and of short prompts, which two settings show.
FURTHER = (
    ImbalanceRouting("W0 balanced", "every expert has the same tokens of every rank"),
    ImbalanceRouting("W1 hot expert set", "a quarter of the experts is hot, always the same and anywhere"),
    ImbalanceRouting("W2 hot rank", "the experts of the first rank are as hot as those of W1"),
    ImbalanceRouting("W3 spread hot experts", "a quarter of the experts is as hot as in W1, every fourth one"),
    ImbalanceRouting(
        "W4 ragged sources", "experts are equally popular; ranks have a half to one and a half of the mean"
    ),
    ImbalanceRouting("W5 experts without load", "the first half of the experts, and so of the ranks, has no tokens"),
    ImbalanceRouting(
        "W6 rotating hot spot", "a quarter of the experts in a row is hot, in turn for three micro-batches"
    ),
    ImbalanceRouting("W7 burst", "even, but a quarter of the experts is hot in every fourth micro-batch"),
    GeneratedRouting(
        "samples of few prompts",
        "as in reinforcement learning: every micro-batch has samples of 16 new prompts, each in one of 8 domains with "
        "its own hot experts",
        tuple(_draw(skew=1.2, drift=0.02, concentration=300.0) for _ in range(8)),
        turns=tuple(range(8)),
        prompts=16,
    ),
)


@dataclass(frozen=True)
class RoutingSetting:
    """Routing for a model on a cluster. Planners see ``warm_up`` micro-batches before the first scored one."""

    routing: Routing
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
    workloads: Sequence[str] = (),
    quick: bool = False,
    traces_only: bool = False,
    warm_up: int = WARM_UP,
) -> list[RoutingSetting]:
    """Returns the settings of a leaderboard.

    ``given`` are traces besides the leaderboard's own workloads, or with ``traces_only`` in their place. ``models`` and
    ``clusters``, by name, replace the leaderboard's own unless they are empty. ``workloads``: names of some of the own
    ones, instead of all. ``quick`` takes generated ones in one setting each, by default two of them.

    Raises ValueError for a trace whose number of experts or top-k fits no model, for two traces of one name, and for
    the name of no workload.
    """
    names = [one.name for one in given]
    if len(set(names)) < len(names):
        raise ValueError(f"trace: {', '.join(names)} have a name in common, which tables need; rename a file")
    if traces_only and not given:
        raise ValueError("traces_only leaves out all workloads but traces, and no trace is given; add --trace FILE")
    if traces_only and workloads:
        raise ValueError(f"traces_only leaves out the workloads {', '.join(workloads)}; use one of both options")
    fitting, on = models or MODELS, clusters or {name: CLUSTERS[name] for name in _RECORDED_ON}
    for one in given:
        if not any(map(one.fits, fitting.values())):
            known = ", ".join(f"{name} ({model.num_experts}, top {model.top_k})" for name, model in fitting.items())
            raise ValueError(
                f"trace: {one.name}: its {one.trace.num_experts} experts, top {one.trace.top_k}, fit none of {known}; "
                "give the model that it was recorded from as --model"
            )
    own = not (models or clusters)
    chosen = [] if traces_only else _chosen(workloads, quick)
    recorded = [*(one for one in chosen if isinstance(one, RecordedRouting)), *given]
    places: list[tuple[Routing, str, str]] = [
        (one, name, place) for one in recorded for name in fitting if one.fits(fitting[name]) for place in on
    ]
    for routing in chosen:
        if not isinstance(routing, RecordedRouting):
            pairs = [(model, cluster) for model in fitting for cluster in on]
            if own:
                pairs = list(_FURTHER_ON if routing in FURTHER else _GENERATED_ON)
                pairs += [_ON_A_RACK] if routing is GENERATED[0] else []
            places += [(routing, *pair) for pair in pairs[: 1 if quick else None]]
    by_name = CLUSTERS | dict(on)
    return [
        RoutingSetting(routing, model, fitting[model], cluster, by_name[cluster], warm_up)
        for routing, model, cluster in places
    ]


def _chosen(workloads: Sequence[str], quick: bool) -> list[Routing]:
    """Returns the workloads of these names, or without any all of them."""
    known: list[Routing] = [*packaged_recordings(), *GENERATED, *FURTHER]
    everything = {one.name: one for one in known}
    for name in workloads:
        if name not in everything:
            close = did_you_mean(name, everything)
            raise ValueError(f"workload={name!r} is none of {'; '.join(everything)}{close}")
    chosen = workloads or (_QUICK if quick else everything)
    return [one for one in known if one.name in chosen]
