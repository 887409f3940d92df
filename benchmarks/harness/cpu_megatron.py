"""Megatron-Core on CPU ranks over gloo: what of it is patched for that, and a small GPT model.

The patches touch what a CPU lacks, and nothing that computes. Importing this file patches torch and Megatron, for the
rest of the process.
"""

from __future__ import annotations

import functools
import gc
import queue
import re
import warnings
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional
from torch.overrides import TorchFunctionMode

warnings.filterwarnings("ignore")


class _Nothing:
    """A stream or an event, of which a CPU has none."""

    def __init__(self, *args: Any, **options: Any) -> None:
        pass

    def __getattr__(self, name: str) -> Any:
        return lambda *args, **options: _Nothing()

    def __enter__(self) -> _Nothing:
        return self

    def __exit__(self, *args: object) -> None:
        pass


_ONE = _Nothing()
cuda: Any = torch.cuda
cuda.current_device = lambda: "cpu"
cuda.Stream = cuda.Event = _Nothing
cuda.current_stream = cuda.default_stream = lambda *args, **options: _ONE
cuda.is_current_stream_capturing = lambda: False
cuda.stream = lambda stream: _Nothing()
cuda.synchronize = cuda.empty_cache = lambda *args: None
cuda.random.get_rng_state = cuda.get_rng_state = lambda *args, **options: torch.get_rng_state()
cuda.set_rng_state = lambda state, *args, **options: torch.set_rng_state(state)

import megatron.core.tensor_parallel.layers as layers  # noqa: E402
import megatron.core.tensor_parallel.random as random  # noqa: E402
import megatron.core.transformer.moe.token_dispatcher as token_dispatcher  # noqa: E402
from megatron.core import parallel_state  # noqa: E402
from megatron.core.dist_checkpointing.strategies import filesystem_async  # noqa: E402
from megatron.core.models.backends import LocalSpecProvider  # noqa: E402
from megatron.core.models.gpt import GPTModel  # noqa: E402
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec  # noqa: E402
from megatron.core.transformer import torch_norm  # noqa: E402
from megatron.core.transformer.moe import moe_layer  # noqa: E402
from megatron.core.transformer.moe.experts import GroupedMLPSubmodules, SequentialMLP, TEGroupedMLP  # noqa: E402
from megatron.core.transformer.transformer_config import TransformerConfig  # noqa: E402

from moesys.config import Strategy  # noqa: E402
from moesys.megatron import experts  # noqa: E402

# gloo takes sizes of messages as numbers, as they are once they have left a GPU.
token_dispatcher.maybe_move_tensor_to_cpu = lambda tensor, as_numpy=False, record_stream=False: (
    tensor.numpy() if as_numpy and isinstance(tensor, Tensor) else tensor
)

# Apex's products, which add the gradients of weights to those of other micro-batches.
layers._grad_accum_fusion_available = True
layers.fused_weight_gradient_mlp_cuda = SimpleNamespace(
    wgrad_gemm_accum_fp32=lambda x, grad, main_grad: main_grad.add_(grad.float().mT @ x.float())
)
# Ranks have no processes of their own, which Megatron would start for results of writing.
filesystem_async._results_queue = queue.Queue()

VOCABULARY, LENGTH, SEQUENCES = 64, 8, 2


class Norm(nn.RMSNorm):
    """The norm that Megatron has without Apex, which with sequence parallelism it has only with it."""

    def __init__(self, config: TransformerConfig, hidden_size: int, eps: float = 1e-5, **_: Any) -> None:
        super().__init__(hidden_size, eps)
        weight: Any = self.weight
        weight.sequence_parallel = config.sequence_parallel


torch_norm.WrappedTorchNorm.__new__ = lambda cls, **options: Norm(**options)


