from moesys import hf as hf
from moesys import models as models
from moesys import planning as planning
from moesys import traces as traces
from moesys import verify as verify
from moesys.balance.cp_sat import CpSat as CpSat
from moesys.balance.eplb import Eplb as Eplb
from moesys.balance.even_split import EvenSplit as EvenSplit
from moesys.balance.faster_moe import FasterMoe as FasterMoe
from moesys.balance.flex_moe import FlexMoe as FlexMoe
from moesys.balance.flow.flow_split import FlowSplit as FlowSplit
from moesys.balance.greedy.greedy import Greedy as Greedy
from moesys.balance.laer import Laer as Laer
from moesys.balance.llep import Llep as Llep
from moesys.balance.moon_ep import MoonEp as MoonEp
from moesys.balance.proportional_split import Proportional as Proportional
from moesys.balance.quotas import Quotas as Quotas
from moesys.balance.run_planner import plan_layout as plan_layout
from moesys.balance.static import Static as Static
from moesys.balance.ultra_ep import UltraEp as UltraEp
from moesys.collectives import CollectiveError as CollectiveError
from moesys.config import Adaptive as Adaptive
from moesys.config import Balance as Balance
from moesys.config import ClusterSpec as ClusterSpec
from moesys.config import Ema as Ema
from moesys.config import Ep as Ep
from moesys.config import Fsep as Fsep
from moesys.config import Last as Last
from moesys.config import LayoutInvariant as LayoutInvariant
from moesys.config import ModelShape as ModelShape
from moesys.config import Oracle as Oracle
from moesys.config import Ordered as Ordered
from moesys.config import Split as Split
from moesys.config import Strategy as Strategy
from moesys.config import WindowMean as WindowMean
from moesys.config import presets as presets
from moesys.config.experiment import Experiment as Experiment
from moesys.config.overlap import MegaKernel as MegaKernel
from moesys.config.overlap import Pipelined as Pipelined
from moesys.config.overlap import Sequential as Sequential
from moesys.config.workload import Generated as Generated
from moesys.config.workload import Replay as Replay
from moesys.config.workload import Training as Training
from moesys.files import whole_folder as whole_folder
from moesys.frames import RankMismatchError as RankMismatchError
from moesys.hf.parallelize import parallelize as parallelize
from moesys.hf.routing_replay import record_routing as record_routing
from moesys.hf.routing_replay import replay_routing as replay_routing
from moesys.lab.commands.compare import compare as compare
from moesys.lab.commands.explain import explain as explain
from moesys.lab.runs.runner import run as run
from moesys.lab.runs.slurm import Slurm as Slurm
from moesys.lab.runs.tuning import tune as tune
from moesys.moe.call import recompute as recompute
from moesys.moe.experts import Experts as Experts
from moesys.moe.gradients import clip_grad_norm_ as clip_grad_norm_
from moesys.moe.gradients import sync_gradients as sync_gradients
from moesys.moe.layer import MoELayer as MoELayer
from moesys.moe.muon import Muon as Muon
from moesys.moe.outside import OutsideExperts as OutsideExperts
from moesys.moe.router import global_aux_loss as global_aux_loss
from moesys.moe.router import router_loss as router_loss
from moesys.moe.router_bias import QuantileBalancer as QuantileBalancer
from moesys.moe.router_bias import move_router_bias as move_router_bias
from moesys.moe.router_bias import update_router_bias as update_router_bias
from moesys.moe.runtime import PlanningState as PlanningState
from moesys.moe.runtime import link as link
from moesys.moe.watch import Watch as Watch
from moesys.simulator.step_program import simulate as simulate
from moesys.tuner.space import SearchBounds as SearchBounds
from moesys.tuner.space import Space as Space

__version__: str
__all__ = [
    "Adaptive",
    "Balance",
    "ClusterSpec",
    "CollectiveError",
    "CpSat",
    "Ema",
    "Ep",
    "Eplb",
    "EvenSplit",
    "Experiment",
    "Experts",
    "FasterMoe",
    "FlexMoe",
    "FlowSplit",
    "Fsep",
    "Generated",
    "Greedy",
    "Laer",
    "Last",
    "LayoutInvariant",
    "Llep",
    "MegaKernel",
    "MoELayer",
    "ModelShape",
    "MoonEp",
    "Muon",
    "Oracle",
    "Ordered",
    "OutsideExperts",
    "Pipelined",
    "PlanningState",
    "Proportional",
    "QuantileBalancer",
    "Quotas",
    "RankMismatchError",
    "Replay",
    "SearchBounds",
    "Sequential",
    "Slurm",
    "Space",
    "Split",
    "Static",
    "Strategy",
    "Training",
    "UltraEp",
    "Watch",
    "WindowMean",
    "clip_grad_norm_",
    "compare",
    "explain",
    "global_aux_loss",
    "hf",
    "link",
    "models",
    "move_router_bias",
    "parallelize",
    "plan_layout",
    "planning",
    "presets",
    "recompute",
    "record_routing",
    "replay_routing",
    "router_loss",
    "run",
    "simulate",
    "sync_gradients",
    "traces",
    "tune",
    "update_router_bias",
    "verify",
    "whole_folder",
]
