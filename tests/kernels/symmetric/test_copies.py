"""Copies move exactly the bytes they are told to, between any addresses, by copy engines where there are some."""

from __future__ import annotations

import sys
from types import SimpleNamespace

import pytest
import torch

from moesys.kernels.symmetric import heap
from moesys.kernels.symmetric.pulls import BLOCK_WORDS, Copy, start_copies

CPU = torch.device("cpu")
UNTOUCHED = 255


@pytest.mark.parametrize(
    ("destination", "source", "num_bytes"),
    [
        pytest.param(0, 0, 64, id="aligned"),
        pytest.param(0, 0, 0, id="nothing"),
        pytest.param(5, 21, 83, id="head and tail of the same alignment"),
        pytest.param(3, 3, 9, id="shorter than its head"),
        pytest.param(4, 8, 41, id="words of 4 bytes"),
        pytest.param(6, 10, 41, id="words of 4 bytes behind a head"),
        pytest.param(1, 2, 37, id="bytes"),
        pytest.param(16, 32, 3 * 4 * BLOCK_WORDS + 20, id="several blocks of a program"),
        pytest.param(1, 2, 3 * BLOCK_WORDS + 5, id="several blocks of bytes"),
    ],
)
@pytest.mark.parametrize("programs", [1, 3])
def test_a_copy_moves_its_bytes_and_no_others(destination, source, num_bytes, programs):
    came = torch.randint(0, 255, (source + num_bytes + 32,), dtype=torch.uint8)
    went = torch.full((destination + num_bytes + 32,), UNTOUCHED, dtype=torch.uint8)
    assert came.data_ptr() % 16 == went.data_ptr() % 16 == 0
    start_copies([Copy(went.data_ptr() + destination, came.data_ptr() + source, num_bytes)], CPU, programs)
    assert torch.equal(went[destination : destination + num_bytes], came[source : source + num_bytes])
    assert (went[:destination] == UNTOUCHED).all()
    assert (went[destination + num_bytes :] == UNTOUCHED).all()


def test_copies_of_one_call_are_all_made():
    came, went = torch.arange(300, dtype=torch.int16), torch.zeros(300, dtype=torch.int16)
    parts = [(0, 10, 20), (100, 0, 7), (50, 200, 33)]
    table = [Copy(went.data_ptr() + 2 * to, came.data_ptr() + 2 * at, 2 * length) for to, at, length in parts]
    start_copies(table, CPU)
    start_copies([], CPU)
    wanted = torch.zeros_like(went)
    for to, at, length in parts:
        wanted[to : to + length] = came[at : at + length]
    assert torch.equal(went, wanted)


def test_engines_are_those_of_cupy_or_of_the_driver(monkeypatch):
    """On a pretended GPU: which calls either gets, each as wide as the driver takes them."""
    asked, answers, gpu = [], [0, 0, 700], torch.device("cuda", 0)
    driver = SimpleNamespace(
        cuMemcpyAsync=lambda *call: asked.append([number.value for number in call]) or answers.pop(0)
    )
    runtime = SimpleNamespace(memcpyAsync=lambda *call: asked.append(call), memcpyDefault=4)
    monkeypatch.setattr(heap, "cuda_driver", lambda: driver)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: SimpleNamespace(cuda_stream=77))
    monkeypatch.setattr(torch.cuda, "device", lambda device: torch.no_grad())
    monkeypatch.setitem(sys.modules, "cupy", None)
    start_copies([Copy(1 << 47, 2, 3), Copy(9, 9, 0), Copy(4, 5, 1 << 33)], gpu)
    assert asked == [[1 << 47, 2, 3, 77], [4, 5, 1 << 33, 77]]
    with pytest.raises(RuntimeError, match="does not copy 3 bytes from 0x2 to 0x1: error 700"):
        start_copies([Copy(1, 2, 3)], gpu)
    asked.clear()
    monkeypatch.setitem(sys.modules, "cupy", SimpleNamespace())
    monkeypatch.setitem(sys.modules, "cupy.cuda", SimpleNamespace(runtime=runtime))
    start_copies([Copy(1, 2, 3), Copy(9, 9, 0), Copy(4, 5, 6)], gpu)
    assert asked == [(1, 2, 3, 4, 77), (4, 5, 6, 4, 77)]
    assert heap.copy_engines(CPU) is None


@pytest.mark.parametrize(
    ("error", "value", "reaches"), [(0, 0, False), (0, 1, True), (1, 0, None)], ids=["no", "yes", "not told"]
)
def test_the_driver_says_whether_atomics_reach_a_gpu(monkeypatch, error, value, reaches):
    """Between GPUs that this process sees, by their names; of others nothing is known."""
    asked = []

    def attribute(out, kind, source, destination):
        asked.append((kind, source, destination))
        out._obj.value = value
        return error

    monkeypatch.setattr(heap, "cuda_driver", lambda: SimpleNamespace(cuDeviceGetP2PAttribute=attribute))
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 3)
    monkeypatch.setattr(
        torch.cuda,
        "get_device_properties",
        lambda device: SimpleNamespace(uuid=f"GPU-{device.index}"),
    )
    assert heap.atomics_reach("GPU-0", "GPU-2") is reaches
    assert asked == [(heap.P2P_NATIVE_ATOMICS, 0, 2)]
    # A GPU that CUDA_VISIBLE_DEVICES hides, on either side, and a machine without a driver.
    assert heap.atomics_reach("GPU-0", "GPU-7") is heap.atomics_reach("GPU-7", "GPU-0") is None
    monkeypatch.setattr(heap, "cuda_driver", lambda: None)
    assert heap.atomics_reach("GPU-0", "GPU-2") is None
