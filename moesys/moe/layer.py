"""MoELayer: an ordinary module, ``y = layer(x)``, that runs a declared strategy."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from moesys.config import ClusterSpec, ModelShape, Strategy
from moesys.layout_schedule import InlinePlanner, LayoutSchedule, PlanSource
from moesys.moe.call import LayerCall
from moesys.moe.expert_parameters import DTYPES, initial_generator
from moesys.moe.expert_store import ExpertStore, shards_of
from moesys.moe.lookahead import Link, Lookahead
from moesys.moe.masters import Masters, distributed
from moesys.moe.metrics import LayerMetrics
from moesys.moe.planners import MicroBatch, planner_of
from moesys.moe.ranks import cluster_of, mesh_of
from moesys.moe.recompute import current_tape
from moesys.moe.routed_experts import RoutedExperts
from moesys.moe.router import Router
from moesys.moe.shared import SharedExperts
from moesys.moe.state import join_state, split_state
from moesys.moe.unread_plans import DevicesPlan, SingleRankPlan
from moesys.overlap.comm.channel import Channel
from moesys.overlap.comm.heartbeat import Heartbeat
from moesys.overlap.comm.record import Meter, Recorder
from moesys.overlap.expert_compute import ExpertCompute
from moesys.overlap.experts_on_device import experts_on_device
from moesys.step import LayerPlan

STATE_TIMEOUT_S = 600.0


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
        self.shards = shards_of(strategy, shape, self.cluster, rank, self.group)
        self.meter = Meter()
        # None: that of the device.
        self.expert_compute: ExpertCompute | None = None
        self.tokens_since_update_E = torch.zeros(shape.num_experts, dtype=torch.int64)
        self._last_plan: LayerPlan | SingleRankPlan | DevicesPlan | None = None
        # Drawn on the CPU, so that every device starts from the same weights.
        generator = initial_generator(seed, layer_index, expert=None)
        self.router = Router(shape, device="cpu", generator=generator).to(device)
        self.shared_experts = SharedExperts(shape, generator).to(device) if shape.n_shared_experts else None
        local = self.shards.initial(seed, layer_index).to(device)
        self.experts = nn.Parameter(distributed(local, self.shards, self.mesh))
        self._connect(Channel(self.group, self.cluster.node_of_rank, Recorder(rank), self.meter, device.type))

    def _connect(self, channel: Channel) -> None:
        """Makes what other ranks are met through."""
        self.token_channel = channel
        masters = Masters(self._parameters, "experts", self.shards, self.mesh)
        self.store = ExpertStore(self.layer_index, self.strategy.sharding, self.shards, masters, self.schedule, channel)
        self.planner = planner_of(self.strategy, self.shape, self.cluster, self.schedule, self.shards, channel)
        self.link = Link()

    # Planning is Python on integers and talks to other ranks: nothing that a compiler could trace.
    @torch.compiler.disable
    def forward(self, x: Tensor) -> Tensor:
        """Returns y of x's shape [..., H] and dtype. Raises ValueError for another last dimension."""
        if x.shape[-1] != self.shape.hidden_size:
            raise ValueError(
                f"x has shape {tuple(x.shape)}; its last dimension must be hidden_size={self.shape.hidden_size}"
            )
        x_TH = x.reshape(-1, self.shape.hidden_size)
        routing = self.router(x_TH)
        call = self._replayed_or_planned(routing.expert_TK)
        y_TH = RoutedExperts.apply(
            x_TH.to(DTYPES[self.shape.dtype]),
            routing.weight_TK,
            self.store.masters.differentiable(),
            call,
            self.link,
        ).to(x.dtype)
        self._count(call)
        if self.shared_experts is not None:
            y_TH = y_TH + self.shared_experts(x_TH)
        return y_TH.view(x.shape)

    def _replayed_or_planned(self, expert_TK: Tensor) -> LayerCall:
        """Returns the call that a recomputation repeats, else a new one."""
        tape = current_tape()
        if tape is None:
            return self._plan(expert_TK)
        if tape.mode == "replay":
            return tape.next_call(self.layer_index)
        tape.calls.append(call := self._plan(expert_TK))
        return call

    def _plan(self, expert_TK: Tensor) -> LayerCall:
        """Decides who computes what, and where it is sent: the only part of forward that recomputation leaves out."""
        learning = self.training and torch.is_grad_enabled()
        lookahead = self.link.lookahead
        neighbours = lookahead.enter(self.store)
        # Asked for every time, as it depends on the device and, on the CPU, on the number of threads, which may change.
        compute = self.expert_compute or experts_on_device(self.shape, DTYPES[self.shape.dtype], expert_TK.device.type)
        upcoming = [store.schedule for store in neighbours.upcoming]
        batch = MicroBatch(expert_TK, compute, learning, upcoming, lookahead)
        executor, self._last_plan, counts = self.planner.plan(batch)
        call = LayerCall(self.store, executor, neighbours, counts)
        lookahead.entered(call)
        return call

    def _count(self, call: LayerCall) -> None:
        """Adds up counts for ``update_router_bias``, on their device, which has them once forward is launched."""
        if call.counts is not None:
            tokens_E, call.counts = call.counts(), None
            self.tokens_since_update_E = self.tokens_since_update_E.to(tokens_E.device) + tokens_E

    @property
    def last_plan(self) -> LayerPlan | None:
        """The newest micro-batch's plan; None before the first. To read it may be to wait for the device."""
        if isinstance(self._last_plan, SingleRankPlan | DevicesPlan):
            self._last_plan = self._last_plan.read()
        return self._last_plan

    def metrics(self) -> LayerMetrics | None:
        """Returns what the newest micro-batch did; None before the first. Counters of bytes and time begin anew."""
        if (plan := self.last_plan) is None:
            return None
        metrics = LayerMetrics.of(self.layer_index, plan, self.meter)
        self.meter.clear()
        return metrics

    def check(self) -> None:
        """Waits for the device. Raises ``PeerTimeoutError`` where a MegaKernel was given up, and ValueError where one
        was planned more rows than ``rows_cap``, which else a later micro-batch tells on a GPU.
        """
        self.link.lookahead.mega_home.check()

    def update_router_bias(self) -> None:
        """Moves the router's correction bias towards balance, by the tokens of micro-batches since the last time."""
        self.router.update_bias(self.tokens_since_update_E.to(self.router.weight.device))
        self.tokens_since_update_E = torch.zeros_like(self.tokens_since_update_E)

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> MoELayer:
        """Moves between devices, and refuses ``layer.bfloat16()`` and the like."""
        if fn(torch.empty(0, dtype=torch.float32, device=self.experts.device)).dtype != torch.float32:
            raise TypeError(
                "masters of a MoELayer stay float32; declare ModelShape(dtype=...) to compute in another type"
            )
        return super()._apply(fn, recurse)

    # --- linking ------------------------------------------------------------------------------------------

    def join(
        self,
        lookahead: Lookahead,
        first: MoELayer,
        weight_channel: Channel,
        plan_source: PlanSource,
        heartbeat: Heartbeat | None,
    ) -> None:
        """Becomes one of the layers of a linked model, whose ``first`` has the memory for all."""
        self.link.lookahead = lookahead
        self.shards.share_with(first.shards)
        self.schedule.source = plan_source
        self.store.channel = weight_channel
        self.token_channel.recorder = weight_channel.recorder
        self.token_channel.heartbeat = weight_channel.heartbeat = heartbeat

    def unlink(self) -> None:
        """Plans and restores on demand again, as before ``link``."""
        self.link.cut()
        self.shards.unshare()
        self.schedule.source = InlinePlanner()
        self.store.channel = self.token_channel
        self.store.drop_prefetched()
        self.token_channel.heartbeat = None

    # --- state --------------------------------------------------------------------------------------------

    def full_state_dict(self) -> dict[str, Tensor]:
        """Returns everything, gathered on every rank, in the names and shapes of transformers' MoE blocks
        (``moe.state``).
        """
        return join_state(self.store.masters.full(), self.shape, self._replicated())

    @torch.no_grad()
    def load_full_state_dict(self, state: dict[str, Tensor]) -> None:
        """The inverse of ``full_state_dict``: every rank keeps its part. Raises KeyError and ValueError for misfits."""
        self.store.drop_prefetched()
        for expert, flat_P in split_state(state, self.shape, self._replicated()):
            self.store.masters.load(expert, flat_P)

    def _replicated(self) -> dict[str, nn.Module]:
        """Returns the modules that every rank holds whole, by their names in transformers."""
        modules = {"gate": self.router, "shared_experts": self.shared_experts}
        return {name: module for name, module in modules.items() if module is not None}

    def get_extra_state(self) -> str:
        """Returns load history, layouts and counts in JSON, so that a resumed run plans as an undisturbed one would.

        Text, as its length changes from step to step: distributed checkpoints load tensors only into their own size.
        """
        tokens_E = self.tokens_since_update_E.tolist()
        return json.dumps(self.schedule.state_dict(STATE_TIMEOUT_S) | {"tokens_since_update": tokens_E})

    def set_extra_state(self, state: str) -> None:
        loaded = json.loads(state)
        self.schedule.load_state_dict(loaded)
        self.tokens_since_update_E = torch.tensor(loaded["tokens_since_update"], dtype=torch.int64)
        self.store.drop_prefetched()

    def __getstate__(self) -> dict[str, Any]:
        """For ``copy.deepcopy`` and pickling: one rank's layer, not linked, without the spans it has recorded."""
        if self.group is not None or self.link.linked:
            raise TypeError(
                "only a layer without a process group and not linked can be copied or pickled; "
                "make another and load this one's state_dict()"
            )
        connected = ("token_channel", "store", "planner", "link")
        return {name: value for name, value in self.__dict__.items() if name not in connected}

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        self._connect(Channel(None, self.cluster.node_of_rank, Recorder(0), self.meter))

    def extra_repr(self) -> str:
        return f"{self.shape!r}, strategy={self.strategy.name!r}, ranks={self.token_channel.num_ranks}"
