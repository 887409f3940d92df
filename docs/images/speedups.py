"""Draws docs/images/speedups.svg, the figure of README.md, from a run of experiments/rebalance_ablation.py.

moesys run experiments/rebalance_ablation.py
python docs/images/speedups.py runs/rebalance-ablation-*
"""

import sys
from pathlib import Path

import matplotlib

matplotlib.use("svg")
import matplotlib.pyplot as plt

import moesys as ms

LABELS = {
    "greedy+flow, oracle": "Greedy + FlowSplit, future load known",
    "greedy+flow": "Greedy + FlowSplit (moesys)",
    "laer+flow": "Laer + FlowSplit",
    "laer+even": "Laer + EvenSplit (LAER-MoE)",
    "proportional only": "Laer, proportional replicas only",
    "even only": "Laer, even replicas only",
    "flex_moe+even": "FlexMoe + EvenSplit",
    "eplb+even": "Eplb + EvenSplit",
}
GREEN, GREY, RED = "#1a7f37", "#6e7781", "#cf222e"

(comparison,) = ms.compare(sys.argv[1:])
rows = {row.name: row.speedup for row in comparison.rows}
plt.rcParams.update({"font.size": 10, "svg.hashsalt": "moesys"})
figure, axes = plt.subplots(figsize=(8.4, 3.5), layout="constrained")
for place, name in enumerate(reversed(LABELS)):
    ratio = rows[name]
    color = GREEN if ratio.low > 1 else RED if ratio.high < 1 else GREY
    axes.plot([ratio.low, ratio.high], [place, place], color=color, linewidth=2.5)
    axes.plot(ratio.estimate, place, "o", color=color)
    axes.text(1.6, place, f"{ratio.estimate:.2f} [{ratio.low:.2f}, {ratio.high:.2f}]", va="center", family="monospace")
axes.axvline(1, color=GREY, linestyle="--", linewidth=1)
axes.set_yticks(range(len(LABELS)), reversed(LABELS.values()))
axes.set_xlim(0.6, 1.58)
axes.set_xlabel("speed-up over fixed placement of sharded experts, 95 % interval over 8 seeds")
axes.set_title("SIMULATED: Mixtral-8x7B MoE layers, 32 × A100 in 4 nodes", loc="left", fontsize=11)
for side in ("top", "right"):
    axes.spines[side].set_visible(False)
figure.savefig(Path(__file__).with_suffix(".svg"), metadata={"Date": None}, facecolor="white")
