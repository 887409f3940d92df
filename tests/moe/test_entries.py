"""Public entries say what is wrong with their arguments, on every rank where others would wait, and compute nothing."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial, wraps
from typing import Any

import pytest
import torch
import torch.distributed as dist
from conftest import on_ranks
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate
from torch.utils.checkpoint import checkpoint

import moesys as ms
from moesys.lab.ranks.pool import LocalRanks
from moesys.overlap.experts_triton import TritonExperts

SHAPE = ms.ModelShape(hidden_size=32, intermediate_size=16, num_experts=4, top_k=2, initializer_range=0.3)
EP = ms.Strategy(name="ep")
T = 12


def inputs() -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    expert_TK = torch.stack([torch.randperm(4, generator=generator)[:2] for _ in range(T)])
    return torch.randn(T, 32, generator=generator), expert_TK, torch.rand(T, 2, generator=generator)


X, IDS, WEIGHTS = inputs()

NO_EXPERT = r"expert_TK has choices that name no expert \(1 of 24\), and the 4 experts of layer 0 have ids from 0 to 3"


@pytest.mark.parametrize(
    "strategy", [EP, EP.replace(reduction=ms.LayoutInvariant(token_block=32))], ids=["", "invariant"]
)
@pytest.mark.parametrize("invalid", [-1, 4, 2**40])
def test_ids_of_no_expert_are_refused_by_kernels_too(invalid: int, strategy: ms.Strategy) -> None:
    """The device counts, and the host reads its count."""
    experts = ms.Experts(SHAPE, strategy)
    experts.expert_compute = TritonExperts()
    expert_TK = IDS.clone()
    expert_TK[3, 1] = invalid
    with pytest.raises(ValueError, match=NO_EXPERT):
        experts(X, expert_TK, WEIGHTS)
    experts(X, IDS, WEIGHTS).sum().backward()


def test_int32_ids_and_an_expert_twice_are_right() -> None:
    experts, y = ms.Experts(SHAPE, EP), []
    for expert_TK in (IDS, IDS.int()):
        y.append(experts(X, expert_TK, WEIGHTS))
    assert torch.equal(*y)
    once, twice = IDS[:, :1].expand(-1, 2), experts(X, IDS[:, :1].expand(-1, 2), WEIGHTS)
    alone = ms.Experts(SHAPE.replace(top_k=1), EP)
    assert once.shape == IDS.shape
    torch.testing.assert_close(twice, alone(X, IDS[:, :1], WEIGHTS.sum(1, keepdim=True)))


def one_rank_is_wrong(kernels: bool, strategy: ms.Strategy) -> str:
    experts = ms.Experts(SHAPE, strategy, layer_index=3)
    if kernels:
        experts.expert_compute = TritonExperts()
    expert_TK = IDS.clone()
    if dist.get_rank() == 1:
        expert_TK[3, 0] = 17
    with pytest.raises(ValueError, match="rank 1") as error:
        experts(X, expert_TK, WEIGHTS)
    # No rank is behind the others.
    experts(X, IDS, WEIGHTS).sum().backward()
    return str(error.value)


@pytest.mark.parametrize(
    ("kernels", "strategy", "words"),
    [
        (False, EP, "expert_TK of rank 1 has the id 17, and the 4 experts of layer 3 have ids from 0 to 3"),
        (True, EP, "expert_TK of rank 1 has choices that name no expert (1 of 24), and the 4 experts of layer 3 have"),
        (
            True,
            EP.replace(overlap=ms.MegaKernel(programs=1, most_tokens=T, rows_cap=2.0)),
            "expert_TK of rank 1 has choices that name no expert (1)",
        ),
    ],
    ids=["on hosts", "routed on devices", "planned in a MegaKernel"],
)
def test_an_id_of_no_expert_on_one_rank_is_an_error_on_all(
    ranks: LocalRanks, kernels: bool, strategy: ms.Strategy, words: str
) -> None:
    assert all(words in said for said in ranks.run(one_rank_is_wrong, kernels, strategy, num_ranks=2, timeout_s=100))


def devices_in_different_layers(strategy: ms.Strategy) -> str:
    rank = dist.get_rank()
    model = nn.ModuleList(ms.MoELayer(SHAPE, strategy, layer_index=index) for index in (5, 7))
    ms.link(model)
    for layer in model:
        layer.experts.expert_compute = TritonExperts()
        layer(X)
    with pytest.raises(ms.RankMismatchError) as error:
        model[rank](X)
    return str(error.value)


@pytest.mark.parametrize(
    "overlap",
    [ms.Sequential(), ms.Pipelined(chunks=2), ms.MegaKernel(programs=1, most_tokens=T, rows_cap=2.0)],
    ids=lambda overlap: overlap.kind,
)
def test_devices_that_plan_in_different_layers(ranks: LocalRanks, overlap: ms.Sequential) -> None:
    for said in ranks.run(devices_in_different_layers, EP.replace(overlap=overlap), num_ranks=2, timeout_s=100):
        assert "forward of layer 5 (micro-batch 1, in training" in said
        assert "forward of layer 7 (micro-batch 1, in training" in said


def recomputed_behind_a_mismatch() -> list[float]:
    """Ranks have caught the error of different layers, and then recompute one of them."""
    rank = dist.get_rank()
    model = nn.ModuleList(ms.MoELayer(SHAPE, EP, layer_index=index) for index in (5, 7)).eval()
    for layer in model:
        layer.experts.expert_compute = TritonExperts()
    with pytest.raises(ms.RankMismatchError):
        model[rank](X)
    x = X.clone().requires_grad_()
    checkpoint(lambda x: model[0](x) * 2.0, x, use_reentrant=False).square().sum().backward()
    expected = X.clone().requires_grad_()
    (model[0](expected) * 2.0).square().sum().backward()
    return (x.grad - expected.grad).flatten().tolist()


def test_devices_count_their_calls_alike_behind_a_mismatch(ranks: LocalRanks) -> None:
    assert not any(map(any, ranks.run(recomputed_behind_a_mismatch, num_ranks=2, timeout_s=100)))


# --- construction -------------------------------------------------------------------------------------------


def test_no_layer_is_made_in_the_context_of_the_meta_device() -> None:
    with torch.device("meta"), pytest.raises(RuntimeError, match=r"experts cannot be made inside of torch\.device"):
        ms.MoELayer(SHAPE, EP)


@pytest.mark.parametrize("strategy", [EP, ms.Strategy(name="fsep", sharding=ms.Fsep(slots_per_rank=4))], ids=str)
@pytest.mark.parametrize("made", [True, False], ids=["made on meta", "moved"])
def test_experts_without_values_are_not_computed_with(strategy: ms.Strategy, made: bool) -> None:
    layer = ms.MoELayer(SHAPE, strategy, device="meta") if made else ms.MoELayer(SHAPE, strategy).to("meta")
    chosen = torch.zeros(len(X), SHAPE.top_k, dtype=torch.int64), torch.ones(len(X), SHAPE.top_k)
    state = ms.MoELayer(SHAPE, EP).full_state_dict()
    # Also where experts alone, or all but the router, have values.
    router = ms.MoELayer(SHAPE, strategy)
    router.router.to("meta")
    for call in (
        lambda: layer.experts(X, *chosen),
        *(partial(each, X) for each in (layer, router)),
        *(partial(each.load_full_state_dict, state) for each in (layer, router)),
    ):
        with torch.no_grad(), pytest.raises(RuntimeError, match=r"on the meta device, without values; call to_empty\("):
            call()
    weight_2HI = torch.nn.Parameter(torch.empty(SHAPE.num_experts, 8, 32, device="meta"))
    down = torch.nn.Parameter(torch.empty(SHAPE.num_experts, 32, 4, device="meta"))
    outside = ms.OutsideExperts(lambda: {"gate_up": weight_2HI, "down": down})
    experts = ms.Experts(SHAPE.replace(intermediate_size=4), EP, outside=outside)
    with torch.no_grad(), pytest.raises(RuntimeError, match="on the meta device, without values"):
        experts(X, *chosen)


@pytest.mark.parametrize("variable", ["WORLD_SIZE", "SLURM_STEP_NUM_TASKS", "OMPI_COMM_WORLD_SIZE", "PMI_SIZE"])
def test_ranks_without_a_process_group_are_noticed(monkeypatch: pytest.MonkeyPatch, variable: str) -> None:
    monkeypatch.setenv(variable, "2")
    layer = ms.MoELayer(SHAPE, EP)
    with torch.no_grad():
        layer(X)
    with pytest.warns(UserWarning, match=rf"a launcher started 2 ranks \({variable}\), but there is no process group"):
        layer(X).sum().backward()
    layer(X).sum().backward()  # said once


# --- the layer ----------------------------------------------------------------------------------------------


@on_ranks(2)
def test_a_layer_refuses_a_distributed_tensor_and_takes_turned_weights() -> None:
    mesh = DeviceMesh("cpu", [0, 1])
    with pytest.raises(TypeError, match="x is a DTensor; give this rank's own part"):
        ms.MoELayer(SHAPE, EP, mesh)(DTensor.from_local(X, mesh, [Replicate()]))
    # Routing weights may lie either way round.
    ms.Experts(SHAPE, EP, mesh)(X, IDS, WEIGHTS.T.contiguous().requires_grad_().T).sum().backward()


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("shared", [0, 1])
def test_a_float32_layer_computes_half_precision_in_float32(dtype: torch.dtype, shared: int) -> None:
    layer = ms.MoELayer(SHAPE.replace(n_shared_experts=shared), EP)
    half = X.to(dtype).requires_grad_()
    whole = half.detach().float().requires_grad_()
    found, expected = layer(half), layer(whole)
    assert found.dtype == dtype
    # Outputs of shared and routed experts are added in the input's dtype.
    assert shared or torch.equal(found, expected.to(dtype))
    torch.testing.assert_close(found, expected.to(dtype), rtol=2e-2, atol=2e-2)
    found.float().sum().backward()
    # Backward begins with a gradient in the input's precision.
    (gradient,) = torch.autograd.grad(expected.sum(), whole)
    torch.testing.assert_close(half.grad, gradient.to(dtype), rtol=2e-2, atol=2e-2)


# --- functions of a model -----------------------------------------------------------------------------------


def clipped(given: Callable[[nn.Module], Any]) -> list[Tensor]:
    layer = ms.MoELayer(SHAPE.replace(n_shared_experts=1), EP)
    layer(X).square().sum().backward()
    norm = ms.clip_grad_norm_(given(layer), 1e-3)
    return [norm, *(each.grad for each in layer.parameters())]


@pytest.mark.parametrize("given", [lambda layer: layer.parameters(), lambda layer: list(layer.parameters())])
def test_gradients_are_clipped_by_model_or_parameters(given: Callable[[nn.Module], object]) -> None:
    by_model = clipped(lambda layer: layer)
    assert all(torch.equal(one, other) for one, other in zip(clipped(given), by_model, strict=True))


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16], ids=str)
def test_clipping_scales_gradients_of_every_dtype_and_changes_nothing_else(dtype: torch.dtype) -> None:
    parameters = [nn.Parameter(torch.randn(5, 3, dtype=dtype)) for _ in range(2)]
    for each in parameters:
        each.grad = torch.randn_like(each)
    before = [each.grad.clone() for each in parameters]
    norm = ms.clip_grad_norm_(parameters, 1e6)
    assert all(torch.equal(each.grad, grad) for each, grad in zip(parameters, before, strict=True))
    torch.testing.assert_close(norm, torch.cat(before).double().norm().float())
    ms.clip_grad_norm_(parameters, 0.5)
    torch.nn.utils.clip_grad_norm_(others := [nn.Parameter(grad.clone()) for grad in before], 0.5)
    assert [each.grad for each in others] == [None, None]
    for each, grad in zip(parameters, before, strict=True):
        torch.testing.assert_close(each.grad, grad * (0.5 / (norm + 1e-6)).to(dtype))


class OnMatrices(torch.optim.Optimizer):
    """An optimizer under a name of its own that orthogonalises its parameters."""

    def __init__(self, groups: Any) -> None:
        super().__init__(groups, {})

    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for each in group["params"]:
                zeropower_via_newton_schulz(each.grad)


def zeropower_via_newton_schulz(gradient: Tensor) -> None:
    torch.linalg.svd(gradient)


class ByDecomposition(OnMatrices):
    def step(self, closure: Any = None) -> None:
        torch.linalg.svd(self.param_groups[0]["params"][0].grad)


class ByHelper(OnMatrices):
    def step(self, closure: Any = None) -> None:
        helped(self.param_groups[0]["params"][0].grad)


class ByInnerFunction(OnMatrices):
    def step(self, closure: Any = None) -> None:
        def ns5(gradient: Tensor) -> None:
            gradient @ gradient.T

        ns5(self.param_groups[0]["params"][0].grad)


class Descent(torch.optim.SGD):
    """An optimizer by element, with a method that is no function of Python's."""

    @wraps(len)
    def length(self) -> int:
        return 0


