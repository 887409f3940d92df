"""The results of a leaderboard: one line of JSON per planner, setting and seed, so that a crash loses one at most."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from hashlib import sha256
from pathlib import Path
from typing import Any, Literal

from pydantic import TypeAdapter

from moesys.files import append_line
from moesys.lab.leaderboard.planners import PlannerGroup, PlannerPair
from moesys.lab.leaderboard.scores import PlannerScores, score
from moesys.lab.leaderboard.workloads import SCORED, RoutingSetting
from moesys.lab.runs.experiment_files import in_words
from moesys.lab.show.steps import steps_told

FILE = "results.jsonl"
# Packages on which no planned or simulated number depends, except for these files of the leaderboard.
_WITHOUT_INFLUENCE = {"kernels", "overlap", "moe", "hf", "train", "tuner", "lab"}
_WITH_INFLUENCE = {"lab/leaderboard/planners.py", "lab/leaderboard/scores.py"}


@dataclass(frozen=True)
class PlannerResult:
    """A line: one pair of planners in one group, setting and sample. ``key`` is a digest of all that the scores depend
    on.
    """

    key: str
    group: str
    workload: str
    model: str
    cluster: str
    slots: int
    planner: str
    sample: int
    scores: PlannerScores
    schema: Literal[1] = 1

    @property
    def setting(self) -> tuple[str, str, str]:
        return self.workload, self.model, self.cluster


_LINE: TypeAdapter[Any] = TypeAdapter(PlannerResult)


def results(
    settings: Sequence[RoutingSetting], groups: Sequence[PlannerGroup], num_samples: int, folder: Path
) -> list[PlannerResult]:
    """Returns the results of all planners in all settings, and scores those that ``folder`` has no line of. It goes
    sample by sample, so that an unfinished leaderboard has all settings. The caller locks the folder.

    Raises ValueError, before anything is scored, for a sample that a trace does not have.
    """
    path, found = folder / FILE, []
    known = {result.key: result for result in written(path)}
    rounds = [(one, sample, _digest(one, sample)) for sample in range(num_samples) for one in settings]
    with steps_told("leaderboard", len(rounds)) as tell:
        for setting, sample, routing in rounds:
            tell(f"{setting.name}, seed {sample}")
            names = setting.routing.name, setting.model_name, setting.cluster_name
            for group in groups:
                slots = group.slots(setting.model, setting.cluster)
                keys = {pair: _key(setting, group, pair, routing) for pair in group.pairs}
                for balance in dict.fromkeys(pair.balance for pair in group.pairs):
                    missing = [pair for pair in keys if pair.balance == balance and keys[pair] not in known]
                    for pair, scores in score(setting, group, missing, sample) if missing else ():
                        result = PlannerResult(keys[pair], group.name, *names, slots, pair.name, sample, scores)
                        append_line(path, _LINE.dump_json(result) + b"\n")
                        known[result.key] = result
                found += [known[key] for key in keys.values()]
    return found


def written(path: Path) -> Iterator[PlannerResult]:
    """Reads the lines of a file that may not exist; an incomplete last line is ignored.

    Raises ValueError, with its number, for a complete line that is not a result.
    """
    lines = path.read_bytes().split(b"\n")[:-1] if path.exists() else []
    for number, line in enumerate(lines, start=1):
        try:
            yield _LINE.validate_json(line)
        except ValueError as error:
            raise ValueError(
                f"line {number} of {path} is not a result: {in_words(error)}; delete the line to score it again, or "
                "use another folder"
            ) from None


def _digest(setting: RoutingSetting, sample: int) -> str:
    tokens_SRE = setting.tokens_SRE(sample)
    routing = sha256(repr(tokens_SRE.shape).encode() + tokens_SRE.astype("<i8").tobytes()).hexdigest()
    return f"{setting.name}, {sample}: {routing}"


def _key(setting: RoutingSetting, group: PlannerGroup, pair: PlannerPair, routing: str) -> str:
    """Covers the source of a user's planner, and of the parts of moesys that numbers depend on."""
    parts = setting.model, setting.cluster, pair.balance, pair.split
    slots = group.slots(setting.model, setting.cluster)
    rules = repr((group.name, slots, group.lag, group.late_slots, group.predictor, setting.warm_up, SCORED))
    words = (routing, rules, *(part.fingerprint() for part in parts), _digest_of_moesys())
    return sha256("\n".join(words).encode()).hexdigest()[:24]


@cache
def _digest_of_moesys() -> str:
    root, digest = Path(__file__).parents[2], sha256()
    for path in sorted(root.rglob("*.py")):
        name = path.relative_to(root).as_posix()
        if name.split("/")[0] not in _WITHOUT_INFLUENCE or name in _WITH_INFLUENCE:
            digest.update(path.read_bytes())
    return digest.hexdigest()
