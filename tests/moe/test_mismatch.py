"""Ranks that are in different calls, or that declare a layer differently, all raise an error that names both sides."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from itertools import combinations
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest
import torch
import torch.distributed as dist
from conftest import assert_equal, on_ranks
from harness import Stack, gradients_of
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

import moesys as ms
from moesys.collectives import agreement
from moesys.frames import PAYLOAD_BYTES, Identity, Position
from moesys.lab.ranks.pool import LocalRanks
from moesys.overlap.comm.channel import Channel
from moesys.overlap.comm.record import Meter, Recorder

SHAPE = ms.ModelShape(hidden_size=16, intermediate_size=8, num_experts=6, top_k=2)
EP = ms.Strategy(name="ep")
FSEP = ms.Strategy(
    name="fsep",
    sharding=ms.Fsep(slots_per_rank=4, prefetch_layers=1, delay_reshard=True),
    balance=ms.Greedy(),
    split=ms.FlowSplit(),
)
INVARIANT = EP.replace(name="invariant", reduction=ms.LayoutInvariant(token_block=32))


def clamped(h_N2I: Tensor, limit: float) -> Tensor:
    gate_NI, up_NI = h_N2I.chunk(2, dim=-1)
    return functional.silu(gate_NI.clamp(max=limit)) * up_NI


def tokens(rank: int) -> Tensor:
    return torch.randn(32, 16, generator=torch.Generator().manual_seed(rank))


def layers(strategy: ms.Strategy = EP, **changes: Any) -> nn.ModuleList:
    return nn.ModuleList(ms.MoELayer(SHAPE, strategy, layer_index=index, seed=index, **changes) for index in (5, 7))


def refused(call: Callable[[], object], *words: str) -> str:
    """Returns the message of the error that a call must raise on all ranks, which has the words."""
    with pytest.raises(ms.RankMismatchError) as error:
        call()
    assert all(word in str(error.value) for word in words), str(error.value)
    return str(error.value)


# --- different calls ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("linked", [False, True], ids=["on their own", "linked"])
@pytest.mark.parametrize("strategy", [EP, FSEP, INVARIANT], ids=lambda strategy: strategy.name)
@on_ranks(3)
def test_ranks_in_different_layers(strategy: ms.Strategy, linked: bool) -> None:
    model, rank = layers(strategy), dist.get_rank()
    if linked:
        ms.link(model)
    for layer in model:
        layer(tokens(rank))
    refused(
        lambda: model[min(rank, 1)](tokens(rank)),
        "rank 0: forward of layer 5 (micro-batch",
        "ranks 1, 2: forward of layer 7 (micro-batch",
        "All ranks of a process group must make the same calls in the same order",
    )
    # All ranks have raised at one message, so that who goes on alike goes on right.
    model[0](tokens(rank)).sum().backward()


@on_ranks(2)
def test_a_forward_in_evaluation_beside_one_in_training() -> None:
    """An extra pass on rank 0: in evaluation, without gradients, and with frozen experts."""
    model, rank = layers()[0], dist.get_rank()
    words = (
        "rank 0: forward of layer 5 (micro-batch 0, in evaluation or without gradients",
        "rank 1: forward of layer 5 (micro-batch 0, in training, a backward follows)",
    )
    with torch.set_grad_enabled(rank > 0):
        refused(lambda: model(tokens(rank)), *words)
    model.train(rank > 0)
    refused(lambda: model(tokens(rank)), *words)
    model.train()
    model.experts.masters.requires_grad_(rank > 0)
    frozen = "rank 0: forward of layer 5 (micro-batch 0, in training, a backward follows, experts are frozen)"
    refused(lambda: model(tokens(rank)), frozen)


@on_ranks(2)
def test_a_pass_that_begins_anew_beside_one_that_goes_on() -> None:
    """Rank 1 fails between two layers, and begins the pass anew."""
    model, rank = layers(FSEP), dist.get_rank()
    ms.link(model)
    x = model[0](tokens(rank))
    words = "rank 0: forward of layer 7 (micro-batch 0", "rank 1: forward of layer 5 (micro-batch 1"
    refused(lambda: model[1](x) if rank == 0 else model[0](tokens(rank)), *words)


@on_ranks(2)
def test_a_recomputation_beside_a_forward() -> None:
    model, rank = layers(), dist.get_rank()
    x = tokens(rank).requires_grad_()
    y = checkpoint(lambda x: model[0](x) * 2.0, x, use_reentrant=False)
    words = "rank 0: recomputation of layer 5", "rank 1: forward of layer 7"
    refused(lambda: y.sum().backward() if rank == 0 else model[1](x), *words)


def balanced_model() -> nn.ModuleList:
    shape = SHAPE.replace(scoring_func="sigmoid", router_bias_update_rate=0.05)
    model = nn.ModuleList(ms.MoELayer(shape, EP, layer_index=index, seed=index) for index in (5, 7))
    model.balancer = ms.QuantileBalancer(model)
    return model


def save_whole(model: nn.Module) -> None:
    with TemporaryDirectory() as folder, ms.whole_folder(Path(folder) / "checkpoint"):
        pass


def global_aux_loss(model: nn.Module) -> None:
    ms.global_aux_loss(model, [torch.randn(4, 6), torch.randn(4, 6)], dist.group.WORLD)


def agree(model: nn.Module) -> None:
    with agreement("a check of others, with a name that is longer than 48 bytes"):
        pass


# Every call whose ranks meet, by the name that errors have.
CALLS: dict[str, Callable[[nn.Module], object]] = {
    "forward of layer 5": lambda model: model[0](tokens(0)),
    "sync_gradients()": ms.sync_gradients,
    "clip_grad_norm_()": lambda model: ms.clip_grad_norm_(model, 1.0),
    "link()": ms.link,
    "foresee()": lambda model: model[0].experts.foresee([torch.zeros(4, 2, dtype=torch.int64)]),
    "update_router_bias()": ms.update_router_bias,
    "full_state_dict()": lambda model: model[0].full_state_dict(),
    "QuantileBalancer.update()": lambda model: model.balancer.update(),
    "global_aux_loss()": global_aux_loss,
    "whole_folder()": save_whole,
    "a check of others, with a name that is longer th": agree,
}


@on_ranks(2)
def test_ranks_in_any_two_different_calls() -> None:
    """Rank 0 makes one call and rank 1 another, for each pair of calls."""
    model, rank = balanced_model(), dist.get_rank()
    for layer in model:
        layer(tokens(rank)).sum().backward()
        layer.full_state_dict()
    for first, second in combinations(CALLS, 2):
        words = f"ranks met in different calls: rank 0: {first}", f"; rank 1: {second}"
        refused(partial(CALLS[(first, second)[rank]], model), *words)
    # Only the parameters, as torch's own function takes them.
    parameters = list(model.parameters())
    refused(
        lambda: save_whole(model) if rank else ms.clip_grad_norm_(parameters, 1.0),
        "rank 0: clip_grad_norm_(); rank 1: whole_folder()",
    )
    # Then ranks that go on alike go on right.
    model[0](tokens(rank)).sum().backward()


# --- different declarations ---------------------------------------------------------------------------------

CHANGES: dict[str, tuple[dict[str, Any], list[str]]] = {
    "sharding": ({"strategy": FSEP}, ["strategy.sharding.kind='ep'", "strategy.sharding.kind='fsep'"]),
    "slots": (
        {"strategy": EP.replace(sharding=ms.Ep(slots_per_rank=4))},
        ["strategy.sharding.slots_per_rank=None", "strategy.sharding.slots_per_rank=4"],
    ),
    "chunks": ({"strategy": EP.replace(overlap=ms.Pipelined(chunks=3))}, ["strategy.overlap.kind='pipelined'"]),
    "top_k": ({"shape": SHAPE.replace(top_k=1)}, ["ModelShape.top_k=2", "ModelShape.top_k=1"]),
    "width": ({"shape": SHAPE.replace(intermediate_size=16)}, ["ModelShape.intermediate_size=16"]),
    "experts": ({"shape": SHAPE.replace(num_experts=700)}, ["ModelShape.num_experts=700"]),
    "dtype": ({"shape": SHAPE.replace(dtype="bfloat16")}, ["ModelShape.dtype='bfloat16'"]),
    "seed": ({"seed": 3}, ["seed=0", "seed=3"]),
    "cluster": ({"cluster": ms.ClusterSpec(num_nodes=2, ranks_per_node=1)}, ["cluster.num_nodes=1", "num_nodes=2"]),
}


@on_ranks(2)
def test_each_declaration_that_differs_is_named() -> None:
    rank = dist.get_rank()
    for changes, words in CHANGES.values():
        given: dict[str, Any] = {"shape": SHAPE, "strategy": EP, "cluster": ms.ClusterSpec(ranks_per_node=2)}
        given |= changes if rank else {}
        layer = ms.MoELayer(given.pop("shape"), given.pop("strategy"), **given)
        refused(partial(layer, tokens(rank)), "ranks declare layer 0 differently: rank 0: ", *words)


@on_ranks(2)
def test_links_that_differ_are_named() -> None:
    rank = dist.get_rank()
    refused(lambda: ms.link(layers()[: 2 - rank]), "ranks 0 and 1 link models that differ in layer 7.")
    refused(lambda: ms.link(layers(FSEP if rank else EP)), "ranks 0 and 1 link models that differ in layer 5.")
    refused(lambda: ms.link(layers(), plan_timeout_s=1.0 + rank), "differ in plan_timeout_s (1.0 and 2.0)")


# Each entry changes one thing of rank 1, and has words of the error.
FORMS: dict[str, tuple[dict[str, Any], str]] = {
    "parts": ({"parts": ("gate", "up", "down")}, "outside.parts.gate_up=[16, 16]"),
    "transposed": ({"transposed": True}, "outside.transposed=False; rank 1: "),
    "activation": ({"activation": functional.gelu}, "activation=None; rank 1: outside.activation='gelu'"),
    "activation.limit": ({"activation": partial(clamped, limit=2.0)}, "activation=\"clamped {'limit': 1.0}\"; rank 1"),
    "weights_on": ({"weights_on": "activations"}, "weights_on='outputs'; rank 1: outside.weights_on='activations'"),
}


@on_ranks(2)
def test_each_form_that_differs_is_named() -> None:
    """All forms have equally many elements, so that they could travel."""
    H, I = SHAPE.hidden_size, SHAPE.intermediate_size
    sizes = {"gate_up": (2 * I, H), "gate": (I, H), "up": (I, H), "down": (H, I)}
    inputs = tokens(0)[:3], torch.tensor([[0, 1], [2, 3], [4, 5]]), torch.ones(3, 2)
    for name, (of_rank_1, words) in FORMS.items():
        usual = {"activation": partial(clamped, limit=1.0)} if name == "activation.limit" else {}
        options = dict(of_rank_1) if dist.get_rank() else usual
        parts = {part: torch.randn(3, *sizes[part]) for part in options.pop("parts", ("gate_up", "down"))}
        if options.get("transposed"):
            parts = {part: tensor.mT for part, tensor in parts.items()}
        experts = ms.Experts(SHAPE, EP, outside=ms.OutsideExperts(partial(dict, parts), **options))
        refused(partial(experts, *inputs), "ranks declare layer 0 differently: rank 0: ", words)


@on_ranks(2)
def test_strategies_may_have_different_names() -> None:
    ms.MoELayer(SHAPE, EP.replace(name=f"of rank {dist.get_rank()}"))(tokens(0))


# --- gradients ----------------------------------------------------------------------------------------------


class TwoInputs(nn.Module):
    """A model in which each rank uses another of its first layers."""

    def __init__(self, widths: tuple[int, int]) -> None:
        super().__init__()
        self.inputs = nn.ModuleList(nn.Linear(width, 16, bias=False) for width in widths)
        self.unused = nn.Linear(2, 2)
        self.moe = ms.MoELayer(SHAPE, EP)


def missing_gradients(widths: tuple[int, int]) -> list[list[float] | None]:
    torch.manual_seed(0)
    model, rank = TwoInputs(widths), dist.get_rank()
    model.moe(model.inputs[rank](torch.ones(4, widths[rank]))).square().sum().backward()
    expected = [None if each.weight.grad is None else each.weight.grad.clone() for each in model.inputs]
    ms.sync_gradients(model)
    assert model.unused.weight.grad is None
    # One rank alone has each of them, so that the sum is what it had.
    others = [torch.zeros_like(each.weight) for each in model.inputs]
    for each, other in zip(expected, others, strict=True):
        if each is not None:
            other.copy_(each)
        dist.all_reduce(other)
    assert all(torch.equal(each.weight.grad, other) for each, other in zip(model.inputs, others, strict=True))
    return [each.weight.grad.flatten().tolist() for each in model.inputs]


@pytest.mark.parametrize("widths", [(4, 4), (4, 5)], ids=["of one size", "of two sizes"])
def test_gradients_that_exist_on_some_ranks_only_are_summed(ranks: LocalRanks, widths: tuple[int, int]) -> None:
    first, second = ranks.run(missing_gradients, widths, num_ranks=2)
    assert first == second
    assert all(any(gradient) for gradient in first)


@on_ranks(1)
def test_headers_travel_on_the_device_of_the_experts() -> None:
    """Calls on a model whose experts are on a device from which no header can be read."""
    model = ms.MoELayer(SHAPE, EP).to("meta")
    with pytest.raises(NotImplementedError, match="Cannot copy out of meta tensor"):
        ms.sync_gradients(model)
    # Models are linked before their experts have memory.
    ms.link(model).close()


@on_ranks(2)
def test_parameters_that_differ_and_sparse_gradients_are_refused() -> None:
    rank = dist.get_rank()
    model = nn.ModuleDict({"moe": ms.MoELayer(SHAPE, EP), f"head_{rank}": nn.Linear(3, 2)})
    differing = "head_0.weight [2, 3] torch.float32, and head_1.weight [2, 3] torch.float32"
    refused(lambda: ms.sync_gradients(model), differing)
    model = nn.ModuleDict({"moe": ms.MoELayer(SHAPE, EP), "words": nn.Embedding(5, 2, sparse=rank == 1)})
    model["words"](torch.tensor([1])).sum().backward()
    with pytest.raises(ValueError, match=r"the gradient of words\.weight on rank 1 is sparse"):
        ms.sync_gradients(model)


# --- layers of one index --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["called before", "never called", "experts"])
@on_ranks(2)
def test_layers_of_one_index_are_told_apart(kind: str) -> None:
    """Two layers of one index, which rank 1 calls in the other order, after calls in one order or none."""
    first, second = (ms.MoELayer(SHAPE, EP) for _ in range(2))
    rank = dist.get_rank()
    pair = (first, second) if rank == 0 else (second, first)
    if kind == "called before":
        for layer in (first, second):
            layer(tokens(rank))
    chosen = torch.arange(2).repeat(32, 1), torch.full((32, 2), 0.5)
    called = partial(pair[0].experts, tokens(rank), *chosen) if kind == "experts" else partial(pair[0], tokens(rank))
    refused(called, "of the layers with this layer_index, which each need their own")


@on_ranks(2)
def test_layers_that_were_made_on_one_rank_alone_do_no_harm() -> None:
    """Rank 1 has made a layer that it dropped and one that it keeps, and all ranks make another."""
    group = dist.new_group([0, 1])
    kept = [ms.MoELayer(SHAPE, EP, group) for _ in range(2 * dist.get_rank())][1:]
    layer = ms.MoELayer(SHAPE, EP, group)
    layer(tokens(0)).sum().backward()
    assert len(kept) == dist.get_rank()
    dist.destroy_process_group(group)


def test_a_recomputation_knows_layers_of_one_index_apart() -> None:
    layers = [ms.MoELayer(SHAPE, EP) for _ in range(2)]
    order = iter((0, 1, 1, 0))
    x = tokens(0).requires_grad_()
    y = checkpoint(lambda x: layers[next(order)](layers[next(order)](x)) * 2.0, x, use_reentrant=False)
    with pytest.raises(RuntimeError, match="a checkpointed region must run the same layers both times"):
        y.square().sum().backward()


@pytest.mark.parametrize("call", [ms.PlanningState, ms.link])
def test_layers_of_one_index_are_refused(call: Callable[[nn.Module], object]) -> None:
    with pytest.raises(ValueError, match=r"layer_index values \[0, 0\] repeat; give every layer its own"):
        call(nn.ModuleList(ms.MoELayer(SHAPE, EP) for _ in range(2)))


# --- what a layer is made before, and what it is left with --------------------------------------------------


def made_before_the_group(layer: ms.MoELayer) -> None:
    """``layer`` was made in a process without a group."""
    model = nn.Sequential(layer)
    with torch.no_grad():
        model(tokens(0))
    words = r"layer 0 was made before torch\.distributed was initialised.*each of the 2 ranks would train experts of"
    clip = partial(ms.clip_grad_norm_, max_norm=1.0)
    for call in (lambda model: model(tokens(0)), ms.sync_gradients, clip, ms.link):
        with pytest.raises(RuntimeError, match=words):
            call(model)
    alone = ms.MoELayer(SHAPE, EP, dist.new_group([dist.get_rank()], use_local_synchronization=True))
    alone(tokens(0)).sum().backward()
    ms.sync_gradients(alone)


def test_a_layer_that_is_older_than_the_process_group(ranks: LocalRanks) -> None:
    ranks.run(made_before_the_group, ms.MoELayer(SHAPE, EP), num_ranks=2)


@pytest.mark.parametrize("comes", [False, True], ids=["never sent", "sent too late"])
@on_ranks(2)
def test_a_message_that_was_given_up_meets_none_of_the_next_call(comes: bool) -> None:
    """Rank 0 drops messages, which rank 1 sends too late or never; then both make the next call."""
    rank = dist.get_rank()
    channel = Channel(dist.group.WORLD, [0, 0], Recorder(rank), Meter(), identity=Identity(3))
    old, new = channel.tagged(8), channel.tagged(9)
    received, nothing, number = torch.zeros(1), torch.zeros(0), torch.full((1,), 10.0 + rank)
    # As many as a pipeline of chunks over several nodes has under way.
    for _ in range(6 * (rank == 0)):
        # Large enough that its data do not come along with its announcement.
        old.all_to_all(torch.zeros(100_000), nothing, [0, 100_000], [0, 0], lane="reshard")
    dist.barrier()
    for _ in range(6 * (rank == 1 and comes)):
        old.all_to_all(nothing, torch.ones(100_000), [0, 0], [100_000, 0], lane="reshard")
    counts = [0, 1] if rank == 0 else [1, 0]
    new.all_to_all(received, number, counts, counts, lane="reshard").wait()
    assert received.tolist() == [[11.0], [10.0]][rank]


@on_ranks(2, 90)
def test_a_step_behind_a_backward_that_failed_has_the_bits_of_any_other() -> None:
    """A backward that fails on each rank at another point, between two messages; then a step as if nothing had been."""
    rank = dist.get_rank()

    def fail(_: Tensor) -> None:
        raise ArithmeticError

    model = Stack(SHAPE, FSEP, num_layers=3)
    ms.link(model)
    for step in range(2):
        expected = Stack(SHAPE, FSEP, num_layers=3)
        expected.load_state_dict(model.state_dict())
        ms.link(expected)
        # Before and behind one layer's linear layer: no message is between the two.
        at: Any = (model.mixers[2].weight, model.mixers[2].bias)[rank]
        hook = at.register_hook(fail)
        with pytest.raises(ArithmeticError):
            model(tokens(rank + step)).sum().backward()
        hook.remove()
        model.zero_grad()
        expected.load_state_dict(model.state_dict())
        for each in (expected, model):
            each(tokens(rank)).sum().backward()
        assert_equal(gradients_of(model), gradients_of(expected))
        model.zero_grad()


@on_ranks(2)
def test_an_error_that_was_caught_does_not_come_again() -> None:
    """Gathers that no host waits for: one that fits no other, and another one behind it; then all ranks go on."""
    rank = dist.get_rank()
    channel = Channel(dist.group.WORLD, [0, 0], Recorder(rank), Meter())
    for number in (1 + rank, 1 + rank):
        channel.all_gather(torch.zeros(1), lane="counts", at=Position("recomputation", number), read=False)
    with pytest.raises(ms.RankMismatchError, match=r"rank 0: recomputation \(generation 1\); rank 1: "):
        channel.all_gather(torch.zeros(1), lane="counts")
    assert channel.all_gather(torch.full((1,), 1.0 + rank), lane="counts").tolist() == [[1.0], [2.0]]


@on_ranks(1)
def test_an_error_without_words_has_its_kind() -> None:
    channel = Channel(dist.group.WORLD, [0], Recorder(0), Meter())

    def fail() -> None:
        raise RuntimeError

    with pytest.raises(ms.CollectiveError, match=r"First error: RuntimeError$"):
        channel.guard("a call", fail)


# --- frames -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("num_bytes", [0, 8, PAYLOAD_BYTES // 8 * 8, PAYLOAD_BYTES + 8, 3 * PAYLOAD_BYTES])
@on_ranks(3)
def test_payloads_come_whole(num_bytes: int) -> None:
    """Payloads of any length and dtype come whole, in one message or two."""
    rank, size = dist.get_rank(), dist.get_world_size()
    channel = Channel(dist.group.WORLD, [0] * size, Recorder(rank), Meter())
    for dtype in (torch.uint8, torch.int32, torch.float64):
        values = [torch.arange(num_bytes // 8).to(dtype) + each for each in range(size)]
        assert torch.equal(channel.all_gather(values[rank], lane="counts"), torch.stack(values))
    lengths = [num_bytes * each for each in range(size)]
    found = channel.gather_bytes(bytes([rank]) * lengths[rank], Position(), torch.device("cpu"))
    with pytest.raises(ms.RankMismatchError, match=r"sent different sizes in values: rank 0: 8 bytes; rank"):
        channel.all_gather(torch.zeros(rank + 1, dtype=torch.int64), lane="counts")
    assert found == [bytes([each]) * length for each, length in enumerate(lengths)]
