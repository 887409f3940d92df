"""The command ``layer``: one rank of ``MoELayer`` compared with transformers' MoE blocks of the same weights.

With ``--reduction`` the layer is compared with itself: ``LayoutInvariant`` with ``Ordered``.

T tokens, H hidden, I expert width, E experts, K top-k.
"""

from __future__ import annotations

import importlib
import statistics
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Annotated, Any, Literal

import torch
import typer
from torch import Tensor, nn

from benchmarks.harness.contest import Case, Contestant, Near, hold
from benchmarks.harness.options import Repeats, chosen, machine_line
from benchmarks.harness.stopwatch import Work, processor_ms, wall_ms
from moesys.config import LayoutInvariant, ModelShape, Ordered, Strategy
from moesys.lab.commands.options import flag, option, refusing
from moesys.lab.runs.statistics import Quantiles
from moesys.lab.show.progress import steps_told
from moesys.lab.show.sheets import AS_TABLES, Column, CommandOutput, Report, Sheet, publish
from moesys.moe.layer import MoELayer
from moesys.moe.masters import DTYPES

OURS = "moesys"
PEERS = ("eager", "grouped_mm")
# The same blocks with float32 parameters and gradients, as in MoELayer, computing in 16 bits under autocast.
MASTERED = {"eager": "eager, float32 masters", "grouped_mm": "grouped_mm, float32 masters"}
REDUCTIONS = (Ordered(), LayoutInvariant())
ORDERED, INVARIANT = (reduction.kind for reduction in REDUCTIONS)
# The ratios of the table: the fastest of the contestants on the right, divided by the baseline.
SHOWN_RATIOS = {
    f"better / {OURS}": PEERS,
    f"better, float32 masters / {OURS}": tuple(MASTERED.values()),
    f"{INVARIANT} / {ORDERED}": (INVARIANT,),
}
# The largest ‖a - b‖ / ‖b‖ at which a speed is shown. The eager block adds experts in bfloat16.
TOLERANCE = {"float32": 1e-5, "bfloat16": 2e-2}

Family = Literal["mixtral", "qwen3_moe", "olmoe", "deepseek_v3"]
# The config and the block of each family, in transformers' module of that family.
BLOCKS: dict[Family, tuple[str, str]] = {
    "mixtral": ("MixtralConfig", "MixtralSparseMoeBlock"),
    "qwen3_moe": ("Qwen3MoeConfig", "Qwen3MoeSparseMoeBlock"),
    "olmoe": ("OlmoeConfig", "OlmoeSparseMoeBlock"),
    "deepseek_v3": ("DeepseekV3Config", "DeepseekV3MoE"),
}
DIRECTIONS = ("forward + backward", "forward")


@dataclass(frozen=True)
class ScaledLayer:
    """A published layer, scaled to what a laptop runs in about a second."""

    name: str
    family: Family
    num_tokens: int
    shape: ModelShape


def _case(name: str, family: Family, T: int, H: int, I: int, E: int, K: int, **router: Any) -> ScaledLayer:
    shape = ModelShape(hidden_size=H, intermediate_size=I, num_experts=E, top_k=K, **router)
    return ScaledLayer(name, family, T, shape)


_DEEPSEEK = {"scoring_func": "sigmoid", "n_group": 8, "topk_group": 4, "routed_scaling_factor": 2.5}
CASES = (
    _case("mixtral", "mixtral", T=1024, H=1024, I=896, E=8, K=2),
    _case("qwen3-moe", "qwen3_moe", T=2048, H=768, I=384, E=32, K=4),
    _case("olmoe", "olmoe", T=2048, H=768, I=512, E=32, K=4, norm_topk_prob=False),
    _case("deepseek-v3", "deepseek_v3", T=1024, H=1024, I=256, E=32, K=4, n_shared_experts=1, **_DEEPSEEK),
    _case("small-experts", "qwen3_moe", T=4096, H=512, I=128, E=64, K=8),
    _case("few-tokens", "qwen3_moe", T=64, H=1024, I=384, E=32, K=4),
)


