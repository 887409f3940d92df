"""The units of a model in the order of forward: the embedding, each layer, and the last norm with the head.

They are what FSDP2 gathers at once in transformers' models (``base_model_fsdp_plan``). The head's stay from forward
until backward; tied to the embedding, where one rank has both, so does the embedding.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace

from moesys.config import Gqa, ModelSpec
from moesys.config.model_run import ModelRun
from moesys.simulator.model.model_cost import count_model
from moesys.simulator.model.operations import Operations
from moesys.simulator.model.rest_seconds import RestSeconds, rest_seconds


@dataclass(frozen=True)
class Unit:
    """``rest``: seconds of all but routed experts. ``parameters``: of all but those, that a tensor group holds. kept:
    gathered once for forward and backward.
    """

    operations: Operations
    rest: RestSeconds
    parameters: int
    has_experts: bool = False
    kept: bool = False


@dataclass(frozen=True)
class Units:
    """Of a whole model. Layers that are equal share one object."""

    embedding: Unit
    layers: tuple[Unit, ...]
    head: Unit

    @classmethod
    def of(cls, run: ModelRun) -> Units:
        model, cost = run.model, count_model(_as_shared(run), run.seq_len, fp8=run.fp8, fp8_rows=run.fp8_rows)
        found = {
            id(each): Unit(each, rest_seconds(each, run), each.dense_parameters, layer.has_experts)
            for each, layer in zip(cost.layers, model.layers, strict=True)
        }
        # Neither end runs again.
        first, last = (replace(rest_seconds(each, run), again=0.0) for each in (cost.embedding, cost.head))
        one_rank_has_both = model.tied_embeddings and run.parallelism.pipeline == 1
        # Tied, the head of a last stage of its own has a copy of the embedding.
        copied = model.tied_embeddings and not one_rank_has_both
        head = cost.head.parameters + (cost.embedding.parameters if copied else 0)
        return cls(
            Unit(cost.embedding, first, cost.embedding.parameters, kept=one_rank_has_both),
            tuple(found[id(each)] for each in cost.layers),
            Unit(cost.head, last, head, kept=True),
        )

    def of_part(self, layers: range) -> tuple[Unit, ...]:
        """Returns those of some neighbouring layers, and of the model's ends that they are at."""
        first, last = layers.start == 0, layers.stop == len(self.layers)
        within = self.layers[layers.start : layers.stop]
        return (*(self.embedding,) * first, *within, *(self.head,) * last)

    def of_stage(self, parts: Iterable[range]) -> tuple[Unit, ...]:
        """Returns those of all its parts."""
        return tuple(unit for layers in parts for unit in self.of_part(layers))


def _as_shared(run: ModelRun) -> ModelSpec:
    """Returns the model as a tensor group has it: with a head of keys and values for every rank at least."""
    layers = []
    for layer in run.model.layers:
        attention = layer.attention
        if isinstance(attention, Gqa) and attention.num_kv_heads < run.parallelism.tensor:
            layer = layer.replace(attention=attention.replace(num_kv_heads=run.parallelism.tensor))
        layers.append(layer)
    return run.model.replace(layers=tuple(layers))
