"""A process group over gloo whose collectives take the time that a link of a given bandwidth would need."""

import queue
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch.futures import Future

# torch's stubs give ProcessGroup overloads for callers, which no override in Python can repeat.
# mypy: disable-error-code="override, assignment"

_BACKEND = "paced"


@dataclass(frozen=True)
class Pace:
    """The link that every rank of a paced group has, once for each direction.

    `gb_per_s` is in 10^9 bytes a second and positive; `latency_us` is paid once by every collective.

    A collective of 3 MB over `Pace(gb_per_s=1.0, latency_us=50.0)` takes 3.05 ms.
    """

    gb_per_s: float
    latency_us: float = 0.0

    def __post_init__(self) -> None:
        if not self.gb_per_s > 0:
            raise ValueError(f"gb_per_s={self.gb_per_s} must be positive")
        if not self.latency_us >= 0:
            raise ValueError(f"latency_us={self.latency_us} must not be negative")

    def seconds(self, num_bytes: float) -> float:
        """Seconds that `num_bytes` need in one direction."""
        return self.latency_us * 1e-6 + num_bytes / (self.gb_per_s * 1e9)


def make_paced_group(
    group: dist.ProcessGroup, gb_per_s: float, latency_us: float = 0.0, *, timeout_s: float = 60.0
) -> dist.ProcessGroup:
    """Makes a paced group of the ranks of `group`; every one of them must call this, and nobody else.

    The data moves over gloo connections of the new group's own, so `group` stays free for other use.
    `timeout_s` is how long a collective waits for a missing rank before it fails.
    The result works with `torch.distributed` like any group, and ends with `dist.destroy_process_group`.

    Raises:
        ValueError: `gb_per_s` is not positive, or `latency_us` is negative.
    """
    register_paced_backend()
    return dist.new_group(
        dist.get_process_group_ranks(group),
        backend=_BACKEND,
        pg_options=Pace(gb_per_s, latency_us),
        timeout=timedelta(seconds=timeout_s),
        use_local_synchronization=True,
    )


def register_paced_backend() -> None:
    """Makes `backend="paced"` known to torch in this process; calling it again changes nothing.

    After it, `dist.init_process_group("paced", pg_options=Pace(...))` paces the default group too.
    """
    if _BACKEND not in dist.Backend.backend_list:
        dist.Backend.register_backend(_BACKEND, _create, extended_api=True, devices=["cpu"])


def _create(options: Any, pace: Pace) -> "PacedGroup":
    gloo = dist.ProcessGroupGloo(options.store, options.group_rank, options.group_size, timeout=options.timeout)
    return PacedGroup(gloo, pace)


class PacedWork(dist.Work):
    """The handle of one paced collective: complete when its time on the link is over, not when its data is there."""

    def __init__(self, outputs: list[torch.Tensor]) -> None:
        super().__init__()
        self._outputs = outputs
        self._ended = threading.Event()
        self._error: Exception | None = None
        self._future: Future[list[torch.Tensor]] = Future()

    def wait(self, timeout: timedelta = timedelta(0)) -> bool:
        """Sleeps until the collective ends and returns True; zero `timeout` means no limit.

        Raises what the collective raised, or `TimeoutError`.
        """
        if not self._ended.wait(timeout.total_seconds() or None):
            raise TimeoutError(f"the collective did not end within {timeout.total_seconds()} s")
        if self._error is not None:
            raise self._error
        return True

    def synchronize(self) -> None:
        """The same as `wait()`."""
        self.wait()

    def is_completed(self) -> bool:
        """Whether the collective has ended, well or not."""
        return self._ended.is_set()

    def is_success(self) -> bool:
        """Whether the collective has ended well."""
        return self._ended.is_set() and self._error is None

    def exception(self) -> Exception | None:
        """What the collective raised, if it did."""
        return self._error

    def result(self) -> list[torch.Tensor]:
        """The output tensors."""
        return self._outputs

    def get_future(self) -> Future[list[torch.Tensor]]:
        """A future of the output tensors; its callbacks run on the group's thread and hold up the next collective."""
        return self._future

    def _end(self, error: Exception | None) -> None:
        self._error = error
        # Before the future, whose callbacks may take long and must find the work completed.
        self._ended.set()
        if error is None:
            self._future.set_result(self._outputs)
        else:
            self._future.set_exception(error)  # type: ignore[arg-type]  # torch declares the type of a result


