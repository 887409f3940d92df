"""Known loads over sizes: Zipf popularity, drawn once, drawn again, and disturbed."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from benchmarks.planner.many_ranks import TOKENS_PER_RANK, TOP_K
from moesys.config import ClusterSpec
from moesys.load import LoadMatrix

NOISE = 0.15


@dataclass(frozen=True)
class Size:
    num_experts: int
    num_ranks: int
    ranks_per_node: int = 8

    @property
    def slots(self) -> int:
        """One redundant slot a rank."""
        return self.num_experts // self.num_ranks + 1

    @property
    def cluster(self) -> ClusterSpec:
        return ClusterSpec(num_nodes=self.num_ranks // self.ranks_per_node, ranks_per_node=self.ranks_per_node)


SIZES = (Size(64, 8), Size(128, 32), Size(256, 64), Size(512, 256))
EXPONENTS = (0.5, 1.0, 1.5)


@dataclass(frozen=True)
class Sample:
    """Loads of one popularity: what is planned on, drawn again, and drawn after every expert's load was disturbed."""

    exact: LoadMatrix
    again: LoadMatrix
    noisy: LoadMatrix


def zipf_sample(size: Size, exponent: float, seed: int, tokens_per_rank: int = TOKENS_PER_RANK) -> Sample:
    """Popularity place^-exponent in shuffled order; a rank's T·K choices are independent of one another.

    So a hot expert may be chosen more often than there are tokens: harsher than a router. ``noisy``: under log-normal
    noise of 15 %.
    """
    rng = np.random.Generator(np.random.Philox(np.random.SeedSequence((seed, size.num_experts, size.num_ranks))))
    share_E = np.arange(1, size.num_experts + 1) ** -exponent
    rng.shuffle(share_E)
    noisy_E = share_E * np.exp(NOISE * rng.standard_normal(size.num_experts))
    choices = tokens_per_rank * TOP_K
    exact, again, noisy = (
        LoadMatrix(rng.multinomial(choices, popularity_E / popularity_E.sum(), size=size.num_ranks))
        for popularity_E in (share_E, share_E, noisy_E)
    )
    return Sample(exact, again, noisy)
