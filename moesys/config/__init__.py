"""The declarations of users: the shape of a model, a cluster, a strategy, an experiment.

Every type is a frozen pydantic model that refuses unknown fields, names the way out in its errors, and can be written
to and read from JSON and TOML. Nothing here imports torch, so that ``--help`` and a typo in a strategy answer at once.

R ranks, E experts, S slots per rank, K top-k, H hidden size, I expert width, P_e parameters of an expert.
"""

from moesys.config.balance import Balance, MinReplicas, ReplicasWithin, Within
from moesys.config.base import BYTES_PER_GB, Declared, DType
from moesys.config.cluster import ClusterSpec, Microseconds
from moesys.config.layer_spec import DenseMlp, Gqa, LayerSpec, Mla, MoeMlp
from moesys.config.model import ModelShape
from moesys.config.model_run import ModelRun, Parallelism
from moesys.config.model_spec import ModelSpec
from moesys.config.overlap import Overlap
from moesys.config.sharding import Ep, Fsep, Sharding, SlotCount, SlotGigabytes
from moesys.config.split import Split
from moesys.config.strategy import (
    Adaptive,
    Ema,
    Last,
    LayoutInvariant,
    Oracle,
    Ordered,
    Predictor,
    Reduction,
    Strategy,
    WindowMean,
)

__all__ = [
    "BYTES_PER_GB",
    "Adaptive",
    "Balance",
    "ClusterSpec",
    "DType",
    "Declared",
    "DenseMlp",
    "Ema",
    "Ep",
    "Fsep",
    "Gqa",
    "Last",
    "LayerSpec",
    "LayoutInvariant",
    "Microseconds",
    "MinReplicas",
    "Mla",
    "ModelRun",
    "ModelShape",
    "ModelSpec",
    "MoeMlp",
    "Oracle",
    "Ordered",
    "Overlap",
    "Parallelism",
    "Predictor",
    "Reduction",
    "ReplicasWithin",
    "Sharding",
    "SlotCount",
    "SlotGigabytes",
    "Split",
    "Strategy",
    "WindowMean",
    "Within",
]
