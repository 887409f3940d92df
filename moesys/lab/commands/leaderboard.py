"""``moesys leaderboard``: all planners on the same routing, models and clusters, by the simulated seconds of a layer.

A layout is planned on micro-batches before the one that it is scored on, except in the group that plans on the current
counts. ``ranking`` has the rules of ranking, ``planners`` who takes part, ``workloads`` the settings.
"""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from moesys.config import ModelShape, ModelSpec
from moesys.config.layer_spec import MoeMlp
from moesys.lab.commands.declarations import cluster_of, predictor_of
from moesys.lab.leaderboard.planners import GROUPS, PlannerGroup, named_planner
from moesys.lab.leaderboard.ranking import write_pages
from moesys.lab.leaderboard.scores import FILE, results
from moesys.lab.leaderboard.workloads import SCORED, TOKENS_PER_RANK, WARM_UP, RoutingSetting, recorded_in, settings
from moesys.lab.runs.records import take_lock
from moesys.lab.runs.stopwatch import machine_line


@dataclass(frozen=True)
class LeaderboardOptions:
    """The options of the command, as they are given on the command line."""

    seeds: int = 3
    quick: bool = False
    planner: Sequence[str] = ()
    trace: Sequence[Path] = ()
    traces_only: bool = False
    model: str | None = None
    cluster: str | None = None
    slots: int | None = None
    lag: int = 1
    predictor: str = "last"

    @property
    def warm_up(self) -> int:
        """The micro-batches before the first scored one, whose layout is planned on ``WARM_UP`` loads."""
        return WARM_UP + self.lag - 1

    @property
    def command(self) -> str:
        words = ["moesys leaderboard"]
        for name, value in vars(self).items():
            for one in value if isinstance(value, Sequence) and not isinstance(value, str) else [value]:
                if one:
                    words.append(f"--{name.replace('_', '-')}" + ("" if one is True else f" {shlex.quote(str(one))}"))
        return " ".join(words)

    def groups(self) -> list[PlannerGroup]:
        """Raises ValueError for planners and predictors that do not exist."""
        added = [named_planner(text) for text in self.planner]
        groups = [replace(group.with_planners(added), slots_per_rank=self.slots) for group in GROUPS]
        predictor = predictor_of(self.predictor)
        return [replace(group, lag=self.lag, predictor=predictor) if group.lag else group for group in groups]

    def settings(self) -> list[RoutingSetting]:
        """Raises ValueError for models, clusters and traces that do not exist or do not fit."""
        models: dict[str, ModelShape] = {}
        if self.model:
            spec = ModelSpec.from_config(self.model)
            mlp = spec.layers[spec.moe_layers[0]].mlp
            assert isinstance(mlp, MoeMlp)
            models = {spec.name: mlp.shape}
        return settings(
            [recorded_in(path) for path in self.trace],
            models=models,
            clusters={self.cluster: cluster_of(self.cluster)} if self.cluster else {},
            quick=self.quick,
            traces_only=self.traces_only,
            warm_up=self.warm_up,
        )


def leaderboard_command(out: Path, options: LeaderboardOptions) -> int:
    """Scores what ``out`` has no results of, writes the pages there and prints; returns the exit code.

    Raises ValueError for options that cannot be met, and if another process writes into ``out``.
    """
    groups, scored_in = options.groups(), options.settings()
    out.mkdir(parents=True, exist_ok=True)
    with take_lock(out):
        found = results(scored_in, groups, options.seeds, out)
        markdown, html = write_pages(out, scored_in, groups, found, _introduction(options))
    print(f"pages: {markdown} and {html}; every sample: {out / FILE}")
    return 0


def _introduction(options: LeaderboardOptions) -> list[str]:
    return [
        f"`{options.command}`; `docs/leaderboard.md` has the rules.",
        f"Forward and backward of a layer without overlap (`Sequential`), {TOKENS_PER_RANK:,} tokens per rank, "
        f"simulated; {options.seeds} seeds. Planners see {options.warm_up} micro-batches and are scored on the next "
        f"{SCORED}. All planners of a group have the same slots, lag, predictor and sharding. Layouts from history are "
        f"planned on micro-batches up to the one that is {options.lag} before the scored one.",
        "Slowdown: a planner's seconds divided by those of the fastest planner of its group in the same setting and "
        "seed; geometric mean over the settings of a workload, then over workloads. The 95 % interval is Student's "
        "over seeds, which are draws, or layers and parts of a recording. A planner that cannot handle some setting "
        "has no place; its other columns are means over the settings that it can handle.",
        "Crossing: routed tokens that leave their NVLink domain. Copies: replicas that a plan brings to ranks that did "
        "not hold them; on current counts, experts that are lent. Restored: experts that are sent in a forward, all "
        "ranks. Memory: an upper bound for a layer's experts and rows on the rank that holds most. Planning: measured, "
        "the median after a first plan; of a layout, and on current counts of the split too.",
        f"Planning was measured on {machine_line(1, ('numpy', 'numba', 'ortools'))}.",
    ]
