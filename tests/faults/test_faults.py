"""Faults at random moments: each ends within its time-out, either with the right result after a resume, to the last
bit, or with an error that names rank, layer and cause; and nothing is left behind.

With MOESYS_SWEEP=1 all 200 seeds of ``faults.py`` run.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
import uuid
from collections.abc import Iterator
from dataclasses import dataclass, replace
from multiprocessing import Pipe
from pathlib import Path
from random import Random
from typing import Any

import pytest
from faults import (
    ALL,
    DAMAGES,
    NOT_FINITE,
    NUM_LAYERS,
    QUICK,
    ROOT,
    SAVE_EVERY,
    STEPS,
    TRAININGS,
    Fault,
    Job,
    Strike,
)
from left_behind import MARKER, SHARED, alive, temporary, unmapped

from moesys.lab.runs.records import RunFolder
from moesys.lab.runs.watched_run import read_watched_run

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="looks for processes in /proc")

SWEEP = os.environ.get("MOESYS_SWEEP") == "1"
LIMIT_S = 60.0
# Of collectives where a rank is gone: the others notice no earlier where it hangs.
SHORT_S = 4.0
# How long a process is stopped, and beyond what others wait for it.
STOPPED_S, HUNG_S = 1.5, SHORT_S + 8.0
PATHS = [str(ROOT), *(str(ROOT / "tests" / name) for name in ("faults", "hf", "lab", "moe", "oracles"))]
COMMAND_CODES = {"sigterm": 128 + signal.SIGTERM, "ctrl-c": 128 + signal.SIGINT, "kill": -signal.SIGKILL}
# The words of a call or of a layer.
WHERE = r"layer \d|\w\(\) failed|nothing is written|CheckpointException"
NO_ROOM = r"File too large|Errno 27|disk may be full"


@dataclass(frozen=True)
class Ended:
    """A process that ended."""

    rank: int
    code: int
    stdout: str
    stderr: str

    @property
    def result(self) -> dict[str, Any]:
        """What the job returned, with the ticks of its clocks."""
        return json.loads(self.stdout.rpartition("RESULT ")[2])


class Server:
    """The program that forks the processes of jobs, and what it ran without any fault."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.marker, self._baselines = folder, uuid.uuid4().hex, {}
        self._connection, there = Pipe()
        environment = {**os.environ, "PYTHONPATH": os.pathsep.join(PATHS), MARKER: self.marker, "MPLBACKEND": "agg"}
        # They tell processes that torchrun or pytest started them.
        for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "PYTEST_CURRENT_TEST"):
            environment.pop(name, None)
        command = [sys.executable, "-W", "ignore", "-c", f"import fault_jobs; fault_jobs.serve({there.fileno()})"]
        handles = [there.fileno()]
        self._process = subprocess.Popen(command, env=environment, pass_fds=handles, start_new_session=True)
        there.close()
        assert self._connection.poll(120), "the server of jobs does not begin"
        assert self._connection.recv() == "ready"
        self.inputs = folder / "inputs"
        (made,) = self.run(Job("inputs", self.prepared(self.inputs)))
        assert not made.code, made.stderr

    def close(self) -> None:
        self._connection.close()
        self._process.wait(30)

    def prepared(self, folder: Path) -> Path:
        """Makes the folder of a job, with a copy of the inputs."""
        for name in ("tmp", "in"):
            (folder / name).mkdir(parents=True)
        if folder != self.inputs:
            shutil.copytree(self.inputs / "in", folder / "in", dirs_exist_ok=True)
        return folder

    def run(self, job: Job, stopped_s: float = STOPPED_S) -> list[Ended]:
        """Returns the ends of all processes of a job, by rank. A process that is stopped goes on after ``stopped_s``.

        Fails where one does not end in time, and where processes are left.
        """
        (job.folder / "store").unlink(missing_ok=True)
        self._connection.send(job)
        pids, codes, stopped = self._connection.recv(), {}, {}
        until_s = time.monotonic() + LIMIT_S
        while len(codes) < len(pids):
            if self._connection.poll(0.05):
                rank, codes[rank] = self._connection.recv()
                continue
            for pid in filter(is_stopped, pids):
                if time.monotonic() > stopped.setdefault(pid, time.monotonic()) + stopped_s:
                    os.kill(pid, signal.SIGCONT)
            if time.monotonic() > until_s:
                self._end(pids, codes)
                raise AssertionError(f"{job} does not end:\n{self._outputs(job, len(pids))}")
        until_s = time.monotonic() + 15
        while (left := self._alive()) and time.monotonic() < until_s:
            time.sleep(0.1)
        assert not left, f"processes are left: {left}"
        names = [
            [(job.folder / f"{name}-{rank}").read_text() for name in ("stdout", "stderr")] for rank in sorted(codes)
        ]
        return [Ended(rank, codes[rank], *outputs) for rank, outputs in enumerate(names)]

    def _alive(self) -> list[int]:
        return [pid for pid in alive(self.marker) if pid != self._process.pid]

    def _end(self, pids: list[int], codes: dict[int, int]) -> None:
        """Ends a job that hangs, whose processes first print their stacks."""
        for number in (signal.SIGUSR1, signal.SIGKILL):
            for pid in [pid for rank, pid in enumerate(pids) if rank not in codes]:
                os.kill(pid, number)
            time.sleep(1.0)
        while len(codes) < len(pids):
            rank, codes[rank] = self._connection.recv()
        for pid in self._alive():
            os.kill(pid, signal.SIGKILL)

    def _outputs(self, job: Job, num: int) -> str:
        return "\n".join(f"rank {rank}:\n{(job.folder / f'stderr-{rank}').read_text()[-3000:]}" for rank in range(num))

    def baseline(self, target: str, strategy: str, num_ranks: int) -> tuple[Any, list[dict[str, int]]]:
        """Returns the right result of a target, and the ticks of each of its processes."""
        key = target.replace("saves", "loop"), strategy, num_ranks
        if key not in self._baselines:
            job = Job(key[0], self.prepared(self.folder / " ".join(map(str, key))), num_ranks, strategy)
            ended = self.run(job)
            assert not any(each.code for each in ended), ended
            assert not temporary(job.folder)
            self._baselines[key] = result_of(job, ended), [each.result["ticks"] for each in ended]
        return self._baselines[key]


