"""MoELayer: an ordinary module, ``y = layer(x)``: a router, experts under a declared strategy, and shared experts."""

from __future__ import annotations

import warnings

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.nn import functional

from moesys.balance.plan import LayerPlan
from moesys.collectives import meet
from moesys.config import ClusterSpec, LayoutInvariant, ModelShape, Strategy
from moesys.frames import Position
from moesys.moe.arguments import check_mask, check_x
from moesys.moe.call import current_tape
from moesys.moe.experts import Experts
from moesys.moe.masters import DTYPES, ExpertForm, OwnMasters, initial_generator
from moesys.moe.metrics import LayerMetrics
from moesys.moe.router import Router
from moesys.moe.token_blocks import TokenBlocks
from moesys.overlap.experts_cpu import CpuExperts

GATE_UP, DOWN = "experts.gate_up_proj", "experts.down_proj"


class SharedExperts(nn.Module):
    """``n_shared_experts`` fused into one SwiGLU of n·I, with DeepSeek-V3's names and shapes; replicated masters."""

    def __init__(self, shape: ModelShape, generator: torch.Generator) -> None:
        super().__init__()
        width = shape.n_shared_experts * shape.intermediate_size
        self.dtype = DTYPES[shape.dtype]
        self.gate_proj = nn.Linear(shape.hidden_size, width, bias=False, dtype=torch.float32)
        self.up_proj = nn.Linear(shape.hidden_size, width, bias=False, dtype=torch.float32)
        self.down_proj = nn.Linear(width, shape.hidden_size, bias=False, dtype=torch.float32)
        with torch.no_grad():
            for parameter in self.parameters():
                parameter.normal_(std=shape.initializer_range, generator=generator)

    def forward(self, x_TH: Tensor, blocks: TokenBlocks | None = None) -> Tensor:
        """Returns [T, H] in x's dtype, computed in the shape's dtype, under autocast too. ``blocks``: given if no
        bit may depend on the number of tokens.
        """
        x = x_TH.to(self.dtype)
        with torch.autocast(x_TH.device.type, enabled=False):
            if blocks is not None:
                hidden = blocks.elementwise(_swiglu, blocks.linear(x, self.gate_proj.weight, self.up_proj.weight))
                return blocks.linear(hidden, self.down_proj.weight).to(x_TH.dtype)
            gate, up, down = (layer.weight.to(self.dtype) for layer in (self.gate_proj, self.up_proj, self.down_proj))
            hidden = functional.silu(functional.linear(x, gate)) * functional.linear(x, up)
            return functional.linear(hidden, down).to(x_TH.dtype)


def _swiglu(h_TU: Tensor) -> Tensor:
    gate, up = h_TU.chunk(2, dim=1)
    return functional.silu(gate) * up


