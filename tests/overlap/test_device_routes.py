"""Routes that a device makes are the host's, table by table, for every split that devices know."""

from __future__ import annotations

from dataclasses import dataclass, field, fields, replace
from typing import Any

import numpy as np
import torch
from conftest import examples
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

import moesys as ms
from moesys.balance.plan import plan_layer
from moesys.frames import NO_LAYER, Identity, Position, header
from moesys.kernels.launch import HostCopy
from moesys.kernels.routing import route
from moesys.layout import ExpertLayout
from moesys.load import LoadMatrix
from moesys.overlap.comm.record import Meter
from moesys.overlap.device_routes import PendingRoutes, chunk_numbers, device_split, own_replicas, route_on_device
from moesys.overlap.routes import build_routes, chunk_counts

SPLITS = tuple(split for kind in ms.Split.kinds().values() if (split := kind()).on_device)


@dataclass
class Gathered:
    """As much of a channel as routes ask for, of ranks that come one after another."""

    num_ranks: int
    said_R: list[Tensor]
    choices_R: list[int]
    meter: Meter = field(default_factory=Meter)
    identity: Identity = NO_LAYER
    generation: int = 0

    def tagged(self, generation: int) -> Gathered:
        return self

    @property
    def members(self) -> list[int]:
        return list(range(self.num_ranks))

    def all_gather(self, values_N: Tensor, *, lane: str, at: Position, read: bool) -> Tensor:
        headers = [header(NO_LAYER, replace(at, choices=choices), 0, 0) for choices in self.choices_R]
        self.headers = HostCopy(torch.from_numpy(np.stack(headers)))
        return torch.stack(self.said_R)

    def compare_calls(self) -> None:
        """All ranks are in one call."""


FORWARD = Position("forward", 0)


@dataclass
class Micro:
    """A micro-batch of all ranks."""

    layout: ExpertLayout
    cluster: ms.ClusterSpec
    expert_RTK: list[Tensor]
    num_chunks: int
    turn: int

    def on_devices(self, split: ms.Split) -> list[PendingRoutes]:
        chunks, made_by = self.num_chunks, device_split(self.layout, self.cluster, split, "cpu")
        chunk_RT1 = [chunk_numbers(len(e), chunks, torch.device("cpu")) for e in self.expert_RTK]
        parts = zip(self.expert_RTK, chunk_RT1, strict=True)
        said = [route(e * chunks + chunk, self.layout.num_experts * chunks).first_G1 for e, chunk in parts]
        channel: Any = Gathered(len(said), said, [each.numel() for each in self.expert_RTK])
        return [
            route_on_device(
                e,
                None if chunks == 1 else chunk,
                chunks,
                made_by,
                own_replicas(self.layout, rank),
                self.turn,
                FORWARD,
                channel,
            )
            for rank, (e, chunk) in enumerate(zip(self.expert_RTK, chunk_RT1, strict=True))
        ]

    def plan(self, split: ms.Split) -> Any:
        tokens_RE = np.stack([np.bincount(e.flatten(), minlength=self.layout.num_experts) for e in self.expert_RTK])
        slots = self.layout.expert_RS.shape[1]
        strategy = ms.Strategy(name="any", sharding=ms.Fsep(slots_per_rank=slots), split=split)
        model = ms.ModelShape(
            hidden_size=8, intermediate_size=4, num_experts=self.layout.num_experts, top_k=self.expert_RTK[0].shape[1]
        )
        load = LoadMatrix(tokens_RE)
        return plan_layer(strategy, model, self.cluster, load, layout=self.layout, turn=self.turn)


@st.composite
def micros(draw: Any) -> Micro:
    """Up to four ranks, one or two nodes, replicas, empty slots, duplicates, ranks without tokens or experts."""
    num_ranks, E = draw(st.integers(2, 4)), draw(st.integers(1, 6))
    slots = -(-E // num_ranks) + draw(st.integers(0, 2))
    cells = [*range(E), *draw(st.lists(st.integers(-1, E - 1), min_size=num_ranks * slots - E, max_size=12))]
    rng = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    expert_RS = rng.permutation(cells[: num_ranks * slots]).reshape(num_ranks, slots)
    cluster = ms.ClusterSpec(ranks_per_node=num_ranks)
    if num_ranks == 4 and draw(st.booleans()):
        cluster = ms.ClusterSpec(num_nodes=2, ranks_per_node=2)
    top_k = draw(st.integers(1, min(3, E)))
    share_E = rng.dirichlet(np.full(E, draw(st.sampled_from([0.2, 5.0]))))
    tokens_R = draw(st.lists(st.integers(0, 12), min_size=num_ranks, max_size=num_ranks))
    expert_RTK = [
        torch.from_numpy(np.argsort(rng.exponential(size=(T, E)) / share_E, axis=1)[:, :top_k].copy()) for T in tokens_R
    ]
    return Micro(ExpertLayout(expert_RS, E), cluster, expert_RTK, draw(st.integers(1, 3)), draw(st.integers(0, 9)))


def differing(found: Any, expected: Any) -> list[str]:
    """Names of fields that are not the same, to the dtype. What only hosts know, rows by slot, is no such field."""
    names = []
    for each in fields(expected):
        one, other = getattr(found, each.name), getattr(expected, each.name)
        if each.name in ("slots", "order", "chunks"):
            continue
        same = torch.equal(one, other) and one.dtype == other.dtype if isinstance(other, Tensor) else one == other
        names += [] if same else [each.name]
    return names


@examples(2, 20)
@given(micro=micros(), split=st.sampled_from(SPLITS))
def test_every_table_is_the_hosts(micro: Micro, split: ms.Split) -> None:
    plan = micro.plan(split)
    counts_CRE = np.stack([chunk_counts(e, micro.layout.num_experts, micro.num_chunks) for e in micro.expert_RTK], 1)
    for rank, pending in enumerate(micro.on_devices(split)):
        routes = pending.routes
        expected = build_routes(micro.expert_RTK[rank], counts_CRE, plan.tokens, rank, 1)
        if micro.num_chunks == 1:
            assert not expected.order
            expected = expected.__class__(
                **{**vars(expected), "order_row_P": routes.order_row_P, "order_arrival_P": routes.order_arrival_P}
            )
        assert differing(routes, expected) == []
        for chunk, as_expected in zip(routes.chunks, expected.chunks, strict=True):
            assert differing(chunk, as_expected) == []
        assert pending.plan.entries().tolist() == plan.tokens.entries.tolist()
        assert pending.plan.counts_RE().tolist() == plan.load.tokens_RE.tolist()
