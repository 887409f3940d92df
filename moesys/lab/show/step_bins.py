"""Bins: consecutive steps that share a column of a figure, so that a hundred thousand steps fit on a page.

S steps, B bins.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from moesys.load import IntArray

FloatArray = npt.NDArray[np.float64]


class Axis(NamedTuple):
    """Columns of a figure: what they are, the number of each in growing order, and what each is called."""

    name: str
    numbers: list[int]
    labels: list[str]


@dataclass(frozen=True, eq=False)
class Bins:
    """Bins of ``steps_S``. ``first_B``: where in it each begins."""

    steps_S: IntArray
    first_B: IntArray

    @classmethod
    def of(cls, steps_S: IntArray, most: int) -> Bins:
        """Returns at most ``most`` bins, which differ in length by one at most."""
        num_bins = min(most, len(steps_S))
        return cls(steps_S, np.arange(num_bins) * len(steps_S) // num_bins)

    def __len__(self) -> int:
        return len(self.first_B)

    @property
    def single(self) -> bool:
        """Whether every step has a bin for itself."""
        return len(self) == len(self.steps_S)

    def mean(self, values: FloatArray) -> FloatArray:
        """Returns means over each bin's steps, axis 0, of what is not nan."""
        counts = np.add.reduceat(np.isfinite(values).astype(float), self.first_B)
        sums = np.add.reduceat(np.where(np.isfinite(values), values, 0.0), self.first_B)
        return np.where(counts > 0, sums / np.maximum(counts, 1), np.nan)

    def low(self, values: FloatArray) -> FloatArray:
        """Returns the least of each bin."""
        return np.asarray(np.fmin.reduceat(values, self.first_B))

    def high(self, values: FloatArray) -> FloatArray:
        """Returns the largest of each bin."""
        return np.asarray(np.fmax.reduceat(values, self.first_B))

    def axis(self) -> Axis:
        """Returns bins as columns, each with the number of its first step, called step 7 or steps 11–20."""
        last_B = np.append(self.first_B[1:], len(self.steps_S)) - 1
        firsts, lasts = self.steps_S[self.first_B].tolist(), self.steps_S[last_B].tolist()
        labels = [
            f"step {first}" if first == last else f"steps {first}–{last}"
            for first, last in zip(firsts, lasts, strict=True)
        ]
        return Axis("step", firsts, labels)
