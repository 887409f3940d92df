"""Writes a comparison as markdown, CSV, JSON and LaTeX."""

from __future__ import annotations

import csv
import io
import re
from dataclasses import asdict
from typing import Any, Literal

import pydantic_core

from moesys.lab.runs.comparison import Comparison, Row
from moesys.lab.runs.records import setting_fingerprint
from moesys.lab.show.tables import comparison_sheet

Format = Literal["markdown", "csv", "json", "latex"]
COMPARISON_SCHEMA = 1

_LATEX = {
    "\\": r"\textbackslash{}",
    "~": r"$\sim$",
    "^": r"\textasciicircum{}",
    "×": r"$\times$",
    "<": r"$<$",
    ">": r"$>$",
    # After the end of a row a bracket would be read as its optional argument.
    "[": "{[}",
    "]": "{]}",
} | {character: f"\\{character}" for character in "&%$#_{}"}


def format_comparison(comparison: Comparison, form: Format, machine: str = "") -> str:
    """The whole text, newline at the end; ``machine`` is what the numbers were measured on, in a line."""
    match form:
        case "markdown":
            return to_markdown(comparison, machine)
        case "csv":
            return to_csv(comparison)
        case "json":
            return to_json(comparison, machine)
        case "latex":
            return to_latex(comparison, machine)


def to_markdown(comparison: Comparison, machine: str = "") -> str:
    """A heading, the table with the best rows in bold, the legend as a list."""
    sheet = comparison_sheet(comparison, machine)
    lines = [f"### {_markdown(sheet.title)}", "", _markdown_row([_markdown(column) for column in sheet.columns])]
    lines.append(_markdown_row([":--", *["--:"] * (len(sheet.columns) - 1)]))
    for cells, best in zip(sheet.rows, sheet.best, strict=True):
        marks = "**" if best else ""
        lines.append(_markdown_row([f"{marks}{_markdown(cell)}{marks}" if cell else "" for cell in cells]))
    lines += ["", *(f"- {_markdown(note)}" for note in sheet.legend)]
    return "\n".join(lines) + "\n"


def to_latex(comparison: Comparison, machine: str = "") -> str:
    """A table for the package booktabs, with the best rows in bold and the legend as its caption."""
    sheet = comparison_sheet(comparison, machine)
    caption = " ".join(_latex(note) for note in (f"{sheet.title}.", *sheet.legend))
    rows = []
    for cells, best in zip(sheet.rows, sheet.best, strict=True):
        rows.append(_latex_row([rf"\textbf{{{_latex(cell)}}}" if best and cell else _latex(cell) for cell in cells]))
    return "\n".join(
        [
            r"\begin{table}",
            r"\centering",
            rf"\begin{{tabular}}{{l{'r' * (len(sheet.columns) - 1)}}}",
            r"\toprule",
            _latex_row([_latex(column) for column in sheet.columns]),
            r"\midrule",
            *rows,
            r"\bottomrule",
            r"\end{tabular}",
            rf"\caption{{{caption}}}",
            r"\end{table}",
            "",
        ]
    )


def to_csv(comparison: Comparison) -> str:
    """One line a row with unrounded figures: of each metric the median, of the speed-up everything."""
    units = {metric: unit for row in comparison.rows for metric, unit in row.units.items()}
    text = io.StringIO()
    rows = [_csv_fields(row, comparison, units) for row in comparison.rows]
    writer = csv.DictWriter(text, list(rows[0]), lineterminator="\n")
    writer.writeheader()
    writer.writerows(rows)
    return text.getvalue()


def to_json(comparison: Comparison, machine: str = "") -> str:
    """Everything: the experiment with all defaults, and of each row its statistics, all samples and all losses.

    A number that JSON cannot hold is the string "NaN", "Infinity" or "-Infinity".
    """
    return (
        pydantic_core.to_json(
            {
                "schema": COMPARISON_SCHEMA,
                "source": comparison.source,
                "fingerprint": setting_fingerprint(comparison.experiment),
                "machine": machine,
                "environments": comparison.environments,
                "baseline": comparison.baseline.name,
                "best": sorted(comparison.best),
                "rows": [_json_fields(row) for row in comparison.rows],
                "experiment": comparison.experiment.model_dump(mode="json"),
            },
            indent=1,
            inf_nan_mode="strings",
        ).decode()
        + "\n"
    )


def _markdown_row(cells: list[str]) -> str:
    return f"| {' | '.join(cells)} |"


def _markdown(text: str) -> str:
    return re.sub(r"([\\`*_<>|])", r"\\\1", _one_line(text))


def _latex_row(cells: list[str]) -> str:
    return " & ".join(cells) + r" \\"


def _latex(text: str) -> str:
    return "".join(_LATEX.get(character, character) for character in _one_line(text))


def _one_line(text: str) -> str:
    return " ".join(text.split())


def _csv_fields(row: Row, comparison: Comparison, units: dict[str, str]) -> dict[str, Any]:
    ratio, agreement = row.speedup, row.agreement
    return {
        "strategy": row.name,
        "source": comparison.source,
        "n seeds": row.n,
        "failed seeds": len(row.failed),
        "speedup": ratio and ratio.estimate,
        "speedup low 95 %": ratio and ratio.low,
        "speedup high 95 %": ratio and ratio.high,
        "speedup p": ratio and ratio.p,
        "verdict": ratio and ratio.verdict,
        "loss at end (nats a token)": row.final_loss,
        "largest relative difference of a loss": agreement and agreement.difference,
        "numbers agree": agreement and agreement.holds,
        **{f"median {metric}{f' ({unit})' if unit else ''}": row.median(metric) for metric, unit in units.items()},
    }


def _json_fields(row: Row) -> dict[str, Any]:
    return {
        "name": row.name,
        "strategy": row.strategy.model_dump(mode="json"),
        "n": row.n,
        "failed": row.failed,
        "speedup": row.speedup and {**asdict(row.speedup), "verdict": row.speedup.verdict},
        "agreement": row.agreement and {**asdict(row.agreement), "bit_equal": row.agreement.bit_equal},
        "samples": {
            metric: {"unit": row.units[metric], "values_by_seed": by_seed} for metric, by_seed in row.samples.items()
        },
        "losses_by_seed": row.losses,
    }
