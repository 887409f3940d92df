"""What differs and what is rounding, in records made by hand: a verdict, a place, a note, or nothing."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import assert_equal
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from moesys.verify.comparison import Finding, NearTieError, TrainingComparison, rows_of_tokens
from moesys.verify.recording import RunRecord, StepRecord, TrainingRecorder, _batches
from moesys.verify.runs import CheckReport, SituationResult, _masks
from moesys.verify.setup import SITUATIONS, CheckOptions, RecordingJob, Setup

SPREAD = 1e-6
JOB = RecordingJob(lambda world: Setup(None, None, None), CheckOptions(), SITUATIONS["plain"], torch.float32, Path())  # type: ignore[arg-type]


# The parameters of the model: their seeds, and their shapes.
PARAMETERS = {"weight": (30, (6, 5)), "head": (40, (6, 5)), "mlp.experts.up": (70, (4, 6, 5))}


def numbers(seed: int, *shape: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def record(part: int, parts: int, *, reference: bool = False, error: float = 0.0) -> RunRecord:
    """Returns the record of a step of a model with three parameters and a router; ``error``: of gradients, relative."""
    step = StepRecord()
    for m, each in enumerate(range(parts) if reference else (part,)):
        scores = numbers(10 + each, 48, 8)
        step["passes"][m] = {"gate[0]": scores, "gate[1]": scores.topk(2).indices}
        step["output_gradients"][m] = {"gate[0]": numbers(20 + each, 48, 8)}
        step["contributions"][m] = {name: numbers(seed + each, *shape) for name, (seed, shape) in PARAMETERS.items()}
        step["evaluation"][f"loss of evaluate, part {each}"] = torch.tensor(1.0 + each, dtype=torch.float64)
    whole = {name: sum(numbers(seed + p, *shape) for p in range(parts)) for name, (seed, shape) in PARAMETERS.items()}
    whole = {name: tensor * (1 + error) for name, tensor in whole.items()}
    step |= {"gradient": whole, "clipped": dict(whole), "update": {n: -0.1 * t for n, t in whole.items()}}
    step["logged"]["loss"] = torch.tensor(2.0 * (1 + error), dtype=torch.float64)
    step["norm"]["norm"] = torch.tensor(3.0, dtype=torch.float64)
    step["squares"] = {name: float(tensor.square().sum()) for name, tensor in whole.items()}
    step["buffer"]["gate.bias"] = numbers(4, 8)
    initial = {"weight": numbers(1, 6, 5), "head": numbers(2, 6, 5), "gate.bias": numbers(3, 8)}
    return RunRecord(part, parts, initial, initial, [step], "", [], {})


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
    assert comparison.compared["parameters"] == set(PARAMETERS)
    assert comparison.compared["outputs"] == {"gate[0]", "gate[1]"}


@pytest.mark.parametrize(
    ("stage", "name"),
    [*((s, "weight") for s in ("gradient", "clipped")), ("logged", "loss"), ("norm", "norm")],
)
def test_the_tolerance_is_32_times_the_reference_s_own_rounding(stage: str, name: str) -> None:
    assert [finding.stage for finding in compared(scaled(stage, name, 1 + 40 * SPREAD)).findings] == [stage]
    assert compared(scaled(stage, name, 1 + 25 * SPREAD)).findings == []


def test_an_update_in_float32_has_more_room_as_optimizers_enlarge_the_rounding_of_elements_near_zero() -> None:
    assert compared(scaled("update", "weight", 1 + 9e-5)).findings == []
    for error, dtype in ((1.1e-4, torch.float32), (9e-5, torch.float64)):
        found = compared(scaled("update", "weight", 1 + error), dtype).findings
        assert [finding.stage for finding in found] == ["update"]


def test_what_float32_rounds_in_float64_is_a_note() -> None:
    comparison = compared(scaled("gradient", "weight", 1 + 32 * 2.0**-24), torch.float64)
    assert (comparison.findings, comparison.compared["rounded"]) == ([], {"weight"})
    wrong = compared(scaled("gradient", "weight", 1 + 128 * 2.0**-24), torch.float64)
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
        (scaled("gradient", "weight", 2.0), "gradient", "2 × the reference: summed over 2 data ranks"),
        (
            lambda step: step["gradient"]["mlp.experts.up"][2].mul_(2.0),
            "gradient",
            "experts 2: 2 × the reference on experts only: summed over 2 data ranks",
        ),
        (
            lambda step: step["gradient"].update({"mlp.experts.up": step["gradient"]["mlp.experts.up"].roll(1, 0)}),
            "gradient",
            "experts permuted: [3, 0, 1, 2]",
        ),
        (
            lambda step: step["gradient"].update(weight=step["gradient"]["weight"].roll(3, 0)),
            "gradient",
            "exchanged halves of the tensor",
        ),
        (
            lambda step: step["clipped"].update(step["gradient"] | {"weight": 3 * step["gradient"]["weight"]}),
            "clipped",
            "3 ×",
        ),
        (scaled("update", "head", 2.0), "update", "2 × the reference; ranks differ"),
        (lambda step: step["absent"].update(weight=True) or step["gradient"].pop("weight"), "gradient", "None"),
        (scaled("buffer", "gate.bias", 2.0), "buffer", "moved once for each of 2 ranks"),
        (scaled("evaluation", "loss of evaluate, part 1", 1.5), "evaluation", "3, reference 2: 3/2 ×"),
    ],
)
def test_a_difference_has_its_stage(change: Any, stage: str, words: str) -> None:
    finding = compared(change).findings[0]
    assert (finding.stage, finding.ranks) == (stage, (1,))
    assert words in finding.cause


def test_a_clip_without_effect_is_named() -> None:
    ranks = [record(part, 2) for part in range(2)]
    reference, reordered = record(0, 2, reference=True), record(0, 2, reference=True, error=SPREAD)
    for run in (reference, reordered):
        run.steps[0]["clipped"] = {name: 0.25 * tensor for name, tensor in run.steps[0]["clipped"].items()}
    [finding] = TrainingComparison(JOB, reference, reordered, {}, ranks).run()
    assert (finding.stage, finding.cause) == ("clipped", "not scaled: clipping has no effect on it")


def test_loss_terms_have_coefficients_of_their_own() -> None:
    """Each of two terms is what the reference loses without it, whatever the other one is."""
    terms = {"auxiliary loss": 50, "z-loss": 60}

    def less(base: int) -> RunRecord:
        run = record(0, 2, reference=True)
        for m, contributions in run.steps[0]["contributions"].items():
            contributions["weight"] = contributions["weight"] - numbers(base + m, 6, 5)
        return run

    ranks = [record(part, 2) for part in range(2)]
    for run in ranks:
        weight = run.steps[0]["gradient"]["weight"]
        run.steps[0]["gradient"]["weight"] = weight - sum(numbers(60 + m, 6, 5) for m in range(2)) / 2
    reference, reordered = record(0, 2, reference=True), record(0, 2, reference=True, error=SPREAD)
    without = {term: less(base) for term, base in terms.items()}
    finding = TrainingComparison(JOB, reference, reordered, without, ranks).run()[0]
    assert (finding.stage, finding.tensor) == ("gradient", "weight")
    assert finding.cause == "z-loss counts 1/2 ×: divided by 2 data ranks once too often"


@pytest.mark.parametrize("shares", [False, True])
def test_masks_are_those_of_the_whole_model(shares: bool) -> None:
    """Inside of the model, ranks that share a batch have parts of tensors, which differ."""

    def masked(rank: int, seed: int) -> RunRecord:
        run = record(0 if shares else rank, 1 if shares else 2)
        run.drawn_by = "dropout"
        run.steps[0]["passes"][0] = {"q_proj[0]": numbers(rank, 4, 8), "model[0]": numbers(seed, 4, 8)}
        # Choices of experts may be alike whatever the masks are.
        run.steps[0]["passes"][0]["model[1]"] = torch.arange(4)
        return run

    findings = {alike: list(_masks([masked(0, 7), masked(1, 7 if alike else 8)])) for alike in (True, False)}
    assert findings[shares] == []
    [finding] = findings[not shares]
    assert (finding.tensor, finding.ranks) == ("model[0]", (0, 1))
    assert ("draw different" if shares else "draw equal") in finding.cause


def test_each_expert_has_factors_of_its_own() -> None:
    def change(step: StepRecord) -> None:
        experts = step["gradient"]["mlp.experts.up"]
        experts[1], experts[3] = 2 * experts[1], experts[3] / 2

    [finding] = compared(change).findings
    assert finding.cause == (
        "experts 1: 2 × the reference on experts only: summed over 2 data ranks instead of averaged, or counted twice"
        " / experts 3: 1/2 × the reference on experts only: divided by 2 data ranks once too often"
    )


def test_ranks_that_share_a_batch_have_parts_of_a_sum() -> None:
    ranks = [record(0, 1) for _ in range(2)]
    for run, sign in zip(ranks, (1, -1), strict=True):
        [step] = run.steps
        step["gradient"]["weight"] = step["gradient"]["weight"] / 2 + sign * numbers(90, 6, 5)
        step["output_gradients"][0]["gate[0]"] = step["output_gradients"][0]["gate[0]"] / 2 + sign * numbers(91, 48, 8)
    reference, reordered = record(0, 1, reference=True), record(0, 1, reference=True, error=SPREAD)
    place, finding = TrainingComparison(JOB, reference, reordered, {}, ranks).run()
    assert (place.stage, place.tensor, place.cause) == ("backward", "gate[0]", "each rank has a part of a sum")
    assert (finding.stage, finding.tensor, finding.cause) == ("gradient", "weight", "each rank has a part of a sum")


def test_the_first_step_that_differs_ends_the_comparison() -> None:
    ranks, references = [record(part, 2) for part in range(2)], [record(0, 2, reference=True) for _ in range(2)]
    for part, rank in enumerate(ranks):
        rank.steps += record(part, 2).steps
    for reference in references:
        reference.steps += record(0, 2, reference=True).steps
    ranks[1].steps[1]["gradient"]["weight"] *= 2
    comparison = TrainingComparison(replace(JOB, steps=2), *references, {}, ranks)
    assert [finding.tensor for finding in comparison.run()] == ["step 1: weight"]
    ranks[1].steps[0]["gradient"]["head"] = 3 * ranks[1].steps[0]["gradient"]["head"]
    comparison = TrainingComparison(replace(JOB, steps=2), *references, {}, ranks)
    assert [finding.tensor for finding in comparison.run()] == ["head"]


@pytest.mark.parametrize(
    ("factors", "by_place", "words"),
    [
        ((1.0, 1.0), False, "every token has the same weight, and no term depends on the division"),
        ((0.5, 1.5), True, "averaged: a token has 2/3 to 2 times its weight in the global batch, by its micro-batch"),
        (None, False, "the loss is one of each micro-batch: gradients differ by up to"),
    ],
)
def test_the_weights_of_tokens_are_those_of_the_whole_batch(
    factors: tuple[float, float] | None, by_place: bool, words: str
) -> None:
    whole = record(0, 2, reference=True)
    for name, (seed, shape) in PARAMETERS.items():
        parts = [numbers(seed + m, *shape) for m in range(2)]
        other = numbers(95, *shape)
        gradient = sum(f * part for f, part in zip(factors, parts, strict=True)) if factors else sum(parts) + other
        whole.steps[0]["gradient"][name] = gradient
    said, by_its_place = compared(lambda step: None).definition(whole)
    assert words in said
    assert by_its_place == by_place


def test_rows_of_padding_are_not_compared() -> None:
    mask = torch.tensor([[True, True, False], [True, False, False]])
    tokens_BSH = numbers(1, 2, 3, 4)
    rows = tokens_BSH.flatten(0, 1)[[0, 1, 3]]
    assert_equal(rows_of_tokens(tokens_BSH, mask), rows)
    assert_equal(rows_of_tokens(tokens_BSH.flatten(0, 1), mask), rows)
    assert rows_of_tokens(numbers(2, 2, 4, 3, 3), mask) is None
    assert_equal(rows_of_tokens(numbers(2, 2, 4, 3, 3), mask | True), numbers(2, 2, 4, 3, 3))


def test_the_reference_is_reordered_in_its_rows_and_its_micro_batches() -> None:
    job = replace(JOB, situation=SITUATIONS["padding"], parts=2)
    batches, reordered = _batches(job, 0, 0), _batches(replace(job, order="reordered"), 0, 0)
    assert len(batches) == 4
    for batch, other in zip(batches, reversed(reordered), strict=True):
        assert_equal({name: tensor.flip(0) for name, tensor in batch.items()}, other)
    [whole] = _batches(replace(job, order="whole"), 0, 0)
    assert_equal(whole, {name: torch.cat([batch[name] for batch in batches]) for name in whole})


class Choosing(nn.Module):
    """A router that chooses ``again`` experts further when it is called again."""

    def __init__(self, again: int) -> None:
        super().__init__()
        self.again, self.calls = again, 0

    def forward(self, scores_TE: Tensor) -> tuple[Tensor, Tensor]:
        self.calls += 1
        choices_TK = (scores_TE.topk(2).indices + (self.calls > 1) * self.again) % scores_TE.shape[1]
        return scores_TE.sigmoid(), choices_TK


class Recomputing(nn.Module):
    def __init__(self, again: int) -> None:
        super().__init__()
        self.weight, self.router = nn.Parameter(torch.ones(8)), Choosing(again)

    def forward(self, scores_TE: Tensor) -> Tensor:
        # A recomputation ends with the last tensor that backward needs, which is behind the router.
        return checkpoint(
            lambda scores_TE: self.router(scores_TE)[0].exp(), scores_TE * self.weight, use_reentrant=False
        )


@pytest.mark.parametrize(("again", "broken"), [(0, {}), (1, {"choices": "router[1]"})])
def test_a_recomputation_must_repeat_the_choices_of_its_forward(again: int, broken: dict[str, str]) -> None:
    model = Recomputing(again)
    recorder = TrainingRecorder(Setup(model, lambda batches: {}, None), contributions=False)
    model(numbers(1, 6, 8).float()).sum().backward()
    assert model.router.calls == 2
    assert recorder.step["broken"] == broken


RIGHT, WRONG = SituationResult("plain"), SituationResult("uneven", [Finding("logged", "loss", (0,), 1.0, "2 ×")])
HALF = SituationResult("uneven", [Finding("definition", "loss", (), 1.0, "means")], not_checked="it is no sum")
NOT_CHECKED = SituationResult("tied", not_checked="the check does not list tied in supports")


@pytest.mark.parametrize(
    ("situations", "error", "code", "words"),
    [
        ([RIGHT, NOT_CHECKED], "", 0, "right in 1 situation,"),
        ([RIGHT, WRONG, NOT_CHECKED], "", 1, "WRONG in 1 of 2 situations,"),
        ([RIGHT, WRONG], "rank 1 hangs", 1, "WRONG in 1 of 2 situations,"),
        ([RIGHT, HALF], "", 1, "WRONG in 1 of 2 situations,"),
        ([RIGHT], "rank 1 hangs", 2, "could not be checked,"),
        ([NOT_CHECKED], "", 2, "could not be checked,"),
    ],
)
def test_what_is_not_checked_is_never_right(situations: list[Any], error: str, code: int, words: str) -> None:
    report = CheckReport("check", 2, "float64", situations, error)
    assert report.exit_code == code
    assert str(report).startswith(f"check, 2 ranks, float64: {words} 0 s")
