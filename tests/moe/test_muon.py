"""``ms.Muon`` against ``torch.optim.Muon``, matrix by matrix, under every sharding; its bits, states and errors."""

from __future__ import annotations

from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from conftest import SWEEP, assert_equal, refusal
from harness import Stack, summed, tokens_of, whole
from muon_oracle import Oracle, of_flat
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

import moesys as ms
from moesys.lab.ranks.pool import LocalRanks
from moesys.moe import muon
from moesys.moe.masters import local_part

# Sizes are uneven: P_e = 1275 elements over 2 and 4 ranks, and 6 experts over 4.
SHAPE = ms.ModelShape(hidden_size=25, intermediate_size=17, num_experts=6, top_k=2, n_shared_experts=1)
PLANNED: dict[str, Any] = {"balance": ms.Greedy(), "split": ms.FlowSplit()}
STRATEGIES = {
    "ep": ms.Strategy(name="ep"),
    "lent": ms.Strategy(name="lent", sharding=ms.Ep(slots_per_rank=6), **PLANNED),
    "fsep": ms.Strategy(name="fsep", sharding=ms.Fsep(slots_per_rank=6), **PLANNED),
}
OPTIONS: dict[str, dict[str, Any]] = {
    "torch's defaults": {"lr": 0.02},
    "others": {"lr": 0.02, "momentum": 0.8, "nesterov": False, "weight_decay": 0.3, "ns_steps": 3},
    "as AdamW": {"lr": 0.01, "adjust_lr_fn": "match_rms_adamw"},
}
ADAMW = {"lr": 1e-3, "eps": 1e-3}
# Of parameters after ten steps, relative; 1e-7 on a CPU whose products do not depend on where a matrix lies.
DTYPES, BOUND = (torch.float32, torch.bfloat16), 1e-6


def trained(strategy: ms.Strategy, options: dict[str, Any], dtype: torch.dtype, steps: int) -> tuple[float, float]:
    """The largest error of a parameter after ``steps``, and how far the masters have gone."""
    model = Stack(SHAPE, strategy, num_layers=2)
    optimizer = ms.Muon(model, **options, adamw=ADAMW, ns_dtype=dtype)
    oracle = Oracle(model, of_flat(SHAPE.hidden_size, SHAPE.intermediate_size), ADAMW, dtype, **options)
    begin = whole(model.moe[0].experts.masters).detach().clone()
    for step in range(steps):
        model(tokens_of(step, SHAPE.hidden_size)).square().mean().backward()
        ms.sync_gradients(model)
        ms.clip_grad_norm_(model, 1.0)
        oracle.step()
        optimizer.step()
        optimizer.zero_grad()
    masters = [layer.experts.masters for layer in model.moe]
    kept = torch.tensor(sum(local_part(optimizer.state[each]["momentum_buffer"]).numel() for each in masters))
    assert summed(kept) == sum(each.numel() for each in masters), "momentum is not on one rank each"
    moved = float((whole(model.moe[0].experts.masters).detach() - begin).norm() / begin.norm())
    return max(oracle.errors().values()), moved


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
def test_one_process_does_what_torch_does_of_each_matrix(options: dict[str, Any], dtype: torch.dtype) -> None:
    error, moved = trained(STRATEGIES["ep"], options, dtype, STEPS)
    assert error < BOUND
    assert moved > 0.01 * STEPS


# Every sharding, number of ranks and dtype; the sweep has all of three. Two ranks divide the six experts under
# ``fsep``, and have gradients of whole ones; four do not.
QUICK = zip((2, 2, 1, 4), ("fsep", "lent", "ep", "fsep"), 2 * DTYPES, strict=True)
CELLS, STEPS = (list(product((1, 2, 4), STRATEGIES, DTYPES)), 10) if SWEEP else (list(QUICK), 4)


@pytest.mark.parametrize(("num_ranks", "name", "dtype"), CELLS)
def test_every_sharding_does_what_torch_does_of_each_matrix(
    ranks: LocalRanks, num_ranks: int, name: str, dtype: torch.dtype
) -> None:
    options = OPTIONS["torch's defaults"]
    for error, moved in ranks.run(trained, STRATEGIES[name], options, dtype, STEPS, num_ranks=num_ranks):
        assert error < BOUND
        assert moved > 0.01 * STEPS


