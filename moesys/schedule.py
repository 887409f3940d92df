"""The schedule of a layer on one rank: its stages in the order in which they are issued, and what each waits for.

Executors run it and the simulator times it, so that what is simulated is what runs. While the experts of a chunk are
computed, the next chunk's rows are sent to their experts, and the last chunk's results are sent back. Backward goes the
same way with the gradient of the output, and computes weight gradients while the last chunk is sent back. One chunk is
``Sequential``: then every stage waits for all before it. Recomputation is forward up to the pre-activations, which is
all that backward reads, and no results are sent back.

Where a token crosses to a node once (``node_dispatch``), rows that came into a node are spread in it before the experts
run. Where one sum per node returns (``combine="per_node"``), results are collected in the node, summed and sent back.
Large messages of one chunk are sent in parts (``row_traffic.num_parts``): while a part crosses, the part before it is
spread.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Literal, NamedTuple

from moesys.config import Overlap
from moesys.config.overlap import Pipelined, Sequential

Direction = Literal["forward", "recomputation", "backward"]
StageKind = Literal[
    # Messages. They are issued, and travel beside the stages that follow until one waits for them.
    "dispatch_weights",  # routing weights of all chunks, to the experts of their rows
    "dispatch",  # a chunk's rows, to their experts; those of other nodes once to the node
    "spread",  # a chunk's rows that came into this node once, to their experts
    "combine",  # a chunk's results, to their sources; where sums return, those of other nodes' tokens to gates
    "send_sums",  # sums of the results that gates collected, to their sources, and the results of this node's tokens
    "combine_dweights",  # gradients of the routing weights of all chunks, to their sources
    # What a rank waits for or computes.
    "publish",  # this rank's rows are put where the MegaKernels of others pull them
    "wait_for_experts",  # the layer's experts are here
    "experts",  # products of a chunk's rows with their experts, in backward the gradients of their inputs
    "pre_activations",  # the first of those products
    "sum",  # the results of each token of a chunk are summed
    "weight_gradients",  # the gradients of experts, over the rows of all chunks
    "gather_dweights",  # gradients of routing weights, in the order of the tokens
    "mega_kernels",  # all that is left, which overlaps by itself
]


class Stage(NamedTuple):
    """A stage of one direction; ``chunk`` is 0 for a stage of all chunks.

    ``part``: the part of a dispatch that crosses to nodes, beside which the part before it is spread; or of a combine
    at gates, beside which the sums of the part before it return. The last part is spread, and its sums return, in a
    stage of its own.
    """

    kind: StageKind
    chunk: int = 0
    part: int = 0


# Stages in the order in which a rank issues them, each with the stages that it waits for.
Schedule = Mapping[Stage, tuple[Stage, ...]]


def schedule_of(overlap: Overlap, direction: Direction, num_nodes: int, parts: int = 1) -> Schedule:
    """Returns the stages of one direction under ``overlap``; on one node there is none to cross to, with ``parts``."""
    if overlap.reaches_memory:
        publish, here = Stage("publish"), Stage("wait_for_experts")
        return MappingProxyType({publish: (), here: (publish,), Stage("mega_kernels"): (here,)})
    return _chunk_schedule(overlap, direction, num_nodes, parts)


def _chunk_schedule(overlap: Sequential | Pipelined, direction: Direction, num_nodes: int, parts: int) -> Schedule:
    """Returns the stages of one direction of tokens that travel in chunks."""
    chunks, backward, again = overlap.chunks, direction == "backward", direction == "recomputation"
    once, per_node = overlap.crosses_once(num_nodes), overlap.sums_by_node(num_nodes)
    here, last = Stage("wait_for_experts"), chunks - 1
    arrive: StageKind = "spread" if once else "dispatch"
    returned: StageKind = "send_sums" if per_node else "combine"
    products: StageKind = "pre_activations" if again else "experts"
    # In backward the ranks of the experts need routing weights; in forward only gates that sum results do.
    weights = [Stage("dispatch_weights")] if backward or (per_node and not again) else []
    waits: dict[Stage, tuple[Stage, ...]] = dict.fromkeys(weights, ())

    def in_parts(kind: StageKind, chunk: int) -> Stage:
        """Issues all parts but the first, and returns the last."""
        for part in range(1, parts):
            waits[Stage(kind, chunk, part)] = (Stage(kind, chunk, part - 1),)
        return Stage(kind, chunk, parts - 1)

    def send_sums(chunk: int) -> None:
        if per_node and chunk >= 0:
            waits[Stage("send_sums", chunk)] = (in_parts("combine", chunk),)

    def sum_up(chunk: int) -> None:
        if chunk >= 0:
            waits[Stage("sum", chunk)] = (Stage(returned, chunk),)

    def spread(chunk: int) -> None:
        if once and chunk < chunks:
            waits[Stage("spread", chunk)] = (in_parts("dispatch", chunk),)

    waits[Stage("dispatch", 0)] = ()
    for chunk in range(chunks):
        if chunk < last:
            waits[Stage("dispatch", chunk + 1)] = ()
        if chunk == 0:
            spread(0)
            # Experts travel beside the first chunk, and what is fetched ahead for other layers behind it.
            waits[here] = (Stage(arrive, 0), *(weights if backward else []))
        waits[Stage(products, chunk)] = (Stage(arrive, chunk), here)
        spread(chunk + 1)
        if again:
            continue
        # Sums of nodes are weighted in forward.
        summing = weights if per_node and not backward and chunk == 0 else []
        waits[Stage("combine", chunk)] = (Stage("experts", chunk), *summing)
        send_sums(chunk - 1)
        sum_up(chunk - 2 if per_node else chunk - 1)
    if again:
        return MappingProxyType(waits)
    if per_node:
        sum_up(last - 1)
        send_sums(last)
    if not backward:
        sum_up(last)
        return MappingProxyType(waits)
    all_experts = tuple(Stage("experts", chunk) for chunk in range(chunks))
    gradients: dict[Stage, tuple[Stage, ...]] = {
        Stage("combine_dweights"): all_experts,
        Stage("weight_gradients"): all_experts,
    }
    if chunks == 1:
        sum_up(last)
        waits |= gradients
    else:
        waits |= gradients
        sum_up(last)
    waits[Stage("gather_dweights")] = (Stage("combine_dweights"),)
    return MappingProxyType(waits)