class GroupedLinear(nn.Module):
    """The linear layers of all experts by the names of Transformer Engine's parameters, which needs a GPU."""

    def __init__(
        self, num: int, wide: int, out: int, *, config: Any, bias: bool, skip_bias_add: bool, **_: Any
    ) -> None:
        super().__init__()
        self._num, self._bias, self._later = num, bias, skip_bias_add
        for index in range(num):
            sizes = {f"weight{index}": (out, wide)} | ({f"bias{index}": (out,)} if bias else {})
            for name, size in sizes.items():
                parameter: Any = nn.Parameter(torch.zeros(size))
                parameter.allreduce = config.expert_model_parallel_size == 1
                self.register_parameter(name, parameter)

    def forward(self, rows: Tensor, counts: list[int]) -> tuple[Tensor, list[Tensor] | None]:
        biases = [getattr(self, f"bias{index}") for index in range(self._num)] if self._bias else None
        now = [None] * self._num if biases is None or self._later else biases
        weights = [getattr(self, f"weight{index}") for index in range(self._num)]
        done = torch.cat([functional.linear(*each) for each in zip(rows.split(counts), weights, now, strict=True)])
        return done, biases if self._later else None


class LatentLinear(nn.Linear):
    """A projection to or from latent tokens, as Transformer Engine has it."""

    def __init__(self, wide: int, out: int, *, bias: bool, **_: Any) -> None:
        super().__init__(wide, out, bias)

    def forward(self, x: Tensor) -> Any:
        return super().forward(x), None


moe_layer.HAVE_TE, moe_layer.TELinear = True, LatentLinear
_one_by_one = LocalSpecProvider.grouped_mlp_modules
_GROUPED = functools.partial(TEGroupedMLP, submodules=GroupedMLPSubmodules(GroupedLinear, GroupedLinear))
LocalSpecProvider.grouped_mlp_modules = lambda self, grouped: _GROUPED if grouped else _one_by_one(self, grouped)


class OnCpu(TorchFunctionMode):
    """Makes tensors on the CPU that Megatron asks for on a GPU, whose names it also looks for."""

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if function is Tensor.cuda:
            return args[0]
        if str(kwargs.get("device", "")).startswith("cuda"):
            kwargs["device"] = "cpu"
        result = function(*args, **kwargs)
        if function is Tensor.type and len(args) == 1:
            return result.replace("torch.", "torch.cuda.")
        return result


def config_of(**options: Any) -> TransformerConfig:
    """Returns the configuration of a small model of the local implementation, as far as ``options`` has no others."""
    defaults: dict[str, Any] = {
        **{"num_layers": 2, "hidden_size": 16, "num_attention_heads": 4, "num_moe_experts": 8, "moe_router_topk": 2},
        **{"ffn_hidden_size": 32, "moe_ffn_hidden_size": 24, "gated_linear_unit": True, "add_bias_linear": False},
        **{"activation_func": functional.silu, "bias_activation_fusion": False, "normalization": "RMSNorm"},
        **{"moe_token_dispatcher_type": "alltoall", "moe_router_load_balancing_type": "none"},
        **{"moe_router_dtype": "fp32", "hidden_dropout": 0.0, "attention_dropout": 0.0, "transformer_impl": "local"},
        **{"bias_dropout_fusion": False, "masked_softmax_fusion": False, "use_cpu_initialization": True},
        **{"pipeline_dtype": torch.float32, "expert_tensor_parallel_size": 1},
    }
    return TransformerConfig(**defaults | options)


@contextmanager
def parallel(**sizes: int) -> Iterator[None]:
    """Makes Megatron's process groups, for as long as the context lasts."""
    with OnCpu():
        parallel_state.initialize_model_parallel(**{"expert_tensor_parallel_size": 1} | sizes)
        random.model_parallel_cuda_manual_seed(1)
        try:
            yield
        finally:
            # Megatron destroys some of its groups. Each of the others has threads of gloo, which wake a hundred times
            # a second.
            groups = parallel_state._global_process_group_list[1:]
            parallel_state.destroy_model_parallel()
            for group in groups:
                with suppress(ValueError):
                    dist.destroy_process_group(group)
            # Models keep groups too, in circles.
            gc.collect()


