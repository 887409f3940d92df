"""A cluster: its ranks, what joins them, and how fast bytes and flops go."""

from __future__ import annotations

from functools import cached_property
from itertools import accumulate
from typing import Annotated, Self

from pydantic import ConfigDict, Field, model_validator

from moesys.config.base import Declaration, DisplayName

MOST_RANKS = 2**20
# The slowest link has one byte per second, and the longest time is 11 days: anything beyond is a slip.
SLOWEST_GB_PER_S = 1e-9
Microseconds = Annotated[float, Field(ge=0, le=1e12)]
Rate = Annotated[float, Field(ge=SLOWEST_GB_PER_S)]
OptionalRate = Annotated[float | None, Field(ge=SLOWEST_GB_PER_S)]
OptionalTflops = Annotated[float | None, Field(ge=1e-12, le=1e12)]


class ClusterSpec(Declaration):
    """Ranks in domains and nodes, and how fast bytes and flops go. Ranks are numbered node by node.

    A domain is what the fastest links join (an NVLink domain): a node, a part of one, or whole nodes together. What
    leaves a domain goes out of its node and into another's, or the same one's, over that node's NICs.

    The default speeds are LAER-MoE's for A100-80GB nodes: its measured links (network_config.json), and the matmul rate
    behind its planner's 1.484375 us a token. GB/s are 1e9 bytes a second, one way. What else slows a step costs nothing
    by default: memory, tiles of one element, no waves, no latency; presets and calibration fill it in.
    """

    # An instance is frozen and was validated; to validate it again would take its cached properties for fields.
    model_config = ConfigDict(revalidate_instances="never")

    num_nodes: int = Field(1, ge=1, description="number of nodes")
    ranks_per_node: int | tuple[int, ...] = Field(1, description="one number for every node, or one per node")
    ranks_per_domain: int | tuple[int, ...] | None = None
    """Ranks that the fastest links join: one number, or one per domain; None: nodes."""
    name: DisplayName = Field("", description="name in tables; not part of the fingerprint")
    intra_node_gb_per_s: Rate = Field(216.269, description="bandwidth of a rank inside its domain, each way, GB/s")
    inter_node_gb_per_s: Rate = Field(88.9539, description="bandwidth of a node between domains, each way, GB/s")
    expert_tflops: float = Field(237.0, ge=1e-12, le=1e12, description="dense matmul rate of a rank, TFLOP/s")
    backward_tflops: OptionalTflops = Field(None, description="rate of products for gradients; None: as forward")
    attention_tflops: OptionalTflops = Field(None, description="rate of attention scores; None: as other products")
    attention_backward_tflops: OptionalTflops = None
    """Rate of their gradients; None: as attention_tflops."""
    fp8_tflops: OptionalTflops = Field(None, description="rate of float8 products; None: no float8")
    peak_tflops: OptionalTflops = Field(None, description="dense 16-bit peak by data sheet, for MFU")
    memory_gb_per_s: OptionalRate = None
    """Bandwidth of a rank's memory, GB/s; None: memory costs no time."""
    elementwise_gb_per_s: OptionalRate = None
    """Minimal bytes of norms, rotary embeddings, activations and residuals over time, GB/s; None: memory_gb_per_s."""
    elementwise_backward_gb_per_s: OptionalRate = None
    """The same of their gradients, GB/s; None: elementwise_gb_per_s."""
    optimizer_gb_per_s: OptionalRate = None
    """Minimal bytes of the optimizer over its time, GB/s; None: memory_gb_per_s."""
    memory_gb: float | None = Field(None, gt=0, le=1e9, description="memory of a rank, 1e9 bytes; None: unknown")
    multiprocessors: int = Field(1, ge=1, description="multiprocessors of a rank: tiles that run at a time")
    tile_rows: int = Field(1, ge=1, description="rows of a tile; an expert has whole tiles")
    tile_columns: int = Field(1, ge=1, description="columns of a tile")
    copy_share: float = Field(0.0, ge=0, lt=1, description="share of computing power that is lost while messages move")
    fused_rate: float = Field(1.0, gt=0, le=1)
    """Rate of tiles inside a MegaKernel, relative to a separate kernel."""
    launch_us: Microseconds = Field(0.0, description="time from the end of a kernel to the next")
    flag_us: Microseconds = Field(0.0, description="time until a flag is seen on another rank")
    intra_node_us: Microseconds = Field(0.0, description="latency of a message inside a domain")
    inter_node_us: Microseconds = Field(0.0, description="latency of a message between domains")

    @model_validator(mode="after")
    def _check(self) -> Self:
        # This comes before any list with an entry per rank is made.
        if max(self.num_ranks, self.num_nodes) > MOST_RANKS:
            raise ValueError(
                f"num_nodes={self.num_nodes} and ranks_per_node={self.ranks_per_node} are more than {MOST_RANKS} "
                "ranks; use fewer"
            )
        if isinstance(self.ranks_per_node, tuple) and len(self.ranks_per_node) != self.num_nodes:
            raise ValueError(
                f"ranks_per_node={list(self.ranks_per_node)} names {len(self.ranks_per_node)} nodes but "
                f"num_nodes={self.num_nodes}; give one number a node, or one number for all"
            )
        if min(self.node_sizes) < 1:
            raise ValueError(f"ranks_per_node={self.ranks_per_node} leaves a node without ranks; use at least 1")
        self._check_domains()
        return self

    def _check_domains(self) -> None:
        sizes, declared = self.domain_sizes, self.ranks_per_domain
        if min(sizes, default=0) < 1:
            raise ValueError(f"ranks_per_domain={declared} leaves a domain without ranks; use at least 1")
        if sum(sizes) != self.num_ranks:
            raise ValueError(
                f"ranks_per_domain={declared} does not add up to the {self.num_ranks} ranks of the nodes "
                f"{self.node_sizes}; use a divisor or a multiple of the node sizes, or one number a domain"
            )
        node_ends, domain_ends = set(accumulate(self.node_sizes)), set(accumulate(sizes))
        if not (node_ends <= domain_ends or domain_ends <= node_ends):
            raise ValueError(
                f"ranks_per_domain={declared} does not nest with the nodes {self.node_sizes}: every domain must lie in "
                "one node, or every domain must be whole nodes; use a divisor or a multiple of the node sizes, or one "
                "number a domain"
            )

    @property
    def has_speeds(self) -> bool:
        """This is true if more is declared than ranks, their nodes and domains, and a name."""
        changed = {name for name, field in type(self).model_fields.items() if getattr(self, name) != field.default}
        return bool(changed - {"num_nodes", "ranks_per_node", "ranks_per_domain", "name"})

    @property
    def hardware(self) -> str:
        """The name, or the hardware of the default speeds, if no other speed is declared; else ""."""
        return self.name or ("" if self.has_speeds else "no speed is declared, so A100-80GB is assumed")

    @property
    def node_sizes(self) -> tuple[int, ...]:
        if isinstance(self.ranks_per_node, tuple):
            return self.ranks_per_node
        return (self.ranks_per_node,) * self.num_nodes

    @property
    def num_ranks(self) -> int:
        per_node = self.ranks_per_node
        return sum(per_node) if isinstance(per_node, tuple) else self.num_nodes * per_node

    @cached_property
    def node_of_rank(self) -> tuple[int, ...]:
        """Node index of each rank, [R]."""
        return tuple(node for node, size in enumerate(self.node_sizes) for _ in range(size))

    @property
    def domain_sizes(self) -> tuple[int, ...]:
        """Ranks of each domain, in rank order; sums to R."""
        match self.ranks_per_domain:
            case None:
                return self.node_sizes
            case int(size):
                return (size,) * max(1, self.num_ranks // max(1, size))
            case sizes:
                return sizes

    @property
    def domain_of_rank(self) -> tuple[int, ...]:
        """Domain index of each rank, [R]."""
        return tuple(domain for domain, size in enumerate(self.domain_sizes) for _ in range(size))
