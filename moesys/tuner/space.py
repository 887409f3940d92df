"""The space that a tuner searches: values for fields of a ``Strategy``, by path, and how far the search goes."""

from __future__ import annotations

import itertools
import math
import random
from collections.abc import Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from typing import Annotated, Any, Self, get_args

from pydantic import (
    AfterValidator,
    ConfigDict,
    RootModel,
    TypeAdapter,
    ValidationError,
    model_serializer,
    model_validator,
)

from moesys.balance.flow.flow_split import FlowSplit
from moesys.config import Declaration, Fsep, Strategy, WindowMean
from moesys.config.base import WordedModel, in_words, unknown_kind
from moesys.config.member import Member
from moesys.kinds import did_you_mean
from moesys.tuner.tuned_workload import Setting

# The fields of a strategy that decide its speed.
PARTS = tuple(name for name in Strategy.model_fields if name not in ("name", "reduction"))
# Unions whose fields are searched one by one.
_BY_FIELD = ("sharding", "overlap")
# Fields that change no speed, and memory for slots, which slots_per_rank declares as well.
_NOT_SEARCHED = {"kind", "rows_cap", "most_tokens", "timeout_s", "slot_gb_per_rank"}
# TOML has no null.
_NONE = "none"
# Number of members of each other kind of sharding or overlap that are neighbours.
_OF_ANOTHER_KIND = 16
# Number of points with the same plans that are drawn in a row.
_SHARING_PLANS = 4
# Values of ``FlowSplit.max_inter_node`` in the default space.
_CAPS = (0.02, 0.05, 0.1)

Values = dict[str, tuple[Any, ...]]


@dataclass(frozen=True)
class SearchBounds:
    """How far ``tune`` searches in the cost model.

    budget: points to look at. seeds: number of the experiment's seeds; a few paired seeds tell strategies apart.
    memory_gb: memory of a rank in units of 1e9 bytes; None: as the cluster declares. model_layers: layers of the whole
    model, whose memory counts; None: those of the workload. seed: of everything that the search draws. jobs:
    processes that simulate, which do not change the result; None: one per core, 1: the calling process.
    """

    budget: int = 256
    seeds: int = 2
    memory_gb: float | None = None
    model_layers: int | None = None
    seed: int = 0
    jobs: int | None = None


def _checked(listed: Values) -> Values:
    """Returns the space with values as their fields have them. Raises ValueError for values that fit no strategy."""
    found: Values = {}
    # Parts come first, because the listed kinds decide which fields there are.
    for path, values in sorted(listed.items(), key=lambda item: "." in item[0]):
        part, *rest = path.split(".")
        if part not in PARTS:
            raise ValueError(
                f"{path} is no field that can be searched; use one of {', '.join(PARTS)}{did_you_mean(path, PARTS)}"
            )
        if not values:
            raise ValueError(f"{path} lists no value; list at least one, or leave it out for the default")
        if rest:
            adapters = [_adapter(_classes_of(part)[kind], rest[-1]) for kind in _kinds_meant(path, found)]
            found[path] = tuple(_field_value(path, value, adapters) for value in values)
        else:
            found[path] = tuple(_part_value(part, value) for value in values)
    return {path: found[path] for path in listed}


