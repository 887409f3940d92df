"""What comes behind a stage's last micro-batch: gradients that still travel, the optimizer, parameters."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from moesys.config.model_run import ModelRun
from moesys.cost import optimizer_seconds
from moesys.whole_model.exchanges import Ring, passes_of_sum
from moesys.whole_model.memory import MASTER_BYTES, MOMENT_BYTES
from moesys.whole_model.model_step import SimulatedPart
from moesys.whole_model.units import Units

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
        and parameters behind the forward of the first, bucket by bucket.
        """
        run, parallel = self.run, self.run.parallelism
        units = self.units.of_stage(chunks)
        experts = sum(unit.operations.of("experts").parameters for unit in units) / run.groups.expert
        dense = sum(unit.parameters for unit in units) / parallel.tensor
        sharded, travelled = parallel.dense != "replicated", parallel.dense == "full"
        summed, gathered, updated = 0.0, 0.0, 0.0
        for ring, parameters, done in ((Ring.of_dense(run), dense, travelled), (Ring.of_experts(run), experts, False)):
            updated += parameters / (ring.size if sharded else 1)
            if done:
                continue
            gradients_s = ring.seconds(parameters * run.gradient_bytes, run.cluster)
            summed += gradients_s * (passes_of_sum(run) if sharded else 2)
            if sharded:
                gathered += ring.seconds(parameters * run.model.bytes_per_element, run.cluster)
        # Gradients of the layer that comes last have nothing to hide behind, nor have parameters of the first.
        layers = sum(map(len, chunks))
        hidden = (layers - 1) / layers
        summed = max(0.0, summed - hidden * sum(part.seconds.backward for part in parts))
        gathered = max(0.0, gathered - hidden * sum(part.seconds.forward for part in parts))
        optimizer_s = optimizer_seconds(updated * update_bytes(run.optimizer), run.cluster)
        return {"gradients and parameters": summed + gathered, "optimizer": optimizer_s}