@dataclass(frozen=True)
class Row:
    """The result of one case, dtype and direction.

    samples_ms: milliseconds of each contestant by repetition, the baseline first; empty if an output was wrong.
    """

    direction: Annotated[str, Column("direction")]
    shape: Annotated[str, Column("shape")]
    num_tokens: Annotated[int, Column("T")]
    model: ModelShape
    samples_ms: dict[str, list[float]]
    wrong: Annotated[str, Column("wrong", wraps=True)]

    @property
    def dtype(self) -> Annotated[str, Column("dtype", after="num_tokens")]:
        return self.model.dtype

    @property
    def median_ms(self) -> Annotated[dict[str, float], Column("{}", ".1f", after="model")]:
        return {name: statistics.median(samples_ms) for name, samples_ms in self.samples_ms.items()}

    @property
    def ratios(self) -> Annotated[dict[str, Quantiles], Column("")]:
        """The time of each contestant divided by that of the baseline, the first one."""
        names = list(self.samples_ms)
        return {name: Quantiles.of_ratios(self.samples_ms[name], self.samples_ms[names[0]]) for name in names[1:]}

    @property
    def shown_ratios(self) -> Annotated[dict[str, Quantiles], Column("{}", after="samples_ms")]:
        found = {}
        for title, names in SHOWN_RATIOS.items():
            if timed := [name for name in names if name in self.ratios]:
                found[title] = self.ratios[min(timed, key=lambda name: self.median_ms[name])]
        return found


def bench_layer(
    shape: Annotated[str, option("NAMES", "Names of layers, separated by commas, or all.")] = "all",
    dtype: Annotated[str, option("DTYPE", "float32, bfloat16 or all.")] = "all",
    tokens: Annotated[int | None, option("N", "Number of tokens, instead of the layer's own.", min=1)] = None,
    repeats: Repeats = 9,
    threads: Annotated[int | None, option("N", "Number of threads (default: torch's).", min=1)] = None,
    reduction: Annotated[bool, flag("Compare LayoutInvariant with Ordered instead.", "--reduction")] = False,
    output: CommandOutput = AS_TABLES,
) -> None:
    """Compares one rank of MoELayer with transformers' MoE blocks."""
    with refusing():
        cases = select(shape, dtype, tokens)
    threads = threads or torch.get_num_threads()
    rows = measure(cases, repeats=repeats, threads=threads, reduction=reduction, quiet=output.quiet)
    publish((reduction_report if reduction else report)(rows, repeats, threads), output)
    raise typer.Exit(int(any(row.wrong for row in rows)))


def select(shape: str = "all", dtype: str = "all", num_tokens: int | None = None) -> list[ScaledLayer]:
    """Returns the cases of these names in each dtype. Raises ValueError for an unknown name."""
    shapes, dtypes = chosen("shape", shape, [case.name for case in CASES]), chosen("dtype", dtype, TOLERANCE)
    return [
        ScaledLayer(case.name, case.family, num_tokens or case.num_tokens, case.shape.replace(dtype=of))
        for case in CASES
        if case.name in shapes
        for of in dtypes
    ]


def measure(
    cases: Sequence[ScaledLayer], *, repeats: int, threads: int, reduction: bool = False, quiet: bool = False
) -> list[Row]:
    """Measures each case, one row per direction.

    Outputs and gradients are compared with those of the first contestant before anything is timed, and a case is not
    timed if one of them differs.
    """
    rows: list[Row] = []
    threads_before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        with steps_told("layer", len(cases), quiet) as tell:
            for case in cases:
                tell(f"{case.name}, {case.shape.dtype}")
                rows += _measure(case, repeats, reduction)
    finally:
        torch.set_num_threads(threads_before)
    return rows


def report(rows: Sequence[Row], repeats: int, threads: int) -> Report:
    """Returns the table of the comparison with transformers."""
    tolerances = ", ".join(f"{tolerance:g} ({dtype})" for dtype, tolerance in TOLERANCE.items())
    notes = [
        f"A ratio is the time of transformers' block divided by that of MoELayer: above 1, MoELayer is faster; median "
        f"[p20, p80] of {repeats} paired repetitions. 'better' is the faster of the two implementations.",
        "A speed is shown only if output and gradients match the eager block in the same run, within "
        f"{tolerances} of their norm.",
        "bfloat16: parameters and gradients of eager and grouped_mm are bfloat16. Those of MoELayer are float32, as an "
        "optimizer needs them, and cast once per pass; so are those of the blocks with float32 masters, under "
        "torch.autocast.",
        "Tokens are random, restricted to those that both routers send to the same experts. 'forward' runs without "
        "autograd.",
    ]
    title = "MEASURED: one rank of MoELayer and transformers' blocks, ms (median)"
    return _report("layer", title, rows, machine_line(threads, ("torch", "transformers")), notes)


