"""Each row of the table of the diagnosis, from coefficients made by hand; and the candidates of a wrong norm."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from moesys.verify.comparison import _fitted
from moesys.verify.diagnosis import FOLLOWS, MAIN, ROWS, Observation, Row, explain, explain_norm, fraction

AUX = "auxiliary loss"


def seen(main: list[float], aux: list[float] | None = None, **options: Any) -> Observation:
    """Returns an observation of two parts, whose micro-batches have these coefficients."""
    coefficients = {(MAIN, m): c for m, c in enumerate(main)} | {(AUX, m): c for m, c in enumerate(aux or ())}
    options = {"micro_batches": len(main) // 2, "tokens": [40]} | options
    return Observation(coefficients, **options)


CASES: dict[str, tuple[Observation, str]] = {
    "factor, 1": (seen([1, 1], [1, 1]), "1 × the reference: rounding only"),
    "factor, 0": (seen([0, 0]), "0 × the reference: nothing reaches it"),
    "factor, configured": (seen([0.5, 0.5], scope="all", loss_factor=0.5), "step divides by a configured number"),
    "factor": (seen([2, 2], [2, 2]), "2 × the reference: summed over 2 data ranks"),
    "loss_term": (seen([1, 1], [0.5, 0.5]), "auxiliary loss counts 1/2 ×: divid"),
    "loss_term, main": (seen([0, 0], [1, 1]), "main loss counts 0 ×: nothing reaches it"),
    "own_tokens": (
        seen([0, 2], [0, 2], part=1, alike=False),
        "only this rank's own tokens, 2 ×: not reduced over the 2 data ranks",
    ),
    "missing": (seen([1, 0, 1, 1], [1, 0, 1, 1]), "tokens of part 0 micro-batch 1 are missing"),
    "means": (
        seen([2 / 3, 2], [1, 1]),
        "means of each rank are averaged: a token's weight depends on its rank (2/3 to 2)",
    ),
    "accumulated": (seen([4, 2, 1, 4, 2, 1]), "reduced, not its increase"),
    "accumulated, scaled": (seen([1 / 8, 1 / 4, 1 / 2, 1 / 8, 1 / 4, 1 / 2]), "the accumulated buffer is scaled"),
}


def row_of(case: str) -> Row:
    """Returns the row that a case is for."""
    return next(row for row in ROWS if row.__name__ == case.partition(",")[0])


def test_every_row_has_a_case() -> None:
    assert {row_of(case) for case in CASES} == set(ROWS)


@pytest.mark.parametrize("case", CASES)
def test_a_row_names_its_cause_and_a_way_out(case: str) -> None:
    observation, words = CASES[case]
    assert words in row_of(case)(observation)
    cause = explain(observation)
    assert words in cause.words
    assert ROWS[row_of(case)] in cause.way_out


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row.__name__)
def test_no_other_row_gives_the_same_cause(row: Row) -> None:
    """A row that does not hold says nothing of what others are for."""
    for case, (observation, _) in CASES.items():
        assert row_of(case) is row or not row(observation), (row.__name__, case)


def test_what_no_coefficients_explain_follows_from_something_earlier() -> None:
    assert explain(seen([2, 2], residual=0.5)).words == FOLLOWS
    assert explain(Observation()).words == FOLLOWS


@pytest.mark.parametrize(
    ("value", "options", "words"),
    [
        (2.0, {}, "summed over 2 data ranks"),
        (0.5, {}, "divided by 2 data ranks once too often"),
        (4.0, {}, "multiplied by 2 data ranks twice"),
        (3.0, {"micro_batches": 3}, "not divided by the 3 micro-batches"),
        (1 / 3, {"micro_batches": 3}, "divided by 3 micro-batches once too often"),
        (4.0, {"ranks": 8, "parts": 2}, "summed over 4 ranks that share a batch"),
        (8.0, {"ranks": 8, "parts": 2}, "summed over 8 ranks"),
        (40.0, {}, "multiplied by the 40 tokens of the batch"),
        (0.5, {"scope": "all"}, "divided by 2 data ranks once too often"),
        (0.5, {"scope": "all", "loss_factor": 0.5}, "step divides by a configured number"),
        (1.7, {}, "a constant factor"),
    ],
)
def test_a_factor_is_named_by_the_size_that_it_equals(value: float, options: dict[str, Any], words: str) -> None:
    assert words in explain(seen([value, value], **{"micro_batches": 1, **options})).words


def test_a_factor_that_equals_two_sizes_names_both() -> None:
    words = explain(seen([2, 2, 2, 2])).words
    assert "2 data ranks" in words
    assert "2 micro-batches" in words


def test_means_of_micro_batches_are_named() -> None:
    words = explain(seen([60 / 40, 60 / 120, 60 / 40, 60 / 40])).words
    assert words == "means of each micro-batch are averaged: a token's weight depends on its micro-batch (1/2 to 3/2)"


def test_whether_ranks_are_alike_decides_between_missing_and_not_reduced() -> None:
    assert explain(seen([0, 2], part=1)).words == "tokens of part 0 micro-batch 0 are missing, the rest is 2 ×"
    assert explain(seen([0, 2], part=1, alike=False)).words.startswith("only this rank's own tokens, 2 ×")


def test_a_factor_on_experts_only_says_so() -> None:
    assert "on experts only" in explain(seen([2, 2], scope="experts")).words


def test_coefficients_that_no_row_knows_are_printed() -> None:
    assert explain(seen([1.5, 0.7], [1, 1])).words == (
        "coefficients main loss 0: 3/2, main loss 1: 0.7, auxiliary loss 0: 1, auxiliary loss 1: 1"
    )


def test_a_fit_recovers_coefficients_and_prefers_the_simplest() -> None:
    random = torch.Generator().manual_seed(0)
    vectors = {
        (term, m): torch.randn(5, 7, generator=random, dtype=torch.float64) for term in (MAIN, AUX) for m in range(2)
    }
    wanted = {(MAIN, 0): 1.0, (MAIN, 1): 2.0, (AUX, 0): 0.0, (AUX, 1): 0.25}
    got = sum(c * vectors[key] for key, c in wanted.items())
    fitted = _fitted(got, vectors, Observation())
    assert fitted.residual < 1e-12
    assert fitted.coefficients == pytest.approx(wanted, abs=1e-12)
    double = _fitted(2 * sum(vectors.values()), vectors, Observation())
    assert double.coefficients == pytest.approx(dict.fromkeys(vectors, 2.0))
    other = torch.randn(5, 7, generator=random, dtype=torch.float64)
    assert explain(_fitted(got + other, vectors, Observation())).words == FOLLOWS


def test_more_coefficients_than_numbers_are_not_fitted() -> None:
    vectors = {(MAIN, m): torch.tensor([1.0 + m, 3.0 - m]) for m in range(2)}
    assert explain(_fitted(torch.tensor([5.0, -3.0]), vectors, Observation())).words == FOLLOWS


def test_experts_have_coefficients_in_common() -> None:
    """Expert 0 has no tokens of some micro-batches, expert 1 none of others, and both lack those of the last one."""
    random = torch.Generator().manual_seed(0)
    vectors = {(MAIN, m): torch.randn(2, 5, 7, generator=random, dtype=torch.float64) for m in range(4)}
    vectors[MAIN, 1][0], vectors[MAIN, 2][1] = 0.0, 0.0
    fitted = _fitted(sum(vectors.values()) - vectors[MAIN, 3], vectors, Observation(micro_batches=2))
    assert explain(fitted).words == "tokens of part 1 micro-batch 1 are missing"


GRADIENTS = {"dense": 4.0, "layers.0.experts.up": 12.0}
# Each of two ranks has half of the experts, and all of the dense parameter.
OWN = [{"dense": 4.0, "layers.0.experts.up": 5.0}, {"dense": 4.0, "layers.0.experts.up": 7.0}]


@pytest.mark.parametrize(
    ("square", "words"),
    [
        (16.0, "right for its gradients"),
        (9.0, "of this rank's shards only"),
        (4.0, "without experts"),
        (20.0, "what ranks have alike counts once for each rank"),
        (28.0, "experts count once for each rank"),
        ((3.0 / 2 + 11.0**0.5 / 2) ** 2, "the mean of the ranks' own norms"),
        (5.5, "0.5863 × the reference"),
    ],
)
def test_a_wrong_norm_is_named(square: float, words: str) -> None:
    assert words in explain_norm(square**0.5, 4.0, GRADIENTS, OWN, 0).words


def test_experts_of_other_ranks_are_told_from_shards() -> None:
    own = [{"dense": 1.0, "layers.0.experts.up": 5.0}, {"dense": 3.0, "layers.0.experts.up": 7.0}]
    assert explain_norm(3.0, 4.0, GRADIENTS, own, 0).words == "experts of other ranks are missing"
    shards = explain_norm(6.0**0.5, 4.0, GRADIENTS, own, 0).words
    assert shards == "of this rank's shards only: not reduced over the ranks"


@pytest.mark.parametrize(
    ("value", "text"), [(2.0, "2"), (0.5, "1/2"), (0.75, "3/4"), (1 / 3, "1/3"), (0.123456, "0.12346"), (1e9, "1e+09")]
)
def test_numbers_are_fractions_where_they_are_simple(value: float, text: str) -> None:
    assert fraction(value) == text
