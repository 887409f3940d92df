"""Kernels compiled for Hopper without a GPU: the machine code has what was claimed of it. In slow tests also by the
oldest Triton that moesys runs on, torch 2.11's; `make aot` compiles those that compute for Blackwell too.
"""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from compile_for_hopper import MEGA_QUICK, PRODUCTS, QUICK, SPECIALISES

from moesys.kernels.experts.tile_tuner import PINNED

ROOT = Path(__file__).parents[2]
OLDEST = ROOT / ".venv" / "oldest-triton"
SCRIPT = Path(__file__).with_name("compile_for_hopper.py")
pytestmark = pytest.mark.timeout(2700)
GEMMS = {*PRODUCTS, "dW1", "dW2"}
SWEEP = os.environ.get("MOESYS_SWEEP") == "1"
# Of one kernel more than one: a matrix as it lies or transposed; either side gathered; with and without weights.
SIGNATURES = {"_grouped_gemm": 2, "_outer_products": 2, "_combine": 2}
# Memory that is read or written by an instruction: the register that holds its address.
LOAD, STORE = (re.compile(rf"\b{kind}\.global\.\S+ .*?\[ (%rd\d+) \+ 0 \]") for kind in ("ld", "st"))


def compiled_into(folder, *modes, before=()):
    """The folder, when one process in which Triton does not interpret has written what it compiled into it. ``before``:
    first paths.
    """
    environment = {name: value for name, value in os.environ.items() if name not in ("TRITON_INTERPRET", PINNED)}
    places = [*before, ROOT, ROOT / "tests" / "overlap", environment.get("PYTHONPATH", "")]
    environment["PYTHONPATH"] = os.pathsep.join(map(str, places))
    command = [sys.executable, "-W", "ignore", SCRIPT, folder, *modes]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr[-4000:]
    return folder


@pytest.fixture(scope="module")
def compiled(tmp_path_factory):
    return compiled_into(tmp_path_factory.mktemp("compiled"), *["sweep"] * SWEEP)


@pytest.mark.slow
@pytest.mark.parametrize("version", ["", "3.6."])
def test_every_kernel_compiles_and_spills_nothing(version, tmp_path):
    if version and not OLDEST.is_dir():
        pytest.skip("make .venv/oldest-triton installs it")
    found = written(compiled_into(tmp_path, "all", before=[OLDEST] * bool(version)), "all")
    assert found["triton"].startswith(version)
    assert found["known"] >= 40
    assert (found["not"], found["wrong"]) == ([], [])


def rows_of(folder, name):
    return written(folder, name)["rows"]


def written(folder, name):
    return json.loads((folder / f"{name}.json").read_text())


def test_no_spills_tensor_cores_and_wide_copies(compiled):
    """At the blocks that are used untuned, at least 128x128, with the hints of a real launch."""
    rows = rows_of(compiled, "usual")
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
    others = {"route", "tiles", "groups", "combine", "counts", "split", "shares", "chunks"}
    assert {row["op"] for row in rows} >= (GEMMS | others if SWEEP else {*QUICK})


def test_mega_kernels_spill_nothing_and_move_rows_in_words_of_16_bytes(compiled):
    """One op of each kernel at one size where both are fused; with MOESYS_SWEEP all ops and points at all sizes."""
    rows = rows_of(compiled, "mega")
    assert [(row["op"], row["wrong"]) for row in rows if row["wrong"]] == []
    assert {row["op"].split()[-1] for row in rows} == ({*PRODUCTS} if SWEEP else {*MEGA_QUICK})
    # The waits before a product leave its operands' copies in a pipeline.
    assert all(16 in row["code"]["copy_bytes"] for row in rows if row["tile"])
    assert all(row["moves_rows"] for row in rows) or SWEEP
    # Eight loads of a thread before it stores, where rows are fetched; one left a link idle most of the time.
    fetching = {row["op"].split()[-1] for row in rows if row["code"]["flight_bytes"] >= 128}
    assert fetching >= ({"up", "activation_gradient"} if SWEEP else {"activation_gradient"})


