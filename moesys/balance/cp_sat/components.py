"""Components: layouts of few slots as a partition of experts, solved by dynamic programming over sets of experts.

Draw a line from every expert to every rank that computes some of its tokens. Some least-loaded split has no cycles
(a basic solution of the split's linear program), so every connected component is a tree: k experts on m ranks have
k + m - 1 lines, each of which is a slot. Therefore experts can be planned for a busiest rank of ``limit`` tokens only
if they fall apart into sets such that m ranks hold the tokens of a set, m · limit >= tokens, and the ranks of all sets,
and the slots of their trees, are there.

That is a bound for every layout, and far stronger than slots alone where there are fewer spare slots than ranks. It is
all but exact: what it leaves out is which ranks of a tree hold which of its experts, and ``fill_components`` nearly
always finds that.
"""

from __future__ import annotations

from bisect import insort
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from moesys.compiled import compiled
from moesys.load import IntArray

# 3^16 / 2 pairs of sets are visited at worst, in about a second
MOST_EXPERTS = 16
NEVER = 1 << 14


@dataclass(frozen=True)
class Component:
    """Experts that share ``num_ranks`` ranks, whose slots exceed ``num_ranks`` × the common ones by ``extra_slots``."""

    experts: tuple[int, ...]
    num_ranks: int
    extra_slots: int


