"""LAER-MoE's 24 rows, simulated: ``python -m experiments.published.laer_moe`` writes this text above its tables.

Seconds of an iteration of four methods, simulated, and those that LAER-MoE (arXiv 2602.11686) published with its
artifact. Nothing here was measured by this project.

Four constants are fitted to the rows and the breakdown of one shape, 8x7b-e8k2, of which most was published; the three
other shapes are held out. Two baselines are judged on the same rows. The closed form is 4 x (experts x max/mean +
attention + all-to-all + overhead), with max/mean of the published log of tokens; the growth of max/mean and the
overhead are fitted to the same shape. The copied row is the row of the same model on the other data set; it knows the
answer.

The 24 rows are four simulations of each method: a simulation knows neither the data set nor the coefficient of the
auxiliary loss, nor the bias that distinguishes Qwen's layers from Mixtral's. Routing is generated
(``laer_routing.py``, fitted to the published micro-batches), with experts made less equal
(``skew_growth``) and, for iterations 21 to 70, of which the rows are means, calmer (``unrest``).

The last table replaces parts of LAER-MoE one after another; all else stays, hardware, attention, dispatcher,
recomputation and the traffic of parameters included. Unified is FSEP with this project's layout, the flow split and
overlap between nodes, on these four nodes ``Pipelined(chunks=4)``. Only stages with overlap pay for launches, flags,
latencies and waves of tiles. Expert gradients travel in bfloat16, as LAER-MoE's do; this project's travel in float32,
in a stage of its own.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import astuple, dataclass, replace
from itertools import product
from typing import Annotated, TypeVar

import numpy as np
import typer

from experiments.published import laer_setup as laer
from experiments.published.drawn_steps import Found, Scenario, SimulatedStep, simulate
from experiments.published.laer_baselines import copied_row_errors, fitted_closed_form, megatron_sheet, row_errors
from experiments.published.laer_routing import LAER_E8K2_ROUTING, LAER_E16K4_ROUTING
from experiments.published.laer_setup import CONSTANTS, METHODS, Constants, LaerModel, PublishedRow
from moesys.config import Overlap, presets
from moesys.config.overlap import MegaKernel, Pipelined, Sequential
from moesys.lab.commands.options import AsJson, OutFolder, Wide
from moesys.lab.show.sheets import Column, CommandOutput, Report, Sheet, figure, publish

# --- the fit --------------------------------------------------------------------------------------------------
# Between the ends of ``ROWS_SLOWDOWNS`` seconds lie on a straight line (within 1 in 1,000), and a dispatcher delays all
# ranks alike. So each routing is simulated only at both ends, without a dispatcher.

SKEW_GROWTHS = (0.0, 1.0, 1.5, 2.0, 2.5, 3.0)
UNRESTS = (0.0, 0.1, 0.2, 0.35, 0.6, 1.0)
ROWS_SLOWDOWNS = tuple(np.arange(0.0, 8.5, 0.5).tolist())
DISPATCHERS_MS = tuple(np.arange(0.0, 12.5, 0.5).tolist())
FIT_SEEDS, FIT_ITERATIONS = (0, 1), (30,)
# Constants fit about as well as the best ones if their misfit is at most so many times as large.
AS_GOOD = 1.1

Routing = tuple[float, float]
Key = TypeVar("Key", bound=Hashable)
Ends = tuple[SimulatedStep, SimulatedStep]
ScenarioOf = Callable[[Constants], Scenario]


@dataclass(frozen=True)
class Fit:
    """Constants, and the root mean square error that they leave in one shape's figures."""

    constants: Constants
    misfit: float


