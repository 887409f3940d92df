"""Training of small GPT models in a loop of Megatron's own parts on CPU ranks, which
``benchmarks.harness.cpu_megatron`` makes possible, and what else the tests ask of Megatron-Core.
"""

from __future__ import annotations

import ast
import contextlib
import functools
import inspect
import sys
from collections.abc import Callable, Iterator
from dataclasses import fields
from importlib.util import module_from_spec, spec_from_file_location
from itertools import groupby
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import benchmarks.harness.cpu_megatron as cpu  # isort: skip  # Patches Megatron, before anything else of it is imported.

import megatron.core.transformer.moe.token_dispatcher as token_dispatcher
import torch
import torch.distributed as dist
from megatron.core import dist_checkpointing, parallel_state
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig, finalize_model_grads
from megatron.core.models import backends
from megatron.core.models.gpt import GPTModel
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.models.hybrid.hybrid_layer_specs import hybrid_stack_spec
from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
from megatron.core.pipeline_parallel import get_forward_backward_func
from megatron.core.transformer.moe import moe_layer
from megatron.core.transformer.moe.experts import SequentialMLP
from megatron.core.transformer.moe.router import TopKRouter
from megatron.core.transformer.moe.router_replay import RouterReplay, RouterReplayAction
from megatron.core.transformer.moe.router_trace import RouterTracer
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron_runs import STRATEGIES, Run, Trained
from torch import Tensor, nn

from moesys.config import Strategy
from moesys.megatron import experts
from moesys.megatron.moe_layer import REFUSED
from moesys.moe.experts import experts_of
from moesys.overlap.experts_triton import TritonExperts

VOCABULARY, LENGTH, SEQUENCES = 64, 8, 2
# Megatron's activations would be compiled for half a minute, in each process.
torch.compiler.set_stance("force_eager")


def config_of(run: Run) -> TransformerConfig:
    """Returns the options of a small model, as far as ``run`` has no others."""
    options: dict[str, Any] = {
        "sequence_parallel": run.parallel.get("tensor_model_parallel_size", 1) > 1,
        "expert_model_parallel_size": min(dist.get_world_size(), 2),
    }
    if run.half:
        options |= {"bf16": True, "params_dtype": torch.bfloat16, "pipeline_dtype": torch.bfloat16}
    return cpu.config_of(**options | dict(run.parallel) | dict(run.config))


def parallel(run: Run) -> contextlib.AbstractContextManager[None]:
    return cpu.parallel(**{"expert_model_parallel_size": min(dist.get_world_size(), 2)} | dict(run.parallel))


def models_of(run: Run, config: TransformerConfig) -> list[GPTModel]:
    """Returns the parts of the model that this rank has."""
    chunks = run.parallel.get("virtual_pipeline_model_parallel_size")
    stages = [{"vp_stage": chunk} for chunk in range(chunks)] if chunks else [{}]
    models = [cpu.model_of(config, run.strategy, VOCABULARY, 64, **stage) for stage in stages]
    for each in (each for model in models for each in experts_of(model) if run.by_triton):
        each.expert_compute = TritonExperts()
    return models


def train(*runs: Run) -> list[Trained]:
    """Trains on all ranks by Megatron's schedule, reduction of gradients, and optimizer, one run after the other. Those
    that follow one another in equal groups share them, as gloo takes a second to make them.
    """
    trained = []
    for _, alike in groupby(runs, lambda run: dict(run.parallel)):
        alike = list(alike)
        with parallel(alike[0]):
            trained += map(_trained, alike)
    return trained


