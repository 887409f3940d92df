"""Do the strategies win on real architectures too?

Small models of transformers' own code, with experts, routers and attention as OLMoE, Qwen3-MoE and DeepSeek-V3 have
them; all but the experts is sharded by FSDP2, as people train. A model's own balancing loss is on where it has one.

Look at load max/mean of ``ep``: it is all that balance can take away, and how much of a step are experts decides what
that is worth. Agreement must be bit-equal in every row: with ``LayoutInvariant`` every strategy trains the same model.

Measured on 2 local ranks; a model takes about two minutes on two cores. An experiment has one workload, so each model
is one, with a run folder of its own: ``moesys run`` runs all ``experiments()``; ``moesys explain`` takes
``experiment()``, which is OLMoE. For a model of your own name its folder instead.
"""

import moesys as ms

MODELS = ("olmoe-small", "qwen3-moe-small", "deepseek-v3-small")


def experiment(model: str = MODELS[0]) -> ms.Experiment:
    ep = ms.Strategy(name="ep", reduction=ms.LayoutInvariant())
    lent = ep.replace(name="ep+lent", sharding=ms.Ep(slots_per_rank=6), balance=ms.Greedy(), split=ms.FlowSplit())
    fsep = lent.replace(name="fsep", sharding=ms.Fsep(slots_per_rank=6, prefetch_layers=1))
    return ms.Experiment(
        name=f"real-{model}",
        description=f"strategies on {model}",
        cluster=ms.ClusterSpec(ranks_per_node=2),
        strategies=(ep, lent, fsep, fsep.replace(name="unified", overlap=ms.Pipelined(chunks=2))),
        workload=ms.models.ModelTraining(model=model, context=128, batch=16, warmup=2, steps=8),
        seeds=tuple(range(6)),
    )


def experiments() -> list[ms.Experiment]:
    return [experiment(model) for model in MODELS]
