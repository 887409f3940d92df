"""ExpertLayout: who holds what. TokenPlan: who goes where."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING

import numpy as np

from moesys.display import Columns, Display, counted, draw_map
from moesys.load import IntArray, LoadMatrix, frozen_int64

if TYPE_CHECKING:
    from matplotlib.axes import Axes

EMPTY = -1


@dataclass(frozen=True, eq=False, repr=False)
class ExpertLayout(Display):
    """The expert in every slot of every rank, ``expert_RS`` int64 [R, S]; ``EMPTY`` (-1) marks a slot without one.

    Every expert of 0..num_experts-1 is held by at least one rank. Ranks with fewer slots than S have empty ones.

    ``ExpertLayout([[0, 1], [0, 2], [3, -1]], num_experts=4)``: expert 0 has replicas on ranks 0 and 1.
    """

    expert_RS: IntArray
    num_experts: int

    def __post_init__(self) -> None:
        expert_RS = frozen_int64("expert_RS", self.expert_RS, num_dims=2)
        object.__setattr__(self, "expert_RS", expert_RS)
        if self.num_experts < 1:
            raise ValueError(f"num_experts={self.num_experts}; a layout needs at least one expert")
        if expert_RS.size and (expert_RS.min() < EMPTY or expert_RS.max() >= self.num_experts):
            rank, slot = np.argwhere((expert_RS < EMPTY) | (expert_RS >= self.num_experts))[0]
            raise ValueError(
                f"expert_RS[{rank}, {slot}] = {expert_RS[rank, slot]}; experts are 0..{self.num_experts - 1}, "
                f"{EMPTY} for an empty slot"
            )
        missing = np.flatnonzero(np.bincount(expert_RS.ravel() - EMPTY, minlength=self.num_experts + 1)[1:] == 0)
        if missing.size:
            raise ValueError(f"no rank holds experts {missing[:8].tolist()}; every expert needs a slot")

    @property
    def num_ranks(self) -> int:
        return self.expert_RS.shape[0]

    @property
    def num_slots(self) -> int:
        """Returns S, the slots of the widest rank."""
        return self.expert_RS.shape[1]

    @cached_property
    def replicas_RE(self) -> IntArray:
        """Copies of each expert on each rank, [R, E]; more than 1 is a wasted slot."""
        replicas_RE = np.zeros((self.num_ranks, self.num_experts), dtype=np.int64)
        rank, slot = np.nonzero(self.expert_RS != EMPTY)
        np.add.at(replicas_RE, (rank, self.expert_RS[rank, slot]), 1)
        replicas_RE.setflags(write=False)
        return replicas_RE

    @cached_property
    def num_duplicates(self) -> int:
        """Slots that hold an expert which their rank already holds."""
        return int(np.maximum(self.replicas_RE - 1, 0).sum())

    @cached_property
    def filled_R(self) -> IntArray:
        """Slots of each rank that hold an expert."""
        filled_R = (self.expert_RS != EMPTY).sum(axis=1)
        filled_R.setflags(write=False)
        return filled_R

    def without_last(self, num_slots: int) -> ExpertLayout:
        """Returns the layout without the last slots of every rank. Late slots are the last ones."""
        return ExpertLayout(self.expert_RS[:, : self.num_slots - num_slots], self.num_experts) if num_slots else self

    def experts_of(self, rank: int) -> tuple[int, ...]:
        """Returns the experts in a rank's filled slots, in slot order (a duplicate appears twice)."""
        return tuple(int(expert) for expert in self.expert_RS[rank] if expert != EMPTY)

    @cached_property
    def held_by_rank(self) -> list[tuple[int, ...]]:
        """Returns the distinct experts of each rank in ascending order. Each computes in a slot of its own: a duplicate
        has no work of its own, and one rank alone has all experts in the order of the masters.
        """
        return [tuple(sorted(set(self.experts_of(rank)))) for rank in range(self.num_ranks)]

    @cached_property
    def held_slot_RE(self) -> IntArray:
        """Returns the place of each expert in ``held_by_rank``, [R, E]; -1 where a rank does not hold it."""
        slot_RE = np.full((self.num_ranks, self.num_experts), -1, dtype=np.int64)
        for slot_E, held in zip(slot_RE, self.held_by_rank, strict=True):
            slot_E[list(held)] = np.arange(len(held))
        slot_RE.setflags(write=False)
        return slot_RE

    def fingerprint(self) -> str:
        """Returns a hex digest of the layout's content, for agreement between ranks."""
        head = f"{self.expert_RS.shape}:{self.num_experts}:".encode()
        return hashlib.sha256(head + self.expert_RS.astype("<i8").tobytes()).hexdigest()

    def __eq__(self, other: object) -> bool:
        return (
            isinstance(other, ExpertLayout)
            and self.num_experts == other.num_experts
            and np.array_equal(self.expert_RS, other.expert_RS)
        )

    def plot(self, ax: Axes | None = None) -> Axes:
        """Draws the number of replicas of each expert on each rank as a map."""
        return draw_map(self.replicas_RE, f"{self.filled_R.sum():,} experts in slots", "replicas", ax)

    def _facts(self) -> str:
        slots, most = int(self.filled_R.sum()), int(self.replicas_RE.sum(axis=0).max())
        replicas = f"up to {most} replicas of an expert" if most > 1 else "no replicas"
        return f"{self.num_experts} experts in {slots:,} slots of {counted(self.num_ranks, 'rank')}, {replicas}"

    def _columns(self) -> Columns:
        rank, slot = np.nonzero(self.expert_RS != EMPTY)
        return {"rank": rank, "slot": slot, "expert": self.expert_RS[rank, slot]}

    def _shown(self) -> Columns:
        slots = {
            f"slot {slot}": ["" if expert == EMPTY else int(expert) for expert in expert_R]
            for slot, expert_R in enumerate(self.expert_RS.T)
        }
        return {"rank": range(self.num_ranks), **slots}

    def __str__(self) -> str:
        rows = (" ".join("." if e == EMPTY else str(e) for e in row) for row in self.expert_RS)
        return "\n".join(f"rank {rank}: {row}" for rank, row in enumerate(rows))


