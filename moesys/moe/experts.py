"""Experts: the experts of a Mixture-of-Experts layer without its router, run under a declared strategy."""

from __future__ import annotations

import json
import os
import warnings
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from functools import cache, partial
from typing import Any, Literal
from weakref import ReferenceType, WeakSet, ref

import pydantic_core
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from moesys.balance.layout_schedule import InlinePlanner, LayoutSchedule, PlanSource
from moesys.balance.plan import LayerPlan
from moesys.collectives import guarded, require_group
from moesys.config import ClusterSpec, Ep, Fsep, LayoutInvariant, ModelShape, Strategy
from moesys.config.base import python_value
from moesys.frames import BACKWARD, EXPERT_GRADIENTS, LEARNING, Identity, Position
from moesys.kernels.cpu.page_pool import PagePool
from moesys.load import frozen_int64
from moesys.moe.arguments import check_inputs, check_kinds, cluster_of, declaration, mesh_of, require_module
from moesys.moe.call import NUM_SAVED, LayerCall, Link, Lookahead, RoutedExperts, current_tape
from moesys.moe.masters import DTYPES, ExpertForm, Masters, OwnMasters, distributed
from moesys.moe.metrics import LayerMetrics, LoadLog
from moesys.moe.outside import OutsideExperts, OutsideMasters
from moesys.moe.planners import Planner, PlanReader
from moesys.moe.sharded_experts import ShardedExperts
from moesys.moe.store import ExpertShards, ExpertStore
from moesys.moe.whole_experts import WholeExperts
from moesys.overlap.comm.background import Heartbeat
from moesys.overlap.comm.channel import Channel
from moesys.overlap.comm.record import Meter, Recorder
from moesys.overlap.executor import NUM_FACTORS, Executor, ExpertCompute, LayerContext, executor_of
from moesys.overlap.experts_cpu import OURS, CpuExperts, experts_on_device
from moesys.torch_private import (
    ends_recomputation,
    is_registered,
    unscale_beside_dtensors,
    unseen_by_selective_checkpoints,
)

STATE_TIMEOUT_S = 600.0
# Variables in which torchrun, srun, Open MPI and other launchers give the number of ranks.
_LAUNCHED = ("WORLD_SIZE", "SLURM_STEP_NUM_TASKS", "OMPI_COMM_WORLD_SIZE", "PMI_SIZE")


@dataclass
class _LayerCount:
    """The layers of one index that this process has made for one group."""

    number: int = 0
    living: WeakSet[Experts] = field(default_factory=WeakSet)


# The key is a reference, which does not keep the group, and differs from that of any later group of its name.
@cache
def _layer_count(group: ReferenceType[dist.ProcessGroup], layer_index: int) -> _LayerCount:
    return _LayerCount()