def reduction_report(rows: Sequence[Row], repeats: int, threads: int) -> Report:
    """Returns the table of the comparison between reductions."""
    notes = [
        f"{INVARIANT} / {ORDERED}: the time with LayoutInvariant() divided by that with Ordered(); median [p20, p80] "
        f"of {repeats} paired repetitions. There is one rank, so nothing is communicated.",
        "Processor time of one thread, which does not include other work on the machine."
        if threads == 1
        else "Wall time.",
    ]
    title = "MEASURED: what a reduction costs one rank of MoELayer, ms (median)"
    return _report("reductions", title, rows, machine_line(threads), notes)


def _report(name: str, title: str, rows: Sequence[Row], machine: str, notes: Sequence[str]) -> Report:
    by_direction = sorted(rows, key=lambda row: DIRECTIONS.index(row.direction))
    sheet = Sheet(title, by_direction, [machine, *notes], group_by="direction")
    return Report(name, title, "measured", [sheet], data={"machine": machine, "rows": rows})


# --- one case ---------------------------------------------------------------------------------------------------------


def _measure(case: ScaledLayer, repeats: int, reduction: bool) -> Iterator[Row]:
    runs = _reductions(case) if reduction else _blocks(case)
    first, baseline = next(iter(runs)), ORDERED if reduction else OURS

    def forget() -> None:
        for run in runs.values():
            run.x.grad = None
            run.module.zero_grad(set_to_none=True)

    setups = {name: partial(Contestant, run.results, run.works) for name, run in runs.items()}
    # One thread that waits for nobody: with processor time, other work on the machine does not count.
    stopwatch = processor_ms if reduction and torch.get_num_threads() == 1 else wall_ms
    near = Near(TOLERANCE[case.shape.dtype], first)
    found = hold(Case(setups, near, before=forget, stopwatch=stopwatch, all_or_none=True), repeats)
    why = "; ".join(f"{name}: {outcome.wrong}" for name, outcome in found.items() if outcome.wrong)
    for direction in DIRECTIONS:
        samples_ms = {name: found[name].samples_ms[direction] for name in found if found[name].samples_ms}
        baseline_first = {baseline: samples_ms[baseline]} | samples_ms if samples_ms else {}
        yield Row(direction, case.name, case.num_tokens, case.shape, baseline_first, why)


@dataclass(frozen=True)
class _Run:
    """A contestant: a module, its input and the gradient of its output.

    implementation: the implementation of experts in a block of transformers. autocast: whether the block computes in
    the input's dtype by autocast.
    """

    module: nn.Module
    x: Tensor
    dy: Tensor
    implementation: str | None = None
    autocast: bool = False

    @property
    def works(self) -> dict[str, Work]:
        return {"forward + backward": self.forward_backward, "forward": self.forward}

    def _call(self) -> Tensor:
        if self.implementation is not None:
            experts: Any = self.module.experts
            experts.config._experts_implementation = self.implementation
        with torch.autocast(self.x.device.type, self.x.dtype, enabled=self.autocast):
            return self.module(self.x)

    def forward(self) -> None:
        with torch.no_grad():
            self._call()

    def forward_backward(self) -> Tensor:
        y = self._call()
        y.backward(self.dy)
        return y

    def results(self) -> dict[str, Tensor]:
        """Returns output and gradients, by the names and in the shapes of transformers' block."""
        y = self.forward_backward()
        assert self.x.grad is not None
        results = {"output": y.detach(), "dx": self.x.grad}
        for name, parameter in self.module.named_parameters():
            assert parameter.grad is not None, name
            results[name.replace("router.", "gate.")] = parameter.grad
        if self.implementation is not None:
            gate_up, down = results.pop("experts.gate_up_proj"), results.pop("experts.down_proj")
            results["experts.masters"] = torch.cat([gate_up.flatten(1), down.flatten(1)], dim=1)
        return {name: tensor.clone() for name, tensor in results.items()}


