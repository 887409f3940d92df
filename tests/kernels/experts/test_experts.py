"""The experts as one op: against autograd through plain torch, under compile and checkpoints, and what it keeps."""

import pytest
import torch
from conftest import assert_equal
from kernel_references import exact_activation
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

from moesys.kernels.experts.activations import GATED
from moesys.kernels.experts.experts import moe_experts

T, H, I, E, K = 11, 40, 24, 5, 3


def arguments(dtype=torch.float32, activation="swiglu", tokens=T):
    generator = torch.Generator().manual_seed(7)

    def normal(*shape, std=1.0):
        return (torch.randn(shape, generator=generator) * std).to(dtype).requires_grad_()

    U = 2 * I if GATED[activation] else I
    expert_TK = torch.randint(0, E + 1, (tokens, K), generator=generator)  # E: a choice that is not held here
    weight_TK = torch.rand(tokens, K, generator=generator).requires_grad_()
    return normal(tokens, H), expert_TK, weight_TK, normal(E, U, H, std=0.2), normal(E, H, I, std=0.2)


def factors():
    """LoRA on both matrices."""
    generator, sizes = torch.Generator().manual_seed(8), ((32, H), (2 * I, 32), (16, I), (H, 16))
    return [(torch.randn(E, *size, generator=generator) * 0.2).requires_grad_() for size in sizes]


def reference(x_TH, expert_TK, weight_TK, gate_up_EUH, down_EHI, activation="swiglu"):
    """Token by token, in float64."""
    rows = []
    for token, experts in enumerate(expert_TK.tolist()):
        total_H = torch.zeros(H, dtype=torch.float64)
        for k, expert in enumerate(experts):
            if expert < E:
                h_U = gate_up_EUH[expert].double() @ x_TH[token].double()
                y_H = down_EHI[expert].double() @ exact_activation(h_U, activation)
                total_H = total_H + weight_TK[token, k].double() * y_H
        rows.append(total_H)
    return torch.stack(rows)


def with_gradients(function, inputs, *more, factors=None):
    y_TH = function(*inputs, *more, **({"factors": factors} if factors else {}))
    dy_TH = torch.randn(y_TH.shape, generator=torch.Generator().manual_seed(3)).to(y_TH.dtype)
    learnt = [tensor for tensor in (*inputs, *(factors or ())) if tensor is not None and tensor.requires_grad]
    return [y_TH.detach(), *torch.autograd.grad(y_TH, learnt, dy_TH)]


def relative_error(found, expected):
    return float((found.double() - expected.double()).norm() / expected.double().norm())


@pytest.mark.parametrize("activation", list(GATED))
def test_output_and_every_gradient_in_float32(activation):
    inputs = arguments(activation=activation)
    for found, expected in zip(
        with_gradients(moe_experts, inputs, activation), with_gradients(reference, inputs, activation), strict=True
    ):
        assert relative_error(found, expected) < 1e-6


def adapted_reference(x_TH, expert_TK, weight_TK, gate_up_EUH, down_EHI, *, factors):
    def summed(matrices, inward, outward):
        return matrices if inward is None else matrices.double() + outward.double() @ inward.double()

    matrices = summed(gate_up_EUH, *factors[:2]), summed(down_EHI, *factors[2:])
    return reference(x_TH, expert_TK, weight_TK, *matrices)


