"""Discrete events of tasks on programs, gates that they wait for, and links that they share.

A launch is a queue of runs on one rank: so many equal tasks one after another, which its programs take in order. A task
has its gate open, computes, then moves bytes over links, and holds its program until all of them are through. A task
that is done counts down gates; a gate opens when it is at zero, a flag's time later where who waits is another rank.
Runs of one task each are tiles, longer ones blocks: programs that take tasks of a run at once go through it together.

A link gives each task that has bytes left on it the same part of its rate (processor sharing, kept by one virtual time
a link), whatever else the task waits for: bytes go through all links of their way at once.

The loop is compiled by numba and kept on disk; it calls no function of another file.
"""

from __future__ import annotations

import heapq
from typing import Any, NamedTuple

import numpy as np
from numba import njit

from moesys.config import ClusterSpec
from moesys.cost import FloatArray
from moesys.load import IntArray

_COMPUTED, _ENDED, _LINK, _OPENED, _LAUNCHED = range(5)


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
    ``latency``: behind both. ``floor``: before which none is ready. ``gate``: that it waits for, -1 for none.
    ``opens``: gates that each task counts down. ``links`` and ``link_bytes``, in the same order: what moves over which.
    """

    tasks: IntArray
    compute: FloatArray
    memory: FloatArray
    latency: FloatArray
    floor: FloatArray
    gate: IntArray
    opens: Table
    links: Table
    link_bytes: FloatArray


class Gates(NamedTuple):
    """``pending``: counts until each opens. ``rank``: whose programs wait for it. ``opens``: gates it counts down."""

    pending: IntArray
    rank: IntArray
    opens: Table


class Launches(NamedTuple):
    """Of each its ``rank``, ``first`` run, number of ``runs``; a rank's in order. ``start``: seconds before which it
    does not begin.
    """

    rank: IntArray
    first: IntArray
    runs: IntArray
    start: FloatArray


class Times(NamedTuple):
    """Seconds: of each run when its first task was taken, its first was ready, its last was done; how long its tasks
    waited, all together; of each launch its begin and end.
    """

    taken: FloatArray
    ready: FloatArray
    end: FloatArray
    waited: FloatArray
    begin_L: FloatArray
    end_L: FloatArray


def run_all(
    runs: Runs,
    gates: Gates,
    launches: Launches,
    seconds_a_byte: FloatArray,
    programs: int,
    gap_seconds: float,
    flag_seconds: float,
) -> Times:
    """``programs``: of every launch. ``gap_seconds``: from the end of a launch to the next one's begin.

    Raises RuntimeError where tasks wait for each other, which no queue that is topological as numbered allows.
    """
    # Arrays of one kind, so that the loop is compiled once.
    runs = Runs(*(_plain(field) for field in runs))
    gates = Gates(*(_plain(field) for field in gates))
    launches = Launches(*(_plain(field) for field in launches))
    times = Times(*_run(runs, gates, launches, seconds_a_byte, programs, gap_seconds, flag_seconds))
    if np.isnan(times.end_L).any():
        raise RuntimeError(f"{np.isnan(times.end_L).sum()} launches never end: their queues are not topological")
    return times


def seconds_a_byte(cluster: ClusterSpec) -> FloatArray:
    """Of each link, [2·R + 2·N], as ``cost.link_seconds`` has them."""
    intra, inter = 1 / (cluster.intra_node_gb_per_s * 1e9), 1 / (cluster.inter_node_gb_per_s * 1e9)
    return np.concatenate([np.full(2 * cluster.num_ranks, intra), np.full(2 * cluster.num_nodes, inter)])


def _plain(field: Any) -> Any:
    if isinstance(field, Table):
        return Table(*map(_plain, field))
    return np.require(field, requirements=["C", "W"])


def _compiled(function: Any) -> Any:
    return njit(cache=True, nogil=True)(function)


@_compiled
def _run(  # type: ignore[no-untyped-def]
    runs, gates, launches, seconds_a_byte, programs, gap_seconds, flag_seconds
):
    num_runs, num_links, num_launches = len(runs.tasks), len(seconds_a_byte), len(launches.rank)
    taken, ready, end = np.full(num_runs, np.nan), np.full(num_runs, np.nan), np.full(num_runs, np.nan)
    waited = np.zeros(num_runs)
    begin_L, end_L = np.full(num_launches, np.nan), np.full(num_launches, np.nan)
    pending, open_at = gates.pending.copy(), np.zeros(len(gates.pending))
    launch_of, in_run = np.zeros(num_runs, dtype=np.int64), np.zeros(num_runs, dtype=np.int64)
    # Of each launch the run whose tasks are taken, programs that have nothing to do, and programs that are gone.
    at_run, idle = launches.first.copy(), np.zeros(num_launches, dtype=np.int64)
    gone = np.zeros(num_launches, dtype=np.int64)
    next_launch, last_of_rank = np.full(num_launches, -1), np.full(launches.rank.max() + 1, -1)

    # Tasks of one run that programs took together: as a list, numbers of which are used again.
    part_run, part_count, part_left, part_memory = [0], [0], [0], [0.0]
    part_next, part_taken, part_rounds = [0], [0.0], [0]
    unused = [0]
    # Parts that wait for a gate, each of which names the next.
    waiting = np.full(len(gates.pending), -1)

    virtual, updated, active = np.zeros(num_links), np.zeros(num_links), np.zeros(num_links)
    # When each is looked at next: no later than the first part on it can be through.
    version, due = np.zeros(num_links, dtype=np.int64), np.full(num_links, np.inf)
    # Of each link, the parts that move bytes on it, by the virtual time at which they are through.
    queues = [[(0.0, 0)] for _ in range(num_links)]
    for link in range(num_links):
        queues[link].pop()
    changed, is_changed = [0], np.zeros(num_links, dtype=np.bool_)
    changed.pop()

    # (seconds, number, kind, of what, version): equal times in the order in which they were found.
    events = [(0.0, 0, 0, 0, 0)]
    events.pop()
    number = 0
    for launch in range(num_launches):
        rank = launches.rank[launch]
        if last_of_rank[rank] >= 0:
            next_launch[last_of_rank[rank]] = launch
        else:
            number += 1
            heapq.heappush(events, (launches.start[launch], number, _LAUNCHED, launch, 0))
        last_of_rank[rank] = launch
        launch_of[launches.first[launch] : launches.first[launch] + launches.runs[launch]] = launch

    # Gates that are counted down: which, by whose tasks, by how many.
    told = [(0, 0, 0)]
    told.pop()
    # Launches that have programs with nothing to do, and parts that are ready.
    serving, begun = [0], [0]
    serving.pop()
    begun.pop()
    while len(events) > 0:
        now = events[0][0]
        while len(events) > 0 and events[0][0] == now:
            _, _, kind, what, seen = heapq.heappop(events)
            if kind == _LAUNCHED:
                begin_L[what] = now
                idle[what] = programs
                serving.append(what)
            elif kind == _OPENED:
                part = waiting[what]
                waiting[what] = -1
                first_begun = len(begun)
                while part >= 0:
                    begun.append(part)
                    part = part_next[part]
                # In the order in which they came.
                low, high = first_begun, len(begun) - 1
                while low < high:
                    begun[low], begun[high] = begun[high], begun[low]
                    low, high = low + 1, high - 1
            elif kind == _COMPUTED:
                run = part_run[what]
                part_memory[what] = now + part_rounds[what] * runs.memory[run]
                first, last = runs.links.first[run], runs.links.first[run + 1]
                part_left[what] = last - first
                if first == last:
                    at = part_memory[what] + runs.latency[run]
                    number += 1
                    heapq.heappush(events, (at, number, _ENDED, what, 0))
                for place in range(first, last):
                    link = runs.links.value[place]
                    if active[link] > 0:
                        virtual[link] += (now - updated[link]) / (active[link] * seconds_a_byte[link])
                    updated[link] = now
                    active[link] += part_count[what]
                    heapq.heappush(queues[link], (virtual[link] + runs.link_bytes[place], what))
                    if not is_changed[link]:
                        is_changed[link] = True
                        changed.append(link)
            elif kind == _LINK:
                if seen == version[what]:
                    due[what] = np.inf
                    if active[what] > 0:
                        virtual[what] += (now - updated[what]) / (active[what] * seconds_a_byte[what])
                    updated[what] = now
                    if not is_changed[what]:
                        is_changed[what] = True
                        changed.append(what)
                    left = (queues[what][0][0] - virtual[what]) * active[what] * seconds_a_byte[what]
                    if now + left > now * (1 + 1e-12):
                        # More parts have come since.
                        continue
                    virtual[what] = queues[what][0][0]
                    through = virtual[what] * (1 + 1e-12)
                    while len(queues[what]) > 0 and queues[what][0][0] <= through:
                        part = heapq.heappop(queues[what])[1]
                        active[what] -= part_count[part]
                        part_left[part] -= 1
                        if part_left[part] == 0:
                            at = max(now, part_memory[part]) + runs.latency[part_run[part]]
                            number += 1
                            heapq.heappush(events, (at, number, _ENDED, part, 0))
            else:
                run = part_run[what]
                end[run] = now
                launch = launch_of[run]
                if idle[launch] == 0:
                    serving.append(launch)
                idle[launch] += part_count[what]
                unused.append(what)
                for place in range(runs.opens.first[run], runs.opens.first[run + 1]):
                    told.append((runs.opens.value[place], launches.rank[launch], part_count[what] * part_rounds[what]))

        while len(told) > 0:
            gate, teller, times = told.pop()
            pending[gate] -= times
            seen_at = now + (flag_seconds if gates.rank[gate] != teller else 0.0)
            open_at[gate] = max(open_at[gate], seen_at)
            if pending[gate] == 0:
                if waiting[gate] >= 0:
                    number += 1
                    heapq.heappush(events, (open_at[gate], number, _OPENED, gate, 0))
                for place in range(gates.opens.first[gate], gates.opens.first[gate + 1]):
                    told.append((gates.opens.value[place], gates.rank[gate], 1))

        for launch in serving:
            behind = launches.first[launch] + launches.runs[launch]
            while idle[launch] > 0 and at_run[launch] < behind:
                run = at_run[launch]
                left = runs.tasks[run] - in_run[run]
                # Where nothing else is held meanwhile, several after another: half of what each program has yet to do.
                rounds = 1
                if runs.links.first[run] == runs.links.first[run + 1]:
                    rounds = max(1, left // (2 * programs))
                takes = min(idle[launch], left // rounds)
                in_run[run] += takes * rounds
                idle[launch] -= takes
                if in_run[run] == runs.tasks[run]:
                    at_run[launch] += 1
                if takes == 0:
                    continue
                if len(unused) > 0:
                    part = unused.pop()
                else:
                    part = len(part_run)
                    part_run.append(0)
                    part_count.append(0)
                    part_left.append(0)
                    part_memory.append(0.0)
                    part_next.append(-1)
                    part_taken.append(0.0)
                    part_rounds.append(0)
                part_run[part], part_count[part], part_next[part], part_taken[part] = run, takes, -1, now
                part_rounds[part] = rounds
                if np.isnan(taken[run]):
                    taken[run] = now
                gate = runs.gate[run]
                if gate >= 0 and (pending[gate] > 0 or open_at[gate] > now):
                    if pending[gate] <= 0 and waiting[gate] < 0:
                        number += 1
                        heapq.heappush(events, (open_at[gate], number, _OPENED, gate, 0))
                    part_next[part] = waiting[gate]
                    waiting[gate] = part
                else:
                    begun.append(part)
            if idle[launch] > 0:
                gone[launch] += idle[launch]
                idle[launch] = 0
                if gone[launch] == programs:
                    end_L[launch] = now
                    following = next_launch[launch]
                    if following >= 0:
                        number += 1
                        at = max(now + gap_seconds, launches.start[following])
                        heapq.heappush(events, (at, number, _LAUNCHED, following, 0))
        serving.clear()

        for part in begun:
            run = part_run[part]
            begins = max(now, runs.floor[run])
            waited[run] += (begins - part_taken[part]) * part_count[part]
            if np.isnan(ready[run]):
                ready[run] = begins
            number += 1
            heapq.heappush(events, (begins + part_rounds[part] * runs.compute[run], number, _COMPUTED, part, 0))
        begun.clear()

        for link in changed:
            is_changed[link] = False
            if len(queues[link]) > 0:
                left = (queues[link][0][0] - virtual[link]) * active[link] * seconds_a_byte[link]
                at = updated[link] + max(left, 0.0)
                if at < due[link]:
                    due[link] = at
                    version[link] += 1
                    number += 1
                    heapq.heappush(events, (at, number, _LINK, link, version[link]))
        changed.clear()
    return taken, ready, end, waited, begin_L, end_L
