"""What a calibration measures, on CPUs and on GPUs; and what it leaves out of all fits, to see them predict."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from benchmarks.calibrate.block_timings import AttentionCase, ElementwiseCase
from benchmarks.calibrate.expert_passes import ExpertCase
from moesys.config import DType, ModelShape


@dataclass(frozen=True)
class LayerCase:
    """A layer, and how many tokens each rank has."""

    shape: ModelShape
    num_tokens: int


@dataclass(frozen=True)
class ModelCase:
    """A model of transformers' Qwen3-MoE, and the batch of each rank: so many sequences of ``seq_len`` tokens."""

    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    seq_len: int
    sequences: int


@dataclass(frozen=True)
class Grid:
    """What is measured on one kind of device.

    tiles: (rows, columns) among which the fit chooses. memory_bytes: copied at once. parameters: shapes that an
    optimizer updates. fused: tokens, H, I, experts and choices of a layer for MegaKernels, where there are some.
    longest_message_s: larger messages than take so long are left out. layers, models: whose steps are measured and
    simulated in the end, if any.
    """

    dtype: DType
    cases: tuple[ExpertCase, ...]
    tiles: tuple[tuple[int, int], ...]
    attention: tuple[AttentionCase, ...]
    elementwise: tuple[ElementwiseCase, ...]
    parameters: tuple[tuple[int, int], ...]
    beside_copies: ExpertCase
    memory_bytes: int
    message_bytes: tuple[int, ...]
    fused: tuple[int, int, int, int, int] | None = None
    longest_message_s: float = 0.25
    layers: tuple[LayerCase, ...] = ()
    models: tuple[ModelCase, ...] = ()


def _cases(
    shapes: Sequence[tuple[int, int]], rows: Sequence[int], groups: Sequence[tuple[int, int]]
) -> tuple[ExpertCase, ...]:
    """Every shape (H, I) with each number of rows, and with (experts, rows of each)."""
    several = [(each,) for each in rows] + [(each,) * experts for experts, each in groups]
    return tuple(ExpertCase(case_rows, H, I) for H, I in shapes for case_rows in several)


def _attention(
    fitted: Sequence[tuple[int, int, int]], held_out: Sequence[tuple[int, int, int]]
) -> tuple[AttentionCase, ...]:
    """Of (heads, width of a head, tokens)."""
    return (*(AttentionCase(*of) for of in fitted), *(AttentionCase(*of, held_out=True) for of in held_out))


def _elementwise(fitted: Sequence[tuple[int, int]], held_out: Sequence[tuple[int, int]]) -> tuple[ElementwiseCase, ...]:
    """Of (tokens, H)."""
    return (*(ElementwiseCase(*of) for of in fitted), *(ElementwiseCase(*of, held_out=True) for of in held_out))


CPU_GRID = Grid(
    dtype="float32",
    cases=(
        *_cases([(256, 512), (512, 512), (512, 1024)], [7, 21, 71, 151, 401, 1001], [(8, 21), (8, 101)]),
        ExpertCase((111,), 384, 768, held_out=True),
        ExpertCase((601,), 768, 384, held_out=True),
        ExpertCase((300, 120, 60, 30, 20, 10, 5, 0), 384, 768, held_out=True),
        ExpertCase((64, 64, 64, 64), 768, 384, held_out=True),
    ),
    # Rows alone are rounded: to bring a matrix into the order that the CPU likes costs as much as some rows.
    tiles=tuple((rows, 1) for rows in (1, 2, 4, 8, 16, 24, 32, 48, 64)),
    attention=_attention(
        [(4, 64, 256), (8, 64, 256), (4, 128, 256), (8, 32, 512), (8, 64, 512), (8, 64, 1024)],
        [(6, 64, 384), (12, 32, 768)],
    ),
    elementwise=_elementwise(
        [(512, 512), (1024, 256), (1024, 512), (2048, 256), (2048, 512)], [(1024, 384), (1536, 256)]
    ),
    parameters=((512, 1024),) * 16,
    beside_copies=ExpertCase((256,), 512, 512),
    memory_bytes=64 << 20,
    message_bytes=tuple(1 << power for power in range(10, 24, 2)),
    layers=tuple(
        LayerCase(ModelShape(hidden_size=hidden, intermediate_size=width, num_experts=8, top_k=2), tokens)
        for hidden, width, tokens in ((384, 768, 256), (384, 768, 1024), (768, 384, 512))
    ),
    models=(ModelCase(256, 512, 3, 4, 256, 8), ModelCase(384, 384, 2, 6, 384, 4)),
)
CUDA_GRID = Grid(
    dtype="bfloat16",
    cases=(
        *_cases(
            [(2048, 768), (7168, 2048), (4096, 14336)], [1, 24, 100, 300, 1000, 4096, 16384], [(32, 100), (32, 512)]
        ),
        ExpertCase((2000,), 5120, 1536, held_out=True),
        ExpertCase((4000, 1000, 300, 100, 30, 10, 3, 0) * 4, 5120, 1536, held_out=True),
    ),
    tiles=tuple((rows, columns) for rows in (64, 128, 256) for columns in (64, 128, 256)),
    attention=_attention(
        [(32, 128, 2048), (32, 128, 4096), (128, 128, 4096), (32, 64, 4096), (32, 128, 8192)], [(64, 128, 3072)]
    ),
    elementwise=_elementwise([(4096, 2048), (8192, 4096), (4096, 7168), (16384, 2048)], [(8192, 2048)]),
    parameters=((4096, 4096),) * 16,
    beside_copies=ExpertCase((4096,), 4096, 2048),
    memory_bytes=1 << 30,
    message_bytes=tuple(1 << power for power in range(12, 28, 3)),
    fused=(8192, 2048, 768, 128, 8),
)
GRIDS = {"cpu": CPU_GRID, "cuda": CUDA_GRID}
