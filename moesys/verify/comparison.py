"""The comparison of ranks with the reference, stage by stage in the order of a step.

R ranks, P parts, A micro-batches of a part.
"""

from __future__ import annotations

import math
import re
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from operator import itemgetter
from statistics import median

import torch
from torch import Tensor

from moesys.verify.diagnosis import (
    FOLLOWS,
    MAIN,
    NO_GRADIENT,
    PART_OF_A_SUM,
    Cause,
    Observation,
    error_of,
    explain,
    explain_norm,
    fit,
    fraction,
)
from moesys.verify.recording import Named, RecordingJob, RunRecord, StepRecord
from moesys.verify.setup import NO_LABEL, Batch, batch_of, count_labels, is_of_experts, root_of

# Outputs and their gradients say where something goes wrong, and are no verdict.
PLACES = ("output", "backward")
# What a step that rounds to float32 somewhere may differ by: 64 times its rounding.
FLOAT32_ROUNDING = 64 * 2.0**-24


@dataclass(frozen=True)
class Finding:
    """One difference. tensor: where, and how many others have the same cause. error: relative. follows: another one
    causes it.
    """

    stage: str
    tensor: str
    ranks: tuple[int, ...]
    error: float
    cause: str
    way_out: str = ""

    @property
    def follows(self) -> bool:
        return FOLLOWS in self.cause


def rows_of_tokens(tensor: Tensor, mask: Tensor) -> Tensor | None:
    """Returns the rows of tokens that are no padding, of [B, S, ...] or [B · S, ...]; None for another layout of a
    micro-batch with padding, where nobody knows which they are.
    """
    if tensor.shape[:2] == mask.shape:
        return tensor[mask]
    if tensor.dim() > 1 and tensor.shape[0] == mask.numel():
        return tensor[mask.flatten()]
    return tensor if bool(mask.all()) else None


class NearTieError(Exception):
    """Tokens choose other experts at a near tie, so that nothing after it can be compared."""


class Tolerances:
    """What may differ in one step by rounding: 32 times what the reference itself does with sums in another order."""

    def __init__(self, right: StepRecord, reordered: StepRecord, dtype: torch.dtype) -> None:
        self.least, self.note_below = (1e-10, FLOAT32_ROUNDING) if dtype == torch.float64 else (1e-6, 0.0)
        self.scales: dict[str, float] = {}
        self._spreads: dict[str, dict[str, float]] = {}
        for kind in ("gradients", "clipped", "update", "buffer"):
            a, b = getattr(right, kind), getattr(reordered, kind)
            self.scales[kind] = 1e-6 * root_of([float(tensor.double().square().sum()) for tensor in a.values()])
            self._spreads[kind] = {n: error_of(b[n], a[n], self.scales[kind]) for n in a if n in b}
        gradients = list(self._spreads["gradients"].values()) or [0.0]
        self.spread, self.largest = median(gradients), max(32 * max(gradients), self.least)
        self._logged = {n: abs(reordered.logged[n] - x) / max(abs(x), 1e-300) for n, x in right.logged.items()}

    def of(self, kind: str, name: str) -> float:
        """Returns the largest relative error that is rounding."""
        if kind == "logged":
            return max(32 * self._logged[name], self.largest)
        spreads = self._spreads[kind]
        # A clip may return float32, and an update is enlarged by the optimizer.
        least = self.least if kind == "gradients" else max(self.least, 1e-6)
        return max(32 * spreads.get(name, 0.0), 32 * median(spreads.values() or [0.0]), least)


