"""What moesys uses of torch that is not public, each with what it needs of torch and what happens without it.

A new release of torch may change or drop any of these without notice: read this file first when moesys fails with one.
``tests/test_torch_private.py`` calls each. What kernels use is in ``moesys/kernels/torch_internals.py``. Beside these,
``MoELayer`` overrides ``nn.Module._apply``, which every module's ``to`` calls, to move its masters too.
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import wraps
from typing import Any, ParamSpec, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch._subclasses.fake_tensor import is_fake
from torch.autograd import Variable
from torch.utils._python_dispatch import TorchDispatchMode

NO_BACKWARD = -1
MOST_CYCLES_PER_S = 3e9  # No GPU has a faster clock.

P = ParamSpec("P")
T = TypeVar("T")


def current_backward() -> int:
    """Returns a number for the backward pass that runs in this thread, ``NO_BACKWARD`` outside of one.

    Needs ``torch._C._current_graph_task_id``: -1 outside of a backward, another number in each. Without it the first
    forward of a router or layer in training raises AttributeError. There is no way around it, as a recomputation that
    is not noticed would plan anew, and hang the other ranks.
    """
    return torch._C._current_graph_task_id()


def checkpointed_region() -> tuple[Any, bool] | None:
    """Returns an object that stands for the innermost non-reentrant ``torch.utils.checkpoint`` that runs, the same in
    its first pass and whenever it runs again, and whether it runs again; None outside of one.

    Needs ``torch._C._autograd._top_saved_tensors_default_hooks``, and that the hooks of a checkpoint close over its
    ``frame``, those of a recomputation over ``target_frame_ref``. Without it None: who checkpoints must then pass
    ``context_fn=moesys.recompute``, or a recomputation raises RuntimeError.
    """
    seen = _seen_by_hooks()
    if "target_frame_ref" in seen:
        return seen["target_frame_ref"](), True
    return (seen["frame"], False) if "frame" in seen else None


def ends_recomputation(num_saved: int) -> bool:
    """Returns whether the innermost checkpoint that runs again stops when ``num_saved`` more tensors are saved for
    backward: then nobody reads what comes of them.

    Needs what ``checkpointed_region`` needs, that the hooks of a recomputation close over ``gid`` too, and of a frame
    ``early_stop``, ``recomp_counter`` and ``weak_holders``. Without them False: all of a layer runs again.
    """
    seen = _seen_by_hooks()
    if not {"target_frame_ref", "gid"} <= seen.keys():
        return False
    frame = seen["target_frame_ref"]()
    if not all(hasattr(frame, name) for name in ("early_stop", "recomp_counter", "weak_holders")):
        return False
    return bool(frame.early_stop) and frame.recomp_counter[seen["gid"]] + num_saved == len(frame.weak_holders)


def _seen_by_hooks() -> Mapping[str, Any]:
    """Returns what the innermost hooks of saved tensors close over, by name."""
    hooks = torch._C._autograd._top_saved_tensors_default_hooks(True)
    pack = None if hooks is None else inspect.unwrap(hooks[0])
    return inspect.getclosurevars(pack).nonlocals if inspect.isfunction(pack) else {}


def unseen_by_selective_checkpoints(call: Callable[P, T]) -> Callable[P, T]:
    """Hides the operations of ``call`` from selective activation checkpointing, which then runs it again as a whole:
    it takes for granted that a recomputation has the operations of the first pass. Other dispatch modes see them.

    Needs ``torch._C._len_torch_dispatch_stack``, ``_pop_mode`` and ``_push_mode`` of ``torch.utils._python_dispatch``,
    and ``_CachingTorchDispatchMode`` and ``_CachedTorchDispatchMode`` of ``torch.utils.checkpoint``. Without the first,
    the first forward raises AttributeError; without the others, a forward under any dispatch mode raises ImportError.
    """

    @wraps(call)
    def called(*args: P.args, **kwargs: P.kwargs) -> T:
        if torch.compiler.is_compiling() or not torch._C._len_torch_dispatch_stack():
            return call(*args, **kwargs)
        with _without_selective_checkpoints():
            return call(*args, **kwargs)

    return called


@contextmanager
def _without_selective_checkpoints() -> Iterator[None]:
    from torch.utils._python_dispatch import _pop_mode, _push_mode
    from torch.utils.checkpoint import _CachedTorchDispatchMode, _CachingTorchDispatchMode

    # The innermost mode comes first.
    modes = [_pop_mode() for _ in range(torch._C._len_torch_dispatch_stack())]
    others = [mode for mode in modes if not isinstance(mode, _CachedTorchDispatchMode | _CachingTorchDispatchMode)]
    for mode in reversed(others):
        _push_mode(mode)
    try:
        yield
    finally:
        for _ in others:
            _pop_mode()
        for mode in reversed(modes):
            _push_mode(mode)


def will_execute(node: Any) -> bool:
    """Returns whether the backward that runs comes to ``node`` of the graph, the accumulation into a leaf's ``.grad``.

    Needs ``torch._C._will_engine_execute_node``, which raises RuntimeError for leaves under ``torch.autograd.grad``.
    Without it the first backward raises AttributeError. Answering False instead would be right, but never delay a
    gradient: ``delay_reshard=True`` would gain nothing.
    """
    try:
        return torch._C._will_engine_execute_node(node)
    except RuntimeError:
        return False


def hooks_of(parameter: Tensor, *, behind: bool = False) -> list[Callable[[Tensor], Tensor | None]]:
    """Returns the hooks of a leaf on its gradient, or those ``behind`` its accumulation, which get the leaf.

    Needs ``Tensor._backward_hooks`` and ``Tensor._post_accumulate_grad_hooks``. Without them there seem to be none, and
    hooks do not see delayed gradients.
    """
    hooks = getattr(parameter, "_post_accumulate_grad_hooks" if behind else "_backward_hooks", None)
    return list(hooks.values()) if hooks else []


def hide_backward(leaf: Tensor, *, hide: bool) -> None:
    """Hides the backward that runs from the hooks of a leaf whose gradient comes later, or does so no longer: autograd
    calls them also where the gradient is missing. Hooks that are called with a gradient are called in any case.

    Needs what ``hooks_of`` does. Without it hooks of leaves with delayed gradients are called with None.
    """
    for table in (leaf._backward_hooks, getattr(leaf, "_post_accumulate_grad_hooks", None)):
        if table:
            leaf.moesys_hides_backward = hide  # type: ignore[attr-defined]
            for key, hook in table.items():
                if not hasattr(hook, "moesys_may_pass"):
                    # The same key, by which users remove their hook.
                    table[key] = _passing_where_hidden(hook)


def _passing_where_hidden(hook: Callable[[Tensor], Tensor | None]) -> Callable[[Tensor | None], Tensor | None]:
    @wraps(hook)
    def called(value: Tensor | None) -> Tensor | None:
        """Calls the hook. ``value``: the gradient, or the leaf for hooks behind its accumulation."""
        return None if value is None or getattr(value, "moesys_hides_backward", False) else hook(value)

    called.moesys_may_pass = True  # type: ignore[attr-defined]
    return called


def after_this_backward(callback: Callable[[], None]) -> None:
    """Calls ``callback`` when the backward that runs is through, before ``backward()`` returns.

    Needs ``Variable._execution_engine.queue_callback``, which torch's own FSDP and DDP use. Without it backward raises
    AttributeError where gradients are delayed; ``delay_reshard=False`` does not need it.
    """
    Variable._execution_engine.queue_callback(callback)


def gather_with(owner: Any, part: Any) -> bool:
    """Makes the FSDP unit of ``part`` gather its parameters and reduce their gradients whenever that of ``owner``, a
    module around it, does, instead of when ``part`` runs, which may be on some ranks only. Returns whether it does.

    Needs ``FSDPModule._get_fsdp_state`` and its ``_fsdp_param_groups``, over all of which the hooks of a unit go.
    Without them False: ranks then wait for each other if they differ in the parts that they use.
    """
    mine, others = (getattr(each._get_fsdp_state(), "_fsdp_param_groups", None) for each in (owner, part))
    if mine is None or others is None:
        return False
    # The first group that is gathered in backward brings the last of the unit before it, which has most.
    mine[:0] = others
    others.clear()
    return True


def default_store() -> dist.Store:
    """Returns the rendezvous store of the default process group, through which ranks say that they are alive.

    Needs ``torch.distributed.distributed_c10d._get_default_store``; the store has ``clone``, a connection of its own,
    since torch 2.10. Without it linking a model on several ranks raises AttributeError.
    """
    return dist.distributed_c10d._get_default_store()


def num_process_groups() -> int:
    """Returns how many process groups this process is in, the default one among them.

    Needs ``torch.distributed.distributed_c10d._world.pg_map``. Without it AttributeError when a local rank ends a run.
    """
    return len(dist.distributed_c10d._world.pg_map)


def is_registered(group: dist.ProcessGroup) -> bool:
    """Returns whether a process group has not been destroyed; as ``num_process_groups``, without which AttributeError
    in every forward of several ranks.
    """
    return group in dist.distributed_c10d._world.pg_map


def group_timeout_s(group: dist.ProcessGroup | None, device_type: str) -> float:
    """Returns the seconds after which collectives of the group give up; torch's default where a backend does not tell,
    and for one rank alone.

    Needs ``ProcessGroup._get_backend`` and its ``options._timeout``. Without them it is torch's default, and a group
    that was made with a shorter time-out may notice dead ranks later than it could.
    """
    timeout = dist.default_pg_timeout
    try:
        if group is not None:
            timeout = group._get_backend(torch.device(device_type)).options._timeout
    except (AttributeError, RuntimeError):
        pass
    return float(timeout.total_seconds())


def forget_meshes() -> None:
    """Makes ``DTensor`` forget the meshes of a process group that is gone, for a process that comes to have another.

    What an operation made of tensors on a mesh is kept and given for an equal mesh, which has other groups: those of
    the same number in their order, if any. Needs ``torch.distributed.tensor.debug._clear_sharding_prop_cache``. Without
    it a second run of ``LocalRanks`` raises ImportError.
    """
    if "torch.distributed.tensor" in sys.modules:
        from torch.distributed.tensor.debug import _clear_sharding_prop_cache

        _clear_sharding_prop_cache()


def require_values(tensor: Tensor, name: str) -> None:
    """Raises TypeError for a tensor without values: on the meta device, or a fake one of a trace.

    Needs ``torch._subclasses.fake_tensor.is_fake``. Without it moesys.moe raises ImportError.
    """
    if tensor.is_meta or (type(tensor) is not Tensor and is_fake(tensor)):
        raise TypeError(
            f"{name} has no values (a tensor on the meta device, or a fake one of a trace or an export), and where "
            "tokens go depends on them; run the layer on real tensors"
        )


def unscale_beside_dtensors() -> None:
    """Makes ``torch.amp.GradScaler`` take plain gradients and ``DTensor``s together, and ``DTensor``s of several
    meshes. An infinite gradient on one rank makes all ranks of its mesh skip the step, as in torch for one mesh.

    Needs ``DTensor._op_dispatcher._custom_op_handlers``, in which torch has a handler of its own for the same operator;
    ``torch.distributed.tensor.parallel.loss_parallel`` changes the table too. Without it GradScaler fails inside torch
    where gradients of both kinds meet.
    """
    from torch.distributed.tensor import DTensor

    handlers: Any = getattr(getattr(DTensor, "_op_dispatcher", None), "_custom_op_handlers", None)
    if handlers is not None:
        handlers[torch.ops.aten._amp_foreach_non_finite_check_and_unscale_.default] = _unscale


def _unscale(operator: Callable[..., None], args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    from torch.distributed.tensor import DTensor

    gradients, found_inf, inverse_scale = args
    sharded = [gradient for gradient in gradients if isinstance(gradient, DTensor)]
    parts = [gradient.to_local() if isinstance(gradient, DTensor) else gradient for gradient in gradients]
    operator(parts, found_inf, inverse_scale, **kwargs)
    # Each group is reduced once, in the order of the gradients, which is the same on all ranks.
    groups = {
        gradient.device_mesh.get_group(dim): None
        for gradient in sharded
        for dim, placement in enumerate(gradient.placements)
        if not placement.is_replicate()
    }
    for group in groups:
        dist.all_reduce(found_inf, dist.ReduceOp.MAX, group=group)


class Float64Mode(TorchDispatchMode):
    """Makes operators that cast to a narrower dtype cast to float64, also in backward and in recomputations, which run
    without a ``TorchFunctionMode``. ``grouped_product`` computes grouped products in float64, which the kernel refuses.

    Needs ``torch.utils._python_dispatch.TorchDispatchMode`` and ``torch.ops.aten._grouped_mm``. Without them importing
    this module raises ImportError, or the first operator in float64 AttributeError; ``--dtype float32`` needs neither.
    """

    def __init__(self, grouped_product: Callable[[Tensor, Tensor, Tensor], Tensor]) -> None:
        super().__init__()
        self._grouped_product = grouped_product

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        if kwargs.get("dtype") in (torch.float32, torch.float16, torch.bfloat16):
            kwargs["dtype"] = torch.float64
        if func is torch.ops.aten._grouped_mm.default and args[0].dtype == torch.float64:
            a, b, *rest = args
            return self._grouped_product(a, b, rest[0] if rest else kwargs["offs"])
        return func(*args, **kwargs)


def hold_stream(seconds: float) -> None:
    """Keeps the current stream of the current GPU busy for ``seconds`` or longer, so that the host gets ahead of it.

    Needs ``torch.cuda._sleep``, which takes clock cycles. Without it calibrations of GPUs raise AttributeError.
    """
    torch.cuda._sleep(int(seconds * MOST_CYCLES_PER_S))


def run_forward_pre_hooks(module: nn.Module) -> None:
    """Calls the hooks that run before a module's forward, for a module whose parameters are used without a call of it.

    Needs ``torch.nn.Module._forward_pre_hooks``. Without it parameters are read, which raises AttributeError.
    """
    for hook in list(module._forward_pre_hooks.values()):
        hook(module, ())
