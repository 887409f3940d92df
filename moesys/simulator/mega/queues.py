"""The queues of all ranks for ``events``, made of runs of equal tasks: how long a task takes, what it waits for, and
what it moves over which links.

R ranks, L links as in ``cost.link_seconds``, X runs.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from moesys.compiled import borrowing
from moesys.config import ClusterSpec
from moesys.cost import FloatArray
from moesys.load import IntArray
from moesys.simulator.mega.tiles import BoolArray

Pairs = tuple[IntArray, IntArray]


class Table(NamedTuple):
    """Lists of numbers in one array: list i is ``value[first[i] : first[i + 1]]``."""

    first: IntArray
    value: IntArray

    @staticmethod
    def of(key: IntArray, value: IntArray, size: int) -> Table:
        """Returns ``size`` lists. Each has the values whose key is its number, in order."""
        order = np.argsort(key, kind="stable")
        first = np.concatenate([[0], np.bincount(key, minlength=size).cumsum()])
        return Table(first.astype(np.int64), value[order].astype(np.int64))


class Runs(NamedTuple):
    """All runs, launch by launch in the order of their queues. Seconds and bytes of one task.

    tasks: the number of tasks. compute: seconds before bytes move. memory: seconds of the rank's own memory, while
    links move bytes. latency: seconds after both. gate: the gate that tasks wait for, -1 for none. needs: pairs of a
    run and a rank that must have published. opens: the gates that each task counts down. links, link_bytes: the links
    of each run, and the bytes on each, in the same order.
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
        """Returns the runs without links that are busy for less than ``quiet`` of the busiest one's time: a task takes
        as long for its bytes there as if nothing else used the link. ``busy_L``: seconds.
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
    """Gates that tasks wait for. ``pending``: the counts until each opens. ``rank``: the rank whose programs wait for
    it. ``opens``: the gates that it counts down.
    """

    pending: IntArray
    rank: IntArray
    opens: Table


class Launches(NamedTuple):
    """The rank, the first run and the number of runs of each launch; those of a rank are in order."""

    rank: IntArray
    first: IntArray
    runs: IntArray


class Machine(NamedTuple):
    """The hardware that launches run on.

    programs: the programs of every launch. gap_seconds: from the end of a launch to the begin of the next one.
    flag_seconds: until other ranks see a flag. byte_seconds_L: seconds per byte of each link, [2·R + 2·N].
    """

    programs: int
    gap_seconds: float
    flag_seconds: float
    byte_seconds_L: FloatArray

    @staticmethod
    def of(cluster: ClusterSpec, programs: int) -> Machine:
        """Returns the ranks of ``cluster``, each with so many programs."""
        intra, inter = 1 / (cluster.intra_node_gb_per_s * 1e9), 1 / (cluster.inter_node_gb_per_s * 1e9)
        byte_seconds_L = np.concatenate([np.full(2 * cluster.num_ranks, intra), np.full(2 * cluster.num_nodes, inter)])
        return Machine(programs, cluster.launch_us * 1e-6, cluster.flag_us * 1e-6, byte_seconds_L)


def number_in_rank(rank: IntArray) -> IntArray:
    """Returns the number of each entry on its rank; ``rank`` is sorted."""
    size = np.bincount(rank)
    return np.arange(len(rank)) - np.repeat(size.cumsum() - size, size)


# The names that ``kernels.mega.tasks`` gives them.
KINDS = ("fetch", "product", "push", "sum", "outer_product")
FETCH, PRODUCT, PUSH, SUM, OUTER_PRODUCT = range(len(KINDS))

# The names of launches for the weight gradients of a layer's two matrices.
WEIGHT_GRADIENTS = ("weight_gradient_up", "weight_gradient_down")


class PeerTraffic(NamedTuple):
    """The bytes that runs exchange with peers. ``amount``: per task; ``share``: the part of the run's tasks that do."""

    run: IntArray
    peer: IntArray
    amount: FloatArray
    share: FloatArray


_NO_PAIRS = (np.zeros(0, dtype=np.int64), np.zeros(0, dtype=np.int64))
_NOTHING = PeerTraffic(*_NO_PAIRS, np.zeros(0), np.zeros(0))


@dataclass(frozen=True)
class RunsOfKind:
    """Runs of one kind and launch, those of a rank in order; see ``Runs``.

    rank: sorted. group: the group whose rows they handle, -1 for sums. needs: pairs of run and rank. opens: pairs of
    run and gate. exchanged: the traffic of a task with peers.
    """

    kind: int
    rank: IntArray
    tasks: IntArray
    compute: FloatArray | float = 0.0
    memory: FloatArray | float = 0.0
    gate: IntArray | int = -1
    group: IntArray | int = -1
    needs: Pairs = _NO_PAIRS
    opens: Pairs = _NO_PAIRS
    exchanged: PeerTraffic = _NOTHING

    def __len__(self) -> int:
        return len(self.tasks)


