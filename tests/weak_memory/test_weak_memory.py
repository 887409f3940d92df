"""The protocol under weak memory: all ranks in one process, interleaved as seeds say, with the bits of ``Sequential``.

What the model holds is tried by itself first. MOESYS_WEAK_SEEDS=0:1000 runs other schedules in the slow test.
"""

from __future__ import annotations

import os
import random
from collections.abc import Iterator

import numpy as np
import pytest
from clocked_memory import Agent, ClockedMemory, Segment, Space
from interleaved_interpreter import interleaved
from mutants import Hunt, all_mutants
from weak_cases import all_cases, counts, given_up, run_once

CASES = all_cases()


@pytest.fixture(scope="module", autouse=True)
def _interleaved() -> Iterator[None]:
    with interleaved():
        yield


# Those that take no more than a tenth of a second.
QUICK = ("counts", "counts of 2 ranks", "two pulls", "pulls", "nobody publishes counts", "nobody shares")
# Memory that grows while a peer is late, both granularities, plans of hosts and of devices, both directions, and waits
# that run out.
FEW = (
    *QUICK,
    "growth beside",
    "tiles",
    "experts",
    "planned on devices",
    "pulls beside",
    "no backward",
    "counts run out",
)


@pytest.mark.parametrize("name", FEW)
def test_no_schedule_changes_a_bit_or_hangs(name: str) -> None:
    for seed in range(3 if name in QUICK else 1):
        shown = run_once(CASES[name], seed)
        assert not shown.by_memory + shown.by_result, f"seed {seed}"


@pytest.mark.slow
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("name", CASES)
def test_more_schedules(name: str) -> None:
    for seed in range(*map(int, os.environ.get("MOESYS_WEAK_SEEDS", "100:150").split(":"))):
        shown = run_once(CASES[name], seed)
        assert not shown.by_memory + shown.by_result, f"seed {seed}"


def test_a_seed_replays() -> None:
    first, again, other = (run_once(CASES["no backward"], seed) for seed in (5, 5, 6))
    assert first == again
    assert first.steps != other.steps


def test_a_rank_that_never_comes_is_a_hang_without_time() -> None:
    late = given_up(counts(3), 1)
    (said,) = run_once(late._replace(jumps=None), 0).by_result
    assert said.startswith("DeadlockError: all wait: ")
    assert "for abort of rank 0 + 0 or published of rank 0 + 128" in said


class Two:
    """Two agents, with a word of payload, 7, and a flag."""

    def __init__(self, seed: int = 0, stale: float = 1.0) -> None:
        self.words = np.array([7, 0], dtype=np.int32)
        self.payload, self.flag = (self.words.ctypes.data + 4 * place for place in range(2))
        segment = Segment(self.payload, self.words.nbytes, "words")
        self.space, self.memory = Space([segment], range(4)), ClockedMemory(4, 2, random.Random(seed), stale)
        view = np.zeros(4, dtype=np.int64)
        self.agents = [Agent(f"agent {rank}", rank, rank, view.copy(), 1, spaces=[self.space]) for rank in (0, 1)]
        for agent in self.agents:
            self.memory.begin(agent)

    def store(self, agent: int, value: int) -> None:
        self.memory.store(self.agents[agent], np.array([self.payload]), np.array([value], dtype=np.int32))

    def load(self, agent: int) -> int:
        return int(self.memory.load(self.agents[agent], np.array([self.payload]), np.dtype(np.int32))[0])

    def atomic(self, agent: int, sem: str, scope: str = "sys") -> None:
        self.memory.atomic(self.agents[agent], self.flag, sem, scope, alone=False)


# Each case says what is missing: (barrier before, release, scope of it, acquire, barrier behind it).
WAYS = {
    "nothing": (True, "release", "sys", "acquire", True),
    "the barrier before the release": (False, "release", "sys", "acquire", True),
    "the release": (True, "relaxed", "sys", "acquire", True),
    "who sees it beyond its GPU": (True, "release", "gpu", "acquire", True),
    "the acquire": (True, "release", "sys", "relaxed", True),
    "the barrier behind the acquire": (True, "release", "sys", "acquire", False),
}


@pytest.mark.parametrize("missing", WAYS)
def test_a_payload_is_seen_behind_its_flag_only_in_one_way(missing: str) -> None:
    barrier, release, scope, acquire, barrier_behind = WAYS[missing]
    two = Two()
    for value in (8, 9):
        two.store(0, value)
        two.agents[0].barrier()
    two.store(0, 10)
    if barrier:
        two.agents[0].barrier()
    two.atomic(0, release, scope)
    two.atomic(1, acquire)
    if barrier_behind:
        two.agents[1].barrier()
    loaded = two.load(1)
    assert (loaded == 10) == (missing == "nothing")
    assert bool(two.memory.findings) == (missing != "nothing")


