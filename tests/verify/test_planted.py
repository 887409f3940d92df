"""Planted faults are found, named and placed, by ranks that are processes of their own."""

from __future__ import annotations

from functools import partial

import pytest
from held import HELD, held, means
from planted import FAULTS

from moesys import verify

ALWAYS = (
    *(
        "gradients summed",
        "norm misses experts",
        "bias in each micro-batch",
        "counts doubled by recomputation",
        "bias lost on resume",
    ),
    *("evaluation in training mode", "equal masks"),
)


@pytest.mark.timeout(600)
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=() if name in ALWAYS else pytest.mark.slow) for name in FAULTS]
)
def test_a_fault_is_found_named_and_placed(name: str) -> None:
    fault = FAULTS[name]
    report = verify.run(fault.build(name), situations=[fault.situation])
    assert report.exit_code == 1, report
    assert fault.first in report.findings[0].tensor, report
    assert any(fault.words in finding.cause for finding in report.findings), report
    only = "In float64 only" if name == "expert gradients divided twice" else "Also in float32"
    assert report.situations[0].in_float32.startswith(only), report
    with pytest.raises(AssertionError, match="WRONG in 1 of 1 situation"):
        report.require_right()


@pytest.mark.filterwarnings("ignore")
def test_a_definition_that_is_not_the_expected_one_is_a_fault() -> None:
    finding = verify.run(means, situations=["uneven"]).findings[0]
    assert (finding.stage, finding.tensor) == ("definition", "loss")
    assert "the means of micro-batches or of ranks are averaged" in finding.cause


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", HELD)
def test_a_fault_that_was_planted_later_is_found(name: str) -> None:
    situation, words, first = HELD[name]
    report = verify.run(partial(held, fault=name), situations=[situation])
    assert report.exit_code == 1, report
    assert first in report.findings[0].tensor, report
    assert any(words in finding.cause for finding in report.findings), report
