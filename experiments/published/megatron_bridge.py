"""Whole models, simulated: ``python -m experiments.published.megatron_bridge`` writes this text above its tables.

Tokens per second and GPU of whole models in training, simulated, and those that NVIDIA published of Megatron-Bridge:
github.com/NVIDIA-NeMo/Megatron-Bridge, docs/performance-summary.md and performance-summary-archive.md, releases 25.11
to 26.08, read on 2026-11-22: mock data, routing forced to balance, no token dropped. Nothing here was measured by this
project.

The tables of the source state neither dispatcher nor recomputation nor CUDA graphs; dispatcher and whole graphs are
those of recipes in the same repository. Assumed: nothing runs again in backward, optimizer states are sharded, moments
are float32. Not simulated: DeepSeek-V3's extra prediction head (4 % of its flops), graphs of parts of a layer, and the
kernels that newer releases fuse. "out" means that more memory is counted than there is, with nothing running again:
recipes of DeepSeek-V3 and Kimi-K2 compute latents again, those of GPT-OSS activations and norms, which takes little
time and is not simulated.

Two constants are fitted, for steps that are no whole graph, on the two smallest models, Qwen3-30B-A3B and GPT-OSS-120B;
Qwen3-235B-A22B, DeepSeek-V3 and Kimi-K2 are held out. The first is the time of the host per operation: it starts each
kernel, and an operation is several kernels, such as casts, masks and permutations. The second is the rate of products
over the preset's: products of training run both ways and are not fused with activations. "by preset", nothing is
fitted; the baseline is one rate of model flops for each system and precision, fitted on all rows of the same two
models. Held-out rows are not untouched: docs/measured/throughput_simulated_2026-11-24.md says how often they were
predicted, and what changed in between.

The rule for ``megatron_bridge_rows.csv`` and ``megatron_bridge_pairs.csv`` was fixed before any of the rows was fitted:

- Rows (``listed``): models with a packaged configuration, systems with a preset or B300, releases from 26.02.01 on,
  not marked as a regression by the source. Of a configuration that several releases have, the newest up to 26.04.01,
  and the newest after it: between those two the same configurations moved by 30 % in the median, whole CUDA graphs
  among the reasons. Between all other neighbors they moved by 3 % at most.
- Pairs: two configurations of one model on the same GPUs that differ in parallelism, precision, micro-batch or global
  batch; of one release, or of neighbors between which unchanged configurations moved by at most 5 % in the median. Of
  all rows from 26.02 on, and of 25.11 on Blackwell within the release (on H100 that release was slowed by its host).
- ``whole_graph``: a step is one CUDA graph, as recipes of the same repository say (perf_recipes, scripts/performance:
  ``full_iteration``): MXFP8 on Blackwell after 26.04.01, except GPT-OSS and DeepSeek-V3 on B300, and Kimi-K2.
- ``fused_dispatch``: rows are sent by HybridEP or DeepEP, as the same recipes say, where a token goes to a node once
  and to a rank once; elsewhere by an all-to-all of one row per choice. Added after the first run and before the fit.
- ``overlaps``: a micro-batch's exchanges run beside another's products (``overlap_moe_expert_parallel_comm``,
  ``moe_a2a_overlap`` in the recipes of v0.4.2, v0.5.0 and v0.6.0): whole graphs; of 26.04.01 DeepSeek-V3 on B200,
  GPT-OSS-120B on GB200 and Qwen3-235B on H100. Added after held-out rows had been predicted twice.
"""

from __future__ import annotations

import csv
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from math import comb
from pathlib import Path
from typing import Annotated, Literal

import typer
from pydantic import BaseModel
from scipy.stats import spearmanr

from moesys.config import ClusterSpec, ModelSpec, Strategy, presets
from moesys.config.model_run import ModelRun, Parallelism
from moesys.config.overlap import Sequential
from moesys.lab.commands.options import AsJson, OutFolder, Quiet, Wide
from moesys.lab.show.progress import steps_told
from moesys.lab.show.sheets import Column, CommandOutput, Report, Sheet, publish
from moesys.simulator.model.model_cost import model_flops_per_token
from moesys.simulator.model.simulate_model import simulate_model

# Models that the constants are fitted on: the two smallest, which have rows of all systems and precisions.
FITTED_MODELS = frozenset({"qwen3-30b-a3b", "gpt-oss-120b"})
# Least squares of log errors over the listed rows of the fitted models whose step is no whole CUDA graph, on
# 2026-11-24. The microseconds of the host to start an operation while others run, and the rate of products over the
# preset's. All else is the presets', the models' and the recipes'.
HOST_US, PRODUCTS = 250.0, 0.504

