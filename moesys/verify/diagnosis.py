"""From what was observed of a wrong gradient or norm to its cause and the way out, by one table of rows.

A gradient is a sum of the reference's contributions, each with a coefficient: right ones have 1. P parts (ranks with
data of their own), R ranks, A micro-batches of a part.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from fractions import Fraction
from itertools import product
from typing import NamedTuple

import torch
from torch import Tensor

from moesys.verify.setup import is_of_experts

MAIN = "main loss"
FOLLOWS = "no sum of the reference's parts: follows from an earlier tensor"


class Cause(NamedTuple):
    """A cause in words, and the way out."""

    words: str
    way_out: str = ""


# The causes that are seen without coefficients, each with its way out.
FOUND = {
    "absent": Cause("has no gradient (None)", "Touch every local expert: without a gradient there is no momentum."),
    "permuted": Cause("experts permuted", "Check the order of ranks in the expert mesh, and loading."),
    "halves": Cause("exchanged halves of the tensor, such as gate and up", "Check the order of gate and up."),
    "part of a sum": Cause("each rank has a part of a sum", "Sum it over the ranks that share the batch."),
}


def error_of(got: Tensor, right: Tensor, scale: float = 0.0) -> float:
    """Returns |got − right| / max(|right|, ``scale``) by Frobenius norms; infinite for another shape, and for NaN."""
    if got.shape != right.shape:
        return math.inf
    error = float((got.double() - right.double()).norm()) / max(float(right.double().norm()), scale, 1e-300)
    return math.inf if math.isnan(error) else error


def fit(got: Tensor, vectors: Sequence[Tensor]) -> tuple[list[float], float]:
    """Returns the coefficients of the ``vectors`` whose sum is nearest to ``got``, NaN for a vector of zeros, and the
    relative residual.
    """
    matrix, right = torch.stack([vector.double().flatten() for vector in vectors]), got.double().flatten()
    norms = matrix.norm(dim=1)
    used = norms > 1e-10 * norms.max()
    if not used.any() or not right.isfinite().all():
        return len(vectors) * [math.nan], 1.0
    scaled = matrix[used] / norms[used, None]
    solution = torch.linalg.pinv(scaled @ scaled.T, hermitian=True) @ (scaled @ right)
    coefficients = torch.full_like(norms, math.nan).masked_scatter(used, solution / norms[used])
    return coefficients.tolist(), float((solution @ scaled - right).norm()) / max(float(right.norm()), 1e-300)


def fraction(value: float) -> str:
    """Returns a number as a fraction where it is a simple one: ``2``, ``1/2``, ``3/4``."""
    near = Fraction(value).limit_denominator(8) if math.isfinite(value) and abs(value) < 100 else math.inf
    return str(near) if abs(value - near) < 5e-5 else f"{value:.5g}"


@dataclass(frozen=True)
class Observation:
    """What is known of a wrong gradient on one rank.

    coefficients: of each loss term and micro-batch of the reference, which is part · A + micro-batch, where it
    contributes. residual: what no coefficients explain, relative. tolerance: the largest error that is rounding. alike:
    all ranks have the same gradient. scope: "all" parameters are wrong, only "experts", or "some". loss_factor: the
    logged loss, divided by the reference's. tokens: numbers of tokens of the global batch, with a label and all.
    """

    coefficients: Mapping[tuple[str, int], float] = field(default_factory=dict)
    residual: float = 0.0
    tolerance: float = 0.0
    part: int = 0
    alike: bool = True
    scope: str = "some"
    ranks: int = 2
    parts: int = 2
    micro_batches: int = 1
    tokens: Sequence[int] = ()
    loss_factor: float = 1.0

    @property
    def fits(self) -> bool:
        """True if coefficients explain the gradient."""
        return bool(self.coefficients) and self.residual <= min(max(1e-6, 100 * self.tolerance), 0.05)

    def same(self, values: Iterable[float], value: float) -> bool:
        near = min(max(1e-4, 100 * self.tolerance), 0.02)
        return all(abs(c - value) < near * max(1.0, abs(value)) for c in values)

    @property
    def by_micro_batch(self) -> dict[int, float]:
        """The coefficient of each micro-batch: that of the main loss, where it has one."""
        return {m: c for (_, m), c in sorted(self.coefficients.items(), key=lambda item: item[0][0] == MAIN)}


def sizes_of(seen: Observation) -> dict[str, int]:
    """Returns the sizes of a training by which something may be multiplied or divided."""
    sizes = {"data ranks": seen.parts, "ranks that share a batch": seen.ranks // seen.parts}
    sizes |= {"micro-batches": seen.micro_batches, "ranks": seen.ranks * (1 < seen.parts < seen.ranks)}
    return {name: size for name, size in sizes.items() if size > 1}


def factor_words(seen: Observation, value: float) -> str:
    """Returns what a factor may come from: every size that it equals is named."""
    if seen.same([value], 0) or seen.same([value], 1):
        return "nothing reaches it" if value < 0.5 else "rounding only, where it computes in float32"
    if seen.scope == "all" and seen.parts > 1 and seen.same([value, seen.loss_factor], 1 / seen.parts):
        return "as the logged loss: step divides by a configured number, not by that of its micro-batches"
    found = list[str]()
    for name, size in sizes_of(seen).items():
        once = f"summed over {size} {name} instead of averaged, or counted twice"
        once = f"not divided by the {size} micro-batches" if name == "micro-batches" else once
        often = {1 / size: f"divided by {size} {name} once too often", size**2: f"multiplied by {size} {name} twice"}
        found += [words for each, words in {size: once, **often}.items() if seen.same([value], each)]
    tokens = [f"multiplied by the {n} tokens of the batch" for n in seen.tokens if n > 1 and seen.same([value], n)]
    return " or ".join([*found, *tokens[:1]]) or "a constant factor"


# --- rows of coefficients: each returns what an observation means, "" where it says nothing --------------------------


def factor(seen: Observation) -> str:
    value = next(iter(seen.coefficients.values()))
    where = " on experts only" * (seen.scope == "experts")
    same = seen.same(seen.coefficients.values(), value)
    return f"{fraction(value)} × the reference{where}: {factor_words(seen, value)}" * same


def loss_term(seen: Observation) -> str:
    for term in dict.fromkeys(term for term, _ in seen.coefficients):
        values = [c for (each, _), c in seen.coefficients.items() if each == term]
        rest = [c for (each, _), c in seen.coefficients.items() if each != term]
        if rest and seen.same(rest, 1) and seen.same(values, values[0]) and not seen.same(values, 1):
            return f"{term} counts {fraction(values[0])} ×: {factor_words(seen, values[0])}"
    return ""


def own_tokens(seen: Observation) -> str:
    own = [c for (_, m), c in seen.coefficients.items() if m // seen.micro_batches == seen.part]
    rest = [c for (_, m), c in seen.coefficients.items() if m // seen.micro_batches != seen.part]
    if seen.alike or not own or not rest or not seen.same(rest, 0) or not seen.same(own, own[0]):
        return ""
    return f"only this rank's own tokens, {fraction(own[0])} ×: not reduced over the {seen.parts} data ranks"


def missing(seen: Observation) -> str:
    dead = [m for m, c in seen.by_micro_batch.items() if seen.same([c], 0)]
    alive = [c for m, c in seen.by_micro_batch.items() if m not in dead]
    if not dead or not alive or not seen.alike or not seen.same(alive, alive[0]):
        return ""
    lost = ", ".join(f"part {m // seen.micro_batches} micro-batch {m % seen.micro_batches}" for m in dead)
    rest = "" if seen.same(alive, 1) else f", the rest is {fraction(alive[0])} ×"
    return f"tokens of {lost} are missing{rest}"


def means(seen: Observation) -> str:
    main = {m: c for (term, m), c in seen.coefficients.items() if term == MAIN}
    number = seen.parts * seen.micro_batches
    if len(main) < number or any(seen.same([c], 0) for c in main.values()) or seen.same(main.values(), 1):
        return ""
    # The sum of n_p / N over the parts, or of n_m / N over the micro-batches, is 1.
    if not seen.same([math.fsum(1 / c for c in main.values()) / number], 1):
        return ""
    by_part = all(seen.same([c], main[m - m % seen.micro_batches]) for m, c in main.items())
    of = "rank" if by_part else "micro-batch"
    weights = f"({fraction(min(main.values()))} to {fraction(max(main.values()))})"
    return f"means of each {of} are averaged: a token's weight depends on its {of} {weights}"


def accumulated(seen: Observation) -> str:
    sizes = [size for name, size in sizes_of(seen).items() if name != "micro-batches" and seen.micro_batches > 1]
    ways = ((1, "multiplies", "gradient is reduced"), (-1, "divides", "buffer is scaled"))
    for size, (sign, verb, what), last in product(sizes, ways, (0, 1)):
        powers = {m: sign * (seen.micro_batches - 1 + last - m % seen.micro_batches) for m in seen.by_micro_batch}
        if all(seen.same([c], float(size) ** powers[m]) for m, c in seen.by_micro_batch.items()):
            words = f"every backward {verb} what earlier micro-batches left by {size}"
            return f"{words}: the accumulated {what}, not its increase"
    return ""


# The rows of coefficients, and their ways out. All rows that hold are the cause.
Row = Callable[[Observation], str]
ROWS: dict[Row, str] = {
    factor: "Compare the factor of the loss with the division of DDP or FSDP (set_gradient_divide_factor).",
    loss_term: "Divide it by ranks and micro-batches once; if it counts 0 ×, look for a detach on its path.",
    own_tokens: "Mark the parameter for the reduction over the data ranks, or place its gradient as Partial.",
    missing: "Check zero_grad and no_sync in accumulation, and the sampler of these ranks.",
    means: "Sum the losses of tokens, and divide by the tokens of the global batch.",
    accumulated: "Reduce or scale the increase of the gradient, or all of it once after the last backward.",
}


def explain(seen: Observation) -> Cause:
    """Returns the cause of a wrong gradient: that of all rows that hold, or the numbers."""
    if not seen.fits:
        return Cause(FOLLOWS, "See the first output or gradient that differs.")
    found = {words: way_out for row, way_out in ROWS.items() if (words := row(seen))}
    if not found:
        numbers = ", ".join(f"{term} {m}: {fraction(c)}" for (term, m), c in seen.coefficients.items())
        found = {f"coefficients {numbers}": "Compare them with the factors that the trainer applies."}
    return Cause(" or ".join(found), " ".join(dict.fromkeys(found.values())))


def explain_norm(
    norm: float, right: float, gradients: Mapping[str, float], own: Sequence[Mapping[str, float]], rank: int
) -> Cause:
    """Returns the cause of a wrong norm.

    gradients: the squares of the whole gradients that this rank has. own: of each rank, the squares of its own parts.
    """
    experts, ranks, mine = set(filter(is_of_experts, gradients)), len(own), own[rank]
    candidates = {
        "right for its gradients, which are wrong": sum(gradients.values()),
        "of this rank's shards only: not reduced over the ranks": sum(mine.values()),
        "the mean of the ranks' own norms": (sum(math.sqrt(sum(each.values())) for each in own) / ranks) ** 2,
        "experts of other ranks are missing": sum(mine.get(n, s) if n in experts else s for n, s in gradients.items()),
        "what ranks have alike counts once for each rank": sum(each.get(n, 0.0) for each in own for n in gradients),
        "experts count once for each rank": sum(s * (ranks if n in experts else 1) for n, s in gradients.items()),
        "without experts": sum(s for n, s in gradients.items() if n not in experts),
    }
    fitting = [words for words, square in candidates.items() if abs(norm - math.sqrt(square)) < 1e-5 * right]
    if fitting[:1] == ["right for its gradients, which are wrong"]:
        return Cause(fitting[0])
    way = "Sum the squares of each parameter over the ranks that hold different parts of it, then take the root."
    return Cause(" or ".join(fitting) or f"{norm / right:.4g} × the reference", way)
