"""A layout by hubs, compiled: the heaviest experts are cut so that every rank is filled exactly.

Experts are *hubs*, which may have many replicas, or *whole*, with one. Whole experts go to the lightest rank, heaviest
first, and leave a hub's slot free on every rank. What they leave of a rank's fair share, its room, the hubs fill to the
token. A rank with one hub's slot is a *leaf* of that hub; one with two is a *link*, where two hubs share the room.
Links join the hubs to a tree in which heavier hubs have more neighbours, so that on later counts what one expert has
more than foreseen can flow to every rank: with one redundant slot a rank there are just as many links as a tree needs.

On exact counts this is the wrap-around rule of McNaughton (1959), with a choice of who is cut where; that choice is
what makes it robust, and keeps tokens in their node.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from moesys.compiled import borrowing, compiled
from moesys.layout import EMPTY
from moesys.load import IntArray

# A hub's last tokens go to a link if they fill at most so many sixteenths of its room: the rest is what its neighbour
# can give way by.
FULLEST_LINK = 14


class Site(NamedTuple):
    """Where experts are to be placed. R ranks, N nodes, E experts; all int64.

    ``slots_R``: usable slots, 0 for ranks that are left alone; ``node_R``; ``seat_R``: ranks with slots, in the order
    that goes round the nodes; ``tokens_E``: what is to be balanced; ``supply_NE``: of it, what each node's ranks send;
    ``order_D``: the D experts to place, heaviest first; ``before_RS``: what ranks hold now, all EMPTY for nothing.
    Whole experts stay there as long as they leave hubs room, and hubs where their tokens have no longer way.
    """

    slots_R: IntArray
    node_R: IntArray
    seat_R: IntArray
    tokens_E: IntArray
    supply_NE: IntArray
    order_D: IntArray
    before_RS: IntArray


class Works(NamedTuple):
    """A layout under construction; all int64.

    ``expert_RS``: what stands; ``filled_R``: slots in use; ``open_R``: free slots for hubs; ``room_R``: tokens that a
    rank still takes; for hub j ``rest_J``: tokens not placed, ``placed_J``: replicas, ``lacking_NJ``: tokens that a
    node's ranks send beyond what it got there.
    """

    expert_RS: IntArray
    filled_R: IntArray
    open_R: IntArray
    room_R: IntArray
    rest_J: IntArray
    placed_J: IntArray
    lacking_NJ: IntArray


@compiled
def build_on_hubs(site, num_hubs, expert_RS):  # type: ignore[no-untyped-def]
    """Fills the slots of ``site``'s ranks in ``expert_RS`` [R, S] with the first ``num_hubs`` experts as hubs.

    Every slot is filled, no rank holds an expert twice. False, with ``expert_RS`` in disorder, where so few hubs cannot
    fill the slots, or so many do not fit.
    """
    num_whole = site.order_D.size - num_hubs
    num_slots = most_hubs = total = 0
    for rank in site.seat_R:
        num_slots += site.slots_R[rank]
        most_hubs += min(site.slots_R[rank], num_hubs)
        expert_RS[rank, :] = EMPTY
    for expert in site.order_D:
        total += site.tokens_E[expert]
    hub_slots = num_slots - num_whole
    if not num_hubs <= hub_slots <= most_hubs:
        return False
    num_ranks, num_seats = site.slots_R.size, site.seat_R.size
    works = Works(
        expert_RS,
        np.zeros(num_ranks, np.int64),
        np.zeros(num_ranks, np.int64),
        np.zeros(num_ranks, np.int64),
        np.empty(num_hubs, np.int64),
        np.zeros(num_hubs, np.int64),
        np.empty((site.supply_NE.shape[0], num_hubs), np.int64),
    )
    for index in range(num_seats):
        works.room_R[site.seat_R[index]] = total // num_seats + (index < total % num_seats)
    for hub in range(num_hubs):
        works.rest_J[hub] = site.tokens_E[site.order_D[hub]]
        works.lacking_NJ[:, hub] = site.supply_NE[:, site.order_D[hub]]
    _deal_hub_slots(site, num_hubs, hub_slots, works.open_R)
    _place_whole(site, num_hubs, works)
    parent_J = _grow_tree(site, num_hubs)
    spare_links = hub_slots - num_seats - (num_hubs - 1)
    for hub in range(num_hubs - 1, 0, -1):
        spare_links = _place_hub(site, hub, parent_J[hub], spare_links, works)
    return _place_missing(site, num_hubs, works) and _fill_up(site, num_hubs, works)


@borrowing
def _deal_hub_slots(site, num_hubs, hub_slots, open_R):  # type: ignore[no-untyped-def]
    """One hub's slot to every rank in seat order, then a second one, and so on."""
    while hub_slots:
        for rank in site.seat_R:
            if hub_slots and open_R[rank] < min(site.slots_R[rank], num_hubs):
                open_R[rank] += 1
                hub_slots -= 1


