"""The schedule of a layer's layouts: it records loads, requests plans, and changes the layout on all ranks at once.

After the loads of micro-batch t are known, a plan may be requested; loads that a device counted are read only then. The
plan is used from micro-batch t + lag on, by every rank or by none: each rank votes whether it has the plan (the vote
travels with the counts), and if one has not received it in time, all keep the old layout. That is recorded as an event,
because results may then differ in bits.

Layouts that depend on the counts of their own micro-batch, which are late slots and, with lag=0, the whole layout, are
not part of this: they are a function of those counts (``plan.plan_layer``).
"""

from __future__ import annotations

import time
import zlib
from base64 import b64encode
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

import numpy as np
from pydantic import Base64Bytes, NonNegativeInt, TypeAdapter

from moesys.balance.planning_problem import PastBatch, PlanningProblem
from moesys.balance.predictors import LoadHistory
from moesys.balance.run_planner import plan_layout, planned, warm_up
from moesys.config import Balance, ClusterSpec, ModelShape, Oracle, Strategy
from moesys.config.base import in_words
from moesys.layout import ExpertLayout
from moesys.load import IntArray, LoadMatrix


@dataclass(frozen=True)
class PlanRequest:
    """All arguments of a layout. ``layer`` is only the index of the layer that requests it.

    ``load`` counts 1/``units_per_token`` tokens of one micro-batch. ``before``: the plan that was requested before,
    which is made before this one, and whose memory the planner gets.
    """

    layer: int
    load: LoadMatrix
    model: ModelShape
    cluster: ClusterSpec
    strategy: Strategy
    slots_R: tuple[int, ...]
    previous: ExpertLayout
    units_per_token: int = 1
    recent: tuple[PastBatch, ...] = ()
    before: PlanTicket | None = None

    def solve(self, alike: bool = False) -> PlanOutcome:
        """Returns the plan. With ``alike`` there is no deadline, so that every rank computes the same plan; without it,
        one rank must plan for all.
        """
        balance = self.strategy.balance.with_moves_priced(self.units_per_token, self.strategy.replan_every)
        problem = PlanningProblem.of_layout(
            self.load, self.cluster, self.slots_R, self.model, self.previous, self.strategy, self.units_per_token
        )
        memory = b"" if self.before is None else self.before.memory()
        problem = replace(problem, recent=self.recent, memory=memory)
        return PlanOutcome(*planned(problem, balance.without_clock() if alike else balance))


class PlanTicket(Protocol):
    """A plan that was requested."""

    def ready(self, timeout_s: float) -> bool:
        """Returns whether the plan is ready, after at most ``timeout_s`` seconds. Raises the planner's errors."""

    def layout(self) -> ExpertLayout:
        """Returns the plan, once it is ready."""

    def memory(self) -> bytes:
        """Returns the memory of the planner; nothing if the plan was not made."""

    def cancel(self) -> None:
        """Cancels a plan that will not be used, so that it need not be made."""


@dataclass(frozen=True)
class PlanOutcome:
    """A plan that is made, such as a layer without a runtime makes for itself on every rank; or one without
    ``solution``, which will not be made. When that is due, this rank votes against it, so that it is late on every
    rank; if its planner raised an ``error``, ``ready`` raises that error.
    """

    solution: ExpertLayout | None = None
    remembered: bytes = b""
    error: Exception | None = None

    def ready(self, timeout_s: float) -> bool:
        if self.error is not None:
            raise self.error
        return self.solution is not None

    def layout(self) -> ExpertLayout:
        assert self.solution is not None, "a plan was asked for its layout before it was ready"
        return self.solution

    def memory(self) -> bytes:
        return self.remembered

    def cancel(self) -> None:
        """Ignores the call, because the plan is made or dropped already."""


class PlanSource(Protocol):
    def submit(self, request: PlanRequest) -> PlanTicket: ...


class InlinePlanner:
    """Plans at once, in the computing thread; a pure function, so all ranks get the same."""

    def submit(self, request: PlanRequest) -> PlanTicket:
        return request.solve(alike=True)


@dataclass(frozen=True)
class PlanEvent:
    """A departure from the plan, or a sum that cannot be. After one, bits are no longer those of an undisturbed run."""

    layer: int
    micro_batch: int
    what: str


