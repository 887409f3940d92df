"""Whole models: their declaration, their operations and the simulation of a training step: ``ms.models``."""

from moesys.config import DenseMlp, Gqa, LayerSpec, Mla, ModelRun, ModelSpec, MoeMlp, Parallelism
from moesys.config.workload import ModelTraining
from moesys.simulator.model.model_cost import ModelCost, Operation, Operations, count_model, model_flops_per_token
from moesys.simulator.model.model_step import ModelStep
from moesys.simulator.model.simulate_model import simulate_model

__all__ = [
    "DenseMlp",
    "Gqa",
    "LayerSpec",
    "Mla",
    "ModelCost",
    "ModelRun",
    "ModelSpec",
    "ModelStep",
    "ModelTraining",
    "MoeMlp",
    "Operation",
    "Operations",
    "Parallelism",
    "count_model",
    "model_flops_per_token",
    "simulate_model",
]