@compiled
def _place_whole(site, num_hubs, works):  # type: ignore[no-untyped-def]
    """Experts that are not hubs, heaviest first, each to where it is, or to the rank with most room among those with a
    slot for it.
    """
    filled_R, open_R, room_R = works.filled_R, works.open_R, works.room_R
    whole_E = np.zeros(site.tokens_E.size, np.bool_)
    whole_E[site.order_D[num_hubs:]] = True
    hub_tokens = np.int64(0)
    for expert in site.order_D[:num_hubs]:
        hub_tokens += site.tokens_E[expert]
    # half of what hubs take of a rank on average: where they have less room, less can give way
    least_room = hub_tokens // site.seat_R.size // 2
    for rank in site.seat_R:
        for slot in range(site.before_RS.shape[1]):
            expert = site.before_RS[rank, slot]
            if expert == EMPTY or not whole_E[expert] or filled_R[rank] + open_R[rank] == site.slots_R[rank]:
                continue
            if room_R[rank] - site.tokens_E[expert] >= least_room:
                whole_E[expert] = False
                works.expert_RS[rank, filled_R[rank]] = expert
                filled_R[rank] += 1
                room_R[rank] -= site.tokens_E[expert]
    for expert in site.order_D[num_hubs:]:
        if not whole_E[expert]:
            continue
        best = -1
        for rank in site.seat_R:
            if filled_R[rank] + open_R[rank] < site.slots_R[rank] and (best < 0 or room_R[rank] > room_R[best]):
                best = rank
        works.expert_RS[best, filled_R[best]] = expert
        filled_R[best] += 1
        room_R[best] -= site.tokens_E[expert]


@compiled
def _grow_tree(site, num_hubs):  # type: ignore[no-untyped-def]
    """Each hub's neighbour among heavier ones: that with the most tokens a neighbour."""
    parent_J = np.zeros(num_hubs, np.int64)
    degree_J = np.ones(num_hubs, np.int64)
    for hub in range(1, num_hubs):
        best = 0
        for other in range(1, hub):
            tokens, best_tokens = site.tokens_E[site.order_D[other]], site.tokens_E[site.order_D[best]]
            if tokens * degree_J[best] > best_tokens * degree_J[other]:
                best = other
        parent_J[hub] = best
        degree_J[best] += 1
        degree_J[hub] += 1
    return parent_J


@borrowing
def _holds(works, rank, expert):  # type: ignore[no-untyped-def]
    held = False
    for slot in range(works.filled_R[rank]):
        held = held or works.expert_RS[rank, slot] == expert
    return held


@borrowing
def _put(site, works, rank, hub, tokens):  # type: ignore[no-untyped-def]
    """A replica of a hub, and so many of its tokens, onto a rank with a free hub's slot."""
    works.expert_RS[rank, works.filled_R[rank]] = site.order_D[hub]
    works.filled_R[rank] += 1
    works.open_R[rank] -= 1
    works.room_R[rank] -= tokens
    works.rest_J[hub] -= tokens
    works.placed_J[hub] += 1
    works.lacking_NJ[site.node_R[rank], hub] -= tokens


@borrowing
def _nearer(site, hub, rank, best, works):  # type: ignore[no-untyped-def]
    """Whether a hub's tokens have less way to a rank's node, or none more and the hub is there already."""
    lacking = works.lacking_NJ[site.node_R[rank], hub]
    best_lacking = works.lacking_NJ[site.node_R[best], hub]
    if lacking != best_lacking:
        return lacking > best_lacking
    here = there = False
    for slot in range(site.before_RS.shape[1]):
        here = here or site.before_RS[rank, slot] == site.order_D[hub]
        there = there or site.before_RS[best, slot] == site.order_D[hub]
    return here and not there


