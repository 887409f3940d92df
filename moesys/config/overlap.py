"""Overlap: what runs beside what."""

from __future__ import annotations

from typing import Annotated, ClassVar, Literal, Self

from pydantic import Field, model_validator

from moesys.config.base import Declaration, KindUnion
from moesys.config.cluster import ClusterSpec

# On one rank there is nothing to overlap with, whatever the overlap.
ALONE_BY_KERNELS = "moesys.overlap.experts_triton:SingleRankExecutor"


class _Messages(Declaration):
    """How rows travel where they travel as messages. ``node_dispatch="once"``: a token crosses to a node once, however
    many of its experts are there, and spreads inside (DeepSeek's DeepEP, two-stage dispatch).

    By default every result returns, and is summed in the order of k: the same bits as ``direct``. With
    ``combine="per_node"`` one partial sum per node returns, rounded to the dtype of tokens. Its bits depend only on
    which node has which expert: no overlap changes them.
    """

    node_dispatch: Literal["direct", "once"] = Field("direct", description="one row per choice, or per node and token")
    combine: Literal["ordered", "per_node"] = "ordered"
    """Return every row, or one sum per node and token (with node_dispatch='once')."""

    @model_validator(mode="after")
    def _check(self) -> Self:
        if self.combine == "per_node" and self.node_dispatch == "direct":
            raise ValueError(
                "combine='per_node' sums where rows came into the node, but node_dispatch='direct' sends them to their "
                "experts at once; use node_dispatch='once', or combine='ordered'"
            )
        return self

    # Values of the questions and fields of ``MegaKernel`` that code for every overlap reads: ranks do not access each
    # other's memory, rows are kept until backward, and the CPU plans.
    reaches_memory: ClassVar[Literal[False]] = False
    keep_x: ClassVar[bool] = True
    most_tokens: ClassVar[None] = None

    def executor(self, num_ranks: int, num_nodes: int, by_kernels: bool) -> str:
        """Returns the module and class that run micro-batches on these ranks; ``by_kernels``: GPU kernels compute."""
        if num_ranks == 1:
            return ALONE_BY_KERNELS if by_kernels else "moesys.overlap.alone:AloneExecutor"
        if self.crosses_once(num_nodes):
            return "moesys.overlap.node_routes:NodeExecutor"
        return "moesys.overlap.chunked:ChunkedExecutor"

    def out_of_reach(self, cluster: ClusterSpec) -> str:
        """Returns "": messages reach every rank."""
        return ""

    def unfit_for_layout_invariant(self) -> str:
        """Returns why its bits would depend on the layout under ``LayoutInvariant``, or ""."""
        if self.combine == "ordered":
            return ""
        return (
            "reduction=LayoutInvariant() sums a token's experts in the order of k, but combine='per_node' sums "
            "those of a node first; use combine='ordered', or reduction=Ordered()"
        )

    def crosses_once(self, num_nodes: int) -> bool:
        """Returns whether a token crosses to each of ``num_nodes`` once; False for a single node."""
        return num_nodes > 1 and self.node_dispatch == "once"

    def sums_by_node(self, num_nodes: int) -> bool:
        """Returns whether sums return from each of ``num_nodes``, instead of all results."""
        return num_nodes > 1 and self.combine == "per_node"


class Sequential(_Messages):
    """Dispatch, experts and combine one after another."""

    kind: Literal["sequential"] = "sequential"
    chunks: ClassVar[int] = 1


class Pipelined(_Messages):
    """Tokens in ``chunks``: dispatch of the next and combine of the last in flight while one is computed."""

    kind: Literal["pipelined"] = "pipelined"
    chunks: int = Field(ge=1, description="parts of the tokens of a micro-batch")


