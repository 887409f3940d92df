"""One pass of one layer under ``MegaKernel``, forward or backward, in closed form.

Kernel A pulls rows and multiplies them, kernel B multiplies, pushes results and sums what comes back. Inside a kernel,
links move rows while programs compute, so a kernel takes the longer of two sums: all of the transfer and the products
that cannot run beside it, or all products and the part of the transfer that nothing runs beside. What cannot overlap is
the first pulls (the row tiles of one sweep) and the products of the last ones, a wave of products before the first push
and after the last product, and what ``dispatch_share`` and ``combine_share`` put before or behind the other kind.
Sums wait until every rank that holds rows of this one has pushed. Kernels that are not fused follow one another.

A rank's matmul rate and memory rate are shared by its programs, or by its multiprocessors if there are more of these;
in a kernel that does more than a product, the matmul rate is multiplied by ``fused_rate``. A group's tiles take the
time of their flops, including those of rows and columns that they lack, or of the group's bytes. A product takes at
least the time of its flops in whole waves; bytes are not rounded up. Weight gradients follow the rank's own pushes, as
they do in the queue. Rows travel over the links of the rank and of its peers; each transfer takes as long as the
busiest of them.

As for ``Sequential``, the model leaves out tables of routing, routing weights and their gradients, and epilogues. R
ranks, E experts, L links as in ``cost.link_seconds``, H hidden, I expert width. All times in seconds.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from moesys.config import ClusterSpec, ModelShape
from moesys.config.overlap import MegaKernel
from moesys.cost import GRADIENT_BYTES, FloatArray, LinkLoad, gather_seconds, link_load, memory_seconds, product_rate
from moesys.layout import TokenPlan
from moesys.load import IntArray
from moesys.simulator.links import links_of_ranks

BoolArray = npt.NDArray[np.bool_]

# Row tiles that sweep all column tiles together.
RASTER = 8


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


@dataclass(frozen=True)
class TileSizes:
    """Rows and columns of a product's tile, and columns of each half of ``gate_up``'s."""

    rows: int
    columns: int
    halves: int

    @staticmethod
    def of(overlap: MegaKernel, model: ModelShape) -> TileSizes:
        """Returns the sizes that ``overlap`` declares, and for others those of the kernels on a GPU. Raises ValueError
        if a fetch has more rows than a tile.
        """
        usual = (64, 64) if model.dtype == "float32" else (128, 256)
        rows, columns = overlap.tile_rows or usual[0], overlap.tile_columns or usual[1]
        if rows % overlap.fetch_rows:
            raise ValueError(
                f"fetch_rows={overlap.fetch_rows} is more than the {rows} rows of a tile that kernels choose for "
                f"dtype={model.dtype!r}; use at most {rows}, or declare tile_rows"
            )
        return TileSizes(rows, columns, max(16, columns // 2))


def publish_seconds(
    overlap: MegaKernel, model: ModelShape, cluster: ClusterSpec, plan: TokenPlan, backward: bool
) -> FloatArray:
    """Returns the seconds [R] from when a rank enters until its first kernel needs the layer's experts. It copies its
    tokens to the memory from which others pull them, and so reads and writes T·H elements of each tensor.
    """
    return gather_seconds(
        overlap.tensors_pulled(backward) * plan.load.tokens_RE.sum(axis=1) / model.top_k, model, cluster
    )


def mega_pass(
    overlap: MegaKernel,
    model: ModelShape,
    cluster: ClusterSpec,
    plan: TokenPlan,
    backward: bool,
    start_R: FloatArray,
    experts_R: FloatArray | None = None,
) -> MegaPass:
    """Returns the pass of ranks that enter at ``start_R`` and publish their tokens. Their kernels run from
    ``experts_R`` on, when their experts are there; None: they are there before.
    """
    pulls, pushes = overlap.fused in ("both", "dispatch"), overlap.fused in ("both", "combine")
    work, R = _Work(overlap, model, cluster, plan, backward), cluster.num_ranks
    gap, flag, tensors = cluster.launch_us * 1e-6, cluster.flag_us * 1e-6, overlap.tensors_pulled(backward)
    source, _, holder, tokens = plan.entries.T
    rows_RR = np.bincount(source * R + holder, weights=tokens, minlength=R * R).reshape(R, R).astype(np.float64)
    pulled_RR, pushed_RR = _to_others(rows_RR, model, overlap.deduplicate), _to_others(rows_RR, model)
    dispatch = link_load(pulled_RR * (tensors * model.row_bytes), cluster)
    combine = link_load(pushed_RR.T * model.row_bytes, cluster)
    needs_RR, latency_R = (rows_RR > 0) | np.eye(R, dtype=bool), _latency(rows_RR, cluster)

    # Kernel A: rows are pulled from ranks that have published, and products of the last sweep follow the last of them.
    published_R = start_R + publish_seconds(overlap, model, cluster, plan, backward)
    begin_R = published_R if experts_R is None else np.maximum(published_R, experts_R)
    launched_R = np.maximum(begin_R + gap, _last(published_R + flag, needs_RR)[0])
    first = work.first_product(pulls)
    fetches_R = work.row_tiles_R * (work.sizes.rows // overlap.fetch_rows)
    busy_R = tensors * work.moving(pulled_RR.sum(axis=0)) + latency_R * fetches_R / work.programs
    pull_R = np.maximum(_busiest(dispatch, needs_RR, cluster, 0) + latency_R, busy_R)
    share, alone_R = overlap.dispatch_share, work.first_rows(overlap)
    # The part of the products that may run before all rows are there. The pulls of a sweep hold programs until their
    # rows are through the link: on average half of them at a time, and all programs while there are more pulls.
    beside_R = np.minimum(1.0, fetches_R * (1 - share) / np.maximum(share * first.tiles_R, 1e-9)) * pulls
    burst_R = np.maximum(alone_R * fetches_R, 1) / work.programs
    held_R = np.where(burst_R < 1, burst_R / 2, 1 - 1 / (2 * np.maximum(burst_R, 1)))
    fill_R = np.minimum(beside_R * (busy_R + held_R * pull_R), pull_R)
    behind_R = np.maximum(alone_R, 1 - beside_R) * first.in_waves_R
    fetched_R = launched_R + np.maximum(pull_R, first.in_waves_R + fill_R - behind_R)
    first_end_R = fetched_R + behind_R + gap * (not pulls)

    # Kernel B: tiles push their own rows, or tasks of their own do.
    second = work.second_product(pushes)
    apart, alone_R = overlap.combine_share > 0 or not pushes, work.programs / np.maximum(second.tiles_R, work.programs)
    pushed_by_R = work.row_tiles_R if apart else second.tiles_R
    busy_R = work.moving(pushed_RR.sum(axis=0)) * apart + latency_R * pushed_by_R / work.programs
    push_R = np.maximum(_busiest(combine, needs_RR, cluster, 1) + latency_R, busy_R)
    share = overlap.combine_share * pushes if apart else 0.5
    # The part of the pushes that may run beside products.
    beside_R = np.minimum(1.0, second.tiles_R * (share / (1 - share)) / np.maximum(pushed_by_R, 1))
    fill_R = alone_R * second.in_waves_R
    behind_R = np.minimum(beside_R * busy_R + np.maximum(alone_R, 1 - beside_R) * push_R, push_R)
    second_at_R = first_end_R + gap
    pushed_R = second_at_R + np.maximum(second.in_waves_R + behind_R, fill_R + push_R) + gap * (not pushes)

    # Sums follow weight gradients that are tasks of kernel B, and come before those in kernels of their own.
    gradients = work.weight_gradients(overlap.overlap_weight_gradients) if backward else TileTimes(*np.zeros((3, R)))
    own_R = gradients_at_R = pushed_R + gap * (not pushes)
    arrived_R, last_R = _last(pushed_R + flag, needs_RR.T)
    if overlap.overlap_weight_gradients:
        own_R = own_R + gradients.in_waves_R
    ready_R = np.maximum(own_R, arrived_R)
    end_R = summed_R = ready_R + work.sum_seconds(plan.load.tokens_RE.sum(axis=1))
    spans = [("experts", first_end_R - first.seconds_R, first.seconds_R), ("experts", second_at_R, second.seconds_R)]
    spans += [("sum", ready_R, summed_R - ready_R)]
    if backward:
        if not overlap.overlap_weight_gradients:
            end_R = summed_R + 2 * gap + gradients.in_waves_R
            gradients_at_R = end_R - gradients.seconds_R
        spans.insert(
            2 if overlap.overlap_weight_gradients else 3, ("weight_gradients", gradients_at_R, gradients.seconds_R)
        )
    combine_at_R = second_at_R + (fill_R if pushes else second.in_waves_R + gap)
    moved = (
        RowTransfer("dispatch", launched_R, fetched_R, dispatch.seconds_L),
        RowTransfer("combine", np.minimum(combine_at_R, pushed_R), pushed_R, combine.seconds_L),
    )
    computed = tuple(ComputeSpan(kind, at_R, at_R + seconds_R) for kind, at_R, seconds_R in spans)
    return MegaPass(end_R, computed, moved, np.where(arrived_R > own_R, last_R, np.arange(R)))


def _to_others(rows_RR: FloatArray, model: ModelShape, distinct: bool = False) -> FloatArray:
    """Returns the rows that travel from each rank to each other; ``distinct``: a token once, as is expected of tokens
    that choose experts independently.
    """
    if distinct:
        choices_R1 = np.maximum(rows_RR.sum(axis=1, keepdims=True), 1)
        rows_RR = choices_R1 / model.top_k * (1 - (1 - rows_RR / choices_R1) ** model.top_k)
    return rows_RR * ~np.eye(len(rows_RR), dtype=bool)


def _latency(rows_RR: FloatArray, cluster: ClusterSpec) -> FloatArray:
    """Returns the mean latency of the messages of each rank that computes rows, [R]."""
    domain_R = np.asarray(cluster.domain_of_rank)
    latency_RR = np.where(domain_R[:, None] == domain_R, cluster.intra_node_us, cluster.inter_node_us) * 1e-6
    return (rows_RR * latency_RR * ~np.eye(len(rows_RR), dtype=bool)).sum(axis=0) / np.maximum(rows_RR.sum(axis=0), 1)


def _busiest(load: LinkLoad, needs_RR: BoolArray, cluster: ClusterSpec, side: int) -> FloatArray:
    """Returns the seconds of the busiest link over which each rank that computes rows moves them: its own, and those of
    its peers. ``side``: of these ranks' peers 0 for the links out, 1 for those in.
    """
    seconds_4R = np.where(load.used_4R, load.seconds_L[links_of_ranks(cluster)], 0.0)
    own_R, peers_R = (seconds_4R[of::2].max(axis=0) for of in (1 - side, side))
    return np.maximum(own_R, _last(peers_R, needs_RR)[0].clip(0.0))


def _last(at_R: FloatArray, needs_RR: BoolArray) -> tuple[FloatArray, IntArray]:
    """Returns for each column the largest ``at_R`` of the rows that it needs, -inf for none, and the first such row."""
    at_RR = np.where(needs_RR, at_R[:, None], -np.inf)
    return at_RR.max(axis=0), at_RR.argmax(axis=0)


class TileTimes(NamedTuple):
    """The tiles of a product: how many a rank has, in which seconds all its programs compute them, and the same if the
    flops of the last wave take as long as those of a whole one.
    """

    tiles_R: FloatArray
    seconds_R: FloatArray
    in_waves_R: FloatArray


class _Work:
    """The tasks of one direction on each rank. Seconds are those of all programs of a rank together."""

    def __init__(
        self, overlap: MegaKernel, model: ModelShape, cluster: ClusterSpec, plan: TokenPlan, backward: bool
    ) -> None:
        self.model, self.backward, self.fused_rate = model, backward, cluster.fused_rate
        self.sizes, self.programs = TileSizes.of(overlap, model), overlap.programs or cluster.multiprocessors
        self.rows_RE = plan.computed_RE.astype(np.float64)
        self.held_RE = (plan.layout.replicas_RE > 0).astype(np.float64)
        self.row_tiles_RE = np.ceil(self.rows_RE / self.sizes.rows)
        self.row_tiles_R = self.row_tiles_RE.sum(axis=1)
        # Programs that are fewer than multiprocessors have their share of the rank's rates.
        slower = max(self.programs, cluster.multiprocessors) / self.programs
        self.flop_seconds = slower / product_rate(cluster, backward)
        self.byte_seconds = slower * memory_seconds(1.0, cluster)

    def first_product(self, fused: bool) -> TileTimes:
        """Returns A's product: ``gate_up`` with the activation, or ``down`` with the activation's gradient."""
        H, I = self.model.hidden_size, self.model.intermediate_size
        if self.backward:
            return self._by_rows(H, I, self.sizes.columns, 1, H + 5 * I, fused)
        return self._by_rows(H, I, self.sizes.halves, 2, H + 3 * I, fused)

    def second_product(self, fused: bool) -> TileTimes:
        """Returns B's product: ``down``, or ``gate_up`` transposed."""
        H, L = self.model.hidden_size, self.model.intermediate_size * (2 if self.backward else 1)
        return self._by_rows(L, H, self.sizes.columns, 1, H + L, fused)

    def weight_gradients(self, fused: bool) -> TileTimes:
        """Returns the products of the gradients of ``gate_up`` and of ``down``."""
        H, I, found = self.model.hidden_size, self.model.intermediate_size, []
        for left, right in ((2 * I, H), (H, I)):
            tiles = -(-left // self.sizes.rows) * -(-right // self.sizes.columns)
            flops_RE = self.rows_RE * (2.0 * tiles * self.sizes.rows * self.sizes.columns)
            bytes_RE = self.rows_RE * ((left + right) * self.model.bytes_per_element)
            bytes_RE = bytes_RE + self.held_RE * (left * right * GRADIENT_BYTES)
            found.append(self._tiles(self.held_RE * tiles, flops_RE, bytes_RE, fused))
        return TileTimes(*np.sum(found, axis=0))

    def moving(self, others_R: FloatArray) -> FloatArray:
        """Returns the seconds of memory in which rows are fetched, or pushed: those of others are written, or read, and
        all that stay are both.
        """
        rows_R = self.rows_RE.sum(axis=1)
        return (2 * rows_R - others_R) * (self.model.row_bytes * self.byte_seconds)

    def sum_seconds(self, choices_R: IntArray) -> FloatArray:
        """Returns the seconds in which K rows of each token are read, and one is written."""
        return choices_R * np.float64((1 + 1 / self.model.top_k) * self.model.row_bytes * self.byte_seconds)

    def first_rows(self, overlap: MegaKernel) -> FloatArray:
        """Returns the part of a rank's rows that are there before the first product: a sweep, or an expert's."""
        tiles_R = np.maximum(self.row_tiles_R, 1)
        if overlap.granularity == "tile":
            return np.minimum(RASTER / tiles_R, 1)
        largest_R = self.row_tiles_RE.max(axis=1)
        if overlap.tile_order == "slots":
            largest_R = tiles_R / np.maximum((self.row_tiles_RE > 0).sum(axis=1), 1)
        return np.minimum(np.maximum(largest_R, RASTER) / tiles_R, 1)

    def _by_rows(self, depth: int, width: int, columns: int, halves: int, row_elements: int, fused: bool) -> TileTimes:
        tiles_RE = self.row_tiles_RE * -(-width // columns)
        flops_RE = tiles_RE * (2.0 * self.sizes.rows * columns * halves * depth)
        elements_RE = self.held_RE * (halves * width * depth) + self.rows_RE * row_elements
        return self._tiles(tiles_RE, flops_RE, elements_RE * (tiles_RE > 0) * self.model.bytes_per_element, fused)

    def _tiles(self, tiles_RE: FloatArray, flops_RE: FloatArray, bytes_RE: FloatArray, fused: bool) -> TileTimes:
        flop_seconds_RE = flops_RE * (self.flop_seconds / (self.fused_rate if fused else 1.0))
        tiles_R = tiles_RE.sum(axis=1)
        seconds_R = np.maximum(flop_seconds_RE, bytes_RE * self.byte_seconds).sum(axis=1)
        waves_R = np.ceil(tiles_R / self.programs) * self.programs / np.maximum(tiles_R, 1)
        return TileTimes(tiles_R, seconds_R, np.maximum(seconds_R, flop_seconds_RE.sum(axis=1) * waves_R))
