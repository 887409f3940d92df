"""One rank of ``MoELayer`` against transformers' own blocks of the same weights, forward and backward.

T tokens, H hidden, I expert width, E experts, K top-k.
"""

from __future__ import annotations

import importlib
import statistics
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Annotated, Any, Literal

import torch
from torch import Tensor, nn

from benchmarks.harness.contest import Case, Contestant, hold, relative_difference
from benchmarks.harness.names import chosen
from moesys.config import ModelShape, Strategy
from moesys.lab.runs.stopwatch import Spread, Work, machine_line
from moesys.lab.show.reports import Report, publish
from moesys.lab.show.sheets import Column, Sheet
from moesys.lab.show.steps import steps_told
from moesys.moe.expert_parameters import DTYPES
from moesys.moe.layer import MoELayer

OURS = "moesys"
PEERS = ("eager", "grouped_mm")
# The same blocks with float32 parameters and gradients, as ours are, computing in 16 bits under autocast.
MASTERED = {"eager": "eager, float32 masters", "grouped_mm": "grouped_mm, float32 masters"}
# Largest ‖a - b‖ / ‖b‖ from the eager block at which a speed is shown. The eager block adds experts up in bfloat16.
TOLERANCE = {"float32": 1e-5, "bfloat16": 2e-2}

Family = Literal["mixtral", "qwen3_moe", "olmoe", "deepseek_v3"]
# A config and a block of each family, in transformers' file of its own.
BLOCKS: dict[Family, tuple[str, str]] = {
    "mixtral": ("MixtralConfig", "MixtralSparseMoeBlock"),
    "qwen3_moe": ("Qwen3MoeConfig", "Qwen3MoeSparseMoeBlock"),
    "olmoe": ("OlmoeConfig", "OlmoeSparseMoeBlock"),
    "deepseek_v3": ("DeepseekV3Config", "DeepseekV3MoE"),
}
Direction = Literal["forward + backward", "forward"]
DIRECTIONS: tuple[Direction, ...] = ("forward + backward", "forward")


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
    """What was measured for one case, dtype and direction.

    differences: of each contestant but the eager block from it, ‖a - b‖ / ‖b‖, the worst over output and gradients.
    samples_ms: milliseconds of each contestant by repetition; empty where an output was wrong.
    """

    direction: Annotated[Direction, Column("direction")]
    shape: Annotated[str, Column("shape")]
    num_tokens: Annotated[int, Column("T")]
    model: ModelShape
    differences: dict[str, float]
    samples_ms: dict[str, list[float]]
    wrong: Annotated[str, Column("wrong")]

    @property
    def dtype(self) -> Annotated[str, Column("dtype", after="num_tokens")]:
        return self.model.dtype

    @property
    def median_ms(self) -> Annotated[dict[str, float], Column("{}", ".1f", after="differences")]:
        return {name: statistics.median(samples_ms) for name, samples_ms in self.samples_ms.items()}

    @property
    def ratios(self) -> Annotated[dict[str, Spread], Column("")]:
        """The time of all contestants but us over ours: above 1, we are faster."""
        ours_ms = self.samples_ms.get(OURS, ())
        return {name: Spread.of_ratios(of, ours_ms) for name, of in self.samples_ms.items() if name != OURS}

    @property
    def to_better(self) -> Annotated[dict[str, Spread], Column(f"{{}} / {OURS}", after="samples_ms")]:
        """The same of the faster of two: with parameters of the dtype, and with float32 masters."""
        found = {}
        for name, peers in {"better": PEERS, "better, float32 masters": tuple(MASTERED.values())}.items():
            if timed := [peer for peer in peers if peer in self.samples_ms]:
                found[name] = self.ratios[min(timed, key=lambda peer: self.median_ms[peer])]
        return found

    @property
    def matched(self) -> Annotated[bool, Column("")]:
        return not self.wrong


def select(shape: str = "all", dtype: str = "all", num_tokens: int | None = None) -> list[ScaledLayer]:
    """The cases of these names, in every dtype asked for. Raises ValueError for a name that is not there."""
    shapes, dtypes = chosen("shape", shape, [case.name for case in CASES]), chosen("dtype", dtype, TOLERANCE)
    return [
        ScaledLayer(case.name, case.family, num_tokens or case.num_tokens, case.shape.replace(dtype=of))
        for case in CASES
        if case.name in shapes
        for of in dtypes
    ]


def bench_layer(cases: Sequence[ScaledLayer], *, repeats: int = 9, threads: int | None = None) -> list[Row]:
    """Measures each case, one row a direction; ``threads`` is torch's own number by default.

    Outputs and gradients are compared with those of the eager block first, and a contestant that differs stops the
    timing of its case.
    """
    rows: list[Row] = []
    threads_before = torch.get_num_threads()
    torch.set_num_threads(threads or threads_before)
    try:
        with steps_told("layer", len(cases)) as tell:
            for case in cases:
                tell(f"{case.name}, {case.shape.dtype}")
                rows += _measure(case, repeats)
    finally:
        torch.set_num_threads(threads_before)
    return rows


