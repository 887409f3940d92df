"""What differs and what is rounding, in records made by hand: a verdict, a place, a note, or nothing."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from moesys.verify.comparison import FLOAT32_ROUNDING, NearTieError, TrainingComparison
from moesys.verify.recording import RunRecord, StepRecord
from moesys.verify.setup import SITUATIONS, CheckOptions, RecordingJob, Setup

SPREAD = 1e-6
JOB = RecordingJob(lambda world: Setup(None, None, None), CheckOptions(), SITUATIONS["plain"], torch.float32, Path())  # type: ignore[arg-type]


def numbers(seed: int, *shape: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def record(part: int, parts: int, *, reference: bool = False, error: float = 0.0) -> RunRecord:
    """Returns the record of a step of a model with one weight and a router; ``error``: of all gradients, relative."""
    step = StepRecord()
    for m, each in enumerate(range(parts) if reference else (part,)):
        scores = numbers(10 + each, 48, 8)
        step["passes"][m] = {"gate[0]": scores, "gate[1]": scores.topk(2).indices}
        step["output_gradients"][m] = {"gate[0]": numbers(20 + each, 48, 8)}
        step["contributions"][m] = {"weight": numbers(30 + each, 6, 5), "head": numbers(40 + each, 6, 5)}
    whole = {name: sum(numbers(base + p, 6, 5) for p in range(parts)) for name, base in (("weight", 30), ("head", 40))}
    whole = {name: tensor * (1 + error) for name, tensor in whole.items()}
    step |= {"gradient": whole, "clipped": dict(whole), "update": {n: -0.1 * t for n, t in whole.items()}}
    step["logged"]["loss"] = torch.tensor(2.0 * (1 + error), dtype=torch.float64)
    step["norm"]["norm"] = torch.tensor(3.0, dtype=torch.float64)
    step["squares"] = {name: float(tensor.square().sum()) for name, tensor in whole.items()}
    initial = {"weight": numbers(1, 6, 5), "head": numbers(2, 6, 5), "gate.bias": numbers(3, 8)}
    return RunRecord(part, parts, initial, initial, [step])


def compared(change: Any, dtype: torch.dtype = torch.float32, rank: int = 1) -> TrainingComparison:
    """Returns the comparison of two ranks, of which the step of one is changed."""
    ranks = [record(part, 2) for part in range(2)]
    change(ranks[rank].steps[0])
    spread = SPREAD if dtype == torch.float32 else 0.0
    reordered = record(0, 2, reference=True, error=spread)
    comparison = TrainingComparison(replace(JOB, dtype=dtype), record(0, 2, reference=True), reordered, {}, ranks)
    comparison.run()
    return comparison


def scaled(kind: str, name: str, factor: float) -> Any:
    def change(step: StepRecord) -> None:
        step[kind][name] = step[kind][name] * factor

    return change


def test_equal_records_differ_nowhere() -> None:
    comparison = compared(lambda step: None)
    assert comparison.findings == []
    assert comparison.compared["parameters"] == {"weight", "head"}
    assert comparison.compared["outputs"] == {"gate[0]", "gate[1]"}


@pytest.mark.parametrize(
    ("stage", "name"),
    [*((s, "weight") for s in ("gradient", "clipped", "update")), ("logged", "loss"), ("norm", "norm")],
)
def test_the_tolerance_is_32_times_the_reference_s_own_rounding(stage: str, name: str) -> None:
    assert [finding.stage for finding in compared(scaled(stage, name, 1 + 40 * SPREAD)).findings] == [stage]
    assert compared(scaled(stage, name, 1 + 25 * SPREAD)).findings == []


def test_what_float32_rounds_in_float64_is_a_note() -> None:
    assert 64 * torch.finfo(torch.float32).eps / 2 == FLOAT32_ROUNDING
    comparison = compared(scaled("gradient", "weight", 1 + FLOAT32_ROUNDING / 2), torch.float64)
    assert (comparison.findings, comparison.compared["rounded"]) == ([], {"weight"})
    wrong = compared(scaled("gradient", "weight", 1 + 2 * FLOAT32_ROUNDING), torch.float64)
    assert [finding.stage for finding in wrong.findings] == ["gradient"]


def test_other_choices_are_a_verdict_unless_the_scores_are_a_near_tie() -> None:
    def other(step: StepRecord) -> None:
        step["passes"][0]["gate[1]"][5] = torch.tensor([0, 1]) + step["passes"][0]["gate[0]"][5].argsort()[0] % 2

    assert [finding.stage for finding in compared(other).findings] == ["choices"]

    def swapped(step: StepRecord) -> None:
        """Exchanges the last choice of a token for an expert whose score is almost the same."""
        scores, choices = step["passes"][0]["gate[0]"], step["passes"][0]["gate[1]"]
        third = scores[7].argsort(descending=True)[2]
        assert abs(float(scores[7, third] - scores[7, choices[7, 1]])) < 0.5
        choices[7, 1] = third

    assert [finding.stage for finding in compared(swapped).findings] == ["choices"]


def test_a_near_tie_is_no_fault() -> None:
    ranks = [record(part, 2) for part in range(2)]
    reference, reordered = record(0, 2, reference=True), record(0, 2, reference=True, error=SPREAD)
    scores = reference.steps[0]["passes"][1]["gate[0]"]
    order = scores[7].argsort(descending=True)
    scores[7, order[2]] = scores[7, order[1]] * (1 - 1e-7)
    ranks[1].steps[0]["passes"][0]["gate[0]"].copy_(scores)
    ranks[1].steps[0]["passes"][0]["gate[1]"][7, 1] = order[2]
    with pytest.raises(NearTieError, match=r"1 tokens of gate\[1\] on rank 1"):
        TrainingComparison(JOB, reference, reordered, {}, ranks).run()


@pytest.mark.parametrize(("spread", "is_sum"), [(1e-5, True), (1e-3, False)])
def test_a_reference_that_depends_on_the_order_of_micro_batches_is_no_sum(spread: float, is_sum: bool) -> None:
    ranks = [record(part, 2) for part in range(2)]
    reordered = record(0, 2, reference=True, error=spread)
    assert TrainingComparison(JOB, record(0, 2, reference=True), reordered, {}, ranks).is_sum == is_sum


def test_the_order_of_choices_does_not_matter() -> None:
    assert (
        compared(lambda step: step["passes"][0]["gate[1]"].copy_(step["passes"][0]["gate[1]"].flip(1))).findings == []
    )


def test_outputs_and_their_gradients_alone_are_no_fault() -> None:
    assert compared(lambda step: step["passes"][0]["gate[0]"].mul_(2)).findings == []

    def wrong_after(step: StepRecord) -> None:
        step["passes"][0]["gate[0]"].mul_(2)
        step["gradient"]["weight"] = step["gradient"]["weight"] + numbers(99, 6, 5)

    stages = [finding.stage for finding in compared(wrong_after).findings]
    assert stages == ["output", "gradient"]


def test_a_recomputation_that_chooses_anew_is_a_verdict() -> None:
    [finding] = compared(lambda step: step["broken"].setdefault("choices", "gate[1]")).findings
    assert (finding.stage, finding.tensor, finding.ranks) == ("choices", "gate[1]", (1,))


def test_other_weights_end_the_comparison() -> None:
    ranks = [record(part, 2) for part in range(2)]
    ranks[1].initial = {**ranks[1].initial, "gate.bias": ranks[1].initial["gate.bias"] + 1}
    reference, reordered = record(0, 2, reference=True), record(0, 2, reference=True, error=SPREAD)
    [finding] = TrainingComparison(JOB, reference, reordered, {}, ranks).run()
    assert (finding.stage, finding.tensor, finding.cause) == ("weights", "gate.bias", "starts from other values")


@pytest.mark.parametrize(
    ("change", "stage", "words"),
    [
        (scaled("gradient", "weight", 2.0), "gradient", "rank 1"),
        (
            lambda step: step["clipped"].update(step["gradient"] | {"weight": 3 * step["gradient"]["weight"]}),
            "clipped",
            "3 ×",
        ),
        (scaled("update", "head", 2.0), "update", "2 × the reference; ranks differ"),
        (lambda step: step["absent"].update(weight=True) or step["gradient"].pop("weight"), "gradient", "None"),
    ],
)
def test_a_difference_has_its_stage(change: Any, stage: str, words: str) -> None:
    finding = compared(change).findings[0]
    assert finding.stage == stage
    assert words in finding.cause or finding.ranks == (1,)


def test_a_clip_without_effect_is_named() -> None:
    ranks = [record(part, 2) for part in range(2)]
    reference, reordered = record(0, 2, reference=True), record(0, 2, reference=True, error=SPREAD)
    for run in (reference, reordered):
        run.steps[0]["clipped"] = {name: 0.25 * tensor for name, tensor in run.steps[0]["clipped"].items()}
    [finding] = TrainingComparison(JOB, reference, reordered, {}, ranks).run()
    assert (finding.stage, finding.cause) == ("clipped", "not scaled: clipping has no effect on it")
