"""The shape of one MoE layer, and the layers of a whole model: attention and an MLP, as the products, norms and biases
that they consist of.

H is the width of a token, which a layer takes from its model.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, ClassVar, Literal, Self

from pydantic import Field, model_validator

from moesys.config.base import BYTES_PER_ELEMENT, Declaration, DType, KindUnion


class ModelShape(Declaration):
    """One MoE layer. Field names are those of the published configurations (Mixtral, Qwen3-MoE, OLMoE, DeepSeek-V3).

    ``dtype`` is what experts compute in; master parameters are float32 whatever it says.
    """

    hidden_size: int = Field(ge=1, description="H, width of a token")
    intermediate_size: int = Field(ge=1, description="I, width of one expert (moe_intermediate_size elsewhere)")
    num_experts: int = Field(ge=1, description="E, routed experts")
    top_k: int = Field(ge=1, description="K, experts a token is sent to (num_experts_per_tok elsewhere)")
    dtype: DType = Field("float32", description="dtype of computation; masters are float32")
    scoring_func: Literal["softmax", "sigmoid"] = "softmax"
    """Softmax, or sigmoid with a correction bias (DeepSeek-V3)."""
    norm_topk_prob: bool = Field(True, description="divide the K weights by their sum")
    n_group: int = Field(1, ge=1, description="groups of experts; 1: none")
    topk_group: int = Field(1, ge=1, description="groups a token may choose from")
    routed_scaling_factor: float = Field(1.0, gt=0, description="factor on the normalised weights")
    n_shared_experts: int = Field(0, ge=0, description="shared experts, one SwiGLU of n × I")
    router_aux_loss_coef: float = Field(0.0, ge=0, description="coefficient of the load-balancing loss")
    router_z_loss_coef: float = Field(0.0, ge=0, description="coefficient of the router z-loss")
    router_bias_update_rate: float = Field(0.0, ge=0, description="step of the correction bias; 0: constant")
    initializer_range: float = Field(0.02, gt=0, description="standard deviation of initial weights")

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

    @property
    def row_bytes(self) -> int:
        """Bytes of one token's row in the compute dtype."""
        return self.hidden_size * self.bytes_per_element


@dataclass(frozen=True)
class Product:
    """A product of rows with weights: [rows, inputs] x [inputs, outputs], and a bias of ``outputs`` if it has one."""

    inputs: int
    outputs: int
    bias: bool = False

    @property
    def parameters(self) -> int:
        return self.inputs * self.outputs + self.bias * self.outputs

    @property
    def flops(self) -> int:
        """The flops of one row: a multiplication and an addition per weight, without the bias, as torch counts them."""
        return 2 * self.inputs * self.outputs


class Gqa(Declaration):
    """Grouped-query attention (arXiv 2305.13245); ``num_kv_heads == num_heads`` is attention of many heads."""

    kind: Literal["gqa"] = "gqa"
    num_heads: int = Field(ge=1, description="heads of queries")
    num_kv_heads: int = Field(ge=1, description="heads of keys and values")
    head_dim: int = Field(ge=1, description="width of a head")
    window: int | None = Field(None, ge=1, description="keys that a query sees, its own included; None: all before it")
    qkv_bias: bool = Field(False, description="biases of queries, keys and values")
    output_bias: bool = Field(False, description="bias of the output projection")
    qk_norm: Literal["head", "row"] | None = None
    """RMSNorm of queries and keys: per head (Qwen3), or whole rows (OLMoE)."""
    sinks: bool = Field(False, description="a learnt logit per head in the softmax (GPT-OSS)")

    @model_validator(mode="after")
    def _check(self) -> Self:
        if self.num_heads % self.num_kv_heads:
            raise ValueError(
                f"num_kv_heads={self.num_kv_heads} does not divide num_heads={self.num_heads}; equally many heads "
                "of queries share one of keys, so choose a divisor"
            )
        return self

    @property
    def qk_head_dim(self) -> int:
        return self.head_dim

    @property
    def v_head_dim(self) -> int:
        return self.head_dim

    def products(self, hidden_size: int) -> dict[str, Product]:
        """Returns the projections by name, in the order in which they run."""
        query = self.num_heads * self.head_dim
        return {
            "qkv": Product(hidden_size, query + 2 * self.num_kv_heads * self.head_dim, self.qkv_bias),
            "output": Product(query, hidden_size, self.output_bias),
        }

    @property
    def norm_widths(self) -> tuple[int, ...]:
        """The weights of the norms of queries and of keys; () without norms."""
        match self.qk_norm:
            case "head":
                return self.head_dim, self.head_dim
            case "row":
                return self.num_heads * self.head_dim, self.num_kv_heads * self.head_dim
            case None:
                return ()