def least_by_components(
    tokens_E: Sequence[int], slots_R: Sequence[int], low: int, high: int
) -> tuple[int, list[Component]]:
    """The least limit in ``low``..``high`` that a partition into components allows, and the partition.

    No layout with these slots, at most E a rank and 0 for a rank without, has a busiest rank below it, given that none
    is below ``low``. ``high`` must be reached by some layout. For some tokens, and at most ``MOST_EXPERTS`` experts.
    """
    slots = [count for count in slots_R if count]
    tokens_G = _tokens_of_sets(tokens_E)
    low = max(low, -(-int(tokens_G[-1]) // len(slots)))
    least_GR, reach = None, 1
    while low < high:
        # the least is mostly near the bound below, and low limits are quick to refuse
        middle = min(low + reach - 1, (low + high) // 2)
        reach *= 4
        trial_GR = _table(tokens_G, middle, slots)
        if trial_GR[-1, -1] < NEVER:
            high, least_GR = middle, trial_GR
        else:
            low = middle + 1
    least_GR = _table(tokens_G, low, slots) if least_GR is None else least_GR
    assert least_GR[-1, -1] < NEVER, f"a layout reaches {high} tokens, but no partition into components does"
    return low, _traced(least_GR, tokens_G, low, slots)


def fill_components(
    components: Sequence[Component], tokens_E: Sequence[int], slots_R: Sequence[int], limit: int
) -> list[list[int]] | None:
    """The experts of every rank, [R], for a busiest rank of ``limit`` tokens; None where filling tree by tree fails.

    A tree is filled rank by rank: with its lightest experts, as many as there are slots for but one, and with a piece
    of its heaviest, up to the limit.
    """
    rows: list[list[int]] = [[] for _ in slots_R]
    free = sorted((rank for rank, slots in enumerate(slots_R) if slots), key=lambda rank: (-slots_R[rank], rank))
    common = slots_R[free[-1]]
    for component in sorted(components, key=lambda component: (-component.extra_slots, component.experts)):
        # the widest ranks while slots beyond the common ones are needed, then the narrowest
        ranks: list[int] = []
        extra = component.extra_slots
        for _ in range(component.num_ranks):
            ranks.append(free.pop(0 if extra > 0 else -1))
            extra -= slots_R[ranks[-1]] - common
        for order in (ranks[::-1], ranks):
            filled = _filled_tree([(tokens_E[e], e) for e in component.experts], [slots_R[r] for r in order], limit)
            if filled is not None:
                break
        else:
            return None
        for rank, row in zip(order, filled, strict=True):
            rows[rank] = row
    return rows


def _filled_tree(experts: list[tuple[int, int]], slots_R: Sequence[int], limit: int) -> list[list[int]] | None:
    left = sorted(experts)
    rows: list[list[int]] = []
    for slots in slots_R:
        room = limit
        row: list[int] = []
        while len(left) > 1 and len(row) < slots - 1 and left[0][0] <= room:
            tokens, expert = left.pop(0)
            row.append(expert)
            room -= tokens
        if left and (room or not left[-1][0]):
            tokens, expert = left.pop()
            row.append(expert)
            if tokens > room:
                insort(left, (tokens - room, expert))
        rows.append(row)
    return None if left else rows


def _table(tokens_G: IntArray, limit: int, slots_R: Sequence[int]) -> np.ndarray:
    common = min(slots_R)
    return _least_extra(
        tokens_G, limit, len(slots_R), common, max(slots_R) - common, sum(slots_R) - common * len(slots_R)
    )


def _tokens_of_sets(tokens_E: Sequence[int]) -> IntArray:
    """Tokens of every set of experts, [2^E]; bit e of the index says that expert e is in the set."""
    tokens_G = np.zeros(1, dtype=np.int64)
    for tokens in tokens_E:
        tokens_G = np.concatenate([tokens_G, tokens_G + tokens])
    return tokens_G


@compiled
def _least_extra(tokens_G, limit, num_ranks, common, extra_a_rank, most_extra):  # type: ignore[no-untyped-def]
    """The fewest slots beyond ``common`` a rank with which m ranks hold a set of experts, int16 [2^E, m = 0..R].

    ``NEVER`` stands for more than ``most_extra``, for more than ``extra_a_rank`` on a rank, and for m ranks that waste
    more room than there is to waste. Leaving such m out, and sets that no partition reaches, takes a table of 16
    experts and ranks from 3.7 s to 0.04 s. Sets are built from the highest expert down: a component that contains the
    lowest expert of a set joins any set of experts above it that it does not contain.
    """
    num_sets = len(tokens_G)
    waste = num_ranks * limit - tokens_G[-1]
    least_GR = np.full((num_sets, num_ranks + 1), NEVER, dtype=np.int16)
    least_GR[0, : min(num_ranks, waste // limit) + 1] = 0
    possible_G = np.zeros(num_sets, dtype=np.bool_)
    possible_G[0] = True
    size_G = np.zeros(num_sets, dtype=np.int16)
    fewest_G, most_G = np.zeros(num_sets, dtype=np.int16), np.zeros(num_sets, dtype=np.int16)
    for group in range(num_sets):
        size_G[group] = size_G[group & (group - 1)] + 1 if group else 0
        fewest_G[group] = (tokens_G[group] + limit - 1) // limit
        most_G[group] = min(num_ranks, (tokens_G[group] + waste) // limit)
    lowest = num_sets >> 1
    while lowest:
        above = (num_sets - 1) & ~(2 * lowest - 1)
        component = above | lowest
        while component:
            for ranks in range(max(1, fewest_G[component]), most_G[component] + 1):
                extra = max(0, size_G[component] - 1 - ranks * (common - 1))
                if extra > min(most_extra, ranks * extra_a_rank):
                    continue
                others = above & ~component
                rest = others
                while True:
                    if possible_G[rest]:
                        before, after = least_GR[rest], least_GR[rest | component]
                        for m in range(ranks + fewest_G[rest], most_G[rest | component] + 1):
                            together = before[m - ranks] + extra
                            if together < after[m] and together <= most_extra:
                                after[m] = together
                                possible_G[rest | component] = True
                    if rest == 0:
                        break
                    rest = (rest - 1) & others
                if extra == 0:
                    break
            component = ((component ^ lowest) - 1) & above | lowest if component != lowest else 0
        lowest >>= 1
    return least_GR


def _traced(least_GR: np.ndarray, tokens_G: IntArray, limit: int, slots_R: Sequence[int]) -> list[Component]:
    """The components of a best partition of all experts, by walking the table back."""
    common, extra_a_rank = min(slots_R), max(slots_R) - min(slots_R)
    components = []
    left, ranks_left = len(tokens_G) - 1, len(slots_R)
    while left:
        lowest = left & -left
        others = rest = left ^ lowest
        found = None
        while found is None:
            # the largest set that could be the rest, so the smallest component, comes first
            group = left ^ rest
            for ranks in range(max(1, -(-int(tokens_G[group]) // limit)), ranks_left + 1):
                extra = max(0, group.bit_count() - 1 - ranks * (common - 1))
                together = int(least_GR[rest, ranks_left - ranks]) + extra
                if extra <= ranks * extra_a_rank and together == least_GR[left, ranks_left]:
                    found = Component(tuple(e for e in range(group.bit_length()) if group >> e & 1), ranks, extra)
                    break
            assert rest or found, "the table has a set of experts without a best component"
            rest = (rest - 1) & others
        components.append(found)
        left ^= sum(1 << expert for expert in found.experts)
        ranks_left -= found.num_ranks
    return components
