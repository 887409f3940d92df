"""Seconds for flops and bytes: pure functions of shapes, plans and a ``ClusterSpec``.

Traffic is a matrix ``bytes_RR`` [source, destination], float64, its diagonal zero: what a rank keeps is free. Links are
each rank's way out and in inside its node, and each node's way out and in; all work at once, at full rate in both
directions. Nothing here knows latency, how efficient a GEMM of few rows is, or memory traffic.

R ranks, N nodes, E experts, H hidden, I expert width, P_e = 3·H·I parameters of an expert, b bytes of an element,
s = ceil(P_e / R) the wire slice of an expert that is sharded over all ranks.
"""

from __future__ import annotations

from typing import TypeVar, assert_never

import numpy as np
import numpy.typing as npt

from moesys.config import ClusterSpec, Ep, Fsep, ModelShape, Sharding
from moesys.layout import ExpertLayout, TokenPlan
from moesys.load import IntArray

FloatArray = npt.NDArray[np.float64]
Rows = TypeVar("Rows", float, FloatArray)

# Expert gradients travel in float32, whatever experts compute in.
GRADIENT_BYTES = 4


def expert_seconds(rows: Rows, model: ModelShape, cluster: ClusterSpec, backward: bool) -> Rows:
    """Seconds of a rank's expert GEMMs on ``rows`` (a number or an array): 6·rows·H·I flops at the rank's matmul rate.

    Two flops a parameter and row. Backward has twice as many, half of them for the gradient of the input, half for
    that of the weights. Activations and the weighted sum of combine are left out.
    """
    flops = 6 * model.hidden_size * model.intermediate_size * (2 if backward else 1)
    return rows * (flops / (cluster.expert_tflops * 1e12))


# --- traffic ------------------------------------------------------------------------------------------------


def dispatch_bytes(plan: TokenPlan, model: ModelShape) -> FloatArray:
    """``bytes_RR`` of the rows that go to their experts: b·H a (token, expert) pair, not de-duplicated.

    Combine, and dispatch of the output's gradient, send as much: combine is the transposed matrix.
    """
    bytes_RR = np.zeros((plan.load.num_ranks, plan.load.num_ranks))
    source, _, destination, tokens = plan.entries.T
    np.add.at(bytes_RR, (source, destination), tokens * (model.bytes_per_element * model.hidden_size))
    return _between_ranks(bytes_RR)


def restores_per_step(sharding: Sharding) -> int:
    """Of a layer and micro-batch: 2 where experts are given back after forward, and so come again for backward."""
    return 2 if isinstance(sharding, Fsep) and sharding.reshard_after_forward else 1


