"""``moesys bench reproduce``: LAER-MoE's measurements simulated, on the screen and as a page."""

from __future__ import annotations

from pathlib import Path

from moesys.bench.harness.steps import steps_told
from moesys.bench.laer.constants import CONSTANTS
from moesys.bench.laer.fit import NUM_TOLD, fit
from moesys.bench.laer.planner_times import planner_times
from moesys.bench.laer.report import fit_section, planner_section, sections
from moesys.bench.laer.reproduction import RATES_GB_PER_S, SEEDS, reproduce
from moesys.bench.pages import Section, show

# Planners of two settings, then four shapes, breakdown, ablation and its rates.
STEPS = len(SEEDS) * (5 + 3) + 4 + 2 + len(RATES_GB_PER_S)

INTRODUCTION = (
    "`python -m moesys bench reproduce`: seconds of an iteration as the simulator has them, beside those that LAER-MoE "
    "(arXiv 2602.11686) published with its artifact. Nothing here was measured by us but the planners' times.",
    "Four simulations of three methods stand behind 24 rows: a simulation knows neither the dataset nor the "
    "coefficient of the auxiliary loss, nor the bias that tells Qwen's layers from Mixtral's. Routing is drawn "
    "(`moesys/config/laer_routing.py`, fitted to the published micro-batches), and made more unequal and calmer for "
    "iterations 21 to 70, of which the rows are means and nothing is published: `skew_growth` and `calm`.",
)


def main(out: Path | None = None, *, with_planners: bool = True, with_fit: bool = False) -> int:
    """Simulate, write, print; the exit code."""
    with steps_told("reproduce", STEPS) as tell:
        found = reproduce(tell=tell)
    parts: list[Section] = sections(found, CONSTANTS)
    if with_planners:
        with steps_told("planners", 25) as tell:
            parts.append(planner_section(planner_times(tell=tell)))
    if with_fit:
        with steps_told("fit", NUM_TOLD) as tell:
            parts.append(fit_section(fit(tell=tell)))
    show(parts, "LAER-MoE's measurements", INTRODUCTION, "laer_reproduction", out)
    return 0