def owner_of_experts(num_experts: int, num_ranks: int) -> IntArray:
    """Returns the rank that owns each expert where experts stay whole, int64 [E]: ceil(E / R) a rank, in order."""
    return np.arange(num_experts) // -(-num_experts // num_ranks)


def lender_of_experts(held_RE: IntArray, node_R: IntArray | None = None) -> IntArray:
    """Returns who gives each rank each expert that it holds, where experts stay whole: int64 [R, E], ``EMPTY`` where it
    holds none.

    That is the owner, who gives to itself; with ``node_R`` [R] it gives to its own node and to one holder in each other
    node, who gives to the others there: the one in place e mod k of k holders in rank order, so that they take turns.
    """
    num_ranks, num_experts = held_RE.shape
    owner_E = owner_of_experts(num_experts, num_ranks)
    lender_RE = np.tile(owner_E, (num_ranks, 1))
    for node in range(0 if node_R is None else int(node_R[-1]) + 1):
        assert node_R is not None
        members, away = np.flatnonzero(node_R == node), np.flatnonzero(node_R[owner_E] != node)
        there = held_RE[np.ix_(members, away)] > 0
        turn = away % np.maximum(there.sum(axis=0), 1)
        carrier = members[np.argmax(there.cumsum(axis=0) == turn + 1, axis=0)]
        lender_RE[np.ix_(members, away)] = carrier
        lender_RE[carrier, away] = owner_E[away]
    return np.where(held_RE > 0, lender_RE, EMPTY)


def check_same_shape(load: LoadMatrix, layout: ExpertLayout) -> None:
    """Raises ValueError where a load and a layout are for different ranks or experts."""
    if (load.num_ranks, load.num_experts) != (layout.num_ranks, layout.num_experts):
        raise ValueError(
            f"the load is for {load.num_ranks} ranks and {load.num_experts} experts, the layout for "
            f"{layout.num_ranks} and {layout.num_experts}; plan both for the same cluster and model"
        )


