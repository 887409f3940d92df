"""Megatron-Bridge's rows and pairs: frozen by their rule, and a page that shows misses first."""

from __future__ import annotations

import numpy as np
import pytest

from experiments.published.megatron_bridge import (
    BY,
    HOST_US,
    choices_over_ranks,
    fit_rates,
    pair_result,
    published_pairs,
    published_rows,
    sheets,
    simulate_row,
)

ROWS = published_rows()
# Qwen3-30B-A3B on 8 B200, micro-batch 4 and 1, and on 8 GB300 as a whole graph.
FOUR, ONE, WHOLE = ROWS[69], ROWS[156], ROWS[7]


def test_rows_and_pairs_are_by_the_rule() -> None:
    assert sum(row.listed for row in ROWS.values()) == 40
    assert {row.release for row in ROWS.values() if not row.listed} <= {"25.11", "26.02", "26.02.01", "26.04", "26.06"}
    for before, after in ((ROWS[first], ROWS[second]) for first, second in published_pairs()):
        assert (before.model, before.system, before.gpus) == (after.model, after.system, after.gpus)
        assert before.run != after.run
    assert len(published_pairs()) == 12


@pytest.mark.parametrize("row", ROWS.values(), ids=lambda row: str(row.row))
def test_every_row_can_be_simulated(row) -> None:
    run = row.fitted_run
    assert run.cluster.num_ranks == row.gpus
    assert run.num_micro_batches * row.micro_batch * run.groups.data == row.global_batch


def test_whole_graphs_take_no_constant() -> None:
    assert WHOLE.fitted_run == WHOLE.run
    assert FOUR.fitted_run.host_us == HOST_US
    assert FOUR.fitted_run.cluster.expert_tflops < FOUR.run.cluster.expert_tflops


def test_a_fused_dispatch_sends_a_token_to_a_rank_once() -> None:
    """8 different experts of 128, 16 of them on each of 8 ranks: drawn, how many of the others have one."""
    draws = np.random.default_rng(0).permuted(np.tile(np.arange(128), (20000, 1)), axis=1)[:, :8] // 16
    reached = np.mean([len(set(ranks) - {0}) for ranks in draws.tolist()])
    choices = np.mean((draws != 0).sum(axis=1))
    assert choices_over_ranks(FOUR.run) == pytest.approx(choices / reached, rel=0.01)


def test_pairs_rows_and_bars_of_a_few_rows() -> None:
    rates = fit_rates([FOUR])
    assert list(rates) == [("b200", "MXFP8")]
    rate = rates["b200", "MXFP8"]
    assert rate / FOUR.flops_per_token == pytest.approx(FOUR.tokens_s_gpu)
    four, one, other, before, after = found = [
        simulate_row(row, rate) for row in (FOUR, ONE, ROWS[133], ROWS[93], ROWS[60])
    ]
    assert other.errors.keys() == set(BY)
    pair = pair_result(one, four)
    assert pair.change == "micro-batch 1 to 4"
    assert pair.published == FOUR.tokens_s_gpu / ONE.tokens_s_gpu
    assert pair.errors["baseline"] == pytest.approx(1 / pair.published - 1)
    bars, pairs, rows = sheets(found, [pair, pair_result(before, after)])
    assert [len(sheet.rows) for sheet in (pairs, rows)] == [2, 5]
    order = [row.met for row in bars.rows]
    assert order == sorted(order, key=("no", "yes", "").index)