class Outside(nn.Module):
    """Experts whose parameters lie in one of the forms that ``OutsideExperts`` takes; all but the first are halves in
    turns, [in, out], apart, or one for each expert.
    """

    def __init__(self, form: str) -> None:
        super().__init__()
        E, H, I = 4, 6, 5
        sizes = {"gate_up": (E, 2 * I, H), "down": (E, H, I)}
        options: dict[str, Any] = {}
        if form in ("interleaved", "transposed"):
            sizes = {"gate_up": (E, H, 2 * I), "down": (E, I, H)} if form == "transposed" else sizes
            options = {"activation": _in_turns, "transposed": form == "transposed"}
        elif form != "side by side":
            sizes = {"gate": (E, I, H), "up": (E, I, H), "down": (E, H, I)}
        turned, each = form == "read as .mT", form == "one for each"
        kept = {name: torch.randn(size) for name, size in sizes.items()}
        for name, tensor in kept.items():
            tensor = tensor.mT.contiguous() if turned else tensor
            parts = [nn.Parameter(one) for one in tensor] if each else [nn.Parameter(tensor)]
            setattr(self, name, nn.ParameterList(parts))

        def read() -> dict[str, Any]:
            lists = {name: getattr(self, name) for name in sizes}
            if each:
                return {name: [*of] for name, of in lists.items()}
            return {name: of[0].mT if turned else of[0] for name, of in lists.items()}

        shape = ms.ModelShape(hidden_size=H, intermediate_size=I, num_experts=E, top_k=2)
        self.experts = ms.Experts(shape, STRATEGIES["ep"], outside=ms.OutsideExperts(read, **options))
        self.form = form

    def cut(self, name: str, tensor: Tensor) -> list[Tensor]:
        matrices = [tensor] if tensor.ndim == 2 else [*tensor]
        if self.form in ("transposed", "read as .mT"):
            matrices = [matrix.T for matrix in matrices]
        if not name.startswith("gate_up"):
            return matrices
        if self.form == "side by side":
            return [half for matrix in matrices for half in matrix.chunk(2)]
        return [half for matrix in matrices for half in (matrix[0::2], matrix[1::2])]


def _in_turns(rows: Tensor) -> Tensor:
    return rows[..., 0::2].sigmoid() * rows[..., 1::2].clamp(max=3.0)


@pytest.mark.parametrize("form", ["side by side", "interleaved", "transposed", "apart", "read as .mT", "one for each"])
def test_experts_of_others_are_cut_into_their_own_matrices(form: str) -> None:
    torch.manual_seed(0)
    model = Outside(form)
    optimizer = ms.Muon(model, lr=0.02)
    oracle = Oracle(model, model.cut, {}, torch.float32, lr=0.02)
    assert len(optimizer.param_groups) == 1
    for _ in range(3):
        x_TH, expert_TK = torch.randn(9, 6), torch.rand(9, 4).topk(2).indices
        model.experts(x_TH, expert_TK, torch.ones(9, 2)).square().sum().backward()
        oracle.step()
        optimizer.step()
        optimizer.zero_grad()
    assert max(oracle.errors().values()) < BOUND


def test_an_activation_that_mixes_halves_otherwise_is_refused() -> None:
    model = Outside("interleaved")
    model.experts.outside = ms.OutsideExperts(model.experts.outside.read, activation=lambda rows: rows[..., :5].sin())
    with pytest.raises(ValueError, match="reads its rows of gate_up neither as"):
        ms.Muon(model)
    optimizer = ms.Muon(model, muon=lambda name, _: False if name.startswith("gate_up") else None)
    assert [group["algorithm"] for group in optimizer.param_groups] == ["muon", "adamw"]


def test_batches_on_gpus_are_the_matrices_one_by_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """In the code of GPUs, here on the CPU: batches that are padded, of views that are transposed."""
    group = ms.Muon(ms.MoELayer(SHAPE, STRATEGIES["ep"])).param_groups[0]
    wides = [torch.randn(5, 17, 25), torch.randn(1, 25, 17).mT, torch.randn(3, 17, 25)]
    wanted = [wide.clone() for wide in wides]
    muon.orthogonalize_(wanted, group)
    monkeypatch.setattr(muon, "_ONE_BY_ONE", ())
    muon.orthogonalize_(wides, group)
    for found, each in zip(wides, wanted, strict=True):
        torch.testing.assert_close(found, each, rtol=1e-5, atol=1e-6)
        singular_values = torch.linalg.svdvals(found)
        assert singular_values.max() / singular_values.min() < 2.0


