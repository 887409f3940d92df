"""Runs of every kind, each in a fork that ends as a program does, so that what takes seconds to import is there.

``python one_end.py KIND COUNT FOLDER`` prints the exit code of each as JSON.
"""

from __future__ import annotations

import json
import os
import sys
import threading
from collections.abc import Callable
from pathlib import Path

import torch
import torch.distributed as dist
from runner_cases import EP, FSEP, simulation

import moesys as ms
from moesys.__main__ import main
from moesys.lab.ranks import pool
from moesys.lab.ranks.pool import LocalRanks


def on_workers(folder: Path) -> None:
    # They begin with the first trial, however little there is to do.
    pool.ALONE_S = 0.0
    (folder / "experiment.json").write_text(simulation(strategies=(EP, FSEP), seeds=(0,)).to_json())
    sys.argv = ["moesys", "run", str(folder / "experiment.json"), "--out", str(folder / "runs"), "--jobs", "2"]
    main()


def mega_kernels(folder: Path) -> None:
    with LocalRanks(2) as ranks:
        ranks.run(by_mega_kernel)


def by_mega_kernel() -> None:
    strategy = ms.Strategy(name="mega", overlap=ms.MegaKernel(programs=1, rows_cap=2.0))
    shape = ms.ModelShape(hidden_size=16, intermediate_size=16, num_experts=4, top_k=2)
    layer = ms.MoELayer(shape, strategy)
    layer(torch.randn(4, 16)).sum().backward()


def local_ranks(folder: Path) -> None:
    ranks = LocalRanks(2)
    assert ranks.run(dist.get_rank) == [0, 1]
    ranks.close()
    left = [thread.name for thread in threading.enumerate() if thread is not threading.current_thread()]
    assert not left, f"threads after close(): {left}"


KINDS: dict[str, Callable[[Path], None]] = {
    "simulated on workers": on_workers,
    "MegaKernels": mega_kernels,
    "local ranks": local_ranks,
}


def exit_code(kind: str, folder: Path) -> int:
    folder.mkdir(parents=True)
    if not (pid := os.fork()):
        KINDS[kind](folder)
        sys.exit(0)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


if __name__ == "__main__":
    os.environ["TRITON_INTERPRET"] = "1"
    torch.set_num_threads(1)
    # Tables of the runs go where errors go.
    stdout = os.dup(1)
    os.dup2(2, 1)
    kind, count, folder = sys.argv[1], int(sys.argv[2]), Path(sys.argv[3])
    codes = [exit_code(kind, folder / str(number)) for number in range(count)]
    os.write(stdout, json.dumps(codes).encode())
