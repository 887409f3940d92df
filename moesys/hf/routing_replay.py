"""Records which experts the routers of a model choose, and has them choose the same again: router replay.

A rollout engine and a trainer round differently, so that some tokens go to other experts in training than in the
rollout; replay takes that difference away (arXiv 2510.11370). moesys' own routers and transformers' are treated alike.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from torch import Tensor, nn

from moesys.hf.routers import routers_of
from moesys.moe.experts import experts_of
from moesys.moe.routing_replay import Ids, recorded, replayed


@contextmanager
def record_routing(model: nn.Module) -> Iterator[list[Tensor]]:
    """Records the experts that every router in ``model`` chooses: ``with ms.record_routing(model) as expert_LTK:``.

    Gives a list, which is empty inside of the ``with`` and has after it one [L, T, K] of each micro-batch: L routers in
    the order of ``model.named_modules()``, this rank's T tokens as the routers see them (batch and sequence
    flattened), K top-k in the order of the router. uint8 for up to 256 experts, else int16, on the routers' device.
    What activation checkpointing runs again is not recorded again.

    Raises ValueError for a router that is not known, by the name of its class, and RuntimeError where routers did not
    run equally often.
    """
    with recorded(routers_of(model)) as expert_LTK:
        yield expert_LTK


@contextmanager
def replay_routing(model: nn.Module, expert_LTK: Ids | Sequence[Ids]) -> Iterator[None]:
    """Has every router in ``model`` choose the given experts: ``with ms.replay_routing(model, expert_LTK):``.

    ``expert_LTK``: what ``record_routing`` gave, or a tensor or array [L, T, K] of any integer dtype; a list of them
    has one of each micro-batch, in the order in which they are run. Ranks may have different T.

    Scores are those of the live router; the weights of the given experts are gathered from them, normalised and scaled
    as the router does, and so are differentiable in the tokens and in the router. Correction biases and limits of
    groups count for nothing, and a moesys router's balancing loss is that of the given experts. Outputs are summed in
    the given order of K.

    Activation checkpointing runs again with the experts of the first pass, also after the ``with``; it needs
    ``use_reentrant=False``, and regions inside each other ``context_fn=ms.recompute``.

    Layers with ``predictor=Oracle()`` train inside of it: they plan layouts for the loads that the ids of all ranks
    make. Ranks then enter together, with equally many micro-batches.

    Raises TypeError for another dtype; ValueError for another shape, an id outside of [0, E), an expert twice for one
    token, a router that is not known, and at the end for micro-batches that were not run.
    """
    with replayed(routers_of(model), experts_of(model), expert_LTK):
        yield
