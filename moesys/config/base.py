"""The base of everything that users declare: frozen, strict about names, JSON and TOML, a fingerprint."""

from __future__ import annotations

import hashlib
import json
import re
import reprlib
import tomllib
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from inspect import signature
from types import FunctionType
from typing import Annotated, Any, ClassVar, Literal, Self, get_args, get_origin

import tomli_w
from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    GetCoreSchemaHandler,
    ValidationError,
    ValidationInfo,
    ValidatorFunctionWrapHandler,
    model_validator,
)
from pydantic_core import CoreSchema, ErrorDetails, core_schema

from moesys.display import CONTROL
from moesys.kinds import did_you_mean, public_path

FINGERPRINT_SCHEMA = 2
BYTES_PER_GB = 10**9

# Short names of dtypes, which are understood where a declaration is made, and never written.
_DTYPES = {"fp32": "float32", "bf16": "bfloat16", "fp16": "float16"}
LongName = BeforeValidator(lambda dtype: _DTYPES.get(dtype, dtype) if isinstance(dtype, str) else dtype)
DType = Annotated[Literal["float32", "bfloat16", "float16"], LongName]
BYTES_PER_ELEMENT: dict[str, int] = {"float32": 4, "bfloat16": 2, "float16": 2}


def _printable(text: str, info: ValidationInfo) -> str:
    # A record may be older than this check: its names are read, and escaped where they are printed.
    if not info.context and (wrong := CONTROL.search(text)):
        raise ValueError(f"the name has the character {wrong[0]!r}; use one line without control characters")
    return text


LONGEST_NAME = 200
# The type of a name, which is printed in tables and is part of names of files.
DisplayName = Annotated[str, Field(max_length=LONGEST_NAME), AfterValidator(_printable)]


def check_seed(seed: int) -> int:
    """Returns the seed. Raises ValueError for one that draws the same as another: torch takes 32 bits of a seed, and
    numpy takes the others for those of a layer.
    """
    if not 0 <= seed < 2**32:
        raise ValueError(f"seed={seed} is out of range; use 0 <= seed < 2**32")
    return seed


# A record may be older than this check.
Seed = Annotated[int, Field(ge=0), AfterValidator(lambda seed, info: seed if info.context else check_seed(seed))]


class WordedModel(BaseModel):
    """Base of models in JSON and TOML, which raise ValueError with the message of ``in_words`` where pydantic raises
    ValidationError.
    """

    def __init__(self, /, *values: Any, **fields: Any) -> None:
        with _in_words_only():
            super().__init__(*values, **fields)

    # Nested models are validated without their __init__, so that an error has the path from the outermost one.
    __init__.__pydantic_base_init__ = True  # type: ignore[attr-defined]

    def __setattr__(self, name: str, value: Any) -> None:
        with _in_words_only():
            super().__setattr__(name, value)

    @classmethod
    def model_validate(cls, obj: Any, **options: Any) -> Self:
        with _in_words_only():
            return super().model_validate(obj, **options)

    @classmethod
    def model_validate_json(cls, json_data: str | bytes | bytearray, **options: Any) -> Self:
        with _in_words_only():
            return super().model_validate_json(json_data, **options)

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


class Declaration(WordedModel):
    """Base of everything a person declares: frozen, strict about names, re-validated by ``replace``."""

    model_config = ConfigDict(frozen=True, extra="forbid", revalidate_instances="always", allow_inf_nan=False)

    display_fields: ClassVar[frozenset[str]] = frozenset({"name"})

    def __init__(self, /, *values: Any, **fields: Any) -> None:
        if values:
            written = _call(type(self)).replace("...", reprlib.repr(values[0]), 1)
            raise TypeError(
                f"{type(self).__name__}({reprlib.repr(values[0])}) gives a value without the name of its field; write "
                f"{written}, with fields {_fields(type(self))}"
            )
        super().__init__(**fields)

    __init__.__pydantic_base_init__ = True  # type: ignore[attr-defined]
    # Help and completion list the fields only.
    __init__.__signature__ = signature(BaseModel.__init__)  # type: ignore[attr-defined]

    @model_validator(mode="before")
    @classmethod
    def _has_known_fields(cls, fields: Any) -> Any:
        _check_called(fields)
        if not isinstance(fields, dict):
            return fields
        for name, value in fields.items():
            if name not in cls.model_fields and cls.model_config.get("extra") != "allow":
                raise ValueError(
                    f"{cls.__name__} has no field {name!r}; its fields are {_fields(cls)}"
                    f"{did_you_mean(name, cls.model_fields)}"
                )
            if isinstance(value, Declaration) and get_origin(cls.model_fields[name].annotation) is tuple:
                kind = type(value).__name__
                raise ValueError(f"{name} must be a tuple of {kind}; write {name}=({kind.lower()},)")
        fields = python_value(fields)
        if missing := [name for name, field in cls.model_fields.items() if field.is_required() and name not in fields]:
            raise ValueError(f"{cls.__name__} needs {', '.join(missing)}; write {_call(cls)}")
        return fields

    def replace(self, **changes: Any) -> Self:
        """Returns a copy with some fields changed, validated as a whole."""
        fields = {field: getattr(self, field) for field in type(self).model_fields}
        return type(self).model_validate(fields | changes)

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


