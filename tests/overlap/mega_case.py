"""Random micro-batches on ranks, by MegaKernels and by what says what they must compute: what their tests share."""

from __future__ import annotations

import time
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

import moesys as ms
from moesys.balance.run_planner import split_tokens
from moesys.kernels.experts.experts import ExpertMatrices, experts_backward, experts_forward
from moesys.kernels.experts.tile_tuner import ShapeClass, blocks_of
from moesys.kernels.routing import route
from moesys.layout import EMPTY, ExpertLayout, TokenPlan
from moesys.load import LoadMatrix
from moesys.overlap.device_routes import device_split
from moesys.overlap.executor import ExpertGradients, ExpertWeights, SavedTensors
from moesys.overlap.experts_triton import ACTIVATION
from moesys.overlap.mega_executor import MegaHeaps, MegaKernelRun, plan_mega, plan_mega_later, replicas_of

CPU = torch.device("cpu")
TIMEOUT_S = 60.0


@dataclass(frozen=True)
class Case:
    """``tokens``: of each rank. ``dropped``: the part of all choices that go nowhere. ``repeats``: a token may choose
    an expert twice. ``split``: makes the plan, of micro-batch ``turn``, which is random without it; points with
    ``most_tokens`` have the device make it. ``reversed_backward``: all points run forward before the last of them runs
    backward. ``late``: who sleeps, for how long, and before what.
    """

    num_experts: int
    top_k: int
    hidden: int
    width: int
    dtype: str
    tokens: tuple[int, ...]
    slots: int
    points: tuple[ms.MegaKernel, ...]
    seed: int = 0
    dropped: float = 0.0
    repeats: bool = False
    split: ms.EvenSplit | ms.Proportional | ms.FlowSplit | None = None
    turn: int = 0
    reversed_backward: bool = False
    late: tuple[int, float, str] = (0, 0.0, "forward")

    @property
    def num_ranks(self) -> int:
        return len(self.tokens)

    @property
    def cluster(self) -> ms.ClusterSpec:
        return ms.ClusterSpec(ranks_per_node=self.num_ranks)

    @property
    def model(self) -> ms.ModelShape:
        return ms.ModelShape(
            hidden_size=self.hidden,
            intermediate_size=self.width,
            num_experts=self.num_experts,
            top_k=self.top_k,
            dtype=self.dtype,
        )


@dataclass(frozen=True)
class Weights:
    """``HeldExperts`` as two tensors."""

    adapters = None

    gate_up: Tensor
    down: Tensor

    def stacked(self) -> tuple[Tensor, Tensor]:
        return self.gate_up, self.down

    def __len__(self) -> int:
        return len(self.gate_up)

    def by_slot(self) -> list[ExpertWeights]:
        return [ExpertWeights(*matrices) for matrices in zip(self.gate_up, self.down, strict=True)]


Results = dict[str, Tensor]


