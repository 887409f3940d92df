"""The comparison of ranks with the reference, stage by stage in the order of a step.

R ranks, P parts, A micro-batches of a part.
"""

from __future__ import annotations

import math
import re
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from operator import itemgetter
from statistics import median
from typing import Any

import torch
from torch import Tensor

from moesys.verify.diagnosis import FOUND, MAIN, Cause, Observation, error_of, explain, explain_norm, fit, fraction
from moesys.verify.recording import Named, RunRecord, StepRecord
from moesys.verify.setup import NO_LABEL, Batch, RecordingJob, batch_of, count_labels, is_of_experts

TENSORS = ("logged", "gradient", "norm", "clipped", "update", "buffer", "evaluation")
# The rules that each process must keep by itself, and how it breaks them.
RULES = {"choices": "a recomputation chose other experts than the forward", "evaluation": "evaluation changes it"}
WAYS_OUT = {
    "weights": "Draw or load the same weights on all ranks, such as by moesys.verify.draw.",
    "choices": "Save the choices in the forward, and use them in the recomputation.",
    "clipped": "Check that clipping scales the gradients in place that the optimizer reads.",
    "update": "Compare the options, the state and the parameter groups of the optimizer on ranks and in one process.",
    "buffer": "Move biases once in a step, by the counts of all ranks, without evaluations and recomputations.",
    "evaluation": "Count and move biases only while the model trains, and compare the loss with that of eval().",
}


@dataclass(frozen=True)
class Finding:
    """One difference. tensor: where, and how many others have the same cause. error: relative."""

    stage: str
    tensor: str
    ranks: tuple[int, ...]
    error: float
    cause: str
    way_out: str = ""


class NearTieError(Exception):
    """Tokens choose other experts at a near tie, so that nothing after it can be compared."""


# An output that differs, or its gradient: its place in a pass, its name, the stage, the rank, the error, and its cause.
_Place = tuple[int, str, str, int, float, Callable[[], Cause]]


def rows_of_tokens(tensor: Tensor | None, mask: Tensor) -> Tensor | None:
    """Returns the rows of tokens that are no padding, of [B, S, ...] or [B · S, ...]; None for another layout of a
    micro-batch with padding, where nobody knows which they are.
    """
    if tensor is None:
        return None
    by_token = tensor.shape[:2] == mask.shape
    rows = tensor.flatten(0, 1) if by_token else tensor
    if bool(mask.all()):
        return rows
    return rows[mask.flatten()] if by_token or (rows.dim() > 1 and len(rows) == mask.numel()) else None


class Tolerances:
    """What may differ in one step by rounding: 32 times what the reference itself does with sums in another order."""

    def __init__(self, right: StepRecord, reordered: StepRecord, dtype: torch.dtype) -> None:
        # A step that rounds to float32 somewhere may differ by 64 times its rounding.
        self.least, self.note_below = (1e-10, 64 * 2.0**-24) if dtype == torch.float64 else (1e-6, 0.0)
        self.scales, self._spreads = dict[str, float](), dict[str, dict[str, float]]()
        for stage in TENSORS:
            a, b = right[stage], reordered[stage]
            self.scales[stage] = 1e-6 * math.hypot(*(float(tensor.double().norm()) for tensor in a.values()))
            self._spreads[stage] = {n: error_of(b[n], a[n], self.scales[stage]) for n in a if n in b}
        gradients = list(self._spreads["gradient"].values()) or [0.0]
        self.spread, self.largest = median(gradients), max(32 * max(gradients), self.least)

    def of(self, stage: str, name: str) -> float:
        """Returns the largest relative error that is rounding."""
        spreads = self._spreads[stage]
        least = self.largest if stage in ("logged", "norm", "evaluation") else self.least
        # A clip may return float32, and an optimizer divides elements near zero, and their rounding, by their own size.
        enlarged = {"gradient": 0.0, "update": 1e-6 if self.note_below else 1e-4}.get(stage, 1e-6)
        return max(32 * spreads.get(name, 0.0), 32 * median(spreads.values() or [0.0]), least, enlarged)


