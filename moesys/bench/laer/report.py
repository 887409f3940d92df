"""The reproduction's tables."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict

from moesys.bench.harness.stopwatch import machine_line
from moesys.bench.laer.constants import FITTED, SOURCES
from moesys.bench.laer.fit import CALMS, FINALISTS, SKEW_GROWTHS, Fit
from moesys.bench.laer.planner_times import MOST_LAER_RANKS, PLANNERS, PlannerTime
from moesys.bench.laer.published import METHODS
from moesys.bench.laer.reproduction import Reproduction, Row, least_worst_error, median_and_worst
from moesys.bench.laer.step import Constants
from moesys.bench.pages import Section, table

# The bars that this project set itself: of errors of speed-ups, of expert seconds, of the ablation in points.
MEDIAN_BAR, WORST_BAR, EXPERTS_BAR, ABLATION_BAR = 0.05, 0.12, 0.06, 0.05


def sections(found: Reproduction, constants: Constants) -> list[Section]:
    return [
        _summary(found),
        _constants(constants),
        _rows(found),
        _spread(found),
        _breakdown(found),
        _ablation(found),
        _unhidden(found, constants),
        _balance(found),
    ]


def _summary(found: Reproduction) -> Section:
    made = table("SIMULATED: errors against LAER-MoE's published figures", ("what", "bar", "found", "met"))

    def add(what: str, bar: float, value: float) -> None:
        made.add_row(what, f"{100 * bar:.0f} %", f"{100 * value:.1f} %", "yes" if value <= bar else "no")

    groups: tuple[tuple[str, bool | None], ...] = (("6 fitted rows", True), ("18 others", False), ("all 24", None))
    for name, fitted in groups:
        median, worst = median_and_worst(found.speed_up_errors(fitted))
        add(f"speed-up over FSDP+EP, {name}: median", MEDIAN_BAR, median)
        add(f"speed-up over FSDP+EP, {name}: worst", WORST_BAR, worst)
    add("expert seconds of the breakdown: worst", EXPERTS_BAR, max(abs(part.experts_error) for part in found.breakdown))
    points = found.ablation_points().values()
    add("ablation, points: worst", ABLATION_BAR, max(abs(simulated - published) for published, simulated in points))
    median, worst = median_and_worst(found.seconds_errors())
    notes = [
        "speed-up: of FlexMoE and of LAER; 12 of the fitted rows, 36 of the others.",
        f"Without a bar, the seconds themselves: median error {100 * median:.1f} %, worst {100 * worst:.1f} %, of 72.",
    ]
    return made, notes


def _constants(constants: Constants) -> Section:
    made = table("The constants of the simulation", ("constant", "value", "source"), left=3)
    for name, value in asdict(constants).items():
        made.add_row(name, f"{value:g}", SOURCES[name])
    num_fitted = sum(source.endswith(FITTED) for source in SOURCES.values())
    return made, [f"{len(SOURCES)} in all, {num_fitted} of them fitted; beside them shapes, and the drawn routing."]


def _rows(found: Reproduction) -> Section:
    title = "SIMULATED beside published: seconds of an iteration, and FSDP+EP's over them"
    columns = ["dataset", "aux", "model", "fitted"]
    for method in METHODS:
        columns += [method, "sim", "err %"]
    for method in METHODS[1:]:
        columns += [f"/ {method}", "sim", "err %"]
    made = table(title, [*columns, "Megatron"], left=4)
    for row in found.rows:
        cells = [row.published.dataset, f"{row.published.aux_loss:g}", row.published.model, "yes" if row.fitted else ""]
        for method in METHODS:
            cells += [f"{row.published.seconds(method):.2f}", f"{row.simulated[method]:.2f}"]
            cells += [f"{100 * row.error(method):+.1f}"]
        for method in METHODS[1:]:
            published, simulated = row.speed_up(method)
            cells += [f"{published:.3f}", f"{simulated:.3f}", f"{100 * row.speed_up_error(method):+.1f}"]
        made.add_row(*cells, f"{row.published.megatron_s:.2f}")
    return made, ["Megatron's seconds are quoted, not simulated."]


def _spread(found: Reproduction) -> Section:
    title = "SIMULATED beside published: speed-ups over FSDP+EP of the rows that are one simulation"
    columns = ("model", "method", "rows", "least", "most", "least worst err %", "simulated", "worst err %", "± %")
    made = table(title, columns, left=2)
    by_simulation: dict[tuple[tuple[float, ...], ...], list[Row]] = {}
    for row in found.rows:
        by_simulation.setdefault(tuple(row.of_seeds.values()), []).append(row)
    for rows in by_simulation.values():
        names = ", ".join(dict.fromkeys(row.published.model for row in rows))
        for method in METHODS[1:]:
            published = [row.speed_up(method)[0] for row in rows]
            worst = max((row.speed_up_error(method) for row in rows), key=abs)
            numbers = (f"{min(published):.3f}", f"{max(published):.3f}", f"{100 * least_worst_error(published):.1f}")
            simulated = (f"{rows[0].speed_up(method)[1]:.3f}", f"{100 * worst:+.1f}")
            error = f"{100 * rows[0].standard_error(method):.1f}"
            made.add_row(names, method, str(len(rows)), *numbers, *simulated, error)
    num_seeds = len(found.rows[0].of_seeds["FSDP+EP"])
    notes = [
        "least worst err: what the best single number has for the worst of them: no simulation that does not know "
        "datasets is below it.",
        f"±: standard error of the simulated one over the routing drawn under {num_seeds} seeds, by the jackknife.",
    ]
    return made, notes


def _breakdown(found: Reproduction) -> Section:
    title = "SIMULATED beside published: iteration 14, seconds, means over ranks"
    columns = ["model", "method"]
    for name in ("experts", "all-to-all, waiting", "rest", "total"):
        columns += [name, "sim"]
    made = table(title, [*columns, "experts err %"], left=2)
    for part in found.breakdown:
        published, simulated = part.published, part.simulated
        rest_s = published.total_s - published.experts_s - published.all_to_all_s
        pairs = (
            (published.experts_s, simulated.experts),
            (published.all_to_all_s, simulated.all_to_all),
            (rest_s, simulated.rest),
            (published.total_s, simulated.total),
        )
        cells = [f"{seconds:.2f}" for pair in pairs for seconds in pair]
        made.add_row(published.model, published.method, *cells, f"{100 * part.experts_error:+.1f}")
    notes = [
        "Published under a profiler, which slows: FSDP+EP e8k2 takes 38.0 s there and 35.7 s in the mean of the rows.",
        "Published rest holds waiting too: a rank with fewer rows than others has more of it, by about half of what "
        "it computes less. Simulated, all waiting for rows and ranks is in the all-to-all.",
    ]
    return made, notes


def _ablation(found: Reproduction) -> Section:
    title = "SIMULATED beside published: ablation of mixtral-8x7b-e8k2, seconds over FSDP+EP's"
    made = table(title, ("variant", "published", "simulated", "points"))
    for name, (published, simulated) in found.ablation_points().items():
        made.add_row(name, f"{published:.3f}", f"{simulated:.3f}", f"{100 * (simulated - published):+.1f}")
    notes = [
        "no_pq: even replicas only. no_even: proportional ones only. no_comm_opt: FSDP looks ahead by one unit.",
    ]
    return made, notes


def _unhidden(found: Reproduction, constants: Constants) -> Section:
    title = "SIMULATED: seconds over FSDP+EP's, mixtral-8x7b-e8k2, by the rate between nodes"
    made = table(title, ("GB/s of a node", "LAER", "no_comm_opt"), left=0)
    measured = tuple(found.ablation_points()[name][1] for name in ("LAER", "no_comm_opt"))
    for rate, ratios in {constants.inter_node_gb_per_s: measured, **found.unhidden}.items():
        made.add_row(f"{rate:g}", *(f"{ratio:.3f}" for ratio in ratios))
    published = (found.ablation_points()[name][0] for name in ("LAER", "no_comm_opt"))
    made.add_row("published", *(f"{ratio:.3f}" for ratio in published))
    return made, ["With the optimisations what experts and gradients take is hidden: the rows do not tell the rate."]


def _balance(found: Reproduction) -> Section:
    made = table("SIMULATED: rows of the busiest rank over the mean", ("routing", "planner", "max/mean"), left=2)
    for (setting, planner), value in found.max_over_mean.items():
        made.add_row(setting, planner, f"{value:.3f}")
    made.add_row("e8k2", "no_pq or no_even, in hindsight", f"{found.hindsight:.3f}")
    return made, ["Means over layers, the micro-batches of the simulated iterations and seeds."]


def planner_section(times: Sequence[PlannerTime]) -> Section:
    """Of the planner-time figure."""
    title = "MEASURED: milliseconds of one layout for 32 experts, beside LAER-MoE's on other hardware"
    names = list(PLANNERS)
    made = table(title, ("ranks", "slots a rank", "published", *names), left=0)
    for time in times:
        ours = (f"{time.measured_ms[name]:.2f}" if name in time.measured_ms else "" for name in names)
        made.add_row(str(time.num_ranks), str(time.slots), f"{time.published_ms:.2f}", *ours)
    notes = [
        f"{machine_line(1, ('numpy', 'numba'))}; medians, one call at a time.",
        "published: LAER-MoE's C++ planner on its authors' machine, which is not ours. laer: the same rule, in exact "
        f"arithmetic, timed up to {MOST_LAER_RANKS} ranks.",
    ]
    return made, notes


def fit_section(found: Sequence[Fit]) -> Section:
    """All finalists, best first."""
    made = table(
        "SIMULATED: the fit", ("skew_growth", "calm", "dispatcher_ms", "misfit %", "above the best", "±"), left=0
    )
    for one in found:
        k, (above, error) = one.constants, one.behind(found[0])
        made.add_row(
            *(f"{value:g}" for value in (k.skew_growth, k.calm, k.dispatcher_ms)),
            *(f"{100 * value:.2f}" for value in (one.misfit, above, error)),
        )
    return made, [
        "misfit: root mean square error of 18 seconds and 12 speed-ups, of the 6 rows fitted on.",
        "±: standard error of the column before over the routing drawn under 16 seeds, by the jackknife.",
        f"Shown are the {FINALISTS} best (skew_growth, calm) of {len(SKEW_GROWTHS) * len(CALMS)}, by all draws.",
    ]
