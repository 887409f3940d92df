"""One pass of one layer under ``MegaKernel`` on simulated ranks: forward, or backward.

R ranks, L links as in ``cost.link_seconds``. All times in seconds.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from moesys.config import ClusterSpec, MegaKernel, ModelShape
from moesys.cost import FloatArray, gather_seconds
from moesys.layout import TokenPlan
from moesys.load import IntArray
from moesys.overlap.mega_blocks import queues_of_blocks
from moesys.overlap.mega_events import Times, run_all, seconds_a_byte
from moesys.overlap.mega_queues import FETCH, OUTER_PRODUCT, PRODUCT, PUSH, SUM, Queues
from moesys.overlap.mega_units import Coarseness
from moesys.overlap.mega_work import Work
from moesys.overlap.tile_tasks import BoolArray


@dataclass(frozen=True)
class Computed:
    """What multiprocessors did, of one kind: ``experts``, ``weight_gradients`` or ``sum``.

    Lasts as long on each rank as all its programs together need for it, so what is missing until the pass ends was
    waited. No two of a rank overlap.
    """

    kind: str
    start_R: FloatArray
    end_R: FloatArray


@dataclass(frozen=True)
class Moved:
    """Rows that travelled, ``dispatch`` or ``combine``: from the first that each rank pulled, or pushed, to its last.

    ``link_seconds_L`` [2·R + 2·N]: what the links were busy with, as ``cost.link_seconds`` has them.
    """

    kind: str
    start_R: FloatArray
    end_R: FloatArray
    link_seconds_L: FloatArray


@dataclass(frozen=True)
class MegaPass:
    """``end_R``: when each rank is through. ``waited_for_R``: the rank whose rows came home last, for each that waited
    for rows; its own number where its own work was last.
    """

    end_R: FloatArray
    computed: tuple[Computed, ...]
    moved: tuple[Moved, ...]
    waited_for_R: IntArray


def publish_seconds(model: ModelShape, cluster: ClusterSpec, plan: TokenPlan) -> FloatArray:
    """[R]: from when a rank enters until its first kernel needs the layer's experts. It copies its tokens to where
    others pull them, T·H elements read and written.
    """
    return gather_seconds(plan.load.tokens_RE.sum(axis=1) / model.top_k, model, cluster)


def mega_pass(
    overlap: MegaKernel,
    model: ModelShape,
    cluster: ClusterSpec,
    plan: TokenPlan,
    start_R: FloatArray,
    backward: bool,
    experts_R: FloatArray | None = None,
    coarse: Coarseness | None = None,
) -> MegaPass:
    """Each rank enters at ``start_R`` and has its experts at ``experts_R``, None: before it needs them. Until then it
    publishes (``publish_seconds``), and from then on its kernels run.
    """
    work = Work(overlap, model, cluster, backward)
    published_R = start_R + publish_seconds(model, cluster, plan)
    begin_R = published_R if experts_R is None else np.maximum(published_R, experts_R)
    gap_seconds, byte_seconds_L = cluster.launch_us * 1e-6, seconds_a_byte(cluster)
    coarse = Coarseness.of(work, plan, cluster) if coarse is None else coarse
    queues = queues_of_blocks(work, cluster, plan, published_R, begin_R + gap_seconds, coarse)
    times = run_all(
        queues.runs, queues.gates, queues.launches, byte_seconds_L, coarse.programs, gap_seconds, cluster.flag_us * 1e-6
    )
    return pass_of(queues, times, coarse.programs, byte_seconds_L, begin_R, plan)


def pass_of(
    queues: Queues, times: Times, programs: int, byte_seconds_L: FloatArray, begin_R: FloatArray, plan: TokenPlan
) -> MegaPass:
    """What ranks that began at ``begin_R`` did, of tiles or of blocks."""
    end_R = begin_R.copy()
    np.maximum.at(end_R, queues.launches.rank, times.end_L)
    pulls = queues.kind == FETCH
    moved = tuple(
        _moved(kind, queues, times, chosen, byte_seconds_L, begin_R)
        for kind, chosen in (("dispatch", pulls), ("combine", ~pulls))
    )
    return MegaPass(end_R, _computed(queues, times, programs), moved, _waited_for(queues, times, plan))


def _computed(queues: Queues, times: Times, programs: int) -> tuple[Computed, ...]:
    """What programs were busy with, as if all of a rank did it together: A's products as late as they can have been,
    then B's, weight gradients, and sums, each kind after the other as early as it can have been.
    """
    rank_L, second_L = queues.launches.rank, queues.combines_L
    R, second_X = int(rank_L.max()) + 1, second_L[queues.launch]
    seconds = queues.runs.tasks * queues.runs.compute / programs
    end_R, at_R = np.zeros(R), np.full(R, np.inf)
    np.maximum.at(end_R, rank_L[~second_L], times.end_L[~second_L])
    np.minimum.at(at_R, rank_L[second_L], times.begin_L[second_L])

    def busy_R(chosen: BoolArray) -> FloatArray:
        return np.bincount(queues.rank[chosen], weights=seconds[chosen], minlength=R).astype(np.float64)

    found = [Computed("experts", end_R - busy_R((queues.kind == PRODUCT) & ~second_X), end_R)]
    for kind, name in ((PRODUCT, "experts"), (OUTER_PRODUCT, "weight_gradients"), (SUM, "sum")):
        until_R = at_R + busy_R((queues.kind == kind) & second_X)
        found.append(Computed(name, at_R, until_R))
        at_R = until_R
    return tuple(found)


def _moved(
    kind: str, queues: Queues, times: Times, chosen: BoolArray, byte_seconds_L: FloatArray, begin_R: FloatArray
) -> Moved:
    """By the runs that are chosen and move something; a rank without any has nothing, at its beginning."""
    runs, links = queues.runs, queues.runs.links
    run_Y = np.repeat(np.arange(len(runs.tasks)), np.diff(links.first))
    amount = runs.link_bytes * runs.tasks[run_Y] * chosen[run_Y]
    seconds_L = np.bincount(links.value, weights=amount, minlength=len(byte_seconds_L)) * byte_seconds_L
    moving = np.flatnonzero(chosen & (np.diff(links.first) > 0) & (runs.tasks > 0))
    start_R, end_R = np.full(len(begin_R), np.inf), begin_R.copy()
    np.minimum.at(start_R, queues.rank[moving], times.ready[moving] + runs.compute[moving])
    np.maximum.at(end_R, queues.rank[moving], times.end[moving])
    return Moved(kind, np.where(np.isfinite(start_R), start_R, begin_R), end_R, seconds_L)


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
