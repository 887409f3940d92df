"""The units of a model in the order of forward: the embedding, each layer, and the last norm with the head.

A unit is what FSDP2 gathers at once in transformers' models (``base_model_fsdp_plan``). The head's parameters stay from
forward until backward; so do the embedding's if they are tied to the head's and one rank has both.

``rest_seconds`` times what a rank does besides the routed experts. Each operation takes its flops at the rate of its
products or its bytes at the memory's rate, and a launch. Tensor and context groups share them evenly. What tensor
groups exchange (sequence parallelism, arXiv 2205.05198, section 4.2.2: an all-gather before and a reduce-scatter after
attention and each dense MLP) is never hidden, and keys and values travel around a context group during the scores.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace

from moesys.config import ClusterSpec, Gqa, ModelSpec
from moesys.config.model_run import LayerRecompute, ModelRun
from moesys.cost import attention_rate, elementwise_seconds, product_rate
from moesys.simulator.model.exchanges import place_groups
from moesys.simulator.model.model_cost import Operation, Operations, Part, count_model

# Number of a tensor group's exchanges that run again: the gather, and the reduce-scatter if the whole layer runs again.
_SENT_AGAIN: dict[LayerRecompute, int] = {"none": 0, "selective": 1, "full": 2}
# The parts that ``simulator.step_program`` times.
ROUTED: frozenset[Part] = frozenset({"dispatch", "experts", "combine"})
# Parts whose weights a tensor group shares, with an exchange before and one after each.
_SHARED_BY_WEIGHTS: tuple[tuple[Part, ...], ...] = (("attention_projections",), ("shared_experts", "dense_mlp"))


@dataclass(frozen=True)
class RestSeconds:
    """Seconds of one unit and micro-batch on a rank, without routed experts. ``again``: what runs once more in
    backward. ``weight_gradients``: the part of ``backward`` that may come later.
    """

    forward: float = 0.0
    backward: float = 0.0
    again: float = 0.0
    weight_gradients: float = 0.0

    @property
    def seconds(self) -> float:
        return self.forward + self.backward + self.again


def rest_seconds(operations: Operations, run: ModelRun) -> RestSeconds:
    """Returns the seconds of all operations but those of routed experts."""
    rest = Operations(operations.seq_len, tuple(each for each in operations.operations if each.part not in ROUTED))
    again = rest.again(run.parallelism.recompute)
    sent_s, exposed_s = _tensor_seconds(rest, run), _context_seconds(rest, run)
    computed = _computed(rest, run)
    return RestSeconds(
        forward=computed.forward + 2 * sent_s + exposed_s,
        # Gradients are exchanged in the opposite direction. Gathers for weight gradients are hidden by input gradients.
        backward=computed.backward + 2 * sent_s + 2 * exposed_s,
        again=_computed(again, run).forward
        + _SENT_AGAIN[run.parallelism.recompute] * sent_s
        + (exposed_s if again.operations else 0.0),
        weight_gradients=computed.weight_gradients,
    )


def _computed(operations: Operations, run: ModelRun) -> RestSeconds:
    cluster = run.cluster
    share = run.micro_batch / (run.parallelism.tp * run.parallelism.cp)
    launch_s = cluster.launch_us * 1e-6
    forward = backward = weight_gradients = 0.0
    for each in operations.operations:
        rate, gradient_rate = (_rate(each, cluster, backward) for backward in (False, True))
        weights_s = share * each.weight_gradient_flops / gradient_rate
        products_s = share * each.input_gradient_flops / gradient_rate
        inputs_s = products_s + elementwise_seconds(share * each.backward_bytes, cluster, backward=True)
        moved_s = elementwise_seconds(share * each.forward_bytes, cluster, backward=False)
        forward += share * each.flops / rate + moved_s + launch_s
        backward += inputs_s + weights_s + each.backward_kernels * launch_s
        weight_gradients += weights_s
    return RestSeconds(forward, backward, weight_gradients=weight_gradients)


def _rate(operation: Operation, cluster: ClusterSpec, backward: bool) -> float:
    """Returns the flops per second of an operation's products."""
    if operation.part == "attention_scores":
        return attention_rate(cluster, backward)
    if operation.fp8 and cluster.fp8_tflops:
        return cluster.fp8_tflops * 1e12
    return product_rate(cluster, backward)


