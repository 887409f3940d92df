"""A strategy: everything that decides how an MoE layer runs, and nothing that decides what it computes.

The predictor decides for which load a layout is planned; the reduction decides which bits must agree, and so how sums
over rows and ranks are made. The other parts of a strategy have files of their own.
"""

from __future__ import annotations

from typing import Annotated, ClassVar, Literal, Self

from pydantic import Field, model_validator

from moesys.config.base import BYTES_PER_GB, Declaration, DisplayName, KindUnion
from moesys.config.cluster import ClusterSpec
from moesys.config.member import Balance, Split
from moesys.config.model import ModelShape
from moesys.config.overlap import Overlap, Sequential
from moesys.config.sharding import Ep, Sharding, one_per_rank


class Last(Declaration):
    """The newest load."""

    kind: Literal["last"] = "last"


class WindowMean(Declaration):
    """The mean of the newest ``steps`` loads (LAER-MoE: 5)."""

    kind: Literal["window_mean"] = "window_mean"
    steps: int = Field(5, ge=1, description="number of newest loads that are averaged")


class Ema(Declaration):
    """Exponential moving average: ``decay`` of the old, the rest of the newest."""

    kind: Literal["ema"] = "ema"
    decay: float = Field(0.7, ge=0, lt=1)
    """The load of k micro-batches ago has the weight ``decay`` to the power of k."""


class Adaptive(Declaration):
    """Uses the predictor that was closest lately: each one is tested on every load before it sees the load."""

    kind: Literal["adaptive"] = "adaptive"
    candidates: tuple[Annotated[Last | WindowMean | Ema, KindUnion()], ...] = Field(
        (Last(), WindowMean(steps=5), Ema(decay=0.5), Ema(decay=0.9)), min_length=1
    )
    """Predictors of which the most accurate one is used."""
    memory: int = Field(16, ge=1, description="loads over which an error is forgotten to 1/e")


class Oracle(Declaration):
    """Predicts the load of the micro-batch that the plan will serve, which no predictor can beat.

    It is available in simulations, and in training in which routing is replayed.
    """

    kind: Literal["oracle"] = "oracle"


Predictor = Annotated[Last | WindowMean | Ema | Adaptive | Oracle, KindUnion()]


class Ordered(Declaration):
    """The same bits for every overlap: rows of an expert by (source rank, token, k), replicas by rank."""

    kind: Literal["ordered"] = "ordered"
    # Bytes of an element of an expert's gradient, which is float32.
    gradient_bytes: ClassVar[int] = 4


class LayoutInvariant(Declaration):
    """The same bits for every overlap, layout, split and sharding, and for any number of ranks.

    The rows of an expert, by (source rank, token, k) over all ranks, are cut into blocks of ``block_rows`` (the last
    one of half to one and a half of that), and splits give a block to one rank. A block's weight gradient is one
    product; blocks are added in float64 on a grid so coarse that no addition rounds, so that no order shows. Bits are
    those of a numerics class: CPUs have one, kernels another. A ``MegaKernel`` is planned by hosts
    (``most_tokens=None``) and leaves weight gradients to launches of their own (``overlap_weight_gradients=False``).
    """

    kind: Literal["layout_invariant"] = "layout_invariant"
    block_rows: int = Field(256, ge=16, le=65536, description="rows of an expert whose gradient is one product")
    token_block: int = Field(32, ge=32, multiple_of=32)
    """Block of tokens of router and shared experts; a rank has a multiple."""
    # Bytes of an element of an expert's gradient: float64, in which gradients of ranks are added.
    gradient_bytes: ClassVar[int] = 8


Reduction = Annotated[Ordered | LayoutInvariant, KindUnion()]


