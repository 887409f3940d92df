"""A layer on MegaKernels: the bits of Sequential on the same kernels, over micro-batches, with FSEP, recomputed."""

from __future__ import annotations

from dataclasses import replace
from itertools import product
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from harness import Case, Stack, assert_same_bits, gradients_of, run_cases
from shuffling_planner import ShufflingPlanner

import moesys as ms
from moesys.lab.ranks.pool import LocalRanks
from moesys.moe.outside import OutsideExperts
from moesys.overlap import mega_executor
from moesys.overlap.experts_triton import TritonExperts

FSEP = ms.Strategy(name="fsep", sharding=ms.Fsep(slots_per_rank=3), balance=ms.Greedy(), split=ms.FlowSplit())
SHAPE = ms.ModelShape(hidden_size=20, intermediate_size=12, num_experts=5, top_k=2, dtype="bfloat16")
# Others are tried where less is around them (tests/overlap/test_mega.py).
POINT = ms.MegaKernel(programs=1, deduplicate=True)
MEGA, NODES = ms.Strategy(name="mega", overlap=POINT), ms.ClusterSpec(num_nodes=2)
# Smaller ones first: the heap grows between micro-batches. One rank has none, then all.
TOKENS = [[3, 0, 5], [0, 11, 0]]


def test_a_layer_over_two_micro_batches_with_fsep_and_late_slots(ranks: LocalRanks) -> None:
    late = FSEP.replace(late_slots=1)
    # Computing is so dear that experts are fetched late.
    cluster = ms.ClusterSpec(ranks_per_node=3, expert_tflops=1e-6)
    late_sequential = Case(SHAPE, late, TOKENS, cluster=cluster, skew=1.0, kernels=True, shuffle_layouts=True)
    cases = [late_sequential, replace(late_sequential, strategy=late.replace(overlap=POINT))]
    for rank, results in enumerate(ranks.run(run_cases, cases, num_ranks=3, timeout_s=250)):
        assert_same_bits(results, f"rank {rank}")
        assert any(row[-1] >= 0 for layout in results[0]["layouts"] for row in layout), "nothing was fetched late"


def refused_over_nodes() -> str:
    with pytest.raises(ValueError, match="strategy 'mega'") as error:
        ms.MoELayer(SHAPE, MEGA, cluster=NODES)
    return str(error.value)


def test_a_layer_over_several_domains_is_refused_in_the_words_of_simulations(ranks: LocalRanks) -> None:
    assert ranks.run(refused_over_nodes, num_ranks=2) == [f"strategy 'mega': {MEGA.overlap.out_of_reach(NODES)}"] * 2


def test_ranks_without_an_expert(ranks: LocalRanks) -> None:
    shape = SHAPE.model_copy(update={"num_experts": 2, "top_k": 1})
    sequential = Case(shape, ms.Strategy(name="ep"), [[9, 0, 4]], kernels=True)
    mega = replace(sequential, strategy=ms.Strategy(name="ep+mega", overlap=ms.MegaKernel()))
    for rank, results in enumerate(ranks.run(run_cases, [sequential, mega], num_ranks=3, timeout_s=250)):
        assert_same_bits(results, f"rank {rank}")


def outside(strategy: ms.Strategy, turned: bool, adapted: bool) -> list[torch.Tensor]:
    """Two micro-batches through experts that another library keeps: gate and up apart, or [in, out] and turned; or
    frozen, with LoRA.
    """
    rank, E, H, I = dist.get_rank(), SHAPE.num_experts, SHAPE.hidden_size, SHAPE.intermediate_size
    shapes = {"gate": (I, H), "up": (I, H), "down": (H, I)}
    if turned:
        shapes = {"gate_up": (2 * I, H), "down": (H, I)}
    generator = torch.Generator().manual_seed(1)
    leaves = {}
    for name, size in shapes.items():
        tensor = torch.randn(E, *size, generator=generator) / 4
        dim = 0 if isinstance(strategy.sharding, ms.Ep) else 1 + (name == "gate_up")
        leaf = tensor.chunk(2, dim=dim)[rank]
        leaves[name] = torch.nn.Parameter(leaf.mT.contiguous() if turned else leaf.contiguous(), not adapted)
    of_factors = {"in": (32, H), "out": (2 * I, 32), "down in": (16, I), "down out": (H, 16)} if adapted else {}
    factors = {name: torch.nn.Parameter(torch.randn(E, *size) / 4) for name, size in of_factors.items()}
    read = lambda: {name: leaf.mT if turned else leaf for name, leaf in leaves.items()}  # noqa: E731
    held = OutsideExperts(read, adapters=(lambda: [*factors.values()]) if adapted else None)
    experts = ms.Experts(SHAPE, strategy, outside=held)
    experts.expert_compute = TritonExperts()
    if strategy.name != "ep":
        experts.schedule.source = ShufflingPlanner()
    found = []
    for tokens in (3 * rank, 5):
        x_TH = torch.randn(tokens, H, generator=generator).bfloat16().requires_grad_()
        expert_TK = torch.rand(tokens, E, generator=generator).topk(2).indices
        y_TH = experts(x_TH, expert_TK, torch.rand(tokens, 2, generator=generator))
        y_TH.float().square().sum().backward()
        found += [y_TH.detach(), x_TH.grad]
    return [*found, *(leaf.grad for leaf in (factors or leaves).values())]