def test_products_by_halves_are_the_products(monkeypatch: pytest.MonkeyPatch) -> None:
    group = ms.Muon(ms.MoELayer(SHAPE, STRATEGIES["ep"])).param_groups[0]
    halved = torch.randn(1, 1100, 1031, generator=torch.Generator().manual_seed(0))
    whole = halved.clone()
    muon.orthogonalize_([halved], group)
    monkeypatch.setattr(muon, "_HALVED_ROWS", 10**6)
    muon.orthogonalize_([whole], group)
    assert not torch.equal(halved, whole), "both are the same products"
    torch.testing.assert_close(halved, whole, rtol=0, atol=1e-5 * float(whole.abs().max()))


def work_of(strategy: ms.Strategy) -> int:
    """The cost of all rows that this rank owns, of parameters that no rank has whole."""
    optimizer = ms.Muon(Stack(SHAPE, strategy, num_layers=2))
    shares = [share for of_round in optimizer._rounds for share in of_round if share.matrices.channel.group is not None]
    return sum(share.counts[dist.get_rank()] * share.matrices.cost for share in shares)


def test_work_is_shared_out_over_layers(ranks: LocalRanks) -> None:
    """Four ranks have three of the twelve experts each, though no layer's six can be divided so."""
    work = ranks.run(work_of, STRATEGIES["fsep"])
    # A step on [17, 25] has 17² · (25 + 17 + 25) multiplications, and an expert three such matrices.
    assert work == [3 * 3 * 17 * 17 * (25 + 17 + 25)] * 4


def rows_at_once(strategy: ms.Strategy) -> tuple[bool, int]:
    """Returns whether owners get gradients of whole experts, and the most experts that travel in one message."""
    optimizer = ms.Muon(ms.MoELayer(SHAPE.replace(num_experts=18), strategy))
    shares = [share for of_round in optimizer._rounds for share in of_round if share.matrices.stacked]
    assert sum(sum(share.counts) for share in shares) == 18
    return shares[0].matrices.by_owner, max(sum(share.counts) for share in shares)


@pytest.mark.parametrize("num_ranks", [2, 4])
def test_a_message_has_a_few_experts_of_each_rank(ranks: LocalRanks, num_ranks: int) -> None:
    """Four of each; two ranks divide the experts, and four do not."""
    strategy = STRATEGIES["fsep"].replace(sharding=ms.Fsep(slots_per_rank=9))
    found = ranks.run(rows_at_once, strategy, num_ranks=num_ranks)
    assert found == [(num_ranks == 2, 4 * num_ranks)] * num_ranks


# --- bits -----------------------------------------------------------------------------------------------------------

INVARIANT = ms.ModelShape(hidden_size=37, intermediate_size=17, num_experts=6, top_k=2, n_shared_experts=1)


class Layers(nn.Module):
    """Layers without anything between them, whose gradients ``LayoutInvariant`` does not cover."""

    def __init__(self, strategy: ms.Strategy) -> None:
        super().__init__()
        self.moe = nn.ModuleList(ms.MoELayer(INVARIANT, strategy, layer_index=index) for index in range(2))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.moe:
            x = x + layer(x)
        return x


def steps_of_batch(model: nn.Module, optimizer: Any, numbers: range) -> list[float]:
    """Steps on the same 256 tokens, whatever the number of ranks that divide them."""
    num_ranks, rank = (dist.get_world_size(), dist.get_rank()) if dist.is_initialized() else (1, 0)
    norms = []
    for number in numbers:
        x_TH = torch.randn(256, INVARIANT.hidden_size, generator=torch.Generator().manual_seed(number))
        model(x_TH.tensor_split(num_ranks)[rank]).square().sum().backward()
        ms.sync_gradients(model)
        norms.append(ms.clip_grad_norm_(model, 1.0).item())
        optimizer.step()
        optimizer.zero_grad()
    return norms


