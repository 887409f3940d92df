"""``moesys demo``: four strategies train side by side on this machine, and their routing is replayed on 32 GPUs.

The same four in both tables: experts whole on their owners, or fully sharded under a layout that follows the load; each
of them in sequence, or in two chunks whose communication overlaps with computing. Where torch finds a GPU, ranks train
there, and two more have MegaKernels.
"""

from __future__ import annotations

import sys
from pathlib import Path

from moesys.config import (
    ClusterSpec,
    Ep,
    FlowSplit,
    Fsep,
    Greedy,
    MegaKernel,
    ModelShape,
    Pipelined,
    Sequential,
    Strategy,
    presets,
)
from moesys.config.experiment import Experiment, Replay, Training
from moesys.lab.commands import refused
from moesys.lab.commands.compare import report
from moesys.lab.runs.progress import progress_on
from moesys.lab.runs.runner import Interrupted, RunResult, run
from moesys.lab.runs.statistics import MIN_SEEDS
from moesys.lab.runs.trials import routing_of
from moesys.lab.show.figures import computed_tokens, load_heat_map, loss_chart, timeline_chart
from moesys.replay import replay_steps
from moesys.step import StepPlan, simulate

SEEDS = tuple(range(MIN_SEEDS))
# The baseline's routing under one seed.
TRACE = "seed-{seed}.npz"
# Micro-batches of 4 ranks that make one of the cluster's 32 source ranks.
FOLD = 8
MODEL = ModelShape(hidden_size=64, intermediate_size=64, num_experts=16, top_k=2, initializer_range=0.1)
CLUSTER = ClusterSpec(name="this machine", ranks_per_node=4)
# Mixtral's layer with twice the experts.
LARGE_MODEL = presets.LAER_E8K2.replace(num_experts=16)


def training_experiment() -> Experiment:
    """Real training on four local ranks: a byte-level language model with two layers of 16 experts; on GPUs where there
    are any, and then also with MegaKernels.
    """
    # Not at the top: the command line imports this, and need not wait for torch.
    from moesys.train.device import best_device

    device = best_device()
    strategies = _strategies(Ep(), Fsep(slots_per_rank=5, prefetch_layers=1, delay_reshard=True))
    if device == "cuda":
        strategies += tuple(
            one.replace(name=f"{one.name}+mega", overlap=MegaKernel())
            for one in strategies
            if isinstance(one.overlap, Sequential)
        )
    return Experiment(
        name="demo",
        description=f"{len(strategies)} strategies train the same small language model on the same text.",
        model=MODEL,
        cluster=CLUSTER,
        strategies=strategies,
        workload=Training(num_layers=2, context=64, batch=4, warmup=8, steps=5 * FOLD, device=device),
        seeds=SEEDS,
    )


def replay_experiment(traces: Path) -> Experiment:
    """The routing that the baseline's trainings had, on LAER-MoE's cluster of 4 x 8 A100.

    With fewer experts than ranks plain EP would leave half of the ranks without one; here every expert is lent once.
    """
    return Experiment(
        name="demo-cluster",
        description="The demo's own routing, scaled, through the cost model.",
        model=LARGE_MODEL,
        cluster=presets.LAER_A100,
        strategies=_strategies(Ep(slots_per_rank=2), Fsep(slots_per_rank=2, prefetch_layers=1, delay_reshard=True)),
        workload=Replay(trace=str(traces / TRACE), warmup=2, tokens_per_rank=16384),
        seeds=SEEDS,
    )


def demo(out: Path, fresh: bool = False) -> int:
    """Train, compare, replay, compare, draw; trials that are recorded already are not run again. The exit code."""
    try:
        # hidden, so that ``compare runs/*`` does not take it for a run folder
        traces = out.resolve() / ".demo-traces"
        training = training_experiment()
        print(_where(training))
        trained = _run(training, out, fresh, record_routing=traces / TRACE)
        if trained.failed:
            return trained.exit_code
        print()
        replayed = _run(replay_experiment(traces), out, fresh)
    except (ValueError, OSError) as error:
        return refused(error)
    except Interrupted as stop:
        print(stop, file=sys.stderr)
        return 130
    drawn = [*_draw_losses(trained), *_draw_cluster(replayed)]
    print(f"\nRun folders: {trained.path} and {replayed.path}. Figures, as SVG and PNG:")
    for path in drawn:
        if path.suffix == ".png":
            print(f"  {path}")
    return replayed.exit_code


def _where(training: Experiment) -> str:
    """What this machine lets the demo show."""
    assert isinstance(training.workload, Training)
    if training.workload.device == "cpu":
        return "no GPU here: four strategies train on the CPU, and MegaKernels are left out"
    names = ", ".join(one.name for one in training.strategies if isinstance(one.overlap, MegaKernel))
    return f"training on GPUs, with MegaKernels too: {names}"


def _strategies(ep: Ep, fsep: Fsep) -> tuple[Strategy, ...]:
    """The four; the first is the baseline."""
    whole = Strategy(name="ep", sharding=ep)
    sharded = Strategy(name="fsep", sharding=fsep, balance=Greedy(), split=FlowSplit())
    overlap = Pipelined(chunks=2)
    return (
        whole,
        whole.replace(name="ep+pipelined", overlap=overlap),
        sharded,
        sharded.replace(name="unified", overlap=overlap),
    )


def _run(experiment: Experiment, out: Path, fresh: bool, record_routing: Path | None = None) -> RunResult:
    result = run(experiment, out, fresh=fresh, record_routing=record_routing, progress=progress_on(sys.stdout))
    print(result)
    report(result, "table")
    return result


def _draw_losses(trained: RunResult) -> list[Path]:
    losses: dict[str, dict[int, list[float]]] = {strategy.name: {} for strategy in trained.experiment.strategies}
    for record in trained.records:
        losses[record.strategy][record.seed] = record.losses
    return loss_chart(losses, trained.path / "figures" / "losses", name=trained.experiment.name)


def _draw_cluster(replayed: RunResult) -> list[Path]:
    """The last micro-batch of the first seed: who computes what before and after, and who does what when."""
    experiment, folder = replayed.experiment, replayed.path / "figures"
    last = {strategy.name: _last_step(experiment, strategy) for strategy in experiment.strategies}
    paths = load_heat_map(
        computed_tokens(last["ep"].layers[0].tokens),
        computed_tokens(last["unified"].layers[0].tokens),
        folder / "load",
        name=f"{experiment.name}, layer 0",
        source="simulated",
        labels=("ep", "unified"),
    )
    for name, step in last.items():
        paths += timeline_chart(simulate(step), folder / f"timeline-{name}", name=f"{experiment.name}, {name}")
    return paths


def _last_step(experiment: Experiment, strategy: Strategy) -> StepPlan:
    assert isinstance(experiment.workload, Replay)
    routing = routing_of(experiment.workload, experiment.model, experiment.cluster, experiment.seeds[0])
    *_, last = replay_steps(strategy, experiment.model, experiment.cluster, routing.tokens_SLRE)
    return last
