"""What a check found: a table of 80 columns, JSON, and an exit code."""

from __future__ import annotations

import json
import platform
from dataclasses import asdict, dataclass, field
from textwrap import wrap
from typing import Any

import torch

from moesys.display import counted
from moesys.verify.comparison import PLACES, Finding

SCHEMA = 1
WIDTH = 80
# The columns of the table: situation, stage, tensor, ranks, error; the cause is below each row.
_COLUMNS = (13, 10, 38, 7, 8)


@dataclass
class SituationResult:
    """What one situation showed.

    definition: what the loss of the user means. in_float32: whether float32 has the fault too. not_checked: why the
    situation was not checked. spread: the median rounding of gradients, relative.
    """

    name: str
    dtype: str = ""
    findings: list[Finding] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    definition: str = ""
    in_float32: str = ""
    not_checked: str = ""
    compared: dict[str, set[str]] = field(default_factory=dict)
    spread: float = 0.0
    seconds: float = 0.0

    @property
    def verdict(self) -> str:
        return "WRONG" if self.findings else "not checked" if self.not_checked else "right"


@dataclass
class CheckReport:
    """The result of a check. error: why it could not be carried out to the end."""

    check: str
    ranks: int
    dtype: str
    situations: list[SituationResult] = field(default_factory=list)
    error: str = ""
    seconds: float = 0.0

    @property
    def findings(self) -> list[Finding]:
        """All findings, situation after situation, each in the order of a step."""
        return [finding for situation in self.situations for finding in situation.findings]

    @property
    def exit_code(self) -> int:
        """0 if the training is right, 1 if it is wrong, 2 if it could not be checked."""
        if self.findings:
            return 1
        return 2 if self.error or not any(each.verdict == "right" for each in self.situations) else 0

    def require_right(self) -> None:
        """Raises AssertionError, with the report, unless the training is right."""
        if self.exit_code:
            raise AssertionError(f"\n{self}")

    def __str__(self) -> str:
        wrong = [each for each in self.situations if each.findings]
        checked = [each for each in self.situations if not each.not_checked]
        words = "right in" if not wrong else f"WRONG in {len(wrong)} of"
        words = f"{words} {counted(len(checked), 'situation')}" if wrong or not self.error else "could not be checked"
        lines = [f"{self.check}, {self.ranks} ranks, {self.dtype}: {words}, {self.seconds:.0f} s"]
        if wrong:
            lines += ["", _row(("situation", "stage", "tensor", "ranks", "error"))]
        for situation in wrong:
            lines += _table(situation)
        if self.error:
            lines += ["", f"Error: {self.error}"]
        return "\n".join([*lines, *self._notes()])

    def _notes(self) -> list[str]:
        lines = [""]
        definitions = dict.fromkeys(each.definition for each in self.situations if each.definition)
        lines += [f"Definition: {words}." for words in definitions]
        parameters, outputs, skipped, rounded = (
            set().union(*(each.compared.get(kind, ()) for each in self.situations))
            for kind in ("parameters", "outputs", "skipped", "rounded")
        )
        if parameters:
            numbers = f"{len(parameters)} parameters, {len(outputs)} outputs"
            lines.append(f"Compared: {numbers}; {len(skipped - outputs)} outputs have another shape or hold padding.")
            spread = max(each.spread for each in self.situations)
            lines.append(f"Rounding of the reference itself: {spread:.0e} (median of gradients).")
        if rounded:
            lines.append(f"Note: {len(rounded)} tensors differ by float32's rounding, such as {min(rounded)}.")
        for each in self.situations:
            lines += [f"Note ({each.name}): {note}." for note in each.notes]
            lines += [f"Not checked: {each.name}, as {each.not_checked}."] if each.not_checked else []
        wrapped = [line for text in lines for line in (wrap(text, WIDTH) or [""])]
        return wrapped if len(lines) > 1 else []

    def to_json(self) -> str:
        """Returns the report as JSON, with the environment and a number that changes with its schema."""
        found: dict[str, Any] = {"schema": SCHEMA, "exit_code": self.exit_code, **asdict(self)}
        found["environment"] = {"torch": torch.__version__, "python": platform.python_version()}
        return json.dumps(found, indent=2, default=sorted)


def _row(cells: tuple[str, ...]) -> str:
    parts = []
    for cell, width in zip(cells, _COLUMNS, strict=True):
        cell = cell if len(cell) <= width - 1 else "…" + cell[2 - width :]
        parts.append(cell.ljust(width))
    return "  " + "".join(parts).rstrip()


def _table(situation: SituationResult) -> list[str]:
    lines, name = [], situation.name
    shown = [finding for finding in situation.findings if not finding.follows]
    follow = [finding for finding in situation.findings if finding.follows]
    for finding in shown or follow[:1]:
        ranks = ", ".join(map(str, finding.ranks))
        lines.append(_row((name, finding.stage, finding.tensor, ranks, f"{finding.error:.1g}")))
        lines += [f"{'':15}{line}" for line in wrap(finding.cause, WIDTH - 15)]
        name = ""
    if shown and follow:
        words = f"{counted(len(follow), 'other difference')} of gradients: no sum of the reference's parts."
        lines += [f"{'':15}{line}" for line in wrap(words, WIDTH - 15)]
    first = situation.findings[0]
    place = f"First: {first.stage} of {first.tensor}."
    if not any(finding.stage in PLACES for finding in situation.findings) and first.stage in ("gradient", "norm"):
        place += " All outputs and gradients of outputs are right."
    ways = list(dict.fromkeys(finding.way_out for finding in situation.findings if finding.way_out))
    way_out = f" Way out: {ways[0]}" if ways else ""
    text = f"{place} {situation.in_float32}".rstrip() + way_out
    return [*lines, *(f"  {line}" for line in wrap(text, WIDTH - 2))]
