"""``moesys simulate --model``: a step of a whole model under each strategy, from its config.json alone."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from rich import box
from rich.console import Console, Group
from rich.table import Table
from rich.text import Text

from moesys.config import BYTES_PER_GB, ModelSpec, Strategy, presets
from moesys.config.model_run import ModelRun, Parallelism
from moesys.config.workload import Generated
from moesys.files import write_whole
from moesys.kinds import did_you_mean
from moesys.lab.runs.declarations import cluster_of, declared_in
from moesys.lab.show.figures import memory_chart
from moesys.lab.show.tables import figure, print_full
from moesys.simulator.model.model_step import ModelStep
from moesys.simulator.model.simulate_model import simulate_model

_FASTER = (1.25, 1.5, 2.0)


def simulate_whole_model(
    model: str,
    cluster: str | None,
    *,
    strategies: Sequence[str],
    parallel: str,
    skew: float,
    draws: int,
    out: Path | None,
    **fields: Any,
) -> None:
    """Simulates a step of a model under each strategy, prints the tables and writes the files.

    ``fields``: fields of ``ModelRun``. Raises ValueError for arguments that cannot be met.
    """
    if cluster is None:
        raise ValueError("a model needs a cluster to run on; give --cluster, as in --cluster h100:4")
    routing = Generated(skew=skew) if skew else None
    declared = {
        "model": ModelSpec.from_config(model),
        "cluster": cluster_of(cluster),
        "parallelism": parallelism_of(parallel),
        **fields,
    }
    if len(set(strategies)) < len(strategies):
        raise ValueError(f"strategy={list(strategies)} names one twice; give each once")
    steps = []
    with Console(stderr=True).status("") as status:
        for name in strategies:
            run = ModelRun.model_validate(declared | {"strategy": named_strategy(name)})

            def tell(words: str, name: str = run.strategy.name) -> None:
                status.update(f"{name}: {words}")

            steps.append(simulate_model(run, routing, draws=draws, tell=tell))
    print_full(Group(*tables(steps)), notes(steps, skew))
    for path in [] if out is None else _write(steps, out):
        print(f"written to {path}")


def parallelism_of(text: str) -> Parallelism:
    """Reads ``tp=2,pp=8,vp=4,ep=32,recompute=full``: fields of ``Parallelism``. Raises ValueError for others."""
    fields: dict[str, str] = {}
    for part in filter(None, (part.strip() for part in text.split(","))):
        name, equals, value = part.partition("=")
        if not equals:
            raise ValueError(f"parallel={part!r} gives no value; write it as in tp=2,pp=8,ep=32")
        if (field := name.strip()) in fields:
            raise ValueError(f"parallel={text!r} gives {field} twice; give it once")
        fields[field] = value.strip()
    try:
        return Parallelism.model_validate(fields)
    except ValueError as error:
        raise ValueError(f"parallel={text!r}: {error}") from None


def named_strategy(text: str) -> Strategy:
    """Reads ``ep``; ``fsep:3`` or ``laer:3``, presets with so many slots a rank; or a ``Strategy`` in a file.

    Raises ValueError for others.
    """
    if text == "ep":
        return presets.ep()
    if preset := re.fullmatch(r"(fsep|laer):(\d+)", text):
        name, slots = preset.groups()
        return {"fsep": presets.fsep, "laer": presets.laer}[name](int(slots))
    if Path(text).suffix in (".json", ".toml"):
        return declared_in(Path(text), Strategy)
    raise ValueError(
        f"strategy={text!r} is not known; use ep, fsep:SLOTS, laer:SLOTS, or the .toml or .json file of a Strategy"
        f"{did_you_mean(text, ('fsep:SLOTS', 'laer:SLOTS'))}"
    )


# --- what is shown --------------------------------------------------------------------------------------------------


def tables(steps: Sequence[ModelStep]) -> list[Text | Table]:
    """Returns the tables of times, of what ranks do, and of memory, each under its title."""
    run = steps[0].run
    parallel = run.parallelism
    sizes = {name: getattr(parallel, name) for name in ("tp", "cp", "pp", "vp")}
    words = ", ".join(f"{name} {size}" for name, size in (sizes | {"ep": run.groups.expert}).items() if size != 1)
    title = (
        f"SIMULATED: {run.model.name or 'a model'} of {run.model.num_parameters / 1e9:.1f} billion parameters "
        f"({run.model.active_parameters / 1e9:.1f} active), on {run.cluster.name or 'a cluster'}"
        f"{', ' + words if words else ''}: {run.num_micro_batches} micro-batches of {run.micro_batch} x "
        f"{run.seq_len:,} tokens"
    )
    names = [step.run.strategy.name for step in steps]
    summary = _table("strategy", ["step ms", "p10 to p90", "speed-up", "tokens/s a rank", "MFU", "max/mean"])
    summary.add_column("peak GB", justify="right")
    summary.add_column("verdict")
    for step in steps:
        low, high = step.interval
        summary.add_row(
            step.run.strategy.name,
            figure(1e3 * step.seconds),
            f"{figure(1e3 * low)} to {figure(1e3 * high)}" if high > low else "",
            f"{steps[0].seconds / step.seconds:.2f}",
            f"{step.tokens_per_second:,.0f}",
            "" if step.mfu is None else f"{step.mfu:.1%}",
            f"{max(draw.max_over_mean for draw in step.draws):.2f}",
            f"{step.peak.gb:.1f}",
            step.verdict or "runs, by what is counted",
        )
    where = _table("mean of ranks, ms", names)
    for part in dict.fromkeys(name for step in steps for name in step.shares):
        shares = [(step.shares.get(part, 0.0), step.seconds) for step in steps]
        if any(seconds > 5e-6 for seconds, _ in shares):
            where.add_row(part, *(f"{figure(1e3 * seconds)}  {seconds / whole:4.0%}" for seconds, whole in shares))
    held = _table("rank that holds most, GB", names)
    for part in steps[0].peak.parts:
        held.add_row(part, *(f"{step.peak.parts[part] / BYTES_PER_GB:.1f}" for step in steps))
    titles = (title, "What takes the time", "What takes the memory")
    return [
        each
        for words, table in zip(titles, (summary, where, held), strict=True)
        for each in (Text(words, style="bold"), table)
    ]


def _table(first: str, others: Sequence[str]) -> Table:
    table = Table(box=box.SIMPLE_HEAD)
    table.add_column(first, no_wrap=True)
    for name in others:
        table.add_column(Text(name), justify="right", no_wrap=True)
    return table


def notes(steps: Sequence[ModelStep], skew: float) -> list[str]:
    """Returns how to read the tables, and the effect of faster layers."""
    faster = "; ".join(
        f"{step.run.strategy.name}: " + ", ".join(f"{step.speed_up(by):.2f}" for by in _FASTER) for step in steps
    )
    routing = f"drawn with skew {skew:g}" if skew else "even, as no --skew is given"
    return [
        f"Routing is {routing}. bubble: a stage of the pipeline has nothing to do. MFU: of the data sheet's rate in "
        "16 bits.",
        f"Layers of experts {', '.join(f'{by:g}' for by in _FASTER)} times as fast would make the step faster by "
        f"{faster}.",
        "Memory leaves out what an allocator wastes, and workspaces of kernels and of NCCL.",
        *dict.fromkeys(step.remark for step in steps if step.remark),
    ]


def _write(steps: Sequence[ModelStep], out: Path) -> list[Path]:
    """Writes the simulated steps as data, and a chart of the memory."""
    found = out / "model.json"
    write_whole(found, json.dumps([_fields(step) for step in steps], indent=2))
    parts = {step.run.strategy.name: step.peak.parts for step in steps}
    return [found, *memory_chart(parts, out / "memory", have_gb=steps[0].run.cluster.memory_gb)]


def _fields(step: ModelStep) -> Mapping[str, Any]:
    return {
        "run": step.run.model_dump(mode="json"),
        "seconds": step.seconds,
        "seconds_by_draw": [draw.seconds for draw in step.draws],
        "tokens_per_second": step.tokens_per_second,
        "mfu": step.mfu,
        "seconds_by_part": step.shares,
        "bytes_by_stage": [stage.parts for stage in step.memory],
        "verdict": step.verdict,
        "speed_up_with_faster_experts": {str(by): step.speed_up(by) for by in _FASTER},
    }
