"""Calibration: fits find what times were made from, and real ranks become a ClusterSpec that loads."""

from __future__ import annotations

import errno
import itertools
import json
import os
import random
import socket
from pathlib import Path
from unittest import mock

import numpy as np
import pytest
import torch
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st
from typer.testing import CliRunner, Result

from moesys.__main__ import app
from moesys.bench import commands
from moesys.bench.calibrate import calibrate_report as report
from moesys.bench.calibrate import measurement
from moesys.bench.calibrate import rank_timings as on_rank
from moesys.bench.calibrate.cluster_fit import fit_messages, fit_products, predicted_seconds
from moesys.bench.calibrate.measurement import CPU_GRID, CUDA_GRID, Grid, LayerCase
from moesys.bench.calibrate.rank_timings import BesideCopies, Effort, ExpertCase
from moesys.bench.calibrate.step_check import STRATEGIES, check_steps
from moesys.bench.harness import reports
from moesys.bench.harness.bench_ranks import TorchrunRanks, writes
from moesys.config import ClusterSpec, ModelShape, presets
from moesys.lab.ranks.pool import LocalRanks

TINY = Grid(
    dtype="float32",
    cases=(ExpertCase((4,), 16, 16), ExpertCase((64,), 32, 16), ExpertCase((3, 0, 5), 16, 32)),
    tiles=((1, 1), (8, 1)),
    beside_copies=ExpertCase((32,), 32, 32),
    memory_bytes=1 << 20,
    message_bytes=(64, 1024, 16384),
    layers=(LayerCase(ModelShape(hidden_size=16, intermediate_size=16, num_experts=4, top_k=2), 24),),
)
QUICK = Effort(repeats=2, window_s=0.001)


# --- fits -------------------------------------------------------------------------------------------------------------


@given(
    latency_us=st.floats(0, 1e4),
    gb_per_s=st.floats(1e-3, 1e3),
    noise=st.sampled_from([0.0, 0.02]),
    seed=st.integers(0, 2**32),
)
def test_latency_and_rate_are_found_in_times_of_messages(latency_us, gb_per_s, noise, seed):
    """The middle size takes as long before its first byte as behind it, so that both show."""
    draw = random.Random(seed)
    middle = max(1.0, latency_us) * gb_per_s * 1e3
    sizes = [max(1, round(middle * 4.0**power)) for power in range(-4, 5)]
    exact = {size: latency_us * 1e-6 + size / (gb_per_s * 1e9) for size in sizes}
    line = fit_messages({size: seconds * (1 + draw.uniform(-noise, noise)) for size, seconds in exact.items()})
    allowed = 1e-6 + 4 * noise
    assert line.gb_per_s == pytest.approx(gb_per_s, rel=allowed)
    assert line.latency_us == pytest.approx(latency_us, rel=allowed, abs=allowed)
    assert all(abs(error) <= allowed for error in line.errors.values())


def test_times_that_do_not_grow_give_the_rate_of_the_largest_message():
    line = fit_messages({10: 3.0, 100: 2.0, 1000: 1.0})
    assert line.gb_per_s == pytest.approx(1000e-9)
    assert line.latency_us == 0


def test_one_size_is_no_line():
    with pytest.raises(ValueError, match="1 sizes of messages are no line; measure two or more"):
        fit_messages({10: 1.0})


def known_cluster(**fields) -> ClusterSpec:
    return ClusterSpec(memory_gb_per_s=20.0, launch_us=3.0).replace(**fields)


@given(
    rate=st.floats(0.005, 0.5),
    rows=st.sampled_from([rows for rows, _ in CPU_GRID.tiles]),
    noise=st.sampled_from([0.0, 0.02]),
    seed=st.integers(0, 2**32),
)
def test_rate_and_tiles_are_found_in_times_of_products(rate, rows, noise, seed):
    draw, cases = random.Random(seed), CPU_GRID.cases[:11]
    true = known_cluster(expert_tflops=rate, tile_rows=rows, memory_gb_per_s=1e4)
    seconds = [predicted_seconds(case, true, "float32") * (1 + draw.uniform(-noise, noise)) for case in cases]
    found = fit_products(cases, seconds, known_cluster(memory_gb_per_s=1e4), "float32", CPU_GRID.tiles)
    assert found.cluster.expert_tflops == pytest.approx(rate, rel=1e-3 + 2 * noise)
    assert found.cluster.tile_rows == rows
    assert max(map(abs, found.errors)) <= 1e-3 + 4 * noise


