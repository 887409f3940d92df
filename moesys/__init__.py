"""moesys: declare, train and compare strategies for Mixture-of-Experts layers.

``import moesys as ms``. The public names are those of ``__all__``; each is imported when it is first asked for, so that
declaring a strategy does not wait for torch.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from moesys import hf as hf
    from moesys.balance.budget import replica_budget as replica_budget
    from moesys.balance.certificate import Certificate as Certificate
    from moesys.balance.certificate import certify as certify
    from moesys.balance.flow.max_load import min_max_load as min_max_load
    from moesys.balance.homes import plan_homes as plan_homes
    from moesys.balance.layouts import plan_layout as plan_layout
    from moesys.balance.layouts import plan_layouts as plan_layouts
    from moesys.balance.plan import LayerPlan as LayerPlan
    from moesys.balance.plan import StepPlan as StepPlan
    from moesys.balance.plan import plan_layer as plan_layer
    from moesys.balance.planning_problem import PlanningProblem as PlanningProblem
    from moesys.balance.predictors import LoadHistory as LoadHistory
    from moesys.balance.predictors import measured_drift as measured_drift
    from moesys.balance.seconds_certificate import SecondsCertificate as SecondsCertificate
    from moesys.balance.seconds_certificate import certify_seconds as certify_seconds
    from moesys.balance.splits import split_tokens as split_tokens
    from moesys.collectives import CollectiveError as CollectiveError
    from moesys.collectives import RankMismatchError as RankMismatchError
    from moesys.config import Adaptive as Adaptive
    from moesys.config import Balance as Balance
    from moesys.config import ClusterSpec as ClusterSpec
    from moesys.config import CpSat as CpSat
    from moesys.config import Declared as Declared
    from moesys.config import DenseMlp as DenseMlp
    from moesys.config import Ema as Ema
    from moesys.config import Ep as Ep
    from moesys.config import Eplb as Eplb
    from moesys.config import EvenSplit as EvenSplit
    from moesys.config import FasterMoe as FasterMoe
    from moesys.config import FlexMoe as FlexMoe
    from moesys.config import FlowSplit as FlowSplit
    from moesys.config import Fsep as Fsep
    from moesys.config import Gqa as Gqa
    from moesys.config import Greedy as Greedy
    from moesys.config import Laer as Laer
    from moesys.config import Last as Last
    from moesys.config import LayerSpec as LayerSpec
    from moesys.config import LayoutInvariant as LayoutInvariant
    from moesys.config import Llep as Llep
    from moesys.config import MegaKernel as MegaKernel
    from moesys.config import Mla as Mla
    from moesys.config import ModelRun as ModelRun
    from moesys.config import ModelShape as ModelShape
    from moesys.config import ModelSpec as ModelSpec
    from moesys.config import MoeMlp as MoeMlp
    from moesys.config import MoonEp as MoonEp
    from moesys.config import Oracle as Oracle
    from moesys.config import Ordered as Ordered
    from moesys.config import Parallelism as Parallelism
    from moesys.config import Pipelined as Pipelined
    from moesys.config import Proportional as Proportional
    from moesys.config import Quotas as Quotas
    from moesys.config import Sequential as Sequential
    from moesys.config import Split as Split
    from moesys.config import Static as Static
    from moesys.config import Strategy as Strategy
    from moesys.config import UltraEp as UltraEp
    from moesys.config import WindowMean as WindowMean
    from moesys.config import presets as presets
    from moesys.config.experiment import Experiment as Experiment
    from moesys.config.workload import Generated as Generated
    from moesys.config.workload import ModelTraining as ModelTraining
    from moesys.config.workload import Replay as Replay
    from moesys.config.workload import Training as Training
    from moesys.hf.parallelize import parallelize as parallelize
    from moesys.hf.routing_replay import record_routing as record_routing
    from moesys.hf.routing_replay import replay_routing as replay_routing
    from moesys.lab.commands.compare import compare as compare
    from moesys.lab.explanation.explanation import explain as explain
    from moesys.lab.runs.comparison import Comparison as Comparison
    from moesys.lab.runs.comparison import compare_records as compare_records
    from moesys.lab.runs.runner import RunResult as RunResult
    from moesys.lab.runs.runner import run as run
    from moesys.lab.runs.slurm import Slurm as Slurm
    from moesys.lab.runs.tuning import TuneResult as TuneResult
    from moesys.lab.runs.tuning import tune as tune
    from moesys.layout import ExpertLayout as ExpertLayout
    from moesys.layout import TokenPlan as TokenPlan
    from moesys.load import LoadMatrix as LoadMatrix
    from moesys.moe.experts import Experts as Experts
    from moesys.moe.gradients import clip_grad_norm_ as clip_grad_norm_
    from moesys.moe.gradients import sync_gradients as sync_gradients
    from moesys.moe.gradients import update_router_bias as update_router_bias
    from moesys.moe.home_moves import gather_loads as gather_loads
    from moesys.moe.home_moves import move_homes as move_homes
    from moesys.moe.layer import MoELayer as MoELayer
    from moesys.moe.metrics import LayerMetrics as LayerMetrics
    from moesys.moe.planning_state import PlanningState as PlanningState
    from moesys.moe.recompute import recompute as recompute
    from moesys.moe.router import router_loss as router_loss
    from moesys.moe.runtime import MoERuntime as MoERuntime
    from moesys.moe.runtime import link as link
    from moesys.moe.watch import Watch as Watch
    from moesys.simulator.critical_path import PathPart as PathPart
    from moesys.simulator.model.model_cost import ModelCost as ModelCost
    from moesys.simulator.model.model_cost import count_model as count_model
    from moesys.simulator.model.model_cost import model_flops_per_token as model_flops_per_token
    from moesys.simulator.model.model_step import ModelStep as ModelStep
    from moesys.simulator.model.operations import Operation as Operation
    from moesys.simulator.model.operations import Operations as Operations
    from moesys.simulator.model.simulate_model import simulate_model as simulate_model
    from moesys.simulator.rest_of_step import RestOfStep as RestOfStep
    from moesys.simulator.simulation import Simulation as Simulation
    from moesys.simulator.step_program import simulate as simulate
    from moesys.simulator.step_program import simulation as simulation
    from moesys.timeline import Span as Span
    from moesys.timeline import Timeline as Timeline
    from moesys.trace_imports import megatron_trace as megatron_trace
    from moesys.trace_imports import vllm_trace as vllm_trace
    from moesys.traces import Trace as Trace
    from moesys.traces import generate as generate
    from moesys.traces import load_trace as load_trace
    from moesys.traces import save_trace as save_trace
    from moesys.tuner.space import SearchBounds as SearchBounds
    from moesys.tuner.space import Space as Space
    from moesys.whole_folders import whole_folder as whole_folder

# The imports above are for type checkers; a test holds them and this table equal.
_MODULE_OF = {
    "Adaptive": "moesys.config",
    "Balance": "moesys.config",
    "Certificate": "moesys.balance.certificate",
    "ClusterSpec": "moesys.config",
    "CollectiveError": "moesys.collectives",
    "Comparison": "moesys.lab.runs.comparison",
    "CpSat": "moesys.config",
    "Declared": "moesys.config",
    "DenseMlp": "moesys.config",
    "Ema": "moesys.config",
    "Ep": "moesys.config",
    "Eplb": "moesys.config",
    "EvenSplit": "moesys.config",
    "FasterMoe": "moesys.config",
    "Experiment": "moesys.config.experiment",
    "ExpertLayout": "moesys.layout",
    "Experts": "moesys.moe.experts",
    "FlexMoe": "moesys.config",
    "FlowSplit": "moesys.config",
    "Fsep": "moesys.config",
    "Generated": "moesys.config.workload",
    "Gqa": "moesys.config",
    "Greedy": "moesys.config",
    "Laer": "moesys.config",
    "Last": "moesys.config",
    "Llep": "moesys.config",
    "LayerMetrics": "moesys.moe.metrics",
    "LayerPlan": "moesys.balance.plan",
    "LayerSpec": "moesys.config",
    "LayoutInvariant": "moesys.config",
    "LoadHistory": "moesys.balance.predictors",
    "LoadMatrix": "moesys.load",
    "MegaKernel": "moesys.config",
    "Mla": "moesys.config",
    "MoELayer": "moesys.moe.layer",
    "MoERuntime": "moesys.moe.runtime",
    "ModelCost": "moesys.simulator.model.model_cost",
    "MoeMlp": "moesys.config",
    "ModelRun": "moesys.config",
    "ModelShape": "moesys.config",
    "ModelSpec": "moesys.config",
    "ModelStep": "moesys.simulator.model.model_step",
    "MoonEp": "moesys.config",
    "ModelTraining": "moesys.config.workload",
    "Oracle": "moesys.config",
    "Operation": "moesys.simulator.model.operations",
    "Operations": "moesys.simulator.model.operations",
    "Ordered": "moesys.config",
    "PathPart": "moesys.simulator.critical_path",
    "Parallelism": "moesys.config",
    "Pipelined": "moesys.config",
    "PlanningProblem": "moesys.balance.planning_problem",
    "PlanningState": "moesys.moe.planning_state",
    "Proportional": "moesys.config",
    "Quotas": "moesys.config",
    "RankMismatchError": "moesys.collectives",
    "Replay": "moesys.config.workload",
    "RestOfStep": "moesys.simulator.rest_of_step",
    "RunResult": "moesys.lab.runs.runner",
    "SearchBounds": "moesys.tuner.space",
    "SecondsCertificate": "moesys.balance.seconds_certificate",
    "Sequential": "moesys.config",
    "Simulation": "moesys.simulator.simulation",
    "Slurm": "moesys.lab.runs.slurm",
    "Space": "moesys.tuner.space",
    "Span": "moesys.timeline",
    "Split": "moesys.config",
    "Static": "moesys.config",
    "StepPlan": "moesys.balance.plan",
    "Strategy": "moesys.config",
    "UltraEp": "moesys.config",
    "Timeline": "moesys.timeline",
    "TokenPlan": "moesys.layout",
    "Trace": "moesys.traces",
    "Training": "moesys.config.workload",
    "TuneResult": "moesys.lab.runs.tuning",
    "Watch": "moesys.moe.watch",
    "WindowMean": "moesys.config",
    "certify": "moesys.balance.certificate",
    "certify_seconds": "moesys.balance.seconds_certificate",
    "clip_grad_norm_": "moesys.moe.gradients",
    "compare": "moesys.lab.commands.compare",
    "compare_records": "moesys.lab.runs.comparison",
    "count_model": "moesys.simulator.model.model_cost",
    "explain": "moesys.lab.explanation.explanation",
    "gather_loads": "moesys.moe.home_moves",
    "generate": "moesys.traces",
    "link": "moesys.moe.runtime",
    "load_trace": "moesys.traces",
    "measured_drift": "moesys.balance.predictors",
    "megatron_trace": "moesys.trace_imports",
    "min_max_load": "moesys.balance.flow.max_load",
    "model_flops_per_token": "moesys.simulator.model.model_cost",
    "move_homes": "moesys.moe.home_moves",
    "parallelize": "moesys.hf.parallelize",
    "plan_homes": "moesys.balance.homes",
    "plan_layer": "moesys.balance.plan",
    "plan_layout": "moesys.balance.layouts",
    "plan_layouts": "moesys.balance.layouts",
    "recompute": "moesys.moe.recompute",
    "record_routing": "moesys.hf.routing_replay",
    "replay_routing": "moesys.hf.routing_replay",
    "replica_budget": "moesys.balance.budget",
    "router_loss": "moesys.moe.router",
    "run": "moesys.lab.runs.runner",
    "save_trace": "moesys.traces",
    "simulate": "moesys.simulator.step_program",
    "simulate_model": "moesys.simulator.model.simulate_model",
    "simulation": "moesys.simulator.step_program",
    "split_tokens": "moesys.balance.splits",
    "sync_gradients": "moesys.moe.gradients",
    "tune": "moesys.lab.runs.tuning",
    "update_router_bias": "moesys.moe.gradients",
    "vllm_trace": "moesys.trace_imports",
    "whole_folder": "moesys.whole_folders",
}

# Names that are modules themselves.
_ROOMS = {"hf": "moesys.hf", "presets": "moesys.config.presets"}

__all__ = ["presets", *sorted([*_MODULE_OF, "hf"])]


def __getattr__(name: str) -> Any:
    if name in _ROOMS:
        return import_module(_ROOMS[name])
    if name in _MODULE_OF:
        return getattr(import_module(_MODULE_OF[name]), name)
    raise AttributeError(f"module 'moesys' has no attribute {name!r}; its public names are in moesys.__all__")


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
