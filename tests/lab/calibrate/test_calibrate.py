"""Calibration: fits find what times were made from, and real ranks become a ClusterSpec that loads."""

from __future__ import annotations

import errno
import json
import math
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

from moesys import ClusterSpec, presets
from moesys.__main__ import app
from moesys.cost import link_seconds
from moesys.lab.calibrate import gpu_timings, timings
from moesys.lab.calibrate.measurement import PARTS, calibrate, fit_messages, fit_rate
from moesys.lab.calibrate.timings import (
    CPU_GRID,
    CUDA_GRID,
    GRIDS,
    Effort,
    ExpertCase,
    Grid,
)
from moesys.lab.commands import calibrate as command
from moesys.lab.commands import options
from moesys.lab.ranks import torchrun_ranks
from moesys.lab.ranks.pool import LocalRanks
from moesys.lab.ranks.process_start import writes
from moesys.lab.ranks.torchrun_ranks import start_ranks
from moesys.lab.show import sheets
from moesys.lab.show.sheets import CommandOutput

TINY = Grid(
    dtype="float32",
    fitted={
        "experts": [((4,), 16, 16), ((64,), 32, 16), ((3, 0, 5), 16, 32)],
        "attention": [(2, 8, 16)],
        "elementwise": [(8, 64)],
    },
    held_out={"experts": [], "attention": [(1, 8, 24)], "elementwise": [(16, 64)]},
    tiles=((1, 1), (8, 1)),
    parameters=((8, 16), (4, 4)),
    beside_copies=ExpertCase((32,), 32, 32),
    memory_bytes=1 << 20,
    message_bytes=(64, 1024, 16384),
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
    noisy = {size: seconds * (1 + draw.uniform(-noise, noise)) for size, seconds in exact.items()}
    allowed = 1e-6 + 4 * noise
    assert fit_messages(noisy) == (
        pytest.approx(latency_us, rel=allowed, abs=allowed),
        pytest.approx(gb_per_s, rel=allowed),
    )


def test_times_that_do_not_grow_give_the_rate_of_the_largest_message():
    assert fit_messages({10: 3.0, 100: 2.0, 1000: 1.0}) == (0, pytest.approx(1000e-9))


@given(
    rate=st.floats(0.005, 0.5),
    rows=st.sampled_from([rows for rows, _ in CPU_GRID.tiles]),
    noise=st.sampled_from([0.0, 0.02]),
    seed=st.integers(0, 2**32),
)
def test_rate_and_tiles_are_found_in_times_of_products(rate, rows, noise, seed):
    draw, base = random.Random(seed), ClusterSpec(memory_gb_per_s=1e4, launch_us=3.0)
    cases = [ExpertCase((each,), 256, 512) for each in (7, 21, 41, 71, 101, 151, 301, 1001)]
    cases += [ExpertCase((each,) * 8, 256, 512) for each in (21, 51, 101)]
    true = base.replace(expert_tflops=rate, tile_rows=rows)
    seconds = {
        (case, "forward"): case.seconds("forward", true, "float32") * (1 + draw.uniform(-noise, noise))
        for case in cases
    }
    found = fit_rate("expert_tflops", tiled(base), seconds, "float32")
    assert (found.expert_tflops, found.tile_rows) == (pytest.approx(rate, rel=1e-3 + 2 * noise), rows)


def tiled(cluster: ClusterSpec) -> list[ClusterSpec]:
    return [cluster.replace(tile_rows=rows, tile_columns=columns) for rows, columns in CPU_GRID.tiles]


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

    class Work(float):
        def seconds(self, of, cluster, dtype):
            return self / cluster.expert_tflops + beside

    seconds = {
        (Work(work), place): (work / rate + beside) * (1 + draw.uniform(-noise, noise))
        for place, work in enumerate(works)
    }
    found = fit_rate("expert_tflops", [ClusterSpec()], seconds, "float32")
    # A part that is known makes what is not as much more uncertain, at most twice.
    assert found.expert_tflops == pytest.approx(rate, rel=1e-4 + 3 * noise)


def test_without_tiles_memory_and_launches_a_product_takes_its_flops():
    seconds = {(case, "forward"): case.flops("forward") / 2e10 for case in CPU_GRID.cases("experts")}
    found = fit_rate("expert_tflops", tiled(ClusterSpec()), seconds, "float32")
    assert found.expert_tflops == pytest.approx(0.02, rel=1e-4)
    assert found.tile_rows == 1


def test_what_is_held_out_is_no_case_of_a_fit():
    """Each grid has cases of every kind that no fitted case equals, and shapes of experts that none has."""
    for grid in (CPU_GRID, CUDA_GRID):
        for kind in ("experts", "attention", "elementwise"):
            assert grid.held_out[kind]
            assert not set(grid.fitted[kind]) & set(grid.held_out[kind])
        assert not {size[1:] for size in grid.fitted["experts"]} & {size[1:] for size in grid.held_out["experts"]}


# --- all of it, on ranks whose times are known ------------------------------------------------------------------------


class KnownRanks:
    """Ranks that time as ``cluster`` predicts; the last one's messages are the slowest, by a tenth."""

    def __init__(self, cluster: ClusterSpec) -> None:
        self.cluster, self.calls = cluster, []

    def run(self, fn, *args, timeout_s=None):
        self.calls.append(fn)
        return [self._of(fn, args, rank) for rank in range(self.cluster.num_ranks)]

    def _of(self, fn, args, rank):
        cluster = self.cluster
        if fn is timings.gpu_facts:
            return "H100", cluster.multiprocessors, cluster.memory_gb
        if fn is timings.basics:
            return {
                "launch": [cluster.launch_us * 1e-6] * 3,
                "memory copy": [2e-9 * args[0] / cluster.memory_gb_per_s] * 3,
                "update": [30e-9 * sum(map(math.prod, args[1])) / cluster.optimizer_gb_per_s] * 3,
            }
        if fn is timings.passes:
            return [{of: [case.seconds(of, cluster, args[1])] * 3 for of in passes_of(case)} for case in args[0]]
        if fn is gpu_timings.fused_tiles:
            return {"fused": [1.0] * 3, "apart": [cluster.fused_rate] * 3}
        if fn is timings.all_to_alls:
            bytes_RR = args[1].astype(float)
            fastest = {f"{place}_gb_per_s": 1e-9 for place in ("intra_node", "inter_node")}
            busiest = link_seconds(bytes_RR, cluster.replace(**fastest)).max()
            node_R = np.asarray(cluster.node_of_rank)
            place = "inter_node" if (args[1] & (node_R[:, None] != node_R)).any() else "intra_node"
            per_byte = busiest * 1e-9 / getattr(cluster, f"{place}_gb_per_s")
            slowest = 1.0 if rank == cluster.num_ranks - 1 or args[1].sum() == 2 else 1 / 1.1
            return {b: [slowest * (getattr(cluster, f"{place}_us") * 1e-6 + b * per_byte)] * 3 for b in args[0]}
        if fn is timings.products_beside_copies:
            return [(1.0 - cluster.copy_share, 1.0)] * 3
        assert fn is gpu_timings.flag_ping_pongs
        return [cluster.flag_us * 1e-6] * 3 if rank in args[0] else []

    def close(self) -> None:
        self.calls.append("closed")


def passes_of(case) -> tuple[str, ...]:
    return ("forward", "input_gradients", "backward") if isinstance(case, ExpertCase) else ("forward", "backward")


# None of them what another is.
OWN_RATES = {
    "backward_tflops": 500.0,
    "attention_tflops": 400.0,
    "attention_backward_tflops": 300.0,
    "elementwise_gb_per_s": 1100.0,
    "elementwise_backward_gb_per_s": 900.0,
    "optimizer_gb_per_s": 2000.0,
}
KNOWN = presets.h100().replace(**OWN_RATES)


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
                **dict(zip(OWN_RATES, (0.03, 0.02, 0.01, 4.0, 3.0, 9.0), strict=True)),
            ),
            CPU_GRID,
        ),
    ],
)
def test_a_known_cluster_is_found_again(device_type, cluster, grid):
    told: list[str] = []
    ranks = KnownRanks(cluster)
    shape = ClusterSpec(num_nodes=cluster.num_nodes, ranks_per_node=cluster.ranks_per_node)
    found = calibrate(
        ranks,
        shape,
        device_type=device_type,
        grid=grid,
        tell=told.append,
    )
    for field in set(ClusterSpec.model_fields) - {"name"}:
        expected, figure = getattr(cluster, field), getattr(found.cluster, field)
        assert figure == (pytest.approx(expected, rel=2e-3) if isinstance(expected, float) else expected), field
    without = {figure.field for figure in found.figures if not figure.measured}
    assert without == ({"flag_us", "fused_rate"} if device_type == "cpu" else set())
    predicted = [*found.passes, *(message for link in found.links for message in link.messages)]
    assert max(abs(each.error) for each in predicted) < 5e-3
    assert all(figure.held_out for figure in found.figures if "tflops" in figure.field or "elementwise" in figure.field)
    assert told == list(PARTS)
    assert len(found.samples_s) == len([fn for fn in ranks.calls if fn is not timings.gpu_facts])
    pairs = {link.name: link.gb_per_s for link in found.links if link.name.startswith("ranks ")}
    size = cluster.node_sizes[0]
    assert pairs == {
        "ranks 0 and 1": pytest.approx(cluster.intra_node_gb_per_s, rel=2e-3),
        f"ranks 0 and {size}": pytest.approx(cluster.inter_node_gb_per_s, rel=2e-3),
    }