@dataclass(frozen=True)
class Launch:
    """A launch of each of ``ranks``.

    name: the name of the kernel. kinds: its runs, by kind. order: the order of all runs, which are numbered kind by
    kind, rank by rank. combines: whether it is B, or comes after it.
    """

    ranks: IntArray
    name: str
    kinds: tuple[RunsOfKind, ...]
    order: IntArray
    combines: bool

    @staticmethod
    def plain(ranks: IntArray, name: str, kind: RunsOfKind, combines: bool) -> Launch:
        return Launch(ranks, name, (kind,), np.arange(len(kind)), combines)


def joined(first: Launch, second: Launch) -> Launch:
    """Returns one launch with all tasks of the first, and then all of the second."""
    kinds = first.kinds + second.kinds
    order = np.concatenate([first.order, len(first.order) + second.order])
    rank = np.concatenate([kind.rank for kind in kinds])
    return Launch(first.ranks, first.name, kinds, order[np.argsort(rank[order], kind="stable")], first.combines)


@dataclass(frozen=True)
class Queues:
    """The tasks that ``events`` runs, with the kind, group, rank and launch of each run, [X].

    names, combines_L: those of launches.
    """

    kind: IntArray
    group: IntArray
    rank: IntArray
    launch: IntArray
    names: tuple[str, ...]
    combines_L: BoolArray
    runs: Runs
    gates: Gates
    launches: Launches

    @staticmethod
    def of(
        all_launches: Sequence[Launch],
        gate_rank: IntArray,
        gate_opens: Pairs,
        cluster: ClusterSpec,
        together: float = 1.0,
        a_program: float = 1.0,
    ) -> Queues:
        """Returns the queues of all launches.

        gate_rank: the rank of each gate. gate_opens: pairs of gates, the first of which counts the second down.
        together: the number of tasks that are simulated as one; a_program: the number of programs that one stands for,
        which takes as long for one task as they take for all of its tasks. So the seconds of programs and the bytes of
        a run stay the same.
        """
        ranks, sizes = [launch.ranks for launch in all_launches], [len(launch.order) for launch in all_launches]
        kinds = [kind for launch in all_launches for kind in launch.kinds]
        firsts = np.cumsum([0, *map(len, kinds)])[:-1]
        rank = np.concatenate([kind.rank for kind in kinds])
        # The launches of a rank follow one another.
        stage_L, rank_L = np.repeat(np.arange(len(ranks)), list(map(len, ranks))), np.concatenate(ranks)
        by_rank = np.lexsort((stage_L, rank_L))
        stage_L, rank_L = stage_L[by_rank], rank_L[by_rank]
        stage = np.repeat(np.arange(len(sizes)), sizes)
        # The run at each place in the queues, where runs are numbered kind by kind, and the place of each run.
        behind = np.cumsum([0, *sizes])
        order = np.concatenate([first + launch.order for first, launch in zip(behind, all_launches, strict=False)])
        order = order[np.lexsort((stage, rank[order]))]
        place = np.empty_like(order)
        place[order] = np.arange(len(order))
        size_L = np.zeros((int(rank_L.max()) + 1, len(sizes)), dtype=np.int64)
        np.add.at(size_L, (rank[order], stage[order]), 1)
        size_L = size_L[rank_L, stage_L]

        def placed(values: Iterable[npt.ArrayLike]) -> npt.NDArray[Any]:
            each = [np.broadcast_to(value, len(kind)) for value, kind in zip(values, kinds, strict=True)]
            return np.concatenate(each)[order]

        rank_X, kind_X = rank[order], placed([kind.kind for kind in kinds])
        whole = placed([kind.tasks for kind in kinds])
        tasks = np.ceil(whole / together - 1e-9).astype(np.int64)
        times = whole / np.maximum(tasks, 1)
        links, link_bytes, latency = _links(rank_X, kind_X == FETCH, _peers(kinds, firsts, place, times), cluster)
        opener = np.concatenate([place[first + kind.opens[0]] for first, kind in zip(firsts, kinds, strict=True)])
        opened = np.concatenate([kind.opens[1] for kind in kinds])
        needing = np.concatenate([place[first + kind.needs[0]] for first, kind in zip(firsts, kinds, strict=True)])
        needed = np.concatenate([kind.needs[1] for kind in kinds])
        num_gates = len(gate_rank)
        pending = np.bincount(opened, weights=tasks[opener], minlength=num_gates)
        pending += np.bincount(gate_opens[1], minlength=num_gates)
        runs = Runs(
            tasks=tasks,
            compute=placed([kind.compute for kind in kinds]) * (times / a_program),
            memory=placed([kind.memory for kind in kinds]) * (times / a_program),
            # A program that takes tasks one after another has as many latencies.
            latency=latency * np.maximum(times / a_program, 1.0),
            gate=placed([kind.gate for kind in kinds]),
            needs=(needing, needed),
            opens=Table.of(opener, opened, len(tasks)),
            links=links,
            link_bytes=link_bytes,
        )
        gates = Gates(pending.astype(np.int64), gate_rank, Table.of(*gate_opens, num_gates))
        return Queues(
            kind=kind_X,
            group=placed([kind.group for kind in kinds]),
            rank=rank_X,
            launch=np.repeat(np.arange(len(size_L)), size_L),
            names=tuple(all_launches[number].name for number in stage_L.tolist()),
            combines_L=np.array([launch.combines for launch in all_launches])[stage_L],
            runs=runs,
            gates=gates,
            launches=Launches(rank_L, size_L.cumsum() - size_L, size_L),
        )


