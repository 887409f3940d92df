"""Kernels compiled for Hopper without a GPU: the machine code has what was claimed of it."""

import json
import os
import subprocess
import sys

import pytest

GEMMS = {"up", "down", "activation_gradient", "input_gradient", "dW1", "dW2"}
SWEEP = os.environ.get("MOESYS_SWEEP") == "1"


@pytest.mark.timeout(900)
@pytest.mark.parametrize("size", ["all"] if SWEEP else ["qwen3-30b"])
def test_no_spills_tensor_cores_and_wide_copies(tmp_path, size):
    """At the blocks that are used, at least 128x128, with the hints of a real launch."""
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    command = [sys.executable, "-m", "moesys", "bench", "kernels", "--aot", "--size", size]
    done = subprocess.run(
        [*command, "--json", str(tmp_path / "rows.json")], env=environment, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr[-4000:]
    rows = json.loads((tmp_path / "rows.json").read_text())
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
    assert {row["op"] for row in rows} >= GEMMS | {"route", "tiles", "groups", "combine", "split", "replicas"}


def test_an_interpreting_process_compiles_nothing():
    from moesys.kernels.ahead_of_time import compiling

    with pytest.raises(RuntimeError, match="TRITON_INTERPRET=1 compiles nothing"), compiling():
        pass
