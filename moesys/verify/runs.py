"""The runs of a check, ranks and the reference in processes of their own, and its report: a table, and JSON."""

from __future__ import annotations

import importlib
import json
import platform
import re
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing, suppress
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from textwrap import wrap
from typing import Any

import torch

from moesys.display import counted
from moesys.kinds import did_you_mean
from moesys.lab.ranks.pool import LocalRanks, RankError, RankTimeouts
from moesys.verify.comparison import Finding, NearTieError, TrainingComparison, first_difference
from moesys.verify.diagnosis import ROWS, error_of, means
from moesys.verify.recording import RunRecord, record
from moesys.verify.setup import SITUATIONS, Build, CheckOptions, RecordingJob, Situation, batch_of

# A situation runs again with another seed where tokens choose other experts at near ties.
MOST_SEEDS = 4
SCHEMA, WIDTH = 1, 80
# The columns of the table: situation, stage, tensor, ranks, error; the cause is below each row.
_COLUMNS = (13, 10, 38, 7, 8)


@dataclass
class SituationResult:
    """The result of one situation.

    definition: what the loss of the user means. in_float32: whether float32 has the fault too. not_checked: why the
    situation was not checked. spread: the median rounding of gradients, relative.
    """

    name: str
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
        is_right = not self.error and any(each.verdict == "right" for each in self.situations)
        return 1 if self.findings else 0 if is_right else 2

    def require_right(self) -> None:
        """Raises AssertionError, with the report, unless the training is right."""
        if self.exit_code:
            raise AssertionError(f"\n{self}")

    def __str__(self) -> str:
        wrong = [each for each in self.situations if each.findings]
        checked = [each for each in self.situations if each.verdict != "not checked" and (wrong or not self.error)]
        words = "right in" if not wrong else f"WRONG in {len(wrong)} of"
        words = f"{words} {counted(len(checked), 'situation')}" if checked else "could not be checked"
        lines = [f"{self.check}, {self.ranks} ranks, {self.dtype}: {words}, {self.seconds:.0f} s"]
        lines += ["", _row(("situation", "stage", "tensor", "ranks", "error"))] if wrong else []
        lines += [line for situation in wrong for line in _table(situation)]
        lines += ["", f"Error: {self.error}"] if self.error else []
        notes = [line for note in self._notes() for line in wrap(note, WIDTH)]
        return "\n".join([*lines, *([""] if notes else []), *notes])

    def _notes(self) -> Iterator[str]:
        kinds = ("parameters", "outputs", "skipped", "rounded")
        of = {kind: set().union(*(each.compared.get(kind, ()) for each in self.situations)) for kind in kinds}
        if of["parameters"]:
            numbers = f"{len(of['parameters'])} parameters, {len(of['outputs'])} outputs"
            skipped = len(of["skipped"] - of["outputs"])
            yield f"Compared: {numbers}; {skipped} outputs have another shape or hold padding."
            spread = max(each.spread for each in self.situations)
            yield f"Rounding of the reference itself: {spread:.0e} (median of gradients)."
        if rounded := of["rounded"]:
            yield f"Note: {len(rounded)} tensors differ by float32's rounding, such as {min(rounded)}."
        for each in self.situations:
            yield from [f"Definition: {each.definition}."] * bool(each.definition)
            yield from (f"Note ({each.name}): {note}." for note in each.notes)
            yield from [f"Not checked: {each.name}, as {each.not_checked}."] * bool(each.not_checked)

    def to_json(self) -> str:
        """Returns the report as JSON, with the environment and a number that changes with its schema."""
        environment = {"torch": torch.__version__, "python": platform.python_version()}
        found = {"schema": SCHEMA, "exit_code": self.exit_code, **asdict(self), "environment": environment}
        return json.dumps(found, indent=2, default=sorted)


def _row(cells: tuple[str, ...]) -> str:
    short = [c if len(c) < width else "…" + c[2 - width :] for c, width in zip(cells, _COLUMNS, strict=True)]
    return "  " + "".join(map(str.ljust, short, _COLUMNS)).rstrip()


def _table(situation: SituationResult) -> list[str]:
    lines, first = list[str](), situation.findings[0]
    for finding in situation.findings:
        ranks = ", ".join(map(str, finding.ranks))
        name = situation.name if finding is first else ""
        lines.append(_row((name, finding.stage, finding.tensor, ranks, f"{finding.error:.1g}")))
        lines += wrap(finding.cause, WIDTH, **_indent(15))
    place = f"First: {first.stage} of {first.tensor}."
    # Outputs and their gradients are compared before gradients are.
    place += " All outputs and gradients of outputs are right." * (first.stage in ("gradient", "norm"))
    way_out = next((f"Way out: {finding.way_out}" for finding in situation.findings if finding.way_out), "")
    return [*lines, *wrap(" ".join(filter(None, (place, situation.in_float32, way_out))), WIDTH, **_indent(2))]