def simulate_ends(
    scenarios: Mapping[Key, ScenarioOf], routings: Sequence[Routing], seeds: Sequence[int], what: str
) -> dict[tuple[Routing, Key], Ends]:
    """Simulates each scenario under each routing at both ends of ``ROWS_SLOWDOWNS``, without a dispatcher."""
    made: dict[tuple[Routing, Key], list[Scenario]] = {}
    for routing, (key, scenario), slowdown in product(routings, scenarios.items(), (0.0, ROWS_SLOWDOWNS[-1])):
        growth, unrest = routing
        constants = replace(CONSTANTS, dispatcher_ms=0.0, rows_slowdown=slowdown, skew_growth=growth, unrest=unrest)
        made.setdefault((routing, key), []).append(scenario(constants))
    found = simulate([of for both in made.values() for of in both], seeds, what)
    return {of: (SimulatedStep.mean(found[none]), SimulatedStep.mean(found[most])) for of, (none, most) in made.items()}


def between(ends: Ends, model: LaerModel, constants: Constants) -> SimulatedStep:
    """Returns the step under ``constants`` of the same routing."""
    share = constants.rows_slowdown / ROWS_SLOWDOWNS[-1]
    none, most = (np.array(astuple(end)) for end in ends)
    step = SimulatedStep(*((1 - share) * none + share * most).tolist())
    return replace(step, total=step.total + model.num_passes * constants.dispatcher_ms * 1e-3)


# A method, and "rows" or "breakdown": the iterations of which.
Method = tuple[str, str]


def simulate_grid(
    model: LaerModel,
    routings: Sequence[Routing] = tuple(product(SKEW_GROWTHS, UNRESTS)),
    seeds: Sequence[int] = FIT_SEEDS,
    iterations: Sequence[int] = FIT_ITERATIONS,
) -> dict[tuple[Routing, Method], Ends]:
    """Simulates all methods under every routing."""

    def scenario(method: str, when: Sequence[int]) -> ScenarioOf:
        return lambda constants: laer.scenario(model, method, constants, when)

    whens = {"rows": iterations, "breakdown": (laer.BREAKDOWN_ITERATION,)}
    scenarios = {(method, of): scenario(method, when) for method in METHODS for of, when in whens.items()}
    return simulate_ends(scenarios, routings, seeds, "fit")


def misfit(
    steps: Mapping[Method, SimulatedStep], rows: Sequence[PublishedRow], breakdown: Sequence[laer.PublishedBreakdown]
) -> float:
    """Returns the root of the mean of four mean squares: of the errors of seconds, of speed-ups, of the breakdown's
    parts, and of the ranks' spread, in points.
    """
    parts, spreads = [], []
    for row in breakdown:
        step = steps[row.method, "breakdown"]
        parts += [getattr(step, part) / published_s - 1 for part, published_s in row.parts.items()]
        spreads.append(step.spread - row.spread)
    groups = (*row_errors({method: steps[method, "rows"].total for method in METHODS}, rows), parts, spreads)
    return float(np.sqrt(np.mean([np.mean(np.square(group)) for group in groups])))


def fit(
    simulated: Mapping[tuple[Routing, Method], Ends],
    rows: Sequence[PublishedRow] = laer.ROWS,
    breakdown: Sequence[laer.PublishedBreakdown] = laer.BREAKDOWN,
    shape: str = laer.FITTED_SHAPE,
) -> list[Fit]:
    """Returns all points of the grid, best first. Only the rows and the breakdown of ``shape`` are read."""
    model, found = laer.model_of(shape), []
    own_rows, own_breakdown = laer.published_rows(shape, rows), [row for row in breakdown if row.model.endswith(shape)]
    for growth, unrest in dict.fromkeys(routing for routing, _ in simulated):
        of_routing = {key: ends for (routing, key), ends in simulated.items() if routing == (growth, unrest)}
        for slowdown, dispatcher_ms in product(ROWS_SLOWDOWNS, DISPATCHERS_MS):
            constants = replace(
                CONSTANTS, dispatcher_ms=dispatcher_ms, rows_slowdown=slowdown, skew_growth=growth, unrest=unrest
            )
            steps = {key: between(ends, model, constants) for key, ends in of_routing.items()}
            found.append(Fit(constants, misfit(steps, own_rows, own_breakdown)))
    return sorted(found, key=lambda one: one.misfit)


