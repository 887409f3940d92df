"""A rank that compiles makes nobody wait in a kernel: it does so before it publishes, and ranks meet on their hosts."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest


@pytest.mark.timeout(300)
def test_all_kernels_of_both_directions_are_compiled_before_anything_is_published() -> None:
    """Every signature that a micro-batch launches, for Hopper; the next one compiles nothing again."""
    script = Path(__file__).with_name("compile_before.py")
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    places = [str(script.parents[2]), str(script.parent), environment.get("PYTHONPATH", "")]
    environment["PYTHONPATH"] = os.pathsep.join(places)
    command = [sys.executable, "-W", "ignore", str(script)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-4000:]
    for launches in json.loads(done.stdout):
        met = [place for place, (name, *_) in enumerate(launches) if name == "met"]
        assert len(met) == 1
        ahead, behind = launches[: met[0]], launches[met[0] + 1 :]
        assert all(compiling for *_, compiling in ahead)
        assert not any(compiling for *_, compiling in behind)
        compiled = {(name, signature) for name, signature, _ in ahead}
        assert {(name, signature) for name, signature, _ in behind} <= compiled
        assert {"_publish", "_mega_dispatch", "_mega_combine", "_spoil"} <= {name for name, _ in compiled}
