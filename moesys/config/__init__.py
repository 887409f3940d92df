"""The declarations of users: the shape of a model, a cluster, a strategy, an experiment.

Every type is a frozen pydantic model that refuses unknown fields, names the way out in its errors, and can be written
to and read from JSON and TOML. Nothing here imports torch, so that ``--help`` and a typo in a strategy answer at once.

R ranks, E experts, S slots per rank, K top-k, H hidden size, I expert width, P_e parameters of an expert.
"""

from moesys.config.base import BYTES_PER_GB as BYTES_PER_GB
from moesys.config.base import Declaration as Declaration
from moesys.config.base import DType as DType
from moesys.config.cluster import ClusterSpec as ClusterSpec
from moesys.config.cluster import Microseconds as Microseconds
from moesys.config.member import Balance as Balance
from moesys.config.member import MinReplicas as MinReplicas
from moesys.config.member import ReplicasWithin as ReplicasWithin
from moesys.config.member import Split as Split
from moesys.config.member import Within as Within
from moesys.config.model import DenseMlp as DenseMlp
from moesys.config.model import Gqa as Gqa
from moesys.config.model import LayerSpec as LayerSpec
from moesys.config.model import Mla as Mla
from moesys.config.model import ModelShape as ModelShape
from moesys.config.model import MoeMlp as MoeMlp
from moesys.config.model_run import ModelRun as ModelRun
from moesys.config.model_run import Parallelism as Parallelism
from moesys.config.model_spec import ModelSpec as ModelSpec
from moesys.config.overlap import Overlap as Overlap
from moesys.config.sharding import Ep as Ep
from moesys.config.sharding import Fsep as Fsep
from moesys.config.sharding import Sharding as Sharding
from moesys.config.sharding import SlotCount as SlotCount
from moesys.config.sharding import SlotGigabytes as SlotGigabytes
from moesys.config.strategy import Adaptive as Adaptive
from moesys.config.strategy import Ema as Ema
from moesys.config.strategy import Last as Last
from moesys.config.strategy import LayoutInvariant as LayoutInvariant
from moesys.config.strategy import Oracle as Oracle
from moesys.config.strategy import Ordered as Ordered
from moesys.config.strategy import Predictor as Predictor
from moesys.config.strategy import Reduction as Reduction
from moesys.config.strategy import Strategy as Strategy
from moesys.config.strategy import WindowMean as WindowMean
