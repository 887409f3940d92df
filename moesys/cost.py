"""Seconds for flops and bytes: pure functions of shapes, plans and a ``ClusterSpec``.

Traffic is a matrix ``bytes_RR`` [source, destination], float64, its diagonal zero: what a rank keeps is free. Links are
each rank's way out and in inside its domain, and each node's way out and in of its ranks' domains: NICs belong to
nodes, whatever the fastest links join. All work at once, at full rate in both directions. Products of an expert's rows
run in tiles, and tiles in waves: one wave is a tile on each multiprocessor. With the defaults of a ``ClusterSpec``
tiles are of one element, waves of one tile, and memory costs no time: then all that counts is flops.

R ranks, N nodes, E experts, H hidden, I expert width, P_e = 3·H·I parameters of an expert, b bytes of an element,
s = ceil(P_e / R) the wire slice of an expert that is sharded over all ranks.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal, TypeVar, assert_never

import numpy as np
import numpy.typing as npt

from moesys.config import ClusterSpec, Ep, Fsep, ModelShape, Sharding
from moesys.layout import ExpertLayout, TokenPlan, lender_of_experts, owner_of_experts
from moesys.load import IntArray

FloatArray = npt.NDArray[np.float64]
Rows = TypeVar("Rows", float, FloatArray)

# Expert gradients travel in float32, whatever experts compute in.
GRADIENT_BYTES = 4


def product_rate(cluster: ClusterSpec, backward: bool) -> float:
    """Returns the flops per second of a rank's products with weights, or of the products of their gradients."""
    declared = cluster.backward_tflops if backward else None
    return (declared or cluster.expert_tflops) * 1e12


def attention_rate(cluster: ClusterSpec, backward: bool) -> float:
    """Returns the flops per second of a rank's attention scores, or of their gradients."""
    declared = cluster.attention_backward_tflops if backward else None
    return (declared or cluster.attention_tflops or cluster.expert_tflops) * 1e12


def expert_seconds(rows: Rows, model: ModelShape, cluster: ClusterSpec, backward: bool) -> Rows:
    """Returns the seconds of a rank's expert GEMMs on ``rows`` (a number or an array): 6·rows·H·I flops at its matmul
    rate, which is two flops per parameter and row.

    Backward has twice as many, half of them for the gradient of the input, half for that of the weights. Activations
    and the weighted sum of combine are left out.
    """
    flops = 6 * model.hidden_size * model.intermediate_size * (2 if backward else 1)
    return rows * (flops / product_rate(cluster, backward))


def row_product_seconds(model: ModelShape, cluster: ClusterSpec) -> float:
    """Returns the seconds of the GEMMs of one row, forward and backward."""
    return sum(expert_seconds(1.0, model, cluster, backward) for backward in (False, True))


ExpertPass = Literal["forward", "pre_activations", "input_gradients", "weight_gradients"]


def pass_seconds(rows_RE: FloatArray, model: ModelShape, cluster: ClusterSpec, of: ExpertPass) -> FloatArray:
    """Returns the seconds [R] of each rank's two grouped products of a pass, as the kernels compute them.

    Rows read, written: x, then h before and a after the activation [forward, up: H to 2I]; a, y [down: I to H]. The
    gradients of inputs: dy and h, then dh and the weighted a [H to I]; dh, dx [2I to H]. Of weights, float32: dy, a;
    x, dh. By default these three together are ``expert_seconds`` forward and backward. Pre-activations: the first
    product of forward.
    """
    H, I, b = model.hidden_size, model.intermediate_size, model.bytes_per_element
    match of:
        case "pre_activations":
            return product_seconds(rows_RE, 2 * I, H, (H + 3 * I) * b, 2 * H * I * b, cluster)
        case "forward":
            up = pass_seconds(rows_RE, model, cluster, "pre_activations")
            return up + product_seconds(rows_RE, H, I, (H + I) * b, H * I * b, cluster)
        case "input_gradients":
            activation = product_seconds(rows_RE, I, H, (H + 5 * I) * b, H * I * b, cluster, backward=True)
            row_bytes, expert_bytes = (H + 2 * I) * b, 2 * H * I * b
            return activation + product_seconds(rows_RE, H, 2 * I, row_bytes, expert_bytes, cluster, backward=True)
        case "weight_gradients":
            down = weight_gradient_seconds(rows_RE, H, I, b, cluster)
            return down + weight_gradient_seconds(rows_RE, 2 * I, H, b, cluster)
        case _:
            assert_never(of)


