"""A linked model runs faster and computes the same: prefetch, delayed gradients, planner thread, recomputation."""

from __future__ import annotations

import re
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from types import SimpleNamespace
from typing import Any

import harness
import pytest
import torch
import torch.distributed as dist
from conftest import assert_equal, on_ranks
from harness import Stack, assert_same_training, gradients_of, train
from shuffling_planner import ShufflingPlanner
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import moesys as ms
from moesys.balance.layout_schedule import PlanOutcome, PlanRequest
from moesys.lab.ranks.pool import LocalRanks, RankError
from moesys.layout import ExpertLayout
from moesys.moe import runtime as module

SHAPE = ms.ModelShape(hidden_size=24, intermediate_size=16, num_experts=6, top_k=2)
FSEP = ms.Strategy(
    name="fsep",
    sharding=ms.Fsep(slots_per_rank=3),
    balance=ms.Laer(),
    split=ms.FlowSplit(),
    predictor=ms.Ema(decay=0.5),
)
Checkpointed = Callable[[nn.Module, Tensor], Tensor]
BEHIND = FSEP.replace(sharding=ms.Fsep(slots_per_rank=3, prefetch_layers=2, delay_reshard=True))
LENT = FSEP.replace(name="lent", sharding=ms.Ep(slots_per_rank=4))
LENT_BEHIND = LENT.replace(sharding=LENT.sharding.replace(prefetch_layers=2, delay_reshard=True))
# What travels behind other layers is sliced over all ranks, or lent by its owner.
whose = pytest.mark.parametrize("behind", [BEHIND, LENT_BEHIND], ids=["fsep", "lent"])


def tokens_of(batch: int) -> Tensor:
    return harness.tokens_of(batch, SHAPE.hidden_size)


BY_NODE = ms.Fsep(slots_per_rank=3, restore="hierarchical", reshard="hierarchical")
LATE = FSEP.replace(balance=ms.Greedy(), late_slots=1, lag=2)
# Computing is dear beside bytes, so that fetching pays although there are few tokens.
DEAR = ms.ClusterSpec(num_nodes=2, ranks_per_node=(2, 1), expert_tflops=1e-6)
# A strategy whose experts travel on demand, and its ranks.
ON_DEMAND = {
    "by node, late slots": (LATE.replace(sharding=BY_NODE), DEAR),
    "flat": (FSEP, ms.ClusterSpec(ranks_per_node=3)),
    "lent": (LENT, ms.ClusterSpec(ranks_per_node=3)),
    "lag 0": (LATE.replace(late_slots=0, lag=0), DEAR),
}


@pytest.mark.parametrize(
    "name", [*ON_DEMAND][:1] + [pytest.param(name, marks=pytest.mark.slow) for name in [*ON_DEMAND][1:]]
)
def test_linking_changes_no_bit(ranks: LocalRanks, name: str) -> None:
    on_demand, cluster = ON_DEMAND[name]
    plain = ranks.run(train, SHAPE, on_demand, False, False, cluster, 2, num_ranks=cluster.num_ranks)
    ahead = on_demand.sharding.replace(prefetch_layers=2, delay_reshard=True)
    once = on_demand.replace(sharding=ahead, overlap=ms.Pipelined(chunks=2, node_dispatch="once"))
    variants = {"prefetched, delayed, recomputed, in chunks": (once, True, True)}
    if isinstance(ahead, ms.Fsep):
        kept = ahead.replace(reshard_after_forward=False)
        variants["kept after forward"] = (on_demand.replace(sharding=kept), True, False)
    else:
        variants["on demand"] = (on_demand, True, False)
    for variant, arguments in variants.items():
        found = ranks.run(train, SHAPE, *arguments, cluster, 2, num_ranks=cluster.num_ranks)
        for before, after in zip(plain, found, strict=True):
            assert torch.equal(after["norm"], before["norm"]), variant
            assert_same_training(after, before, variant)
    assert len({str(layouts) for layouts in plain[0]["layouts"]}) > 1, "the layout never changed"


