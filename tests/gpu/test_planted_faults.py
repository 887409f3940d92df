"""Each GPU check of one rank fails when what it proves does not hold: a fault is planted in what it examines."""

from __future__ import annotations

import itertools
import subprocess
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import test_1_device as device
import test_2_kernels as kernels
import test_3_launch as launch
import test_4_between_ranks as between_ranks
import test_5_flags as flags
import test_8_benchmarks as measured
import torch
import triton
import triton.language as tl
from gpu_ranks import GpuRank
from torch import Tensor
from typer.main import get_command

from benchmarks.__main__ import app as benchmarks_app
from benchmarks.kernels.checks import Verdict
from moesys.__main__ import app as moesys_app
from moesys.kernels.experts import experts
from moesys.overlap import experts_triton

CPU = torch.device("cpu")
Fault = Callable[[pytest.MonkeyPatch], None]


def here(rank: int = 0, num_ranks: int = 1, num_gpus: int = 0) -> GpuRank:
    return GpuRank(Path("/nowhere"), num_gpus, rank, num_ranks)


def off_by_one(usual: Callable[..., Any]) -> Callable[..., Any]:
    """Changes the first number of the first tensor."""

    def wrong(*args: Any, **kwargs: Any) -> Any:
        found = usual(*args, **kwargs)
        first = found if isinstance(found, Tensor) else found[0]
        first.view(-1)[:1] += 64
        return found

    return wrong


def waits(usual: Callable[..., Any]) -> Callable[..., Any]:
    """Waits in code that calls itself a part of moesys."""
    source = "lambda usual: lambda *args, **kwargs: (tensor.item(), usual(*args, **kwargs))[1]"
    return eval(source, {"__name__": "moesys.planted", "tensor": torch.ones(1)})(usual)


# --- on one rank ----------------------------------------------------------------------------------------------------


def test_every_op_that_is_wrong_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    names = {
        "topk": "topk_by_index",
        "route": "route",
        "tiles": "tile_table",
        "groups": "groups_by_size",
        "gather": "gather_rows",
        "ordered sum": "ordered_sum",
    }
    for name in names.values():
        monkeypatch.setattr(kernels, name, off_by_one(getattr(kernels, name)))
    split = kernels.device_split

    def wrong_split(*args: Any) -> Any:
        return SimpleNamespace(tokens_RP=off_by_one(split(*args).tokens_RP))

    monkeypatch.setattr(kernels, "device_split", wrong_split)
    with pytest.raises(AssertionError) as error:
        kernels.test_ops(here())
    for name in (*names, "even split", "flow split"):
        assert f"{name} differs" in str(error.value), name


def test_an_op_with_other_bits_the_second_time_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kernels, "_rank_ops", lambda device, rehearsed: ())
    number, usual = itertools.count(), kernels.gather_rows
    monkeypatch.setattr(kernels, "gather_rows", lambda *args: usual(*args) + next(number) * 2.0)
    with pytest.raises(AssertionError, match="gather gives other bits the second time"):
        kernels.test_ops(here())


