"""NodeCarriers: through whom slices of experts come into a node, and the sums of their gradients leave it.

The carriers of a node share the work: slices of an outside rank r pass through the rank whose place in the node is
r mod the node's size. Inside the node a rank's own slices pass through nobody.
"""

from __future__ import annotations

from collections.abc import Sequence

from moesys.moe.shards import HeldByRank


class NodeCarriers:
    """Of the node of ``rank``: ``members``, its ranks, and ``wanted``, the distinct experts that these hold, in the
    order of ranks and slots. ``nodes`` and ``wanted_by_node`` are those of all.
    """

    def __init__(self, rank: int, node_of_rank: Sequence[int], held: HeldByRank) -> None:
        self.rank, self.num_ranks = rank, len(node_of_rank)
        self.nodes = [
            [each for each, of in enumerate(node_of_rank) if of == node] for node in sorted(set(node_of_rank))
        ]
        self.wanted_by_node = [list(dict.fromkeys(e for each in ranks for e in held[each])) for ranks in self.nodes]
        self.members, self.wanted = next(
            (ranks, wanted) for ranks, wanted in zip(self.nodes, self.wanted_by_node, strict=True) if rank in ranks
        )
        # Whose slices a member passes on: its own, and those of the outside ranks that it is the carrier of.
        self.owners_by = {
            member: [owner for owner in range(self.num_ranks) if _carrier(self.members, owner) == member]
            for member in self.members
        }
        self.owners = self.owners_by[rank]
        self.outside = [owner for owner in self.owners if owner != rank]
        self._held, self._place = held, {expert: place for place, expert in enumerate(self.wanted)}

    @property
    def by_carrier(self) -> list[int]:
        """All ranks, in the order of the members that pass on their slices."""
        return [owner for member in self.members for owner in self.owners_by[member]]

    def places_of(self, member: int) -> list[int]:
        """Returns where the experts that a member holds are among ``wanted``."""
        return [self._place[expert] for expert in self._held[member]]

    def abroad(self) -> list[tuple[int, list[int]]]:
        """Returns who carries the slices of this rank in each other node, with the experts wanted there; by rank."""
        return [
            (_carrier(ranks, self.rank), wanted)
            for ranks, wanted in zip(self.nodes, self.wanted_by_node, strict=True)
            if ranks is not self.members
        ]


def _carrier(ranks: Sequence[int], owner: int) -> int:
    return owner if owner in ranks else ranks[owner % len(ranks)]
