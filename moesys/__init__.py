"""moesys: declare, train and compare strategies for Mixture-of-Experts layers.

``import moesys as ms``. The public names are those of ``__all__``; each is imported when it is first asked for, so that
declaring a strategy does not wait for torch. ``__init__.pyi`` shows them to type checkers; ``tests/golden/make.py``
writes it from the table below.
"""

from __future__ import annotations

from importlib import import_module
from importlib.machinery import PathFinder
from importlib.metadata import version
from typing import Any

from moesys.kinds import BALANCES, OVERLAPS, SPLITS, did_you_mean, public_path

# The public names of each module. Those of planners, splits and overlaps are in ``kinds``.
_NAMES = {
    "moesys.balance.run_planner": "plan_layout",
    "moesys.collectives": "CollectiveError",
    "moesys.config": (
        "Adaptive Balance ClusterSpec Ema Ep Fsep Last LayoutInvariant ModelShape Oracle Ordered Split Strategy "
        "WindowMean"
    ),
    "moesys.config.experiment": "Experiment",
    "moesys.config.workload": "Generated Replay Training",
    "moesys.files": "whole_folder",
    "moesys.frames": "RankMismatchError",
    "moesys.hf.parallelize": "parallelize",
    "moesys.hf.routing_replay": "record_routing replay_routing",
    "moesys.lab.commands.compare": "compare",
    "moesys.lab.commands.explain": "explain",
    "moesys.lab.runs.runner": "run",
    "moesys.lab.runs.slurm": "Slurm",
    "moesys.lab.runs.tuning": "tune",
    "moesys.moe.call": "recompute",
    "moesys.moe.experts": "Experts",
    "moesys.moe.gradients": "clip_grad_norm_ sync_gradients",
    "moesys.moe.layer": "MoELayer",
    "moesys.moe.muon": "Muon",
    "moesys.moe.outside": "OutsideExperts",
    "moesys.moe.router": "global_aux_loss router_loss",
    "moesys.moe.router_bias": "QuantileBalancer move_router_bias update_router_bias",
    "moesys.moe.runtime": "PlanningState link",
    "moesys.moe.watch": "Watch",
    "moesys.simulator.step_program": "simulate",
    "moesys.tuner.space": "SearchBounds Space",
}
_MODULE_OF = {name: module for module, names in _NAMES.items() for name in names.split()}
_MODULE_OF |= dict((*BALANCES.values(), *SPLITS.values(), *OVERLAPS.values()))

# Public modules.
_MODULES = {
    "hf": "moesys.hf",
    "models": "moesys.models",
    "planning": "moesys.planning",
    "presets": "moesys.config.presets",
    "traces": "moesys.traces",
    "verify": "moesys.verify",
}

__all__ = sorted([*_MODULE_OF, *_MODULES])


def __getattr__(name: str) -> Any:
    if name in _MODULES:
        return import_module(_MODULES[name])
    if name in _MODULE_OF:
        return getattr(import_module(_MODULE_OF[name]), name)
    if name == "__version__":
        return version("moesys")
    # Python asks for a module of the package here before it imports it, as for ``from moesys import files``.
    elsewhere = "" if name.startswith("_") or PathFinder.find_spec(name, __path__) else public_path(name)
    names = f"its public names are in moesys.__all__{did_you_mean(name, __all__)}"
    hint = f"it is {elsewhere}" if elsewhere else names
    # With the module as ``obj``, Python would append a guess of its own.
    raise AttributeError(f"module 'moesys' has no attribute {name!r}; {hint}", name=name, obj=None)


def __dir__() -> list[str]:
    return [*__all__, "__version__"]
