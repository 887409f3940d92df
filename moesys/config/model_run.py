"""ModelRun: a whole model in training on a cluster, as it is simulated."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from typing import Annotated, Literal, Self

from pydantic import Field, model_validator

from moesys.config.base import BYTES_PER_ELEMENT, Declaration, LongName
from moesys.config.cluster import ClusterSpec
from moesys.config.model import ModelShape, MoeMlp
from moesys.config.model_spec import ModelSpec
from moesys.config.strategy import Strategy

PipelineSchedule = Literal["1f1b", "zero_bubble"]
# The part of a layer that runs forward again in backward.
LayerRecompute = Literal["none", "selective", "full"]


class Parallelism(Declaration):
    """Groups of ranks, numbered as Megatron does: tensor groups are neighbours, then context, then data, and pipeline
    stages lie farthest apart. Expert groups are neighbours inside a stage; each has its own layouts.

    Inside tensor and context groups a rank has its share of every sequence's tokens (sequence parallelism), so that
    experts never see a token twice.
    """

    tp: int = Field(1, ge=1, description="tensor parallelism of attention and dense layers")
    cp: int = Field(1, ge=1, description="context parallelism: ranks that share a sequence")
    pp: int = Field(1, ge=1, description="pipeline stages")
    vp: int = Field(1, ge=1, description="parts of the model per stage; more than 1: interleaved")
    ep: int | None = Field(None, ge=1, description="ranks of an expert group; None: all of a stage")
    schedule: PipelineSchedule = Field("1f1b", description="schedule of the pipeline")
    overlap_micro_batches: bool = False
    """Run a forward concurrently with another micro-batch's backward."""
    dense: Literal["replicated", "optimizer", "full"] = "optimizer"
    """What is sharded of dense parameters: nothing, optimizer states, or all."""
    recompute: LayerRecompute = "none"
    """What runs again in backward: nothing, what is cheap, or whole layers."""

    @model_validator(mode="after")
    def _check(self) -> Self:
        if self.vp > 1 and self.pp == 1:
            raise ValueError(f"vp={self.vp} interleaves the stages of a pipeline, but pp=1; use vp=1, or more stages")
        if self.vp > 1 and self.schedule == "zero_bubble":
            raise ValueError(
                f"schedule='zero_bubble' has one part of the model a stage, not vp={self.vp}; "
                "use schedule='1f1b', or vp=1"
            )
        if self.overlap_micro_batches and self.schedule == "zero_bubble":
            raise ValueError(
                "overlap_micro_batches=True pairs forwards with whole backwards, which schedule='zero_bubble' splits; "
                "use schedule='1f1b'"
            )
        if self.overlap_micro_batches and self.pp > 1 and self.vp == 1:
            raise ValueError(
                f"overlap_micro_batches=True with pp={self.pp} needs interleaved stages, as Megatron-Core "
                "does: else each stage waits for the next one's pair; use vp=2 or more, or pp=1"
            )
        return self

    def groups(self, cluster: ClusterSpec) -> Groups:
        """Returns the sizes of all groups. Raises ValueError where they do not multiply to the cluster's ranks."""
        ranks, replica = cluster.num_ranks, self.tp * self.cp * self.pp
        if ranks % replica:
            raise ValueError(
                f"tp={self.tp}, cp={self.cp} and pp={self.pp} multiply to {replica}, "
                f"which does not divide the cluster's {ranks} ranks; choose divisors of {ranks}"
            )
        stage = ranks // self.pp
        expert = stage if self.ep is None else self.ep
        if stage % expert:
            raise ValueError(
                f"ep={expert} does not divide the {stage} ranks of a stage ({ranks} ranks, pp="
                f"{self.pp}); choose a divisor of {stage}, or None for all of them"
            )
        return Groups(data=ranks // replica, stage=stage, expert=expert, expert_data=stage // expert)


@dataclass(frozen=True)
class Groups:
    """The number of ranks in each kind of group: data parallel, a pipeline stage, an expert group, and the ranks that
    hold the same experts.
    """

    data: int
    stage: int
    expert: int
    expert_data: int


class ModelRun(Declaration):
    """A model, the ranks that train it, and how. Every data-parallel rank takes ``micro_batch`` sequences at once, as
    often as ``global_batch`` needs.
    """

    model: ModelSpec = Field(description="the whole model")
    cluster: ClusterSpec = Field(description="the cluster, of equal nodes")
    strategy: Strategy = Field({"name": "ep"}, validate_default=True, description="strategy of MoE layers")
    parallelism: Parallelism = Field(Parallelism(), description="how ranks share everything else")
    seq_len: int = Field(4096, ge=1, description="tokens of a sequence")
    micro_batch: int = Field(1, ge=1, description="sequences of a data-parallel rank in a micro-batch")
    global_batch: int | None = Field(None, ge=1)
    """Sequences of a step; None: one micro-batch of every data-parallel rank and stage."""
    fp8: bool = Field(False, description="products with weights in float8, except router and head")
    fp8_rows: bool = Field(False, description="with fp8: rows and gradients are dispatched in float8")
    gradient_dtype: Annotated[Literal["float32", "bfloat16"], LongName] = "float32"
    """Dtype of gradients between micro-batches and in sums over ranks."""
    host_us: float = Field(0.0, ge=0, le=1e12)
    """CPU time to launch each operation, a lower bound of a pass; 0: a step is one CUDA graph."""
    backend: Literal["nccl", "gloo"] = "nccl"
    """Backend of data-parallel collectives; gloo (CPUs): nothing is prefetched with dense="full"."""
    optimizer: Literal["adam", "adam_bf16", "sgd", "muon"] = "adam"
    """Moments in float32, in bfloat16 (DeepSeek-V3), none, or one (``ms.Muon``); masters are float32."""

    @model_validator(mode="after")
    def _check(self) -> Self:
        groups, parallel = self.groups, self.parallelism
        shapes = {layer.mlp.shape for layer in self.model.layer_counts if isinstance(layer.mlp, MoeMlp)}
        if len(shapes) != 1:
            raise ValueError(
                f"model={self.model.name!r} has {len(shapes)} kinds of experts; a simulated model has one, "
                "in one layer at least"
            )
        heads = min(layer.attention.num_heads for layer in self.model.layer_counts)
        if parallel.tp > heads or heads % parallel.tp:
            raise ValueError(
                f"tp={parallel.tp} does not divide the {heads} heads of attention; choose a divisor of {heads}"
            )
        if (parts := parallel.pp * parallel.vp) > self.model.num_layers:
            raise ValueError(
                f"pp={parallel.pp} with vp={parallel.vp} cuts "
                f"{self.model.num_layers} layers into {parts} parts; use at most {self.model.num_layers}"
            )
        for attention in {layer.attention for layer in self.model.layer_counts}:
            few, many = sorted((parallel.tp, attention.num_kv_heads))
            if many % few:
                raise ValueError(
                    f"tp={parallel.tp} neither divides the {attention.num_kv_heads} heads of keys, nor has "
                    "each head equally many ranks; choose a divisor or a multiple"
                )
        sharing = parallel.tp * parallel.cp
        if self.seq_len % sharing:
            raise ValueError(
                f"tp={parallel.tp} and cp={parallel.cp} share each sequence, and do not divide its "
                f"seq_len={self.seq_len} tokens; choose divisors"
            )
        at_once = groups.data * self.micro_batch
        if self.global_batch is not None and self.global_batch % at_once:
            raise ValueError(
                f"global_batch={self.global_batch} is no multiple of the {at_once} sequences that {groups.data} "
                f"data-parallel ranks take at once with micro_batch={self.micro_batch}; use a multiple"
            )
        if parallel.vp > 1 and self.num_micro_batches % parallel.pp:
            raise ValueError(
                f"global_batch={self.global_batch} makes {self.num_micro_batches} micro-batches, which do not fill the "
                f"groups of pp={parallel.pp} that vp={parallel.vp} goes through; "
                f"use a multiple of {parallel.pp * at_once}"
            )
        if self.fp8 and self.cluster.fp8_tflops is None:
            raise ValueError(
                f"fp8=True, but the cluster {self.cluster.name!r} declares no fp8_tflops; declare it, or use fp8=False"
            )
        if self.fp8_rows and (not self.fp8 or self.strategy.overlap.reaches_memory):
            raise ValueError(
                f"fp8_rows=True with fp8={self.fp8}, overlap={self.strategy.overlap.kind!r}: experts that compute in "
                "float8 take rows in float8, and MegaKernels send rows as they are; use fp8=True and another overlap"
            )
        self.strategy.slots(self.shape, self.expert_cluster)
        return self

    @property
    def groups(self) -> Groups:
        return self.parallelism.groups(self.cluster)

    @property
    def shape(self) -> ModelShape:
        """The shape of the layers with experts."""
        return next(layer.mlp.shape for layer in self.model.layer_counts if isinstance(layer.mlp, MoeMlp))

    @property
    def gradient_bytes(self) -> int:
        """Bytes of one gradient."""
        return BYTES_PER_ELEMENT[self.gradient_dtype]

    @property
    def num_micro_batches(self) -> int:
        """The micro-batches of a data-parallel rank in a step."""
        if self.global_batch is None:
            return self.parallelism.pp
        return self.global_batch // (self.groups.data * self.micro_batch)

    @property
    def tokens_per_step(self) -> int:
        return self.num_micro_batches * self.micro_batch * self.groups.data * self.seq_len

    @property
    def tokens_per_rank(self) -> int:
        """The tokens of a micro-batch on each rank of an expert group."""
        return self.micro_batch * self.seq_len // (self.parallelism.tp * self.parallelism.cp)

    @property
    def expert_cluster(self) -> ClusterSpec:
        """The ranks of one expert group, which are neighbours; its products run in float8 with ``fp8``.

        Groups are placed as ranks are numbered. If their places differ, so that rows of some go over NICs, it is the
        group with most pairs of ranks in different domains, because the others wait for it.

        Raises ValueError if nodes differ, or if a group is neither part of a node nor whole nodes.
        """
        cluster, ranks = self.cluster, self.groups.expert
        node, nodes_differ = cluster.node_sizes[0], len(set(cluster.node_sizes)) > 1
        if nodes_differ or (ranks > node and ranks % node) or (ranks < node and node % ranks):
            raise ValueError(
                f"an expert group of {ranks} ranks lies on nodes of {sorted(set(cluster.node_sizes))} ranks; whole "
                "models are simulated on equal nodes, with groups that divide them or are whole nodes"
            )
        domain_R = cluster.domain_of_rank
        placed = [tuple(Counter(domain_R[first : first + ranks]).values()) for first in range(0, len(domain_R), ranks)]
        return cluster.replace(
            num_nodes=max(1, ranks // node),
            ranks_per_node=min(ranks, node),
            ranks_per_domain=min(placed, key=lambda sizes: sum(size * size for size in sizes)),
            expert_tflops=cluster.fp8_tflops if self.fp8 else cluster.expert_tflops,
            backward_tflops=None if self.fp8 else cluster.backward_tflops,
        )
