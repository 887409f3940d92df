"""Damaged and forged inputs, made from valid ones; and the limits under which they are read.

All is drawn from a ``random.Random``, so that a seed gives the same input again.
"""

from __future__ import annotations

import copy
import json
import math
import os
import re
import resource
import signal
import struct
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from random import Random
from types import FrameType
from typing import Any

import tomli_w

# Texts that stand in a file as they are, where a value was.
RAW = (
    *("[" * 100_000 + "]" * 100_000, '{"a":' * 50_000 + "1" + "}" * 50_000, "[" * 150 + "]" * 150),
    *("NaN", "-Infinity", "inf", "1e999", "-1e999", "9" * 5000, "0x1F", "1_0", "01", "+1", "-", '"\\ud800"', "{", ","),
)
WEIRD: tuple[Any, ...] = (
    *(None, True, False, 0, 1, -1, 2, 3, 7, 255, 2**31, -(2**31), 2**53 + 1, 2**63 - 1, 2**63, 2**64, -(2**70)),
    *(10**12, 10**400, 0.5, -0.0, 1.5, 1e-320, 1e16, 1e308, math.inf, -math.inf, math.nan),
    *(
        "",
        " ",
        "0",
        "none",
        "x",
        "x" * 70_000,
        "\0",
        "a\x1b[31m\nb",
        "\x85\u2028\u202e",
        "\ud800",
        "../../../etc/hosts",
    ),
    *("<script>", "{seed}", "%s", "é" * 300, "a.b", "a:b", "json:JSONDecoder", "/dev/full"),
    *([], {}, [[]], [1, 2], ["x"], {"kind": "x"}, {"kind": "json:JSONDecoder"}, [[1, 2], [3]], {"": {"": []}}),
    *map("\x01{}\x01".format, range(len(RAW))),
)


def altered(draw: Random, tree: Any) -> Any:
    """Returns a copy of what JSON can hold, in which some values are others, missing, added or swapped."""
    holder = [copy.deepcopy(tree)]
    for _ in range(draw.choice((1, 1, 1, 1, 2, 3))):
        places = list(_places(holder))
        # All but the whole, which is drawn seldom.
        at, key = draw.choice(places[1:] if len(places) > 1 and draw.random() < 0.98 else places)
        value, change = at[key], draw.randrange(8)
        if change == 0 and at is not holder:
            del at[key]
        elif change == 1:
            other, name = draw.choice(places)
            at[key] = copy.deepcopy(other[name])
        elif change == 2 and type(value) in (int, float):
            at[key] = draw.choice((-value, value + 1, value - 1, 2 * value, value * 1000, value / 3, str(value)))
        elif change == 3 and isinstance(value, list):
            at[key] = draw.choice(
                (value[::-1], value[1:], value * 2, value * 50, [*value, draw.choice(WEIRD)], [value])
            )
        elif change == 3 and isinstance(value, dict):
            name = draw.choice([*value, "further", "kind", "name", "schema", "", "\x1b"])
            value[name] = copy.deepcopy(draw.choice(WEIRD))
        else:
            at[key] = copy.deepcopy(draw.choice(WEIRD))
    return holder[0]


def _places(at: Any) -> Iterator[tuple[Any, Any]]:
    for key in range(len(at)) if isinstance(at, list) else list(at):
        yield at, key
        if isinstance(at[key], list | dict):
            yield from _places(at[key])


def mangled(draw: Random, data: bytes) -> bytes:
    """Returns bytes with a few changes: flipped, cut, inserted, repeated; and other sizes where numbers stand."""
    found = bytearray(data)
    for _ in range(draw.choice((1, 1, 2, 4))):
        at = draw.randrange(len(found) + 1)
        end = min(len(found), at + draw.choice((1, 1, 2, 8, 64, 400)))
        change = draw.randrange(9)
        if change == 0:
            del found[at:]
        elif change == 1:
            del found[at:end]
        elif change == 2:
            found[at:at] = draw.choice((b"\n", b"\0", b"\r\n", b"\xff", b'"', b"{", b"]", b"9", draw.randbytes(5)))
        elif change == 3:
            found[at:at] = found[at:end]
        elif change == 4:
            found[at:end] = draw.randbytes(end - at)
        elif change == 5 and (numbers := list(re.finditer(rb"\d+", found))):
            number = draw.choice(numbers)
            found[slice(*number.span())] = draw.choice((b"0", b"-1", b"1", b"3", b"999999999999", b"1" * 30, b"1e9"))
        elif change == 6 and len(found) >= 8:
            at = draw.choice((0, draw.randrange(len(found) - 7)))
            found[at : at + 8] = struct.pack("<Q", draw.choice((0, 1, 2**31, 2**40, 2**63, 2**64 - 1, len(found))))
        elif at < len(found):
            found[at] ^= 1 << draw.randrange(8)
    return bytes(found)


