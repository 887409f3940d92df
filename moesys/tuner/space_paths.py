"""Resolves paths of a space: which fields of a ``Strategy`` they name, which values fit there, which members follow."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping
from typing import Annotated, Any, get_args

from pydantic import TypeAdapter, ValidationError

from moesys.config import Declared, Strategy
from moesys.config.member import Member

Listed = Mapping[str, tuple[Any, ...]]

# What can be searched: the fields of a strategy that decide its speed.
PARTS = tuple(name for name in Strategy.model_fields if name not in ("name", "reduction"))
# Unions whose kinds have fields that are searched one by one.
BY_FIELD = ("sharding", "overlap")
# TOML has no null.
NONE = "none"
# Fields that change no speed, and memory for slots, of which slots_per_rank says as much.
_NOT_SEARCHED = {"kind", "rows_cap", "most_tokens", "timeout_s", "slot_gb_per_rank"}


def _classes_of(part: str) -> dict[str, type[Declared]]:
    """moesys' members of a union by kind; none of a field that is no union."""
    if (union := _own_may_extend(part)) is not None:
        return dict(union.kinds())
    members = [member for member in get_args(Strategy.model_fields[part].annotation) if issubclass(member, Declared)]
    return {member.model_fields["kind"].get_default(): member for member in members}


def _own_may_extend(part: str) -> type[Member] | None:
    declared = Strategy.model_fields[part].annotation
    return declared if isinstance(declared, type) and issubclass(declared, Member) else None


def _adapter(declared: type[Declared], field: str) -> TypeAdapter[Any]:
    """What a field takes, its bounds included."""
    info = declared.model_fields[field]
    taken: Any = Annotated[(info.annotation, *info.metadata)] if info.metadata else info.annotation
    return TypeAdapter(taken)


def _listed(listed: Listed, part: str) -> tuple[Any, ...]:
    """A part's values: kinds and whole members, or numbers; where none are listed, the strategy's default."""
    default = Strategy.model_fields[part].get_default()
    return listed.get(part, (getattr(default, "kind", default),))


def fields_of(part: str, kind: str) -> tuple[str, ...]:
    """Fields of a kind that can be searched."""
    return tuple(name for name in _classes_of(part)[kind].model_fields if name not in _NOT_SEARCHED)


def choices_of(listed: Listed, part: str, kind: str) -> dict[str, tuple[Any, ...]]:
    """Values for each field of a kind that is listed by its name; no fields of one that is not."""
    if kind not in _listed(listed, part):
        return {}
    fields = _classes_of(part)[kind].model_fields
    return {
        name: listed.get(
            f"{part}.{kind}.{name}",
            listed.get(f"{part}.{name}", (fields[name].get_default(call_default_factory=True),)),
        )
        for name in fields_of(part, kind)
    }


def members_of(listed: Listed, part: str) -> dict[str, list[Any]]:
    """Members of a union by kind, as listed: of a name every combination of its fields' values that its class takes.

    Values of a part that is no union are of one kind, "".
    """
    found: dict[str, list[Any]] = {}
    classes = _classes_of(part)
    for value in _listed(listed, part):
        if isinstance(value, str):
            found.setdefault(value, []).extend(_combined(classes[value], choices_of(listed, part, value)))
        else:
            found.setdefault(getattr(value, "kind", ""), []).append(value)
    return found


def _combined(member: type[Declared], choices: dict[str, tuple[Any, ...]]) -> Iterator[Declared]:
    for values in itertools.product(*choices.values()):
        try:
            yield member(**dict(zip(choices, values, strict=True)))
        except ValidationError:
            continue


# --- what is refused --------------------------------------------------------------------------------------------


def checked_paths(listed: Listed) -> dict[str, tuple[Any, ...]]:
    """The same, with values as their fields have them. Raises ValueError for what fits no strategy."""
    found: dict[str, tuple[Any, ...]] = {}
    # Parts first, for which kinds are listed decides which fields there are.
    for path, values in sorted(listed.items(), key=lambda item: "." in item[0]):
        part, *rest = path.split(".")
        if part not in PARTS:
            raise ValueError(f"{path} is no field that can be searched; use one of {', '.join(PARTS)}")
        if not values:
            raise ValueError(f"{path} lists no value; list at least one, or leave it out for the default")
        if rest:
            adapters = [_adapter(_classes_of(part)[kind], rest[-1]) for kind in _kinds_meant(path, found)]
            found[path] = tuple(_field_value(path, value, adapters) for value in values)
        else:
            found[path] = tuple(_part_value(part, value) for value in values)
    for part in PARTS:
        for kind, members in members_of(found, part).items():
            if not members:
                raise ValueError(
                    f"{part} lists {kind!r}, of which no combination of values is one; "
                    f"list others for {', '.join(f'{part}.{name}' for name in fields_of(part, kind))}"
                )
    return {path: found[path] for path in listed}


def _kinds_meant(path: str, listed: Listed) -> list[str]:
    """The kinds that a path of two or three words is about. Raises ValueError where none of them is listed."""
    part, *kind, field = path.split(".")
    classes = _classes_of(part)
    named = [value for value in _listed(listed, part) if isinstance(value, str)]
    if len(kind) > 1 or (kind and kind[0] not in classes):
        raise ValueError(
            f"{path} names no kind of {part}; use {part}.{field}, or a kind before the field: {', '.join(classes)}"
        )
    having = [name for name in kind or classes if field in fields_of(part, name)]
    if not having:
        fields = dict.fromkeys(name for one in kind or classes for name in fields_of(part, one))
        known = f"use one of {', '.join(fields)}" if fields else f"{part} has values and no fields"
        raise ValueError(f"{path} is no field that can be searched; {known}")
    if meant := [name for name in having if name in named]:
        return meant
    raise ValueError(
        f"{path} is a field of {' and '.join(having)}, which {part} does not list; "
        f"list {having[0]!r} there, or leave {path} out"
    )


def _field_value(path: str, value: Any, adapters: list[TypeAdapter[Any]]) -> Any:
    """As all kinds take it. Raises ValueError where one refuses it."""
    try:
        first, *_ = [adapter.validate_python(value) for adapter in adapters]
        return first
    except ValidationError as error:
        if value == NONE:
            return _field_value(path, None, adapters)
        raise ValueError(f"{path}={value!r}: {_in_words(error)}") from None


def _part_value(part: str, value: Any) -> Any:
    """A kind, a member or a number. Raises ValueError for what is none."""
    classes = _classes_of(part)
    if isinstance(value, str) and ":" in value and _own_may_extend(part):
        # One's own by its import path, with its fields' defaults: as whole as a member that is listed with them.
        value = {"kind": value}
    if isinstance(value, str) and classes:
        if value not in classes:
            raise ValueError(f"{part}={value!r} is no kind of {part}; use one of {', '.join(classes)}")
        return value
    try:
        return _adapter(Strategy, part).validate_python(value)
    except ValidationError as error:
        raise ValueError(f"{part}={value!r}: {_in_words(error)}") from None


def _in_words(error: ValidationError) -> str:
    return "; ".join(detail["msg"].removeprefix("Value error, ") for detail in error.errors(include_url=False))
