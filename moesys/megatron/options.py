"""Options of Megatron-Core's MoE layers: which are used under a strategy, which have no effect, and which are refused.

The three tables have every option of ``TransformerConfig`` whose name says that it is of MoE, and every other one that
Megatron's own layer reads.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

from megatron.core.transformer.moe.experts import TEGroupedMLP
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor, nn
from torch.nn.functional import silu

from moesys.config import Fsep, Strategy


class Refusal(NamedTuple):
    """Why an option is refused where it is none of the ``allowed`` values, of which errors advise the first."""

    why: str
    allowed: tuple[Any, ...] = (False,)


def _names(text: str) -> frozenset[str]:
    return frozenset(text.split())


_DROPS = "tokens beyond a capacity would be dropped, and moesys computes all of them; balance experts by the strategy"
_DISPATCHES = (
    "the layer would be taken apart at Megatron's dispatch, which moesys replaces; choose the strategy's overlap"
)
_QUANTIZED = "experts would be quantized, and moesys computes them in the dtype of their parameters"
_OFFLOADED = "activations inside of the experts would be offloaded, and moesys keeps its own"

REFUSED = {
    "activation_func_fp8_input_store": Refusal(_QUANTIZED),
    "cpu_offloading": Refusal(_OFFLOADED),
    "delay_wgrad_compute": Refusal("gradients would be computed after backward, and moesys computes them in it"),
    "expert_gtp_weight_remat_size": Refusal("experts would be sharded a second time; choose Fsep", (1,)),
    "expert_tensor_parallel_size": Refusal("experts would be cut over tensor-parallel ranks; choose Fsep", (1,)),
    "fp4": Refusal(_QUANTIZED, (None,)),
    "fp8": Refusal(_QUANTIZED, (None,)),
    "moe_expert_capacity_factor": Refusal(_DROPS, (None,)),
    "moe_expert_rank_capacity_factor": Refusal(_DROPS, (None,)),
    "moe_pad_expert_input_to_capacity": Refusal(_DROPS),
    "moe_pad_experts_for_cuda_graph_inference": Refusal(_DROPS),
    "moe_paged_stash": Refusal("activations would be kept in pages of Megatron's, and moesys keeps its own"),
    "moe_router_padding_for_fp8": Refusal(_QUANTIZED),
    "moe_router_padding_for_quantization": Refusal(_QUANTIZED),
    "moe_shared_expert_overlap": Refusal("shared experts would run inside of Megatron's dispatch, which is not used"),
    "moe_single_grouped_bias": Refusal("all biases would be in one tensor, of which moesys does not know the layout"),
    "moe_single_grouped_weight": Refusal(
        "all experts would be in one tensor, of which moesys does not know the layout"
    ),
    "moe_token_dispatcher_type": Refusal("its buffers would never be used", ("alltoall", "allgather")),
    "moe_token_dropping": Refusal(_DROPS),
    "overlap_dispatch_backward_with_experts_wgrad": Refusal(_DISPATCHES),
    "overlap_moe_expert_parallel_comm": Refusal(_DISPATCHES),
    "transformer_impl": Refusal("generation has a dispatch of its own", ("transformer_engine", "local")),
    "use_kitchen": Refusal(_QUANTIZED),
    "use_te_activation_func": Refusal("the activation would be a module of Transformer Engine"),
}
USED = _names(
    """
    activation_func activation_func_clamp_value add_bias_linear calculate_per_token_loss cuda_graph_impl
    cuda_graph_modules expert_model_parallel_size ffn_hidden_size fine_grained_activation_offloading
    gated_linear_unit glu_linear_offset gradient_accumulation_fusion hidden_size init_method
    moe_apply_probs_on_input moe_aux_loss_coeff moe_enable_routing_replay moe_ffn_hidden_size
    moe_grad_scale_func moe_grouped_gemm moe_input_jitter_eps moe_latent_size moe_layer_freq moe_layer_recompute
    moe_mlp_glu_interleave_size moe_per_layer_logging moe_router_bias_update_rate moe_router_dtype
    moe_router_enable_expert_bias moe_router_force_biased moe_router_force_load_balancing moe_router_fusion
    moe_router_group_topk moe_router_load_balancing_type moe_router_num_groups moe_router_pre_softmax
    moe_router_quantile_balancing_ema moe_router_score_function moe_router_topk moe_router_topk_limited_devices
    moe_router_topk_scaling_factor moe_shared_expert_gate moe_shared_expert_glu_interleave_size
    moe_shared_expert_intermediate_size moe_z_loss_coeff mtp_num_layers mtp_use_repeated_layer num_layers
    num_moe_experts offload_modules output_layer_init_method params_dtype perform_initialization
    recompute_granularity recompute_modules sequence_parallel use_grouped_gemm_for_shared_expert
    """
)
# How Megatron's experts and dispatchers compute what moesys computes in its own way, and what only refused options use.
WITHOUT_EFFECT = _names(
    """
    bias_activation_fusion bias_dropout_fusion cpu_offloading_activations delay_offload_until_cuda_graph
    expert_tensor_parallel_num_weight_shards fp4_recipe fp8_recipe gtp_weight_remat_size
    inference_grouped_gemm_backend inference_moe_disable_fused_quant_kernels inference_moe_token_dispatcher_type
    moe_deepep_num_sms moe_enable_deepep moe_flex_dispatcher_backend moe_flex_dispatcher_num_sms
    moe_hybridep_num_blocks_permute moe_hybridep_num_blocks_unpermute moe_hybridep_num_sms
    moe_hybridep_num_sms_preprocessing moe_hybridep_pad_uneven_dispatch_inputs moe_ncclep_static_shape
    moe_ncclep_zero_copy moe_paged_stash_buffer_size_factor_cpu moe_paged_stash_buffer_size_factor_cuda
    moe_paged_stash_page_size moe_permute_fusion moe_permute_fusion_into_hybridep moe_token_drop_policy
    use_fused_weighted_squared_relu use_transformer_engine_op_fuser
    """
)


def check_options(config: TransformerConfig, strategy: Strategy) -> None:
    """Raises ValueError for an option under which moesys runs no experts, and for experts that ``Fsep`` cannot cut."""
    for name, refusal in REFUSED.items():
        # Megatron removes options now and then.
        if (value := getattr(config, name, refusal.allowed[0])) not in refusal.allowed:
            raise ValueError(f"{name}={value!r}: {refusal.why}; set {name}={refusal.allowed[0]!r}")
    graphs = [getattr(each, "name", each) for each in config.cuda_graph_modules or ()]
    if config.cuda_graph_impl != "none" and (not graphs or any(each.startswith("moe") for each in graphs)):
        raise ValueError(
            f"cuda_graph_impl={config.cuda_graph_impl!r} with cuda_graph_modules={graphs} would capture MoE layers, "
            'whose plans are made on the host; set cuda_graph_modules=["attn"], or cuda_graph_impl="none"'
        )
    inside = {"expert_fc1", "moe_act", "fused_group_mlp"} & set(config.offload_modules or ())
    if config.fine_grained_activation_offloading and inside:
        raise ValueError(
            f"offload_modules={config.offload_modules}: {_OFFLOADED}; leave out {', '.join(sorted(inside))}"
        )
    if isinstance(strategy.sharding, Fsep):
        if config.add_bias_linear:
            raise ValueError(
                f"add_bias_linear=True, and strategy {strategy.name!r} has sharding=Fsep, for which Megatron's biases "
                "are not cut; set add_bias_linear=False, or choose Ep"
            )
        width, num_ranks = config.moe_latent_size or config.hidden_size, config.expert_model_parallel_size
        if width % num_ranks:
            raise ValueError(
                f"expert_model_parallel_size={num_ranks} does not divide the width {width} of experts, which Fsep "
                "cuts; choose ranks that do, or Ep"
            )


def activation_of(config: TransformerConfig, experts: nn.Module) -> Callable[[Tensor], Tensor] | None:
    """Returns the activation of ``experts`` [N, 2I] to [N, I], or [N, I] without a gate; None for SwiGLU."""
    function, offset, most = config.activation_func, config.glu_linear_offset, config.activation_func_clamp_value
    if not config.gated_linear_unit:
        return function
    blocks = config.moe_mlp_glu_interleave_size if isinstance(experts, TEGroupedMLP) else None
    if function is silu and not offset and most is None and blocks is None:
        return None

    def gated(x_N2I: Tensor) -> Tensor:
        if blocks is not None:
            x_N2I = TEGroupedMLP._remove_glu_interleaving(x_N2I, blocks)
        gate_NI, up_NI = x_N2I.chunk(2, dim=-1)
        if most is not None:
            gate_NI, up_NI = gate_NI.clamp(max=most), up_NI.clamp(-most, most)
        return function(gate_NI) * (up_NI + offset)

    return gated
