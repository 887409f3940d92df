"""Do MegaKernels train the same model, to the last bit?

Experts one after another on stand-alone kernels (``sequential``), and the same in MegaKernels at three points of their
search space (UniEP, arXiv 2604.19241): as they come; unfused, flags and fetches of whole experts; and with pushes,
sums and weight gradients as tasks of their own, and plans made on the device. Two ranks pull and push over shared
memory, and wait for each other's flags, with experts that follow the load under FSEP.

Look at agreement: every row must be bit-equal. Triton's interpreter runs the kernels on the CPU, thousands of times
slower than a GPU, so no time in the table means anything.

Measured on 2 local ranks, without a GPU; a minute or two on two cores. With compiled kernels, where GPUs are, compare
``overlap_ablation``.
"""

import moesys as ms


def experiment() -> ms.Experiment:
    sequential = ms.Strategy(
        name="sequential", sharding=ms.Fsep(slots_per_rank=3), balance=ms.Greedy(), split=ms.FlowSplit()
    )
    points = {
        "mega": ms.MegaKernel(rows_cap=2.0),
        "mega/unfused": ms.MegaKernel(
            fused="none", granularity="expert", tile_order="slots", deduplicate=True, rows_cap=2.0
        ),
        "mega/tasks": ms.MegaKernel(combine_share=0.5, reduce_share=0.5, programs=1, most_tokens=16, rows_cap=2.0),
    }
    return ms.Experiment(
        name="mega-interpret",
        description="MegaKernels against stand-alone kernels, interpreted",
        model=ms.ModelShape(hidden_size=32, intermediate_size=24, num_experts=4, top_k=2),
        cluster=ms.ClusterSpec(ranks_per_node=2),
        strategies=(sequential, *(sequential.replace(name=name, overlap=point) for name, point in points.items())),
        workload=ms.Training(num_layers=1, context=16, batch=1, warmup=0, steps=3, interpret=True),
        seeds=(0,),
    )