@dataclass(frozen=True)
class _State:
    """The fields of ``LayoutSchedule.state_dict``. pending: the micro-batches that plans are due for; None is late.
    recent: number, load (int64, little-endian, compressed) and layout of each past micro-batch, for planners. memory:
    what the planner remembers of its newest plan, compressed.
    """

    micro_batch: NonNegativeInt
    layout: list[list[int]]
    history: dict[str, Any] | None
    pending: list[tuple[NonNegativeInt, list[list[int]] | None]]
    recent: list[tuple[NonNegativeInt, Base64Bytes, list[list[int]]]] = field(default_factory=list)
    memory: Base64Bytes = b""


_STATE = TypeAdapter(_State)


class LayoutSchedule:
    """One layer's layouts over its micro-batches. The same calls on every rank give the same layouts.

    ``tokens_SRE``: this layer's loads of all micro-batches, which are known in a replay only. ``predictor=Oracle()``
    plans for that of the first micro-batch in which a plan is used, and raises ValueError in training without them.
    """

    def __init__(
        self,
        layer: int,
        strategy: Strategy,
        model: ModelShape,
        cluster: ClusterSpec,
        tokens_SRE: IntArray | None = None,
    ) -> None:
        self.layer, self.strategy, self.model, self.cluster = layer, strategy, model, cluster
        self.slots_R = strategy.early_slots(model, cluster)
        # With lag=0 every micro-batch has a layout of its own, which ``plan_layer`` makes when its counts are known.
        self.follows_history = strategy.balance.kind != "static" and strategy.lag > 0
        self.source: PlanSource = InlinePlanner()
        self.micro_batch = 0
        self.events: list[PlanEvent] = []
        self.num_experts = model.num_experts
        if cluster.num_ranks > 1:
            # Compile before any rank waits for another one's plan, and not in the middle of a training.
            size = cluster.num_ranks * model.num_experts
            warm_up(strategy.balance, strategy.split, late_slots=bool(strategy.late_slots), load_size=size)
        self.layout = self._first_layout()
        foresees = isinstance(strategy.predictor, Oracle)
        # Loads from a micro-batch on.
        self._tokens_SRE, self._known_from = (tokens_SRE if foresees else None), 0
        self._history = None if foresees else LoadHistory(strategy.predictor)
        self._pending: deque[tuple[int, PlanTicket]] = deque()
        # The plan that was requested last.
        self._newest: PlanTicket | None = None
        # The newest micro-batches that the history has seen; requests pass them to the planner.
        self._recent: deque[PastBatch] = deque(maxlen=strategy.balance.recent_batches)
        # Micro-batches that the history has not seen: number, layout, load.
        self._unread: list[tuple[int, ExpertLayout, Callable[[], LoadMatrix]]] = []
        # The micro-batch for which a plan has to be requested.
        self._asked_for: int | None = None

    @property
    def has_request(self) -> bool:
        """This is true if it is time to call ``request``."""
        return self._asked_for is not None

    @property
    def due(self) -> bool:
        """Whether a plan should be in use from the coming micro-batch on."""
        return bool(self._pending) and self._pending[0][0] <= self.micro_batch

    def ready(self, deadline_s: float) -> bool:
        """Returns this rank's vote: whether it has every plan that is due, after waiting at most until ``deadline_s``
        (monotonic clock).
        """
        self.request()
        due = [ticket for due, ticket in self._pending if due <= self.micro_batch]
        return all(ticket.ready(max(0.0, deadline_s - time.monotonic())) for ticket in due)

    def commit(self, agreed: bool) -> None:
        """Applies the outcome of the vote, the same on all ranks: uses the newest plan that is due, or drops what is
        due.
        """
        late = self.due and not agreed
        while self.due:
            due, ticket = self._pending.popleft()
            if agreed:
                self.layout = ticket.layout()
            else:
                ticket.cancel()
                self.add_event(f"plan due at {due} came too late: layout kept")
        if late:
            # Ranks that have the late plan remember what others do not know, and plans that each rank made for itself
            # may follow from it.
            self._newest = None
            if isinstance(self.source, InlinePlanner):
                self._drop_pending()

    def advance(self) -> None:
        """Passes over a micro-batch whose load is for no plan, because one rank has all experts under every layout."""
        self.micro_batch += 1

    def observe(self, load: LoadMatrix, *, at_once: bool = True) -> None:
        """Counts the load of the coming micro-batch, whose layout is settled, and requests a plan if it is time.

        If not ``at_once``, a schedule that makes its own plans (``InlinePlanner``) leaves the request to ``request``,
        which a layer calls at the end of a backward, or else to ``ready`` in the next micro-batch. The plan is the
        same.
        """
        self.record(lambda: load)
        if at_once or not isinstance(self.source, InlinePlanner):
            self.request()

    def record(self, load: Callable[[], LoadMatrix]) -> None:
        """Notes a micro-batch with its settled layout, whose ``load`` can be read once it has been launched; the
        caller then calls ``request``.
        """
        micro_batch, due = self.micro_batch, self.micro_batch + self.strategy.lag
        self.advance()
        if not self.follows_history:
            return
        self.require_known_loads()
        if self._history is not None:
            self._unread.append((micro_batch, self.layout, load))
        if self.micro_batch % self.strategy.replan_every == 0:
            self._asked_for = due

    def require_known_loads(self) -> None:
        """Raises ValueError if ``Oracle()`` would plan for loads that are not known."""
        if self.follows_history and self._history is None and self._tokens_SRE is None:
            raise ValueError(
                "predictor=Oracle() plans for loads that are still to come, which only a replay knows; train inside of "
                "ms.replay_routing, use workload=Replay(...) or Generated(...), or predictor=Adaptive()"
            )

    def foresee(self, tokens_SRE: IntArray | None) -> None:
        """Takes the loads of the coming micro-batches, or None if they are no longer known. ``predictor=Oracle()``
        plans for the first of them at once. Pending plans are dropped.
        """
        self._drop_pending()
        self._tokens_SRE, self._known_from = tokens_SRE, self.micro_batch
        if tokens_SRE is not None and self.follows_history:
            self._asked_for = self.micro_batch
            self.request()

    def add_event(self, what: str, micro_batch: int | None = None) -> None:
        """Keeps an event, of the coming micro-batch where none is given."""
        self.events.append(PlanEvent(self.layer, self.micro_batch if micro_batch is None else micro_batch, what))

    def keep_made_plans(self) -> None:
        """Keeps the requested plans that are made, which are used when they are due. The others are late, because their
        source makes no more plans.
        """
        self._pending = deque((due, _made(ticket)) for due, ticket in self._pending)
        self._newest = _made(self._newest) if self._newest else None

    def __getstate__(self) -> dict[str, Any]:
        """Returns the state for copies and pickles. Reads all loads first, because their readers cannot be pickled."""
        self._read()
        return self.__dict__

    def _drop_pending(self) -> None:
        self._asked_for = None
        for _, ticket in self._pending:
            ticket.cancel()
        self._pending.clear()

    def request(self) -> None:
        """Requests a plan if it is time, which reads the loads of all micro-batches since the last one."""
        due, self._asked_for = self._asked_for, None
        if due is None:
            return
        if self._history is not None:
            self._read()
            planned_for, units_per_token = self._history.predicted(), self._history.units_per_token
        elif self._tokens_SRE is not None and due - self._known_from < len(self._tokens_SRE):
            planned_for, units_per_token = LoadMatrix(self._tokens_SRE[due - self._known_from]), 1
        else:
            return
        request = PlanRequest(
            layer=self.layer,
            load=planned_for,
            model=self.model,
            cluster=self.cluster,
            strategy=self.strategy,
            slots_R=self.slots_R,
            previous=self.layout,
            units_per_token=units_per_token,
            recent=tuple(self._recent),
            before=self._newest,
        )
        self._newest = self.source.submit(request)
        self._pending.append((due, self._newest))

    def _read(self) -> None:
        """Adds the loads that the history has not seen. Waits for the device that counted them."""
        for micro_batch, layout, read in self._unread:
            assert self._history is not None
            load = read()
            self._history.observe(load)
            self._recent.append(PastBatch(micro_batch, load, layout))
        self._unread.clear()

    def state_dict(self, timeout_s: float) -> dict[str, Any]:
        """Returns what a resumed run needs for the same bits. Waits for plans that are being made; one that is not made
        by then, or was dropped, is late in the resumed run.
        """
        self.request()
        pending = [
            (due, ticket.layout().expert_RS.tolist() if ticket.ready(timeout_s) else None)
            for due, ticket in self._pending
        ]
        self._read()
        return {
            "micro_batch": self.micro_batch,
            "layout": self.layout.expert_RS.tolist(),
            "history": None if self._history is None else self._history.state_dict(),
            "pending": pending,
            "memory": _text(self._newest.memory() if self._newest else b""),
            "recent": [
                (
                    batch.micro_batch,
                    _text(batch.load.tokens_RE.astype("<i8").tobytes()),
                    batch.layout.expert_RS.tolist(),
                )
                for batch in self._recent
            ],
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continues where another run stopped. With the state of other ranks or slots, planning begins anew.

        Raises ValueError for anything else than a state of as many experts.
        """
        try:
            found = _STATE.validate_python(state)
            rows: list[Any] = [found.layout, *(plan for _, plan in found.pending)]
            layout, *plans = (None if each is None else ExpertLayout(each, self.num_experts) for each in rows)
            assert layout is not None
            recent = [
                PastBatch(
                    number,
                    LoadMatrix(np.frombuffer(zlib.decompress(tokens), "<i8").reshape(len(held), self.num_experts)),
                    ExpertLayout(np.array(held), self.num_experts),
                )
                for number, tokens, held in found.recent
            ]
            memory = zlib.decompress(found.memory) if found.memory else b""
        except (ValueError, zlib.error) as error:
            raise self._damage(in_words(error)) from None
        expert_RS = layout.expert_RS
        self.micro_batch = found.micro_batch
        if not self.follows_history:
            return
        self._drop_pending()
        self._unread.clear()
        self._recent.clear()
        self._newest = None
        if self._history is not None:
            self._history = LoadHistory(self.strategy.predictor)
        if expert_RS.shape != self.layout.expert_RS.shape or ((expert_RS >= 0).sum(axis=1) > self.slots_R).any():
            self.layout = self._first_layout()
            self.add_event(f"history is of {expert_RS.shape[0]} ranks with {expert_RS.shape[1]} slots: begun anew")
            return
        if any(plan is not None and plan.expert_RS.shape != expert_RS.shape for plan in plans):
            raise self._damage(f"pending has a plan of another shape than its layout, {expert_RS.shape}")
        # Slots can differ by rank from those that a plan was made for.
        plans = [None if plan is None or (plan.filled_R > self.slots_R).any() else plan for plan in plans]
        if any(batch.layout.expert_RS.shape != expert_RS.shape for batch in recent):
            raise self._damage(f"recent has a layout of another shape than the one in force, {expert_RS.shape}")
        if (loads := (found.history or {}).get("shape")) not in (None, [len(expert_RS), self.num_experts]):
            raise self._damage(f"history is of loads of shape {loads}, and its layout of {len(expert_RS)} ranks")
        if self._history is not None and found.history is not None:
            if found.history.get("predictor") != self.strategy.predictor.model_dump(mode="json"):
                self.add_event("history is of another predictor: begun anew, layout kept")
            else:
                self._history.load_state_dict(found.history)
        self.layout = layout
        if self._history is not None:
            self._recent.extend(recent)
            self._newest = PlanOutcome(layout, memory)
        for (due, _), plan in zip(found.pending, plans, strict=True):
            self._pending.append((due, PlanOutcome(plan)))

    def _damage(self, what: str) -> ValueError:
        return ValueError(f"the state of layer {self.layer} is damaged: {what}; load another checkpoint")

    def _first_layout(self) -> ExpertLayout:
        """Returns the layout for the time before the first load is known, when all experts are alike."""
        uniform = LoadMatrix(np.ones((self.cluster.num_ranks, self.num_experts), dtype=np.int64))
        balance = self.strategy.balance.without_clock()
        if self.cluster.num_ranks == 1 and balance.is_compiled:
            # It chooses this layout, too.
            balance = Balance.class_of("static")()
        return plan_layout(uniform, self.cluster, balance, self.slots_R, model=self.model)


def _text(data: bytes) -> str:
    """Returns bytes, compressed and with a checksum, as text; a load has about a byte a count."""
    return b64encode(zlib.compress(data, level=1)).decode()


def _made(ticket: PlanTicket) -> PlanTicket:
    try:
        return PlanOutcome(ticket.layout(), ticket.memory()) if ticket.ready(0.0) else PlanOutcome()
    except Exception as error:
        return PlanOutcome(error=error)
