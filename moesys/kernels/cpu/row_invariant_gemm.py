"""Matrix products whose rows do not depend on how many rows share the call.

Chunks of one computation may only change its bits if a GEMM treats a row differently in small company. BLAS libraries
do so below a handful of rows (they switch to other kernels, or cut the rows between threads), and not above: so the
least safe number of rows is measured, and shorter calls are padded to it by their callers. Very narrow matrices (about
a dozen columns) have no safe number; their rows are multiplied one by one.
"""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import cache
from hashlib import sha256
from pathlib import Path

import torch
from torch import Tensor

from moesys.kernels.torch_internals import HAS_ONEDNN, onednn_product

LARGEST_MINIMUM = 32
LARGE_WEIGHT = 1 << 18
# A tensor-core tile computes a row in the same way at every place in the tile.
DEVICE_TILE_ROWS = 64
SMALL_MATRIX = 1 << 16
# Below this, kernels depend on rows and addresses in ways that no probe has found all of.
NARROW = 16
# Addresses of allocations are multiples of this.
ALIGNMENT_BYTES = 64
# Columns beyond these are more of the same, and would make the probe of a large expert take a minute.
LARGEST_COLUMNS = 2048
CACHE = "MOESYS_CACHE"
# A probe takes milliseconds, unless other programs take the cores that its threads wait for.
_SILENT_S = 1.0
_FEW_COUNTS = (*range(1, 17), 24, 32, 64, 100)
_MANY_COUNTS = (*range(1, 70), 100, 127, 128, 129, 192, 256)

# (first row, elements by which x and out are shifted from an aligned address): a row is also seen at other places in
# the call and in memory.
_PLACEMENTS = ((0, 0, 0), (5, 3, 5), (3, 1, 8), (16, 8, 1), (33, 5, 16))


@dataclass(frozen=True)
class RowRule:
    """A rule for calls of a GEMM by which chunks change no bit: a call has at least ``min_rows`` rows, or, if that is
    not enough, exactly ``tile_rows`` rows.
    """

    min_rows: int = 1
    tile_rows: int | None = None

    @staticmethod
    def all_of(rules: list[RowRule]) -> RowRule:
        """Returns one rule that keeps all ``rules``."""
        tiles = [rule.tile_rows for rule in rules if rule.tile_rows is not None]
        return RowRule(max(rule.min_rows for rule in rules), min(tiles) if tiles else None)


def row_rule(
    contraction: int, columns: int, dtype: torch.dtype, transposed: bool, device_type: str, added: bool = False
) -> RowRule:
    """Returns the rule for x [m, contraction] @ w [contraction, columns]; ``transposed``: w is a transposed contiguous
    matrix; ``added``: the product is added to the output.

    On the CPU it is probed once per machine, with torch's current number of threads, which is part of the numerics
    class. What was found is in the folder that ``MOESYS_CACHE`` names, else in the user's cache.
    """
    if device_type != "cpu":
        return RowRule(tile_rows=DEVICE_TILE_ROWS)
    if min(contraction, columns) < NARROW:
        return RowRule(tile_rows=1)
    return _probe(contraction, columns, dtype, transposed, torch.get_num_threads(), added)


def projection_rule(
    inward: int, outward: int, dtype: torch.dtype, device_type: str, transposed: bool = False
) -> RowRule:
    """Returns the rule for both products of a projection by weight [outward, inward], or [inward, outward] where it is
    ``transposed``: x @ weightᵀ of forward, dy @ weight of backward.
    """
    return RowRule.all_of(
        [
            row_rule(inward, outward, dtype, not transposed, device_type),
            row_rule(outward, inward, dtype, transposed, device_type),
        ]
    )


