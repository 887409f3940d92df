"""Checks that must hold before the speed of a kernel is shown: errors, bits, and use inside torch.

Each check of moesys returns a ``Verdict`` or raises what torch or Triton raised.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Annotated, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from benchmarks.harness.contest import in_a_line
from benchmarks.kernels.drawn_layer import Implementation, Layer, Results, Run, Size, draw_layer, relative_errors
from moesys.kernels.experts.experts import ExpertMatrices, experts_backward, experts_forward, moe_experts
from moesys.kernels.experts.tile_config import TileConfig, TileConfigs
from moesys.kernels.routing import route
from moesys.lab.show.sheets import Column

# The largest ‖found - right‖ / ‖right‖ at which a contestant is timed.
TOLERANCE = {torch.float32: 1e-5, torch.float16: 4e-3, torch.bfloat16: 2e-2}
# The largest error of moesys, in multiples of that of torch's grouped GEMM, and the error below which rounding decides.
MOST_OF_GROUPED = 1.5
FLOOR = {torch.float32: 1e-6, torch.float16: 0.0, torch.bfloat16: 0.0}
WARM_UPS = 3


@dataclass(frozen=True)
class Finding:
    """The result of one check of moesys: the layer, the check, whether it holds, and details."""

    where: Annotated[str, Column("where")]
    what: Annotated[str, Column("what", wraps=True)]
    holds: Annotated[bool, Column("verdict", lambda holds: "holds" if holds else "FAILS")]
    says: Annotated[str, Column("details", wraps=True)]


class Verdict(NamedTuple):
    """The result of a check: ``holds`` is True if it passed, and ``says`` gives the details."""

    holds: bool
    says: str


def found_of(where: str, what: str, check: Callable[[], Verdict]) -> Finding:
    """Runs ``check``; a check that raises does not hold."""
    try:
        return Finding(where, what, *check())
    except Exception as error:
        return Finding(where, what, False, in_a_line(error))


def wrong_errors(errors: Mapping[str, float], dtype: torch.dtype, grouped: Sequence[Mapping[str, float]] = ()) -> str:
    """Returns why ``errors`` are too large, or "" if they are not.

    ``grouped``: the errors of torch's grouped GEMM on the same layer; the smallest of them bound those of moesys.
    """
    found = []
    for name, error in errors.items():
        bounds = [TOLERANCE[dtype], *(max(MOST_OF_GROUPED * other[name], FLOOR[dtype]) for other in grouped)]
        if not error <= min(bounds):
            found.append(f"{name} is off by {error:.1e}, {min(bounds):.1e} is the most")
    return "; ".join(found)


def same_bits(layer: Layer, runs: int) -> Verdict:
    """Checks that repeated forwards and backwards have equal bits."""
    run = ours_on(layer)
    first = run.results()
    for _ in range(runs - 1):
        differs = different(run.results(), first)
        if differs:
            return Verdict(False, f"{differs} differ from run to run")
    return Verdict(True, f"{runs} runs")


def same_bits_in_other_blocks(layer: Layer) -> Verdict:
    """Checks that other tiles with the same contraction give equal bits."""
    x_TH, weight_TK, dtype = layer.x_TH, layer.weight_TK, layer.x_TH.dtype
    contraction = 32 if dtype == torch.float32 or x_TH.device.type == "cpu" else 64
    blocks = TileConfigs.all_of(TileConfig(rows=64, columns=64, contraction=contraction, warps=4, stages=3, raster=3))
    matrices = ExpertMatrices(layer.gate_up_EUH, layer.down_EHI, "swiglu")
    routing = route(layer.expert_TK, layer.size.E)
    y_TH, state = experts_forward(x_TH, routing, weight_TK, matrices, blocks)
    out = torch.empty_like(layer.gate_up_EUH), torch.empty_like(layer.down_EHI)
    gradients = experts_backward(layer.dy_TH, x_TH, weight_TK, matrices, state, blocks, out)
    differs = different((y_TH, *gradients, *out), ours_on(layer).results())
    says = f"{differs} differ" if differs else f"tiles of {blocks.up.rows}x{blocks.up.columns}"
    return Verdict(not differs, says)


def compiled_whole(layer: Layer) -> Verdict:
    """Checks ``torch.compile(fullgraph=True)`` of a module with a residual around the experts."""
    backend = "inductor" if layer.x_TH.is_cuda else "aot_eager"
    compiled = torch.compile(_Residual(), fullgraph=True, backend=backend)
    return _as_plain(layer, compiled, backend)


def recomputed(layer: Layer) -> Verdict:
    """Checks activation checkpointing."""

    def again(*arguments: Tensor) -> Tensor:
        y_TH: Tensor = checkpoint(_Residual(), *arguments, use_reentrant=False)
        return y_TH

    return _as_plain(layer, again, "use_reentrant=False")


def graph_replayed(layer: Layer, other: Layer) -> Verdict:
    """Checks a CUDA graph of forward and backward, captured on one layer's tensors and replayed on another's."""
    held = replace(
        layer, **{name: getattr(layer, name).clone() for name in ("x_TH", "dy_TH", "expert_TK", "weight_TK")}
    )
    run = ours_on(held)
    aside = torch.cuda.Stream()
    aside.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(aside):
        for _ in range(WARM_UPS):
            run.results()
    torch.cuda.current_stream().wait_stream(aside)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = run.results()
    for name in ("x_TH", "dy_TH", "expert_TK", "weight_TK"):
        getattr(held, name).copy_(getattr(other, name))
    graph.replay()
    torch.cuda.synchronize()
    differs = different(captured, ours_on(held).results())
    says = f"{differs} differ on new data" if differs else "replayed on new data"
    return Verdict(not differs, says)


def inside_torch(size: Size, dtype: torch.dtype, device: torch.device) -> list[Finding]:
    """Checks the experts inside torch's compiler, checkpoints and, on a GPU, CUDA graphs."""

    def layer(seed: int = 0) -> Layer:
        return draw_layer(size, "uniform", dtype, device, seed)

    # Each check draws its own layer, so that a failure to draw one does not end the others.
    checks = {
        "torch.compile(fullgraph=True)": lambda: compiled_whole(layer()),
        "activation checkpointing": lambda: recomputed(layer()),
    }
    if device.type == "cuda":
        checks["CUDA graph"] = lambda: graph_replayed(layer(), layer(1))
    return [found_of(f"{size.name}, uniform", what, check) for what, check in checks.items()]


