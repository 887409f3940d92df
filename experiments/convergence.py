"""Do all strategies train the same model?

A strategy may decide how a layer runs and nothing of what it computes, so the losses of 300 steps should be one curve.
With ``LayoutInvariant`` it is, to the last bit, whatever the layout: a row that parts is an error, and
``moesys bisect`` finds its first tensor. With ``Ordered``, the default elsewhere, a layout with other replicas adds
gradients in another order: losses differ by about 1e-9 at first, until a rounding sends one token to another expert,
and the runs part (LAER-MoE, arXiv 2602.11686, figure 9, reports 4.4e-4 on average over 3000 steps against Megatron).

Look at agreement: bit-equal in every row. Speed is not the question here. A router that collapses shows as starved
experts and a falling ``router_entropy``.

Measured on 4 local ranks; a seed takes up to ten minutes on two cores that have other work too.
"""

import moesys as ms


def experiment() -> ms.Experiment:
    ep = ms.Strategy(name="ep", reduction=ms.LayoutInvariant())
    pipelined = ms.Pipelined(chunks=4)
    fsep = ep.replace(name="fsep", sharding=ms.Fsep(slots_per_rank=6, prefetch_layers=1, delay_reshard=True))
    return ms.Experiment(
        name="convergence",
        description="the loss of every strategy over 300 steps",
        model=ms.ModelShape(hidden_size=64, intermediate_size=128, num_experts=16, top_k=2, router_aux_loss_coef=0.01),
        cluster=ms.ClusterSpec(ranks_per_node=4),
        strategies=(
            ep,
            ep.replace(name="ep+pipelined", overlap=pipelined),
            ep.replace(name="ep+eplb", sharding=ms.Ep(slots_per_rank=6), balance=ms.Eplb()),
            fsep,
            fsep.replace(name="laer", balance=ms.Laer(), predictor=ms.WindowMean(steps=5)),
            fsep.replace(name="greedy+flow", balance=ms.Greedy(), split=ms.FlowSplit()),
            fsep.replace(name="unified", balance=ms.Greedy(), split=ms.FlowSplit(), overlap=pipelined),
        ),
        workload=ms.Training(context=64, batch=2, steps=300),
        seeds=(0, 1, 2),
    )
