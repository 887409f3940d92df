"""``moesys simulate --model``: a step of a whole model under each strategy, from its config.json alone."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated, Any

from moesys.config import BYTES_PER_GB, Strategy, presets
from moesys.config.model_run import ModelRun, Parallelism
from moesys.config.workload import Generated
from moesys.display import counted
from moesys.files import write_whole
from moesys.kinds import did_you_mean
from moesys.lab.runs.declarations import cluster_of, declared_in
from moesys.lab.show.progress import status_line
from moesys.lab.show.sheets import Column, CommandOutput, Sheet, figure, print_sheet
from moesys.simulator.model.model_step import ModelStep
from moesys.simulator.model.simulate_model import simulate_model


def run_of(cluster: str | None, **fields: Any) -> ModelRun:
    """Returns the run with these fields, of which ``model`` is a name or a path. Raises ValueError for others."""
    if cluster is None:
        raise ValueError("a model needs a cluster to run on; give --cluster, as in --cluster h100:4")
    return ModelRun.model_validate({"cluster": cluster_of(cluster), **fields})


def simulate_whole_model(
    run_with: Callable[..., ModelRun],
    *,
    strategies: Sequence[str],
    skew: float,
    draws: int,
    output: CommandOutput,
    read: Sheet | None = None,
) -> None:
    """Simulates a step of a model under each strategy, prints the tables and writes the steps.

    ``run_with`` makes the run of a strategy. ``read``: where its fields are from. Raises ValueError for arguments that
    cannot be met.
    """
    routing = Generated(skew=skew) if skew else None
    if len(set(strategies)) < len(strategies):
        raise ValueError(f"strategy={list(strategies)} names one twice; give each once")
    steps = []
    with status_line(output.quiet) as show:
        for name in strategies:
            run = run_with(strategy=named_strategy(name))

            def tell(words: str, name: str = run.strategy.name) -> None:
                show(f"{name}: {words}")

            steps.append(simulate_model(run, routing, draws=draws, tell=tell))
    if output.folder is not None:
        write_whole(output.folder / "model.json", _json(steps, read))
    if output.as_json:
        print(_json(steps, read))
    else:
        for sheet in [*sheets(steps, notes_on(steps, skew)), *([read] if read else [])]:
            print_sheet(sheet, wide=output.wide)
    if output.folder is not None:
        output.print_written(["model.json"])


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


@dataclass(frozen=True)
class WholeModelStep:
    """A row: a step of a model under one strategy."""

    strategy: Annotated[str, Column("strategy", align="left", wraps=True)]
    step_ms: Annotated[float, Column("step ms", figure, kept=True)]
    spread: Annotated[str, Column("p10 to p90", align="right")]
    speedup: Annotated[float, Column("speed-up", ".2f", kept=True)]
    tokens_per_second: Annotated[float, Column("tokens/s per rank", ",.0f")]
    mfu: Annotated[float | None, Column("MFU", ".1%")]
    max_over_mean: Annotated[float, Column("max/mean", ".2f")]
    peak_gb: Annotated[float, Column("peak GB", ".1f", kept=True)]
    verdict: Annotated[str, Column("verdict", align="left", wraps=True, kept=True)]


@dataclass(frozen=True)
class PartOfStep:
    """A row: a part of the time or of the memory, by strategy."""

    time: Annotated[str, Column("mean of ranks, ms", align="left")]
    memory: Annotated[str, Column("rank that holds most, GB", align="left")]
    by_strategy: Annotated[Mapping[str, str], Column("{}", align="right")]


def sheets(steps: Sequence[ModelStep], notes: Sequence[str] = ()) -> list[Sheet]:
    """Returns the tables of times, of what ranks do, and of memory, which has the notes."""
    run = steps[0].run
    parallel = run.parallelism
    sizes = {name: getattr(parallel, name) for name in ("tp", "cp", "pp", "vp")}
    words = ", ".join(f"{name} {size}" for name, size in (sizes | {"ep": run.groups.expert}).items() if size != 1)
    title = (
        f"SIMULATED: {run.model.name or 'a model'} of {figure(run.model.num_parameters / 1e6)} million parameters "
        f"({figure(run.model.active_parameters / 1e6)} active), on {run.cluster.name or 'a cluster'}"
        f"{', ' + words if words else ''}: {counted(run.num_micro_batches, 'micro-batch')} of "
        f"{run.micro_batch} x {run.seq_len:,} tokens"
    )
    summary = []
    for step in steps:
        low, high = (figure(1e3 * seconds) for seconds in step.interval)
        summary.append(
            WholeModelStep(
                strategy=step.run.strategy.name,
                step_ms=1e3 * step.seconds,
                spread=f"{low} to {high}" if low != high else "",
                speedup=steps[0].seconds / step.seconds,
                tokens_per_second=step.tokens_per_second,
                mfu=step.mfu,
                max_over_mean=max(draw.max_over_mean for draw in step.draws),
                peak_gb=step.peak.gb,
                verdict=step.verdict or "fits",
            )
        )
    where = []
    for part in dict.fromkeys(name for step in steps for name in step.shares):
        shares = {step.run.strategy.name: (step.shares.get(part, 0.0), step.seconds) for step in steps}
        if any(seconds > 5e-6 for seconds, _ in shares.values()):
            cells = {name: f"{figure(1e3 * one)}  {one / whole:4.0%}" for name, (one, whole) in shares.items()}
            where.append(PartOfStep(part, "", cells))
    held = [
        PartOfStep("", part, {of.run.strategy.name: f"{of.peak.parts[part] / BYTES_PER_GB:.1f}" for of in steps})
        for part in steps[0].peak.parts
    ]
    return [Sheet(title, summary), Sheet("What takes the time", where), Sheet("What takes the memory", held, notes)]


def notes_on(steps: Sequence[ModelStep], skew: float) -> list[str]:
    """Returns how to read the tables."""
    routing = f"drawn with skew {skew:g}" if skew else "even, as no --skew is given"
    piped = any(step.run.parallelism.pp > 1 for step in steps)
    return [
        f"Routing is {routing}. {'bubble: a stage of the pipeline has nothing to do. ' * piped}MFU: of the data "
        "sheet's rate in 16 bits.",
        "Memory leaves out what an allocator wastes, and workspaces of kernels and of NCCL.",
        *dict.fromkeys(step.remark for step in steps if step.remark),
    ]


def _json(steps: Sequence[ModelStep], read: Sheet | None) -> str:
    found = [
        {
            **({"read": [asdict(row) for row in read.rows]} if read else {}),
            "run": step.run.model_dump(mode="json"),
            "seconds": step.seconds,
            "seconds_by_draw": [draw.seconds for draw in step.draws],
            "tokens_per_second": step.tokens_per_second,
            "mfu": step.mfu,
            "seconds_by_part": step.shares,
            "bytes_by_stage": [stage.parts for stage in step.memory],
            "verdict": step.verdict,
        }
        for step in steps
    ]
    return json.dumps(found, indent=2)
