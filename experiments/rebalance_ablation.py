"""Which part of balancing pays: the planner's candidates, or the split of the current tokens?

LAER-MoE's own ablation (arXiv 2602.11686, figure 12: Mixtral 8x7B, 8 experts, 2 slots a rank on 32 GPUs), and beyond
it: the exact split over LAER's layouts, then over ours. ``fsep`` is what the paper calls FSDP+EP, the same restores
under a layout that never changes; every rank has experts to compute, so the baseline flatters nobody.

Look at load max/mean first: what is left of it is what computing waits for. Then at ``both`` against ``laer+flow``:
one layout, two splits. ``greedy+flow`` balances best and is no faster: look at between nodes. The skew is set so that
the static layout has about the 1.66 of LAER's own log.

Simulated; eight seeds take less than a minute on two cores.
"""

import moesys as ms


def experiment() -> ms.Experiment:
    fsep = ms.Strategy(
        name="fsep",
        sharding=ms.Fsep(slots_per_rank=2, prefetch_layers=1, delay_reshard=True),
        predictor=ms.WindowMean(steps=5),
    )
    both = fsep.replace(name="both", balance=ms.Laer())
    return ms.Experiment(
        name="rebalance-ablation",
        description="LAER-MoE's ablation and the exact split, on its cluster",
        model=ms.presets.LAER_E8K2,
        cluster=ms.presets.LAER_A100,
        strategies=(
            fsep,
            both.replace(name="even only", balance=ms.Laer(candidates=("even",))),
            both.replace(name="proportional only", balance=ms.Laer(candidates=("proportional",))),
            both,
            both.replace(name="laer+flow", split=ms.FlowSplit()),
            both.replace(name="greedy+flow", balance=ms.Greedy(), split=ms.FlowSplit()),
        ),
        workload=ms.Generated(skew=0.8),
    )