@cache
def _probe(contraction: int, columns: int, dtype: torch.dtype, transposed: bool, threads: int, added: bool) -> RowRule:
    columns = min(columns, LARGEST_COLUMNS)
    name = f"rows-{contraction}-{columns}-{dtype}-{transposed}-{threads}" + "-added" * added
    with suppress(OSError, ValueError):
        min_rows, tile_rows = map(int, Path(_folder_of_machine(), name).read_text().split())
        return RowRule(min_rows, tile_rows or None)
    rule = _measured_rule(contraction, columns, dtype, transposed, added)
    # Where nothing can be written, the next process measures again.
    with suppress(OSError):
        path = _folder_of_machine() / name
        path.parent.mkdir(parents=True, exist_ok=True)
        part = path.with_name(f"{path.name}.{os.getpid()}")
        part.write_text(f"{rule.min_rows} {rule.tile_rows or 0}\n")
        part.replace(path)
    return rule


def cache_folder() -> Path:
    """Returns the folder that ``MOESYS_CACHE`` names, else that of moesys in the user's cache.

    Raises OSError if neither is known.
    """
    if named := os.environ.get(CACHE):
        return Path(named)
    try:
        return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "moesys"
    except RuntimeError:
        # This happens in a container whose user has no name.
        raise OSError(f"this user has no home folder to keep blocks in; name a folder by {CACHE}") from None


@cache
def _folder_of_machine() -> Path:
    """Returns the folder of this processor, of this build of torch, and of the variables that steer its libraries."""
    steering = {name: value for name, value in os.environ.items() if name.startswith(("MKL_", "ONEDNN_", "DNNL_"))}
    cpu = Path("/proc/cpuinfo").read_text().partition("\n\n")[0] if os.path.exists("/proc/cpuinfo") else ""
    fixed = [line for line in cpu.splitlines() if line.startswith(("model", "stepping", "flags", "vendor"))]
    machine = (*fixed, torch.__version__, torch.__config__.show(), sorted(steering.items()), _PLACEMENTS)
    return cache_folder() / f"gemm-{sha256(repr(machine).encode()).hexdigest()[:16]}"


def _measured_rule(contraction: int, columns: int, dtype: torch.dtype, transposed: bool, added: bool) -> RowRule:
    small = contraction * columns <= SMALL_MATRIX
    counts, placements = (_MANY_COUNTS, _PLACEMENTS) if small else (_FEW_COUNTS, _PLACEMENTS[:2])
    rows = max(counts) + max(first_row for first_row, _, _ in placements)
    seeds = range(2 if small else 1)
    trials = [_trial(rows, contraction, columns, dtype, transposed, seed, added) for seed in seeds]
    begun_s, unsafe = time.monotonic(), 0
    for count in reversed(counts):
        if time.monotonic() - begun_s > _SILENT_S:
            _say_once("moesys measures how many rows BLAS needs for equal bits, once per machine and size of expert")
        if not _is_safe(count, trials, placements, added):
            unsafe = count
            break
    return RowRule(unsafe + 1) if unsafe < LARGEST_MINIMUM else RowRule(tile_rows=1)


@cache
def _say_once(line: str) -> None:
    logging.getLogger(__name__).warning(line)


