"""What runs of MegaKernels' tasks are: how long a task takes, what it waits for, what it moves over which links.

L links as in ``cost.link_seconds``, X runs.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from moesys.config import ClusterSpec
from moesys.cost import FloatArray
from moesys.load import IntArray

Pairs = tuple[IntArray, IntArray]


class Table(NamedTuple):
    """Lists of numbers, one behind the other: list i is ``value[first[i] : first[i + 1]]``."""

    first: IntArray
    value: IntArray

    @staticmethod
    def of(key: IntArray, value: IntArray, size: int) -> Table:
        """``size`` lists, each of the values that have its number as key, in order."""
        order = np.argsort(key, kind="stable")
        first = np.concatenate([[0], np.bincount(key, minlength=size).cumsum()])
        return Table(first.astype(np.int64), value[order].astype(np.int64))


class Runs(NamedTuple):
    """All runs, launch by launch in the order of their queues. Seconds and bytes of one task.

    ``tasks``: of each. ``compute``: before bytes move. ``memory``: that the rank's own memory takes beside links.
    ``latency``: behind both. ``gate``: that it waits for, -1 for none. ``needs``: pairs of a run and a rank that must
    have published. ``opens``: gates that each task counts down. ``links`` and ``link_bytes``, in the same order: what
    moves over which.
    """

    tasks: IntArray
    compute: FloatArray
    memory: FloatArray
    latency: FloatArray
    gate: IntArray
    needs: Pairs
    opens: Table
    links: Table
    link_bytes: FloatArray

    def without_quiet_links(self, byte_seconds_L: FloatArray, busy_L: FloatArray, quiet: float) -> Runs:
        """Where links that are busy for less than ``quiet`` of the busiest one's time are not shared: a task takes as
        long for its bytes on one as if it had that for itself. ``busy_L``: seconds.
        """
        run_Y = np.repeat(np.arange(len(self.tasks)), np.diff(self.links.first))
        seconds_Y = self.link_bytes * byte_seconds_L[self.links.value]
        shared_Y = (busy_L >= quiet * busy_L.max())[self.links.value]
        memory = self.memory.copy()
        np.maximum.at(memory, run_Y[~shared_Y], seconds_Y[~shared_Y])
        first = np.r_[0, np.bincount(run_Y[shared_Y], minlength=len(memory)).cumsum()]
        return self._replace(
            memory=memory, links=Table(first, self.links.value[shared_Y]), link_bytes=self.link_bytes[shared_Y]
        )


class Gates(NamedTuple):
    """``pending``: counts until each opens. ``rank``: whose programs wait for it. ``opens``: gates it counts down."""

    pending: IntArray
    rank: IntArray
    opens: Table


class Launches(NamedTuple):
    """Of each its ``rank``, ``first`` run and number of ``runs``; a rank's in order."""

    rank: IntArray
    first: IntArray
    runs: IntArray


class Machine(NamedTuple):
    """What launches run on.

    ``programs``: of every launch. ``gap_seconds``: from the end of a launch to the next one's begin. ``flag_seconds``:
    until other ranks see a flag. ``byte_seconds_L``: seconds of a byte on each link, [2·R + 2·N].
    """

    programs: int
    gap_seconds: float
    flag_seconds: float
    byte_seconds_L: FloatArray

    @staticmethod
    def of(cluster: ClusterSpec, programs: int) -> Machine:
        """The ranks of ``cluster``, each with so many programs."""
        intra, inter = 1 / (cluster.intra_node_gb_per_s * 1e9), 1 / (cluster.inter_node_gb_per_s * 1e9)
        byte_seconds_L = np.concatenate([np.full(2 * cluster.num_ranks, intra), np.full(2 * cluster.num_nodes, inter)])
        return Machine(programs, cluster.launch_us * 1e-6, cluster.flag_us * 1e-6, byte_seconds_L)


def number_in_rank(rank: IntArray) -> IntArray:
    """Of what lies rank by rank, how many of its rank come before each."""
    size = np.bincount(rank)
    return np.arange(len(rank)) - np.repeat(size.cumsum() - size, size)