def as_good(fits: Sequence[Fit]) -> list[Fit]:
    """Returns those that fit about as well as the best, which comes first."""
    return [one for one in fits if one.misfit <= AS_GOOD * fits[0].misfit]


# --- claims ---------------------------------------------------------------------------------------------------

# The hottest expert of the few layers that a seed draws decides over an iteration: speed-ups of single seeds spread by
# 1 to 4 %, so the mean of eight is known to about 1 %.
SEEDS = tuple(range(8))
ABLATION_MODEL = "mixtral-8x7b-e8k2"
# GB/s of a node; that of the constants was measured by the artifact's authors. 84.6: NCCL's all-to-all of 4 GB on two
# nodes of 8 A100 with 4 NICs of 200 Gb/s, 19.83 GB/s of bus rate, of which 8 of 15 parts leave the node
# (github.com/NVIDIA/nccl issue 1138, 2024). Nobody has published a rate for 64 messages of 11 MB per rank: 75 and 65.
RATES_GB_PER_S = (CONSTANTS.inter_node_gb_per_s, 84.6, 75.0, 65.0)
PARTS = {"experts": "experts", "all_to_all": "all-to-all, waiting", "rest": "rest", "total": "total"}


@dataclass(frozen=True)
class Claim:
    """A published figure: ``part`` of ``scenario``, or with ``per`` how many times the seconds of ``per``.

    of: what the figure describes, by column. in_points: the difference is in points, as for shares. scenario: None for
    a figure that is quoted only. own, per_own: the simulated values of both, per seed.
    """

    of: Annotated[Mapping[str, str], Column("{}")]
    published: Annotated[float | None, Column("published", figure)]
    scenario: Scenario | None
    per: Scenario | None = None
    part: str = "total"
    in_points: bool = False
    fitted: Annotated[bool, Column("fitted on", lambda fitted: "yes" if fitted else "")] = False
    own: tuple[float, ...] = ()
    per_own: tuple[float, ...] = (1.0,)

    def simulated_by(self, found: Found) -> Claim:
        """Returns the claim with the values of its scenarios."""
        if self.scenario is None:
            return self
        own = tuple(getattr(step, self.part) for step in found[self.scenario])
        per_own = tuple(step.total for step in found[self.per]) if self.per else (1.0,)
        return replace(self, own=own, per_own=per_own)

    @property
    def simulated(self) -> Annotated[float | None, Column("simulated", figure, after="published")]:
        """The mean over seeds; of a ratio, the ratio of the means."""
        return float(np.mean(self.own) / np.mean(self.per_own)) if self.own else None

    @property
    def difference(self) -> Annotated[float | None, Column("difference %", "+.1f", 100, after="simulated")]:
        """The simulated figure minus the published one, divided by the published one unless ``in_points``."""
        if self.simulated is None or self.published is None:
            return None
        return self.simulated - self.published if self.in_points else self.simulated / self.published - 1


def errors(claims: Sequence[Claim]) -> list[float]:
    """Returns the absolute differences of the claims that are simulated."""
    return [abs(claim.difference) for claim in claims if claim.difference is not None]


def row_claims(constants: Constants, iterations: Sequence[int]) -> tuple[list[Claim], list[Claim]]:
    """Returns the claims of figure 8: seconds of an iteration, and speed-ups over FSDP+EP."""
    seconds, speed_ups = [], []
    for row in laer.ROWS:
        of = {"dataset": row.dataset, "aux": f"{row.aux_loss:g}", "model": row.model}
        model, fitted = laer.model_of(row.model), row.model.endswith(laer.FITTED_SHAPE)
        scenarios = {method: laer.scenario(model, method, constants, iterations) for method in METHODS}
        for method, published_s in row.seconds.items():
            named, ratio = {**of, "method": method}, row.fsdp_ep_s / published_s
            seconds.append(Claim(named, published_s, scenarios[method], fitted=fitted))
            speed_ups.append(Claim(named, ratio, scenarios["FSDP+EP"], per=scenarios[method], fitted=fitted))
        seconds.append(Claim({**of, "method": "Megatron"}, row.megatron_s, None))
    return seconds, [claim for claim in speed_ups if claim.of["method"] != "FSDP+EP"]


