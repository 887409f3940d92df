"""Can a planner of one's own beat EPLB in twenty lines?

``NodeByNode``, written here in the experiment's file, plans as EPLB does, but each node by itself, from what its ranks
want, as long as it has a slot for every expert. EPLB knows no nodes. See ``docs/planners.md``.

Look at load max/mean and at nodes %, under one split. With ``even``, which stays on a node that has the expert, EPLB's
replicas are where nobody asks for them; ``flow`` repairs the balance, and pays between nodes. ``greedy`` is ours.

Simulated; eight seeds take less than a minute on two cores.
"""

import numpy as np

import moesys as ms
from experiments.published.laer_routing import LAER_E8K2_ROUTING


class NodeByNode(ms.Balance):
    """EPLB's two steps, for each node by itself: replicate what is heaviest, place the heaviest replica first."""

    most_replicas: int = 8

    def layout(self, problem: ms.planning.PlanningProblem) -> ms.planning.ExpertLayout:
        slots_R, node_R = np.array(problem.slots_R), np.array(problem.cluster.node_of_rank)
        if np.bincount(node_R, slots_R).min() < problem.load.num_experts:
            node_R = np.zeros_like(node_R)  # no room for every expert on every node: the cluster is one
        expert_RS = np.full((len(slots_R), slots_R.max()), -1)
        for node in np.unique(node_R):
            ranks = np.flatnonzero(node_R == node)
            tokens_E = problem.load.tokens_RE[ranks].sum(axis=0)
            replicas_E, most = np.ones(len(tokens_E), int), min(self.most_replicas, len(ranks))
            while replicas_E.sum() < slots_R[ranks].sum() and replicas_E.min() < most:
                replicas_E[np.where(replicas_E < most, tokens_E / replicas_E, -1).argmax()] += 1
            share_E, load_R = tokens_E / replicas_E, np.zeros(len(slots_R))
            for expert in np.argsort(-share_E, kind="stable"):
                free = [r for r in ranks if (expert_RS[r] >= 0).sum() < slots_R[r]]
                for rank in sorted(free, key=lambda r: load_R[r])[: replicas_E[expert]]:
                    expert_RS[rank, (expert_RS[rank] >= 0).sum()] = expert
                    load_R[rank] += share_E[expert]
        return ms.planning.ExpertLayout(expert_RS, problem.load.num_experts)


def experiment() -> ms.Experiment:
    fsep = ms.Fsep(slots_per_rank=2, prefetch_layers=1, delay_reshard=True)
    eplb = ms.Strategy(name="eplb+even", sharding=fsep, balance=ms.Eplb(), predictor=ms.WindowMean(steps=5))
    own, flow = eplb.replace(name="own+even", balance=NodeByNode()), ms.FlowSplit()
    return ms.Experiment(
        name="own-planner",
        description="NodeByNode against EPLB",
        model=ms.presets.LAER_E8K2,
        cluster=ms.presets.LAER_A100,
        strategies=(
            eplb,
            eplb.replace(name="eplb+flow", split=flow),
            own,
            own.replace(name="own+flow", split=flow),
            own.replace(name="greedy+flow", split=flow, balance=ms.Greedy()),
        ),
        workload=LAER_E8K2_ROUTING.replace(num_layers=2),
    )
