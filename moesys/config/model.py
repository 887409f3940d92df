"""The shape of one MoE layer."""

from __future__ import annotations

from typing import Literal, Self

from pydantic import Field, model_validator

from moesys.config.base import BYTES_PER_ELEMENT, Declaration, DType


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
