"""What moesys uses of torch that is not public does what moesys believes: the first tests to run with a new torch."""

from __future__ import annotations

import copy
import inspect
from datetime import timedelta
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from torch.autograd import forward_ad
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Shard
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import (
    CheckpointPolicy,
    checkpoint,
    create_selective_checkpoint_contexts,
    set_checkpoint_early_stop,
)

from moesys import torch_private
from moesys.kernels.torch_internals import HAS_ONEDNN, onednn_product, refuse_function_transforms
from moesys.torch_private import (
    NO_BACKWARD,
    after_this_backward,
    checkpointed_region,
    current_backward,
    ends_recomputation,
    group_timeout_s,
    hide_backward,
    hooks_of,
    num_process_groups,
    unscale_beside_dtensors,
    unseen_by_selective_checkpoints,
    will_execute,
)
from moesys.verify.recording import grouped_product


@pytest.fixture
def group(tmp_path):
    """A group of this process alone."""
    store = dist.FileStore(str(tmp_path / "store"), 1)
    dist.init_process_group("gloo", store=store, rank=0, world_size=1, timeout=timedelta(seconds=77))
    yield dist.group.WORLD
    dist.destroy_process_group()


class Watched(torch.autograd.Function):
    """The identity; its backward calls ``watch`` with the node of the leaf before it."""

    @staticmethod
    def forward(ctx, x, watch):
        ctx.watch = watch
        return x.clone()

    @staticmethod
    def backward(ctx, grad):
        ctx.watch(ctx.next_functions[0][0])
        return grad, None


def seen_in_backward(watch, differentiate=torch.Tensor.backward):
    """What ``watch`` returns inside a backward to a leaf."""
    seen = []
    x = torch.ones(3, requires_grad=True)
    differentiate(Watched.apply(x, lambda node: seen.append(watch(node))).sum())
    return seen


def test_every_backward_has_a_number_of_its_own():
    assert current_backward() == NO_BACKWARD
    numbers = [seen_in_backward(lambda _: current_backward())[0] for _ in range(2)]
    assert NO_BACKWARD not in numbers
    assert numbers[0] != numbers[1]
    assert current_backward() == NO_BACKWARD


def test_a_checkpointed_region_is_known_when_it_runs_again():
    seen = []

    def region(x):
        seen.append(checkpointed_region())
        return x.sin()

    def mixed(x):
        return checkpoint(region, x, use_reentrant=False) + checkpoint(region, 2 * x, use_reentrant=False)

    assert checkpointed_region() is None
    mixed(torch.ones(3, requires_grad=True)).sum().backward()
    (first, again_1), (second, again_2), *repeated = seen
    assert (again_1, again_2) == (False, False)
    assert first is not second
    assert {id(frame) for frame, again in repeated if again} == {id(first), id(second)}
    with torch.autograd.graph.saved_tensors_hooks(lambda x: x, lambda x: x):
        assert checkpointed_region() is None


@pytest.mark.parametrize("early_stop", [True, False])
def test_a_recomputation_says_where_it_ends(early_stop):
    """Of three tensors that are saved, two are behind the first product."""
    asked = []
    assert not ends_recomputation(0)

    def run(x):
        y = x.exp()
        asked.append([ends_recomputation(count) for count in range(4)])
        return y.exp().sin()

    with set_checkpoint_early_stop(early_stop):
        y = checkpoint(run, torch.ones(3, requires_grad=True), use_reentrant=False)
    y.sum().backward()
    assert asked == [[False] * 4, [False, False, early_stop, False]]


def test_selective_checkpoints_do_not_see_what_other_modes_see():
    """The hidden call runs other operations in its second pass, and none is kept."""
    runs = []

    @unseen_by_selective_checkpoints
    def hidden(x):
        runs.append(1)
        return x.exp().sin() if len(runs) == 1 else x.exp().sin().clone()

    def run(x):
        return hidden(x).cos().sum()

    def contexts():
        return create_selective_checkpoint_contexts(lambda *_, **__: CheckpointPolicy.MUST_SAVE)

    x, kept = (torch.ones(3, requires_grad=True) for _ in range(2))
    with Seen() as seen:
        checkpoint(run, x, use_reentrant=False, context_fn=contexts).backward()
    run(kept).backward()
    assert torch.equal(x.grad, kept.grad)
    assert [seen.operations.count(name) for name in ("exp", "clone", "sum")] == [2, 1, 1]
    with pytest.raises(ValueError, match="inside"), Seen() as seen:
        unseen_by_selective_checkpoints(int)("inside")
    x.exp()
    assert seen.operations == []


class Seen(TorchDispatchMode):
    """Keeps the names of operations."""

    def __init__(self):
        super().__init__()
        self.operations = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.operations.append(func.overloadpacket.__name__)
        return func(*args, **(kwargs or {}))


def test_a_backward_comes_to_the_leaves_and_a_gradient_for_others_does_not():
    assert seen_in_backward(will_execute) == [True]
    other = torch.ones(1, requires_grad=True)
    assert seen_in_backward(will_execute, lambda loss: (loss + other.sum()).backward(inputs=[other])) == []

    x = torch.ones(3, requires_grad=True)
    seen = []
    y = Watched.apply(x, lambda node: seen.append(will_execute(node)))
    torch.autograd.grad(y.sum(), x)
    assert seen == [False]


