"""The tiles of a grouped GEMM; those of all five GEMMs of a layer, as JSON; the layers for which a choice holds."""

from __future__ import annotations

import json
import math
import os
from dataclasses import asdict, dataclass, fields
from types import MappingProxyType
from typing import Any, Literal, NamedTuple, get_args

import pydantic_core
import torch
from torch import Tensor

# How many multiprocessors persistent kernels leave to collectives and copies.
SPARED = "MOESYS_SPARED_MULTIPROCESSORS"
# The interpreter runs programs one after another; a few of them show whether they share the tiles rightly.
INTERPRETED_PROGRAMS = 3
SPECIALISED_WARPS = 4

Operands = Literal["pointers", "tma", "specialised"]
# The smallest sizes of a block: products of tensor cores take 16 by 16 by 16 at least.
LEAST = MappingProxyType(
    {"rows": 16, "columns": 16, "contraction": 16, "warps": 1, "stages": 1, "raster": 1, "resident": 1}
)
# The smallest sizes of a block of 16 bits, for products by groups of four warps (Hopper's ``wgmma``).
WARPGROUP = MappingProxyType({"rows": 64, "warps": 4})
OPERAND_BYTES = 2
POWERS_OF_TWO = ("rows", "columns", "contraction", "warps")


# Registers of an NVIDIA multiprocessor, the most that one thread can have, and the threads of a warp.
NUM_REGISTERS, MOST_REGISTERS, THREADS_OF_WARP = 65536, 255, 32