class Space(WordedModel, RootModel[dict[str, tuple[Any, ...]]]):
    """Every combination of one value per field of ``Strategy``; a field that is not named has its default.

    ``Space({"sharding": ("ep", "fsep"), "sharding.fsep.slots_per_rank": (2, 3), "overlap": ("sequential", "pipelined"),
    "overlap.chunks": (2, 4), "split": ("even", FlowSplit(max_inter_node=0.1)), "replan_every": (1, 8)})``

    Sharding, balance, predictor, split and overlap list kinds, or whole members. ``overlap.chunks`` lists values of
    that field for each listed kind of overlap that has it, ``sharding.fsep.slots_per_rank`` for one kind; members
    that are listed whole stay as they are. In a file, ``none`` stands for None.

    Combinations that ``Strategy`` refuses, or that do not fit the model, are no points. Raises ValueError, which names
    the path, for unknown fields and kinds, for fields of kinds that are not listed, and for values that
    a field refuses.
    """

    model_config = ConfigDict(frozen=True)

    root: Annotated[dict[str, tuple[Any, ...]], AfterValidator(_checked)] = {}

    @model_validator(mode="after")
    def _has_members(self) -> Self:
        for part in PARTS:
            if none := [kind for kind, members in self.by_kind(part).items() if not members]:
                fields = ", ".join(f"{part}.{name}" for name in _fields_of(part, none[0]))
                raise ValueError(
                    f"{part} lists {none[0]!r}, of which no combination of values is one; list others for {fields}"
                )
        return self

    @model_serializer(mode="plain")
    def _serialised(self) -> dict[str, list[Any]]:
        return {path: [_in_file(value) for value in values] for path, values in self.root.items()}

    @property
    def num_combinations(self) -> int:
        """The number of combinations, including those that are no points or equal to another point."""
        return math.prod(len(self.values(part)) for part in PARTS)

    def values(self, part: str) -> list[Any]:
        """Returns all values of a field of ``Strategy``; of a union its members."""
        return [value for values in self.by_kind(part).values() for value in values]

    def choices(self, part: str, kind: str) -> Values:
        """Returns the values of each field of a kind that is listed by name; no fields of another kind."""
        if kind not in _listed(self.root, part):
            return {}
        fields, found = _classes_of(part)[kind].model_fields, {}
        for name in _fields_of(part, kind):
            default = (fields[name].get_default(call_default_factory=True),)
            found[name] = self.root.get(f"{part}.{kind}.{name}", self.root.get(f"{part}.{name}", default))
        return found

    def by_kind(self, part: str) -> dict[str, list[Any]]:
        """Returns the values of a field by kind: of a listed name every combination that its class accepts. The values
        of a field that is no union have the kind "".
        """
        found: dict[str, list[Any]] = {}
        for value in _listed(self.root, part):
            if not isinstance(value, str):
                found.setdefault(getattr(value, "kind", ""), []).append(value)
                continue
            members, choices = found.setdefault(value, []), self.choices(part, value)
            for values in itertools.product(*choices.values()):
                with suppress(ValueError):
                    members.append(_classes_of(part)[value](**dict(zip(choices, values, strict=True))))
        return found

    def points(self, setting: Setting) -> Iterator[Strategy]:
        """Yields all points, each once."""
        combinations = itertools.product(*map(self.values, PARTS))
        yield from _once(setting.point(**dict(zip(PARTS, values, strict=True))) for values in combinations)

    def drawn(self, setting: Setting, draws: random.Random) -> Iterator[Strategy]:
        """Yields points in random order, each once, until chance finds nothing new. All kinds of sharding and overlap
        are equally likely, however many fields they have. Some points in a row have the same plans, and share them.
        """
        shardings: list[list[list[Any]]] = []
        for members in self.by_kind("sharding").values():
            by_slots: dict[Any, list[Any]] = {}
            for member in members:
                by_slots.setdefault(member.slots_per_rank, []).append(member)
            shardings.append(list(by_slots.values()))
        overlaps = list(self.by_kind("overlap").values())
        others = {part: self.values(part) for part in PARTS if part not in _BY_FIELD}

        def draw() -> Iterator[Strategy | None]:
            while True:
                of_slots = draws.choice(draws.choice(shardings))
                parts = {part: draws.choice(values) for part, values in others.items()}
                for _ in range(_SHARING_PLANS):
                    sharding, overlap = draws.choice(of_slots), draws.choice(draws.choice(overlaps))
                    yield setting.point(sharding=sharding, overlap=overlap, **parts)

        yield from _once(draw(), patience=1000)

    def neighbours(self, strategy: Strategy, setting: Setting, draws: random.Random) -> Iterator[Strategy]:
        """Yields points that differ from ``strategy`` in one field, each once. Another kind of sharding or overlap has
        some of its members drawn, because the fields of one kind do not decide those of another.
        """
        kept = {part: getattr(strategy, part) for part in PARTS}
        changes = ({part: value} for part, own in kept.items() for value in self._near(part, own, draws))
        points = _once(setting.point(**kept | change) for change in changes)
        return (point for point in points if point.fingerprint() != strategy.fingerprint())

    def _near(self, part: str, own: Any, draws: random.Random) -> Iterator[Any]:
        """Yields the values of a field that ``own`` may be replaced by."""
        for kind, members in self.by_kind(part).items():
            if part not in _BY_FIELD:
                yield from members
            elif kind != own.kind:
                yield from draws.sample(members, min(len(members), _OF_ANOTHER_KIND))
            else:
                yield from (value for value in self.root.get(part, ()) if getattr(value, "kind", "") == kind)
                for field, values in self.choices(part, kind).items():
                    # Slots are declared as a number or as memory.
                    other = {"slot_gb_per_rank": None} if field == "slots_per_rank" else {}
                    for value in values:
                        with suppress(ValueError):
                            yield own.replace(**{field: value} | other)