def _indent(width: int) -> dict[str, Any]:
    return dict.fromkeys(("initial_indent", "subsequent_indent"), " " * width)


# --- runs -------------------------------------------------------------------------------------------------------------


class CheckError(Exception):
    """A check could not be carried out: its training raises, hangs, dies, draws random numbers, or does not train."""


# The fault of dropout masks and its way out, by whether ranks have the same part.
MASKS = {
    True: ("ranks that share a batch draw different dropout masks", "Seed ranks of one part alike."),
    False: ("ranks with data of their own draw equal dropout masks", "Seed by the part after the model is drawn."),
}


@dataclass
class _Runner:
    """Runs one check on its ranks."""

    build: Build
    options: CheckOptions
    ranks: LocalRanks

    def records(self, job: RecordingJob, num_ranks: int = 1) -> list[RunRecord]:
        """Runs a training on ranks, and returns their records, whose tensors are read when they are used.

        Raises CheckError with the tracebacks of ranks that fail, and ends all.
        """
        try:
            self.ranks.run(record, job, num_ranks=num_ranks)
        except RankError as error:
            where = "the reference, which is one process" if num_ranks == 1 else f"{num_ranks} ranks"
            short = any(words in str(error) for words in ("MemoryError", "not enough memory", "signal 9"))
            hint = "\nIf it refuses float64, give float32 (--dtype float32)." * (job.dtype == torch.float64)
            hint = "\nGive the model fewer layers or experts by its configuration." if short else hint
            raise CheckError(f"{where}, situation {job.situation.name}, {str(job.dtype)[6:]}: {error}{hint}") from error
        return [torch.load(job.file(rank), mmap=True, weights_only=False) for rank in range(num_ranks)]

    def reference(self, job: RecordingJob, parts: int, **options: Any) -> RunRecord:
        return self.records(replace(job, parts=parts, **options))[0]

    def check(self, situation: Situation) -> SituationResult:
        """Runs a situation, in float32 too if float64 finds a fault."""
        result = self._with_seeds(situation, self.options.dtype)
        with suppress(CheckError):
            if result.findings and self.options.dtype == torch.float64:
                stages = {each.stage for each in self._with_seeds(situation, torch.float32).findings}
                both = any(finding.stage in stages for finding in result.findings)
                result.in_float32 = "Also in float32." if both else "In float64 only: float32 takes another path."
        return result

    def _with_seeds(self, situation: Situation, dtype: torch.dtype) -> SituationResult:
        """Runs a situation, with another seed where tokens choose other experts at near ties."""
        result, begin_s = SituationResult(situation.name), time.monotonic()
        for tries in range(MOST_SEEDS):
            again = replace(situation, seed=situation.seed + 1000 * tries)
            with tempfile.TemporaryDirectory(prefix="moesys-verify-") as folder:
                job = RecordingJob(self.build, self.options, again, dtype, Path(folder), steps=situation.steps)
                try:
                    self._compare(result, job)
                    break
                except NearTieError as tie:
                    result.notes.append(f"{tie} choose other experts at near ties, so another seed was taken")
        else:
            result.not_checked = f"with {MOST_SEEDS} seeds tokens choose other experts at near ties"
        result.seconds = time.monotonic() - begin_s
        return result

    def _compare(self, result: SituationResult, job: RecordingJob) -> None:
        situation, saves = job.situation, job.situation.needs == "save"
        if situation.needs not in ("", "evaluate", "save", *self.options.supports):
            result.not_checked = f"the check does not list {situation.needs} in supports"
            return
        _check_batches(self.options, situation)
        # The world of one rank is built first, and may leave a checkpoint in the folder for others.
        if not self.records(replace(job, steps=0))[0].able.get(situation.needs, True):
            result.not_checked = f"the setup has no {'save and load' if saves else 'evaluate'}"
            return
        ranks = self.records(replace(job, steps=job.steps + saves), self.options.ranks)
        parts = _parts(ranks)
        if situation.dropout:
            result.findings = list(_masks(ranks))
            return
        reference, reordered = self.reference(job, parts), self.reference(job, parts, order="reordered")
        for words in _unfit(reference, ranks):
            raise CheckError(f"situation {situation.name}: {words}")
        without = {term: self.reference(job, parts, steps=1, without=term) for term in ranks[0].terms}
        comparison = TrainingComparison(job, reference, reordered, without, ranks)
        if situation.name == "uneven":
            whole = self.reference(job, parts, order="whole", steps=1)
            result.definition, by_place = comparison.definition(whole)
            if by_place and self.options.expects == "token_mean":
                result.findings = [Finding("definition", "loss", (), 1.0, result.definition, ROWS[means])]
        if not comparison.is_sum:
            words = "the step is no sum over micro-batches: their order changes it by more than rounding"
            if situation.micro_batches > 1:
                result.not_checked = words
                return
            result.notes.append(f"{words}. It is compared with one process that takes all rows as one micro-batch")
            reference, reordered = (self.reference(job, parts, order=o) for o in ("whole", "reordered-whole"))
            comparison = TrainingComparison(job, reference, reordered, {}, ranks)
        result.findings += comparison.run()
        result.compared, result.spread = dict(comparison.compared), comparison.tolerances[0].spread
        if idle := comparison.without_main_gradient():
            result.notes.append(f"the main loss does not train {', '.join(idle[:3])}{', ...' * (len(idle) > 3)}")
        if saves and not result.findings:
            result.findings = list(self._resumed(job, ranks, parts))[:1]

    def _resumed(self, job: RecordingJob, went_on: list[RunRecord], parts: int) -> Iterator[Finding]:
        """Compares a checkpoint of the ranks with what they had, in one process and on the ranks, and one more step of
        a training that was loaded with one that went on.
        """
        again = replace(job, steps=1, resume=True)
        alone = self.reference(again, parts)
        if found := first_difference(went_on[0].trained, alone.initial):
            yield Finding("saved", found[0], (0,), 1.0, f"in the checkpoint: {found[1].words}", found[1].way_out)
            return
        loaded = self.records(again, self.options.ranks)
        rounding = 1e-6 if job.dtype == torch.float64 else 1e-3
        for rank, right in enumerate(went_on):
            update = right.steps[-1]["update"]
            scale = 1e-6 * max(float(each.norm()) for each in update.values())
            for who, got, limit in (("", loaded[rank], 1e-7), (" in one process", alone, rounding)):
                for name, value in update.items():
                    error = error_of(got.steps[-1]["update"].get(name, value * 0), value, scale)
                    if error > limit:
                        words = f"the step after loading{who} has another update: state of the optimizer"
                        way_out = "Save and load moments and step counts under the names of their parameters."
                        yield Finding("saved", name, (rank,), error, words, way_out)


