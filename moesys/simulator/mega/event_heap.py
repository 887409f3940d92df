"""A heap of events, by their time, which the compiled loop of ``events`` pushes to and pops from."""

from __future__ import annotations

from typing import NamedTuple

from moesys.compiled import borrowing
from moesys.cost import FloatArray
from moesys.load import IntArray

# Bits of an event's word: the number of a part, gate or launch, then its kind, then how many were found before it.
_KIND, _FOUND = 28, 30


class Events(NamedTuple):
    """A binary heap of seconds and words; ``counts``: how many there are, and were."""

    at: FloatArray
    word: IntArray
    counts: IntArray


@borrowing
def push(events, at, kind, of):  # type: ignore[no-untyped-def]
    """An event of this kind at ``at``, of the part, gate or launch with number ``of``."""
    place = events.counts[0]
    events.counts[0] += 1
    events.counts[1] += 1
    word = (events.counts[1] << _FOUND) | (kind << _KIND) | of
    while place > 0:
        above = (place - 1) >> 1
        if events.at[above] < at or (events.at[above] == at and events.word[above] < word):
            break
        events.at[place], events.word[place] = events.at[above], events.word[above]
        place = above
    events.at[place], events.word[place] = at, word


@borrowing
def pop(events):  # type: ignore[no-untyped-def]
    """(kind, number) of the first event; of equal times in the order in which they were found."""
    first = events.word[0]
    events.counts[0] -= 1
    size = events.counts[0]
    at, word = events.at[size], events.word[size]
    place = 0
    while True:
        below = 2 * place + 1
        if below >= size:
            break
        right = below + 1
        if right < size and (
            events.at[right] < events.at[below]
            or (events.at[right] == events.at[below] and events.word[right] < events.word[below])
        ):
            below = right
        if at < events.at[below] or (at == events.at[below] and word < events.word[below]):
            break
        events.at[place], events.word[place] = events.at[below], events.word[below]
        place = below
    events.at[place], events.word[place] = at, word
    return (first >> _KIND) & ((1 << (_FOUND - _KIND)) - 1), first & ((1 << _KIND) - 1)
