"""Which part of balancing pays: the planner, the split of the current tokens, or knowing what comes?

LAER-MoE's own ablation (arXiv 2602.11686, figure 12: Mixtral 8x7B, 8 experts, 2 slots a rank on 32 GPUs), on routing
with the statistics of its logs; beside it other planners, and beyond it the exact split, over LAER's layouts and over
ours. ``fsep`` is what the paper calls FSDP+EP, the same restores under a layout that never changes; every rank has
experts to compute, so the baseline flatters nobody. The oracle plans for the very tokens that come.

Look at load max/mean first: what is left of it is what computing waits for. Then at ``laer+even`` against
``laer+flow``: one layout, two splits; from there to ``greedy+flow``: one split, two layouts; and at how little is left
for the oracle. Between nodes is the price. EPLB and FlexMoE know no nodes and plan for a split over all replicas; over
this one, which stays on a node that has the expert, they lose to not planning at all.

Simulated; eight seeds take less than a minute on two cores.
"""

import moesys as ms
from experiments.published.laer_routing import LAER_E8K2_ROUTING


def experiment() -> ms.Experiment:
    fsep = ms.Strategy(
        name="fsep",
        sharding=ms.Fsep(slots_per_rank=2, prefetch_layers=1, delay_reshard=True),
        predictor=ms.WindowMean(steps=5),
    )
    laer = fsep.replace(name="laer+even", balance=ms.Laer())
    greedy = fsep.replace(name="greedy+flow", balance=ms.Greedy(), split=ms.FlowSplit())
    return ms.Experiment(
        name="rebalance-ablation",
        description="planners, splits and an oracle, on LAER-MoE's cluster",
        model=ms.presets.LAER_E8K2,
        cluster=ms.presets.LAER_A100,
        strategies=(
            fsep,
            fsep.replace(name="eplb+even", balance=ms.Eplb()),
            fsep.replace(name="flex_moe+even", balance=ms.FlexMoe()),
            laer.replace(name="even only", balance=ms.Laer(candidates=("even",))),
            laer.replace(name="proportional only", balance=ms.Laer(candidates=("proportional",))),
            laer,
            laer.replace(name="laer+flow", split=ms.FlowSplit()),
            greedy,
            greedy.replace(name="greedy+flow, oracle", predictor=ms.Oracle()),
        ),
        workload=LAER_E8K2_ROUTING.replace(num_layers=2),
    )
