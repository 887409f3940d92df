"""The queues of all ranks, put together from runs of tasks that are alike in kind, for ``mega_events``.

R ranks, L links as in ``cost.link_seconds``, X runs.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeVar

import numpy as np
import numpy.typing as npt

from moesys.config import ClusterSpec
from moesys.cost import FloatArray
from moesys.load import IntArray
from moesys.overlap.mega_events import Gates, Launches, Runs, Table
from moesys.overlap.tile_tasks import BoolArray

# As ``kernels.task_times`` calls them.
KINDS = ("fetch", "product", "push", "sum", "outer_product")
FETCH, PRODUCT, PUSH, SUM, OUTER_PRODUCT = range(len(KINDS))

# Launches of their own, of a layer's two matrices.
WEIGHT_GRADIENTS = ("weight_gradient_up", "weight_gradient_down")

Pairs = tuple[IntArray, IntArray]
Number = TypeVar("Number", np.int64, np.float64)


@dataclass(frozen=True)
class RunsOfKind:
    """Runs of one kind and launch, in order of their numbers, as ``mega_events.Runs`` has them.

    ``group``: whose rows they handle, -1 for sums. ``flops``: of a task, whole tiles. ``opens``: pairs of run and gate.
    ``bytes_XR``: that a task exchanges with each peer, None where none does.
    """

    kind: int
    tasks: IntArray
    compute: FloatArray
    memory: FloatArray
    floor: FloatArray
    gate: IntArray
    group: IntArray
    flops: FloatArray
    opens: Pairs
    bytes_XR: FloatArray | None

    @staticmethod
    def of(
        kind: int,
        tasks: IntArray,
        *,
        compute: FloatArray | None = None,
        memory: FloatArray | None = None,
        floor: FloatArray | None = None,
        gate: IntArray | None = None,
        group: IntArray | None = None,
        flops: FloatArray | None = None,
        opens: Pairs | None = None,
        bytes_XR: FloatArray | None = None,
    ) -> RunsOfKind:
        """What is not said is nothing."""
        zero, none = np.zeros(len(tasks)), np.full(len(tasks), -1)
        nowhere = np.zeros(0, dtype=np.int64)
        return RunsOfKind(
            kind,
            tasks,
            zero if compute is None else compute,
            zero if memory is None else memory,
            zero if floor is None else floor,
            none if gate is None else gate,
            none if group is None else group,
            zero if flops is None else flops,
            (nowhere, nowhere) if opens is None else opens,
            bytes_XR,
        )

    def __len__(self) -> int:
        return len(self.tasks)


@dataclass(frozen=True)
class Launch:
    """Runs of several kinds, and ``order``: which comes when, of all of them one kind behind the other.

    ``name``: as kernels are called; ``combines``: whether it is of B, or behind it.
    """

    rank: int
    name: str
    kinds: tuple[RunsOfKind, ...]
    order: IntArray
    combines: bool

    @staticmethod
    def plain(rank: int, name: str, kind: RunsOfKind, combines: bool) -> Launch:
        return Launch(rank, name, (kind,), np.arange(len(kind)), combines)


def joined(first: Launch, second: Launch) -> Launch:
    """All tasks of the first, then all of the second, in one launch."""
    order = np.concatenate([first.order, len(first.order) + second.order])
    return Launch(first.rank, first.name, first.kinds + second.kinds, order, first.combines)


@dataclass(frozen=True)
class Queues:
    """What ``mega_events`` runs, and of each run, [X], its kind, group, flops of a task, number, rank and launch.

    ``number``: among those of its kind and launch. ``names``, ``combines_L``: of launches.
    """

    kind: IntArray
    group: IntArray
    flops: FloatArray
    number: IntArray
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
        start_R: FloatArray,
    ) -> Queues:
        """``gate_rank``: of each gate; ``gate_opens``: pairs of gates, the first of which counts the second down.

        ``start_R``: seconds at which each rank's first launch begins.
        """
        size_L = np.array([len(launch.order) for launch in all_launches])
        first_L = size_L.cumsum() - size_L
        kinds = [kind for launch in all_launches for kind in launch.kinds]
        # Of each place in the queues the run, one kind behind the other, and of each run its place.
        order = np.concatenate([first + launch.order for first, launch in zip(first_L, all_launches, strict=True)])
        place = np.empty_like(order)
        place[order] = np.arange(len(order))
        firsts = np.cumsum([0, *map(len, kinds)])[:-1]

        def placed(values: list[npt.NDArray[Number]]) -> npt.NDArray[Number]:
            return np.concatenate(values)[order]

        rank_L = np.array([launch.rank for launch in all_launches])
        rank_X, kind_X = np.repeat(rank_L, size_L), placed([np.full(len(kind), kind.kind) for kind in kinds])
        tasks = placed([kind.tasks for kind in kinds])
        links, link_bytes, latency = _links(rank_X, kind_X == FETCH, _peers(kinds, firsts, place), cluster)
        opener = np.concatenate([place[first + kind.opens[0]] for first, kind in zip(firsts, kinds, strict=True)])
        opened = np.concatenate([kind.opens[1] for kind in kinds])
        num_gates = len(gate_rank)
        pending = np.bincount(opened, weights=tasks[opener], minlength=num_gates)
        pending += np.bincount(gate_opens[1], minlength=num_gates)
        runs = Runs(
            tasks=tasks,
            compute=placed([kind.compute for kind in kinds]),
            memory=placed([kind.memory for kind in kinds]),
            latency=latency,
            floor=placed([kind.floor for kind in kinds]),
            gate=placed([kind.gate for kind in kinds]),
            opens=Table.of(opener, opened, len(tasks)),
            links=links,
            link_bytes=link_bytes,
        )
        gates = Gates(pending.astype(np.int64), gate_rank, Table.of(*gate_opens, num_gates))
        return Queues(
            kind=kind_X,
            group=placed([kind.group for kind in kinds]),
            flops=placed([kind.flops for kind in kinds]),
            number=placed([np.arange(len(kind)) for kind in kinds]),
            rank=rank_X,
            launch=np.repeat(np.arange(len(size_L)), size_L),
            names=tuple(launch.name for launch in all_launches),
            combines_L=np.array([launch.combines for launch in all_launches]),
            runs=runs,
            gates=gates,
            launches=Launches(rank_L, first_L, size_L, start_R[rank_L]),
        )


def _peers(kinds: Sequence[RunsOfKind], firsts: IntArray, place: IntArray) -> tuple[IntArray, IntArray, FloatArray]:
    """(run, peer, bytes of a task that they exchange)."""
    found = [(np.zeros(0, dtype=np.int64), np.zeros(0, dtype=np.int64), np.zeros(0))]
    for first, kind in zip(firsts, kinds, strict=True):
        if kind.bytes_XR is not None:
            run, peer = np.nonzero(kind.bytes_XR)
            found.append((place[first + run], peer, kind.bytes_XR[run, peer]))
    run, peer, amount = (np.concatenate(values) for values in zip(*found, strict=True))
    return run, peer, amount


def _links(
    rank_X: IntArray, pulls_X: BoolArray, peers: tuple[IntArray, IntArray, FloatArray], cluster: ClusterSpec
) -> tuple[Table, FloatArray, FloatArray]:
    """Which links each run moves bytes over, how many a task, and the latency behind them, [X]."""
    R, N, node_R = cluster.num_ranks, cluster.num_nodes, np.asarray(cluster.node_of_rank)
    run, peer, amount = peers
    own, pulls = rank_X[run], pulls_X[run]
    sender, receiver = np.where(pulls, peer, own), np.where(pulls, own, peer)
    intra = node_R[sender] == node_R[receiver]
    out = np.where(intra, sender, 2 * R + node_R[sender])
    into = np.where(intra, R + receiver, 2 * R + N + node_R[receiver])
    num_links = 2 * (R + N)
    key, inverse = np.unique(np.concatenate([run, run]) * num_links + np.concatenate([out, into]), return_inverse=True)
    total = np.bincount(inverse, weights=np.concatenate([amount, amount]), minlength=len(key)).astype(np.float64)
    latency = np.zeros(len(rank_X), dtype=np.float64)
    np.maximum.at(latency, run, np.where(intra, cluster.intra_node_us, cluster.inter_node_us) * 1e-6)
    return Table.of(key // num_links, key % num_links, len(rank_X)), total, latency
