"""What LAER-MoE's artifact published of its experiments (scripts_ae/*_backup.csv, for arXiv 2602.11686).

4 nodes of 8 A100-80GB, 128 sequences of 8,192 tokens an iteration in 2 micro-batches, activations recomputed.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

METHODS = ("FSDP+EP", "FlexMoE", "LAER")


@dataclass(frozen=True)
class PublishedRow:
    """Figure 8: seconds of an iteration, the mean of iterations 21 to 70. ``megatron_s`` is quoted, not simulated."""

    dataset: str
    aux_loss: float
    model: str
    fsdp_ep_s: float
    flex_moe_s: float
    laer_s: float
    megatron_s: float

    @property
    def seconds(self) -> dict[str, float]:
        """Of the ``METHODS``."""
        return dict(zip(METHODS, (self.fsdp_ep_s, self.flex_moe_s, self.laer_s), strict=True))


ROWS = (
    PublishedRow("wikitext", 0.0, "mixtral-8x22b-e16k4", 27.22, 25.47, 18.37, 24.12),
    PublishedRow("wikitext", 0.0, "mixtral-8x22b-e8k2", 35.16, 26.50, 24.00, 39.77),
    PublishedRow("wikitext", 0.0, "mixtral-8x7b-e16k4", 27.79, 24.71, 18.85, 25.98),
    PublishedRow("wikitext", 0.0, "mixtral-8x7b-e8k2", 35.66, 28.51, 26.33, 43.38),
    PublishedRow("wikitext", 0.0, "qwen-8x7b-e16k4", 27.82, 25.03, 18.87, 25.88),
    PublishedRow("wikitext", 0.0, "qwen-8x7b-e8k2", 35.77, 28.98, 25.64, 43.41),
    PublishedRow("wikitext", 0.0001, "mixtral-8x22b-e16k4", 27.16, 25.44, 18.26, 24.11),
    PublishedRow("wikitext", 0.0001, "mixtral-8x22b-e8k2", 34.62, 26.71, 23.94, 39.97),
    PublishedRow("wikitext", 0.0001, "mixtral-8x7b-e16k4", 27.60, 24.54, 19.16, 26.12),
    PublishedRow("wikitext", 0.0001, "mixtral-8x7b-e8k2", 35.30, 29.02, 26.12, 43.09),
    PublishedRow("wikitext", 0.0001, "qwen-8x7b-e16k4", 27.67, 25.01, 19.21, 25.91),
    PublishedRow("wikitext", 0.0001, "qwen-8x7b-e8k2", 35.59, 28.12, 26.18, 43.42),
    PublishedRow("C4", 0.0, "mixtral-8x22b-e16k4", 28.35, 27.33, 19.98, 22.35),
    PublishedRow("C4", 0.0, "mixtral-8x22b-e8k2", 37.26, 26.41, 24.79, 41.64),
    PublishedRow("C4", 0.0, "mixtral-8x7b-e16k4", 27.63, 24.45, 19.11, 26.49),
    PublishedRow("C4", 0.0, "mixtral-8x7b-e8k2", 37.00, 28.91, 27.95, 43.96),
    PublishedRow("C4", 0.0, "qwen-8x7b-e16k4", 27.77, 24.58, 19.26, 27.03),
    PublishedRow("C4", 0.0, "qwen-8x7b-e8k2", 37.39, 29.75, 27.50, 43.91),
    PublishedRow("C4", 0.0001, "mixtral-8x22b-e16k4", 28.53, 27.47, 20.29, 22.43),
    PublishedRow("C4", 0.0001, "mixtral-8x22b-e8k2", 37.12, 26.47, 24.78, 41.96),
    PublishedRow("C4", 0.0001, "mixtral-8x7b-e16k4", 27.53, 24.60, 19.26, 26.83),
    PublishedRow("C4", 0.0001, "mixtral-8x7b-e8k2", 36.71, 29.68, 28.14, 44.26),
    PublishedRow("C4", 0.0001, "qwen-8x7b-e16k4", 27.50, 24.59, 19.19, 27.25),
    PublishedRow("C4", 0.0001, "qwen-8x7b-e8k2", 37.18, 30.12, 27.81, 44.07),
)


@dataclass(frozen=True)
class PublishedBreakdown:
    """Figure 10(a): seconds of iteration 14, counted from 0, under a profiler; means over ranks, wikitext, aux loss 0.

    experts_s: twice its forward and recomputation. all_to_all_s: of tokens, with the waiting for slower ranks.
    spread: of the ranks' expert seconds, the standard deviation over the mean.
    """

    model: str
    method: str
    all_to_all_s: float
    experts_s: float
    total_s: float
    spread: float

    @property
    def parts(self) -> dict[Literal["experts", "all_to_all", "rest", "total"], float]:
        """Seconds, by the names of ``StepSeconds``."""
        rest_s = self.total_s - self.experts_s - self.all_to_all_s
        return {"experts": self.experts_s, "all_to_all": self.all_to_all_s, "rest": rest_s, "total": self.total_s}


BREAKDOWN = (
    PublishedBreakdown("mixtral-8x7b-e8k2", "FSDP+EP", 14.73, 11.85, 38.01, 0.134),
    PublishedBreakdown("mixtral-8x7b-e8k2", "FlexMoE", 11.42, 11.80, 32.97, 0.119),
    PublishedBreakdown("mixtral-8x7b-e8k2", "LAER", 8.45, 11.74, 29.55, 0.112),
    PublishedBreakdown("mixtral-8x7b-e16k4", "FSDP+EP", 11.66, 9.03, 28.14, 0.181),
    PublishedBreakdown("mixtral-8x7b-e16k4", "FlexMoE", 9.23, 9.00, 24.82, 0.129),
    PublishedBreakdown("mixtral-8x7b-e16k4", "LAER", 4.35, 9.02, 19.36, 0.012),
)

# Figure 10(b)'s log of tokens: rows of the busiest rank over the mean, in the mean over layers and micro-batches 1 to 9
# of 8x7b-e8k2, and 1 to 29 of 8x7b-e16k4.
LOGGED_MAX_OVER_MEAN = {
    "e8k2": dict(zip(METHODS, (1.659, 1.481, 1.381), strict=True)),
    "e16k4": dict(zip(METHODS, (1.729, 1.655, 1.273), strict=True)),
}
# The same in the log's last two micro-batches of 8x7b-e16k4, which are those of iteration 14.
LAST_LOGGED_MAX_OVER_MEAN = {"e16k4": dict(zip(METHODS, (1.892, 1.717, 1.164), strict=True))}

# Figure 12: seconds of an iteration, mixtral-8x7b-e8k2, wikitext, aux loss 0.
ABLATION_S = {"FSDP+EP": 35.66, "no_pq": 31.70, "no_comm_opt": 28.59, "no_even": 28.33, "LAER": 26.33}

# Figure 11: milliseconds of LAER's planner for 32 experts, by (ranks, slots a rank), on its authors' machine.
PLANNER_MS = {
    (ranks, slots): milliseconds
    for slots, times_ms in {
        1: (0.487, 1.294, 3.594, 24.481, 99.849),
        2: (0.517, 1.536, 4.446, 28.641, 116.086),
        4: (0.749, 2.082, 6.053, 33.648, 131.156),
        8: (1.000, 2.944, 9.443, 46.645, 181.777),
        16: (1.749, 5.282, 17.427, 76.303, 281.982),
    }.items()
    for ranks, milliseconds in zip((64, 128, 256, 512, 1024), times_ms, strict=True)
}
