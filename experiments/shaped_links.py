"""Does overlap pay where links are slow?

Two hosts with a rank each and 200 Mbit/s between them: network namespaces of this machine (Linux, root), so that a real
training waits for real bytes, and no GPU is needed to see what overlap hides. One piece, then chunks of tokens.
UniEP (arXiv 2604.19241) asks the same of its kernels.

Look at agreement first: chunks may not change a bit, so every row is bit-equal. Then at exposed ms: what is left of it
is what chunks could not hide; dense gradients, which travel after backward, are not in it. Try a link ten times as
fast, and one ten times as slow: where computing or bytes rule, overlap has nothing to hide, or nothing to hide behind.
With more hosts than cores give each a share of the processor (``cpus_per_host=0.45`` for four on two cores), or a host
that waits speeds the others up.
``python -m benchmarks shaped`` asks more: bandwidths, latencies, splits, and what the simulator says of each.

Measured on 2 local ranks, in namespaces; expect ten minutes on two cores.
"""

import moesys as ms


def experiment() -> ms.Experiment:
    ep = ms.Strategy(name="sequential", reduction=ms.LayoutInvariant())
    return ms.Experiment(
        name="shaped-links",
        description="overlap between two hosts with a slow link",
        model=ms.ModelShape(hidden_size=256, intermediate_size=1024, num_experts=4, top_k=2, router_aux_loss_coef=0.01),
        cluster=ms.ClusterSpec(num_nodes=2, ranks_per_node=1, inter_node_gb_per_s=0.025),
        strategies=(
            ep,
            *(ep.replace(name=f"pipelined/{chunks}", overlap=ms.Pipelined(chunks=chunks)) for chunks in (2, 4)),
        ),
        workload=ms.Training(num_layers=1, steps=20, shaped_links=True),
        repeat_baseline=True,
    )