def _trial(
    rows: int, contraction: int, columns: int, dtype: torch.dtype, transposed: bool, seed: int, added: bool
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Returns x, w, what x @ w is written over or ``added`` to, and the result."""
    x_MK, weight_KN = _cancelling(rows, contraction, columns, seed)
    x_MK, weight_KN = x_MK.to(dtype), weight_KN.to(dtype)
    weight_KN = weight_KN.t().contiguous().t() if transposed else weight_KN
    # Addends are as small as rounding errors of the product, which larger ones would hide.
    start_MN = weight_KN[torch.arange(rows) % contraction] * 2.0**-12
    product_MN = start_MN.clone()
    _multiply(x_MK, weight_KN.t(), product_MN, added)
    return x_MK, weight_KN, start_MN, product_MN


def _is_safe(
    count: int,
    trials: Sequence[tuple[Tensor, Tensor, Tensor, Tensor]],
    placements: Sequence[tuple[int, int, int]],
    added: bool,
) -> bool:
    """Returns whether calls of ``count`` rows give the same bits as one call of all rows."""
    for x_MK, weight_KN, start_MN, expected_MN in trials:
        for first_row, x_shift, out_shift in placements:
            rows = slice(first_row, first_row + count)
            out_NN = _shifted(start_MN[rows], out_shift)
            _multiply(_shifted(x_MK[rows], x_shift), weight_KN.t(), out_NN, added)
            if not torch.equal(out_NN, expected_MN[rows]):
                return False
    return True


def _shifted(rows_NK: Tensor, elements: int) -> Tensor:
    """Returns a copy that begins ``offset`` elements behind an aligned address."""
    buffer = torch.zeros(rows_NK.numel() + elements, dtype=rows_NK.dtype)
    return buffer[elements:].view(rows_NK.shape).copy_(rows_NK)


def _cancelling(rows: int, contraction: int, columns: int, seed: int) -> tuple[Tensor, Tensor]:
    """Returns x [rows, contraction] and w [contraction, columns] whose products, of very different sizes, cancel in
    pairs.

    What remains of x @ w is mostly rounding error, so that any other order of summation shows. Ordinary numbers would
    hide it from 16-bit outputs, whose rounding is coarser than the difference.
    """
    generator = torch.Generator().manual_seed(seed)
    x_MK = torch.randn(rows, contraction, generator=generator)
    weight_KN = torch.randn(contraction, columns, generator=generator)
    first, second = torch.randperm(contraction // 2 * 2, generator=generator).view(2, -1)
    x_MK[:, first] *= 2.0 ** torch.randint(-8, 9, (rows, len(first)), generator=generator)
    x_MK[:, second] = -x_MK[:, first]
    weight_KN[second] = weight_KN[first]
    return x_MK, weight_KN


def matmul_rows(x_MK: Tensor, weight_NK: Tensor, out_MN: Tensor, rule: RowRule, *, add: bool = False) -> None:
    """Writes ``out_MN = x_MK @ weight_NKᵀ``, or adds it, by ``rule``; the caller has padded x to ``rule.min_rows``
    rows, and the weight is copied if it is not ``aligned``.
    """
    weight_NK = aligned(weight_NK)
    if rule.tile_rows is None:
        _multiply(x_MK, weight_NK, out_MN, add)
        return
    tile_K = x_MK.new_zeros(rule.tile_rows, x_MK.shape[1])
    tile_N = out_MN.new_zeros(rule.tile_rows, out_MN.shape[1])
    for start in range(0, x_MK.shape[0], rule.tile_rows):
        rows = min(rule.tile_rows, x_MK.shape[0] - start)
        tile_K[:rows] = x_MK[start : start + rows]
        if add:
            tile_N[:rows] = out_MN[start : start + rows]
        _multiply(tile_K, weight_NK, tile_N, add)
        out_MN[start : start + rows] = tile_N[:rows]


def is_aligned(tensor: Tensor) -> bool:
    """Returns whether a tensor begins at an address that allocations have."""
    return tensor.data_ptr() % ALIGNMENT_BYTES == 0


def aligned(rows: Tensor) -> Tensor:
    """Returns the rows at an address that is aligned like an allocation. BLAS' order of sums in narrow matrices depends
    on the alignment of both operands, and the address of a matrix among others depends on the layout.
    """
    return rows if is_aligned(rows) else rows.clone()


def _multiply(x_MK: Tensor, weight_NK: Tensor, out_MN: Tensor, add: bool) -> None:
    """Writes ``out = x @ weightᵀ``, or adds it.

    oneDNN multiplies float32 on the CPU if the weight is large, as torch does in 16 bits. It is 5 to 15 % faster than
    MKL, which torch uses, with hundreds of rows, and computes rows alike from the second on. But it prepares for each
    new number of rows for half a millisecond, in which MKL finishes a small product.
    """
    large = weight_NK.numel() >= LARGE_WEIGHT
    if add:
        torch.addmm(out_MN, x_MK, weight_NK.t(), out=out_MN)
    elif HAS_ONEDNN and large and x_MK.dtype == torch.float32 and x_MK.device.type == "cpu":
        out_MN.copy_(onednn_product(x_MK, weight_NK))
    else:
        torch.mm(x_MK, weight_NK.t(), out=out_MN)
