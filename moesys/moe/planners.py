"""The planner of a layer, which plans one micro-batch: which rank computes which token, from the experts they choose.

One rank alone plans nothing. Several ranks exchange counts, and each makes the same plan, on its host or on its device.
Where devices plan, planning makes the host wait for other ranks only to agree on layouts that are due, or to grow the
heap of a MegaKernel. The executor declares where plans are made (``overlap.executor``), and takes the plan. Plans on a
device are read on request.

T tokens of this rank, K top-k, E experts, C chunks, R ranks.
"""

from __future__ import annotations

import hashlib
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor

from moesys.balance.layout_schedule import LayoutSchedule
from moesys.balance.plan import LayerPlan, plan_layer
from moesys.balance.planning_problem import PlanningProblem
from moesys.balance.run_planner import plan_layout
from moesys.config import ClusterSpec, ModelShape, Ordered, Strategy
from moesys.frames import Position
from moesys.kernels.launch import to_device
from moesys.layout import ExpertLayout, TokenPlan
from moesys.load import IntArray, LoadMatrix
from moesys.moe.call import LayerCall
from moesys.moe.token_blocks import check_blocks
from moesys.overlap.comm.channel import Channel
from moesys.overlap.executor import Executor, HostPlan
from moesys.overlap.routes import chunk_counts, invalid_id, no_expert

# Returns a plan that is on a device, or that has not been made yet.
PlanReader = Callable[[], LayerPlan]


