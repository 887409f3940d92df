"""What one rank of ``bench shaped --case models`` does: training steps of transformers' small models over a link.

B sequences of a rank, E experts.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property, partial

import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh

from benchmarks.harness.contest import Case, Contestant, Near, Outcome, hold
from benchmarks.harness.model_steps import (
    HIDDEN,
    LENGTH,
    TOLERANCE,
    ModelSteps,
    config_of,
    new_model,
    strategies,
    tokens_of,
)
from benchmarks.shaped.host_steps import ShapedCase
from moesys.config import ModelSpec, Pipelined, Strategy
from moesys.config.layer_spec import MoeMlp
from moesys.hf.parallelize import EP, parallelize

THEIRS = "transformers"
# Of the steps that calibration looks at: shares of a case's sequences, none of them all, and chunks.
MOST_SEQUENCES, SOME_SEQUENCES, CHUNKS = 0.75, 0.25, 4
PIECES = ("most", "some", "chunks")


@dataclass(frozen=True)
class ModelCase:
    """A model on hosts of one rank each, and how its tokens are routed. sequences: of a rank's batch."""

    model: str
    routing: str
    hosts: int
    mbit_per_s: float
    sequences: int
    latency_us: float = 0.0
    hidden_size: int = HIDDEN

    @cached_property
    def spec(self) -> ModelSpec:
        return ModelSpec.from_config(config_of(self.model, self.hidden_size).to_dict(), dtype="float32")

    @property
    def strategies(self) -> list[Strategy]:
        return strategies(self.hosts)

    @property
    def links(self) -> ShapedCase:
        """Its links, and all-to-alls as large as those of its layers."""
        shape = next(layer.mlp.shape for layer in self.spec.layer_counts if isinstance(layer.mlp, MoeMlp))
        tokens = (self.sequences * LENGTH,) * self.hosts
        return ShapedCase("models", self.mbit_per_s, self.latency_us, tokens, shape, tuple(self.strategies))

    @property
    def pieces(self) -> dict[str, tuple[Strategy, int]]:
        """``PIECES``: steps of even tokens that are none of the case's own, with their sequences: most of them, some,
        and most in chunks.
        """
        ep = self.strategies[0]
        most, some = (round(self.sequences * share) for share in (MOST_SEQUENCES, SOME_SEQUENCES))
        chunked = ep.replace(name="chunks", overlap=Pipelined(chunks=CHUNKS))
        return {"most": (ep, most), "some": (ep, some), "chunks": (chunked, most)}


def measure(case: ModelCase, repeats: int) -> Mapping[str, Outcome]:
    """Every strategy of the case and, interleaved with them, its pieces, so that whatever else the machine does slows
    all; a collective of all ranks. ``Outcome.metrics`` are plans, layer by layer, as ``LayerPlan.to_json``.

    Loss and gradients must be those of transformers' own code on each rank's whole model.
    """
    # Gradients are gathered once, to be compared, however many messages that takes.
    logging.getLogger("torch.distributed.tensor._redistribute").setLevel(logging.ERROR)
    near = Near(TOLERANCE, THEIRS)

    def wrong(name: str, results: dict[str, Tensor]) -> str:
        return near(name, results) if results else ""

    setups = {THEIRS: partial(_theirs, case)}
    setups |= {each.name: partial(_ours, case, each) for each in case.strategies}
    setups |= {name: partial(_piece, case, *piece) for name, piece in case.pieces.items()}
    return hold(Case(setups, wrong, before=dist.barrier), repeats)


def _theirs(case: ModelCase) -> Contestant:
    """The whole model on each rank; gradients are the mean over ranks."""
    model = new_model(case.model, case.hidden_size)
    model.set_experts_implementation("grouped_mm")
    steps = ModelSteps(model, tokens_of(case.sequences), case.routing)

    def results() -> dict[str, Tensor]:
        found = steps.results()
        for name, result in found.items():
            if name != "loss":
                dist.all_reduce(result)
                result /= dist.get_world_size()
        return found

    return Contestant(results, {})


def _ours(case: ModelCase, strategy: Strategy) -> Contestant:
    steps = _steps(case, strategy, case.sequences, case.routing)
    return Contestant(steps.results, {"step": steps.step}, partial(_plans, steps))


def _piece(case: ModelCase, strategy: Strategy, sequences: int) -> Contestant:
    """Runs twice, before which layouts settle, and has nothing to be compared."""
    steps = _steps(case, strategy, sequences, "balanced")

    def results() -> dict[str, Tensor]:
        steps.step()
        steps.step()
        return {}

    return Contestant(results, {"step": steps.step}, partial(_plans, steps))


def _steps(case: ModelCase, strategy: Strategy, sequences: int, routing: str) -> ModelSteps:
    model = new_model(case.model, case.hidden_size)
    mesh = init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=(EP,))
    parallelize(model, strategy, mesh, cluster=case.links.cluster)
    return ModelSteps(model, tokens_of(sequences), routing)


def _plans(steps: ModelSteps) -> list[str]:
    return [plan.to_json() for plan in steps.plans()]
