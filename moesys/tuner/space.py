"""The space that a tuner searches: values for each field of a ``Strategy``, declared as anything else is."""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Annotated, Any, Literal, TypeVar

from pydantic import BeforeValidator, Field, PlainSerializer, ValidationError

from moesys.config import (
    Balance,
    ClusterSpec,
    Declared,
    Ep,
    EvenSplit,
    Fsep,
    Last,
    MegaKernel,
    ModelShape,
    Overlap,
    Pipelined,
    Predictor,
    Sequential,
    Sharding,
    SlotCount,
    Split,
    Static,
    Strategy,
)

# What ``Space.replaced`` calls the fields that it changes at once.
PLACEMENT = "sharding, balance and split"
# Points that are drawn with the same plans.
_SHARING_PLANS = 4

T = TypeVar("T")
Listed = Annotated[tuple[T, ...], Field(min_length=1)]
Slots = SlotCount | tuple[SlotCount, ...]
_NONE = "none"
# TOML's lists have no null.
OrNone = Annotated[
    T | None,
    BeforeValidator(lambda value: None if value == _NONE else value),
    PlainSerializer(lambda value: _NONE if value is None else value, when_used="json"),
]


class EpChoices(Declared):
    """Values for the fields of ``Ep``; ``none`` in a file is no slots to lend."""

    kind: Literal["ep"] = "ep"
    slots_per_rank: Listed[OrNone[Slots]] = (None,)


class FsepChoices(Declared):
    """Values for the fields of ``Fsep``."""

    kind: Literal["fsep"] = "fsep"
    slots_per_rank: Listed[Slots]
    prefetch_layers: Listed[int] = (0,)
    delay_reshard: Listed[bool] = (False,)
    reshard_after_forward: Listed[bool] = (True,)
    restore: Listed[Literal["flat", "hierarchical"]] = ("flat",)


class SequentialChoices(Declared):
    """``Sequential`` has no fields."""

    kind: Literal["sequential"] = "sequential"


class PipelinedChoices(Declared):
    """Values for the fields of ``Pipelined``."""

    kind: Literal["pipelined"] = "pipelined"
    chunks: Listed[int]


class MegaKernelChoices(Declared):
    """Values for those fields of ``MegaKernel`` that change its speed; the others keep their defaults."""

    kind: Literal["mega_kernel"] = "mega_kernel"
    fused: Listed[Literal["both", "dispatch", "combine", "none"]] = ("both",)
    dispatch_share: Listed[float] = (0.25,)
    combine_share: Listed[float] = (0.0,)
    reduce_share: Listed[float] = (0.0,)
    granularity: Listed[Literal["tile", "expert"]] = ("tile",)
    tile_order: Listed[Literal["largest_first", "slots"]] = ("largest_first",)
    deduplicate: Listed[bool] = (False,)
    overlap_weight_gradients: Listed[bool] = (True,)
    fetch_rows: Listed[int] = (32,)
    sum_tokens: Listed[int] = (16,)
    tile_rows: Listed[OrNone[int]] = (None,)
    tile_columns: Listed[OrNone[int]] = (None,)
    warps: Listed[OrNone[int]] = (None,)
    stages: Listed[OrNone[int]] = (None,)
    programs: Listed[OrNone[int]] = (None,)


ShardingChoices = Annotated[EpChoices | FsepChoices, Field(discriminator="kind")]
OverlapChoices = Annotated[SequentialChoices | PipelinedChoices | MegaKernelChoices, Field(discriminator="kind")]


@dataclass(frozen=True)
class Neighbour:
    """A strategy that differs from another in ``field``, a dotted path as in TOML, and has ``value`` there."""

    field: str
    value: Any
    strategy: Strategy


