"""Each release, acquire, barrier and turn of the kernels, removed: alone, in the source of the function that has it.

What several functions call (``raise_flag``, ``wait``, ``is_last``) is weakened for one caller at a time, too.
"""

from __future__ import annotations

import ast
import importlib
import inspect
import re
import textwrap
import types
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import pytest
from weak_cases import Shown, WeakCase, run_once

from moesys.kernels.mega import arguments, exchange, mega_combine, mega_dispatch, push_rows, tasks
from moesys.kernels.symmetric import counts, pulls, signals

interpreter = importlib.import_module("triton.runtime.interpreter")

MODULES = (signals, counts, pulls, exchange, arguments, tasks, mega_dispatch, push_rows)
MODULES = (*MODULES, mega_combine)
# Records of tasks are read when their launch has ended, so that nothing of them travels between programs.
RECORDS = {"begin_task", "task_is_ready", "end_task", "_read_clock"}
BARRIER = ("barrier", "tl.debug_barrier()", "None")
AT_ONCE = "raise_at_sources(launch, flags_at_sources(launch, rows, tile, column_tile, came, sizes, tiling.rows), epoch)"
# What is removed, from what, by what.
WEAKENED = (
    BARRIER,
    ("release", 'sem="release"', 'sem="relaxed"'),
    ("acquire", 'sem="acquire"', 'sem="relaxed"'),
    ("release", 'sem="acq_rel"', 'sem="acquire"'),
    ("acquire", 'sem="acq_rel"', 'sem="release"'),
    ("other GPUs", 'scope="sys"', 'scope="gpu"'),
    # A tile's flags are raised behind its stores: never, and too early.
    ("its flags", "raise_at_sources(launch, late, epoch)", "None"),
    ("stores before its flags", "through = tl.cast(set_off(", f"{AT_ONCE}; through = tl.cast(set_off("),
)
SHARED = {"raise_flag": signals, "wait": signals, "is_last": arguments}
# A wait asks for flags by another function, and for nothing but whether it is to stop by itself.
WEAKENED_AT = {
    "raise_flag": (BARRIER, WEAKENED[1], WEAKENED[5]),
    "wait": (BARRIER, ("acquire", "_poll(", "relaxed_poll(")),
    "is_last": (BARRIER, WEAKENED[3], WEAKENED[4]),
}


@dataclass(frozen=True)
class Mutant:
    """``function`` of ``module`` has lost something: the ``place``-th ``old`` becomes ``new``. Where a ``callee`` is
    named the old is a call of it, and there alone it is weaker: ``weakens`` says what becomes of what, everywhere.
    """

    module: str
    function: str
    lost: str
    old: str
    new: str
    place: int
    callee: str = ""
    weakens: tuple[str, str] = ("", "")

    @property
    def name(self) -> str:
        number = f" {self.place + 1}" if self.place else ""
        of = f" of {self.callee}" if self.callee else ""
        return f"{self.module.rpartition('.')[2]}.{self.function}: {self.lost}{of}{number}"


def all_mutants() -> list[Mutant]:
    found = []
    for module in MODULES:
        for name, function in functions_of(module):
            source = source_of(function)
            for lost, old, new in WEAKENED:
                found += [Mutant(module.__name__, name, lost, old, new, place) for place in range(source.count(old))]
            for callee in SHARED:
                ways = [(lost, (old, new)) for lost, old, new in WEAKENED_AT[callee]]
                for place in range(len(re.findall(_call(callee), source))):
                    for lost, weakens in ways:
                        found.append(Mutant(module.__name__, name, lost, callee, "weaker", place, callee, weakens))
    return found


def _call(name: str) -> str:
    return rf"(?<!def )\b{name}(?=\()"


def functions_of(module: types.ModuleType) -> Iterator[tuple[str, Any]]:
    for name, value in list(vars(module).items()):
        interpreted = isinstance(value, interpreter.InterpretedFunction)
        if interpreted and value.fn.__module__ == module.__name__ and name not in RECORDS:
            yield name, value


def source_of(function: Any) -> str:
    source = textwrap.dedent(inspect.getsource(function.fn))
    return source[re.search(r"^def ", source, re.MULTILINE).start() :]


@contextmanager
def mutated(mutant: Mutant) -> Iterator[None]:
    module = importlib.import_module(mutant.module)
    function = getattr(module, mutant.function)
    pattern = re.escape(mutant.old)
    with pytest.MonkeyPatch.context() as patch:
        if mutant.callee:
            pattern, (old, new) = _call(mutant.callee), mutant.weakens
            callee = getattr(SHARED[mutant.callee], mutant.callee)
            relaxed = _compiled(signals._poll, source_of(signals._poll).replace("acquire", "relaxed"))
            patch.setattr(signals, "relaxed_poll", relaxed, raising=False)
            patch.setattr(module, "weaker", _compiled(callee, source_of(callee).replace(old, new)), raising=False)
        source = source_of(function)
        at = list(re.finditer(pattern, source))[mutant.place]
        changed = _compiled(function, source[: at.start()] + mutant.new + source[at.end() :])
        patch.setitem(interpreter.InterpretedFunction.rewritten_fn, function.fn, changed)
        yield


def _compiled(function: Any, source: str, first: str = "") -> Any:
    """As the interpreter would run the function if that were its source, behind a ``first`` statement."""
    # Once as it is, which brings the interpreter's names to where it is from.
    function.rewrite()
    tree = interpreter.FunctionRewriter.ast_transformer.visit(ast.parse(source))
    tree.body[0].body[:0] = ast.parse(first).body
    ast.fix_missing_locations(tree)
    found: dict[str, Any] = {}
    exec(compile(tree, f"<{function.fn.__name__}, mutated>", "exec"), function.fn.__globals__, found)
    return found[function.fn.__name__]


class Hunt:
    """Finds mutants by cases in which their function is called."""

    def __init__(self, cases: Mapping[str, WeakCase]) -> None:
        self._cases = cases
        self._calls = {name: _calls(case) for name, case in cases.items()}

    def find(self, mutant: Mutant, seeds: int) -> Shown | None:
        """Returns what shows it first, by ``seeds`` of each case in turn."""
        named = f"{mutant.module}.{mutant.function}"
        cases = [name for name in self._cases if named in self._calls[name]]
        with mutated(mutant):
            for seed in range(seeds):
                for name in cases:
                    shown = run_once(self._cases[name], seed)
                    if shown.by_memory or shown.by_result:
                        return shown
        return None


def _calls(case: WeakCase) -> set[str]:
    """Functions that a schedule of the case calls."""
    called: set[str] = set()
    with pytest.MonkeyPatch.context() as patch:
        for module in MODULES:
            patch.setattr(module, "called", called, raising=False)
            for name, function in functions_of(module):
                noting = _compiled(function, source_of(function), f"called.add('{module.__name__}.{name}')")
                patch.setitem(interpreter.InterpretedFunction.rewritten_fn, function.fn, noting)
        run_once(case, 0)
    return called