def test_without_tiles_memory_and_launches_a_product_takes_its_flops():
    seconds = [case.flops / 2e10 for case in CPU_GRID.cases]
    found = fit_products(CPU_GRID.cases, seconds, ClusterSpec(), "float32", CPU_GRID.tiles)
    assert found.cluster.expert_tflops == pytest.approx(0.02, rel=1e-4)
    assert found.cluster.tile_rows == 1


# --- all of it, on ranks whose times are known ------------------------------------------------------------------------


class KnownRanks:
    """Ranks that time as ``cluster`` predicts; the last one's messages are the slowest, by a tenth."""

    def __init__(self, cluster: ClusterSpec, grid: Grid) -> None:
        self.cluster, self.grid, self.calls = cluster, grid, []

    def run(self, fn, *args, timeout_s=None):
        self.calls.append(fn)
        return [self._of(fn, args, rank) for rank in range(self.cluster.num_ranks)]

    def _of(self, fn, args, rank):
        cluster, ranks = self.cluster, on_rank
        peers = {"ranks": cluster.node_sizes[0] - 1, "nodes": cluster.node_sizes[0] * cluster.num_ranks // 2}
        if fn is ranks.launches:
            return [cluster.launch_us * 1e-6] * 3
        if fn is ranks.memory_copies:
            return [2e-9 * args[0] / cluster.memory_gb_per_s] * 3
        if fn is ranks.expert_products:
            return [[predicted_seconds(case, cluster, args[1])] * 3 for case in args[0]]
        if fn is ranks.all_to_alls:
            place = "intra_node" if args[2] == "ranks" else "inter_node"
            per_byte = 1e-9 / getattr(cluster, f"{place}_gb_per_s")
            latency = getattr(cluster, f"{place}_us") * 1e-6
            slowest = 1.0 if rank == cluster.num_ranks - 1 else 1 / 1.1
            return {b: [slowest * (latency + peers[args[2]] * b * per_byte)] * 3 for b in args[0]}
        if fn is ranks.round_trips:
            return {b: [20e-6 + b * 1e-9] * 3 for b in args[0]} if rank in args[1] else {}
        if fn is ranks.products_beside_copies:
            return BesideCopies([1.0 - cluster.copy_share] * 3, [1.0] * 3)
        if fn is ranks.gpu_facts:
            return "H100", cluster.multiprocessors, cluster.memory_gb
        assert fn is ranks.flag_ping_pongs
        return [cluster.flag_us * 1e-6] * 3 if rank in args[0] else []


@pytest.mark.parametrize(
    ("device_type", "cluster", "grid"),
    [
        # What no kernel of the layers does is not measured, and no data sheet is read.
        ("cuda", presets.h100(2).replace(fp8_tflops=None, peak_tflops=None), CUDA_GRID),
        (
            "cpu",
            ClusterSpec(
                num_nodes=2,
                ranks_per_node=2,
                expert_tflops=0.04,
                tile_rows=8,
                memory_gb_per_s=500.0,
                launch_us=2.0,
                intra_node_gb_per_s=1.5,
                intra_node_us=120.0,
                inter_node_gb_per_s=0.0125,
                inter_node_us=600.0,
                copy_share=0.3,
            ),
            CPU_GRID,
        ),
    ],
)
def test_a_known_cluster_is_found_again(device_type, cluster, grid):
    kept: list[set[str]] = []
    told: list[str] = []
    ranks = KnownRanks(cluster, grid)
    shape = ClusterSpec(num_nodes=cluster.num_nodes, ranks_per_node=cluster.ranks_per_node)
    found = measurement.calibrate(
        ranks,
        shape,
        device_type=device_type,
        grid=grid,
        tell=told.append,
        keep=lambda samples: kept.append(set(samples)),
    )
    for field in set(ClusterSpec.model_fields) - {"name"}:
        expected, figure = getattr(cluster, field), getattr(found.cluster, field)
        assert figure == (pytest.approx(expected, rel=2e-3) if isinstance(expected, float) else expected), field
    assert all(figure.measured for figure in found.figures if not (device_type == "cpu" and figure.field == "flag_us"))
    assert told == list(measurement.PARTS)
    assert len(kept) == len(ranks.calls)
    assert all(before < after for before, after in itertools.pairwise(kept))
    (pair,) = {link.line.latency_us for link in found.links if link.name == "rank 0 to 1"}
    assert pair == pytest.approx(10.0)


def test_what_is_not_there_is_not_measured_and_says_so():
    for nodes, size, missing in [
        (1, 2, {"inter_node_gb_per_s", "inter_node_us", "flag_us"}),
        (2, 1, {"intra_node_gb_per_s", "intra_node_us", "flag_us"}),
    ]:
        cluster = presets.h100(2).replace(num_nodes=nodes, ranks_per_node=size, multiprocessors=1, flag_us=0.0)
        grid = CUDA_GRID
        found = measurement.calibrate(KnownRanks(cluster, grid), cluster, grid=grid)
        assert {figure.field for figure in found.figures if not figure.measured} == missing
        there, absent = ("intra_node", "inter_node") if nodes == 1 else ("inter_node", "intra_node")
        for unit in ("gb_per_s", "us"):
            expected = pytest.approx(getattr(cluster, f"{there}_{unit}"), rel=2e-3)
            assert getattr(found.cluster, f"{there}_{unit}") == expected
            assert getattr(found.cluster, f"{absent}_{unit}") == expected
        text = report.spec_text(found, ".toml")
        assert ClusterSpec.from_toml(text) == found.cluster
        assert "# flag_us: not measured: on the CPU flags are seen by Triton's interpreter alone" in text


# --- on real ranks ----------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_real_ranks_become_a_cluster_with_links_inside_and_between_nodes(ranks: LocalRanks):
    shape = ClusterSpec(num_nodes=2, ranks_per_node=2)
    found = measurement.calibrate(ranks, shape, grid=TINY, effort=QUICK)
    assert found.cluster.num_ranks == 4
    names = [link.name for link in found.links]
    assert names == [
        "all-to-all inside nodes",
        "all-to-all between nodes",
        "rank 0 to 1",
        "rank 0 to 2",
        "rank 2 to 0",
    ]
    # A node sends to two ranks of the other from each of its two.
    assert list(found.links[0].seconds) == [64, 1024, 16384]
    assert list(found.links[1].seconds) == [256, 4096, 65536]
    assert all(spread.n == QUICK.repeats for link in found.links for spread in link.seconds.values())
    assert all(product.ms.median > 0 and product.ms.n == 4 * QUICK.repeats for product in found.products)
    assert found.cluster.memory_gb_per_s > 0
    assert ClusterSpec.from_json(report.spec_text(found, ".json")) == found.cluster


def test_steps_of_a_layer_are_measured_and_simulated(ranks: LocalRanks):
    """The simulated step follows the figures, and the measured one does not."""
    slow = known_cluster(ranks_per_node=4, expert_tflops=1e-4, intra_node_us=1e4, intra_node_gb_per_s=0.1)
    layer = LayerCase(ModelShape(hidden_size=16, intermediate_size=16, num_experts=4, top_k=2), 48)
    checks = check_steps(ranks, slow, [layer], repeats=2)
    assert [check.strategy for check in checks] == [strategy.name for strategy in STRATEGIES]
    for check in checks:
        assert check.measured_ms.n == 2
        assert check.measured_ms.median > 0
        # Dispatch and combine, there and back, wait for ten milliseconds each.
        assert check.simulated_ms > 40
        assert check.error == pytest.approx(check.simulated_ms / check.measured_ms.median - 1)


def sends_where_it_should(between: str) -> dict[int, int]:
    """Bytes of this rank's all-to-alls to each peer, under two nodes of two."""
    sent = {}
    begin = on_rank._begin_exchange

    def spy(out, into, splits):
        for peer, num_bytes in enumerate(splits):
            sent[peer] = max(sent.get(peer, 0), num_bytes)
        return begin(out, into, splits)

    with mock.patch.object(on_rank, "_begin_exchange", spy):
        on_rank.all_to_alls((8, 16), (0, 0, 1, 1), between, 1.0, QUICK, "cpu")
    return sent


@pytest.mark.parametrize(
    ("between", "to_RR"), [("ranks", [[1], [0], [3], [2]]), ("nodes", [[2, 3], [2, 3], [0, 1], [0, 1]])]
)
def test_an_all_to_all_stays_in_nodes_or_leaves_them(ranks: LocalRanks, between: str, to_RR: list[list[int]]):
    for sent, peers in zip(ranks.run(sends_where_it_should, between), to_RR, strict=True):
        assert sent == {peer: 16 if peer in peers else 0 for peer in range(4)}


def sizes_in_time(longest_s: float) -> list[int]:
    """Sizes measured on a link of a byte in 10 us, on which rank 1 is twice as slow."""
    pace_s = 1e-5 * (1 + dist.get_rank())

    def seconds_of(work, calls, device):
        return calls * work() * pace_s

    with mock.patch.object(on_rank, "_seconds_of", seconds_of):
        of_size = lambda size: lambda: size  # noqa: E731
        return list(
            on_rank._growing((1, 10, 100, 1000, 10_000, 100_000), of_size, longest_s, QUICK, torch.device("cpu"))
        )


@pytest.mark.parametrize(("longest_s", "count"), [(1e-9, 3), (0.019, 3), (0.021, 4), (0.21, 5), (9.0, 6)])
def test_messages_that_would_take_too_long_are_left_out_on_all_ranks(ranks: LocalRanks, longest_s: float, count: int):
    sizes = ranks.run(sizes_in_time, longest_s, num_ranks=2)
    assert sizes == [[1, 10, 100, 1000, 10_000, 100_000][:count]] * 2


def test_products_are_those_of_the_experts():
    """Each layer's weights in turn, each expert's rows through its own."""
    case = ExpertCase((2, 3), 4, 6)
    pool_N = torch.arange(2 * case.num_weights, dtype=torch.float32)
    multiplied = []

    def spy(left, right, out):
        multiplied.append((tuple(left.shape), int(right.t()[0, 0])))

    call = on_rank._expert_call(case, pool_N)
    with mock.patch.object(torch, "mm", spy):
        call(), call(), call()
    one_layer = [((2, 4), 0), ((2, 6), 96), ((3, 4), 48), ((3, 6), 120)]
    next_layer = [(shape, first + case.num_weights) for shape, first in one_layer]
    assert multiplied == [*one_layer, *next_layer, *one_layer]


def joins_two_hosts(port: int) -> tuple[ClusterSpec, list[int], bool]:
    """As torchrun would start it, on two hosts of one and two ranks."""
    rank = dist.get_rank()
    # Whoever leaves a group that others still enter cuts them off.
    dist.barrier()
    dist.destroy_process_group()
    told = {"RANK": rank, "WORLD_SIZE": 3, "LOCAL_RANK": max(0, rank - 1), "GROUP_RANK": min(rank, 1)}
    told |= {"LOCAL_WORLD_SIZE": 1 + min(rank, 1), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    with mock.patch.dict(os.environ, {name: str(value) for name, value in told.items()}):
        joined = TorchrunRanks("cpu", threads=1)
        gathered = joined.run(dist.get_rank)
        dist.barrier()
        joined.close()
        return joined.cluster, gathered, writes()


def test_ranks_of_torchrun_are_told_apart_by_host(ranks: LocalRanks):
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    hosts = ClusterSpec(num_nodes=2, ranks_per_node=(1, 2))
    assert ranks.run(joins_two_hosts, port, num_ranks=3) == [(hosts, [0, 1, 2], rank == 0) for rank in range(3)]


# --- the command ------------------------------------------------------------------------------------------------------


def bench(*arguments: str) -> Result:
    return CliRunner().invoke(app, ["bench", "calibrate", *arguments], prog_name="moesys")


@pytest.fixture
def _tiny(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setitem(measurement.GRIDS, "cpu", TINY)


@pytest.mark.usefixtures("_tiny")
def test_two_ranks_are_measured_shown_and_written():
    done = bench("--ranks", "2", "--repeats", "2", "--out", "here.toml", "--json", "samples.json")
    assert done.exit_code == 0, done.output
    cluster = ClusterSpec.from_toml(Path("here.toml").read_text())
    assert cluster.node_sizes == (2,)
    assert cluster.name.startswith("1 x 2 ")
    assert "MEASURED: 1 x 2 " in done.output
    assert "there is no such link" in done.output
    assert "MEASURED and SIMULATED: steps of one MoE layer" in done.output
    written = json.loads(Path("samples.json").read_text())
    assert [step["strategy"] for step in written["steps"]] == ["sequential", "pipelined 4"]
    assert all(step["simulated_ms"] > 0 for step in written["steps"])
    assert written["cluster"] == cluster.model_dump(mode="json")
    assert np.shape(written["samples_s"]["expert products"]) == (2, len(TINY.cases), 2)
    assert {"launch", "memory copy", "all-to-all of ranks", "rank 0 to 1"} <= set(written["samples_s"])


@pytest.mark.parametrize(("load", "warned"), [(2.1, True), (1.9, False)])
def test_other_work_is_warned_of(monkeypatch, load, warned):
    monkeypatch.setattr(report, "available_cores", lambda: 2)
    monkeypatch.setattr(os, "getloadavg", lambda: (load, 0.0, 0.0))
    said = report.other_work()
    assert said == ["The machine had other work (load 2.1 on 2 cores): measure again when it has none."][: int(warned)]
    found = measurement.calibrate(KnownRanks(presets.h100(), TINY), presets.h100(), grid=TINY)
    assert ("other work" in report.spec_text(found, ".toml", said)) == warned


@pytest.mark.usefixtures("_tiny")
def test_what_was_measured_outlives_a_crash(monkeypatch: pytest.MonkeyPatch):
    class Crashing(KnownRanks):
        def run(self, fn, *args, timeout_s=None):
            if fn is on_rank.expert_products:
                raise RuntimeError("lost")
            return super().run(fn, *args)

        def close(self) -> None:
            self.calls.append("closed")

    crashing = Crashing(presets.h100().replace(ranks_per_node=2), TINY)
    monkeypatch.setattr(report, "start_ranks", lambda *_, **__: (crashing, crashing.cluster))
    with pytest.raises(RuntimeError, match="lost"):
        report.main(2, json_path=Path("samples.json"), out=Path("here.toml"))
    written = json.loads(Path("samples.json").read_text())
    assert not written["finished"]
    assert written["samples_s"].keys() == {"launch", "memory copy"}
    assert crashing.calls[-1] == "closed"
    assert not Path("here.toml").exists()


@pytest.mark.parametrize(
    ("arguments", "variables", "message"),
    [
        (["--out", "here.yaml"], {}, "here.yaml is neither .toml nor .json; name a file of one of these kinds"),
        (["--out", "nowhere/here.toml"], {}, "nowhere is not a folder; make it, or write elsewhere"),
        (["--device", "cuda"], {}, "device='cuda', but torch sees no GPU here; use --device cpu"),
        (["--ranks", "3"], {"RANK": "0", "WORLD_SIZE": "2"}, "ranks=3, but torchrun started 2; leave --ranks out"),
    ],
)
@pytest.mark.usefixtures("_tiny")
def test_what_cannot_be_is_refused(arguments, variables, message, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with mock.patch.dict(os.environ, variables):
        done = bench(*arguments)
    assert done.exit_code == 2
    assert message in " ".join(done.output.replace("│", " ").split())


@pytest.mark.usefixtures("_tiny")
def test_a_folder_that_takes_no_file_is_refused_before_anything_is_measured(monkeypatch):
    def refuses(**_: object) -> None:
        raise OSError(errno.EROFS, os.strerror(errno.EROFS))

    monkeypatch.setattr(commands, "TemporaryFile", refuses)
    monkeypatch.setenv("RANK", "1")
    monkeypatch.setenv("WORLD_SIZE", "2")
    assert "ranks=3, but torchrun started 2" in bench("--out", "nowhere/here.toml", "--ranks", "3").output
    monkeypatch.setenv("RANK", "0")
    done = bench("--out", "here.toml")
    assert done.exit_code == 2
    assert ". takes no file: Read-only file system; write elsewhere" in " ".join(done.output.split())


@pytest.mark.usefixtures("_tiny")
def test_what_was_measured_is_written_before_it_is_printed(monkeypatch):
    class Known(KnownRanks):
        def close(self) -> None: ...

    def stops(*_: object) -> None:
        raise BrokenPipeError

    known = Known(presets.h100().replace(ranks_per_node=2), TINY)
    monkeypatch.setattr(report, "start_ranks", lambda *_, **__: (known, known.cluster))
    monkeypatch.setattr(report, "check_steps", lambda *_: [])
    monkeypatch.setattr(reports, "print_full", stops)
    with pytest.raises(BrokenPipeError):
        report.main(2, json_path=Path("samples.json"), out=Path("here.toml"))
    assert "cluster" in json.loads(Path("samples.json").read_text())
    ClusterSpec.from_toml(Path("here.toml").read_text())


def test_gpus_are_those_of_torchrun(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    with pytest.raises(ValueError, match="takes the ranks that torchrun starts, one a GPU; run torchrun"):
        report.check(None, "cuda")
