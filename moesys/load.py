"""LoadMatrix: who wants what."""

from __future__ import annotations

from collections.abc import Sized
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from moesys.display import Columns, Display, counted, draw_map

if TYPE_CHECKING:
    from matplotlib.axes import Axes

IntArray = npt.NDArray[np.int64]

# Over the number of ranks: what all ranks together have room for, and sums of two loads, fit int64.
MOST_TOKENS = 2**61


def frozen_int64(name: str, values: Any, num_dims: int) -> IntArray:
    """Returns a read-only int64 copy of ``values``, or raises a ValueError that names it."""
    try:
        array = np.asarray(values)
    except ValueError as error:
        raise ValueError(_ragged(name, values) or f"{name} is no array: {error}") from None
    if array.dtype.kind not in "iu":
        raise ValueError(f"{name} has dtype {array.dtype}; it counts, so give integers")
    if array.ndim != num_dims:
        raise ValueError(f"{name} has shape {array.shape}; it needs {num_dims} dimensions")
    array = as_int64(name, array)
    array.setflags(write=False)
    return array


def _ragged(name: str, rows: Any) -> str:
    """Returns which row is shorter than others, or "" if none is."""
    lengths = [len(row) if isinstance(row, Sized) else 0 for row in rows]
    rank = lengths.index(min(lengths))
    filled = "; fill the row with -1" if name == "expert_RS" else ""
    words = f"{name}: rank {rank} has {lengths[rank]} of {max(lengths)} entries{filled}"
    return words if lengths[rank] < max(lengths) else ""


def as_int64(name: str, array: npt.NDArray[Any]) -> IntArray:
    """Returns a copy of integers as int64. Raises ValueError, with ``name``, for those that it cannot hold."""
    if array.size and array.dtype.kind == "u" and array.max() > np.iinfo(np.int64).max:
        raise ValueError(f"{name} has {array.max()}; use integers below 2**63")
    return array.astype(np.int64, order="C")


@dataclass(frozen=True, eq=False, repr=False)
class LoadMatrix(Display):
    """Tokens that each source rank routes to each expert, ``tokens_RE`` int64 [R, E]; sums to the routed tokens (T·K).

    Two ranks, three experts, top-1: ``LoadMatrix([[4, 0, 1], [2, 3, 0]])`` says that rank 0 has five tokens,
    four of them for expert 0.
    """

    tokens_RE: IntArray

    def __post_init__(self) -> None:
        tokens_RE = frozen_int64("tokens_RE", self.tokens_RE, num_dims=2)
        if 0 in tokens_RE.shape:
            raise ValueError(f"tokens_RE has shape {tokens_RE.shape}; it needs at least one rank and one expert")
        if tokens_RE.min() < 0:
            rank, expert = np.argwhere(tokens_RE < 0)[0]
            raise ValueError(f"tokens_RE[{rank}, {expert}] = {tokens_RE[rank, expert]}; counts cannot be negative")
        # lower counts cannot sum to more; these are summed where nothing wraps round
        most = MOST_TOKENS // len(tokens_RE)
        total = sum(tokens_RE.ravel().tolist()) if int(tokens_RE.max()) > most // tokens_RE.size else 0
        if total > most:
            raise ValueError(
                f"tokens_RE sums to {total} tokens; of {len(tokens_RE)} ranks use at most {most} (2**61 over "
                "their number), or scale it"
            )
        object.__setattr__(self, "tokens_RE", tokens_RE)

    @property
    def num_ranks(self) -> int:
        return self.tokens_RE.shape[0]

    @property
    def num_experts(self) -> int:
        return self.tokens_RE.shape[1]

    @property
    def tokens_E(self) -> IntArray:
        """Returns the tokens of each expert, summed over all sources."""
        return self.tokens_RE.sum(axis=0)

    @cached_property
    def log_popularity_E(self) -> npt.NDArray[np.float64]:
        """Returns natural logarithms of experts' tokens plus 1, less the mean of all experts'; read-only."""
        log_E = np.log1p(self.tokens_E)
        log_E -= log_E.mean()
        log_E.setflags(write=False)
        return log_E

    @property
    def total(self) -> int:
        return int(self.tokens_RE.sum())

    def plot(self, ax: Axes | None = None) -> Axes:
        """Draws the tokens as a map of ranks and experts."""
        return draw_map(self.tokens_RE, f"{self.total:,} tokens", "tokens", ax)

    def _facts(self) -> str:
        tokens_E = self.tokens_E
        ratio = f", busiest expert {tokens_E.max() / tokens_E.mean():.2f} × the mean" if self.total else ""
        return f"{counted(self.num_ranks, 'rank')} × {self.num_experts} experts, {self.total:,} tokens{ratio}"

    def _columns(self) -> Columns:
        rank, expert = np.indices(self.tokens_RE.shape).reshape(2, -1)
        return {"source": rank, "expert": expert, "tokens": self.tokens_RE.ravel()}

    def _shown(self) -> Columns:
        by_expert = {f"expert {expert}": tokens_R for expert, tokens_R in enumerate(self.tokens_RE.T)}
        return {"source rank": range(self.num_ranks), **by_expert}

    def __eq__(self, other: object) -> bool:
        return isinstance(other, LoadMatrix) and np.array_equal(self.tokens_RE, other.tokens_RE)
