"""Small workloads and spaces: quick to exhaust, and each with another best strategy."""

from __future__ import annotations

from collections.abc import Sequence

from moesys import ClusterSpec, Generated, ModelShape, Space, Strategy, WindowMean
from moesys.limits import RankMemory, rank_memory
from moesys.tuner.costs import Costs, Entry, Helpers, Session, TuneJournal
from moesys.tuner.tuned_workload import Fidelity, Plans, Setting, SimulatedWorkload, ladder

EP = Strategy(name="ep")
MODEL = ModelShape(hidden_size=256, intermediate_size=512, num_experts=8, top_k=2, dtype="bfloat16")
# Computing, links inside and links between nodes in turn are what a step waits for.
TWO_NODES = ClusterSpec(num_nodes=2, ranks_per_node=2)
RATES = {"intra_node_gb_per_s": 60.0, "inter_node_gb_per_s": 20.0, "expert_tflops": 20.0, "copy_share": 0.1}
CLUSTERS = {
    "slow ranks": TWO_NODES.replace(expert_tflops=2.0),
    "slow links": TWO_NODES.replace(intra_node_gb_per_s=8.0, inter_node_gb_per_s=2.0),
    "even": TWO_NODES.replace(intra_node_us=5.0, inter_node_us=15.0, launch_us=3.0, **RATES),
}
SPACE = Space(
    {
        "sharding": ("ep", "fsep"),
        "sharding.ep.slots_per_rank": (None, 3),
        "sharding.fsep.slots_per_rank": (2, 3, 4),
        "sharding.prefetch_layers": (0, 1),
        "sharding.delay_reshard": (False, True),
        "balance": ("static", "eplb", "greedy"),
        "predictor": ("last", WindowMean(steps=3)),
        "split": ("even", "proportional", "flow"),
        "overlap": ("sequential", "pipelined"),
        "overlap.chunks": (2, 4, 8),
    }
)
# As SPACE, with less to exhaust.
SMALL = Space(
    {path: values for path, values in SPACE.root.items() if path not in ("sharding.prefetch_layers", "predictor")}
    | {"sharding.fsep.slots_per_rank": (2, 3), "balance": ("static", "greedy"), "split": ("even", "flow")}
    | {"overlap.chunks": (2, 8)}
)


def changed(space: Space, values: dict[str, tuple]) -> Space:
    """With other values; a part that is given anew loses the paths below it."""
    kept = {path: listed for path, listed in space.root.items() if path.partition(".")[0] not in values}
    return Space(kept | values)


def drawn(cluster: ClusterSpec, skew: float = 1.0, tokens_per_rank: int = 512, **changes) -> SimulatedWorkload:
    fields = {"skew": skew, "num_layers": 2, "tokens_per_rank": tokens_per_rank, "warmup": 2, "steps": 4}
    return SimulatedWorkload.of(MODEL, cluster, Generated(**fields | changes), (0,))


def setting_of(workload: SimulatedWorkload, memory_gb: float | None = None) -> Setting:
    return Setting(workload.model, workload.cluster.replace(memory_gb=memory_gb), workload.workload.num_layers)


def memory_of(strategy: Strategy, setting: Setting, tokens_per_rank: int, recompute: bool = False) -> RankMemory:
    return rank_memory(
        strategy, setting.model, setting.cluster, setting.num_layers, tokens_per_rank, recompute=recompute
    )


class Observed:
    """Keeps the stages and entries of a tuning."""

    def __init__(self) -> None:
        self.stages: list[str] = []
        self.entries: list[Entry] = []

    def stage(self, words: str, num_points: int) -> None:
        self.stages.append(words)

    def point(self, entry: Entry) -> None:
        self.entries.append(entry)


def session_of(journal: TuneJournal | None = None, helpers: Helpers | None = None) -> Session:
    return Session(journal or TuneJournal(None, {}), Observed(), helpers)


def costs_of(
    workload: SimulatedWorkload,
    session: Session | None = None,
    starts: Sequence[Strategy] = (EP,),
    setting: Setting | None = None,
) -> Costs:
    session = session or session_of()
    return Costs(Plans(workload), setting or setting_of(workload), session, starts)


def cost(costs: Costs, strategy: Strategy, fidelity: Fidelity) -> Entry:
    costs.look([strategy], fidelity, "point")
    return costs.session.journal.find(strategy.fingerprint(), str(fidelity))


def exhausted(workload: SimulatedWorkload, space: Space) -> dict[str, float]:
    """Milliseconds of every point on all of the workload, by fingerprint."""
    costs, whole = costs_of(workload), ladder(workload)[-1]
    costs.look(space.points(setting_of(workload)), whole, "points")
    assert not costs.refused
    return {fingerprint: one.ms for fingerprint, one in costs.simulated[whole].items()}