def two_micro_batches(strategy: ms.Strategy, linked: bool, again: str) -> dict[str, Any]:
    """Two forwards under different layouts, then their backwards in reverse order. ``again``: what is recomputed."""
    model = Stack(SHAPE, strategy, num_layers=2)
    runtime = ms.link(model) if linked else None
    for moe in model.moe:
        moe.experts.schedule.source = ShufflingPlanner()
    run: Callable[[Tensor], Tensor] = partial(model, checkpointed=bool(again))
    if again == "blocks and the whole":
        run = partial(checkpoint, run, use_reentrant=False, context_fn=ms.recompute)
    inputs = [tokens_of(batch).requires_grad_() for batch in (0, 1)]
    losses, layouts = [], []
    for x in inputs:
        losses.append(run(x).square().sum())
        layouts.append([moe.last_plan.layout.expert_RS.tolist() for moe in model.moe])
    for loss in reversed(losses):
        loss.backward()
    if runtime is not None:
        runtime.close()
    assert [moe.experts.schedule.micro_batch for moe in model.moe] == [2, 2]
    return {"gradients": gradients_of(model), "dx": [x.grad for x in inputs], "layouts": layouts}


def recomputed_in_every_way(strategy: ms.Strategy) -> list[dict[str, Any]]:
    ways = ((False, ""), (False, "blocks"), (True, "blocks"), (False, "blocks and the whole"))
    return [two_micro_batches(strategy, *way) for way in ways]


@pytest.mark.parametrize(
    "strategy", [FSEP, BEHIND, LENT_BEHIND, ms.Strategy(name="ep")], ids=["fsep", "behind", "lent behind", "ep"]
)
def test_recomputation_in_reverse_order_changes_no_bit(ranks: LocalRanks, strategy: ms.Strategy) -> None:
    for plain, *recomputed in ranks.run(recomputed_in_every_way, strategy, num_ranks=3):
        for each in recomputed:
            assert each["layouts"] == plain["layouts"]
            assert_equal([each["dx"], each["gradients"]], [plain["dx"], plain["gradients"]])
        assert (plain["layouts"][0] != plain["layouts"][1]) == (strategy.name != "ep")


def inside_another(layer: nn.Module, x: Tensor) -> Tensor:
    inner = partial(checkpoint, layer, use_reentrant=False)
    return checkpoint(lambda x: inner(inner(x)), x, use_reentrant=False)


def by_reentrant(layer: nn.Module, x: Tensor) -> Tensor:
    return checkpoint(layer, x, use_reentrant=True)


@pytest.mark.parametrize("checkpointed", [inside_another, by_reentrant])
def test_recomputation_without_recorded_plans_is_refused(checkpointed: Checkpointed) -> None:
    y = checkpointed(ms.MoELayer(SHAPE, ms.Strategy(name="ep")), tokens_of(0).requires_grad_())
    with pytest.raises(RuntimeError, match=r"pass use_reentrant=False to torch\.utils\.checkpoint"):
        y.sum().backward()


def with_recorded_plans(layer: nn.Module, x: Tensor) -> Tensor:
    return checkpoint(layer, x, use_reentrant=False, context_fn=ms.recompute)


def by_itself(layer: nn.Module, x: Tensor) -> Tensor:
    return checkpoint(layer, x, use_reentrant=False)


@pytest.mark.parametrize("checkpointed", [with_recorded_plans, by_itself])
def test_recomputation_plans_nothing_and_remembers_nothing(checkpointed: Checkpointed) -> None:
    layer = ms.MoELayer(SHAPE, ms.Strategy(name="ep"))
    first, second = (checkpointed(layer, tokens_of(batch).requires_grad_()).sum() for batch in (0, 1))
    # Graphs that are kept run again, and backwards need not come in order.
    for y in (second, first, first):
        y.backward(retain_graph=True)
    assert layer.experts.schedule.micro_batch == 2


def test_evaluation_leaves_history_alone() -> None:
    layer = ms.MoELayer(SHAPE, FSEP.replace(sharding=ms.Fsep(slots_per_rank=6)))
    with torch.no_grad():
        layer(tokens_of(0))
    layer.eval()(tokens_of(0))
    assert layer.experts.schedule.micro_batch == 0


