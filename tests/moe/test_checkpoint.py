"""Checkpoints: saved on any ranks under any sharding, loaded on any others, and a resumed run has the bits of another.

Sizes are uneven on purpose: P_e = 1275 parameters over 2 and 4 ranks, 6 experts over 4 (the last owns none).
"""

from __future__ import annotations

import copy
import io
import pickle
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from conftest import assert_equal
from harness import Stack, tokens_of, whole
from torch import Tensor, nn
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    get_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
    set_state_dict,
)

import moesys as ms
from moesys.lab.ranks.pool import LocalRanks
from moesys.moe.router_bias import update_router_bias

SHAPE = ms.ModelShape(
    hidden_size=25,
    intermediate_size=17,
    num_experts=6,
    top_k=2,
    scoring_func="sigmoid",
    n_shared_experts=1,
    router_bias_update_rate=0.01,
)
EP = ms.Strategy(name="ep")
# Room for all experts on one rank, so that one strategy fits every number of ranks.
FSEP = ms.Strategy(
    name="fsep",
    sharding=ms.Fsep(slots_per_rank=6),
    balance=ms.Greedy(),
    split=ms.FlowSplit(),
    predictor=ms.Ema(decay=0.5),
)
TIGHT = FSEP.replace(sharding=ms.Fsep(slots_per_rank=3))
BEHIND = FSEP.replace(sharding=ms.Fsep(slots_per_rank=3, prefetch_layers=2, delay_reshard=True))
STRATEGIES = {"ep": EP, "fsep": FSEP}

# torch says so whenever it saves or loads in one process, even where no_dist=True asks for just that.
alone = pytest.mark.filterwarnings("ignore:torch.distributed is disabled, unavailable or uninitialized:UserWarning")


def build(strategy: ms.Strategy, seed: int = 0) -> tuple[Stack, torch.optim.Optimizer]:
    model = Stack(SHAPE, strategy, num_layers=2, seed=seed)
    return model, torch.optim.Adam(model.parameters(), lr=1e-2)


def train(model: nn.Module, optimizer: torch.optim.Optimizer, steps: range) -> dict[str, list[Any]]:
    """Optimizer steps of two micro-batches each: losses and layouts."""
    record: dict[str, list[Any]] = {"losses": [], "layouts": []}
    for step in steps:
        optimizer.zero_grad()
        for batch in (2 * step, 2 * step + 1):
            loss = model(tokens_of(batch, SHAPE.hidden_size)).square().sum()
            loss.backward()
            record["losses"].append(loss.item())
            record["layouts"].append([moe.last_plan.layout.expert_RS.tolist() for moe in model.moe])
        ms.sync_gradients(model)
        ms.clip_grad_norm_(model, 1.0)
        optimizer.step()
        # Not after every step, so that the counts for the next update are part of what must be resumed.
        if step % 2:
            update_router_bias(model)
    return record


def everything(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Tensor]:
    """Parameters, buffers and optimizer state, whole, by name."""
    names = {parameter: name for name, parameter in model.named_parameters()}
    tensors = {name: whole(t.detach()).clone() for name, t in (*model.named_parameters(), *model.named_buffers())}
    for parameter, state in optimizer.state.items():
        tensors |= {f"{names[parameter]}/{key}": whole(value).clone() for key, value in state.items()}
    return tensors


