"""Shorter ways through Triton's interpreter for what kernels do most, with the same bits."""

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


@contextmanager
def quick_tensors() -> Iterator[None]:
    """Inside ``_patch_lang``."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(tensor, "__init__", _new_tensor)
        patch.setattr(Handle, "__post_init__", lambda self: None)
        for name in OPERATORS:
            patch.setattr(tensor, name, _quick(name, getattr(tensor, name)))
        yield