def run(
    build: Build,
    *,
    situations: Sequence[str | Situation] | str | None = None,
    ranks: int | None = None,
    dtype: torch.dtype | None = None,
    seed: int = 0,
    timeout_s: float = 300.0,
    progress: Callable[[str], None] = lambda line: None,
) -> CheckReport:
    """Runs a check in one process and on ranks of this machine, and compares all that a training uses.

    Args:
        build: a module-level function that builds a ``Setup`` for a ``World``, marked by ``check`` or not.
        situations: names of situations or situations, or ``all``; by default ``plain``, ``uneven``, ``padding``, and
            ``recomputation`` if the check supports it.
        ranks: the number of ranks; by default that of the check.
        dtype: float64 or float32; by default that of the check. What float64 finds is looked for in float32 too.
        seed: added to the seeds of the batches.
        timeout_s: the most seconds of one run; ranks that give no answer are ended, with their stacks in the message.
        progress: called with a line for each situation.

    Raises ValueError for a situation that there is not, or options that are not allowed.
    """
    options = getattr(getattr(build, "func", build), "check_options", CheckOptions())
    options = replace(options, ranks=ranks or options.ranks, dtype=dtype or options.dtype)
    known = SITUATIONS | {each: each for each in situations or () if isinstance(each, Situation)}
    names = SITUATIONS if situations == "all" else [situations] if isinstance(situations, str) else situations
    for name in (names := names or ("plain", "uneven", "padding", "recomputation")):
        if name not in known:
            hint = did_you_mean(name, SITUATIONS) or f"; choose from {', '.join(SITUATIONS)}"
            raise ValueError(f"situations has {name!r}, which is no situation{hint}")
    report, begin_s = CheckReport(name_of(build), options.ranks, str(options.dtype)[6:]), time.monotonic()
    timeouts = RankTimeouts(run_s=timeout_s, collective_s=max(1.0, 0.8 * timeout_s))
    # Modules that take long to import, and that ranks need: for torch's modes, and for models.
    slow = re.compile(r"transformers\.models\.\w+\.modeling_\w+|transformers\.distributed")
    preload = ["torch._dynamo", *filter(slow.fullmatch, sys.modules)]
    with closing(LocalRanks(options.ranks, timeouts=timeouts, preload=preload)) as pool:
        try:
            for situation in (replace(known[name], seed=known[name].seed + seed) for name in names):
                report.situations.append(result := _Runner(build, options, pool).check(situation))
                progress(f"{situation.name}: {result.verdict}, {result.seconds:.0f} s")
        except CheckError as error:
            report.error = str(error)
    report.seconds = time.monotonic() - begin_s
    return report


