"""transformers' own models under strategies, over real ranks with FSDP2: what transformers' all_to_all computes."""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from conftest import assert_equal, refusal
from hf_models import FAMILIES, drawn, fsep, lent, loaded, saved_model, text, whole
from shuffling_planner import ShufflingPlanner
from torch import Tensor

import moesys as ms
from moesys.lab.ranks.pool import LocalRanks
from moesys.moe.experts import experts_of

EXPERTS = 8
TOLERANCE = 1e-5

EP = ms.Strategy(name="ep")
FOUR = {"fsdp_size": 4, "ep_size": 4}
OVERLAPS = (ms.Sequential(), ms.Pipelined(chunks=3))


@dataclass(frozen=True)
class Run:
    """How a model is trained: ``strategy`` None is transformers' own all_to_all. ``routing``: each rank's, replayed."""

    strategy: ms.Strategy | None
    sizes: dict[str, int] = field(default_factory=FOUR.copy)
    steps: int = 3
    micro_batches: int = 1
    checkpointing: bool = False
    linked: bool = False
    shuffled: bool = False
    mixed: bool = False
    autocast: bool = False
    compiled: str = ""
    routing: tuple[Tensor, ...] | None = None

    @property
    def ranks(self) -> int:
        return self.sizes.get("fsdp_size", 1) * self.sizes.get("tp_size", 1) * self.sizes.get("dp_replicate_size", 1)


def made(folder: Path, run: Run) -> Any:
    model = loaded(folder, run.strategy, run.sizes, fsdp_mixed_precision=run.mixed)
    if run.checkpointing:
        model.gradient_checkpointing_enable({"use_reentrant": False})
    if run.compiled:
        model.compile(backend=run.compiled)
    return model


def train(folder: Path, run: Run) -> dict[str, Any]:
    """A rank's losses and gradient norms of each step, whole gradients of the first, and the parameters at the end."""
    torch.manual_seed(0)
    model = made(folder, run)
    runtime = ms.link(model) if run.linked and run.strategy is not None else None
    for each in experts_of(model) if run.shuffled else ():
        each.schedule.source = ShufflingPlanner()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, foreach=False)
    batch = dist.get_rank() // run.sizes.get("tp_size", 1)
    losses, norms, first, layouts = [], [], {}, []
    for step in range(run.steps):
        for part in range(run.micro_batches):
            # ranks have different numbers of tokens
            ids = text(1000 * step + 100 * part + batch, num_rows=2 + batch % 2)
            routing = ms.replay_routing(model, run.routing[batch]) if run.routing else nullcontext()
            with routing, torch.autocast("cpu", torch.bfloat16, enabled=run.autocast):
                loss = model(input_ids=ids, labels=ids).loss
            loss.backward()
            losses.append(loss.item())
        gradients = {name: whole(p.grad) for name, p in model.named_parameters() if p.grad is not None}
        norms.append(torch.stack([gradient.double().norm() for gradient in gradients.values()]).norm().item())
        first = first or gradients
        layouts.append([each.last_plan.layout.expert_RS.tolist() for each in experts_of(model)])
        optimizer.step()
        optimizer.zero_grad()
    if runtime is not None:
        runtime.close()
    state = {name: whole(p) for name, p in model.named_parameters()}
    return {"losses": losses, "norms": norms, "gradients": first, "state": state, "layouts": layouts}


def train_all(folder: Path, runs: list[Run]) -> list[dict[str, Any]]:
    """Several in one visit to the ranks."""
    return [train(folder, run) for run in runs]


def results(ranks: LocalRanks, folder: Path, runs: list[Run]) -> list[dict[str, Any]]:
    """Of the first rank; losses are of all."""
    by_rank = ranks.run(train_all, folder, runs, num_ranks=runs[0].ranks, timeout_s=200.0)
    for found in zip(*by_rank, strict=True):
        found[0]["losses"] = [loss for one in found for loss in one["losses"]]
    return by_rank[0]


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """``saved_model`` for a family of models."""
    return partial(saved_model, tmp_path_factory.mktemp("models"), EXPERTS)


