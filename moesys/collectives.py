"""Collectives that fail say which one failed, which ranks are gone, and what ranks must do alike."""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import TypeVar

import numpy as np
import torch
import torch.distributed as dist

from moesys import frames
from moesys.frames import ALIKE, FRAME_BYTES, HEADER_BYTES, RankMismatchError
from moesys.torch_private import default_store, group_timeout_s

# Ranks that are alive report their own failure within this many seconds after the time-out of their group.
FAILURE_GRACE_S = 5.0
# Longer time-outs are not waited for: a process that ends closes its connections, and then the others fail too.
_MOST_PATIENCE_S = 20.0
# The key of the rendezvous store that counts the failures of all ranks.
_FAILURES = "moesys/failures"

T = TypeVar("T")


class CollectiveError(RuntimeError):
    """A failed collective. ``silent_ranks``: the ranks without a heartbeat or a report: dead, hung or late."""

    def __init__(self, message: str, silent_ranks: tuple[int, ...]) -> None:
        super().__init__(message)
        self.silent_ranks = silent_ranks


# Errors that say by themselves what failed.
EXPLAINED = (torch.OutOfMemoryError, CollectiveError, RankMismatchError)


def guarded(what: str, group: dist.ProcessGroup | None, call: Callable[[], T], *, device_type: str = "cpu") -> T:
    """Returns ``call()``, which is a collective of ``group``, or waits for one. ``what`` names it in errors.

    Raises ``CollectiveError`` if it fails, with the ranks that do not answer.
    """
    try:
        return call()
    except EXPLAINED:
        raise
    except RuntimeError as error:
        raise failure_of(what, group, error, device_type, FAILURE_GRACE_S, None) from error


@contextmanager
def silent_ranks_named(what: str) -> Iterator[None]:
    """Raises ``CollectiveError``, with the ranks that do not answer, where a collective of others' code fails in the
    block. Other errors pass.
    """
    try:
        yield
    except EXPLAINED:
        raise
    except RuntimeError as error:
        # Gloo has no class of errors of its own.
        if not isinstance(error, dist.DistError) and "/gloo/" not in str(error):
            raise
        raise failure_of(what, dist.group.WORLD, error, "cpu", FAILURE_GRACE_S, None) from error


@contextmanager
def agreement(what: str, other: type[Exception] = RuntimeError) -> Iterator[None]:
    """Ends on all ranks together: raises the error of the block on the ranks where it fails, and an ``other`` that
    repeats it on the ranks where it does not. A collective of all ranks, if there is a process group; ``what`` names it
    in errors.
    """
    error: Exception | None = None
    try:
        yield
    except Exception as raised:
        error = raised
    message = b"" if error is None else f"{type(error).__name__}: {error}".encode()
    group = dist.group.WORLD if dist.is_initialized() else None
    messages = meet(what, group, device_of(group), message)
    if error is not None:
        raise error
    for rank, message in enumerate(messages):
        if message:
            raise other(f"rank {rank} failed, and nothing is written: {message.decode(errors='replace')}")


def meet(what: str, group: dist.ProcessGroup | None, device: torch.device, payload: bytes = b"") -> list[bytes]:
    """Returns every rank's ``payload``, of which about 4,000 bytes are sent, between tensors on ``device``. The first
    collective of a call of ``group`` (None: one rank alone) that sends no frames otherwise; ``what`` names the call.

    Raises ``RankMismatchError`` on all ranks where they are in different calls.
    """
    if group is None:
        return [payload]
    begun = payload[: frames.PAYLOAD_BYTES]
    frame = frames.header(frames.NO_LAYER, frames.Position(what), 0, len(begun)).tobytes() + begun
    sent_F = torch.from_numpy(np.frombuffer(frame.ljust(FRAME_BYTES, b"\0"), np.uint8).copy()).to(device)
    received_RF = sent_F.new_empty(dist.get_world_size(group), FRAME_BYTES)
    gather = partial(dist.all_gather, list(received_RF.unbind()), sent_F, group=group)
    guarded(what, group, gather, device_type=device.type)
    frames_RF = received_RF.cpu().numpy()
    headers_RN = frames_RF[:, :HEADER_BYTES].copy().view(np.int64)
    if not frames.same_position(headers_RN):
        raise frames.position_mismatch(headers_RN, dist.get_process_group_ranks(group))
    sizes = frames.payload_bytes_of(headers_RN)
    return [row[HEADER_BYTES:][:size].tobytes() for row, size in zip(frames_RF, sizes, strict=True)]