class Space(Declared):
    """Every combination of one value a field. Sharding and overlap have fields that depend on their kind; members of
    the other unions are listed whole: ``split=(EvenSplit(), FlowSplit(max_inter_node=0.1))``.

    Combinations that ``Strategy`` refuses, or that do not fit the model, are no points.
    """

    sharding: Listed[ShardingChoices] = (EpChoices(),)
    balance: Listed[Balance] = (Static(),)
    predictor: Listed[Predictor] = (Last(),)
    split: Listed[Split] = (EvenSplit(),)
    overlap: Listed[OverlapChoices] = (SequentialChoices(),)
    replan_every: Listed[Annotated[int, Field(ge=1)]] = (1,)
    lag: Listed[Annotated[int, Field(ge=1)]] = (1,)

    def shardings(self) -> list[Sharding]:
        return [member for choices in self.sharding for member in _members(choices, _sharding)]

    def overlaps(self) -> list[Overlap]:
        return [member for choices in self.overlap for member in _members(choices, _overlap)]

    @property
    def num_combinations(self) -> int:
        """Of values; those that are no points, or one point in several words, are counted too."""
        others = (self.balance, self.predictor, self.split, self.replan_every, self.lag)
        count = len(self.shardings()) * len(self.overlaps())
        for values in others:
            count *= len(values)
        return count

    def points(self, setting: Setting) -> Iterator[Strategy]:
        """All points, each once."""
        fields = (
            self.shardings(),
            self.balance,
            self.predictor,
            self.split,
            self.overlaps(),
            self.replan_every,
            self.lag,
        )
        yield from _once(setting.point(*values) for values in itertools.product(*fields))

    def drawn(self, setting: Setting, draws: random.Random) -> Iterator[Strategy]:
        """Points in an order by chance, each once; kinds of sharding and overlap are as likely as each other, however
        many fields they have. Ends when chance finds nothing new.

        Some points after each other differ in nothing that plans depend on, so that they can share them.
        """
        shardings = [list(_by_slots(_members(choices, _sharding))) for choices in self.sharding]
        overlaps = [list(_members(choices, _overlap)) for choices in self.overlap]

        def draw() -> Iterator[Strategy | None]:
            while True:
                of_slots = draws.choice(draws.choice(shardings))
                balance, predictor = draws.choice(self.balance), draws.choice(self.predictor)
                split = draws.choice(self.split)
                when = draws.choice(self.replan_every), draws.choice(self.lag)
                for _ in range(_SHARING_PLANS):
                    sharding, overlap = draws.choice(of_slots), draws.choice(draws.choice(overlaps))
                    yield setting.point(sharding, balance, predictor, split, overlap, *when)

        yield from _once(draw(), patience=1000)

    def neighbours(self, strategy: Strategy, setting: Setting) -> Iterator[Neighbour]:
        """Points that differ from ``strategy`` in one field. Of another kind of sharding or overlap there are all
        members, as no field of one kind says what another's should be.
        """
        seen = {strategy.fingerprint()}
        for field, value, changed in self._changes(strategy):
            parts = {name: getattr(strategy, name) for name in _PARTS} | changed
            point = setting.point(*(parts[name] for name in _PARTS))
            if point is not None and (fingerprint := point.fingerprint()) not in seen:
                seen.add(fingerprint)
                yield Neighbour(field, value, point)

    def replaced(self, strategy: Strategy, setting: Setting, draws: random.Random, count: int) -> list[Neighbour]:
        """``strategy`` with another sharding, balance and split at once, as none of them pays without the others: all
        of them, or ``count`` by chance.
        """
        combinations = list(itertools.product(self.shardings(), self.balance, self.split))
        if len(combinations) > count:
            combinations = draws.sample(combinations, count)
        predictor, overlap = strategy.predictor, strategy.overlap
        points = (
            setting.point(sharding, balance, predictor, split, overlap, strategy.replan_every, strategy.lag)
            for sharding, balance, split in combinations
        )
        return [Neighbour(PLACEMENT, point.name, point) for point in _once(points)]

    def _changes(self, strategy: Strategy) -> Iterator[tuple[str, Any, dict[str, Any]]]:
        unions: tuple[tuple[str, Declared, tuple[Declared, ...], Callable[[dict[str, Any]], Declared]], ...] = (
            ("sharding", strategy.sharding, self.sharding, _sharding),
            ("overlap", strategy.overlap, self.overlap, _overlap),
        )
        for name, own, all_choices, make in unions:
            for choices in all_choices:
                if getattr(choices, "kind", "") != getattr(own, "kind", ""):
                    for member in _members(choices, make):
                        yield f"{name}.kind", member, {name: member}
                    continue
                for field in _fields(choices):
                    for value in getattr(choices, field):
                        if (changed := _replaced(own, field, value)) is not None:
                            yield f"{name}.{field}", value, {name: changed}
        for name in ("balance", "predictor", "split", "replan_every", "lag"):
            for value in getattr(self, name):
                yield name, value, {name: value}


_PARTS = ("sharding", "balance", "predictor", "split", "overlap", "replan_every", "lag")


