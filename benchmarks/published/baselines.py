"""What a simulator has to be better than: a closed form fitted on the same shape, and a published row copied."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import product

import numpy as np

from benchmarks.published.fit import row_errors
from benchmarks.published.laer_figures import LOGGED_MAX_OVER_MEAN, METHODS, ROWS, PublishedRow
from benchmarks.published.laer_setup import CONSTANTS, TOKENS, Constants, laer_model
from moesys.cost import expert_seconds

GROWTHS = tuple(np.arange(0.0, 4.05, 0.05).tolist())
OVERHEADS_MS = tuple(np.arange(0.0, 31.0, 1.0).tolist())


@dataclass(frozen=True)
class ClosedForm:
    """Seconds of an iteration as a sum over its passes: experts times max/mean, attention, an all-to-all, an overhead.

    growth: of max/mean - 1, over that of the published log of tokens. overhead_ms: of a pass of a layer.
    """

    growth: float
    overhead_ms: float

    def seconds(self, shape: str, constants: Constants = CONSTANTS) -> dict[str, float]:
        """By method. Of ``constants`` those alone that were measured."""
        model = laer_model(shape)
        rows = TOKENS * model.layer.top_k
        experts_s = float(expert_seconds(rows, model.layer, constants.cluster, backward=False))
        rest = model.rest_of_step(constants, communication_optimised=True)
        other_s = float(rest.other_seconds) - constants.dispatcher_ms * 1e-3
        ranks = constants.cluster.ranks_per_node
        assert isinstance(ranks, int)
        sent = rows * model.layer.row_bytes * (ranks - 1) / ranks
        rows_s = sent / (constants.intra_node_gb_per_s * 1e9)
        fixed_s = other_s + rows_s + self.overhead_ms * 1e-3
        logged = LOGGED_MAX_OVER_MEAN[shape.rpartition("-")[2]]
        return {
            method: rest.optimizer_seconds
            + model.num_passes * (experts_s * (1 + self.growth * (logged[method] - 1)) + fixed_s)
            for method in METHODS
        }


def fitted_closed_form(shape: str, rows: Sequence[PublishedRow]) -> ClosedForm:
    """The least root mean square error over the rows' seconds and speed-ups, each group as heavy."""

    def square(form: ClosedForm) -> float:
        return sum(float(np.mean(np.square(of))) for of in row_errors(form.seconds(shape), rows))

    return min((ClosedForm(*of) for of in product(GROWTHS, OVERHEADS_MS)), key=square)


def copied_row_errors(shape: str, rows: Sequence[PublishedRow] = ROWS) -> tuple[list[float], list[float]]:
    """Of ``shape``'s rows against the same model's on the other data set: errors of seconds, and of speed-ups."""
    of_seconds, of_speed_ups = [], []
    for row in rows:
        if row.model.endswith(shape):
            other = next(
                of for of in rows if (of.model, of.aux_loss) == (row.model, row.aux_loss) and of.dataset != row.dataset
            )
            errors = row_errors(other.seconds, [row])
            of_seconds += errors[0]
            of_speed_ups += errors[1]
    return of_seconds, of_speed_ups