def assert_agree(found: dict[str, Any], wanted: dict[str, Any], tolerance: float = TOLERANCE) -> None:
    assert found["losses"] == pytest.approx(wanted["losses"], rel=tolerance)
    assert found["norms"] == pytest.approx(wanted["norms"], rel=tolerance)
    assert found["gradients"].keys() == wanted["gradients"].keys()
    for name, gradient in wanted["gradients"].items():
        error = (found["gradients"][name] - gradient).abs().max() / gradient.abs().max()
        assert error <= tolerance, (name, float(error))


def assert_same_bits(found: dict[str, Any], wanted: dict[str, Any]) -> None:
    assert_equal(*([each[kind] for kind in ("losses", "gradients", "state")] for each in (found, wanted)))


ALWAYS = ("qwen3_moe",)


@pytest.mark.parametrize(
    "family", [family if family in ALWAYS else pytest.param(family, marks=pytest.mark.slow) for family in FAMILIES]
)
def test_every_strategy_computes_what_all_to_all_does(ranks: LocalRanks, checkpoints: Any, family: str) -> None:
    """Losses, norms and every gradient over three steps; overlaps have the same bits; layouts change."""
    R = 2 if family in ALWAYS else 4
    sizes = {"fsdp_size": R, "ep_size": R}
    strategies = (lent(R), fsep(R)) if family in ALWAYS else (EP, lent(R), fsep(R))
    ours = [each.replace(overlap=way) for each in strategies for way in OVERLAPS]
    runs = [Run(None, sizes), *(Run(strategy, sizes, shuffled=strategy.name != "ep") for strategy in ours)]
    oracle, *found = results(ranks, checkpoints(family), runs)
    for sequential, pipelined in zip(found[::2], found[1::2], strict=True):
        assert_agree(sequential, oracle)
        assert_same_bits(pipelined, sequential)
    for run, changing in zip(runs[1:], found, strict=True):
        assert len({str(layouts) for layouts in changing["layouts"]}) == (3 if run.shuffled else 1)


REPLICAS = {"fsdp_size": 2, "dp_replicate_size": 2, "ep_size": 2}
BATCH_FOR_TWO = {"fsdp_size": 2, "tp_size": 2, "ep_size": 4}


# Replicas are two groups as well, which tests/hf/test_parallelize.py has always.
@pytest.mark.parametrize("kind", [pytest.param(lent, marks=pytest.mark.slow), fsep])
@pytest.mark.parametrize("sizes", [pytest.param(REPLICAS, marks=pytest.mark.slow), BATCH_FOR_TWO])
def test_on_every_mesh(ranks: LocalRanks, checkpoints: Any, sizes: dict[str, int], kind: Any) -> None:
    """Groups smaller than the world have layouts of their own, and gradients of replicas count once."""
    runs = [Run(strategy, sizes, steps=1) for strategy in (None, kind(sizes["ep_size"]))]
    oracle, found = results(ranks, checkpoints("qwen3_moe"), runs)
    assert_agree(found, oracle)


@pytest.mark.slow
def test_linking_recomputing_and_accumulating(ranks: LocalRanks, checkpoints: Any) -> None:
    # Layouts of its own: planners know that gradients are delayed.
    delayed = fsep(4, prefetch_layers=1, delay_reshard=True)
    ways = [{}, {"linked": True}, {"linked": True, "checkpointing": True}]
    runs = [Run(None, micro_batches=2), *(Run(delayed, micro_batches=2, **way) for way in ways)]
    oracle, plain, *others = results(ranks, checkpoints("qwen3_moe"), runs)
    assert_agree(plain, oracle)
    for other in others:
        assert other["layouts"] == plain["layouts"]
        assert_same_bits(other, plain)


def compiled_too(folder: Path, backend: str) -> tuple[list[dict[str, Any]], list[str]]:
    """What plain and compiled models make, and at what graphs broke."""
    sizes = {"fsdp_size": 2, "ep_size": 2}
    runs = [Run(strategy, sizes, compiled=way) for strategy in (lent(2), fsep(2)) for way in ("", backend)]
    torch._dynamo.utils.counters.clear()
    found = train_all(folder, runs)
    return found, list(torch._dynamo.utils.counters["graph_break"])


