"""From which skew on does balance pay, and how much?

The speed-up over a layout that never changes, for expert popularities from almost even (0) to very uneven (1.5, the
standard deviation of their logarithm). LAER-MoE's planner with its even split stands beside the exact split over the
same layouts and over ours. Skew is log-normal because that fits what routers do (deepseek-ai/DeepEP, issue 393).

Look at where the curves part, and at the steps from ``laer`` to ``laer+flow``, one layout and two splits, and on to
``greedy+flow``, one split and two layouts. Beyond 1 the gain falls again, because layouts are planned on older loads,
and at equal drift a popularity moves the more the larger the skew (with ``drift=0`` it does not fall). Every strategy
restores two slots a rank, so none pays more for its layout.

Simulated; eight seeds take less than ten seconds a skew on two cores. An experiment has one workload, so each skew is
one, with a run folder of its own: ``moesys run`` runs all ``experiments()``, and ``runs/index.html`` has a
sentence about each; ``moesys explain`` takes ``experiment()``, which is skew 1.
"""

import moesys as ms

SKEWS = (0.0, 0.25, 0.5, 0.75, 1.0, 1.5)


def experiment(skew: float = 1.0) -> ms.Experiment:
    fsep = ms.Strategy(name="fsep", sharding=ms.Fsep(slots_per_rank=2, prefetch_layers=1, delay_reshard=True))
    laer = fsep.replace(name="laer", balance=ms.Laer(), predictor=ms.WindowMean(steps=5))
    return ms.Experiment(
        name=f"skew-{skew:g}",
        description=f"speed-up of balance at a skew of {skew:g}",
        model=ms.presets.LAER_E8K2,
        cluster=ms.presets.LAER_A100,
        strategies=(
            fsep,
            laer,
            laer.replace(name="laer+flow", split=ms.FlowSplit()),
            laer.replace(name="greedy+flow", balance=ms.Greedy(), split=ms.FlowSplit()),
        ),
        workload=ms.Generated(skew=skew),
    )


def experiments() -> list[ms.Experiment]:
    return [experiment(skew) for skew in SKEWS]