def json_bytes(draw: Random, tree: Any, share: float = 0.75) -> bytes:
    """Returns a tree as JSON, changed: with probability ``share`` its values, else its bytes."""
    if draw.random() >= share:
        return mangled(draw, json.dumps(tree).encode())
    text = _with_raw(json.dumps(altered(draw, tree), ensure_ascii=draw.random() < 0.5))
    if draw.random() < 0.1 and (keys := list(re.finditer(r'"\w+": ', text))):
        key = draw.choice(keys)
        text = text[: key.start()] + key[0] + draw.choice(("0", "null", "[]", '"x"')) + ", " + text[key.start() :]
    return text.encode("utf-8", "surrogatepass")


def json_lines(draw: Random, trees: list[Any]) -> bytes:
    """Returns lines of JSON of which one is changed, missing or there twice; or the bytes of all are changed."""
    lines = [json.dumps(tree).encode() for tree in trees]
    which = draw.randrange(len(lines))
    match draw.randrange(8):
        case 0:
            return mangled(draw, b"".join(line + b"\n" for line in lines))
        case 1:
            lines[which : which + 1] = [lines[which]] * draw.choice((0, 2))
        case _:
            lines[which] = json_bytes(draw, trees[which])
    return b"".join(line + b"\n" for line in lines)


def toml_bytes(draw: Random, tree: Any) -> bytes:
    """Returns a tree as TOML, changed: its values or its bytes. TOML has no null."""
    if draw.random() < 0.3:
        return mangled(draw, tomli_w.dumps(_without_none(tree)).encode())
    changed = _without_none(altered(draw, tree))
    return _with_raw(tomli_w.dumps(changed if isinstance(changed, dict) else {"": changed})).encode(
        "utf-8", "surrogatepass"
    )


def _with_raw(text: str) -> str:
    return re.sub(r'"\\u0001(\d+)\\u0001"', lambda found: RAW[int(found[1])], text)


def _without_none(tree: Any) -> Any:
    if isinstance(tree, dict):
        return {name: _without_none(value) for name, value in tree.items() if value is not None}
    return [_without_none(value) for value in tree if value is not None] if isinstance(tree, list) else tree


def json_or_toml(draw: Random, tree: Any, stem: Path) -> Path:
    """Writes a changed tree to a .json or .toml file and returns its path."""
    path, make = draw.choice(((stem.with_suffix(".json"), json_bytes), (stem.with_suffix(".toml"), toml_bytes)))
    path.write_bytes(make(draw, tree))
    return path


# --- limits -------------------------------------------------------------------------------------------------------


class HangError(BaseException):
    """A reader took too much of the processor's time. No handler of errors takes it for a damaged file."""


@contextmanager
def memory_limit(num_bytes: int) -> Iterator[None]:
    """Lets this process take so many more bytes; beyond them it gets MemoryError."""
    before = resource.getrlimit(resource.RLIMIT_AS)
    taken = int(Path("/proc/self/statm").read_text().split()[0]) * os.sysconf("SC_PAGE_SIZE")
    resource.setrlimit(resource.RLIMIT_AS, (taken + num_bytes, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_AS, before)


@contextmanager
def time_limit(seconds: float) -> Iterator[None]:
    """Raises HangError when the block has computed for so many seconds; other programs do not count."""

    def stop(number: int, frame: FrameType | None) -> None:
        raise HangError(f"it computed for {seconds} s")

    before = signal.signal(signal.SIGPROF, stop)
    signal.setitimer(signal.ITIMER_PROF, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)
        signal.signal(signal.SIGPROF, before)


@contextmanager
def refused(*names: str, kinds: tuple[type[Exception], ...] = (ValueError, OSError)) -> Iterator[None]:
    """Takes an error whose text has one of ``names``; any other error is a fault."""
    try:
        yield
    except AssertionError:
        raise
    except kinds as error:
        if not any(name in str(error) for name in names):
            raise AssertionError(f"names no file or field: {error!r:.300}") from error