def breakdown_claims(constants: Constants) -> list[Claim]:
    """Returns the claims of figure 10(a)."""
    claims = []
    for row in laer.BREAKDOWN:
        scenario = laer.scenario(laer.model_of(row.model), row.method, constants, (laer.BREAKDOWN_ITERATION,))
        of, fitted = {"model": row.model, "method": row.method}, row.model.endswith(laer.FITTED_SHAPE)
        for part, published_s in row.parts.items():
            claims.append(Claim(of | {"part": PARTS[part]}, published_s, scenario, part=part, fitted=fitted))
        of |= {"part": "spread"}
        claims.append(Claim(of, row.spread, scenario, part="spread", in_points=True, fitted=fitted))
    return claims


def ablation_claims(constants: Constants, iterations: Sequence[int], rate: float, of: Mapping[str, str]) -> list[Claim]:
    """Returns the claims of figure 12, seconds over FSDP+EP's, at a rate between nodes that no planner knows."""
    planners = dict.fromkeys(laer.ABLATION_S, "LAER") | {name: name for name in ("FSDP+EP", "no_pq", "no_even")}
    scenarios = {}
    for name, planner in planners.items():
        optimized = name != "no_comm_opt"
        scenario = laer.scenario(laer.model_of(ABLATION_MODEL), planner, constants, iterations, optimized)
        scenarios[name] = replace(scenario, cluster=scenario.cluster.replace(inter_node_gb_per_s=rate))
    published = {name: seconds / laer.ABLATION_S["FSDP+EP"] for name, seconds in laer.ABLATION_S.items()}
    static = scenarios["FSDP+EP"]
    return [
        Claim({**of, "variant": name}, published[name], scenarios[name], static, in_points=True) for name in planners
    ]


def busiest_claims(constants: Constants, iterations: Sequence[int]) -> list[Claim]:
    """Returns the load imbalance of two shapes, with the log of tokens where iteration 14 is logged."""
    claims = []
    whens = {"14": (laer.BREAKDOWN_ITERATION,), "21 to 70": iterations}
    for name, method, (when, of) in product(("8x7b-e8k2", "8x7b-e16k4"), METHODS, whens.items()):
        logged = laer.LAST_LOGGED_MAX_OVER_MEAN[method] if (name, when) == ("8x7b-e16k4", "14") else None
        scenario = laer.scenario(laer.model_of(name), method, constants, of)
        words = {"model": name, "method": method, "iteration": when}
        claims.append(Claim(words, logged, scenario, part="max_over_mean"))
    return claims


def reproduce(
    constants: Constants = CONSTANTS, seeds: Sequence[int] = SEEDS, iterations: Sequence[int] = laer.ROW_ITERATIONS
) -> dict[str, list[Claim]]:
    """Simulates all claims, by table; the same arguments give the same figures."""
    seconds, speed_ups = row_claims(constants, iterations)
    ablated = [ablation_claims(constants, iterations, rate, {"GB/s of a node": f"{rate:g}"}) for rate in RATES_GB_PER_S]
    claims = {
        "seconds": seconds,
        "speed-ups": speed_ups,
        "breakdown": breakdown_claims(constants),
        "ablation": ablation_claims(constants, iterations, constants.inter_node_gb_per_s, {}),
        "rates": [claim for of in ablated for claim in reversed(of) if claim.of["variant"] in ("LAER", "no_comm_opt")],
        "max/mean": busiest_claims(constants, iterations),
    }
    scenarios = [of for table in claims.values() for claim in table for of in (claim.scenario, claim.per) if of]
    found = simulate(scenarios, seeds, "LAER-MoE")
    return {name: [claim.simulated_by(found) for claim in table] for name, table in claims.items()}


# --- beyond LAER-MoE ------------------------------------------------------------------------------------------