@pytest.mark.slow
@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
def test_compiled_models_train_alike(ranks: LocalRanks, checkpoints: Any, backend: str) -> None:
    """The graph breaks at the experts; all else is compiled."""
    for found, breaks in ranks.run(compiled_too, checkpoints("qwen3_moe"), backend, num_ranks=2, timeout_s=500.0):
        for plain, compiled in zip(found[::2], found[1::2], strict=True):
            assert_agree(compiled, plain)
        assert any("Experts.forward" in each for each in breaks)


def exact_gradients(family: str) -> tuple[dict[str, Tensor], tuple[Tensor, ...]]:
    """Gradients of the first step in one process in float64, and the routing of each of four ranks."""
    model, routing = drawn(family, EXPERTS, experts_implementation="eager").double(), []
    for rank in range(4):
        ids = text(rank, num_rows=2 + rank % 2)
        with ms.record_routing(model) as recorded:
            (model(input_ids=ids, labels=ids).loss / 4).backward()
        routing.append(recorded[0])
    return {name: p.grad for name, p in model.named_parameters() if p.grad is not None}, tuple(routing)


# tests/hf/test_routed_experts.py compares errors of experts in one process, in the usual run.
@pytest.mark.slow
@pytest.mark.parametrize("how", ["mixed", "autocast"])
@pytest.mark.parametrize("family", FAMILIES)
def test_in_bfloat16_errors_are_of_transformers(ranks: LocalRanks, checkpoints: Any, family: str, how: str) -> None:
    """Of the first step's gradients, all parameters together, beside the same in float64 with the same routing."""
    exact, routing = exact_gradients(family)
    options = {how: True, "steps": 1, "routing": routing}
    runs = [Run(strategy, **options) for strategy in (None, lent(4), fsep(4))]
    theirs, *ours = (found["gradients"] for found in results(ranks, checkpoints(family), runs))

    def error(found: dict[str, Tensor]) -> float:
        assert found.keys() == exact.keys()
        squares = [((found[name].double() - each).square().sum(), each.square().sum()) for name, each in exact.items()]
        wrong, right = (float(sum(side)) for side in zip(*squares, strict=True))
        return (wrong / right) ** 0.5

    for one in ours:
        assert 0 < error(one) <= 1.5 * error(theirs)


def saved(folder: Path, out: Path, strategy: ms.Strategy) -> None:
    loaded(folder, strategy, FOUR).save_pretrained(out)


def test_checkpoints_are_transformers_own(ranks: LocalRanks, checkpoints: Any, tmp_path: Path) -> None:
    """What four ranks save, one process loads without moesys, bit by bit; and so do other ranks."""
    from transformers import AutoModelForCausalLM

    folder = checkpoints("qwen3_moe")
    for strategy in (lent(4), fsep(4)):
        out = tmp_path / strategy.name
        ranks.run(saved, folder, out, strategy, timeout_s=100.0)
        before, after = (AutoModelForCausalLM.from_pretrained(path).state_dict() for path in (folder, out))
        assert before.keys() == after.keys()
        assert all(torch.equal(after[name], tensor) for name, tensor in before.items())


FEW = fsep(4).replace(sharding=ms.Fsep(slots_per_rank=1))


def refused(folder: Path, strategy: ms.Strategy, sizes: dict[str, int]) -> None:
    loaded(folder, strategy, sizes)


@pytest.mark.parametrize(
    ("family", "strategy", "message"),
    [
        ("gpt_oss", EP.replace(overlap=ms.MegaKernel()), "overlap=MegaKernel, whose kernels compute SwiGLU without"),
        ("qwen3_moe", FEW, "slots_per_rank=1 gives 4 slots on 4 ranks for 8 experts; use at least 2"),
    ],
    ids=["mega kernels", "too few slots"],
)
def test_what_cannot_run_is_refused_on_every_rank(
    ranks: LocalRanks, checkpoints: Any, family: str, strategy: ms.Strategy, message: str
) -> None:
    for told in ranks.run(refusal, refused, checkpoints(family), strategy, FOUR, timeout_s=60.0):
        assert message in told