# --- linked layers have the bits of others, whatever passes there are ---


@contextmanager
def joined(model: nn.Module, linked: bool) -> Iterator[Any]:
    runtime = ms.link(model) if linked else None
    yield model
    if runtime is not None:
        runtime.close()


def broken_off_pass(strategy: ms.Strategy, linked: bool) -> Any:
    """A pass that ends after the first layer, when the second one's experts are on their way; then an ordinary step."""
    with joined(Stack(SHAPE, strategy, num_layers=2), linked) as model:
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        model(tokens_of(0)).square().sum().backward()
        model.moe[0](tokens_of(1))
        optimizer.step()
        optimizer.zero_grad()
        loss = model(tokens_of(2)).square().sum()
        loss.backward()
    return loss.detach(), gradients_of(model)


def failing_backward(strategy: ms.Strategy, linked: bool) -> Any:
    """A backward that raises half-way, with a gradient waiting to set off; then an ordinary step."""

    def fail(_: Tensor) -> None:
        raise ArithmeticError("on purpose")

    with joined(Stack(SHAPE, strategy, num_layers=3), linked) as model:
        if linked:
            handle = model.mixers[1].weight.register_hook(fail)
            with pytest.raises(ArithmeticError):
                model(tokens_of(0)).sum().backward()
            handle.remove()
            model.zero_grad()
            # Messages that are dropped while a slow peer still sends them would meet those of the next step.
            dist.barrier()
        model(tokens_of(0)).sum().backward()
    return gradients_of(model)


def skipped_layers(strategy: ms.Strategy, linked: bool, keep: bool = False) -> Any:
    """Passes that run other layers than the order they were learnt in: the first alone, then the second alone.

    ``keep``: rank 0 holds on to an old graph, as a log of losses would.
    """
    with joined(Stack(SHAPE, strategy, num_layers=2), linked) as model:
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        model(tokens_of(0)).square().sum().backward()
        kept = model.moe[0](tokens_of(1))
        kept.square().sum().backward(retain_graph=True)
        if not (keep and dist.get_rank() == 0):
            del kept
        optimizer.step()
        optimizer.zero_grad()
        y = model.moe[1](tokens_of(2))
        y.square().sum().backward()
    return y.detach(), gradients_of(model)


def shared_layer(strategy: ms.Strategy, linked: bool) -> Any:
    """One layer used twice in a pass, gradients of three micro-batches accumulated."""
    with joined(Stack(SHAPE, strategy, num_layers=2), linked) as model:
        for batch in range(3):
            x = model(tokens_of(batch))
            (x + model.moe[0](x)).square().sum().backward()
    return gradients_of(model)


def two_dtypes(strategy: ms.Strategy, linked: bool) -> Any:
    """The layer before brings experts ahead in the dtype of the layer that computes with them, not in its own."""
    shapes = SHAPE.replace(dtype="bfloat16"), SHAPE
    layers = [ms.MoELayer(shape, strategy, layer_index=index) for index, shape in enumerate(shapes)]
    found = []
    with joined(nn.Sequential(*layers), linked) as model:
        for batch in range(3):
            found.append(50 * model(tokens_of(batch)))
            found[-1].sum().backward()
    return [each.detach() for each in found], gradients_of(model)


def hooked(strategy: ms.Strategy, linked: bool, behind: bool, last_rank: int) -> Any:
    """A hook on the last layer's masters, or behind their accumulation, doubles gradients on ranks to ``last_rank``."""

    def double(leaf: Tensor) -> None:
        leaf.grad.mul_(2)

    with joined(Stack(SHAPE, strategy, num_layers=2), linked) as model:
        masters = model.moe[1].experts.masters
        if dist.get_rank() > last_rank:
            pass
        elif behind:
            masters.register_post_accumulate_grad_hook(double)
        else:
            masters.register_hook(lambda gradient: 2 * gradient)
        for batch in range(2):
            model(tokens_of(batch)).square().sum().backward()
    return gradients_of(model)


