"""``python -m experiments.demo``: four strategies train OLMoE's code on this machine, and their routing is replayed on
simulated GPUs.

The model is transformers' own, small; all but its experts is sharded by FSDP2. The same four strategies are in both
tables: experts on their owners alone, in sequence or in two chunks whose communication overlaps with computing; lent by
their owners, or fully sharded, both under a layout that follows the load and with an exact split. Where torch finds a
GPU, ranks train there. On CPUs they train with ``LayoutInvariant``, so that all losses have the same bits.

There are as many ranks as cores: where ranks share cores, the idle time of one is the gain of another, and imbalance
costs nothing. Experts have many rows and are much wider than tokens, so that computing outweighs copies. A token goes
to one expert, as in Switch Transformers (arXiv 2101.03961): more than a quarter of the text's bytes are spaces, so that
routing is skewed, which a second choice would level.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Annotated

import torch
import typer
from rich.console import Console

from moesys.balance.flow.flow_split import FlowSplit
from moesys.balance.greedy.greedy import Greedy
from moesys.config import Ep, Fsep, LayoutInvariant, Ordered, Strategy, presets
from moesys.config.experiment import Experiment
from moesys.config.model_spec import read_config
from moesys.config.overlap import Pipelined
from moesys.config.strategy import Reduction
from moesys.config.workload import ModelTraining, Replay
from moesys.lab.commands.compare import print_locations, report
from moesys.lab.commands.options import Quiet, RunFolders, Wide, flag, refusing
from moesys.lab.ranks.process_start import sigterm_as_ctrl_c
from moesys.lab.runs.comparison import Comparison
from moesys.lab.runs.environment import available_cores
from moesys.lab.runs.runner import RunResult, run, trace_path
from moesys.lab.runs.statistics import MIN_SEEDS
from moesys.lab.show.progress import RunProgress
from moesys.lab.show.sheets import CommandOutput

SEEDS = tuple(range(MIN_SEEDS))
MOST_RANKS = 8


# The largest power of two that is no more than this machine's cores, from 2 to ``MOST_RANKS``.
NUM_RANKS = max(2, min(MOST_RANKS, 1 << (available_cores().bit_length() - 1)))
OWNED_EXPERTS = 2
MODEL = {
    "intermediate_size": 2048,
    "num_experts": OWNED_EXPERTS * NUM_RANKS,
    "num_experts_per_tok": 1,
    # With a router that is drawn this wide, enough that no expert is left without tokens in these few steps, and not
    # enough to balance the load.
    "router_aux_loss_coef": 0.02,
    "initializer_range": 0.05,
}
CLUSTER = presets.cpu(NUM_RANKS).replace(name="this machine")
# Mixtral's experts, as many as there are here; each on a GPU.
LARGE_MODEL = presets.LAER_E8K2.replace(num_experts=MODEL["num_experts"], top_k=MODEL["num_experts_per_tok"])
GPUS_OF_NODE = min(8, LARGE_MODEL.num_experts)
LARGE_CLUSTER = presets.h100(LARGE_MODEL.num_experts // GPUS_OF_NODE).replace(
    ranks_per_node=GPUS_OF_NODE, name=f"{LARGE_MODEL.num_experts} x H100"
)
# Micro-batches of the ranks here that make one of the cluster's.
FOLD = LARGE_CLUSTER.num_ranks // NUM_RANKS


def training_experiment() -> Experiment:
    """Returns a training on local ranks, on GPUs if there are any: two layers of OLMoE with two experts per rank."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    return Experiment(
        name="demo",
        description="Four strategies train the same small OLMoE on the same text.",
        cluster=CLUSTER,
        # Transformers' experts have no kernels that would have the same bits on GPUs.
        strategies=_strategies(OWNED_EXPERTS + 1, LayoutInvariant() if device == "cpu" else Ordered()),
        workload=ModelTraining(
            model="olmoe-small",
            config=json.dumps(read_config("olmoe-small") | MODEL),
            context=64,
            batch=32,
            warmup=1,
            steps=5,
            learning_rate=2e-4,
            device=device,
        ),
        seeds=SEEDS,
    )


def replay_experiment(trained: Path) -> Experiment:
    """Returns a replay of the baseline's routing in a run folder, scaled to the experts and the tokens of a large
    model.
    """
    training = training_experiment()
    trace = str(trace_path(trained.resolve(), training.trial(training.baseline, SEEDS[0])))
    return Experiment(
        name="demo-cluster",
        description="The demo's own routing, scaled, through the cost model.",
        model=LARGE_MODEL,
        cluster=LARGE_CLUSTER,
        strategies=_strategies(slots_per_rank=2, reduction=Ordered()),
        # Names of traces end with the seed.
        workload=Replay(trace=trace.removesuffix("0.npz") + "{seed}.npz", warmup=1, tokens_per_rank=16384),
        seeds=SEEDS,
    )


@refusing()
def main(
    out: RunFolders = Path("runs"),
    quiet: Quiet = False,
    wide: Wide = False,
    fresh: Annotated[bool, flag("Train again, in new run folders.", "--fresh")] = False,
) -> None:
    """Train and compare four strategies on this machine, and replay the routing of the first one on simulated GPUs.

    It takes less than 3 minutes on 2 cores. Recorded trials are not repeated.
    """
    show = CommandOutput(quiet=quiet, wide=wide)
    trained, compared = _run(training_experiment(), out, show, fresh)
    if trained.failed or compared.unequal:
        raise typer.Exit(1)
    share = max(max(of) / sum(of) for record in trained.records for of in record.tokens_LE)
    print(f"\nOne expert gets up to {share:.0%} of a layer's tokens: routers are new; trained ones are more even.\n")
    replayed, _ = _run(replay_experiment(trained.path), out, show, fresh)
    print_locations([trained.path, replayed.path], sys.stdout)
    raise typer.Exit(replayed.exit_code)


def _strategies(slots_per_rank: int, reduction: Reduction) -> tuple[Strategy, ...]:
    """Returns the four; the first is the baseline."""
    whole = Strategy(name="ep", sharding=Ep(), reduction=reduction)
    lent = whole.replace(
        name="ep+lent", sharding=Ep(slots_per_rank=slots_per_rank), balance=Greedy(), split=FlowSplit()
    )
    sharded = Fsep(slots_per_rank=slots_per_rank, prefetch_layers=1, reshard_after_forward=False)
    return (
        whole,
        whole.replace(name="ep+pipelined", overlap=Pipelined(chunks=2)),
        lent,
        lent.replace(name="fsep", sharding=sharded),
    )


def _run(experiment: Experiment, out: Path, show: CommandOutput, fresh: bool) -> tuple[RunResult, Comparison]:
    progress = RunProgress(Console(file=sys.stdout, quiet=show.quiet))
    result = run(experiment, out, fresh=fresh, progress=progress)
    if not show.quiet:
        print(result.summary)
    return result, report(result, as_json=False, wide=show.wide)


if __name__ == "__main__":
    with sigterm_as_ctrl_c():
        typer.run(main)
