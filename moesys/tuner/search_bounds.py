"""SearchBounds: how far a search for a strategy goes."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class SearchBounds:
    """How far ``tune`` searches in the cost model.

    budget: points to look at. seeds: how many of the experiment's, of which paired a few tell strategies apart.
    memory_gb: of a rank, 1e9 bytes; None: as the cluster says. model_layers: of the whole model, whose memory counts;
    None: those of the workload. seed: of everything that the search draws. minutes: after which the best until then is
    the answer, wherever the search is; None: when it is through. jobs: processes that simulate, with the same answer
    for any; None: one a core, 1: the process that asks.
    """

    budget: int = 256
    seeds: int = 2
    memory_gb: float | None = None
    model_layers: int | None = None
    seed: int = 0
    minutes: float | None = None
    jobs: int | None = None
