"""Which kernels a first micro-batch of MegaKernels compiles before it publishes anything, and which it launches then.

For a process in which Triton does not interpret: `tests/kernels/compile_for_hopper.py` asks, and in slow tests has them
compiled.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from itertools import product
from typing import Any
from unittest import mock

import torch
import triton
from mega_case import Case, Drawn, Weights

import moesys as ms
from benchmarks.kernels import ahead_of_time
from moesys.kernels.mega.arguments import MegaMemory
from moesys.kernels.mega.exchange import regions
from moesys.kernels.mega.point import blocks_at
from moesys.kernels.symmetric import signals
from moesys.kernels.symmetric.heap import Heap
from moesys.moe.masters import ExpertForm
from moesys.overlap.experts_triton import ACTIVATION
from moesys.overlap.mega_executor import MegaKernelRun, replicas_of, tokens_by_replica

CASE = Case(5, 2, 64, 32, "bfloat16", (16, 16), 3, ())
POINTS = (ms.MegaKernel(), ms.MegaKernel(fused="none", deduplicate=True, granularity="expert"))


def run(point: ms.MegaKernel, apart: bool, seen: list[tuple[str, str, bool]]) -> None:
    """On the CPU, where nothing that is compiled runs: torch's operators find zeros for what kernels would write.

    Our own experts are one vector each, those of other libraries may have their matrices ``apart``; gradients are not.
    """
    drawn, cpu = Drawn(CASE), torch.device("cpu")
    form, size = ExpertForm.of(CASE.model), (len(drawn.held(0)), CASE.model.expert_parameters)
    weights = drawn.weights(0) if apart else Weights(*form.weights(torch.zeros(size, dtype=torch.bfloat16))[:2])
    heap = Heap.virtual(regions(16, 2, 64, torch.bfloat16, 2, 99), 2, cpu)[0]
    memory = MegaMemory(heap, lambda: seen.append(("met", "", True)))
    executor = MegaKernelRun(
        drawn.expert_RTK[0].clone(),
        CASE.num_experts,
        tokens_by_replica(drawn.plan, cpu),
        replicas_of(drawn.layout, 0, cpu),
        int(drawn.plan.tokens_R[0]),
        memory,
        blocks_at(point, ACTIVATION, torch.bfloat16, torch.device("meta")),
        point,
    )
    for _ in range(2):
        y_TH, saved = executor.forward(drawn.x_RTH[0], drawn.weight_RTK[0], lambda: weights)
        executor.backward(y_TH, saved, lambda: weights, form.gradients(torch.zeros(size)))


def zeroed(empty: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    def born(*args: Any, **kwargs: Any) -> torch.Tensor:
        made = empty(*args, **kwargs)
        return made if made.is_meta else made.zero_()

    return born


def launches(compiles: bool = False) -> list[list[tuple[str, str, bool]]]:
    """Returns, for each point and way in which matrices may lie, the kernel of each launch, its signature, and whether
    it was for the compiler alone. Nothing is compiled without ``compiles``.
    """
    seen: list[tuple[str, str, bool]] = []
    ahead: list[int] = []
    compile_ = MegaKernelRun._compile

    def note(*, fn: Any, key: Any, **_: Any) -> bool:
        seen.append((fn.name.rpartition(".")[2], str(key), bool(ahead)))
        # True is instead of compiling.
        return not compiles

    def noted(*args: Any) -> None:
        ahead.append(1)
        compile_(*args)
        ahead.clear()

    patches: list[tuple[Any, str, Any]] = [
        (MegaKernelRun, "_compile", noted),
        (signals, "raise_if_given_up", lambda heap: None),
        (triton.knobs.runtime, "jit_cache_hook", note),
        (ahead_of_time, "read_machine_code", lambda compiled: compiled),
    ]
    for place, name in ((torch, "empty"), (torch, "empty_like"), (torch.Tensor, "new_empty")):
        patches.append((place, name, zeroed(getattr(place, name))))
    found = []
    with ExitStack() as stack:
        for patch in patches:
            stack.enter_context(mock.patch.object(*patch))
        stack.enter_context(ahead_of_time.compiling())
        for point, apart in product(POINTS, (False, True)):
            seen.clear()
            run(point, apart, seen)
            found.append(list(seen))
    return found
