"""The command ``optimizers``: steps of ``ms.Muon`` on ranks, of AdamW, and of Muon that each rank computes as a whole.

The model is a stack of MoE layers, and gradients are those of one batch. "repeated" is what a data-parallel program
does: every rank gathers the update of each layer, and makes the matrices of all experts orthogonal.

R ranks, E experts.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Annotated, Any
from unittest.mock import patch

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, distribute_tensor

from benchmarks.harness.live_tensors import live_at_peak
from benchmarks.harness.options import Repeats, machine_line
from benchmarks.harness.stopwatch import interleave, wall_ms
from moesys.config import Ep, Fsep, ModelShape, Strategy
from moesys.lab.commands.options import option, refusing
from moesys.lab.ranks.pool import LocalRanks, RankTimeouts
from moesys.lab.show.progress import steps_told
from moesys.lab.show.sheets import AS_TABLES, Column, CommandOutput, Report, Sheet, figure, publish
from moesys.moe import muon
from moesys.moe.gradients import sync_gradients
from moesys.moe.layer import MoELayer
from moesys.moe.masters import local_part
from moesys.moe.muon import Muon

REPEATED = "muon, repeated"
_TIMEOUTS = RankTimeouts(run_s=3600.0, collective_s=600.0)
# The largest difference of a parameter from that of "repeated" after a step, over the largest one.
TOLERANCE = 1e-6


@dataclass(frozen=True)
class Size:
    layers: int
    experts: int
    hidden: int
    width: int


@dataclass(frozen=True)
class Row:
    """The result of one optimizer. Milliseconds and bytes are those of the rank that has most.

    iteration_ms: processor time of Newton–Schulz, by repetition. received: bytes that a rank received in a step.
    state, peak: bytes of the optimizer's state, and of all tensors that live at once in a step.
    """

    name: Annotated[str, Column("optimizer")]
    samples_ms: list[float]
    iteration_samples_ms: list[float]
    received_mb: Annotated[float, Column("received MB", figure)]
    state_mb: Annotated[float, Column("state MB", figure)]
    peak_mb: Annotated[float, Column("peak MB", figure)]
    error: float = field(default=0.0)
    wrong: Annotated[str, Column("wrong", wraps=True)] = ""

    @property
    def step_ms(self) -> Annotated[float | None, Column("step ms", figure, after="name")]:
        return None if self.wrong else statistics.median(self.samples_ms)

    @property
    def iteration_ms(self) -> Annotated[float | None, Column("iteration, CPU ms", figure, after="step_ms")]:
        return None if self.wrong else statistics.median(self.iteration_samples_ms)


def bench_optimizers(
    layers: Annotated[int, option("N", "MoE layers.", min=1)] = 2,
    experts: Annotated[int, option("N", "Experts of a layer.", min=2)] = 16,
    hidden: Annotated[int, option("N", "Hidden size.", min=8)] = 512,
    width: Annotated[int, option("N", "Width of an expert.", min=8)] = 256,
    ranks: Annotated[int, option("N", "Number of local ranks of one thread.", min=2)] = 2,
    repeats: Repeats = 9,
    output: CommandOutput = AS_TABLES,
) -> None:
    """Times steps of optimizers on ranks."""
    with refusing():
        if experts % ranks:
            raise ValueError(f"ranks={ranks} does not divide the {experts} experts of a layer; choose a divisor")
    size = Size(layers, experts, hidden, width)
    with LocalRanks(ranks, timeouts=_TIMEOUTS) as pool, steps_told("optimizers", 1, output.quiet) as tell:
        tell(f"{ranks} ranks")
        rows = of_slowest(pool.run(measure_on_rank, size, repeats))
    machine = machine_line(1)
    notes = [
        f"{machine}; {ranks} ranks of one thread.",
        f"A step of the optimizer, of the slowest rank; median of {repeats} interleaved repetitions. {layers} layers "
        f"of {experts} experts, hidden size {hidden}, width {width}, in float32.",
        "iteration: processor time of Newton-Schulz on the rank with most. received: bytes of the optimizer's "
        "messages, or of gathers. state: that of the optimizer. peak: tensors that live at once in the step, with "
        "parameters, gradients and state.",
        f"A time is shown only if all parameters equal those of {REPEATED!r} within {TOLERANCE:g}.",
    ]
    title = "MEASURED: a step of the optimizer"
    data = {"machine": machine, "num_ranks": ranks, "rows": rows}
    publish(Report("optimizers", title, "measured", [Sheet(title, rows, notes)], data=data), output)


def of_slowest(rows_R: Sequence[Sequence[Row]]) -> list[Row]:
    """Returns rows with the largest numbers of all ranks, by repetition."""
    found = []
    for of_ranks in zip(*rows_R, strict=True):
        step_ms, iteration_ms = (
            [*map(max, zip(*samples, strict=True))]
            for samples in ([row.samples_ms for row in of_ranks], [row.iteration_samples_ms for row in of_ranks])
        )
        error = max(row.error for row in of_ranks)
        wrong = f"differs by {error:.1e}" if error > TOLERANCE else ""
        megabytes = ((row.received_mb, row.state_mb, row.peak_mb) for row in of_ranks)
        received_mb, state_mb, peak_mb = map(max, zip(*megabytes, strict=True))
        found.append(Row(of_ranks[0].name, step_ms, iteration_ms, received_mb, state_mb, peak_mb, error, wrong))
    return found


# --- on a rank --------------------------------------------------------------------------------------------------------


def measure_on_rank(size: Size, repeats: int) -> list[Row]:
    """Measures all optimizers; all ranks call it at once."""
    R = dist.get_world_size()
    ep = Strategy(name="ep", sharding=Ep())
    fsep = Strategy(name="fsep", sharding=Fsep(slots_per_rank=-(-size.experts // R)))
    contestants = {
        REPEATED: Contestant(size, ep, RepeatedMuon),
        "muon, ep": Contestant(size, ep, partial(Muon, lr=0.01)),
        "muon, fsep": Contestant(size, fsep, partial(Muon, lr=0.01)),
        "adamw, ep": Contestant(size, ep, _adamw),
        "adamw, fsep": Contestant(size, fsep, _adamw),
    }
    wanted = [_whole(p) for p in contestants[REPEATED].after_a_step()]
    rows: list[tuple[str, tuple[float, float, float], float]] = []
    for name, each in contestants.items():
        error = 0.0
        if name != REPEATED:
            found = [_whole(p) for p in each.after_a_step()]
            if each.is_muon:
                error = max(float((a - b).abs().max() / b.abs().max()) for a, b in zip(found, wanted, strict=True))
        peak = sum(live_at_peak(each.model, each.optimizer, each.optimizer.step).values())
        rows.append((name, (each.received_bytes() / 1e6, each.state_bytes() / 1e6, peak / 1e6), error))
    timed = {name: partial(wall_ms, each.step) for name, each in contestants.items()}
    samples = interleave(timed, repeats, before=dist.barrier)
    # The first sample of each is that of the warm-up.
    return [
        Row(name, samples[name], contestants[name].iteration_ms[-repeats:], *megabytes, error)
        for name, megabytes, error in rows
    ]


class Contestant:
    """A model with the gradients of one batch, and its optimizer."""

    def __init__(self, size: Size, strategy: Strategy, make: Callable[[nn.Module], Any]) -> None:
        shape = ModelShape(hidden_size=size.hidden, intermediate_size=size.width, num_experts=size.experts, top_k=2)
        layers = (MoELayer(shape, strategy, layer_index=index) for index in range(size.layers))
        self.model = nn.Sequential(*layers)
        self.optimizer = make(self.model)
        self.is_muon = not isinstance(self.optimizer, torch.optim.AdamW)
        generator = torch.Generator().manual_seed(dist.get_rank())
        self.model(torch.randn(256, size.hidden, generator=generator)).square().mean().backward()
        sync_gradients(self.model)
        self.iteration_ms: list[float] = []

    def after_a_step(self) -> list[Any]:
        self.optimizer.step()
        return [each for name, each in self.model.named_parameters() if name.endswith("masters")]

    def step(self) -> None:
        """Makes a step, and keeps the processor time of its iterations."""
        spent_s, iterate = 0.0, muon.orthogonalize_

        def timed(*args: Any) -> None:
            nonlocal spent_s
            start_s = time.thread_time()
            iterate(*args)
            spent_s += time.thread_time() - start_s

        with patch.object(muon, "orthogonalize_", timed):
            self.optimizer.step()
        self.iteration_ms.append(1e3 * spent_s)

    def state_bytes(self) -> int:
        """Returns the bytes of this rank's state of all parameters."""
        states = [each for state in self.optimizer.state.values() for each in state.values()]
        return sum(local_part(each).nbytes for each in states if isinstance(each, Tensor))

    def received_bytes(self) -> int:
        """Returns the bytes that this rank receives in a step."""
        if isinstance(self.optimizer, RepeatedMuon):
            return self.optimizer.received_bytes
        if not isinstance(self.optimizer, Muon):
            return 0
        channels = {each.channel for each in self.optimizer._matrices.values() if each.channel.group is not None}
        for channel in channels:
            channel.meter.clear()
        self.optimizer.step()
        return sum(channel.meter.bytes_of("optimizer") for channel in channels)


