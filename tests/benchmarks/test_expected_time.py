"""The model of a kernel's time on an H100: each of its terms by hand."""

from __future__ import annotations

import pytest

from benchmarks.kernels import aot_report, expected_time
from benchmarks.kernels.aot import SIZES, Compiled, Size
from benchmarks.kernels.expected_time import Expected, Product, Work, expected, product_us, resident_programs
from benchmarks.kernels.op_work import DIRECTIONS, mega_of, product_of, work_of
from benchmarks.kernels.published_peers import BEST
from moesys.kernels.experts.ahead_of_time import MachineCode
from moesys.kernels.experts.tile_config import TileConfig

BLOCK = TileConfig(rows=128, columns=256, contraction=64, stages=4)


def code(registers: int = 32, threads: int = 128, shared: int = 0, flight: int = 64) -> MachineCode:
    return MachineCode("kernel", registers, 0, 0, shared, (), (), (4, 16), (16,), flight, 0, threads, False)


@pytest.mark.parametrize(
    ("machine", "programs"),
    [
        (code(), 16),  # 65,536 registers for 32 of 128 threads; 2,048 threads
        (code(registers=33), 12),  # 40 are given
        (code(threads=1024), 2),
        (code(shared=100_000), 2),
        (code(registers=255, threads=256, shared=200_000), 1),
    ],
)
def test_resident_programs(machine: MachineCode, programs: int) -> None:
    assert resident_programs(machine) == programs


def test_memory_is_as_fast_as_what_is_in_flight() -> None:
    """A program of 32 threads with 16 bytes each: 132 · 512 B a latency."""
    alone = code(registers=255, threads=32, shared=220_000, flight=16)
    latency_us = 2 * 479 / 1755
    found = expected(Work(0.0, 1e6), alone, [], None)
    assert found.us == pytest.approx(1 + 1e6 / (132 * 512 / latency_us))
    assert found.roofline_us == pytest.approx(1e6 / 3.35e6)
    # Enough in flight: what streams reach.
    assert expected(Work(0.0, 1e9), code(), [], None).us == pytest.approx(1 + 1e9 / (0.9 * 3.35e6))


def test_products_take_waves_of_tiles() -> None:
    """132 groups of 192 rows and 256 columns: two tiles of rows each, two waves of 10 steps."""
    product = Product(132, 192.0, 256, 640.0)
    step_us = 2 * 128 * 256 * 64 / (0.7 * 6e6)
    one_wave = 10 * step_us + 128 * 256 * 2 / 8e4 + 2 * 479 / 1755
    assert product_us(product, BLOCK) == pytest.approx(2 * one_wave)
    # One tile more is a wave more.
    assert product_us(product._replace(groups=133), BLOCK) == pytest.approx(3 * one_wave)
    assert product_us(product._replace(groups=133, columns=257), BLOCK) > product_us(product, BLOCK) * 2


def test_narrow_tiles_wait_for_their_operands_and_shallow_pipelines_for_latency() -> None:
    product = Product(132, 32.0, 64, 6400.0)
    narrow = TileConfig(rows=64, columns=64, contraction=64, stages=4)
    loads_us = 128 * 64 * 2 / 8e4
    assert product_us(product, narrow) == pytest.approx(100 * loads_us + 64 * 64 * 2 / 8e4 + 2 * 479 / 1755)
    shallow = TileConfig(rows=64, columns=64, contraction=64, stages=2)
    assert product_us(product, shallow) == pytest.approx(100 * 2 * 479 / 1755 + 64 * 64 * 2 / 8e4 + 2 * 479 / 1755)


def test_rows_of_peers_are_waited_for_where_they_are_pulled() -> None:
    product, machine = Product(132, 64.0, 256, 64.0), code(registers=255, threads=256, flight=128)
    work = Work(0.0, 0.0, 1e7)
    pushed = expected(work, machine, [product], BLOCK)
    pulled = expected(work, machine, [product], BLOCK, pulls=True)
    assert pushed.us == pytest.approx(1e7 / 450e3)
    assert pulled.us == pytest.approx(max(1e7 / 450e3, 1 + product_us(product, BLOCK) + 1e7 * 1.5 / (132 * 32768)))
    # With a sixteenth on their way they are what takes the time.
    slow = expected(work, code(registers=255, threads=256, flight=8), [product], BLOCK, pulls=True)
    assert slow.us > 1e7 * 1.5 / (132 * 256 * 16)


def test_work_is_that_of_a_layer() -> None:
    """Products of both directions are 6 and 12 times T·K·H·I, as the bench counts them."""
    for size in SIZES:
        rows = size.T * size.K * size.H * size.I
        for direction, times in (("forward", 6), ("backward", 12)):
            ops = [op for op in DIRECTIONS[direction] if product_of(op, size) is not None]
            works = [work_of(op, size) for op in ops]
            assert sum(work.flops for work in works if work is not None) == times * rows
            products = [product_of(op, size) for op in ops]
            assert sum(
                2 * of.groups * of.rows * of.columns * of.contraction * of.halves for of in products if of is not None
            ) == pytest.approx(times * rows)


def test_a_mega_kernel_does_the_same_in_larger_groups_over_links() -> None:
    size = Size("toy", 64, 32, 16, 8, 2)
    found = mega_of("up", size, 4)
    assert found is not None
    work, (product,) = found
    own = work_of("up", size)
    assert own is not None
    assert (work.flops, work.memory_bytes) == (own.flops, own.memory_bytes)
    assert work.link_bytes == 64 * 2 * 32 * 2 * 3 / 4
    assert (product.groups, product.rows) == (2, 64 * 2 / 2)
    assert mega_of("counts", size, 4) is None
    backward = mega_of("input_gradient", size, 4)
    assert backward is not None
    assert len(backward[1]) == 3


def test_the_report_has_a_row_for_each_op_that_works_and_each_direction() -> None:
    size = SIZES[0]
    tile = code(registers=255, threads=256, shared=200_000)
    ops = [*DIRECTIONS["forward"], *DIRECTIONS["backward"], "route", "fused up"]
    rows = [Compiled(size.name, op, None if op in ("combine", "gather_sum") else BLOCK, tile) for op in ops]
    # Beside a product's kernel, one that adds its partial sums up.
    rows.append(Compiled(size.name, "activation_gradient", None, code()))
    kernels = list(aot_report.modelled(rows, SIZES))
    assert [row.op for row in kernels] == [op for op in ops if op != "route"]
    layers = list(aot_report.modelled_layers(kernels, SIZES))
    assert [(row.size.name, row.direction) for row in layers] == [(size.name, "forward"), (size.name, "backward")]
    forward_us = sum(row.time.us for row in kernels[:3])
    assert layers[0].tflops == pytest.approx(6 * 32768 * 8 * 2048 * 768 / forward_us / 1e6)
    assert (layers[0].peer_tflops, layers[1].peer_tflops) == BEST[size.name][:2]
    assert 0 < layers[0].time.fraction < 1


def test_nothing_is_expected_above_its_roofline() -> None:
    for size in SIZES:
        for op in (*DIRECTIONS["forward"], *DIRECTIONS["backward"]):
            work, product = work_of(op, size), product_of(op, size)
            assert work is not None
            found = expected(work, code(flight=128), [product] if product else [], BLOCK if product else None)
            assert found.fraction < 1, (size.name, op)
    assert Expected(4.0, 1.0).fraction == 0.25
    assert expected_time.OF_CUBLAS["pointers"] < expected_time.OF_CUBLAS["specialised"]
