"""LAER-MoE's published measurements as claims: rows of three methods, their speed-ups, breakdown, ablation.

A simulation knows shapes and routing: not the dataset, not the coefficient of the auxiliary loss, not Qwen's bias. So
24 rows are four simulations of three methods each, and what differs between rows of a shape is not explained.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import product
from typing import Annotated

import numpy as np

from benchmarks.published.claims import Claim, Part, errors, scenarios_of
from benchmarks.published.drawn_steps import Found, Scenario, simulate
from benchmarks.published.laer_figures import ABLATION_S, BREAKDOWN, LAST_LOGGED_MAX_OVER_MEAN, METHODS, ROWS
from benchmarks.published.laer_setup import (
    BREAKDOWN_ITERATION,
    CONSTANTS,
    FITTED_SHAPE,
    ROW_ITERATIONS,
    Constants,
    laer_model,
    laer_scenario,
)
from moesys.lab.show.sheets import Column

# An iteration's layers are drawn once a seed, and the hottest expert of a few makes it slow: speed-ups of single seeds
# spread by 1 to 4 %, so that the mean of eight is known to about 1 %.
SEEDS = tuple(range(8))
ABLATION_MODEL = "mixtral-8x7b-e8k2"
# That of the constants was measured by the artifact's authors. 84.6: NCCL's all-to-all of 4 GB on two nodes of 8 A100
# with 4 NICs of 200 Gb/s, 19.83 GB/s of bus rate, of which 8 of 15 parts leave the node (github.com/NVIDIA/nccl issue
# 1138, 2024). 75 and 65: on 64 messages of 11 MB a rank nobody has published one.
RATES_GB_PER_S = (84.6, 75.0, 65.0)


PARTS: dict[Part, str] = {
    "experts": "experts",
    "all_to_all": "all-to-all, waiting",
    "rest": "rest",
    "total": "total",
}


@dataclass(frozen=True)
class Busiest:
    """How busy the busiest rank is under a method."""

    model: Annotated[str, Column("model")]
    method: Annotated[str, Column("method")]
    iteration: Annotated[str, Column("iteration")]
    logged: Annotated[float | None, Column("published max/mean", ".3f")]
    simulated: Annotated[float, Column("simulated", ".3f")]


@dataclass(frozen=True)
class Reproduction:
    """All claims, by the table that shows them, with what is simulated.

    max_over_mean: of the busiest rank, by routing, planner and when, with what the log of tokens has.
    """

    seconds: tuple[Claim, ...]
    speed_ups: tuple[Claim, ...]
    breakdown: tuple[Claim, ...]
    ablation: tuple[Claim, ...]
    rates: tuple[Claim, ...]
    max_over_mean: tuple[Busiest, ...]

    def held_out(self) -> tuple[list[float], list[float]]:
        """Absolute errors of the shapes that are not fitted on: of seconds, and of speed-ups over FSDP+EP."""
        seconds, speed_ups = (
            errors([claim for claim in claims if not claim.fitted]) for claims in (self.seconds, self.speed_ups)
        )
        return seconds, speed_ups

    def mean_seconds(self, method: str) -> dict[str, float]:
        """Simulated, by shape."""
        return {
            laer_model(claim.of["model"]).name: claim.simulated
            for claim in self.seconds
            if claim.of["method"] == method and claim.simulated is not None
        }


def row_claims(
    constants: Constants, iterations: Sequence[int] = ROW_ITERATIONS
) -> tuple[tuple[Claim, ...], tuple[Claim, ...]]:
    """Of figure 8: seconds of an iteration, and how many times those of LAER and FlexMoE FSDP+EP's are."""
    seconds, speed_ups = [], []
    for row in ROWS:
        model = laer_model(row.model)
        of = {"dataset": row.dataset, "aux": f"{row.aux_loss:g}", "model": row.model}
        fitted = row.model.endswith(FITTED_SHAPE)
        static = laer_scenario(model, "FSDP+EP", constants, iterations)
        for method, published_s in row.seconds.items():
            named, scenario = {**of, "method": method}, laer_scenario(model, method, constants, iterations)
            seconds.append(Claim(named, published_s, scenario, fitted=fitted))
            if method != "FSDP+EP":
                speed_ups.append(Claim(named, row.fsdp_ep_s / published_s, static, per=scenario, fitted=fitted))
        seconds.append(Claim({**of, "method": "Megatron"}, row.megatron_s, None))
    return tuple(seconds), tuple(speed_ups)


