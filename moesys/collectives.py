"""Collectives that fail say which one failed, which ranks are gone, and what ranks must do alike."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager, suppress
from functools import partial
from typing import TypeVar

import numpy as np
import torch
import torch.distributed as dist

from moesys import frames
from moesys.frames import ALIKE, FRAME_BYTES, HEADER_BYTES, RankMismatchError
from moesys.torch_private import default_store, group_timeout_s, is_registered

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


def require_group(group: dist.ProcessGroup | None, whose: str) -> None:
    """Raises RuntimeError where a process group was destroyed. ``whose``: what the error says that it belongs to."""
    if group is not None and not is_registered(group):
        raise group_destroyed(whose)


def group_destroyed(whose: str) -> RuntimeError:
    """Returns the error to raise where the process group of ``whose`` was destroyed."""
    return RuntimeError(
        f"the process group of {whose} was destroyed (destroy_process_group); make the model again after "
        "init_process_group, and load the state_dict() of this one"
    )


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

    Raises ``RankMismatchError`` on all ranks where they are in different calls, and RuntimeError where the group was
    destroyed.
    """
    if group is None:
        return [payload]
    require_group(group, what)
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
    without_heartbeat: Callable[[dist.Store, Sequence[int]], set[int]] | None,
) -> CollectiveError:
    """Reports this rank's failure to the others, and finds out which of them neither report one nor are alive. Returns
    the error to raise; other arguments as those of ``guarded``.

    The ranks that do not answer are those that ``without_heartbeat`` returns for the store and the group's members.
    Without it they are the ranks that have not reported a failure of their own ``grace_s`` after the group's time-out,
    or after 20 s if that is shorter. Rank 0 is said not to answer where the store does not.
    """
    members, me = dist.get_process_group_ranks(group), dist.get_rank()
    patience_s = min(group_timeout_s(group, device_type), _MOST_PATIENCE_S) + grace_s
    answers: list[tuple[set[int], dict[int, str]]] = []

    def ask() -> None:
        with suppress(RuntimeError):
            answers.append(_answer(default_store(), what, members, patience_s, without_heartbeat))

    # Questions to the store have no time-out, and its host may be frozen.
    thread = threading.Thread(target=ask, name="moesys-failure", daemon=True)
    thread.start()
    thread.join(patience_s + FAILURE_GRACE_S)
    unreachable = not answers
    silent, reports = answers[0] if answers else (set[int](), dict[int, str]())
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
            "store, which rank 0 hosts unless a launcher does, is gone or does not answer)"
        )
    if not silent:
        return "every rank is alive, so ranks that made different calls, the network or a time-out failed it"
    names = f"rank{'s' * (len(silent) > 1)} {', '.join(map(str, sorted(silent)))}"
    late = "" if have_heartbeats else ", or late in another part of the program"
    return f"{names} did not answer and {'are' if len(silent) > 1 else 'is'} dead or hung{late}"


def _answer(
    store: dist.Store,
    what: str,
    members: Sequence[int],
    patience_s: float,
    without_heartbeat: Callable[[dist.Store, Sequence[int]], set[int]] | None,
) -> tuple[set[int], dict[int, str]]:
    """Reports this rank's failure. Returns the members that neither report one nor are alive, and the calls in which
    others failed. Failures are numbered by the store, as clocks of hosts differ.
    """
    me = dist.get_rank()
    known = f"moesys/seen/{me}"
    # Reports that this rank has seen belong to its earlier failures.
    seen = store.add(known, 0)
    store.set(_key(me), f"{store.add(_FAILURES, 1)} {what}")
    silent = set(members) if without_heartbeat is None else without_heartbeat(store, members)
    deadline_s = time.monotonic() + patience_s * (without_heartbeat is None)
    while len(reports := _reports(store, members, seen)) < len(members) and time.monotonic() < deadline_s:
        time.sleep(0.05)
    store.add(known, store.add(_FAILURES, 0) - seen)
    return silent - reports.keys(), {rank: where for rank, where in reports.items() if rank != me}


def _reports(store: dist.Store, ranks: Sequence[int], seen: int) -> dict[int, str]:
    """Returns the calls in which ranks failed after the failure of number ``seen``."""
    found = {rank: store.get(_key(rank)).decode().split(" ", 1) for rank in ranks if store.check([_key(rank)])}
    return {rank: where for rank, (number, where) in found.items() if int(number) > seen}


def _key(rank: int) -> str:
    return f"moesys/failed/{rank}"
