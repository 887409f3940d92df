"""How fast a product's tiles are inside a fused kernel, ``ClusterSpec.fused_rate``: fitted on one published time, and
held against others that it was not fitted on.

Other people's kernels, on other layers, some in FP8: what holds for all of them may hold for these.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated

from scipy.optimize import brentq

from benchmarks.published.hopper_parts import FITTED_PART, HELD_OUT, HopperPart
from moesys.lab.show.sheets import Column, Sheet

RATES = (1.0, 0.85, 0.7)
# Nobody writes a kernel whose tiles are slower.
SLOWEST = 0.05


@dataclass(frozen=True)
class FusedRow:
    """A fused part that others measured. ``error``: of what is simulated, over what is published, by ``fused_rate``.
    ``explained_by``: the rate at which both are the same, None where none below 1 is.
    """

    of: Annotated[Mapping[str, str], Column("{}")]
    fitted: Annotated[bool, Column("fitted on", lambda fitted: "yes" if fitted else "held out")]
    published_ms: Annotated[float, Column("published ms", ".3f")]
    error: Annotated[Mapping[str, float], Column("error % at {}", "+.0f", 100)]
    explained_by: Annotated[float | None, Column("explained by", ".2f")]


def fused_rate_of(part: HopperPart) -> float | None:
    """At which ``part`` takes as long as is published; None where it is slower at full rate already."""
    if part.simulated_ms() >= part.published_ms:
        return None
    return float(brentq(lambda rate: part.simulated_ms(rate) - part.published_ms, SLOWEST, 1.0, xtol=1e-3))


def fused_row(part: HopperPart, rates: Sequence[float]) -> FusedRow:
    error = {f"{rate:.2f}": part.simulated_ms(rate) / part.published_ms - 1 for rate in rates}
    return FusedRow(part.words, part == FITTED_PART, part.published_ms, error, fused_rate_of(part))


def fused_sheet(rates: Sequence[float], parts: Sequence[HopperPart] = (FITTED_PART, *HELD_OUT)) -> Sheet:
    """Each part at each rate."""
    notes = (
        "explained by: the fused_rate at which a part takes as long as is published; empty where it takes longer at 1.",
        "DeepSeek-V3, V4-Flash, V4-Pro: DeepGEMM's fused layers in FP8 (pull requests 352 and 383); links are as much "
        "faster as FP8 rows are smaller. H200: the rate is that of DeepGEMM's grouped products on H800; H20: its peak.",
    )
    return Sheet(
        "SIMULATED beside published: fused parts, by fused_rate", [fused_row(of, rates) for of in parts], notes
    )