class TrainingComparison:
    """Compares the records of ranks with those of the reference; ``run`` returns the findings, in order.

    without: the reference without each loss term. is_sum: False if the reference itself depends on the order of
    micro-batches by more than rounding. compared: names of parameters and outputs that were compared, of
    outputs that were skipped, and of tensors that differ by float32's rounding.
    """

    def __init__(
        self, job: RecordingJob, right: RunRecord, reordered: RunRecord, without: dict[str, RunRecord], ranks: Any
    ) -> None:
        self.reference, self.ranks, self.without, self._job = right, list[RunRecord](ranks), without, job
        self.parts, self.micro_batches = self.ranks[0].parts, job.situation.micro_batches
        self.tolerances = [Tolerances(a, b, job.dtype) for a, b in zip(right.steps, reordered.steps, strict=True)]
        self.compared, self.findings = defaultdict[str, set[str]](set), list[Finding]()
        # In right references no gradient moved by more than 1e-13 in float64, and 1e-5 in float32.
        self.is_sum = self.tolerances[0].largest < 32 * (1e-9 if job.dtype == torch.float64 else 3e-4)
        self._begin(0)

    def _begin(self, step: int) -> None:
        self._step, self._tolerance, self._right = step, self.tolerances[step], self.reference.steps[step]
        self._got = [each.steps[step] for each in self.ranks]

    def _batch(self, part: int, micro_batch: int) -> Batch:
        return batch_of(self._job.options, self._job.situation, part, micro_batch, self._step)

    def without_main_gradient(self) -> list[str]:
        """Returns the parameters of the reference whose gradient comes from other terms than the main loss, or none."""
        self._begin(0)
        main = {name: self._terms("gradient", name)[MAIN] for name in self._right["gradient"]}
        return [name for name, m in main.items() if float(m.norm()) <= self._tolerance.scales["gradient"]]

    def definition(self, whole: RunRecord) -> tuple[str, bool]:
        """Returns what the user's loss means, in words, and whether the weight of a token depends on where it is.

        whole: the reference with all rows as one micro-batch.
        """
        right, scale = whole.steps[0]["gradient"], 1e3 * self._tolerance.scales["gradient"]
        error = max(error_of(self._right["gradient"][name], gradient, scale) for name, gradient in right.items())
        if error <= max(self._tolerance.largest, 1e-6):
            return "every token has the same weight, and no term depends on the division into micro-batches", False
        # The weights of tokens are those of the gradient that other terms reach least.
        fits = [_fitted(gradient, self._contributions(name), Observation()) for name, gradient in right.items()]
        best = min(fits, key=lambda fitted: fitted.residual)
        weights = [1 / c for (term, _), c in best.coefficients.items() if term == MAIN and c]
        if best.residual < 1e-3 and weights and max(abs(weight - 1) for weight in weights) > 1e-3:
            span = f"{fraction(min(weights))} to {fraction(max(weights))} times its weight in the global batch"
            return f"the means of micro-batches or of ranks are averaged: a token has {span}, by its micro-batch", True
        words = f"the {' and '.join(self.without) or 'loss'} is one of each micro-batch"
        return f"{words}: gradients differ by up to {100 * error:.2g} % from that of all", False

    def run(self) -> list[Finding]:
        for rank, got in enumerate(self.ranks):
            if found := first_difference(self.reference.initial, got.initial):
                self._add("weights", found[0], [rank], 1.0, Cause(f"starts from {found[1].words}", found[1].way_out))
                return self.findings
        for step in range(len(self.reference.steps)):
            if not self.findings:
                self._compare(step)
            # Places alone are no fault: a right model may have a part of a sum there.
            self.findings = [] if self._is_right else self.findings
        return self.findings

    @property
    def _is_right(self) -> bool:
        # Outputs and their gradients say where something goes wrong, and are no verdict.
        return all(finding.stage in ("output", "backward") for finding in self.findings)

    def _compare(self, step: int) -> None:
        self._begin(step)
        for rank, mine in enumerate(self._got):
            for rule, name in mine["broken"].items():
                self._add(rule, name, [rank], 1.0, Cause(RULES[rule], WAYS_OUT[rule]))
        self._places(self._outputs())
        self._tensors("logged")
        self._places(self._output_gradients() if not step else iter(()))
        for stage in TENSORS[1:]:
            if stage in ("gradient", "norm") or self._is_right:
                self._tensors(stage)

    def _add(self, stage: str, tensor: str, ranks: Sequence[int], error: float, cause: Cause) -> None:
        tensor = f"step {self._step}: {tensor}" if self._step else tensor
        self.findings.append(Finding(stage, tensor, tuple(sorted(set(ranks))), error, cause.words, cause.way_out))

    def _is_wrong(self, name: str, error: float, tolerance: float) -> bool:
        """Returns whether an error is one; what differs by float32's rounding is counted, and is none."""
        if tolerance < error <= self._tolerance.note_below:
            self.compared["rounded"].add(name)
        return error > max(tolerance, self._tolerance.note_below)

    # --- outputs and their gradients ----------------------------------------------------------------------------------

    def _passes(self) -> Iterator[tuple[int, int, int, Tensor]]:
        """Yields (rank, micro-batch, pass of the reference, mask) for all passes that correspond."""
        for rank, mine in enumerate(self._got):
            part, number = self.ranks[rank].part, self.micro_batches
            if len(self._right["passes"]) == self.parts * number and len(mine["passes"]) == number:
                for m in range(number):
                    yield rank, m, part * number + m, self._batch(part, m)["attention_mask"].bool()

    def _places(self, places: Iterator[_Place]) -> None:
        """Adds the first place of each stage."""
        first, found = dict[str, _Place](), sorted(places, key=itemgetter(0, 1))
        for place in found:
            first.setdefault(place[2], place)
        for stage, (_, key, _, _, error, cause) in first.items():
            self._add(stage, key, [rank for _, each, _, rank, *_ in found if each == key], error, cause())

    def _outputs(self) -> Iterator[_Place]:
        for rank, m, index, mask in self._passes():
            choices: Named = {}
            for order, (key, tensor) in enumerate(self._right["passes"][index].items()):
                mine, b = self._got[rank]["passes"][m].get(key), rows_of_tokens(tensor, mask)
                a = rows_of_tokens(mine, mask) if mine is not None and mine.shape == tensor.shape else None
                self.compared["skipped" if a is None or b is None else "outputs"].add(key)
                if a is None or b is None:
                    continue
                stage = "output" if b.is_floating_point() else "choices"
                error = error_of(a, b, 1e-12) if stage == "output" else float(_other_choices(a, b).double().mean())
                choices |= {key: b} if stage == "choices" else {}
                if self._is_wrong(key, error, self._tolerance.largest * (stage == "output")):
                    find = self._output_cause if stage == "output" else self._choices_cause
                    cause = partial(find, key, rank, index, a, b, mask, dict(choices))
                    yield order, key, stage, rank, error, cause

    def _output_cause(self, key: str, _: int, index: int, a: Tensor, b: Tensor, mask: Tensor, choices: Named) -> Cause:
        tolerance = self._tolerance.largest
        for other, outputs in self._right["passes"].items():
            theirs = rows_of_tokens(outputs.get(key), mask) if other != index else None
            if theirs is not None and error_of(a, theirs) <= tolerance < error_of(b, theirs):
                place = f"part {other // self.micro_batches} micro-batch {other % self.micro_batches}"
                return Cause(f"reads the data of {place}", "Check the sampler: each data rank has data of its own.")
        mine, right = (each.double().flatten(0, -2) if each.dim() > 1 else each.double()[:, None] for each in (a, b))
        [factor], residual = fit(mine, [right])
        if residual <= tolerance:
            return Cause(f"{fraction(factor)} × the reference")
        norms = right.norm(dim=-1).clamp(min=1e-300)
        factors = (mine * right).sum(-1, keepdim=True) / norms.square()[:, None]
        if mine.shape[-1] > 1 and bool(((mine - factors * right).norm(dim=-1) <= tolerance * norms).all()):
            words = "the reference times one factor for each token: not normalised, or scaled"
            return Cause(words, "Compare the normalisation and the scaling factor of the router's weights.")
        wrong = (mine - right).norm(dim=-1) > tolerance * norms
        words = f"{int(wrong.sum())} of {len(wrong)} tokens differ"
        chosen = next((each for each in reversed(choices.values()) if len(each) == len(wrong) and each.dim() > 1), None)
        if chosen is not None and not bool(wrong.all()):
            common = set.intersection(*map(set, chosen[wrong].tolist()))
            words += f"; each of them chose expert {', '.join(map(str, sorted(common)))}" if common else ""
        return Cause(words)

    def _choices_cause(self, key: str, rank: int, index: int, a: Tensor, b: Tensor, mask: Tensor, _: Named) -> Cause:
        """Raises NearTieError if the scores of the experts that were chosen instead differ by rounding. Scores are
        another output of the module, with a bias beside it or not.
        """
        module, differs = key.partition("[")[0], _other_choices(a, b)
        beside = module.rpartition(".")[0]
        vectors = [each.double() for n, each in self.reference.initial.items() if n.startswith(beside)]
        for other, tensor in self._right["passes"][index].items():
            scores = rows_of_tokens(tensor, mask) if other.partition("[")[0] == module else None
            if scores is None or not scores.is_floating_point() or scores.shape[-1] <= int(max(a.max(), b.max())):
                continue
            for bias in (torch.zeros(()), *(each for each in vectors if each.shape == scores.shape[-1:])):
                values = scores.double() + bias
                mine, right = (values[differs].gather(-1, each[differs].long()).sort(-1).values for each in (a, b))
                if float((mine - right).abs().max()) <= self._tolerance.largest * float(values.abs().max()):
                    raise NearTieError(f"{int(differs.sum())} tokens of {key} on rank {rank}")
        words = f"{int(differs.sum())} of {len(differs)} tokens choose other experts"
        return Cause(words, "Compare the router's input, its bias and its normalisation.")

    def _output_gradients(self) -> Iterator[_Place]:
        """Yields of each pass the first gradient of an output, from the loss backward, that is not the reference's,
        each loss term times one factor, by which it is divided later.
        """
        for rank, m, index, mask in self._passes():
            theirs, mine = self._right["output_gradients"][index], self._got[rank]["output_gradients"][m]
            least = 1e-9 * max((float(gradient.norm()) for gradient in theirs.values()), default=0.0)
            expected: dict[str, float] = {}
            for order, (key, right) in enumerate(theirs.items()):
                gradient = mine.get(key, torch.zeros_like(right))
                rows = rows_of_tokens(gradient, mask) if gradient.shape == right.shape else None
                terms = self._terms("output_gradients", key, index).items()
                large = [(term, rows_of_tokens(g, mask)) for term, g in terms if float(g.norm()) > least]
                vectors = {term: vector for term, vector in large if vector is not None}
                if rows is None or not vectors or key not in self._got[rank]["passes"][m]:
                    continue
                found = zip(vectors, fit(rows, list(vectors.values()))[0], strict=True)
                expected = {term: c for term, c in found if c == c} | expected
                sums = torch.stack([expected.get(term, 0.0) * vector for term, vector in vectors.items()])
                error = error_of(rows, sums.sum(0), max(float(each.norm()) for each in sums))
                if error > max(self._tolerance.largest, self._tolerance.note_below):
                    cause = partial(self._flow, key, rank, m, rows, list(vectors.values()), mask, order)
                    yield order, key, "backward", rank, error, cause
                    break

    def _flow(self, key: str, rank: int, m: int, rows: Tensor, terms: list[Tensor], mask: Tensor, at: int) -> Cause:
        sharing = [got for got, run in zip(self._got, self.ranks, strict=True) if run.part == self.ranks[rank].part]
        parts = (rows_of_tokens(each["output_gradients"][m].get(key), mask) for each in sharing)
        alike = [each for each in parts if each is not None and each.shape == rows.shape]
        if len(alike) > 1 and fit(torch.stack(alike).sum(0), terms)[1] < self._tolerance.largest:
            return FOUND["part of a sum"]
        padding = "" if bool(mask.all()) else ", in a micro-batch with padding"
        if float(rows.norm()) < 1e-9 * max(float(vector.norm()) for vector in terms):
            return Cause(f"is zero: nothing flows back to it{padding}")
        # Only the loss is between the first gradient and outputs that are right.
        if not at and not any(finding.stage in ("choices", "output") for finding in self.findings):
            return Cause("wrong at the loss: other labels, another mask or formula")
        return Cause(f"wrong from here on{padding}")

    # --- tensors of a step --------------------------------------------------------------------------------------------

    def _tensors(self, stage: str) -> None:
        """Adds the tensors of a stage that differ: gradients by their causes, others with the cause of the first."""
        rights, scale, limit_of = self._right[stage], self._tolerance.scales[stage], partial(self._tolerance.of, stage)
        # A rank evaluates its own part alone.
        got = {n: [each[stage].get(n, t * (stage == "evaluation")) for each in self._got] for n, t in rights.items()}
        errors = {n: [error_of(each, right, scale) for each in got[n]] for n, right in rights.items()}
        ranks = {n: [r for r, e in enumerate(errors[n]) if self._is_wrong(n, e, limit_of(n))] for n in rights}
        wrong = [name for name in rights if ranks[name]]
        trained = {name for name, right in rights.items() if stage == "gradient" and float(right.norm()) > scale}
        self.compared["parameters"] |= trained and rights.keys()
        scope = "all" if trained <= set(wrong) else "experts" if all(map(is_of_experts, wrong)) else "some"
        seen = Observation(ranks=len(self.ranks), parts=self.parts, micro_batches=self.micro_batches, scope=scope)
        causes: dict[Cause, list[str]] = {}
        for name in wrong if stage == "gradient" else wrong[:1]:
            limit = max(limit_of(name), self._tolerance.note_below)
            alike = all(error_of(each, got[name][0], scale) <= limit for each in got[name])
            here = replace(seen, alike=alike, tolerance=limit_of(name))
            of = ranks[name][:1] if alike else ranks[name]
            cause = _joined("rank", {rank: self._cause(stage, name, rank, got[name], here) for rank in of})
            causes.setdefault(cause, []).append(name)
        for cause, names in causes.items():
            names = names if stage == "gradient" else wrong
            shown = "all parameters" if trained and trained <= set(names) else _kinds(names)
            where = [rank for name in names for rank in ranks[name]]
            self._add(stage, shown, where, max(max(errors[name]) for name in names), cause)

    def _cause(self, stage: str, name: str, rank: int, ranks: list[Tensor], seen: Observation) -> Cause:
        got, right, step = ranks[rank], self._right[stage][name], self._got[rank]
        if stage == "gradient":
            return self._gradient_cause(name, rank, right, ranks, seen)
        if stage == "norm":
            squares = {n: float(gradient.double().square().sum()) for n, gradient in step["gradient"].items()}
            return explain_norm(float(got), float(right), squares, [each["squares"] for each in self._got], rank)
        words = self._words_of_change(stage, name, got, right, step)
        drift = "; ranks differ, so that replicas drift apart" * (stage == "update" and not seen.alike)
        for word, size in (("sum", 1), ("mean", len(ranks))) if stage == "logged" and not seen.alike else ():
            if error_of(torch.stack(ranks).sum(0) / size, right) <= max(self._tolerance.of(stage, name), 1e-6):
                words += f"; the {word} over the ranks is right, so reduce it before step returns it"
        return Cause(words + drift, WAYS_OUT.get(stage, ""))

    def _words_of_change(self, stage: str, name: str, got: Tensor, right: Tensor, step: StepRecord) -> str:
        a, b, limit = got.double(), right.double(), max(self._tolerance.of(stage, name), 1e-6)
        if stage in ("logged", "evaluation"):
            ratio = f": {fraction(float(a / b))} ×" if float(b) else ""
            return f"{float(a):.6g}, reference {float(b):.6g}{ratio}"
        if stage == "update" and name in step["absent"]:
            return f"{FOUND['absent'].words} on these ranks: no decay, no momentum there"
        if a.shape != b.shape or not float(b.norm()):
            return "differs"
        if stage == "clipped" and error_of(a, step["gradient"][name]) <= limit:
            return "not scaled: clipping has no effect on it"
        [factor], residual = fit(a, [b])
        if residual <= limit:
            sizes = ((self.micro_batches, "micro-batches"), (self.parts, "ranks"), (2, "forwards, as recomputed"))
            moved = " or ".join(f"moved once for each of {n} {of}" for n, of in sizes if abs(factor - n) < 1e-4)
            more = f": {moved}" if stage == "buffer" and moved and factor > 1.5 else ""
            return f"{fraction(factor)} × the reference{more}"
        start = self.reference.initial.get(name)
        if stage == "update" and not self._step and start is not None:
            [factor], residual = fit(a - b, [start])
            if residual <= 1e-3:
                return f"differs by {factor:.2g} × the parameter: weight decay"
        return "differs in direction"

    def _gradient_cause(self, name: str, rank: int, right: Tensor, ranks: list[Tensor], seen: Observation) -> Cause:
        got, part = ranks[rank], self.ranks[rank].part
        limit, scale = max(seen.tolerance, self._tolerance.note_below), self._tolerance.scales["gradient"]
        sharing = [each for each, run in zip(ranks, self.ranks, strict=True) if run.part == part]
        if name in self._got[rank]["absent"]:
            return FOUND["absent"]
        if moved := _rearrangement(name, got, right, limit):
            return moved
        can_sum = not seen.alike and {each.shape for each in sharing[1:]} == {right.shape}
        if can_sum and error_of(torch.stack(sharing).sum(0), right) <= limit:
            return FOUND["part of a sum"]
        loss = self._got[0]["logged"]["loss"] / (float(self._right["logged"]["loss"]) or 1.0)
        seen = replace(seen, part=part, tokens=self._tokens(), loss_factor=float(loss))
        # Each expert by itself, where they have no coefficients in common.
        rows = got if _has_experts(name, got) else got[None]
        rights, vectors = right.view_as(rows), {key: v.view_as(rows) for key, v in self._contributions(name).items()}
        errors = [error_of(a, b, scale) for a, b in zip(rows, rights, strict=True)]
        wrong = [e for e, error in enumerate(errors) if error > limit] or list(range(len(rows)))

        def fitted(experts: list[int]) -> Observation:
            return _fitted(rows[experts], {key: vector[experts] for key, vector in vectors.items()}, seen)

        common = fitted(wrong)
        causes = {e: explain(common if common.fits or len(rows) == 1 else fitted([e])) for e in wrong}
        # An expert without tokens has a gradient of zeros, which is right whatever the factor.
        return _joined("experts", causes, each=any(e not in wrong and float(b.norm()) for e, b in enumerate(rights)))

    def _tokens(self) -> list[int]:
        """Returns how many tokens of the global batch have a next token with a label, a label, and are no padding."""
        batches = [self._batch(p, m) for p in range(self.parts) for m in range(self.micro_batches)]
        labels = sum(int((each["labels"] != NO_LABEL).sum()) for each in batches)
        return [sum(map(count_labels, batches)), labels, sum(int(each["attention_mask"].sum()) for each in batches)]

    def _terms(self, kind: str, key: str, index: int | None = None) -> Named:
        """Returns a tensor of the reference, or of a pass of it, as a sum of loss terms, which step 0 has alone."""
        steps = [self._right, *(run.steps[0] for run in self.without.values() if not self._step)]
        whole, *without = (step[kind] if index is None else step[kind][index] for step in steps)
        if key not in whole:
            return {}
        # A parameter that only one term reaches has no gradient without it.
        terms = {t: whole[key] - each.get(key, 0.0) for t, each in zip(self.without, without, strict=False)}
        return terms | {MAIN: whole[key] - sum(terms.values())}

    def _contributions(self, name: str) -> dict[tuple[str, int], Tensor]:
        """Returns what each micro-batch and loss term adds to a gradient; {} if passes are no micro-batches."""
        each = self._right["contributions"]
        if len(each) != self.parts * self.micro_batches:
            return {}
        terms = enumerate(self._terms("contributions", name, m) for m in range(len(each)))
        return {(term, m): vector for m, vectors in terms for term, vector in vectors.items()}