def far_offsets(size: Size, dtype: torch.dtype, device: torch.device) -> Verdict:
    """Checks rows, matrices and gradients at both ends of tensors with more elements than an int32 can number."""
    layer = draw_layer(size, "uniform", dtype, device)
    # Tokens in order of their experts, so that the first and last rows of every tensor belong to the outer experts.
    in_order_TK = (torch.arange(size.T, device=device) * size.E // size.T)[:, None]
    layer = replace(layer, expert_TK=in_order_TK)
    outer = relative_errors(*_outer_experts(layer, ours_on(layer).results()))
    wrong = wrong_errors(outer, dtype)
    rows = size.T * size.K
    largest = min(rows * 2 * size.I, rows * size.H, size.E * size.H * size.I)
    says = wrong or f"h, y and every matrix have {largest:.3g} elements or more; errors to {max(outer.values()):.1e}"
    return Verdict(not wrong, says)


def _outer_experts(layer: Layer, found: Results) -> tuple[Layer, Results]:
    """Returns the layer of the first and last expert and their tokens, which have one choice each, and its results."""
    last = layer.size.E - 1
    token_N = ((layer.expert_TK[:, 0] == 0) | (layer.expert_TK[:, 0] == last)).nonzero().flatten()
    outer = torch.tensor([0, last], device=token_N.device)
    part = Layer(
        layer.size._replace(T=len(token_N), E=2, K=1),
        layer.x_TH[token_N],
        layer.dy_TH[token_N],
        (layer.expert_TK[token_N] == last).long(),
        layer.weight_TK[token_N],
        layer.gate_up_EUH[outer],
        layer.down_EHI[outer],
    )
    return part, Results(*(tensor[token_N] for tensor in found[:3]), *(tensor[outer] for tensor in found[3:]))


class _Residual(nn.Module):
    def forward(self, x_TH: Tensor, expert_TK: Tensor, weight_TK: Tensor, gate_up: Tensor, down: Tensor) -> Tensor:
        return x_TH + moe_experts(x_TH, expert_TK, weight_TK, gate_up, down)


def _as_plain(layer: Layer, other: Callable[..., Tensor], how: str) -> Verdict:
    """Checks that ``other`` gives the bits of ``_Residual``."""
    plain, found = (Run(Implementation(experts), layer).results() for experts in (_Residual(), other))
    differs = different(found, plain)
    return Verdict(not differs, f"{differs} differ" if differs else f"{how}, equal bits")


def ours_on(layer: Layer) -> Run:
    return Run(Implementation(moe_experts), layer)


def different(found: Iterable[Tensor | None], expected: Results) -> str:
    """Returns the names of the results whose bits differ."""
    pairs = zip(Results._fields, found, expected, strict=True)
    return ", ".join(name for name, left, right in pairs if left is None or not torch.equal(left, right))
