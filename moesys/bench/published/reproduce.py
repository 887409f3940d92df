"""``moesys bench reproduce``: LAER-MoE's claims, on the screen and as a page."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated

from moesys.bench.harness.reports import publish_simulated
from moesys.bench.harness.sheets import Column, Sheet
from moesys.bench.published.claims import Claim, errors, least_worst_error
from moesys.bench.published.constants_grid import fit, fit_sheet
from moesys.bench.published.laer_claims import ABLATION_MODEL, Reproduction, reproduce
from moesys.bench.published.laer_setup import CONSTANTS, FITTED, SOURCES, Constants
from moesys.bench.published.planner_times import planner_sheet, planner_times

# The bars that this project set itself: of errors of speed-ups, of expert seconds, of the ablation in points.
MEDIAN_BAR, WORST_BAR, EXPERTS_BAR, ABLATION_BAR = 0.05, 0.12, 0.06, 0.05

INTRODUCTION = (
    "`python -m moesys bench reproduce`: seconds of an iteration as the simulator has them, beside those that LAER-MoE "
    "(arXiv 2602.11686) published with its artifact. Nothing here was measured by us but the planners' times.",
    "Four simulations of three methods stand behind 24 rows: a simulation knows neither the dataset nor the "
    "coefficient of the auxiliary loss, nor the bias that tells Qwen's layers from Mixtral's. Routing is drawn "
    "(`moesys/config/laer_routing.py`, fitted to the published micro-batches), and made more unequal and calmer for "
    "iterations 21 to 70, of which the rows are means and nothing is published: `skew_growth` and `calm`.",
)


@dataclass(frozen=True)
class Bar:
    """An error beside the most that it was to be."""

    what: Annotated[str, Column("what")]
    bar: Annotated[float, Column("bar %", ".0f", 100)]
    found: Annotated[float, Column("found %", ".1f", 100)]

    @property
    def met(self) -> Annotated[str, Column("met")]:
        return "yes" if self.found <= self.bar else "no"


@dataclass(frozen=True)
class Constant:
    """One of the reproduction's."""

    name: Annotated[str, Column("constant")]
    value: Annotated[float, Column("value", "g")]
    source: Annotated[str, Column("source")]


@dataclass(frozen=True)
class OneSimulation:
    """Published speed-ups of the rows that are one simulation, beside it."""

    models: Annotated[str, Column("model")]
    method: Annotated[str, Column("method")]
    num_rows: Annotated[int, Column("rows")]
    least: Annotated[float, Column("least published", ".3f")]
    most: Annotated[float, Column("most", ".3f")]
    least_worst: Annotated[float, Column("least worst err %", ".1f", 100)]
    simulated: Annotated[float | None, Column("simulated", ".3f")]
    worst: Annotated[float, Column("worst err %", "+.1f", 100)]
    standard_error: Annotated[float, Column("± %", ".1f", 100)]


@dataclass(frozen=True)
class Busiest:
    """How busy the busiest rank is under a planner."""

    routing: Annotated[str, Column("routing")]
    planner: Annotated[str, Column("planner")]
    max_over_mean: Annotated[float, Column("max/mean", ".3f")]


def main(out: Path | None = None, *, with_fit: bool = False) -> int:
    """Simulate, write, print; the exit code."""
    found = [*sheets(reproduce(), CONSTANTS), planner_sheet(planner_times())]
    if with_fit:
        found.append(fit_sheet(fit()))
    publish_simulated("laer_reproduction", "LAER-MoE's measurements", found, INTRODUCTION, out)
    return 0


