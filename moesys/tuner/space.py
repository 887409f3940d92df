"""Declares what a tuner searches: values for fields of a ``Strategy``, by path."""

from __future__ import annotations

import itertools
import math
import random
import tomllib
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Annotated, Any, Self

import tomli_w
from pydantic import AfterValidator, ConfigDict, RootModel, ValidationError, model_serializer

from moesys.config import Declared, Sharding, Strategy
from moesys.tuner.setting import Setting
from moesys.tuner.space_paths import BY_FIELD, NONE, PARTS, checked_paths, choices_of, members_of

# What ``Space.replaced`` calls the fields that it changes at once.
PLACEMENT = "sharding, balance and split"
# Points that are drawn with the same plans.
_SHARING_PLANS = 4


@dataclass(frozen=True)
class Neighbour:
    """A strategy that differs from another in ``field``, a dotted path as in TOML, and has ``value`` there."""

    field: str
    value: Any
    strategy: Strategy


class Space(RootModel[dict[str, tuple[Any, ...]]]):
    """Every combination of one value a field of ``Strategy``; a field that is not named has its default.

    ``Space({"sharding": ("ep", "fsep"), "sharding.fsep.slots_per_rank": (2, 3), "overlap": ("sequential", "pipelined"),
    "overlap.chunks": (2, 4), "split": ("even", FlowSplit(max_inter_node=0.1)), "replan_every": (1, 8)})``

    Sharding, balance, predictor, split and overlap list kinds, or members whole. ``overlap.chunks`` lists values of
    that field for each kind of overlap that is listed and has it, ``sharding.fsep.slots_per_rank`` for one kind;
    members that are listed whole stay as they are. In a file, ``none`` stands for None.

    Combinations that ``Strategy`` refuses, or that do not fit the model, are no points. Raises ValidationError, which
    names the path, for fields and kinds that there are not, fields of kinds that are not listed, and values that a
    field refuses.
    """

    model_config = ConfigDict(frozen=True)

    root: Annotated[dict[str, tuple[Any, ...]], AfterValidator(checked_paths)] = {}

    def to_json(self) -> str:
        return self.model_dump_json(indent=2)

    @classmethod
    def from_json(cls, text: str | bytes) -> Self:
        return cls.model_validate_json(text)

    def to_toml(self) -> str:
        return tomli_w.dumps(self.model_dump(mode="json"))

    @classmethod
    def from_toml(cls, text: str) -> Self:
        return cls.model_validate(tomllib.loads(text))

    @model_serializer(mode="plain")
    def _serialised(self) -> dict[str, list[Any]]:
        return {path: [_in_file(value) for value in values] for path, values in self.root.items()}

    @property
    def num_combinations(self) -> int:
        """Of values; those that are no points, or one point in several words, are counted too."""
        return math.prod(len(self.values(part)) for part in PARTS)

    def values(self, part: str) -> list[Any]:
        """All values of a part of ``Strategy``: its members, of unions."""
        return [value for values in self.by_kind(part).values() for value in values]

    def by_kind(self, part: str) -> dict[str, list[Any]]:
        """Members of a union by kind, as listed; values of another part are of one kind."""
        return members_of(self.root, part)

    def points(self, setting: Setting) -> Iterator[Strategy]:
        """All points, each once."""
        yield from _once(setting.point(*values) for values in itertools.product(*map(self.values, PARTS)))

    def drawn(self, setting: Setting, draws: random.Random) -> Iterator[Strategy]:
        """Points in an order by chance, each once; kinds of sharding and overlap are as likely as each other, however
        many fields they have. Ends when chance finds nothing new.

        Some points after each other differ in nothing that plans depend on, so that they can share them.
        """
        shardings = [list(_by_slots(members)) for members in self.by_kind("sharding").values()]
        overlaps = list(self.by_kind("overlap").values())
        others = {part: self.values(part) for part in PARTS if part not in BY_FIELD}

        def draw() -> Iterator[Strategy | None]:
            while True:
                of_slots = draws.choice(draws.choice(shardings))
                parts = {part: draws.choice(values) for part, values in others.items()}
                for _ in range(_SHARING_PLANS):
                    sharding, overlap = draws.choice(of_slots), draws.choice(draws.choice(overlaps))
                    yield setting.point(sharding=sharding, overlap=overlap, **parts)

        yield from _once(draw(), patience=1000)

    def neighbours(self, strategy: Strategy, setting: Setting) -> Iterator[Neighbour]:
        """Points that differ from ``strategy`` in one field. Of another kind of sharding or overlap there are all
        members, as no field of one kind says what another's should be.
        """
        seen = {strategy.fingerprint()}
        for field, value, changed in self._changes(strategy):
            point = setting.point(**{part: getattr(strategy, part) for part in PARTS} | changed)
            if point is not None and (fingerprint := point.fingerprint()) not in seen:
                seen.add(fingerprint)
                yield Neighbour(field, value, point)

    def replaced(self, strategy: Strategy, setting: Setting, draws: random.Random, count: int) -> list[Neighbour]:
        """``strategy`` with another sharding, balance and split at once, as none of them pays without the others: all
        of them, or ``count`` by chance.
        """
        combinations = list(itertools.product(*map(self.values, ("sharding", "balance", "split"))))
        if len(combinations) > count:
            combinations = draws.sample(combinations, count)
        kept = {part: getattr(strategy, part) for part in PARTS}
        points = (
            setting.point(**kept | {"sharding": sharding, "balance": balance, "split": split})
            for sharding, balance, split in combinations
        )
        return [Neighbour(PLACEMENT, point.name, point) for point in _once(points)]

    def searched_fields(self, part: str, kind: str) -> tuple[str, ...]:
        """The fields of a kind whose values this space searches one by one: none where it lists no such kind."""
        return tuple(choices_of(self.root, part, kind))

    def _changes(self, strategy: Strategy) -> Iterator[tuple[str, Any, dict[str, Any]]]:
        for part in BY_FIELD:
            own = getattr(strategy, part)
            for kind, members in self.by_kind(part).items():
                if kind != own.kind:
                    yield from ((f"{part}.kind", member, {part: member}) for member in members)
                    continue
                for field, values in choices_of(self.root, part, kind).items():
                    for value in values:
                        if (changed := _replaced(own, field, value)) is not None:
                            yield f"{part}.{field}", value, {part: changed}
                whole = [value for value in self.root.get(part, ()) if getattr(value, "kind", "") == kind]
                yield from ((f"{part}.kind", member, {part: member}) for member in whole)
        for part in PARTS:
            if part not in BY_FIELD:
                yield from ((part, value, {part: value}) for value in self.values(part))


def _in_file(value: Any) -> Any:
    if isinstance(value, Declared):
        return value.model_dump(mode="json", exclude_none=True)
    return NONE if value is None else value


def _by_slots(shardings: list[Sharding]) -> Iterator[list[Sharding]]:
    """Those together that have the same slots."""
    by_slots: dict[Any, list[Sharding]] = {}
    for sharding in shardings:
        by_slots.setdefault(sharding.slots_per_rank, []).append(sharding)
    yield from by_slots.values()


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