class Experts(nn.Module):
    """The experts of ``shape`` under ``strategy``: ``y_TH = experts(x_TH, expert_TK, weight_TK)``, differentiable in x,
    in the weights and in the experts.

    ``group``: the ranks that share the experts: a process group, a 1-D ``DeviceMesh``, or None for the default group
    where torch.distributed is initialised and for one rank alone where it is not. Every rank calls the experts with its
    own tokens, as many as it has (none is fine), the same number of times.

    ``cluster``: which ranks share a node. By default nodes of LOCAL_WORLD_SIZE ranks, as torchrun sets it, or one node.
    ``layer_index`` and ``seed`` give the initial experts, together with nothing else: not the ranks, not the sharding.

    One parameter: ``masters`` [E, P_e], float32, a ``DTensor`` that the strategy shards. Its gradient is summed over
    all ranks, as if every rank's loss were one term of a sum.

    ``outside``: experts whose parameters another library keeps. Then ``masters`` is None, and experts are computed in
    the dtype of x, not in that of ``shape``. Parts that do not fit are refused here if they are sharded already,
    otherwise in the first forward.

    Raises ValueError where strategy, shape and cluster do not fit, and for a strategy that does not run ``outside``.
    """

    masters: nn.Parameter | None

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
        outside: OutsideExperts | None = None,
    ) -> None:
        super().__init__()
        layer_index, seed = python_value((layer_index, seed))
        check_kinds(shape=shape, strategy=strategy, group=group, cluster=cluster, layer_index=layer_index, seed=seed)
        form = None if outside is None else outside.form(shape)
        # The function that an expert computes.
        self.function = OURS
        if outside is not None and form is not None:
            self.function = outside.function(form)
            outside.check(strategy, self.function)
        device = torch.device(device or "cpu")
        if torch.get_default_device().type == "meta":
            raise RuntimeError(
                'experts cannot be made inside of torch.device("meta"), because each rank draws its own part of them '
                'from layer_index and seed; make this module outside of it, with device="cuda" or device="cpu"'
            )
        self.mesh = mesh_of(group, device.type, may_reorder=outside is None)
        self.group = None if self.mesh is None else self.mesh.get_group()
        if self.mesh is not None:
            unscale_beside_dtensors()
        num_ranks = dist.get_world_size(self.group) if self.group is not None else 1
        rank = dist.get_rank(self.group) if self.group is not None else 0
        self.cluster = cluster if cluster is not None else cluster_of(num_ranks, device.type)
        if self.cluster.num_ranks != num_ranks:
            raise ValueError(
                f"cluster has {self.cluster.num_ranks} ranks but the group has {num_ranks}; "
                "declare the nodes of exactly the ranks that share the experts"
            )
        if reason := strategy.overlap.out_of_reach(self.cluster):
            raise ValueError(f"strategy {strategy.name!r}: {reason}")
        self.shape, self.strategy, self.layer_index = shape, strategy, layer_index
        declared = declaration(shape, strategy, self.cluster, None if outside else seed)
        if outside is not None and form is not None:
            declared["outside"] = outside.declared(form)
        self.identity = Identity(layer_index, declared)
        if self.group is not None:
            made = _layer_count(ref(self.group), layer_index)
            made.number += 1
            made.living.add(self)
            self.identity = Identity(layer_index, declared, made.number, made.living)
        self.schedule = LayoutSchedule(layer_index, strategy, shape, self.cluster)
        self.outside = outside
        self.shards = shards_of(strategy, shape, self.cluster, rank, self.group, form)
        self.meter = Meter(device.type)
        # Tokens per block for the router and shared experts; None unless the reduction is ``LayoutInvariant``.
        self.token_block: int | None = None
        # None: the default of the device, which is a GEMM for each expert on the CPU, and Triton kernels on a GPU.
        self.expert_compute: ExpertCompute | None = None
        self.counted_E = torch.zeros(shape.num_experts, dtype=torch.int64)
        # ``global_aux_loss`` accumulates in its first layer, for all layers, the choices that follow from this rank's
        # router logits.
        self.preferred_E = self.counted_E
        # The planner of the newest micro-batch, as in ``Executor.planned_by``.
        self.planned_by: Literal["nobody", "hosts", "devices"] = "nobody"
        self._last_plan: LayerPlan | PlanReader | None = None
        # Initial values are drawn on the CPU, so that every device starts from the same weights.
        own = None
        if outside is None:
            initial = self.shards.initial(seed, layer_index).to(device)
            own = nn.Parameter(distributed(initial, shape, self.shards.shard_dim, self.mesh))
        self.register_parameter("masters", own)
        recorder = Recorder(rank, device_type=device.type)
        nodes = self.cluster.node_of_rank
        self._connect(Channel(self.group, nodes, recorder, self.meter, device.type, self.identity))

    def _connect(self, channel: Channel) -> None:
        """Makes all members that depend on the other ranks and on this machine; a copy of the layer makes its own."""
        # These compute experts, by dtype, device and number of threads.
        self._computes: dict[tuple[torch.dtype, str, int], ExpertCompute] = {}
        self.token_channel = channel
        masters: Masters
        if self.outside is None:
            as_masters = partial(distributed, shape=self.shape, shard_dim=self.shards.shard_dim, mesh=self.mesh)
            masters = OwnMasters(self._parameters, "masters", self.shards.keep, as_masters)
        else:
            masters = OutsideMasters(self.outside, self.shards)
        self.store = ExpertStore(self.layer_index, self.strategy.sharding, self.shards, masters, self.schedule, channel)
        declared = (self.strategy, self.shape, self.cluster)
        self.planner = Planner(*declared, self.schedule, channel)
        self.link = Link()
        shared_memory = self.link.lookahead.shared_memory
        self.context = LayerContext(*declared, channel, self.shards.memory, self.schedule.add_event, shared_memory)
        self._executors: dict[ExpertCompute, Executor] = {}
        # Set by ``Watch``: records the load of each micro-batch.
        self.load_log: LoadLog | None = None
        # Counts the scores by which a router chose, from its choices and the mask (``QuantileBalancer``).
        self.count_scores: Callable[[Tensor, Tensor | None], None] | None = None

    # Planning is Python on integers and communicates with other ranks, which a compiler cannot trace.
    @torch.compiler.disable
    @unseen_by_selective_checkpoints
    def forward(self, x_TH: Tensor, expert_TK: Tensor, weight_TK: Tensor, mask_T: Tensor | None = None) -> Tensor:
        """Returns y [T, H] in x's dtype: a token's experts' outputs times their weights, summed in the order of k.

        A micro-batch takes five steps. ``Planner.plan`` runs steps 1 and 2. ``LayerCall.begin`` then adopts a transfer
        that earlier layers have started, and sends the experts of late slots. ``RoutedExperts.forward`` runs steps 3 to
        5, which a recomputation by activation checkpointing repeats as far as backward needs them.

        1. Ranks exchange how many of their tokens choose each expert.
        2. Every rank makes the same plan: which rank computes which token, by which copy of its expert. Where devices
           plan, the host only launches these two steps, and waits for sizes in step 4; MegaKernels compute both in
           step 4.
        3. Unless earlier layers have started it, the transfer of the layout's experts to this rank is created, and its
           first messages are sent (``LayerCall.restore``); step 4 sends the remaining ones.
        4. The schedule runs (``MicroBatchRun.forward``): tokens are sent to the ranks of their experts, computed once
           the experts have arrived (``LayerCall.wait_for_experts``), and sent back; each token's results are summed.
        5. Padding tokens get rows of zeros (``LayerCall.with_padding``).

        ``x_TH``: floating point [T, H]. ``expert_TK``: int64 or int32 [T, K], the chosen experts. ``weight_TK``:
        floating point [T, K]. T may differ between ranks, and may be 0.

        ``mask_T``: bool [T], False for padding. Padding is neither sent nor counted: its output and its gradients are
        zeros, and its ids may be anything. On a GPU the host waits for the mask. None: all tokens are real.

        Raises TypeError and ValueError for other kinds, dtypes, shapes and devices, on this rank; ValueError on all
        ranks for an id that is none of an expert's; ``RankMismatchError`` on all ranks where they are in different
        layers, micro-batches or modes, or have declared the layer differently.
        """
        check_inputs(x_TH, expert_TK, weight_TK, mask_T, self.shape, rounds=self.outside is None)
        dtype = DTYPES[self.shape.dtype] if self.outside is None else x_TH.dtype
        masters = self.store.masters.differentiable()
        if any(each.is_meta for each in masters):
            raise RuntimeError(
                f"the experts of layer {self.layer_index} are on the meta device, without values; call "
                "to_empty(device=...) on the model, and load its state, before its first forward"
            )
        adapters = None if self.outside is None else self.outside.adapters
        factors = (None,) * NUM_FACTORS if adapters is None else adapters()
        learnt = *masters, *(each for each in factors if each is not None)
        inputs = (x_TH.to(dtype), weight_TK.float().contiguous(), *learnt)
        trains_experts = torch.is_grad_enabled() and any(each.requires_grad for each in masters)
        saves = torch.is_grad_enabled() and any(each.requires_grad for each in inputs)
        flags = BACKWARD * saves + EXPERT_GRADIENTS * trains_experts
        # Triton launches on the current device.
        with torch.cuda.device_of(x_TH):
            call = self._replay_or_plan(expert_TK.long(), mask_T, dtype, flags)
            if call.replayed:
                # If nothing is saved here, the tensor that stops a recomputation is saved after the layer.
                call.output_read = not (saves and ends_recomputation(NUM_SAVED + len(learnt)))
            y_TH: Tensor = RoutedExperts.apply(*inputs[:2], call, self.link, *masters, *factors)
            self._count(call)
            if y_TH.requires_grad and not self.training and any(each.requires_grad for each in learnt):
                y_TH.register_hook(self._warn_of_evaluation)
            first_pass = self.training and torch.is_grad_enabled() and not call.replayed
            if self.load_log is not None and first_pass:
                micro_batch = self.schedule.micro_batch - 1
                x_NH, weight_NK = map(call.without_padding, inputs[:2])
                self.load_log.check(self.layer_index, micro_batch, x_NH, weight_NK, masters, y_TH)
            if self.count_scores is not None and first_pass:
                self.count_scores(expert_TK, mask_T)
            return y_TH.to(x_TH.dtype)

    def _warn_of_evaluation(self, dy_TH: Tensor) -> None:
        """Warns in the backward of a layer in evaluation mode that trains, and learns nothing from its loads."""
        if self.schedule.follows_history or self.load_log is not None or self.count_scores is not None:
            warnings.warn(
                f"layer {self.layer_index} trains in evaluation mode, in which layouts do not follow its loads, and "
                "nothing is recorded or counted; call model.train(), as models of from_pretrained need it",
                stacklevel=2,
            )

    def _replay_or_plan(self, expert_TK: Tensor, mask_T: Tensor | None, dtype: torch.dtype, flags: int) -> LayerCall:
        """Returns the call that a recomputation repeats, else a new one."""
        tape = current_tape()
        if tape is None:
            return self._plan(expert_TK, mask_T, dtype, flags)
        if tape.mode == "replay":
            return tape.next_call(self.store)
        tape.calls.append(call := self._plan(expert_TK, mask_T, dtype, flags))
        call.runs_again = True
        return call

    def _plan(self, expert_TK: Tensor, mask_T: Tensor | None, dtype: torch.dtype, flags: int) -> LayerCall:
        """Plans a micro-batch; a recomputation reuses the recorded ``LayerCall``, and does not call this method.

        ``flags``: the flags of the forward (``frames.Position``).
        """
        learning = self.training and torch.is_grad_enabled()
        self.require_group(learning)
        num_tokens, real_N = len(expert_TK), None
        if mask_T is not None and len(found_N := mask_T.nonzero().flatten()) < num_tokens:
            real_N, expert_TK = found_N, expert_TK.index_select(0, found_N)
        lookahead = self.link.lookahead
        neighbours = lookahead.enter(self.store)
        executor = self._executor(dtype, expert_TK.device.type)
        self.planned_by = executor.planned_by
        flags += LEARNING * learning
        call = LayerCall(self.store, neighbours, dtype, flags, num_tokens, real_N, lookahead.plan_timeout_s)
        channel = self.token_channel
        channel.generation = max(channel.generation, lookahead.generation)
        self._last_plan = self.planner.plan(call, expert_TK, executor, self.token_block)
        lookahead.generation = channel.generation
        if learning and self.load_log is not None:
            self.load_log.add(self._last_plan)
        call.begin(channel.generation)
        lookahead.entered(call)
        return call

    def _executor(self, dtype: torch.dtype, device_type: str) -> Executor:
        """Returns the executor of micro-batches in ``dtype``. Raises ValueError where the strategy has none."""
        compute = self.computed_by(dtype, device_type)
        invariant = isinstance(self.strategy.reduction, LayoutInvariant)
        if invariant and isinstance(compute, CpuExperts) and device_type != "cpu":
            raise ValueError(
                f"strategy {self.strategy.name!r} has reduction=LayoutInvariant(), but experts that are not SwiGLU "
                f"without biases have no kernels on {device_type}; use reduction=Ordered() there"
            )
        if self.strategy.overlap.reaches_memory and dtype != DTYPES[self.shape.dtype]:
            raise ValueError(
                f"x is {str(dtype).removeprefix('torch.')} and strategy {self.strategy.name!r} has overlap=MegaKernel, "
                f"which has memory for rows of {self.shape.dtype}; give x in that dtype, or declare "
                "ModelShape(dtype=...) of x"
            )
        if (executor := self._executors.get(compute)) is None:
            executor = self._executors[compute] = executor_of(self.context, compute)
        return executor

    def require_group(self, learning: bool = True) -> None:
        """Raises RuntimeError for experts whose process group was destroyed and, if they are ``learning``, for those
        that were made before the process group whose ranks were to share them. Warns in the first micro-batch of a
        training where a launcher has started several ranks and there is no process group.
        """
        if self.group is not None and not is_registered(self.group):
            self.token_channel.require_group()
        if self.group is not None or not learning:
            return
        if dist.is_available() and dist.is_initialized():
            if dist.get_world_size() > 1:
                raise RuntimeError(
                    f"layer {self.layer_index} was made before torch.distributed was initialised, so each of the "
                    f"{dist.get_world_size()} ranks would train experts of its own; call init_process_group first, or "
                    "give the layer a group of one rank if that is meant"
                )
        elif self.schedule.micro_batch == 0 and (names := [of for of in _LAUNCHED if os.environ.get(of, "1") != "1"]):
            warnings.warn(
                f"a launcher started {os.environ[names[0]]} ranks ({names[0]}), but there is no process group, so each "
                "rank trains a model of its own; call torch.distributed.init_process_group before the layers are made",
                stacklevel=2,
            )

    def computed_by(self, dtype: torch.dtype, device_type: str) -> ExpertCompute:
        """Returns what computes experts in ``dtype``: asked for every time, as it depends on the device and, on the
        CPU, on the number of threads, which may change.
        """
        if self.expert_compute is not None:
            return self.expert_compute
        key = dtype, device_type, torch.get_num_threads()
        if key not in self._computes:
            self._computes[key] = experts_on_device(self.shape, dtype, device_type, self.function)
        return self._computes[key]

    def _count(self, call: LayerCall) -> None:
        """Adds up counts for ``take_counts``, on their device, which has them once forward is launched."""
        if call.counts is not None:
            tokens_E, call.counts = call.counts(), None
            self.counted_E = self.counted_E.to(tokens_E.device) + tokens_E

    def take_counts(self) -> Tensor:
        """Returns the choices of each expert on all ranks, int64 [E], in training since the last time."""
        counted_E, self.counted_E = self.counted_E, torch.zeros_like(self.counted_E)
        self.preferred_E = self.counted_E
        return counted_E

    @property
    def last_plan(self) -> LayerPlan | None:
        """The newest micro-batch's plan; None before the first. To read it may be to wait for the device."""
        if callable(self._last_plan):
            self._last_plan = self._last_plan()
        return self._last_plan

    def foresee(self, micro_batches: Sequence[Tensor]) -> None:
        """Learns which experts this rank's tokens will choose in the micro-batches that come, integers [T, K] of each,
        -1 for padding: for ``predictor=Oracle()``. A collective of the ranks that share the experts; as many
        micro-batches on each.
        """
        self.token_channel.require_group()
        E = self.shape.num_experts
        counts = [torch.bincount(expert_TK[expert_TK >= 0].long(), minlength=E) for expert_TK in micro_batches]
        counts_N = torch.cat([torch.zeros(0, dtype=torch.int64), *counts]).to(self.store.masters.device)
        tokens_RN = self.token_channel.all_gather(counts_N, lane="counts", at=Position("foresee()")).cpu()
        self.schedule.foresee(tokens_RN.unflatten(1, (-1, E)).transpose(0, 1).contiguous().numpy())

    def metrics(self) -> LayerMetrics | None:
        """Returns what the newest micro-batch did; None before the first. Counters of bytes and time begin anew."""
        if (plan := self.last_plan) is None:
            return None
        metrics = LayerMetrics.of(self.layer_index, plan, self.meter)
        self.meter.clear()
        return metrics

    def check(self) -> None:
        """Waits for the device. Raises what the end of a backward or a later micro-batch would raise on a GPU:
        ``PeerTimeoutError`` where a MegaKernel was given up, ValueError where one was planned more rows than
        ``rows_cap`` or a token chose no expert, and ``RankMismatchError`` where ranks were in different calls.
        """
        for each in (*self._executors.values(), *self.context.shared_memory.values()):
            each.check()

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Experts:
        """Moves between devices, and refuses ``layer.bfloat16()`` and the like."""
        own = self.masters
        if own is not None and fn(torch.empty(0, dtype=torch.float32, device=own.device)).dtype != torch.float32:
            raise TypeError("masters stay float32; declare ModelShape(dtype=...) to compute in another type")
        return super()._apply(fn, recurse)

    # --- linking ------------------------------------------------------------------------------------------

    def use_memory(self, memory: PagePool) -> None:
        """Allocates large tensors in ``memory`` from now on, which the layers of a model use in turn."""
        self.shards.memory = self.context.memory = memory

    def join(
        self,
        lookahead: Lookahead,
        first: Experts,
        weight_channel: Channel,
        plan_source: PlanSource,
        heartbeat: Heartbeat | None,
    ) -> None:
        """Becomes one of the layers of a linked model, which all use the memory of its ``first``."""
        self.link.lookahead = lookahead
        self.shards.share_with(first.shards)
        self.context.memory, self.context.shared_memory = self.shards.memory, lookahead.shared_memory
        self.schedule.source = plan_source
        self.store.channel = weight_channel
        self.token_channel.recorder = weight_channel.recorder
        self.token_channel.heartbeat = weight_channel.heartbeat = heartbeat

    def unlink(self) -> None:
        """Ends what ``join`` began: the layer plans and restores on demand again."""
        self.link.lookahead = Lookahead()
        self.use_memory(PagePool())
        self.context.shared_memory = self.link.lookahead.shared_memory
        self.schedule.source = InlinePlanner()
        self.store.channel = self.token_channel
        self.store.drop_prefetched()
        self.token_channel.heartbeat = None

    # --- state --------------------------------------------------------------------------------------------

    def get_extra_state(self) -> str:
        """Returns load history, layouts and counts in JSON, so that a resumed run plans as an undisturbed one would.

        Text, as its length changes from step to step: distributed checkpoints load tensors only into their own size.
        """
        return json.dumps(self.schedule.state_dict(STATE_TIMEOUT_S) | {"counted": self.counted_E.tolist()})

    def set_extra_state(self, state: str) -> None:
        """Raises ValueError for anything else than the state of as many experts."""
        try:
            loaded = pydantic_core.from_json(state)
            counted = frozen_int64("counted", loaded.pop("counted"), num_dims=1)
        except (AttributeError, LookupError, TypeError, ValueError) as error:
            raise ValueError(f"state is none of a layer's experts: {error!r}; load another checkpoint") from None
        if len(counted) != self.shape.num_experts:
            raise ValueError(
                f"state is of {len(counted)} experts, and these are {self.shape.num_experts}; load that of the same "
                "model"
            )
        self.schedule.load_state_dict(loaded)
        self.counted_E = torch.tensor(counted)
        self.store.drop_prefetched()

    def __getstate__(self) -> dict[str, Any]:
        """Returns the state for ``copy.deepcopy`` and pickling: that of one rank's layer, which is not linked, without
        the spans that it has recorded.
        """
        if self.group is not None or self.link.linked:
            raise TypeError(
                "only a layer without a process group and not linked can be copied or pickled; "
                "make another and load this one's state_dict()"
            )
        if self.outside is not None:
            raise TypeError("a copy would read the parameters of the original; make other experts for other parameters")
        # A plan that has not been read yet may be on a device.
        _ = self.last_plan
        connected = {"token_channel", "store", "planner", "link", "context", "load_log"}
        connected |= {"_executors", "_computes", "count_scores"}
        return {name: value for name, value in self.__dict__.items() if name not in connected}

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        self._connect(Channel(None, self.cluster.node_of_rank, Recorder(0), self.meter))

    def extra_repr(self) -> str:
        return f"{self.shape!r}, strategy={self.strategy.name!r}, ranks={self.token_channel.num_ranks}"


