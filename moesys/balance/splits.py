"""split_tokens: the current load and a layout in, who goes where out."""

from __future__ import annotations

from typing import assert_never

from moesys.balance.baselines.even_split import even_split
from moesys.balance.baselines.proportional_split import proportional_split
from moesys.balance.flow.flow_split import flow_split
from moesys.config import ClusterSpec, EvenSplit, FlowSplit, Proportional, Split
from moesys.layout import ExpertLayout, TokenPlan
from moesys.load import LoadMatrix


def split_tokens(
    load: LoadMatrix, layout: ExpertLayout, cluster: ClusterSpec, config: Split, turn: int = 0
) -> TokenPlan:
    """The tokens of ``load`` over the replicas of ``layout``, as ``config`` divides them.

    ``turn``, the number of the micro-batch, rotates the tokens that do not divide evenly over the replicas.

    Raises ValueError when load, layout and cluster do not belong together.
    """
    if not load.num_ranks == layout.num_ranks == cluster.num_ranks:
        raise ValueError(
            f"the load is for {load.num_ranks} ranks, the layout for {layout.num_ranks}, the cluster has "
            f"{cluster.num_ranks}; plan all three for the same ranks"
        )
    if load.num_experts != layout.num_experts:
        raise ValueError(
            f"the load is for {load.num_experts} experts, the layout for {layout.num_experts}; "
            "plan both for the same model"
        )
    match config:
        case EvenSplit():
            return even_split(load, layout, cluster.node_of_rank, turn)
        case Proportional():
            return proportional_split(load, layout, cluster, turn)
        case FlowSplit():
            return flow_split(load, layout, cluster, config, turn)
        case _:
            assert_never(config)