class TrainingComparison:
    """Compares the records of ranks with those of the reference; ``run`` returns the findings, in order.

    without: the reference without each loss term. compared: names of parameters and outputs that were compared, of
    outputs that were skipped, and of tensors that differ by float32's rounding.
    """

    def __init__(
        self,
        job: RecordingJob,
        right: RunRecord,
        reordered: RunRecord,
        without: Mapping[str, RunRecord],
        ranks: list[RunRecord],
    ) -> None:
        self.reference, self.ranks, self.without, self._job = right, ranks, without, job
        self.parts, self.micro_batches = ranks[0].parts, job.situation.micro_batches
        steps = zip(right.steps, reordered.steps, strict=True)
        self.tolerances = [Tolerances(a, b, job.dtype) for a, b in steps]
        self.compared, self.findings = defaultdict[str, set[str]](set), list[Finding]()
        self._at, self._step, self._tolerance = "", 0, self.tolerances[0]

    def _batch(self, part: int, micro_batch: int) -> Batch:
        return batch_of(self._job.options, self._job.situation, part, micro_batch, self._step)

    @property
    def is_sum(self) -> bool:
        """False if the reference itself depends on the order of micro-batches by more than rounding."""
        # In right references no gradient moved by more than 1e-13 in float64, and 1e-5 in float32.
        return self.tolerances[0].largest < (32 * 1e-9 if self.tolerances[0].least < 1e-8 else 32 * 3e-4)

    def without_main_gradient(self) -> list[str]:
        """Returns the parameters of the reference whose gradient comes from other terms than the main loss, or none."""
        whole, found = self.reference.steps[0].gradients, []
        for name, gradient in whole.items():
            without = [run.steps[0].gradients.get(name, torch.zeros_like(gradient)) for run in self.without.values()]
            main = gradient - sum(gradient - each for each in without)
            found += [name] if float(main.norm()) <= self.tolerances[0].scales["gradients"] else []
        return found

    def run(self) -> list[Finding]:
        for rank, got in enumerate(self.ranks):
            found = difference_of_states(self.reference.initial, got.initial)
            if found is not None:
                self._add("weights", found[0], [rank], 1.0, Cause(f"starts from {found[1]}", found[2]))
                return self.findings
        for step, right in enumerate(self.reference.steps):
            if self.findings:
                break
            self._at, self._step, self._tolerance = f"step {step}: " * (step > 0), step, self.tolerances[step]
            self._compare(right, [each.steps[step] for each in self.ranks])
            # Places alone are no fault: a right model may have a part of a sum there.
            if all(finding.stage in PLACES for finding in self.findings):
                self.findings = []
        return self.findings

    def _compare(self, right: StepRecord, got: list[StepRecord]) -> None:
        for rank, mine in enumerate(got):
            for key in mine.repeats[:1]:
                words = "a recomputation chose other experts than the forward"
                way_out = "Save the choices in the forward, and use them in the recomputation."
                self._add("choices", key, [rank], 1.0, Cause(words, way_out))
        self._forward(right, got)
        self._logged(right, got)
        if not self._step:
            self._backward(right, got)
        self._gradients(right, got)
        self._norm(right, got)
        for kind in ("clipped", "update", "buffer"):
            if all(finding.stage in PLACES for finding in self.findings):
                self._changes(kind, right, got)
        self._evaluation(right, got)

    def _add(self, stage: str, tensor: str, ranks: Sequence[int], error: float, cause: Cause) -> None:
        ranks = tuple(sorted(set(ranks)))
        self.findings.append(Finding(stage, self._at + tensor, ranks, error, cause.words, cause.way_out))

    def _wrong(self, name: str, errors: Sequence[float], tolerance: float) -> list[int]:
        """Returns the ranks that are wrong; what differs by float32's rounding is counted, and is not."""
        wrong = [rank for rank, error in enumerate(errors) if error > max(tolerance, self._tolerance.note_below)]
        if not wrong and max(errors, default=0.0) > tolerance:
            self.compared["rounded"].add(name)
        return wrong

    # --- forward ------------------------------------------------------------------------------------------------------

    def _passes(self, right: StepRecord, got: list[StepRecord]) -> Iterator[tuple[int, int, int, Tensor]]:
        """Yields (rank, micro-batch, pass of the reference, mask) for all passes that correspond."""
        for rank, mine in enumerate(got):
            if len(right.passes) == self.parts * self.micro_batches and len(mine.passes) == self.micro_batches:
                part = self.ranks[rank].part
                for m in range(self.micro_batches):
                    yield rank, m, part * self.micro_batches + m, self._batch(part, m)["attention_mask"].bool()

    def _forward(self, right: StepRecord, got: list[StepRecord]) -> None:
        """Adds the first output that differs and the first choices that do, in the order of the reference's modules."""
        order = {key: place for outputs in reversed(right.passes) for place, key in enumerate(outputs)}
        first: dict[str, tuple[int, str, list[int], float, Cause]] = {}
        for rank, m, index, mask in self._passes(right, got):
            choices: Named = {}
            for key, tensor in right.passes[index].items():
                mine, b = got[rank].passes[m].get(key), rows_of_tokens(tensor, mask)
                a = None if mine is None or mine.shape != tensor.shape else rows_of_tokens(mine, mask)
                if a is None or b is None:
                    self.compared["skipped"].add(key)
                    continue
                self.compared["outputs"].add(key)
                if b.is_floating_point():
                    stage, error = "output", error_of(a, b, 1e-12)
                    wrong = bool(self._wrong(key, [error], self._tolerance.largest))
                else:
                    choices[key], differs = b, _other_choices(a, b)
                    stage, error, wrong = "choices", float(differs.double().mean()), bool(differs.any())
                if not wrong or (stage in first and first[stage][0] < order[key]):
                    continue
                if stage in first and first[stage][0] == order[key]:
                    first[stage][2].append(rank)
                    continue
                if stage == "output":
                    cause = self._cause_of_output(key, a, b, mask, index, choices)
                elif self._is_near_tie(key, right.passes[index], a, b, mask):
                    raise NearTieError(f"{int(differs.sum())} tokens of {key} on rank {rank}")
                else:
                    words = f"{int(differs.sum())} of {len(differs)} tokens choose other experts"
                    cause = Cause(words, "Compare the router's input, its bias and its normalisation.")
                first[stage] = (order[key], key, [rank], error, cause)
        for stage, (_, key, ranks, error, cause) in sorted(first.items(), key=lambda item: item[1][0]):
            self._add(stage, key, ranks, error, cause)

    def _cause_of_output(self, key: str, a: Tensor, b: Tensor, mask: Tensor, index: int, choices: Named) -> Cause:
        tolerance = self._tolerance.largest
        for other, outputs in enumerate(self.reference.steps[self._step].passes):
            theirs = rows_of_tokens(outputs[key], mask) if key in outputs and other != index else None
            if theirs is not None and error_of(a, theirs) <= tolerance and error_of(b, theirs) > tolerance:
                place = f"part {other // self.micro_batches} micro-batch {other % self.micro_batches}"
                return Cause(f"reads the data of {place}", "Check the sampler: each data rank has data of its own.")
        a, b = a.double(), b.double()
        factor = float((a * b).sum() / b.square().sum().clamp(min=1e-300))
        if error_of(a, factor * b) <= tolerance:
            return Cause(f"{fraction(factor)} × the reference")
        mine, right = (each.flatten(0, -2) if each.dim() > 1 else each[:, None] for each in (a, b))
        norms = right.norm(dim=-1).clamp(min=1e-300)
        wrong = (mine - right).norm(dim=-1) > tolerance * norms
        factors = (mine * right).sum(-1, keepdim=True) / norms.square()[:, None]
        if mine.shape[-1] > 1 and bool(((mine - factors * right).norm(dim=-1) <= tolerance * norms).all()):
            words = "the reference times one factor for each token: not normalised, or scaled"
            return Cause(words, "Compare the normalisation and the scaling factor of the router's weights.")
        words = f"{int(wrong.sum())} of {len(wrong)} tokens differ"
        chosen = next((each for each in reversed(choices.values()) if len(each) == len(wrong) and each.dim() > 1), None)
        if chosen is not None and not bool(wrong.all()):
            common = set.intersection(*map(set, chosen[wrong].tolist()))
            words += f"; each of them chose expert {_numbers(sorted(common))}" if common else ""
        return Cause(words)

    def _is_near_tie(self, key: str, outputs: Named, a: Tensor, b: Tensor, mask: Tensor) -> bool:
        """Returns whether the scores of the experts that were chosen instead differ by rounding. Scores are another
        output of the module, with a bias beside it or not.
        """
        module, differs = key.partition("[")[0], _other_choices(a, b)
        beside = module.rpartition(".")[0]
        vectors = [each.double() for n, each in self.reference.initial.items() if n.startswith(beside)]
        for other, tensor in outputs.items():
            scores = rows_of_tokens(tensor, mask) if other.partition("[")[0] == module else None
            if scores is None or not scores.is_floating_point() or scores.shape[-1] <= int(max(a.max(), b.max())):
                continue
            for bias in (torch.zeros(()), *(each for each in vectors if each.shape == scores.shape[-1:])):
                values = scores.double() + bias
                mine, right = (values[differs].gather(-1, each[differs].long()).sort(-1).values for each in (a, b))
                if float((mine - right).abs().max()) <= self._tolerance.largest * float(values.abs().max()):
                    return True
        return False

    def _logged(self, right: StepRecord, got: list[StepRecord]) -> None:
        least = 1e-6 * max(map(abs, right.logged.values()))
        for name, value in right.logged.items():
            errors = [abs(mine.logged[name] - value) / max(abs(value), least, 1e-300) for mine in got]
            errors = [math.inf if math.isnan(error) else error for error in errors]
            if ranks := self._wrong(name, errors, self._tolerance.of("logged", name)):
                shown = got[ranks[0]].logged[name]
                words = f"{shown:.6g}, reference {value:.6g}" + (f": {fraction(shown / value)} ×" if value else "")
                self._add("logged", name, ranks, max(errors), Cause(words))

    # --- backward -----------------------------------------------------------------------------------------------------

    def _terms(self, kind: str, index: int, key: str) -> Named:
        """Returns a tensor of a pass of the reference's first step as a sum of loss terms."""
        rest, terms = getattr(self.reference.steps[0], kind)[index].get(key), {}
        for term, run in self.without.items():
            if rest is not None:
                without = getattr(run.steps[0], kind)[index].get(key)
                # Where only this term reaches, there is no gradient without it.
                terms[term], rest = (rest, None) if without is None else (rest - without, without)
        return terms | ({} if rest is None else {MAIN: rest})

    def _backward(self, right: StepRecord, got: list[StepRecord]) -> None:
        """Adds the first gradient of an output, from the loss backward, that is not the reference's, each loss term
        times one factor, by which it is divided later; or ranks whose factors differ.
        """
        factors: dict[str, dict[tuple[int, int], float]] = {}
        first: tuple[int, str, int, float, str] | None = None
        for rank, m, index, mask in self._passes(right, got):
            theirs, mine = right.output_gradients[index], got[rank].output_gradients[m]
            largest = max((float(gradient.norm()) for gradient in theirs.values()), default=0.0)
            expected: dict[str, float] = {}
            for order, (key, whole) in enumerate(theirs.items()):
                grad = mine.get(key, torch.zeros_like(whole))
                if key not in got[rank].passes[m] or grad.shape != whole.shape or rows_of_tokens(whole, mask) is None:
                    continue
                terms = self._terms("output_gradients", index, key)
                terms = {term: g for term, g in terms.items() if float(g.norm()) > 1e-9 * largest}
                error = self._error_of_output(grad, terms, mask, expected)
                if error > self._tolerance.note_below:
                    if first is None or order < first[0]:
                        first = (order, key, rank, error, self._words_of_backward(rank, m, key, grad, terms, mask))
                    break
            for term, value in expected.items():
                factors.setdefault(term, {})[rank, m] = value
        if first is not None:
            order, key, rank, error, words = first
            # Only the loss is between the first gradient and outputs that are right.
            at_loss = not order and not self.findings[:-1] and words.startswith("wrong")
            words = "wrong at the loss: other labels, another mask or formula" if at_loss else words
            self._add("backward", key, [rank], error, Cause(words))
            return
        for term, of in factors.items():
            if max(of.values()) - min(of.values()) > 1e2 * self._tolerance.largest * max(1.0, *map(abs, of.values())):
                words = ", ".join(f"rank {rank} micro-batch {m}: {fraction(c)}" for (rank, m), c in of.items())
                cause = Cause(f"ranks scale it unequally ({words})")
                self._add("backward", f"scale of the {term}", [rank for rank, _ in of], 1.0, cause)

    def _error_of_output(self, grad: Tensor, terms: Named, mask: Tensor, expected: dict[str, float]) -> float:
        """Returns the relative error of a gradient, 0.0 for rounding, where each term has its expected factor; the
        first gradient with a term sets it.
        """
        mine = rows_of_tokens(grad, mask)
        vectors = {term: rows for term, g in terms.items() if (rows := rows_of_tokens(g, mask)) is not None}
        if mine is None or not vectors:
            return 0.0
        coefficients, residual = fit(mine, list(vectors.values()))
        norm = max(float(mine.norm()), *(float(vector.norm()) for vector in vectors.values()))
        error = residual * float(mine.norm()) / norm
        for (term, vector), c in zip(vectors.items(), coefficients, strict=True):
            if not math.isnan(c):
                right = expected.setdefault(term, c)
                error = max(error, abs(c - right) * float(vector.norm()) / norm / max(1.0, abs(right)))
        return error if error > self._tolerance.largest else 0.0

    def _words_of_backward(self, rank: int, m: int, key: str, grad: Tensor, terms: Named, mask: Tensor) -> str:
        sharing = [each.steps[0] for each in self.ranks if each.part == self.ranks[rank].part]
        parts = [each.output_gradients[m][key] for each in sharing if key in each.output_gradients[m]]
        complete = sharing[1:] and len(parts) == len(sharing) and all(each.shape == grad.shape for each in parts)
        if complete and fit(torch.stack(parts).sum(0), list(terms.values()))[1] < self._tolerance.largest:
            return PART_OF_A_SUM
        is_zero = float(grad.norm()) < 1e-9 * max(float(g.norm()) for g in terms.values())
        words = "is zero: nothing flows back to it" if is_zero else "wrong from here on"
        return words + ("" if bool(mask.all()) else ", in a micro-batch with padding")

    # --- gradients ----------------------------------------------------------------------------------------------------

    def _wrong_tensors(
        self, kind: str, right: StepRecord, got: list[StepRecord]
    ) -> dict[str, tuple[list[int], float, list[Tensor]]]:
        """Returns for each tensor that differs the ranks, the largest error, and the tensors of all ranks."""
        scale, wrong = self._tolerance.scales[kind], {}
        for name, tensor in getattr(right, kind).items():
            others = [getattr(mine, kind).get(name, torch.zeros_like(tensor)) for mine in got]
            errors = [error_of(other, tensor, scale) for other in others]
            if ranks := self._wrong(name, errors, self._tolerance.of(kind, name)):
                wrong[name] = (ranks, max(errors), others)
        return wrong

    def _gradients(self, right: StepRecord, got: list[StepRecord]) -> None:
        self.compared["parameters"] |= right.gradients.keys()
        wrong, scale = self._wrong_tensors("gradients", right, got), self._tolerance.scales["gradients"]
        trained = {name for name, gradient in right.gradients.items() if float(gradient.norm()) > scale}
        scope = "all" if trained <= set(wrong) else "experts" if all(map(is_of_experts, wrong)) else "some"
        causes: dict[Cause, list[str]] = {}
        for name, (ranks, _, others) in wrong.items():
            causes.setdefault(self._cause(name, ranks, others, right, got, scope), []).append(name)
        for cause, names in causes.items():
            shown = "all parameters" if trained <= set(names) else _kinds(names)
            ranks = [rank for name in names for rank in wrong[name][0]]
            self._add("gradient", shown, ranks, max(wrong[name][1] for name in names), cause)

    def _cause(
        self, name: str, ranks: list[int], all_ranks: list[Tensor], right: StepRecord, got: list[StepRecord], scope: str
    ) -> Cause:
        tolerance, scale = self._tolerance.of("gradients", name), self._tolerance.scales["gradients"]
        limit = max(tolerance, self._tolerance.note_below)
        alike = all(error_of(each, all_ranks[0], scale) <= limit for each in all_ranks)
        seen = Observation(
            near=min(max(1e-4, 100 * tolerance), 0.02),
            largest_residual=min(max(1e-6, 100 * tolerance), 0.05),
            alike=alike and len({name in mine.absent for mine in got}) == 1,
            scope=scope,
            ranks=len(got),
            parts=self.parts,
            micro_batches=self.micro_batches,
            tokens=self._tokens(),
            loss_factor=got[0].logged["loss"] / (right.logged["loss"] or 1.0),
        )
        causes = {}
        for rank in ranks[:1] if seen.alike else ranks:
            here = replace(seen, part=self.ranks[rank].part, absent=name in got[rank].absent)
            causes[rank] = self._cause_on_rank(name, rank, all_ranks, right.gradients[name], here, limit)
        if len(set(causes.values())) == 1:
            return causes[ranks[0]]
        return _joined({f"rank {rank}": cause for rank, cause in causes.items()}, " / ")

    def _tokens(self) -> list[int]:
        """Returns how many tokens of the global batch have a next token with a label, a label, and are no padding."""
        batches = [self._batch(p, m) for p in range(self.parts) for m in range(self.micro_batches)]
        labels, masks = (torch.cat([each[name] for each in batches]) for name in ("labels", "attention_mask"))
        return [sum(map(count_labels, batches)), int((labels != NO_LABEL).sum()), int(masks.sum())]

    def _cause_on_rank(
        self, name: str, rank: int, all_ranks: list[Tensor], right: Tensor, seen: Observation, limit: float
    ) -> Cause:
        got = all_ranks[rank]
        if seen.absent:
            return explain(seen)
        if got.shape != right.shape:
            return Cause(f"has shape {list(got.shape)}, not {list(right.shape)}", "Put it together by Setup.full.")
        sharing = [each for each, run in zip(all_ranks, self.ranks, strict=True) if run.part == seen.part]
        together = sharing[1:] and not seen.alike and all(each.shape == right.shape for each in sharing)
        if together and error_of(torch.stack(sharing).sum(0), right) <= limit:
            return explain(replace(seen, sums_up=True))
        if permutation := _permutation(name, got, right, limit):
            return explain(replace(seen, permutation=permutation))
        vectors = self._contributions(name)
        if not _has_experts(name, got):
            return explain(_fitted(got, vectors, replace(seen, halves=_has_halves(got, right, limit))))
        # An expert without tokens has a gradient of zeros, which is right whatever the factor.
        scale = self._tolerance.scales["gradients"]
        wrong = {e: error_of(got[e], right[e], scale) > limit for e in range(len(got)) if float(right[e].norm())}
        wrong |= {e: True for e in range(len(got)) if e not in wrong and float(got[e].norm()) > scale}
        fits = {}
        for e in (e for e, is_wrong in wrong.items() if is_wrong):
            here = replace(seen, halves=_has_halves(got[e], right[e], limit))
            fits[e] = _fitted(got[e], {key: vector[e] for key, vector in vectors.items()}, here)
        merged = merged_observation(list(fits.values()))
        if merged is not None:
            words, way_out = explain(merged)
            return Cause(words if all(wrong.values()) else f"experts {_numbers(list(fits))}: {words}", way_out)
        by_cause: dict[Cause, list[int]] = {}
        for e, observation in fits.items():
            by_cause.setdefault(explain(observation), []).append(e)
        return _joined({f"experts {_numbers(experts)}": cause for cause, experts in by_cause.items()}, "; ")

    def _contributions(self, name: str) -> dict[tuple[str, int], Tensor]:
        """Returns what each micro-batch and loss term adds to a gradient; {} if passes are no micro-batches."""
        step, number = self.reference.steps[self._step], self.parts * self.micro_batches
        if len(step.contributions) != number:
            return {}
        if self._step:
            return {(MAIN, m): each[name] for m, each in enumerate(step.contributions) if name in each}
        terms = [self._terms("contributions", m, name) for m in range(number)]
        return {(term, m): vector for m, of in enumerate(terms) for term, vector in of.items()}

    # --- norm, optimizer and buffers ----------------------------------------------------------------------------------

    def _norm(self, right: StepRecord, got: list[StepRecord]) -> None:
        if right.norm is None:
            return
        norms = [math.inf if mine.norm is None or math.isnan(mine.norm) else mine.norm for mine in got]
        errors = [abs(norm - right.norm) / max(right.norm, 1e-300) for norm in norms]
        causes = []
        for rank in (ranks := self._wrong("norm", errors, max(self._tolerance.largest, 1e-6))):
            squares = {name: float(tensor.double().square().sum()) for name, tensor in got[rank].gradients.items()}
            causes.append(explain_norm(norms[rank], right.norm, squares, [each.squares for each in got], rank))
        if causes:
            words = " / ".join(dict.fromkeys(cause.words for cause in causes))
            self._add("norm", "norm that clips", ranks, max(errors), Cause(words, causes[0].way_out))

    def _changes(self, kind: str, right: StepRecord, got: list[StepRecord]) -> None:
        """Adds the clipped gradients, updates or buffers that differ, with the cause of the first."""
        wrong = self._wrong_tensors(kind, right, got)
        for name, (ranks, error, others) in list(wrong.items())[:1]:
            mine = others[ranks[0]]
            words = self._words_of_change(kind, name, mine, getattr(right, kind)[name], got[ranks[0]])
            alike = kind != "update" or all(error_of(each, mine) <= 1e-6 for each in others)
            words += "" if alike else "; ranks differ, so that replicas drift apart"
            self._add(kind, _kinds(list(wrong)), ranks, error, Cause(words, _WAYS_OF_CHANGES[kind]))

    def _words_of_change(self, kind: str, name: str, mine: Tensor, right: Tensor, step: StepRecord) -> str:
        a, b, limit = mine.double(), right.double(), max(self._tolerance.of(kind, name), 1e-6)
        if kind == "update" and name in step.absent:
            return f"{NO_GRADIENT} on these ranks: no decay, no momentum there"
        if a.shape != b.shape or not float(b.norm()):
            return "differs"
        if kind == "clipped" and error_of(a, step.gradients[name]) <= limit:
            return "not scaled: clipping has no effect on it"
        factor = float((a * b).sum() / b.square().sum())
        if error_of(a, factor * b) <= limit:
            sizes = {self.micro_batches: f"{self.micro_batches} micro-batches", self.parts: f"{self.parts} ranks"}
            moved = [f"moved once for each of {words}" for size, words in sizes.items() if abs(factor - size) < 1e-4]
            moved += ["counted twice, as by a recomputation or an evaluation"] if abs(factor - 2) < 1e-4 else []
            more = f": {' or '.join(moved)}" if kind == "buffer" and moved and factor > 1.5 else ""
            return f"{fraction(factor)} × the reference{more}"
        start = self.reference.initial.get(name)
        if kind == "update" and not self._step and start is not None:
            factor = float(((a - b) * start).sum() / start.double().square().sum().clamp(min=1e-300))
            if error_of(a - b, factor * start.double()) <= 1e-3:
                return f"differs by {factor:.2g} × the parameter: weight decay"
        return "differs in direction"

    def _evaluation(self, right: StepRecord, got: list[StepRecord]) -> None:
        for rank, mine in enumerate(got):
            for part, value in mine.evaluation.items():
                error = abs(value - right.evaluation[part]) / max(abs(right.evaluation[part]), 1e-300)
                if not self.findings and self._wrong("evaluation", [error], self._tolerance.largest):
                    words = f"{value:.6g}, reference {right.evaluation[part]:.6g}"
                    self._add("evaluation", "loss of evaluate", [rank], error, Cause(words, "Compare it with eval()."))
            for name in mine.counted[:1]:
                cause = Cause("evaluation changes it", "Count and move biases only while the model trains.")
                self._add("evaluation", name, [rank], 1.0, cause)


