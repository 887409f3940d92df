"""Planners that take their time, or the process with them."""

import multiprocessing
import os
import signal
import time

import numpy as np

import moesys as ms


class Waiting(ms.Balance):
    """A layout that never changes, after ``seconds``."""

    seconds: float

    def layout(self, problem: ms.planning.PlanningProblem) -> ms.planning.ExpertLayout:
        time.sleep(self.seconds)
        return in_turn(problem)


class Noting(ms.Balance):
    """Writes a byte to ``file`` for each plan."""

    file: str

    def layout(self, problem: ms.planning.PlanningProblem) -> ms.planning.ExpertLayout:
        with open(self.file, "ab") as notes:
            notes.write(b".")
        return in_turn(problem)


class Dying(ms.Balance):
    """Kills the process that plans, if it was started for that: a worker, or a job of submitit."""

    def layout(self, problem: ms.planning.PlanningProblem) -> ms.planning.ExpertLayout:
        if multiprocessing.parent_process() is not None or "SUBMITIT_EXECUTOR" in os.environ:
            os.kill(os.getpid(), signal.SIGKILL)
        return in_turn(problem)


def in_turn(problem: ms.planning.PlanningProblem) -> ms.planning.ExpertLayout:
    R, S = len(problem.slots_R), max(problem.slots_R)
    return ms.planning.ExpertLayout(np.arange(R * S).reshape(R, S) % problem.load.num_experts, problem.load.num_experts)