def _tensor_seconds(operations: Operations, run: ModelRun) -> float:
    """Returns the seconds of all gathers before the parts that a tensor group shares; the reduce-scatters after them
    take as long.
    """
    size, cluster = run.parallelism.tp, run.cluster
    shared = sum(bool(operations.of(*parts).operations) for parts in _SHARED_BY_WEIGHTS)
    if size == 1 or not shared:
        return 0.0
    received = run.tokens_per_rank * (size - 1) * run.model.hidden_size * run.model.bytes_per_element
    return shared * (received / _neighbour_rate(size, cluster) + cluster.intra_node_us * 1e-6)


def _context_seconds(operations: Operations, run: ModelRun) -> float:
    """Returns the seconds of keys and values that travel around a context group and are not hidden by the scores."""
    size, cluster = run.parallelism.cp, run.cluster
    scores = operations.of("attention_scores")
    if size == 1 or not scores.operations:
        return 0.0
    saved = scores.saved()
    own = (saved["keys"] + saved["values"]) * run.micro_batch / (size * run.parallelism.tp)
    moved_s = (size - 1) * own / _neighbour_rate(size * run.parallelism.tp, cluster)
    return max(0.0, moved_s - _computed(scores, run).forward)


def _neighbour_rate(size: int, cluster: ClusterSpec) -> float:
    """Returns the bytes per second between neighbours in groups of ``size`` neighbouring ranks: the rate of a rank's
    link if each group lies in one domain, and otherwise that of its share of the NICs.
    """
    if not place_groups(size, 1, cluster).on_nics:
        return cluster.intra_node_gb_per_s * 1e9
    return cluster.inter_node_gb_per_s * 1e9 / cluster.node_sizes[0]


@dataclass(frozen=True)
class Unit:
    """A unit of a model. ``rest``: seconds without routed experts. ``parameters``: those of a tensor group, without
    routed experts. ``kept``: whether they are gathered once for forward and backward.
    """

    operations: Operations
    rest: RestSeconds
    parameters: int
    has_experts: bool = False
    kept: bool = False


@dataclass(frozen=True)
class Units:
    """The units of a whole model. Layers that are equal share one object."""

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
        # Neither the embedding nor the head runs again.
        first, last = (replace(rest_seconds(each, run), again=0.0) for each in (cost.embedding, cost.head))
        one_rank_has_both = model.tied_embeddings and run.parallelism.pp == 1
        # A last stage of its own has a copy of the embedding if the head is tied to it.
        copied = model.tied_embeddings and not one_rank_has_both
        head = cost.head.parameters + (cost.embedding.parameters if copied else 0)
        return cls(
            Unit(cost.embedding, first, cost.embedding.parameters, kept=one_rank_has_both),
            tuple(found[id(each)] for each in cost.layers),
            Unit(cost.head, last, head, kept=True),
        )

    def of_part(self, layers: range) -> tuple[Unit, ...]:
        """Returns the units of neighbouring layers, with the embedding or the head if they are next to them."""
        first, last = layers.start == 0, layers.stop == len(self.layers)
        within = self.layers[layers.start : layers.stop]
        return (*(self.embedding,) * first, *within, *(self.head,) * last)

    def of_stage(self, parts: Iterable[range]) -> tuple[Unit, ...]:
        """Returns the units of all parts of a stage."""
        return tuple(unit for layers in parts for unit in self.of_part(layers))


def _as_shared(run: ModelRun) -> ModelSpec:
    """Returns the model as a tensor group computes it: with at least one head of keys and values per rank."""
    layers = []
    for layer in run.model.layers:
        attention = layer.attention
        if isinstance(attention, Gqa) and attention.num_kv_heads < run.parallelism.tp:
            layer = layer.replace(attention=attention.replace(num_kv_heads=run.parallelism.tp))
        layers.append(layer)
    return run.model.replace(layers=tuple(layers))