def attach(experts: Experts, module: nn.Module) -> None:
    """Makes ``experts`` known as those of a module of another library, which keeps their parameters.

    They do not become a child of the module: they have no parameters, and safetensors cannot hold their state, a text.
    """
    module.__dict__["moesys_experts"] = experts


def experts_of(model: nn.Module) -> list[Experts]:
    """Returns all experts of a model, its own and attached ones, in the order of its modules.

    Raises TypeError for an object that is not a module, such as ``model.parameters()``.
    """
    require_module(model)
    found = (module.__dict__.get("moesys_experts", module) for module in model.modules())
    return [each for each in found if isinstance(each, Experts)]


def require_own_indices(layers: Sequence[Experts]) -> None:
    """Raises ValueError for layers of which several have one ``layer_index``."""
    indices = [layer.layer_index for layer in layers]
    if len(set(indices)) < len(indices):
        raise ValueError(f"layer_index values {indices} repeat; give every layer its own")


def experts_beside(model: nn.Module, paths: Iterable[str], without: str) -> list[Experts]:
    """Returns for each path of a router, or of a tensor of one, the experts that it serves: those of the innermost
    module around it that has any. Raises ValueError where there are none, or several: ``without``, formatted by path.
    """
    modules = ((name, module.__dict__.get("moesys_experts", module)) for name, module in model.named_modules())
    experts = [(name.split("."), each) for name, each in modules if isinstance(each, Experts)]
    beside = []
    for path in paths:
        parts = path.split(".")
        found: list[Experts] = []
        for depth in reversed(range(len(parts))):
            if found := [each for name, each in experts if name[:depth] == parts[:depth]]:
                break
        if len(found) != 1:
            raise ValueError(without.format(path))
        beside.append(found[0])
    return beside


