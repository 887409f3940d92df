"""The budget of each package: the most lines of code and the most files that it may have.

A line of code is a line that is not blank, not a comment and not part of a docstring. Each commit that cuts lowers the
numbers of its package here. The totals are never raised: a package may only rise in a commit that lowers another by as
much, or with the issue that names the new feature.
"""

from __future__ import annotations

import ast
import io
import tokenize
from functools import cache
from pathlib import Path
from typing import NamedTuple

import pytest

ROOT = Path(__file__).parents[1]


class Budget(NamedTuple):
    lines: int
    files: int


# The files that lie in moesys/ itself, by the package of the design that they belong to.
GROUND = (
    *("load", "layout", "timeline", "schedule", "cost", "row_traffic", "traces", "compiled"),
    *("torch_private", "files", "step_lines", "collectives", "limits", "kinds", "journal"),
)
PACKAGES = {
    "moesys/config": ("config",),
    "moesys, ground files": GROUND,
    "moesys/kernels": ("kernels",),
    "moesys/balance": ("balance",),
    "moesys/overlap": ("overlap",),
    "moesys/moe": ("moe",),
    "moesys/simulator": ("simulator",),
    "moesys/tuner": ("tuner",),
    "moesys, hosts": ("hf",),
    "moesys/lab": ("lab",),
    "moesys, entry points": ("__init__", "__main__"),
}
BUDGETS = {
    "moesys/config": Budget(2_172, 19),
    "moesys, ground files": Budget(1_628, 15),
    "moesys/kernels": Budget(5_160, 50),
    "moesys/balance": Budget(5_424, 44),
    "moesys/overlap": Budget(3_036, 19),
    "moesys/moe": Budget(3_437, 20),
    "moesys/simulator": Budget(3_418, 25),
    "moesys/tuner": Budget(1_153, 9),
    "moesys, hosts": Budget(1_823, 11),
    "moesys/lab": Budget(8_194, 67),
    "moesys, entry points": Budget(430, 2),
    "benchmarks": Budget(4_070, 35),
    "experiments": Budget(1_394, 15),
    "tests": Budget(37_817, 293),
}
TOTAL = Budget(35_875, 281)
OUTSIDE = ("benchmarks", "experiments", "tests")


def code_lines(source: str) -> int:
    """Returns the number of lines that hold code: no blank lines, comments or docstrings."""
    layout = (tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT, tokenize.ENDMARKER)
    found: set[int] = set()
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type not in layout:
            found |= set(range(token.start[0], token.end[0] + 1))
    for node in ast.walk(ast.parse(source)):
        documented = isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef)
        if documented and ast.get_docstring(node, clean=False) is not None:
            found -= set(range(node.body[0].lineno, (node.body[0].end_lineno or 0) + 1))
    return len(found)


def measured(files: list[Path]) -> Budget:
    return Budget(sum(map(lines_of_file, files)), len(files))


@cache
def lines_of_file(path: Path) -> int:
    return code_lines(path.read_text())


def files_of(package: str) -> list[Path]:
    """Returns the Python files of a row of the table."""
    if package in OUTSIDE:
        return sorted((ROOT / package).rglob("*.py"))
    parts = PACKAGES[package]
    files = (ROOT / "moesys").rglob("*.py")
    return [path for path in files if path.relative_to(ROOT / "moesys").parts[0].removesuffix(".py") in parts]


def test_each_file_of_the_package_has_a_budget() -> None:
    in_table = [path for package in PACKAGES for path in files_of(package)]
    assert sorted(in_table) == sorted((ROOT / "moesys").rglob("*.py"))


@pytest.mark.parametrize("package", BUDGETS)
def test_a_package_keeps_to_its_budget(package: str) -> None:
    found, most = measured(files_of(package)), BUDGETS[package]
    assert found.lines <= most.lines, f"{package} has {found}, and its budget is {most}"
    assert found.files <= most.files, f"{package} has {found}, and its budget is {most}"


def test_budgets_are_lowered_with_what_they_measure() -> None:
    """A budget that is more than 2 % above what it measures would let the package grow back without a word."""
    for package, most in BUDGETS.items():
        found = measured(files_of(package))
        assert most.lines <= 1.02 * found.lines + 10, f"lower {package} to {found}"
        assert most.files <= found.files + 1, f"lower {package} to {found}"


def test_the_total_of_the_package_is_never_raised() -> None:
    inside = [most for package, most in BUDGETS.items() if package not in OUTSIDE]
    assert sum(most.lines for most in inside) <= TOTAL.lines
    assert sum(most.files for most in inside) <= TOTAL.files


@pytest.mark.parametrize(
    ("source", "lines"),
    [
        ('"""Doc."""\n\nx = 1\n', 1),
        ("# why\nx = 1  # and why\n\n\ny = 2\n", 2),
        ('def f():\n    """Doc\n    goes on.\n    """\n    return (\n        1,\n    )\n', 4),
        ('x = """\nno docstring\n"""\n', 3),
        ("class A:\n    'Doc.'\n    b: int\n", 2),
    ],
)
def test_lines_of_code_are_counted(source: str, lines: int) -> None:
    assert code_lines(source) == lines
