"""Who stands on the leaderboard, and where: groups of planners that are compared, settings, and one's own planners."""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

from benchmarks.board.workloads import GENERATED, Recorded, Workload, recorded_here
from benchmarks.planner.scored_layers import member_words
from benchmarks.planner.union import CLUSTERS, MODELS
from moesys.balance.cp_sat.cp_sat import SOLVED_WHOLE
from moesys.config import (
    Balance,
    ClusterSpec,
    CpSat,
    Ep,
    Eplb,
    EvenSplit,
    FasterMoe,
    FlexMoe,
    FlowSplit,
    Fsep,
    Greedy,
    Laer,
    Llep,
    ModelShape,
    MoonEp,
    Proportional,
    Quotas,
    Split,
    Static,
    Strategy,
    UltraEp,
)
from moesys.lab.runs.experiment_files import import_named

# It takes part only where it solves the whole problem, and nothing waits for its plans: otherwise they take seconds.
_CP_SAT = CpSat(deterministic_time=0.2)

EVERY_SPLIT: tuple[Split, ...] = (
    EvenSplit(),
    Proportional(),
    FlowSplit(),
    FlowSplit(max_inter_node="seconds"),
)
_FLOWS = EVERY_SPLIT[2:]
_LAYOUTS: tuple[Balance, ...] = (
    Static(),
    Eplb(),
    Eplb(hierarchical=True, num_groups=8),
    Laer(),
    FlexMoe(),
    Greedy(),
)
_ON_COUNTS: tuple[Balance, ...] = (MoonEp(), Llep(), UltraEp(), FasterMoe())


@dataclass(frozen=True)
class Entry:
    """A planner of layouts and the split that goes over them."""

    balance: Balance
    split: Split

    @property
    def name(self) -> str:
        return f"{member_words(self.balance)} + {member_words(self.split)}"


OURS = Entry(Greedy(), FlowSplit(max_inter_node="seconds"))


def _entries(balances: Sequence[Balance], splits: Sequence[Split]) -> tuple[Entry, ...]:
    return tuple(Entry(balance, split) for balance in balances for split in splits)


