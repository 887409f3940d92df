"""moesys: declare, train and compare strategies for Mixture-of-Experts layers.

``import moesys as ms``. The public names are those of ``__all__``; each is imported when it is first asked for, so that
declaring a strategy does not wait for torch. ``__init__.pyi`` shows them to type checkers; ``tests/golden/make.py``
writes it from the table below.
"""

from __future__ import annotations

from importlib import import_module
from importlib.metadata import version
from typing import Any

from moesys.kinds import BALANCES, OVERLAPS, SPLITS, did_you_mean

# The public names of each module. Those of planners, splits and overlaps are in ``kinds``.
_NAMES = {
    "moesys.balance.budget": "replica_budget",
    "moesys.balance.certificate": "Certificate certify",
    "moesys.balance.flow.max_load": "min_max_load",
    "moesys.balance.plan": "LayerPlan StepPlan plan_layer",
    "moesys.balance.run_planner": "plan_layout plan_layouts split_tokens",
    "moesys.balance.planning_problem": "PlanningProblem",
    "moesys.balance.predictors": "LoadHistory measured_drift",
    "moesys.collectives": "CollectiveError",
    "moesys.config": (
        "Adaptive Balance ClusterSpec Declared DenseMlp Ema Ep Fsep Gqa Last LayerSpec LayoutInvariant Mla "
        "ModelRun ModelShape ModelSpec MoeMlp Oracle Ordered Parallelism Split Strategy WindowMean"
    ),
    "moesys.config.experiment": "Experiment",
    "moesys.config.workload": "Generated ModelTraining Replay Training",
    "moesys.files": "whole_folder",
    "moesys.frames": "RankMismatchError",
    "moesys.hf.parallelize": "parallelize",
    "moesys.hf.routing_replay": "record_routing replay_routing",
    "moesys.lab.commands.compare": "compare",
    "moesys.lab.commands.explain": "explain",
    "moesys.lab.runs.comparison": "Comparison compare_records",
    "moesys.lab.runs.runner": "RunResult run",
    "moesys.lab.runs.slurm": "Slurm",
    "moesys.lab.runs.tuning": "TuneResult tune",
    "moesys.layout": "ExpertLayout TokenPlan",
    "moesys.load": "LoadMatrix",
    "moesys.moe.call": "recompute",
    "moesys.moe.experts": "Experts",
    "moesys.moe.gradients": "clip_grad_norm_ sync_gradients",
    "moesys.moe.layer": "MoELayer",
    "moesys.moe.metrics": "LayerMetrics",
    "moesys.moe.outside": "OutsideExperts",
    "moesys.moe.router": "global_aux_loss router_loss",
    "moesys.moe.router_bias": "QuantileBalancer move_router_bias update_router_bias",
    "moesys.moe.runtime": "MoERuntime PlanningState link",
    "moesys.moe.watch": "Watch",
    "moesys.simulator.critical_path": "PathPart",
    "moesys.simulator.model.model_cost": "ModelCost Operation Operations count_model model_flops_per_token",
    "moesys.simulator.model.model_step": "ModelStep",
    "moesys.simulator.model.simulate_model": "simulate_model",
    "moesys.simulator.rest_of_step": "RestOfStep",
    "moesys.simulator.simulation": "Simulation",
    "moesys.simulator.step_program": "simulate simulation",
    "moesys.timeline": "Span Timeline",
    "moesys.traces": "Trace generate load_trace megatron_trace save_trace vllm_trace",
    "moesys.tuner.space": "SearchBounds Space",
}
_MODULE_OF = {name: module for module, names in _NAMES.items() for name in names.split()}
_MODULE_OF |= dict((*BALANCES.values(), *SPLITS.values(), *OVERLAPS.values()))

# Public names that are modules themselves.
_MODULES = {"hf": "moesys.hf", "presets": "moesys.config.presets"}

__all__ = sorted([*_MODULE_OF, *_MODULES])


def __getattr__(name: str) -> Any:
    if name in _MODULES:
        return import_module(_MODULES[name])
    if name in _MODULE_OF:
        return getattr(import_module(_MODULE_OF[name]), name)
    if name == "__version__":
        return version("moesys")
    raise AttributeError(
        f"module 'moesys' has no attribute {name!r}; its public names are in moesys.__all__"
        f"{did_you_mean(name, __all__)}"
    )


def __dir__() -> list[str]:
    return [*__all__, "__version__"]