def _trained(run: Run) -> Trained:
    cpu.random.model_parallel_cuda_manual_seed(1)
    config = config_of(run)
    models = models_of(run, config)
    if run.half:
        models = [model.bfloat16() for model in models]
    ddp = DistributedDataParallelConfig(**{"grad_reduce_in_fp32": True, **run.ddp})
    wrapped = [DistributedDataParallel(config, ddp, model) for model in models]
    distributed = ddp.use_distributed_optimizer
    options = OptimizerConfig(
        bf16=run.half, optimizer="adam", lr=3e-3, clip_grad=1.0, use_distributed_optimizer=distributed
    )
    options.overlap_param_gather = ddp.overlap_param_gather
    optimizer = get_megatron_optimizer(options, wrapped)
    config.finalize_model_grads_func, config.grad_scale_func = finalize_model_grads, optimizer.scale_loss
    if ddp.overlap_grad_reduce:
        syncs = [each.no_sync for each in wrapped]
        config.no_sync_func = syncs if len(syncs) > 1 else syncs[0]
    if run.load is not None:
        load(run.load, wrapped, optimizer)
    trained = Trained()
    for index in range(run.first, run.first + run.steps):
        for each in wrapped:
            each.zero_grad_buffer()
        optimizer.zero_grad()
        batches = [batch(run, index * run.accumulate + each) for each in range(run.accumulate)]
        data = [iter(batches) for _ in wrapped]
        losses = get_forward_backward_func()(
            forward_step_func=functools.partial(forward_step, run),
            data_iterator=data if len(data) > 1 else data[0],
            model=wrapped,
            num_microbatches=run.accumulate,
            seq_length=LENGTH,
            micro_batch_size=SEQUENCES,
            forward_only=False,
        )
        if index == run.first:
            trained.gradients = cpu.whole(models, lambda parameter: parameter.main_grad)
        _, norm, _ = optimizer.step()
        trained.norms.append(norm)
        trained.losses.append(sum(float(each["loss"]) for each in losses))
        plans = [each.last_plan for model in models for each in experts_of(model)]
        trained.held.append([plan.layout.expert_RS.copy() for plan in plans if plan is not None])
    trained.parameters = cpu.whole(models, lambda parameter: parameter.detach())
    buffers = [each for model in models for name, each in model.named_buffers() if name.endswith("expert_bias")]
    trained.biases = [each.clone() for each in buffers]
    trained.linked = [each.link.linked for model in models for each in experts_of(model)]
    trained.restored = [each.meter.bytes_of("restore") for model in models for each in experts_of(model)]
    if run.save is not None:
        save(run.save, wrapped, optimizer)
    return trained


def batch(run: Run, index: int) -> tuple[Tensor, Tensor, Tensor]:
    """Returns ids and labels [B, S], and True for real tokens."""
    rank = parallel_state.get_data_parallel_rank()
    length = LENGTH + 3 * rank * run.uneven
    rows = torch.arange(SEQUENCES)[:, None] + SEQUENCES * (rank + 8 * index)
    ids = (7 * rows + (1 + rows % 5) * torch.arange(length + 1)) % VOCABULARY
    real = torch.arange(length) < length - (1 + rows % 3) * run.padding
    return ids[:, :-1].contiguous(), ids[:, 1:].contiguous(), real


def forward_step(run: Run, data: Any, model: nn.Module) -> Any:
    ids, labels, real = next(data)
    length = ids.shape[1]
    positions = torch.arange(length).expand(SEQUENCES, -1)
    mask = torch.ones(1, 1, length, length, dtype=torch.bool).triu(1)

    def loss_of(output: Tensor) -> Any:
        total, count = (output * real).sum(), real.sum()
        if run.config.get("calculate_per_token_loss"):
            return total, count.int(), {"loss": total.detach() / count}
        return total / count, {"loss": (total / count).detach()}

    options = {"padding_mask": ~real} if run.padding else {}
    return model(ids, positions, mask, labels=labels, **options), loss_of


def save(folder: str, wrapped: list[Any], optimizer: Any) -> None:
    dist_checkpointing.save(_sharded(wrapped, optimizer, loading=False), folder)


def load(folder: str, wrapped: list[Any], optimizer: Any) -> None:
    state = dist_checkpointing.load(_sharded(wrapped, optimizer, loading=True), folder)
    for index, model in enumerate(wrapped):
        model.module.load_state_dict(state[f"model{index}"])
    optimizer.load_state_dict(state["optimizer"])


def _sharded(wrapped: list[Any], optimizer: Any, *, loading: bool) -> dict[str, Any]:
    state: dict[str, Any] = {f"model{index}": model.module.sharded_state_dict() for index, model in enumerate(wrapped)}
    every = {name: each for model in state.values() for name, each in model.items()}
    return state | {"optimizer": optimizer.sharded_state_dict(every, is_loading=loading)}


def messages(cases: list[tuple[Strategy, dict[str, Any], dict[str, Any]]]) -> list[str]:
    """Returns the errors of models under these strategies, with these options, and other changes of a run."""
    found = []
    for changes, alike in groupby(cases, lambda case: case[2]):
        run = Run(**changes)
        with parallel(run):
            for strategy, options, _ in alike:
                try:
                    config = config_of(run)
                    # As Megatron would have it where what the option needs is installed.
                    vars(config).update(options)
                    models_of(Run(strategy, config=options, **changes), config)
                    found.append("no error")
                except (TypeError, ValueError) as error:
                    found.append(f"{type(error).__name__}: {error}")
    return found


