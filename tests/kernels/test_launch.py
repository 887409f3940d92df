"""Launches go to the device of their tensors: of every kernel that any file launches, and of a layer's directions."""

from __future__ import annotations

import ast
import importlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from triton.runtime.interpreter import InterpretedFunction
from triton.runtime.jit import KernelInterface

import moesys as ms
from moesys.kernels.launch import kernel, on_its_device
from moesys.moe.experts import Experts
from moesys.overlap.alone import AloneRun

ROOT = Path(__file__).parents[2]


@pytest.fixture
def current(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The current device of a machine with several GPUs, as the only element. There is none here."""
    device = [0]

    def exchange(index: int) -> int:
        before = device[0]
        if index >= 0:
            device[0] = index
        return before

    monkeypatch.setattr(torch.cuda, "_exchange_device", exchange)
    monkeypatch.setattr(torch.cuda, "_maybe_exchange_device", exchange)
    return device


def on_gpu(index: int) -> Tensor:
    with FakeTensorMode():
        return torch.empty(4, device=f"cuda:{index}")


def launched_kernels() -> Iterator[tuple[str, Any]]:
    """Every jitted function that some file takes with a grid, by the file and its name there."""
    for path in sorted((ROOT / "moesys").rglob("*.py")):
        tree = ast.parse(path.read_text())
        names = {
            node.value.id
            for node in ast.walk(tree)
            if isinstance(node, ast.Subscript) and isinstance(node.value, ast.Name)
        }
        if names and "triton" in path.read_text():
            module = importlib.import_module(".".join(path.relative_to(ROOT).with_suffix("").parts))
            for name in sorted(names):
                if isinstance(vars(module).get(name), KernelInterface):
                    yield f"{path.relative_to(ROOT)}: {name}", vars(module)[name]


def test_every_kernel_runs_where_its_first_tensor_is(current: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    ran_on: list[int] = []
    monkeypatch.setattr(InterpretedFunction, "run", lambda *_, **__: ran_on.append(current[0]))
    found = dict(launched_kernels())
    assert len(found) >= 31, sorted(found)
    for number, (name, launched) in enumerate(found.items(), start=1):
        launched[(1,)](3, (None, (on_gpu(number), on_gpu(0))), on_gpu(0))
        assert ran_on == [number], f"{name} is launched on the current device; make it a moesys.kernels.launch.kernel"
        assert current == [0]
        ran_on.clear()


def test_a_kernel_without_a_tensor_is_refused() -> None:
    launched = kernel(lambda count: None)
    with pytest.raises(LookupError, match="no argument is a tensor; give one"):
        launched[(1,)](3)


def test_keywords_count_behind_arguments(current: list[int]) -> None:
    where = on_its_device(lambda *_, **__: current[0])
    assert where(1, of=on_gpu(2)) == 2
    assert where(on_gpu(3), of=on_gpu(2)) == 3
    assert where(torch.empty(1), on_gpu(2)) == 0, "on the CPU nothing changes"


def test_layers_compute_where_their_tokens_are(current: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    """Forward, and backward, which runs on threads of autograd."""
    shape = ms.ModelShape(hidden_size=8, intermediate_size=4, num_experts=4, top_k=2)
    experts = Experts(shape, ms.Strategy(name="ep", sharding=ms.Ep()))
    x_TH = torch.randn(3, 8, requires_grad=True)
    ran_on = []

    def noting(direction: str) -> Any:
        usual = getattr(AloneRun, direction)

        def noted(*args: Any, **kwargs: Any) -> Any:
            ran_on.append((direction, current[0]))
            return usual(*args, **kwargs)

        return noted

    for direction in ("forward", "backward"):
        monkeypatch.setattr(AloneRun, direction, noting(direction))
    # Tokens here are on the CPU, and only what asks for their device is told of another one.
    monkeypatch.setattr(torch.cuda, "device_of", lambda _: torch.cuda.device(1))
    experts(x_TH, torch.tensor([[0, 1], [1, 2], [3, 0]]), torch.rand(3, 2)).sum().backward()
    assert ran_on == [("forward", 1), ("backward", 1)]
    assert current == [0]