@dataclass(frozen=True)
class _Collective:
    """One call in the queue: what moves the data, the larger of bytes sent and bytes received, and when it came."""

    move: Callable[[], None]
    num_bytes: float
    issued_s: float
    work: PacedWork


class PacedGroup(dist.ProcessGroup):
    """Collectives over `gloo`, each made to last as long as on one serial link a rank and direction.

    Collectives run one after the other in the order of issue, as on one CUDA stream, on a thread of the group's own.
    One starts when the last rank has issued it and has ended the one before. On each rank it ends
    `pace.seconds(num_bytes)` later, where `num_bytes` is the larger of what that rank sends to and receives from
    others, or when gloo is done, if that is later. With n ranks and b the bytes of one rank's tensor:

    - all-to-all: the bytes of the buffers less the rank's own part;
    - all-gather and reduce-scatter: (n − 1) · b of the smaller tensor;
    - all-reduce: 2 · (n − 1) / n · b, the ring's;
    - broadcast and reduce: b, pipelined; gather and scatter: (n − 1) · b at the root, b elsewhere;
    - barrier: none, only the latency.

    Ranks compare their monotonic clocks, so all must run on one machine. Point-to-point messages are refused.
    Gloo's own time shows where it is longer than the link's (with 2 cores, 1.7 ms a call for 2 ranks and 4.4 ms for 4,
    n = 100 and 50): choose a pace and sizes that take longer.
    """

    # Any: torch's stubs do not know the collectives of a backend.
    def __init__(self, gloo: Any, pace: Pace) -> None:
        super().__init__(gloo.rank(), gloo.size())  # type: ignore[call-arg]  # the stubs know one constructor of two
        self._gloo = gloo
        self._pace = pace
        self._queue: queue.SimpleQueue[_Collective | None] = queue.SimpleQueue()
        self._thread = threading.Thread(
            target=_run_in_order, args=(self._queue, gloo, pace), name="paced-group", daemon=True
        )
        self._thread.start()

    def getBackendName(self) -> str:
        """The name under which `register_paced_backend` made it known."""
        return _BACKEND

    # A group keeps its name in its registered backends, of which this one has none.
    def setGroupName(self, name: str) -> None:
        """Keeps the name that torch gives to the group."""
        self._name = name

    def getGroupName(self) -> str:
        """The name by which functional collectives find the group."""
        return self._name

    def shutdown(self) -> None:
        """Ends the thread after the collectives already issued; `dist.destroy_process_group` calls it."""
        self._queue.put(None)
        self._thread.join()

    def all_to_all_single(
        self,
        output: torch.Tensor,
        input: torch.Tensor,
        output_splits: Sequence[int],
        input_splits: Sequence[int],
        *opts: Any,
    ) -> PacedWork:
        """Rows of `input` to all ranks, by `input_splits` or evenly; see `dist.all_to_all_single`."""
        received = _bytes_of_others(output, output_splits, self.rank(), self.size())
        sent = _bytes_of_others(input, input_splits, self.rank(), self.size())
        return self._issue(
            lambda: self._gloo.alltoall_base(output, input, list(output_splits), list(input_splits), *opts),
            max(sent, received),
            [output],
        )

    def all_gather_single(self, output: torch.Tensor, input: torch.Tensor, *opts: Any) -> PacedWork:
        """Every rank's `input` in `output`; see `dist.all_gather_into_tensor`."""
        return self._issue(
            lambda: self._gloo._allgather_base(output, input, *opts), (self.size() - 1) * input.nbytes, [output]
        )

    def all_gather_single_coalesced(
        self, outputs: list[torch.Tensor], inputs: list[torch.Tensor], *opts: Any
    ) -> PacedWork:
        """Several `all_gather_single` that share one latency."""
        return self._issue(
            lambda: [
                self._gloo._allgather_base(output, input, *opts) for output, input in zip(outputs, inputs, strict=True)
            ],
            (self.size() - 1) * _num_bytes(inputs),
            outputs,
        )

    def allgather(self, outputs: list[list[torch.Tensor]], inputs: list[torch.Tensor], *opts: Any) -> PacedWork:
        """Every rank's tensor in a list; see `dist.all_gather`."""
        received = sum(_num_bytes(tensors) for tensors in outputs) - _num_bytes(inputs)
        sent = (self.size() - 1) * _num_bytes(inputs)
        return self._issue(
            lambda: self._gloo.allgather(outputs, inputs, *opts),
            max(sent, received),
            [tensor for tensors in outputs for tensor in tensors],
        )

    def allreduce(self, tensors: list[torch.Tensor], *opts: Any) -> PacedWork:
        """The sum, or another reduction, of every rank's tensor; see `dist.all_reduce`."""
        return self._issue(lambda: self._gloo.allreduce(tensors, *opts), self._ring_bytes(tensors), tensors)

    def allreduce_coalesced(self, tensors: list[torch.Tensor], *opts: Any) -> PacedWork:
        """Several `allreduce` that share one latency."""
        return self._issue(lambda: self._gloo.allreduce_coalesced(tensors, *opts), self._ring_bytes(tensors), tensors)

    def reduce_scatter_single(self, output: torch.Tensor, input: torch.Tensor, *opts: Any) -> PacedWork:
        """This rank's share of the reduced `input`; see `dist.reduce_scatter_tensor`."""
        return self._issue(
            lambda: self._gloo._reduce_scatter_base(output, input, *opts), (self.size() - 1) * output.nbytes, [output]
        )

    def reduce_scatter_single_coalesced(
        self, outputs: list[torch.Tensor], inputs: list[torch.Tensor], *opts: Any
    ) -> PacedWork:
        """Several `reduce_scatter_single` that share one latency."""
        return self._issue(
            lambda: [
                self._gloo._reduce_scatter_base(output, input, *opts)
                for output, input in zip(outputs, inputs, strict=True)
            ],
            (self.size() - 1) * _num_bytes(outputs),
            outputs,
        )

    def reduce_scatter(self, outputs: list[torch.Tensor], inputs: list[list[torch.Tensor]], *opts: Any) -> PacedWork:
        """This rank's share of the reduced list; see `dist.reduce_scatter`."""
        sent = sum(_num_bytes(tensors) for tensors in inputs) - _num_bytes(outputs)
        received = (self.size() - 1) * _num_bytes(outputs)
        return self._issue(lambda: self._gloo.reduce_scatter(outputs, inputs, *opts), max(sent, received), outputs)

    def broadcast(self, tensors: list[torch.Tensor], *opts: Any) -> PacedWork:
        """The root's tensor on every rank; see `dist.broadcast`."""
        return self._issue(lambda: self._gloo.broadcast(tensors, *opts), self._tree_bytes(tensors), tensors)

    def reduce(self, tensors: list[torch.Tensor], *opts: Any) -> PacedWork:
        """The reduced tensor on the root; see `dist.reduce`."""
        return self._issue(lambda: self._gloo.reduce(tensors, *opts), self._tree_bytes(tensors), tensors)

    def gather(self, outputs: list[list[torch.Tensor]], inputs: list[torch.Tensor], *opts: Any) -> PacedWork:
        """Every rank's tensor in a list on the root, whose `outputs` alone is not empty; see `dist.gather`."""
        received = sum(_num_bytes(tensors) for tensors in outputs)
        num_bytes = received - _num_bytes(inputs) if received else _num_bytes(inputs)
        return self._issue(
            lambda: self._gloo.gather(outputs, inputs, *opts),
            num_bytes,
            [tensor for tensors in outputs for tensor in tensors],
        )

    def scatter(self, outputs: list[torch.Tensor], inputs: list[list[torch.Tensor]], *opts: Any) -> PacedWork:
        """One tensor for each rank from the root, whose `inputs` alone is not empty; see `dist.scatter`."""
        sent = sum(_num_bytes(tensors) for tensors in inputs)
        num_bytes = sent - _num_bytes(outputs) if sent else _num_bytes(outputs)
        return self._issue(lambda: self._gloo.scatter(outputs, inputs, *opts), num_bytes, outputs)

    def barrier(self, opts: Any = None) -> PacedWork:
        """Ends on no rank before every rank has come; see `dist.barrier`."""
        # The agreement on when to start, which precedes every collective, is a barrier already.
        return self._issue(lambda: None, 0, [])

    def send(self, tensors: list[torch.Tensor], dst: int, tag: int) -> PacedWork:
        """Refused: raises `NotImplementedError`."""
        raise NotImplementedError("a paced group has collectives only; send over an unpaced group")

    def recv(self, tensors: list[torch.Tensor], src: int, tag: int) -> PacedWork:
        """Refused: raises `NotImplementedError`."""
        raise NotImplementedError("a paced group has collectives only; receive over an unpaced group")

    def alltoall(self, outputs: list[torch.Tensor], inputs: list[torch.Tensor], *opts: Any) -> PacedWork:
        """Refused, as gloo has none: raises `NotImplementedError`."""
        raise NotImplementedError("gloo has no all_to_all of lists; use dist.all_to_all_single")

    # torch before 2.13 calls these by other names, and its C++ side knows both.
    alltoall_base = all_to_all_single
    _allgather_base = all_gather_single
    _reduce_scatter_base = reduce_scatter_single
    allgather_into_tensor_coalesced = all_gather_single_coalesced
    reduce_scatter_tensor_coalesced = reduce_scatter_single_coalesced

    def _ring_bytes(self, tensors: list[torch.Tensor]) -> float:
        return 2 * (self.size() - 1) / self.size() * _num_bytes(tensors)

    def _tree_bytes(self, tensors: list[torch.Tensor]) -> int:
        return _num_bytes(tensors) if self.size() > 1 else 0

    def _issue(self, start: Callable[[], Any], num_bytes: float, outputs: list[torch.Tensor]) -> PacedWork:
        """Queues `start`, which begins the inner collective and gives its work, a list of works or None."""

        def move() -> None:
            begun = start()
            for inner in begun if isinstance(begun, list) else [begun]:
                if inner is not None:
                    inner.wait()

        work = PacedWork(outputs)
        self._queue.put(_Collective(move, num_bytes, time.monotonic(), work))
        return work