_WAYS_OF_CHANGES = {
    "clipped": "Check that clipping scales the gradients in place that the optimizer reads.",
    "update": "Compare the options, the state and the parameter groups of the optimizer on ranks and in one process.",
    "buffer": "Move biases once in a step, by the counts of all ranks, without evaluations and recomputations.",
}


def _joined(causes: Mapping[str, Cause], between: str) -> Cause:
    words = between.join(f"{about}: {cause.words}" for about, cause in causes.items())
    return Cause(words, " ".join(dict.fromkeys(cause.way_out for cause in causes.values())))


def _other_choices(a: Tensor, b: Tensor) -> Tensor:
    """Returns which tokens choose other experts: sets of the last dimension, of tensors [..., K]."""
    differs = a.sort(-1).values != b.sort(-1).values
    return differs.flatten(0, -2).any(-1) if a.dim() > 1 else differs


def _permutation(name: str, got: Tensor, right: Tensor, tolerance: float) -> list[int]:
    """Returns for each expert the one that it has the values of; [] if that is no permutation, or each has its own."""
    experts = range(len(got)) if _has_experts(name, got) else ()
    match = [next((f for f in experts if error_of(got[e], right[f]) <= tolerance), -1) for e in experts]
    return match if sorted(match) == list(experts) and match != sorted(match) else []