# Stages differ far more than draws of routing do: one seed, and one of the rows' iterations.
STAGE_SEEDS, STAGE_ITERATIONS = (0,), (44,)
_SEQUENTIAL = Sequential()


@dataclass(frozen=True)
class Stage:
    """A step from LAER-MoE to this project's layer; its name says what differs from the stage before."""

    name: str
    planner: str
    overlap: Overlap = _SEQUENTIAL
    gradient_bytes: int = 2

    def scenario(self, model: LaerModel, constants: Constants) -> Scenario:
        """Returns the scenario of the stage. Overlap needs the multiprocessors, tiles and latencies of an A100."""
        of = laer.scenario(model, self.planner, constants, STAGE_ITERATIONS)
        names = ("multiprocessors", "tile_rows", "tile_columns", "launch_us", "flag_us", "intra_node_us")
        gpu = presets.a100(of.cluster.num_nodes)
        in_tiles = {name: getattr(gpu, name) for name in (*names, "inter_node_us")}
        return replace(
            of,
            strategy=of.strategy.replace(overlap=self.overlap),
            cluster=of.cluster if self.overlap == _SEQUENTIAL else of.cluster.replace(**in_tiles),
            rest=replace(of.rest, gradient_bytes=self.gradient_bytes),
        )


STATIC, LAER = Stage("static", "FSDP+EP"), Stage("LAER's layout", "LAER")
UNIFIED = Stage("unified", "greedy, flow", Pipelined(chunks=4))
STAGES = (
    STATIC,
    LAER,
    Stage("flow split", "LAER, flow"),
    Stage("our layout", "greedy, flow"),
    UNIFIED,
    Stage("its gradients in float32", "greedy, flow", Pipelined(chunks=4), gradient_bytes=4),
    Stage("would not run: MegaKernels across nodes", "greedy, flow", MegaKernel()),
)


@dataclass(frozen=True)
class StageRow:
    """Speed-ups of a stage, the geometric means over the rows: over LAER's stage and over the static one.

    least, most: over LAER's stage, over all constants that fit about as well as the best.
    seconds, max_over_mean: of an iteration, by shape.
    """

    stage: Annotated[str, Column("stage")]
    over_laer: Annotated[float, Column("over LAER", ".3f")]
    least: Annotated[float, Column("least", ".3f")]
    most: Annotated[float, Column("most", ".3f")]
    over_static: Annotated[float, Column("over static", ".3f")]
    published: Annotated[float | None, Column("published", ".3f")]
    seconds: Annotated[Mapping[str, float], Column("s, {}", figure)]
    max_over_mean: Annotated[Mapping[str, float], Column("max/mean, {}", ".3f")]


def stage_rows(fits: Sequence[Fit], models: Sequence[LaerModel] = laer.MODELS) -> list[StageRow]:
    """Simulates every stage of ``models`` under the constants of all ``fits``, best first."""

    def scenario(model: LaerModel, stage: Stage) -> ScenarioOf:
        return lambda constants: stage.scenario(model, constants)

    best, made = fits[0].constants, {of: scenario(*of) for of in product(models, STAGES)}
    direct = {of: scenario(best) for of, scenario in made.items()}
    found = simulate(direct.values(), STAGE_SEEDS, "stages")
    steps = {of: SimulatedStep.mean(found[scenario]) for of, scenario in direct.items()}
    routings = list(dict.fromkeys((one.constants.skew_growth, one.constants.unrest) for one in fits))
    ends = simulate_ends(made, routings, STAGE_SEEDS, "stages, all constants that fit")
    of_rows = [model for row in laer.ROWS if (model := laer.model_of(row.model)) in models]

    def speed_up(seconds: Mapping[tuple[LaerModel, Stage], float], stage: Stage, over: Stage) -> float:
        return statistics.geometric_mean(seconds[model, over] / seconds[model, stage] for model in of_rows)

    def seconds_under(constants: Constants) -> dict[tuple[LaerModel, Stage], float]:
        routing = constants.skew_growth, constants.unrest
        return {of: between(ends[routing, of], of[0], constants).total for of in made}

    of_fits = [seconds_under(one.constants) for one in fits]
    seconds = {of: step.total for of, step in steps.items()}
    published = statistics.geometric_mean(row.fsdp_ep_s / row.laer_s for row in laer.ROWS)
    rows = []
    for stage in STAGES:
        ratios = [speed_up(of, stage, LAER) for of in of_fits]
        over = (speed_up(seconds, stage, LAER), min(ratios), max(ratios), speed_up(seconds, stage, STATIC))
        by_shape = {model.name: steps[model, stage] for model in models}
        totals, busiest = (
            {name: getattr(of, field) for name, of in by_shape.items()} for field in ("total", "max_over_mean")
        )
        rows.append(StageRow(stage.name, *over, published if stage == LAER else None, totals, busiest))
    return rows


