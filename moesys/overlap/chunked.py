"""Dispatch, experts and combine, chunk by chunk; sequential is one chunk.

While chunk i is computed, chunk i+1 is on its way to the experts and chunk i-1 on its way home. Chunks change when
things happen and never what is computed: a row comes out the same in any company, and weight gradients sum over all
rows at once in expert order (``expert_math``). Backward runs the same schedule on the output's gradient, and computes
weight gradients while the last chunk travels home.

T tokens of this rank, H hidden, I expert width, K top-k, M arrivals, P expert rows.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from moesys.kernels.cpu.page_pool import PagePool, Scratch
from moesys.overlap.comm.channel import Channel, Transfer
from moesys.overlap.executor import Saved, WaitForExperts
from moesys.overlap.expert_math import Arrivals, BackwardPass, ExpertMath, ForwardPass, Workplace
from moesys.overlap.held_experts import ExpertGradients
from moesys.overlap.routes import ChunkRoutes, Routes


@dataclass(frozen=True)
class ChunkedExecutor:
    """Runs one micro-batch of one layer on one rank.

    ``math``: how experts are computed; ``routes`` are padded for it. ``memory``: where large tensors lie.
    """

    routes: Routes
    channel: Channel
    math: ExpertMath
    memory: PagePool

    def forward(self, x_TH: Tensor, weight_TK: Tensor, wait_for_experts: WaitForExperts) -> tuple[Tensor, Saved]:
        """Output [T, H] in x's dtype. ``wait_for_experts`` is called once, when the first chunk has arrived."""
        arrivals = self._arrivals(x_TH, self.routes.send_token_N)
        at = Workplace(self.memory, Scratch(self.memory, x_TH.device))
        y_TH = self.memory.empty_like(x_TH)
        math: ForwardPass | None = None

        def ready() -> None:
            nonlocal math
            math = self.math.forward(self.routes, arrivals, wait_for_experts(), at)

        def experts(chunk: ChunkRoutes) -> Tensor:
            assert math is not None
            return math.experts(chunk)

        def combine(chunk: ChunkRoutes, home_NH: Tensor, home_TK: Tensor) -> None:
            tokens = slice(*chunk.tokens)
            place_TK = home_TK.view_as(weight_TK[tokens])
            self.math.combine(home_NH, place_TK, weight_TK[tokens], y_TH[tokens], at.scratch)

        self._run(arrivals, ready, experts, combine, "forward")
        assert math is not None
        return y_TH, Saved(arrivals.rows, math.pre_activations())

    def backward(
        self,
        dy_TH: Tensor,
        weight_TK: Tensor,
        saved: Saved,
        wait_for_experts: WaitForExperts,
        gradients: ExpertGradients | None,
    ) -> tuple[Tensor, Tensor]:
        """(dx [T, H], dweight float32 [T, K]); each held expert's weight gradients are written into ``gradients``,
        or not computed where that is None.
        """
        routes = self.routes
        arrivals = self._arrivals(dy_TH, routes.send_token_N)
        saved_arrivals = Arrivals(saved.arrivals_MH, arrivals.index)
        at = Workplace(self.memory, Scratch(self.memory, dy_TH.device))
        dx_TH = self.memory.empty_like(dy_TH)
        # Routing weights and their gradients travel in one message each: chunks of them would be all latency.
        weight_M, weights_here = self._weights_to_experts(weight_TK.reshape(-1)[routes.send_row_N])
        dweight_M = torch.empty_like(weight_M)
        math: BackwardPass | None = None

        def ready() -> None:
            nonlocal math
            weights_here()
            weights = wait_for_experts()
            math = self.math.backward(routes, arrivals, saved_arrivals, saved.h_P2I, weight_M, weights, gradients, at)

        def experts(chunk: ChunkRoutes) -> Tensor:
            assert math is not None
            dx_PH, dweight_M[slice(*chunk.arrivals)] = math.experts(chunk)
            return dx_PH

        def combine(chunk: ChunkRoutes, home_NH: Tensor, home_TK: Tensor) -> None:
            tokens = slice(*chunk.tokens)
            self.math.combine(home_NH, home_TK.view_as(weight_TK[tokens]), None, dx_TH[tokens], at.scratch)

        dweights_home: Callable[[], Tensor] | None = None

        def after_experts() -> None:
            nonlocal dweights_home
            dweights_home = self._dweights_home(dweight_M)
            if gradients is not None:
                assert math is not None
                math.weight_gradients(gradients)

        self._run(arrivals, ready, experts, combine, "backward", after_experts)
        assert dweights_home is not None
        dweight_TK = torch.empty_like(weight_TK)
        dweight_TK.view(-1)[routes.send_row_N] = dweights_home()
        return dx_TH, dweight_TK

    def _run(
        self,
        arrivals: Arrivals,
        ready: Callable[[], None],
        experts: Callable[[ChunkRoutes], Tensor],
        combine: Callable[[ChunkRoutes, Tensor, Tensor], None],
        direction: str,
        after_experts: Callable[[], None] | None = None,
    ) -> None:
        """The schedule: experts of a chunk run while the next chunk arrives and the last one goes home."""
        chunks, recorder = self.routes.chunks, self.channel.recorder
        dispatched = [self._dispatch(0, arrivals, direction)]
        going_home: list[tuple[int, Tensor, Transfer | None]] = []

        def finish() -> None:
            index, home, transfer = going_home.pop(0)
            chunk = chunks[index]
            if transfer is None:
                # On one rank nothing has put the rows in wire order.
                home_TK = chunk.return_M[chunk.home_TK]
            else:
                transfer.wait()
                home_TK = chunk.home_TK
            with recorder.span("compute", "combine", f"{direction} {index}"):
                combine(chunk, home, home_TK)

        for index, chunk in enumerate(chunks):
            if index + 1 < len(chunks):
                dispatched.append(self._dispatch(index + 1, arrivals, direction))
            if (arriving := dispatched.pop(0)) is not None:
                arriving.wait()
            if index == 0:
                ready()
            with recorder.span("compute", "experts", f"{direction} {index}"):
                rows = experts(chunk)
            going_home.append((index, *self._send_home(chunk, rows, f"{direction} {index}")))
            if index:
                finish()
        if len(chunks) == 1:
            finish()
        if after_experts is not None:
            with recorder.span("compute", "weight_gradients", direction):
                after_experts()
        if len(chunks) > 1:
            finish()

    def _arrivals(self, source: Tensor, send_index: Tensor) -> Arrivals:
        if self.channel.num_ranks == 1:
            return Arrivals(source, send_index)
        received = self.memory.empty((self.routes.num_arrivals, *source.shape[1:]), source.dtype, source.device)
        return Arrivals(received, None, source, send_index)

    def _dispatch(self, index: int, arrivals: Arrivals, direction: str) -> Transfer | None:
        if arrivals.source is None or arrivals.send_index is None:
            return None
        chunk = self.routes.chunks[index]
        return self.channel.all_to_all(
            arrivals.rows[slice(*chunk.arrivals)],
            arrivals.source.index_select(0, arrivals.send_index[slice(*chunk.sent)]),
            chunk.arrive_counts_R,
            chunk.send_counts_R,
            lane="dispatch",
            detail=f"{direction} {index}",
        )

    def _send_home(self, chunk: ChunkRoutes, rows: Tensor, detail: str) -> tuple[Tensor, Transfer | None]:
        """Rows in wire order at their source and the transfer to wait for; on one rank the rows themselves."""
        if self.channel.num_ranks == 1:
            return rows, None
        home = self.memory.empty((chunk.sent[1] - chunk.sent[0], *rows.shape[1:]), rows.dtype, rows.device)
        transfer = self.channel.all_to_all(
            home,
            rows.index_select(0, chunk.return_M),
            chunk.send_counts_R,
            chunk.arrive_counts_R,
            lane="combine",
            detail=detail,
        )
        return home, transfer

    def _weights_to_experts(self, weight_N: Tensor) -> tuple[Tensor, Callable[[], None]]:
        """Routing weights in wire order go to their experts: a buffer by arrival, and what fills it when called."""
        if self.channel.num_ranks == 1:
            return weight_N, lambda: None
        received, transfer = self._exchange_all(weight_N[self.routes.by_destination_N], "dispatch", home=False)
        weight_M = torch.empty_like(received)

        def finish() -> None:
            transfer.wait()
            weight_M[self.routes.by_source_M] = received

        return weight_M, finish

    def _dweights_home(self, dweight_M: Tensor) -> Callable[[], Tensor]:
        """Gradients of routing weights by arrival go home: when called, they are there in wire order."""
        if self.channel.num_ranks == 1:
            return lambda: dweight_M
        received, transfer = self._exchange_all(dweight_M[self.routes.by_source_M], "combine", home=True)

        def finish() -> Tensor:
            transfer.wait()
            dweight_N = torch.empty_like(received)
            dweight_N[self.routes.by_destination_N] = received
            return dweight_N

        return finish

    def _exchange_all(self, values: Tensor, lane: str, *, home: bool) -> tuple[Tensor, Transfer]:
        """One number a row, of all chunks at once, to the experts or home."""
        sent_R = [sum(counts) for counts in zip(*(c.send_counts_R for c in self.routes.chunks), strict=True)]
        arrived_R = [sum(counts) for counts in zip(*(c.arrive_counts_R for c in self.routes.chunks), strict=True)]
        out_R, in_R = (sent_R, arrived_R) if home else (arrived_R, sent_R)
        received = values.new_empty(sum(out_R))
        return received, self.channel.all_to_all(received, values, out_R, in_R, lane=lane, detail="weights")