def _unfit(reference: RunRecord, ranks: Sequence[RunRecord]) -> Iterator[str]:
    """Yields why nothing can be compared with a reference."""
    if module := reference.drawn_by:
        yield f"the model draws random numbers, first in {module}; switch dropout and noise off, as by dropout=0.0"
    for kind in ("gradient", "update"):
        if not any(float(tensor.norm()) for tensor in reference.steps[0][kind].values()):
            yield f"the reference does not train: every {kind} is zero; check the loss, and what the optimizer has"
    for rank, got in enumerate(ranks):
        missing, more = reference.initial.keys() - got.initial, got.initial.keys() - reference.initial
        if missing and more:
            words = f"rank {rank} has no {min(missing)}, but {min(more)}, which the reference has not"
            yield f"{words}; give Setup.full, which returns tensors under its names"
        mine, right = (sorted(each.steps[0]["logged"]) for each in (got, reference))
        if mine != right:
            yield f"step returns {mine} on rank {rank} and {right} in one process; return the same names"


def _masks(ranks: Sequence[RunRecord]) -> Iterator[Finding]:
    """Yields the output by which ranks of different parts drew the same masks, or ranks of one part different ones."""
    first, *others = (run.steps[0]["passes"][0] for run in ranks)
    if not any(run.drawn_by for run in ranks):
        raise CheckError("situation dropout: the model draws no random numbers; switch dropout on where asked for it")
    # The last output is the whole model's: inside of it, ranks that share a batch may have parts of tensors.
    last = [name for name, output in first.items() if output.is_floating_point()][-1]
    for rank, outputs in enumerate(others, 1):
        shares = ranks[rank].part == ranks[0].part
        if torch.allclose(first[last], outputs[last], 0, 0, equal_nan=True) != shares:
            yield Finding("output", last, (0, rank), 1.0, *MASKS[shares])


def _check_batches(options: CheckOptions, situation: Situation) -> None:
    """Raises CheckError for batches that lack something, or differ between calls."""
    first, again = (batch_of(options, situation, 0, 0, 0) for _ in range(2))
    if absent := {"input_ids", "labels", "attention_mask"} - first.keys():
        raise CheckError(f"batches returns {sorted(first)}, without {min(absent)}; return all of the three")
    if not all(torch.equal(first[name], again[name]) for name in first):
        raise CheckError("batches returns another batch when it is called again; draw with a generator that it seeds")


def _parts(ranks: Sequence[RunRecord]) -> int:
    """Returns the number of parts; raises CheckError if ranks do not agree, or parts are missing."""
    numbers, have = {run.parts for run in ranks}, [run.part for run in ranks]
    if len(numbers) != 1 or sorted(set(have)) != list(range(min(numbers))):
        words = "all ranks return the same parts, and each of 0 to parts - 1 is the part of a rank"
        raise CheckError(f"ranks have parts {have} of {sorted(numbers)}; {words}")
    return numbers.pop()


def name_of(build: Build) -> str:
    """Returns the name of a check, with the arguments of ``functools.partial``."""
    given = getattr(build, "keywords", {})
    name: str = getattr(getattr(build, "func", build), "__name__", type(build).__name__)
    return " ".join([name, *(f"{key}={it}" for key, it in given.items() if isinstance(it, str | int) and it)])


def checks_in(target: str) -> list[Build]:
    """Imports a file, and returns its checks, or the one of ``file.py:name``. Ranks import it too, so its folder is
    added to ``sys.path``.

    Raises ValueError if it is no Python file, or has no such check, or if another module has its name.
    """
    file, _, name = target.partition(":")
    path = Path(file).resolve()
    if path.suffix != ".py" or not path.is_file():
        raise ValueError(f"{path} is no Python file; give the path of one, such as check.py")
    sys.path.insert(0, str(path.parent))
    module = importlib.import_module(path.stem)
    if Path(getattr(module, "__file__", None) or "").resolve() != path:
        raise ValueError(f"{path} has the name of another module, {module.__name__}; give the file another name")
    found = {each: build for each, build in vars(module).items() if hasattr(build, "check_options")}
    if not found:
        raise ValueError(f"{path} has no check; mark a function that builds a Setup by @verify.check(ranks=2)")
    if name and name not in found:
        raise ValueError(f"{file} has no check {name!r}; it has {', '.join(found)}{did_you_mean(name, found)}")
    return [found[name]] if name else list(found.values())
