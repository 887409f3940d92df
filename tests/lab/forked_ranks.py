"""Trains a linked model on two forked ranks, with plans under way at their end, or runs something else in one fork, so
that what takes seconds to import is there; and prints how each process ended.

``python forked_ranks.py MODE COUNT`` prints the exit codes of all processes, COUNT times, as JSON.
"""

from __future__ import annotations

import gc
import json
import os
import shutil
import sys
import threading
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from tempfile import mkdtemp

import torch
import torch.distributed as dist
import torch.distributed.tensor
from runner_cases import EP, FSEP, simulation

import moesys as ms
from moesys.__main__ import main
from moesys.balance.run_planner import warm_up
from moesys.lab.ranks import pool
from moesys.lab.ranks.pool import LocalRanks
from moesys.moe.runtime import MoERuntime

SHAPE = ms.ModelShape(hidden_size=16, intermediate_size=8, num_experts=6, top_k=2)
# A rank that must not wait for the other one may take this long; normal ends take 1 to 2 s.
LIMIT_S = 60.0


class Slow(ms.Balance):
    """Planning that takes longer than all micro-batches, but for the first layout."""

    def layout(self, problem):
        if problem.layout is not None:
            time.sleep(0.3)
        return ms.plan_layout(problem.load, problem.cluster, ms.Greedy(), problem.slots_R)


SHARDING = ms.Fsep(slots_per_rank=4, prefetch_layers=1, delay_reshard=True)
STRATEGY = ms.Strategy(name="slow", sharding=SHARDING, balance=Slow(), split=ms.FlowSplit(), lag=4)


class FreedSlowly:
    """An object that is freed with the interpreter and takes its time, as large models do."""

    def __del__(self, sleep=time.sleep):
        sleep(0.5)


def trained() -> tuple[torch.nn.ModuleList, MoERuntime]:
    model = torch.nn.ModuleList(ms.MoELayer(SHAPE, STRATEGY, layer_index=index) for index in range(2))
    runtime = ms.link(model)
    for step in range(2):
        x = torch.randn(24, 16, generator=torch.Generator().manual_seed(10 * step + dist.get_rank()))
        model[1](model[0](x)).square().mean().backward()
        ms.sync_gradients(model)
    return model, runtime


def open_to_the_end(rank: int, ended: Path) -> None:
    sys.kept = [trained()]


def gone_before(rank: int, ended: Path) -> None:
    """The groups are destroyed under the runtime."""
    sys.kept = [trained()]
    dist.destroy_process_group()


def gone_then_closed(rank: int, ended: Path) -> None:
    _, runtime = trained()
    dist.destroy_process_group()
    runtime.close()


def collected(rank: int, ended: Path) -> None:
    trained()
    gc.collect()


def vanished(rank: int, ended: Path) -> None:
    """Rank 1 ends without any handler, while rank 0 waits for its plan."""
    sys.kept = [trained()]
    if rank == 1:
        os._exit(0)


def raising(rank: int, ended: Path, failing: int) -> None:
    """One rank raises, and the other goes on until it has ended."""
    sys.kept = [trained()]
    if rank == failing:
        raise ArithmeticError("on purpose")
    until_s = time.monotonic() + LIMIT_S
    while not ended.exists():
        assert time.monotonic() < until_s, "the rank that raised did not end"
        time.sleep(0.05)


def on_workers(rank: int, ended: Path) -> None:
    # They begin with the first trial, however little there is to do.
    pool.ALONE_S = 0.0
    file, out = ended.with_name("experiment.json"), ended.with_name("runs")
    file.write_text(simulation(strategies=(EP, FSEP), seeds=(0,)).to_json())
    sys.argv = ["moesys", "run", str(file), "--out", str(out), "--jobs", "2"]
    main()


def mega_kernels(rank: int, ended: Path) -> None:
    with LocalRanks(2) as ranks:
        ranks.run(by_mega_kernel)


def by_mega_kernel() -> None:
    strategy = ms.Strategy(name="mega", overlap=ms.MegaKernel(programs=1, rows_cap=2.0))
    layer = ms.MoELayer(SHAPE.replace(intermediate_size=16, num_experts=4), strategy)
    layer(torch.randn(4, 16)).sum().backward()


def local_ranks(rank: int, ended: Path) -> None:
    ranks = LocalRanks(2)
    assert ranks.run(dist.get_rank) == [0, 1]
    ranks.close()
    left = [thread.name for thread in threading.enumerate() if thread is not threading.current_thread()]
    assert not left, f"threads after close(): {left}"


# In one process each.
ALONE: dict[str, Callable[[int, Path], None]] = {
    "simulated on workers": on_workers,
    "MegaKernels": mega_kernels,
    "local ranks": local_ranks,
}
MODES = ALONE | {
    "open": open_to_the_end,
    "gone before": gone_before,
    "gone, then closed": gone_then_closed,
    "collected": collected,
    "vanished": vanished,
    "rank 0 raises": lambda rank, ended: raising(rank, ended, 0),
    "rank 1 raises": lambda rank, ended: raising(rank, ended, 1),
}


def prepare() -> None:
    """Loads and probes once what every fork would."""
    warm_up()
    with torch.no_grad():
        ms.MoELayer(SHAPE, ms.Strategy(name="ep"))(torch.zeros(24, 16))


def exit_codes(mode: str, freed_slowly: int) -> list[int]:
    # A context manager would remove the folder in every forked rank too.
    folder, codes, rank_of = Path(mkdtemp()), {}, {}
    for rank in range(1 if mode in ALONE else 2):
        if pid := os.fork():
            rank_of[pid] = rank
            continue
        if mode not in ALONE:
            # A file outlives both ranks, as a launcher's store does.
            store = dist.FileStore(str(folder / "store"), 2)
            dist.init_process_group("gloo", store=store, rank=rank, world_size=2, timeout=timedelta(seconds=120))
        MODES[mode](rank, folder / "ended")
        if rank == freed_slowly:
            sys.freed_slowly = FreedSlowly()
        sys.exit(0)
    while rank_of:
        pid, status = os.wait()
        codes[rank_of.pop(pid)] = os.waitstatus_to_exitcode(status)
        (folder / "ended").touch()
    shutil.rmtree(folder)
    return [codes[rank] for rank in sorted(codes)]


if __name__ == "__main__":
    os.environ["TRITON_INTERPRET"] = "1"
    torch.set_num_threads(1)
    # Tables of runs go where errors go.
    stdout = os.dup(1)
    os.dup2(2, 1)
    prepare()
    codes = [exit_codes(sys.argv[1], freed_slowly=number % 2) for number in range(int(sys.argv[2]))]
    os.write(stdout, json.dumps(codes).encode())