@dataclass
class Planner:
    """Plans the micro-batches of one layer on one rank, over the layouts of ``schedule``."""

    strategy: Strategy
    shape: ModelShape
    cluster: ClusterSpec
    schedule: LayoutSchedule
    channel: Channel
    # The newest layout, and the holder of each expert where each has one.
    _holders: tuple[ExpertLayout | None, IntArray | None] = field(default=(None, None), init=False)

    def __post_init__(self) -> None:
        strategy, split = self.strategy, self.strategy.split
        self._by_own_code, self._own_code_ran = bool(strategy.balance.own_code or split.own_code), False
        # This is true if a plan is only a built-in split of the tokens over the layout of the schedule.
        plain = isinstance(strategy.reduction, Ordered) and split.own_code is None
        self._only_splits = plain and not split.follows_planner and not strategy.plans_on_counts

    def plan(
        self, call: LayerCall, expert_TK: Tensor, executor: Executor, token_block: int | None
    ) -> LayerPlan | PlanReader:
        """Plans a micro-batch for ``executor``, sets the members of ``call`` that follow from the plan, and settles the
        layouts of the next layers. Returns the plan.

        ``expert_TK``: the choices of this rank's real tokens, int64 [T, K]. ``token_block``: the number that divides
        the tokens of every rank in training, if there is one.
        """
        match executor.planned_by:
            case "nobody":
                return self._alone(call, expert_TK, executor, token_block)
            case "hosts":
                return self._on_hosts(call, expert_TK, executor, token_block)
            case "devices":
                return self._on_devices(call, expert_TK, executor)

    def _alone(
        self, call: LayerCall, expert_TK: Tensor, executor: Executor, token_block: int | None
    ) -> LayerPlan | PlanReader:
        schedule, learning = self.schedule, call.learning
        if learning and schedule.due:
            schedule.commit(schedule.ready(time.monotonic() + call.timeout_s))
        run = executor.sort(expert_TK, schedule.micro_batch)
        if token_block is not None and learning:
            check_blocks([call.num_tokens], token_block, self.channel.members)
        layout, turn, tokens_E = schedule.layout, schedule.micro_batch, run.tokens_E

        def read() -> LayerPlan:
            return self._layer_plan(LoadMatrix(tokens_E[None].cpu().numpy()), layout, turn)

        if self._by_own_code and not self._own_code_ran:
            self._run_own_code(read())
        if learning:
            schedule.require_known_loads()
            schedule.advance()
        call.run, call.layout, call.check = run, layout, run.check
        call.counts = (lambda: tokens_E) if learning else None
        return read

    def _run_own_code(self, plan: LayerPlan) -> None:
        """Makes a layout for the load of the first ``plan``. One rank needs neither: they are made so that errors of a
        user's own planner or split are raised in the first forward pass, as on several ranks.
        """
        balance = self.strategy.balance
        if balance.own_code is not None:
            slots_R, layout = self.schedule.slots_R, plan.layout
            plan_layout(
                plan.load, self.cluster, balance, slots_R, model=self.shape, previous=layout, strategy=self.strategy
            )
        self._own_code_ran = True

    def _on_hosts(self, call: LayerCall, expert_TK: Tensor, executor: Executor, token_block: int | None) -> LayerPlan:
        schedule, channel, learning = self.schedule, self.channel, call.learning
        deciding = self._deciding(call)
        tokens_RCE, votes_RN, most_tokens = self._exchange(call, expert_TK, deciding, executor.num_chunks, token_block)
        if learning:
            _commit(deciding, votes_RN)
        load = LoadMatrix(tokens_RCE.sum(dim=1).numpy())

        def make() -> LayerPlan:
            plan = self._layer_plan(load, schedule.layout, schedule.micro_batch)
            if learning:
                # Only a user's code may fail, of which all ranks must learn in this micro-batch.
                schedule.observe(load, at_once=self._by_own_code)
            return plan

        with channel.meter.planning():
            plan = _agreed_plan(make, channel, expert_TK.device) if self._by_own_code else make()
            call.run = executor.run(expert_TK, HostPlan(plan, tokens_RCE.numpy(), most_tokens))
        call.layout, call.check = plan.tokens.layout, None
        call.counts = (lambda: torch.from_numpy(load.tokens_E)) if learning else None
        return plan

    def _deciding(self, call: LayerCall) -> list[LayoutSchedule]:
        """Returns the schedules whose layouts are settled: those of this layer and of the next layers."""
        return [self.schedule, *(store.schedule for store in call.upcoming)]

    def _layer_plan(self, load: LoadMatrix, layout: ExpertLayout, turn: int) -> LayerPlan:
        """Returns the plan of ``plan_layer``, by as few steps as the strategy needs."""
        strategy = self.strategy
        if not self._only_splits:
            return plan_layer(strategy, self.shape, self.cluster, load, layout=layout, turn=turn)
        if (holder_E := self._only_holders(layout)) is not None:
            return LayerPlan(_to_holders(load, layout, holder_E), turn)
        num_ranks, num_slots = layout.expert_RS.shape
        slots_R = (num_slots,) * num_ranks
        problem = PlanningProblem(load, self.cluster, slots_R, layout, self.shape, turn, overlap=strategy.overlap)
        return LayerPlan(strategy.split.split(problem), turn)

    def _only_holders(self, layout: ExpertLayout) -> IntArray | None:
        """Returns the rank that holds each expert, [E], if each has only one, as under ``Ep``, so that all splits are
        the same; None otherwise.
        """
        if self._holders[0] is not layout:
            holds_RE = layout.replicas_RE > 0
            single = (holds_RE.sum(axis=0) == 1).all()
            self._holders = layout, holds_RE.argmax(axis=0) if single else None
        return self._holders[1]

    def _exchange(
        self,
        call: LayerCall,
        expert_TK: Tensor,
        deciding: Sequence[LayoutSchedule],
        num_chunks: int,
        token_block: int | None,
    ) -> tuple[Tensor, Tensor, int]:
        """Returns the choices of each rank's chunks for each expert, int64 [R, C, E], each rank's votes for the layouts
        that are due, and the tokens of the rank with most, with padding. A collective. Raises ValueError, on all ranks
        alike, for ids that name no expert and for tokens that are no whole blocks.
        """
        channel, num_experts = self.channel, self.shape.num_experts
        deadline_s = time.monotonic() + call.timeout_s
        votes = [not call.learning or each.ready(deadline_s) for each in deciding]
        invalid = invalid_id(expert_TK, num_experts)
        valid_TK = expert_TK if invalid is None else torch.zeros_like(expert_TK)
        counts_CE = chunk_counts(valid_TK, num_experts, num_chunks).int()
        of_ids = [0, 0] if invalid is None else [1, max(-(2**31), min(invalid, 2**31 - 1))]
        values = torch.tensor([*of_ids, call.num_tokens, *votes], dtype=torch.int32, device=counts_CE.device)
        at = Position("forward", self.schedule.micro_batch, call.flags)
        gathered_RN = channel.all_gather(torch.cat([counts_CE.flatten(), values]), lane="counts", at=at).cpu().long()
        tokens_RCE = gathered_RN[:, : counts_CE.numel()].view(-1, *counts_CE.shape)
        values_RN = gathered_RN[:, counts_CE.numel() :]
        found_R, expert_R, tokens_R = values_RN[:, :3].T.tolist()
        if any(found_R):
            first = found_R.index(1)
            found = f"expert_TK of rank {channel.members[first]} has the id {expert_R[first]}"
            raise no_expert(found, num_experts, self.schedule.layer)
        if token_block is not None and call.learning:
            check_blocks(tokens_R, token_block, channel.members)
        return tokens_RCE, values_RN[:, 3:], max(tokens_R)

    def _on_devices(self, call: LayerCall, expert_TK: Tensor, executor: Executor) -> PlanReader:
        schedule = self.schedule
        if call.learning:
            self._agree(self._deciding(call), call.timeout_s, expert_TK.device)
        call.layout = layout = schedule.layout
        at = Position("forward", schedule.micro_batch, call.flags)
        call.run, pending, call.check = executor.launch(expert_TK, layout, at)

        def load() -> LoadMatrix:
            return LoadMatrix(pending.counts_RE())

        def read() -> LayerPlan:
            return LayerPlan(TokenPlan(pending.entries().numpy(), load(), layout), pending.turn)

        def counts() -> Tensor:
            tokens_E = pending.tokens_RE.sum(0)
            schedule.request()
            return tokens_E

        call.counts = counts if call.learning else None
        if call.learning:
            schedule.record(load)
        return read

    def _agree(self, deciding: Sequence[LayoutSchedule], timeout_s: float, device: torch.device) -> None:
        """Adopts, for each schedule with a due layout, the newest one on all ranks, or keeps the old one on all.

        If none is due, which all ranks know, no rank waits.
        """
        if not any(schedule.due for schedule in deciding):
            return
        deadline_s = time.monotonic() + timeout_s
        votes = to_device([schedule.ready(deadline_s) for schedule in deciding], device)
        at = Position("agreement on a layout", deciding[0].micro_batch)
        _commit(deciding, self.channel.all_gather(votes, lane="counts", at=at).cpu())


