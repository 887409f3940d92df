"""Makes the space searched where nobody declares one: what may pay on this model and cluster, and fits in memory."""

from __future__ import annotations

from typing import Any

from moesys.balance.flow.flow_split import FlowSplit
from moesys.config import Fsep, Strategy, WindowMean
from moesys.tuner.setting import Setting
from moesys.tuner.space import Space

Values = dict[str, tuple[Any, ...]]
_CAPS = (0.02, 0.05, 0.1)


def default_space(setting: Setting, tokens_per_rank: int, *, mega_kernels: bool = True) -> Space:
    """Everything a strategy can say, at a few values a field.

    Left out: planners that take seconds a plan (``CpSat``), predictors that know what is to come, plans that come late
    (``lag``), slots beyond memory, and ``MegaKernel`` where nothing can run it: without ``mega_kernels``, and over
    several domains.
    """
    cluster = setting.cluster
    one_domain = len(cluster.domain_sizes) == 1
    # To pull x again takes longer, and only pays where memory is short.
    keep_x = (True,) if setting.recompute or cluster.memory_gb is None else (True, False)
    overlaps = _overlaps(mega_kernels and one_domain, across=cluster.num_nodes > 1, keep_x=keep_x)
    if cluster.num_ranks == 1:
        return Space(overlaps)
    counts = _slot_counts(setting, tokens_per_rank)
    nodes = cluster.num_nodes > 1
    shardings: Values = {"sharding": ("ep",), "sharding.ep.slots_per_rank": (None, *counts)}
    if counts:
        hierarchical = nodes and max(cluster.node_sizes) > 1
        shardings |= {
            "sharding": ("ep", "fsep"),
            "sharding.fsep.slots_per_rank": counts,
            "sharding.prefetch_layers": tuple(range(min(3, setting.num_layers))),
            "sharding.delay_reshard": (False, True) if setting.num_layers > 1 else (False,),
            "sharding.reshard_after_forward": (True, False),
            "sharding.restore": ("flat", "hierarchical") if hierarchical else ("flat",),
            "sharding.reshard": ("flat", "hierarchical") if hierarchical else ("flat",),
            "sharding.lend": ("flat", "hierarchical") if hierarchical else ("flat",),
        }
    capped = tuple(FlowSplit(max_inter_node=cap) for cap in _CAPS if not one_domain)
    return Space(
        {
            **shardings,
            "balance": ("static", "eplb", "laer", "flex_moe", "greedy"),
            "predictor": ("last", WindowMean(steps=5), "adaptive"),
            "split": ("even", "proportional", "flow", *capped),
            **overlaps,
            "replan_every": (1, 4, 16),
        }
    )


def _slot_counts(setting: Setting, tokens_per_rank: int) -> tuple[int, ...]:
    """From as many slots a rank as experts need to twice as many, as far as memory goes."""
    experts = setting.model.num_experts
    needed = -(-experts // setting.cluster.num_ranks)
    counts = sorted({needed, needed + 1, needed + 2, needed + -(-needed // 2), 2 * needed})

    def fits(slots: int) -> bool:
        plain = Strategy(name="fsep", sharding=Fsep(slots_per_rank=slots))
        return not setting.out_of_memory(plain, tokens_per_rank)

    return tuple(slots for slots in counts if slots <= experts and fits(slots))


def _overlaps(mega_kernels: bool, across: bool, keep_x: tuple[bool, ...]) -> Values:
    plain: Values = {"overlap": ("sequential", "pipelined"), "overlap.chunks": (2, 4, 8)}
    if across:
        plain |= {"overlap.node_dispatch": ("direct", "once"), "overlap.combine": ("ordered", "per_node")}
    if not mega_kernels:
        return plain
    return plain | {
        "overlap": ("sequential", "pipelined", "mega_kernel"),
        "overlap.fused": ("both", "dispatch", "combine"),
        "overlap.dispatch_share": (0.1, 0.25, 0.5),
        "overlap.combine_share": (0.0, 0.25),
        "overlap.granularity": ("tile", "expert"),
        "overlap.tile_order": ("largest_first", "slots"),
        "overlap.deduplicate": (False, True),
        "overlap.keep_x": keep_x,
    }
