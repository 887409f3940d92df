"""MoELayer: an ordinary module, ``y = layer(x)``, that runs a declared strategy."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard

from moesys.config import ClusterSpec, Fsep, MegaKernel, ModelShape, Pipelined, Strategy
from moesys.layout import ExpertLayout, TokenPlan
from moesys.load import LoadMatrix
from moesys.moe.call import LayerCall, RoutedExperts
from moesys.moe.device_plan import DevicePlan, DevicePlanner, RanksPlan
from moesys.moe.expert_parameters import DTYPES, initial_generator
from moesys.moe.metrics import LayerMetrics
from moesys.moe.planning import InlinePlanner, LayoutSchedule
from moesys.moe.ranks import cluster_of, mesh_of
from moesys.moe.recompute import current_tape
from moesys.moe.router import Router
from moesys.moe.sharding import shards_of
from moesys.moe.shards import Restored
from moesys.moe.shared import SharedExperts
from moesys.moe.state import join_state, split_state
from moesys.overlap.chunked import ChunkedExecutor
from moesys.overlap.comm.channel import Channel
from moesys.overlap.comm.record import Meter, Recorder
from moesys.overlap.executor import Executor
from moesys.overlap.expert_compute import ExpertCompute
from moesys.overlap.experts_on_device import experts_on_device
from moesys.overlap.routes import build_routes, chunk_counts
from moesys.step import LayerPlan, plan_layer, plans_on_device

if TYPE_CHECKING:
    from moesys.moe.runtime import MoERuntime
    from moesys.overlap.mega_executor import MegaExecutor, MegaHome
    from moesys.overlap.single_rank import LocalExecutor

STATE_TIMEOUT_S = 600.0
PLAN_TIMEOUT_S = 60.0


class MoELayer(nn.Module):
    """A Mixture-of-Experts layer of ``shape`` under ``strategy``; x of [..., H] in, the same shape and dtype out.

    ``group``: the ranks that share the experts: a process group, a 1-D ``DeviceMesh``, or None for the default group
    where torch.distributed is initialised and for one rank alone where it is not. Every rank calls the layer with its
    own tokens, as many as it has (none is fine), the same number of times.

    ``cluster``: which ranks share a node. By default nodes of LOCAL_WORLD_SIZE ranks, as torchrun sets it, or one node.
    ``layer_index`` and ``seed`` give the initial weights, together with nothing else: not the ranks, not the sharding.

    Gradients: expert gradients are summed over all ranks, as if every rank's loss were one term of a sum. The router
    and the shared experts are replicated, their gradients local: ``sync_gradients`` adds them up. Divide a mean loss by
    the number of tokens of all ranks.

    Parameters, all float32: ``router.weight`` [E, H], ``experts`` [E, P_e] (a ``DTensor``, sharded by the strategy),
    ``shared_experts.*``. Raises ValueError where strategy, shape and cluster do not fit.
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
        device = torch.device(device or "cpu")
        self.mesh = mesh_of(group, device.type)
        self.group = None if self.mesh is None else self.mesh.get_group()
        num_ranks = dist.get_world_size(self.group) if self.group is not None else 1
        rank = dist.get_rank(self.group) if self.group is not None else 0
        self.cluster = cluster if cluster is not None else cluster_of(num_ranks)
        if self.cluster.num_ranks != num_ranks:
            raise ValueError(
                f"cluster has {self.cluster.num_ranks} ranks but the group has {num_ranks}; "
                "declare the nodes of exactly the ranks that share the experts"
            )
        self.shape, self.strategy, self.layer_index = shape, strategy, layer_index
        self.schedule = LayoutSchedule(layer_index, strategy, shape, self.cluster)
        self.compute_dtype = DTYPES[shape.dtype]
        self.meter = Meter()
        self.token_channel = Channel(self.group, self.cluster.node_of_rank, Recorder(rank), self.meter, device.type)
        self.weight_channel = self.token_channel
        self.runtime: MoERuntime | None = None
        self.plan_timeout_s = PLAN_TIMEOUT_S
        # None: that of the device.
        self.expert_compute: ExpertCompute | None = None
        self.mega_home: MegaHome | None = None
        self.tokens_since_update_E = torch.zeros(shape.num_experts, dtype=torch.int64)
        self._prefetched: tuple[ExpertLayout, int, Restored] | None = None
        self._last_plan: LayerPlan | DevicePlan | RanksPlan | None = None
        self._device_planner = DevicePlanner(strategy, shape, self.cluster, rank) if plans_on_device(strategy) else None
        # The plan whose counts are not added up yet.
        self._uncounted: RanksPlan | None = None

        self.shards = shards_of(strategy, shape, self.cluster, rank, self.group)
        # EP keeps what it lent until backward: sending it twice would cost more than the memory is worth.
        self.reshard_after_forward, self.prefetch_layers, self.delay_reshard = False, 0, False
        if isinstance(sharding := strategy.sharding, Fsep):
            self.reshard_after_forward = sharding.reshard_after_forward
            self.prefetch_layers, self.delay_reshard = sharding.prefetch_layers, sharding.delay_reshard
        self.num_chunks = strategy.overlap.chunks if isinstance(strategy.overlap, Pipelined) else 1
        # Drawn on the CPU, so that every device starts from the same weights.
        generator = initial_generator(seed, layer_index, expert=None)
        self.router = Router(shape, device="cpu", generator=generator).to(device)
        self.shared_experts = SharedExperts(shape, generator).to(device) if shape.n_shared_experts else None
        self.experts = nn.Parameter(self._sharded(self.shards.initial(seed, layer_index).to(device)))

    # Planning is Python on integers and talks to other ranks: nothing that a compiler could trace.
    @torch.compiler.disable
    def forward(self, x: Tensor) -> Tensor:
        """y of x's shape [..., H] and dtype. Raises ValueError for another last dimension."""
        if x.shape[-1] != self.shape.hidden_size:
            raise ValueError(
                f"x has shape {tuple(x.shape)}; its last dimension must be hidden_size={self.shape.hidden_size}"
            )
        x_TH = x.reshape(-1, self.shape.hidden_size)
        routing = self.router(x_TH)
        tape = current_tape()
        replay = tape is not None and tape.mode == "replay"
        if tape is not None and replay:
            call = tape.next_call(self.layer_index)
        else:
            call = self._plan_call(routing.expert_TK, checkpointed=tape is not None)
            if tape is not None:
                tape.calls.append(call)
        y_TH = RoutedExperts.apply(
            x_TH.to(self.compute_dtype), routing.weight_TK, _local(self.experts), call, replay
        ).to(x.dtype)
        self._learn_from_device()
        if self.shared_experts is not None:
            y_TH = y_TH + self.shared_experts(x_TH)
        return y_TH.view(x.shape)

    @property
    def last_plan(self) -> LayerPlan | None:
        """The newest micro-batch's plan; None before the first. To read it may be to wait for the device."""
        if isinstance(self._last_plan, DevicePlan | RanksPlan):
            self._last_plan = self._last_plan.read()
        return self._last_plan

    def metrics(self) -> LayerMetrics | None:
        """What the newest micro-batch did; None before the first. Counters of bytes and time begin anew."""
        if (plan := self.last_plan) is None:
            return None
        metrics = LayerMetrics.of(self.layer_index, plan, self.meter)
        self.meter.clear()
        return metrics

    def check(self) -> None:
        """Waits for the device. Raises ``PeerTimeoutError`` where a MegaKernel was given up, and ValueError where one
        was planned more rows than ``rows_cap``, which else a later micro-batch tells on a GPU.
        """
        home = self.mega_home if self.runtime is None else self.runtime.mega_home
        if home is not None:
            home.check()

    def update_router_bias(self) -> None:
        """Move the router's correction bias towards balance, by the tokens of all micro-batches since the last time."""
        self.router.update_bias(self.tokens_since_update_E.to(self.router.weight.device))
        self.tokens_since_update_E = torch.zeros_like(self.tokens_since_update_E)

    # --- planning -----------------------------------------------------------------------------------------

    def _plan_call(self, expert_TK: Tensor, checkpointed: bool) -> LayerCall:
        """Who computes what, and where it is sent: the only part of forward that recomputation leaves out."""
        learning = self.training and torch.is_grad_enabled()
        previous = self.runtime.enter(self) if self.runtime is not None else None
        upcoming = self.runtime.upcoming(self) if self.runtime is not None else []
        # Asked for every time, as it depends on the device and, on the CPU, on the number of threads, which may change.
        compute = self.expert_compute or experts_on_device(self.shape, self.compute_dtype, expert_TK.device.type)
        alone = self._plan_alone(expert_TK, compute, learning)
        executor = (
            alone
            or self._plan_on_device(expert_TK, learning, upcoming)
            or self._plan_together(expert_TK, compute, learning, upcoming)
        )
        call = LayerCall(self, self.schedule.layout, executor, previous, checkpointed)
        if (prefetched := self._valid_prefetch()) is not None:
            call.adopt(prefetched)
        self._prefetched = None
        call.upcoming = upcoming
        if self.runtime is not None:
            self.runtime.entered(call)
        return call

    def _plan_alone(self, expert_TK: Tensor, compute: ExpertCompute, learning: bool) -> LocalExecutor | None:
        """On one rank, where ``compute`` can: nothing is planned, and counts stay on the device until they are read."""
        if self.token_channel.num_ranks > 1:
            return None
        with self.meter.planning():
            executor = compute.alone(expert_TK, self.shape.num_experts)
        if executor is None:
            return None
        layout, turn, tokens_E = self.schedule.layout, self.schedule.micro_batch, executor.tokens_E
        self._last_plan = DevicePlan(self.strategy, self.shape, self.cluster, layout, turn, tokens_E)
        if learning:
            self.schedule.pass_by()
            self._count(tokens_E)
        return executor

    def _plan_on_device(self, expert_TK: Tensor, learning: bool, upcoming: list[MoELayer]) -> MegaExecutor | None:
        """On several ranks, where the strategy lets them: forward plans, and counts stay on the device until they are
        read. Hosts meet only to agree on layouts that are due.
        """
        if self._device_planner is None:
            return None
        if learning:
            self._settle([self, *upcoming])
        with self.meter.planning():
            schedule, home = self.schedule, self._mega_home(expert_TK.device)
            executor, plan = self._device_planner.begin(
                home, expert_TK, schedule.layout, schedule.micro_batch, self.compute_dtype, self.token_channel.recorder
            )
        self._last_plan = plan
        self._uncounted = plan if learning else None
        if learning:
            schedule.expect(plan.load)
        return executor

    def _learn_from_device(self) -> None:
        """Forward is launched: its counts are on their way."""
        if (plan := self._uncounted) is not None:
            self._uncounted = None
            self._count(plan.tokens_E)
            self.schedule.ask()

    def _settle(self, deciding: list[MoELayer]) -> None:
        """All ranks use the layouts that are due, or none does. Where none is due nobody waits: ranks know alike."""
        if not any(layer.schedule.due for layer in deciding):
            return
        deadline = time.monotonic() + self.plan_timeout_s
        votes = torch.tensor([layer.schedule.ready(deadline) for layer in deciding], dtype=torch.int64)
        gathered_RN = self.token_channel.all_gather(votes.to(self.experts.device), lane="counts").cpu()
        for layer, vote in zip(deciding, gathered_RN.amin(dim=0).tolist(), strict=True):
            layer.schedule.settle(bool(vote))

    def _plan_together(
        self, expert_TK: Tensor, compute: ExpertCompute, learning: bool, upcoming: list[MoELayer]
    ) -> Executor:
        """Exchange counts, agree on layouts, and plan."""
        deciding = [self, *upcoming]
        deadline = time.monotonic() + self.plan_timeout_s
        votes = [not learning or layer.schedule.ready(deadline) for layer in deciding]
        counts_CE = chunk_counts(expert_TK, self.shape.num_experts, self.num_chunks)
        said = torch.tensor([len(expert_TK), *votes], dtype=torch.int64, device=counts_CE.device)
        gathered_RN = self.token_channel.all_gather(torch.cat([counts_CE.flatten(), said]), lane="counts").cpu()
        tokens_RCE = gathered_RN[:, : counts_CE.numel()].view(-1, *counts_CE.shape)
        said_RN = gathered_RN[:, counts_CE.numel() :]
        if learning:
            agreed = said_RN[:, 1:].amin(dim=0).tolist()
            for layer, vote in zip(deciding, agreed, strict=True):
                layer.schedule.settle(bool(vote))
        with self.meter.planning():
            load = LoadMatrix(tokens_RCE.sum(dim=1).numpy())
            schedule = self.schedule
            plan = plan_layer(
                self.strategy, self.shape, self.cluster, load, layout=schedule.layout, turn=schedule.micro_batch
            )
            if learning:
                schedule.observe(load)
                self._count(torch.from_numpy(load.tokens_E))
            self._last_plan = plan
            if isinstance(self.strategy.overlap, MegaKernel):
                return self._fused(self.strategy.overlap, expert_TK, plan.tokens, int(said_RN[:, 0].max()))
            routes = build_routes(
                expert_TK,
                np.ascontiguousarray(tokens_RCE.numpy().swapaxes(0, 1)),
                plan.tokens,
                self.token_channel.rank,
                compute.min_rows,
            )
        return ChunkedExecutor(routes, self.token_channel, compute, self.shards.memory)

    def _fused(self, overlap: MegaKernel, expert_TK: Tensor, plan: TokenPlan, most_tokens: int) -> MegaExecutor:
        # Here, so that Triton is loaded only where it runs.
        from moesys.overlap.mega_executor import plan_mega

        return plan_mega(
            overlap,
            self._mega_home(expert_TK.device),
            expert_TK,
            plan,
            self.token_channel.rank,
            most_tokens,
            self.shape.hidden_size,
            self.compute_dtype,
            self.token_channel.recorder,
        )

    def _mega_home(self, device: torch.device) -> MegaHome:
        from moesys.overlap.mega_executor import MegaHome

        overlap = self.strategy.overlap
        assert isinstance(overlap, MegaKernel)
        # Layers of a linked model take turns on one.
        holder = self if self.runtime is None else self.runtime
        if holder.mega_home is None:
            holder.mega_home = MegaHome(self.group, device, overlap.timeout_s)
        return holder.mega_home

    def _count(self, tokens_E: Tensor) -> None:
        """For ``update_router_bias``; on the device of the newest counts."""
        self.tokens_since_update_E = self.tokens_since_update_E.to(tokens_E.device) + tokens_E

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> MoELayer:
        """Moves between devices, and refuses ``layer.bfloat16()`` and the like."""
        if fn(torch.empty(0, dtype=torch.float32, device=self.experts.device)).dtype != torch.float32:
            raise TypeError(
                "masters of a MoELayer stay float32; declare ModelShape(dtype=...) to compute in another type"
            )
        return super()._apply(fn, recurse)

    def unlink(self) -> None:
        """Plan and restore on demand again, as before ``link``."""
        self.runtime = None
        self.schedule.source = InlinePlanner()
        self.token_channel.pulse = None
        self.weight_channel = self.token_channel
        self.shards.unshare()
        self._prefetched = None

    # --- experts ------------------------------------------------------------------------------------------

    def start_restore(self, layout: ExpertLayout) -> Restored:
        """Start bringing the experts of ``layout`` here."""
        return self.shards.restore(self._local_masters(), layout, self.weight_channel, f"layer {self.layer_index}")

    def prefetch(self) -> None:
        """Start bringing the experts of the coming micro-batch, whose layout is settled, unless it is done already."""
        if self.runtime is not None and self._valid_prefetch() is None:
            layout = self.schedule.layout
            self._prefetched = (layout, self.runtime.num_passes, self.start_restore(layout))

    def _valid_prefetch(self) -> Restored | None:
        """What was brought ahead, if it was for this pass: one that was broken off leaves experts behind, which the
        next optimizer step makes stale.
        """
        if self._prefetched is None or self.runtime is None:
            return None
        layout, of_pass, restored = self._prefetched
        return restored if (layout, of_pass) == (self.schedule.layout, self.runtime.num_passes) else None

    def reshard_gradients(self, grads_DP: Tensor, call: LayerCall, may_delay: bool) -> Tensor | None:
        """This rank's part of the masters' gradient; None where it comes later, straight into ``experts.grad``."""

        def start() -> Any:
            return self.shards.reshard(grads_DP, call.layout, self.weight_channel, f"layer {self.layer_index}")

        if self.runtime is not None and self.delay_reshard and may_delay:
            self.runtime.delay(self, start)
            return None
        return start()()

    @torch.no_grad()
    def accumulate_gradient(self, local: Tensor) -> None:
        """Add to ``experts.grad`` what autograd was not there to add."""
        if self.experts.grad is None:
            self.experts.grad = self._sharded(local)
        else:
            _local(self.experts.grad).add_(local)

    # --- state --------------------------------------------------------------------------------------------

    def full_state_dict(self) -> dict[str, Tensor]:
        """Everything, gathered on every rank, in the names and shapes of transformers' MoE blocks (``moe.state``)."""
        masters = self.experts.detach()
        full_EP = masters.full_tensor() if isinstance(masters, DTensor) else masters
        return join_state(full_EP, self.shape, self._replicated())

    @torch.no_grad()
    def load_full_state_dict(self, state: dict[str, Tensor]) -> None:
        """The inverse of ``full_state_dict``: every rank keeps its part. Raises KeyError and ValueError for misfits."""
        self._prefetched = None
        for expert, flat_P in split_state(state, self.shape, self._replicated()):
            self.shards.keep(self._local_masters(), expert, flat_P)

    def _replicated(self) -> dict[str, nn.Module]:
        """The modules that every rank holds whole, by their names in transformers."""
        modules = {"gate": self.router, "shared_experts": self.shared_experts}
        return {name: module for name, module in modules.items() if module is not None}

    def get_extra_state(self) -> str:
        """Load history, layouts and counts in JSON, so that a resumed run plans as an undisturbed one would.

        Text, as its length changes from step to step: distributed checkpoints load tensors only into their own size.
        """
        tokens_E = self.tokens_since_update_E.tolist()
        return json.dumps(self.schedule.state_dict(STATE_TIMEOUT_S) | {"tokens_since_update": tokens_E})

    def set_extra_state(self, state: str) -> None:
        loaded = json.loads(state)
        self.schedule.load_state_dict(loaded)
        self.tokens_since_update_E = torch.tensor(loaded["tokens_since_update"], dtype=torch.int64)
        self._prefetched = None

    def __getstate__(self) -> dict[str, Any]:
        """For ``copy.deepcopy`` and pickling: one rank's layer, not linked, without the spans it has recorded."""
        if self.group is not None or self.runtime is not None:
            raise TypeError(
                "only a layer without a process group and not linked can be copied or pickled; "
                "make another and load this one's state_dict()"
            )
        return {name: value for name, value in self.__dict__.items() if name not in ("token_channel", "weight_channel")}

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        self.token_channel = Channel(None, self.cluster.node_of_rank, Recorder(0), self.meter)
        self.weight_channel = self.token_channel

    def extra_repr(self) -> str:
        return f"{self.shape!r}, strategy={self.strategy.name!r}, ranks={self.token_channel.num_ranks}"

    def _local_masters(self) -> Tensor:
        """This rank's part of the masters, outside of autograd."""
        return _local(self.experts.detach())

    def _sharded(self, local: Tensor) -> Tensor:
        """A tensor of logical shape [E, P_e] from this rank's part."""
        if self.mesh is None:
            return local
        size = torch.Size((self.shape.num_experts, self.shape.expert_parameters))
        placement = Shard(self.shards.shard_dim)
        return DTensor.from_local(local, self.mesh, [placement], run_check=False, shape=size, stride=(size[1], 1))


def _local(tensor: Tensor) -> Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor
