"""PlanningProblem: what every planner and split is given, checked once; and the node and the domain of each rank."""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from numbers import Integral

import numpy as np

from moesys.compiled import compiled
from moesys.config import ClusterSpec, ModelShape, Overlap, Sharding, Strategy, Within
from moesys.config.base import check_type
from moesys.config.sharding import one_per_rank
from moesys.display import Columns, Display
from moesys.layout import EMPTY, ExpertLayout
from moesys.load import IntArray, LoadMatrix


@dataclass(frozen=True, eq=False)
class PastBatch:
    """A micro-batch that the layer has run: its number, its load, and the layout that was in force."""

    micro_batch: int
    load: LoadMatrix
    layout: ExpertLayout


@dataclass(frozen=True, eq=False, repr=False)
class PlanningProblem(Display):
    """One layer's load, and where its experts and tokens may go.

    - ``load``: tokens of each source rank for each expert;
    - ``cluster``: the ranks, by nodes and domains;
    - ``slots_R``: slots of each rank, [R];
    - ``layout``: the one in force. A planner may stay near it, and None says that there is none; a split divides the
      tokens over it;
    - ``model``: the layer's shape, None where the caller does not know it;
    - ``turn``: the number of the micro-batch, which rotates the tokens that do not divide evenly;
    - ``sharding``: how experts come to their slots, None where that costs nothing or is not known;
    - ``overlap``: how rows travel, None where that is not known;
    - ``units_per_token``: counts of ``load`` that are one token of a micro-batch;
    - ``recent``: the newest micro-batches before the plan, oldest first, as many as the planner's
      ``recent_batches``; empty where there is no history;
    - ``lag``: a plan is used this many micro-batches after the newest of ``recent``;
    - ``late_R``: late slots of each rank, [R], in addition to ``slots_R``: they are filled from the counts of the
      micro-batch itself. Empty where there are none;
    - ``memory``: what the planner returned beside its plan before (``Balance.plan``), empty at first.

    ``plan_layout`` and ``split_tokens`` make it by ``of_layout`` and ``of_split``, which check that its parts belong
    together; planners and splits trust it.
    """

    load: LoadMatrix
    cluster: ClusterSpec
    slots_R: tuple[int, ...]
    layout: ExpertLayout | None = None
    model: ModelShape | None = None
    turn: int = 0
    sharding: Sharding | None = None
    overlap: Overlap | None = None
    units_per_token: int = 1
    recent: tuple[PastBatch, ...] = ()
    lag: int = 1
    late_R: tuple[int, ...] = ()
    memory: bytes = b""

    def _facts(self) -> str:
        return f"{self.load._facts()}, {sum(self.slots_R):,} slots, turn {self.turn}"

    def _columns(self) -> Columns:
        ranks = range(self.load.num_ranks)
        return {"rank": ranks, "tokens": self.load.tokens_RE.sum(axis=1), "slots": self.slots_R}

    @classmethod
    def of_layout(
        cls,
        load: LoadMatrix,
        cluster: ClusterSpec,
        slots_per_rank: int | Sequence[int],
        model: ModelShape | None = None,
        previous: ExpertLayout | None = None,
        strategy: Strategy | None = None,
        units_per_token: int = 1,
    ) -> PlanningProblem:
        """Makes the problem of choosing a layout; ``slots_per_rank`` is one number for all ranks or one a rank, and
        experts and rows travel as ``strategy`` has it.

        Raises ValueError when load, model, cluster, slots and previous do not belong together.
        """
        check_type(LoadMatrix, load=load)
        check_type(ClusterSpec, cluster=cluster)
        check_model(load, model)
        slots_R = _checked_slots(load, cluster, slots_per_rank)
        if previous is not None:
            _check_previous(previous, load, slots_R)
        of_strategy = {name: getattr(strategy, name) for name in ("sharding", "overlap", "lag") if strategy}
        if strategy and model:
            of_strategy["late_R"] = strategy.late_slots_R(model, cluster)
        return cls(load, cluster, slots_R, previous, model, units_per_token=units_per_token, **of_strategy)

    @classmethod
    def of_split(
        cls,
        load: LoadMatrix,
        layout: ExpertLayout,
        cluster: ClusterSpec,
        turn: int = 0,
        model: ModelShape | None = None,
        overlap: Overlap | None = None,
    ) -> PlanningProblem:
        """Makes the problem of dividing tokens over the replicas of ``layout``.

        Raises ValueError when load, model, layout and cluster do not belong together.
        """
        check_type(LoadMatrix, load=load)
        check_type(ExpertLayout, layout=layout)
        check_type(ClusterSpec, cluster=cluster)
        check_model(load, model)
        if not load.num_ranks == layout.num_ranks == cluster.num_ranks:
            raise ValueError(
                f"the load is for {load.num_ranks} ranks, the layout for {layout.num_ranks}, the cluster has "
                f"{cluster.num_ranks}; plan all three for the same ranks"
            )
        if load.num_experts != layout.num_experts:
            raise ValueError(
                f"the load is for {load.num_experts} experts, the layout for {layout.num_experts}; "
                "plan both for the same model"
            )
        return cls(load, cluster, (layout.num_slots,) * layout.num_ranks, layout, model, turn, overlap=overlap)

    def over(self, layout: ExpertLayout) -> PlanningProblem:
        """Returns the same problem with ``layout`` in force, for planners that judge a layout by a split over it."""
        return replace(self, layout=layout)

    @property
    def layout_in_force(self) -> ExpertLayout:
        """The layout that a split divides tokens over."""
        assert self.layout is not None, "tokens are split over a layout, and the problem has none"
        return self.layout