# --- the page -------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Bar:
    """An error, the most that it was to be, and the errors of what needs no simulator."""

    what: Annotated[str, Column("what")]
    bar: Annotated[float, Column("bar %", ".0f", 100)]
    found: Annotated[float, Column("simulator %", ".1f", 100)]
    closed_form: Annotated[float | None, Column("closed form %", ".1f", 100)] = None
    copied_row: Annotated[float | None, Column("copied row %", ".1f", 100)] = None

    @property
    def met(self) -> Annotated[str, Column("met")]:
        better = self.closed_form is None or self.found < self.closed_form
        return "yes" if self.found <= self.bar and better else "no"


@dataclass(frozen=True)
class ConstantRow:
    """A constant; of a fitted one, also the range of the values that fit about as well."""

    name: Annotated[str, Column("constant")]
    value: Annotated[float, Column("value", "g")]
    source: Annotated[str, Column("source")]
    least: Annotated[float | None, Column("least as good", "g")] = None
    most: Annotated[float | None, Column("most", "g")] = None


# What this project asked of held-out seconds and speed-ups.
_HELD_OUT_BARS: tuple[tuple[str, Callable[[list[float]], float], float], ...] = (
    ("median", statistics.median, 0.05),
    ("worst", max, 0.10),
)


def bars_sheet(claims: Mapping[str, Sequence[Claim]]) -> Sheet:
    """Returns the errors of what was held out; misses come first."""
    others = [model.name for model in laer.MODELS if model.name != laer.FITTED_SHAPE]
    form = fitted_closed_form(laer.FITTED_SHAPE, laer.published_rows(laer.FITTED_SHAPE))
    by_form = [row_errors(form.seconds(shape), laer.published_rows(shape)) for shape in others]
    by_copy = [copied_row_errors(shape) for shape in others]
    rows = []
    for place, (name, what) in enumerate({"seconds": "seconds", "speed-ups": "speed-ups over FSDP+EP"}.items()):
        own = errors([claim for claim in claims[name] if not claim.fitted])
        of_baselines = [[abs(error) for of in by for error in of[place]] for by in (by_form, by_copy)]
        for which, over, bar in _HELD_OUT_BARS:
            rows.append(Bar(f"{what}, three other shapes: {which}", bar, *map(over, (own, *of_baselines))))
    for shape, fitted in ((f"{laer.FITTED_SHAPE}, fitted on", True), ("8x7b-e16k4, held out", False)):
        for part in ("experts", "all-to-all, waiting", "rest"):
            of = [claim for claim in claims["breakdown"] if claim.fitted == fitted and claim.of["part"] == part]
            rows.append(Bar(f"breakdown, {shape}: {part}, worst of 3", 0.15, max(errors(of))))
    rows.append(Bar("ablation, points: worst", 0.05, max(errors(claims["ablation"]))))
    note = "To meet its bar, the simulator also has to be better than the closed form."
    return Sheet("SIMULATED: errors of what was held out", sorted(rows, key=lambda row: row.met), [note])


