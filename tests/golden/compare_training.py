"""Trains eight strategies under two seeds in two checkouts, and compares losses to the last bit.

``python tests/golden/compare_training.py OTHER`` in a checkout; OTHER is the root of the one to compare it with, such
as a worktree of the commit before. Exit code 1 where a loss differs. Three minutes on two cores, and two
more in a checkout whose planners are still to be compiled.

Bits hold on one machine with one torch only, so both are trained here. The experiments of this file run in each of them
by its own ``moesys run``.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from tempfile import TemporaryDirectory

import moesys as ms

ROOT = Path(__file__).parents[2]
# strategy, seed -> the losses of all steps, as they are read from JSON, which keeps every bit
Losses = dict[tuple[str, int], list[float]]


def experiments() -> list[ms.Experiment]:
    """Two ranks as one node, and as two."""
    ep = ms.Strategy(name="ep")
    lent = ep.replace(name="lent", sharding=ms.Ep(slots_per_rank=6), balance=ms.Greedy(), split=ms.FlowSplit())
    fsep = lent.replace(name="fsep", sharding=ms.Fsep(slots_per_rank=6))
    eager = ms.Fsep(slots_per_rank=6, prefetch_layers=1, delay_reshard=True)
    kept = ms.Fsep(slots_per_rank=(7, 5), reshard_after_forward=False)
    losses = {"router_aux_loss_coef": 0.01, "router_z_loss_coef": 0.001, "n_shared_experts": 1}
    sizes = {"num_layers": 2, "num_heads": 2, "context": 32, "batch": 2, "micro_batches": 2}
    one_node = ms.Experiment(
        name="one-node",
        model=ms.ModelShape(hidden_size=32, intermediate_size=48, num_experts=8, top_k=2, **losses),
        cluster=ms.ClusterSpec(ranks_per_node=2),
        strategies=(
            ep,
            ep.replace(name="ep pipelined", overlap=ms.Pipelined(chunks=3)),
            lent,
            fsep,
            fsep.replace(name="fsep eager", sharding=eager, overlap=ms.Pipelined(chunks=2), predictor=ms.Adaptive()),
            fsep.replace(name="fsep kept", sharding=kept, balance=ms.Eplb(), split=ms.Proportional(), replan_every=2),
        ),
        workload=ms.Training(warmup=0, steps=12, recompute=True, **sizes),
        seeds=(0, 1),
    )
    hierarchical = fsep.replace(
        name="fsep hierarchical",
        sharding=eager.replace(restore="hierarchical"),
        balance=ms.FlexMoe(),
        split=ms.FlowSplit(traffic="exact", max_inter_node=0.4),
        overlap=ms.Pipelined(chunks=2),
        lag=2,
    )
    sigmoid = {"scoring_func": "sigmoid", "n_group": 2, "router_bias_update_rate": 0.001, "norm_topk_prob": False}
    two_nodes = one_node.replace(
        name="two-nodes",
        model=one_node.model.replace(dtype="bfloat16", **sigmoid),
        cluster=ms.ClusterSpec(num_nodes=2, ranks_per_node=1),
        strategies=(hierarchical, ms.presets.laer(slots_per_rank=6)),
        workload=one_node.workload.replace(recompute=False),
    )
    return [one_node, two_nodes]


def losses_of(checkout: Path) -> Losses:
    """Trains there; a line a trial on stderr. Raises CalledProcessError where a trial failed."""
    if not (checkout / "moesys").is_dir():
        raise SystemExit(f"{checkout} is no checkout: it has no folder moesys; give the root of one")
    print(f"training with {checkout}", file=sys.stderr, flush=True)
    environment = os.environ | {"PYTHONPATH": str(checkout)}
    with TemporaryDirectory() as folder:
        command = [sys.executable, "-m", "moesys", "run", str(Path(__file__).resolve()), "--out", folder]
        # its progress and tables are none of this script's answer
        subprocess.run(command, cwd=folder, env=environment, stdout=sys.stderr.fileno(), check=True)
        lines = [line for path in Path(folder).glob("*/records.jsonl") for line in path.read_text().splitlines()]
    records = [json.loads(line) for line in lines]
    return {(record["strategy"], record["seed"]): record["losses"] for record in records}


def verdict(here: list[float], there: list[float]) -> str:
    """In hexadecimal, which shows each bit."""
    for step, (a, b) in enumerate(zip(here, there, strict=True)):
        if a.hex() != b.hex():
            return f"differs from step {step} on: {a.hex()} here, {b.hex()} there"
    return f"equal, at last {here[-1].hex()}"


def main() -> int:
    if len(sys.argv) != 2:
        raise SystemExit(f"usage: python {sys.argv[0]} OTHER_CHECKOUT")
    here, there = losses_of(ROOT), losses_of(Path(sys.argv[1]).resolve())
    if here.keys() != there.keys():
        raise SystemExit(f"only one has trials of {sorted(here.keys() ^ there.keys())}")
    verdicts = {trial: verdict(here[trial], there[trial]) for trial in sorted(here)}
    for (strategy, seed), said in verdicts.items():
        print(f"{strategy:20} seed {seed}   {said}")
    return int(any(said.startswith("differs") for said in verdicts.values()))


if __name__ == "__main__":
    sys.exit(main())
