"""One pass of one layer under ``MegaKernel`` on simulated ranks: forward, or backward.

R ranks, L links as in ``cost.link_seconds``. All times in seconds.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass

import numpy as np

from moesys.config import ClusterSpec, ModelShape
from moesys.config.overlap import MegaKernel
from moesys.cost import FloatArray, gather_seconds
from moesys.layout import TokenPlan
from moesys.load import IntArray
from moesys.simulator.mega.blocks import queues_of_blocks
from moesys.simulator.mega.events import Times, run_all
from moesys.simulator.mega.queues import FETCH, OUTER_PRODUCT, PRODUCT, PUSH, SUM, Machine, Queues, Runs
from moesys.simulator.mega.tiles import BoolArray, TaskSeconds
from moesys.simulator.mega.units import Coarseness


@dataclass(frozen=True)
class ComputeSpan:
    """Computing of one kind: ``experts``, ``weight_gradients`` or ``sum``.

    It lasts as long on each rank as all its programs together need for it; a rank waits for the rest of the pass. Spans
    of a rank do not overlap.
    """

    kind: str
    start_R: FloatArray
    end_R: FloatArray


@dataclass(frozen=True)
class RowTransfer:
    """Rows that travel, ``dispatch`` or ``combine``: from the first that each rank pulls, or pushes, to its last.

    link_seconds_L: the seconds in which each link is busy with them, [2·R + 2·N], as in ``cost.link_seconds``.
    """

    kind: str
    start_R: FloatArray
    end_R: FloatArray
    link_seconds_L: FloatArray


@dataclass(frozen=True)
class MegaPass:
    """A pass that has run. ``end_R``: when each rank ended. ``waited_for_R``: for each rank that waited for rows, the
    rank whose results arrived last; its own number if its own work was last.
    """

    end_R: FloatArray
    computed: tuple[ComputeSpan, ...]
    moved: tuple[RowTransfer, ...]
    waited_for_R: IntArray


def publish_seconds(
    overlap: MegaKernel, model: ModelShape, cluster: ClusterSpec, plan: TokenPlan, backward: bool
) -> FloatArray:
    """Returns the seconds [R] from when a rank enters until its first kernel needs the layer's experts. It copies its
    tokens to the memory from which others pull them, and so reads and writes T·H elements of each tensor.
    """
    return gather_seconds(
        overlap.tensors_pulled(backward) * plan.load.tokens_RE.sum(axis=1) / model.top_k, model, cluster
    )


@dataclass(frozen=True)
class QueuedPass:
    """A pass whose queues are made before any rank enters it.

    runs: those of ``queues``, without links that are not shared. link_seconds: see ``link_seconds_of``.
    """

    machine: Machine
    plan: TokenPlan
    queues: Queues
    runs: Runs
    link_seconds: tuple[FloatArray, FloatArray]
    publish_seconds_R: FloatArray

    @staticmethod
    def of(
        overlap: MegaKernel,
        model: ModelShape,
        cluster: ClusterSpec,
        plan: TokenPlan,
        backward: bool,
        coarse: Coarseness | None = None,
    ) -> QueuedPass:
        work = TaskSeconds(overlap, model, cluster, backward)
        coarse = Coarseness.of(work, plan, cluster) if coarse is None else coarse
        queues, machine = queues_of_blocks(work, cluster, plan, coarse), Machine.of(cluster, coarse.programs)
        byte_seconds_L = machine.byte_seconds_L
        link_seconds = link_seconds_of(queues, byte_seconds_L)
        publish_seconds_R = publish_seconds(overlap, model, cluster, plan, backward)
        runs = queues.runs
        if coarse.quiet > 0:
            runs = runs.without_quiet_links(byte_seconds_L, link_seconds[0] + link_seconds[1], coarse.quiet)
        return QueuedPass(machine, plan, queues, runs, link_seconds, publish_seconds_R)

    def run(self, start_R: FloatArray, experts_R: FloatArray | None = None) -> MegaPass:
        """Runs the pass. Each rank enters at ``start_R`` and publishes its tokens. Its kernels run from ``experts_R``
        on, when its experts are there; None: they are there before.
        """
        published_R = start_R + self.publish_seconds_R
        begin_R = published_R if experts_R is None else np.maximum(published_R, experts_R)
        queues, machine = self.queues, self.machine
        launched_R = begin_R + machine.gap_seconds
        times = run_all(self.runs, queues.gates, queues.launches, machine, published_R, launched_R)
        return pass_of(queues, times, machine.programs, self.link_seconds, begin_R, self.plan)


def queued_ahead(
    overlap: MegaKernel, model: ModelShape, cluster: ClusterSpec, passes: Iterable[tuple[TokenPlan, bool]]
) -> Iterator[QueuedPass]:
    """Yields passes, given by a plan and whether it is backward. Each is queued while the one before it runs."""
    with ThreadPoolExecutor(max_workers=1) as pool:
        before: Future[QueuedPass] | None = None
        for plan, backward in passes:
            following = pool.submit(QueuedPass.of, overlap, model, cluster, plan, backward)
            if before is not None:
                yield before.result()
            before = following
        if before is not None:
            yield before.result()


def link_seconds_of(queues: Queues, byte_seconds_L: FloatArray) -> tuple[FloatArray, FloatArray]:
    """Returns ``RowTransfer.link_seconds_L`` of ``dispatch`` and of ``combine``."""
    runs, links = queues.runs, queues.runs.links
    run_Y = np.repeat(np.arange(len(runs.tasks)), np.diff(links.first))
    seconds_Y = runs.link_bytes * runs.tasks[run_Y] * byte_seconds_L[links.value]
    pulled_Y = (queues.kind == FETCH)[run_Y]
    pulled_L, pushed_L = (
        np.bincount(links.value[of], weights=seconds_Y[of], minlength=len(byte_seconds_L)).astype(np.float64)
        for of in (pulled_Y, ~pulled_Y)
    )
    return pulled_L, pushed_L


def pass_of(
    queues: Queues,
    times: Times,
    programs: int,
    link_seconds: tuple[FloatArray, FloatArray],
    begin_R: FloatArray,
    plan: TokenPlan,
) -> MegaPass:
    """Returns the pass of ranks that began at ``begin_R``, from the times of tiles or of blocks."""
    end_R = begin_R.copy()
    np.maximum.at(end_R, queues.launches.rank, times.end_L)
    pulls = queues.kind == FETCH
    moved = tuple(
        _moved(kind, queues, times, chosen, seconds_L, begin_R)
        for kind, chosen, seconds_L in zip(("dispatch", "combine"), (pulls, ~pulls), link_seconds, strict=True)
    )
    return MegaPass(end_R, _computed(queues, times, programs), moved, _waited_for(queues, times, plan))


def _computed(queues: Queues, times: Times, programs: int) -> tuple[ComputeSpan, ...]:
    """Returns the computing of each rank as if all its programs did the same: A's products as late as possible, then
    B's products, weight gradients and sums, one kind after the other as early as possible.
    """
    rank_L, second_L = queues.launches.rank, queues.combines_L
    R, second_X = int(rank_L.max()) + 1, second_L[queues.launch]
    seconds = queues.runs.tasks * queues.runs.compute / programs
    end_R, at_R = np.zeros(R), np.full(R, np.inf)
    np.maximum.at(end_R, rank_L[~second_L], times.end_L[~second_L])
    np.minimum.at(at_R, rank_L[second_L], times.begin_L[second_L])

    def busy_R(chosen: BoolArray) -> FloatArray:
        return np.bincount(queues.rank[chosen], weights=seconds[chosen], minlength=R).astype(np.float64)

    found = [ComputeSpan("experts", end_R - busy_R((queues.kind == PRODUCT) & ~second_X), end_R)]
    for kind, name in ((PRODUCT, "experts"), (OUTER_PRODUCT, "weight_gradients"), (SUM, "sum")):
        until_R = at_R + busy_R((queues.kind == kind) & second_X)
        found.append(ComputeSpan(name, at_R, until_R))
        at_R = until_R
    return tuple(found)


def _moved(
    kind: str, queues: Queues, times: Times, chosen: BoolArray, seconds_L: FloatArray, begin_R: FloatArray
) -> RowTransfer:
    """Returns the transfer of the chosen runs that move rows. A rank without any has an empty one at its begin."""
    runs = queues.runs
    moving = np.flatnonzero(chosen & (np.diff(runs.links.first) > 0) & (runs.tasks > 0))
    start_R, end_R = np.full(len(begin_R), np.inf), begin_R.copy()
    np.minimum.at(start_R, queues.rank[moving], times.ready[moving] + runs.compute[moving])
    np.maximum.at(end_R, queues.rank[moving], times.end[moving])
    return RowTransfer(kind, np.where(np.isfinite(start_R), start_R, begin_R), end_R, seconds_L)


def _waited_for(queues: Queues, times: Times, plan: TokenPlan) -> IntArray:
    R = plan.load.num_ranks
    pushed_R, waited_R, last_R = np.zeros(R), np.zeros(R), np.zeros(R)
    pushes = (
        queues.combines_L[queues.launch] & ((queues.kind == PRODUCT) | (queues.kind == PUSH)) & (queues.runs.tasks > 0)
    )
    np.maximum.at(pushed_R, queues.rank[pushes], times.end[pushes])
    sums = queues.kind == SUM
    np.add.at(waited_R, queues.rank[sums], times.waited[sums])
    source, _, destination, _ = plan.entries.T
    np.maximum.at(last_R, source, pushed_R[destination])
    found_R = np.arange(R)
    last = (pushed_R[destination] == last_R[source]) & (waited_R[source] > 0)
    found_R[source[last]] = destination[last]
    return found_R