@borrowing
def _find_link(site, hub, parent, works):  # type: ignore[no-untyped-def]
    """A rank that can take the hub and its parent, where the hub's tokens have the least way to go; -1 for none."""
    best = -1
    for rank in site.seat_R:
        if works.open_R[rank] < 2 or works.room_R[rank] <= 0:
            continue
        if best >= 0 and not _nearer(site, hub, rank, best, works):
            continue
        if not _holds(works, rank, site.order_D[hub]) and not _holds(works, rank, site.order_D[parent]):
            best = rank
    return best


@borrowing
def _find_leaf(site, hub, works):  # type: ignore[no-untyped-def]
    """A rank with one hub's slot that this hub can fill, where its tokens have the least way to go; -1 for none."""
    best = -1
    for rank in site.seat_R:
        if works.open_R[rank] != 1 or not 0 < works.room_R[rank] <= works.rest_J[hub]:
            continue
        if best >= 0 and not _nearer(site, hub, rank, best, works):
            continue
        if not _holds(works, rank, site.order_D[hub]):
            best = rank
    return best


@borrowing
def _place_hub(site, hub, parent, spare_links, works):  # type: ignore[no-untyped-def]
    """Fills leaves with a hub until what is left fits a link to its parent; gives the links still to spare."""
    rest_J, room_R = works.rest_J, works.room_R
    link = _find_link(site, hub, parent, works)
    while link < 0 or rest_J[hub] * 16 > room_R[link] * FULLEST_LINK:
        leaf = _find_leaf(site, hub, works)
        if leaf < 0:
            break
        # too much for one link, and after a leaf too little for a link that gives way
        after_leaf = rest_J[hub] - room_R[leaf]
        if spare_links > 0 and link >= 0 and rest_J[hub] <= 2 * room_R[link] and after_leaf < room_R[link] // 4:
            spare_links -= 1
            _share(site, works, link, hub, parent, rest_J[hub] // 2)
            link = _find_link(site, hub, parent, works)
        else:
            _put(site, works, leaf, hub, room_R[leaf])
    if link >= 0:
        _share(site, works, link, hub, parent, min(rest_J[hub], room_R[link]))
    return spare_links


@borrowing
def _share(site, works, rank, hub, parent, tokens):  # type: ignore[no-untyped-def]
    """A link: so many of the hub's tokens, and as many of its parent's as fill the rank."""
    _put(site, works, rank, hub, tokens)
    _put(site, works, rank, parent, min(max(works.rest_J[parent], 0), works.room_R[rank]))


@borrowing
def _place_missing(site, num_hubs, works):  # type: ignore[no-untyped-def]
    """Hubs without a replica, heaviest first, to the rank with the most room; False where no slot is left."""
    for hub in range(num_hubs):
        if works.placed_J[hub]:
            continue
        best = -1
        for rank in site.seat_R:
            if works.open_R[rank] and (best < 0 or works.room_R[rank] > works.room_R[best]):
                best = rank
        if best < 0:
            return False
        _put(site, works, best, hub, max(min(works.rest_J[hub], works.room_R[best]), 0))
    return True


@borrowing
def _fill_up(site, num_hubs, works):  # type: ignore[no-untyped-def]
    """Free slots, one a rank in turn: to the hub that fills most of the room; without room, to the most tokens a
    replica.
    """
    rest_J, placed_J, room_R = works.rest_J, works.placed_J, works.room_R
    left = works.open_R.sum()
    while left:
        for rank in site.seat_R:
            if not works.open_R[rank]:
                continue
            best = -1
            for hub in range(num_hubs):
                if _holds(works, rank, site.order_D[hub]):
                    continue
                if best < 0:
                    best = hub
                    continue
                fills = max(min(rest_J[hub], room_R[rank]), 0)
                most = max(min(rest_J[best], room_R[rank]), 0)
                tokens, best_tokens = site.tokens_E[site.order_D[hub]], site.tokens_E[site.order_D[best]]
                heavier = tokens * (placed_J[best] + 1) > best_tokens * (placed_J[hub] + 1)
                if fills > most or (fills == most and heavier):
                    best = hub
            if best < 0:
                return False
            _put(site, works, rank, best, max(min(rest_J[best], room_R[rank]), 0))
            left -= 1
    return True
