"""What people declare: the shape of a model, a cluster, a strategy.

Every type here is a frozen pydantic model that refuses unknown fields, says the way out in its errors, and
survives a round trip through JSON and TOML. Nothing here imports torch, so that ``--help`` and a typo in a
strategy answer at once.

R ranks, E experts, S slots a rank, K top-k, H hidden size, I expert width, P_e parameters of an expert.
"""

from __future__ import annotations

import hashlib
import json
import tomllib
from itertools import accumulate
from typing import Annotated, Any, ClassVar, Literal, Self

import tomli_w
from pydantic import BaseModel, ConfigDict, Field, model_validator

FINGERPRINT_SCHEMA = 1
BYTES_PER_GB = 10**9

DType = Literal["float32", "bfloat16", "float16"]
BYTES_PER_ELEMENT: dict[str, int] = {"float32": 4, "bfloat16": 2, "float16": 2}


class Declared(BaseModel):
    """Base of everything a person declares: frozen, strict about names, re-validated by ``replace``."""

    model_config = ConfigDict(frozen=True, extra="forbid", revalidate_instances="always", allow_inf_nan=False)

    display_fields: ClassVar[frozenset[str]] = frozenset({"name"})

    def replace(self, **changes: Any) -> Self:
        """A copy with some fields changed, validated as a whole."""
        fields = {field: getattr(self, field) for field in type(self).model_fields}
        return type(self).model_validate(fields | changes)

    def to_json(self, indent: int | None = 2) -> str:
        return self.model_dump_json(indent=indent)

    @classmethod
    def from_json(cls, text: str | bytes) -> Self:
        return cls.model_validate_json(text)

    def to_toml(self) -> str:
        """TOML has no null, so fields that are ``None`` are left out; ``None`` is their default."""
        return tomli_w.dumps(self.model_dump(mode="json", exclude_none=True))

    @classmethod
    def from_toml(cls, text: str) -> Self:
        return cls.model_validate(tomllib.loads(text))

    def fingerprint(self) -> str:
        """64 hex digits: sha256 over all fields, defaults written out, display names left out.

        Two declarations with one fingerprint describe the same computation, whatever they are called.
        """
        identity = {"schema": FINGERPRINT_SCHEMA, "type": type(self).__name__, "fields": _identity(self)}
        return hashlib.sha256(json.dumps(identity, sort_keys=True, separators=(",", ":")).encode()).hexdigest()


def _identity(value: Any) -> Any:
    if isinstance(value, Declared):
        return {f: _identity(getattr(value, f)) for f in type(value).model_fields if f not in value.display_fields}
    if isinstance(value, tuple | list):
        return [_identity(item) for item in value]
    return value


# --- who computes what ------------------------------------------------------------------------------------


