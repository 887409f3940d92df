"""Does overlap pay on this machine, and how fine should the chunks be?

One after another, then in 2, 4 and 8 chunks, with experts whole on their owners (``ep``) and sharded (``fsep``).
Layouts never change and every rank holds 4 of 16 experts either way, so only the order of work differs. UniEP (arXiv
2604.19241) asks the same of its kernels; chunks are the coarse form of it.

Look at agreement first: chunks may not change a bit, so ``ep`` rows are bit-equal and ``fsep`` rows all show the same
difference: ``LayoutInvariant``, which would end it, takes experts this small 16 % longer. Then at exposed ms. Four
ranks on two cores share what computes and what copies: overlap has little to hide behind there, and more chunks are
more messages. ``ep (again)`` is the noise of the machine.

Where torch finds a GPU, ranks train there, and each sharding has a row with MegaKernels, UniEP's own form of overlap.

Measured on 4 local ranks; all eight seeds were not timed yet; expect ten minutes on two cores. On your own ranks:
``torchrun --nproc-per-node 4 -m moesys run experiments/overlap_ablation.py``.
"""

import torch

import moesys as ms


def experiment() -> ms.Experiment:
    device = "cuda" if torch.cuda.is_available() else "cpu"
    chunked = {f"/{chunks}": ms.Pipelined(chunks=chunks) for chunks in (2, 4, 8)}
    mega = {"/mega": ms.MegaKernel(rows_cap=2.0)} if device == "cuda" else {}
    overlaps = {"": ms.Sequential(), **chunked, **mega}
    shardings = {"ep": ms.Ep(), "fsep": ms.Fsep(slots_per_rank=4)}
    return ms.Experiment(
        name="overlap-ablation",
        description="chunks of dispatch, experts and combine; on GPUs MegaKernels too",
        model=ms.ModelShape(hidden_size=128, intermediate_size=256, num_experts=16, top_k=2, router_aux_loss_coef=0.01),
        cluster=ms.ClusterSpec(ranks_per_node=4),
        strategies=tuple(
            ms.Strategy(name=f"{name}{suffix}", sharding=sharding, overlap=overlap)
            for name, sharding in shardings.items()
            for suffix, overlap in overlaps.items()
        ),
        workload=ms.Training(steps=30, device=device),
        repeat_baseline=True,
    )