def _reductions(case: ScaledLayer) -> dict[str, _Run]:
    """Returns the layer with each reduction, with equal weights."""
    generator, dtype = torch.Generator().manual_seed(0), DTYPES[case.shape.dtype]
    size = (1, case.num_tokens, case.shape.hidden_size)
    x, dy = (torch.randn(size, generator=generator).to(dtype) for _ in range(2))
    return {
        of.kind: _Run(MoELayer(case.shape, Strategy(name=of.kind, reduction=of)), x.clone().requires_grad_(), dy)
        for of in REDUCTIONS
    }


def _blocks(case: ScaledLayer) -> dict[str, _Run]:
    """Returns transformers' block with each implementation of experts, and the layer with the block's weights."""
    layer, block = MoELayer(case.shape, Strategy(name="ep")), _make_block(case)
    block.load_state_dict(layer.full_state_dict())
    block.to(DTYPES[case.shape.dtype])
    # The layer takes its weights back from the block, which may have rounded them to bfloat16.
    layer.load_full_state_dict({name: tensor.float() for name, tensor in block.state_dict().items()})
    x, dy = _tokens(case, layer, block)
    runs = {peer: _Run(block, x, dy, peer) for peer in PEERS} | {OURS: _Run(layer, x, dy)}
    if x.dtype != torch.float32:
        mastered = _make_block(case)
        mastered.load_state_dict(layer.full_state_dict())
        _route_in_float32(mastered)
        runs |= {name: _Run(mastered, x, dy, peer, autocast=True) for peer, name in MASTERED.items()}
    return runs


def _make_block(case: ScaledLayer) -> nn.Module:
    """Returns transformers' block of the case's family and shape. The config of a family ignores unknown names."""
    modeling = importlib.import_module(f"transformers.models.{case.family}.modeling_{case.family}")
    config_name, block_name = BLOCKS[case.family]
    shape = case.shape
    sizes = dict.fromkeys(("intermediate_size", "moe_intermediate_size"), shape.intermediate_size)
    counts = dict.fromkeys(("num_experts", "num_local_experts", "n_routed_experts"), shape.num_experts)
    alike = ("hidden_size", "norm_topk_prob", "n_group", "topk_group", "n_shared_experts", "routed_scaling_factor")
    fields = {name: getattr(shape, name) for name in alike}
    config = getattr(modeling, config_name)(num_experts_per_tok=shape.top_k, **sizes, **counts, **fields)
    block: nn.Module = getattr(modeling, block_name)(config)
    return block


def _route_in_float32(block: nn.Module) -> None:
    """Keeps autocast out of the router, as in MoELayer: in 16 bits it would choose other experts."""
    gate: Any = block.gate
    route = gate.forward

    def forward(x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        with torch.autocast(x.device.type, enabled=False):
            logits, weight_TK, expert_TK = route(x.float())
        return logits, weight_TK.to(x.dtype), expert_TK

    gate.forward = forward


@torch.no_grad()
def _tokens(case: ScaledLayer, layer: MoELayer, block: nn.Module) -> tuple[Tensor, Tensor]:
    """Returns x and dy, both [1, T, H]: random tokens that both routers send to the same experts.

    transformers' softmax routers compute in the block's dtype. In bfloat16 they choose other experts for a few tokens,
    whose outputs could not be compared.
    """
    generator = torch.Generator().manual_seed(0)
    dtype, T, H = DTYPES[case.shape.dtype], case.num_tokens, case.shape.hidden_size
    gate: Any = block.gate
    pool_NH = torch.randn(4 * T, H, generator=generator).to(dtype)
    while len(pool_NH) >= T:
        x_TH = pool_NH[:T]
        ours_TK, theirs_TK = layer.router(x_TH).expert_TK, gate(x_TH[None])[2]
        alike_T = (ours_TK.sort(dim=1).values == theirs_TK.sort(dim=1).values).all(dim=1)
        if alike_T.all():
            return x_TH[None].requires_grad_(), torch.randn(1, T, H, generator=generator).to(dtype)
        pool_NH = torch.cat([x_TH[alike_T], pool_NH[T:]])
    raise RuntimeError(f"{case.name}: too few of {4 * T} tokens are routed alike by moesys and transformers")