def check_model(load: LoadMatrix, model: ModelShape | None) -> None:
    """Raises ValueError where a load and a model differ in experts."""
    if model is not None and model.num_experts != load.num_experts:
        raise ValueError(
            f"the load counts {load.num_experts} experts but num_experts={model.num_experts}; "
            "give one column of tokens_RE an expert"
        )


def _checked_slots(load: LoadMatrix, cluster: ClusterSpec, slots_per_rank: int | Sequence[int]) -> tuple[int, ...]:
    if load.num_ranks != cluster.num_ranks:
        raise ValueError(
            f"the load counts {load.num_ranks} source ranks but the cluster has {cluster.num_ranks}; "
            "give one row of tokens_RE a rank"
        )
    one_for_all = not isinstance(slots_per_rank, Iterable)
    given = one_per_rank("slots_per_rank", slots_per_rank, cluster.num_ranks)
    if not all(issubclass(kind, Integral) and kind is not bool for kind in set(map(type, given))):
        raise ValueError(f"slots_per_rank={slots_per_rank} counts slots; give integers")
    slots_R = tuple(map(int, given))
    if min(slots_R) < 0:
        raise ValueError(f"slots_per_rank={list(slots_R)} has a negative count; use 0 for a rank that holds nothing")
    missing = load.num_experts - sum(slots_R)
    if missing > 0:
        way_out = f"use at least {-(-load.num_experts // len(slots_R))}" if one_for_all else f"add at least {missing}"
        raise ValueError(
            f"slots_per_rank={slots_per_rank if one_for_all else list(slots_R)} gives {sum(slots_R)} slots on "
            f"{len(slots_R)} ranks for {load.num_experts} experts; {way_out}"
        )
    return slots_R


def _check_previous(previous: ExpertLayout, load: LoadMatrix, slots_R: tuple[int, ...]) -> None:
    shape = (previous.num_ranks, previous.num_slots, previous.num_experts)
    wanted = (load.num_ranks, max(slots_R), load.num_experts)
    if shape != wanted:
        raise ValueError(
            f"previous has (ranks, slots, experts) = {shape} but the plan is for {wanted}; "
            "give a previous layout of the same shape, or previous=None"
        )
    for rank, (filled, slots) in enumerate(zip(previous.filled_R.tolist(), slots_R, strict=True)):
        if filled > slots:
            raise ValueError(
                f"previous fills {filled} slots of rank {rank}, which has {slots}; "
                "give a previous layout that fits the slots, or previous=None"
            )


def nodes_of(cluster: ClusterSpec) -> IntArray:
    """Returns the node of each rank, int64 [R]: ``node_of_rank``, but fast enough for every micro-batch."""
    return np.repeat(np.arange(cluster.num_nodes), cluster.ranks_per_node)


def link_domains_of(cluster: ClusterSpec) -> IntArray:
    """Returns the domain of fast links of each rank, int64 [R]; like ``domain_of_rank``, but faster."""
    return np.repeat(np.arange(len(cluster.domain_sizes)), cluster.domain_sizes)


