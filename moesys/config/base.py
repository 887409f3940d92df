"""The base of everything that users declare: frozen, strict about names, JSON and TOML, a fingerprint."""

from __future__ import annotations

import hashlib
import json
import re
import tomllib
from collections.abc import Iterator
from typing import Annotated, Any, ClassVar, Literal, Self

import tomli_w
from pydantic import AfterValidator, BaseModel, ConfigDict, Field, ValidationInfo

FINGERPRINT_SCHEMA = 2
BYTES_PER_GB = 10**9

DType = Literal["float32", "bfloat16", "float16"]
BYTES_PER_ELEMENT: dict[str, int] = {"float32": 4, "bfloat16": 2, "float16": 2}


# Characters that move the cursor, end a line or change the direction of what follows.
CONTROL = re.compile("[\x00-\x1f\x7f-\x9f\u2028-\u202e\u2066-\u2069\ud800-\udfff]")


def _printable(text: str, info: ValidationInfo) -> str:
    # A record may be older than this check: its names are read, and escaped where they are printed.
    if not info.context and (wrong := CONTROL.search(text)):
        raise ValueError(f"the name has the character {wrong[0]!r}; use one line without control characters")
    return text


LONGEST_NAME = 200
# A name that people give: it is printed in tables, written to terminals, and part of names of files.
DisplayName = Annotated[str, Field(max_length=LONGEST_NAME), AfterValidator(_printable)]


class Declared(BaseModel):
    """Base of everything a person declares: frozen, strict about names, re-validated by ``replace``."""

    model_config = ConfigDict(frozen=True, extra="forbid", revalidate_instances="always", allow_inf_nan=False)

    display_fields: ClassVar[frozenset[str]] = frozenset({"name"})

    def replace(self, **changes: Any) -> Self:
        """Returns a copy with some fields changed, validated as a whole."""
        fields = {field: getattr(self, field) for field in type(self).model_fields}
        return type(self).model_validate(fields | changes)

    def to_json(self, indent: int | None = 2) -> str:
        return self.model_dump_json(indent=indent)

    @classmethod
    def from_json(cls, text: str | bytes) -> Self:
        return cls.model_validate_json(text)

    def to_toml(self) -> str:
        """Returns the fields as TOML, without those that are None, which TOML cannot express: None is their default."""
        return tomli_w.dumps(self.model_dump(mode="json", exclude_none=True))

    @classmethod
    def from_toml(cls, text: str) -> Self:
        return cls.model_validate(toml_fields(text))

    def fingerprint(self) -> str:
        """Returns 64 hex digits: the sha256 of all fields, defaults included, without display names.

        Two declarations with the same fingerprint describe the same computation, whatever they are called.
        """
        identity = {"schema": FINGERPRINT_SCHEMA, "type": type(self).__name__, "fields": self._identity()}
        return hashlib.sha256(json.dumps(identity, sort_keys=True, separators=(",", ":")).encode()).hexdigest()

    def __repr_args__(self) -> Iterator[tuple[str | None, Any]]:
        """Yields only the fields that differ from their defaults, so that a printed declaration is short."""
        fields = type(self).model_fields
        for name, value in super().__repr_args__():
            if name not in fields or fields[name].is_required() or not _is_default(value, fields[name].default):
                yield name, value

    def _identity(self) -> dict[str, Any]:
        return {
            name: _identity(getattr(self, name)) for name in type(self).model_fields if name not in self.display_fields
        }


def toml_fields(text: str) -> dict[str, Any]:
    """Returns what a text in TOML declares. Raises ValueError for other texts."""
    try:
        return tomllib.loads(text)
    except RecursionError:
        raise ValueError("the TOML is nested too deeply") from None


def _is_default(value: Any, default: Any) -> bool:
    if isinstance(default, dict):
        # The default of a union is declared by its kind, so that its class is imported only when it is needed.
        return default == {"kind": getattr(value, "kind", None)} and not any(value.__repr_args__())
    return bool(value == default)


def _identity(value: Any) -> Any:
    if isinstance(value, Declared):
        return value._identity()
    if isinstance(value, tuple | list):
        return [_identity(item) for item in value]
    return value
