"""Says which strategies a model and a cluster tell apart, and what each is called."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from moesys.balance.even_split import EvenSplit
from moesys.balance.static import Static
from moesys.config import (
    Balance,
    ClusterSpec,
    Declared,
    Ep,
    Fsep,
    Last,
    MegaKernel,
    ModelShape,
    Overlap,
    Predictor,
    Sharding,
    Split,
    Strategy,
)
from moesys.limits import out_of_memory


@dataclass(frozen=True)
class Setting:
    """What decides which strategies can be told apart, and which would run: their model, cluster and number of layers.

    model_layers: of the whole model, whose memory counts; None: ``num_layers``. recompute: only one layer's rows are
    kept for backward.
    """

    model: ModelShape
    cluster: ClusterSpec
    num_layers: int
    model_layers: int | None = None
    recompute: bool = False

    def out_of_memory(self, strategy: Strategy, tokens_per_rank: int) -> str:
        """Why a rank cannot hold what the strategy has it hold; "" if it can, as far as anybody knows."""
        num_layers = self.model_layers or self.num_layers
        return out_of_memory(strategy, self.model, self.cluster, num_layers, tokens_per_rank, recompute=self.recompute)

    def out_of_reach(self, strategy: Strategy) -> str:
        """Returns why the overlap does not reach all ranks, or ""."""
        return strategy.overlap.out_of_reach(self.cluster)

    def point(
        self,
        sharding: Sharding,
        balance: Balance,
        predictor: Predictor,
        split: Split,
        overlap: Overlap,
        replan_every: int,
        lag: int,
        late_slots: int,
    ) -> Strategy | None:
        """The strategy of these parts in its plainest words, named after them; None where there is none."""
        try:
            strategy = Strategy(
                name="point",
                sharding=sharding,
                balance=balance,
                predictor=predictor,
                split=split,
                overlap=overlap,
                replan_every=replan_every,
                lag=lag,
                late_slots=late_slots,
            )
            strategy.early_slots(self.model, self.cluster)
        except ValueError:
            return None
        return self.plainest(strategy)

    def plainest(self, strategy: Strategy) -> Strategy:
        """Fields that change nothing here get the value that says least, so that one computation is one point."""
        changes: dict[str, Any] = {}
        slots_R = strategy.slots(self.model, self.cluster)
        if isinstance(strategy.balance, Static):
            changes |= {"predictor": Last(), "replan_every": 1, "lag": 1}
        if sum(slots_R) == self.model.num_experts:
            # Every expert has one holder, and all splits send its rows there.
            changes["split"] = EvenSplit()
        sharding = strategy.sharding
        one_node = self.cluster.num_nodes == 1 or max(self.cluster.node_sizes) == 1
        if isinstance(sharding, Ep) and one_node:
            changes["sharding"] = sharding.replace(lend="flat")
        if isinstance(sharding, Fsep):
            changes["sharding"] = sharding.replace(
                prefetch_layers=min(sharding.prefetch_layers, self.num_layers - 1),
                restore="flat" if one_node else sharding.restore,
                reshard="flat" if one_node else sharding.reshard,
            )
        overlap = strategy.overlap
        if self.cluster.num_nodes == 1 and not isinstance(overlap, MegaKernel):
            # There is no node to cross to.
            changes["overlap"] = overlap.replace(node_dispatch="direct", combine="ordered")
        plain = strategy.replace(**changes)
        return plain.replace(name=words_of(plain))


def words_of(strategy: Strategy) -> str:
    """A name that says what a strategy is; fields that have their default are left out."""
    parts = [_part_words(strategy.sharding), _part_words(strategy.balance)]
    if not isinstance(strategy.balance, Static):
        parts.append(_part_words(strategy.predictor))
    parts += [_part_words(strategy.split), _part_words(strategy.overlap)]
    parts += [f"replan {strategy.replan_every}"] * (strategy.replan_every > 1)
    parts += [f"lag {strategy.lag}"] * (strategy.lag != 1)
    parts += [f"late {strategy.late_slots}"] * (strategy.late_slots > 0)
    return " + ".join(parts)


def value_words(value: Any) -> str:
    """A field's value as tables and comments show it."""
    return _part_words(value) if isinstance(value, Declared) else str(value).lower() if value is None else str(value)


def _part_words(part: Declared) -> str:
    fields = [name for name in type(part).model_fields if name != "kind"]
    said = [
        f"{name}={value}"
        for name in fields
        if (value := getattr(part, name)) != type(part).model_fields[name].get_default()
    ]
    kind: str = getattr(part, "kind", "")
    return f"{kind}({', '.join(said)})" if said else kind