PASSES: dict[str, Callable[[ms.Strategy, bool], Any]] = {
    "broken off": broken_off_pass,
    "a backward that fails": failing_backward,
    "skipped layers": skipped_layers,
    "skipped layers, and rank 0 keeps a graph": partial(skipped_layers, keep=True),
    "a layer used twice": shared_layer,
    "two dtypes": two_dtypes,
    "a hook on one rank": partial(hooked, behind=False, last_rank=0),
    "a hook on all": partial(hooked, behind=False, last_rank=1),
    "a hook behind accumulation on one rank": partial(hooked, behind=True, last_rank=0),
    "a hook behind accumulation on all": partial(hooked, behind=True, last_rank=1),
}


def all_passes(behind: ms.Strategy, linked: bool) -> dict[str, Any]:
    return {name: run(behind.replace(balance=ms.Static()), linked) for name, run in PASSES.items()}


@whose
def test_links_change_no_bit_whatever_passes_there_are(ranks: LocalRanks, behind: ms.Strategy) -> None:
    """Experts and gradients that are left from a pass are not used, and hooks see delayed gradients."""
    linked, alone = (ranks.run(all_passes, behind, linked, num_ranks=2) for linked in (True, False))
    for found, wanted in zip(linked, alone, strict=True):
        for name, each in wanted.items():
            assert_equal(found[name], each, name)


class SlowPlan:
    """A plan that one rank gets too late."""

    def __init__(self, solution: ExpertLayout) -> None:
        self.solution = solution

    def ready(self, timeout_s: float) -> bool:
        time.sleep(timeout_s)
        return False

    def layout(self) -> ExpertLayout:
        return self.solution

    def cancel(self) -> None:
        self.cancelled = True


class SlowPlanner(ShufflingPlanner):
    def submit(self, request: PlanRequest) -> PlanOutcome:
        solved = super().submit(request)
        return SlowPlan(solved.solution) if dist.get_rank() == 1 else solved  # type: ignore[return-value]


def one_rank_plans_late() -> dict[str, Any]:
    model = Stack(SHAPE, BEHIND, num_layers=2)
    runtime = ms.link(model, plan_timeout_s=0.05)
    for moe in model.moe:
        moe.experts.schedule.source = SlowPlanner()
    for batch in range(3):
        model(tokens_of(batch)).sum().backward()
    result = {"layouts": [moe.last_plan.layout.expert_RS.tolist() for moe in model.moe], "events": runtime.events}
    runtime.close()
    return result


def test_a_late_plan_is_dropped_by_all_ranks_and_recorded(ranks: LocalRanks) -> None:
    results = ranks.run(one_rank_plans_late, num_ranks=3)
    assert all(result == results[0] for result in results)
    assert [(event.layer, event.micro_batch) for event in results[0]["events"]] == [(0, 1), (0, 2), (1, 1), (1, 2)]
    assert "came too late: layout kept" in results[0]["events"][0].what


def different_histories() -> None:
    model = Stack(SHAPE, FSEP, num_layers=1)
    ms.link(model)
    schedule = model.moe[0].experts.schedule
    schedule.layout = schedule.layout if dist.get_rank() else ExpertLayout(schedule.layout.expert_RS[::-1], 6)
    load = torch.ones(dist.get_world_size(), 6, dtype=torch.int64).numpy()
    schedule.observe(ms.planning.LoadMatrix(load))
    schedule.ready(time.monotonic() + 10.0)


def test_a_plan_from_another_history_is_refused(ranks: LocalRanks) -> None:
    with pytest.raises(RankError, match="rank 1 and rank 0 saw different loads of layer 0") as error:
        ranks.run(different_histories, num_ranks=3)
    assert "3 of 3 ranks failed" in str(error.value)


def groups_of_a_linked_model() -> list[object]:
    """The options of all groups that linking makes, where the backend has some."""
    made, new_group = [], dist.new_group

    def note(*args: Any, **kwargs: Any) -> dist.ProcessGroup:
        made.append(args[3])
        return new_group(*args[:3], **kwargs)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "on_urgent_stream", lambda backends: f"options of {backends}")
        patch.setattr(dist, "new_group", note)
        ms.link(Stack(SHAPE, FSEP, num_layers=1)).close()
    return made


