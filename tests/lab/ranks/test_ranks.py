"""LocalRanks: results by rank, failures that name themselves, and nothing left behind."""

import contextlib
import os
import signal
import subprocess
import sys
import tempfile
import time
from multiprocessing import Pipe
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

from moesys.lab.ranks.pool import LocalRanks, RankError, RankTimeouts
from moesys.lab.ranks.process import ProcessSettings, _serve


def sum_of_ranks(offset: float) -> tuple[int, int, float]:
    value_1 = torch.tensor([offset + dist.get_rank()])
    dist.all_reduce(value_1)
    return dist.get_rank(), dist.get_world_size(), value_1.item()


def process_and_threads() -> tuple[int, int]:
    return os.getpid(), torch.get_num_threads()


def big_tensor(num_values: int) -> torch.Tensor:
    return torch.full((num_values,), float(dist.get_rank()))


def product_lies_on_its_own_mesh() -> bool:
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    tensor = distribute_tensor(torch.ones(dist.get_world_size()), mesh, [Shard(0)])
    return (tensor * 2).device_mesh is mesh


def tensors_back(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    return tensors


def fail_on(failing: int) -> None:
    if dist.get_rank() == failing:
        raise ValueError(f"boom\non {failing}")
    dist.barrier()


def blocked_signals() -> set[int]:
    return set(signal.pthread_sigmask(signal.SIG_BLOCK, []))


def exit_on(failing: int, code: int) -> int:
    if dist.get_rank() == failing:
        sys.exit(code)
    return dist.get_rank()


def signal_on(failing: int, number: int) -> int:
    if dist.get_rank() == failing:
        os.kill(os.getpid(), number)
    return dist.get_rank()


def sleep_on(sleeping: int, seconds: float) -> int:
    if dist.get_rank() == sleeping:
        time.sleep(seconds)
    return dist.get_rank()


def threads_of_groups() -> int:
    """Threads of gloo that run, in Linux."""
    tasks = Path("/proc/self/task").iterdir()
    return sum((task / "comm").read_text().startswith("gloo") for task in tasks)


def leave_groups_in_circles(number: int) -> int:
    for _ in range(number):
        circle = [dist.new_group()]
        circle.append(circle)
    return threads_of_groups()


def wait_for_threads_to_end(left: int) -> int:
    deadline_s = time.monotonic() + 10
    while threads_of_groups() > left and time.monotonic() < deadline_s:
        time.sleep(0.01)
    return threads_of_groups()


def unpicklable_result() -> object:
    return lambda: None


def running(pid: int) -> bool:
    try:
        with open(f"/proc/{pid}/stat") as stat:
            return stat.read().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


@pytest.mark.parametrize("num_ranks", [4, 1, 2, 3])
def test_each_run_has_a_group_of_exactly_its_ranks(ranks: LocalRanks, num_ranks: int) -> None:
    total = num_ranks * 10.0 + sum(range(num_ranks))
    assert ranks.run(sum_of_ranks, 10.0, num_ranks=num_ranks) == [(rank, num_ranks, total) for rank in range(num_ranks)]


def test_no_run_meets_the_meshes_of_the_one_before(ranks: LocalRanks) -> None:
    for _ in range(2):
        assert ranks.run(product_lies_on_its_own_mesh, num_ranks=2) == [True, True]


def test_processes_stay_between_runs_and_have_one_thread(ranks: LocalRanks) -> None:
    first = ranks.run(process_and_threads)
    assert ranks.run(process_and_threads, num_ranks=3) == first[:3]
    assert len({pid for pid, _ in first}) == 4
    assert all(threads == 1 for _, threads in first)


def test_a_pool_has_the_threads_that_it_is_given_and_close_leaves_no_process(ranks: LocalRanks) -> None:
    with LocalRanks(2, threads=2) as pool:
        pids = [pid for pid, threads in pool.run(process_and_threads) if threads == 2]
        assert [running(pid) for pid in pids] == [True, True]
    assert not any(running(pid) for pid in pids)


def test_large_results_come_back_by_value(ranks: LocalRanks) -> None:
    zeros, ones = ranks.run(big_tensor, 5_000_000, num_ranks=2)
    assert zeros.nbytes == ones.nbytes == 20_000_000
    assert zeros.eq(0).all()
    assert ones.eq(1).all()
    ones[0] = 7.0
    assert not ones.is_shared()


def test_tensors_of_every_kind_survive_the_journey(ranks: LocalRanks) -> None:
    sent = {
        "bfloat16": torch.tensor([[1.5, -2.0]], dtype=torch.bfloat16),
        "bool": torch.tensor([True, False]),
        "complex": torch.tensor([1 + 2j]),
        "empty": torch.zeros(0, 3, dtype=torch.int64),
        "scalar": torch.tensor(3, dtype=torch.int16),
        "transposed": torch.arange(6.0).reshape(2, 3).T,
        "requires_grad": torch.ones(2, requires_grad=True),
        "parameter": torch.nn.Parameter(torch.ones(2)),
    }
    (back,) = ranks.run(tensors_back, sent, num_ranks=1)
    for name, tensor in sent.items():
        assert type(back[name]) is type(tensor), name
        assert back[name].requires_grad == tensor.requires_grad, name
        torch.testing.assert_close(back[name], tensor, rtol=0, atol=0)


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_groups_that_a_run_leaves_behind_have_no_threads(ranks: LocalRanks) -> None:
    before = ranks.run(threads_of_groups)
    assert ranks.run(leave_groups_in_circles, 3) == [threads + 3 for threads in before]
    # Groups of earlier runs may end too.
    after = ranks.run(wait_for_threads_to_end, max(before))
    assert all(now <= then for now, then in zip(after, before, strict=True))


def test_an_exception_comes_back_with_the_tracebacks_of_all_that_failed(ranks: LocalRanks) -> None:
    with pytest.raises(RankError, match=r"^3 of 3 ranks failed: rank 1 raised ValueError: boom; rank") as caught:
        ranks.run(fail_on, 1, num_ranks=3)
    failures = caught.value.failures
    assert next(iter(failures)) == 1
    assert set(failures) == {0, 1, 2}
    assert "in fail_on" in failures[1]
    assert "ValueError: boom\non 1" in failures[1]
    assert "dist.barrier()" in failures[0]
    assert failures[1] in str(caught.value) + "\n"
    assert ranks.run(sum_of_ranks, 0.0, num_ranks=2) == [(0, 2, 1.0), (1, 2, 1.0)]


def test_others_that_do_not_fail_get_a_short_grace(ranks: LocalRanks) -> None:
    with LocalRanks(2, timeouts=RankTimeouts(grace_s=0.2)) as pool, pytest.raises(RankError) as caught:
        pool.run(fail_first_sleep_second)
    assert "rank 1 gave no answer within 0.2 s of the first failure" in str(caught.value)
    assert "in fail_first_sleep_second" in caught.value.failures[1]


def fail_first_sleep_second() -> None:
    if dist.get_rank() == 0:
        raise ValueError("first")
    time.sleep(60)


@pytest.mark.parametrize(
    ("fn", "args", "reason"),
    [
        (signal_on, (2, signal.SIGKILL), "was killed by signal 9"),
        (exit_on, (2, 3), "exited with code 3"),
    ],
    ids=["killed", "exited"],
)
def test_a_dead_rank_is_named(ranks: LocalRanks, fn: object, args: tuple[int, int], reason: str) -> None:
    with pytest.raises(RankError, match=f"^1 of 3 ranks failed: rank 2 {reason}$") as caught:
        ranks.run(fn, *args, num_ranks=3)
    assert caught.value.failures == {2: reason}


def test_a_result_that_cannot_be_pickled_is_a_failure(ranks: LocalRanks) -> None:
    with pytest.raises(RankError, match="unpicklable_result"):
        ranks.run(unpicklable_result, num_ranks=1)


def test_ranks_without_an_answer_are_named_with_their_stacks(ranks: LocalRanks) -> None:
    ranks.run(process_and_threads)
    with pytest.raises(RankError, match=r"^1 of 3 ranks failed: rank 1 gave no answer within 0.5 s") as caught:
        ranks.run(sleep_on, 1, 60.0, num_ranks=3, timeout_s=0.5)
    assert "in sleep_on" in caught.value.failures[1]
    ranks.run(process_and_threads)
    with pytest.raises(RankError, match=r"^2 of 3 ranks failed: ranks 0, 2 gave no answer within 0.5 s"):
        ranks.run(barrier_without, 1, num_ranks=3, timeout_s=0.5)


def barrier_without(missing: int) -> None:
    if dist.get_rank() != missing:
        dist.barrier()


def test_outcomes_tells_who_died_and_what_the_others_returned(ranks: LocalRanks) -> None:
    pids = [pid for pid, _ in ranks.run(process_and_threads)]
    killed = ranks.outcomes(signal_on, 2, signal.SIGKILL, expect_dead={2})
    assert [outcome.kind for outcome in killed] == ["returned", "returned", "died", "returned"]
    assert [outcome.result for outcome in killed] == [0, 1, None, 3]
    assert killed[2].reason == "was killed by signal 9"
    stopped = ranks.outcomes(signal_on, 0, signal.SIGSTOP, num_ranks=2, expect_dead={0})
    assert [outcome.kind for outcome in stopped] == ["silent", "returned"]
    assert not any(running(pid) for pid in pids)


def test_a_rank_killed_between_runs_is_replaced(ranks: LocalRanks) -> None:
    pid, _ = ranks.run(process_and_threads, num_ranks=2)[1]
    os.kill(pid, signal.SIGKILL)
    # Until nothing is left: a zombie's threads may still hold its pipes open.
    with contextlib.suppress(ProcessLookupError):
        while True:
            os.kill(pid, 0)
            time.sleep(0.01)
    assert ranks.run(sum_of_ranks, 0.0, num_ranks=2) == [(0, 2, 1.0), (1, 2, 1.0)]


def test_ctrl_c_is_for_this_process_and_not_for_ranks_from_their_first_import_on(ranks: LocalRanks) -> None:
    assert all(signal.SIGINT in blocked for blocked in ranks.run(blocked_signals))
    assert signal.SIGINT not in blocked_signals()


def test_wrong_sizes_are_refused(ranks: LocalRanks) -> None:
    with pytest.raises(ValueError, match="num_ranks=5 must be between 1 and 4, the ranks of the pool"):
        ranks.run(process_and_threads, num_ranks=5)
    with pytest.raises(ValueError, match="threads=0 must be at least 1"):
        LocalRanks(2, threads=0)


ORPHANING = """
import os, signal, sys, time
import torch.distributed as dist
from moesys.lab.ranks.pool import LocalRanks

def end_parent(parent, pids_path):
    with open(f"{pids_path}{dist.get_rank()}", "w") as file:
        file.write(str(os.getpid()))
    dist.barrier()
    if dist.get_rank() == 0:
        os.kill(parent, signal.SIGKILL)
    if dist.get_rank() == 1:
        os.kill(os.getpid(), signal.SIGSTOP)
    time.sleep(60)

if __name__ == "__main__":
    ranks = LocalRanks(3, environment={"MOESYS_TEST_VARIABLE": "here"})
    print(ranks.run(os.getenv, "MOESYS_TEST_VARIABLE"), os.getenv("MOESYS_TEST_VARIABLE"), flush=True)
    ranks.run(end_parent, os.getpid(), sys.argv[1])
"""


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux ends a stopped process with its parent")
def test_ranks_have_variables_from_their_start_and_end_with_a_killed_parent_even_while_stopped(tmp_path: Path) -> None:
    """In a process of its own, as this one's first pool has started already, and where the folder for temporary files
    has a path that is too long for the address of a socket.
    """
    script, place = tmp_path / "orphaning.py", tmp_path / ("long" * 30)
    script.write_text(ORPHANING)
    place.mkdir()
    paths = os.pathsep.join(path for path in sys.path if path)
    environment = {**os.environ, "PYTHONPATH": paths, "TMPDIR": str(place)}
    ended = subprocess.run(
        [sys.executable, script, f"{tmp_path}/pid"], env=environment, stdout=subprocess.PIPE, text=True, timeout=60
    )
    assert ended.stdout == "['here', 'here', 'here'] None\n"
    assert ended.returncode == -signal.SIGKILL
    pids = [int((tmp_path / f"pid{rank}").read_text()) for rank in range(3)]
    deadline_s = time.monotonic() + 20
    while any(running(pid) for pid in pids) and time.monotonic() < deadline_s:
        time.sleep(0.02)
    assert not any(running(pid) for pid in pids)


def unwritten_memory() -> list[torch.Tensor]:
    scope = {"__name__": "moesys.probe", "torch": torch}
    exec("like = torch.zeros(2, dtype=torch.int32)\nmade = [torch.empty(2), torch.empty_like(like)]", scope)
    return scope["made"]


def test_memory_that_moesys_leaves_unwritten_shows(ranks: LocalRanks) -> None:
    for floats, integers in (unwritten_memory(), *ranks.run(unwritten_memory, num_ranks=1)):
        assert floats.isnan().all()
        assert integers.eq(torch.iinfo(torch.int32).max).all()


def listening_addresses() -> list[str]:
    """Returns the addresses, in hexadecimal, at which this process listens, by Linux's list of its sockets."""
    links = []
    for name in os.listdir("/proc/self/fd"):
        with contextlib.suppress(FileNotFoundError):
            links.append(os.readlink(f"/proc/self/fd/{name}"))
    found = []
    for table in ("/proc/net/tcp", "/proc/net/tcp6"):
        for line in Path(table).read_text().splitlines()[1:]:
            fields = line.split()
            # State 0A is "listen"; the tenth field is the inode.
            if fields[3] == "0A" and f"socket:[{fields[9]}]" in links:
                found.append(fields[1].partition(":")[0])
    return found


@pytest.mark.skipif(sys.platform != "linux", reason="reads Linux's list of sockets")
def test_ranks_and_their_store_listen_on_loopback_only() -> None:
    loopback = ("0100007F", "00000000000000000000000001000000")
    with LocalRanks(2) as ranks:
        ranks.run(sum_of_ranks, 0.0)
        addresses = [
            *listening_addresses(),
            *(address for found in ranks.run(listening_addresses) for address in found),
        ]
    assert addresses
    assert not [address for address in addresses if address not in loopback]


KILLED_WITH_RANKS = """
import os, signal, sys
import torch.distributed as dist
from moesys.lab.ranks.pool import LocalRanks
if __name__ == "__main__":
    ranks = LocalRanks(1)
    assert ranks.run(dist.get_rank) == [0]
    print(*sorted(os.listdir(os.environ["TMPDIR"])), flush=True)
    if sys.argv[1] == "killed":
        os.kill(os.getpid(), signal.SIGKILL)
    ranks.close()
"""


@pytest.mark.slow
def test_what_a_killed_process_left_in_temporary_folders_is_removed_by_the_next(tmp_path):
    """A link that somebody else made there is not followed. The address of a socket is too long below ``tmp_path``."""
    script, victim = tmp_path / "script.py", tmp_path / "victim"
    script.write_text(KILLED_WITH_RANKS)
    victim.mkdir()
    (victim / "precious").write_text("")
    with tempfile.TemporaryDirectory(dir="/tmp") as place:
        Path(place, "moesys-ranks-link").symlink_to(victim)
        found = []
        for how in ("killed", "ends"):
            done = subprocess.run(
                [sys.executable, script, how],
                env={**os.environ, "TMPDIR": place},
                capture_output=True,
                text=True,
                check=False,
            )
            found.append(done.stdout.split())
            assert done.returncode == (-signal.SIGKILL if how == "killed" else 0), done.stderr
        assert [len(folders) for folders in found] == [2, 2]
        assert set(found[0]) & set(found[1]) == {"moesys-ranks-link"} == set(os.listdir(place))
    assert [path.name for path in victim.iterdir()] == ["precious"]


def test_a_rank_whose_parent_was_stopped_while_it_started_ends_without_a_traceback(monkeypatch):
    monkeypatch.setattr("moesys.lab.ranks.process._die_with_parent", lambda: None)
    here, there = Pipe()
    here.close()
    with there:
        assert _serve(ProcessSettings(), there, there) is None
