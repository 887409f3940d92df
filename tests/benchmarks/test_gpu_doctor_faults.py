"""benchmarks doctor: each check fails when what it proves does not hold. A fault is planted in what it looks at."""

from __future__ import annotations

import itertools
import subprocess
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import triton
import triton.language as tl
from torch import Tensor
from typer.main import get_command

from benchmarks import __main__ as bench_commands
from benchmarks.doctor import benches, collectives, compiled, guards, ops, oracle, place, rounds, seen, waiting
from benchmarks.doctor.place import LeftOutError, Place
from benchmarks.kernels.checks import Verdict
from moesys.kernels.experts import experts
from moesys.overlap import single_rank

CPU = torch.device("cpu")
Fault = Callable[[pytest.MonkeyPatch], None]


def here(rank: int = 0, num_ranks: int = 1, device_type: Any = "cpu", gpus: int = 0) -> Place:
    return Place(device_type, Path("/nowhere"), gpus, rank, num_ranks)


def off_by_one(usual: Callable[..., Any]) -> Callable[..., Any]:
    """The first number of the first tensor is another."""

    def wrong(*args: Any, **kwargs: Any) -> Any:
        found = usual(*args, **kwargs)
        first = found if isinstance(found, Tensor) else found[0]
        first.view(-1)[:1] += 64
        return found

    return wrong


def waits(usual: Callable[..., Any]) -> Callable[..., Any]:
    """In code that calls itself a part of moesys."""
    source = "lambda usual: lambda *args, **kwargs: (tensor.item(), usual(*args, **kwargs))[1]"
    return eval(source, {"__name__": "moesys.planted", "tensor": torch.ones(1)})(usual)


# --- of one rank ----------------------------------------------------------------------------------------------------


def test_every_op_that_is_wrong_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    kernels = {
        "topk": "topk_by_index",
        "route": "route",
        "tiles": "tile_table",
        "groups": "groups_by_size",
        "gather": "gather_rows",
        "up": "up",
        "down": "grouped_gemm",
        "combine": "combine",
        "activation gradient": "activation_gradient",
        "weight gradient of up": "weight_gradient",
        "ordered sum": "ordered_sum",
    }
    for name in kernels.values():
        monkeypatch.setattr(ops, name, off_by_one(getattr(ops, name)))
    split = ops.device_split

    def wrong_split(*args: Any) -> Any:
        return SimpleNamespace(tokens_RP=off_by_one(split(*args).tokens_RP))

    monkeypatch.setattr(ops, "device_split", wrong_split)
    with pytest.raises(RuntimeError) as error:
        ops.ops_agree(here())
    for name in (*kernels, "input gradient", "gather sum", "weight gradient of down", "even split", "flow split"):
        assert f"{name} differs" in str(error.value) or f"{name} is off" in str(error.value), name


def test_an_op_with_other_bits_the_second_time_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ops, "_of_products", lambda layer: ())
    monkeypatch.setattr(ops, "_of_ranks", lambda device, rehearsed: ())
    number, usual = itertools.count(), ops.gather_rows
    monkeypatch.setattr(ops, "gather_rows", lambda *args: usual(*args) + next(number) * 2.0)
    with pytest.raises(RuntimeError, match="gather gives other bits the second time"):
        ops.ops_agree(here())