def is_stopped(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "T"
    except OSError:
        return False


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    before = set(os.listdir(SHARED))
    server = Server(tmp_path_factory.mktemp("faults"))
    yield server
    server.close()
    assert not unmapped(before)


def result_of(job: Job, ended: list[Ended]) -> Any:
    """What must be the same with a fault and without."""
    if job.target in TRAININGS:
        return [{name: each.result[name] for name in ("losses", "parameters")} for each in ended]
    if job.target.startswith("run"):
        # A run begins another folder beside one that has a folder in the place of experiment.json.
        *_, folder = (None, *sorted(path.parent for path in job.out.glob("*/records.jsonl")))
        records = RunFolder(folder).records() if folder else []
        # What was recorded is not run again. Samples of real ranks are times.
        assert len(records) == len({(each.identity, each.error) for each in records})
        return [
            [each.identity, each.status, each.losses, each.tokens_LE, each.samples if job.target == "run" else {}]
            for each in {record.identity: record for record in records}.values()
        ]
    found = {path.relative_to(job.out): path.read_bytes() for path in job.out.rglob("*") if path.is_file()}
    kept = {"tune": (".toml",), "convert": (".distcp",), "report": (".html",)}[job.target]
    return {str(path): content for path, content in found.items() if path.suffix in kept}


# --- one fault --------------------------------------------------------------------------------------------------------


def outcome_of(fault: Fault, server: Server, folder: Path) -> str:
    """Returns how the fault was survived: "right" at once, "resumed" or "refused". Raises AssertionError else."""
    if fault.kind in NOT_FINITE:
        return as_in_plain_torch(fault, server, folder)
    wanted, ticks = server.baseline(fault.target, fault.strategy, fault.num_ranks)
    job = Job(fault.target, server.prepared(folder), fault.num_ranks, fault.strategy)
    if fault.kind in DAMAGES:
        return after_damage(fault, server, job, wanted, ticks)
    kind = "hang" if fault.kind == "stop" and fault.lasts else fault.kind
    struck = replace(job, strike=strike_of(fault, kind, ticks))
    if kind in ("kill", "raise", "hang", "full disk", "removed folder", "ctrl-c"):
        struck = replace(struck, collective_s=SHORT_S)
    ended = server.run(struck, HUNG_S if kind == "hang" else STOPPED_S)
    assert "STRUCK" in ended[fault.rank].stderr, "the moment did not come"
    if not any(each.code for each in ended) and result_of(job, ended) == wanted:
        assert not temporary(folder)
        return "right"
    if kind == "removed folder" and not any(each.code for each in ended):
        # What was written stood there before it was removed.
        pass
    elif job.target in TRAININGS:
        check_errors_of_ranks(fault, kind, ended)
    else:
        check_error_of_command(fault, kind, ended[0])
    if kind in ("raise", "full disk", "removed folder"):
        assert not temporary(folder)
    resumed(server, job, wanted)
    return "resumed"


def strike_of(fault: Fault, kind: str, ticks: list[dict[str, int]]) -> Strike:
    of_rank = ticks[fault.rank]
    clock = fault.clock if of_rank[fault.clock] else "file"
    # Ranks look for each other's files, which is a tick more or less.
    return Strike(kind, fault.rank, clock, 1 + int(fault.at * max(1, of_rank[clock] - 4)), fault.size)


def resumed(server: Server, job: Job, wanted: Any) -> None:
    """Runs the job again, as its errors say, and asserts that the result is the right one and nothing is left."""
    ended = server.run(job)
    if torn := re.search(
        r"(/\S*checkpoint-\d+) is not of a ResumableTrainer, .*resume from an earlier one", ended[0].stderr
    ):
        shutil.rmtree(torn[1])
        ended = server.run(job)
    if "is there already, and not an empty folder" in ended[0].stderr:
        # The conversion was complete.
        assert result_of(job, ended) == wanted
        shutil.rmtree(job.out / "converted")
        ended = server.run(job)
    assert not any(each.code for each in ended), "\n".join(each.stderr for each in ended)
    assert result_of(job, ended) == wanted
    if job.target in TRAININGS and temporary(job.folder):
        # It was killed while the last save removed the checkpoint before: the next save does so.
        server.run(replace(job, steps=job.steps + SAVE_EVERY))
    assert not temporary(job.folder)
    until_s = time.monotonic() + 10
    while (left := os.listdir(job.folder / "tmp")) and time.monotonic() < until_s:
        time.sleep(0.1)
    assert not left, left


def check_errors_of_ranks(fault: Fault, kind: str, ended: list[Ended]) -> None:
    """Each living rank names the rank that was struck, and the layer or call in which it noticed."""
    for each in ended:
        assert each.code, f"rank {each.rank} ended well, and others did not"
        if kind in ("sigterm", "ctrl-c") or (kind == "kill" and each.rank == fault.rank):
            continue
        if each.rank == fault.rank:
            wanted = {"raise": "planted", "full disk": NO_ROOM, "removed folder": "No such file|removed"}.get(kind, "")
            assert re.search(wanted, each.stderr), each.stderr
        else:
            # torch says so of checkpoints in a way of its own.
            assert re.search(rf"\brank(s? (\d, )*|s:dict_keys\(\[){fault.rank}\b", each.stderr), each.stderr
            assert re.search(WHERE, each.stderr), each.stderr


def check_error_of_command(fault: Fault, kind: str, ended: Ended) -> None:
    """A command that cannot go on says why in a line, and its exit code says that it was not its fault."""
    if kind == "raise":
        assert (ended.code, "planted" in ended.stdout + ended.stderr) in ((1, True), (2, True)), ended
    elif kind in COMMAND_CODES:
        assert ended.code == COMMAND_CODES[kind], ended
    else:
        assert ended.code == 2, ended
        assert re.search(NO_ROOM if kind == "full disk" else r"/out\b.*|removed", ended.stderr), ended
    if kind != "kill":
        assert "Traceback" not in ended.stderr, ended.stderr


# --- damaged files ----------------------------------------------------------------------------------------------------

FOREIGN = (
    b"",
    b"{}\n",
    b"[1, 2]\n",
    b"<!DOCTYPE html>\n<html></html>\n",
    bytes(range(256)) * 8,
    b"\x1f\x8b\x08\0\0\0\0\0",
    None,
)


def after_damage(fault: Fault, server: Server, job: Job, wanted: Any, ticks: list[dict[str, int]]) -> str:
    """Damages a file of what an earlier run of the job left, or of what a command reads, and starts the job."""
    if job.target in TRAININGS:
        server.run(replace(job, steps=SAVE_EVERY))
    elif job.target in ("run", "tune"):
        # When something is there.
        late = replace(fault, at=0.5 + fault.at / 2)
        server.run(replace(job, strike=strike_of(late, "kill", ticks)))
    killed = set(temporary(job.folder))
    path = damage(
        fault,
        job.out
        if job.target in (*TRAININGS, "run", "tune")
        else job.inputs / {"convert": "hub", "report": "watched"}[job.target],
    )
    ended = server.run(replace(job, collective_s=SHORT_S))
    if any(each.code for each in ended):
        text = "\n".join(each.stderr for each in ended)
        assert all(each.code for each in ended), text
        assert path.name in text or path.parent.name in text, f"{path.name} is not named:\n{text}"
        if job.target not in TRAININGS:
            assert ended[0].code == 2, ended
            assert "Traceback" not in text, text
        # A folder that is refused stays as it is.
        assert killed.issuperset(temporary(job.folder))
        return "refused"
    # The lines of an unfinished file are a page too.
    if job.target != "report" or fault.kind == "other version":
        assert result_of(job, ended) == wanted
    assert not temporary(job.folder)
    return "resumed"


def damage(fault: Fault, folder: Path) -> Path:
    draw = Random(fault.seed)
    files = sorted(path for path in folder.rglob("*") if path.is_file() and path.name != ".lock")
    if fault.kind == "other version":
        files = [path for path in files if path.suffix in (".json", ".jsonl")]
    path = draw.choice(files)
    content = path.read_bytes()
    if fault.kind == "torn file":
        path.write_bytes(content[: int(fault.size * len(content))])
    elif fault.kind == "other version":
        path.write_bytes(newer(content))
    elif (foreign := draw.choice(FOREIGN)) is None:
        path.unlink()
        path.mkdir()
    else:
        path.write_bytes(foreign)
    return path


def newer(content: bytes) -> bytes:
    """Returns JSON as a later version might write it: with another schema, or with a field more."""
    if re.search(rb'"schema": ?\d', content):
        return re.sub(rb'("schema": ?)\d+', rb"\g<1>77", content)
    return content.replace(b"{", b'{"later": 1, ', 1)


# --- NaN and infinity -------------------------------------------------------------------------------------------------


def as_in_plain_torch(fault: Fault, server: Server, folder: Path) -> str:
    """Losses and parameters are finite as long as they are in plain torch, and Watch names the first layer and rank."""
    moment = 1 + int(fault.at * STEPS * NUM_LAYERS)
    strike = Strike(fault.kind, fault.rank, "", moment, fault.size, fault.where)
    job = Job(fault.target, server.prepared(folder), fault.num_ranks, fault.strategy, strike=strike)
    ended = server.run(job)
    assert not any(each.code for each in ended), "\n".join(each.stderr for each in ended)
    (plain,) = server.run(replace(job, target="plain"))
    losses, finite = plain.result["losses"], plain.result["finite"]
    for each in ended:
        assert [is_finite(loss) for loss in each.result["losses"]] == [is_finite(step[each.rank]) for step in losses]
        assert [set(step) for step in each.result["finite"]] == [set(step) for step in finite]
    step, layer = divmod(moment - 1, NUM_LAYERS)
    first = min(read_watched_run(job.out / "watched").events, key=lambda each: (each.step, place(each.event.what)))
    assert (first.step, first.event.layer) == (step, layer), first
    assert first.event.what.startswith(f"rank {fault.rank}: NaN or infinity in "), first
    return "right"


def is_finite(number: float) -> bool:
    return abs(number) < float("inf")


def place(what: str) -> int:
    """Returns how far in a layer's computation it lies: a cause comes before its effects."""
    return [
        "the input",
        "the parameters of experts",
        "the routing weights",
        "the output",
        "the gradient of the output",
    ].index(what.partition(" in ")[2])


# --- the tests --------------------------------------------------------------------------------------------------------


# A rank that is killed while it saves, one that stops, NaN, a full disk, a foreign file, and SIGTERM.
USUAL = (0, 1, 3, 5, 7, 10)


@pytest.mark.parametrize(
    "seed",
    [seed if seed in USUAL else pytest.param(seed, marks=pytest.mark.slow) for seed in range(ALL if SWEEP else QUICK)],
    ids=lambda seed: str(Fault.of(seed)),
)
def test_it_is_survived(server: Server, tmp_path: Path, seed: int) -> None:
    outcome_of(Fault.of(seed), server, tmp_path / "job")


def test_the_first_seeds_have_every_kind() -> None:
    assert len({Fault.of(seed).kind for seed in range(QUICK)}) == QUICK
