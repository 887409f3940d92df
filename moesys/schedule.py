"""The schedule of a layer on one rank: its stages in the order in which they are issued, and what each waits for.

Executors run it and the simulator times it, so that what is simulated is what runs. While the experts of a chunk are
computed, the next chunk's rows are on their way to their experts, and the last chunk's on their way home. Backward goes
the same way with the gradient of the output, and computes weight gradients while the last chunk travels home. One chunk
is ``Sequential``: then everything comes after everything before it.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Literal, NamedTuple, assert_never

from moesys.config import MegaKernel, Overlap, Pipelined, Sequential

Direction = Literal["forward", "backward"]
StageKind = Literal[
    # Messages. They are issued, and travel beside the stages that follow until one waits for them.
    "dispatch_weights",  # routing weights of all chunks, to the experts of their rows
    "dispatch",  # a chunk's rows, to their experts
    "combine",  # a chunk's results, home to the ranks of their tokens
    "combine_dweights",  # gradients of the routing weights of all chunks, home
    # What a rank waits for or computes.
    "publish",  # this rank's rows are put where the MegaKernels of others pull them
    "wait_for_experts",  # the layer's experts are here
    "experts",  # products of a chunk's rows with their experts, in backward the gradients of their inputs
    "sum",  # of the results of each token of a chunk
    "weight_gradients",  # of the experts, over the rows of all chunks
    "gather_dweights",  # gradients of routing weights, in the order of the tokens
    "mega_kernels",  # all that is left, which overlaps by itself
]


class Stage(NamedTuple):
    """A stage of one direction; ``chunk`` is 0 for one that is of all chunks."""

    kind: StageKind
    chunk: int = 0


# Stages in the order in which a rank issues them, each with the stages that it waits for.
Schedule = Mapping[Stage, tuple[Stage, ...]]


def num_chunks(overlap: Overlap) -> int:
    """Returns how many chunks the tokens of a rank are cut into."""
    match overlap:
        case Pipelined():
            return overlap.chunks
        case Sequential() | MegaKernel():
            return 1
        case _:
            assert_never(overlap)


def schedule_of(overlap: Overlap, direction: Direction) -> Schedule:
    """Returns the stages of one direction under ``overlap``."""
    match overlap:
        case Sequential() | Pipelined():
            return _chunk_schedule(num_chunks(overlap), direction)
        case MegaKernel():
            publish, here = Stage("publish"), Stage("wait_for_experts")
            return MappingProxyType({publish: (), here: (publish,), Stage("mega_kernels"): (here,)})
        case _:
            assert_never(overlap)


def _chunk_schedule(chunks: int, direction: Direction) -> Schedule:
    """Returns the stages of one direction of tokens that travel in so many chunks."""
    backward, here, last = direction == "backward", Stage("wait_for_experts"), chunks - 1
    waits: dict[Stage, tuple[Stage, ...]] = {}
    if backward:
        waits[Stage("dispatch_weights")] = ()
    waits[Stage("dispatch", 0)] = ()
    for chunk in range(chunks):
        if chunk < last:
            waits[Stage("dispatch", chunk + 1)] = ()
        if chunk == 0:
            # Experts travel beside the first chunk, and what is fetched ahead for other layers behind it.
            waits[here] = (Stage("dispatch", 0), *([Stage("dispatch_weights")] if backward else []))
        waits[Stage("experts", chunk)] = (Stage("dispatch", chunk), here)
        waits[Stage("combine", chunk)] = (Stage("experts", chunk),)
        if chunk > 0:
            waits[Stage("sum", chunk - 1)] = (Stage("combine", chunk - 1),)
    last_sum = {Stage("sum", last): (Stage("combine", last),)}
    if not backward:
        return MappingProxyType(waits | last_sum)
    all_experts = tuple(Stage("experts", chunk) for chunk in range(chunks))
    gradients: dict[Stage, tuple[Stage, ...]] = {
        Stage("combine_dweights"): all_experts,
        Stage("weight_gradients"): all_experts,
    }
    waits |= last_sum | gradients if chunks == 1 else gradients | last_sum
    waits[Stage("gather_dweights")] = (Stage("combine_dweights"),)
    return MappingProxyType(waits)
