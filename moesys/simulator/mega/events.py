"""Discrete events of tasks on programs, gates that they wait for, and links that they share.

A launch is a queue of runs on one rank, each of which is a number of equal tasks that its programs take in order. A
task waits for its gate, computes, then moves bytes over links, and holds its program until all bytes have moved. A task
that ends counts down gates; a gate opens when it is at zero, and one flag time later for another rank. Runs of one task
each are tiles, and longer ones are blocks: programs that take tasks of a run at once run them together.

A link divides its rate evenly between the tasks that have bytes left on it (processor sharing, kept by one virtual time
per link), whatever else the tasks wait for: bytes pass all links of their route at once.

The loop is compiled by numba. It allocates nothing, so that no references are counted: it is given all its arrays.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from moesys.compiled import borrowing
from moesys.cost import FloatArray
from moesys.load import IntArray
from moesys.simulator.mega.queues import Gates, Launches, Machine, Runs
from moesys.simulator.mega.shared_links import SharedLinks, begin, first_end, look_at, take_first

# Bits of an event's word: the number of a part, gate or launch, then its kind, then the number of earlier events.
_KIND, _FOUND = 28, 30


class Events(NamedTuple):
    """A binary heap of seconds and words; ``counts``: how many events there are now, and were added."""

    at: FloatArray
    word: IntArray
    counts: IntArray


@borrowing
def push(events, at, kind, of):  # type: ignore[no-untyped-def]
    """Adds an event of this kind at ``at``, of the part, gate or launch with number ``of``."""
    place = events.counts[0]
    events.counts[0] += 1
    events.counts[1] += 1
    word = (events.counts[1] << _FOUND) | (kind << _KIND) | of
    while place > 0:
        above = (place - 1) >> 1
        if events.at[above] < at or (events.at[above] == at and events.word[above] < word):
            break
        events.at[place], events.word[place] = events.at[above], events.word[above]
        place = above
    events.at[place], events.word[place] = at, word


@borrowing
def pop(events):  # type: ignore[no-untyped-def]
    """Removes the first event and returns (kind, number). Events at the same time come in the order of adding."""
    first = events.word[0]
    events.counts[0] -= 1
    size = events.counts[0]
    at, word = events.at[size], events.word[size]
    place = 0
    while True:
        below = 2 * place + 1
        if below >= size:
            break
        right = below + 1
        if right < size and (
            events.at[right] < events.at[below]
            or (events.at[right] == events.at[below] and events.word[right] < events.word[below])
        ):
            below = right
        if at < events.at[below] or (at == events.at[below] and word < events.word[below]):
            break
        events.at[place], events.word[place] = events.at[below], events.word[below]
        place = below
    events.at[place], events.word[place] = at, word
    return (first >> _KIND) & ((1 << (_FOUND - _KIND)) - 1), first & ((1 << _KIND) - 1)


_COMPUTED, _ENDED, _OPENED, _LAUNCHED = range(4)
_LINK = -1
# The factor within which floats count as equal.
_THROUGH = 1 + 1e-12


class Times(NamedTuple):
    """Seconds of each run: when its first task was ready, when its last task ended, and how long its tasks waited in
    total; of each launch its begin and end.
    """

    ready: FloatArray
    end: FloatArray
    waited: FloatArray
    begin_L: FloatArray
    end_L: FloatArray


# The loop's state of a run, of a part (tasks of a run that programs took together; its number is used again when they
# end), of a launch and of a gate. Each is a row: events go from rank to rank, and a row is read at once.
_RUN = np.dtype(
    [
        *((name, "f8") for name in ("compute", "memory", "latency", "floor", "ready", "end", "waited")),
        *((name, "i4") for name in ("tasks", "taken", "launch", "gate", "links", "links_end", "opens", "opens_end")),
    ],
    align=True,
)
# ``programs`` hold a part, each for ``rounds`` tasks; ``links``: on how many it still is. ``before``: the part that
# came to its gate before it.
_PART = np.dtype(
    [
        *((name, "f8") for name in ("taken", "memory_end")),
        *((name, "i4") for name in ("run", "programs", "rounds", "links", "before")),
    ],
    align=True,
)
# ``run``: whose tasks are taken now; ``idle``, ``gone``: programs without work, and that have ended; ``next``: the next
# launch of its rank.
_LAUNCH = np.dtype(
    [
        *((name, "f8") for name in ("begin", "end")),
        *((name, "i4") for name in ("rank", "run", "runs_end", "idle", "gone", "next")),
    ],
    align=True,
)
# ``last_part``: the part that came to it last.
_GATE = np.dtype(
    [("open_at", "f8"), *((name, "i4") for name in ("pending", "rank", "last_part", "opens", "opens_end"))], align=True
)


def run_all(
    runs: Runs, gates: Gates, launches: Launches, machine: Machine, published_R: FloatArray, start_R: FloatArray
) -> Times:
    """Runs all launches on ``machine``. Ranks have published at ``published_R`` and launch first at ``start_R``.

    Raises RuntimeError if tasks wait for each other, which no queue that is topological as numbered allows.
    """
    num_ranks, num_launches = int(launches.rank.max()) + 1, len(launches.rank)
    launch_X = np.repeat(np.arange(num_launches), launches.runs)
    needing, needed = runs.needs
    floor, own = np.zeros(len(launch_X)), launches.rank[launch_X[needing]]
    np.maximum.at(floor, needing, published_R[needed] + np.where(own == needed, 0.0, machine.flag_seconds))
    run_rows = _rows(
        _RUN,
        len(launch_X),
        compute=runs.compute,
        memory=runs.memory,
        latency=runs.latency,
        floor=floor,
        ready=np.nan,
        end=np.nan,
        tasks=runs.tasks,
        launch=launch_X,
        gate=runs.gate,
        links=runs.links.first[:-1],
        links_end=runs.links.first[1:],
        opens=runs.opens.first[:-1],
        opens_end=runs.opens.first[1:],
    )
    by_rank = np.argsort(launches.rank, kind="stable")
    is_first = np.diff(launches.rank[by_rank], prepend=-1) > 0
    following = np.full(num_launches, -1)
    following[by_rank[:-1][~is_first[1:]]] = by_rank[1:][~is_first[1:]]
    launch_rows = _rows(
        _LAUNCH,
        num_launches,
        begin=np.nan,
        end=np.nan,
        rank=launches.rank,
        run=launches.first,
        runs_end=launches.first + launches.runs,
        next=following,
    )
    gate_rows = _rows(
        _GATE,
        len(gates.rank),
        pending=gates.pending,
        rank=gates.rank,
        last_part=-1,
        opens=gates.opens.first[:-1],
        opens_end=gates.opens.first[1:],
    )
    # Each part may have one event, each gate may open, and one launch per rank may begin.
    num_parts = num_ranks * machine.programs
    size = num_parts + len(gate_rows) + num_ranks
    events = Events(np.empty(size), np.empty(size, dtype=np.int64), np.zeros(2, dtype=np.int64))
    for launch in by_rank[is_first]:
        push(events, start_R[launches.rank[launch]], _LAUNCHED, launch)
    # Each part of a rank is on no more links than the rank's run with most links.
    num_links, most_R = len(machine.byte_seconds_L), np.zeros(num_ranks, dtype=np.int64)
    np.maximum.at(most_R, launches.rank[launch_X], np.diff(runs.links.first))
    room_to_tell = len(gates.opens.value) + 1
    _run(
        (run_rows, np.zeros(num_parts, dtype=_PART), launch_rows, gate_rows),
        # Lists that rows refer to: links and their bytes, and gates that runs and gates count down.
        (runs.links.value, runs.link_bytes, runs.opens.value, gates.opens.value),
        events,
        SharedLinks.of(machine.byte_seconds_L, int(most_R.sum()) * machine.programs),
        # Stacks of numbers: parts that are not used, parts that are ready, launches with idle programs, links with new
        # parts; gates that are to be counted down, and the ranks that do.
        (
            np.arange(num_parts),
            np.empty(num_parts, dtype=np.int64),
            np.empty(num_launches, dtype=np.int64),
            np.empty(num_links, dtype=np.int64),
            np.zeros(num_links, dtype=np.bool_),
            np.empty(room_to_tell, dtype=np.int64),
            np.empty(room_to_tell, dtype=np.int64),
        ),
        machine,
    )
    times = Times(
        *(run_rows[name] for name in ("ready", "end", "waited")), *(launch_rows[name] for name in ("begin", "end"))
    )
    if np.isnan(times.end_L).any():
        raise RuntimeError(f"{np.isnan(times.end_L).sum()} launches never end: their queues are not topological")
    return times


def _rows(dtype: np.dtype[Any], size: int, **columns: Any) -> npt.NDArray[Any]:
    found = np.zeros(size, dtype=dtype)
    for name, values in columns.items():
        found[name] = values
    return found


@borrowing
def _run(rows, lists, events, links, stacks, machine):  # type: ignore[no-untyped-def]
    runs, parts, launches, gates = rows
    link_of, link_bytes, opened_by_run, opened_by_gate = lists
    unused, begun, serving, changed, is_changed, told, tellers = stacks
    programs, gap_seconds, flag_seconds, _ = machine
    num_unused, num_begun, num_serving, num_changed = len(unused), 0, 0, 0
    while True:
        now = links.due[links.first_due[1]]
        if events.counts[0] > 0:
            now = min(now, events.at[0])
        if now == np.inf:
            break
        while True:
            if events.counts[0] > 0 and events.at[0] == now:
                kind, what = pop(events)
            elif links.due[links.first_due[1]] == now:
                kind, what = _LINK, links.first_due[1]
            else:
                break
            if kind == _LINK:
                at = first_end(links, what)
                if at > now * _THROUGH:
                    # More parts have come since the link was looked at.
                    look_at(links, what, at)
                    continue
                through = links.nodes[links.root_L[what]].through
                links.got[what], links.updated[what] = through, now
                through *= _THROUGH
                while links.root_L[what] >= 0 and links.nodes[links.root_L[what]].through <= through:
                    number = take_first(links, what)
                    part = parts[number]
                    links.active[what] -= part.programs
                    part.links -= 1
                    if part.links == 0:
                        push(events, max(now, part.memory_end) + runs[part.run].latency, _ENDED, number)
                look_at(links, what, first_end(links, what))
            elif kind == _COMPUTED:
                part = parts[what]
                run = runs[part.run]
                part.memory_end = now + part.rounds * run.memory
                for place in range(run.links, run.links_end):
                    link = link_of[place]
                    begin(links, link, link_bytes[place], what, part.programs, now)
                    if not is_changed[link]:
                        is_changed[link] = True
                        changed[num_changed] = link
                        num_changed += 1
            elif kind == _ENDED:
                part = parts[what]
                run = runs[part.run]
                run.end = now
                launch = launches[run.launch]
                if launch.idle == 0:
                    serving[num_serving] = run.launch
                    num_serving += 1
                launch.idle += part.programs
                unused[num_unused] = what
                num_unused += 1
                for place in range(run.opens, run.opens_end):
                    told[0], tellers[0], num_told = opened_by_run[place], launch.rank, 1
                    times = part.programs * part.rounds
                    while num_told > 0:
                        num_told -= 1
                        number, teller = told[num_told], tellers[num_told]
                        gate = gates[number]
                        gate.pending -= times
                        gate.open_at = max(gate.open_at, now + (flag_seconds if gate.rank != teller else 0.0))
                        if gate.pending == 0:
                            if gate.last_part >= 0:
                                push(events, gate.open_at, _OPENED, number)
                            # Its rank counts down once the gates that it opens.
                            times = 1
                            for other in range(gate.opens, gate.opens_end):
                                told[num_told], tellers[num_told] = opened_by_gate[other], gate.rank
                                num_told += 1
            elif kind == _LAUNCHED:
                launches[what].begin = now
                launches[what].idle = programs
                serving[num_serving] = what
                num_serving += 1
            else:
                number = gates[what].last_part
                gates[what].last_part = -1
                low = num_begun
                while number >= 0:
                    begun[num_begun] = number
                    num_begun += 1
                    number = parts[number].before
                # Parts begin in the order in which they came.
                high = num_begun - 1
                while low < high:
                    begun[low], begun[high] = begun[high], begun[low]
                    low, high = low + 1, high - 1

        for place in range(num_serving):
            launch = launches[serving[place]]
            while launch.idle > 0 and launch.run < launch.runs_end:
                run_number = launch.run
                run = runs[run_number]
                left = run.tasks - run.taken
                # If a run uses no links, a program takes several tasks one after another: half of its share of the
                # rest.
                rounds = max(1, left // (2 * programs)) if run.links == run.links_end else 1
                takes = min(launch.idle, left // rounds)
                run.taken += takes * rounds
                launch.idle -= takes
                if run.taken == run.tasks:
                    launch.run += 1
                if takes == 0:
                    continue
                num_unused -= 1
                number = unused[num_unused]
                part = parts[number]
                part.run, part.programs, part.rounds, part.taken = run_number, takes, rounds, now
                part.links, part.before = run.links_end - run.links, -1
                if run.gate >= 0 and (gates[run.gate].pending > 0 or gates[run.gate].open_at > now):
                    gate = gates[run.gate]
                    if gate.pending <= 0 and gate.last_part < 0:
                        push(events, gate.open_at, _OPENED, run.gate)
                    part.before = gate.last_part
                    gate.last_part = number
                else:
                    begun[num_begun] = number
                    num_begun += 1
            if launch.idle > 0:
                launch.gone += launch.idle
                launch.idle = 0
                if launch.gone == programs:
                    launch.end = now
                    if launch.next >= 0:
                        push(events, now + gap_seconds, _LAUNCHED, launch.next)
        num_serving = 0

        for place in range(num_begun):
            number = begun[place]
            part = parts[number]
            run = runs[part.run]
            begins = max(now, run.floor)
            run.waited += (begins - part.taken) * part.programs
            if np.isnan(run.ready):
                run.ready = begins
            at = begins + part.rounds * run.compute
            if part.links > 0:
                push(events, at, _COMPUTED, number)
            else:
                push(events, at + part.rounds * (run.memory + run.latency), _ENDED, number)
        num_begun = 0

        for place in range(num_changed):
            link = changed[place]
            is_changed[link] = False
            at = first_end(links, link)
            if at < links.due[link]:
                look_at(links, link, at)
        num_changed = 0
