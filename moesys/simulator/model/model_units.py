"""The units of a model in the order of forward: the embedding, each layer, and the last norm with the head; how long
they take, what data-parallel ranks exchange for them, and what a rank of a pipeline stage holds at most.

A unit is what FSDP2 gathers at once in transformers' models (``base_model_fsdp_plan``). The head's parameters stay from
forward until backward; so do the embedding's if they are tied to the head's and one rank has both.

``rest_seconds`` times what a rank does besides the routed experts. Each operation takes its flops at the rate of its
products or its bytes at the memory's rate, and a launch. Tensor and context groups share them evenly. What tensor
groups exchange (sequence parallelism, arXiv 2205.05198, section 4.2.2: an all-gather before and a reduce-scatter after
attention and each dense MLP) is never hidden, and keys and values travel around a context group during the scores.

A ring passes all of a group's bytes but its own share through every rank, and through the NICs of every domain that the
group spans; the groups of a domain share the NICs.

``Placement`` says which groups fit into domains of the fastest links, and how many share a node's NICs; ranks are
numbered in order.

The count of memory leaves out allocator overhead, and workspaces of kernels and of NCCL.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, fields, replace
from functools import cache

import numpy as np

from moesys.config import BYTES_PER_GB, ClusterSpec, Gqa, ModelSpec
from moesys.config.model_run import LayerRecompute, ModelRun
from moesys.cost import LinkLoad, attention_rate, elementwise_seconds, product_rate
from moesys.limits import rank_memory
from moesys.load import IntArray
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


# --- exchanges ------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Placement:
    """The place of all groups of a kind. ``inside``: whether some group has two ranks in one domain. ``on_nics``: the
    number of groups across domains that the busiest node's NICs carry; the nodes of a domain share them evenly.
    """

    inside: bool
    on_nics: float


@cache
def place_groups(size: int, stride: int, cluster: ClusterSpec) -> Placement:
    """Returns the place of groups of ``size`` ranks, each ``stride`` after the one before. ``size * stride`` divides
    the number of ranks.
    """
    return _place(np.arange(cluster.num_ranks).reshape(-1, size, stride).swapaxes(1, 2).reshape(-1, size), cluster)


@cache
def place_pairs(distance: int, count: int, cluster: ClusterSpec) -> Placement:
    """Returns the place of the pairs of the first ``count`` ranks and those ``distance`` after them."""
    first = np.arange(count)
    return _place(np.stack([first, first + distance], axis=1), cluster)


def _place(ranks_GS: IntArray, cluster: ClusterSpec) -> Placement:
    domain_R, node_R = np.asarray(cluster.domain_of_rank), np.asarray(cluster.node_of_rank)
    domain_GS = np.sort(domain_R[ranks_GS], axis=1)
    in_domain_GD = np.zeros((len(ranks_GS), domain_R[-1] + 1), dtype=bool)
    np.put_along_axis(in_domain_GD, domain_GS, True, axis=1)
    groups_D = in_domain_GD[in_domain_GD.sum(axis=1) > 1].sum(axis=0)
    ranks_DN = np.zeros((domain_R[-1] + 1, node_R[-1] + 1))
    np.add.at(ranks_DN, (domain_R, node_R), 1)
    groups_N = groups_D @ (ranks_DN / ranks_DN.sum(axis=1, keepdims=True))
    return Placement(bool((np.diff(domain_GS, axis=1) == 0).any()), float(groups_N.max()))


def passes_of_sum(run: ModelRun) -> int:
    """Returns how often all gradients go round until each rank has the sum of its part: gloo's reduce-scatter is an
    all-reduce (torch, ``ProcessGroupGloo::reduce_scatter_tensor_coalesced``).
    """
    return 2 if run.backend == "gloo" else 1


@dataclass(frozen=True)
class Ring:
    """Groups of ``size`` ranks that exchange by rings, and their place."""

    size: int
    placement: Placement

    @classmethod
    def of_dense(cls, run: ModelRun) -> Ring:
        """Returns the groups of a stage's ranks that hold the same dense parameters."""
        size, stride = run.groups.stage // run.parallelism.tp, run.parallelism.tp
        return cls(size, place_groups(size, stride, run.cluster))

    @classmethod
    def of_experts(cls, run: ModelRun) -> Ring:
        """Returns the groups of a stage's ranks that hold the same experts."""
        size, stride = run.groups.expert_data, run.groups.expert
        return cls(size, place_groups(size, stride, run.cluster))

    @classmethod
    def of_ends(cls, run: ModelRun) -> Ring:
        """Returns the pairs of ranks of the first and the last stage that hold the same part of tied embeddings."""
        stage = run.groups.stage
        return cls(2, place_pairs(run.cluster.num_ranks - stage, stage, run.cluster))

    def load(self, num_bytes: float, group: ClusterSpec, whole: ClusterSpec) -> LinkLoad:
        """Returns the load of such an exchange on the links of an expert ``group``, which is part of ``whole``."""
        R, N = group.num_ranks, group.num_nodes
        busy_s = self.busy_seconds(num_bytes, whole)
        return LinkLoad(
            np.repeat(busy_s, (2 * R, 2 * N)), np.repeat(np.array(busy_s) > 0, 2)[:, None].repeat(R, axis=1)
        )

    def busy_seconds(self, num_bytes: float, cluster: ClusterSpec) -> tuple[float, float]:
        """Returns the seconds of one all-gather, or one reduce-scatter, of so many bytes per group: of a rank's link
        inside its domain, and of a node's NICs, in either direction; 0 if unused. All groups of a node share its NICs,
        also those of other expert groups.
        """
        passed = num_bytes * (self.size - 1) / self.size
        inside = passed / (cluster.intra_node_gb_per_s * 1e9) if self.placement.inside else 0.0
        return inside, self.placement.on_nics * passed / (cluster.inter_node_gb_per_s * 1e9)


# --- memory ---------------------------------------------------------------------------------------------------------

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
