"""The tuner: finds the fastest of its space by any clock, keeps what it found, and never chooses by itself."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from importlib.metadata import PackageNotFoundError
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from benchmarks.kernels.tile_tuning import tune_blocks
from moesys.config.overlap import MegaKernel
from moesys.kernels.experts import tile_tuner
from moesys.kernels.experts.experts import moe_experts
from moesys.kernels.experts.tile_config import ShapeClass, TileConfig, TileConfigs
from moesys.kernels.experts.tile_tuner import (
    CONTRACTION,
    INTERPRETED,
    MOST_SHARED_BYTES,
    OPS,
    Gpu,
    _cached,
    blocks_for,
    blocks_of,
    cache_file,
    candidates,
)
from moesys.kernels.mega import point
from moesys.kernels.mega.point import blocks_at

SHAPE = ShapeClass(2048, 768, 128, 8, "swiglu", "bfloat16", 2048)
SHAPES = {
    "qwen3-30b": SHAPE,
    "narrow experts": replace(SHAPE, hidden=768, width=64),
    "one row an expert": replace(SHAPE, rows_of_expert=1),
    "widths of one": ShapeClass(1, 1, 1, 1, "swiglu", "bfloat16", 1),
    "one expert": replace(SHAPE, experts=1),
    "mixtral": ShapeClass(4096, 14336, 8, 2, "swiglu", "float16", 4096),
    "not gated": replace(SHAPE, activation="gelu"),
    "relu2": replace(SHAPE, activation="relu2"),
}
GPU = Gpu("NVIDIA Made-up / 9", 100)
CPU = torch.device("cpu")


@pytest.fixture(autouse=True)
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MOESYS_CACHE", str(tmp_path / "cache"))
    monkeypatch.delenv("MOESYS_BLOCKS", raising=False)


class Clock:
    """Says how long a block takes: the farther from the fastest in the list, the longer; remembers what was asked."""

    def __init__(self, fastest: int, failing: tuple[int, ...] = ()) -> None:
        self.fastest, self.failing = fastest, failing
        self.asked: list[tuple[str, int]] = []

    def __call__(self, op: str, blocks: Sequence[TileConfig]) -> list[float | None]:
        self.asked.append((op, len(blocks)))
        return [
            None if place in self.failing else 1.0 + abs(place - self.fastest % len(blocks))
            for place in range(len(blocks))
        ]


@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
@pytest.mark.parametrize("op", OPS)
def test_every_candidate_fits_and_changes_no_bit(op: str, shape: ShapeClass) -> None:
    found = candidates(op, shape)
    assert 1 <= len(found) <= 16
    assert len(set(found)) == len(found)
    for block in found:
        halves = 2 if op == "up" and shape.activation == "swiglu" else 1
        stage_bytes = 2 * block.contraction * (block.rows + halves * block.columns)
        assert block.stages * stage_bytes <= MOST_SHARED_BYTES
        assert block.rows * halves * block.columns <= 128 * 256
        # the numerics class: one contraction, and no tile narrower than a partial sum
        assert block.contraction == CONTRACTION
        assert block.columns >= 32


@pytest.mark.parametrize("op", OPS)
def test_pairs_of_programs_are_tried_behind_what_is_used_untuned(op: str) -> None:
    found = candidates(op, SHAPE)
    pairs = [block for block in found if block.resident == 2]
    assert pairs == found[len(found) - len(pairs) :] != []
    assert {(block.warps, block.stages) for block in pairs} == {(4, 3)}


def test_the_models_choice_is_wide_tiles_by_pointers_and_lower_ones_for_few_rows() -> None:
    wide = TileConfig(128, 256, 64, warps=8, stages=4)
    assert blocks_for(SHAPE) == TileConfigs(replace(wide, columns=128), wide, replace(wide, stages=3), wide, wide)
    assert blocks_for(replace(SHAPE, rows_of_expert=16)).down.rows == 64
    assert [len(candidates(op, replace(SHAPE, dtype="float32"))) for op in OPS] == [1] * 5


@pytest.mark.parametrize(("fastest", "failing", "found"), [(0, (), 0), (3, (), 3), (-1, (), -1), (0, (0, 1), 2)])
def test_the_fastest_of_the_space_is_found_one_op_at_a_time(fastest: int, failing: tuple[int, ...], found: int) -> None:
    clock = Clock(fastest, failing)
    blocks = tune_blocks(SHAPE, clock, GPU)
    assert clock.asked == [(op, len(candidates(op, SHAPE, 100))) for op in OPS]
    assert blocks == TileConfigs(**{op: candidates(op, SHAPE, 100)[found] for op in OPS})


def test_where_all_fail_the_models_choice_stays() -> None:
    assert tune_blocks(SHAPE, Clock(0, failing=tuple(range(16))), GPU) == blocks_for(SHAPE, 100)


def test_what_was_found_is_kept_by_class() -> None:
    other = replace(SHAPE, rows_of_expert=512)
    found = {shape.key: tune_blocks(shape, Clock(place), GPU) for place, shape in enumerate((SHAPE, other))}
    assert _cached(GPU) == found
    again = tune_blocks(SHAPE, Clock(5), GPU)
    assert _cached(GPU) == found | {SHAPE.key: again}


def test_files_are_told_apart_by_gpu_and_versions() -> None:
    path = cache_file(GPU)
    assert path.name.startswith(f"blocks-NVIDIA_Made-up___9-100-torch{torch.__version__}-triton")
    assert len({path, cache_file(replace(GPU, multiprocessors=99)), cache_file(replace(GPU, name="b"))}) == 3


STRINGS = json.dumps({SHAPE.key: {op: {"rows": "128"} for op in OPS}})


@pytest.mark.parametrize("damage", ["", "{", "[1]", '{"a": {"up": 1}}', "null", "\udcff", STRINGS])
def test_a_damaged_file_is_ignored_and_written_anew(damage: str) -> None:
    path = cache_file(GPU)
    path.parent.mkdir()
    path.write_text(damage, errors="surrogateescape")
    assert _cached(GPU) == {}
    found = tune_blocks(SHAPE, Clock(1), GPU)
    assert _cached(GPU) == {SHAPE.key: found}


def test_a_folder_that_cannot_be_written_to_is_known_before_anything_is_timed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("MOESYS_CACHE", str(tmp_path / "file" / "cache"))
    clock = Clock(0)
    with pytest.raises(OSError, match=r"blocks cannot be kept: .*file/cache.*; name a folder .* by MOESYS_CACHE"):
        tune_blocks(SHAPE, clock, GPU)
    assert clock.asked == []
    assert _cached(GPU) == {}


def test_a_user_without_a_home_has_the_models_choice(monkeypatch: pytest.MonkeyPatch) -> None:
    def home() -> Path:
        raise RuntimeError("Could not determine home directory.")

    monkeypatch.setattr(Path, "home", home)
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    monkeypatch.setattr(Gpu, "of", lambda device: GPU)
    found = tune_blocks(SHAPE, Clock(2), GPU)
    assert blocks_of(SHAPE, torch.device("cuda")) == found
    monkeypatch.delenv("MOESYS_CACHE")
    assert blocks_of(SHAPE, torch.device("cuda")) == blocks_for(SHAPE, 100)
    with pytest.raises(OSError, match="no home folder to keep blocks in; name a folder by MOESYS_CACHE"):
        tune_blocks(SHAPE, Clock(2), GPU)


def test_a_copy_that_is_not_installed_has_a_file_too(monkeypatch: pytest.MonkeyPatch) -> None:
    def version(package: str) -> str:
        raise PackageNotFoundError(package)

    monkeypatch.setattr(tile_tuner, "version", version)
    tile_tuner._versions.cache_clear()
    try:
        assert cache_file(GPU).name.endswith("-moesys-not-installed.json")
    finally:
        tile_tuner._versions.cache_clear()


def test_two_writers_lose_nothing() -> None:
    shapes = [replace(SHAPE, rows_of_expert=1 << power) for power in range(16)]
    with ThreadPoolExecutor(4) as pool:
        found = dict(pool.map(lambda shape: (shape.key, tune_blocks(shape, Clock(2), GPU)), shapes))
    assert _cached(GPU) == found
    assert [path.suffix for path in sorted(cache_file(GPU).parent.iterdir())] == [".json", ".lock"]


@pytest.fixture
def pin(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[str], None]:
    def pinned(text: str) -> None:
        (tmp_path / "pinned.json").write_text(text)
        monkeypatch.setenv("MOESYS_BLOCKS", str(tmp_path / "pinned.json"))

    return pinned


def test_pinned_blocks_win_over_what_was_tuned_and_that_over_the_default(
    pin: Callable[[str], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Gpu, "of", lambda device: GPU)
    cuda, pinned = torch.device("cuda"), TileConfigs.all_of(TileConfig(64, 64, 32))
    assert blocks_of(SHAPE, CPU) == TileConfigs.all_of(INTERPRETED)
    assert blocks_of(SHAPE, cuda) == blocks_for(SHAPE, 100)
    # A step neither searches again nor reads a file.
    with monkeypatch.context() as patched:
        patched.setattr(Gpu, "of", lambda device: pytest.fail("looked up again"))
        assert blocks_of(replace(SHAPE), cuda) is blocks_of(SHAPE, cuda)
    found = tune_blocks(SHAPE, Clock(2), GPU)
    assert blocks_of(SHAPE, cuda) == found != blocks_for(SHAPE, 100)
    assert blocks_of(replace(SHAPE, top_k=2), cuda) == blocks_for(replace(SHAPE, top_k=2), 100)
    pin(pinned.to_json())
    assert blocks_of(SHAPE, CPU) == blocks_of(SHAPE, cuda) == pinned
    pin("{}")
    with pytest.raises(ValueError, match=r"MOESYS_BLOCKS=.*pinned\.json: these are no blocks"):
        blocks_of(SHAPE, CPU)
    # A GPU would multiply these in another way.
    pin(replace(TileConfigs.all_of(TileConfig()), down=TileConfig(rows=32)).to_json())
    assert blocks_of(SHAPE, CPU).down.rows == 32
    with pytest.raises(ValueError, match=r"rows=32 of a tile of down in torch\.bfloat16: .* use rows=64 or more"):
        blocks_of(SHAPE, cuda)


def test_the_argument_wins_over_the_pinned_file(pin: Callable[[str], None]) -> None:
    generator = torch.Generator().manual_seed(0)
    x_TH, gate_up, down = (torch.randn(s, generator=generator) for s in ((5, 32), (2, 32, 32), (2, 32, 16)))
    expert_TK, weight_TK = torch.tensor([[0], [1], [1], [0], [1]]), torch.ones(5, 1)
    expected = moe_experts(x_TH, expert_TK, weight_TK, gate_up, down)
    pin("not blocks")
    with pytest.raises(ValueError, match="MOESYS_BLOCKS"):
        moe_experts(x_TH, expert_TK, weight_TK, gate_up, down)
    given = TileConfigs.all_of(TileConfig(16, 64, 32))
    assert torch.equal(moe_experts(x_TH, expert_TK, weight_TK, gate_up, down, blocks=given), expected)


def test_shapes_are_classed_by_rows_of_an_expert() -> None:
    x_TH, down_EHI = torch.empty(300, 64, dtype=torch.bfloat16), torch.empty(8, 64, 32)
    shape = ShapeClass.of(x_TH, down_EHI, 600, "swiglu")
    assert shape == ShapeClass(64, 32, 8, 2, "swiglu", "bfloat16", 64)
    assert ShapeClass.of(x_TH[:0], down_EHI, 0, "swiglu").rows_of_expert == 1
    assert json.loads(json.dumps({shape.key: 1})) == {"64-32-8-2-swiglu-bfloat16-64": 1}


def test_persistent_kernels_leave_what_is_spared_to_others(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: SimpleNamespace(multi_processor_count=132))
    gpu = torch.device("cuda", 0)
    heaps: list[Any] = [SimpleNamespace(arena=SimpleNamespace(device=gpu), num_ranks=ranks) for ranks in (1, 8)]
    points = MegaKernel(), MegaKernel(programs=7)
    assert [[point.programs_at(each, heap) for each in points] for heap in heaps] == [[132, 7], [116, 7]]
    assert [TileConfig(resident=each).num_programs(gpu) for each in (1, 2)] == [132, 264]
    monkeypatch.setenv("MOESYS_SPARED_MULTIPROCESSORS", "16")
    assert TileConfig().num_programs(gpu) == 116
    assert TileConfig(programs=132).num_programs(gpu) == 132
    for wrong in ("132", "-1", "many"):
        monkeypatch.setenv("MOESYS_SPARED_MULTIPROCESSORS", wrong)
        with pytest.raises(ValueError, match=f"MOESYS_SPARED_MULTIPROCESSORS='{wrong}'; use a number from 0 to 131"):
            TileConfig().num_programs(gpu)


@pytest.mark.parametrize("old", [False, True])
def test_ways_that_triton_cannot_compile_are_no_candidates(monkeypatch: pytest.MonkeyPatch, old: bool) -> None:
    monkeypatch.setattr(tile_tuner, "OLD_TRITON", old)
    for op in OPS:
        ways = {block.operands for block in candidates(op, SHAPE)}
        refused = tile_tuner.refused_ways(op, "swiglu")
        assert ways | refused.keys() == {"pointers", "tma", "specialised"}
        assert not ways & refused.keys()
        assert ("specialised" in refused) == (op == "weight_gradient" or (old and op in ("up", "activation_gradient")))


def test_tiles_of_weight_gradients_are_narrow_where_wide_ones_spill(monkeypatch: pytest.MonkeyPatch) -> None:
    given = (MegaKernel(), "swiglu", torch.bfloat16, torch.device("meta"))
    monkeypatch.setattr(point, "OLD_TRITON", False)
    assert blocks_at(*given, 90).weight_gradient.columns == 256
    assert blocks_at(*given, 100).weight_gradient.columns == 128
    monkeypatch.setattr(point, "OLD_TRITON", True)
    old = blocks_at(*given, 90)
    assert (old.weight_gradient.columns, old.input_gradient.columns) == (128, 256)
    assert blocks_at(MegaKernel(warps=4), *given[1:], 90).activation_gradient.columns == 128
    pairs = [blocks_at(MegaKernel(warps=4, tile_columns=128), *given[1:], each).weight_gradient for each in (90, 100)]
    assert [block.columns for block in pairs] == [128, 64]
    assert blocks_at(MegaKernel(warps=4, tile_columns=32), *given[1:], 90).activation_gradient.columns == 32
    # What is asked for narrower stays so.
    assert blocks_at(MegaKernel(tile_columns=64), *given[1:], 100).weight_gradient.columns == 64
    columns = [blocks_of(SHAPE, torch.device("meta"), capability).weight_gradient.columns for capability in (90, 100)]
    assert columns == [256, 128]
