"""Tunes: an experiment's fastest strategy, searched for in the cost model and, where it trains, timed at last.

The tuner knows points and costs; here is what it needs of the lab: an experiment's routing, ranks to time on, a folder.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable
from contextlib import ExitStack, closing
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

from moesys.balance.replay import routing_of
from moesys.balance.run_planner import warm_up
from moesys.config import Strategy
from moesys.config.base import check_type, python_value
from moesys.config.experiment import Experiment, Trial
from moesys.config.workload import ModelTraining, RealTraining, Replay, Training
from moesys.display import Columns, Display, by_column
from moesys.files import FolderLock, write_whole
from moesys.lab.ranks.process_start import RunInterruption, sigterm_as_ctrl_c
from moesys.lab.runs.places import Place, TrialError, num_workers, place_for, simulating_workers
from moesys.lab.runs.records import numbered, setting_fingerprint
from moesys.lab.runs.statistics import paired_ratio
from moesys.lab.runs.trials import Measurement, has_seeds, simulated_cluster
from moesys.traces import save_trace
from moesys.tuner.costs import Entry, Observer, Session, TuneJournal
from moesys.tuner.pick import TunePick, tune_workload
from moesys.tuner.space import SearchBounds, Space
from moesys.tuner.timing import MOST_TRIALS, Clock, TrialFailedError
from moesys.tuner.tuned_workload import Setting, SimulatedWorkload

JOURNAL, STRATEGY, EXPERIMENT, ROUTING = "journal.jsonl", "tuned.toml", "experiment.toml", "routing.npz"
# The share of the micro-batches of a training's own routing that planners see and that are not timed.
_UNTIMED_SHARE = 0.2
# The most seeds over which intervals of the result are computed.
_MOST_DRAWS = 8


@dataclass(frozen=True, repr=False)
class TuneResult(Display):
    """The result of ``tune``. ``path``: the folder with ``tuned.toml``, the strategy and its reasons;
    ``experiment.toml``, the experiment with the strategy as its last, for ``moesys run`` and ``explain``; and
    ``journal.jsonl``.
    """

    tuned: TunePick
    experiment: Experiment
    path: Path

    def _facts(self) -> str:
        tuned = self.tuned
        return f"{decision(tuned)[:-1]}, of {tuned.search.num_points} points, in {self.path}"

    def _columns(self) -> Columns:
        rows: list[tuple[str, str, int | None, float]] = [
            (one.strategy.name, "simulated", None, one.ms) for one in self.tuned.search.ranking
        ]
        for timed in self.tuned.timing.ranking if self.tuned.timing else ():
            rows += [(timed.strategy.name, "measured", seed, ms) for seed, ms in timed.ms_by_seed.items()]
        return by_column(("strategy", "source", "seed", "step_ms"), rows)

    def _shown(self) -> Columns:
        rows = [(choice.field, choice.value, str(choice)) for choice in self.tuned.choices]
        return by_column(("field", "value", "why"), rows)


def decision(tuned: TunePick) -> str:
    """Returns a sentence: how many times as fast as the baseline the pick is, with an interval, or that this is not
    decided. The pick is the fastest of several, so its interval leans upwards.
    """
    pick, name = tuned.strategy.fingerprint(), tuned.baseline.name
    if pick == tuned.baseline.fingerprint():
        return f"Decided by {tuned.decided_by} times: {name}, the baseline, is the fastest that was found."
    drawn = (paired_ratio(of.baseline_ms, of.own_ms) for of in tuned.compared if of.strategy.fingerprint() == pick)
    if (ratio := next(drawn, None)) is None:
        return f"Decided by {tuned.decided_by} times: {tuned.speedup:.3f} x as fast as {name}, on one draw."
    words = f"by {tuned.decided_by} times: {ratio:.2f} x as fast as {name}, n = {ratio.n}"
    if ratio.holds_one:
        why = "too few for an interval" if ratio.low is None else "the 95 % interval contains 1"
        return f"Undecided {words}: {why}; moesys run with more seeds tests it."
    return f"Decided {words}, with a 95 % interval."


def tune(
    experiment: Experiment,
    space: Space | None = None,
    bounds: SearchBounds | None = None,
    *,
    out: str | Path = "runs",
    timed: int | None = None,
    threads: int = 1,
    fresh: bool = False,
    told: Observer | None = None,
) -> TuneResult:
    """Searches ``space`` for the fastest strategy for ``experiment``. The search starts at the strategies of the
    experiment, the first of which is the baseline.

    space: by default one that is made from model, cluster and memory (``tuner.space.default_space``). bounds: how far
    to search in the cost model; by default ``SearchBounds()``. timed: trials on real ranks, at most 30; by default 30
    of a training, whose times are measured, and none of other workloads, which only the cost model runs.

    The same call in the same folder goes on where it was stopped; ``fresh`` begins anew. Under torchrun every rank
    calls this and gets the same result. A script that calls this needs ``if __name__ == "__main__":`` around the call:
    ranks and workers are processes that import it.

    Raises ValueError for what cannot be tuned or resumed.
    """
    check_type(Experiment, experiment=experiment)
    trains = isinstance(experiment.workload, RealTraining)
    timed, threads = python_value((MOST_TRIALS * trains if timed is None else timed, threads))
    bounds = SearchBounds(**python_value(vars(bounds or SearchBounds())))
    _check(experiment, timed, bounds)
    jobs = num_workers(bounds.jobs)
    with sigterm_as_ctrl_c(), closing(place_for(experiment, threads)) as place:
        if not place.writes:
            return _follow(place, experiment)
        try:
            with ExitStack() as opened:
                folder = opened.enter_context(closing(_Folder(experiment, Path(out), fresh, threads, bounds.seeds)))
                run = partial(_timed, place, experiment)
                workload = folder.workload(run)
                helpers = opened.enter_context(closing(simulating_workers(jobs, warm_up))) if jobs > 1 else None
                tuned = tune_workload(
                    workload,
                    experiment.strategies,
                    Session(folder.journal, told or Silence(), helpers),
                    space=space,
                    bounds=bounds,
                    mega_kernels=not trains,
                    clock=Clock(partial(_step_ms, run), timed) if timed else None,
                    draw_seeds=experiment.seeds[:_MOST_DRAWS] if has_seeds(experiment.workload) else (),
                )
                result = folder.keep(tuned)
        except KeyboardInterrupt:
            raise RunInterruption(
                "stopped: what was found out is in the journal; the same command goes on from there"
            ) from None
        except Exception as error:
            place.share((None, error))
            raise
        place.share((None, result))
        return result


class Silence:
    """Says nothing."""

    def stage(self, words: str, num_points: int) -> None: ...

    def point(self, entry: Entry) -> None: ...


def _check(experiment: Experiment, timed: int, bounds: SearchBounds) -> None:
    workload, memory_gb = experiment.workload, bounds.memory_gb
    if bounds.budget < 1 or bounds.seeds < 1:
        raise ValueError(f"budget={bounds.budget} and seeds={bounds.seeds}; both are 1 or more")
    if memory_gb is not None and not memory_gb > 0:
        raise ValueError(f"memory_gb={memory_gb} holds nothing; declare what a GPU has, or leave it out for enough")
    if timed and not isinstance(workload, RealTraining):
        raise ValueError(
            f"timed={timed}: workload={type(workload).__name__} is run by the cost model and by no clock; "
            "use timed=0, or workload=Training(...)"
        )
    if timed and isinstance(workload, Training) and workload.interpret:
        raise ValueError(
            f"timed={timed}: interpret=True runs kernels in Triton's interpreter, whose times mean nothing; "
            "use timed=0, or interpret=False"
        )
    if timed and not 2 <= timed <= MOST_TRIALS:
        raise ValueError(f"timed={timed}; use 2 to {MOST_TRIALS} trials, or 0 for none")


def _follow(place: Place, experiment: Experiment) -> TuneResult:
    """Runs the trials that the writer asks for, on a rank that does not write."""
    while True:
        asked: tuple[Trial | None, TuneResult | Exception | None] = place.share(None)
        trial, outcome = asked
        if isinstance(outcome, Exception):
            raise outcome
        if trial is None:
            assert isinstance(outcome, TuneResult)
            return outcome
        try:
            place.run(trial, experiment)
        except TrialError:
            # The writer hears of it too, and decides.
            continue


def _timed(place: Place, experiment: Experiment, strategy: Strategy, seed: int) -> Measurement:
    """Runs a trial on real ranks, on the process that writes. Raises TrialFailedError."""
    trial: Trial = experiment.trial(strategy, seed)
    place.share((trial, None))
    try:
        measurement = place.run(trial, experiment)
    except TrialError as error:
        raise TrialFailedError(str(error)) from None
    assert measurement is not None
    return measurement


def _step_ms(run: Callable[[Strategy, int], Measurement], strategy: Strategy, seed: int) -> float:
    """Returns the median of a trial's steps, each of which took as long as its slowest rank."""
    return run(strategy, seed).samples["step_ms"].median