class MoELayer(nn.Module):
    """A Mixture-of-Experts layer of ``shape`` under ``strategy``, which turns x of [..., H] into y of its shape and
    dtype. Experts compute in ``shape.dtype``, and y is rounded to the dtype of x: a layer in float32 also takes x in
    bfloat16 or float16, as models with activations in 16 bits have it.

    It takes the arguments of ``Experts``; ``layer_index`` and ``seed`` determine the initial router and shared experts
    too.

    Gradients: expert gradients are summed over all ranks, as if every rank's loss were one term of a sum. The router
    and the shared experts are replicated, their gradients local: ``sync_gradients`` adds them up. With
    ``LayoutInvariant`` backward has added them up already, so leave ``summed_in_backward()`` out of DDP and FSDP.
    Divide a mean loss by the number of tokens of all ranks.

    Parameters, all float32: ``router.weight`` [E, H], ``experts.masters`` [E, P_e] (a ``DTensor``, sharded by the
    strategy), ``shared_experts.*``. Raises ValueError where strategy, shape and cluster do not fit.
    """

    def __init__(
        self,
        shape: ModelShape,
        strategy: Strategy,
        group: dist.ProcessGroup | DeviceMesh | None = None,
        *,
        cluster: ClusterSpec | None = None,
        layer_index: int = 0,
        seed: int = 0,
        device: torch.device | str | None = None,
    ) -> None:
        super().__init__()
        self.shape = shape
        self.experts = Experts(
            shape, strategy, group, cluster=cluster, layer_index=layer_index, seed=seed, device=device
        )
        # Initial values are drawn on the CPU, so that every device starts from the same weights.
        generator = initial_generator(seed, layer_index, expert=None)
        self.router = Router(shape, device="cpu", generator=generator).to(device)
        self.shared_experts = SharedExperts(shape, generator).to(device) if shape.n_shared_experts else None
        if isinstance(strategy.reduction, LayoutInvariant):
            self.experts.token_block = strategy.reduction.token_block

    # A graph break inside of the layer would gain nothing.
    @torch.compiler.disable
    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        """Returns y of x's shape [..., H] and dtype, a floating-point one.

        ``mask``: bool of x's shape without H, False for padding, as in transformers' attention_mask. Padding is neither
        sent to experts nor counted, also not in the router's losses; its output and its gradient are zeros.

        Raises TypeError and ValueError for another kind, dtype or last dimension, and what ``Experts.forward`` raises.
        """
        check_x(x, self.shape)
        if self.experts.schedule.micro_batch == 0:
            self._check_values()
        x_TH, mask_T = x.reshape(-1, self.shape.hidden_size), None
        if mask is not None:
            check_mask("mask", mask, x)
            mask_T = mask.reshape(-1)
            # Padding tokens are set to zero, so that NaN or inf in them cannot reach the output.
            x_TH = x_TH.masked_fill(~mask_T[:, None], 0)
        # Shared experts run first: then the routed experts save the last tensors, and a recomputation may stop there.
        blocks = self._token_blocks(x.device.type)
        shared_TH = None if self.shared_experts is None else self.shared_experts(x_TH, blocks)
        routing = self.router(x_TH, blocks, mask_T)
        y_TH = self.experts(x_TH, routing.expert_TK, routing.weight_TK, mask_T)
        self._compare_replicas()
        if shared_TH is not None:
            y_TH = y_TH + shared_TH
        return y_TH.view(x.shape)

    @property
    def last_plan(self) -> LayerPlan | None:
        """The plan of the newest micro-batch; see ``Experts.last_plan``."""
        return self.experts.last_plan

    def metrics(self) -> LayerMetrics | None:
        """Returns what the newest micro-batch did; see ``Experts.metrics``."""
        return self.experts.metrics()

    def summed_in_backward(self) -> list[nn.Parameter]:
        """Returns the parameters beside experts whose gradients backward sums over the ranks (``LayoutInvariant``):
        what else sums gradients must leave them out.
        """
        if self.experts.token_block is None:
            return []
        return [parameter for module in self._replicated().values() for parameter in module.parameters()]

    def full_state_dict(self) -> dict[str, Tensor]:
        """Returns everything, gathered on every rank, in the names and shapes of transformers' MoE blocks
        (Mixtral, Qwen3-MoE, OLMoE, DeepSeek-V3): ``gate.weight`` [E, H], ``experts.gate_up_proj`` [E, 2I, H],
        ``experts.down_proj`` [E, H, I], and where they exist ``gate.e_score_correction_bias`` [E] and
        ``shared_experts.{gate,up,down}_proj.weight``.
        """
        experts = self.experts
        experts.token_channel.require_group()
        meet("full_state_dict()", experts.group, experts.store.masters.device)
        gate_up, down = ExpertForm.of(self.shape).views(self._masters().full()).values()
        state = {GATE_UP: gate_up.contiguous(), DOWN: down.contiguous()}
        return state | {name: tensor.clone() for name, tensor in self._replicated_state().items()}

    @torch.no_grad()
    def load_full_state_dict(self, state: dict[str, Tensor]) -> None:
        """Loads what ``full_state_dict`` returns; every rank keeps its part.

        Raises KeyError for a name that is missing, ValueError for a shape that differs or a name too many, before
        anything is loaded.
        """
        H, I, E = self.shape.hidden_size, self.shape.intermediate_size, self.shape.num_experts
        wanted = {GATE_UP: torch.Size((E, 2 * I, H)), DOWN: torch.Size((E, H, I))}
        wanted |= {name: tensor.shape for name, tensor in self._replicated_state().items()}
        if missing := [name for name in wanted if name not in state]:
            raise KeyError(f"state has no {missing[0]}, which this layer has; its names are {', '.join(wanted)}")
        if unknown := sorted(set(state) - set(wanted)):
            raise ValueError(f"state has {unknown}, which this layer has not; drop them or change the shape")
        for name, size in wanted.items():
            if not isinstance(state[name], Tensor) or not state[name].is_floating_point():
                kind = getattr(state[name], "dtype", type(state[name]).__name__)
                raise ValueError(f"{name} is of {kind}; give a tensor of a floating-point dtype")
            if state[name].shape != size:
                raise ValueError(f"{name} has shape {tuple(state[name].shape)}; this layer's is {tuple(size)}")
        self._check_values()
        self.experts.store.drop_prefetched()
        self._masters().drop_cast()
        for name, tensor in self._replicated_state().items():
            tensor.copy_(state[name])
        for expert in range(E):
            parts = state[GATE_UP][expert].reshape(-1), state[DOWN][expert].reshape(-1)
            self._masters().load(expert, torch.cat(parts))

    def _check_values(self) -> None:
        """Raises RuntimeError where the layer has no values yet."""
        if without := [name for name, each in self.named_parameters() if each.is_meta]:
            raise RuntimeError(
                f"{without[0]} of layer {self.experts.layer_index} is on the meta device, without values; call "
                "to_empty(device=...) on the model, and then load its state, before its first forward"
            )

    def _compare_replicas(self) -> None:
        """Warns in micro-batches 1, 2, 4, 8 and so on of a training if ranks have different routers or shared experts,
        as they do after a step without ``sync_gradients``. A collective of these micro-batches. Where devices plan,
        nothing is compared, as the host would have to wait.
        """
        experts = self.experts
        number = experts.schedule.micro_batch - 1
        if experts.group is None or experts.planned_by != "hosts" or number < 1 or number & (number - 1):
            return
        if not (self.training and torch.is_grad_enabled()) or ((tape := current_tape()) and tape.mode == "replay"):
            return
        at = Position("comparison of routers", number)
        found, _ = experts.token_channel.differing(self._replicated_state(), at, experts.store.masters.device)
        if found:
            name, first, second = found
            warnings.warn(
                f"ranks {first} and {second} have other values of {name} of layer {experts.layer_index}, which every "
                "rank should have alike; call ms.sync_gradients(model) between backward and the optimizer's step, or "
                "wrap the model in DDP or FSDP, and load the same values on every rank",
                stacklevel=2,
            )

    def _token_blocks(self, device_type: str) -> TokenBlocks | None:
        if (num_tokens := self.experts.token_block) is None:
            return None
        by_kernels = not isinstance(self.experts.computed_by(DTYPES[self.shape.dtype], device_type), CpuExperts)
        return TokenBlocks(num_tokens, self.experts.token_channel, by_kernels, learning=self.training)

    def _masters(self) -> OwnMasters:
        masters = self.experts.store.masters
        assert isinstance(masters, OwnMasters)
        return masters

    def _replicated_state(self) -> dict[str, Tensor]:
        """Returns the tensors that every rank holds whole, by their names in transformers."""
        modules = self._replicated().items()
        return {f"{prefix}.{name}": each for prefix, module in modules for name, each in module.state_dict().items()}

    def _replicated(self) -> dict[str, nn.Module]:
        """Returns the modules that every rank holds whole, by their names in transformers."""
        modules = {"gate": self.router, "shared_experts": self.shared_experts}
        return {name: module for name, module in modules.items() if module is not None}
