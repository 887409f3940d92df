from moesys import hf as hf
from moesys.balance.budget import replica_budget as replica_budget
from moesys.balance.certificate import Certificate as Certificate
from moesys.balance.certificate import certify as certify
from moesys.balance.cp_sat import CpSat as CpSat
from moesys.balance.eplb import Eplb as Eplb
from moesys.balance.even_split import EvenSplit as EvenSplit
from moesys.balance.faster_moe import FasterMoe as FasterMoe
from moesys.balance.flex_moe import FlexMoe as FlexMoe
from moesys.balance.flow.flow_split import FlowSplit as FlowSplit
from moesys.balance.flow.max_load import min_max_load as min_max_load
from moesys.balance.greedy.greedy import Greedy as Greedy
from moesys.balance.laer import Laer as Laer
from moesys.balance.llep import Llep as Llep
from moesys.balance.moon_ep import MoonEp as MoonEp
from moesys.balance.plan import LayerPlan as LayerPlan
from moesys.balance.plan import StepPlan as StepPlan
from moesys.balance.plan import plan_layer as plan_layer
from moesys.balance.planning_problem import PlanningProblem as PlanningProblem
from moesys.balance.predictors import LoadHistory as LoadHistory
from moesys.balance.predictors import measured_drift as measured_drift
from moesys.balance.proportional_split import Proportional as Proportional
from moesys.balance.quotas import Quotas as Quotas
from moesys.balance.run_planner import plan_layout as plan_layout
from moesys.balance.run_planner import plan_layouts as plan_layouts
from moesys.balance.run_planner import split_tokens as split_tokens
from moesys.balance.static import Static as Static
from moesys.balance.ultra_ep import UltraEp as UltraEp
from moesys.collectives import CollectiveError as CollectiveError
from moesys.config import Adaptive as Adaptive
from moesys.config import Balance as Balance
from moesys.config import ClusterSpec as ClusterSpec
from moesys.config import Declared as Declared
from moesys.config import DenseMlp as DenseMlp
from moesys.config import Ema as Ema
from moesys.config import Ep as Ep
from moesys.config import Fsep as Fsep
from moesys.config import Gqa as Gqa
from moesys.config import Last as Last
from moesys.config import LayerSpec as LayerSpec
from moesys.config import LayoutInvariant as LayoutInvariant
from moesys.config import Mla as Mla
from moesys.config import ModelRun as ModelRun
from moesys.config import ModelShape as ModelShape
from moesys.config import ModelSpec as ModelSpec
from moesys.config import MoeMlp as MoeMlp
from moesys.config import Oracle as Oracle
from moesys.config import Ordered as Ordered
from moesys.config import Parallelism as Parallelism
from moesys.config import Split as Split
from moesys.config import Strategy as Strategy
from moesys.config import WindowMean as WindowMean
from moesys.config import presets as presets
from moesys.config.experiment import Experiment as Experiment
from moesys.config.overlap import MegaKernel as MegaKernel
from moesys.config.overlap import Pipelined as Pipelined
from moesys.config.overlap import Sequential as Sequential
from moesys.config.workload import Generated as Generated
from moesys.config.workload import ModelTraining as ModelTraining
from moesys.config.workload import Replay as Replay
from moesys.config.workload import Training as Training
from moesys.files import whole_folder as whole_folder
from moesys.frames import RankMismatchError as RankMismatchError
from moesys.hf.parallelize import parallelize as parallelize
from moesys.hf.routing_replay import record_routing as record_routing
from moesys.hf.routing_replay import replay_routing as replay_routing
from moesys.lab.commands.compare import compare as compare
from moesys.lab.commands.explain import explain as explain
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
from moesys.moe.call import recompute as recompute
from moesys.moe.experts import Experts as Experts
from moesys.moe.gradients import clip_grad_norm_ as clip_grad_norm_
from moesys.moe.gradients import sync_gradients as sync_gradients
from moesys.moe.layer import MoELayer as MoELayer
from moesys.moe.metrics import LayerMetrics as LayerMetrics
from moesys.moe.outside import OutsideExperts as OutsideExperts
from moesys.moe.router import global_aux_loss as global_aux_loss
from moesys.moe.router import router_loss as router_loss
from moesys.moe.router_bias import QuantileBalancer as QuantileBalancer
from moesys.moe.router_bias import move_router_bias as move_router_bias
from moesys.moe.router_bias import update_router_bias as update_router_bias
from moesys.moe.runtime import MoERuntime as MoERuntime
from moesys.moe.runtime import PlanningState as PlanningState
from moesys.moe.runtime import link as link
from moesys.moe.watch import Watch as Watch
from moesys.simulator.critical_path import PathPart as PathPart
from moesys.simulator.model.model_cost import ModelCost as ModelCost
from moesys.simulator.model.model_cost import Operation as Operation
from moesys.simulator.model.model_cost import Operations as Operations
from moesys.simulator.model.model_cost import count_model as count_model
from moesys.simulator.model.model_cost import model_flops_per_token as model_flops_per_token
from moesys.simulator.model.model_step import ModelStep as ModelStep
from moesys.simulator.model.simulate_model import simulate_model as simulate_model
from moesys.simulator.rest_of_step import RestOfStep as RestOfStep
from moesys.simulator.simulation import Simulation as Simulation
from moesys.simulator.step_program import simulate as simulate
from moesys.simulator.step_program import simulation as simulation
from moesys.timeline import Span as Span
from moesys.timeline import Timeline as Timeline
from moesys.traces import Trace as Trace
from moesys.traces import generate as generate
from moesys.traces import load_trace as load_trace
from moesys.traces import megatron_trace as megatron_trace
from moesys.traces import save_trace as save_trace
from moesys.traces import vllm_trace as vllm_trace
from moesys.tuner.space import SearchBounds as SearchBounds
from moesys.tuner.space import Space as Space