def test_hooks_do_not_see_a_backward_that_is_hidden():
    class WithoutGradient(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return x.clone()

        @staticmethod
        def backward(ctx, dy):
            hide_backward(leaf, hide=True)

    leaf, seen = torch.ones(2, requires_grad=True), []
    on_gradient = leaf.register_hook(seen.append)
    leaf.register_post_accumulate_grad_hook(seen.append)
    WithoutGradient.apply(leaf).sum().backward()
    assert not seen
    for hook in hooks_of(leaf):
        hook(leaf.detach())
    assert len(seen) == 1
    hide_backward(leaf, hide=False)
    leaf.sum().backward()
    assert seen[2] is leaf
    on_gradient.remove()
    leaf.sum().backward()
    assert seen[3:] == [leaf]


def test_a_callback_comes_behind_the_whole_backward():
    order = []
    x = torch.ones(3, requires_grad=True)
    y = Watched.apply(x, lambda _: after_this_backward(lambda: order.append(("end", x.grad is not None))))
    z = Watched.apply(y, lambda _: order.append("later layer"))
    z.sum().backward()
    assert order == ["later layer", ("end", True)]


def test_the_time_out_of_a_group_is_told(group):
    assert group_timeout_s(group, "cpu") == 77


def test_plain_gradients_are_unscaled_beside_those_of_a_mesh(group):
    mesh = init_device_mesh("cpu", (1,))
    unscale_beside_dtensors()
    for largest, infinite in ((8.0, 0.0), (torch.inf, 1.0)):
        gradients = [torch.full((3,), 8.0), DTensor.from_local(torch.full((2,), largest), mesh, [Shard(0)])]
        found_inf = torch.zeros(1)
        torch._amp_foreach_non_finite_check_and_unscale_(gradients, found_inf, torch.tensor(0.25))
        assert found_inf.item() == infinite
        assert gradients[0].tolist() == [2.0] * 3


def test_a_unit_is_gathered_with_the_one_around_it(group):
    model = torch.nn.Sequential(torch.nn.Linear(3, 3), torch.nn.Linear(3, 3))
    x, whole = torch.randn(2, 3), copy.deepcopy(model)
    for each in (model[1], model):
        fully_shard(each, mesh=init_device_mesh("cpu", (1,)))
    assert torch_private.gather_with(model, model[1])
    gathered = []
    model[0].register_forward_hook(lambda *_: gathered.append(type(model[1].weight)))
    for each in (model, whole):
        each(x).square().sum().backward()
    assert gathered == [torch.nn.Parameter]
    for name, each in whole.named_parameters():
        torch.testing.assert_close(model.get_parameter(name).grad.full_tensor(), each.grad)
    assert not torch_private.gather_with(SimpleNamespace(_get_fsdp_state=object), model)


def test_process_groups_are_counted(group):
    assert num_process_groups() == 1
    dist.new_group()
    assert num_process_groups() == 2


def test_the_rendezvous_store_has_connections_of_its_own(group):
    store = torch_private.default_store()
    store.set("moesys/test", "here")
    assert store.clone().get("moesys/test") == b"here"


@pytest.mark.skipif(not HAS_ONEDNN, reason="this torch has no oneDNN")
def test_onednn_multiplies():
    x_MK, weight_NK = torch.randn(5, 32), torch.randn(24, 32)
    torch.testing.assert_close(onednn_product(x_MK, weight_NK), x_MK @ weight_NK.T)


# torch's own forward mode uses it
@pytest.mark.filterwarnings("ignore:.torch.jit.script. is:DeprecationWarning")
def test_transforms_are_known_where_they_run():
    x = torch.randn(3, requires_grad=True)

    def watch(x):
        refuse_function_transforms(x)
        return x.sum()

    watch(x).backward()
    watched = x.clone()
    watched.register_hook(refuse_function_transforms)
    for way in (
        lambda: torch.func.grad(watch)(x),
        lambda: torch.vmap(watch)(torch.ones(2, 3)),
        lambda: torch.func.vmap(lambda _: watch(x))(x),
        lambda: torch.autograd.grad(watched, x, torch.eye(3), is_grads_batched=True),
        lambda: watch(forward_ad.make_dual(x, x)),
    ):
        with forward_ad.dual_level(), pytest.raises(RuntimeError, match=r"transform of torch\.func"):
            way()


def test_casts_are_to_float64_in_backward_too():
    x = torch.ones(3, 4, dtype=torch.float64, requires_grad=True)
    weight = torch.full((2, 4, 5), 1 / 3, dtype=torch.float64, requires_grad=True)
    seen = []
    with torch_private.Float64Mode(grouped_product):
        y = x.to(torch.bfloat16).softmax(-1, dtype=torch.float32)
        y.register_hook(lambda gradient: seen.append(gradient.float().dtype))
        z = torch._grouped_mm(y, weight, torch.tensor([1, 3], dtype=torch.int32))
        z.sum().backward()
    assert (y.dtype, z.dtype, seen) == (torch.float64, torch.float64, [torch.float64])
    assert torch.equal(z, y @ weight[0])
    assert torch.equal(weight.grad[0], y[:1].detach().T @ torch.ones(1, 5, dtype=torch.float64))


def test_a_stream_can_be_held():
    assert list(inspect.signature(torch.cuda._sleep).parameters) == ["cycles"]
