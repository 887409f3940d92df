"""The runs of a check: ranks and the reference in processes of their own, situation after situation."""

from __future__ import annotations

import importlib
import inspect
import re
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from moesys.kinds import did_you_mean
from moesys.lab.ranks.pool import LocalRanks, RankError, RankTimeouts
from moesys.verify.comparison import Finding, NearTieError, TrainingComparison, difference_of_states, same_values
from moesys.verify.diagnosis import error_of, fit, fraction
from moesys.verify.recording import RecordingJob, RunRecord, in_world, prepare, read_record, record
from moesys.verify.report import CheckReport, SituationResult
from moesys.verify.setup import DEFAULT_SITUATIONS, SITUATIONS, Build, CheckOptions, Situation, batch_of, options_of

# A situation runs again with another seed where tokens choose other experts at near ties.
MOST_SEEDS = 4
Progress = Callable[[str], None]


class CheckError(Exception):
    """A check could not be carried out: its training raises, hangs, dies, draws random numbers, or does not train."""


@dataclass
class _Runner:
    """Runs one check on its ranks. folder: shared by all processes."""

    build: Build
    options: CheckOptions
    ranks: LocalRanks
    folder: Path
    timeout_s: float

    def call(self, function: Callable[[RecordingJob], Any], job: RecordingJob, num_ranks: int) -> list[Any]:
        """Calls a function on ranks; raises CheckError with the tracebacks of those that fail, and ends all."""
        try:
            return self.ranks.run(in_world, function, job, num_ranks=num_ranks, timeout_s=self.timeout_s)
        except RankError as error:
            where = "the reference, which is one process" if num_ranks == 1 else f"{num_ranks} ranks"
            short = any(words in str(error) for words in ("MemoryError", "not enough memory", "signal 9"))
            hint = "\nIf memory is short, give the model fewer layers or experts by its configuration." * short
            raise CheckError(f"{where}, situation {job.situation.name}, {_words(job.dtype)}: {error}{hint}") from error

    def reference(self, job: RecordingJob, parts: int, **options: Any) -> RunRecord:
        job = replace(job, parts=parts, **options)
        self.call(record, job, 1)
        return read_record(job)

    def compare(self, situation: Situation, dtype: torch.dtype) -> SituationResult:
        """Runs one situation in one dtype, and returns what was found."""
        begin_s, result = time.monotonic(), SituationResult(situation.name, _words(dtype))
        folder = self.folder / f"{situation.name}-{_words(dtype)}-{situation.seed}"
        folder.mkdir()
        job = RecordingJob(self.build, self.options, situation, dtype, folder, steps=situation.steps)
        if not self.call(prepare, job, 1)[0].get(situation.needs, True):
            result.not_checked = f"the setup has no {'save and load' if situation.needs == 'save' else 'evaluate'}"
            return result
        on_ranks = replace(job, steps=job.steps + (situation.needs == "save"))
        answers = self.call(record, on_ranks, self.options.ranks)
        parts, ranks = _parts(answers), [read_record(on_ranks, rank) for rank in range(self.options.ranks)]
        if situation.dropout:
            result.findings = list(_masks(ranks))
        else:
            self._compare_with_reference(result, job, ranks, parts, answers[0][2])
        if situation.needs == "save" and not result.findings:
            result.findings = self._resumed(job, ranks, parts)
        result.seconds = time.monotonic() - begin_s
        return result

    def _compare_with_reference(
        self, result: SituationResult, job: RecordingJob, ranks: list[RunRecord], parts: int, terms: Sequence[str]
    ) -> None:
        reference, reordered = self.reference(job, parts), self.reference(job, parts, order="reordered")
        self._check_reference(reference, ranks, f"situation {job.situation.name}")
        without = {term: self.reference(job, parts, steps=1, without=term) for term in terms}
        comparison = TrainingComparison(job, reference, reordered, without, ranks)
        if job.situation.name == "uneven":
            whole = self.reference(job, parts, order="whole", steps=1)
            result.definition, means = _definition(reference, whole, without, comparison.tolerances[0].largest)
            if means and self.options.expects == "token_mean":
                way_out = "Sum the losses of tokens, and divide by the tokens of the global batch."
                result.findings.append(Finding("definition", "loss", (), 1.0, result.definition, way_out))
        if not comparison.is_sum:
            result.notes.append("the step is no sum over micro-batches: their order changes it by more than rounding")
            if job.situation.micro_batches > 1:
                result.not_checked = "the step is no sum over micro-batches, and this situation has several"
                return
            result.notes.append("it is compared with one process that takes all rows as one micro-batch")
            reference, reordered = (self.reference(job, parts, order=o) for o in ("whole", "reordered-whole"))
            comparison = TrainingComparison(job, reference, reordered, {}, ranks)
        result.findings += comparison.run()
        result.compared, result.spread = dict(comparison.compared), comparison.tolerances[0].spread
        idle = comparison.without_main_gradient()
        if idle:
            result.notes.append(f"the main loss does not train {', '.join(idle[:3])}{', ...' * (len(idle) > 3)}")

    def _check_reference(self, reference: RunRecord, ranks: Sequence[RunRecord], where: str) -> None:
        """Raises CheckError for a reference with which nothing can be compared."""
        step = reference.steps[0]
        if reference.drawn_by:
            words = f"the model draws random numbers, first in {reference.drawn_by}; switch dropout and noise off"
            raise CheckError(f"{where}: {words}, such as by dropout=0.0")
        for kind, words in (("gradients", "gradient"), ("update", "update")):
            if not any(float(tensor.norm()) for tensor in getattr(step, kind).values()):
                words = f"the reference does not train: every {words} is zero"
                raise CheckError(f"{where}: {words}; check the loss, and which parameters the optimizer has")
        for rank, got in enumerate(ranks):
            missing, more = (
                [name for name in a if name not in b]
                for a, b in ((reference.initial, got.initial), (got.initial, reference.initial))
            )
            if missing and more:
                words = f"rank {rank} has no {missing[0]}, but {more[0]}, which the reference has not"
                raise CheckError(f"{where}: {words}; give Setup.full, which returns tensors under its names")
            if got.steps[0].logged.keys() != step.logged.keys():
                words = f"step returns {sorted(got.steps[0].logged)} on rank {rank} and {sorted(step.logged)} in one"
                raise CheckError(f"{where}: {words} process; return the same names")

    def _resumed(self, job: RecordingJob, went_on: list[RunRecord], parts: int) -> list[Finding]:
        """Compares a checkpoint of the ranks with what they had, in one process and on the ranks, and one more step of
        a training that was loaded with one that went on.
        """
        again = replace(job, steps=1, resume=True)
        alone = self.reference(again, parts)
        found = difference_of_states(went_on[0].trained, alone.initial)
        if found is not None:
            return [Finding("saved", found[0], (0,), 1.0, f"in the checkpoint: {found[1]}", found[2])]
        self.call(record, again, self.options.ranks)
        rounding = 1e-6 if job.dtype == torch.float64 else 1e-3
        for rank, right in enumerate(went_on):
            update = right.steps[-1].update
            scale = 1e-6 * max(float(each.norm()) for each in update.values())
            for who, got, limit in (("", read_record(again, rank), 1e-7), (" in one process", alone, rounding)):
                for name, value in update.items():
                    error = error_of(got.steps[-1].update.get(name, value * 0), value, scale)
                    if error > limit:
                        words = f"the step after loading{who} has another update: state of the optimizer"
                        way_out = "Save and load moments and step counts under the names of their parameters."
                        return [Finding("saved", name, (rank,), error, words, way_out)]
        return []