def helped(gradient: Tensor) -> Tensor:
    return torch.linalg.qr(gradient)


def test_optimizers_on_matrices_do_not_get_experts() -> None:
    layer = ms.MoELayer(SHAPE, EP)
    masters = layer.experts.masters
    layer(X).square().sum().backward()
    before = masters.detach().clone()
    kinds = (torch.optim.Muon, torch.optim.Adafactor, OnMatrices, ByDecomposition, ByHelper, ByInnerFunction)
    for optimizer in (*(kind([masters]) for kind in kinds), OnMatrices([{"params": [masters]}])):
        with pytest.raises(TypeError, match=rf"{type(optimizer).__name__} takes masters \[.*\] for one matrix, and"):
            optimizer.step()
    assert torch.equal(masters, before)
    # Other parameters, other optimizers, and groups that such an optimizer trains by element.
    muon = torch.optim.Muon([layer.router.weight])
    muon.step()
    OnMatrices([{"params": [masters], "use_muon": False}]).step()
    OnMatrices([{"params": [masters], "algorithm": "adamw"}]).step()
    torch.optim.AdamW([masters]).step()
    Descent([masters], lr=0.1).step()
    assert not torch.equal(masters, before)
    # A group that is added later is as any other.
    muon.add_param_group({"params": [masters]})
    with pytest.raises(TypeError, match="Muon takes masters"):
        muon.step()
