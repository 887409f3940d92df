"""The planners that the leaderboard compares: pairs of a layout planner and a token split, in groups."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from pydantic import TypeAdapter

from moesys.balance.cp_sat import SOLVED_WHOLE, CpSat
from moesys.balance.eplb import Eplb
from moesys.balance.even_split import EvenSplit
from moesys.balance.faster_moe import FasterMoe
from moesys.balance.flow.flow_split import FlowSplit
from moesys.balance.greedy.greedy import Greedy
from moesys.balance.quotas import Quotas
from moesys.config import Balance, ClusterSpec, Ep, Fsep, Last, ModelShape, Predictor, Split, Strategy
from moesys.config.base import in_words
from moesys.files import json_of
from moesys.lab.runs.declarations import own_kind
from moesys.tuner.tuned_workload import value_words

_FLOWS: tuple[Split, ...] = (FlowSplit(), FlowSplit(max_inter_node="seconds"))
# All planners and splits of moesys take part, also those that are still to come.
_SPLITS = (*(split() for split in Split.kinds().values() if not split.follows_planner), _FLOWS[1])
_PLANNERS = tuple(planner() for planner in Balance.kinds().values() if planner is not CpSat)
_ON_COUNTS = tuple(planner for planner in _PLANNERS if planner.has_quotas)
_LAYOUTS = (*(planner for planner in _PLANNERS if not planner.has_quotas), Eplb(hierarchical=True, num_groups=8))
# CP-SAT takes part only where it solves the whole problem and no rank waits for its plan: otherwise it takes seconds.
_CP_SAT = CpSat(deterministic_time=0.2)
_LAST = Last()


@dataclass(frozen=True)
class PlannerPair:
    """A layout planner and the token split that divides tokens over its layouts."""

    balance: Balance
    split: Split

    @property
    def name(self) -> str:
        return f"{value_words(self.balance)} + {value_words(self.split)}"


OURS = PlannerPair(Greedy(), _FLOWS[1])


def _pairs(balances: Sequence[Balance], splits: Sequence[Split]) -> tuple[PlannerPair, ...]:
    return tuple(PlannerPair(balance, split) for balance in balances for split in splits)


@dataclass(frozen=True)
class PlannerGroup:
    """Pairs that are compared with each other: all have the same slots, lag, predictor and sharding.

    With m experts per rank if no expert were replicated, a rank has m/4 further slots, at least one, for fully sharded
    experts. With ``lag=0`` experts have owners, and a rank has 2m slots, half of them for its own experts, as MoonEP
    needs them. ``slots_per_rank`` replaces this rule.
    """

    name: str
    about: str
    pairs: tuple[PlannerPair, ...]
    lag: int = 1
    late_slots: int = 0
    slots_per_rank: int | None = None
    predictor: Predictor = _LAST

    def slots(self, model: ModelShape, cluster: ClusterSpec) -> int:
        fewest = -(-model.num_experts // cluster.num_ranks)
        by_rule = min(model.num_experts, fewest + max(1, fewest // 4)) if self.lag else 2 * fewest
        return self.slots_per_rank or by_rule

    def strategy(self, pair: PlannerPair, model: ModelShape, cluster: ClusterSpec) -> Strategy:
        """Returns the strategy of a pair. Raises ValueError if the pair cannot run under the group's conditions."""
        placements = model.num_experts * cluster.num_ranks
        if isinstance(pair.balance, CpSat) and placements > SOLVED_WHOLE:
            raise ValueError(
                f"{placements} placements (ranks x experts) are more than the {SOLVED_WHOLE} that CP-SAT solves as one "
                "problem; beyond them its plans take seconds"
            )
        slots = self.slots(model, cluster)
        return Strategy(
            name=pair.name,
            sharding=Fsep(slots_per_rank=slots) if self.lag else Ep(slots_per_rank=slots),
            balance=self._informed(pair.balance, cluster),
            predictor=self.predictor,
            split=pair.split,
            lag=self.lag,
            late_slots=self.late_slots,
        )

    def _informed(self, balance: Balance, cluster: ClusterSpec) -> Balance:
        """Sets what a planner may know beforehand: the cluster's speeds, and that no load drifts with ``lag=0``."""
        if isinstance(balance, FasterMoe):
            gb_per_s = cluster.inter_node_gb_per_s * cluster.num_nodes / cluster.num_ranks
            return balance.replace(gb_per_s=gb_per_s, tflops=cluster.expert_tflops)
        return balance.replace(drift=0.0) if isinstance(balance, Greedy) and self.lag == 0 else balance

    def with_planners(self, added: Sequence[Balance | Split]) -> PlannerGroup:
        """Adds layout planners, each with every split of the group, and splits, each with every layout planner."""
        splits = tuple(dict.fromkeys(pair.split for pair in self.pairs if not pair.split.follows_planner))
        balances = tuple(dict.fromkeys(pair.balance for pair in self.pairs if pair.split in splits))
        new_balances = [member for member in added if isinstance(member, Balance)]
        new_splits = [member for member in added if isinstance(member, Split)]
        pairs = self.pairs + _pairs(new_balances, (*splits, *new_splits)) + _pairs(balances, new_splits)
        return replace(self, pairs=tuple(dict.fromkeys(pairs)))


GROUPS = (
    PlannerGroup(
        "planned on history",
        "Layouts are planned on earlier counts, in parallel with training; experts are fully sharded",
        _pairs((*_LAYOUTS, _CP_SAT), _SPLITS) + _pairs(_ON_COUNTS, _FLOWS[:1]),
    ),
    PlannerGroup(
        "history and one late slot",
        "As above, but one slot of each rank is filled from the current counts where that is predicted to be faster",
        _pairs(_LAYOUTS, _FLOWS),
        late_slots=1,
    ),
    PlannerGroup(
        "planned on current counts",
        "Layouts are planned on the counts of the same micro-batch, before any token is sent, so the time of planning "
        "is added to that of the layer; experts are owned by ranks and lent to others",
        _pairs(_ON_COUNTS, (Quotas(),)) + _pairs(_LAYOUTS, (EvenSplit(), *_FLOWS)),
        lag=0,
    ),
)


def named_planner(text: str) -> Balance | Split:
    """Returns a layout planner or split: ``path/to/file.py:Class``, ``module:Class``, ``module.Class``; or JSON, such
    as ``{"kind": "greedy", "effort": 4}``.

    Raises ValueError if there is no such class, or if a field is missing or wrong.
    """
    if text.lstrip().startswith("{"):
        fields = json_of(text, f"planner={text!r}")
    else:
        path, _, name = text.rpartition(":") if ":" in text else text.rpartition(".")
        if not (path and name):
            raise ValueError(f"planner={text!r} names no class; give file.py:Class, module:Class, or JSON with a kind")
        fields = {"kind": f"{path}:{name}"}
    try:
        fields["kind"] = own_kind(str(fields.get("kind")))
    except ValueError as error:
        raise ValueError(f"planner={text!r}: {error}") from None
    errors: list[str] = []
    kind = fields["kind"]
    known = [union for union in (Balance, Split) if kind in union.table or union.own_class(kind)]
    for union in known or (Balance, Split):
        try:
            planner: Any = TypeAdapter(union).validate_python(fields)
            found: Balance | Split = planner
            return found
        except ValueError as error:
            errors.append(in_words(error))
    raise ValueError(f"planner={text!r}: {'; '.join(dict.fromkeys(errors))}")
