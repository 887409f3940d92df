"""The property matrix: strategy x shape x ranks x dtype, each against the whole layer, computed plainly in float64.

The plain computation uses no code of moesys: every expert computes every token, and most of that is multiplied by 0.
It gives the output, the gradient of the tokens, and the gradients of router, experts and shared experts. Some cells
run again in chunks, with rows that travel directly, or as they did before, to the same bits. The usual run takes a
part of the matrix: each strategy once, every shape and number of ranks in either dtype, and every shape on two numbers
of ranks. ``MOESYS_SWEEP=1`` takes all of it, and runs every cell again in all counts of chunks.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass, replace
from itertools import chain, combinations, islice, product
from typing import Any

import pytest
import torch
from harness import Case, assert_same_bits, inputs, plain_experts, run_cases
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.nn import functional

import moesys as ms
from moesys.lab.ranks.pool import LocalRanks

SWEEP = os.environ.get("MOESYS_SWEEP") == "1"
RANKS = (1, 2, 3, 4)
CHUNKS = (1, 2, 3, 5, 16)
# Of so many cells one runs again, in the usual run.
AGAIN = 3
DTYPES = ("float32", "bfloat16")
# Relative norms of differences. bfloat16 rounds products, activations and outputs to 8 bits.
TOLERANCE = {"float32": 2e-6, "bfloat16": 1.5e-2}
# Tokens of each rank, in whole blocks where no bit may depend on how many there are.
BLOCK = 32


@dataclass(frozen=True)
class Shape:
    """``tokens``: of each micro-batch and rank. ``skew`` pulls all tokens towards one direction."""

    E: int
    K: int
    tokens: tuple[tuple[int, ...], ...]
    H: int = 20
    I: int = 12
    skew: float = 0.0
    others: tuple[tuple[str, Any], ...] = ()

    def model(self, dtype: str) -> ms.ModelShape:
        sizes = {"hidden_size": self.H, "intermediate_size": self.I, "num_experts": self.E, "top_k": self.K}
        return ms.ModelShape(**sizes, dtype=dtype, **dict(self.others))


DEEPSEEK = (
    ("scoring_func", "sigmoid"),
    ("n_group", 4),
    ("topk_group", 2),
    ("n_shared_experts", 2),
    ("routed_scaling_factor", 2.5),
)
# Each says which edge it is.
SHAPES = {
    "one token a rank": Shape(6, 2, ((1, 1, 1, 1), (1, 1, 1, 1))),
    "ragged": Shape(7, 2, ((37, 5, 64, 18), (3, 40, 9, 0)), H=40, I=24),
    "ranks without tokens": Shape(5, 2, ((0, 23, 0, 9), (0, 0, 0, 0))),
    "experts without tokens": Shape(23, 1, ((6, 3, 5, 4), (2, 7, 4, 1)), others=(("norm_topk_prob", False),)),
    "all tokens to few experts": Shape(8, 2, ((33, 20, 41, 8), (9, 30, 12, 25)), skew=20.0),
    "every expert chosen": Shape(4, 4, ((9, 14, 3, 30), (5, 5, 5, 5))),
    "fewer experts than ranks": Shape(2, 1, ((9, 4, 7, 12), (3, 11, 6, 2)), others=(("norm_topk_prob", False),)),
    "sizes that nothing divides": Shape(5, 3, ((50, 61, 7, 29), (13, 8, 31, 44)), H=37, I=13, skew=1.0),
    "groups and shared experts": Shape(8, 3, ((24, 17, 30, 6), (8, 19, 2, 33)), others=DEEPSEEK),
}


def _lent(slots: int, **options: Any) -> ms.Strategy:
    lend = options.pop("lend", "flat")
    return ms.Strategy(name="lent", sharding=ms.Ep(slots_per_rank=slots, lend=lend), **{**MOVING, **options})


def _fsep(slots: int, sharding: dict[str, Any] | None = None, **options: Any) -> ms.Strategy:
    return ms.Strategy(name="fsep", sharding=ms.Fsep(slots_per_rank=slots, **(sharding or {})), **{**MOVING, **options})


MOVING: dict[str, Any] = {"balance": ms.Greedy(), "split": ms.FlowSplit()}
THREE, KEPT = ms.Pipelined(chunks=3), {"reshard_after_forward": False}
ONCE = {"node_dispatch": "once"}
BY_NODE = {"node_dispatch": "once", "combine": "per_node"}
INVARIANT = ms.LayoutInvariant(block_rows=16, token_block=BLOCK)
# Of each, by the slots of a rank: one more than experts need.
STRATEGIES: dict[str, Callable[[int], ms.Strategy]] = {
    "ep": lambda _: ms.Strategy(name="ep"),
    "ep, in chunks": lambda _: ms.Strategy(name="ep", overlap=THREE),
    "ep, once a node": lambda _: ms.Strategy(name="ep", overlap=ms.Sequential(**ONCE)),
    "ep, sums of nodes": lambda _: ms.Strategy(name="ep", overlap=ms.Pipelined(chunks=2, **BY_NODE)),
    "ep, invariant": lambda _: ms.Strategy(name="ep", reduction=INVARIANT),
    "lent": lambda slots: _lent(slots),
    "lent by node, in chunks": lambda slots: _lent(slots, lend="hierarchical", overlap=ms.Pipelined(chunks=2)),
    "lent, late": lambda slots: _lent(slots, late_slots=1),
    "lent on the counts": lambda slots: _lent(slots, lag=0, balance=ms.Eplb()),
    # It may borrow as many as live on a rank.
    "lent by quotas": lambda slots: _lent(2 * slots, lag=0, balance=ms.MoonEp(), split=ms.Quotas()),
    "lent, invariant": lambda slots: _lent(slots, balance=ms.Eplb(), split=ms.EvenSplit(), reduction=INVARIANT),
    "fsep": lambda slots: _fsep(slots),
    "fsep, laer, in chunks": lambda slots: _fsep(slots, balance=ms.Laer(), split=ms.EvenSplit(), overlap=THREE),
    "fsep, kept": lambda slots: _fsep(slots, KEPT, balance=ms.Eplb(), split=ms.Proportional()),
    "fsep by node, once a node": lambda slots: _fsep(
        slots, {"restore": "hierarchical", "reshard": "hierarchical"}, overlap=ms.Sequential(**ONCE)
    ),
    "fsep, sums of nodes": lambda slots: _fsep(slots, overlap=ms.Sequential(**BY_NODE)),
    "fsep by node, late": lambda slots: _fsep(slots, {"restore": "hierarchical"}, late_slots=1),
    "fsep by quotas": lambda slots: _fsep(slots, lag=0, balance=ms.Llep(min_tokens=1), split=ms.Quotas()),
    "fsep, invariant": lambda slots: _fsep(slots, overlap=ms.Pipelined(chunks=2), reduction=INVARIANT),
}
# Nodes of several kinds.
NODES = {1: (1,), 2: (1, 1), 3: (2, 1), 4: (1, 2, 1)}


@dataclass(frozen=True)
class Cell:
    strategy: str
    shape: str
    ranks: int
    dtype: str

    def case(self) -> Case:
        shape, strategy = SHAPES[self.shape], STRATEGIES[self.strategy](-(-SHAPES[self.shape].E // self.ranks) + 1)
        tokens = [list(counts[: self.ranks]) for counts in shape.tokens]
        if strategy.reduction.kind == "layout_invariant":
            tokens = [[-(-count // BLOCK) * BLOCK for count in counts] for counts in tokens]
        model, sizes = shape.model(self.dtype), NODES[self.ranks]
        return Case(
            model,
            strategy,
            tokens,
            # Computing is dear beside bytes, so that experts are fetched late although there are few tokens.
            cluster=ms.ClusterSpec(num_nodes=len(sizes), ranks_per_node=sizes, expert_tflops=1e-6),
            weights=weights_of(model),
            skew=shape.skew,
            # Another layout for every micro-batch, where any may be.
            shuffle_layouts=strategy.sharding.lends if isinstance(strategy.sharding, ms.Ep) else True,
        )

    def cases(self, number: int) -> list[Case]:
        """Returns the case, and those that must have its bits."""
        case = self.case()
        others = [case, *(in_chunks(case, chunks) for chunks in CHUNKS)]
        if not SWEEP:
            again = number % AGAIN == 0 or differs_in_chunks(case.strategy)
            others = others[number // AGAIN % len(others) :][:again]
        if case.strategy.overlap == ms.Sequential(**ONCE):
            others.append(replace(case, strategy=case.strategy.replace(overlap=ms.Sequential())))
        return [case, *others]


def differs_in_chunks(strategy: ms.Strategy) -> bool:
    """Returns whether a strategy plans from current counts, or sums rows on their way, which chunks must not change."""
    return strategy.lag == 0 or strategy.late_slots > 0 or strategy.overlap == ms.Sequential(**BY_NODE)


def in_chunks(case: Case, chunks: int) -> Case:
    """Returns the case with another overlap, whose rows travel in the same way."""
    way = {name: getattr(case.strategy.overlap, name) for name in ("node_dispatch", "combine")}
    return replace(case, strategy=case.strategy.replace(overlap=ms.Pipelined(chunks=chunks, **way)))


def weights_of(shape: ms.ModelShape) -> dict[str, Tensor]:
    """Weights whose choices are far from ties in any dtype."""
    generator = torch.Generator().manual_seed(shape.num_experts)
    H, I, E = shape.hidden_size, shape.intermediate_size, shape.num_experts
    sizes: dict[str, tuple[int, ...]] = {
        "gate.weight": (E, H),
        "experts.gate_up_proj": (E, 2 * I, H),
        "experts.down_proj": (E, H, I),
    }
    if shape.scoring_func == "sigmoid":
        sizes["gate.e_score_correction_bias"] = (E,)
    if width := I * shape.n_shared_experts:
        sizes |= {f"shared_experts.{name}_proj.weight": (width, H) for name in ("gate", "up")}
        sizes["shared_experts.down_proj.weight"] = (H, width)
    return {name: torch.randn(size, generator=generator) * 0.2 for name, size in sizes.items()}


def covering() -> list[Cell]:
    """Returns cells such that each strategy is in one of several ranks, and each dtype with every shape and number of
    ranks.
    """
    cells = [Cell("fsep", "ragged", 1, "float32"), Cell("lent, invariant", "groups and shared experts", 1, "bfloat16")]
    for row, strategy in enumerate(STRATEGIES):
        turn, column = divmod(row, len(SHAPES))
        cells.append(Cell(strategy, [*SHAPES][column], (4, 2, 3)[(row + turn) % 3], DTYPES[turn % 2]))
    return cells


ALL = [Cell(*each) for each in product(STRATEGIES, SHAPES, RANKS, DTYPES)]
CELLS = ALL if SWEEP else covering()


def test_every_strategy_and_every_pair_with_a_dtype_is_in_the_quick_part() -> None:
    def pairs(cells: list[Cell]) -> set[tuple[Any, ...]]:
        found = [pair for cell in cells for pair in combinations(vars(cell).items(), 2)]
        return {pair for pair in found if {name for name, _ in pair} in ({"shape", "dtype"}, {"ranks", "dtype"})}

    assert pairs(covering()) == pairs(ALL)
    assert {cell.strategy for cell in covering() if cell.ranks > 1} == {*STRATEGIES}


@pytest.mark.parametrize("num_ranks", RANKS)
def test_outputs_and_gradients_are_those_of_the_whole_layer_in_float64(ranks: LocalRanks, num_ranks: int) -> None:
    cells = [cell for cell in CELLS if cell.ranks == num_ranks]
    cases = [cell.cases(number) for number, cell in enumerate(cells)]
    by_rank = ranks.run(run_cases, list(chain(*cases)), num_ranks=num_ranks, timeout_s=250)
    of_ranks = list(map(iter, by_rank))
    wrong = {}
    for cell, (case, *others) in zip(cells, cases, strict=True):
        results = [list(islice(of_rank, 1 + len(others))) for of_rank in of_ranks]
        for rank, of_rank in enumerate(results):
            assert_same_bits(of_rank, f"rank {rank}, {cell}")
        if case.strategy.late_slots and cell in covering():
            late = [row[-1] for layout in results[0][0]["layouts"] for row in layout]
            assert max(late) >= 0, f"{cell}: nothing was fetched late"
        if errors := errors_of(case, [first for first, *_ in results], TOLERANCE[cell.dtype]):
            wrong[cell] = errors
    assert not wrong


# --- the plain computation --------------------------------------------------------------------------------------------


def errors_of(case: Case, results: list[dict[str, Any]], tolerance: float) -> dict[str, float]:
    """Returns what is farther from the plain computation than ``tolerance``, a relative norm, by name."""
    state = {name: tensor.double().requires_grad_() for name, tensor in results[0]["state"].items()}
    pairs = [[inputs(case, batch, rank) for rank in range(len(results))] for batch in range(len(case.tokens))]
    dtype = getattr(torch, case.shape.dtype)
    errors, floor = {}, 1e-12
    # Size of the router's gradient if the two terms of a softmax's slope were added up, not subtracted.
    uncancelled = 0.0

    def compare(name: str, found: Tensor, wanted: Tensor, within: float = tolerance, lost: float = floor) -> None:
        error, size = float((found.double() - wanted).norm()), float(wanted.norm())
        if not error <= within * size + lost:  # NaN is an error too
            errors[name] = error / max(size, floor)

    for batch, of_ranks in enumerate(pairs):
        x = torch.cat([x for x, _ in of_ranks]).double().requires_grad_()
        dy = torch.cat([dy for _, dy in of_ranks]).double()
        y, scores = whole_layer(x, state, case.shape, dtype)
        scores.retain_grad()
        y.backward(dy)
        uncancelled += float(((scores * scores.grad.abs()).detach().t() @ x.detach().abs()).norm())
        compare(f"y of {batch}", torch.cat([result["outputs"][batch] for result in results]), y.detach())
        compare(f"dx of {batch}", torch.cat([result["dx"][batch] for result in results]), x.grad)
    wanted = {name: tensor.grad for name, tensor in state.items() if tensor.grad is not None}
    experts = [wanted.pop(f"experts.{name}_proj").flatten(1) for name in ("gate_up", "down")]
    compare("experts", results[0]["gradients"]["experts.masters"], torch.cat(experts, dim=1))
    # Large tokens saturate a softmax, whose slope then holds fewer digits, or none where its terms cancel.
    router = wanted.pop("gate.weight")
    lost = 1e-12 + max(1e-6, tolerance / 10) * uncancelled
    if case.shape.top_k == 1 and case.shape.norm_topk_prob:
        # The only weight is 1, whatever the router says, and what is left is noise.
        lost = 1e-4
    compare("router", results[0]["gradients"]["router.weight"], router, tolerance * (1 + case.skew), lost)
    for name, gradient in wanted.items():
        compare(name, results[0]["gradients"][name], gradient)
    return errors


def whole_layer(x: Tensor, state: dict[str, Tensor], shape: ms.ModelShape, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Outputs of all tokens, and scores of all experts; the tokens and weights of experts are rounded to ``dtype``."""
    rounded = _Rounded.apply(x, dtype)
    weights = {name: _Rounded.apply(tensor, dtype) for name, tensor in state.items()}
    logits = x @ state["gate.weight"].t()
    scores = logits.softmax(1) if shape.scoring_func == "softmax" else logits.sigmoid()
    # The choice is made in float32, where ties go to the lower expert.
    near = functional.linear(x.detach().float(), state["gate.weight"].detach().float())
    near = near.softmax(1) if shape.scoring_func == "softmax" else near.sigmoid()
    chosen = _choice(near, state, shape)
    weight = scores.gather(1, chosen)
    if shape.norm_topk_prob:
        weight = weight / weight.sum(1, keepdim=True)
    projections = (weights[f"experts.{name}_proj"] for name in ("gate_up", "down"))
    y = plain_experts(rounded, chosen, weight * shape.routed_scaling_factor, *projections)
    if shape.n_shared_experts:
        gate, up, down = (weights[f"shared_experts.{name}_proj.weight"].t() for name in ("gate", "up", "down"))
        y = y + (functional.silu(rounded @ gate) * (rounded @ up)) @ down
    return y, scores