def product_seconds(
    rows_RE: FloatArray,
    columns: int,
    depth: int,
    row_bytes: int,
    expert_bytes: int,
    cluster: ClusterSpec,
    backward: bool = False,
) -> FloatArray:
    """Returns the seconds [R] of one grouped product of each expert's rows [rows, depth] and weights [depth, columns].

    An expert's rows are rounded up to whole tiles, a rank's tiles to whole waves. ``row_bytes``: read and written for a
    row, ``expert_bytes`` for an expert that has rows; tiles find the rest in the cache.
    """
    tiles_R = _whole(rows_RE, cluster.tile_rows).sum(axis=-1) * -(-columns // cluster.tile_columns)
    waves_R = _whole(tiles_R, cluster.multiprocessors)
    num_bytes_R = rows_RE.sum(axis=-1) * row_bytes + (rows_RE > 0).sum(axis=-1) * float(expert_bytes)
    busy_R = np.maximum(waves_R * tile_seconds(depth, cluster, backward), memory_seconds(num_bytes_R, cluster))
    return busy_R + cluster.launch_us * 1e-6


def weight_gradient_seconds(
    rows_RE: FloatArray, rows_out: int, columns: int, element_bytes: int, cluster: ClusterSpec
) -> FloatArray:
    """Returns the seconds [R] of one grouped product of gradients, [rows_out, columns] for each expert, over all rows.

    A tile of an expert takes as long as the expert has rows, so tiles differ: the last wave is as long as the mean of
    all, and no wave is shorter than the longest tile.
    """
    tiles = -(-rows_out // cluster.tile_rows) * -(-columns // cluster.tile_columns)
    num_R = (rows_RE > 0).sum(axis=-1) * float(tiles)
    mean_R = rows_RE.sum(axis=-1) * tiles / np.maximum(num_R, 1)
    depth_R = np.maximum(_whole(num_R, cluster.multiprocessors) * mean_R, rows_RE.max(axis=-1))
    num_bytes_R = rows_RE.sum(axis=-1) * ((rows_out + columns) * element_bytes)
    num_bytes_R = num_bytes_R + num_R / tiles * (rows_out * columns * GRADIENT_BYTES)
    busy_R = np.maximum(depth_R * tile_seconds(1, cluster, backward=True), memory_seconds(num_bytes_R, cluster))
    return busy_R + cluster.launch_us * 1e-6


def tile_seconds(depth: int, cluster: ClusterSpec, backward: bool) -> float:
    """Returns the seconds of one tile of a product over ``depth`` on one multiprocessor."""
    flops = 2 * cluster.tile_rows * cluster.tile_columns * depth
    return flops * cluster.multiprocessors / product_rate(cluster, backward)


def _whole(count: FloatArray, unit: int) -> FloatArray:
    """Returns how many units hold ``count``; units of one element are not rounded, as a chunk may have a mean
    of rows.
    """
    return count if unit == 1 else np.ceil(count / unit)


def gather_seconds(rows_R: Rows, model: ModelShape, cluster: ClusterSpec) -> Rows:
    """Returns the seconds in which a rank permutes rows: each is read once and written once."""
    return memory_seconds(rows_R * (2 * model.row_bytes), cluster) + cluster.launch_us * 1e-6


def sum_seconds(choices_R: Rows, model: ModelShape, cluster: ClusterSpec) -> Rows:
    """Returns the seconds of combine's weighted sum: K rows of each token are read, and one is written. ``choices_R``:
    K per token.
    """
    row_bytes = model.row_bytes * (1 + 1 / model.top_k)
    return memory_seconds(choices_R * row_bytes, cluster) + cluster.launch_us * 1e-6


def memory_seconds(num_bytes: Rows, cluster: ClusterSpec) -> Rows:
    """Returns the seconds in which a rank reads and writes ``num_bytes`` of its memory; 0 if its speed is not
    declared.
    """
    return _moved_seconds(num_bytes, cluster.memory_gb_per_s)


def elementwise_seconds(num_bytes: float, cluster: ClusterSpec, backward: bool) -> float:
    """Returns the seconds of elementwise operations that read and write ``num_bytes``, if each of them is one
    kernel.
    """
    declared = cluster.elementwise_backward_gb_per_s if backward else None
    return _moved_seconds(num_bytes, declared or cluster.elementwise_gb_per_s or cluster.memory_gb_per_s)


def optimizer_seconds(num_bytes: float, cluster: ClusterSpec) -> float:
    """Returns the seconds in which an optimizer reads and writes ``num_bytes``."""
    return _moved_seconds(num_bytes, cluster.optimizer_gb_per_s or cluster.memory_gb_per_s)


def _moved_seconds(num_bytes: Rows, gb_per_s: float | None) -> Rows:
    return num_bytes * (0.0 if gb_per_s is None else 1 / (gb_per_s * 1e9))


# --- traffic ------------------------------------------------------------------------------------------------


def dispatch_bytes(plan: TokenPlan, model: ModelShape) -> FloatArray:
    """Returns ``bytes_RR`` of the token all-to-all: b·H per (token, expert) pair, not de-duplicated.

    Combine, and dispatch of the output's gradient, send as much: the matrix of combine is the transposed one.
    """
    R = plan.load.num_ranks
    source, _, destination, tokens = plan.entries.T
    num_bytes = np.bincount(source * R + destination, weights=tokens * model.row_bytes, minlength=R * R)
    return _between_ranks(num_bytes.astype(np.float64).reshape(R, R))


def restores_per_step(sharding: Sharding) -> int:
    """Returns how often a layer restores its experts in a micro-batch: twice if it releases them after forward."""
    return 2 if sharding.reshard_after_forward else 1


def restore_bytes(
    layout: ExpertLayout,
    model: ModelShape,
    cluster: ClusterSpec,
    sharding: Sharding,
    every_slot: bool = False,
    here: ExpertLayout | None = None,
) -> tuple[FloatArray, ...]:
    """Returns ``bytes_RR`` of each all-to-all, one after another, that gives every rank the experts of ``layout``,
    except for those of ``here``, which it has; an empty tuple if nothing is missing.

    An expert that a rank holds twice is sent once, unless ``every_slot`` of ``Fsep`` has its own messages. Wire slices
    are padded to s, and padding is counted.

    - ``Fsep``, flat: one, in which a rank receives b·s·(experts held) from every other rank (LAER-MoE, section 4).
    - ``Fsep``, hierarchical: two. A node of g ranks receives b·s·(R - g)·(distinct experts in the node) from outside;
      then its ranks, each of which has carried a share of that, spread it inside.
    - ``Ep``: an expert travels whole, b·P_e, from its owner to each other rank that holds it. None if nobody borrows.
      Hierarchical: from its owner to one such rank in each other node, and then from there to the others of that node.
    """
    held_RE = _sent(layout, every_slot)
    if here is not None:
        held_RE = held_RE - _sent(here, every_slot)
    match sharding:
        case Fsep():
            slice_bytes = float(model.bytes_per_element * -(-model.expert_parameters // cluster.num_ranks))
            if cluster.num_ranks == 1 or not held_RE.any():
                return ()
            if sharding.restore == "flat":
                return (_flat(held_RE.sum(axis=1), slice_bytes),)
            return _hierarchical(held_RE, np.asarray(cluster.node_of_rank), slice_bytes)
        case Ep():
            return _lent(held_RE, cluster, sharding, float(model.bytes_per_element * model.expert_parameters))
        case _:
            assert_never(sharding)


def reshard_bytes(
    layout: ExpertLayout,
    model: ModelShape,
    cluster: ClusterSpec,
    sharding: Sharding,
    gradient_bytes: int = GRADIENT_BYTES,
    every_slot: bool = False,
) -> tuple[FloatArray, ...]:
    """Returns ``bytes_RR`` of each all-to-all, one after another, that reduces a layer's expert gradients: a restore
    backwards, flat or hierarchical as ``reshard`` of ``Fsep`` and ``lend`` of ``Ep`` say.

    The tuple is empty if every gradient is on its owner already. Optimizer state never moves. ``gradient_bytes``: of
    one element, which the layers send in float32.
    """
    held_RE = _sent(layout, every_slot)
    match sharding:
        case Fsep():
            if cluster.num_ranks == 1:
                return ()
            slice_bytes = float(gradient_bytes * -(-model.expert_parameters // cluster.num_ranks))
            if sharding.reshard == "flat":
                return (_flat(held_RE.sum(axis=1), slice_bytes).T,)
            between_RR, inside_RR = _hierarchical(held_RE, np.asarray(cluster.node_of_rank), slice_bytes)
            return inside_RR.T, between_RR.T
        case Ep():
            lent = _lent(held_RE, cluster, sharding, float(gradient_bytes * model.expert_parameters))
            return tuple(lent_RR.T for lent_RR in reversed(lent))
        case _:
            assert_never(sharding)


def _sent(layout: ExpertLayout, every_slot: bool) -> IntArray:
    return layout.replicas_RE if every_slot else (layout.replicas_RE > 0).astype(np.int64)


def _flat(held_R: IntArray, slice_bytes: float) -> FloatArray:
    return _between_ranks(np.broadcast_to(held_R * slice_bytes, (len(held_R), len(held_R))).copy())


def _hierarchical(held_RE: IntArray, node_R: IntArray, slice_bytes: float) -> tuple[FloatArray, FloatArray]:
    """Returns ``bytes_RR`` between and inside of nodes. The carriers are those of ``moe.sharded_experts``: in each
    node, slices of outside rank r go to the rank whose place there is r mod the node's size.
    """
    num_ranks = len(node_R)
    between_RR, inside_RR = np.zeros((num_ranks, num_ranks)), np.zeros((num_ranks, num_ranks))
    for node in range(node_R[-1] + 1):
        ranks = np.flatnonzero(node_R == node)
        outside = np.flatnonzero(node_R != node)
        distinct = int(held_RE[ranks].any(axis=0).sum())
        carriers = ranks[outside % len(ranks)]
        between_RR[outside, carriers] = distinct * slice_bytes
        carried = 1 + np.bincount(np.searchsorted(ranks, carriers), minlength=len(ranks))
        inside_RR[np.ix_(ranks, ranks)] = np.outer(carried, held_RE[ranks].sum(axis=1)) * slice_bytes
    return between_RR, _between_ranks(inside_RR)


def _lent(held_RE: IntArray, cluster: ClusterSpec, sharding: Ep, expert_bytes: float) -> tuple[FloatArray, ...]:
    """Returns ``bytes_RR`` of what owners send, and then of what its receivers pass on
    (``layout.lender_of_experts``).
    """
    num_ranks, num_experts = held_RE.shape
    node_R = np.asarray(cluster.node_of_rank) if sharding.lend == "hierarchical" else None
    holder, expert = np.nonzero(held_RE)
    lender = lender_of_experts(held_RE, node_R)[holder, expert]
    first = lender == owner_of_experts(num_experts, num_ranks)[expert]
    lent = []
    for given in (first, ~first):
        bytes_RR = np.zeros((num_ranks, num_ranks))
        np.add.at(bytes_RR, (lender[given], holder[given]), expert_bytes)
        lent.append(_between_ranks(bytes_RR))
    return tuple(bytes_RR for bytes_RR in lent if bytes_RR.any())


def _between_ranks(bytes_RR: FloatArray) -> FloatArray:
    np.fill_diagonal(bytes_RR, 0.0)
    return bytes_RR


# --- links --------------------------------------------------------------------------------------------------


@dataclass(frozen=True, eq=False)
class LinkLoad:
    """What an all-to-all asks of the links.

    seconds_L: float64 [2·R + 2·N], that each link is busy with it alone: ranks' ways out, ranks' ways in, nodes' ways
    out, nodes' ways in. A rank's own are for bytes within its domain; a node's are shared by its ranks.
    used_4R: bool [4, R], whether a rank sends within its domain, receives within it, sends to other domains, receives
    from them: on which of those four it has to wait.
    """

    seconds_L: FloatArray
    used_4R: npt.NDArray[np.bool_]

    def part(self, of: float) -> LinkLoad:
        """Returns the load of the share ``of`` of every message."""
        return replace(self, seconds_L=self.seconds_L * of)

    def messages(self) -> LinkLoad:
        """Returns the load of messages between the same ranks whose bytes do not count."""
        return replace(self, seconds_L=np.zeros_like(self.seconds_L))

    def reversed(self) -> LinkLoad:
        """Returns the load of the way back: what came in goes out."""
        R = self.used_4R.shape[1]
        out_R, in_R, rest = np.split(self.seconds_L, [R, 2 * R])
        out_N, in_N = np.split(rest, 2)
        return LinkLoad(np.concatenate([in_R, out_R, in_N, out_N]), self.used_4R[[1, 0, 3, 2]])


def link_load(bytes_RR: FloatArray, cluster: ClusterSpec) -> LinkLoad:
    """Returns the load of an all-to-all of ``bytes_RR``, whose diagonal is zero."""
    sizes, domain_R = cluster.domain_sizes, np.asarray(cluster.domain_of_rank)
    first_N = np.cumsum((0, *cluster.node_sizes[:-1]))
    R, D = len(domain_R), len(sizes)
    here_R = np.arange(R)
    if len(set(sizes)) == 1:
        # The same sums, ten times as fast on a thousand ranks.
        to_RD = np.einsum("rdg->rd", bytes_RR.reshape(R, D, R // D))
        from_RD = bytes_RR.reshape(D, R // D, R).sum(axis=1).T
    else:
        first_D = np.cumsum((0, *sizes[:-1]))
        to_RD, from_RD = np.add.reduceat(bytes_RR, first_D, axis=1), np.add.reduceat(bytes_RR, first_D, axis=0).T
    inside = [toward_RD[here_R, domain_R] for toward_RD in (to_RD, from_RD)]
    outside = []
    for toward_RD in (to_RD, from_RD):
        toward_RD[here_R, domain_R] = 0.0
        outside.append(toward_RD.sum(axis=1))
    between = [np.add.reduceat(bytes_R, first_N) for bytes_R in outside]
    intra, inter = cluster.intra_node_gb_per_s * 1e9, cluster.inter_node_gb_per_s * 1e9
    seconds_L = np.concatenate([*(bytes_R / intra for bytes_R in inside), *(bytes_N / inter for bytes_N in between)])
    return LinkLoad(seconds_L, np.stack([*inside, *outside]) > 0)


def link_seconds(bytes_RR: FloatArray, cluster: ClusterSpec) -> FloatArray:
    """Returns ``LinkLoad.seconds_L`` of ``bytes_RR``: seconds that each link is busy with it alone, [2·R + 2·N]."""
    return link_load(bytes_RR, cluster).seconds_L


def transfer_seconds(bytes_RR: FloatArray, cluster: ClusterSpec) -> float:
    """Returns the seconds of an all-to-all that has the links for itself: those of its busiest link (FasterMoE, section
    4).
    """
    return float(link_seconds(bytes_RR, cluster).max())


def reshard_seconds(layout: ExpertLayout, model: ModelShape, cluster: ClusterSpec, sharding: Sharding) -> float:
    """Returns the seconds of the all-to-alls that reduce a layer's expert gradients; 0 if all are on their owners."""
    return sum(transfer_seconds(bytes_RR, cluster) for bytes_RR in reshard_bytes(layout, model, cluster, sharding))
