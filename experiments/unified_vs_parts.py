"""Is balanced and overlapped at once more than either alone?

Expert parallelism, then each idea by itself, then both: overlap (UniEP, arXiv 2604.19241), fully sharded experts that
follow the load (LAER-MoE, arXiv 2602.11686), ``unified``. The layer is LAER-MoE's e8k2 cut once finer than its e16k4:
32 experts for 32 ranks. With 8 experts ``ep`` would leave 24 ranks idle, and whatever it is compared with would shine.

Look at exposed ms, which is what ``ep`` loses to wires and to waiting, and at how much each part wins back.
``ep+pipelined`` hides bytes but waits for the busiest rank. ``fsep`` balances, and its eight slots a rank put every
expert on every node, so that tokens stay inside: it would win at no skew at all (try ``skew=0``). The price is its
restores, and memory for eight experts a rank where ``ep`` has one.

Simulated; eight seeds take less than a minute on two cores.
"""

import moesys as ms


def experiment() -> ms.Experiment:
    ep = ms.Strategy(name="ep")
    fsep = ms.Strategy(
        name="fsep",
        sharding=ms.Fsep(slots_per_rank=8, prefetch_layers=1, delay_reshard=True),
        balance=ms.Greedy(),
        split=ms.FlowSplit(),
    )
    pipelined = ms.Pipelined(chunks=4)
    return ms.Experiment(
        name="unified-vs-parts",
        description="overlap alone, balance alone, both",
        model=ms.presets.LAER_E8K2.replace(intermediate_size=3584, num_experts=32, top_k=8),
        cluster=ms.presets.LAER_A100,
        strategies=(
            ep,
            ep.replace(name="ep+pipelined", overlap=pipelined),
            fsep,
            fsep.replace(name="unified", overlap=pipelined),
        ),
        workload=ms.Generated(skew=0.5),
    )