def test_a_load_returns_any_value_that_is_not_older_than_what_it_knows() -> None:
    seen = set()
    for seed in range(40):
        two = Two(seed, stale=0.7)
        for value in (8, 9, 10):
            two.store(0, value)
            two.agents[0].barrier()
            if value == 8:
                two.atomic(0, "release")
                two.atomic(1, "acquire")
                two.agents[1].barrier()
        seen.add(two.load(1))
    assert seen == {8, 9, 10}


def test_a_store_must_come_behind_the_loads_of_what_it_replaces() -> None:
    two = Two()
    two.load(0)
    two.agents[0].barrier()
    two.atomic(0, "relaxed")
    two.atomic(1, "acquire")
    two.agents[1].barrier()
    two.store(1, 8)
    assert two.memory.findings == ["agent 1 stores what is loaded by agent 0: words + 0"]


def test_threads_of_a_program_need_a_barrier() -> None:
    two = Two()
    two.load(0)
    two.store(0, 8)
    assert two.memory.findings == ["agent 0 stores what is loaded by its own: words + 0"]


SAMPLE = (
    "signals.raise_flag: release",
    "signals.wait: barrier",
    "signals._poll: acquire",
    "arguments._publish: barrier",
    "counts._receive: barrier",
    "pulls._tell_all: release of raise_flag",
    "pulls._await_all: acquire of wait",
)


def test_a_release_an_acquire_or_a_barrier_less_is_found() -> None:
    hunt = Hunt({name: CASES[name] for name in ("counts of 2 ranks", "two pulls")})
    mutants = {mutant.name: mutant for mutant in all_mutants()}
    found = {name: hunt.find(mutants[name], 4) for name in SAMPLE}
    assert all(shown is not None and shown.by_memory for shown in found.values()), found


def test_flags_that_a_tile_raises_never_or_too_early_are_found() -> None:
    hunt = Hunt({"tiles": CASES["tiles"]})
    mutants = {mutant.name: mutant for mutant in all_mutants()}
    never, last_never, early = (
        hunt.find(mutants[f"mega_combine._mega_combine: {lost}"], 4)
        for lost in ("its flags", "its flags 2", "stores before its flags")
    )
    assert never is not None
    assert last_never is not None
    assert never.by_result
    assert last_never.by_result
    assert early is not None
    assert early.by_memory


# Why these may be removed, as far as this model sees.
ENDS = "nothing is read behind it but whether all is over"
OWN = "programs of one rank use it"
NEEDLESS = {
    "signals.wait: acquire": ENDS,
    "signals.all_came: acquire": ENDS,
    "signals._give_up: release": "chooses one program, and carries nothing",
    "signals._give_up: acquire": "chooses one program, and carries nothing",
    "signals._give_up: release 2": "its own rank's next launch is behind it anyway",
    "signals._give_up: other GPUs": OWN,
    "signals._give_up: other GPUs 3": "this rank alone writes and reads it, if no other gave up",
    "signals._read_report: acquire": "shows in one schedule of a thousand: a peer tells behind all waits of this rank",
    "signals._read_report: barrier": "the same",
    "pulls._await_all: barrier of wait": "the kernel ends behind it",
    "pulls._tell_all: barrier of raise_flag": "the kernel has stored nothing before it",
    "arguments._await_sources: barrier of wait": "the kernel ends behind it",
    "arguments._publish: barrier of raise_flag": "the kernel has stored what its own rank alone reads",
    "arguments.raise_or_count: barrier of raise_flag": "the same thread has counted and raises",
    "arguments.raise_or_count: other GPUs of raise_flag": OWN,
    "arguments.raise_or_count: other GPUs of raise_flag 2": OWN,
    "mega_dispatch._fetch: barrier of wait": "another wait follows, with its barrier",
    "mega_combine._mega_combine: other GPUs of raise_flag": OWN,
}


@pytest.mark.slow
@pytest.mark.timeout(7200)
def test_each_of_them_is_found() -> None:
    hunt = Hunt(CASES)
    mutants = {mutant.name: mutant for mutant in all_mutants()}
    missed = {name for name, mutant in mutants.items() if hunt.find(mutant, 4) is None}
    assert missed <= set(NEEDLESS) <= set(mutants)
