"""The constants that are fitted to published throughputs, each with its cause, and the fit.

They are of rows whose step is no whole CUDA graph; the others run by the presets as they are. All else is the presets',
the models' and the recipes'. Known beside presets, and not fitted: a fused dispatch sends a token to a rank once,
however many of its experts are there, which is simulated as faster links inside a domain, by choices over ranks reached
of uniform routing; gradients are summed in bfloat16, as the recipes have it.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import astuple, dataclass
from math import comb

import numpy as np
from scipy.optimize import least_squares

from benchmarks.published.throughput_rows import PublishedRow
from moesys.config import ClusterSpec, Sequential, Strategy
from moesys.config.model_run import ModelRun
from moesys.simulator.model.model_cost import model_flops_per_token
from moesys.simulator.model.model_step import ModelStep
from moesys.simulator.model.simulate_model import simulate_model

_FUSED = Strategy(name="fused dispatch", overlap=Sequential(node_dispatch="once", combine="per_node"))


@dataclass(frozen=True)
class Constants:
    """host_us: of the host to start an operation, while others run. products: the rate reached, over the preset's."""

    host_us: float
    products: float


CAUSES = {
    "host_us": "the host starts each kernel; an operation is several, as casts, masks and permutations are",
    "products": "products of training, both ways and not fused with activations, over those that presets are of",
}
# ``fit`` of the listed rows of fitted models, with ``python -m benchmarks throughput --fit`` on 2026-11-24.
FITTED = Constants(host_us=250.0, products=0.504)
_LEAST, _START, _MOST = Constants(1.0, 0.3), Constants(150.0, 0.8), Constants(1000.0, 1.2)


def simulated(row: PublishedRow, constants: Constants | None) -> ModelStep:
    """Returns the step of a row. None: by the preset as it is."""
    return simulate_model(run_of(row, constants))


def run_of(row: PublishedRow, constants: Constants | None) -> ModelRun:
    """Returns the run of a row: preset, constants, and what its recipe says."""
    if row.whole_graph or constants is None:
        run = row.run(row.cluster)
    else:
        run = row.run(_slowed(row.cluster, constants.products)).replace(host_us=constants.host_us)
    run = run.replace(gradient_dtype="bfloat16")
    if not row.fused_dispatch:
        return run
    faster = run.cluster.intra_node_gb_per_s * choices_over_ranks(run)
    # Trays of a rack are nodes, but rows that stay in the rack use no NIC.
    in_domain = run.expert_cluster.domain_sizes == (run.expert_cluster.num_ranks,)
    return run.replace(
        strategy=run.strategy if in_domain else _FUSED, cluster=run.cluster.replace(intra_node_gb_per_s=faster)
    )


def choices_over_ranks(run: ModelRun) -> float:
    """Returns how many choices of a token are of other ranks, over the other ranks that it reaches: routing uniform."""
    E, K, R = run.shape.num_experts, run.shape.top_k, run.groups.expert
    reached = (R - 1) * (1 - comb(E - E // R, K) / comb(E, K))
    return K * (1 - 1 / R) / reached


def _slowed(cluster: ClusterSpec, products: float) -> ClusterSpec:
    assert cluster.fp8_tflops is not None, cluster.name
    return cluster.replace(expert_tflops=products * cluster.expert_tflops, fp8_tflops=products * cluster.fp8_tflops)


def fit(rows: Sequence[PublishedRow]) -> Constants:
    """Returns the constants with the least squares of log errors on those ``rows`` that they are of."""
    rows = [row for row in rows if not row.whole_graph]

    def errors(logs: Iterable[float]) -> list[float]:
        constants = Constants(*map(float, np.exp(list(logs))))
        return [float(np.log(simulated(row, constants).tokens_per_second / row.tokens_s_gpu)) for row in rows]

    bounds = np.log(astuple(_LEAST)), np.log(astuple(_MOST))
    # Whole tiles and waves make steps of the simulated seconds: differences are taken over a twentieth.
    found = least_squares(errors, np.log(astuple(_START)), bounds=bounds, diff_step=0.05, xtol=1e-3, ftol=1e-4)
    return Constants(*map(float, np.exp(found.x)))


def fit_rates(rows: Sequence[PublishedRow]) -> dict[tuple[str, str], float]:
    """Returns the baseline's constants: of each system and precision one rate of model flops, flops a second and GPU,
    the geometric mean of ``rows``.
    """
    logs: dict[tuple[str, str], list[float]] = {}
    for row in rows:
        logs.setdefault((row.system, row.precision), []).append(np.log(row.tokens_s_gpu * flops_per_token(row)))
    return {key: float(np.exp(np.mean(of))) for key, of in logs.items()}


def flops_per_token(row: PublishedRow) -> float:
    """Returns model flops of forward and backward."""
    return model_flops_per_token(row.run(row.cluster).model, row.seq_len)
