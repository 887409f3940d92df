"""Each row of the table of the diagnosis, from coefficients made by hand; and the candidates of a wrong norm."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from moesys.verify.comparison import _fitted, merged_observation
from moesys.verify.diagnosis import (
    ALONE,
    FOLLOWS,
    MAIN,
    TOGETHER,
    DiagnosisRow,
    Observation,
    explain,
    explain_norm,
    fraction,
)

AUX = "auxiliary loss"


def seen(main: list[float], aux: list[float] | None = None, **options: Any) -> Observation:
    """Returns an observation of two parts, whose micro-batches have these coefficients."""
    coefficients = {(MAIN, m): c for m, c in enumerate(main)} | {(AUX, m): c for m, c in enumerate(aux or ())}
    options = {"micro_batches": len(main) // 2, "tokens": [40]} | options
    return Observation(coefficients, **options)


ROWS: dict[str, tuple[Observation, str]] = {
    "the gradient is None on some ranks": (seen([1, 1], absent=True), "None"),
    "rows of experts match other experts": (seen([1, 1], permutation=[1, 0]), "experts permuted: [1, 0]"),
    "the halves of a tensor are exchanged": (seen([1, 1], halves=True), "gate and up"),
    "the ranks that share a batch sum up to the reference": (seen([1, 1], sums_up=True), "not summed over the ranks"),
    "the residual is large": (seen([2, 2], residual=0.5), FOLLOWS),
    "all coefficients are 1": (seen([1, 1], [1, 1]), "rounding only"),
    "all coefficients are 0": (seen([0, 0]), "nothing reaches it"),
    "all coefficients and the logged loss are 1/P": (
        seen([0.5, 0.5], scope="all", loss_factor=0.5),
        "step divides by a configured number",
    ),
    "all coefficients are the same": (seen([2, 2], [2, 2]), "2 × the reference: summed over 2 data ranks"),
    "a loss term has another coefficient, the rest 1": (seen([1, 1], [0.5, 0.5]), "auxiliary loss counts 1/2 ×: divid"),
    "the main loss has 0, other terms 1": (seen([0, 0], [1, 1]), "main loss has no gradient here"),
    "only the rank's own part has coefficients, and ranks differ": (
        seen([0, 2], [0, 2], part=1, alike=False),
        "only this rank's own tokens, 2 ×: not reduced over the 2 data ranks",
    ),
    "some parts or micro-batches have 0, and ranks are alike": (
        seen([1, 0, 1, 1], [1, 0, 1, 1]),
        "tokens of part 0 micro-batch 1 are missing",
    ),
    "parts, or micro-batches, have coefficients N / (P · n)": (
        seen([2 / 3, 2], [1, 1]),
        "means of each rank are averaged: a token's weight depends on its rank (2/3 to 2)",
    ),
    "the coefficient of micro-batch m is R^(A-1-m)": (seen([4, 2, 1, 4, 2, 1]), "reduced, not its increase"),
    "the coefficient of micro-batch m is 1 / R^(A-m)": (
        seen([1 / 8, 1 / 4, 1 / 2, 1 / 8, 1 / 4, 1 / 2]),
        "the accumulated buffer is scaled",
    ),
}


def test_every_row_has_a_case() -> None:
    assert list(ROWS) == [row.observed for row in (*ALONE, *TOGETHER)]


@pytest.mark.parametrize("row", [*ALONE, *TOGETHER], ids=lambda row: row.observed)
def test_a_row_names_its_cause_and_a_way_out(row: DiagnosisRow) -> None:
    observation, words = ROWS[row.observed]
    cause = explain(observation)
    assert words in cause.words
    assert row.way_out in cause.way_out


@pytest.mark.parametrize("row", [*ALONE, *TOGETHER], ids=lambda row: row.observed)
def test_no_other_row_gives_the_same_cause(row: DiagnosisRow) -> None:
    """A row that does not hold says nothing of what others are for."""
    for observed, (observation, _) in ROWS.items():
        if observed != row.observed and row in TOGETHER and observed in {each.observed for each in TOGETHER}:
            assert not row.means(observation), (row.observed, observed)


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
        (1.7, {}, "a constant factor"),
    ],
)
def test_a_factor_is_named_by_the_size_that_it_equals(value: float, options: dict[str, int], words: str) -> None:
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


def test_experts_complete_each_others_coefficients() -> None:
    nan = float("nan")
    merged = merged_observation([seen([1, nan, 1, 0]), seen([nan, 0, 1, 0])])
    assert merged is not None
    assert explain(merged).words == "tokens of part 0 micro-batch 1, part 1 micro-batch 1 are missing"
    assert merged_observation([seen([1, 0]), seen([1, 2])]) is None


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


@pytest.mark.parametrize(
    ("value", "text"), [(2.0, "2"), (0.5, "1/2"), (0.75, "3/4"), (1 / 3, "1/3"), (0.123456, "0.12346"), (1e9, "1e+09")]
)
def test_numbers_are_fractions_where_they_are_simple(value: float, text: str) -> None:
    assert fraction(value) == text