def model_of(
    config: TransformerConfig, strategy: Strategy | None, vocabulary: int, length: int, **stage: int
) -> GPTModel:
    """Returns the part of a model that this rank has, drawn. ``strategy``: None for Megatron's own experts."""
    spec = get_gpt_layer_local_spec(config.num_moe_experts, config.moe_grouped_gemm, normalization="RMSNorm")
    model = GPTModel(
        config,
        spec if strategy is None else experts(spec, strategy),
        vocabulary,
        length,
        parallel_output=True,
        position_embedding_type="rope",
        share_embeddings_and_output_weights=False,
        pre_process=parallel_state.is_pipeline_first_stage(ignore_virtual=False, **stage),
        post_process=parallel_state.is_pipeline_last_stage(ignore_virtual=False, **stage),
        **stage,
    )
    draw(model)
    return model


def experts_in(model: nn.Module) -> Iterator[tuple[str, bool, dict[int, dict[str, nn.Parameter]]]]:
    """Returns, for each module with experts, its name, whether they are slices of all, and their parameters."""
    R, r = parallel_state.get_expert_model_parallel_world_size(), parallel_state.get_expert_model_parallel_rank()
    for name, module in model.named_modules():
        if isinstance(module, SequentialMLP):
            held = [dict(expert.named_parameters()) for expert in module.local_experts]
        elif isinstance(module, TEGroupedMLP):
            held = [{} for _ in range(module.num_local_experts)]
            for path, parameter in module.named_parameters():
                number = int(re.findall(r"\d+$", path)[0])
                held[number][path.removesuffix(str(number))] = parameter
        else:
            continue
        sliced = R > 1 and len(held) == module.config.num_moe_experts
        yield name, sliced, dict(enumerate(held, 0 if sliced else r * len(held)))


@torch.no_grad()
def draw(model: nn.Module) -> None:
    """Draws all parameters anew, alike for every sharding of experts."""
    R, r = parallel_state.get_expert_model_parallel_world_size(), parallel_state.get_expert_model_parallel_rank()
    tensor_rank = parallel_state.get_tensor_model_parallel_rank()
    for name, parameter in model.named_parameters():
        if ".mlp.experts." not in name and "norm" not in name:
            own = tensor_rank * getattr(parameter, "tensor_model_parallel", False)
            generator = torch.Generator().manual_seed(sum(map(ord, name)) + 100 * own)
            parameter.copy_(torch.randn(parameter.shape, generator=generator) * 0.1)
    for name, sliced, held in experts_in(model):
        for number, expert in held.items():
            for path, parameter in expert.items():
                dim = int("fc1" in path)
                sizes = [size * (R if sliced and axis == dim else 1) for axis, size in enumerate(parameter.shape)]
                generator = torch.Generator().manual_seed(sum(map(ord, name + path)) + 1000 * number)
                drawn = torch.randn(sizes, generator=generator) * 0.1
                parameter.copy_(drawn.chunk(R, dim)[r] if sliced else drawn)


def whole(models: list[GPTModel], tensor_of: Any) -> dict[str, Tensor]:
    """Returns a tensor of each parameter by its name, and those of all experts whole."""
    found = {}
    for model in models:
        first = model.decoder.layers[0].layer_number
        for name, parameter in model.named_parameters():
            if ".mlp.experts." not in name:
                found[f"{first} {name}"] = tensor_of(parameter).clone()
        R, group = (
            parallel_state.get_expert_model_parallel_world_size(),
            parallel_state.get_expert_model_parallel_group(),
        )
        for name, _, held in experts_in(model):
            own = {
                (number, path): tensor_of(parameter).clone()
                for number, expert in held.items()
                for path, parameter in expert.items()
            }
            of_ranks: list[Any] = [None] * R
            dist.all_gather_object(of_ranks, own, group=group)
            for number, path in sorted({key for each in of_ranks for key in each}):
                parts = [each[number, path] for each in of_ranks if (number, path) in each]
                dim = int("fc1" in path and parts[0].dim() > 1)
                found[f"{first} {name}.{number}.{path}"] = torch.cat(parts, dim)
    return found
