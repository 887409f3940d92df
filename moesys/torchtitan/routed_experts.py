"""torchtitan's ``RoutedExperts`` under a strategy: torchtitan keeps, shards, initialises, and saves the parameters, and
chooses experts; dispatch, computation and combination are those of ``Experts``.

R ranks of an expert group, E experts, D the width of a token and F that of an expert, as torchtitan has them.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import partial, wraps
from typing import Any

import spmd_types
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torchtitan.config.override import derive
from torchtitan.distributed.parallel_dims import MeshAxisName, ParallelDims, SpmdLayout
from torchtitan.models.common.moe import GroupedExperts, RoutedExperts
from torchtitan.models.common.token_dispatcher import AllToAllTokenDispatcher, LocalTokenDispatcher

from moesys.config import Fsep, ModelShape, Strategy
from moesys.kernels.cpu.page_pool import PagePool
from moesys.moe.experts import Experts, attach
from moesys.moe.outside import OutsideExperts
from moesys.moe.runtime import MoERuntime, link
from moesys.torch_private import unseen_by_selective_checkpoints

# These are torchtitan's parameters of experts and their parts, by the class that keeps them.
_PARTS = {
    "torchtitan.models.common.moe.GroupedExperts": {"w1_EFD": "gate", "w2_EDF": "down", "w3_EFD": "up"},
    "torchtitan.models.gpt_oss.moe.GptOssGroupedExperts": {
        "mlp1_weight_EGD": "gate_up",
        "mlp1_bias_EG": "gate_up_bias",
        "mlp2_weight_EDF": "down",
        "mlp2_bias_ED": "down_bias",
    },
}


def replaced(config: RoutedExperts.Config, strategy: Strategy, dtype: str) -> RoutedExperts.Config:
    """Returns the configuration of the same experts under ``strategy``. ``dtype``: that of their products.

    Raises ValueError for experts that moesys does not run.
    """
    if type(config) is not RoutedExperts.Config:
        raise ValueError(
            f"{type(config).__qualname__} is no RoutedExperts.Config of torchtitan, whose dispatch moesys replaces; "
            "leave out the override or converter that made it"
        )
    inner, dispatcher = config.inner_experts, config.token_dispatcher
    if _keeper(inner) not in _PARTS:
        raise ValueError(
            f"{_keeper(inner)} keeps experts in a layout that moesys does not know; it runs those of "
            f"{' and '.join(_PARTS)}, without quantization or other overrides"
        )
    if type(dispatcher) not in (LocalTokenDispatcher.Config, AllToAllTokenDispatcher.Config):
        raise ValueError(
            f"{type(dispatcher).__qualname__} would send tokens, which moesys does itself; choose the model's "
            'moe_comm_backend="standard"'
        )
    if isinstance(strategy.sharding, Fsep) and inner.sharding_config is not None:
        states = inner.sharding_config.state_shardings
        cut = {name: _cut(states[name], part) for name, part in _PARTS[_keeper(inner)].items()}
        inner = replace(inner, sharding_config=replace(inner.sharding_config, state_shardings=cut))
    return derive(config, StrategyRoutedExperts.Config, inner_experts=inner, strategy=strategy.to_json(), dtype=dtype)


def _keeper(config: GroupedExperts.Config) -> str:
    """Returns the name of the class that keeps the experts of ``config``."""
    return f"{type(config).__module__}.{type(config).__qualname__}".removesuffix(".Config")


def _cut(layout: SpmdLayout, part: str) -> SpmdLayout:
    """Returns a layout whose expert ranks have slices of all experts, cut where ``OutsideExperts`` has it."""
    return SpmdLayout({**layout.axis_types, MeshAxisName.EP: spmd_types.S(2 if part == "gate_up" else 1)})


def _outside(module: nn.Module, config: Any) -> OutsideExperts:
    """Returns the experts that ``module`` keeps."""
    parts, activation = _PARTS[_keeper(config)], None
    if "gate_up" in parts.values():
        from torchtitan.models.gpt_oss.moe import swiglu

        activation = partial(swiglu, limit=config.swiglu_limit)

    def read() -> dict[str, Tensor]:
        return {part: getattr(module, name) for name, part in parts.items()}

    return OutsideExperts(read, activation=activation)


class _Model:
    """State that the layers of one model share: their order, memory that they use in turn, and their runtime."""

    def __init__(self) -> None:
        self.modules: list[StrategyRoutedExperts] = []
        self.experts: list[Experts] = []
        self.memory = PagePool()
        self.runtime: MoERuntime | None = None

    @staticmethod
    def of(parallel_dims: ParallelDims) -> _Model:
        """Returns that of the model which is made for ``parallel_dims``."""
        found: _Model = vars(parallel_dims).setdefault("moesys_model", _Model())
        if found.experts and len(found.experts) == len(found.modules):
            # Another model of the same ranks.
            found = vars(parallel_dims)["moesys_model"] = _Model()
        return found


class StrategyRoutedExperts(RoutedExperts):
    """The routed experts of a layer under a strategy. Its parameters, their initialisation, FSDP and checkpoints are
    those of ``RoutedExperts``; ``token_dispatcher`` is not used.
    """

    @dataclass(kw_only=True, slots=True)
    class Config(RoutedExperts.Config):
        """``strategy``: in JSON, as torchtitan writes configurations down. ``dtype``: as in ``experts``."""

        strategy: str
        dtype: str

    def __init__(self, config: Config) -> None:
        super().__init__(config)
        self._config, self._strategy = config, Strategy.from_json(config.strategy)
        self._model: _Model | None = None
        self._mesh: DeviceMesh | None = None

    def parallelize(self, parallel_dims: ParallelDims) -> None:
        """Shards the parameters. Raises ValueError on all ranks for ranks that cannot share the experts."""
        self._mesh = _expert_mesh(parallel_dims, self._config.inner_experts, self._strategy)
        super().parallelize(parallel_dims)
        self._model = _Model.of(parallel_dims)
        self._model.modules.append(self)

    def init_states(self, *, buffer_device: torch.device | None = None) -> None:
        """Initialises the parameters, which torchtitan does layer by layer in their order when all are sharded. Makes
        the experts that use them, and links them when it comes to the last layer: a collective.
        """
        super().init_states(buffer_device=buffer_device)
        if "moesys_experts" in self.__dict__:
            return
        if self._model is None:
            if dist.is_initialized() and dist.get_world_size() > 1:
                raise ValueError(_NO_GROUP.format(1))
            self._model = _Model()
            self._model.modules.append(self)
        model = self._model
        inner = self._config.inner_experts
        shape = ModelShape(
            hidden_size=inner.dim,
            intermediate_size=inner.hidden_dim,
            num_experts=inner.num_experts,
            top_k=self._config.token_dispatcher.top_k,
            dtype=self._config.dtype,
        )
        outside, index = _outside(self.inner_experts, inner), len(model.experts)
        # Parameters may be offloaded to the CPU, but not where they are computed with.
        on = self._mesh.device_type if self._mesh is not None else next(self.inner_experts.parameters()).device
        experts = Experts(shape, self._strategy, self._mesh, layer_index=index, device=on, outside=outside)
        experts.use_memory(model.memory)
        attach(experts, self)
        model.experts.append(experts)
        if self._mesh is not None and len(model.experts) == len(model.modules):
            model.runtime = link(nn.ModuleList(model.experts))

    # torchtitan finds shardings of inputs by the names that its own method has for them.
    @wraps(RoutedExperts.forward, assigned=())
    @torch.compiler.disable(reason='moesys plans on the CPU; leave "model" out of compile.components')
    @unseen_by_selective_checkpoints
    def forward(self, x: Tensor, weights: Tensor, choices: Tensor, counts: Tensor) -> Tensor:
        """Returns y in the shape and dtype of x, [B, L, D] or [T, D]; ``weights`` and ``choices`` are [B, L, K] or
        [T, K]. The experts compute in the dtype of their parameters, which is that of mixed precision.
        """
        experts: Experts = self.__dict__["moesys_experts"]
        experts.training = self.training
        # FSDP has put parameters in its own dtype in place.
        dtype = next(self.inner_experts.parameters()).dtype
        flat = (tensor.reshape(-1, tensor.shape[-1]) for tensor in (x.to(dtype), choices, weights))
        # A copy, as the output lies in a page that later layers use again.
        return experts(*flat).to(x.dtype, copy=True).view(x.shape)


_NO_GROUP = (
    "parallelism.expert_parallel_degree={}, but experts are shared by the ranks of the mesh 'ep'; set it to the number "
    "of ranks that are to share them"
)


def _expert_mesh(parallel_dims: ParallelDims, config: GroupedExperts.Config, strategy: Strategy) -> DeviceMesh | None:
    """Returns the ranks that share the experts; None for one rank alone."""
    if parallel_dims.pp > 1:
        raise ValueError(
            f"parallelism.pipeline_parallel_degree={parallel_dims.pp}, and moesys runs no experts in pipelines yet; "
            "set it to 1"
        )
    mesh = parallel_dims.get_optional_mesh("ep")
    if mesh is None:
        if parallel_dims.world_size > 1:
            raise ValueError(_NO_GROUP.format(parallel_dims.ep))
        return None
    if not isinstance(strategy.sharding, Fsep) and config.num_experts % mesh.size():
        raise ValueError(
            f"parallelism.expert_parallel_degree={mesh.size()} does not divide the {config.num_experts} experts of a "
            "layer; choose a degree that does, or Fsep"
        )
    return mesh