class Drawn:
    """What ``case`` is made of, the same on all ranks."""

    def __init__(self, case: Case) -> None:
        self.case = case
        numbers = np.random.default_rng(case.seed)
        E, R = case.num_experts, case.num_ranks
        expert_RS = np.full((R, case.slots), EMPTY)
        # All experts somewhere, whichever ranks stay without; then replicas, some of them on the same rank.
        first = numbers.permutation(expert_RS.size)[:E]
        expert_RS.flat[first] = np.arange(E)
        more = (expert_RS == EMPTY) & (numbers.random(expert_RS.shape) < 0.5)
        expert_RS[more] = numbers.integers(0, E, more.sum())
        self.layout = ExpertLayout(expert_RS, E)
        self.expert_RTK = [self._choices(numbers, tokens) for tokens in case.tokens]
        self.plan = self._plan(numbers)
        generator = torch.Generator().manual_seed(case.seed)
        dtype = getattr(torch, case.dtype)

        def normal(*shape: int) -> Tensor:
            return torch.randn(shape, generator=generator).to(dtype)

        self.gate_up = normal(E, 2 * case.width, case.hidden) * 0.3
        self.down = normal(E, case.hidden, case.width) * 0.3
        self.x_RTH = [normal(tokens, case.hidden) for tokens in case.tokens]
        self.dy_RTH = [normal(tokens, case.hidden) for tokens in case.tokens]
        self.weight_RTK = [torch.rand(tokens, case.top_k, generator=generator) for tokens in case.tokens]

    def _choices(self, numbers: np.random.Generator, tokens: int) -> Tensor:
        E, K = self.case.num_experts, self.case.top_k
        chosen = numbers.integers(0, E, (tokens, K))
        if not self.case.repeats:
            chosen = numbers.random((tokens, E)).argsort(1)[:, :K]
        # On both sides of what there is.
        nowhere = numbers.choice([-1, E], (tokens, K))
        return torch.from_numpy(np.where(numbers.random((tokens, K)) < self.case.dropped, nowhere, chosen))

    def _plan(self, numbers: np.random.Generator) -> TokenPlan:
        E, R = self.case.num_experts, self.case.num_ranks
        tokens_RE = np.stack([_counts(expert_TK, E) for expert_TK in self.expert_RTK])
        if self.case.split is not None:
            load = LoadMatrix(tokens_RE)
            return split_tokens(load, self.layout, self.case.cluster, self.case.split, self.case.turn)
        tokens_RER = np.zeros((R, E, R), dtype=np.int64)
        for source, expert in np.ndindex(R, E):
            holders = np.flatnonzero(self.layout.replicas_RE[:, expert])
            shares = numbers.dirichlet(np.full(len(holders), 0.5))
            tokens_RER[source, expert, holders] = numbers.multinomial(tokens_RE[source, expert], shares)
        return TokenPlan.from_dense(tokens_RER, LoadMatrix(tokens_RE), self.layout)

    def held(self, rank: int) -> list[int]:
        return list(self.layout.held_by_rank[rank])

    def weights(self, rank: int) -> Weights:
        return Weights(self.gate_up[self.held(rank)], self.down[self.held(rank)])

    def new_gradients(self, rank: int) -> ExpertGradients:
        num_held, H, I = len(self.held(rank)), self.case.hidden, self.case.width
        return ExpertGradients(
            torch.full((num_held, 2 * I, H), float("nan")), torch.full((num_held, H, I), float("nan"))
        )

    @cached_property
    def replica_RTK(self) -> list[Tensor]:
        """The number of each choice's replica, by (expert, rank), enumerated row by row."""
        number = {(int(e), int(r)): p for p, (e, r) in enumerate(np.argwhere(self.layout.replicas_RE.T > 0))}
        left = self.plan.tokens_RER.copy()
        replica_RTK = []
        for source, expert_TK in enumerate(self.expert_RTK):
            replica_TK = torch.full_like(expert_TK, -1)
            for (token, choice), expert in np.ndenumerate(expert_TK.numpy()):
                if 0 <= expert < self.case.num_experts:
                    destination = int(np.flatnonzero(left[source, expert])[0])
                    left[source, expert, destination] -= 1
                    replica_TK[token, choice] = number[int(expert), destination]
            replica_RTK.append(replica_TK)
        return replica_RTK


def _counts(expert_TK: Tensor, num_experts: int) -> np.ndarray:
    kept = expert_TK[(expert_TK >= 0) & (expert_TK < num_experts)]
    return np.bincount(kept.numpy(), minlength=num_experts)


def by_one_process(drawn: Drawn, rank: int) -> Results:
    """What stand-alone kernels say of all ranks' tokens at once, each replica as an expert of its own: the bits of
    ``Sequential``, as a layer shows (``tests/moe/test_mega_layer.py``).
    """
    expert_P = torch.from_numpy(np.argwhere(drawn.layout.replicas_RE.T > 0)[:, 0])
    rank_P = np.argwhere(drawn.layout.replicas_RE.T > 0)[:, 1]
    gate_up, down = drawn.gate_up[expert_P], drawn.down[expert_P]
    routing = route(torch.cat(drawn.replica_RTK), len(expert_P))
    x_TH, dy_TH, weight_TK = torch.cat(drawn.x_RTH), torch.cat(drawn.dy_RTH), torch.cat(drawn.weight_RTK)
    matrices = ExpertMatrices(gate_up, down, ACTIVATION)
    blocks = blocks_of(ShapeClass.of(x_TH, down, len(routing.entry_P), ACTIVATION), CPU)
    y_TH, state = experts_forward(x_TH, routing, weight_TK, matrices, blocks)
    dgate_up, ddown = (torch.empty_like(of, dtype=torch.float32) for of in matrices[:2])
    dx_TH, dweight_TK = experts_backward(dy_TH, x_TH, weight_TK, matrices, state, blocks, (dgate_up, ddown))
    first = sum(drawn.case.tokens[:rank])
    own = slice(first, first + drawn.case.tokens[rank])
    here = torch.from_numpy(np.flatnonzero(rank_P == rank))
    gradients = ExpertGradients(dgate_up[here], ddown[here])
    return _results(y_TH[own], dx_TH[own], dweight_TK[own], gradients)