def restore_bytes(
    layout: ExpertLayout, model: ModelShape, cluster: ClusterSpec, sharding: Sharding
) -> tuple[FloatArray, ...]:
    """``bytes_RR`` of each all-to-all, one after another, that gives every rank the experts of ``layout``.

    An expert that a rank holds twice is sent once. Wire slices are padded to s, and padding is counted.

    - ``Fsep``, flat: one, in which a rank receives b·s·(experts held) from every other rank (LAER-MoE, section 4).
    - ``Fsep``, hierarchical: two. A node of g ranks receives b·s·(R - g)·(distinct experts in the node) from outside;
      then its ranks, each of which has carried a share of that, spread it inside.
    - ``Ep``: an expert travels whole, b·P_e, from its owner to each other rank that holds it. None if nobody borrows.
    """
    held_RE = (layout.replicas_RE > 0).astype(np.int64)
    match sharding:
        case Fsep():
            slice_bytes = float(model.bytes_per_element * -(-model.expert_parameters // cluster.num_ranks))
            if cluster.num_ranks == 1:
                return ()
            if sharding.restore == "flat":
                return (_flat(held_RE.sum(axis=1), slice_bytes),)
            return _hierarchical(held_RE, np.asarray(cluster.node_of_rank), slice_bytes)
        case Ep():
            return _lent(held_RE, float(model.bytes_per_element * model.expert_parameters))
        case _:
            assert_never(sharding)


def reshard_bytes(
    layout: ExpertLayout, model: ModelShape, cluster: ClusterSpec, sharding: Sharding
) -> tuple[FloatArray, ...]:
    """``bytes_RR`` of the all-to-all that brings a layer's expert gradients home in float32: a flat restore backwards.

    None where every gradient is at home already. Optimizer state never moves.
    """
    held_RE = (layout.replicas_RE > 0).astype(np.int64)
    match sharding:
        case Fsep():
            if cluster.num_ranks == 1:
                return ()
            wire_slice = -(-model.expert_parameters // cluster.num_ranks)
            return (_flat(held_RE.sum(axis=1), float(GRADIENT_BYTES * wire_slice)).T,)
        case Ep():
            return tuple(lent_RR.T for lent_RR in _lent(held_RE, float(GRADIENT_BYTES * model.expert_parameters)))
        case _:
            assert_never(sharding)


def _flat(held_R: IntArray, slice_bytes: float) -> FloatArray:
    return _between_ranks(np.broadcast_to(held_R * slice_bytes, (len(held_R), len(held_R))).copy())


def _hierarchical(held_RE: IntArray, node_R: IntArray, slice_bytes: float) -> tuple[FloatArray, FloatArray]:
    """Who carries what is ``moe.sharded_experts``' choice: in each node, slices of outside rank r go to the rank whose
    place there is r mod the node's size.
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


def _lent(held_RE: IntArray, expert_bytes: float) -> tuple[FloatArray, ...]:
    """A rank owns ceil(E / R) experts in rank order, and lends them to all others that hold them."""
    num_ranks, num_experts = held_RE.shape
    owner_E = np.arange(num_experts) // -(-num_experts // num_ranks)
    bytes_RR = np.zeros((num_ranks, num_ranks))
    holder, expert = np.nonzero(held_RE)
    np.add.at(bytes_RR, (owner_E[expert], holder), expert_bytes)
    bytes_RR = _between_ranks(bytes_RR)
    return (bytes_RR,) if bytes_RR.any() else ()


def _between_ranks(bytes_RR: FloatArray) -> FloatArray:
    np.fill_diagonal(bytes_RR, 0.0)
    return bytes_RR


# --- links --------------------------------------------------------------------------------------------------


def link_seconds(bytes_RR: FloatArray, cluster: ClusterSpec) -> FloatArray:
    """Seconds that each link is busy with ``bytes_RR`` alone, [2·R + 2·N]: ranks' ways out, ranks' ways in, nodes' ways
    out, nodes' ways in. A rank's own are for bytes within its node; a node's are shared by its ranks.
    """
    node_R = np.asarray(cluster.node_of_rank)
    same_node_RR = node_R[:, None] == node_R[None, :]
    intra_RR = np.where(same_node_RR, bytes_RR, 0.0)
    inter_RR = np.where(same_node_RR, 0.0, bytes_RR)
    out_N, in_N = (np.bincount(node_R, weights=inter_RR.sum(axis=axis), minlength=cluster.num_nodes) for axis in (1, 0))
    intra, inter = cluster.intra_node_gb_per_s * 1e9, cluster.inter_node_gb_per_s * 1e9
    return np.concatenate([intra_RR.sum(axis=1) / intra, intra_RR.sum(axis=0) / intra, out_N / inter, in_N / inter])


def transfer_seconds(bytes_RR: FloatArray, cluster: ClusterSpec) -> float:
    """Seconds of an all-to-all that has the links for itself: those of its busiest link (FasterMoE, section 4)."""
    return float(link_seconds(bytes_RR, cluster).max())


def dispatch_seconds(plan: TokenPlan, model: ModelShape, cluster: ClusterSpec) -> float:
    """Seconds in which all rows go to their experts; combine takes as long, as links are as fast both ways."""
    return transfer_seconds(dispatch_bytes(plan, model), cluster)


def restore_seconds(layout: ExpertLayout, model: ModelShape, cluster: ClusterSpec, sharding: Sharding) -> float:
    """Seconds that it takes to have the experts of ``layout``; 0 where they are there."""
    return sum(transfer_seconds(bytes_RR, cluster) for bytes_RR in restore_bytes(layout, model, cluster, sharding))


def reshard_seconds(layout: ExpertLayout, model: ModelShape, cluster: ClusterSpec, sharding: Sharding) -> float:
    """Seconds that it takes to bring a layer's expert gradients home; 0 where they are at home."""
    return sum(transfer_seconds(bytes_RR, cluster) for bytes_RR in reshard_bytes(layout, model, cluster, sharding))
