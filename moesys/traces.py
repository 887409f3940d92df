"""Traces: the token counts that routers asked for, by micro-batch. They are recorded in training, imported from other
tools, or drawn with a declared skew.

``megatron_trace`` reads what Megatron-LM writes for ``--moe-routing-trace-path`` (NVIDIA/Megatron-LM,
megatron/core/transformer/moe/router_trace.py, 2026), and ``vllm_trace`` what vLLM returns for
``--enable-return-routed-experts`` (vllm-project/vllm, docs/training/routed_experts_replay.md, v0.21).

S micro-batches, L layers, R source ranks, E experts, T tokens of a rank, K top-k.
"""

from __future__ import annotations

import base64
import io
import json
import re
import zipfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from hashlib import sha256
from math import prod
from pathlib import Path
from typing import IO, Any, TypeVar

import numpy as np
import numpy.typing as npt
import pydantic_core

from moesys.config.base import check_seed, python_value
from moesys.config.workload import Generated
from moesys.display import CONTROL, Columns, Display, counted, listed
from moesys.files import opened, read_bytes, whole_file
from moesys.load import IntArray, as_int64, frozen_int64

__all__ = ["Trace", "generate", "load_trace", "megatron_trace", "save_trace", "vllm_trace"]

FORMAT_VERSION = 1
# Counts of a trace that is read: 2 GiB in memory.
MOST_COUNTS = 2**28
# Products of counts stay below this, so that scaling is exact in int64.
LARGEST_PRODUCT = 2**62

FloatArray = npt.NDArray[np.float64]
_RANK_FILE = re.compile(r"router_trace_rank(\d+)\.jsonl")
T = TypeVar("T")
# Of a layer in Megatron: "decoder" or "mtp", which of the MTP blocks, and its number.
_Layer = tuple[str, int, int]