def replayed(by_verl: bool) -> tuple[list[Tensor], list[Tensor], list[Tensor]]:
    """Returns the experts [T, K] that Megatron's replay or that of verl gives the routers of a model, those of the
    plans under a strategy, and by layer the tokens of each expert by the map of ``route``, which somebody has replaced.
    """
    run = Run(STRATEGIES["ep"], config={"moe_enable_routing_replay": True})
    RouterReplay.clear_global_router_replay_instances()
    with parallel(run), verl_patch() if by_verl else contextlib.nullcontext() as verl:
        (model,) = models_of(run, config_of(run))
        given = [torch.rand(SEQUENCES * LENGTH, 8).topk(2).indices for _ in model.decoder.layers]
        if verl is None:
            RouterReplay.set_replay_data(given)
            RouterReplay.set_global_router_replay_action(RouterReplayAction.REPLAY_FORWARD)
        else:
            verl.RouterReplay.set_replay_data(given)
            verl.RouterReplay.set_global_router_replay_action(verl.RouterReplayAction.REPLAY_FORWARD)
        seen = []
        for layer in model.decoder.layers:
            route = layer.mlp.route
            layer.mlp.route = lambda *args, of=route: seen.append(of(*args)[1]) or of(*args)
        ids, *_ = batch(run, 0)
        mask = torch.ones(1, 1, LENGTH, LENGTH, dtype=torch.bool).triu(1)
        model(ids, torch.arange(LENGTH).expand(SEQUENCES, -1), mask)
        planned = [torch.from_numpy(each.last_plan.load.tokens_RE.copy()).sum(0) for each in experts_of(model)]
    return given, planned, [map_TE.sum(0) for map_TE in seen]


def traced(folder: str, strategy: Strategy | None) -> list[Any]:
    """Writes what Megatron's ``--moe-routing-trace-path`` does for two steps; returns the loads of this rank's plans by
    step and layer, [R, E].
    """
    run, loads = Run(strategy), []
    with parallel(run):
        (model,) = models_of(run, config_of(run))
        tracer = RouterTracer(folder, 2, dist.get_rank(), training_mode=True)
        tracer.register_hooks(model)
        for step in range(2):
            output, loss_of = forward_step(run, iter([batch(run, step)]), model)
            loss_of(output)[0].backward()
            tracer.advance_step(step)
            loads.append([each.last_plan.load.tokens_RE.copy() for each in experts_of(model)])
    return loads


@contextlib.contextmanager
def verl_patch() -> Iterator[Any]:
    """Gives verl's module for the replay of routes, whose patch of Megatron is applied."""
    path = Path(sys.prefix, "hosts", "verl", "utils", "megatron", "router_replay_patch.py")
    found = spec_from_file_location("verl_router_replay", path)
    verl = module_from_spec(found)
    found.loader.exec_module(verl)
    dispatcher = token_dispatcher.MoEAlltoAllTokenDispatcher
    with (
        patch.object(TopKRouter, "__init__", TopKRouter.__init__),
        patch.object(TopKRouter, "routing", TopKRouter.routing),
        patch.object(TransformerConfig, "__init__", TransformerConfig.__init__),
        patch.object(dispatcher, "preprocess", dispatcher.preprocess),
    ):
        verl.apply_router_replay_patch()
        try:
            yield verl
        finally:
            for changed, mark in ((TopKRouter, "_router_replay_patched"), (TransformerConfig, "_verl_router_patched")):
                delattr(changed, mark)
            del dispatcher._preprocess_patched


class MegatronEngine:
    """verl's engine, as far as the page on reinforcement learning uses it, with a provider of Megatron-Bridge."""

    def _build_tf_config(self) -> None:
        def spec(config: Any, vp_stage: int | None = None) -> Any:
            return get_gpt_layer_local_spec(num_experts=8, normalization="RMSNorm")

        self.provider = SimpleNamespace(transformer_layer_spec=spec)