def save(path: Path, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    model_state, optimizer_state = get_state_dict(model, optimizer)
    dcp.save({"model": model_state, "optimizer": optimizer_state}, checkpoint_id=path)


def load(path: Path, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    model_state, optimizer_state = get_state_dict(model, optimizer)
    state = {"model": model_state, "optimizer": optimizer_state}
    dcp.load(state, checkpoint_id=path)
    set_state_dict(model, optimizer, model_state_dict=state["model"], optim_state_dict=state["optimizer"])


# --- other ranks, other shardings -----------------------------------------------------------------------------


def train_and_save(path: Path) -> dict[str, dict[str, Tensor]]:
    """A checkpoint of each sharding, and what is in it."""
    saved = {}
    for name, strategy in STRATEGIES.items():
        model, optimizer = build(strategy)
        train(model, optimizer, range(2))
        save(path / name, model, optimizer)
        saved[name] = everything(model, optimizer)
    return saved


def load_each(path: Path) -> dict[tuple[str, str], dict[str, Any]]:
    """Each checkpoint loaded as each sharding, into a model that began elsewhere and has already run."""
    loaded = {}
    for source in STRATEGIES:
        for target, strategy in STRATEGIES.items():
            model, optimizer = build(strategy, seed=1)
            train(model, optimizer, range(1))
            load(path / source, model, optimizer)
            loaded[source, target] = {
                "tensors": everything(model, optimizer),
                "events": [event.what for moe in model.moe for event in moe.experts.schedule.events],
                "micro_batches": [moe.experts.schedule.micro_batch for moe in model.moe],
            }
            if source != target:
                train(model, optimizer, range(2, 3))
    return loaded


@alone
def test_a_checkpoint_of_four_ranks_loads_on_any_ranks_as_any_sharding(ranks: LocalRanks, tmp_path: Path) -> None:
    saved = ranks.run(train_and_save, tmp_path)
    assert any(name.endswith("moe.1.experts.masters/exp_avg_sq") for name in saved[0]["ep"])
    for before in saved[1:]:
        assert_equal(before["ep"], saved[0]["ep"])
    visits = {0: [load_each(tmp_path)], 2: ranks.run(load_each, tmp_path, num_ranks=2)}
    for num_ranks, results in visits.items():
        for rank, result in enumerate(results):
            for (source, target), after in result.items():
                where = f"{source} of 4 ranks as {target} on rank {rank} of {num_ranks}"
                assert_equal(after["tensors"], saved[0][source], where)
                assert after["micro_batches"] == [4, 4], where
                assert len(after["events"]) == 2 * (target == "fsep"), where
                if source == target == "fsep":
                    assert after["events"][0] == "history is of 4 ranks with 6 slots: begun anew"


def full_states(sources: list[dict[str, Tensor]] | None) -> list[dict[str, Tensor]]:
    """Each layer's state: of FSEP after two steps, or of EP after taking over what is given."""
    model, optimizer = build(FSEP if sources is None else EP)
    train(model, optimizer, range(2))
    for moe, source in zip(model.moe, sources or (), strict=False):
        moe.load_full_state_dict(source)
    return [moe.full_state_dict() for moe in model.moe]


def test_full_states_travel_between_ranks_and_shardings(ranks: LocalRanks) -> None:
    sources = ranks.run(full_states, None)[0]
    assert set(sources[0]) >= {"gate.weight", "gate.e_score_correction_bias", "experts.gate_up_proj"}
    for results in ([full_states(sources)], ranks.run(full_states, sources, num_ranks=3)):
        for result in results:
            for after, before in zip(result, sources, strict=True):
                assert_equal(after, before)


# --- stop and resume ------------------------------------------------------------------------------------------


def straight_and_resumed(path: Path, strategy: ms.Strategy, linked: bool) -> tuple[dict[str, Any], dict[str, Any]]:
    """Six steps at a stretch, and six with a stop after three."""

    def ended(model: Stack, optimizer: torch.optim.Optimizer, *records: dict[str, list[Any]]) -> dict[str, Any]:
        return {
            "losses": [loss for record in records for loss in record["losses"]],
            "layouts": [layouts for record in records for layouts in record["layouts"]],
            "tensors": everything(model, optimizer),
            "planning": [moe.experts.get_extra_state() for moe in model.moe],
            "events": [event for moe in model.moe for event in moe.experts.schedule.events],
        }

    def begin(seed: int) -> tuple[Stack, torch.optim.Optimizer]:
        model, optimizer = build(strategy, seed)
        if linked:
            ms.link(model)
        return model, optimizer

    def end(model: Stack) -> None:
        if linked:
            model.moe[0].experts.link.lookahead.close()

    model, optimizer = begin(0)
    straight = ended(model, optimizer, train(model, optimizer, range(6)))
    end(model)

    model, optimizer = begin(0)
    before = train(model, optimizer, range(3))
    save(path, model, optimizer)
    end(model)
    model, optimizer = begin(1)
    load(path, model, optimizer)
    resumed = ended(model, optimizer, before, train(model, optimizer, range(3, 6)))
    end(model)
    return straight, resumed


# Greedy leaves experts of so small a model at home.
LENT = EP.replace(sharding=ms.Ep(slots_per_rank=3), balance=ms.Eplb())
LENT_AHEAD = LENT.replace(sharding=LENT.sharding.replace(prefetch_layers=1, delay_reshard=True), lag=2)
# A strategy, and whether layers are linked.
RESUMED = {
    "a plan on its way": (BEHIND.replace(replan_every=3, lag=2), True),
    "alone": (TIGHT, False),
    "linked": (BEHIND, True),
    "ep with replicas": (LENT.replace(predictor=ms.WindowMean(steps=3)), True),
    "ep ahead": (LENT_AHEAD, True),
    "ep lent by node": (LENT.replace(sharding=LENT.sharding.replace(lend="hierarchical")), True),
}


@pytest.mark.parametrize(
    "name", [name if name == "a plan on its way" else pytest.param(name, marks=pytest.mark.slow) for name in RESUMED]
)
def test_a_resumed_run_has_the_same_bits(ranks: LocalRanks, tmp_path: Path, name: str) -> None:
    for straight, resumed in ranks.run(straight_and_resumed, tmp_path, *RESUMED[name], num_ranks=3):
        assert resumed["losses"] == straight["losses"]
        assert resumed["layouts"] == straight["layouts"]
        assert resumed["planning"] == straight["planning"]
        assert resumed["events"] == straight["events"] == []
        assert_equal(resumed["tensors"], straight["tensors"])
        changes = [str(layouts) for layouts in straight["layouts"][6:]]
        assert len(set(changes)) > 1, "the layout never changed after the stop, so its history was not tested"


# --- the forms in which people keep state ---------------------------------------------------------------------


def through_a_file(model: Stack, optimizer: torch.optim.Optimizer, weights_only: bool) -> tuple[Stack, Any]:
    buffer = io.BytesIO()
    torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, buffer)
    buffer.seek(0)
    file = torch.load(buffer, weights_only=weights_only)
    fresh, fresh_optimizer = build(FSEP, seed=1)
    fresh.load_state_dict(file["model"])
    fresh_optimizer.load_state_dict(file["optimizer"])
    return fresh, fresh_optimizer


def through_every_form(path: Path) -> dict[str, dict[str, Tensor]]:
    """One model's state through the forms that trainers use, each into a fresh model."""
    model, optimizer = build(FSEP)
    train(model, optimizer, range(2))
    results = {"before": everything(model, optimizer)}
    planning = [moe.experts.get_extra_state() for moe in model.moe]

    def check(name: str, model: Stack, optimizer: torch.optim.Optimizer) -> None:
        results[name] = everything(model, optimizer)
        assert [moe.experts.get_extra_state() for moe in model.moe] == planning, name

    # torchtitan: flattened optimizer state, and a model's and an optimizer's own calls.
    flat = StateDictOptions(flatten_optimizer_state_dict=True)
    dcp.save(get_model_state_dict(model) | get_optimizer_state_dict(model, optimizer, options=flat), checkpoint_id=path)
    fresh, fresh_optimizer = build(FSEP, seed=1)
    model_state = get_model_state_dict(fresh)
    optimizer_state = get_optimizer_state_dict(fresh, fresh_optimizer, options=flat)
    state = model_state | optimizer_state
    dcp.load(state, checkpoint_id=path)
    set_model_state_dict(fresh, {name: state[name] for name in model_state})
    set_optimizer_state_dict(fresh, fresh_optimizer, {name: state[name] for name in optimizer_state}, options=flat)
    check("flattened", fresh, fresh_optimizer)

    # Whole tensors on the first rank alone. Not set_state_dict: where the dicts are empty, torch leaves the model out.
    gathered = get_state_dict(model, optimizer, options=StateDictOptions(full_state_dict=True, cpu_offload=True))
    fresh, fresh_optimizer = build(FSEP, seed=1)
    from_first = StateDictOptions(full_state_dict=True, broadcast_from_rank0=True)
    set_model_state_dict(fresh, gathered[0], options=from_first)
    set_optimizer_state_dict(fresh, fresh_optimizer, gathered[1], options=from_first)
    check("full", fresh, fresh_optimizer)

    # Every rank its own file.
    check("a file a rank", *through_a_file(model, optimizer, weights_only=False))
    return results


def test_state_survives_every_form(ranks: LocalRanks, tmp_path: Path) -> None:
    for results in ranks.run(through_every_form, tmp_path / "dcp", num_ranks=2):
        before = results.pop("before")
        for name, after in results.items():
            assert_equal(after, before, name)
    dcp_to_torch_save(tmp_path / "dcp", tmp_path / "file.pt")
    file = torch.load(tmp_path / "file.pt", weights_only=True)
    assert torch.equal(file["moe.0.experts.masters"], before["moe.0.experts.masters"])
    assert isinstance(file["moe.0.experts._extra_state"], str)


def test_a_state_dict_is_a_safe_file_and_resumes() -> None:
    model, optimizer = build(FSEP)
    train(model, optimizer, range(3))
    fresh, fresh_optimizer = through_a_file(model, optimizer, weights_only=True)
    assert train(fresh, fresh_optimizer, range(3, 5)) == train(model, optimizer, range(3, 5))
    assert_equal(everything(fresh, fresh_optimizer), everything(model, optimizer))


@pytest.mark.parametrize("linked", [False, True])
@pytest.mark.parametrize("changes", [{}, {"replan_every": 3}, {"lag": 3}, {"lag": 0}], ids=str)
def test_a_copy_goes_on_as_the_original_does(linked: bool, changes: dict[str, int]) -> None:
    model, optimizer = build(FSEP.replace(**changes))
    runtime = ms.link(model) if linked else None
    train(model, optimizer, range(2))
    if runtime is not None:
        runtime.close()
    twin = pickle.loads(pickle.dumps(model)) if linked else copy.deepcopy(model)
    assert twin.moe[0].experts.token_channel is not model.moe[0].experts.token_channel
    for batch in (4, 5):
        x_TH = tokens_of(batch, SHAPE.hidden_size)
        assert torch.equal(twin(x_TH), model(x_TH))
    assert twin.moe[1].experts.get_extra_state() == model.moe[1].experts.get_extra_state()


def test_a_linked_layer_cannot_be_copied() -> None:
    model, _ = build(FSEP)
    runtime = ms.link(model)
    with pytest.raises(TypeError, match=r"only a layer without a process group and not linked .* state_dict\(\)"):
        copy.deepcopy(model)
    runtime.close()
    copy.deepcopy(model)