def _run_in_order(collectives: "queue.SimpleQueue[_Collective | None]", gloo: Any, pace: Pace) -> None:
    """Runs collectives until None comes. Gloo's waits and `sleep` release the GIL and use no CPU."""
    latest = dist.AllreduceOptions()
    latest.reduceOp = dist.ReduceOp.MAX
    free_s = 0.0
    while (collective := collectives.get()) is not None:
        error: Exception | None = None
        try:
            start_s = torch.tensor([max(collective.issued_s, free_s)], dtype=torch.float64)
            gloo.allreduce([start_s], latest).wait()
            collective.move()
            free_s = max(time.monotonic(), start_s.item() + pace.seconds(collective.num_bytes))
            time.sleep(max(0.0, free_s - time.monotonic()))
        except Exception as failed:
            error = failed
        collective.work._end(error)


def _num_bytes(tensors: Sequence[torch.Tensor]) -> int:
    return sum(tensor.nbytes for tensor in tensors)


def _bytes_of_others(buffer: torch.Tensor, splits: Sequence[int], rank: int, size: int) -> int:
    """Bytes of `buffer` that leave or come from other ranks; no `splits` means even ones."""
    rows = buffer.shape[0] if buffer.dim() else 1
    own_rows = splits[rank] if splits else rows // size
    return buffer.nbytes * (rows - own_rows) // rows if rows else 0
