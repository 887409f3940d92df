"""Loads, layouts, plans and certificates, for programs that call the planners themselves: ``ms.planning``."""

from __future__ import annotations

from moesys.balance.certificate import Certificate, certify
from moesys.balance.flow.max_load import min_max_load
from moesys.balance.plan import LayerPlan, StepPlan, plan_layer
from moesys.balance.planning_problem import PlanningProblem
from moesys.balance.predictors import LoadHistory, measured_drift
from moesys.balance.run_planner import split_tokens
from moesys.layout import ExpertLayout, TokenPlan
from moesys.load import LoadMatrix

__all__ = [
    "Certificate",
    "ExpertLayout",
    "LayerPlan",
    "LoadHistory",
    "LoadMatrix",
    "PlanningProblem",
    "StepPlan",
    "TokenPlan",
    "certify",
    "measured_drift",
    "min_max_load",
    "plan_layer",
    "split_tokens",
]