@pytest.mark.parametrize("adapted", [(True, True), (True, False), (False, True)], ids=["both", "up", "down"])
@pytest.mark.parametrize("frozen", [True, False])
def test_output_and_every_gradient_with_lora(adapted, frozen):
    inputs, pairs = arguments(), [each if adapted[place // 2] else None for place, each in enumerate(factors())]
    for matrices in inputs[3:]:
        matrices.requires_grad_(not frozen)
    found, expected = (with_gradients(each, inputs, factors=pairs) for each in (moe_experts, adapted_reference))
    for one, other in zip(found, expected, strict=True):
        assert relative_error(one, other) < 1e-6


@pytest.mark.parametrize(("dtype", "most"), [(torch.bfloat16, 1.5e-2), (torch.float16, 2e-3)], ids=str)
def test_output_and_every_gradient_in_16_bits(dtype, most):
    inputs = arguments(dtype)
    for found, expected in zip(with_gradients(moe_experts, inputs), with_gradients(reference, inputs), strict=True):
        assert relative_error(found, expected) < most


def test_no_tokens():
    inputs = arguments(tokens=0)
    y_TH, dx_TH, dweight_TK, dgate_up, ddown = with_gradients(moe_experts, inputs)
    assert y_TH.shape == dx_TH.shape == (0, H)
    assert dweight_TK.shape == (0, K)
    assert not dgate_up.any()
    assert not ddown.any()


def test_a_compiled_graph_without_breaks_has_the_same_bits():
    inputs = arguments()
    compiled = torch.compile(moe_experts, fullgraph=True, backend="aot_eager")
    for pairs in (None, factors()):
        found, expected = (with_gradients(each, inputs, factors=pairs) for each in (compiled, moe_experts))
        assert_equal(found, expected)


def test_recomputation_has_the_same_bits():
    inputs = arguments()

    def recomputed(*tensors):
        return checkpoint(moe_experts, *tensors, use_reentrant=False)

    assert_equal(with_gradients(recomputed, inputs), with_gradients(moe_experts, inputs))


# torch 2.15 looks at the gradients of its own copies
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")
def test_the_ops_keep_their_promises_to_torch():
    x, expert, weight, gate_up, down = arguments()
    # rows of dropped choices are not written, and what is compared here must be
    by_columns = x.detach().t().contiguous().t().requires_grad_()
    for rows, pairs in ((x, [None] * 4), (by_columns, factors())):
        inputs = (rows, expert % E, weight, gate_up, down, "swiglu", "", *pairs)
        torch.library.opcheck(torch.ops.moesys.experts.default, inputs)


def test_what_is_kept_for_backward_is_x_and_h():
    """2·T·H + 4·T·K·I bytes in 16 bits, besides arguments that live anyway and int32 of the routing."""
    inputs = arguments(torch.bfloat16)
    kept = []

    def pack(tensor):
        kept.append(tensor)
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        moe_experts(*inputs)
    parameters = {tensor.data_ptr() for tensor in inputs[3:]}
    activations = [t for t in kept if t.is_floating_point() and t.data_ptr() not in parameters]
    sizes = sorted(tensor.numel() * tensor.element_size() for tensor in activations if tensor.dtype == torch.bfloat16)
    assert sizes == sorted([2 * T * H, 4 * T * K * I])
    assert [t.shape for t in activations if t.dtype == torch.float32] == [(T, K)]


class ZeroBytes(TorchDispatchMode):
    """Counts the bytes of tensors that are made as zeros."""

    num_bytes = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        made = func(*args, **(kwargs or {}))
        if "zero" in str(func) and isinstance(made, torch.Tensor):
            self.num_bytes += made.nbytes
        return made


def test_backward_makes_no_gradient_of_what_is_kept():
    """torch made zeros as large as h and the routing, which lived until the end of backward."""
    y_TH = moe_experts(*arguments())
    with ZeroBytes() as made:
        y_TH.sum().backward()
    assert made.num_bytes == 0


@pytest.mark.parametrize("learns", [False, True], ids=["incoming gradient is a constant", "it requires a gradient"])
def test_second_derivatives_are_refused(learns):
    x, expert, weight, gate_up, down = arguments()
    dy = torch.ones(T, H, requires_grad=learns)
    (dx,) = torch.autograd.grad(moe_experts(x, expert, weight, gate_up, down), x, dy, create_graph=True)
    for each in (x, weight, gate_up, down, *([dy] if learns else [])):
        with pytest.raises(RuntimeError, match="second derivatives through experts"):
            torch.autograd.grad(dx.sum(), each, retain_graph=True, allow_unused=True)


# Forward mode of torch 2.13 calls what it has deprecated itself, when it is first used.
@pytest.mark.filterwarnings("ignore:.*torch.jit.script:DeprecationWarning")
@pytest.mark.parametrize("which", ["x", "gate_up"])
def test_forward_mode_is_refused(which):
    """torch alone would give a tangent of zero, without an error, where no argument requires a gradient."""
    x, expert, weight, gate_up, down = (each.detach() for each in arguments())
    with torch.autograd.forward_ad.dual_level():
        x, gate_up = (
            torch.autograd.forward_ad.make_dual(each, torch.ones_like(each)) if name == which else each
            for name, each in (("x", x), ("gate_up", gate_up))
        )
        with pytest.raises(RuntimeError, match="forward-mode"):
            moe_experts(x, expert, weight, gate_up, down)


@pytest.mark.parametrize(
    ("place", "change", "name"),
    [
        (1, lambda factor: None, "gate_up"),
        (0, lambda factor: factor[:-1], "gate_up"),
        (3, lambda factor: factor[..., :8], "down"),
        (2, lambda factor: factor.bfloat16(), "down"),
    ],
    ids=["half a pair", "fewer experts", "another r", "another dtype"],
)
def test_factors_that_do_not_fit_are_refused(place, change, name):
    given = factors()
    given[place] = change(given[place])
    with pytest.raises(ValueError, match=f"factors of {name} are .* where 16 divides r, or both None"):
        moe_experts(*arguments(), factors=given)