class _Folder:
    """``<out>/<name>-<fingerprint>-tuned``, which one process at a time may write.

    Raises ValueError for one of another model, cluster, workload, trace, machine or source of moesys.
    """

    def __init__(self, experiment: Experiment, out: Path, fresh: bool, threads: int, num_seeds: int) -> None:
        self.experiment, self._threads, self._seeds = experiment, threads, experiment.seeds[:num_seeds]
        self.path = out / f"{experiment.name}-{setting_fingerprint(experiment)}-tuned"
        self.path.mkdir(parents=True, exist_ok=True)
        self._lock = FolderLock(self.path)
        try:
            names = (JOURNAL, STRATEGY, EXPERIMENT, ROUTING)
            if fresh and (old := [name for name in names if (self.path / name).exists()]):
                # The files of an earlier tuning get a folder of their own.
                aside = next(each for name in numbered("before") if not (each := self.path / name).exists())
                aside.mkdir()
                for name in old:
                    shutil.move(self.path / name, aside)
            self.journal = TuneJournal(self.path / JOURNAL, self._setting(), self._lock)
        except BaseException:
            self._lock.close()
            raise

    def close(self) -> None:
        self._lock.close()

    def workload(self, run: Callable[[Strategy, int], Measurement]) -> SimulatedWorkload:
        """Returns the workload of the cost model; for a training, the routing of the baseline's first trial."""
        experiment, workload, seeds = self.experiment, self.experiment.workload, self._seeds
        if isinstance(workload, RealTraining):
            self._record_routing(run, seeds[0])
            workload = Replay(
                trace=str(self.path / ROUTING),
                warmup=int(workload.steps * _UNTIMED_SHARE) * workload.micro_batches,
                micro_batches=workload.micro_batches,
                recompute=workload.recomputed,
            )
            seeds = seeds[:1]
        return SimulatedWorkload.of(experiment.model, simulated_cluster(experiment), workload, seeds)

    def _record_routing(self, run: Callable[[Strategy, int], Measurement], seed: int) -> None:
        """Writes the routing of the baseline to the folder, unless it is there."""
        workload, baseline = self.experiment.workload, self.experiment.baseline
        assert isinstance(workload, Training | ModelTraining)
        # The tuner takes the trial from the journal, where it looks for this form of the strategy.
        setting = Setting(self.experiment.model, self.experiment.cluster, workload.num_layers)
        baseline = setting.plainest(baseline).replace(name=baseline.name)
        of, path = f"seed {seed}", self.path / ROUTING
        if self.journal.find(baseline.fingerprint(), of) is not None:
            if not path.exists():
                raise ValueError(f"{path} is gone, on which its journal stands; begin anew with --fresh (fresh=True)")
            return
        try:
            measurement = run(baseline, seed)
        except TrialFailedError as error:
            raise ValueError(
                f"the baseline, strategy {baseline.name!r}, fails: {error}; put another one first"
            ) from None
        assert measurement.routing is not None
        # The routing is written first, so that a recorded trial always has it.
        save_trace(measurement.routing, path)
        self.journal.add(Entry.about(baseline, "measured", of, measurement.samples["step_ms"].median))

    def keep(self, tuned: TunePick) -> TuneResult:
        """Writes the strategy, and an experiment with the strategy as its last one."""
        names = {strategy.name for strategy in self.experiment.strategies}
        name = next(name for name in numbered("tuned") if name not in names)
        strategy = tuned.strategy.replace(name=name)
        others = [one for one in self.experiment.strategies if one.fingerprint() != strategy.fingerprint()]
        experiment = self.experiment.replace(name=f"{self.experiment.name[:90]}-tuned", strategies=(*others, strategy))
        write_whole(self.path / STRATEGY, tuned.to_toml(decision(tuned)))
        write_whole(self.path / EXPERIMENT, experiment.to_toml())
        return TuneResult(tuned, experiment, self.path)

    def _setting(self) -> dict[str, str]:
        """Returns everything that costs depend on besides the strategy."""
        # This import is here because it imports torch.
        from moesys.lab.runs.environment import collect_environment, source_digest

        experiment, workload = self.experiment, self.experiment.workload
        setting = {name: getattr(experiment, name).fingerprint()[:12] for name in ("model", "cluster", "workload")}
        setting["moesys"] = source_digest()
        if isinstance(workload, RealTraining):
            # The digest of the source replaces the commit.
            setting["machine"] = replace(collect_environment(self._threads), git_commit="").machine_line
        if isinstance(workload, Replay):
            routings = [routing_of(workload, experiment.model, experiment.cluster, seed) for seed in self._seeds]
            setting["trace"] = " ".join(routing.digest for routing in routings)
        return setting