def _choice(scores: Tensor, state: dict[str, Tensor], shape: ms.ModelShape) -> Tensor:
    """The K experts of each token: DeepSeek-V3's groups are scored by their best two."""
    if shape.scoring_func == "sigmoid":
        scores = scores + state["gate.e_score_correction_bias"].detach().float()
    if shape.n_group > 1:
        groups = scores.view(len(scores), shape.n_group, -1)
        best = groups.topk(2, dim=2).values.sum(2).topk(shape.topk_group, dim=1).indices
        allowed = torch.zeros(groups.shape[:2], dtype=torch.bool).scatter(1, best, True)
        scores = groups.masked_fill(~allowed[:, :, None], -torch.inf).flatten(1)
    return scores.sort(dim=1, descending=True, stable=True).indices[:, : shape.top_k]


class _Rounded(torch.autograd.Function):
    """Rounds to a dtype; its gradient is the identity."""

    @staticmethod
    def forward(ctx: Any, tensor: Tensor, dtype: torch.dtype) -> Tensor:
        return tensor.to(dtype).double()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return gradient, None


# --- random cases -----------------------------------------------------------------------------------------------------


@st.composite
def drawn_cases(draw: st.DrawFn) -> tuple[Case, int]:
    """A case and the chunks that it is compared at."""
    num_ranks = draw(st.integers(1, 4))
    num_experts = draw(st.integers(1, 11))
    shape = ms.ModelShape(
        hidden_size=draw(st.integers(1, 40)),
        intermediate_size=draw(st.integers(1, 30)),
        num_experts=num_experts,
        top_k=draw(st.integers(1, num_experts)),
        dtype=draw(st.sampled_from(DTYPES)),
        norm_topk_prob=draw(st.booleans()),
    )
    name = draw(st.sampled_from([name for name in STRATEGIES if "invariant" not in name]))
    strategy = STRATEGIES[name](
        -(-num_experts // num_ranks) + draw(st.integers(int("quotas" in name or "late" in name), 2))
    )
    nodes = draw(st.integers(1, num_ranks))
    sizes = [num_ranks - nodes + 1] + [1] * (nodes - 1)
    counts = st.lists(st.integers(0, 40), min_size=num_ranks, max_size=num_ranks)
    case = Case(
        shape,
        strategy,
        draw(st.lists(counts, min_size=1, max_size=3)),
        seed=draw(st.integers(0, 99)),
        cluster=ms.ClusterSpec(num_nodes=nodes, ranks_per_node=tuple(sizes)),
        skew=draw(st.sampled_from([0.0, 1.0, 30.0])),
    )
    return case, draw(st.integers(2, 9))


# A token that is so sure of its expert that float32 has no slope left.
SATURATED = Case(
    ms.ModelShape(hidden_size=32, intermediate_size=1, num_experts=2, top_k=1, norm_topk_prob=False),
    ms.Strategy(name="any"),
    [[1]],
    cluster=ms.ClusterSpec(ranks_per_node=1),
    skew=30.0,
)


@pytest.mark.timeout(3600)
@settings(max_examples=400 if SWEEP else 2, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(drawn=drawn_cases())
@example(drawn=(SATURATED, 2))
def test_in_random_cases_chunks_change_no_bit_and_nothing_is_wrong(ranks: LocalRanks, drawn: tuple[Case, int]) -> None:
    case, chunks = drawn
    by_rank = ranks.run(run_cases, [case, in_chunks(case, chunks)], num_ranks=len(case.tokens[0]))
    for rank, results in enumerate(by_rank):
        assert_same_bits(results, f"rank {rank}")
    if case.shape.dtype == "float32":
        assert not errors_of(case, [results[0] for results in by_rank], 2e-5)