@dataclass(frozen=True)
class Group:
    """Planners that are compared: all have the same slots, lag and sharding.

    m experts a rank if nothing were replicated: ``sharding="fsep"`` has a quarter more slots, one at least;
    ``"ep"`` has twice as many, half of them at home, as MoonEP needs them.
    """

    name: str
    about: str
    sharding: Literal["fsep", "ep"]
    lag: int
    late_slots: int
    entries: tuple[Entry, ...]

    def slots(self, model: ModelShape, cluster: ClusterSpec) -> int:
        fewest = -(-model.num_experts // cluster.num_ranks)
        return 2 * fewest if self.sharding == "ep" else min(model.num_experts, fewest + max(1, fewest // 4))

    def strategy(self, entry: Entry, model: ModelShape, cluster: ClusterSpec) -> Strategy:
        """Raises ValueError where planner and group do not go together."""
        placements = model.num_experts * cluster.num_ranks
        if isinstance(entry.balance, CpSat) and placements > SOLVED_WHOLE:
            raise ValueError(
                f"{placements} placements, ranks x experts, are more than the {SOLVED_WHOLE} that CP-SAT solves "
                "whole; beyond them its plans take seconds"
            )
        slots = self.slots(model, cluster)
        return Strategy(
            name=entry.name,
            sharding=Ep(slots_per_rank=slots) if self.sharding == "ep" else Fsep(slots_per_rank=slots),
            balance=_told(entry.balance, cluster, self.lag),
            split=entry.split,
            lag=self.lag,
            late_slots=self.late_slots,
        )

    def with_own(self, own: Sequence[Balance | Split]) -> Group:
        """One's own layouts under every split of the group, and one's own splits over all layouts of the group."""
        splits = tuple(dict.fromkeys(entry.split for entry in self.entries if not isinstance(entry.split, Quotas)))
        balances = tuple(dict.fromkeys(entry.balance for entry in self.entries if entry.split in splits))
        layouts = [member for member in own if isinstance(member, Balance)]
        dividing = [member for member in own if isinstance(member, Split)]
        added = _entries(layouts, (*splits, *dividing)) + _entries(balances, dividing)
        return replace(self, entries=self.entries + added)


def _told(balance: Balance, cluster: ClusterSpec, lag: int) -> Balance:
    """What a planner may know beforehand: how fast the cluster is, and that nothing drifts with ``lag=0``."""
    match balance:
        case FasterMoe():
            gb_per_s = cluster.inter_node_gb_per_s * cluster.num_nodes / cluster.num_ranks
            return balance.replace(gb_per_s=gb_per_s, tflops=cluster.expert_tflops)
        case Greedy() if lag == 0:
            return balance.replace(drift=0.0)
        case _:
            return balance


GROUPS = (
    Group(
        "planned on history",
        "a layout is planned on the counts before, beside training; experts are fully sharded",
        "fsep",
        lag=1,
        late_slots=0,
        entries=_entries((*_LAYOUTS, _CP_SAT), EVERY_SPLIT) + _entries(_ON_COUNTS, (FlowSplit(),)),
    ),
    Group(
        "history and one late slot",
        "as above, but one slot of each rank is filled on the current counts, where that pays",
        "fsep",
        lag=1,
        late_slots=1,
        entries=_entries(_LAYOUTS, _FLOWS),
    ),
    Group(
        "planned on current counts",
        "a layout is planned on the counts that are run, before any token leaves; experts have homes and are lent",
        "ep",
        lag=0,
        late_slots=0,
        entries=_entries(_ON_COUNTS, (Quotas(),)) + _entries(_LAYOUTS, (EvenSplit(), *_FLOWS)),
    ),
)


@dataclass(frozen=True)
class Setting:
    """A workload for a model on a cluster."""

    workload: Workload
    model_name: str
    cluster_name: str

    @property
    def name(self) -> str:
        return f"{self.workload.name}: {self.model_name} on {self.cluster_name}"

    @property
    def model(self) -> ModelShape:
        return MODELS[self.model_name]

    @property
    def cluster(self) -> ClusterSpec:
        return CLUSTERS[self.cluster_name]


_RECORDED_ON = ("2 x 8 H100", "4 x 8 H100")
_DRAWN_ON = (
    ("Mixtral-8x7B", "2 x 8 H100"),
    ("Qwen3-30B-A3B", "2 x 8 H100"),
    ("Qwen3-30B-A3B", "4 x 8 H100"),
    ("OLMoE-1B-7B", "4 x 8 H100, NICs of a tenth"),
    ("DeepSeek-V3", "4 x 8 H100"),
)
# 72 ranks take as long as all the others together, so one workload has them.
_ON_A_RACK = ("skewed", ("DeepSeek-V3", "72 GB200, a rack"))
_QUICK = ("skewed", "bursts")


def settings(given: Sequence[Recorded] = (), *, quick: bool = False) -> list[Setting]:
    """All settings of the board, and those of traces that are ``given``; ``quick``: two drawn workloads, one setting
    of each.

    Raises ValueError for a trace whose experts no model of the board has, and for two of one name.
    """
    recorded, names = () if quick else recorded_here(), [one.name for one in given]
    if len(set(names)) < len(names):
        raise ValueError(f"trace: {', '.join(names)} share a name, by which tables tell them apart; rename a file")
    for one in given:
        if not any(map(one.fits, MODELS.values())):
            known = ", ".join(f"{model.num_experts} top {model.top_k}" for model in MODELS.values())
            raise ValueError(
                f"trace: {one.name}: its {one.trace.num_experts} experts, top {one.trace.top_k}, are those of no model "
                f"of the board; give a trace of {known}"
            )
    return [
        *(
            Setting(one, model_name, cluster_name)
            for one in (*recorded, *given)
            for model_name, model in MODELS.items()
            if one.fits(model)
            for cluster_name in _RECORDED_ON
        ),
        *(
            Setting(drawn, *where)
            for drawn in GENERATED
            if not quick or drawn.name in _QUICK
            for where in (_DRAWN_ON[:1] if quick else _DRAWN_ON)
        ),
        *(Setting(drawn, *_ON_A_RACK[1]) for drawn in GENERATED if drawn.name == _ON_A_RACK[0] and not quick),
    ]


def own_planner(text: str) -> Balance | Split:
    """A planner or a split of one's own: ``path/to/file.py:Class``, ``module:Class`` or ``module.Class``.

    Raises ValueError where there is no such class, or it needs fields.
    """
    path, colon, name = text.rpartition(":") if ":" in text else text.rpartition(".")
    if not (path and colon and name):
        raise ValueError(f"planner={text!r} names no class; give file.py:Class, or module:Class")
    file = Path(path)
    is_file = file.suffix == ".py"
    if is_file and not file.is_file():
        raise ValueError(f"planner={text!r}: {file} is not a file; give the file that has {name}")
    folder, kind = (file.resolve().parent, f"{file.stem}:{name}") if is_file else (Path.cwd(), f"{path}:{name}")
    wrong: list[str] = []
    for union in (Balance, Split):
        try:
            import_named({union.union: kind}, folder)
            own = union.own_class(kind)
            assert own is not None
            made = own()
            assert isinstance(made, Balance | Split)
        except ValueError as error:
            wrong.append(str(error))
            continue
        there = Path(inspect.getfile(own))
        if is_file and (not there.is_file() or there.read_bytes() != file.read_bytes()):
            raise ValueError(f"planner={text!r}: {kind} is that of {there} already; give one of the files another name")
        return made
    raise ValueError(f"planner={text!r}: {wrong[0]}")