def default_space(setting: Setting, tokens_per_rank: int, *, mega_kernels: bool = True) -> Space:
    """Returns a space with a few values for each field that may pay on this model and cluster and fits in memory.

    It leaves out planners that take seconds per plan (``CpSat``), predictors that know the future, plans that come late
    (``lag``), slots beyond memory, and ``MegaKernel`` without ``mega_kernels`` or across several domains.
    """
    cluster = setting.cluster
    one_domain, across = len(cluster.domain_sizes) == 1, cluster.num_nodes > 1
    overlaps: Values = {"overlap": ("sequential", "pipelined"), "overlap.chunks": (2, 4, 8)}
    if across:
        overlaps |= {"overlap.node_dispatch": ("direct", "once"), "overlap.combine": ("ordered", "per_node")}
    if mega_kernels and one_domain:
        # To pull x again takes longer, and pays only where memory is short.
        keep_x = (True,) if setting.recompute or cluster.memory_gb is None else (True, False)
        overlaps |= {
            "overlap": ("sequential", "pipelined", "mega_kernel"),
            "overlap.fused": ("both", "dispatch", "combine"),
            "overlap.dispatch_share": (0.1, 0.25, 0.5),
            "overlap.combine_share": (0.0, 0.25),
            "overlap.granularity": ("tile", "expert"),
            "overlap.tile_order": ("largest_first", "slots"),
            "overlap.deduplicate": (False, True),
            "overlap.keep_x": keep_x,
        }
    if cluster.num_ranks == 1:
        return Space(overlaps)
    counts = _slot_counts(setting, tokens_per_rank)
    shardings: Values = {"sharding": ("ep",), "sharding.ep.slots_per_rank": (None, *counts)}
    if counts:
        ways = ("flat", "hierarchical") if across and max(cluster.node_sizes) > 1 else ("flat",)
        shardings |= {
            "sharding": ("ep", "fsep"),
            "sharding.fsep.slots_per_rank": counts,
            "sharding.prefetch_layers": tuple(range(min(3, setting.num_layers))),
            "sharding.delay_reshard": (False, True) if setting.num_layers > 1 else (False,),
            "sharding.reshard_after_forward": (True, False),
            **dict.fromkeys(("sharding.restore", "sharding.reshard", "sharding.lend"), ways),
        }
    return Space(
        {
            **shardings,
            "balance": ("static", "eplb", "laer", "flex_moe", "greedy"),
            "predictor": ("last", WindowMean(steps=5), "adaptive"),
            "split": (
                "even",
                "proportional",
                "flow",
                *(FlowSplit(max_inter_node=cap) for cap in _CAPS if not one_domain),
            ),
            **overlaps,
            "replan_every": (1, 4, 16),
        }
    )