class Strategy(Declaration):
    """Everything that decides how an MoE layer runs, and nothing that decides what it computes."""

    name: DisplayName = Field(min_length=1, description="name in tables; not part of the fingerprint")
    sharding: Sharding = Field(Ep(), description="how experts are distributed over ranks")
    balance: Balance = Field({"kind": "static"}, validate_default=True)
    """The planner of layouts."""
    predictor: Predictor = Field(Last(), description="the load that balance plans for")
    split: Split = Field({"kind": "even"}, validate_default=True)
    """How the current tokens are divided over replicas."""
    overlap: Overlap = Field(Sequential(), description="which stages run concurrently")
    reduction: Reduction = Field(Ordered(), description="the order of sums")
    replan_every: int = Field(1, ge=1, description="micro-batches between two layout plans")
    lag: int = Field(1, ge=0, description="micro-batches from a plan's newest load to its use; 0: the current counts")
    late_slots: int = Field(0, ge=0)
    """Slots per rank that are filled after routing if that is predicted to be faster."""

    @model_validator(mode="after")
    def _check(self) -> Self:
        if isinstance(self.sharding, Ep) and not self.sharding.lends and self.balance.kind != "static":
            raise ValueError(
                f"sharding=Ep() keeps every expert on its owner rank, but balance={type(self.balance).__name__}() "
                "moves experts; use balance=Static(), Ep(slots_per_rank=...) or Fsep(slots_per_rank=...)"
            )
        has_quotas = self.balance.has_quotas and self.balance.own_code is None
        if self.split.follows_planner and not (self.lag == 0 and has_quotas):
            with_quotas = ", ".join(f"{member.__name__}()" for member in Balance.kinds().values() if member.has_quotas)
            raise ValueError(
                f"split=Quotas() divides the counts that a plan was made on, but lag={self.lag} and "
                f"balance={type(self.balance).__name__}(); use lag=0 and one of {with_quotas}, or FlowSplit()"
            )
        if self.lag == 0:
            self._check_lag_0()
        if self.late_slots:
            self._check_late_slots()
        if isinstance(self.reduction, LayoutInvariant) and (reason := self.overlap.unfit_for_layout_invariant()):
            raise ValueError(reason)
        overlap = self.overlap
        if self.plans_on_counts and overlap.most_tokens is not None:
            raise ValueError(
                f"most_tokens={overlap.most_tokens} lets devices split tokens while no host waits, but "
                f"lag={self.lag} and late_slots={self.late_slots} choose experts on the hosts; "
                "use MegaKernel(most_tokens=None), or lag=1 and late_slots=0"
            )
        return self

    def _check_lag_0(self) -> None:
        if self.replan_every > 1:
            raise ValueError(
                f"replan_every={self.replan_every} keeps a layout, but lag=0 plans one on each micro-batch's own "
                "counts; use replan_every=1, or lag=1"
            )
        if reason := self.balance.unfit_for_lag_0():
            raise ValueError(reason)
        if isinstance(self.sharding, Ep) and (ahead := self.sharding.prefetch_layers):
            raise ValueError(
                f"prefetch_layers={ahead} sends copies before their layer runs, but lag=0 chooses them on the counts; "
                "use prefetch_layers=0, or lag=1"
            )

    def _check_late_slots(self) -> None:
        late, slots = self.late_slots, self.sharding.slots_per_rank
        if self.lag == 0:
            raise ValueError(
                f"late_slots={late} come after a layout that is there, but lag=0 plans all of it on the counts; "
                "use late_slots=0, or lag=1"
            )
        if isinstance(self.sharding, Ep) and not self.sharding.lends:
            raise ValueError(
                f"late_slots={late} hold experts of other ranks, but sharding=Ep() keeps every expert on its owner; "
                "use Ep(slots_per_rank=...) or Fsep(slots_per_rank=...)"
            )
        if slots is not None:
            _check_room(late, slots if isinstance(slots, tuple) else (slots,))

    @property
    def plans_on_counts(self) -> bool:
        """Whether experts are chosen on a micro-batch's own counts, so that some travel only when these are known."""
        return self.lag == 0 or self.late_slots > 0

    @property
    def plans_on_device(self) -> bool:
        """True if ranks plan without a host that waits: ``most_tokens`` is declared, and devices make the split."""
        return self.overlap.most_tokens is not None and self.split.on_device

    def routes_on_device(self, num_nodes: int) -> bool:
        """Returns whether devices can plan and route rows that travel as messages: they make the split, the layout
        does not follow from the counts, and rows go to their experts at once.
        """
        overlap = self.overlap
        return (
            not overlap.reaches_memory
            and not overlap.crosses_once(num_nodes)
            and self.split.on_device
            and not self.plans_on_counts
            and not isinstance(self.reduction, LayoutInvariant)
        )

    def early_slots(self, model: ModelShape, cluster: ClusterSpec) -> tuple[int, ...]:
        """Returns the slots of each rank, [R], that are filled before the counts are known: all but ``late_slots``. A
        rank without slots has no late slots either. They are checked as ``slots`` are.
        """
        slots_R, E = self.slots(model, cluster), model.num_experts
        if not self.late_slots:
            return slots_R
        _check_room(self.late_slots, slots_R)
        early_R = tuple(max(0, slots - self.late_slots) for slots in slots_R)
        if (missing := E - sum(early_R)) > 0:
            raise ValueError(
                f"late_slots={self.late_slots} leaves {sum(early_R)} slots for {E} experts before the counts are "
                f"known; use fewer, or at least {-(-missing // sum(slots > 0 for slots in slots_R))} slots more a rank"
            )
        return early_R

    def late_slots_R(self, model: ModelShape, cluster: ClusterSpec) -> tuple[int, ...]:
        """Returns the late slots of each rank, [R], which a rank without slots has none of; () if the strategy has
        none.
        """
        return tuple(self.late_slots * (slots > 0) for slots in self.slots(model, cluster)) if self.late_slots else ()

    def slots(self, model: ModelShape, cluster: ClusterSpec) -> tuple[int, ...]:
        """Returns the slots of each rank, [R], checked against the model: every expert must find a slot.

        ``Ep()`` has as many slots as a rank owns experts: ceil(E / R) in rank order, the last ranks fewer.
        ``slot_gb_per_rank`` has as many as its bytes hold experts in the compute dtype, and no rank more than E.
        """
        R, E, slots = cluster.num_ranks, model.num_experts, self.sharding.slots_per_rank
        if self.sharding.slot_gb_per_rank is not None:
            return self._slots_in_memory(self.sharding.slot_gb_per_rank, model, R)
        if slots is None:
            owned = -(-E // R)
            return tuple(max(0, min(owned, E - rank * owned)) for rank in range(R))
        if isinstance(slots, int):
            if slots * R < E:
                raise ValueError(
                    f"slots_per_rank={slots} gives {slots * R} slots on {R} ranks for {E} experts; "
                    f"use at least {-(-E // R)}"
                )
            return (slots,) * R
        one_per_rank("slots_per_rank", slots, R)
        if sum(slots) < E:
            raise ValueError(
                f"slots_per_rank={list(slots)} gives {sum(slots)} slots for {E} experts; add at least {E - sum(slots)}"
            )
        return slots

    @staticmethod
    def _slots_in_memory(
        slot_gb_per_rank: float | tuple[float, ...], model: ModelShape, num_ranks: int
    ) -> tuple[int, ...]:
        gb_R = one_per_rank("slot_gb_per_rank", slot_gb_per_rank, num_ranks)
        E, expert_bytes = model.num_experts, model.expert_parameters * model.bytes_per_element
        # whole bytes: 0.6 GB is 600,000,000 bytes although no float is 0.6
        slots_R = tuple(min(E, round(gb * BYTES_PER_GB) // expert_bytes) for gb in gb_R)
        missing = E - sum(slots_R)
        if missing > 0:
            if isinstance(slot_gb_per_rank, tuple):
                way_out = f"add room for {missing} more, {missing * expert_bytes / BYTES_PER_GB} GB"
            else:
                way_out = f"use at least {-(-E // num_ranks) * expert_bytes / BYTES_PER_GB}"
            raise ValueError(
                f"slot_gb_per_rank={slot_gb_per_rank} gives {sum(slots_R)} slots on {num_ranks} ranks for {E} experts "
                f"of {expert_bytes / BYTES_PER_GB} GB; {way_out}"
            )
        return slots_R


def _check_room(late_slots: int, slots_R: tuple[int, ...]) -> None:
    if fewer := [slots for slots in slots_R if 0 < slots < late_slots] or [0] * (max(slots_R) == 0):
        raise ValueError(
            f"late_slots={late_slots} are more than the {min(fewer)} slots that a rank has; "
            f"use at most {min(fewer)}, or give every rank that holds experts at least {late_slots}"
        )