def wrong_combine(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(experts, "combine", off_by_one(experts.combine))


def restless_combine(patch: pytest.MonkeyPatch) -> None:
    """Its bits differ from run to run, by less than errors are allowed."""
    number, usual = itertools.count(), experts.combine
    patch.setattr(experts, "combine", lambda *args: usual(*args).mul_(1 + 2.0**-8 * (next(number) % 3 == 0)))


def tiled_combine(patch: pytest.MonkeyPatch) -> None:
    """Tiles of another size have other bits."""
    usual = experts.grouped_gemm

    def rounded(*args: Any, **kwargs: Any) -> Tensor:
        return usual(*args, **kwargs).mul_(1 + 2.0**-8 * (args[5].rows == 64))

    patch.setattr(experts, "grouped_gemm", rounded)


@pytest.mark.parametrize(
    ("fault", "says"),
    [
        (wrong_combine, "toy: y is off by"),
        (restless_combine, "differ from run to run"),
        (tiled_combine, "y, dx differ"),
    ],
)
def test_experts(fault: Fault, says: str, monkeypatch: pytest.MonkeyPatch) -> None:
    fault(monkeypatch)
    with pytest.raises(RuntimeError, match=says):
        oracle.experts_agree(here())


def test_offsets_that_wrap(monkeypatch: pytest.MonkeyPatch) -> None:
    """The last rows of a product lie elsewhere."""
    usual = experts.grouped_gemm

    def wrapped(*args: Any, **kwargs: Any) -> Tensor:
        found = usual(*args, **kwargs)
        found[-4:] = 0
        return found

    monkeypatch.setattr(experts, "grouped_gemm", wrapped)
    with pytest.raises(RuntimeError, match="y is off by"):
        oracle.far_offsets_hold(here())


def test_a_step_that_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(single_rank, "experts_forward", waits(single_rank.experts_forward))
    with pytest.raises(RuntimeError, match=r"moesys\.planted calls item, which waits for the device"):
        waiting.step_waits_for_nobody(here())


@triton.jit
def _late_payload(epoch, source, word):  # type: ignore[no-untyped-def]
    """What is expected in a round is stored in no round."""
    return (epoch * 40503 + word * 7 + tl.program_id(0)).to(tl.int32)


def late_payloads(patch: pytest.MonkeyPatch) -> None:
    """Every other call, which is what is expected, gives another number."""
    calls, usual = itertools.count(), rounds._payload
    patch.setattr(rounds, "_payload", lambda *args: usual(*args) if next(calls) % 2 else _late_payload(*args))


def test_payloads_that_come_behind_their_flags(monkeypatch: pytest.MonkeyPatch) -> None:
    late_payloads(monkeypatch)
    monkeypatch.setattr(rounds, "REHEARSED_ROUNDS", 3)
    with pytest.raises(RuntimeError, match=r"\d+ words were not there when their flag was"):
        rounds.virtual_rounds_hold(here())


def test_copies_that_do_not_arrive(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(collectives, "start_copies", lambda copies, device: None)
    with pytest.raises(RuntimeError, match="1000 bytes from 0 to 0 did not arrive as they were"):
        collectives.copies_arrive(here())


@pytest.mark.parametrize(
    ("code", "told", "says"),
    [
        (1, "", "compiling ended with code 1: planted"),
        (0, '{"kernels": 2, "triton": "3", "wrong": ["up: 7 spills"]}', "up: 7 spills"),
        (0, '{"kernels": 0, "triton": "3", "wrong": []}', "nothing was compiled"),
    ],
)
def test_kernels_that_fall_short(code: int, told: str, says: str, monkeypatch: pytest.MonkeyPatch) -> None:
    done = SimpleNamespace(returncode=code, stdout=told, stderr="planted")
    monkeypatch.setattr(subprocess, "run", lambda *args, **kwargs: done)
    with pytest.raises(RuntimeError, match=says):
        compiled.compiles(here())


# --- what only a GPU has, with the CPU in its place -----------------------------------------------------------------


@pytest.fixture
def _fake_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two GPUs, which are the CPU."""
    properties = SimpleNamespace(name="fake", multi_processor_count=132, total_memory=2**37)
    fakes = {
        "get_device_properties": lambda device: properties,
        "get_device_capability": lambda device: (9, 0),
        "mem_get_info": lambda device: (2**12, 2**13),
        "device_count": lambda: 2,
        "synchronize": lambda *args: None,
    }
    for name, fake in fakes.items():
        monkeypatch.setattr(torch.cuda, name, fake)
    monkeypatch.setattr(place, "device_of", lambda device_type, rank: CPU)


GPU = here(rank=1, device_type="cuda", gpus=2)


@pytest.mark.usefixtures("_fake_gpu")
def test_a_device_that_multiplies_wrong(monkeypatch: pytest.MonkeyPatch) -> None:
    assert seen.sees_gpu(GPU).startswith("fake, sm_90, 132 multiprocessors, ")
    product = Tensor.__matmul__

    def wrong(left: Tensor, right: Tensor) -> Tensor:
        return product(left, right) + (left.dtype == torch.bfloat16)

    monkeypatch.setattr(Tensor, "__matmul__", wrong)
    with pytest.raises(RuntimeError, match="of 1048576 numbers of a product of integers are wrong"):
        seen.sees_gpu(GPU)


@pytest.mark.usefixtures("_fake_gpu")
def test_kernels_on_the_current_device_instead_of_their_tensors(monkeypatch: pytest.MonkeyPatch) -> None:
    current = [0]

    @contextmanager
    def device(number: int) -> Iterator[None]:
        current[0] = number
        yield

    monkeypatch.setattr(torch.cuda, "device", device)
    monkeypatch.setattr(guards, "draw_layer", lambda size, routing, dtype, device: device.index)
    results = [oracle.draw_layer(ops.TOY, "uniform", torch.float32, CPU, seed) for seed in range(2)]
    runs = [oracle.ours_on(layer).results() for layer in results]
    wrong = {False: lambda layer: SimpleNamespace(results=lambda: runs[layer])}
    wrong[True] = lambda layer: SimpleNamespace(results=lambda: runs[current[0]])
    monkeypatch.setattr(guards, "ours_on", wrong[False])
    assert guards.other_device_is_used(GPU) == "tensors of cuda:1 while cuda:0 is current: equal bits"
    monkeypatch.setattr(guards, "ours_on", wrong[True])
    with pytest.raises(RuntimeError, match=r"y, dx, .* differ where cuda:0 is current and tensors are on cuda:1"):
        guards.other_device_is_used(GPU)


def test_one_gpu_has_no_other(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    with pytest.raises(LeftOutError, match="one GPU here; it takes two"):
        guards.other_device_is_used(here(device_type="cuda", gpus=1))


@pytest.mark.usefixtures("_fake_gpu")
def test_a_graph_that_is_replayed_on_old_data(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(oracle, "draw_layer", lambda *args: args)
    monkeypatch.setattr(oracle, "graph_replayed", lambda layer, other: Verdict(False, "y differs on new data"))
    with pytest.raises(RuntimeError, match="y differs on new data"):
        oracle.graph_is_replayed(GPU)


@pytest.mark.usefixtures("_fake_gpu")
@pytest.mark.parametrize(
    "check",
    [
        benches.kernels_are_timed,
        benches.overlap_is_timed,
        benches.links_are_calibrated,
        benches.models_are_timed,
    ],
)
def test_a_bench_that_fails(check: Callable[[Place], str], monkeypatch: pytest.MonkeyPatch) -> None:
    """And what it was asked for is a command of this command line."""
    asked: list[list[str]] = []

    def run(command: list[str], **kwargs: Any) -> Any:
        asked.append(command)
        return SimpleNamespace(returncode=1, stdout="planted\n")

    monkeypatch.setattr(subprocess, "run", run)
    with pytest.raises(RuntimeError, match="ended with code 1:\nplanted"):
        check(GPU)
    _, _, module, name, *options = asked[0]
    assert module == "benchmarks"
    command = get_command(bench_commands.app).commands[name]  # type: ignore[attr-defined]
    monkeypatch.setattr("moesys.lab.commands.options.TemporaryFile", lambda **kwargs: SimpleNamespace(close=bool))
    monkeypatch.setattr(Path, "is_dir", lambda path: path == Path("/nowhere"))
    command.make_context(name, list(options))


def test_peers_are_found_where_they_are_installed(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    assert "scattermoe" not in benches.installed_peers()
    (tmp_path / "scattermoe").mkdir()
    (tmp_path / "scattermoe" / "__init__.py").touch()
    monkeypatch.syspath_prepend(str(tmp_path))
    assert benches.installed_peers()["scattermoe"] == tmp_path


def test_ranks_that_share_a_gpu_are_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    """By the ranks of this host where torchrun says how many there are."""
    assert here(num_ranks=2, device_type="cuda", gpus=1).ranks_of_gpu == 2
    assert here(num_ranks=8, device_type="cuda", gpus=8).ranks_of_gpu == 1
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "8")
    assert here(num_ranks=16, device_type="cuda", gpus=8).ranks_of_gpu == 1