def levels_of(cluster: ClusterSpec, node_R: IntArray) -> IntArray:
    """Returns the part of the cluster that each rank is in, int64 [L, R]: domains and nodes, the finest first.

    ``node_R``: the node of each rank, ``nodes_of(cluster)``.
    """
    if cluster.ranks_per_domain is None or cluster.domain_sizes == cluster.node_sizes:
        return node_R[None]
    domain_R = link_domains_of(cluster)
    return np.stack([domain_R, node_R] if domain_R[-1] > node_R[-1] else [node_R, domain_R])


def blocks_of_nodes(node_R: IntArray) -> IntArray:
    """Returns the block that each rank is in, int64 [L, R], of 2 nodes, of 4, and so on, as long as there are several.

    If each token crosses to a node once, its rows for experts on nearby nodes share that crossing.
    """
    num_levels = max(int(node_R[-1]).bit_length() - 1, 0)
    blocks = [node_R >> level for level in range(1, num_levels + 1)]
    return np.array(blocks, dtype=np.int64).reshape(num_levels, len(node_R))


def domains_of(cluster: ClusterSpec, replicas_within: Within) -> tuple[int, ...]:
    """Returns for each rank, [R], the number of the part of the cluster that an expert's replicas may not leave."""
    match replicas_within:
        case "cluster":
            return (0,) * cluster.num_ranks
        case "node":
            return cluster.node_of_rank
        case "domain":
            return cluster.domain_of_rank


@compiled
def tokens_by_node(tokens_RE, node_R):  # type: ignore[no-untyped-def]
    """Returns the tokens of each expert by their source's node, int64 [N, E], and in all, int64 [E]."""
    num_ranks, num_experts = tokens_RE.shape
    supply_NE = np.zeros((node_R[num_ranks - 1] + 1, num_experts), np.int64)
    tokens_E = np.zeros(num_experts, np.int64)
    for rank in range(num_ranks):
        supply_E = supply_NE[node_R[rank]]
        for expert in range(num_experts):
            supply_E[expert] += tokens_RE[rank, expert]
    for node in range(supply_NE.shape[0]):
        for expert in range(num_experts):
            tokens_E[expert] += supply_NE[node, expert]
    return supply_NE, tokens_E


def share_key(tokens: int, replicas: int, most_replicas: int) -> int:
    """Returns an integer that orders like ``tokens / replicas``, exactly, whenever ``replicas <= most_replicas``.

    Two different fractions whose denominators are at most B lie at least 1/B² apart, so that after scaling by B² their
    floors differ too; equal fractions have equal floors.
    """
    return tokens * most_replicas**2 // replicas


def common_shares(tokens_E: Sequence[int], replicas_E: Sequence[int]) -> list[int]:
    """Returns the tokens per replica of each expert under an equal split, times one factor that makes all of them
    whole.

    ``common_shares([5, 4], [2, 1]) == [5, 8]``: in halves of a token.
    """
    factor = math.lcm(*replicas_E)
    return [tokens * (factor // replicas) for tokens, replicas in zip(tokens_E, replicas_E, strict=True)]


def usable_slots(slots_R: Iterable[int], num_experts: int) -> list[int]:
    """Returns the slots of each rank that can hold different experts: never more than there are experts.

    The cap loses no expert: a rank with S_r >= E still holds all E, and without such a rank nothing is capped.
    """
    return [min(slots, num_experts) for slots in slots_R]


def experts_with_room(replicas: int, slots_R: Sequence[int], num_experts: int) -> int:
    """Returns how many experts fit on these ranks with ``replicas`` replicas each, no two of an expert on one rank.

    k experts fit if and only if the sum of min(S_r, k) over the ranks is at least k · ``replicas`` (Gale and Ryser),
    and then fewer fit too.
    """
    return bisect_right(
        range(1, num_experts + 1), 0, key=lambda k: replicas * k > sum(min(each, k) for each in slots_R)
    )


def layout_from_rows(
    experts_by_rank: Iterable[Sequence[int]], slots_R: Sequence[int], num_experts: int
) -> ExpertLayout:
    """Returns the layout whose ranks hold these experts, in this order, each row filled up with ``EMPTY``."""
    expert_RS = np.full((len(slots_R), max(slots_R)), EMPTY, dtype=np.int64)
    for rank, experts in enumerate(experts_by_rank):
        assert len(experts) <= slots_R[rank], "a planner overfilled a rank"
        expert_RS[rank, : len(experts)] = experts
    return ExpertLayout(expert_RS, num_experts)
