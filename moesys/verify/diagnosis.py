"""From what was observed of a wrong gradient or norm to its cause and the way out, by one table of rows.

A gradient is a sum of the reference's contributions, each with a coefficient: right ones have 1. P parts (ranks with
data of their own), R ranks, A micro-batches of a part.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import torch
from torch import Tensor

from moesys.verify.setup import is_of_experts, root_of

MAIN = "main loss"
NO_GRADIENT = "has no gradient (None)"
PART_OF_A_SUM = "each rank has a part of a sum: not summed over the ranks that share the batch"
FOLLOWS = "no sum of the reference's parts: follows from an earlier tensor"


def error_of(got: Tensor, right: Tensor, scale: float = 0.0) -> float:
    """Returns |got − right| / max(|right|, ``scale``) by Frobenius norms; infinite for another shape, and for NaN."""
    if got.shape != right.shape:
        return math.inf
    difference = float((got.double() - right.double()).norm())
    if difference == 0.0:
        return 0.0
    error = difference / max(float(right.double().norm()), scale, 1e-300)
    return math.inf if math.isnan(error) else error


def fit(got: Tensor, vectors: Sequence[Tensor]) -> tuple[list[float], float]:
    """Returns the coefficients of the ``vectors`` whose sum is nearest to ``got``, NaN for a vector of zeros, and the
    relative residual.
    """
    matrix, right = torch.stack([vector.double().flatten() for vector in vectors]), got.double().flatten()
    norms = matrix.norm(dim=1)
    used = norms > 1e-10 * norms.max()
    coefficients = torch.full((len(vectors),), math.nan, dtype=torch.float64)
    if not used.any() or not right.isfinite().all():
        return coefficients.tolist(), 1.0
    scaled = matrix[used] / norms[used, None]
    solution = torch.linalg.pinv(scaled @ scaled.T, hermitian=True) @ (scaled @ right)
    coefficients[used] = solution / norms[used]
    residual = float((solution @ scaled - right).norm()) / max(float(right.norm()), 1e-300)
    return coefficients.tolist(), residual


def fraction(value: float) -> str:
    """Returns a number as a fraction where it is a simple one: ``2``, ``1/2``, ``3/4``."""
    for below in (1, 2, 3, 4, 6, 8) if math.isfinite(value) else ():
        if abs(value * below - round(value * below)) < 1e-4 and abs(value * below) < 100:
            return f"{round(value * below)}" + (f"/{below}" if below > 1 else "")
    return f"{value:.5g}"


@dataclass(frozen=True)
class Observation:
    """What is known of a wrong gradient on one rank.

    coefficients: of each loss term and micro-batch of the reference, which is part · A + micro-batch; NaN if that
    contributes nothing. residual: what no coefficients explain, relative. near: how close to a number a coefficient
    must be. alike: all ranks have the same gradient. scope: "all" parameters are wrong, only "experts", or "some".
    loss_factor: the logged loss, divided by the reference's. tokens: numbers of tokens of the global batch, with a
    label and all. permutation: for each expert the one whose gradient it has. halves: the halves of the tensor are
    exchanged. sums_up: the gradients of the ranks that share the batch sum up to the right one.
    """

    coefficients: Mapping[tuple[str, int], float] = field(default_factory=dict)
    residual: float = 0.0
    largest_residual: float = 1e-6
    near: float = 1e-4
    part: int = 0
    alike: bool = True
    scope: str = "some"
    ranks: int = 2
    parts: int = 2
    micro_batches: int = 1
    tokens: Sequence[int] = ()
    loss_factor: float = 1.0
    absent: bool = False
    permutation: Sequence[int] = ()
    halves: bool = False
    sums_up: bool = False

    @property
    def known(self) -> dict[tuple[str, int], float]:
        """The coefficients that are no NaN."""
        return {key: c for key, c in self.coefficients.items() if c == c}

    def of(self, term: str = "", *, but: str = "", part: int | None = None) -> list[float]:
        """Returns the coefficients of one term, of all but one, or of one part."""
        keys = [(of, m) for of, m in self.known if term in ("", of) and of != but]
        return [self.known[of, m] for of, m in keys if part is None or m // self.micro_batches == part]

    def same(self, values: Iterable[float], value: float) -> bool:
        return all(abs(c - value) < self.near * max(1.0, abs(value)) for c in values)

    @property
    def terms(self) -> list[str]:
        return list(dict.fromkeys(term for term, _ in self.coefficients))

    @property
    def by_micro_batch(self) -> dict[int, float]:
        """The coefficient of each micro-batch: that of the main loss, where it has one."""
        others = {m: c for (_, m), c in self.known.items()}
        return dict(sorted((others | {m: c for (term, m), c in self.known.items() if term == MAIN}).items()))


class Cause(NamedTuple):
    """A cause in words, and the way out."""

    words: str
    way_out: str = ""


class DiagnosisRow(NamedTuple):
    """A row of the table: what is observed, and what it means, "" where that is not observed."""

    observed: str
    means: Callable[[Observation], str]
    way_out: str


def sizes_of(seen: Observation) -> dict[str, int]:
    """Returns the sizes of a training by which something may be multiplied or divided."""
    sizes = {"data ranks": seen.parts, "ranks that share a batch": seen.ranks // seen.parts}
    sizes |= {"ranks": seen.ranks} if seen.ranks not in sizes.values() else {}
    sizes |= {"micro-batches": seen.micro_batches}
    return {name: size for name, size in sizes.items() if size > 1}


def factor_words(seen: Observation, value: float) -> str:
    """Returns what a factor may come from: every size that it equals is named."""
    found = []
    for name, size in sizes_of(seen).items():
        if seen.same([value], size):
            summed = f"summed over {size} {name} instead of averaged, or counted twice"
            found.append(f"not divided by the {size} micro-batches" if name == "micro-batches" else summed)
        elif abs(value * size - 1) < seen.near:
            found.append(f"divided by {size} {name} once too often")
        elif seen.same([value], size * size):
            found.append(f"multiplied by {size} {name} twice")
    tokens = [f"multiplied by the {n} tokens of the batch" for n in seen.tokens if n > 1 and seen.same([value], n)]
    found += tokens[:1]
    return " or ".join(found) or "a constant factor"


def _own_steps(seen: Observation) -> str:
    value = 1 / seen.parts
    fits = seen.scope == "all" and seen.parts > 1 and seen.same([*seen.of(), seen.loss_factor], value)
    return f"{fraction(value)} × the reference, as the logged loss: step divides by a configured number" if fits else ""


def _factor(seen: Observation) -> str:
    value = seen.of()[0]
    if not seen.same(seen.of(), value) or _own_steps(seen):
        return ""
    where = " on experts only" * (seen.scope == "experts")
    return f"{fraction(value)} × the reference{where}: {factor_words(seen, value)}"


def _term(seen: Observation) -> str:
    for term in seen.terms:
        values, rest = seen.of(term), seen.of(but=term)
        if term != MAIN and values and rest and seen.same(rest, 1) and seen.same(values, values[0]):
            means = "it has no gradient" if seen.same(values, 0) else factor_words(seen, values[0])
            return f"{term} counts {fraction(values[0])} ×: {means}"
    return ""


def _no_main(seen: Observation) -> str:
    main, others = seen.of(MAIN), seen.of(but=MAIN)
    text = "main loss has no gradient here, the rest is right: detached, or an operation without a backward"
    return text if main and others and seen.same(main, 0) and seen.same(others, 1) else ""


def _own_tokens(seen: Observation) -> str:
    own = seen.of(part=seen.part)
    rest = [c for part in range(seen.parts) if part != seen.part for c in seen.of(part=part)]
    if seen.alike or not own or not rest or not seen.same(rest, 0) or not seen.same(own, own[0]):
        return ""
    return f"only this rank's own tokens, {fraction(own[0])} ×: not reduced over the {seen.parts} data ranks"


def _missing(seen: Observation) -> str:
    alive = {m: c for m, c in seen.by_micro_batch.items() if not seen.same([c], 0)}
    dead = [m for m in seen.by_micro_batch if m not in alive]
    value = next(iter(alive.values()), 0.0)
    if not dead or not alive or not seen.alike or not seen.same(alive.values(), value):
        return ""
    lost = ", ".join(f"part {m // seen.micro_batches} micro-batch {m % seen.micro_batches}" for m in dead)
    return f"tokens of {lost} are missing" + ("" if seen.same([value], 1) else f", the rest is {fraction(value)} ×")


def _means(seen: Observation) -> str:
    main = {m: c for (term, m), c in seen.known.items() if term == MAIN}
    number = seen.parts * seen.micro_batches
    if len(main) < number or min(map(abs, main.values())) < seen.near or seen.same(main.values(), 1):
        return ""
    first = [main[part * seen.micro_batches] for part in range(seen.parts)]
    by_part = all(seen.same([c], first[m // seen.micro_batches]) for m, c in main.items())
    # The sum of n_p / N over the parts, or of n_m / N over the micro-batches, is 1.
    if abs(math.fsum(1 / c for c in main.values()) - number) > 10 * seen.near * number:
        return ""
    of = "rank" if by_part else "micro-batch"
    weights = f"({fraction(min(main.values()))} to {fraction(max(main.values()))})"
    return f"means of each {of} are averaged: a token's weight depends on its {of} {weights}"


def _accumulated(seen: Observation, *exponents: Callable[[int], int]) -> int:
    """Returns the size to whose power the coefficients of micro-batches are, 0 for none."""
    for exponent in exponents if seen.micro_batches > 1 else ():
        for name, size in sizes_of(seen).items():
            powers = {m: float(size) ** exponent(m % seen.micro_batches) for m in seen.by_micro_batch}
            if name != "micro-batches" and all(seen.same([c], powers[m]) for m, c in seen.by_micro_batch.items()):
                return size
    return 0


def _reduced_again(seen: Observation) -> str:
    size = _accumulated(seen, lambda m: seen.micro_batches - 1 - m)
    words = "the accumulated gradient is reduced, not its increase"
    return f"every backward multiplies what earlier micro-batches left by {size}: {words}" if size else ""


def _scaled_again(seen: Observation) -> str:
    size = _accumulated(seen, lambda m: m - seen.micro_batches, lambda m: m + 1 - seen.micro_batches)
    words = "the accumulated buffer is scaled, not its increase"
    return f"every backward divides what earlier micro-batches left by {size}: {words}" if size else ""


# The rows of gradients, in their order. Of these the first that holds is the cause; of the others all that hold are.
ALONE = (
    DiagnosisRow(
        "the gradient is None on some ranks",
        lambda seen: NO_GRADIENT * seen.absent,
        "Touch every local expert on ranks without tokens: without a gradient there is no decay and no momentum.",
    ),
    DiagnosisRow(
        "rows of experts match other experts",
        lambda seen: f"experts permuted: {list(seen.permutation)}" if seen.permutation else "",
        "Check the order of ranks in the expert mesh.",
    ),
    DiagnosisRow(
        "the halves of a tensor are exchanged",
        lambda seen: "the halves of the tensor are exchanged, such as gate and up" * seen.halves,
        "Check the order of gate and up.",
    ),
    DiagnosisRow(
        "the ranks that share a batch sum up to the reference",
        lambda seen: PART_OF_A_SUM * seen.sums_up,
        "Sum it over the ranks that share the batch, such as in the backward of the collective before it.",
    ),
    DiagnosisRow(
        "the residual is large",
        lambda seen: FOLLOWS * (seen.residual > seen.largest_residual or not seen.known),
        "See the first output or gradient that differs.",
    ),
    DiagnosisRow(
        "all coefficients are 1",
        lambda seen: "1 × the reference: rounding only" * seen.same(seen.of(), 1),
        "It computes in float32 somewhere; nothing is to be done.",
    ),
    DiagnosisRow(
        "all coefficients are 0",
        lambda seen: "the gradient is zero: nothing reaches it" * seen.same(seen.of(), 0),
        "Look for a detach, or for an operation without a backward.",
    ),
)
TOGETHER = (
    DiagnosisRow(
        "all coefficients and the logged loss are 1/P",
        _own_steps,
        "Take the number of micro-batches from the argument of step: the reference gets those of all parts.",
    ),
    DiagnosisRow(
        "all coefficients are the same",
        _factor,
        "Compare the factor of the loss with the division of DDP or FSDP (set_gradient_divide_factor).",
    ),
    DiagnosisRow(
        "a loss term has another coefficient, the rest 1",
        _term,
        "Check the scale of this term: divided once by ranks, once by micro-batches, and not detached.",
    ),
    DiagnosisRow(
        "the main loss has 0, other terms 1",
        _no_main,
        "Use a collective with a backward (torch.distributed.nn.functional) and no detach on this path.",
    ),
    DiagnosisRow(
        "only the rank's own part has coefficients, and ranks differ",
        _own_tokens,
        "Mark the parameter for the reduction over the data ranks, or place its gradient as Partial.",
    ),
    DiagnosisRow(
        "some parts or micro-batches have 0, and ranks are alike",
        _missing,
        "Check zero_grad and no_sync in accumulation, and the sampler of these ranks.",
    ),
    DiagnosisRow(
        "parts, or micro-batches, have coefficients N / (P · n)",
        _means,
        "Sum the losses of tokens, and divide by the tokens of the global batch.",
    ),
    DiagnosisRow(
        "the coefficient of micro-batch m is R^(A-1-m)",
        _reduced_again,
        "Reduce the increase of the gradient, or once after the last backward.",
    ),
    DiagnosisRow(
        "the coefficient of micro-batch m is 1 / R^(A-m)",
        _scaled_again,
        "Scale the increase of the gradient, or once after the last backward.",
    ),
)


def explain(seen: Observation) -> Cause:
    """Returns the cause of a wrong gradient: of final rows the first, of the others all that hold, else numbers."""
    for row in ALONE:
        if words := row.means(seen):
            return Cause(words, row.way_out)
    found = [Cause(words, row.way_out) for row in TOGETHER if (words := row.means(seen))]
    numbers = ", ".join(f"{term} {m}: {fraction(c)}" for (term, m), c in seen.known.items())
    found = found or [Cause(f"coefficients {numbers}", "Compare them with the factors that the trainer applies.")]
    return Cause(" or ".join(c.words for c in found), " ".join(dict.fromkeys(c.way_out for c in found)))


def explain_norm(
    norm: float, right: float, gradients: Mapping[str, float], own: Sequence[Mapping[str, float]], rank: int
) -> Cause:
    """Returns the cause of a wrong norm.

    gradients: the squares of the whole gradients that this rank has. own: of each rank, the squares of its own parts.
    """
    experts, ranks, mine = set(filter(is_of_experts, gradients)), len(own), own[rank]
    others = {name: square for name, square in gradients.items() if name not in experts}
    candidates = {
        "right for its gradients, which are wrong": sum(gradients.values()),
        "of this rank's shards only: not reduced over the ranks": sum(mine.values()),
        "the mean of the ranks' own norms": (sum(root_of(list(each.values())) for each in own) / ranks) ** 2,
        "experts of other ranks are missing": sum(mine.get(n, s) if n in experts else s for n, s in gradients.items()),
        "what ranks have alike counts once for each rank": sum(each.get(n, 0.0) for each in own for n in gradients),
        "experts count once for each rank": sum(s * (ranks if n in experts else 1) for n, s in gradients.items()),
        "without experts": sum(others.values()),
    }
    fitting = [words for words, square in candidates.items() if abs(norm - math.sqrt(square)) < 1e-5 * right]
    if fitting[:1] == ["right for its gradients, which are wrong"]:
        return Cause(fitting[0])
    way = "Sum the squares of each parameter over the ranks that hold different parts of it, then take the root."
    return Cause(" or ".join(fitting) or f"{norm / right:.4g} × the reference", way)