def ranks_of_routers(layer: Experts, group: dist.ProcessGroup | None) -> dist.ProcessGroup | None:
    """Returns ``group``, by default the ranks that share the experts of ``layer``; None for one rank alone.

    Raises ValueError where these are fewer ranks than the job has and no ``group`` is given, and RuntimeError where a
    group was destroyed.
    """
    layer.require_group(learning=False)
    require_group(group, "the argument group")
    own = layer.group
    if group is None and own is not None and dist.get_world_size(own) < dist.get_world_size():
        raise ValueError(
            f"the experts' group has {dist.get_world_size(own)} of {dist.get_world_size()} ranks, and other ranks may "
            "have copies of its routers; give group=, all ranks whose routers are copies, for example "
            "dist.group.WORLD, or the layers' own group where no other rank has one"
        )
    return own if group is None else group


def counts_of_batch(layers: Sequence[Experts], group: dist.ProcessGroup | None, call: str) -> list[Tensor]:
    """Returns the choices of each layer's experts in the training passes since the last ``take_counts``, int64 [E],
    over all ranks of ``group``, by default of the layers' own. A collective of ``group`` if it is given. ``call``: the
    public function that an error names.

    Raises ValueError where the experts' group is smaller than the job and no ``group`` is given.
    """
    if layers:
        ranks_of_routers(layers[0], group)
    if group is None or not layers:
        return [layer.counted_E for layer in layers]
    own = layers[0].group
    device = layers[0].store.masters.device
    flat = torch.cat([layer.counted_E.to(device) for layer in layers])
    # All ranks of an expert group have its counts, and the first of them in ``group`` adds them for all.
    members = set(dist.get_process_group_ranks(group))
    if own is not None and dist.get_rank() != next(r for r in dist.get_process_group_ranks(own) if r in members):
        flat.zero_()
    guarded(call, group, partial(dist.all_reduce, flat, group=group), device_type=device.type)
    return list(flat.split([len(layer.counted_E) for layer in layers]))