@dataclass(frozen=True, eq=False, repr=False)
class Trace(Display):
    """Tokens that each source rank routes to each expert, ``tokens_SLRE`` int64 [S, L, R, E], read-only.

    ``top_k``: experts a token goes to, so that a rank's counts in a layer sum to T·K. ``meta``: whatever says where the
    trace is from. Raises ValueError for negative counts, empty dimensions, a name or ``meta`` that is no text or has
    control characters, and counts that no router makes: an expert that has more tokens of a rank than the rank has,
    which are its counts' sum divided by ``top_k``.
    """

    tokens_SLRE: IntArray
    top_k: int
    name: str = ""
    meta: dict[str, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        tokens_SLRE = frozen_int64("tokens_SLRE", self.tokens_SLRE, num_dims=4)
        if 0 in tokens_SLRE.shape:
            raise ValueError(
                f"tokens_SLRE has shape {tokens_SLRE.shape}; it needs at least one micro-batch, layer, rank and expert"
            )
        if tokens_SLRE.min() < 0:
            index = tuple(np.argwhere(tokens_SLRE < 0)[0].tolist())
            raise ValueError(f"tokens_SLRE{list(index)} = {tokens_SLRE[index]}; counts cannot be negative")
        object.__setattr__(self, "top_k", python_value(self.top_k))
        if not (isinstance(self.top_k, int) and 1 <= self.top_k <= tokens_SLRE.shape[3]):
            raise ValueError(
                f"top_k={self.top_k} does not fit {tokens_SLRE.shape[3]} experts; give the experts a token goes to"
            )
        _check_shares(tokens_SLRE, self.top_k)
        for text in (self.name, *self.meta, *self.meta.values()):
            if not isinstance(text, str) or CONTROL.search(text):
                raise ValueError(f"the name or meta has {text!r}; give text without control characters")
        object.__setattr__(self, "tokens_SLRE", tokens_SLRE)

    @property
    def num_micro_batches(self) -> int:
        return self.tokens_SLRE.shape[0]

    @property
    def num_layers(self) -> int:
        return self.tokens_SLRE.shape[1]

    @property
    def num_ranks(self) -> int:
        return self.tokens_SLRE.shape[2]

    @property
    def num_experts(self) -> int:
        return self.tokens_SLRE.shape[3]

    @property
    def digest(self) -> str:
        """Returns 16 hex digits of the counts and their shape."""
        counts = np.ascontiguousarray(self.tokens_SLRE, dtype="<i8")
        return sha256(repr(counts.shape).encode() + counts.tobytes()).hexdigest()[:16]

    def _facts(self) -> str:
        S, L, R, E = self.tokens_SLRE.shape
        name = f"{self.name!r}, " if self.name else ""
        sizes = " × ".join(map(counted, (S, L, R, E), ("micro-batch", "layer", "rank", "expert")))
        return (
            f"{name}{sizes}, top_k={self.top_k}, "
            f"{self.tokens_SLRE.sum() // (S * L * self.top_k):,} tokens per micro-batch"
        )

    def _columns(self) -> Columns:
        names, indices = ("micro_batch", "layer", "rank", "expert"), np.indices(self.tokens_SLRE.shape)
        return {**dict(zip(names, indices.reshape(4, -1), strict=True)), "tokens": self.tokens_SLRE.ravel()}

    def _shown(self) -> Columns:
        tokens_LE = self.tokens_SLRE.sum(axis=(0, 2))
        return {
            "layer": range(self.num_layers),
            "routed tokens": tokens_LE.sum(axis=1),
            "busiest expert": tokens_LE.argmax(axis=1),
            "its tokens": tokens_LE.max(axis=1),
        }

    def fold(self, num_ranks: int) -> Trace:
        """Returns the trace for a cluster of ``num_ranks`` = R·n ranks: n consecutive micro-batches become one, in
        which source rank j·R + r is rank r of the j-th of them. What does not fill a micro-batch at the end is dropped.

        Raises ValueError where ``num_ranks`` is no multiple of R or more than all micro-batches give.
        """
        S, L, R, E = self.tokens_SLRE.shape
        multiples = f"use a multiple of {R} from {R} to {R * S}"
        if num_ranks < 1 or num_ranks % R:
            raise ValueError(f"num_ranks={num_ranks} is no multiple of the trace's {R} source ranks; {multiples}")
        n = num_ranks // R
        if n > S:
            raise ValueError(
                f"num_ranks={num_ranks} needs {n} micro-batches of {R} source ranks, the trace has {S}; {multiples}"
            )
        whole = self.tokens_SLRE[: S // n * n].reshape(S // n, n, L, R, E)
        tokens_SLRE = whole.swapaxes(1, 2).reshape(S // n, L, num_ranks, E)
        return Trace(tokens_SLRE, self.top_k, self.name, self.meta)

    def scaled(self, tokens_per_rank: int) -> Trace:
        """Returns the trace with every source rank's counts scaled to sum to exactly ``tokens_per_rank`` · ``top_k``:
        by largest remainder, at equal ones the lower expert first.

        An expert without tokens gets none, and a rank without tokens stays without. An expert that had at most T of a
        rank's T·K has at most ``tokens_per_rank`` after it: a token's experts can still be distinct.
        """
        tokens_per_rank = python_value(tokens_per_rank)
        if tokens_per_rank < 1:
            raise ValueError(f"tokens_per_rank={tokens_per_rank}; scale to at least one token")
        target = tokens_per_rank * self.top_k
        largest = int(self.tokens_SLRE.max())
        if largest * target >= LARGEST_PRODUCT:
            raise ValueError(
                f"tokens_per_rank={tokens_per_rank} with counts of {largest} passes 2**62; use fewer tokens"
            )
        total_SLR1 = self.tokens_SLRE.sum(axis=-1, keepdims=True)
        scaled_SLRE, remainder_SLRE = np.divmod(self.tokens_SLRE * target, np.maximum(total_SLR1, 1))
        short_SLR1 = np.where(total_SLR1 > 0, target, 0) - scaled_SLRE.sum(axis=-1, keepdims=True)
        place_SLRE = np.argsort(np.argsort(-remainder_SLRE, axis=-1, kind="stable"), axis=-1, kind="stable")
        return replace(self, tokens_SLRE=scaled_SLRE + (place_SLRE < short_SLR1))


def _check_shares(tokens_SLRE: IntArray, top_k: int) -> None:
    """Raises ValueError if an expert has more tokens of a rank than the rank has: a token names an expert once."""
    tokens_SLR = -(-tokens_SLRE.sum(axis=-1) // top_k)
    if (over := np.argwhere(tokens_SLRE.max(axis=-1) > tokens_SLR)).size:
        s, layer, rank = over[0].tolist()
        expert = int(tokens_SLRE[s, layer, rank].argmax())
        raise ValueError(
            f"tokens_SLRE{[s, layer, rank, expert]} = {tokens_SLRE[s, layer, rank, expert]}, but the "
            f"{tokens_SLRE[s, layer, rank].sum()} routed tokens of rank {rank} are {tokens_SLR[s, layer, rank]} tokens "
            f"of top_k={top_k} different experts; remove padding from what was counted, or give another top_k"
        )


# --- files --------------------------------------------------------------------------------------------------


def save_trace(trace: Trace, path: str | Path) -> None:
    """Writes one .npz file, completely or not at all. Raises ValueError for more counts than ``load_trace`` reads."""
    path = Path(path)
    if trace.tokens_SLRE.size > MOST_COUNTS:
        raise ValueError(
            f"the trace has {trace.tokens_SLRE.size:,} counts, and a file at most {MOST_COUNTS:,}; save fewer "
            "micro-batches"
        )
    header = {"version": FORMAT_VERSION, "top_k": trace.top_k, "name": trace.name, "meta": trace.meta}
    # most counts are small, and packed narrowly they take half as much
    narrow_SLRE = trace.tokens_SLRE.astype(np.min_scalar_type(trace.tokens_SLRE.max()))
    path.parent.mkdir(parents=True, exist_ok=True)
    with whole_file(path) as file:
        np.savez_compressed(file, header=np.array(json.dumps(header)), tokens_SLRE=narrow_SLRE)


def load_trace(path: str | Path) -> Trace:
    """Reads what ``save_trace`` wrote. Raises ValueError, which names the file, for anything else."""
    way_out = "give a file that moesys.traces.save_trace wrote"
    if not Path(path).exists():
        raise ValueError(f"trace {path} does not exist; {way_out}")
    with opened(Path(path)) as stored:
        is_archive = zipfile.is_zipfile(stored)
    if not is_archive:
        raise ValueError(f"{path} is no trace: it is not an .npz file; {way_out}")
    try:
        # numpy does not close a file of its own that is torn.
        with opened(Path(path)) as stored, np.load(stored, allow_pickle=False) as file:
            _check_size(file.zip)
            header, tokens_SLRE = pydantic_core.from_json(str(file["header"])), file["tokens_SLRE"]
            # Files of earlier releases have the numbers of micro-batches, too.
            iterations_S = file["iterations_S"] if "iterations_S" in file else np.zeros(0, int)
        version, top_k, name, meta = (header[field] for field in ("version", "top_k", "name", "meta"))
        if version != FORMAT_VERSION:
            raise ValueError(f"its version is {version}, this moesys reads {FORMAT_VERSION}")
        if type(top_k) is not int or iterations_S.dtype.kind not in "iu":
            raise ValueError("its top_k or iterations are no whole numbers")
        return Trace(tokens_SLRE, top_k, name, meta)
    except KeyError as error:
        raise ValueError(f"{path} is no trace: {error.args[0]}; {way_out}") from None
    # Damaged bytes make zipfile and numpy raise almost any error.
    except Exception as error:
        raise ValueError(f"{path} is no trace: {error}; {way_out}") from None


def _check_size(file: zipfile.ZipFile) -> None:
    """Raises ValueError for arrays that take more memory than ``MOST_COUNTS``: a small file may unpack to anything."""
    for member in file.infolist():
        with file.open(member) as array:
            shape, _, dtype = _array_head(array)
        if prod(shape) * max(dtype.itemsize, 8) > 8 * MOST_COUNTS:
            raise ValueError(
                f"its {member.filename} of shape {shape} has more than {MOST_COUNTS:,} counts; save fewer micro-batches"
            )


# --- generator ----------------------------------------------------------------------------------------------


def generate(workload: Generated, num_ranks: int, num_experts: int, top_k: int, seed: int) -> Trace:
    """Draws the routing of ``warmup`` micro-batches and those of ``steps`` steps, as a pure function of the arguments;
    more steps change no earlier one.

    An expert has a standard normal z in each layer, and each source rank its own besides. From one micro-batch to the
    next, z becomes (1 - drift)·z plus fresh noise that keeps its variance. Its log-popularity is skew·z (log-normal),
    -skew·log(place of z, from 1 at the top) (Zipf), or 0; plus ``spread`` times the rank's own. ``concentration`` c
    replaces a rank's shares in a micro-batch by a draw from the Dirichlet distribution with parameters c·shares. A
    rank's T·K counts are multinomial; but a token's experts are distinct, so what an expert gets beyond T goes to
    others in proportion.
    """
    if not 1 <= top_k <= num_experts:
        raise ValueError(f"top_k={top_k} does not fit num_experts={num_experts}; use 1 <= top_k <= {num_experts}")
    check_seed(seed)
    S = workload.warmup + workload.steps * workload.micro_batches
    tokens_SLRE = np.empty((S, workload.num_layers, num_ranks, num_experts), dtype=np.int64)
    tokens_R = np.full(num_ranks, workload.tokens_per_rank)
    for layer in range(workload.num_layers):
        rng = np.random.Generator(np.random.Philox(np.random.SeedSequence((seed, layer))))
        shared = _drifting(rng, workload.drift, (1, num_experts))
        own = _drifting(rng, workload.drift, (num_ranks, num_experts))
        for step in range(S):
            log_RE = _log_popularity(workload, next(shared)) + workload.spread * next(own)
            if workload.concentration is not None:
                log_RE = _strayed(rng, log_RE, workload.concentration)
            tokens_SLRE[step, layer] = draw_counts(rng, log_RE, tokens_R, top_k)
    meta = {"workload": workload.to_json(indent=None), "seed": str(seed)}
    return Trace(tokens_SLRE, top_k, workload.distribution, meta)


def _drifting(rng: np.random.Generator, drift: float, shape: tuple[int, int]) -> Iterator[FloatArray]:
    """Yields standard normal numbers, of which a share is drawn anew each time."""
    z = rng.standard_normal(shape)
    while True:
        yield z
        z = (1 - drift) * z + np.sqrt(1 - (1 - drift) ** 2) * rng.standard_normal(shape)


def _log_popularity(workload: Generated, z_1E: FloatArray) -> FloatArray:
    match workload.distribution:
        case "uniform":
            return 0 * z_1E
        case "log_normal":
            return workload.skew * z_1E
        case "zipf":
            place_1E = np.argsort(np.argsort(-z_1E, kind="stable"), kind="stable")
            return -workload.skew * np.log1p(place_1E)


def _strayed(rng: np.random.Generator, log_RE: FloatArray, concentration: float) -> FloatArray:
    """Returns each rank's log-shares, up to a constant, of a draw from the Dirichlet distribution around its shares."""
    share_RE = np.exp(log_RE - log_RE.max(axis=1, keepdims=True))
    share_RE /= share_RE.sum(axis=1, keepdims=True)
    return np.log(np.maximum(rng.standard_gamma(concentration * share_RE), np.finfo(np.float64).tiny))


def draw_counts(rng: np.random.Generator, log_RE: FloatArray, tokens_R: IntArray, top_k: int) -> IntArray:
    """Draws the tokens of each expert, int64 [R, E], from logarithms of popularity: they sum to T·K for a rank of T
    tokens, and none is above T, because a token's experts are distinct.
    """
    tokens_RE = np.zeros(log_RE.shape, dtype=np.int64)
    missing_R = top_k * tokens_R
    open_RE = np.ones(log_RE.shape, dtype=bool)
    while missing_R.any():
        short = np.flatnonzero(missing_R)
        weight_NE = np.where(open_RE[short], log_RE[short], -np.inf)
        share_NE = np.exp(weight_NE - weight_NE.max(axis=1, keepdims=True))
        share_NE /= share_NE.sum(axis=1, keepdims=True)
        tokens_RE[short] += rng.multinomial(missing_R[short], share_NE)
        tokens_RE = np.minimum(tokens_RE, tokens_R[:, None])
        missing_R = top_k * tokens_R - tokens_RE.sum(axis=1)
        open_RE = tokens_RE < tokens_R[:, None]
    return tokens_RE


# --- traces that other tools recorded ----------------------------------------------------------------------


def megatron_trace(folder: str | Path, num_experts: int) -> Trace:
    """Returns the trace in the folder that ``--moe-routing-trace-path`` named.

    It has a file for each rank, ``router_trace_rank0.jsonl`` and so on, and in it a line of JSON for each step
    and layer: ``step``, ``block`` ("decoder", or "mtp" with ``mtp_idx``), ``layer``, and ``top_indices``, K experts of
    each token. Several records of a step and layer, those of its micro-batches or of recomputation, are added up;
    layers of the decoder come first.

    Raises ValueError where files are missing or hold something else, and where ranks differ in steps or layers, as
    stages of a pipeline do.
    """
    files = {int(match[1]): path for path in Path(folder).glob("*") if (match := _RANK_FILE.fullmatch(path.name))}
    if not files:
        raise ValueError(f"{folder} has no router_trace_rank*.jsonl; give the folder of --moe-routing-trace-path")
    of_rank = {rank: _megatron_rank(path, num_experts) for rank, path in sorted(files.items())}
    first, places = next(iter(of_rank)), [set(counts) for counts in of_rank.values()]
    for rank, counts in of_rank.items():
        if different := sorted(set(counts) ^ places[0]):
            step, (block, _, layer) = different[0]
            raise ValueError(
                f"{folder}: of step {step}, {block} layer {layer} one of ranks {first} and {rank} has a record and the "
                "other none; keep the files of ranks that have the same layers, as those of one pipeline stage"
            )
    steps = sorted({step for step, _ in places[0]})
    layers = sorted({layer for _, layer in places[0]})
    if len(places[0]) != len(steps) * len(layers):
        raise ValueError(f"{folder}: not every step has all {len(layers)} layers; leave the steps out that were cut")
    tokens_SLRE = [[[counts[step, layer][0] for counts in of_rank.values()] for layer in layers] for step in steps]
    widths = {top_k for counts in of_rank.values() for _, top_k in counts.values()}
    return _imported(np.array(tokens_SLRE), widths, Path(folder), "Megatron")


def vllm_trace(path: str | Path, num_experts: int, num_ranks: int, responses_per_rank: int) -> Trace:
    """Returns the trace in a file with one response of a vLLM server, as JSON, in each line.

    ``prompt_routed_experts`` of a response and ``routed_experts`` of each of its choices are [tokens, L, K] expert ids,
    as lists (v0.21) or, as tests of later releases have them, in base64 of an .npy file. Layers without experts, all of
    whose ids are 0, are left out; with K = 1 they cannot be told from others, and stay. Tokens whose ids are -1 came
    from the prefix cache and count nowhere. A server knows no source ranks: ``responses_per_rank`` responses after
    another become those of a rank, and ``num_ranks`` times as many a micro-batch. What fills none is left out.

    Raises ValueError for a line without routed experts, and where there are too few responses for a micro-batch.
    """
    if num_ranks < 1 or responses_per_rank < 1:
        raise ValueError(f"num_ranks={num_ranks} and responses_per_rank={responses_per_rank}; use at least 1 of each")
    if not Path(path).is_file():
        raise ValueError(f"{path} is not a file; give one with a vLLM response in each line")
    responses = _read(path, lambda line: _vllm_response(json.loads(line), num_experts))
    counts_NLE = [counts_LE for counts_LE, _, _ in responses]
    if len({counts_LE.shape for counts_LE in counts_NLE}) > 1:
        raise ValueError(f"{path}: responses have different numbers of layers; give those of one model")
    dense_L = np.any([dense_L for _, _, dense_L in responses], axis=0)
    if dense_L.all() or np.any([counts_LE[dense_L] for counts_LE in counts_NLE]):
        raise ValueError(
            f"{path}: in some response all ids of {listed('layer', np.flatnonzero(dense_L).tolist())} are 0, as those "
            "of layers without experts are in all; leave out padding, or give it ids of -1"
        )
    counts_NLE = [counts_LE[~dense_L] for counts_LE in counts_NLE]
    size = num_ranks * responses_per_rank
    num_batches = len(counts_NLE) // size
    if not num_batches:
        raise ValueError(
            f"{path} has {len(counts_NLE)} responses, and a micro-batch takes num_ranks={num_ranks} times "
            f"responses_per_rank={responses_per_rank}; use fewer"
        )
    by_rank = np.array(counts_NLE[: num_batches * size]).reshape(
        num_batches, num_ranks, responses_per_rank, -1, num_experts
    )
    tokens_SLRE = by_rank.sum(axis=2).swapaxes(1, 2)
    return _imported(tokens_SLRE, {top_k for _, top_k, _ in responses}, Path(path), "vLLM")


def _megatron_rank(path: Path, num_experts: int) -> dict[tuple[int, _Layer], tuple[IntArray, int]]:
    """Returns the counts [E] of one rank by step and layer, each with its top-k."""
    found: dict[tuple[int, _Layer], tuple[IntArray, int]] = {}
    for place, counts_E, top_k in _read(path, lambda line: _megatron_record(json.loads(line), num_experts)):
        before_E, before_k = found.get(place, (0, top_k))
        _one_top_k({before_k, top_k}, path)
        found[place] = before_E + counts_E, top_k
    return found


def _megatron_record(record: dict[str, Any], num_experts: int) -> tuple[tuple[int, _Layer], IntArray, int]:
    ids_TK = _whole_numbers(record["top_indices"])
    if ids_TK.ndim == 1 and (not ids_TK.size or record.get("topk", 1) == 1):
        # A rank without tokens, or top-1 without a dimension of its own.
        ids_TK = ids_TK.reshape(-1, _number(record, "topk", 1))
    if ids_TK.ndim != 2:
        raise ValueError(f"top_indices has shape {ids_TK.shape}, and [tokens, top-k] is two dimensions")
    if record["block"] not in ("decoder", "mtp"):
        raise ValueError(f"block={record['block']!r} is neither 'decoder' nor 'mtp'")
    layer = record["block"], _number(record, "mtp_idx", 0), _number(record, "layer")
    [counts_E] = _counts_LE(ids_TK[:, None, :], num_experts)
    return (_number(record, "step"), layer), counts_E, ids_TK.shape[1]


def _number(record: dict[str, Any], name: str, default: int | None = None) -> int:
    value = record[name] if default is None else record.get(name, default)
    if type(value) is not int or not 0 <= value < 2**53:
        raise ValueError(f"{name}={value!r} is no whole number")
    return value


def _vllm_response(response: dict[str, Any], num_experts: int) -> tuple[IntArray, int, npt.NDArray[np.bool_]]:
    """Returns the counts of all tokens of a response, [L, E], the top-k, and which layers have no experts, bool [L].

    vLLM leaves zeros in the rows of these. With top-1, expert 0 may be what a router chose, so that none is left out.
    """
    parts = [response.get("prompt_routed_experts"), *(choice.get("routed_experts") for choice in response["choices"])]
    arrays = [routes_in(part) for part in parts if part is not None]
    if not arrays:
        raise ValueError("no routed_experts; start the server with --enable-return-routed-experts")
    ids_TLK = np.concatenate(arrays)
    zero_TL, absent_TL = ((ids_TLK == of).all(axis=2) for of in (0, -1))
    dense_L = (zero_TL | absent_TL).all(axis=0) & zero_TL.any(axis=0) & (ids_TLK.shape[2] > 1)
    return _counts_LE(np.where(dense_L[:, None], -1, ids_TLK), num_experts), ids_TLK.shape[2], dense_L


def routes_in(part: Any, shape: tuple[int, int] | None = None) -> IntArray:
    """Returns ids of experts [tokens, layers, top-k] that are an array, nested lists, or in base64 an .npy file; with
    ``shape``, which is [layers, top-k], also int32 alone. Raises ValueError for others.
    """
    if isinstance(part, str | bytes):
        data = base64.b64decode(part, validate=True)
        alone = shape is not None and not data.startswith(np.lib.format.MAGIC_PREFIX)
        part = np.frombuffer(data, "<i4").reshape(-1, *shape or ()) if alone else read_array(data)
    ids_TLK = _whole_numbers(part)
    if ids_TLK.ndim != 3:
        raise ValueError(f"routed_experts has shape {ids_TLK.shape}, and [tokens, layers, top-k] is three dimensions")
    return ids_TLK


def read_array(data: bytes) -> npt.NDArray[Any]:
    """Returns the array in the bytes of an .npy file. Raises ValueError for anything else, and for one of objects."""
    file = io.BytesIO(data)
    try:
        shape, _, dtype = _array_head(file)
        if prod(shape) * dtype.itemsize > len(data):
            raise ValueError(f"it has {len(data)} bytes, and its head says shape {shape} of {dtype}")
        file.seek(0)
        array: npt.NDArray[Any] = np.lib.format.read_array(file, allow_pickle=False)
    # Damaged bytes make numpy raise almost any error.
    except Exception as error:
        raise ValueError(f"it is no array of .npy: {error}") from None
    return array


def _array_head(file: IO[bytes]) -> tuple[tuple[int, ...], bool, np.dtype[Any]]:
    """Returns shape, order and dtype by the head of an .npy file."""
    major, _ = np.lib.format.read_magic(file)
    head = np.lib.format.read_array_header_1_0 if major == 1 else np.lib.format.read_array_header_2_0
    found: tuple[tuple[int, ...], bool, np.dtype[Any]] = head(file)
    return found


def _whole_numbers(ids: Any) -> IntArray:
    array = np.asarray(ids)
    if array.size and array.dtype.kind not in "iu":
        raise ValueError(f"expert ids are {array.dtype}; give whole numbers")
    return as_int64("a token", array)


def _counts_LE(ids_TLK: IntArray, num_experts: int) -> IntArray:
    """Returns the tokens of each expert, int64 [L, E]; those whose ids are all -1 are left out."""
    if ids_TLK.size and not -1 <= ids_TLK.min() <= ids_TLK.max() < num_experts:
        raise ValueError(
            f"expert ids from {ids_TLK.min()} to {ids_TLK.max()} do not fit num_experts={num_experts}; give the "
            "model's own number"
        )
    known_TL = np.asarray((ids_TLK >= 0).any(axis=2))
    ordered_TLK = np.sort(ids_TLK, axis=2)
    wrong_TL = known_TL & ((ordered_TLK[..., :1] < 0).any(axis=2) | (np.diff(ordered_TLK, axis=2) == 0).any(axis=2))
    if wrong_TL.any():
        token, layer = np.argwhere(wrong_TL)[0].tolist()
        raise ValueError(
            f"token {token} of layer {layer} has experts {ids_TLK[token, layer].tolist()}, and a token's experts are "
            "distinct; if it is padding, leave it out or give it ids of -1"
        )
    known = (ids_TK[known_T] for ids_TK, known_T in zip(ids_TLK.swapaxes(0, 1), known_TL.T, strict=True))
    return np.array([np.bincount(ids_TK.ravel(), minlength=num_experts) for ids_TK in known])


def _read(path: str | Path, parsed: Callable[[str], T]) -> list[T]:
    """Returns what the lines of a file hold. Raises a ValueError that names the line."""
    return [_checked(parsed, line, f"line {number} of {path}") for number, line in enumerate(_lines(path), start=1)]


def _lines(path: str | Path) -> list[str]:
    try:
        text = read_bytes(Path(path)).decode().replace("\r\n", "\n")
    except UnicodeDecodeError as error:
        raise ValueError(f"{path} is no text in UTF-8: {error}; give the file as it was written") from None
    # not splitlines, for which some characters of a response end a line, too
    lines = text.split("\n")
    return lines[:-1] if not lines[-1] else lines


def _checked(parsed: Callable[[str], T], line: str, where: str) -> T:
    try:
        return parsed(line)
    except KeyError as error:
        raise ValueError(f"{where} has no {error.args[0]}") from None
    except (ValueError, TypeError, AttributeError, IndexError, OverflowError, EOFError, RecursionError) as error:
        raise ValueError(f"{where} holds no routing: {error}") from None


def _imported(tokens_SLRE: IntArray, widths: set[int], source: Path, tool: str) -> Trace:
    top_k, name = _one_top_k(widths, source), source.name if source.is_dir() else source.stem
    try:
        return Trace(tokens_SLRE, top_k, name, {"from": tool})
    except ValueError as error:
        raise ValueError(f"{source}: {error}") from None


def _one_top_k(widths: set[int], source: str | Path) -> int:
    if not widths:
        raise ValueError(f"{source} has no records; give a trace with some")
    if len(widths) != 1:
        raise ValueError(f"{source} has tokens of {sorted(widths)} experts; give records of one top-k")
    return widths.pop()