class Surprising(KnownRanks):
    """What is held out takes twice as long as the cluster predicts."""

    def _of(self, fn, args, rank):
        found = super()._of(fn, args, rank)
        if fn is not timings.passes:
            return found
        return [
            {of: [(1 + case.held_out) * each for each in windows] for of, windows in by_pass.items()}
            for case, by_pass in zip(args[0], found, strict=True)
        ]


def test_what_is_held_out_changes_no_figure_and_shows_how_well_it_is_predicted():
    usual, surprised = (calibrate(kind(KNOWN), KNOWN, device_type="cuda") for kind in (KnownRanks, Surprising))
    assert surprised.cluster == usual.cluster
    shown = [figure for figure in surprised.figures if figure.held_out]
    assert {figure.field for figure in shown} == {"expert_tflops", *OWN_RATES} - {"optimizer_gb_per_s"}
    for figure in shown:
        assert figure.held_out == pytest.approx([-0.5] * len(figure.held_out), abs=5e-3)
        assert max(map(abs, figure.errors)) < 5e-3


@pytest.mark.parametrize(("nodes", "size"), [(1, 2), (2, 1)])
def test_what_is_not_there_is_not_measured_and_says_so(nodes, size):
    there, absent = ("intra_node", "inter_node") if nodes == 1 else ("inter_node", "intra_node")
    cluster = presets.h100(2).replace(num_nodes=nodes, ranks_per_node=size, multiprocessors=1, **OWN_RATES)
    found = calibrate(KnownRanks(cluster), cluster, grid=CUDA_GRID)
    missing = {f"{absent}_gb_per_s", f"{absent}_us", "flag_us", "fused_rate"}
    assert {figure.field for figure in found.figures if not figure.measured} == missing
    for unit in ("gb_per_s", "us"):
        expected = pytest.approx(getattr(cluster, f"{there}_{unit}"), rel=2e-3)
        assert getattr(found.cluster, f"{there}_{unit}") == getattr(found.cluster, f"{absent}_{unit}") == expected
    text = command.spec_text(found)
    assert ClusterSpec.from_toml(text) == found.cluster
    head = text.partition("\nname")[0]
    assert head.startswith("# Measured by moesys calibrate.\n# ")
    assert "# flag_us: not measured: on a CPU, flags are seen only in Triton's interpreter" in head
    assert "# fused_rate: not measured: on a CPU, MegaKernels run only in Triton's interpreter" in head
    assert found.cluster.fused_rate == 1