class KindUnion:
    """Annotates a union of declarations that their field ``kind`` tells apart. A kind alone stands for its defaults."""

    def __get_pydantic_core_schema__(self, source: Any, handler: GetCoreSchemaHandler) -> CoreSchema:
        members = {member.model_fields["kind"].default: member for member in get_args(source)}

        def chosen(value: Any, _: ValidatorFunctionWrapHandler, info: ValidationInfo) -> Any:
            kind, fields = kind_in(value)
            if not isinstance(kind, str) or kind not in members:
                raise ValueError(unknown_kind(kind, members))
            return of_class(members[kind], fields, info)

        # The union is the schema of JSON and of what is written.
        union = core_schema.tagged_union_schema(
            {kind: handler.generate_schema(member) for kind, member in members.items()}, "kind"
        )
        return core_schema.with_info_wrap_validator_function(chosen, union)


def kind_in(value: Any) -> tuple[Any, Any]:
    """Returns the kind that a value is of or names, and the value or, if it is a kind alone, the fields that it stands
    for.
    """
    _check_called(value)
    if isinstance(value, str):
        return value, {"kind": value}
    return value.get("kind") if isinstance(value, dict) else getattr(value, "kind", value), value


def unknown_kind(kind: Any, kinds: Iterable[str], others: str = "") -> str:
    """Returns why ``kind`` is refused: all ``kinds``, and the closest of them."""
    return f"kind={reprlib.repr(kind)} is not one of {', '.join(kinds)}{others}{did_you_mean(kind, kinds)}"


def of_class(declared: type[Declaration], fields: Any, info: ValidationInfo) -> Any:
    """Returns ``fields`` as a ``declared``. Errors keep the path inside it, so that callers can add their own."""
    return declared.__pydantic_validator__.validate_python(fields, context=info.context)


# --- errors -----------------------------------------------------------------------------------------------------------


def in_words(error: BaseException, *place: str) -> str:
    """Returns the message of an exception; that of pydantic in one line: ``overlap.chunks=0 should be ...; ...``.
    ``place``: names that paths begin with.
    """
    if not isinstance(error, ValidationError):
        return str(error)
    found: dict[str, list[ErrorDetails]] = {}
    for detail in error.errors(include_url=False):
        found.setdefault(_path((*place, *detail["loc"])), []).append(detail)
    # A union reports that a tuple is no number; an error inside the tuple says more.
    inner = [path for path in found if not any(other.startswith(f"{path}[") for other in found)]
    return "; ".join(_refusal(path, found[path]) for path in inner)


@contextmanager
def _in_words_only() -> Iterator[None]:
    try:
        yield
    except ValidationError as error:
        raise ValueError(in_words(error)) from None


def _path(loc: tuple[str | int, ...]) -> str:
    """Returns ``strategies[1].overlap.chunks``, without pydantic's names of the types in a union."""
    names = (of for of in loc if isinstance(of, int) or not (re.search(r"[-\[]", of) or of in ("int", "float", "str")))
    return "".join(f"[{of}]" if isinstance(of, int) else f".{of}" for of in names).removeprefix(".")


def _refusal(path: str, details: list[ErrorDetails]) -> str:
    """Returns what is wrong with one field, for each type that it may be of."""
    first, given = details[0], f"{path}{'=' if path else ''}{reprlib.repr(details[0]['input'])}"
    match first["type"]:
        case "missing":
            return f"{path} is missing"
        case "frozen_instance":
            return f"{path} cannot be changed, as declarations are frozen; make a copy with replace({path}=...)"
        case "value_error":
            message = first["msg"].removeprefix("Value error, ")
            return message if message.startswith(f"{path}=") else ": ".join(filter(None, (path, message)))
        case "model_type":
            return f"{given} should be an instance of {first['ctx']['class_name']}, or a dictionary of its fields"
    messages = dict.fromkeys(detail["msg"].removeprefix("Input should be ") for detail in details)
    if first["msg"].startswith("Input should be "):
        return f"{given} should be {' or '.join(messages)}"
    _, should, bound = first["msg"].partition(" should ")
    return f"{given} should {bound}" if path and should else f"{path and given + ': '}{first['msg']}"


def python_value(value: Any) -> Any:
    """Returns a scalar, an array or a tensor of numpy or torch as numbers of Python, also in tuples, lists and
    dictionaries; other values as they are. A field of strict integers would refuse it, and JSON does not have it.
    """
    if type(value) is dict:
        return {key: python_value(inner) for key, inner in value.items()}
    if type(value) in (tuple, list):
        return type(value)(map(python_value, value))
    return value.tolist() if hasattr(value, "tolist") and hasattr(value, "dtype") else value


def _fields(declared: type[BaseModel]) -> str:
    return ", ".join(name for name in declared.model_fields if name != "kind") or "none"


def check_type(kind: type, **given: Any) -> None:
    """Raises TypeError for an argument that is not of ``kind``, and ValueError for a class or a function."""
    for name, value in given.items():
        if not isinstance(value, kind):
            _check_called(value)
            raise TypeError(f"{name}={reprlib.repr(value)} is of type {type(value).__name__}; give {_call(kind)}")


def _check_called(value: Any) -> None:
    """Raises ValueError for a class or a function in the place of what it returns."""
    if isinstance(value, type | FunctionType):
        what = "class" if isinstance(value, type) else "function"
        raise ValueError(f"{value.__name__} is a {what}; write {_call(value)}")


def _call(called: type | FunctionType) -> str:
    """Returns how a class or a function is called, with the arguments that have no default."""
    needed = [f"{name}=..." for name, of in signature(called).parameters.items() if of.default is of.empty]
    path = called.__name__
    if isinstance(called, type) and called.__module__.startswith("moesys."):
        path = public_path(path) or f"{called.__module__}.{path}"
    return f"{path}({', '.join(needed)})"


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
    if isinstance(value, Declaration):
        return value._identity()
    if isinstance(value, tuple | list):
        return [_identity(item) for item in value]
    return value
