"""Frames: messages that say what they belong to, so that ranks that are in different calls never mix their data.

Every all-gather of a ``Channel``, and the first collective of every other call, sends ``FRAME_BYTES`` bytes from each
rank, whatever it carries: a header, and behind it the payload. Ranks that meet in different calls, layers,
micro-batches or passes therefore always receive a header that they can read, and all of them raise the same error. The
rest of a longer payload follows in a second all-gather, whose size is known to all ranks from the headers.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache, cached_property
from typing import Any

import numpy as np
import numpy.typing as npt

ALIKE = (
    "All ranks of a process group must make the same calls in the same order: the same layers, micro-batches and "
    "passes, the same synchronisations and the same saves"
)
FRAME_BYTES = 4096
# The places of the int64 numbers of a header. Those of the position, and the digest, must be the same on all ranks.
_MAGIC, _LAYER, _NUMBER, _FLAGS = range(4)
# The name of the call, in UTF-8.
_WHAT = slice(4, 10)
_POSITION = slice(_MAGIC, 10)
_TWIN, _DIGEST, _GENERATION, _PAYLOAD_BYTES, _TEXT_BYTES, _CHOICES = range(10, 16)
_WHAT_BYTES, HEADER_BYTES = 6 * 8, 16 * 8
PAYLOAD_BYTES = FRAME_BYTES - HEADER_BYTES
# Changes with the layout of frames, so that versions of moesys that do not understand each other say so.
_VERSION = 0x6D6F65737973_02

LEARNING, BACKWARD, EXPERT_GRADIENTS = 1, 2, 4
NO_NUMBER = -1

Header = npt.NDArray[np.int64]


class RankMismatchError(RuntimeError):
    """The error of ranks that share experts and differ in calls or declarations; every rank raises it."""


@dataclass(frozen=True)
class Position:
    """The call that a rank is in. what: its name, up to 48 bytes. number: the micro-batch in a forward or an agreement
    on a layout, the generation elsewhere. flags: a sum of ``LEARNING``, ``BACKWARD`` and ``EXPERT_GRADIENTS``. choices:
    the number of choices of this rank's tokens, T · K, which is not compared.
    """

    what: str = "values"
    number: int = NO_NUMBER
    flags: int = 0
    choices: int = 0


@dataclass(frozen=True)
class Identity:
    """The declaration of a layer; the same on all ranks that share its experts. layer: -1 for no layer.

    made: its number among the layers of this index that the process has made for its group, from 1. twins: those of
    them that are there, itself among them.
    """

    layer: int = -1
    declared: Mapping[str, Any] | None = None
    made: int = 0
    twins: Collection[object] = field(default=(), compare=False)

    @cached_property
    def text(self) -> bytes:
        return b"" if self.declared is None else json.dumps(self.declared, sort_keys=True).encode()

    @cached_property
    def digest(self) -> int:
        """Returns 63 bits of a hash of the declaration."""
        return int.from_bytes(hashlib.sha256(self.text).digest()[:8], "little") >> 1

    @property
    def twin(self) -> int:
        """Which of several layers of this index it is; 0 for the only one."""
        return self.made if len(self.twins) > 1 else 0


NO_LAYER, VALUES = Identity(), Position()


def header(identity: Identity, at: Position, generation: int, payload_bytes: int) -> Header:
    """Returns the header of a payload, int64 [16]."""
    numbers = (_VERSION, identity.layer, at.number, at.flags, *_numbers_of(at.what), identity.twin)
    texts = (identity.digest, generation, payload_bytes, len(identity.text), at.choices)
    return np.array([*numbers, *texts], dtype=np.int64)


@cache
def _numbers_of(what: str) -> list[int]:
    numbers: list[int] = np.frombuffer(what.encode().ljust(_WHAT_BYTES, b"\0")[:_WHAT_BYTES], np.int64).tolist()
    return numbers


def generation_of(headers_RN: Header) -> int:
    """Returns a number that none of the ranks has had before, the same on all."""
    return int(headers_RN[:, _GENERATION].max()) + 1


def payload_bytes_of(headers_RN: Header) -> list[int]:
    """Returns how long each rank's payload is, in bytes."""
    sizes: list[int] = headers_RN[:, _PAYLOAD_BYTES].tolist()
    return sizes


def choices_of(headers_RN: Header) -> list[int]:
    """Returns how many choices each rank has."""
    choices: list[int] = headers_RN[:, _CHOICES].tolist()
    return choices


def text_bytes_of(headers_RN: Header) -> int:
    """Returns how long the longest declaration is, in bytes."""
    return int(headers_RN[:, _TEXT_BYTES].max())


def call_bits(identity: Identity, at: Position) -> int:
    """Returns 31 bits that identify the forward of a rank, for messages without room for a header; never 0."""
    learning = bool(at.flags & LEARNING)
    declared = (identity.digest + identity.twin) & 0xFF
    return 1 << 30 | (identity.layer & 0x1FF) << 21 | (at.number & 0xFFF) << 9 | learning << 8 | declared