def report(rows: Sequence[Row], repeats: int, threads: int | None = None) -> Report:
    """All rows, the directions apart."""
    tolerances = ", ".join(f"{tolerance:g} ({dtype})" for dtype, tolerance in TOLERANCE.items())
    machine = machine_line(threads or torch.get_num_threads(), ("torch", "transformers"))
    notes = [
        machine,
        f"Ratio: its time over ours, above 1 we are faster; median [p20, p80] of {repeats} repetitions, paired. "
        "'better' is the faster of the two.",
        f"A speed is shown where output and gradients match the eager block in the same run, within {tolerances} of "
        "their norm.",
        "bfloat16: parameters and gradients of eager and grouped_mm are bfloat16. Ours are float32, as an optimiser "
        "wants them, and cast once a pass; so are those of the blocks with float32 masters, under torch.autocast.",
        "Tokens are random, of those that both routers send to the same experts. Forward runs without autograd.",
    ]
    title = "MEASURED: one rank of MoELayer and transformers' blocks, ms (median)"
    by_direction = sorted(rows, key=lambda row: DIRECTIONS.index(row.direction))
    sheet = Sheet(title, by_direction, notes, group_by="direction")
    return Report("layer", title, "measured", [sheet], data={"machine": machine, "rows": rows})


def main(
    cases: Sequence[ScaledLayer], *, repeats: int = 9, threads: int | None = None, json_path: Path | None = None
) -> int:
    """Measure, write, print; the exit code: 1 if an output was wrong."""
    rows = bench_layer(cases, repeats=repeats, threads=threads)
    publish(report(rows, repeats, threads), json_path=json_path)
    return 0 if all(row.matched for row in rows) else 1


# --- one case ---------------------------------------------------------------------------------------------


def _measure(case: ScaledLayer, repeats: int) -> Iterator[Row]:
    layer, block = MoELayer(case.shape, Strategy(name="ep")), _make_block(case)
    block.load_state_dict(layer.full_state_dict())
    block.to(DTYPES[case.shape.dtype])
    # Both begin from the same numbers: what bfloat16 cannot hold is taken from our masters too.
    layer.load_full_state_dict({name: tensor.float() for name, tensor in block.state_dict().items()})
    x, dy = _tokens(case, layer, block)
    runs = {peer: _Run(block, x, dy, peer) for peer in PEERS} | {OURS: _Run(layer, x, dy)}
    mastered = _make_block(case)
    if x.dtype != torch.float32:
        mastered.load_state_dict(layer.full_state_dict())
        _route_in_float32(mastered)
        runs |= {name: _Run(mastered, x, dy, peer, autocast=True) for peer, name in MASTERED.items()}

    def forget() -> None:
        x.grad = None
        for module in (layer, block, mastered):
            module.zero_grad(set_to_none=True)

    differences: dict[str, float] = {}
    expected: dict[str, Tensor] = {}

    def wrong(name: str, results: dict[str, Tensor]) -> str:
        if name == "eager":
            expected.update(results)
            return ""
        differences[name] = max(relative_difference(results[part], value) for part, value in expected.items())
        right = differences[name] <= TOLERANCE[case.shape.dtype]
        return "" if right else f"differs from eager: {name} by {differences[name]:.1e}"

    setups = {name: partial(Contestant, run.results, run.works) for name, run in runs.items()}
    found = hold(Case(setups, wrong, before=forget, all_or_none=True), repeats)
    why = "; ".join(outcome.wrong for outcome in found.values() if outcome.wrong)
    for direction in DIRECTIONS:
        samples_ms = {name: found[name].samples_ms[direction] for name in found if found[name].samples_ms}
        ours_first = {OURS: samples_ms[OURS]} | samples_ms if samples_ms else {}
        yield Row(direction, case.name, case.num_tokens, case.shape, differences, ours_first, why)


@dataclass(frozen=True)
class _Run:
    """One contestant: a module, its input, the gradient of its output, which experts of transformers it uses, and
    whether it computes in the input's dtype by autocast.
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
        """Output and gradients, by the names and in the shapes of the block."""
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


def _make_block(case: ScaledLayer) -> nn.Module:
    """transformers' block of the case's family and shape, uninitialised. Each family's config takes the names that it
    knows.
    """
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
    """Keep autocast out of the router, as ours does: in 16 bits it would choose other experts."""
    gate: Any = block.gate
    route = gate.forward

    def forward(x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        with torch.autocast(x.device.type, enabled=False):
            logits, weight_TK, expert_TK = route(x.float())
        return logits, weight_TK.to(x.dtype), expert_TK

    gate.forward = forward


@torch.no_grad()
def _tokens(case: ScaledLayer, layer: MoELayer, block: nn.Module) -> tuple[Tensor, Tensor]:
    """x and dy, both [1, T, H]: random tokens that both routers send to the same experts.

    transformers' softmax routers compute in the block's dtype. In bfloat16 they choose another expert here and there,
    and outputs could not be compared.
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
