"""What authors print of the packaged published models."""

from __future__ import annotations

from typing import NamedTuple


class Printed(NamedTuple):
    """Billions of parameters; ``of_embeddings``: matrices of V·H, embedding and head, that the active ones count."""

    billions: str | None
    active_billions: str
    of_embeddings: int


# Model cards on huggingface.co, or what is named.
PUBLISHED = {
    "mixtral-8x7b": Printed("46.7", "12.9", 2),
    "qwen1.5-moe-a2.7b": Printed("14.3", "2.7", 2),
    "qwen2-57b-a14b": Printed("57", "14", 2),
    "qwen3-30b-a3b": Printed("30.5", "3.3", 2),
    "qwen3-235b-a22b": Printed("235", "22", 2),
    # arXiv 2409.02060.
    "olmoe-1b-7b": Printed("6.9", "1.3", 2),
    # arXiv 2405.04434.
    "deepseek-v2": Printed("236", "21", 1),
    "deepseek-v2-lite": Printed("15.7", "2.4", 1),
    # arXiv 2412.19437.
    "deepseek-v3": Printed("671", "37", 1),
    # "1 trillion" is not a figure to compare with.
    "kimi-k2": Printed(None, "32", 1),
    # arXiv 2508.10925, table 1, which counts the head and not the embedding.
    "gpt-oss-20b": Printed("20.91", "3.61", 1),
    "gpt-oss-120b": Printed("116.83", "5.13", 1),
    # arXiv 2508.06471, table 1, which counts neither embedding nor head, and in the total an extra prediction layer.
    "glm-4.5": Printed(None, "32", 0),
    "glm-4.5-air": Printed(None, "12", 0),
}