def run(
    build: Build,
    *,
    situations: Sequence[str] | str | None = None,
    ranks: int | None = None,
    dtype: torch.dtype | None = None,
    seed: int = 0,
    timeout_s: float = 300.0,
    progress: Progress = lambda line: None,
) -> CheckReport:
    """Runs a check in one process and on ranks of this machine, and compares all that a training uses.

    Args:
        build: a module-level function that builds a ``Setup`` for a ``World``, marked by ``check`` or not.
        situations: names of situations, or ``all``; by default ``plain``, ``uneven``, ``padding``, and
            ``recomputation`` if the check supports it.
        ranks: the number of ranks; by default that of the check.
        dtype: float64 or float32; by default that of the check. What float64 finds is looked for in float32 too.
        seed: seed of the batches.
        timeout_s: the most seconds of one run; ranks that give no answer are ended, with their stacks in the message.
        progress: called with a line for each situation.

    Raises ValueError for a situation that there is not, or options that are not allowed.
    """
    given = options_of(build)
    options = replace(given, ranks=ranks or given.ranks, dtype=dtype or given.dtype)
    names = tuple(SITUATIONS) if situations == "all" else situations or DEFAULT_SITUATIONS
    for name in (names := [names] if isinstance(names, str) else list(names)):
        if name not in SITUATIONS:
            hint = did_you_mean(name, SITUATIONS) or f"; choose from {', '.join(SITUATIONS)}"
            raise ValueError(f"situations has {name!r}, which is none{hint}")
    report, begin_s = CheckReport(name_of(build), options.ranks, _words(options.dtype)), time.monotonic()
    timeouts = RankTimeouts(run_s=timeout_s, collective_s=max(1.0, 0.8 * timeout_s))
    with (
        tempfile.TemporaryDirectory(prefix="moesys-verify-") as folder,
        closing(LocalRanks(options.ranks, timeouts=timeouts, preload=_preload())) as pool,
    ):
        runner = _Runner(build, options, pool, Path(folder), timeout_s)
        for situation in (replace(SITUATIONS[name], seed=seed) for name in names):
            result = SituationResult(situation.name)
            if situation.needs in ("", "evaluate", "save", *options.supports):
                try:
                    _check_batches(options, situation)
                    result = _in_dtypes(runner, situation, report)
                except CheckError as error:
                    report.error = str(error)
                    break
            else:
                result.not_checked = f"the check does not list {situation.needs} in supports"
            report.situations.append(result)
            progress(f"{situation.name}: {result.verdict}, {result.seconds:.0f} s")
    report.seconds = time.monotonic() - begin_s
    return report


