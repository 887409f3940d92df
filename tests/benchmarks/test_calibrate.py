"""Calibration: fits find what times were made from, and real ranks become a ClusterSpec that loads."""

from __future__ import annotations

import errno
import itertools
import json
import math
import os
import random
import socket
from dataclasses import replace
from pathlib import Path
from unittest import mock

import numpy as np
import pytest
import torch
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st
from typer.testing import CliRunner, Result

from benchmarks.__main__ import app
from benchmarks.calibrate import block_timings as of_block
from benchmarks.calibrate import calibrate_report as report
from benchmarks.calibrate import grids, measurement, other_work
from benchmarks.calibrate import rank_timings as on_rank
from benchmarks.calibrate.block_timings import AttentionCase, ElementwiseCase
from benchmarks.calibrate.cluster_fit import (
    attention_of_case,
    elementwise_of_case,
    fit_messages,
    fit_products,
    fit_rate,
    pass_of_case,
)
from benchmarks.calibrate.expert_passes import PASSES, ExpertCase
from benchmarks.calibrate.fused_tiles import FusedTiles
from benchmarks.calibrate.grids import CPU_GRID, CUDA_GRID, Grid, LayerCase, ModelCase
from benchmarks.calibrate.rank_timings import BesideCopies
from benchmarks.calibrate.windows import Effort
from moesys.config import ClusterSpec, ModelShape, presets
from moesys.lab.commands import options
from moesys.lab.ranks.pool import LocalRanks
from moesys.lab.ranks.torchrun_ranks import TorchrunRanks, writes
from moesys.lab.show import reports