def test_experts_travel_before_other_work_of_a_gpu(ranks: LocalRanks, monkeypatch: pytest.MonkeyPatch) -> None:
    assert ranks.run(groups_of_a_linked_model, num_ranks=2) == [["options of cpu:gloo,cuda:gloo", None]] * 2
    monkeypatch.setattr(dist, "ProcessGroupNCCL", SimpleNamespace(Options=dict), raising=False)
    assert module.on_urgent_stream("cpu:gloo,cuda:gloo") is None
    for backends in ("cuda:nccl", "cpu:gloo,cuda:nccl"):
        assert module.on_urgent_stream(backends) == {"is_high_priority_stream": True}


def test_a_model_without_moe_layers_cannot_be_linked() -> None:
    with pytest.raises(ValueError, match=r"the model has no ms\.Experts"):
        ms.link(torch.nn.Linear(2, 2))


@pytest.mark.parametrize("recomputed", [False, True])
def test_a_graph_can_be_walked_twice(recomputed: bool) -> None:
    layer = ms.MoELayer(SHAPE, ms.Strategy(name="ep"))
    run = partial(checkpoint, layer, use_reentrant=False, context_fn=ms.recompute) if recomputed else layer
    y = run(tokens_of(0).requires_grad_()).sum()
    y.backward(retain_graph=True)
    first = layer.experts.masters.grad.clone()
    layer.experts.masters.grad = None
    y.backward()
    assert torch.equal(layer.experts.masters.grad, first)


def test_delayed_gradients_go_nowhere_but_where_they_are_asked_for() -> None:
    layer = ms.MoELayer(SHAPE, BEHIND.replace(sharding=ms.Fsep(slots_per_rank=6, delay_reshard=True)))
    plain = ms.MoELayer(SHAPE, BEHIND.replace(sharding=ms.Fsep(slots_per_rank=6)))
    runtime = ms.link(layer)
    x = tokens_of(0).requires_grad_()
    torch.autograd.grad(layer(x).sum(), x)
    layer(x).sum().backward(inputs=[x])
    assert layer.experts.masters.grad is None
    (gradient,) = torch.autograd.grad(layer(x).sum(), layer.experts.masters)
    (expected,) = torch.autograd.grad(plain(x).sum(), plain.experts.masters)
    assert torch.equal(gradient, expected)
    layer(x).sum().backward()
    assert torch.equal(layer.experts.masters.grad, expected)
    runtime.close()


def test_closing_an_old_runtime_leaves_the_new_one_alone() -> None:
    layer = ms.MoELayer(SHAPE, ms.Strategy(name="ep"))
    old = ms.link(layer)
    old.close()
    new = ms.link(layer)
    old.close()
    assert layer.experts.link.lookahead is new
    new.close()


@on_ranks(2)
def test_a_plan_may_not_be_awaited_longer_than_collectives_are() -> None:
    with pytest.raises(ValueError, match=r"plan_timeout_s=1000\.0 is more than half of the group's time-out"):
        ms.link(Stack(SHAPE, FSEP, num_layers=1), plan_timeout_s=1000.0)


@on_ranks(2)
def test_late_plans_do_not_pile_up() -> None:
    """A planner takes longer than anybody waits: what is late is dropped, also when the runtime is closed."""
    model, solved = Stack(SHAPE, FSEP, num_layers=2), []
    runtime = ms.link(model, plan_timeout_s=0.01)
    solve = PlanRequest.solve
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(PlanRequest, "solve", lambda request: (solved.append(1), time.sleep(0.3), solve(request))[2])
        for batch in range(12):
            model(tokens_of(batch)).sum().backward()
        before = len(solved)
        runtime.close()
    assert runtime.events
    # Twenty-four plans were asked for; at most the one that was being made is finished.
    assert len(solved) <= before + 1