def bits_of(strategy: ms.Strategy, dtype: torch.dtype) -> dict[str, Tensor]:
    """Parameters and momentum after some steps."""
    model = Layers(strategy.replace(reduction=ms.LayoutInvariant()))
    optimizer = ms.Muon(model, lr=0.02, ns_dtype=dtype)
    norms = steps_of_batch(model, optimizer, range(STEPS))
    found = {name: whole(p).detach().clone() for name, p in model.named_parameters()}
    states = {name: optimizer.state[p] for name, p in model.named_parameters()}
    found |= {f"{name}/{key}": whole(each).clone() for name, state in states.items() for key, each in state.items()}
    return found | {"norms": torch.tensor(norms)}


@pytest.mark.parametrize("dtype", DTYPES)
def test_no_bit_shows_ranks_layout_or_sharding(ranks: LocalRanks, dtype: torch.dtype) -> None:
    wanted = bits_of(STRATEGIES["ep"], dtype)
    assert wanted["moe.1.experts.masters/momentum_buffer"].dtype == torch.float32
    for num_ranks, name, of in CELLS:
        if of == dtype:
            for found in ranks.run(bits_of, STRATEGIES[name], dtype, num_ranks=num_ranks):
                assert_equal(found, wanted, f"{name} on {num_ranks} ranks")


# --- gradients of whole experts -------------------------------------------------------------------------------------

AHEAD = ms.Fsep(slots_per_rank=6, prefetch_layers=1, delay_reshard=True)
BEHIND = STRATEGIES["fsep"].replace(name="behind", sharding=AHEAD)


def gradients_of(strategy: ms.Strategy, muon: bool) -> dict[str, Any]:
    """Two micro-batches, and a step of AdamW, in a model of which a ``Muon`` was made or not."""
    model = Stack(SHAPE, strategy, num_layers=2)
    runtime = ms.link(model)
    optimizer = ms.Muon(model) if muon else None
    masters, calls = model.moe[1].experts.masters, []
    masters.register_hook(lambda gradient: calls.append("gradient"))
    masters.register_post_accumulate_grad_hook(lambda parameter: calls.append("accumulated"))
    for batch in range(2):
        model(tokens_of(batch, SHAPE.hidden_size)).square().mean().backward()
    ms.sync_gradients(model)
    norm = ms.clip_grad_norm_(model, 1.0)
    found = {"gradient": whole(masters.grad).clone(), "norm": norm, "calls": [*calls]}
    found["placements"] = str(masters.grad.placements)
    runtime.close()
    x = tokens_of(3, SHAPE.hidden_size)
    (sliced,) = torch.autograd.grad(model(x).square().mean(), masters)
    found["by itself"], found["placements by itself"] = whole(sliced), str(sliced.placements)
    torch.optim.AdamW(model.parameters(), lr=1e-3).step()
    del optimizer
    return found | {"masters": whole(masters).detach()}


@pytest.mark.parametrize("strategy", [STRATEGIES["fsep"], BEHIND], ids=lambda strategy: strategy.name)
def test_gradients_of_whole_experts_are_those_of_slices(ranks: LocalRanks, strategy: ms.Strategy) -> None:
    slices = ranks.run(gradients_of, strategy, False, num_ranks=2)
    wholes = ranks.run(gradients_of, strategy, True, num_ranks=2)
    for found, wanted in zip(wholes, slices, strict=True):
        assert (found["placements"], wanted["placements"]) == ("(Shard(dim=0),)", "(Shard(dim=1),)")
        assert found["placements by itself"] == "(Shard(dim=1),)"
        for what in ("gradient", "norm", "masters", "by itself"):
            assert_equal(found[what], wanted[what], what)
        assert found["calls"] == wanted["calls"] == ["gradient", "accumulated"] * 2


# --- checkpoints ----------------------------------------------------------------------------------------------------


def model_and_optimizer(strategy: ms.Strategy) -> tuple[Layers, ms.Muon]:
    model = Layers(strategy.replace(reduction=ms.LayoutInvariant()))
    return model, ms.Muon(model, lr=0.02)


def saved(path: Path) -> dict[str, Tensor]:
    """Saves after two steps, and returns the parameters after four."""
    model, optimizer = model_and_optimizer(STRATEGIES["ep"])
    steps_of_batch(model, optimizer, range(2))
    model_state, optimizer_state = get_state_dict(model, optimizer)
    dcp.save({"model": model_state, "optimizer": optimizer_state}, checkpoint_id=path)
    steps_of_batch(model, optimizer, range(2, 4))
    return {name: whole(p).detach() for name, p in model.named_parameters()}