@dataclass(frozen=True, eq=False, repr=False)
class TokenPlan(Display):
    """How many tokens go from each source rank, for each expert, to each destination rank; sparse.

    ``entries`` int64 [N, 4], rows (source, expert, destination, tokens) with tokens > 0, sorted by the first two.
    Over destinations they sum to the load exactly, and only ranks that hold the expert are destinations. Which tokens
    go where follows: a source's tokens for an expert, in (token, k) order, are cut into contiguous ranges, one a
    destination in the order of entries, which is that of ranks unless blocks ask for another (``balance.row_blocks``).
    """

    entries: IntArray
    load: LoadMatrix
    layout: ExpertLayout

    def __post_init__(self) -> None:
        entries = frozen_int64("entries", self.entries, num_dims=2)
        object.__setattr__(self, "entries", entries)
        if entries.shape[1] != 4:
            raise ValueError(f"entries has rows of {entries.shape[1]}; give (source, expert, destination, tokens)")
        load, layout = self.load, self.layout
        check_same_shape(load, layout)
        num_ranks, num_experts = load.tokens_RE.shape
        bounds = (num_ranks, num_experts, num_ranks)
        outside = ((entries[:, :3] < 0) | (entries[:, :3] >= bounds)).any(axis=1)
        if outside.any():
            raise ValueError(
                f"entries has the row {entries[outside][0].tolist()}; ranks are 0..{bounds[0] - 1}, "
                f"experts 0..{bounds[1] - 1}"
            )
        source, expert, destination, tokens = entries.T
        key = source * num_experts + expert
        if (np.diff(key) < 0).any() or len(np.unique(key * num_ranks + destination)) < len(key):
            raise ValueError("entries must be sorted by (source, expert), each with a destination once")
        if (tokens <= 0).any():
            raise ValueError("entries must have tokens > 0; leave the others out")
        planned_RE = np.zeros_like(load.tokens_RE)
        np.add.at(planned_RE, (source, expert), tokens)
        if not np.array_equal(planned_RE, load.tokens_RE):
            s, e = np.argwhere(planned_RE != load.tokens_RE)[0]
            raise ValueError(
                f"the plan sends {planned_RE[s, e]} tokens of source {s} for expert {e}, "
                f"but {load.tokens_RE[s, e]} exist"
            )
        homeless = layout.replicas_RE[destination, expert] == 0
        if homeless.any():
            s, e, d, _ = entries[homeless][0]
            raise ValueError(f"the plan sends tokens of source {s} for expert {e} to rank {d}, which does not hold it")

    @classmethod
    def by_construction(cls, entries: IntArray, load: LoadMatrix, layout: ExpertLayout) -> TokenPlan:
        """Returns a plan of int64 entries that are right by construction, unchecked: the last step of each split."""
        plan = object.__new__(cls)
        entries.setflags(write=False)
        plan.__dict__.update(entries=entries, load=load, layout=layout)
        return plan

    @classmethod
    def from_dense(cls, tokens_RER: IntArray, load: LoadMatrix, layout: ExpertLayout) -> TokenPlan:
        """Returns the plan of a dense [R, E, R] array of tokens per (source, expert, destination)."""
        index = np.argwhere(tokens_RER)
        return cls(np.column_stack([index, tokens_RER[tuple(index.T)]]), load, layout)

    @cached_property
    def tokens_RER(self) -> IntArray:
        """Returns a dense view [source, expert, destination] of R²·E numbers, for tests, small plans and printing."""
        tokens_RER = np.zeros((self.load.num_ranks, self.load.num_experts, self.load.num_ranks), dtype=np.int64)
        source, expert, destination, tokens = self.entries.T
        tokens_RER[source, expert, destination] = tokens
        tokens_RER.setflags(write=False)
        return tokens_RER

    @cached_property
    def tokens_R(self) -> IntArray:
        """Returns the tokens that each destination rank computes."""
        tokens_R = np.zeros(self.load.num_ranks, dtype=np.int64)
        np.add.at(tokens_R, self.entries[:, 2], self.entries[:, 3])
        tokens_R.setflags(write=False)
        return tokens_R

    @cached_property
    def computed_RE(self) -> IntArray:
        """Returns the tokens that each rank computes for each expert."""
        computed_RE = np.zeros_like(self.load.tokens_RE)
        np.add.at(computed_RE, (self.entries[:, 2], self.entries[:, 1]), self.entries[:, 3])
        computed_RE.setflags(write=False)
        return computed_RE

    @property
    def max_over_mean(self) -> float:
        """Returns the imbalance: the busiest rank's tokens divided by the mean, 1.0 for no tokens at all."""
        return float(self.tokens_R.max() / self.tokens_R.mean()) if self.load.total else 1.0

    def inter_node_tokens(self, node_of_rank: tuple[int, ...]) -> int:
        """Returns the tokens that leave their source's node; for a cluster whose links join others, give
        ``domain_of_rank``.
        """
        node = np.asarray(node_of_rank)
        source, _, destination, tokens = self.entries.T
        return int(tokens[node[source] != node[destination]].sum())

    def _facts(self) -> str:
        source, _, destination, tokens = self.entries.T
        sent = int(tokens[source != destination].sum())
        return (
            f"{self.load.total:,} tokens, {self.load.num_experts} experts on {counted(self.load.num_ranks, 'rank')}, "
            f"busiest rank {self.max_over_mean:.3f} × the mean, {sent:,} tokens leave their rank"
        )

    def _columns(self) -> Columns:
        return dict(zip(("source", "expert", "destination", "tokens"), self.entries.T, strict=True))

    def __eq__(self, other: object) -> bool:
        return (
            isinstance(other, TokenPlan)
            and np.array_equal(self.entries, other.entries)
            and self.load == other.load
            and self.layout == other.layout
        )