class MegaKernel(Declaration):
    """Dispatch and experts, experts and combine fused into kernels whose programs take tasks from a queue (UniEP, arXiv
    2604.19241). Its fields are one search space: which sides are fused, in which order tasks come, how fine flags are.
    None of them changes a bit. Runs on GPUs that reach each other's memory; on the CPU in Triton's interpreter.
    """

    kind: Literal["mega_kernel"] = "mega_kernel"
    fused: Literal["both", "dispatch", "combine", "none"] = "both"
    """Sides that are one kernel with their product."""
    dispatch_share: float = Field(0.25, ge=0, le=1)
    """Least share of the first tasks that pull rows; 1: all before any product."""
    combine_share: float = Field(0.0, ge=0, lt=1)
    """Largest share of tasks that push rows; 0: tiles push their own."""
    reduce_share: float = Field(0.0, ge=0, le=1, description="largest share of backward's last tasks that sum rows")
    granularity: Literal["tile", "expert"] = Field("tile", description="what one flag signals")
    tile_order: Literal["largest_first", "slots"] = Field("largest_first", description="order of experts in the queue")
    deduplicate: bool = Field(False, description="a token that goes to several experts of a rank is pulled once")
    keep_x: bool = True
    """Rows of x, T·K·H of a layer, stay until backward; else it pulls them again, which takes longer."""
    overlap_weight_gradients: bool = Field(True, description="their tiles are tasks of backward's combine")
    fetch_rows: int = Field(32, ge=1, description="rows that one task pulls; a power of two that divides tile_rows")
    sum_tokens: int = Field(16, ge=1, description="tokens that one task sums; a power of two")
    tile_rows: int | None = Field(None, ge=16)
    """Rows of a tile, a power of two, on GPUs in 16 bits at least 64; None: the kernels' choice."""
    tile_columns: int | None = Field(None, ge=32)
    """Columns of a tile, a power of two; less would change the router's gradient."""
    warps: int | None = Field(None, ge=1)
    """Warps of a program, a power of two, on GPUs in 16 bits at least 4."""
    stages: int | None = Field(None, ge=1, description="steps of a product whose operands are loaded ahead")
    programs: int | None = Field(None, ge=1, description="resident programs of a rank; None: one per multiprocessor")
    rows_cap: float = Field(1.25, ge=1)
    """Most rows of a rank, in multiples of the choices of the rank with most tokens."""
    most_tokens: int | None = Field(None, ge=1)
    """Largest number of tokens of a rank in a micro-batch; devices plan; None: any."""
    timeout_s: float | None = Field(None, gt=0)
    """Time-out of waits for peers, on all ranks; None: as collectives."""

    reaches_memory: ClassVar[Literal[True]] = True
    chunks: ClassVar[int] = 1

    def executor(self, num_ranks: int, num_nodes: int, by_kernels: bool) -> str:
        """Returns the module and class that run micro-batches, as ``Sequential.executor``."""
        alone = num_ranks == 1 and by_kernels
        return ALONE_BY_KERNELS if alone else "moesys.overlap.mega_executor:MegaExecutor"

    def tensors_pulled(self, backward: bool) -> int:
        """Returns of how many tensors a direction pulls rows: of x or dy, and of x again where it was not kept."""
        return 2 if backward and not self.keep_x else 1

    def out_of_reach(self, cluster: ClusterSpec) -> str:
        """Returns why it cannot run on several domains, or "". It reads and writes its peers' memory, as the fastest
        links let it; its kernels are not written for NICs that could do the same between nodes.
        """
        domains = len(cluster.domain_sizes)
        if domains == 1:
            return ""
        return (
            f"overlap=MegaKernel() reaches the ranks of one domain of the fastest links, and the {cluster.num_ranks} "
            f"ranks are in {domains}; use Sequential() or Pipelined(), or ranks_per_domain={cluster.num_ranks} where "
            "NVLink joins them all"
        )

    def unfit_for_layout_invariant(self) -> str:
        """Returns why it cannot sum as ``LayoutInvariant`` does, or ""."""
        if self.overlap_weight_gradients:
            return (
                "reduction=LayoutInvariant() sums weight gradients when all ranks have told how large theirs are, "
                "but overlap_weight_gradients=True has them in the kernel before; use "
                "MegaKernel(overlap_weight_gradients=False), or reduction=Ordered()"
            )
        if self.most_tokens is not None:
            return (
                f"reduction=LayoutInvariant() splits in whole blocks on hosts, but most_tokens="
                f"{self.most_tokens} has devices split; use most_tokens=None, or reduction=Ordered()"
            )
        return ""

    def crosses_once(self, num_nodes: int) -> bool:
        """Returns False: ranks pull rows from wherever they are."""
        return False

    def sums_by_node(self, num_nodes: int) -> bool:
        """Returns False: every result returns."""
        return False

    @model_validator(mode="after")
    def _check(self) -> Self:
        if self.combine_share > 0 and self.fused in ("dispatch", "none"):
            raise ValueError(
                f"combine_share={self.combine_share} mixes pushes with tiles of a product, but fused={self.fused!r} "
                "has them one after another; use fused='both' or 'combine', or combine_share=0"
            )
        if self.reduce_share > 0 and not self.overlap_weight_gradients:
            raise ValueError(
                f"reduce_share={self.reduce_share} mixes sums with weight gradients, which "
                "overlap_weight_gradients=False computes elsewhere; use reduce_share=0 or overlap_weight_gradients=True"
            )
        for name in ("fetch_rows", "sum_tokens", "tile_rows", "tile_columns", "warps"):
            value = getattr(self, name)
            if value is not None and value & (value - 1):
                nearest = 1 << value.bit_length()
                raise ValueError(f"{name}={value} is no power of two; use {nearest // 2} or {nearest}")
        if self.tile_rows is not None and self.tile_rows % self.fetch_rows:
            raise ValueError(
                f"fetch_rows={self.fetch_rows} is more than tile_rows={self.tile_rows}; use at most {self.tile_rows}"
            )
        return self


Overlap = Annotated[Sequential | Pipelined | MegaKernel, KindUnion()]