def wrong_combine(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(experts, "combine", off_by_one(experts.combine))


def restless_combine(patch: pytest.MonkeyPatch) -> None:
    """Gives other bits from run to run, within the tolerance."""
    number, usual = itertools.count(), experts.combine
    patch.setattr(experts, "combine", lambda *args: usual(*args).mul_(1 + 2.0**-8 * (next(number) % 3 == 0)))


def tiled_combine(patch: pytest.MonkeyPatch) -> None:
    """Gives other bits in tiles of another size."""
    usual = experts.grouped_gemm

    def rounded(*args: Any, **kwargs: Any) -> Tensor:
        return usual(*args, **kwargs).mul_(1 + 2.0**-8 * (args[5].rows == 64))

    patch.setattr(experts, "grouped_gemm", rounded)


@pytest.mark.parametrize(
    ("fault", "says"),
    [
        (wrong_combine, "toy: y is off by"),
        pytest.param(restless_combine, "differ from run to run", marks=pytest.mark.slow),
        pytest.param(tiled_combine, "y, dx differ", marks=pytest.mark.slow),
    ],
)
def test_experts(fault: Fault, says: str, monkeypatch: pytest.MonkeyPatch) -> None:
    fault(monkeypatch)
    with pytest.raises(AssertionError, match=says):
        kernels.test_experts(here())


def test_offsets_that_wrap(monkeypatch: pytest.MonkeyPatch) -> None:
    """The last rows of a product are elsewhere."""
    usual = experts.grouped_gemm

    def wrapped(*args: Any, **kwargs: Any) -> Tensor:
        found = usual(*args, **kwargs)
        found[-4:] = 0
        return found

    monkeypatch.setattr(experts, "grouped_gemm", wrapped)
    with pytest.raises(AssertionError, match="y is off by"):
        kernels.test_offsets(here())


def test_a_step_that_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(experts_triton, "experts_forward", waits(experts_triton.experts_forward))
    with pytest.raises(RuntimeError, match=r"moesys\.planted, line 1, calls item, which waits for the device"):
        launch.test_no_waiting(here())


@triton.jit
def _late_payload(epoch, source, word):  # type: ignore[no-untyped-def]
    """Returns a number that is stored in no round."""
    return (epoch * 40503 + word * 7 + tl.program_id(0)).to(tl.int32)


def late_payloads(patch: pytest.MonkeyPatch) -> None:
    """Every other call, which computes the expected payload, gives another number."""
    calls, usual = itertools.count(), flags._payload
    patch.setattr(flags, "_payload", lambda *args: usual(*args) if next(calls) % 2 else _late_payload(*args))


def test_payloads_that_come_behind_their_flags(monkeypatch: pytest.MonkeyPatch) -> None:
    late_payloads(monkeypatch)
    monkeypatch.setattr(flags, "REHEARSED_ROUNDS", 3)
    with pytest.raises(AssertionError, match=r"\d+ words were not there when their flag was"):
        flags.test_rounds_on_one_gpu(here())


def test_copies_that_do_not_arrive(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(between_ranks, "start_copies", lambda copies, device: None)
    with pytest.raises(AssertionError, match="1000 bytes from 0 to 0 did not arrive unchanged"):
        between_ranks.test_copies(here())


@pytest.mark.parametrize(
    ("code", "told", "says"),
    [
        (1, "", "compiling ended with code 1: planted"),
        (0, '{"kernels": 2, "triton": "3", "wrong": ["up: 7 spills"]}', "up: 7 spills"),
        (0, '{"kernels": 0, "triton": "3", "wrong": []}', "no kernel was compiled"),
    ],
)
def test_kernels_that_fall_short(code: int, told: str, says: str, monkeypatch: pytest.MonkeyPatch) -> None:
    done = SimpleNamespace(returncode=code, stdout=told, stderr="planted")
    monkeypatch.setattr(subprocess, "run", lambda *args, **kwargs: done)
    with pytest.raises(AssertionError, match=says):
        device.test_compile(here())


# --- checks of a GPU, with the CPU in its place -----------------------------------------------------------------


@pytest.fixture
def _fake_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """Shows torch two GPUs, which are the CPU."""
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
    monkeypatch.setattr(GpuRank, "device", CPU)


GPU = here(rank=1, num_gpus=2)


@pytest.mark.usefixtures("_fake_gpu")
def test_a_device_that_multiplies_wrong(monkeypatch: pytest.MonkeyPatch) -> None:
    assert device.test_device(GPU).startswith("fake, sm_90, 132 multiprocessors, ")
    product = Tensor.__matmul__

    def wrong(left: Tensor, right: Tensor) -> Tensor:
        return product(left, right) + (left.dtype == torch.bfloat16)

    monkeypatch.setattr(Tensor, "__matmul__", wrong)
    with pytest.raises(AssertionError, match="of 1048576 numbers of a product of integers are wrong"):
        device.test_device(GPU)


@pytest.mark.usefixtures("_fake_gpu")
def test_kernels_on_the_current_device_instead_of_their_tensors(monkeypatch: pytest.MonkeyPatch) -> None:
    current = [0]

    @contextmanager
    def make_current(number: int) -> Iterator[None]:
        current[0] = number
        yield

    monkeypatch.setattr(torch.cuda, "device", make_current)
    monkeypatch.setattr(launch, "draw_layer", lambda size, routing, dtype, device: device.index)
    results = [kernels.draw_layer(kernels.TOY, "uniform", torch.float32, CPU, seed) for seed in range(2)]
    runs = [kernels.ours_on(layer).results() for layer in results]
    wrong = {False: lambda layer: SimpleNamespace(results=lambda: runs[layer])}
    wrong[True] = lambda layer: SimpleNamespace(results=lambda: runs[current[0]])
    monkeypatch.setattr(launch, "ours_on", wrong[False])
    assert launch.test_other_device(GPU) == "tensors of cuda:1 while cuda:0 is current: equal bits"
    monkeypatch.setattr(launch, "ours_on", wrong[True])
    with pytest.raises(AssertionError, match=r"y, dx, .* differ where cuda:0 is current and tensors are on cuda:1"):
        launch.test_other_device(GPU)


@pytest.mark.usefixtures("_fake_gpu")
def test_a_graph_that_is_replayed_on_old_data(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(launch, "draw_layer", lambda *args: args)
    monkeypatch.setattr(launch, "graph_replayed", lambda layer, other: Verdict(False, "y differs on new data"))
    with pytest.raises(AssertionError, match="y differs on new data"):
        launch.test_graph(GPU)


@pytest.mark.usefixtures("_fake_gpu")
@pytest.mark.parametrize(
    "check",
    [
        measured.test_bench_kernels,
        measured.test_bench_overlap,
        measured.test_bench_calibrate,
    ],
)
def test_a_benchmark_that_fails(check: Callable[[GpuRank], str], monkeypatch: pytest.MonkeyPatch) -> None:
    """The check fails, and the words that it ran are a command, with options that exist."""
    ran: list[list[str]] = []

    def run(command: list[str], **kwargs: Any) -> Any:
        ran.append(command)
        return SimpleNamespace(returncode=1, stdout="planted\n")

    monkeypatch.setattr(subprocess, "run", run)
    with pytest.raises(AssertionError, match=r"ended with code 1:\s+planted"):
        check(GPU)
    _, _, package, name, *options = ran[0]
    group: Any = get_command({"benchmarks": benchmarks_app, "moesys": moesys_app}[package])
    _, command, _ = group.resolve_command(group.make_context(package, [name]), [name])
    monkeypatch.setattr("moesys.lab.commands.options.TemporaryFile", lambda **kwargs: SimpleNamespace(close=bool))
    monkeypatch.setattr(Path, "is_dir", lambda path: path == Path("/nowhere"))
    command.make_context(name, list(options))


def test_a_model_with_wrong_experts(monkeypatch: pytest.MonkeyPatch) -> None:
    steps = measured._model_steps
    monkeypatch.setattr(measured, "_model_steps", lambda gpu, name: (steps(gpu, name)[0] + (name == "moesys"), [1.0]))
    with pytest.raises(AssertionError, match="first losses are "):
        measured.test_bench_model(here())


def test_peers_are_found_where_they_are_installed(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    assert "scattermoe" not in measured.installed_peers()
    (tmp_path / "scattermoe").mkdir()
    (tmp_path / "scattermoe" / "__init__.py").touch()
    monkeypatch.syspath_prepend(str(tmp_path))
    assert measured.installed_peers()["scattermoe"] == tmp_path


def test_ranks_that_share_a_gpu_are_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    """Counts the ranks of this host, where torchrun says how many there are."""
    assert here(num_ranks=2, num_gpus=1).ranks_per_gpu == 2
    assert here(num_ranks=8, num_gpus=8).ranks_per_gpu == 1
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "8")
    assert here(num_ranks=16, num_gpus=8).ranks_per_gpu == 1


def test_two_ranks_on_one_gpu_use_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "set_device", lambda device: None)
    monkeypatch.delenv("LOCAL_RANK", raising=False)
    assert here(rank=1, num_ranks=2, num_gpus=1).device == torch.device("cuda", 0)
    assert here(rank=1, num_ranks=2, num_gpus=2).device == torch.device("cuda", 1)