def _has_experts(name: str, tensor: Tensor) -> bool:
    """Returns whether the first dimension of a tensor is that of experts: its name has no number of one."""
    return is_of_experts(name) and not re.search(r"\.experts\.\d", name) and tensor.dim() > 1


def _has_halves(got: Tensor, right: Tensor, tolerance: float) -> bool:
    if error_of(got, right) <= tolerance:
        return False
    even = [dim for dim, size in enumerate(got.shape) if size % 2 == 0]
    return any(error_of(got.roll(got.shape[dim] // 2, dim), right) <= tolerance for dim in even)


def merged_observation(fits: Sequence[Observation]) -> Observation | None:
    """Returns the one observation of several experts, whose coefficients complete each other; None if they differ."""
    known: dict[tuple[str, int], float] = {}
    for each in fits:
        if any(not each.same([c], known.get(key, c)) for key, c in each.known.items()):
            return None
        known = each.known | known
    if len({(each.halves, each.residual > each.largest_residual) for each in fits}) > 1:
        return None
    return replace(fits[0], coefficients=known)


def _fitted(got: Tensor, vectors: Mapping[tuple[str, int], Tensor], seen: Observation) -> Observation:
    """Returns the observation with the coefficients and the residual of the simplest fit: one factor, one for each loss
    term, one for each micro-batch, or one for each pair.
    """
    if not vectors:
        return seen
    residual, coefficients = 1.0, dict.fromkeys(vectors, math.nan)
    for grouping in (lambda key: 0, itemgetter(0), itemgetter(1), lambda key: key):
        sums: dict[object, Tensor] = {}
        for key, vector in vectors.items():
            group = grouping(key)
            sums[group] = sums[group] + vector.double() if group in sums else vector.double()
        # As many numbers as coefficients would fit anything.
        if len(sums) > 1 and len(sums) >= got.numel():
            break
        values, residual = fit(got, list(sums.values()))
        of = dict(zip(sums, values, strict=True))
        coefficients = {key: of[grouping(key)] if float(vectors[key].norm()) else math.nan for key in vectors}
        if residual <= seen.largest_residual:
            break
    return replace(seen, coefficients=coefficients, residual=residual)


def same_values(a: Tensor, b: Tensor) -> bool:
    """Returns whether all values are the same, where NaN equals NaN."""
    return a.shape == b.shape and bool(((a == b) | (a.isnan() & b.isnan())).all())


def difference_of_states(right: Named, got: Named) -> tuple[str, str, str] | None:
    """Returns the name of the first tensor whose values differ, what it has instead, and the way out; None if all are
    the same.
    """
    for name, tensor in right.items():
        other = got.get(name)
        if other is None:
            return name, "nothing: it is missing", "Save all parameters and buffers."
        if other.shape != tensor.shape:
            return name, f"shape {list(other.shape)}, not {list(tensor.shape)}", "Put it together by Setup.full."
        if same_values(other, tensor):
            continue
        if permutation := _permutation(name, other, tensor, 0.0):
            return name, f"experts permuted: {permutation}", "Check the order of ranks in the expert mesh, and loading."
        if _has_halves(other, tensor, 0.0):
            return name, "halves exchanged, such as gate and up", "Check the order of gate and up."
        return name, "other values", "Draw or load the same weights on all ranks, such as by moesys.verify.draw."
    return None


def _kinds(names: Sequence[str]) -> str:
    """Returns the first kind of parameter, without the numbers of layers, and how many kinds more there are."""
    if len(names) == 1:
        return names[0]
    kinds = list(dict.fromkeys(re.sub(r"\.\d+\.", ".*.", name) for name in names))
    return kinds[0] + (f" and {len(kinds) - 1} more" if kinds[1:] else "")


def _numbers(numbers: Sequence[int]) -> str:
    return ", ".join(map(str, numbers))