def call_mismatch(rank: int, theirs: int, mine: int) -> RankMismatchError:
    """Returns the error of a rank whose ``call_bits`` differ from those of this one."""
    words = [
        f"forward of layer {bits >> 21 & 0x1FF} (micro-batch {bits >> 9 & 0xFFF}, "
        f"{'in training' if bits >> 8 & 1 else 'in evaluation or without gradients'}, declaration {bits & 0xFF:02x})"
        for bits in (theirs, mine)
    ]
    return RankMismatchError(f"ranks met in different calls: rank {rank}: {words[0]}; this rank: {words[1]}. {ALIKE}")


def same_position(headers_RN: Header) -> bool:
    """Returns whether all ranks are in the same call. A rank on which no other layer has the layer's index does not
    contradict the others, as what it has made and dropped before may differ.
    """
    twins = set(headers_RN[:, _TWIN].tolist()) - {0}
    return len(twins) < 2 and bool((headers_RN[:, _POSITION] == headers_RN[0, _POSITION]).all())


def alike(headers_RN: Header) -> bool:
    """Returns whether all ranks are in the same call of a layer that they declare alike."""
    same = headers_RN[:, : _DIGEST + 1] == headers_RN[0, : _DIGEST + 1]
    return bool(same.all()) or (bool(same[:, _DIGEST].all()) and same_position(headers_RN))


def position_mismatch(headers_RN: Header, ranks: Sequence[int]) -> RankMismatchError:
    """Returns the error of ranks that are in different calls, with each rank's own."""
    return _mismatch([_words(row) for row in headers_RN], ranks, "met in different calls")


def declaration_mismatch(texts: Sequence[bytes], layer: int, ranks: Sequence[int]) -> RankMismatchError:
    """Returns the error of a layer that ranks declare differently, with each field that differs."""
    fields = [dict(flat_fields("", json.loads(text))) if text else {} for text in texts]
    names = sorted({name for each in fields for name in each})
    differing = [name for name in names if len({repr(each.get(name)) for each in fields}) > 1]
    # If kinds differ, all of their fields differ, so only the kinds are named.
    kinds = {name.rpartition(".")[0] for name in differing if name.endswith(".kind")}
    differing = [name for name in differing if name.endswith(".kind") or name.rpartition(".")[0] not in kinds]
    values = [", ".join(f"{name}={each.get(name)!r}" for name in differing[:8]) for each in fields]
    more = f" ({len(differing) - 8} more fields differ)" if len(differing) > 8 else ""
    return _mismatch(values, ranks, f"declare layer {layer} differently{more}")


def size_mismatch(sizes: Sequence[int], at: Position, layer: int, ranks: Sequence[int]) -> RankMismatchError:
    """Returns the error of ranks whose values in one call are of different sizes."""
    place = f" of layer {layer}" if layer >= 0 else ""
    return _mismatch([f"{size:,} bytes" for size in sizes], ranks, f"sent different sizes in {at.what}{place}")


def _mismatch(words: Sequence[str], ranks: Sequence[int], what: str) -> RankMismatchError:
    by_words: dict[str, list[int]] = {}
    for rank, each in zip(ranks, words, strict=True):
        by_words.setdefault(each, []).append(rank)
    parts = (f"rank{'s' * (len(of) > 1)} {_listed(of)}: {each}" for each, of in by_words.items())
    return RankMismatchError(f"ranks {what}: {'; '.join(parts)}. {ALIKE}")


def _listed(ranks: Sequence[int]) -> str:
    shown = ", ".join(map(str, ranks[:8]))
    return f"{shown} and {len(ranks) - 8} more" if len(ranks) > 8 else shown


def _words(row: Header) -> str:
    if row[_MAGIC] != _VERSION:
        return "a message that is not of this version of moesys"
    what = row[_WHAT].tobytes().rstrip(b"\0").decode(errors="replace")
    place = f" of layer {row[_LAYER]}" if row[_LAYER] >= 0 and not what.endswith("()") else ""
    if what != "forward":
        counted = "micro-batch" if what in ("agreement on a layout", "comparison of routers") else "generation"
        return f"{what}{place}" + (f" ({counted} {row[_NUMBER]})" if row[_NUMBER] >= 0 else "")
    flags = int(row[_FLAGS])
    mode = "in training" if flags & LEARNING else "in evaluation or without gradients"
    backward = "a backward follows" if flags & BACKWARD else "no backward follows"
    experts = "" if flags & EXPERT_GRADIENTS or not flags & BACKWARD else ", experts are frozen"
    twin = f", number {row[_TWIN]} of the layers with this layer_index, which each need their own" * bool(row[_TWIN])
    return f"{what}{place} (micro-batch {row[_NUMBER]}, {mode}, {backward}{experts}{twin})"


def flat_fields(prefix: str, value: Any) -> list[tuple[str, Any]]:
    """Returns the fields of nested dicts, by dotted path."""
    if isinstance(value, dict):
        inside = ((f"{prefix}.{name}" if prefix else name, inner) for name, inner in value.items())
        return [each for path, inner in inside for each in flat_fields(path, inner)]
    return [(prefix, value)]
