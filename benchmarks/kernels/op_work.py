"""What each op of a layer must do at a size, and as which products tiles see it (``expected_time``).

T tokens, H hidden, I expert width, U = 2·I, E experts, K choices, P = T·K rows.
"""

from __future__ import annotations

from benchmarks.kernels.aot import Size
from benchmarks.kernels.expected_time import Product, Work
from moesys.kernels.experts.activation_gradient import SUM_COLUMNS

DIRECTIONS = {
    "forward": ("up", "down", "combine"),
    "backward": ("activation_gradient", "input_gradient", "gather_sum", "dW2", "dW1"),
}
# Of 16 bits, of a master's gradient, of an index.
HALF, SINGLE = 2, 4


def work_of(op: str, size: Size) -> Work | None:
    """On one device; None for what is launches rather than work. A gathered row counts once for each choice."""
    _, T, H, I, E, K = size
    P = T * K
    rows_H, rows_I, rows_U, matrix = P * H * HALF, P * I * HALF, P * 2 * I * HALF, E * H * I * HALF
    match op:
        case "up":
            return Work(4.0 * P * H * I, rows_H + 2 * matrix + rows_U + rows_I)
        case "down":
            return Work(2.0 * P * H * I, rows_I + matrix + rows_H)
        case "combine" | "gather_sum":
            return Work(2.0 * P * H, rows_H + T * H * HALF + P * SINGLE)
        case "activation_gradient":
            sums = P * -(-I // SUM_COLUMNS) * SINGLE
            return Work(2.0 * P * H * I, rows_H + matrix + 2 * rows_U + rows_I + sums)
        case "input_gradient":
            return Work(4.0 * P * H * I, rows_U + 2 * matrix + rows_H)
        case "dW2":
            return Work(2.0 * P * H * I, rows_H + rows_I + E * H * I * SINGLE)
        case "dW1":
            return Work(4.0 * P * H * I, rows_H + rows_U + 2 * E * H * I * SINGLE)
    return None


def product_of(op: str, size: Size) -> Product | None:
    """None for what is no product. Rows of an expert are even."""
    _, T, H, I, E, K = size
    rows = T * K / E
    match op:
        case "up":
            return Product(E, rows, I, H, halves=2)
        case "down":
            return Product(E, rows, H, I)
        case "activation_gradient":
            return Product(E, rows, I, H)
        case "input_gradient":
            return Product(E, rows, H, 2 * I)
        case "dW2":
            return Product(E, H, I, rows, by_rows=False, out_bytes=SINGLE)
        case "dW1":
            return Product(E, 2 * I, H, rows, by_rows=False, out_bytes=SINGLE)
    return None


def mega_of(op: str, size: Size, num_ranks: int) -> tuple[Work, list[Product]] | None:
    """A fused MegaKernel of one of ``num_ranks`` ranks, which all have the size's tokens and an equal part of experts:
    as many rows as on one device, in fewer and larger groups, all but its own over links.
    """
    own = size._replace(T=size.T * num_ranks)
    rows_H = size.T * size.K * size.H * HALF
    away = rows_H * (num_ranks - 1) / num_ranks
    parts = {"input_gradient": ("input_gradient", "dW2", "dW1")}.get(op, (op,))
    works = [work for part in parts if (work := work_of(part, size)) is not None]
    products = [product for part in parts if (product := product_of(part, own)) is not None]
    if not products:
        return None
    # What is sent is summed where it comes home.
    summed = 0.0 if op in ("up", "activation_gradient") else rows_H + size.T * size.H * HALF
    flops, memory_bytes = (sum(of) for of in list(zip(*works, strict=True))[:2])
    fewer = [product._replace(groups=-(-size.E // num_ranks)) for product in products]
    return Work(flops, memory_bytes + summed, away), fewer
