"""The cases of the benchmark: strategies that do the same work between the same hosts, the first of them the baseline.

Four kinds time one MoE layer: whether overlap pays (``overlap``), whether an exact split pays that keeps tokens on
their host (``split``), layouts for hosts with several ranks (``nodes``), and planners on loads that move
(``planners``). The fifth, ``models``, times training steps of transformers' small models.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property, partial

import torch

import moesys as ms
from benchmarks.harness.model_steps import HIDDEN, LENGTH, MODELS, config_of, strategies
from benchmarks.leaderboard.workloads import GENERATED
from moesys.config import Predictor, presets
from moesys.config.model import MoeMlp
from moesys.config.strategy import Ema, Last, WindowMean
from moesys.load import IntArray
from moesys.traces import Trace

# The latency of one of the overlap cases.
_LATENCY_US = 1000.0
# Steps of so many tokens per rank take far longer than the few milliseconds after which a rank sees a message.
_OVERLAP_TOKENS, _SPLIT_TOKENS, _NODES_TOKENS = 1024, 2048, 1024
# The workloads of the leaderboard on which planners are compared, and the micro-batches that are run before any is
# timed: two to check results, and one of warm-up.
ROUTINGS = ("drifting", "bursts", "prompts by domain")
NOT_TIMED = 3
# The bandwidth at which about half of an overlap case's step is communication, on shares of two cores.
_HALF_MBIT = 200.0
_SUMS = ms.Sequential(node_dispatch="once", combine="per_node")
# The bandwidths at which each model is trained.
_MODELS_MBIT = {"olmoe": (200.0, 1000.0), "qwen3-moe": (500.0,), "deepseek-v3": (500.0,)}
# With so many sequences per rank, by the number of hosts, a step takes about a second on a share of two cores.
_SEQUENCES = {2: 8, 4: 4}

SEQUENTIAL = ms.Strategy(name="sequential")
EVEN = ms.Strategy(name="even split", sharding=ms.Ep(slots_per_rank=3), split=ms.EvenSplit())


@dataclass(frozen=True)
class ShapedCase:
    """Strategies that do the same work over the same links; the first is the baseline.

    Attributes:
        name: its kind, or the name of its model.
        num_tokens: the number of tokens of each rank, [R].
        popularity: the share of the choices that each expert has, [E]; empty for equal shares. Tokens with several
            choices are drawn, and choose popular experts less often than that.
        routing: the workload of the leaderboard whose micro-batches are run, each once; "" for the same tokens in every
            repetition.
        calibrated: the hosts and links by which layouts are planned; None for the declared ones.
    """

    name: str
    mbit_per_s: float
    latency_us: float
    num_tokens: tuple[int, ...]
    shape: ms.ModelShape
    strategies: tuple[ms.Strategy, ...]
    popularity: tuple[float, ...] = ()
    ranks_per_host: int = 1
    routing: str = ""
    calibrated: ms.ClusterSpec | None = None

    @cached_property
    def tokens_SRE(self) -> IntArray:
        """The tokens of each rank and expert in the micro-batches of ``routing``."""
        routing = next(one for one in GENERATED if one.name == self.routing)
        drawn_SRE = routing.tokens_SRE(self.shape, self.cluster, sample=0, warm_up=NOT_TIMED)
        return Trace(drawn_SRE[:, None], self.shape.top_k).scaled(self.num_tokens[0]).tokens_SLRE[:, 0]

    @property
    def num_hosts(self) -> int:
        return len(self.num_tokens) // self.ranks_per_host

    @property
    def is_model(self) -> bool:
        return self.name in MODELS

    @property
    def hosts(self) -> tuple[int, int, float]:
        """Returns the number of hosts, the ranks per host and the latency, which cases on the same hosts share."""
        return self.num_hosts, self.ranks_per_host, self.latency_us

    @property
    def cluster(self) -> ms.ClusterSpec:
        """The hosts and links by which layouts are planned. Declared ones have the bandwidth of the case; how fast a
        rank computes is measured.
        """
        if self.calibrated is not None:
            return self.calibrated
        links = {"inter_node_gb_per_s": self.mbit_per_s / 8e3, "inter_node_us": self.latency_us}
        return presets.cpu(self.ranks_per_host, self.num_hosts).replace(**links)

    @property
    def links(self) -> str:
        """The hosts and their links in words, for tables."""
        latency = f", {self.latency_us:g} us" if self.latency_us else ""
        ranks = f" of {self.ranks_per_host} ranks" if self.ranks_per_host > 1 else ""
        return f"{self.num_hosts}{ranks} x {self.mbit_per_s:g} Mbit/s{latency}"


def asked_for(
    hosts: Sequence[int] = (2, 4),
    mbit_per_s: Sequence[float] = (),
    latency_us: float | None = None,
    kinds: Sequence[str] = (),
) -> list[ShapedCase]:
    """Returns the cases of these kinds; by default all but models.

    Given bandwidths, and a given latency, replace those of the cases.

    Raises ValueError for hosts other than 2 or 4, for bandwidths and latencies out of range, and for unknown kinds.
    """
    known = dict.fromkeys(name.partition(",")[0] for name in LAYER_CASES)
    if unknown := [kind for kind in kinds if kind not in (*known, "models")]:
        raise ValueError(f"case={unknown[0]!r} is none of them; use {', '.join(known)}, or models")
    asked = kinds or known
    if "models" in kinds and (others := [kind for kind in kinds if kind != "models"]):
        raise ValueError(f"case={others[0]!r} and case='models' are pages of their own; ask for one, then the other")
    if refused := [number for number in hosts if number not in (2, 4)]:
        raise ValueError(f"hosts={refused[0]} is not measured here; use 2 or 4")
    for mbit in mbit_per_s:
        if not 10 <= mbit <= 10_000:
            raise ValueError(f"mbit={mbit:g} must be between 10 and 10000")
    latency = latency_us or 0.0
    if not 0 <= latency <= 100_000:
        raise ValueError(f"latency_us={latency:g} must be between 0 and 100000")
    if "models" in kinds:
        return [
            model_case(model, number, mbit, latency)
            for number in hosts
            for model, own in _MODELS_MBIT.items()
            for mbit in mbit_per_s or own
        ]
    chosen = [made for name, made in LAYER_CASES.items() if name.partition(",")[0] in asked]
    cases = [make(number, mbit, latency) for number in hosts for make, own in chosen for mbit in mbit_per_s or own]
    if "overlap" in asked and not mbit_per_s and latency_us is None:
        cases += [overlap_case(number, _HALF_MBIT, _LATENCY_US) for number in hosts]
    return cases


def overlap_case(hosts: int, mbit_per_s: float, latency_us: float) -> ShapedCase:
    """Returns the case of even tokens and four experts, in one piece and in chunks.

    With this H and I communication is about half of a step at 200 Mbit/s, with 2 hosts as with 4: at this bandwidth
    messages are small compared with the computation, and moving them costs a host little processor time. An expert has
    hundreds of rows in the smallest chunk, so that reading its weights once per chunk costs little as well.
    """
    shape = ms.ModelShape(hidden_size=256, intermediate_size=1024, num_experts=4, top_k=2)
    chunked = (SEQUENTIAL.replace(name=f"pipelined {each}", overlap=ms.Pipelined(chunks=each)) for each in (2, 4))
    return ShapedCase("overlap", mbit_per_s, latency_us, (_OVERLAP_TOKENS,) * hosts, shape, (SEQUENTIAL, *chunked))


def split_case(hosts: int, mbit_per_s: float, latency_us: float) -> ShapedCase:
    """Returns the case of a skewed router and ranks that hold more experts than they own, so that tokens have a choice.

    2 hosts: more than half of all tokens choose one expert; every rank holds three of four experts, two of them lent.
    The even split keeps as many tokens as possible on their host and has the busiest rank compute 1.5 times the mean;
    the exact one sends as many tokens away as its cap allows, 1.2 times, and without a cap 1.1.
    4 hosts: each of eight experts is half as popular as the one before, and every rank holds one more than its own two.
    The busiest rank computes 1.76 times the mean by the even split and 1.22 by the exact one, which may not send more
    tokens between hosts than the even one. One expert per rank travels, so that balance matters more than the links.
    """
    popularity: tuple[float, ...] = (0.2, 0.2, 0.55, 0.05)
    cap = 0.45
    if hosts == 4:
        halves = [0.5**expert for expert in range(8)]
        popularity, cap = tuple(half / sum(halves) for half in halves), 0.52
    shape = ms.ModelShape(hidden_size=256, intermediate_size=1024, num_experts=len(popularity), top_k=1)
    splits = (
        EVEN,
        EVEN.replace(name=f"flow, cap {cap:g}", split=ms.FlowSplit(max_inter_node=cap)),
        EVEN.replace(name="flow, no cap", split=ms.FlowSplit()),
    )
    return ShapedCase("split", mbit_per_s, latency_us, (_SPLIT_TOKENS,) * hosts, shape, splits, popularity)


def node_case(hosts: int, mbit_per_s: float, latency_us: float) -> ShapedCase:
    """Returns the case of two ranks per host and fine-grained experts of unequal popularity: layouts for balance alone
    that send a row per choice, and layouts that prefer a host's own tokens and send a row per token and host.

    A host has slots for five eighths of the experts, or three eighths with 4 hosts.
    """
    laer = ms.Strategy(
        name="laer, direct", sharding=_fine_grained_slots(hosts), balance=ms.Laer(), split=ms.EvenSplit()
    )
    # Every step has the same tokens, so loads do not drift.
    ours = laer.replace(name="node first, direct", balance=ms.Greedy(drift=0), split=ms.FlowSplit())
    compared = (
        laer,
        laer.replace(name="laer, sums a node", overlap=_SUMS),
        ours,
        ours.replace(name="node first, once a node", overlap=ms.Sequential(node_dispatch="once")),
        ours.replace(name="node first, sums a node", overlap=_SUMS),
    )
    popularity = tuple(torch.randn(32, generator=torch.Generator().manual_seed(0)).exp().tolist())
    return _fine_grained_case("nodes", hosts, mbit_per_s, latency_us, compared, popularity)


def planner_case(routing: str, hosts: int, mbit_per_s: float, latency_us: float) -> ShapedCase:
    """Returns the shape of ``node_case`` with direct rows and loads that move, under fixed planners and ``Greedy``,
    which plan from the micro-batches before, with the same split.
    """
    base = ms.Strategy(
        name="static",
        sharding=_fine_grained_slots(hosts),
        balance=ms.Static(),
        split=ms.FlowSplit(max_inter_node="seconds"),
    )
    fixed: tuple[tuple[ms.Balance, Predictor], ...] = (
        *((ms.Laer(), predictor) for predictor in (Last(), WindowMean(), Ema())),
        (ms.Eplb(), Ema()),
        (ms.FlexMoe(), Ema()),
    )
    compared = (
        base,
        *(base.replace(name=f"{one.kind}, {seen.kind}", balance=one, predictor=seen) for one, seen in fixed),
        base.replace(name="greedy", balance=ms.Greedy()),
    )
    return _fine_grained_case(f"planners, {routing}", hosts, mbit_per_s, latency_us, compared, routing=routing)


def _fine_grained_slots(hosts: int) -> ms.Fsep:
    return ms.Fsep(slots_per_rank=10 if hosts == 2 else 6)


def _fine_grained_case(
    name: str,
    hosts: int,
    mbit_per_s: float,
    latency_us: float,
    compared: tuple[ms.Strategy, ...],
    popularity: tuple[float, ...] = (),
    routing: str = "",
) -> ShapedCase:
    shape = ms.ModelShape(hidden_size=256, intermediate_size=64, num_experts=32, top_k=6)
    tokens = (_NODES_TOKENS,) * (2 * hosts)
    return ShapedCase(name, mbit_per_s, latency_us, tokens, shape, compared, popularity, 2, routing)


def model_case(model: str, hosts: int, mbit_per_s: float, latency_us: float, hidden_size: int = HIDDEN) -> ShapedCase:
    """Returns the case of one of transformers' models, on hosts of one rank each, with skewed routing."""
    layers = model_spec(model, hidden_size).layer_counts
    shape = next(layer.mlp.shape for layer in layers if isinstance(layer.mlp, MoeMlp))
    tokens = (_SEQUENCES[hosts] * LENGTH,) * hosts
    return ShapedCase(model, mbit_per_s, latency_us, tokens, shape, tuple(strategies(hosts)))


def model_spec(model: str, hidden_size: int) -> ms.models.ModelSpec:
    return ms.models.ModelSpec.from_config(config_of(model, hidden_size).to_dict(), dtype="float32")


# The cases of one layer, each with the bandwidths at which it runs. A kind is the first word of the name.
LAYER_CASES: dict[str, tuple[Callable[[int, float, float], ShapedCase], tuple[float, ...]]] = {
    "overlap": (overlap_case, (100.0, _HALF_MBIT, 2000.0)),
    "split": (split_case, (2000.0,)),
    "nodes": (node_case, (200.0,)),
    **{f"planners, {routing}": (partial(planner_case, routing), (500.0,)) for routing in ROUTINGS},
}