def _in_dtypes(runner: _Runner, situation: Situation, report: CheckReport) -> SituationResult:
    """Runs a situation; in float32 instead if it raises in float64, and in float32 too if float64 finds a fault."""
    if report.dtype == "float32":
        return _with_seeds(runner, situation, torch.float32)
    try:
        result = _with_seeds(runner, situation, torch.float64)
    except CheckError as error:
        raised = re.search(r" raised (.*)", str(error))
        if not raised:
            raise
        try:
            result = _with_seeds(runner, situation, torch.float32)
        except CheckError:
            raise error from None
        report.dtype = "float32"
        result.notes.append(f"float64 raised {raised[1]}, so this is float32")
        return result
    if result.findings:
        with suppress(CheckError):
            again = _with_seeds(runner, situation, torch.float32)
            both = {each.stage for each in again.findings} & {each.stage for each in result.findings}
            words = "Also in float32." if both else "In float64 only: a path that float32 does not take."
            result.in_float32 = words
    return result


def _with_seeds(runner: _Runner, situation: Situation, dtype: torch.dtype) -> SituationResult:
    """Runs a situation, with another seed where tokens choose other experts at near ties."""
    ties: list[str] = []
    while len(ties) < MOST_SEEDS:
        try:
            result = runner.compare(replace(situation, seed=situation.seed + 1000 * len(ties)), dtype)
        except NearTieError as tie:
            ties.append(f"{tie} choose other experts at near ties")
            continue
        result.notes += [f"{tie}, so another seed was taken" for tie in ties]
        return result
    return SituationResult(situation.name, _words(dtype), not_checked=f"with {MOST_SEEDS} seeds {ties[0]}")


def _definition(
    reference: RunRecord, whole: RunRecord, without: Mapping[str, RunRecord], tolerance: float
) -> tuple[str, bool]:
    """Returns what the user's loss means, in words, and whether the weight of a token depends on where it is."""
    step, right = reference.steps[0], whole.steps[0].gradients
    scale = 1e-3 * max(float(gradient.norm()) for gradient in right.values())
    worst = max(error_of(step.gradients[name], gradient, scale) for name, gradient in right.items())
    if worst <= max(tolerance, 1e-6):
        return "every token has the same weight, and no term depends on the division into micro-batches", False
    probes = [run.steps[0] for run in without.values()]

    def of_terms(name: str) -> float:
        """Returns the share of the terms beside the main loss in a gradient."""
        moved = [float((right[name] - probe.gradients[name]).norm()) for probe in probes]
        return sum(moved) / max(float(right[name].norm()), scale)

    # The weights of tokens are those of a gradient that other terms hardly reach.
    name = min(right, key=of_terms)
    main = [
        share[name] - sum(share[name] - probe.contributions[m][name] for probe in probes)
        for m, share in enumerate(step.contributions)
    ]
    coefficients, residual = fit(right[name], main) if main else ([], 1.0)
    weights = [1 / c for c in coefficients if c and c == c]
    if residual < 1e-3 and weights and max(abs(weight - 1) for weight in weights) > 1e-3:
        words = "the means of micro-batches or of ranks are averaged: a token has"
        low, high = (fraction(each) for each in (min(weights), max(weights)))
        return f"{words} {low} to {high} times its weight in the global batch, by its micro-batch", True
    terms = " and ".join(without) or "loss"
    return (
        f"the {terms} is one of each micro-batch: gradients differ by up to {100 * worst:.2g} % from that of all",
        False,
    )


