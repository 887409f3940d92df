"""Shorter ways through Triton's interpreter for what kernels do most, with the same bits: a fifth of the time."""

from __future__ import annotations

import importlib
import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from typing import Any

import numpy as np
import pytest

interpreter = importlib.import_module("triton.runtime.interpreter")
tl = importlib.import_module("triton.language")
Handle, tensor, constexpr = interpreter.TensorHandle, tl.tensor, tl.constexpr

# By the names of Triton's types.
INTEGERS: dict[str, Any] = {"int32": np.int32, "int64": np.int64}
NUMBERS = {**INTEGERS, "fp32": np.float32}
BITS = {**INTEGERS, "int1": np.bool_}


def _divided(left: Any, right: Any) -> Any:
    return (left - np.fmod(left, right)) // right


# What is shortened, for which types, and whether it compares.
OPERATORS: dict[str, tuple[Callable[..., Any], dict[str, Any], bool]] = {
    "__add__": (np.add, NUMBERS, False),
    "__sub__": (np.subtract, NUMBERS, False),
    "__mul__": (np.multiply, NUMBERS, False),
    "__floordiv__": (_divided, INTEGERS, False),
    "__mod__": (np.fmod, INTEGERS, False),
    "__and__": (np.bitwise_and, BITS, False),
    "__or__": (np.bitwise_or, BITS, False),
    "__lt__": (np.less, NUMBERS, True),
    "__le__": (np.less_equal, NUMBERS, True),
    "__gt__": (np.greater, NUMBERS, True),
    "__ge__": (np.greater_equal, NUMBERS, True),
    "__eq__": (np.equal, NUMBERS, True),
    "__ne__": (np.not_equal, NUMBERS, True),
}


def _block(element: Any, shape: tuple[int, ...]) -> Any:
    """The type of so many elements; one object for all."""
    known = element.__dict__.setdefault("_blocks", {})
    if shape not in known:
        known[shape] = tl.block_type(element, list(shape))
    return known[shape]


def _tensor(data: np.ndarray, element: Any, block: bool) -> Any:
    return tensor(_handle(data, element), _block(element, data.shape) if block else element)


def _handle(data: np.ndarray, element: Any) -> Any:
    handle = Handle.__new__(Handle)
    handle.data, handle.dtype, handle.attr = data, element, {}
    return handle


@cache
def _shapes(shape: tuple[int, ...]) -> tuple[Any, Any]:
    return tl.tuple([constexpr(size) for size in shape]), constexpr(math.prod(shape))


def _new_tensor(self: Any, handle: Any, type: Any) -> None:
    self.handle, self.type, self.dtype = handle, type, type.scalar
    self.shape, self.numel = _shapes(type.shape if type.is_block() else ())


