"""``moesys bench uniep``: UniEP's published range beside simulated ratios, on the screen and as a page."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from moesys.bench.harness.steps import steps_told
from moesys.bench.pages import Section, show, table
from moesys.bench.uniep.parts import PARTS, Part
from moesys.bench.uniep.rows import LAYERS, POINTS, PUBLISHED, Row, uniep_rows
from moesys.config import ClusterSpec, presets

CLUSTERS = (presets.h100(), presets.h800())

INTRODUCTION = (
    f"`python -m moesys bench uniep`: UniEP (arXiv 2604.19241) publishes {PUBLISHED[0]}x to {PUBLISHED[1]}x over "
    "sequential execution on Hopper, and in public neither its shapes nor its baselines. Simulated here: forward and "
    "backward of the layers that its authors' repository tests, on one node, equally popular experts, the best of "
    f"{len(POINTS)} points of the search space.",
    "The constants are those of the presets `h100` and `h800`, each with its source there; none is fitted to it.",
)


def main(out: Path | None = None) -> int:
    """Simulate, write, print; the exit code."""
    parts = []
    with steps_told("uniep", len(CLUSTERS) * len(LAYERS) + 1) as tell:
        for cluster in CLUSTERS:
            rows = []
            for layer in LAYERS:
                tell(f"{cluster.name}: {layer.name}, {layer.tokens} tokens")
                rows += uniep_rows(cluster, [layer])
            parts.append(uniep_section(rows, cluster))
        tell("kernels that others measured")
        parts.append(parts_section(PARTS))
    show(parts, "UniEP's range", INTRODUCTION, "uniep", out)
    return 0


def uniep_section(rows: Sequence[Row], cluster: ClusterSpec) -> Section:
    """Times of a MegaKernel as fast as ``Sequential``, and as its own kernels one after another."""
    columns = ["layer", "tokens a rank", "H, I, E, K", "sequential ms", "kernels apart ms", "MegaKernel ms"]
    columns += ["to sequential", "to apart", "in range", "best point"]
    name = cluster.name or f"{cluster.num_ranks} ranks"
    made = table(f"SIMULATED: {name}; published {PUBLISHED[0]} to {PUBLISHED[1]}", columns)
    for row in rows:
        model, to_apart = row.layer.model, row.apart_ms / row.mega_ms
        inside = [PUBLISHED[0] <= ratio <= PUBLISHED[1] for ratio in (row.ratio, to_apart)]
        point = [f"{field}={getattr(row.best, field)}" for field in ("dispatch_share", "combine_share", "deduplicate")]
        made.add_row(
            row.layer.name,
            f"{row.layer.tokens:,}",
            f"{model.hidden_size}, {model.intermediate_size}, {model.num_experts}, {model.top_k}",
            *(f"{ms:.3f}" for ms in (row.sequential_ms, row.apart_ms, row.mega_ms)),
            f"{row.ratio:.2f}",
            f"{to_apart:.2f}",
            {2: "both", 1: "one", 0: "none"}[sum(inside)],
            ", ".join(point),
        )
    notes = [
        "to sequential: rows gathered, sent, computed and summed by kernels of their own, and sent by NCCL's.",
        "to apart: the MegaKernel's own tasks, launched one kind after another.",
    ]
    return made, notes


def parts_section(parts: Sequence[Part]) -> Section:
    """Kernels that others measured, each beside what is simulated of such a part."""
    columns = ["part", "layer", "cluster", "tokens a rank", "H, I, E, K", "not published", "published ms"]
    made = table("SIMULATED beside published: parts of a layer forward", [*columns, "simulated ms", "err %"], left=3)
    for part in parts:
        model, simulated_ms = part.layer.model, part.simulated_ms()
        made.add_row(
            part.what,
            part.layer.name,
            part.cluster.name,
            f"{part.layer.tokens:,}",
            f"{model.hidden_size}, {model.intermediate_size}, {model.num_experts}, {model.top_k}",
            part.assumed,
            f"{part.published_ms:.3f}",
            f"{simulated_ms:.3f}",
            f"{100 * (simulated_ms / part.published_ms - 1):+.0f}",
        )
    notes = [
        "mega EP test: Triton-distributed's documentation, where a token is sent to a rank once; one figure, 5.9 ms, "
        "stands there for dispatch and product in one kernel.",
        "Kraken: its pull request 32, whose times are of the exchange of counts as well, which is not simulated.",
    ]
    return made, notes