def constants_sheet(fits: Sequence[Fit]) -> Sheet:
    """Returns all constants. ``fits``: those that fit about as well, best first."""
    rows = []
    for name, source in laer.SOURCES.items():
        values = [getattr(one.constants, name) for one in fits]
        ends = (min(values), max(values)) if name in laer.FITTED else ()
        rows.append(ConstantRow(name, values[0], source + f"; fitted on {laer.FITTED_SHAPE}" * bool(ends), *ends))
    for shape, routing in (("e8k2", LAER_E8K2_ROUTING), ("e16k4", LAER_E16K4_ROUTING)):
        for name in ("skew", "drift", "concentration"):
            source = f"generated routing of {shape}; fitted to the published log of tokens, not to seconds"
            rows.append(ConstantRow(f"{name}, {shape}", getattr(routing, name), source))
    note = (
        f"as good: {len(fits)} points of the grid whose misfit is at most {AS_GOOD:g} times the best one's, "
        f"{100 * fits[0].misfit:.1f} % (root mean square of the errors of seconds, speed-ups, parts of the breakdown "
        "and the ranks' spread, which weigh the same)."
    )
    return Sheet("The constants of the simulation", rows, [note])


def sheets(claims: Mapping[str, Sequence[Claim]], fits: Sequence[Fit]) -> list[Sheet]:
    """Returns the tables of all claims. ``fits``: those that fit about as well, best first."""
    named = {
        "seconds": "seconds of an iteration",
        "speed-ups": "FSDP+EP's seconds of an iteration over the method's",
        "breakdown": "iteration 14, seconds, means over ranks",
        "ablation": f"ablation of {ABLATION_MODEL}, seconds over FSDP+EP's, difference in points",
        "rates": f"the same by the rate between nodes, which was {CONSTANTS.inter_node_gb_per_s:g} GB/s",
        "max/mean": "rows of the busiest rank over the mean, over layers, micro-batches and seeds",
    }
    notes = {
        "breakdown": [
            "Published of one iteration under a profiler: FSDP+EP e8k2 takes 38.0 s there, and 35.7 s in its row.",
            "all-to-all, waiting: for ranks of the same node; the wait for other nodes is part of the rest.",
            "spread: the standard deviation over the mean of the ranks' expert seconds; its difference in points.",
        ],
        "ablation": [
            "no_pq: only even replicas. no_even: only proportional ones. no_comm_opt: FSDP looks ahead by one."
        ],
    }
    tables = [
        Sheet(f"SIMULATED beside published: {title}", claims[of], notes.get(of, ())) for of, title in named.items()
    ]
    return [bars_sheet(claims), constants_sheet(fits), *tables]


def stages_sheet(stages: Sequence[StageRow], num_fits: int) -> Sheet:
    note = f"least, most: over {num_fits} points of the grid that fit {laer.FITTED_SHAPE} about as well as the best."
    return Sheet("SIMULATED: the 24 rows stage by stage, times as fast, geometric means", stages, [note])


def main(out: OutFolder = None, as_json: AsJson = False, wide: Wide = False) -> None:
    """Simulate LAER-MoE's published rows with constants that are fitted to one of four shapes."""
    fits = as_good(fit(simulate_grid(laer.model_of(laer.FITTED_SHAPE))))
    claims = reproduce(fits[0].constants)
    laer_seconds = {
        laer.model_of(claim.of["model"]).name: claim.simulated
        for claim in claims["seconds"]
        if claim.of["method"] == "LAER" and claim.simulated is not None
    }
    tables = sheets(claims, fits)
    tables.append(megatron_sheet(fits[0].constants, SEEDS, laer_seconds))
    tables.append(stages_sheet(stage_rows(fits), len(fits)))
    title, introduction = "SIMULATED: LAER-MoE's measurements", (__doc__ or "").strip().split("\n\n")
    report = Report("laer_reproduction", title, "simulated", tables, introduction=introduction)
    publish(report, CommandOutput(out, as_json, wide=wide))


if __name__ == "__main__":
    typer.run(main)