TINY = Grid(
    dtype="float32",
    cases=(ExpertCase((4,), 16, 16), ExpertCase((64,), 32, 16), ExpertCase((3, 0, 5), 16, 32)),
    tiles=((1, 1), (8, 1)),
    attention=(AttentionCase(2, 8, 16), AttentionCase(1, 8, 24, held_out=True)),
    elementwise=(ElementwiseCase(8, 64), ElementwiseCase(16, 64, held_out=True)),
    parameters=((8, 16), (4, 4)),
    beside_copies=ExpertCase((32,), 32, 32),
    memory_bytes=1 << 20,
    message_bytes=(64, 1024, 16384),
    layers=(LayerCase(ModelShape(hidden_size=16, intermediate_size=16, num_experts=4, top_k=2), 24),),
    models=(ModelCase(64, 32, 1, 2, 8, 2),),
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
    draw = random.Random(seed)
    cases = [ExpertCase((each,), 256, 512) for each in (7, 21, 41, 71, 101, 151, 301, 1001)]
    cases += [ExpertCase((each,) * 8, 256, 512) for each in (21, 51, 101)]
    true = known_cluster(expert_tflops=rate, tile_rows=rows, memory_gb_per_s=1e4)
    seconds = [pass_of_case(case, "forward", true, "float32") * (1 + draw.uniform(-noise, noise)) for case in cases]
    found, fit = fit_products(cases, seconds, known_cluster(memory_gb_per_s=1e4), "float32", CPU_GRID.tiles)
    assert found.expert_tflops == pytest.approx(rate, rel=1e-3 + 2 * noise)
    assert found.tile_rows == rows
    assert max(map(abs, fit.errors)) <= 1e-3 + 4 * noise


@given(
    rate=st.floats(1e-3, 1e3),
    constant=st.floats(0, 1),
    works=st.lists(st.floats(1e-3, 1e3), min_size=1, max_size=9),
    noise=st.sampled_from([0.0, 0.05]),
    seed=st.integers(0, 2**32),
)
def test_a_rate_is_found_beside_what_has_none(rate, constant, works, noise, seed):
    """Each time is a work by the rate and a part that is known, less than the shortest work takes."""
    draw, beside = random.Random(seed), constant * min(works) / rate
    seconds = [(work / rate + beside) * (1 + draw.uniform(-noise, noise)) for work in works]
    found = fit_rate(lambda of: np.array(works) / of + beside, seconds)
    # A part that is known makes what is not as much more uncertain, at most twice.
    assert found.rate == pytest.approx(rate, rel=1e-4 + 3 * noise)
    assert max(map(abs, found.errors)) <= 1e-4 + 4 * noise


def test_without_tiles_memory_and_launches_a_product_takes_its_flops():
    seconds = [case.flops / 2e10 for case in CPU_GRID.cases]
    found, _ = fit_products(CPU_GRID.cases, seconds, ClusterSpec(), "float32", CPU_GRID.tiles)
    assert found.expert_tflops == pytest.approx(0.02, rel=1e-4)
    assert found.tile_rows == 1


def test_what_is_held_out_is_no_case_of_a_fit():
    """Each grid has cases of every kind that no fitted case equals, and shapes of experts that none has."""
    for grid in (CPU_GRID, CUDA_GRID):
        for cases in (grid.cases, grid.attention, grid.elementwise):
            assert {case.held_out for case in cases} == {False, True}
        fitted = {(case.hidden_size, case.intermediate_size) for case in grid.cases if not case.held_out}
        for case in (each for each in grid.cases if each.held_out):
            assert (case.hidden_size, case.intermediate_size) not in fitted
        for layer in grid.layers:
            assert (layer.shape.hidden_size, layer.shape.intermediate_size) not in fitted


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
        if fn is ranks.expert_passes:
            return [{of: [pass_of_case(case, of, cluster, args[1])] * 3 for of in PASSES} for case in args[0]]
        if fn is of_block.attention:
            return [[[attention_of_case(case, cluster, back)] * 3 for back in (False, True)] for case in args[0]]
        if fn is of_block.elementwise:
            both = (False, True)
            return [[[elementwise_of_case(case, cluster, args[1], back)] * 3 for back in both] for case in args[0]]
        if fn is of_block.adam_updates:
            return [30e-9 * sum(map(math.prod, args[0])) / cluster.optimizer_gb_per_s] * 3
        if fn is ranks.fused_tiles:
            return FusedTiles([1.0] * 3, [cluster.fused_rate] * 3)
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


# None of them what another is.
OWN_RATES = {
    "backward_tflops": 500.0,
    "attention_tflops": 400.0,
    "attention_backward_tflops": 300.0,
    "elementwise_gb_per_s": 1100.0,
    "elementwise_backward_gb_per_s": 900.0,
    "optimizer_gb_per_s": 2000.0,
}


@pytest.mark.parametrize(
    ("device_type", "cluster", "grid"),
    [
        # What no kernel of the layers does is not measured, and no data sheet is read.
        ("cuda", presets.h100(2).replace(fp8_tflops=None, peak_tflops=None, fused_rate=0.8, **OWN_RATES), CUDA_GRID),
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
                backward_tflops=0.03,
                attention_tflops=0.02,
                attention_backward_tflops=0.01,
                elementwise_gb_per_s=4.0,
                elementwise_backward_gb_per_s=3.0,
                optimizer_gb_per_s=9.0,
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
    without = {figure.field for figure in found.figures if not figure.measured}
    assert without == ({"flag_us", "fused_rate"} if device_type == "cpu" else set())
    predicted = [*found.products, *found.works]
    assert max(abs(each.error) for each in predicted) < 5e-3
    assert all(figure.held_out for figure in found.figures if "tflops" in figure.field or "elementwise" in figure.field)
    assert told == list(measurement.PARTS)
    assert len(kept) == len(ranks.calls)
    assert all(before < after for before, after in itertools.pairwise(kept))
    (pair,) = {link.line.latency_us for link in found.links if link.name == "rank 0 to 1"}
    assert pair == pytest.approx(10.0)


class Surprising(KnownRanks):
    """What is held out takes twice as long as the cluster predicts."""

    def _of(self, fn, args, rank):
        found = super()._of(fn, args, rank)
        if fn not in (on_rank.expert_passes, of_block.attention, of_block.elementwise):
            return found
        return [twice(each) if case.held_out else each for case, each in zip(args[0], found, strict=True)]


def twice(each):
    if isinstance(each, dict):
        return {of: [2 * seconds for seconds in windows] for of, windows in each.items()}
    return [[2 * seconds for seconds in windows] for windows in each]


def test_what_is_held_out_changes_no_figure_and_shows_how_well_it_is_predicted():
    cluster = presets.h100().replace(**OWN_RATES)
    usual, surprised = (
        measurement.calibrate(kind(cluster, CUDA_GRID), cluster, device_type="cuda")
        for kind in (KnownRanks, Surprising)
    )
    assert surprised.cluster == usual.cluster
    shown = [figure for figure in surprised.figures if figure.held_out]
    assert {figure.field for figure in shown} == {"expert_tflops", *OWN_RATES} - {"optimizer_gb_per_s"}
    for figure in shown:
        assert figure.held_out == pytest.approx([-0.5] * len(figure.held_out), abs=5e-3)
        assert max(map(abs, figure.errors)) < 5e-3


def test_what_is_not_there_is_not_measured_and_says_so():
    for nodes, size, missing in [
        (1, 2, {"inter_node_gb_per_s", "inter_node_us", "flag_us", "fused_rate"}),
        (2, 1, {"intra_node_gb_per_s", "intra_node_us", "flag_us", "fused_rate"}),
    ]:
        cluster = presets.h100(2).replace(num_nodes=nodes, ranks_per_node=size, multiprocessors=1, **OWN_RATES)
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
        assert "# fused_rate: not measured: on the CPU MegaKernels run in Triton's interpreter alone" in text
        assert found.cluster.fused_rate == 1


def test_a_fused_tile_is_no_faster_than_one_apart():
    cluster = presets.h100().replace(**OWN_RATES)
    slower_apart = KnownRanks(cluster, CUDA_GRID)
    with mock.patch.object(FusedTiles, "__init__", lambda of, *_: vars(of).update(fused_s=[1.0], apart_s=[1.3])):
        found = measurement.calibrate(slower_apart, cluster, device_type="cuda")
    (figure,) = (each for each in found.figures if each.field == "fused_rate")
    assert (figure.value, figure.spread.median) == (1.0, pytest.approx(1.3))


def test_no_layer_for_mega_kernels_is_no_rate():
    cluster = presets.h100().replace(**OWN_RATES)
    grid = replace(CUDA_GRID, fused=None)
    found = measurement.calibrate(KnownRanks(cluster, grid), cluster, device_type="cuda", grid=grid)
    assert {figure.how for figure in found.figures if not figure.measured} >= {"not measured: no layer was asked for"}


KNOWN = presets.h100().replace(**OWN_RATES)


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
    return CliRunner().invoke(app, ["calibrate", *arguments], prog_name="moesys")


@pytest.fixture
def _tiny(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setitem(grids.GRIDS, "cpu", TINY)


@pytest.mark.usefixtures("_tiny")
def test_two_ranks_are_measured_shown_and_written():
    done = bench("--ranks", "2", "--repeats", "2", "--out", "here.toml", "--json", "samples.json", "--page", "here.md")
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
    assert np.shape(written["samples_s"]["experts"]) == (2, len(TINY.cases))
    assert written["samples_s"]["experts"][0][0].keys() == set(PASSES)
    parts = {"launch", "memory copy", "attention", "elementwise", "updates", "all-to-all of ranks", "rank 0 to 1"}
    assert parts <= set(written["samples_s"])
    (model,) = written["models"]
    assert model["simulated_ms"] > 0
    page = Path("here.md").read_text()
    assert page.startswith("# python -m benchmarks calibrate, measured: 1 x 2 ")
    for heading in ("a rank's experts", "attention and what is no product", "steps of whole models"):
        assert heading in page


def test_what_a_file_warns_of_stands_above_the_figures():
    found = measurement.calibrate(KnownRanks(KNOWN, TINY), KNOWN, grid=TINY)
    text = report.spec_text(found, ".toml", ["Other work had 9%."])
    assert text.startswith("# Measured by python -m benchmarks calibrate.\n# Other work had 9%.\n# fused_rate: ")
    assert ClusterSpec.from_toml(text) == found.cluster


@pytest.mark.usefixtures("_tiny")
def test_what_was_measured_outlives_a_crash(monkeypatch: pytest.MonkeyPatch):
    class Crashing(KnownRanks):
        def run(self, fn, *args, timeout_s=None):
            if fn is other_work.processor_seconds:
                return [fn()] * 2
            if fn is on_rank.expert_passes:
                raise RuntimeError("lost")
            return super().run(fn, *args)

        def close(self) -> None:
            self.calls.append("closed")

    crashing = Crashing(KNOWN.replace(ranks_per_node=2), TINY)
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

    monkeypatch.setattr(options, "TemporaryFile", refuses)
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
        def run(self, fn, *args, timeout_s=None):
            return [fn()] * 2 if fn is other_work.processor_seconds else super().run(fn, *args)

        def close(self) -> None: ...

    def stops(*_: object) -> None:
        raise BrokenPipeError

    known = Known(KNOWN.replace(ranks_per_node=2), TINY)
    monkeypatch.setattr(report, "start_ranks", lambda *_, **__: (known, known.cluster))
    monkeypatch.setattr(report, "check_steps", lambda *_: [])
    monkeypatch.setattr(report, "check_models", lambda *_: [])
    monkeypatch.setattr(reports, "print_full", stops)
    with pytest.raises(BrokenPipeError):
        report.main(2, json_path=Path("samples.json"), out=Path("here.toml"))
    assert "cluster" in json.loads(Path("samples.json").read_text())
    ClusterSpec.from_toml(Path("here.toml").read_text())


def test_gpus_are_those_of_torchrun(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    with pytest.raises(ValueError, match="takes the ranks that torchrun starts, one a GPU; run torchrun"):
        report.check(None, "cuda")
