"""LAER-MoE's published measurements as claims: rows of three methods, their speed-ups, breakdown, ablation.

A simulation knows shapes and routing: not the dataset, not the coefficient of the auxiliary loss, not Qwen's bias. So
24 rows are four simulations of three methods each, and what differs between rows of a shape is not explained.
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from moesys.bench.published.claims import Claim, Part, errors, scenarios_of
from moesys.bench.published.drawn_steps import Found, Scenario, simulate
from moesys.bench.published.laer_figures import ABLATION_S, BREAKDOWN, METHODS, ROWS
from moesys.bench.published.laer_setup import (
    BREAKDOWN_ITERATION,
    CONSTANTS,
    ROW_ITERATIONS,
    Constants,
    laer_model,
    laer_scenario,
)

# An iteration's layers are drawn once a seed, and the hottest expert of a few makes it slow: speed-ups of single seeds
# spread by 1 to 4 %, so that the mean of sixteen is known to 1 %.
SEEDS = tuple(range(16))
ABLATION_MODEL = "mixtral-8x7b-e8k2"
# That of the constants was measured by the artifact's authors. 84.6: NCCL's all-to-all of 4 GB on two nodes of 8 A100
# with 4 NICs of 200 Gb/s, 19.83 GB/s of bus rate, of which 8 of 15 parts leave the node (github.com/NVIDIA/nccl issue
# 1138, 2024). 75 and 65: on 64 messages of 11 MB a rank nobody has published one.
RATES_GB_PER_S = (84.6, 75.0, 65.0)


@dataclass(frozen=True)
class Reproduction:
    """All claims, by the table that shows them, with what is simulated.

    max_over_mean: of the busiest rank, by routing and planner. hindsight: the same on e8k2, of whichever of no_pq and
    no_even has the lower one for the tokens that came.
    """

    seconds: tuple[Claim, ...]
    speed_ups: tuple[Claim, ...]
    breakdown: tuple[Claim, ...]
    ablation: tuple[Claim, ...]
    rates: tuple[Claim, ...]
    max_over_mean: dict[tuple[str, str], float]
    hindsight: float

    def speed_up_errors(self, fitted: bool | None = None) -> list[float]:
        """Absolute errors of FlexMoE's and LAER's speed-up over FSDP+EP, of the rows fitted on, the others, or all."""
        return errors([claim for claim in self.speed_ups if fitted in (None, claim.fitted)])


def row_claims(
    constants: Constants, iterations: Sequence[int] = ROW_ITERATIONS
) -> tuple[tuple[Claim, ...], tuple[Claim, ...]]:
    """Of figure 8: seconds of an iteration, and how many times those of LAER and FlexMoE FSDP+EP's are."""
    seconds, speed_ups = [], []
    for row in ROWS:
        model = laer_model(row.model)
        of = {"dataset": row.dataset, "aux": f"{row.aux_loss:g}", "model": row.model}
        fitted = row.dataset == "wikitext" and row.aux_loss == 0
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
        parts: dict[str, tuple[Part, float]] = {
            "experts": ("experts", row.experts_s),
            "all-to-all, waiting": ("all_to_all", row.all_to_all_s),
            "rest": ("rest", row.total_s - row.experts_s - row.all_to_all_s),
            "total": ("total", row.total_s),
        }
        for name, (part, published_s) in parts.items():
            of = {"model": row.model, "method": row.method, "part": name}
            claims.append(Claim(of, published_s, scenario, part=part))
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
        max_over_mean=_max_over_mean(constants, iterations, found),
        hindsight=_hindsight(ablated, found),
    )


def _max_over_mean(constants: Constants, iterations: Sequence[int], found: Found) -> dict[tuple[str, str], float]:
    """Means over layers, micro-batches and seeds, of the planners of each routing."""
    means = {}
    for name, planners in {"8x7b-e8k2": (*METHODS, "no_pq", "no_even"), "8x7b-e16k4": METHODS}.items():
        for planner in planners:
            drawn = found[laer_scenario(laer_model(name), planner, constants, iterations)]
            means[name.removeprefix("8x7b-"), planner] = float(np.mean([of.max_over_mean_P for of in drawn]))
    return means


def _hindsight(scenarios: dict[str, Scenario], found: Found) -> float:
    pairs = zip(found[scenarios["no_pq"]], found[scenarios["no_even"]], strict=True)
    return statistics.fmean(
        min(pair) for one, other in pairs for pair in zip(one.max_over_mean_P, other.max_over_mean_P, strict=True)
    )