def all_registers(warps: int) -> dict[str, int]:
    """Returns the option that gives all registers to a launch of at most one program per multiprocessor: left to
    itself, the assembler spills to make room for more programs than come.
    """
    return {"maxnreg": min(MOST_REGISTERS, NUM_REGISTERS // (THREADS_OF_WARP * warps))}


def usual_programs(device: torch.device, spares: int = 0) -> int:
    """Returns how many programs are resident by default: one per multiprocessor, except for those that are left to
    others' kernels, as many as ``SPARED`` says, or else ``spares``. Programs that find none free would do their share
    when all the others have done theirs.

    Raises ValueError where it is no number of them.
    """
    if device.type != "cuda":
        return INTERPRETED_PROGRAMS
    there = torch.cuda.get_device_properties(device).multi_processor_count
    spared = os.environ.get(SPARED, str(spares))
    if not spared.isdecimal() or int(spared) >= there:
        raise ValueError(f"{SPARED}={spared!r}; use a number from 0 to {there - 1}, as {device} has {there}")
    return there - int(spared)


class Tiling(NamedTuple):
    """The constants of a kernel as one constexpr: fields of a ``TileConfig``."""

    rows: int
    columns: int
    contraction: int
    raster: int
    stages: int
    operands: Operands
    # The rank of LoRA's factors, as kernels read them; 0 without LoRA.
    rank: int = 0


@dataclass(frozen=True)
class TileConfig:
    """Sizes of one tile of a grouped GEMM, and how programs work on it.

    Bits depend on ``contraction``, the products that are summed in one group, and on ``columns`` below 32 in the
    activation gradient, and on nothing else. ``raster``: row tiles that sweep all column tiles together, so that these
    stay in the L2 cache. ``resident``: programs per multiprocessor, of which one stores while another multiplies;
    ``programs``: those of all multiprocessors together, by default that many of each. ``operands``: how operands
    are loaded. "pointers": through addresses, gathered where the op gathers. "tma": by tensor descriptors.
    "specialised": by tensor descriptors in a warp of its own, which runs ahead of two groups of warps that multiply;
    Triton needs ``warps`` = 4 for these, and adds two groups more. Raises ValueError for sizes that no kernel can have.
    """

    rows: int = 128
    columns: int = 128
    contraction: int = 64
    warps: int = 8
    stages: int = 3
    raster: int = 8
    programs: int | None = None
    operands: Operands = "pointers"
    resident: int = 1

    def __post_init__(self) -> None:
        for name, least in LEAST.items():
            value = getattr(self, name)
            if type(value) is not int or value < least or (name in POWERS_OF_TWO and value & (value - 1)):
                power = "a power of two, " if name in POWERS_OF_TWO else ""
                raise ValueError(f"{name}={value!r}; use {power}{least} or more")
        if self.programs is not None and (type(self.programs) is not int or self.programs < 1):
            raise ValueError(f"programs={self.programs!r}; use 1 or more, or None for one a multiprocessor")
        if self.operands not in get_args(Operands):
            raise ValueError(f"operands={self.operands!r} is not known; use one of {', '.join(get_args(Operands))}")
        if self.operands == "specialised" and self.warps != SPECIALISED_WARPS:
            raise ValueError(
                f"warps={self.warps} with operands='specialised': Triton specialises blocks of {SPECIALISED_WARPS} "
                f"warps alone; use warps={SPECIALISED_WARPS}"
            )

    def num_programs(self, device: torch.device) -> int:
        """Returns the number of resident programs on ``device``."""
        return self.programs or self.resident * usual_programs(device)

    def options(self, operands: Operands | None = None, low_rank: Any = None) -> dict[str, Any]:
        """Returns the options of a grouped GEMM's launch; ``operands`` replaces those of the configuration.
        ``low_rank``: what LoRA adds to the product (``LowRankRows``).
        """
        rank = 0 if low_rank is None else low_rank.rows_PR.shape[1]
        return {
            "tiling": self.tiling._replace(operands=operands or self.operands, rank=rank),
            "num_warps": self.warps,
            "num_stages": self.stages,
            "enable_fp_fusion": True,
        }

    @property
    def tiling(self) -> Tiling:
        """Returns the constants that kernels are compiled for."""
        return Tiling(self.rows, self.columns, self.contraction, self.raster, self.stages, self.operands)


@dataclass(frozen=True)
class TileConfigs:
    """The tiles of each grouped GEMM. Their ``contraction`` is part of the numerics class, and so are
    ``activation_gradient.columns`` below 32; all else changes no bit.
    """

    up: TileConfig
    down: TileConfig
    activation_gradient: TileConfig
    input_gradient: TileConfig
    weight_gradient: TileConfig

    @staticmethod
    def all_of(block: TileConfig) -> TileConfigs:
        """Returns the same configuration for every GEMM."""
        return TileConfigs(block, block, block, block, block)

    def require_warpgroups(self, dtype: torch.dtype, device: torch.device) -> None:
        """Raises ValueError for tiles of 16 bits that a GPU would not multiply by warpgroups, as it does all others:
        another kind of product adds in another order. float32 has no tensor-core product, and the interpreter one kind.
        """
        if device.type == "cpu" or dtype.itemsize != OPERAND_BYTES:
            return
        for op in fields(self):
            block = getattr(self, op.name)
            for name, least in WARPGROUP.items():
                value = getattr(block, name)
                if value < least:
                    raise ValueError(
                        f"{name}={value} of a tile of {op.name} in {dtype}: fewer than {least} are multiplied by "
                        f"another kind of tensor-core product, with other bits; use {name}={least} or more, or None "
                        "for the kernels' choice"
                    )

    def to_json(self) -> str:
        return json.dumps(asdict(self), indent=1)

    @staticmethod
    def from_json(text: str) -> TileConfigs:
        """Raises ValueError for anything that ``to_json`` does not write."""
        try:
            blocks = {name: TileConfig(**block) for name, block in pydantic_core.from_json(text).items()}
            return TileConfigs(**blocks)
        except (AttributeError, TypeError, ValueError) as error:
            names = ", ".join(field.name for field in fields(TileConfigs))
            raise ValueError(
                f"these are no blocks: {error}; write an object of {names} by TileConfigs.to_json()"
            ) from None


@dataclass(frozen=True)
class ShapeClass:
    """Layers that share a choice of blocks. ``rows_of_expert``: T·K / E, rounded to a power of two, at least 1."""

    hidden: int
    width: int
    experts: int
    top_k: int
    activation: str
    dtype: str
    rows_of_expert: int

    @staticmethod
    def of(x_TH: Tensor, down_EHI: Tensor, num_rows: int, activation: str) -> ShapeClass:
        """Returns the class of ``num_rows`` = T·K rows of x."""
        E, H, I = down_EHI.shape
        nearest = 1 << max(0, round(math.log2(max(1, num_rows) / max(1, E))))
        top_k = max(1, num_rows // max(1, len(x_TH)))
        return ShapeClass(H, I, E, top_k, activation, str(x_TH.dtype).removeprefix("torch."), nearest)

    @property
    def key(self) -> str:
        """Returns a name for files, one for each class."""
        return "-".join(str(value) for value in asdict(self).values())
