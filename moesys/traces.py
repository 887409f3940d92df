"""Traces: what routers wanted, micro-batch by micro-batch; recorded in training or drawn with a declared skew.

S micro-batches, L layers, R source ranks, E experts, T tokens of a rank, K top-k.
"""

from __future__ import annotations

import json
import zipfile
import zlib
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from hashlib import sha256
from itertools import pairwise
from pathlib import Path

import numpy as np
import numpy.typing as npt

from moesys.config.workload import Generated
from moesys.load import IntArray, frozen_int64
from moesys.whole_file import whole_file

FORMAT_VERSION = 1
# Products of counts stay below this, so that scaling is exact in int64.
LARGEST_PRODUCT = 2**62

FloatArray = npt.NDArray[np.float64]


@dataclass(frozen=True, eq=False)
class Trace:
    """Tokens that each source rank routes to each expert, ``tokens_SLRE`` int64 [S, L, R, E], read-only.

    ``top_k``: experts a token goes to, so that a rank's counts in a layer sum to T·K. ``meta``: whatever says where the
    trace is from. ``iterations``: the number of each micro-batch in the run it is from, rising, where not every one was
    recorded; 0 to S-1 if left out. Raises ValueError for negative counts and empty dimensions.
    """

    tokens_SLRE: IntArray
    top_k: int
    name: str = ""
    meta: dict[str, str] = field(default_factory=dict)
    iterations: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        tokens_SLRE = frozen_int64("tokens_SLRE", self.tokens_SLRE, num_dims=4)
        if 0 in tokens_SLRE.shape:
            raise ValueError(
                f"tokens_SLRE has shape {tokens_SLRE.shape}; it needs at least one micro-batch, layer, rank and expert"
            )
        if tokens_SLRE.min() < 0:
            index = tuple(np.argwhere(tokens_SLRE < 0)[0].tolist())
            raise ValueError(f"tokens_SLRE{list(index)} = {tokens_SLRE[index]}; counts cannot be negative")
        if not 1 <= self.top_k <= tokens_SLRE.shape[3]:
            raise ValueError(
                f"top_k={self.top_k} does not fit {tokens_SLRE.shape[3]} experts; give the experts a token goes to"
            )
        iterations = tuple(map(int, self.iterations)) or tuple(range(len(tokens_SLRE)))
        if len(iterations) != len(tokens_SLRE):
            raise ValueError(
                f"iterations has {len(iterations)} numbers for {len(tokens_SLRE)} micro-batches; give each one"
            )
        if fall := next((pair for pair in pairwise(iterations) if pair[0] >= pair[1]), None):
            raise ValueError(f"iterations goes from {fall[0]} to {fall[1]}; give micro-batches in their order")
        object.__setattr__(self, "tokens_SLRE", tokens_SLRE)
        object.__setattr__(self, "iterations", iterations)

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
        """16 hex digits of the counts and their shape."""
        counts = np.ascontiguousarray(self.tokens_SLRE, dtype="<i8")
        return sha256(repr(counts.shape).encode() + counts.tobytes()).hexdigest()[:16]

    def fold(self, num_ranks: int) -> Trace:
        """The trace for a cluster of ``num_ranks`` = R·n ranks: n consecutive micro-batches become one, in which source
        rank j·R + r is rank r of the j-th of them, and which has the first one's number. What does not fill a
        micro-batch at the end is dropped.

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
        return Trace(tokens_SLRE, self.top_k, self.name, self.meta, self.iterations[: S // n * n : n])

    def scaled(self, tokens_per_rank: int) -> Trace:
        """Every source rank's counts scaled to sum to exactly ``tokens_per_rank`` · ``top_k``: by largest remainder, at
        equal ones the lower expert first.

        An expert without tokens gets none, and a rank without tokens stays without. An expert that had at most T of a
        rank's T·K has at most ``tokens_per_rank`` after it: a token's experts can still be distinct.
        """
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


# --- files --------------------------------------------------------------------------------------------------


def save_trace(trace: Trace, path: str | Path) -> None:
    """Write one .npz file: complete, or not at all."""
    path = Path(path)
    header = {"version": FORMAT_VERSION, "top_k": trace.top_k, "name": trace.name, "meta": trace.meta}
    # most counts are small, and packed narrowly they take half as much
    narrow_SLRE = trace.tokens_SLRE.astype(np.min_scalar_type(trace.tokens_SLRE.max()))
    path.parent.mkdir(parents=True, exist_ok=True)
    with whole_file(path) as file:
        np.savez_compressed(
            file, header=np.array(json.dumps(header)), tokens_SLRE=narrow_SLRE, iterations_S=trace.iterations
        )


def load_trace(path: str | Path) -> Trace:
    """Read what ``save_trace`` wrote. Raises ValueError, which names the file, for anything else."""
    way_out = "give a file that moesys.traces.save_trace wrote"
    if not Path(path).exists():
        raise ValueError(f"trace {path} does not exist; {way_out}")
    if not zipfile.is_zipfile(path):
        raise ValueError(f"{path} is no trace: it is not an .npz file; {way_out}")
    try:
        with np.load(path, allow_pickle=False) as file:
            header, tokens_SLRE = json.loads(str(file["header"])), file["tokens_SLRE"]
            iterations = tuple(file["iterations_S"].tolist()) if "iterations_S" in file else ()
        if header["version"] != FORMAT_VERSION:
            raise ValueError(f"its version is {header['version']}, this moesys reads {FORMAT_VERSION}")
        return Trace(tokens_SLRE, header["top_k"], header["name"], header["meta"], iterations)
    except KeyError as error:
        raise ValueError(f"{path} is no trace: {error.args[0]}; {way_out}") from None
    except (ValueError, TypeError, zipfile.BadZipFile, zlib.error) as error:
        raise ValueError(f"{path} is no trace: {error}; {way_out}") from None


# --- generator ----------------------------------------------------------------------------------------------


def generate(workload: Generated, num_ranks: int, num_experts: int, top_k: int, seed: int) -> Trace:
    """Routing of ``warmup`` micro-batches and those of ``steps`` steps, a pure function of the arguments; more steps
    change no earlier one.

    An expert has a standard normal z in each layer, and each source rank its own besides. From one micro-batch to the
    next, z becomes (1 - drift)·z plus fresh noise that keeps its variance. Its log-popularity is skew·z (log-normal),
    -skew·log(place of z, from 1 at the top) (Zipf), or 0; plus ``spread`` times the rank's own. ``concentration`` c
    replaces a rank's shares in a micro-batch by a draw from the Dirichlet distribution with parameters c·shares. A
    rank's T·K counts are multinomial; but a token's experts are distinct, so what an expert gets beyond T goes to
    others in proportion.
    """
    if not 1 <= top_k <= num_experts:
        raise ValueError(f"top_k={top_k} does not fit num_experts={num_experts}; use 1 <= top_k <= {num_experts}")
    if seed < 0:
        raise ValueError(f"seed={seed} is negative; use 0 or more")
    S = workload.warmup + workload.steps * workload.micro_batches
    tokens_SLRE = np.empty((S, workload.num_layers, num_ranks, num_experts), dtype=np.int64)
    for layer in range(workload.num_layers):
        rng = np.random.Generator(np.random.Philox(np.random.SeedSequence((seed, layer))))
        shared = _drifting(rng, workload.drift, (1, num_experts))
        own = _drifting(rng, workload.drift, (num_ranks, num_experts))
        for step in range(S):
            log_RE = _log_popularity(workload, next(shared)) + workload.spread * next(own)
            if workload.concentration is not None:
                log_RE = _strayed(rng, log_RE, workload.concentration)
            tokens_SLRE[step, layer] = _draw(rng, log_RE, workload.tokens_per_rank, top_k)
    meta = {"workload": workload.to_json(indent=None), "seed": str(seed)}
    return Trace(tokens_SLRE, top_k, workload.distribution, meta)


def _drifting(rng: np.random.Generator, drift: float, shape: tuple[int, int]) -> Iterator[FloatArray]:
    """Standard normal numbers, of which a share is drawn anew each time."""
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
    """Of each rank log-shares, up to a constant, of a draw from the Dirichlet distribution around its shares."""
    share_RE = np.exp(log_RE - log_RE.max(axis=1, keepdims=True))
    share_RE /= share_RE.sum(axis=1, keepdims=True)
    return np.log(np.maximum(rng.standard_gamma(concentration * share_RE), np.finfo(np.float64).tiny))


def _draw(rng: np.random.Generator, log_RE: FloatArray, num_tokens: int, top_k: int) -> IntArray:
    """Counts [R, E] that sum to T·K a rank, none above T."""
    tokens_RE = np.zeros(log_RE.shape, dtype=np.int64)
    missing_R = np.full(len(log_RE), num_tokens * top_k)
    open_RE = np.ones(log_RE.shape, dtype=bool)
    while missing_R.any():
        short = np.flatnonzero(missing_R)
        weight_NE = np.where(open_RE[short], log_RE[short], -np.inf)
        share_NE = np.exp(weight_NE - weight_NE.max(axis=1, keepdims=True))
        share_NE /= share_NE.sum(axis=1, keepdims=True)
        tokens_RE[short] += rng.multinomial(missing_R[short], share_NE)
        tokens_RE = np.minimum(tokens_RE, num_tokens)
        missing_R = num_tokens * top_k - tokens_RE.sum(axis=1)
        open_RE = tokens_RE < num_tokens
    return tokens_RE