def breakdown_claims(constants: Constants) -> tuple[Claim, ...]:
    """Of figure 10(a)."""
    claims = []
    for row in BREAKDOWN:
        scenario = laer_scenario(laer_model(row.model), row.method, constants, (BREAKDOWN_ITERATION,))
        fitted = row.model.endswith(FITTED_SHAPE)
        of = {"model": row.model, "method": row.method}
        for part, published_s in row.parts.items():
            claims.append(Claim(of | {"part": PARTS[part]}, published_s, scenario, part=part, fitted=fitted))
        spread = Claim(of | {"part": "spread"}, row.spread, scenario, part="spread", in_points=True, fitted=fitted)
        claims.append(spread)
    return tuple(claims)


def ablation_scenarios(
    constants: Constants, iterations: Sequence[int], inter_node_gb_per_s: float | None = None
) -> dict[str, Scenario]:
    """Of figure 12, by variant. With another rate between nodes than the constants', their plans are the same."""
    model = laer_model(ABLATION_MODEL)
    planners = dict.fromkeys(ABLATION_S, "LAER") | {name: name for name in ("FSDP+EP", "no_pq", "no_even")}
    rate = inter_node_gb_per_s or constants.inter_node_gb_per_s
    found = {}
    for name, planner in planners.items():
        scenario = laer_scenario(model, planner, constants, iterations, communication_optimised=name != "no_comm_opt")
        found[name] = replace(scenario, cluster=scenario.cluster.replace(inter_node_gb_per_s=rate))
    return found


def ablation_claims(scenarios: dict[str, Scenario], variants: Sequence[str], **of: str) -> tuple[Claim, ...]:
    """Of figure 12: seconds over FSDP+EP's."""
    static = scenarios["FSDP+EP"]
    return tuple(
        Claim(
            {**of, "variant": name}, ABLATION_S[name] / ABLATION_S["FSDP+EP"], scenarios[name], static, in_points=True
        )
        for name in variants
    )


def rate_claims(constants: Constants, iterations: Sequence[int]) -> tuple[Claim, ...]:
    """The ablation of communication by the rate between nodes."""
    claims: list[Claim] = []
    for rate in (constants.inter_node_gb_per_s, *RATES_GB_PER_S):
        slower = ablation_scenarios(constants, iterations, rate)
        claims += ablation_claims(slower, ("LAER", "no_comm_opt"), **{"GB/s of a node": f"{rate:g}"})
    return tuple(claims)


def reproduce(
    constants: Constants = CONSTANTS, seeds: Sequence[int] = SEEDS, iterations: Sequence[int] = ROW_ITERATIONS
) -> Reproduction:
    """All of it; the same arguments give the same figures."""
    ablated = ablation_scenarios(constants, iterations)
    claims = {
        **dict(zip(("seconds", "speed_ups"), row_claims(constants, iterations), strict=True)),
        "breakdown": breakdown_claims(constants),
        "ablation": ablation_claims(ablated, list(ablated)),
        "rates": rate_claims(constants, iterations),
    }
    found = simulate(scenarios_of([claim for of in claims.values() for claim in of]), seeds, "reproduce")
    return Reproduction(
        **{name: tuple(claim.simulated_by(found) for claim in of) for name, of in claims.items()},
        max_over_mean=tuple(_busiest(constants, iterations, found)),
    )


def _busiest(constants: Constants, iterations: Sequence[int], found: Found) -> Iterator[Busiest]:
    """Means over layers, micro-batches and seeds, of the methods."""
    whens = {"14": (BREAKDOWN_ITERATION,), "21 to 70": iterations}
    for name in ("8x7b-e8k2", "8x7b-e16k4"):
        for method, (when, of) in product(METHODS, whens.items()):
            drawn = found[laer_scenario(laer_model(name), method, constants, of)]
            logged = LAST_LOGGED_MAX_OVER_MEAN.get(name.removeprefix("8x7b-"), {})
            published = logged.get(method) if when == "14" else None
            yield Busiest(name, method, when, published, float(np.mean([one.max_over_mean_P for one in drawn])))