class ModelShape(Declared):
    """One MoE layer. Field names are those of the published configurations (Mixtral, Qwen3-MoE, OLMoE, DeepSeek-V3).

    ``dtype`` is what experts compute in; master parameters are float32 whatever it says.
    """

    hidden_size: int = Field(ge=1, description="H, width of a token")
    intermediate_size: int = Field(ge=1, description="I, width of one expert (moe_intermediate_size elsewhere)")
    num_experts: int = Field(ge=1, description="E, routed experts")
    top_k: int = Field(ge=1, description="K, experts a token is sent to (num_experts_per_tok elsewhere)")
    dtype: DType = "float32"
    scoring_func: Literal["softmax", "sigmoid"] = Field(
        "softmax", description="softmax over all experts, or sigmoid with a correction bias (DeepSeek-V3)"
    )
    norm_topk_prob: bool = Field(True, description="the K chosen weights are divided by their sum")
    n_group: int = Field(1, ge=1, description="expert groups of the group-limited choice; 1 for none")
    topk_group: int = Field(1, ge=1, description="groups a token may choose from")
    routed_scaling_factor: float = Field(1.0, gt=0, description="factor on the routing weights, after normalisation")
    n_shared_experts: int = Field(0, ge=0, description="shared experts, fused into one SwiGLU of n × I")
    router_aux_loss_coef: float = Field(0.0, ge=0, description="coefficient of the load-balancing loss")
    router_z_loss_coef: float = Field(0.0, ge=0, description="coefficient of the router z-loss")
    router_bias_update_rate: float = Field(
        0.0, ge=0, description="step of the correction bias towards balance (DeepSeek-V3's gamma); 0 leaves it alone"
    )
    initializer_range: float = Field(0.02, gt=0, description="standard deviation of the initial weights")

    @model_validator(mode="after")
    def _check(self) -> Self:
        if self.top_k > self.num_experts:
            raise ValueError(
                f"top_k={self.top_k} asks for more experts than num_experts={self.num_experts}; "
                f"use top_k <= {self.num_experts} or more experts"
            )
        if self.num_experts % self.n_group:
            raise ValueError(
                f"n_group={self.n_group} does not divide num_experts={self.num_experts}; "
                "groups hold equally many experts, so choose a divisor or n_group=1"
            )
        if self.topk_group > self.n_group:
            raise ValueError(
                f"topk_group={self.topk_group} is more than n_group={self.n_group}; use topk_group <= {self.n_group}"
            )
        reachable = self.topk_group * (self.num_experts // self.n_group)
        if self.top_k > reachable:
            raise ValueError(
                f"top_k={self.top_k} is more than the {reachable} experts in topk_group={self.topk_group} groups of "
                f"{self.num_experts // self.n_group}; raise topk_group or lower top_k"
            )
        if self.n_group > 1 and self.scoring_func == "softmax":
            raise ValueError(
                f"n_group={self.n_group} with scoring_func='softmax' is not a published router; "
                "use scoring_func='sigmoid' or n_group=1"
            )
        if self.n_group > 1 and self.num_experts // self.n_group < 2:
            raise ValueError(
                f"n_group={self.n_group} leaves one expert a group, and a group is scored by its best two; "
                f"use n_group <= {self.num_experts // 2}"
            )
        if self.router_bias_update_rate and self.scoring_func == "softmax":
            raise ValueError(
                f"router_bias_update_rate={self.router_bias_update_rate} needs a correction bias, which "
                "scoring_func='softmax' has not; use scoring_func='sigmoid' or rate 0"
            )
        return self

    @property
    def expert_parameters(self) -> int:
        """P_e: gate and up projections [2I, H] and the down projection [H, I]."""
        return 3 * self.intermediate_size * self.hidden_size

    @property
    def bytes_per_element(self) -> int:
        """Bytes of one element in the compute dtype."""
        return BYTES_PER_ELEMENT[self.dtype]


MOST_RANKS = 2**20
# One byte a second, and 11 days: what is slower is a slip, and times of it would end beyond what a float holds.
SLOWEST_GB_PER_S = 1e-9
Microseconds = Annotated[float, Field(ge=0, le=1e12)]


class ClusterSpec(Declared):
    """Ranks in domains and nodes, and how fast bytes and flops go. Ranks are numbered node by node.

    A domain is what the fastest links join (an NVLink domain): a node, a part of one, or whole nodes together.

    The default speeds are LAER-MoE's for A100-80GB nodes: its measured links (network_config.json), and the matmul rate
    behind its planner's 1.484375 us a token. GB/s are 1e9 bytes a second, one way. What else slows a step costs nothing
    by default: memory, tiles of one element, no waves, no latency; presets and ``moesys bench calibrate`` fill it in.
    """

    num_nodes: int = Field(1, ge=1)
    ranks_per_node: int | tuple[int, ...] = Field(1, description="one number for every node, or one a node")
    ranks_per_domain: int | tuple[int, ...] | None = Field(
        None, description="ranks that the fastest links join: one number for every domain, or one a domain; None: nodes"
    )
    name: str = ""
    intra_node_gb_per_s: float = Field(216.269, ge=SLOWEST_GB_PER_S, description="between two ranks of a node, GB/s")
    inter_node_gb_per_s: float = Field(88.9539, ge=SLOWEST_GB_PER_S, description="in or out of a whole node, GB/s")
    expert_tflops: float = Field(237.0, ge=1e-12, le=1e12, description="dense matmul rate a rank reaches, TFLOP/s")
    memory_gb_per_s: float | None = Field(
        None, ge=SLOWEST_GB_PER_S, description="of a rank's own memory, GB/s; None: it costs no time"
    )
    multiprocessors: int = Field(1, ge=1, description="of a rank: products run in waves of so many tiles")
    tile_rows: int = Field(1, ge=1, description="rows of a tile; an expert's rows are rounded up to whole tiles")
    tile_columns: int = Field(1, ge=1, description="columns of a tile of a product")
    copy_share: float = Field(
        0.0, ge=0, lt=1, description="part of a rank's computing that is lost while its messages move beside it"
    )
    launch_us: Microseconds = Field(0.0, description="from the end of one kernel to the start of the next")
    flag_us: Microseconds = Field(0.0, description="from a flag's release on one rank to its sight on another")
    intra_node_us: Microseconds = Field(0.0, description="a message inside a node takes so long before its first byte")
    inter_node_us: Microseconds = Field(0.0, description="a message between nodes takes so long before its first byte")

    @model_validator(mode="after")
    def _check(self) -> Self:
        # Before anything is as long as there are ranks.
        per_node = self.ranks_per_node
        num_ranks = sum(per_node) if isinstance(per_node, tuple) else self.num_nodes * per_node
        if max(num_ranks, self.num_nodes) > MOST_RANKS:
            raise ValueError(
                f"num_nodes={self.num_nodes} and ranks_per_node={per_node} are more than {MOST_RANKS} ranks; use fewer"
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
    def node_sizes(self) -> tuple[int, ...]:
        if isinstance(self.ranks_per_node, tuple):
            return self.ranks_per_node
        return (self.ranks_per_node,) * self.num_nodes

    @property
    def num_ranks(self) -> int:
        return sum(self.node_sizes)

    @property
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


# --- sharding: what it takes for a rank to hold an expert ---------------------------------------------------

SlotCount = Annotated[int, Field(ge=0, strict=True)]
SlotGigabytes = Annotated[float, Field(ge=0)]


class Ep(Declared):
    """Classic expert parallelism: every expert lives whole on its owner rank.

    With ``slots_per_rank``, or memory for them in ``slot_gb_per_rank``, an owner lends copies of its experts to other
    ranks for the length of a micro-batch, so that balancers can replicate them; masters and optimizer state stay with
    the owner.
    """

    kind: Literal["ep"] = "ep"
    slots_per_rank: SlotCount | tuple[SlotCount, ...] | None = None
    slot_gb_per_rank: SlotGigabytes | tuple[SlotGigabytes, ...] | None = Field(
        None, description="memory for experts in their compute dtype, 1e9 bytes a rank, instead of slots_per_rank"
    )

    @model_validator(mode="after")
    def _check(self) -> Self:
        if self.slots_per_rank is not None and self.slot_gb_per_rank is not None:
            raise ValueError(
                f"slots_per_rank={self.slots_per_rank} and slot_gb_per_rank={self.slot_gb_per_rank} both say how many "
                "experts a rank holds; give one of them"
            )
        return self

    @property
    def lends(self) -> bool:
        """Whether other ranks than its owner may hold an expert."""
        return self.slots_per_rank is not None or self.slot_gb_per_rank is not None


class Fsep(Declared):
    """Fully sharded expert parallelism (LAER-MoE, section 4): every expert is sharded over all ranks and restored into
    slots by all-to-all, so the layout may change every micro-batch.

    ``reshard_after_forward`` frees restored experts after forward and restores them again for backward (ZeRO-3);
    without it they are kept. ``delay_reshard`` sends gradients home behind the backward of the layer before. Slots are
    given as a number or as memory: ``slots_per_rank`` or ``slot_gb_per_rank``.
    """

    kind: Literal["fsep"] = "fsep"
    slots_per_rank: SlotCount | tuple[SlotCount, ...] | None = None
    slot_gb_per_rank: SlotGigabytes | tuple[SlotGigabytes, ...] | None = Field(
        None, description="memory for experts in their compute dtype, 1e9 bytes a rank, instead of slots_per_rank"
    )
    prefetch_layers: int = Field(0, ge=0, description="restores of so many next layers are in flight (linked)")
    delay_reshard: bool = Field(False, description="gradients travel behind the next backward (linked)")
    reshard_after_forward: bool = True
    restore: Literal["flat", "hierarchical"] = Field(
        "flat", description="one all-to-all, or one copy a node and then a spread inside it"
    )

    @model_validator(mode="after")
    def _check(self) -> Self:
        if (self.slots_per_rank is None) == (self.slot_gb_per_rank is None):
            raise ValueError(
                f"slots_per_rank={self.slots_per_rank} and slot_gb_per_rank={self.slot_gb_per_rank}; "
                "give one of them, which says how many experts a rank holds"
            )
        return self


Sharding = Annotated[Ep | Fsep, Field(discriminator="kind")]

# --- balance: a layout from history -------------------------------------------------------------------------


class Static(Declared):
    """The same layout for ever: experts in order over the slots."""

    kind: Literal["static"] = "static"


class Eplb(Declared):
    """DeepSeek's EPLB: replicate the heaviest expert per replica, then pack the heaviest first.

    ``hierarchical``: groups of experts are packed to nodes first, and an expert's replicas stay inside one node.
    """

    kind: Literal["eplb"] = "eplb"
    num_groups: int = Field(
        1, ge=1, description="groups of consecutive experts; hierarchical only, a multiple of nodes"
    )
    hierarchical: bool = Field(False, description="groups to nodes, replicas inside a node, then ranks")

    @model_validator(mode="after")
    def _check(self) -> Self:
        if self.num_groups > 1 and not self.hierarchical:
            raise ValueError(
                f"num_groups={self.num_groups} means nothing to EPLB's global form; "
                "use hierarchical=True or num_groups=1"
            )
        return self


class Laer(Declared):
    """LAER-MoE's planner: candidate replica counts, placement that spreads over nodes, the cheaper one by its cost."""

    kind: Literal["laer"] = "laer"
    candidates: tuple[Literal["even", "proportional"], ...] = Field(("even", "proportional"), min_length=1)


class FlexMoe(Declared):
    """FlexMoE (arXiv 2304.03946) as a baseline: a few expand and shrink moves from the layout in force."""

    kind: Literal["flex_moe"] = "flex_moe"
    max_moves: int = Field(10, ge=0, description="replicas that change from one plan to the next")


Within = Literal["cluster", "node", "domain"]
MinReplicas = Annotated[int, Field(ge=1, description="replicas of every expert, on distinct ranks")]
ReplicasWithin = Annotated[Within, Field(description="all replicas of an expert lie inside one of these")]


class Greedy(Declared):
    """Ours: replicas on distinct ranks, spread over nodes, improved by local search; anytime and monotone in its work.

    With ``deadline_ms`` two ranks may plan differently. Their layouts still agree, for one rank plans and broadcasts,
    but runs do not repeat bit by bit.
    """

    kind: Literal["greedy"] = "greedy"
    effort: int = Field(1, ge=0, description="multiples of the default work, in iterations and never by a clock")
    min_replicas: MinReplicas = 1
    replicas_within: ReplicasWithin = "cluster"
    max_moves: int | None = Field(
        None, ge=0, description="replicas that may differ from the previous layout; None: all"
    )
    move_tokens: int = Field(
        0, ge=0, description="what a moved replica costs, in tokens of the busiest rank over a plan's life"
    )
    deadline_ms: float | None = Field(
        None, gt=0, description="the search ends after so much time; then runs do not repeat bit by bit"
    )


class CpSat(Declared):
    """OR-Tools CP-SAT on the joint placement and split, hinted by ``Greedy`` and never worse than it; R × E <= 4096."""

    kind: Literal["cp_sat"] = "cp_sat"
    deterministic_time: float = Field(2.0, gt=0, description="CP-SAT's work limit, in its deterministic seconds")
    min_replicas: MinReplicas = 1
    replicas_within: ReplicasWithin = "cluster"


Balance = Annotated[Static | Eplb | Laer | FlexMoe | Greedy | CpSat, Field(discriminator="kind")]

# --- predictor: the load a layout is planned for -------------------------------------------------------------


class Last(Declared):
    """The newest load."""

    kind: Literal["last"] = "last"


class WindowMean(Declared):
    """The mean of the newest ``steps`` loads (LAER-MoE: 5)."""

    kind: Literal["window_mean"] = "window_mean"
    steps: int = Field(5, ge=1)


class Ema(Declared):
    """Exponential moving average: ``decay`` of the old, the rest of the newest."""

    kind: Literal["ema"] = "ema"
    decay: float = Field(0.7, ge=0, lt=1)


class Adaptive(Declared):
    """Of several predictors the one that was closest lately: each is tested on every load before it sees it."""

    kind: Literal["adaptive"] = "adaptive"
    candidates: tuple[Annotated[Last | WindowMean | Ema, Field(discriminator="kind")], ...] = Field(
        (Last(), WindowMean(steps=5), Ema(decay=0.5), Ema(decay=0.9)), min_length=1
    )
    memory: int = Field(16, ge=1, description="loads over which an error is forgotten to 1/e")


class Oracle(Declared):
    """The load of the micro-batch that the plan will serve: what no predictor can beat. Simulations only."""

    kind: Literal["oracle"] = "oracle"


Predictor = Annotated[Last | WindowMean | Ema | Adaptive | Oracle, Field(discriminator="kind")]

# --- split: the current tokens over the replicas of their experts ----------------------------------------------


class EvenSplit(Declared):
    """LAER-MoE's lite routing: evenly over the replicas on the source's node, or over all if the node has none."""

    kind: Literal["even"] = "even"


class Proportional(Declared):
    """Over all replicas, in proportion to the room that the other experts leave on their ranks."""

    kind: Literal["proportional"] = "proportional"


class FlowSplit(Declared):
    """Exact: the least maximum load that the layout allows, then little traffic between nodes."""

    kind: Literal["flow"] = "flow"
    traffic: Literal["fast", "exact"] = Field("fast", description="traffic almost the least, or the least there is")
    max_inter_node: float | None = Field(
        None, ge=0, le=1, description="share of the routed tokens that may leave their node, before balance; None: any"
    )


Split = Annotated[EvenSplit | Proportional | FlowSplit, Field(discriminator="kind")]

# --- overlap: what runs beside what ----------------------------------------------------------------------------


class Sequential(Declared):
    """Dispatch, experts and combine one after another."""

    kind: Literal["sequential"] = "sequential"


class Pipelined(Declared):
    """Tokens in ``chunks``: dispatch of the next and combine of the last in flight while one is computed."""

    kind: Literal["pipelined"] = "pipelined"
    chunks: int = Field(ge=1)


class MegaKernel(Declared):
    """Dispatch and experts, experts and combine fused into kernels whose programs take tasks from a queue (UniEP, arXiv
    2604.19241). Its fields are one search space: which sides are fused, in which order tasks come, how fine flags are.
    None of them changes a bit. Runs on GPUs that reach each other's memory; on the CPU in Triton's interpreter.
    """

    kind: Literal["mega_kernel"] = "mega_kernel"
    fused: Literal["both", "dispatch", "combine", "none"] = Field(
        "both", description="sides that are one kernel with the product beside them"
    )
    dispatch_share: float = Field(
        0.25, ge=0, le=1, description="at least this part of the first tasks pulls rows; 1: all before any product"
    )
    combine_share: float = Field(
        0.0, ge=0, lt=1, description="at most this part of the tasks pushes rows home; 0: tiles push their own"
    )
    reduce_share: float = Field(
        0.0, ge=0, le=1, description="at most this part of backward's last tasks sums rows beside weight gradients"
    )
    granularity: Literal["tile", "expert"] = Field("tile", description="what one flag stands for")
    tile_order: Literal["largest_first", "slots"] = Field("largest_first", description="of experts in the queue")
    deduplicate: bool = Field(False, description="a token that goes to several experts of a rank is pulled once")
    overlap_weight_gradients: bool = Field(True, description="their tiles are tasks of backward's combine")
    fetch_rows: int = Field(32, ge=1, description="rows that one task pulls; a power of two that divides tile_rows")
    sum_tokens: int = Field(16, ge=1, description="tokens that one task sums; a power of two")
    tile_rows: int | None = Field(None, ge=16, description="rows of a tile, a power of two; None: the kernels' choice")
    tile_columns: int | None = Field(
        None, ge=32, description="columns of a tile, a power of two; less would change the router's gradient"
    )
    warps: int | None = Field(None, ge=1, description="warps of a program, a power of two")
    stages: int | None = Field(None, ge=1, description="steps of a product whose operands are on their way")
    programs: int | None = Field(None, ge=1, description="resident programs of a rank; None: one a multiprocessor")
    rows_cap: float = Field(
        2.0, ge=1, description="a rank gets at most so many times the choices of the rank with most tokens"
    )
    most_tokens: int | None = Field(
        None, ge=1, description="tokens of a rank in a micro-batch; given, devices plan and no host waits; None: any"
    )
    timeout_s: float = Field(30.0, gt=0, description="a wait for a peer that takes longer is given up, on all ranks")

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


Overlap = Annotated[Sequential | Pipelined | MegaKernel, Field(discriminator="kind")]

# --- reduction: which bits must agree ----------------------------------------------------------------------------


class Ordered(Declared):
    """The same bits for every overlap: rows of an expert by (source rank, token, k), replicas by rank."""

    kind: Literal["ordered"] = "ordered"


class Strategy(Declared):
    """Everything that decides how an MoE layer runs, and nothing that decides what it computes."""

    name: str
    sharding: Sharding = Ep()
    balance: Balance = Static()
    predictor: Predictor = Last()
    split: Split = EvenSplit()
    overlap: Overlap = Sequential()
    reduction: Ordered = Ordered()
    replan_every: int = Field(1, ge=1, description="a layout is planned after every so many micro-batches")
    lag: int = Field(1, ge=1, description="a plan made on micro-batch t is used from t + lag on")

    @model_validator(mode="after")
    def _check(self) -> Self:
        if isinstance(self.sharding, Ep) and not self.sharding.lends and self.balance.kind != "static":
            raise ValueError(
                f"sharding=Ep() keeps every expert on its owner rank, but balance={type(self.balance).__name__}() "
                "moves experts; use balance=Static(), Ep(slots_per_rank=...) or Fsep(slots_per_rank=...)"
            )
        return self

    def slots(self, model: ModelShape, cluster: ClusterSpec) -> tuple[int, ...]:
        """Slots of each rank, [R], checked against the model: every expert must find a slot.

        ``Ep()`` has as many slots as a rank owns experts: ceil(E / R) in rank order, the last ranks fewer.
        ``slot_gb_per_rank`` has as many as its bytes hold experts in the compute dtype, and no rank more than E.
        """
        R, E, slots = cluster.num_ranks, model.num_experts, self.sharding.slots_per_rank
        if self.sharding.slot_gb_per_rank is not None:
            return self._slots_in_memory(self.sharding.slot_gb_per_rank, model, R)
        if slots is None:
            owned = -(-E // R)
            return tuple(max(0, min(owned, E - rank * owned)) for rank in range(R))
        if isinstance(slots, int):
            if slots * R < E:
                raise ValueError(
                    f"slots_per_rank={slots} gives {slots * R} slots on {R} ranks for {E} experts; "
                    f"use at least {-(-E // R)}"
                )
            return (slots,) * R
        if len(slots) != R:
            raise ValueError(
                f"slots_per_rank names {len(slots)} ranks but the cluster has {R}; "
                "give one number a rank, or one for all"
            )
        if sum(slots) < E:
            raise ValueError(
                f"slots_per_rank={list(slots)} gives {sum(slots)} slots for {E} experts; add at least {E - sum(slots)}"
            )
        return slots

    @staticmethod
    def _slots_in_memory(
        slot_gb_per_rank: float | tuple[float, ...], model: ModelShape, num_ranks: int
    ) -> tuple[int, ...]:
        gb_R = slot_gb_per_rank if isinstance(slot_gb_per_rank, tuple) else (slot_gb_per_rank,) * num_ranks
        if len(gb_R) != num_ranks:
            raise ValueError(
                f"slot_gb_per_rank names {len(gb_R)} ranks but the cluster has {num_ranks}; "
                "give one number a rank, or one for all"
            )
        E, expert_bytes = model.num_experts, model.expert_parameters * model.bytes_per_element
        # whole bytes: 0.6 GB is 600,000,000 bytes although no float is 0.6
        slots_R = tuple(min(E, round(gb * BYTES_PER_GB) // expert_bytes) for gb in gb_R)
        missing = E - sum(slots_R)
        if missing > 0:
            if isinstance(slot_gb_per_rank, tuple):
                way_out = f"add room for {missing} more, {missing * expert_bytes / BYTES_PER_GB} GB"
            else:
                way_out = f"use at least {-(-E // num_ranks) * expert_bytes / BYTES_PER_GB}"
            raise ValueError(
                f"slot_gb_per_rank={slot_gb_per_rank} gives {sum(slots_R)} slots on {num_ranks} ranks for {E} experts "
                f"of {expert_bytes / BYTES_PER_GB} GB; {way_out}"
            )
        return slots_R
