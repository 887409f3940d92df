"""What the leaderboard's planners have to plan for: routing that was recorded, and routing that is drawn.

S micro-batches, of which planners see the first ``WARM_UP`` before any is scored; R source ranks, E experts.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from importlib.resources import as_file, files
from pathlib import Path
from typing import Protocol

import numpy as np

from benchmarks.planner.seconds import TOKENS_PER_RANK
from moesys.config import ClusterSpec, ModelShape
from moesys.config.workload import Generated
from moesys.load import IntArray
from moesys.traces import Trace, generate, load_trace

WARM_UP, SCORED = 3, 3


class Workload(Protocol):
    """Routing for any cluster. ``about``: a sentence for the page."""

    @property
    def name(self) -> str: ...

    @property
    def about(self) -> str: ...

    def tokens_SRE(self, model: ModelShape, cluster: ClusterSpec, sample: int) -> IntArray:
        """Counts of one layer, int64 [S, R, E]: a pure function, of which another ``sample`` is another draw."""


@dataclass(frozen=True)
class Drawn:
    """Micro-batch s is that of the draw ``turns[s]``. ``by_node``: ranks of a node want the same, nodes do not."""

    name: str
    about: str
    draws: tuple[Generated, ...]
    turns: tuple[int, ...] = (0,) * (WARM_UP + SCORED)
    by_node: bool = False

    def tokens_SRE(self, model: ModelShape, cluster: ClusterSpec, sample: int) -> IntArray:
        sources = cluster.num_nodes if self.by_node else cluster.num_ranks
        traces = [
            generate(draw, sources, model.num_experts, model.top_k, seed=sample * len(self.draws) + number)
            for number, draw in enumerate(self.draws)
        ]
        tokens_SRE = np.stack([traces[turn].tokens_SLRE[step, 0] for step, turn in enumerate(self.turns)])
        return tokens_SRE[:, list(cluster.node_of_rank)] if self.by_node else tokens_SRE


@dataclass(frozen=True)
class Recorded:
    """A trace, scaled to as many tokens as are drawn. A sample is a layer, and further ones later micro-batches.

    A cluster of fewer ranks gets the first of them; of one with more the trace is folded.
    """

    name: str
    about: str
    trace: Trace

    @cached_property
    def num_samples(self) -> int:
        return self.trace.num_layers * self._windows(self.trace.num_micro_batches)

    def fits(self, model: ModelShape) -> bool:
        return (model.num_experts, model.top_k) == (self.trace.num_experts, self.trace.top_k)

    def tokens_SRE(self, model: ModelShape, cluster: ClusterSpec, sample: int) -> IntArray:
        """Raises ValueError for a sample that the trace has no micro-batches for."""
        R, trace = cluster.num_ranks, self.trace
        if trace.num_ranks < R:
            trace = trace.fold(R)
        window, layer = divmod(sample, trace.num_layers)
        if window >= self._windows(trace.num_micro_batches):
            raise ValueError(
                f"seeds={sample + 1} is more than {self.name} has on {R} ranks: {trace.num_layers} layers of "
                f"{trace.num_micro_batches} micro-batches, and a seed takes {SCORED} of a layer after {WARM_UP}; use "
                "fewer seeds"
            )
        first = window * SCORED
        return trace.scaled(TOKENS_PER_RANK).tokens_SLRE[first : first + WARM_UP + SCORED, layer, :R]

    def _windows(self, num_micro_batches: int) -> int:
        """Parts of a layer that share no micro-batch that is scored."""
        return max(0, (num_micro_batches - WARM_UP) // SCORED)


def recorded_here() -> tuple[Recorded, ...]:
    """The packaged recordings, by name."""
    found = []
    for file in sorted((files("benchmarks.board") / "recorded").iterdir(), key=lambda each: each.name):
        if file.name.endswith(".npz"):
            with as_file(file) as path:
                trace = load_trace(path)
            first, second, *_, last = trace.iterations
            about = (
                f"recorded from a small model of transformers' code while it was trained, every {second - first} "
                f"steps from {first} to {last}; {trace.num_experts} experts, top {trace.top_k}"
            )
            found.append(Recorded(f"{trace.name}, recorded", about, trace))
    return tuple(found)


def recorded_in(path: Path) -> Recorded:
    """A trace of one's own. Raises ValueError for a file that is none."""
    trace = load_trace(path)
    return Recorded(f"{path.stem}, given", path.name, trace)


def _draw(**fields: float) -> Generated:
    shape = {"num_layers": 1, "tokens_per_rank": TOKENS_PER_RANK, "warmup": WARM_UP, "steps": SCORED}
    return Generated.model_validate(shape | fields)


GENERATED = (
    Drawn("skewed", "a few experts are hot and stay so", (_draw(skew=1.5),)),
    Drawn("drifting", "0.3 of the popularity is drawn anew in every micro-batch", (_draw(drift=0.3),)),
    Drawn("node-local", "every node has hot experts of its own", (_draw(skew=0.5, spread=1.0),), by_node=True),
    Drawn(
        "bursts",
        "nearly even, but in two of the six micro-batches other experts are suddenly hot",
        (_draw(skew=0.4), _draw(skew=1.5)),
        turns=(0, 1, 0, 0, 1, 0),
    ),
    Drawn(
        "prompts by domain",
        "as in reinforcement learning: every two micro-batches prompts are of another domain, with hot experts of its "
        "own, and a rank's prompts are alike",
        tuple(_draw(skew=1.2, drift=0.02, concentration=300.0) for _ in range(3)),
        turns=(0, 0, 1, 1, 2, 2),
    ),
)