def _joined(noun: str, causes: Mapping[int, Cause], *, each: bool = False) -> Cause:
    """Returns the cause of several ranks or experts, with their numbers if they have different ones, or ``each``."""
    numbers: dict[Cause, list[int]] = {}
    for number, cause in causes.items():
        numbers.setdefault(cause, []).append(number)
    if len(numbers) == 1 and not each:
        return next(iter(numbers))
    words = " / ".join(f"{noun} {', '.join(map(str, of))}: {cause.words}" for cause, of in numbers.items())
    return Cause(words, " ".join(dict.fromkeys(cause.way_out for cause in numbers)))


def _other_choices(a: Tensor, b: Tensor) -> Tensor:
    """Returns which tokens choose other experts: sets of the last dimension, of tensors [..., K]."""
    differs = a.sort(-1).values != b.sort(-1).values
    return differs.flatten(0, -2).any(-1) if a.dim() > 1 else differs


def _has_experts(name: str, tensor: Tensor) -> bool:
    """Returns whether the first dimension of a tensor is that of experts: its name has no number of one."""
    return is_of_experts(name) and not re.search(r"\.experts\.\d", name) and tensor.dim() > 1


def _rearrangement(name: str, got: Tensor, right: Tensor, tolerance: float) -> Cause | None:
    """Returns whether values are at other places: of another shape, those of another expert, or exchanged halves."""
    if got.shape != right.shape:
        return Cause(f"shape {list(got.shape)}, not {list(right.shape)}", "Put it together by Setup.full.")
    experts = list(range(len(got))) if _has_experts(name, got) else []
    match = [next((f for f in experts if error_of(got[e], right[f]) <= tolerance), -1) for e in experts]
    if sorted(match) == experts != match:
        return FOUND["permuted"]._replace(words=f"{FOUND['permuted'].words}: {match}")
    rolled = (error_of(got.roll(size // 2, dim), right) for dim, size in enumerate(got.shape) if size % 2 == 0)
    return FOUND["halves"] if any(error <= tolerance for error in rolled) else None


def _fitted(got: Tensor, vectors: Mapping[tuple[str, int], Tensor], seen: Observation) -> Observation:
    """Returns the observation with the coefficients and the residual of the simplest fit: one factor, one for each loss
    term, one for each micro-batch, or one for each pair.
    """
    for grouping in (lambda key: 0, itemgetter(0), itemgetter(1), lambda key: key):
        groups = defaultdict[object, list[tuple[str, int]]](list)
        for key in vectors:
            groups[grouping(key)].append(key)
        # As many numbers as coefficients would fit anything.
        if not groups or 1 < len(groups) >= got.numel():
            break
        values, residual = fit(got, [torch.stack([vectors[key] for key in keys]).sum(0) for keys in groups.values()])
        found = {key: c for keys, c in zip(groups.values(), values, strict=True) for key in keys if c == c}
        coefficients = {key: c for key, c in found.items() if float(vectors[key].norm())}
        seen = replace(seen, coefficients=coefficients, residual=residual)
        if seen.fits:
            break
    return seen


def first_difference(right: Named, got: Named) -> tuple[str, Cause] | None:
    """Returns the first tensor whose values differ, NaN not from NaN, and what it has instead; or None."""
    for name, tensor in right.items():
        other = got.get(name)
        if other is None:
            return name, Cause("nothing: it is missing", "Save all parameters and buffers.")
        if other.shape != tensor.shape or not torch.allclose(other, tensor, 0, 0, equal_nan=True):
            return name, _rearrangement(name, other, tensor, 0.0) or Cause("other values", WAYS_OUT["weights"])
    return None


def _kinds(names: Sequence[str]) -> str:
    """Returns the first kind of parameter, without the numbers of layers, and how many kinds more there are."""
    kinds = list(dict.fromkeys(re.sub(r"\.\d+\.", ".*.", name) for name in names))
    return names[0] if len(names) == 1 else kinds[0] + f" and {len(kinds) - 1} more" * (len(kinds) > 1)
