"""What comes behind a stage's last micro-batch: gradients that still travel, the optimizer, parameters."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from moesys.config.model_run import ModelRun
from moesys.cost import optimizer_seconds
from moesys.simulator.model.exchanges import Ring, passes_of_sum
from moesys.simulator.model.memory import MASTER_BYTES, MOMENT_BYTES
from moesys.simulator.model.model_step import SimulatedPart
from moesys.simulator.model.units import Units

# Of a parameter, read and written beside master and moments: its gradient, and the copy in the compute dtype.
_GRADIENT_AND_COPY_BYTES = 4 + 2


def update_bytes(optimizer: str) -> int:
    """Returns the bytes of a parameter that its update reads and writes."""
    return 2 * (MASTER_BYTES + MOMENT_BYTES[optimizer]) + _GRADIENT_AND_COPY_BYTES


@dataclass(frozen=True)
class EndOfStep:
    """Of all stages of ``run``."""

    run: ModelRun
    units: Units

    def seconds(self, chunks: Sequence[range], parts: Sequence[SimulatedPart]) -> dict[str, float]:
        """Returns what a stage still takes, by what it is: gradients hide behind the backward of the last micro-batch,
        and parameters behind the forward of the first, bucket by bucket, as far as links are idle there.
        """
        run, parallel = self.run, self.run.parallelism
        units = self.units.of_stage(chunks)
        experts = sum(unit.operations.of("experts").parameters for unit in units) / run.groups.expert
        dense = sum(unit.parameters for unit in units) / parallel.tensor
        sharded, travelled = parallel.dense != "replicated", parallel.dense == "full"
        # Of links inside domains, and of NICs.
        summed, gathered, updated = np.zeros(2), np.zeros(2), 0.0
        for ring, parameters, done in ((Ring.of_dense(run), dense, travelled), (Ring.of_experts(run), experts, False)):
            updated += parameters / (ring.size if sharded else 1)
            if done:
                continue
            gradients_s = np.array(ring.busy_seconds(parameters * run.gradient_bytes, run.cluster))
            summed += gradients_s * (passes_of_sum(run) if sharded else 2)
            if sharded:
                gathered += ring.busy_seconds(parameters * run.model.bytes_per_element, run.cluster)
        # Gradients of the layer that comes last have nothing to hide behind, nor have parameters of the first.
        layers = sum(map(len, chunks))
        hidden = (layers - 1) / layers
        forward, backward = np.zeros(2), np.zeros(2)
        for part in parts:
            forward += [max(0.0, part.seconds.forward - link.forward) for link in part.busy]
            backward += [max(0.0, part.seconds.backward - link.backward) for link in part.busy]
        shown_s = [float((summed - hidden * backward).max()), float((gathered - hidden * forward).max())]
        return {
            "gradients and parameters": sum(max(0.0, each) for each in shown_s),
            "tied embeddings": self._tied_seconds(chunks),
            "optimizer": optimizer_seconds(updated * update_bytes(run.optimizer), run.cluster),
        }

    def _tied_seconds(self, chunks: Sequence[range]) -> float:
        """Returns those of the first and the last stage to sum gradients of tied embeddings, once their data-parallel
        ranks have (``finalize_model_grads`` of Megatron-Core).
        """
        run, parallel = self.run, self.run.parallelism
        at_end = chunks[0].start == 0 or chunks[-1].stop == len(self.units.layers)
        if not run.model.tied_embeddings or parallel.pipeline == 1 or not at_end:
            return 0.0
        held = self.units.embedding.parameters / parallel.tensor
        if parallel.dense == "full":
            held /= Ring.of_dense(run).size
        return 2 * Ring.of_ends(run).seconds(held * run.gradient_bytes, run.cluster)
