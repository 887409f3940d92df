"""What the assembly of small kernels between ranks says, compiled for Hopper without a GPU."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

# Memory that is read or written by an instruction: the register that holds its address.
LOAD, STORE = (re.compile(rf"\b{kind}\.global\.\S+ .*?\[ (%rd\d+) \+ 0 \]") for kind in ("ld", "st"))


@pytest.fixture(scope="module")
def listings() -> dict[str, tuple[str, int]]:
    """PTX, and bytes in flight, by the kernel's name."""
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    script = Path(__file__).with_name("listings.py")
    environment["PYTHONPATH"] = os.pathsep.join([str(script.parents[2]), environment.get("PYTHONPATH", "")])
    command = [sys.executable, "-W", "ignore", str(script)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-4000:]
    return json.loads(done.stdout)


@pytest.mark.timeout(300)
@pytest.mark.parametrize("kernel", ["_publish", "_receive"])
def test_a_number_is_counted_on_when_all_threads_have_read_it(
    listings: dict[str, tuple[str, int]], kernel: str
) -> None:
    """A warp that came later would read what the first one wrote, and raise a flag for the wrong epoch."""
    read: dict[str, bool] = {}
    counted_on = 0
    for line in listings[kernel][0].splitlines():
        if found := LOAD.search(line):
            read[found[1]] = False
        elif "bar.sync" in line:
            read = dict.fromkeys(read, True)
        elif (found := STORE.search(line)) and found[1] in read:
            assert read[found[1]], line
            counted_on += 1
    assert counted_on == 1


def test_copies_by_programs_have_eight_loads_of_a_thread_on_their_way(listings: dict[str, tuple[str, int]]) -> None:
    assert listings["_copy"][1] == 8 * 16