def test_a_rank_alone_has_no_links():
    cluster = presets.h100().replace(ranks_per_node=1, **OWN_RATES)
    found = calibrate(KnownRanks(cluster), cluster, device_type="cuda")
    assert found.links == []
    assert {figure.field: figure.how for figure in found.figures if not figure.measured} == {
        "copy_share": "not measured: there is no second rank",
        "flag_us": "not measured: no two ranks share a node",
    }


def test_a_fused_tile_is_no_faster_than_one_apart():
    class SlowerApart(KnownRanks):
        def _of(self, fn, args, rank):
            slower = {"fused": [1.0], "apart": [1.3]}
            return slower if fn is gpu_timings.fused_tiles else super()._of(fn, args, rank)

    found = calibrate(SlowerApart(KNOWN), KNOWN, device_type="cuda")
    (figure,) = (each for each in found.figures if each.field == "fused_rate")
    assert (figure.value, figure.spread.median) == (1.0, pytest.approx(1.3))


# --- on real ranks ----------------------------------------------------------------------------------------------------


def joins_two_hosts(port: int) -> tuple[ClusterSpec, list[int], bool]:
    """As torchrun would start it, on two hosts of one and two ranks."""
    rank = dist.get_rank()
    # Whoever leaves a group that others still enter cuts them off.
    dist.barrier()
    dist.destroy_process_group()
    told = {"RANK": rank, "WORLD_SIZE": 3, "LOCAL_RANK": max(0, rank - 1), "GROUP_RANK": min(rank, 1)}
    told |= {"LOCAL_WORLD_SIZE": 1 + min(rank, 1), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    with mock.patch.dict(os.environ, {name: str(value) for name, value in told.items()}):
        joined, cluster = start_ranks(3)
        gathered = joined.run(dist.get_rank)
        joined.close()
        return cluster, gathered, writes()


def test_ranks_of_torchrun_are_told_apart_by_host(ranks: LocalRanks):
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    hosts = ClusterSpec(num_nodes=2, ranks_per_node=(1, 2))
    assert ranks.run(joins_two_hosts, port, num_ranks=3) == [(hosts, [0, 1, 2], rank == 0) for rank in range(3)]


# --- the command ------------------------------------------------------------------------------------------------------


def run_command(*arguments: str) -> Result:
    return CliRunner().invoke(app, ["calibrate", *arguments], prog_name="moesys")


@pytest.fixture
def _tiny(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setitem(GRIDS, "cpu", TINY)
    monkeypatch.setattr(Effort.__init__, "__defaults__", (QUICK.repeats, QUICK.window_s))


@pytest.mark.usefixtures("_tiny")
def test_two_ranks_are_measured_shown_and_written():
    done = run_command("--ranks", "2", "--repeats", "2", "--out", "new/here")
    assert done.exit_code == 0, done.output
    cluster = ClusterSpec.from_toml(Path("new/here/cluster.toml").read_text())
    assert cluster.node_sizes == (2,)
    assert cluster.name.startswith("1 x 2 ")
    assert "there is no such link" in done.output
    written = json.loads(Path("new/here/calibrate.json").read_text())
    assert written["cluster"] == cluster.model_dump(mode="json")
    samples_s, parts = written["samples_s"], {"basics", "experts", "attention", "elementwise", "experts beside copies"}
    assert set(samples_s) == parts | {"all-to-all inside nodes", "ranks 0 and 1"}
    assert np.shape(samples_s["experts"]) == (2, len(TINY.cases("experts")))
    assert samples_s["experts"][0][0].keys() == {"forward", "input_gradients", "backward"}
    assert samples_s["basics"][0].keys() == {"launch", "memory copy", "update"}
    page = Path("new/here/calibrate.md").read_text()
    assert page.startswith("# moesys calibrate, measured: 1 x 2 ")
    for heading in ("MEASURED: computation", "MEASURED: links", "MEASURED: 1 x 2 "):
        assert heading in page
        assert heading in done.output


@pytest.mark.usefixtures("_tiny")
def test_a_folder_that_takes_no_file_is_refused_before_anything_is_measured(monkeypatch):
    def refuses(**_):
        raise OSError(errno.EROFS, os.strerror(errno.EROFS))

    monkeypatch.setattr(options, "TemporaryFile", refuses)
    monkeypatch.setenv("WORLD_SIZE", "2")
    # Another rank does not write, so it needs no folder; what else is refused, the first rank prints.
    for rank, arguments, words in (
        ("1", ("--out", "nowhere/here.toml", "--ranks", "3"), ""),
        ("0", ("--ranks", "3"), "ranks=3, but torchrun started 2; leave --ranks out"),
        ("0", ("--out", "here.toml"), ". takes no file: Read-only file system; give another path"),
    ):
        monkeypatch.setenv("RANK", rank)
        done = run_command(*arguments)
        assert (done.exit_code, bool(done.output)) == (2, rank == "0")
        assert words in " ".join(done.output.split())


@pytest.mark.usefixtures("_tiny")
def test_what_was_measured_is_written_before_it_is_printed(monkeypatch):
    def stops(*_: object, **__: object) -> None:
        raise BrokenPipeError

    known = KnownRanks(KNOWN.replace(ranks_per_node=2))
    monkeypatch.setattr(torchrun_ranks, "start_ranks", lambda *_, **__: (known, known.cluster))
    monkeypatch.setattr(sheets, "print_sheet", stops)
    with pytest.raises(BrokenPipeError):
        command.calibrate_command(2, output=CommandOutput(Path("here")))
    assert "cluster" in json.loads(Path("here/calibrate.json").read_text())
    ClusterSpec.from_toml(Path("here/cluster.toml").read_text())


def test_gpus_are_those_of_torchrun(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    with pytest.raises(ValueError, match="run torchrun --nproc-per-node 8 -m moesys calibrate --device cuda"):
        command.check_ranks(None, "cuda")