def resumed(path: Path) -> dict[str, Tensor]:
    model, optimizer = model_and_optimizer(STRATEGIES["fsep"])
    model_state, optimizer_state = get_state_dict(model, optimizer)
    state = {"model": model_state, "optimizer": optimizer_state}
    dcp.load(state, checkpoint_id=path)
    set_state_dict(model, optimizer, model_state_dict=state["model"], optim_state_dict=state["optimizer"])
    steps_of_batch(model, optimizer, range(2, 4))
    return {name: whole(p).detach() for name, p in model.named_parameters()}


def test_a_checkpoint_of_two_ranks_under_ep_resumes_on_four_under_fsep(ranks: LocalRanks, tmp_path: Path) -> None:
    wanted = ranks.run(saved, tmp_path, num_ranks=2)[0]
    # Two ranks divide the six experts, and have gradients and momentum of whole ones.
    for num_ranks in (4, 2):
        for found in ranks.run(resumed, tmp_path, num_ranks=num_ranks):
            torch.testing.assert_close(found, wanted, rtol=1e-6, atol=1e-7)


def test_state_is_loaded_by_the_same_groups_only() -> None:
    model = ms.MoELayer(SHAPE, STRATEGIES["ep"])
    first, second = (ms.Muon(model, lr=0.02) for _ in range(2))
    adamw = torch.optim.AdamW([{"params": group["params"]} for group in first.param_groups])
    for optimizer in (first, adamw):
        model(torch.randn(20, 25)).square().sum().backward()
        optimizer.step()
    message = r"the state of experts\.masters has step, exp_avg, exp_avg_sq and no momentum_buffer: it is of another"
    with pytest.raises(ValueError, match=message):
        second.load_state_dict(adamw.state_dict())
    assert not second.state
    second.load_state_dict(first.state_dict())
    assert_equal(second.state_dict()["state"], first.state_dict()["state"])


def test_momentum_of_bfloat16_parameters_stays_float32() -> None:
    model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8)).bfloat16()
    first, second = (ms.Muon(model, lr=0.02) for _ in range(2))
    model(torch.randn(4, 8, dtype=torch.bfloat16)).sum().backward()
    first.step()
    second.load_state_dict(first.state_dict())
    assert second.state[model[0].weight]["momentum_buffer"].dtype == torch.float32
    assert_equal(second.state_dict()["state"], first.state_dict()["state"])


# --- what is trained by what ----------------------------------------------------------------------------------------


class Language(nn.Module):
    """A little of all that a language model has. The head is the embedding."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(32, 25)
        self.norm = nn.LayerNorm(25)
        self.blocks = nn.ModuleList([ms.MoELayer(SHAPE.replace(n_shared_experts=0), STRATEGIES["ep"])])
        self.convolution = nn.Conv1d(25, 25, 3)
        self.score = nn.Linear(25, 1)
        self.mixer = nn.Linear(25, 25)
        self.output = nn.Linear(25, 32, bias=False)
        self.output.weight = self.embedding.weight


SUMMARY = """\
Muon, experts: 1 parameter, 18 matrices, lr=0.02, weight_decay=0.1
  blocks.0.experts.masters: 6 × gate [17, 25], up [17, 25], down [25, 17]
Muon, other matrices: 1 parameter, 1 matrix, lr=0.02, weight_decay=0.1
  mixer.weight: [25, 25] (frozen)