def outside_both(strategy: ms.Strategy, turned: bool, adapted: bool) -> list[list[torch.Tensor]]:
    found = []
    for overlap in (ms.Sequential(), POINT.replace(rows_cap=2.0)):
        torch.manual_seed(2)
        found.append(outside(strategy.replace(overlap=overlap), turned, adapted))
    return found


LENT = FSEP.replace(name="lent", sharding=ms.Ep(slots_per_rank=4))


WAYS = product((ms.Strategy(name="ep"), LENT, FSEP), (False, True), (False, True))
FAST = (FSEP, True, False), (LENT, False, True)


@pytest.mark.parametrize(
    ("strategy", "turned", "adapted"),
    [pytest.param(*each, marks=() if each in FAST else pytest.mark.slow) for each in WAYS],
)
def test_parameters_of_other_libraries(ranks: LocalRanks, strategy: ms.Strategy, turned: bool, adapted: bool) -> None:
    for sequential, mega in ranks.run(outside_both, strategy, turned, adapted, num_ranks=2, timeout_s=250):
        assert all(torch.equal(one, other) for one, other in zip(sequential, mega, strict=True))
        assert sequential[-1].any()


def train(overlap: ms.MegaKernel | ms.Sequential, checkpointed: bool, linked: bool) -> dict[str, torch.Tensor]:
    """Two micro-batches through two layers, both under way before the first backward."""
    model = Stack(SHAPE, FSEP.replace(overlap=overlap), num_layers=2)
    for moe in model.moe:
        moe.experts.expert_compute = TritonExperts()
    if linked:
        ms.link(model)
    generator = torch.Generator().manual_seed(dist.get_rank())
    outputs = [
        model(torch.randn(tokens + dist.get_rank(), SHAPE.hidden_size, generator=generator), checkpointed)
        for tokens in (3, 5)
    ]
    for output in reversed(outputs):
        output.square().sum().backward()
    return {"first": outputs[0].detach(), "second": outputs[1].detach(), **gradients_of(model)}


def all_ways() -> list[tuple[str, list[str]]]:
    """Of each way to run it, what differs from Sequential."""
    expected = train(ms.Sequential(), False, False)
    differ = []
    for overlap, checkpointed, linked in (
        (ms.MegaKernel(), False, False),
        (ms.MegaKernel(), True, True),
        (ms.MegaKernel(keep_x=False), True, True),
    ):
        found = train(overlap, checkpointed, linked)
        assert found.keys() == expected.keys()
        name = f"{'recomputed' if checkpointed else 'plain'}, {'x kept' if overlap.keep_x else 'x again'}"
        differ.append((name, [part for part in expected if not torch.equal(expected[part], found[part])]))
    return differ


@pytest.mark.slow
def test_two_micro_batches_under_way_and_recomputation(ranks: LocalRanks) -> None:
    for differ in ranks.run(all_ways, num_ranks=2, timeout_s=250):
        assert differ == [("plain, x kept", []), ("recomputed, x kept", []), ("recomputed, x again", [])]


def test_on_the_cpu_it_says_how_to_interpret(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mega_executor, "INTERPRETED", SimpleNamespace(value=False))
    with pytest.raises(RuntimeError, match=r"runs on GPUs; on the CPU use Sequential\(\) .* TRITON_INTERPRET=1"):
        mega_executor.MegaHeaps(None, torch.device("cpu"), 1.0)