__version__: str
__all__ = [
    "Adaptive",
    "Balance",
    "Certificate",
    "ClusterSpec",
    "CollectiveError",
    "Comparison",
    "CpSat",
    "Declared",
    "DenseMlp",
    "Ema",
    "Ep",
    "Eplb",
    "EvenSplit",
    "Experiment",
    "ExpertLayout",
    "Experts",
    "FasterMoe",
    "FlexMoe",
    "FlowSplit",
    "Fsep",
    "Generated",
    "Gqa",
    "Greedy",
    "Laer",
    "Last",
    "LayerMetrics",
    "LayerPlan",
    "LayerSpec",
    "LayoutInvariant",
    "Llep",
    "LoadHistory",
    "LoadMatrix",
    "MegaKernel",
    "Mla",
    "MoELayer",
    "MoERuntime",
    "ModelCost",
    "ModelRun",
    "ModelShape",
    "ModelSpec",
    "ModelStep",
    "ModelTraining",
    "MoeMlp",
    "MoonEp",
    "Operation",
    "Operations",
    "Oracle",
    "Ordered",
    "OutsideExperts",
    "Parallelism",
    "PathPart",
    "Pipelined",
    "PlanningProblem",
    "PlanningState",
    "Proportional",
    "QuantileBalancer",
    "Quotas",
    "RankMismatchError",
    "Replay",
    "RestOfStep",
    "RunResult",
    "SearchBounds",
    "Sequential",
    "Simulation",
    "Slurm",
    "Space",
    "Span",
    "Split",
    "Static",
    "StepPlan",
    "Strategy",
    "Timeline",
    "TokenPlan",
    "Trace",
    "Training",
    "TuneResult",
    "UltraEp",
    "Watch",
    "WindowMean",
    "certify",
    "clip_grad_norm_",
    "compare",
    "compare_records",
    "count_model",
    "explain",
    "generate",
    "global_aux_loss",
    "hf",
    "link",
    "load_trace",
    "measured_drift",
    "megatron_trace",
    "min_max_load",
    "model_flops_per_token",
    "move_router_bias",
    "parallelize",
    "plan_layer",
    "plan_layout",
    "plan_layouts",
    "presets",
    "recompute",
    "record_routing",
    "replay_routing",
    "replica_budget",
    "router_loss",
    "run",
    "save_trace",
    "simulate",
    "simulate_model",
    "simulation",
    "split_tokens",
    "sync_gradients",
    "tune",
    "update_router_bias",
    "vllm_trace",
    "whole_folder",
]
