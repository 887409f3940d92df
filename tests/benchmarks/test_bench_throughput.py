"""``python -m benchmarks throughput``: frozen rows and pairs, and that a page says what is missed."""

from __future__ import annotations

import numpy as np
import pytest

from benchmarks.published import throughput
from benchmarks.published.throughput_constants import (
    FITTED,
    Constants,
    choices_over_ranks,
    fit,
    fit_rates,
    flops_per_token,
    run_of,
    simulated,
)
from benchmarks.published.throughput_found import Pair
from benchmarks.published.throughput_rows import published_pairs, published_rows

ROWS = published_rows()
# Qwen3-30B-A3B on 8 B200, micro-batch 4 and 1, and on 8 GB300 as a whole graph.
FOUR, ONE, WHOLE = ROWS[69], ROWS[156], ROWS[7]


def test_rows_and_pairs_are_by_the_rule() -> None:
    assert sum(row.listed for row in ROWS.values()) == 40
    assert {row.release for row in ROWS.values() if not row.listed} <= {"25.11", "26.02", "26.02.01", "26.04", "26.06"}
    for before, after in published_pairs():
        assert (before.model, before.system, before.gpus) == (after.model, after.system, after.gpus)
        assert before.run(before.cluster) != after.run(after.cluster)
    assert len(published_pairs()) == 12


@pytest.mark.parametrize("row", ROWS.values(), ids=lambda row: str(row.row))
def test_every_row_can_be_simulated(row) -> None:
    run = run_of(row, FITTED)
    assert run.cluster.num_ranks == row.gpus
    assert run.num_micro_batches * row.micro_batch * run.groups.data == row.global_batch


def test_whole_graphs_take_no_constant() -> None:
    assert run_of(WHOLE, FITTED) == run_of(WHOLE, None)
    assert run_of(FOUR, FITTED) != run_of(FOUR, None)


def test_a_fused_dispatch_sends_a_token_to_a_rank_once() -> None:
    """8 different experts of 128, 16 of them on each of 8 ranks: drawn, how many of the others have one."""
    draws = np.random.default_rng(0).permuted(np.tile(np.arange(128), (20000, 1)), axis=1)[:, :8] // 16
    reached = np.mean([len(set(ranks) - {0}) for ranks in draws.tolist()])
    choices = np.mean((draws != 0).sum(axis=1))
    assert choices_over_ranks(run_of(FOUR, None)) == pytest.approx(choices / reached, rel=0.01)


@pytest.mark.slow
def test_a_fit_finds_what_made_the_rows() -> None:
    """One row that its host limits, and one that its products do."""
    made = Constants(host_us=200.0, products=0.6)
    rows = [row.model_copy(update={"global_batch": 8 * row.micro_batch}) for row in (FOUR, ONE)]
    assert simulated(rows[0], made).shares["host"] < simulated(rows[1], made).shares["host"]
    measured = [row.model_copy(update={"tokens_s_gpu": simulated(row, made).tokens_per_second}) for row in rows]
    found = fit(measured)
    assert (found.host_us, found.products) == pytest.approx((200.0, 0.6), rel=0.03)


def test_pairs_rows_and_bars_of_a_few_rows() -> None:
    rates = fit_rates([FOUR])
    assert list(rates) == [("b200", "MXFP8")]
    assert rates["b200", "MXFP8"] / flops_per_token(FOUR) == pytest.approx(FOUR.tokens_s_gpu)
    found = [throughput.find(row, FITTED, rates["b200", "MXFP8"]) for row in (FOUR, ONE, ROWS[133], ROWS[93], ROWS[60])]
    pair = Pair(found[1], found[0])
    assert pair.change == "micro-batch 1 to 4"
    assert pair.published == FOUR.tokens_s_gpu / ONE.tokens_s_gpu
    assert pair.rate_error == pytest.approx(1 / pair.published - 1)
    bars, pairs, rows, constants = throughput.sheets(found, [pair, Pair(found[3], found[4])], FITTED)
    assert [len(sheet.rows) for sheet in (pairs, rows)] == [2, 5]
    order = [row.met for row in bars.rows]
    assert order == sorted(order, key=("no", "yes", "").index)
    assert constants.rows
