"""The budget of each package, and the rules for names and docstrings that a program can check.

A budget is the most lines of code and the most files that a package may have. A line of code is a line that is not
blank, not a comment and not part of a docstring. Each commit that cuts lowers the numbers of its package here. The
totals are never raised: a package may only rise in a commit that lowers another by as much, or with the issue that
names the new feature.
"""

from __future__ import annotations

import ast
import re
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
    *("torch_private", "files", "step_lines", "collectives", "frames", "limits", "kinds", "journal", "display"),
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
    "moesys, hosts": ("hf", "megatron", "torchtitan"),
    "moesys/lab": ("lab",),
    "moesys/verify": ("verify",),
    "moesys, entry points": ("__init__", "__main__", "models", "planning"),
}
BUDGETS = {
    "moesys/config": Budget(2_132, 13),
    "moesys, ground files": Budget(2_432, 17),
    "moesys/kernels": Budget(4_917, 39),
    "moesys/balance": Budget(5_467, 37),
    "moesys/overlap": Budget(2_859, 15),
    "moesys/moe": Budget(4_529, 22),
    "moesys/simulator": Budget(2_240, 12),
    "moesys/tuner": Budget(853, 6),
    "moesys, hosts": Budget(2_908, 16),
    "moesys/lab": Budget(7_531, 50),
    "moesys/verify": Budget(1_356, 8),
    "moesys, entry points": Budget(268, 4),
    "benchmarks": Budget(7_536, 56),
    "experiments": Budget(1_507, 16),
    "tests": Budget(42_157, 318),
}
TOTAL = Budget(37_492, 239)
OUTSIDE = ("benchmarks", "experiments", "tests")


def code_lines(source: str) -> int:
    """Returns the number of lines that hold code: no blank lines, comments or docstrings."""
    written = (line.strip() for line in source.splitlines())
    found = {number for number, line in enumerate(written, 1) if line and not line.startswith("#")}
    documentation: set[int] = set()
    for node in ast.walk(tree_of(source)):
        match node:
            # Its lines count also where they are blank, or begin as a comment does.
            case ast.Constant(value=str()) | ast.JoinedStr() if node.end_lineno != node.lineno:
                found |= lines_of(node)
            case ast.Module() | ast.ClassDef() | ast.FunctionDef() | ast.AsyncFunctionDef():
                if ast.get_docstring(node, clean=False) is not None:
                    documentation |= lines_of(node.body[0])
    return len(found - documentation)


def lines_of(node: ast.expr | ast.stmt) -> set[int]:
    return set(range(node.lineno, (node.end_lineno or 0) + 1))


@cache
def tree_of(source: str) -> ast.Module:
    return ast.parse(source)


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


def test_slow_tests_that_are_listed_exist() -> None:
    for line in (ROOT / "tests" / "slow.txt").read_text().splitlines():
        if line and not line.startswith("#"):
            file, name = re.fullmatch(r"(\S+\.py)::(\w+)(?:\[.+\])?", line).groups()  # type: ignore[union-attr]
            assert f"\ndef {name}(" in (ROOT / "tests" / file).read_text(), line


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


# --- names and docstrings ---------------------------------------------------------------------------------------------


def words_of(text: str) -> set[str]:
    """Returns the words of a list."""
    return set(re.findall(r"\w+", text))


# Words that end in "s" and are no verbs in the third person.
NOT_VERBS = words_of(
    """
    across always as besides has his is its less perhaps plus sometimes this those thus towards unless us was whereas
    whose yes bias bytes choices class classes columns cores departures elements errors experts fields flops folders
    gradients halves indices items keys kinds lanes layers levels losses megakernels milliseconds nodes options others
    pairs parameters ranks replicas results rows seconds seeds slots spans strategies tables tasks tensors tiles tokens
    trays units values words
    """
)
# Words that are verbs or plural nouns: nouns where one of the words below follows, or a shape.
VERBS_OR_NOUNS = words_of(
    """
    addresses blocks copies counts files groups kernels lines links lists loads maps measures messages names notes
    numbers pages parts plans processes programs queries scores shares shards spreads stages states steps sums tests
    times weights
    """
)
AFTER_NOUNS = words_of("and are by for from in is of on or per that to which with")


@cache
def sources(package: str = "moesys") -> list[tuple[str, ast.Module]]:
    """Returns the path below ``package`` and the syntax tree of each file."""
    files = sorted((ROOT / package).rglob("*.py"))
    return [(path.relative_to(ROOT / package).as_posix(), tree_of(path.read_text())) for path in files]


def begins_with_a_verb(docstring: str) -> bool:
    """Returns whether the first word of a docstring is a verb in the third person."""
    first, rest = re.match(r"([^\s,]*),?\s*(.*)", docstring, re.DOTALL).groups()
    word = first.lower()
    if not re.fullmatch(r"[A-Z][a-z-]*[^s\W]s", first) or word in NOT_VERBS:
        return False
    following = rest.split(maxsplit=1)[0] if rest.strip() else ""
    return word not in VERBS_OR_NOUNS or not (following in AFTER_NOUNS or following.startswith("["))


def begins_with_any_word(file: str, function: ast.FunctionDef | ast.AsyncFunctionDef) -> bool:
    """Returns whether the docstring describes a value, as that of a property does, or is the help text of a command."""
    names = [ast.unparse(decorator) for decorator in function.decorator_list]
    is_command = file == "__main__.py" and any(name.startswith("app.command(") for name in names)
    return is_command or any(name.rpartition(".")[2] in ("property", "cached_property") for name in names)


def test_docstrings_of_functions_begin_with_a_verb_in_the_third_person() -> None:
    found = [
        f"{file}:{node.lineno} {node.name}: {docstring.splitlines()[0]}"
        for file, tree in sources()
        for node in ast.walk(tree)
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
        and (docstring := ast.get_docstring(node))
        and not begins_with_any_word(file, node)
        and not begins_with_a_verb(docstring)
    ]
    assert not found, "\n".join(["begin with a verb, such as Returns:", *found])


def test_no_public_name_of_a_class_is_defined_twice() -> None:
    places: dict[str, list[str]] = {}
    for file, tree in sources():
        for node in ast.walk(tree):
            # torchtitan finds the configuration of a component by the name Config inside of its class.
            if isinstance(node, ast.ClassDef) and not node.name.startswith("_") and node.name != "Config":
                places.setdefault(node.name, []).append(f"{file}:{node.lineno}")
    twice = [f"{name}: {', '.join(where)}" for name, where in places.items() if len(where) > 1]
    assert not twice, "\n".join(["give one of them another name:", *twice])


@pytest.mark.parametrize(
    ("docstring", "verb"),
    [
        *(("Returns the rows.", True), ("Re-runs a step.", True), ("Goes on.", True), ("Plans each layer.", True)),
        *(("Return the rows.", False), ("returns the rows", False), ("``x``, doubled.", False), ("Class.", False)),
        *(("Seconds of a rank.", False), ("Plans of a step.", False), ("Counts [R, E].", False), ("Unless.", False)),
    ],
)
def test_verbs_are_told_from_nouns(docstring: str, verb: bool) -> None:
    assert begins_with_a_verb(docstring) == verb
