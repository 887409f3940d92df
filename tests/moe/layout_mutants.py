"""``LayoutInvariant`` broken, each time in one place: what its tests must notice."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor

from moesys.balance import row_blocks
from moesys.kernels.cpu import row_invariant_gemm
from moesys.moe import gradients, token_blocks
from moesys.moe.store import ExpertStore
from moesys.overlap import experts_cpu
from moesys.overlap.comm.channel import Channel
from moesys.overlap.exact_sum import BlockSums


def _float_sum(total: Tensor, addend: Tensor, grid: float) -> None:
    total.copy_((total.float() + addend.float()).double())


def _local_rows(sums: BlockSums, largest: Tensor) -> Tensor:
    return agree(replace(sums, rows_E=sums.rows_E // sums.channel.num_ranks), largest)


def _local_largest(sums: BlockSums, largest: Tensor) -> Tensor:
    return agree(replace(sums, channel=Channel(None, (0,), sums.channel.recorder, sums.channel.meter)), largest)


def _float32_home(store: ExpertStore, layout: Any, device: torch.device) -> Tensor:
    return new_gradients(store, layout, device).float()


def _float_norm(by_group: dict[Any, list[Tensor]], num_elements: int, device: torch.device) -> Tensor:
    total = torch.zeros((), dtype=torch.float64)
    for groups, parts in by_group.items():
        squares = sum((part.square().sum() for part in parts), torch.zeros(())).double()
        for group in groups:
            torch.distributed.all_reduce(squares, group=group)
        total += squares
    return total.sqrt()


def _float_all_reduce(channel: Channel, values: Tensor, *, lane: str) -> Tensor:
    return all_reduce(channel, values.float(), lane=lane).double()


agree, new_gradients, all_reduce = BlockSums.agree, ExpertStore.new_gradients, Channel.all_reduce

# A mutant: what takes whose place.
MUTANTS: dict[str, tuple[object, str, Callable[..., Any]]] = {
    "blocks are added in float32": (experts_cpu, "add_on_grid", _float_sum),
    "a grid by this rank's rows": (BlockSums, "agree", _local_rows),
    "a grid by this rank's largest": (BlockSums, "agree", _local_largest),
    "splits cut blocks": (row_blocks, "by_blocks", lambda plan, block_rows: plan),
    "splits cut other blocks": (row_blocks, "by_blocks", lambda plan, rows: by_blocks(plan, rows // 2 + 3)),
    "one product of all rows": (BlockSums, "blocks", lambda sums, num_rows: [slice(0, num_rows)]),
    "gradients travel in float32": (ExpertStore, "new_gradients", _float32_home),
    "weights wherever they lie": (row_invariant_gemm, "aligned", lambda rows: rows),
    "tokens' blocks are added in float32": (token_blocks, "add_on_grid", _float_sum),
    "ranks' tokens are added in float32": (Channel, "all_reduce", _float_all_reduce),
    "a norm in float32": (gradients, "_norm", _float_norm),
}
by_blocks = row_blocks.by_blocks


@contextmanager
def mutated(name: str) -> Iterator[None]:
    """``""``: as it is."""
    with patch.object(*MUTANTS[name]) if name else nullcontext():
        yield