def _quick(name: str, usual: Callable[..., Any]) -> Callable[..., Any]:
    operator, kinds, compares = OPERATORS[name]

    def quick(self: Any, other: Any, *args: Any, **kwargs: Any) -> Any:
        if isinstance(other, constexpr):
            other = other.value
        dtype = self.dtype
        number = kinds.get(dtype.name)
        if number is not None and type(self) is tensor:
            left, block = self.handle.data, self.type is not dtype and self.type.is_block()
            if type(other) is tensor and other.dtype is dtype:
                right, other_block = other.handle.data, other.type is not dtype and other.type.is_block()
                if not (block and other_block) or left.ndim == right.ndim:
                    return _tensor(operator(left, right), tl.int1 if compares else dtype, block or other_block)
            elif type(other) is int and number in (np.int32, np.int64) and -(1 << 31) <= other < 1 << 31:
                return _tensor(operator(left, number(other)), tl.int1 if compares else dtype, block)
        elif name == "__add__" and type(dtype) is tl.pointer_type:
            step = max(1, dtype.element_ty.primitive_bitwidth // 8)
            block = self.type.is_block()
            if type(other) is int:
                return _tensor(self.handle.data + np.uint64((step * other) % (1 << 64)), dtype, block)
            if type(other) is tensor and other.dtype.name in INTEGERS:
                right, other_block = other.handle.data, other.type.is_block()
                if not (block and other_block) or self.handle.data.ndim == right.ndim:
                    moved = self.handle.data + right.astype(np.uint64) * np.uint64(step)
                    return _tensor(moved, dtype, block or other_block)
        return usual(self, other, *args, **kwargs)

    return quick


def _plain(value: Any, dtype: Any) -> Any:
    """``value`` as numpy's of ``dtype``, None where that takes more than a cast between integers."""
    if isinstance(value, constexpr):
        value = value.value
    if type(value) is tensor:
        if value.dtype == dtype:
            return value.handle.data
        if value.dtype.name in INTEGERS and dtype.name in INTEGERS:
            return value.handle.data.astype(INTEGERS[dtype.name])
    elif dtype.name in NUMBERS and type(value) in (int, float) and (type(value) is int or dtype is tl.float32):
        return NUMBERS[dtype.name](value)
    elif value == 0 and type(value) in (int, float):
        return _numpy_dtype(dtype).type(0)
    return None


def _quick_load(usual: Callable[..., Any]) -> Callable[..., Any]:
    def load(pointer: Any, mask: Any = None, other: Any = None, **options: Any) -> Any:
        if not options and type(pointer) is tensor and type(pointer.dtype) is tl.pointer_type:
            kind, address = pointer.dtype.element_ty, pointer.handle.data
            default = _plain(0 if other is None else other, kind)
            if default is not None and kind is not tl.int1:
                kept = _kept(mask, address)
                if address.shape != kept.shape:
                    address = np.broadcast_to(address, kept.shape)
                default = np.asarray(default, _numpy_dtype(kind)) if mask is None else _filled(default, kept, kind)
                handles = _handle(address, pointer.dtype), _handle(kept, tl.int1), _handle(default, kind)
                found = interpreter.interpreter_builder.create_masked_load(*handles, None, False)
                return _tensor(found.data, kind, pointer.type.is_block())
        return usual(pointer, mask=mask, other=other, **options)

    return load


def _quick_store(usual: Callable[..., Any]) -> Callable[..., Any]:
    def store(pointer: Any, value: Any, mask: Any = None, **options: Any) -> Any:
        if not options and type(pointer) is tensor and type(pointer.dtype) is tl.pointer_type:
            kind, address = pointer.dtype.element_ty, pointer.handle.data
            data = _plain(value, kind)
            if data is not None and kind is not tl.int1:
                kept = _kept(mask, address)
                handles = _handle(address, pointer.dtype), _handle(np.broadcast_to(data, kept.shape), kind)
                return interpreter.interpreter_builder.create_masked_store(*handles, _handle(kept, tl.int1), None)
        return usual(pointer, value, mask=mask, **options)

    return store


def _kept(mask: Any, address: np.ndarray) -> np.ndarray:
    if isinstance(mask, constexpr):
        mask = mask.value
    if mask is None:
        return _all(address.shape)
    data = mask.handle.data if type(mask) is tensor else np.bool_(mask)
    if data.shape == address.shape:
        return data
    return np.broadcast_to(data, np.broadcast_shapes(address.shape, data.shape))


def _filled(default: Any, kept: np.ndarray, kind: Any) -> np.ndarray:
    return np.full(kept.shape, default, _numpy_dtype(kind)) if np.ndim(default) == 0 else default


@cache
def _all(shape: tuple[int, ...]) -> np.ndarray:
    return np.ones(shape, bool)


def _quick_where(usual: Callable[..., Any]) -> Callable[..., Any]:
    def where(condition: Any, x: Any, y: Any) -> Any:
        kinds = [each.dtype for each in (x, y) if type(each) is tensor]
        if type(condition) is tensor and condition.dtype is tl.int1 and kinds and kinds[0].name in NUMBERS:
            chosen = [_plain(each, kinds[0]) for each in (x, y) if type(each) is not tensor or each.dtype is kinds[0]]
            if len(chosen) == 2 and not any(each is None for each in chosen):
                block = any(type(each) is tensor and each.type.is_block() for each in (condition, x, y))
                return _tensor(np.where(condition.handle.data, *chosen), kinds[0], block)
        return usual(condition, x, y)

    return where


def _quick_extreme(usual: Callable[..., Any], extreme: Callable[..., Any]) -> Callable[..., Any]:
    def of_two(x: Any, y: Any, *args: Any, **options: Any) -> Any:
        kinds = [each.dtype for each in (x, y) if type(each) is tensor]
        if kinds and kinds[0].name in INTEGERS and not args and not options:
            both = [_plain(each, kinds[0]) for each in (x, y) if type(each) is not tensor or each.dtype is kinds[0]]
            if len(both) == 2 and not any(each is None for each in both):
                block = any(type(each) is tensor and each.type.is_block() for each in (x, y))
                return _tensor(extreme(*both), kinds[0], block)
        return usual(x, y, *args, **options)

    return of_two


def _quick_item(usual: Callable[..., Any]) -> Callable[..., Any]:
    def item(self: Any, places: Any) -> Any:
        if self.type.is_block() and isinstance(places, tuple) and None in places:
            places = [place.value if isinstance(place, constexpr) else place for place in places]
            if all(place is None or place == slice(None) for place in places):
                return _tensor(self.handle.data[tuple(places)], self.dtype, True)
        return usual(self, places)

    return item


def _arange(start: Any, end: Any) -> Any:
    start, end = (each.value if isinstance(each, constexpr) else each for each in (start, end))
    return _tensor(np.arange(start, end, dtype=np.int32), tl.int32, True)


def _quick_cast(usual: Callable[..., Any]) -> Callable[..., Any]:
    def to(self: Any, dtype: Any, *args: Any, **options: Any) -> Any:
        if isinstance(dtype, constexpr):
            dtype = dtype.value
        if not args and not options and type(self) is tensor:
            if dtype is self.dtype and dtype.name in NUMBERS:
                return self
            if dtype.name in INTEGERS and self.dtype.name in INTEGERS:
                return _tensor(self.handle.data.astype(INTEGERS[dtype.name]), dtype, self.type.is_block())
            if type(dtype) is tl.pointer_type and self.dtype.name == "int64":
                return _tensor(self.handle.data.view(np.uint64), dtype, self.type.is_block())
        return usual(self, dtype, *args, **options)

    return to


def _numpy_dtype(kind: Any) -> np.dtype:
    return interpreter._get_np_dtype(kind)


def _remembered(usual: Callable[[Any], np.dtype]) -> Callable[[Any], np.dtype]:
    def numpy_dtype(kind: Any) -> np.dtype:
        found = kind.__dict__.get("_numpy")
        if found is None:
            found = kind._numpy = usual(kind)
        return found

    return numpy_dtype


@contextmanager
def quick_tensors() -> Iterator[None]:
    """Inside ``_patch_lang``."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(tensor, "__init__", _new_tensor)
        patch.setattr(tensor, "to", _quick_cast(tensor.to))
        patch.setattr(tensor, "__getitem__", _quick_item(tensor.__getitem__))
        patch.setattr(Handle, "__post_init__", lambda self: None)
        patch.setattr(interpreter, "_get_np_dtype", _remembered(interpreter._get_np_dtype))
        for module in (tl, tl.core):
            patch.setattr(module, "load", _quick_load(module.load))
            patch.setattr(module, "store", _quick_store(module.store))
            patch.setattr(module, "where", _quick_where(module.where))
            patch.setattr(module, "minimum", _quick_extreme(module.minimum, np.minimum))
            patch.setattr(module, "maximum", _quick_extreme(module.maximum, np.maximum))
            patch.setattr(module, "arange", _arange)
        for name in OPERATORS:
            patch.setattr(tensor, name, _quick(name, getattr(tensor, name)))
        yield
