"""Balance: from a load to the layout that fits it, and from a layout to where each token goes.

Two time-scales. Slow: ``LoadHistory`` turns the loads that were into the one to plan for, ``plan_layout`` chooses who
holds what. Fast, every micro-batch: ``split_tokens`` divides the current tokens over the replicas. Everything is a
pure function on integers: equal inputs give equal bytes, on every rank and in every run.
"""

from moesys.balance.budget import replica_budget
from moesys.balance.certificate import Certificate, certify
from moesys.balance.cp_sat.cp_sat import CpSatPlan, solve_by_seconds, solve_cp_sat
from moesys.balance.flow.max_load import TightSet, min_max_load, tight_set
from moesys.balance.greedy.relabelling import num_moves
from moesys.balance.homes import Homes, plan_homes
from moesys.balance.late_slots import fill_late_slots
from moesys.balance.layouts import plan_layout, plan_layouts
from moesys.balance.planning_problem import PlanningProblem
from moesys.balance.predictors import LoadHistory, measured_drift, window
from moesys.balance.quotas import plan_quotas
from moesys.balance.seconds_certificate import SecondsCertificate, certify_seconds
from moesys.balance.splits import split_tokens
from moesys.balance.warm_up import warm_up

__all__ = [
    "Certificate",
    "CpSatPlan",
    "Homes",
    "LoadHistory",
    "PlanningProblem",
    "SecondsCertificate",
    "TightSet",
    "certify",
    "certify_seconds",
    "fill_late_slots",
    "measured_drift",
    "min_max_load",
    "num_moves",
    "plan_homes",
    "plan_layout",
    "plan_layouts",
    "plan_quotas",
    "replica_budget",
    "solve_by_seconds",
    "solve_cp_sat",
    "split_tokens",
    "tight_set",
    "warm_up",
    "window",
]