def mean_over_ranks(values: Sequence[int], layer: Experts, group: dist.ProcessGroup | None, call: str) -> Tensor:
    """Returns the mean of each value over the ranks of ``group``, by default of the layer's own, float32 and at least
    1 / R of R ranks. A collective of them, if there are several. ``call``: the public function that an error names.

    Raises ValueError where the experts' group is smaller than the job and no ``group`` is given.
    """
    ranks_of_routers(layer, group)
    channel, device = layer.token_channel, layer.store.masters.device
    if group is not None:
        channel = Channel(group, channel.node_of_rank, channel.recorder, layer.meter, device.type)
    # No later call reads from a channel that is made here, and would compare what ranks call.
    read = group is not None or device.type == "cpu"
    values_RN = channel.all_gather(torch.tensor(values, device=device), lane="counts", at=Position(call), read=read)
    return values_RN.sum(dim=0).clamp(min=1) / channel.num_ranks


def shards_of(
    strategy: Strategy,
    shape: ModelShape,
    cluster: ClusterSpec,
    rank: int,
    group: dist.ProcessGroup | None,
    form: ExpertForm | None = None,
) -> ExpertShards:
    """Returns this rank's shards, as a strategy asks for them. ``group``: the ranks of ``cluster``; None for one rank
    alone. ``form``: of masters that are not flat.
    """
    match strategy.sharding:
        case Ep(lend=lend):
            return WholeExperts(shape, rank, cluster.node_of_rank, lend == "hierarchical", form)
        case Fsep() as sharding:
            overlap, node_of_rank = strategy.overlap, cluster.node_of_rank
            if overlap.reaches_memory and group is not None and sharding.flat and form is None:
                # Here, so that Triton is loaded only where it runs.
                from moesys.moe.pulled_experts import PulledExperts

                return PulledExperts(shape, rank, node_of_rank, sharding, group, overlap.timeout_s)
            return ShardedExperts(shape, rank, node_of_rank, sharding, form)
