"""DeepSeek's own EPLB beside ours, from a local checkout of deepseek-ai/EPLB: never a dependency."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch

from moesys.layout import ExpertLayout
from moesys.load import IntArray

# rebalance_experts: loads [L, E], replicas, groups, nodes, ranks; the expert of each replica [L, P], and more.
Rebalance = Callable[[torch.Tensor, int, int, int, int], tuple[torch.Tensor, torch.Tensor, torch.Tensor]]
PEER = "EPLB's own code"


def load_peer(path: Path) -> Rebalance:
    """``rebalance_experts`` of a checkout of deepseek-ai/EPLB: its folder, or its eplb.py. Runs that file.

    Raises ValueError where there is none.
    """
    file = path / "eplb.py" if path.is_dir() else path
    if not file.is_file():
        raise ValueError(f"peer_eplb={path} has no eplb.py; give a folder that deepseek-ai/EPLB was checked out to")
    spec = importlib.util.spec_from_file_location("peer_eplb", file)
    if spec is None or spec.loader is None:
        raise ValueError(f"peer_eplb={path} is no Python file; give a folder with its eplb.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    if not hasattr(module, "rebalance_experts"):
        raise ValueError(f"{file} has no rebalance_experts; give the eplb.py of deepseek-ai/EPLB")
    rebalance: Rebalance = module.rebalance_experts
    return rebalance


def peer_layouts(peer: Rebalance, loads_LE: torch.Tensor, num_ranks: int, slots: int) -> list[ExpertLayout]:
    expert_LP = peer(loads_LE, slots * num_ranks, 1, 1, num_ranks)[0].numpy().astype(np.int64)
    return [ExpertLayout(expert_P.reshape(num_ranks, slots), loads_LE.shape[1]) for expert_P in expert_LP]


def even_max_over_mean(tokens_E: IntArray, layout: ExpertLayout) -> float:
    """The busiest rank over the mean where every replica gets the same fraction of its expert's tokens."""
    share_E = tokens_E / layout.replicas_RE.sum(axis=0)
    tokens_R = layout.replicas_RE @ share_E
    return float(tokens_R.max() / tokens_R.mean())
