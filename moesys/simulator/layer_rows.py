"""LayerRows: a layer's rows, and what their way asks of the links."""

from __future__ import annotations

from dataclasses import dataclass

from moesys.config import ClusterSpec, ModelShape, Overlap
from moesys.cost import FloatArray, LinkLoad, dispatch_bytes, link_load, rows_of
from moesys.layout import TokenPlan
from moesys.row_traffic import RowTraffic, row_traffic
from moesys.schedule import StageKind


@dataclass(frozen=True)
class LayerRows:
    """Rows of each rank and expert, what their way asks of the links where all go ``whole``, and what travels in each
    stage and part, were there one chunk.
    """

    rows_RE: FloatArray
    whole: LinkLoad
    traffic: RowTraffic
    loads: dict[tuple[StageKind, int], LinkLoad]

    @classmethod
    def of(cls, plan: TokenPlan, model: ModelShape, cluster: ClusterSpec, overlap: Overlap) -> LayerRows:
        """Returns those of one micro-batch."""
        traffic = row_traffic(plan, model, cluster, overlap)
        loads = traffic.stage_loads(model, cluster)
        whole = link_load(dispatch_bytes(plan, model), cluster) if ("spread", 0) in loads else loads["dispatch", 0]
        return cls(rows_of(plan), whole, traffic, loads)