class Mla(Declaration):
    """Multi-head latent attention (DeepSeek-V2, arXiv 2405.04434, section 2.1), as it trains: keys and values of each
    head are made from the latent, and nothing is absorbed.
    """

    kind: Literal["mla"] = "mla"
    num_heads: int = Field(ge=1, description="heads")
    q_lora_rank: int | None = Field(None, ge=1, description="width of the queries' latent; None: no latent")
    kv_lora_rank: int = Field(ge=1, description="width of the latent of keys and values")
    qk_nope_head_dim: int = Field(ge=1, description="width of queries and keys without position")
    qk_rope_head_dim: int = Field(ge=1, description="width with rotary position; heads share the key's")
    v_head_dim: int = Field(ge=1, description="width of a head's values")
    bias: bool = Field(False, description="biases of the projections to latents and to the output")
    # A query sees every key before it, and no logit takes a share of the softmax.
    window: ClassVar[None] = None
    sinks: ClassVar[bool] = False

    @property
    def num_kv_heads(self) -> int:
        """The number of heads of keys and values: each head has its own."""
        return self.num_heads

    @property
    def qk_head_dim(self) -> int:
        return self.qk_nope_head_dim + self.qk_rope_head_dim

    def products(self, hidden_size: int) -> dict[str, Product]:
        """Returns the projections by name, in the order in which they run."""
        query = self.num_heads * self.qk_head_dim
        if self.q_lora_rank is None:
            queries = {"query": Product(hidden_size, query)}
        else:
            queries = {
                "query_down": Product(hidden_size, self.q_lora_rank, self.bias),
                "query_up": Product(self.q_lora_rank, query),
            }
        return {
            **queries,
            "kv_down": Product(hidden_size, self.kv_lora_rank + self.qk_rope_head_dim, self.bias),
            "kv_up": Product(self.kv_lora_rank, self.num_heads * (self.qk_nope_head_dim + self.v_head_dim)),
            "output": Product(self.num_heads * self.v_head_dim, hidden_size, self.bias),
        }

    @property
    def norm_widths(self) -> tuple[int, ...]:
        """The weights of the norms of latents."""
        return (self.kv_lora_rank,) if self.q_lora_rank is None else (self.q_lora_rank, self.kv_lora_rank)


Attention = Annotated[Gqa | Mla, KindUnion()]


class DenseMlp(Declaration):
    """An MLP that all tokens take: up, activation, down; gated (SwiGLU) or not. It has no bias."""

    kind: Literal["dense"] = "dense"
    intermediate_size: int = Field(ge=1, description="width of the MLP")
    gated: bool = Field(True, description="the up projection has a gate")

    def products(self, hidden_size: int) -> dict[str, Product]:
        """Returns the two products by name. Gate and up are one."""
        return {
            "up": Product(hidden_size, self.intermediate_size * (2 if self.gated else 1)),
            "down": Product(self.intermediate_size, hidden_size),
        }


class MoeMlp(Declaration):
    """Experts behind a router, and the shared expert beside them.

    Its width is ``shared_intermediate_size``, or without it n_shared_experts times the intermediate_size of ``shape``.
    """

    kind: Literal["moe"] = "moe"
    shape: ModelShape = Field(description="shape of experts and router")
    shared_intermediate_size: int | None = Field(None, ge=1, description="width of the shared expert (Qwen2-MoE)")
    shared_gate: bool = Field(False, description="a sigmoid per token scales the shared expert (Qwen2-MoE)")
    expert_bias: bool = Field(False, description="biases of an expert's products (GPT-OSS)")
    router_bias: bool = Field(False, description="a learnt bias of the router (GPT-OSS)")

    @model_validator(mode="after")
    def _check(self) -> Self:
        if self.shared_intermediate_size is not None and self.shape.n_shared_experts:
            raise ValueError(
                f"shared_intermediate_size={self.shared_intermediate_size} and n_shared_experts="
                f"{self.shape.n_shared_experts} of shape both say how wide the shared expert is; leave one out"
            )
        if self.shared_gate and self.shared is None:
            raise ValueError(
                "shared_gate=True has no shared expert to scale; give shared_intermediate_size, or drop the gate"
            )
        return self

    @property
    def shared(self) -> DenseMlp | None:
        """The shared expert: all of them as one."""
        width = self.shared_intermediate_size or self.shape.n_shared_experts * self.shape.intermediate_size
        return DenseMlp(intermediate_size=width) if width else None

    @property
    def router(self) -> Product:
        return Product(self.shape.hidden_size, self.shape.num_experts, self.router_bias)

    @property
    def expert_products(self) -> dict[str, Product]:
        """The two products of one expert by name. Gate and up are one."""
        H, I = self.shape.hidden_size, self.shape.intermediate_size
        return {"up": Product(H, 2 * I, self.expert_bias), "down": Product(I, H, self.expert_bias)}

    @property
    def expert_parameters(self) -> int:
        """The number of parameters of one expert, with its biases."""
        return sum(product.parameters for product in self.expert_products.values())


Mlp = Annotated[DenseMlp | MoeMlp, KindUnion()]


class LayerSpec(Declaration):
    """One layer: attention and an MLP, each behind an RMSNorm, each added to the row that it read."""

    attention: Attention = Field(description="`Gqa` or `Mla`")
    mlp: Mlp = Field(description="`DenseMlp` or `MoeMlp`")

    @property
    def has_experts(self) -> bool:
        return isinstance(self.mlp, MoeMlp)

    def num_parameters(self, hidden_size: int) -> int:
        """Returns the parameters of the layer, those of all experts among them."""
        experts = self.mlp.shape.num_experts * self.mlp.expert_parameters if isinstance(self.mlp, MoeMlp) else 0
        return self._beside_experts(hidden_size) + experts

    def active_parameters(self, hidden_size: int) -> int:
        """Returns the parameters that one token meets: those of its K experts, and all others."""
        experts = self.mlp.shape.top_k * self.mlp.expert_parameters if isinstance(self.mlp, MoeMlp) else 0
        return self._beside_experts(hidden_size) + experts

    def _beside_experts(self, hidden_size: int) -> int:
        attention, mlp = self.attention, self.mlp
        products = list(attention.products(hidden_size).values())
        vectors = 2 * hidden_size + sum(attention.norm_widths) + attention.sinks * attention.num_heads
        dense = mlp.shared if isinstance(mlp, MoeMlp) else mlp
        if dense is not None:
            products += dense.products(hidden_size).values()
        if isinstance(mlp, MoeMlp):
            products.append(mlp.router)
            vectors += mlp.shared_gate * hidden_size
        return vectors + sum(product.parameters for product in products)