def sheets(found: Reproduction, constants: Constants) -> list[Sheet]:
    """All tables of what is simulated."""
    beside = "SIMULATED beside published"
    return [
        _bars(found),
        _constants(constants),
        Sheet(
            f"{beside}: seconds of an iteration",
            found.seconds,
            ("Megatron's seconds are quoted, not simulated.",),
        ),
        Sheet(f"{beside}: FSDP+EP's seconds of an iteration over the method's", found.speed_ups),
        _simulations(found.speed_ups),
        Sheet(
            f"{beside}: iteration 14, seconds, means over ranks",
            found.breakdown,
            (
                "Published under a profiler, which slows: FSDP+EP e8k2 takes 38.0 s there and 35.7 s in the mean of "
                "the rows.",
                "Published rest holds waiting too: a rank with fewer rows than others has more of it, by about half of "
                "what it computes less. Simulated, all waiting for rows and ranks is in the all-to-all.",
            ),
        ),
        Sheet(
            f"{beside}: ablation of {ABLATION_MODEL}, seconds over FSDP+EP's, difference in points",
            found.ablation,
            ("no_pq: even replicas only. no_even: proportional ones only. no_comm_opt: FSDP looks ahead by one unit.",),
        ),
        Sheet(
            f"{beside}: the same by the rate between nodes, which was {constants.inter_node_gb_per_s:g} GB/s",
            found.rates,
            ("With the optimisations what experts and gradients take is hidden: the rows do not tell the rate.",),
        ),
        _busiest(found),
    ]


def _bars(found: Reproduction) -> Sheet:
    rows = []
    groups: tuple[tuple[str, bool | None], ...] = (("6 fitted rows", True), ("18 others", False), ("all 24", None))
    for name, fitted in groups:
        of_group = found.speed_up_errors(fitted)
        rows.append(Bar(f"speed-up over FSDP+EP, {name}: median", MEDIAN_BAR, statistics.median(of_group)))
        rows.append(Bar(f"speed-up over FSDP+EP, {name}: worst", WORST_BAR, max(of_group)))
    experts = [claim for claim in found.breakdown if claim.part == "experts"]
    rows.append(Bar("expert seconds of the breakdown: worst", EXPERTS_BAR, max(errors(experts))))
    rows.append(Bar("ablation, points: worst", ABLATION_BAR, max(errors(found.ablation))))
    of_seconds = errors(found.seconds)
    median, worst = 100 * statistics.median(of_seconds), 100 * max(of_seconds)
    notes = (
        "speed-up: of FlexMoE and of LAER; 12 of the fitted rows, 36 of the others.",
        f"Without a bar, the seconds themselves: median error {median:.1f} %, worst {worst:.1f} %, of 72.",
    )
    return Sheet("SIMULATED: errors against LAER-MoE's published figures", rows, notes)


def _constants(constants: Constants) -> Sheet:
    rows = [Constant(name, value, SOURCES[name]) for name, value in asdict(constants).items()]
    num_fitted = sum(source.endswith(FITTED) for source in SOURCES.values())
    note = f"{len(SOURCES)} in all, {num_fitted} of them fitted; beside them shapes, and the drawn routing."
    return Sheet("The constants of the simulation", rows, (note,))


def _simulations(speed_ups: Sequence[Claim]) -> Sheet:
    by_simulation: dict[tuple[tuple[float, ...], ...], list[Claim]] = {}
    for claim in speed_ups:
        by_simulation.setdefault((claim.own, claim.per_own), []).append(claim)
    rows = []
    for claims in by_simulation.values():
        published = [claim.published for claim in claims]
        rows.append(
            OneSimulation(
                models=", ".join(dict.fromkeys(claim.of["model"] for claim in claims)),
                method=claims[0].of["method"],
                num_rows=len(claims),
                least=min(published),
                most=max(published),
                least_worst=least_worst_error(published),
                simulated=claims[0].simulated,
                worst=max((claim.difference or 0.0 for claim in claims), key=abs),
                standard_error=claims[0].standard_error,
            )
        )
    notes = (
        "least worst err: what the best single number has for the worst of them: no simulation that does not know "
        "datasets is below it.",
        f"±: standard error of the simulated one over the routing drawn under {len(speed_ups[0].own)} seeds, by the "
        "jackknife.",
    )
    return Sheet("SIMULATED beside published: speed-ups over FSDP+EP of the rows that are one simulation", rows, notes)


def _busiest(found: Reproduction) -> Sheet:
    rows = [Busiest(*of, value) for of, value in found.max_over_mean.items()]
    rows.append(Busiest("e8k2", "no_pq or no_even, in hindsight", found.hindsight))
    note = "Means over layers, the micro-batches of the simulated iterations and seeds."
    return Sheet("SIMULATED: rows of the busiest rank over the mean", rows, (note,))
