"""Kernels compiled for Hopper without a GPU: the machine code has what was claimed of it."""

import json
import os
import subprocess
import sys

import pytest
import triton

from moesys.kernels.blocks import Blocks
from moesys.kernels.tiles import Block
from moesys.kernels.tuner import PINNED

GEMMS = {"up", "down", "activation_gradient", "input_gradient", "dW1", "dW2"}
SWEEP = os.environ.get("MOESYS_SWEEP") == "1"


def compiled(folder, size, *options, variables=None):
    """The report of ``moesys bench kernels --aot``, which says that nothing falls short."""
    environment = {name: value for name, value in os.environ.items() if name not in ("TRITON_INTERPRET", PINNED)}
    command = [sys.executable, "-m", "moesys", "bench", "kernels", "--aot", "--size", size, *options]
    done = subprocess.run(
        [*command, "--json", str(folder / "rows.json")],
        env=environment | (variables or {}),
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr[-4000:]
    return json.loads((folder / "rows.json").read_text())


@pytest.mark.timeout(900)
@pytest.mark.parametrize("size", ["all"] if SWEEP else ["qwen3-30b"])
def test_no_spills_tensor_cores_and_wide_copies(tmp_path, size):
    """At the blocks that are used untuned, at least 128x128, with the hints of a real launch."""
    rows = compiled(tmp_path, size, "--no-mega")
    for row in rows:
        code = row["code"]
        assert row["wrong"] == ""
        assert (code["spills"], code["stack_bytes"]) == (0, 0)
        assert code["shared_bytes"] <= 232_448
        if row["op"] in GEMMS and row["tile"]:
            tile_rows, columns, _ = map(int, row["tile"].split("x"))
            assert tile_rows * columns >= 128 * 128
            assert code["mma"]
            assert set(code["copy_bytes"]) <= {16}
    assert {row["op"] for row in rows} >= GEMMS | {"route", "tiles", "groups", "combine", "counts", "split", "replicas"}


MEGA = """
import json, torch
from moesys.lab.bench.kernels_aot import SIZES
from moesys.lab.bench.kernels_aot_mega import compile_mega
rows = [row for size in SIZES[:{sizes}] for row in compile_mega(size, torch.bfloat16, print, {points})]
print(json.dumps([(row.op, row.wrong, row.tile, row.code.copy_bytes, row.moves_rows) for row in rows]))
"""


@pytest.mark.timeout(900)
def test_mega_kernels_spill_nothing_and_move_rows_in_words_of_16_bytes():
    """One size where both kernels are fused; with MOESYS_SWEEP all points at all sizes."""
    program = MEGA.format(sizes=6 if SWEEP else 1, points="" if SWEEP else "['fused']")
    environment = {name: value for name, value in os.environ.items() if name not in ("TRITON_INTERPRET", PINNED)}
    done = subprocess.run([sys.executable, "-c", program], env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-4000:]
    rows = json.loads(done.stdout.splitlines()[-1])
    assert [(op, wrong) for op, wrong, *_ in rows if wrong] == []
    assert {op.split()[-1] for op, *_ in rows} == {"up", "activation_gradient", "down", "input_gradient"}
    # The waits before a product leave its operands' copies in a pipeline.
    assert all(16 in widths for _, _, tile, widths, _ in rows if tile)
    assert all(moves for *_, moves in rows) or SWEEP


def test_an_interpreting_process_compiles_nothing():
    from moesys.kernels.ahead_of_time import compiling

    with pytest.raises(RuntimeError, match="TRITON_INTERPRET=1 compiles nothing"), compiling():
        pass


@pytest.mark.timeout(900)
@pytest.mark.skipif(triton.__version__.startswith("3.6."), reason="3.6 cannot specialise epilogues that split a tile")
def test_specialised_warps_and_descriptors_are_in_the_machine_code(tmp_path):
    """Triton ignores a wish to specialise that it cannot fulfil; and pinned blocks are what is compiled."""
    wide, square = (
        Block(128, columns, 64, warps=4, stages=stages, operands="specialised")
        for columns, stages in ((256, 4), (128, 4))
    )
    pinned = Blocks(square, wide, square, wide, Block(128, 256, 64, stages=4))
    (tmp_path / "blocks.json").write_text(pinned.to_json())
    rows = compiled(tmp_path, "qwen3-30b", "--no-mega", variables={"MOESYS_BLOCKS": str(tmp_path / "blocks.json")})
    gemms = {row["op"]: row["code"] for row in rows if row["tile"] and row["op"] not in {"dW1", "dW2"}}
    assert set(gemms) == {"up", "down", "activation_gradient", "input_gradient"}
    for op, code in gemms.items():
        assert code["specialised"], op
        assert code["tma_loads"] > 0
        assert code["mma"]
        assert code["copy_bytes"] == []
        assert code["threads"] == 384
        assert (code["spills"], code["stack_bytes"]) == (0, 0)
    assert "_gather_rows" in {row["code"]["name"] for row in rows}
