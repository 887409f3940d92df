"""Any sizes, any ranks, any layout: a random search for a bit that overlap changes, or a gradient that is wrong."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from harness import Case, inputs, run_cases
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st
from test_bits import assert_same_bits
from torch import Tensor
from torch.nn import functional

import moesys as ms
from moesys.lab.ranks.pool import LocalRanks


@st.composite
def cases(draw: st.DrawFn) -> tuple[Case, int]:
    """A case and the chunks that it is compared at."""
    num_ranks = draw(st.integers(1, 4))
    num_experts = draw(st.integers(1, 11))
    shape = ms.ModelShape(
        hidden_size=draw(st.integers(1, 40)),
        intermediate_size=draw(st.integers(1, 30)),
        num_experts=num_experts,
        top_k=draw(st.integers(1, num_experts)),
        dtype=draw(st.sampled_from(["float32", "bfloat16"])),
        norm_topk_prob=draw(st.booleans()),
    )
    needed = -(-num_experts // num_ranks)
    slots = draw(st.integers(needed, needed + 2))
    prefetch = draw(st.booleans())
    sharding = draw(
        st.sampled_from(
            [
                ms.Ep(),
                ms.Ep(slots_per_rank=slots),
                ms.Fsep(slots_per_rank=slots, reshard_after_forward=prefetch),
                ms.Fsep(slots_per_rank=slots, restore="hierarchical"),
            ]
        )
    )
    moves = sharding != ms.Ep()
    strategy = ms.Strategy(
        name="any",
        sharding=sharding,
        balance=draw(st.sampled_from([ms.Greedy(), ms.Laer(), ms.Eplb()])) if moves else ms.Static(),
        split=draw(st.sampled_from([ms.EvenSplit(), ms.Proportional(), ms.FlowSplit()])),
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
@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(drawn=cases())
@example(drawn=(SATURATED, 2))
def test_no_bit_changes_and_no_gradient_is_wrong(ranks: LocalRanks, drawn: tuple[Case, int]) -> None:
    case, chunks = drawn
    pipelined = Case(**{**vars(case), "strategy": case.strategy.replace(overlap=ms.Pipelined(chunks=chunks))})
    num_ranks = len(case.tokens[0])
    by_rank = ranks.run(run_cases, [case, pipelined], num_ranks=num_ranks)
    for rank, results in enumerate(by_rank):
        assert_same_bits(results, f"rank {rank}")
    if case.shape.dtype == "float32":
        assert_right(case, [results[0] for results in by_rank])


def assert_right(case: Case, results: list[dict[str, Any]]) -> None:
    """Against a dense float64 layer with the same routing weights: every expert on every token, most of it masked."""
    state = {name: tensor.double() for name, tensor in results[0]["state"].items()}
    parameters = {name: state[name].clone().requires_grad_() for name in state}
    # Size of the router's gradient if the two terms of a softmax's slope were added up.
    uncancelled = torch.zeros_like(parameters["gate.weight"])
    for batch in range(len(case.tokens)):
        x = torch.cat([inputs(case, batch, rank)[0] for rank in range(len(results))]).double().requires_grad_()
        dy = torch.cat([inputs(case, batch, rank)[1] for rank in range(len(results))]).double()
        y, probabilities = dense_layer(x, parameters, case.shape)
        probabilities.retain_grad()
        y.backward(dy)
        uncancelled += (probabilities * probabilities.grad.abs()).detach().t() @ x.detach().abs()
        assert_close(torch.cat([result["outputs"][batch] for result in results]), y)
        assert_close(torch.cat([result["dx"][batch] for result in results]), x.grad)
    experts = [parameters["experts.gate_up_proj"].grad.flatten(1), parameters["experts.down_proj"].grad.flatten(1)]
    assert_close(results[0]["gradients"]["experts.masters"], torch.cat(experts, 1))
    router_gradient = results[0]["gradients"]["router.weight"]
    if case.shape.top_k == 1 and case.shape.norm_topk_prob:
        assert router_gradient.abs().max() < 1e-4, "the only weight is 1, whatever the router says"
    else:
        # Large tokens saturate the softmax, whose slope then holds fewer digits, or none where its terms cancel.
        lost = 1e-12 + 1e-6 * float(uncancelled.norm())
        assert_close(router_gradient, parameters["gate.weight"].grad, 2e-5 * (1 + case.skew), lost)


def dense_layer(x: Tensor, parameters: dict[str, Tensor], shape: ms.ModelShape) -> tuple[Tensor, Tensor]:
    """Outputs, and probabilities of all experts."""
    probabilities = (x @ parameters["gate.weight"].t()).softmax(1)
    # The choice is the layer's own: float32 logits, ties by the lower expert.
    logits = functional.linear(x.detach().float(), parameters["gate.weight"].detach().float()).softmax(1)
    chosen = logits.sort(dim=1, descending=True, stable=True).indices[:, : shape.top_k]
    weights = probabilities.gather(1, chosen)
    if shape.norm_topk_prob:
        weights = weights / weights.sum(1, keepdim=True)
    dense = torch.zeros_like(probabilities).scatter(1, chosen, weights)
    gate, up = torch.einsum("th,eih->tei", x, parameters["experts.gate_up_proj"]).chunk(2, dim=2)
    down = torch.einsum("tei,ehi->teh", functional.silu(gate) * up, parameters["experts.down_proj"])
    return (dense[:, :, None] * down).sum(1), probabilities


def assert_close(actual: Tensor, expected: Tensor, tolerance: float = 2e-5, lost: float = 1e-12) -> None:
    error, size = (actual.double() - expected).norm(), expected.norm()
    assert error <= tolerance * size + lost, f"relative error {float(error / size):.2e}"