def _masks(ranks: Sequence[RunRecord]) -> Iterator[Finding]:
    """Yields the outputs by which ranks of different parts drew the same masks, or ranks of one part different ones."""
    first = ranks[0].steps[0].passes
    if not any(run.drawn_by for run in ranks):
        raise CheckError(
            "situation dropout: the model draws no random numbers; switch dropout on where it is asked for"
        )
    for rank, run in enumerate(ranks[1:], 1):
        pairs = [
            (key, same_values(first[0][key], tensor))
            for key, tensor in run.steps[0].passes[0].items()
            if key in first[0] and tensor.is_floating_point()
        ]
        if run.part == ranks[0].part and (other := [key for key, same in pairs if not same]):
            words = "ranks that share a batch draw different dropout masks"
            yield Finding("output", other[0], (0, rank), 1.0, words, "Seed ranks of one part alike.")
        if run.part != ranks[0].part and pairs and all(same for _, same in pairs):
            words = "ranks with data of their own draw equal dropout masks"
            yield Finding("output", pairs[0][0], (0, rank), 1.0, words, "Seed by the part after the model is drawn.")


def _check_batches(options: CheckOptions, situation: Situation) -> None:
    """Raises CheckError for batches that differ between calls."""
    first, again = (batch_of(options, situation, 0, 0, 0) for _ in range(2))
    for name in ("input_ids", "labels", "attention_mask"):
        if name not in first:
            raise CheckError(f"batches returns {sorted(first)}, without {name}; return all of the three")
    if not all(torch.equal(first[name], again[name]) for name in first):
        raise CheckError("batches returns another batch when it is called again; draw with a generator that it seeds")


def _parts(answers: Sequence[tuple[int, int, list[str]]]) -> int:
    """Returns the number of parts; raises CheckError if ranks do not agree, or parts are missing."""
    numbers, have = {parts for _, parts, _ in answers}, [part for part, _, _ in answers]
    if len(numbers) != 1 or sorted(set(have)) != list(range(min(numbers))):
        words = "all ranks return the same parts, and each of 0 to parts - 1 is the part of a rank"
        raise CheckError(f"ranks have parts {have} of {sorted(numbers)}; {words}")
    return numbers.pop()


def name_of(build: Build) -> str:
    """Returns the name of a check, with the arguments of ``functools.partial``."""
    given = getattr(build, "keywords", {})
    name: str = getattr(getattr(build, "func", build), "__name__", type(build).__name__)
    return " ".join([name, *(str(value) for value in given.values() if isinstance(value, str | int) and value)])


def checks_in(path: Path) -> dict[str, Build]:
    """Imports a file, and returns its checks by name. Ranks import it too, so its folder is added to ``sys.path``.

    Raises ValueError if it is no Python file, or has no check, or if another module has its name.
    """
    path = path.resolve()
    if path.suffix != ".py" or not path.is_file():
        raise ValueError(f"{path} is no Python file; give the path of one, such as check.py")
    sys.path.insert(0, str(path.parent))
    module = importlib.import_module(path.stem)
    if Path(inspect.getsourcefile(module) or "").resolve() != path:
        raise ValueError(f"{path} has the name of another module, {module.__name__}; give the file another name")
    found = {name: each for name, each in vars(module).items() if hasattr(each, "check_options")}
    if not found:
        raise ValueError(f"{path} has no check; mark a function that builds a Setup by @verify.check(ranks=2)")
    return found


def _preload() -> list[str]:
    """Returns modules that take long to import, and that ranks need: for torch's modes, and for models."""
    slow = re.compile(r"transformers\.models\.\w+\.modeling_\w+|transformers\.distributed")
    return ["torch._dynamo", *(name for name in sys.modules if slow.fullmatch(name))]


def _words(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
