"""Colours of kinds of spans: what ranks do most keeps its own from figure to figure, other kinds take what is left."""

from __future__ import annotations

from collections.abc import Sequence

_KIND_COLOURS = {
    "experts": "#0072B2",
    "weight_gradients": "#56B4E9",
    "dispatch": "#E69F00",
    "combine": "#D55E00",
    "restore": "#009E73",
    "reshard": "#CC79A7",
    "counts": "#F0E442",
}
_OTHER_COLOURS = ("#999999", "#444444", "#7B4173", "#8C6D31", "#637939", "#9C9EDE")


def kind_colours(kinds: Sequence[str]) -> dict[str, str]:
    """Returns a colour for each kind."""
    spare = iter(_OTHER_COLOURS * len(kinds))
    return {kind: _KIND_COLOURS.get(kind) or next(spare) for kind in kinds}
