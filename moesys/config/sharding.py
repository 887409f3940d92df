"""Sharding: what it takes for a rank to hold an expert."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Annotated, Any, ClassVar, Literal, Self

from pydantic import Field, SerializerFunctionWrapHandler, model_serializer, model_validator

from moesys.config.base import Declaration, KindUnion

SlotCount = Annotated[int, Field(ge=0, strict=True)]
SlotGigabytes = Annotated[float, Field(ge=0, le=1e9)]
PrefetchLayers = Annotated[int, Field(ge=0, description="following linked layers whose experts are gathered ahead")]
DelayReshard = Annotated[bool, Field(description="send gradients during the next linked layer's backward")]


def one_per_rank(name: str, given: Any, num_ranks: int, of: str = "the cluster") -> tuple[Any, ...]:
    """Returns one value per rank, of one for all or of one each. Raises ValueError for another number of values."""
    values = tuple(given) if isinstance(given, Iterable) else (given,) * num_ranks
    if len(values) != num_ranks:
        raise ValueError(
            f"{name} names {len(values)} ranks but {of} has {num_ranks}; give one number a rank, or one for all"
        )
    return values


class Ep(Declaration):
    """Classic expert parallelism: every expert lives whole on its owner rank.

    With ``slots_per_rank``, or memory for them in ``slot_gb_per_rank``, an owner lends copies of its experts to other
    ranks for the length of a micro-batch, so that layout planners can replicate them; masters and optimizer state stay
    with the owner. ``prefetch_layers`` and ``delay_reshard`` send copies and their gradients behind other layers, as in
    ``Fsep``; copies that are chosen on the current counts (``late_slots``) are sent when these are known. Copies are
    kept for backward: sending them twice would cost more than the memory is worth.
    """

    kind: Literal["ep"] = "ep"
    slots_per_rank: SlotCount | tuple[SlotCount, ...] | None = None
    """Experts that a rank can hold, its own included: one number or one per rank; None: nothing is lent."""
    slot_gb_per_rank: SlotGigabytes | tuple[SlotGigabytes, ...] | None = None
    """Memory for slots, 1e9 bytes, instead of slots_per_rank."""
    lend: Literal["flat", "hierarchical"] = "flat"
    """a copy to every holder, or one per node (a numerics class)."""
    prefetch_layers: PrefetchLayers = 0
    delay_reshard: DelayReshard = False

    reshard_after_forward: ClassVar[bool] = False

    @model_validator(mode="after")
    def _check(self) -> Self:
        for name in ("lend", "prefetch_layers", "delay_reshard"):
            value, default = getattr(self, name), type(self).model_fields[name].default
            if value != default and not self.lends:
                raise ValueError(
                    f"{name}={value!r} says how copies travel, but without slots_per_rank or slot_gb_per_rank nothing "
                    f"is lent; give one of them, or {name}={default!r}"
                )
        if self.slots_per_rank is not None and self.slot_gb_per_rank is not None:
            raise ValueError(
                f"slots_per_rank={self.slots_per_rank} and slot_gb_per_rank={self.slot_gb_per_rank} both say how many "
                "experts a rank holds; give one of them"
            )
        return self

    def _identity(self) -> dict[str, Any]:
        return _without_added(super()._identity())

    @model_serializer(mode="wrap")
    def _written(self, write: SerializerFunctionWrapHandler) -> dict[str, Any]:
        return _without_added(write(self))

    @property
    def lends(self) -> bool:
        """Whether other ranks than its owner may hold an expert."""
        return self.slots_per_rank is not None or self.slot_gb_per_rank is not None


def _without_added(fields: dict[str, Any]) -> dict[str, Any]:
    """Returns the fields of ``Ep`` without those that an earlier release did not have, where they have their defaults:
    what it has recorded keeps its fingerprint and its text.
    """
    return {name: value for name, value in fields.items() if value or name not in ("prefetch_layers", "delay_reshard")}


class Fsep(Declaration):
    """Fully sharded expert parallelism (LAER-MoE, section 4): every expert is sharded over all ranks and restored into
    slots by all-to-all, so the layout may change every micro-batch.

    ``reshard_after_forward`` frees restored experts after forward and restores them again for backward (ZeRO-3);
    without it they are kept. ``delay_reshard`` sends gradients to their owners during the backward of the layer before.
    Slots are given as a number or as memory: ``slots_per_rank`` or ``slot_gb_per_rank``.
    """

    kind: Literal["fsep"] = "fsep"
    slots_per_rank: SlotCount | tuple[SlotCount, ...] | None = None
    """Experts that a rank can hold: one number or one per rank."""
    slot_gb_per_rank: SlotGigabytes | tuple[SlotGigabytes, ...] | None = None
    """Memory for slots, 1e9 bytes, instead of slots_per_rank."""
    prefetch_layers: PrefetchLayers = 0
    delay_reshard: DelayReshard = False
    reshard_after_forward: bool = True
    """Free experts after forward and gather them again in backward."""
    restore: Literal["flat", "hierarchical"] = "flat"
    """One all-to-all, or one copy per node that is spread inside it."""
    reshard: Literal["flat", "hierarchical"] = "flat"
    """Each gradient alone, or summed inside nodes first (a numerics class)."""

    @model_validator(mode="after")
    def _check(self) -> Self:
        if (self.slots_per_rank is None) == (self.slot_gb_per_rank is None):
            raise ValueError(
                f"slots_per_rank={self.slots_per_rank} and slot_gb_per_rank={self.slot_gb_per_rank}; "
                "give one of them, which says how many experts a rank holds"
            )
        return self

    @property
    def flat(self) -> bool:
        """This is true if every slice is sent directly from its owner to its holder, and its gradient directly back."""
        return self.restore == self.reshard == "flat"


Sharding = Annotated[Ep | Fsep, KindUnion()]