def _slot_counts(setting: Setting, tokens_per_rank: int) -> tuple[int, ...]:
    """Returns numbers of slots per rank, from what the experts need to twice as many, as far as memory goes."""
    experts = setting.model.num_experts
    needed = -(-experts // setting.cluster.num_ranks)
    counts = sorted({needed, needed + 1, needed + 2, needed + -(-needed // 2), 2 * needed})

    def fits(slots: int) -> bool:
        plain = Strategy(name="fsep", sharding=Fsep(slots_per_rank=slots))
        return not setting.out_of_memory(plain, tokens_per_rank)

    return tuple(slots for slots in counts if slots <= experts and fits(slots))


# --- members of a space -----------------------------------------------------------------------------------------------


def _classes_of(part: str) -> dict[str, type[Declaration]]:
    """Returns the classes of a union by kind; none of a field that is no union."""
    if (union := _extensible(part)) is not None:
        return dict(union.kinds())
    members = [member for member in get_args(Strategy.model_fields[part].annotation) if issubclass(member, Declaration)]
    return {member.model_fields["kind"].get_default(): member for member in members}


_DEFAULT = Strategy(name="default")


def _extensible(part: str) -> type[Member] | None:
    """Returns the union of a field that takes classes of a user's own."""
    declared = Strategy.model_fields[part].annotation
    return declared if isinstance(declared, type) and issubclass(declared, Member) else None


def _listed(listed: Values, part: str) -> tuple[Any, ...]:
    """Returns the listed kinds, members or numbers of a field, by default the strategy's default."""
    default = getattr(_DEFAULT, part)
    return listed.get(part, (getattr(default, "kind", default),))


def _fields_of(part: str, kind: str) -> list[str]:
    return [name for name in _classes_of(part)[kind].model_fields if name not in _NOT_SEARCHED]


def _once(strategies: Iterable[Strategy | None], patience: float = math.inf) -> Iterator[Strategy]:
    """Yields each strategy once; ends after ``patience`` items in a row that were nothing new."""
    seen: set[str] = set()
    idle = 0
    for strategy in strategies:
        if strategy is not None and (fingerprint := strategy.fingerprint()) not in seen:
            seen.add(fingerprint)
            idle = 0
            yield strategy
        elif (idle := idle + 1) >= patience:
            return


def _in_file(value: Any) -> Any:
    if isinstance(value, Declaration):
        return value.model_dump(mode="json", exclude_none=True)
    return _NONE if value is None else value


# --- values that are refused ------------------------------------------------------------------------------------------


def _adapter(declared: type[Declaration], field: str) -> TypeAdapter[Any]:
    """Returns the validation of a field, including its bounds."""
    info = declared.model_fields[field]
    taken: Any = Annotated[(info.annotation, *info.metadata)] if info.metadata else info.annotation
    return TypeAdapter(taken)


def _kinds_meant(path: str, listed: Values) -> list[str]:
    """Returns the kinds that a path of two or three words is about. Raises ValueError where none of them is listed."""
    part, *kind, field = path.split(".")
    classes = _classes_of(part)
    if len(kind) > 1 or (kind and kind[0] not in classes):
        raise ValueError(
            f"{path} names no kind of {part}; use {part}.{field}, or a kind before the field: {', '.join(classes)}"
        )
    having = [name for name in kind or classes if field in _fields_of(part, name)]
    if not having:
        fields = dict.fromkeys(name for one in kind or classes for name in _fields_of(part, one))
        known = (
            f"use one of {', '.join(fields)}{did_you_mean(field, fields)}"
            if fields
            else f"{part} has values and no fields"
        )
        raise ValueError(f"{path} is no field that can be searched; {known}")
    if meant := [name for name in having if name in _listed(listed, part)]:
        return meant
    raise ValueError(
        f"{path} is a field of {' and '.join(having)}, which {part} does not list; "
        f"list {having[0]!r} there, or leave {path} out"
    )


def _field_value(path: str, value: Any, adapters: list[TypeAdapter[Any]]) -> Any:
    """Returns the value as all kinds accept it. Raises ValueError where one refuses it."""
    try:
        first, *_ = [adapter.validate_python(value) for adapter in adapters]
        return first
    except ValidationError as error:
        if value == _NONE:
            return _field_value(path, None, adapters)
        raise ValueError(in_words(error, path)) from None


def _part_value(part: str, value: Any) -> Any:
    """Returns a kind, a member or a number. Raises ValueError for other values."""
    classes = _classes_of(part)
    if isinstance(value, str) and ":" in value and _extensible(part):
        # A class of a user's own by its import path, with its fields' defaults.
        value = {"kind": value}
    if isinstance(value, str) and classes:
        if value not in classes:
            raise ValueError(f"{part}: {unknown_kind(value, classes)}")
        return value
    try:
        return _adapter(Strategy, part).validate_python(value)
    except ValidationError as error:
        raise ValueError(in_words(error, part)) from None
