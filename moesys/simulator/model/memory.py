"""Counts what a rank of each pipeline stage holds at most, by part, in bytes.

The count leaves out allocator overhead, and workspaces of kernels and of NCCL.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields

from moesys.config import BYTES_PER_GB
from moesys.config.model_run import LayerRecompute, ModelRun
from moesys.limits import rank_memory
from moesys.simulator.model.exchanges import Ring
from moesys.simulator.model.model_cost import Operations
from moesys.simulator.model.model_units import Units

# Bytes per parameter.
MASTER_BYTES = 4
MOMENT_BYTES = {"adam": 8, "adam_bf16": 4, "sgd": 0, "muon": 4}


@dataclass(frozen=True)
class StageMemory:
    """Bytes of a rank of one stage.

    weights: all but experts, in the compute dtype. gradients: in ``gradient_dtype``. optimizer: masters and moments.
    slots: experts in the compute dtype, own, borrowed or restored, and gradients of those that are not its own.
    activations: of all micro-batches in flight. logits: of one micro-batch. rows: those that are sent and received.
    """

    weights: float
    gradients: float
    optimizer: float
    slots: float
    activations: float
    logits: float
    rows: float

    @property
    def parts(self) -> dict[str, float]:
        return {each.name: getattr(self, each.name) for each in fields(self)}

    @property
    def gb(self) -> float:
        """All parts in units of 1e9 bytes."""
        return sum(self.parts.values()) / BYTES_PER_GB


def stage_memory(run: ModelRun, units: Units, chunks: Sequence[range], held: int, row_factor: float) -> StageMemory:
    """Returns what a rank of a stage holds, whose parts of the model are the layers of ``chunks``.

    held: the largest number of forwards of a chunk whose backward is still to come. row_factor: rows of the rank with
    most rows, divided by the mean.
    """
    parallel, model = run.parallelism, run.model
    of_stage = units.of_stage(chunks)
    layers = [units.layers[layer].operations for chunk in chunks for layer in chunk]
    dense = sum(unit.parameters for unit in of_stage) / parallel.tp
    owned = sum(each.of("experts").parameters for each in layers) / run.groups.expert
    b = model.bytes_per_element
    sharded = parallel.dense != "replicated"
    dense_ring, expert_ring = Ring.of_dense(run).size, Ring.of_experts(run).size
    of_experts = MOMENT_BYTES[run.optimizer] + MASTER_BYTES
    of_dense = of_experts if b < MASTER_BYTES else MOMENT_BYTES[run.optimizer]
    whole = parallel.dense == "full"
    # Two units are gathered at a time, as far as they are more than a rank's share.
    gathered = sum(sorted(unit.parameters for unit in of_stage)[-2:]) / parallel.tp
    weights = b * (min(dense, dense / dense_ring + gathered) if whole else dense)
    gradients = run.gradient_bytes * ((dense / dense_ring if whole else dense) + owned)
    # Muon leaves the embedding and the head to AdamW.
    ends = sum(unit.parameters for unit in of_stage if unit is units.embedding or unit is units.head) / parallel.tp
    second = (MOMENT_BYTES["adam"] - MOMENT_BYTES["muon"]) * ends if run.optimizer == "muon" else 0.0
    optimizer = (of_dense * dense + second) / (dense_ring if sharded else 1) + of_experts * owned / (
        expert_ring if sharded else 1
    )
    share = run.micro_batch / (parallel.tp * parallel.cp)
    again = not run.strategy.overlap.keep_x
    kept = sum(_saved(each, parallel.recompute, row_factor, again) for each in layers) * share / len(chunks)
    working = 0.0
    if parallel.recompute != "none" or parallel.overlap_micro_batches:
        working = max(_saved(each, "none", row_factor, again) for each in layers) * share
    return StageMemory(
        weights=weights,
        gradients=gradients,
        optimizer=optimizer,
        slots=_slot_bytes(run, sum(each.parameters > each.dense_parameters for each in layers)),
        activations=held * kept + working,
        logits=units.head.operations.saved_bytes() * share if of_stage[-1] is units.head else 0.0,
        rows=_row_bytes(run, row_factor),
    )


def _saved(layer: Operations, recompute: LayerRecompute, row_factor: float, again: bool) -> float:
    """Returns the bytes that a layer keeps of a sequence, with the experts' rows of the busiest rank. ``again``: rows
    of x are pulled again.
    """
    tensors = {name: size for name, size in layer.saved(recompute).items() if not (again and name == "expert_rows")}
    return sum(size * (row_factor if name.startswith("expert_") else 1.0) for name, size in tensors.items())


def _slot_bytes(run: ModelRun, moe_layers: int) -> float:
    if not moe_layers:
        return 0.0
    held = rank_memory(run.strategy, run.shape, run.expert_cluster, moe_layers, run.tokens_per_rank)
    return held.slot_bytes + held.gradient_bytes


def _row_bytes(run: ModelRun, row_factor: float) -> float:
    """Returns the bytes of one layer's rows that are sent and received, and of as many results; with MegaKernels, of
    the rows that peers access.
    """
    if run.strategy.overlap.reaches_memory:
        return rank_memory(run.strategy, run.shape, run.expert_cluster, 1, run.tokens_per_rank).shared_bytes
    rows = run.tokens_per_rank * run.shape.top_k
    return 2.0 * (rows + rows * row_factor) * run.shape.row_bytes
