"""agreed: what every rank makes for itself, the same on all of them or an error on all."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

import torch

from moesys.overlap.comm.channel import Channel
from moesys.overlap.comm.frames import Position

_DIGEST_BYTES = 32
# Of an error's message, which all ranks raise.
_MESSAGE_BYTES = 2048

T = TypeVar("T")


def agreed(
    make: Callable[[], T],
    digest_of: Callable[[T], bytes],
    channel: Channel,
    device: torch.device,
    *,
    what: str,
    differing: str,
) -> T:
    """Returns what ``make`` returns here, once it is known to be the same everywhere; a collective.

    Where it raises on any rank no rank goes on, to wait for rows that nobody sends: the others raise RuntimeError with
    that rank's message, as "``what`` failed". So do all where digests, of 32 bytes, differ: "``differing``".
    """
    made, failure = None, None
    digest, message = bytes(_DIGEST_BYTES), b""
    try:
        made = make()
        digest = digest_of(made)
    except Exception as error:
        failure = error
        message = f"{type(error).__name__}: {error}".encode()[:_MESSAGE_BYTES]
    said = torch.frombuffer(bytearray(digest + message.ljust(_MESSAGE_BYTES, b"\0")), dtype=torch.uint8)
    at = Position("comparison of plans", channel.generation)
    said_R = [bytes(row) for row in channel.all_gather(said.to(device), lane="counts", at=at).cpu().numpy()]
    if failure is not None:
        raise failure
    assert made is not None
    for rank, other in zip(channel.members, said_R, strict=True):
        if other[_DIGEST_BYTES:].strip(b"\0"):
            message = other[_DIGEST_BYTES:].rstrip(b"\0")
            raise RuntimeError(f"{what} failed on rank {rank}: {message.decode(errors='replace')}")
        if other[:_DIGEST_BYTES] != digest:
            raise RuntimeError(f"ranks {channel.members[channel.rank]} and {rank} {differing}")
    return made