@dataclass(frozen=True)
class Setting:
    """What decides which strategies can be told apart: their model, cluster and number of layers."""

    model: ModelShape
    cluster: ClusterSpec
    num_layers: int

    def point(
        self,
        sharding: Sharding,
        balance: Balance,
        predictor: Predictor,
        split: Split,
        overlap: Overlap,
        replan_every: int,
        lag: int,
    ) -> Strategy | None:
        """The strategy of these parts in its plainest words, named after them; None where there is none."""
        try:
            strategy = Strategy(
                name="point",
                sharding=sharding,
                balance=balance,
                predictor=predictor,
                split=split,
                overlap=overlap,
                replan_every=replan_every,
                lag=lag,
            )
            strategy.slots(self.model, self.cluster)
        except ValueError:
            return None
        return self.plainest(strategy)

    def plainest(self, strategy: Strategy) -> Strategy:
        """Fields that change nothing here get the value that says least, so that one computation is one point."""
        changes: dict[str, Any] = {}
        slots_R = strategy.slots(self.model, self.cluster)
        if isinstance(strategy.balance, Static):
            changes |= {"predictor": Last(), "replan_every": 1, "lag": 1}
        if sum(slots_R) == self.model.num_experts:
            # Every expert has one holder, and all splits send its rows there.
            changes["split"] = EvenSplit()
        sharding = strategy.sharding
        if isinstance(sharding, Fsep):
            one_node = self.cluster.num_nodes == 1 or max(self.cluster.node_sizes) == 1
            changes["sharding"] = sharding.replace(
                prefetch_layers=min(sharding.prefetch_layers, self.num_layers - 1),
                restore="flat" if one_node else sharding.restore,
            )
        plain = strategy.replace(**changes)
        return plain.replace(name=words_of(plain))


def words_of(strategy: Strategy) -> str:
    """A name that says what a strategy is; fields that have their default are left out."""
    parts = [_part_words(strategy.sharding), _part_words(strategy.balance)]
    if not isinstance(strategy.balance, Static):
        parts.append(_part_words(strategy.predictor))
    parts += [_part_words(strategy.split), _part_words(strategy.overlap)]
    parts += [f"replan {strategy.replan_every}"] * (strategy.replan_every > 1)
    parts += [f"lag {strategy.lag}"] * (strategy.lag > 1)
    return " + ".join(parts)


def value_words(value: Any) -> str:
    """A field's value as tables and comments show it."""
    return _part_words(value) if isinstance(value, Declared) else str(value).lower() if value is None else str(value)


def _part_words(part: Declared) -> str:
    fields = [name for name in type(part).model_fields if name != "kind"]
    said = [
        f"{name}={value}"
        for name in fields
        if (value := getattr(part, name)) != type(part).model_fields[name].get_default()
    ]
    kind: str = getattr(part, "kind", "")
    return f"{kind}({', '.join(said)})" if said else kind


# --- members of a union -----------------------------------------------------------------------------------------


def _fields(choices: Declared) -> list[str]:
    return [name for name in type(choices).model_fields if name != "kind"]


def _members(choices: Declared, make: Callable[[dict[str, Any]], T]) -> Iterator[T]:
    """Every combination of the values of ``choices`` that its class takes."""
    names = _fields(choices)
    for values in itertools.product(*(getattr(choices, name) for name in names)):
        try:
            yield make({"kind": getattr(choices, "kind", ""), **dict(zip(names, values, strict=True))})
        except ValidationError:
            continue


def _by_slots(shardings: Iterator[Sharding]) -> Iterator[list[Sharding]]:
    """Those together that have the same slots."""
    by_slots: dict[Any, list[Sharding]] = {}
    for sharding in shardings:
        by_slots.setdefault(sharding.slots_per_rank, []).append(sharding)
    yield from by_slots.values()


def _sharding(fields: dict[str, Any]) -> Sharding:
    return Ep(**fields) if fields["kind"] == "ep" else Fsep(**fields)


def _overlap(fields: dict[str, Any]) -> Overlap:
    match fields["kind"]:
        case "sequential":
            return Sequential()
        case "pipelined":
            return Pipelined(**fields)
        case _:
            return MegaKernel(**fields)


def _replaced(member: Declared, field: str, value: Any) -> Declared | None:
    # Slots are given as a number or as memory.
    changes = {field: value} | ({"slot_gb_per_rank": None} if field == "slots_per_rank" else {})
    try:
        return member.replace(**changes)
    except ValidationError:
        return None


def _once(strategies: Iterator[Strategy | None], patience: int | None = None) -> Iterator[Strategy]:
    """Those that are points, without repeats; ends after ``patience`` that were nothing new, one after another."""
    seen: set[str] = set()
    idle = 0
    for strategy in strategies:
        fingerprint = strategy.fingerprint() if strategy is not None else None
        if strategy is not None and fingerprint is not None and fingerprint not in seen:
            seen.add(fingerprint)
            idle = 0
            yield strategy
        elif patience is not None and (idle := idle + 1) >= patience:
            return
