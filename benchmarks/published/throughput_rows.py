"""What Megatron-Bridge published of whole models: the rows that are simulated, and the pairs of them, by a rule.

Source: github.com/NVIDIA-NeMo/Megatron-Bridge, docs/performance-summary.md and performance-summary-archive.md, read on
2026-11-22: tokens a second and GPU of pre-training on mock data, routing forced to balance, no token dropped.

The rule, fixed before any of the rows was fitted:

- Rows (``listed``): models with a packaged configuration, systems with a preset or B300, releases from 26.02.01 on,
  not marked as a regression by the source. Of a configuration that several releases have, the newest up to 26.04.01,
  and the newest after it: between those two the same configurations moved by 30 % in the median, whole CUDA graphs
  among the reasons. Between all other neighbours they moved by 3 % at most.
- Pairs: two configurations of one model on the same GPUs that differ in parallelism, precision, micro-batch or global
  batch; of one release, or of neighbours between which unchanged configurations moved by at most 5 % in the median. Of
  all rows from 26.02 on, and of 25.11 on Blackwell within the release (on H100 that release was slowed by its host).
- ``whole_graph``: a step is one CUDA graph, as recipes of the same repository say (perf_recipes, scripts/performance:
  ``full_iteration``): MXFP8 on Blackwell after 26.04.01, but for GPT-OSS and DeepSeek-V3 on B300, and Kimi-K2.
- ``fused_dispatch``: rows are sent by HybridEP or DeepEP, as the same recipes say, where a token goes to a node once
  and to a rank once; elsewhere by an all-to-all of a row a choice. Added after the first run, and before the fit.
- ``overlaps``: a micro-batch's exchanges run beside another's products (``overlap_moe_expert_parallel_comm``,
  ``moe_a2a_overlap`` in the recipes of v0.4.2, v0.5.0 and v0.6.0): whole graphs; of 26.04.01 DeepSeek-V3 on B200,
  GPT-OSS-120B on GB200 and Qwen3-235B on H100. Added after held-out rows had been predicted twice.
"""

from __future__ import annotations

import csv
from functools import cache
from importlib.resources import files
from typing import Literal

from pydantic import BaseModel, ConfigDict

from moesys.config import ClusterSpec, ModelSpec, presets
from moesys.config.model_run import ModelRun
from moesys.config.parallelism import Parallelism

# Models on whose rows constants are fitted: the two smallest, which have rows of all systems and precisions.
FITTED_MODELS = frozenset({"qwen3-30b-a3b", "gpt-oss-120b"})


def _b300(num_nodes: int) -> ClusterSpec:
    """GB300's GPUs in nodes of 8, each with a ConnectX-8 of 800 Gb/s (data sheet of DGX B300, 2025)."""
    rack = presets.gb300()
    faster = {"inter_node_gb_per_s": 2 * rack.inter_node_gb_per_s, "memory_gb": rack.memory_gb}
    return presets.b200(num_nodes).replace(name=f"{num_nodes} x 8 B300", **faster)


_SYSTEMS = {
    "h100": (8, presets.h100),
    "b200": (8, presets.b200),
    "b300": (8, _b300),
    "gb200": (4, presets.gb200),
    "gb300": (4, presets.gb300),
}


class PublishedRow(BaseModel):
    """One published measurement. ``row``: its number in this project's list of public figures."""

    model_config = ConfigDict(frozen=True)

    row: int
    release: str
    model: str
    system: Literal["h100", "b200", "b300", "gb200", "gb300"]
    gpus: int
    precision: Literal["BF16", "FP8", "MXFP8"]
    global_batch: int
    micro_batch: int
    seq_len: int
    tensor: int
    pipeline: int
    virtual_stages: int
    expert: int
    whole_graph: bool
    fused_dispatch: bool
    overlaps: bool
    listed: bool
    tokens_s_gpu: float

    @property
    def fitted(self) -> bool:
        return self.model in FITTED_MODELS

    @property
    def cluster(self) -> ClusterSpec:
        """The preset of the system. Jobs on racks ask for equally many trays in each, as many as divide the job's
        (``--segment`` in scripts/performance/utils/executors.py of the source).
        """
        ranks, preset = _SYSTEMS[self.system]
        cluster = preset(nodes := self.gpus // ranks)
        if not isinstance(cluster.ranks_per_domain, tuple):
            return cluster
        trays = max(count for count in range(1, 19) if nodes % count == 0)
        return cluster.replace(ranks_per_domain=trays * ranks)

    def run(self, cluster: ClusterSpec) -> ModelRun:
        """Returns the run that is simulated for it. Of what the table does not say: optimizer states are sharded over
        data-parallel ranks, as all recipes have it, and nothing runs again in backward, as most have it.
        """
        return ModelRun(
            model=_model(self.model),
            cluster=cluster,
            parallelism=Parallelism(
                tensor=self.tensor,
                pipeline=self.pipeline,
                virtual_stages=self.virtual_stages,
                expert=self.expert,
                overlap_micro_batches=self.overlaps,
                dense="optimizer",
                recompute="none",
            ),
            seq_len=self.seq_len,
            micro_batch=self.micro_batch,
            global_batch=self.global_batch,
            fp8=self.precision != "BF16",
        )


@cache
def _model(name: str) -> ModelSpec:
    return ModelSpec.from_config(name)


def published_rows() -> dict[int, PublishedRow]:
    """Returns all rows that are listed or in a pair, by number."""
    return {row.row: row for row in map(PublishedRow.model_validate, _read("throughput_rows.csv"))}


def published_pairs() -> list[tuple[PublishedRow, PublishedRow]]:
    """Returns pairs, the older or first row before the other."""
    rows = published_rows()
    return [(rows[int(pair["before"])], rows[int(pair["after"])]) for pair in _read("throughput_pairs.csv")]


def _read(name: str) -> list[dict[str, str]]:
    text = (files("benchmarks.published") / name).read_text(encoding="utf-8")
    return list(csv.DictReader(text.splitlines()))