class MegaRun:
    """One rank's calls of a micro-batch, on heaps that others may share."""

    def __init__(self, drawn: Drawn, rank: int, heaps: MegaHeaps) -> None:
        self.drawn, self.rank, self.heaps = drawn, rank, heaps
        self.weights, self.weight_TK = drawn.weights(rank), drawn.weight_RTK[rank]

    def forward(self, point: ms.MegaKernel) -> tuple[MegaKernelRun, Tensor, SavedTensors]:
        self._be_late("forward")
        executor = self.plan(point)
        return executor, *executor.forward(self.drawn.x_RTH[self.rank], self.weight_TK, self._experts)

    def plan(self, point: ms.MegaKernel) -> MegaKernelRun:
        """By the host, or, where ``most_tokens`` are declared, by the forward to come."""
        case, layout = self.drawn.case, self.drawn.layout
        expert_TK = self.drawn.expert_RTK[self.rank]
        if point.most_tokens is None:
            return plan_mega(point, case.model, self.heaps, expert_TK, self.drawn.plan, self.rank, max(case.tokens))
        assert case.split is not None
        split, replicas = device_split(layout, case.cluster, case.split, CPU), replicas_of(layout, self.rank, CPU)
        return plan_mega_later(point, case.model, self.heaps, expert_TK, split, replicas, case.turn)[0]

    def backward(self, executor: MegaKernelRun, y_TH: Tensor, saved: SavedTensors) -> Results:
        self._be_late("backward")
        gradients, dy_TH = self.drawn.new_gradients(self.rank), self.drawn.dy_RTH[self.rank]
        dx_TH, dweight_TK = executor.backward(dy_TH, saved, self._experts, gradients)
        return _results(y_TH, dx_TH, dweight_TK, gradients)

    def _experts(self) -> Weights:
        self._be_late("experts")
        return self.weights

    def _be_late(self, now: str) -> None:
        who, seconds, when = self.drawn.case.late
        if (who, when) == (self.rank, now):
            time.sleep(seconds)


def new_heaps(num_ranks: int, timeout_s: float = TIMEOUT_S) -> MegaHeaps:
    return MegaHeaps(dist.group.WORLD if num_ranks > 1 else None, CPU, timeout_s)


def by_mega_kernels(drawn: Drawn, rank: int) -> list[Results]:
    """Of each point of the search space. Collective."""
    case, run = drawn.case, MegaRun(drawn, rank, new_heaps(drawn.case.num_ranks))
    if case.reversed_backward:
        called = [run.forward(point) for point in case.points]
        return [run.backward(*call) for call in reversed(called)][::-1]
    return [run.backward(*run.forward(point)) for point in case.points]


def _results(y_TH: Tensor, dx_TH: Tensor, dweight_TK: Tensor, gradients: ExpertGradients) -> Results:
    return {
        "output": y_TH,
        "dx": dx_TH,
        "dweight": dweight_TK,
        "dW1": gradients.gate_up,
        "dW2": gradients.down,
    }


def differences(case: Case) -> list[str]:
    """Where this rank's MegaKernels differ from what they must compute; empty where they do not."""
    rank, drawn = dist.get_rank(), Drawn(case)
    expected = by_one_process(drawn, rank)
    return [
        f"rank {rank}, {name} at {point!r}"
        for point, found in zip(case.points, by_mega_kernels(drawn, rank), strict=True)
        for name in expected
        if not torch.equal(expected[name], found[name])
    ]