def _peers(kinds: Sequence[RunsOfKind], firsts: IntArray, place: IntArray, times: FloatArray) -> PeerTraffic:
    """Returns the traffic of all kinds, with ``times`` as many bytes per task."""
    found = [
        (place[first + kind.exchanged.run], *kind.exchanged[1:]) for first, kind in zip(firsts, kinds, strict=True)
    ]
    run, peer, amount, share = (np.concatenate(values) for values in zip(*found, strict=True))
    return PeerTraffic(run, peer.astype(np.int64), (amount * times[run]).astype(np.float64), share.astype(np.float64))


def _links(
    rank_X: IntArray, pulls_X: BoolArray, peers: PeerTraffic, cluster: ClusterSpec
) -> tuple[Table, FloatArray, FloatArray]:
    """Returns the links of each run, the bytes of a task on each, and the latency after them, [X]. The latency is the
    mean over the run's tasks, of which some wait for no peer; a task that waits for several peers waits for them at
    once.
    """
    num_peers = len(peers.run)
    latency_X, first = np.zeros(len(rank_X)), np.zeros(len(rank_X) + 1, np.int64)
    link, link_bytes = np.empty(2 * num_peers, np.int64), np.empty(2 * num_peers)
    node_R, domain_R = np.asarray(cluster.node_of_rank), np.asarray(cluster.domain_of_rank)
    latency_seconds = (cluster.intra_node_us * 1e-6, cluster.inter_node_us * 1e-6)
    found = _crossed(
        rank_X.astype(np.int64),
        pulls_X,
        Table.of(peers.run, np.arange(num_peers), len(rank_X)),
        peers,
        node_R,
        domain_R,
        latency_seconds,
        (first, link, link_bytes, latency_X),
        np.full(2 * (cluster.num_ranks + cluster.num_nodes), -1),
    )
    return Table(first, link[:found]), link_bytes[:found], latency_X


@borrowing
def _crossed(rank_X, pulls_X, entries, peers, node_R, domain_R, latency_seconds, found, place_L):  # type: ignore[no-untyped-def]
    """Fills ``found`` run by run, each link of a run once, and returns their number. ``place_L``: -1 for all links."""
    _, peer, amount, share = peers
    first, link_of, link_bytes, latency_X = found
    R, num_nodes, size = len(node_R), node_R[-1] + 1, 0
    for run in range(len(rank_X)):
        own, first[run], longest = rank_X[run], size, 0.0
        for entry in entries.value[entries.first[run] : entries.first[run + 1]]:
            sender, receiver = (peer[entry], own) if pulls_X[run] else (own, peer[entry])
            apart = domain_R[sender] != domain_R[receiver]
            latency = latency_seconds[1] if apart else latency_seconds[0]
            latency_X[run] += share[entry] * latency
            longest = max(longest, latency)
            out, into = sender, R + receiver
            if apart:
                out, into = 2 * R + node_R[sender], 2 * R + num_nodes + node_R[receiver]
            for link in (out, into):
                # Smaller places are those of earlier runs.
                if place_L[link] < first[run]:
                    place_L[link], link_of[size], link_bytes[size] = size, link, 0.0
                    size += 1
                link_bytes[place_L[link]] += amount[entry]
        latency_X[run] = min(latency_X[run], longest)
    first[len(rank_X)] = size
    return size
