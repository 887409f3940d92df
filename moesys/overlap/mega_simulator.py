"""One pass of one layer under ``MegaKernel`` on simulated ranks: forward, or backward.

R ranks, L links as in ``cost.link_seconds``. All times in seconds.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from moesys.config import ClusterSpec, MegaKernel, ModelShape
from moesys.cost import FloatArray, dispatch_bytes, expert_seconds, link_seconds
from moesys.layout import TokenPlan
from moesys.load import IntArray


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
    tokens_R = plan.load.tokens_RE.sum(axis=1) / model.top_k
    row_bytes = model.hidden_size * model.bytes_per_element
    return cluster.launch_us * 1e-6 + tokens_R * (2 * row_bytes / (cluster.memory_gb_per_s * 1e9))


def mega_pass(
    overlap: MegaKernel,
    model: ModelShape,
    cluster: ClusterSpec,
    plan: TokenPlan,
    start_R: FloatArray,
    backward: bool,
    experts_R: FloatArray | None = None,
) -> MegaPass:
    """Each rank enters at ``start_R`` and has its experts at ``experts_R``, None: before it needs them. Until then it
    publishes (``publish_seconds``), and from then on its kernels run.
    """
    ready_R = start_R + publish_seconds(model, cluster, plan)
    if experts_R is not None:
        ready_R = np.maximum(ready_R, experts_R)
    bytes_RR = dispatch_bytes(plan, model)
    dispatch_L, combine_L = link_seconds(bytes_RR, cluster), link_seconds(bytes_RR.T, cluster)
    # Both sides hidden behind the products, or the products behind them.
    experts_R_ = expert_seconds(plan.tokens_R.astype(np.float64), model, cluster, backward)
    begun = float(ready_R.max())
    end_R = np.full(len(ready_R), max(begun + dispatch_L.max() + combine_L.max(), float((ready_R + experts_R_).max())))
    return MegaPass(
        end_R=end_R,
        computed=(Computed("experts", ready_R, ready_R + experts_R_),),
        moved=(
            Moved("dispatch", ready_R, np.full_like(end_R, begun + dispatch_L.max()), dispatch_L),
            Moved("combine", np.full_like(end_R, begun + dispatch_L.max()), end_R, combine_L),
        ),
        waited_for_R=np.full(len(end_R), int((ready_R + experts_R_).argmax())),
    )
