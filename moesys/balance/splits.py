"""split_tokens: the current load and a layout in, who goes where out."""

from __future__ import annotations

from moesys.balance.own_planners import own_split
from moesys.balance.planning_problem import PlanningProblem
from moesys.config import ClusterSpec, EvenSplit, FlowSplit, ModelShape, Overlap, Proportional, Quotas, Split
from moesys.layout import ExpertLayout, TokenPlan
from moesys.load import LoadMatrix


def split_tokens(
    load: LoadMatrix,
    layout: ExpertLayout,
    cluster: ClusterSpec,
    config: Split,
    turn: int = 0,
    *,
    model: ModelShape | None = None,
    overlap: Overlap | None = None,
) -> TokenPlan:
    """Divides the tokens of ``load`` over the replicas of ``layout``, as ``config`` says.

    ``turn``, the number of the micro-batch, rotates the tokens that do not divide evenly over the replicas. ``model``
    is the layer's shape where it is known: ``FlowSplit(max_inter_node="seconds")`` asks for it, others count tokens.
    ``overlap`` says how rows travel: where one sum a node comes home, ``FlowSplit`` keeps rows to near nodes.

    Raises ValueError when load, model, layout and cluster do not belong together, where a split by seconds gets no
    model, for ``Quotas``, and where a split of one's own raises, or returns what does not send every token to a holder.
    """
    problem = PlanningProblem.of_split(load, layout, cluster, turn, model, overlap)
    # A split is imported when it is named, because some of them load numba.
    match config:
        case EvenSplit():
            from moesys.balance.baselines.even_split import even_split

            return even_split(problem, config)
        case Proportional():
            from moesys.balance.baselines.proportional_split import proportional_split

            return proportional_split(problem, config)
        case FlowSplit():
            from moesys.balance.flow.flow_split import flow_split

            return flow_split(problem, config)
        case Quotas():
            raise ValueError(
                "split=Quotas() divides tokens as the planner of the layout does, which is not known here; "
                "use plan_layer with the strategy, or FlowSplit()"
            )
        case _:
            return own_split(problem, config)
