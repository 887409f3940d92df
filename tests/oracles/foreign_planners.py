"""Planners as people write them, and what they get wrong."""

from __future__ import annotations

from typing import Literal

import numpy as np
import torch.distributed as dist

import moesys as ms


class Rotated(ms.Balance):
    """Experts in order over the slots, from another one on for every load."""

    step: int = 1
    shifts: tuple[int, ...] = (0,)
    note: str | None = None

    def layout(self, problem: ms.planning.PlanningProblem) -> ms.planning.ExpertLayout:
        first = self.step * int(problem.load.tokens_E.argmax()) + sum(self.shifts)
        return ms.planning.ExpertLayout(rows_from(first, problem), problem.load.num_experts)


def rows_from(first: int, problem: ms.planning.PlanningProblem) -> np.ndarray:
    expert_RS, next_expert = np.full((len(problem.slots_R), max(problem.slots_R)), -1), first
    for rank, slots in enumerate(problem.slots_R):
        filled = min(slots, problem.load.num_experts)
        expert_RS[rank, :filled] = (next_expert + np.arange(filled)) % problem.load.num_experts
        next_expert += filled
    return expert_RS


class FirstHolder(ms.Split):
    """All tokens of an expert to the first rank that holds it."""

    def split(self, problem: ms.planning.PlanningProblem) -> ms.planning.TokenPlan:
        return ms.planning.TokenPlan(entries_to_first(problem), problem.load, problem.layout_in_force)


def entries_to_first(problem: ms.planning.PlanningProblem) -> np.ndarray:
    source, expert = np.nonzero(problem.load.tokens_RE)
    first_E = (problem.layout_in_force.replicas_RE > 0).argmax(axis=0)
    return np.column_stack([source, expert, first_E[expert], problem.load.tokens_RE[source, expert]])


class FaultyBalance(Rotated):
    """Right for even loads, of which the first layout is made; then not."""

    fault: Literal["raises", "exits", "raises on rank 1", "loses", "overfills", "twice", "shape", "list", "impure"]

    def layout(self, problem: ms.planning.PlanningProblem) -> ms.planning.ExpertLayout:
        right, E = rows_from(0, problem), problem.load.num_experts
        if (problem.load.tokens_RE == problem.load.tokens_RE[0, 0]).all():
            return ms.planning.ExpertLayout(right, E)
        match self.fault:
            case "raises":
                raise KeyError("an idea that I did not have")
            case "exits":
                raise SystemExit("enough")
            case "raises on rank 1":
                assert dist.get_rank() != 1, "not here"
            case "loses":
                right[right == E - 1] = 0
            case "overfills":
                right = right[::-1]
            case "twice":
                right[0] = right[0, 0]
            case "shape":
                right = np.column_stack([right, np.full(len(right), -1)])
            case "list":
                return right.tolist()
            case "impure":
                right = right if dist.get_rank() else right[::-1]
        return ms.planning.ExpertLayout(right, E)


class FaultySplit(ms.Split):
    fault: Literal["raises", "raises on rank 1", "stranger", "loses", "list", "impure"]

    def split(self, problem: ms.planning.PlanningProblem) -> ms.planning.TokenPlan:
        entries = entries_to_first(problem)
        match self.fault:
            case "raises":
                raise KeyError("an idea that I did not have")
            case "raises on rank 1":
                assert dist.get_rank() != 1, "not here"
            case "stranger":
                others_E = (problem.layout_in_force.replicas_RE == 0).argmax(axis=0)
                entries[0, 2] = others_E[entries[0, 1]]
            case "loses":
                entries = entries[1:]
            case "list":
                return entries.tolist()
            case "impure":
                holders_E = [np.flatnonzero(copies_R)[-1] for copies_R in problem.layout_in_force.replicas_RE.T]
                if dist.get_rank():
                    entries[:, 2] = np.array(holders_E)[entries[:, 1]]
        return ms.planning.TokenPlan.by_construction(entries, problem.load, problem.layout_in_force)