def restored_bytes() -> list[int]:
    """Bytes of experts that came to this rank for a frozen first layer and for a second one: after forward, and after
    backward.
    """
    model = nn.Sequential(ms.MoELayer(SHAPE, BEHIND), ms.MoELayer(SHAPE, BEHIND, layer_index=1))
    model[0].requires_grad_(False)
    runtime = ms.link(model)
    y = model(tokens_of(0))
    meters = [moe.experts.meter for moe in model]
    found = [sum(meter.wire_bytes["restore", "intra_node"] for meter in meters[:1])]
    found.append(meters[1].wire_bytes["restore", "intra_node"])
    y.sum().backward()
    found += [meter.wire_bytes["restore", "intra_node"] for meter in meters]
    runtime.close()
    return found


def test_a_frozen_layer_restores_nothing_for_a_backward(ranks: LocalRanks) -> None:
    for frozen, trained, frozen_after, trained_after in ranks.run(restored_bytes, num_ranks=2):
        assert 0 < frozen == frozen_after
        assert 0 < 2 * trained == trained_after


def closed_with_plans_under_way(linked: bool, timeout_s: float | None = None) -> dict[str, Any]:
    """Four micro-batches more after a runtime was closed on plans that take a while; rank 0's are the slowest."""
    model = Stack(SHAPE, FSEP.replace(lag=3), num_layers=2)
    runtime = ms.link(model, plan_timeout_s=timeout_s) if linked else None
    solve = PlanRequest.solve
    PlanRequest.solve = lambda *args, **kwargs: (time.sleep(0.1 - 0.05 * dist.get_rank()), solve(*args, **kwargs))[1]
    losses, layouts = [], []
    try:
        for batch in range(6):
            if batch == 2 and runtime is not None:
                runtime.close()
            if batch == 2:
                states = [moe.experts.get_extra_state() for moe in model.moe]
            losses.append(model(tokens_of(batch)).square().sum().item())
            layouts.append([moe.last_plan.layout.expert_RS.tolist() for moe in model.moe])
    finally:
        PlanRequest.solve = solve
    fresh = Stack(SHAPE, FSEP.replace(lag=3), num_layers=2)
    for moe, state in zip(fresh.moe, states, strict=True):
        moe.experts.set_extra_state(state)
        moe.experts.get_extra_state()
    resumed = []
    for batch in range(2, 6):
        fresh(tokens_of(batch))
        resumed.append([moe.last_plan.layout.expert_RS.tolist() for moe in fresh.moe])
    events = [event for moe in model.moe for event in moe.experts.schedule.events]
    return {"losses": losses, "layouts": layouts, "states": states, "events": events, "resumed": resumed}


def test_plans_under_way_are_used_after_closing(ranks: LocalRanks) -> None:
    plain = ranks.run(closed_with_plans_under_way, False, num_ranks=2)
    closed = ranks.run(closed_with_plans_under_way, True, num_ranks=2)
    assert closed == plain
    assert plain[0]["events"] == []
    assert plain[0]["resumed"] == plain[0]["layouts"][2:]
    assert plain[0]["layouts"][3] != plain[0]["layouts"][2], "no plan was under way"


def test_plans_that_closing_does_not_wait_for_are_late_on_all_ranks(ranks: LocalRanks) -> None:
    results = ranks.run(closed_with_plans_under_way, True, 0.01, num_ranks=2)
    for name in ("layouts", "events", "resumed"):
        assert results[0][name] == results[1][name], name
    # On a busy machine the first plan may be ready before its micro-batch begins.
    assert re.fullmatch(r"plan due at [345] came too late: layout kept", results[0]["events"][0].what)


@on_ranks(2)
def test_a_runtime_is_closed_after_its_groups_were_destroyed() -> None:
    # Runtimes of earlier tests in this process may be still to be collected.
    earlier = set(threading.enumerate())
    model = Stack(SHAPE, FSEP, num_layers=1)
    runtime = ms.link(model)
    model(tokens_of(0)).sum().backward()
    dist.destroy_process_group()
    runtime.close()
    runtime.close()
    names = [thread.name for thread in set(threading.enumerate()) - earlier]
    assert not {"moesys-planner", "moesys-heartbeat"} & {*names}
