"""How readers are tried on damaged and forged inputs: each returns what the input says, or raises an error that names
the file, the line or the field. None raises anything else, computes for long, or takes much memory.

A reader is a function that makes valid inputs with moesys in a folder, and returns the function that tries one changed
input. MOESYS_SWEEP=1 tries 5,000 of each. A fault names its seed, with which ``fault_of`` tries it again.


Inputs are made from valid ones by a ``random.Random``, so that a seed gives the same input again.
"""

from __future__ import annotations

import contextlib
import copy
import io
import json
import math
import os
import random
import re
import resource
import signal
import struct
import traceback
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from random import Random
from types import FrameType
from typing import Any

import numpy as np
import pytest
import tomli_w
import typer

# Texts that stand in a file as they are, where a value was.
RAW = (
    *("[" * 100_000 + "]" * 100_000, '{"a":' * 50_000 + "1" + "}" * 50_000, "[" * 150 + "]" * 150),
    *("NaN", "-Infinity", "inf", "1e999", "-1e999", "9" * 5000, "0x1F", "1_0", "01", "+1", "-", '"\\ud800"', "{", ","),
)
WEIRD: tuple[Any, ...] = (
    *(None, True, False, 0, 1, -1, 2, 3, 7, 255, 2**31, -(2**31), 2**53 + 1, 2**63 - 1, 2**63, 2**64, -(2**70)),
    *(10**12, 10**400, 0.5, -0.0, 1.5, 1e-320, 1e16, 1e308, math.inf, -math.inf, math.nan),
    *("", " ", "0", "none", "x", "x" * 70_000, "\0", "a\x1b[31m\nb", "\x85\u2028\u202e", "\ud800"),
    *("../../../etc/hosts", "<script>", "{seed}", "%s", "é" * 300, "a.b", "a:b", "json:JSONDecoder", "/dev/full"),
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
    text = tomli_w.dumps(changed if isinstance(changed, dict) else {"": changed})
    return _with_raw(text).encode("utf-8", "surrogatepass")


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


def other_counts(draw: Random, array: Any) -> Any:
    """Returns an array with another dtype, shape or value, or as it is."""
    array = array.astype(np.int64)
    match draw.randrange(14):
        case 0:
            return array.astype(draw.choice((np.float64, np.bool_, np.uint8, np.uint64, np.int8, "m8[s]", "c16", "S5")))
        case 1:
            return array.reshape(draw.choice(((-1,), (*array.shape, 1), (1, *array.shape)))).squeeze()
        case 2:
            return array[..., :0] if draw.random() < 0.5 else array[:0]
        case 3:
            array.flat[draw.randrange(array.size)] = draw.choice((-1, 0, 10**6, 2**62, 2**63 - 1, -(2**63)))
        case 4:
            return array.astype(np.float64) + draw.choice((0.5, np.nan, np.inf))
        case 5:
            return array.astype(np.uint64) + np.uint64(draw.choice((2**63, 2**64 - 200)))
        case 6:
            return np.asfortranarray(array).astype(draw.choice((">i8", ">u2", "<i4")))
        case 7:
            return array.swapaxes(0, -1)
    return array


def npy(draw: Random, array: Any) -> bytes:
    """Returns an array as .npy, whose head may be a lie."""
    np.lib.format.write_array(buffer := io.BytesIO(), np.asanyarray(array), allow_pickle=False)
    data = buffer.getvalue()
    if draw.random() < 0.15:
        head = 10 + int.from_bytes(data[8:10], "little")
        wrong = mangled(draw, data[10:head])[: head - 10].ljust(head - 10)
        if draw.random() < 0.5:
            shapes = ("(99999999999,)", "(1, 1, 9999999, 99999999)", "(-1,)", "(0,)", "((((1,),),),)", "(2.5,)")
            lie = f"{{'descr': '<i8', 'fortran_order': False, 'shape': {draw.choice(shapes)}}}"
            wrong = lie.encode().ljust(head - 10)
        data = data[:10] + wrong + data[head:]
    return data


# --- limits -------------------------------------------------------------------------------------------------------


class HangError(BaseException):
    """A reader took too much of the processor's time. No handler of errors takes it for a damaged file."""


@contextmanager
def limits(num_bytes: int = 3 << 30, seconds: float = 10.0) -> Iterator[None]:
    """Lets this process take so many more bytes, beyond which it gets MemoryError, and raises HangError when the block
    has computed for so many seconds; other programs do not count.
    """

    def stop(number: int, frame: FrameType | None) -> None:
        raise HangError(f"it computed for {seconds} s")

    memory = resource.getrlimit(resource.RLIMIT_AS)
    taken = int(Path("/proc/self/statm").read_text().split()[0]) * os.sysconf("SC_PAGE_SIZE")
    resource.setrlimit(resource.RLIMIT_AS, (taken + num_bytes, memory[1]))
    before = signal.signal(signal.SIGPROF, stop)
    signal.setitimer(signal.ITIMER_PROF, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)
        signal.signal(signal.SIGPROF, before)
        resource.setrlimit(resource.RLIMIT_AS, memory)


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


# --- readers -------------------------------------------------------------------------------------------------------

Attempt = Callable[[Random], None]
Reader = Callable[[Path], Attempt]
SWEEPS = os.environ.get("MOESYS_SWEEP") == "1"
BATCHES = [range(first, first + 250) for first in range(0, 5000, 250)] if SWEEPS else [range(12)]


def every_reader(*readers: Reader) -> pytest.MarkDecorator:
    """Returns the mark of a test that tries all readers on all seeds."""
    cases = [
        pytest.param(reader, seeds, id=f"{reader.__name__}-{seeds.start}") for reader in readers for seeds in BATCHES
    ]
    return pytest.mark.parametrize(("reader", "seeds"), cases)


def check_refusal(read: Callable[[Path], object], message: str, folder: Path) -> None:
    with limits(), pytest.raises(ValueError, match=message):
        read(folder)


def faults(reader: Reader, seeds: range, folder: Path) -> str:
    """Returns what is wrong with how a reader takes the inputs of the seeds; "" if nothing is."""
    attempt = reader(folder)
    found = [fault for seed in seeds if (fault := fault_of(attempt, reader.__name__, seed))]
    return f"{len(found)} of {len(seeds)}:\n" + "\n".join(found) if found else ""


def fault_of(attempt: Attempt, name: str, seed: int) -> str:
    """Returns what is wrong with how a reader takes the input of a seed; "" if nothing is."""
    try:
        with limits():
            attempt(random.Random(f"{name} {seed}"))
    except (Exception, HangError) as error:
        root = str(Path(__file__).parents[2])
        frames = [frame for frame in traceback.extract_tb(error.__traceback__) if frame.filename.startswith(root)]
        where = f"{Path(frames[-1].filename).name}:{frames[-1].lineno}"
        return f"{name}, seed {seed}: {where} {type(error).__name__}: {str(error)[:300]!r}"
    return ""


def same(read: Any, said: Any) -> bool:
    """Returns whether what was read is what an input said: numbers may be written as text, and defaults left out."""
    if isinstance(said, dict) and isinstance(read, dict):
        return all(name in read and same(read[name], value) for name, value in said.items())
    if isinstance(said, list | tuple) and isinstance(read, list | tuple):
        return len(read) == len(said) and all(map(same, read, said))
    if isinstance(said, str) and isinstance(read, bool | int | float):
        return str(read).lower() == said.strip().lower() or float(said) == read
    if isinstance(said, int) and isinstance(read, float):
        return float(said) == read
    if isinstance(said, float) and read in ("NaN", "Infinity", "-Infinity"):
        return same(float(read), said)
    # JSON has no nan, and null stands for it.
    return read == said or (read != read and (said is None or said != said))


def known(said: Any, read: Any) -> Any:
    """Returns what an input said, without fields that its reader does not have."""
    both = isinstance(said, dict) and isinstance(read, dict)
    return {name: known(value, read[name]) for name, value in said.items() if name in read} if both else said


def json_said(data: bytes) -> Any:
    """Returns what JSON says by Python's own reader."""
    return json.loads(data.decode("utf-8", "surrogatepass"))


def printed_by(command: Callable[..., Any], *arguments: Any) -> str:
    """Returns what a command prints. Raises ValueError with it where the command refuses its input."""
    told = io.StringIO()
    code = 0
    with contextlib.redirect_stdout(told), contextlib.redirect_stderr(told), warnings.catch_warnings():
        # Of characters that a font does not have.
        warnings.simplefilter("ignore", UserWarning)
        try:
            command(*arguments)
        except typer.Exit as end:
            code = end.exit_code
        except SystemExit as end:
            code = int(end.code or 0)
    text = told.getvalue()
    assert not [each for each in text if each != "\n" and not each.isprintable()], f"it prints {text!r:.300}"
    if code == 2:
        raise ValueError(text)
    assert code in (0, 1)
    return text


DEEP = "[" * 100_000 + "]" * 100_000


def written(folder: Path, name: str, text: str | bytes | list[Any] | dict[str, Any]) -> Path:
    path = folder / name
    text = text if isinstance(text, str | bytes) else json.dumps(text)
    path.write_bytes(text.encode("utf-8", "surrogateescape") if isinstance(text, str) else text)
    return path