def _to_holders(load: LoadMatrix, layout: ExpertLayout, holder_E: IntArray) -> TokenPlan:
    """Returns the plan that sends every token to the only rank that holds its expert, as every split does."""
    source, expert = np.nonzero(load.tokens_RE)
    entries = np.stack([source, expert, holder_E[expert], load.tokens_RE[source, expert]], axis=1)
    return TokenPlan.by_construction(entries, load, layout)


def _commit(schedules: Sequence[LayoutSchedule], votes_RN: Tensor) -> None:
    """Makes all ranks use the plans of a schedule that are due if every one of them has voted for it."""
    for schedule, vote in zip(schedules, votes_RN.amin(dim=0).tolist(), strict=True):
        schedule.commit(bool(vote))


# A rank sends the digest of its plan or, behind as many zeros, the message of an error.
_DIGEST_BYTES = 32


def _agreed_plan(make: Callable[[], LayerPlan], channel: Channel, device: torch.device) -> LayerPlan:
    """Returns the plan that a user's code makes, once it is known to be the same on all ranks; a collective.

    If it raises on any rank, the others raise RuntimeError with that rank's message, and do not wait for rows that
    are never sent. All ranks raise RuntimeError if their plans differ.
    """
    made, failure = None, None
    try:
        made = make()
        sent = _digest(made)
    except Exception as error:
        failure = error
        sent = bytes(_DIGEST_BYTES) + f"{type(error).__name__}: {error}".encode(errors="replace")
    sent_R = channel.gather_bytes(sent, Position("comparison of plans", channel.generation), device)
    if failure is not None:
        raise failure
    assert made is not None
    for rank, other in zip(channel.members, sent_R, strict=True):
        if message := other[_DIGEST_BYTES:].decode():
            raise RuntimeError(f"planning failed on rank {rank}: {message}")
        if other != sent:
            raise RuntimeError(
                f"ranks {channel.members[channel.rank]} and {rank} planned differently from the same counts; let "
                "layout() and split() of your own be functions of the problem and their fields alone"
            )
    return made


def _digest(plan: LayerPlan) -> bytes:
    digest = hashlib.sha256(plan.layout.fingerprint().encode())
    digest.update(plan.tokens.entries.astype("<i8").tobytes())
    return digest.digest()