AdamW: 9 parameters, lr=0.001, weight_decay=0.01
  embedding.weight: [32, 25]
  norm.weight: [25]
  norm.bias: [25]
  blocks.0.router.weight: [6, 25]
  convolution.weight: [25, 25, 3]
  convolution.bias: [25]
  score.weight: [1, 25]
  score.bias: [1]
  mixer.bias: [25]"""


def test_the_summary_says_what_is_trained_by_what() -> None:
    model = Language()
    model.mixer.weight.requires_grad_(False)
    assert ms.Muon(model, lr=0.02).summary() == SUMMARY
    moved = ms.Muon(model, muon=lambda name, _: {"blocks.0.router.weight": True, "mixer.weight": False}.get(name))
    assert "1 parameter, 1 matrix, lr=0.001, weight_decay=0.1\n  blocks.0.router.weight: [6, 25]" in moved.summary()
    assert "  mixer.weight: [25, 25] (frozen)\n  mixer.bias" in moved.summary()


def test_learning_rates_of_groups_follow_a_schedule() -> None:
    model = Language()
    optimizer = ms.Muon(model, lr=0.02, adjust_lr_fn="match_rms_adamw")
    assert [group["lr"] for group in optimizer.param_groups] == [0.02, 0.02, 0.02]
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1.0 if step == 0 else 0.0)
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    before = {name: each.clone() for name, each in model.named_parameters()}
    optimizer.step()
    first = {name: each.clone() for name, each in model.named_parameters()}
    assert all(not torch.equal(first[name], before[name]) for name in before)
    schedule.step()
    optimizer.step()
    assert_equal(dict(model.named_parameters()), first)


def test_an_expert_without_tokens_gets_the_update_of_its_momentum() -> None:
    layer = ms.MoELayer(SHAPE, STRATEGIES["ep"])
    optimizer = ms.Muon(layer, lr=0.02)
    masters = layer.experts.masters
    for experts in ((0, 1), (2, 3)):
        before = masters.detach().clone()
        expert_TK = torch.tensor([experts] * 8)
        layer.experts(torch.randn(8, 25), expert_TK, torch.ones(8, 2)).square().sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    assert masters.isfinite().all()
    decayed = before * (1 - 0.02 * 0.1)
    # Experts 4 and 5 have never had a token; 0 and 1 have had some in the step before.
    assert_equal(masters[4:].detach(), decayed[4:])
    assert not torch.equal(masters[:2], decayed[:2])


def of_few_rows() -> float:
    """The error of matrices of which one has fewer rows than there are ranks."""
    model = nn.Sequential(nn.Linear(8, 3, bias=False), nn.Linear(3, 8, bias=False))
    fully_shard(model, mesh=init_device_mesh("cpu", (dist.get_world_size(),)))
    optimizer = ms.Muon(model, lr=0.02)
    oracle = Oracle(model, lambda _, tensor: [tensor], {}, torch.float32, lr=0.02)
    for step in range(2):
        model(tokens_of(step, 8)).square().sum().backward()
        oracle.step()
        optimizer.step()
        optimizer.zero_grad()
    return max(oracle.errors().values())


def test_a_rank_may_have_no_row_of_a_matrix(ranks: LocalRanks) -> None:
    assert max(ranks.run(of_few_rows)) < BOUND


def with_part_of_a_gradient(dropped: bool) -> Tensor:
    """Masters after a step with a gradient that rank 1 has not, or has as zeros."""
    model = ms.MoELayer(SHAPE, STRATEGIES["fsep"])
    optimizer = ms.Muon(model, lr=0.02)
    model(tokens_of(0, SHAPE.hidden_size)).square().sum().backward()
    ms.sync_gradients(model)
    masters = model.experts.masters
    if dist.get_rank() == 1:
        masters.grad.to_local().zero_()
        masters.grad = None if dropped else masters.grad
    optimizer.step()
    return whole(masters).clone()


@pytest.mark.parametrize("num_ranks", [2, 4])
def test_a_gradient_that_some_ranks_have_is_zero_on_others(ranks: LocalRanks, num_ranks: int) -> None:
    found, wanted = (ranks.run(with_part_of_a_gradient, dropped, num_ranks=num_ranks) for dropped in (True, False))
    assert_equal(found, wanted)


def refusals() -> list[str]:
    """Of ranks that would train other matrices, or the same in another way."""
    model = ms.MoELayer(SHAPE, STRATEGIES["fsep"])
    rank = dist.get_rank()
    return [
        refusal(lambda: ms.Muon(model, muon=lambda name, _: False if rank and "masters" in name else None)),
        refusal(lambda: ms.Muon(model, ns_steps=5 + rank)),
    ]


def test_ranks_that_differ_are_refused(ranks: LocalRanks) -> None:
    for groups, steps in ranks.run(refusals, num_ranks=2):
        assert groups.startswith(
            "RankMismatchError: Muon(): ranks 0 and 1 would train differently: experts.masters [6, 1275] by Muon"
        )
        assert "'ns_steps': 5" in steps
        assert "'ns_steps': 6" in steps