class RepeatedMuon(torch.optim.Optimizer):
    """Muon of the masters of all layers, with the same work on every rank."""

    knows_matrices = True

    def __init__(self, model: nn.Module) -> None:
        self.all = Muon(model, lr=0.01)
        super().__init__(self.all.param_groups[0]["params"], {})
        self.state = self.all.state
        self.received_bytes = 0

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        self.received_bytes, group = 0, self.all.param_groups[0]
        parameter: Any
        for parameter in group["params"]:
            matrices, mesh, placements = self.all._matrices[parameter], parameter.device_mesh, parameter.placements
            buffer = local_part(self.state[parameter].setdefault("momentum_buffer", torch.zeros_like(parameter)))
            gradient = local_part(parameter.grad)
            buffer.lerp_(gradient, 1 - group["momentum"])
            update = gradient.lerp(buffer, group["momentum"])
            whole = DTensor.from_local(update, mesh, placements).full_tensor()
            self.received_bytes += (whole.numel() - update.numel()) * whole.element_size()
            muon.orthogonalize_(matrices.views(whole).values(), group)
            mine = distribute_tensor(whole, mesh, placements, src_data_rank=None)
            matrices.add_(slice(None), mine.to_local(), group)


def _adamw(model: nn.Module) -> torch.optim.AdamW:
    return torch.optim.AdamW(model.parameters(), lr=1e-3)


def _whole(parameter: Any) -> Tensor:
    whole: Tensor = parameter.detach().full_tensor()
    return whole
