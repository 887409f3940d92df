"""agreed: a plan that every rank makes by code which is not ours, the same on all of them or an error on all."""

from __future__ import annotations

import hashlib
from collections.abc import Callable

import torch

from moesys.overlap.comm.channel import Channel
from moesys.step import LayerPlan

_DIGEST_BYTES = 32
# Of an error's message, which all ranks raise.
_MESSAGE_BYTES = 2048


def agreed(make: Callable[[], LayerPlan], channel: Channel, device: torch.device) -> LayerPlan:
    """Returns what ``make`` returns here, once it is known to be the same everywhere; a collective.

    Where it raises on any rank no rank goes on, to wait for rows that nobody sends: those that have a plan raise
    RuntimeError with that rank's message. So do all where their plans differ.
    """
    plan, failure = None, None
    try:
        plan = make()
    except Exception as error:
        failure = error
    digest, message = bytes(_DIGEST_BYTES), f"{type(failure).__name__}: {failure}".encode()[:_MESSAGE_BYTES]
    if plan is not None:
        digest, message = _digest(plan), b""
    said = torch.frombuffer(bytearray(digest + message.ljust(_MESSAGE_BYTES, b"\0")), dtype=torch.uint8)
    said_R = [bytes(row) for row in channel.all_gather(said.to(device), lane="counts").cpu().numpy()]
    if failure is not None:
        raise failure
    assert plan is not None
    for rank, other in enumerate(said_R):
        if other[_DIGEST_BYTES:].strip(b"\0"):
            message = other[_DIGEST_BYTES:].rstrip(b"\0")
            raise RuntimeError(f"planning failed on rank {rank}: {message.decode(errors='replace')}")
        if other[:_DIGEST_BYTES] != digest:
            raise RuntimeError(
                f"ranks {channel.rank} and {rank} planned differently from the same counts; let layout() and split() "
                "of your own be functions of the problem and their fields alone"
            )
    return plan


def _digest(plan: LayerPlan) -> bytes:
    digest = hashlib.sha256(plan.layout.fingerprint().encode())
    digest.update(plan.tokens.entries.astype("<i8").tobytes())
    return digest.digest()