def with_verl(page: str) -> tuple[Trained, Trained, list[str]]:
    """Returns a step with the specification of the engine that the page changes, and with Megatron's own experts; and
    the parameters of the function that makes it.
    """
    names: dict[str, Any] = {}
    module = SimpleNamespace(MegatronEngine=type("MegatronEngine", (MegatronEngine,), {}))
    with patch.dict(sys.modules, {"verl.workers.engine.megatron.transformer_impl": module}):
        exec(page, names)
    engine = module.MegatronEngine()
    engine._build_tf_config()
    spec = engine.provider.transformer_layer_spec
    with patch.object(cpu, "experts", lambda *_: spec(None)):
        (trained,) = train(Run(names["strategy"], 1))
    return trained, *train(Run(steps=1)), list(inspect.signature(spec).parameters)


def followed(page: str) -> tuple[Trained, Trained]:
    """Returns a step with the specification that a program makes, and with Megatron's own experts."""
    names: dict[str, Any] = {}
    exec(page, names)
    with patch.object(cpu, "experts", lambda spec, strategy: names["spec"]):
        return train(Run(names["strategy"], 1), Run(steps=1))


def rounded() -> list[bool]:
    """Returns whether gradients of bfloat16 experts, which two ranks compute, are bfloat16 numbers, without and with
    fusion.
    """
    found = []
    for trained in train(
        *(Run(STRATEGIES["lent"], 1, half=True, config={"gradient_accumulation_fusion": on}) for on in (False, True))
    ):
        gradients = [each for name, each in trained.gradients.items() if ".experts." in name]
        found.append(all(torch.equal(each, each.bfloat16().float()) for each in gradients))
    return found


class PackedExperts(SequentialMLP):
    """Experts as somebody else keeps them."""


def messages_of_layers() -> list[str]:
    """Returns the errors of a layer: of a part of it that is called alone, of tokens that two ranks have, with
    parameters of Megatron-FSDP, for a token whose map has one expert more than K, and with experts of another class.
    """

    def fails(change: Callable[[Any], object], keeper: Any = SequentialMLP, **inputs: Any) -> str:
        with patch(f"{backends.__name__}.SequentialMLP", keeper):
            try:
                (model,) = models_of(run, config_of(run))
                layer = model.decoder.layers[0].mlp
                change(layer)
                layer(torch.zeros(4, 1, 16), **inputs)
            except ValueError as error:
                return str(error)
        return "no error"

    of_three = torch.ones(4, 8), torch.arange(8).expand(4, 8) < 3
    with parallel(run := Run(STRATEGIES["ep"])):
        return [
            fails(lambda layer: None, intermediate_tensors=()),
            fails(lambda layer: vars(layer).update(attn_tp_group=SimpleNamespace(size=lambda: 2))),
            fails(lambda layer: setattr(next(layer.experts.parameters()), "get_main_grad", None)),
            fails(lambda layer: setattr(layer, "route", lambda x, mask: of_three)),
            fails(lambda layer: None, PackedExperts),
        ]


def messages_for_specs() -> list[str]:
    """Returns the classes of a layer in a changed specification of a hybrid model and in the original, and messages."""
    changed = experts(hybrid_stack_spec, STRATEGIES["ep"])
    layers = [each.submodules.moe_layer.submodules.mlp.func for each in (changed, hybrid_stack_spec)]
    found = [each.__name__ for each in layers]
    for spec, strategy in (
        (get_gpt_layer_local_spec(), STRATEGIES["ep"]),
        (get_gpt_layer_local_spec(num_experts=8), "ep.toml"),
    ):
        try:
            experts(spec, strategy)
        except (TypeError, ValueError) as error:
            found.append(str(error))
    return found


def options_of_moe() -> tuple[set[str], set[str]]:
    """Returns the options of Megatron that are of MoE by their names, and those that its own MoE layer reads."""
    options = {field.name for field in fields(TransformerConfig)}
    folder = Path(moe_layer.__file__).parent
    files = [*(folder / f"{name}.py" for name in READ), folder.parent / "mlp.py"]
    nodes = [node for file in files for node in ast.walk(ast.parse(file.read_text()))]
    read = {
        node.attr
        for node in nodes
        if isinstance(node, ast.Attribute) and ast.unparse(node.value).rpartition(".")[2] == "config"
    }
    return {name for name in options if "moe" in name or "expert" in name}, read & options


READ = ("moe_layer", "experts", "router", "shared_experts", "token_dispatcher")


def _names(text: str) -> set[str]:
    return set(text.split())


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


def tables() -> list[set[str]]:
    return [set(REFUSED), USED, WITHOUT_EFFECT]