_FUSED = Strategy(name="fused dispatch", overlap=Sequential(node_dispatch="once", combine="per_node"))


def _b300(num_nodes: int) -> ClusterSpec:
    """Returns GB300's GPUs in nodes of 8, each with a ConnectX-8 of 800 Gb/s (data sheet of DGX B300, 2025)."""
    rack = presets.gb300()
    faster = {"inter_node_gb_per_s": 2 * rack.inter_node_gb_per_s, "memory_gb": rack.memory_gb}
    return presets.b200(num_nodes).replace(name=f"{num_nodes} x 8 B300", **faster)


_SYSTEMS = {
    "h100": (8, presets.h100),
    "b200": (8, presets.b200),
    "b300": (8, _b300),
    "gb200": (4, presets.gb200),
    "gb300": (4, presets.gb300),
}


class PublishedRow(BaseModel, frozen=True):
    """One published measurement. ``row``: its number in this project's list of public figures."""

    row: int
    release: str
    model: str
    system: Literal["h100", "b200", "b300", "gb200", "gb300"]
    gpus: int
    precision: Literal["BF16", "FP8", "MXFP8"]
    global_batch: int
    micro_batch: int
    seq_len: int
    tensor: int
    pipeline: int
    virtual_stages: int
    expert: int
    whole_graph: bool
    fused_dispatch: bool
    overlaps: bool
    listed: bool
    tokens_s_gpu: float

    @property
    def fitted(self) -> bool:
        return self.model in FITTED_MODELS

    @property
    def cluster(self) -> ClusterSpec:
        """The preset of the system. Jobs on racks ask for equally many trays in each, as many as divide the job's
        (``--segment`` in scripts/performance/utils/executors.py of the source).
        """
        ranks, preset = _SYSTEMS[self.system]
        cluster = preset(nodes := self.gpus // ranks)
        if not isinstance(cluster.ranks_per_domain, tuple):
            return cluster
        trays = max(count for count in range(1, 19) if nodes % count == 0)
        return cluster.replace(ranks_per_domain=trays * ranks)

    @property
    def run(self) -> ModelRun:
        """The run under the preset as it is.

        Optimizer states are sharded over data-parallel ranks, as in all recipes, and nothing runs again in backward, as
        in most. Gradients are summed in bfloat16, as in the recipes. A fused dispatch sends a token to a rank once,
        however many of its experts are there: that is simulated as faster links inside a domain.
        """
        run = ModelRun(
            model=_model(self.model),
            cluster=self.cluster,
            parallelism=Parallelism(
                tp=self.tensor,
                pp=self.pipeline,
                vp=self.virtual_stages,
                ep=self.expert,
                overlap_micro_batches=self.overlaps,
                dense="optimizer",
                recompute="none",
            ),
            seq_len=self.seq_len,
            micro_batch=self.micro_batch,
            global_batch=self.global_batch,
            fp8=self.precision != "BF16",
            gradient_dtype="bfloat16",
        )
        if not self.fused_dispatch:
            return run
        faster = run.cluster.replace(intra_node_gb_per_s=run.cluster.intra_node_gb_per_s * choices_over_ranks(run))
        # Trays of a rack are nodes, but rows that stay in the rack use no NIC.
        in_domain = run.expert_cluster.domain_sizes == (run.expert_cluster.num_ranks,)
        return run.replace(cluster=faster) if in_domain else run.replace(cluster=faster, strategy=_FUSED)

    @property
    def fitted_run(self) -> ModelRun:
        """The run with the fitted constants, which a whole graph does not take."""
        if self.whole_graph:
            return self.run
        cluster = self.run.cluster
        assert cluster.fp8_tflops is not None, cluster.name
        rates = {"expert_tflops": PRODUCTS * cluster.expert_tflops, "fp8_tflops": PRODUCTS * cluster.fp8_tflops}
        return self.run.replace(cluster=cluster.replace(**rates), host_us=HOST_US)

    @property
    def flops_per_token(self) -> float:
        """The model flops of forward and backward."""
        return model_flops_per_token(_model(self.model), self.seq_len)


@cache
def _model(name: str) -> ModelSpec:
    return ModelSpec.from_config(name)


def choices_over_ranks(run: ModelRun) -> float:
    """Returns the number of a token's choices on other ranks per other rank that it reaches, routing uniform."""
    E, K, R = run.shape.num_experts, run.shape.top_k, run.groups.expert
    reached = (R - 1) * (1 - comb(E - E // R, K) / comb(E, K))
    return K * (1 - 1 / R) / reached


def _read(name: str) -> list[dict[str, str]]:
    return list(csv.DictReader((Path(__file__).parent / name).read_text(encoding="utf-8").splitlines()))


def published_rows() -> dict[int, PublishedRow]:
    """Returns all rows that are listed or in a pair, by number."""
    return {row.row: row for row in map(PublishedRow.model_validate, _read("megatron_bridge_rows.csv"))}


def published_pairs() -> list[tuple[int, int]]:
    """Returns the numbers of the rows of each pair, the older or first row before the other."""
    return [(int(pair["before"]), int(pair["after"])) for pair in _read("megatron_bridge_pairs.csv")]


def fit_rates(rows: Sequence[PublishedRow]) -> dict[tuple[str, str], float]:
    """Returns the baseline's constants: the geometric mean over ``rows`` of model flops per second and GPU, for each
    system and precision.
    """
    rates: dict[tuple[str, str], list[float]] = {}
    for row in rows:
        rates.setdefault((row.system, row.precision), []).append(row.tokens_s_gpu * row.flops_per_token)
    return {key: statistics.geometric_mean(of) for key, of in rates.items()}


# --- results --------------------------------------------------------------------------------------------------

# Predictions: with the fitted constants, by the presets as they are, and by the baseline's rates.
BY = ("found", "by preset", "baseline")


@dataclass(frozen=True)
class RowResult:
    """A simulated row. tokens: per second and GPU, by ``BY``. memory: of the rank that holds most."""

    published_row: PublishedRow
    tokens: Mapping[str, float]
    row: Annotated[int, Column("row")]
    release: Annotated[str, Column("release")]
    of: Annotated[str, Column("model, GPUs, precision")]
    shape: Annotated[str, Column("TP PP VP EP, micro-batch")]
    graph: Annotated[str, Column("graph")]
    fitted: Annotated[str, Column("fitted on")]
    published: Annotated[float, Column("published", ",.0f")]
    simulated: Annotated[float, Column("simulated", ",.0f")]
    errors: Annotated[Mapping[str, float], Column("error %, {}", "+.1f", 100)]
    memory: Annotated[str, Column("GB counted, of")]


@dataclass(frozen=True)
class PairResult:
    """Two simulated configurations of a model on the same GPUs, and the ratio of their tokens."""

    rows: Annotated[str, Column("rows")]
    of: Annotated[str, Column("model, system")]
    change: Annotated[str, Column("what changes")]
    fitted: Annotated[str, Column("fitted on")]
    published: Annotated[float, Column("published ratio", ".2f")]
    simulated: Annotated[float, Column("simulated", ".2f")]
    errors: Annotated[Mapping[str, float], Column("error %, {}", "+.1f", 100)]


@dataclass(frozen=True)
class Bar:
    """A figure of each prediction, and what this project asked of the first."""

    what: Annotated[str, Column("what")]
    bar: Annotated[str, Column("bar")]
    met: Annotated[str, Column("met")]
    values: Annotated[Mapping[str, float], Column("{}", ".2f")]


def simulate_row(row: PublishedRow, rate: float) -> RowResult:
    """Simulates a row. ``rate``: the baseline's, in flops per second."""
    step, by_preset = simulate_model(row.fitted_run), simulate_model(row.run)
    predictions = (step.tokens_per_second, by_preset.tokens_per_second, rate / row.flops_per_token)
    tokens = dict(zip(BY, predictions, strict=True))
    return RowResult(
        published_row=row,
        tokens=tokens,
        row=row.row,
        release=row.release,
        of=f"{row.model}, {row.gpus} {row.system.upper()}, {row.precision}",
        shape=f"{row.tensor} {row.pipeline} {row.virtual_stages} {row.expert}, {row.micro_batch}",
        graph="whole" if row.whole_graph else "",
        fitted="yes" if row.fitted else "",
        published=row.tokens_s_gpu,
        simulated=step.tokens_per_second,
        errors={by: of / row.tokens_s_gpu - 1 for by, of in tokens.items()},
        memory=f"{step.peak.gb:.0f}, {row.cluster.memory_gb or 0:.0f}" + " (out)" * bool(step.verdict),
    )


def pair_result(before: RowResult, after: RowResult) -> PairResult:
    names = {"precision": "", "global_batch": "batch ", "micro_batch": "micro-batch "}
    names |= {"tensor": "TP", "pipeline": "PP", "virtual_stages": "VP", "expert": "EP"}
    values = {name: [getattr(of.published_row, name) for of in (before, after)] for name in names}
    changes = [f"{names[name]}{old} to {new}" for name, (old, new) in values.items() if old != new]
    published = after.published / before.published
    ratios = {by: after.tokens[by] / before.tokens[by] for by in BY}
    return PairResult(
        rows=f"{before.row}, {after.row}",
        of=f"{before.published_row.model}, {before.published_row.system.upper()}",
        change=", ".join(changes),
        fitted=before.fitted,
        published=published,
        simulated=ratios["found"],
        errors={by: ratio / published - 1 for by, ratio in ratios.items()},
    )


def error_bar(
    what: str, most: float | None, of: Sequence[RowResult | PairResult], over: Callable[[list[float]], float]
) -> Bar:
    values = {by: 100 * over([abs(one.errors[by]) for one in of]) for by in BY}
    if most is None:
        return Bar(what, "", "", values)
    return Bar(what, f"at most {most:.0f}", "yes" if values["found"] <= most else "no", values)


def rank_bar(what: str, listed: Sequence[RowResult], group: Callable[[PublishedRow], tuple[str, ...]]) -> Bar:
    """Returns the mean of Spearman's correlation over groups of at least 3 rows; equal predictions rank nothing: 0."""
    groups: dict[tuple[str, ...], list[RowResult]] = {}
    for one in listed:
        groups.setdefault(group(one.published_row), []).append(one)

    def correlation(of: Sequence[RowResult], by: str) -> float:
        values = [one.tokens[by] for one in of]
        return float(spearmanr([one.published for one in of], values).statistic) if len(set(values)) > 1 else 0.0

    values = {by: statistics.mean(correlation(of, by) for of in groups.values() if len(of) >= 3) for by in BY}
    return Bar(what, "at least 0.9", "yes" if values["found"] >= 0.9 else "no", values)


def sheets(listed: Sequence[RowResult], pairs: Sequence[PairResult]) -> list[Sheet]:
    """Returns all tables; of what was to be met, misses come first."""
    beside, median = "SIMULATED beside published", statistics.median
    held_pairs = [pair for pair in pairs if not pair.fitted]
    held, fitted = ([one for one in listed if bool(one.fitted) == of] for of in (False, True))
    bars = [
        error_bar("pairs: median error %", 10, pairs, median),
        error_bar("pairs of held-out models: median error %", 10, held_pairs, median),
        error_bar("pairs: worst error %", None, pairs, max),
        error_bar("rows of held-out models: median error %", 20, held, median),
        error_bar("rows of held-out models: worst error %", None, held, max),
        error_bar("rows of fitted models: median error %", None, fitted, median),
        error_bar("rows of fitted models: worst error %", None, fitted, max),
        rank_bar("rank correlation of a model's rows on a system, mean", listed, lambda row: (row.model, row.system)),
        rank_bar("rank correlation of a model's rows on all systems, mean", listed, lambda row: (row.model,)),
    ]
    bars.sort(key=lambda bar: ("no", "yes", "").index(bar.met))
    of_bars = (
        f"{len(pairs)} pairs, {len(held_pairs)} of held-out models; {len(listed)} rows, {len(held)} of held-out ones.",
        "rank correlation: Spearman's, of models and systems with at least 3 rows. A configuration that two releases "
        "have differs in published tokens and, where it is no whole graph in either, not in simulated ones.",
    )
    of_rows = (
        f"The constants: {HOST_US:g} microseconds of the host per operation, products at {PRODUCTS:g} of the preset's "
        "rate; a step that is one CUDA graph takes neither.",
    )
    of_pairs = "fitted on: constants were fitted on rows of this model, though not on these pairs."
    return [
        Sheet("SIMULATED: errors against the bars", bars, of_bars),
        Sheet(f"{beside}: pairs, tokens per second of the second over the first", pairs, [of_pairs]),
        Sheet(f"{beside}: tokens per second and GPU", listed, of_rows, group_by="of"),
    ]


def main(out: OutFolder = None, as_json: AsJson = False, quiet: Quiet = False, wide: Wide = False) -> None:
    """Simulate whole models beside the tokens per second that Megatron-Bridge published, with every row's error."""
    rows = published_rows()
    rates = fit_rates([row for row in rows.values() if row.fitted and row.listed])
    found = {}
    with steps_told("Megatron-Bridge", len(rows), quiet) as tell:
        for number, row in rows.items():
            tell(f"row {number}, {row.model}")
            found[number] = simulate_row(row, rates[row.system, row.precision])
    pairs = [pair_result(found[before], found[after]) for before, after in published_pairs()]
    tables = sheets([one for one in found.values() if one.published_row.listed], pairs)
    title, introduction = "SIMULATED: tokens a second of whole models", (__doc__ or "").strip().split("\n\n")
    report = Report("throughput", title, "simulated", tables, introduction=introduction)
    publish(report, CommandOutput(out, as_json, quiet, wide))


if __name__ == "__main__":
    typer.run(main)
