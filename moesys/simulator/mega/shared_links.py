"""Links that tasks share evenly: processor sharing, kept by one virtual time per link.

A part is a number of tasks that move equal bytes at once. Each link counts the bytes that a task which has been on it
all the time has moved so far; a part ends when that count has grown by its own bytes. The compiled loop of ``events``
calls these functions for each part and link.

L links, N nodes: a part on a link.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from moesys.compiled import borrowing
from moesys.cost import FloatArray
from moesys.load import IntArray

# ``through``: the count of bytes at which the part ends. A row per node, as nodes are spread over memory.
_NODE = np.dtype([("through", "f8"), *((name, "i4") for name in ("part", "child", "beside"))], align=True)


class SharedLinks(NamedTuple):
    """The state of all links.

    byte_seconds: seconds per byte. got: bytes that a task on the link has moved so far; updated: the time of that
    count. active: the tasks that share the link. due: when it is looked at next, no later than its first part can end,
    [L + 1], where the last entry is of no link. root_L: the root of the pairing heap of the ``nodes`` of its parts.
    spare, num_spare: the nodes without a part, and their number. first_due: a tournament of links, whose winner is at 1
    and whose leaves are the latter half.
    """

    byte_seconds: FloatArray
    got: FloatArray
    updated: FloatArray
    active: FloatArray
    due: FloatArray
    root_L: IntArray
    nodes: npt.NDArray[Any]
    spare: IntArray
    num_spare: IntArray
    first_due: IntArray

    @staticmethod
    def of(byte_seconds: FloatArray, num_nodes: int) -> SharedLinks:
        """Returns links without parts, with room for so many nodes."""
        num_links = len(byte_seconds)
        leaves = 1 << num_links.bit_length()
        # No link wins until one is due.
        first_due = np.full(2 * leaves, num_links)
        first_due[leaves : leaves + num_links] = np.arange(num_links)
        return SharedLinks(
            byte_seconds=byte_seconds,
            got=np.zeros(num_links),
            updated=np.zeros(num_links),
            active=np.zeros(num_links),
            due=np.full(num_links + 1, np.inf),
            root_L=np.full(num_links, -1),
            nodes=np.empty(num_nodes, dtype=_NODE),
            spare=np.arange(num_nodes),
            num_spare=np.full(1, num_nodes),
            first_due=first_due,
        )


@borrowing
def look_at(links, link, at):  # type: ignore[no-untyped-def]
    """Sets when ``link`` is due."""
    links.due[link] = at
    first_due = links.first_due
    place = (len(first_due) // 2 + link) // 2
    while place > 0:
        left, right = first_due[2 * place], first_due[2 * place + 1]
        winner = left if links.due[left] <= links.due[right] else right
        if winner == first_due[place] and winner != link:
            break
        first_due[place] = winner
        place //= 2


@borrowing
def first_end(links, link):  # type: ignore[no-untyped-def]
    """Returns when the first part on ``link`` ends if no other part comes."""
    root = links.root_L[link]
    if root < 0:
        return np.inf
    left = (links.nodes[root].through - links.got[link]) * links.active[link] * links.byte_seconds[link]
    return links.updated[link] + max(left, 0.0)


@borrowing
def begin(links, link, num_bytes, part, tasks, now):  # type: ignore[no-untyped-def]
    """Puts ``part`` on ``link``, which moves so many bytes for each of its tasks from ``now`` on."""
    # Parts on an infinitely fast link end before time goes on.
    if links.active[link] > 0 and now > links.updated[link]:
        links.got[link] += (now - links.updated[link]) / (links.active[link] * links.byte_seconds[link])
    links.updated[link] = now
    links.active[link] += tasks
    links.num_spare[0] -= 1
    number = links.spare[links.num_spare[0]]
    node = links.nodes[number]
    node.through, node.part, node.child, node.beside = links.got[link] + num_bytes, part, -1, -1
    root = links.root_L[link]
    links.root_L[link] = number if root < 0 else _melded(links.nodes, root, number)


@borrowing
def take_first(links, link):  # type: ignore[no-untyped-def]
    """Removes the first part from ``link`` and returns it. Its tasks still count as active."""
    root = links.root_L[link]
    links.spare[links.num_spare[0]] = root
    links.num_spare[0] += 1
    # The heaps below the root are melded two by two, and the results from the last to the first.
    nodes = links.nodes
    node, melded = np.int64(nodes[root].child), np.int64(-1)
    while node >= 0:
        other, following = np.int64(nodes[node].beside), np.int64(-1)
        if other >= 0:
            following = np.int64(nodes[other].beside)
            node = _melded(nodes, node, other)
        nodes[node].beside = melded
        melded, node = node, following
    if melded >= 0:
        node = np.int64(nodes[melded].beside)
        while node >= 0:
            following = np.int64(nodes[node].beside)
            melded = _melded(nodes, melded, node)
            node = following
    links.root_L[link] = melded
    return nodes[root].part


@borrowing
def _melded(nodes, one, other):  # type: ignore[no-untyped-def]
    """Melds two heaps and returns the root: the first one's if their first parts end at once."""
    if nodes[other].through < nodes[one].through:
        one, other = other, one
    nodes[other].beside = nodes[one].child
    nodes[one].child = other
    return one