def device_of(group: dist.ProcessGroup | None) -> torch.device:
    """Returns a device between which ``group`` sends tensors: the CPU if it can."""
    accelerator = torch.accelerator.current_accelerator()
    if group is None or accelerator is None or "cpu" in dist.get_backend_config(group):
        return torch.device("cpu")
    return accelerator


def failure_of(
    what: str,
    group: dist.ProcessGroup | None,
    error: RuntimeError,
    device_type: str,
    grace_s: float,
    without_heartbeat: Callable[[Sequence[int], float], set[int]] | None,
) -> CollectiveError:
    """Reports this rank's failure to the others, and finds out which of them neither report one nor are alive. Returns
    the error to raise; other arguments as those of ``guarded``.

    The ranks that do not answer are those that ``without_heartbeat`` returns for the members of the group and
    ``grace_s``. Without it they are the ranks that have not reported a failure of their own ``grace_s`` after the
    group's time-out, or after 20 s if that is shorter.
    """
    members, me = dist.get_process_group_ranks(group), dist.get_rank()
    reports: dict[int, str] = {}
    silent: set[int] = set()
    unreachable = False
    timeout_s = group_timeout_s(group, device_type)
    patience_s = min(timeout_s, _MOST_PATIENCE_S) + grace_s
    # Ranks that fail together do so within each other's time-outs; earlier reports belong to other failures.
    unreported = partial(_unreported, since_s=time.time() - timeout_s - grace_s)
    try:
        store = default_store()
        store.set(_key(me), f"{time.time()} {what}")
        if without_heartbeat is not None:
            silent = unreported(store, without_heartbeat(members, grace_s))
        else:
            deadline_s = time.monotonic() + patience_s
            silent = unreported(store, members)
            while silent and time.monotonic() < deadline_s:
                time.sleep(0.05)
                silent = unreported(store, silent)
        others = {rank for rank in members if rank != me} - silent
        others -= unreported(store, others)
        reports = {rank: _report(store, rank)[1] for rank in sorted(others)}
    except RuntimeError:
        unreachable = True
    sentences = [f"rank {me}: {what} failed; {_who(silent, unreachable, without_heartbeat is not None)}"]
    if elsewhere := {rank: where for rank, where in reports.items() if where != what}:
        sentences.append("; ".join(f"rank {rank} failed in {where}" for rank, where in elsewhere.items()))
    sentences.append(ALIKE)
    sentences.append(f"First error: {(str(error).strip() or type(error).__name__).splitlines()[0]}")
    return CollectiveError(". ".join(sentences), (0,) if unreachable else tuple(sorted(silent)))


def _who(silent: Collection[int], unreachable: bool, have_heartbeats: bool) -> str:
    if unreachable:
        return (
            "rank 0 did not answer: it is dead or hung, or it gave up waiting for this rank and ended (the rendezvous "
            "store, which rank 0 hosts unless a launcher does, is gone)"
        )
    if not silent:
        return "every rank is alive, so ranks that made different calls, the network or a time-out failed it"
    names = f"rank{'s' * (len(silent) > 1)} {', '.join(map(str, sorted(silent)))}"
    late = "" if have_heartbeats else ", or late in another part of the program"
    return f"{names} did not answer and {'are' if len(silent) > 1 else 'is'} dead or hung{late}"


def _unreported(store: dist.Store, ranks: Collection[int], since_s: float) -> set[int]:
    return {rank for rank in ranks if _report(store, rank)[0] < since_s}


def _report(store: dist.Store, rank: int) -> tuple[float, str]:
    """Returns when a rank last failed, in seconds of time.time(), and in which call; 0 for one that never has."""
    if not store.check([_key(rank)]):
        return 0.0, ""
    at_s, _, what = store.get(_key(rank)).decode().partition(" ")
    return float(at_s), what


def _key(rank: int) -> str:
    return f"moesys/failed/{rank}"