def test_an_interpreting_process_compiles_nothing():
    from benchmarks.kernels.ahead_of_time import compiling

    with pytest.raises(RuntimeError, match="TRITON_INTERPRET=1 compiles nothing"), compiling():
        pass


@pytest.mark.skipif(not SWEEP, reason="MOESYS_SWEEP=1 compiles them")
@pytest.mark.skipif(not SPECIALISES, reason="this Triton cannot specialise epilogues that split a tile")
def test_specialised_warps_and_descriptors_are_in_the_machine_code(compiled):
    """Triton ignores a wish to specialise that it cannot fulfil; and pinned blocks are what is compiled."""
    rows = rows_of(compiled, "pinned")
    gemms = {row["op"]: row["code"] for row in rows if row["tile"]}
    assert set(gemms) == set(PRODUCTS)
    for op, code in gemms.items():
        assert code["specialised"], op
        assert code["tma_loads"] > 0
        assert code["mma"]
        assert code["copy_bytes"] == []
        assert code["threads"] == 384
        assert (code["spills"], code["stack_bytes"]) == (0, 0)
    assert [row["wrong"] for row in rows if row["wrong"]] == []
    assert "_gather_rows" in {row["code"]["name"] for row in rows}


def test_counts_compile_nothing_anew(compiled):
    """Nor does a layer without tokens, with one, or with other experts, or a split of other sizes."""
    counted = written(compiled, "signatures")
    assert len(counted["first"]) >= 10
    for name, number in counted["first"].items():
        assert number == SIGNATURES.get(name, 1), name
    assert not any(counted["again"].values()), counted["again"]
    assert counted["splits"] == {"_fill_quotas": 1, "_push": 1, "_share_out": 1}


@pytest.mark.parametrize("kernel", ["_publish", "_receive"])
def test_a_number_is_counted_on_when_all_threads_have_read_it(compiled, kernel):
    """A warp that came later would read what the first one wrote, and raise a flag for the wrong epoch."""
    read, counted_on = {}, 0
    for line in written(compiled, "listings")[kernel][0].splitlines():
        if found := LOAD.search(line):
            read[found[1]] = False
        elif "bar.sync" in line:
            read = dict.fromkeys(read, True)
        elif (found := STORE.search(line)) and found[1] in read:
            assert read[found[1]], line
            counted_on += 1
    assert counted_on == 1


def test_nobody_waits_for_the_answer_of_a_raised_flag(compiled):
    """It comes from a peer: its register is no operand of any instruction."""
    ptx = written(compiled, "listings")["_publish"][0]
    answers = re.findall(r"\batom\.\S*\.exch\.\S* (%r\d+),", ptx)
    assert answers
    assert not [line for answer in answers for line in re.findall(rf".*,.*{answer}\b.*", ptx)]


def test_copies_by_programs_have_eight_loads_of_a_thread_on_their_way(compiled):
    assert written(compiled, "listings")["_copy"][1] == 8 * 16


def test_all_kernels_of_both_directions_are_compiled_before_anything_is_published(compiled):
    """A rank that compiles makes nobody wait in a kernel: it compiles every signature that a micro-batch launches
    before it publishes, ranks meet on their hosts, and the next micro-batch compiles nothing again.
    """
    for launches in written(compiled, "launches"):
        met = [place for place, (name, *_) in enumerate(launches) if name == "met"]
        assert len(met) == 1
        ahead, behind = launches[: met[0]], launches[met[0] + 1 :]
        assert all(compiling for *_, compiling in ahead)
        assert not any(compiling for *_, compiling in behind)
        names = {(name, signature) for name, signature, _ in ahead}
        assert {(name, signature) for name, signature, _ in behind} <= names
        assert {"_publish", "_mega_dispatch", "_mega_combine", "_spoil"} <= {name for name, _ in names}
