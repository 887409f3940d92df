"""The calibration check measures steps and simulates them: the simulated time follows the ClusterSpec."""

from __future__ import annotations

from functools import partial
from types import SimpleNamespace

import pytest

from benchmarks import calibration_check
from benchmarks.calibration_check import STRATEGIES, ModelCase, check_layers, check_models
from moesys.config import ClusterSpec
from moesys.lab.ranks.pool import LocalRanks

SLOW = ClusterSpec(memory_gb_per_s=20.0, launch_us=3.0, intra_node_gb_per_s=0.1)


def test_steps_of_a_layer_are_measured_and_simulated(ranks: LocalRanks, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(calibration_check, "LAYERS", ((16, 16, 48),))
    slow = SLOW.replace(ranks_per_node=4, expert_tflops=1e-4, intra_node_us=1e4)
    checks = check_layers(ranks, slow, repeats=2)
    assert [check.step.rpartition(", ")[2] for check in checks] == [strategy.name for strategy in STRATEGIES]
    for check in checks:
        assert check.measured_ms.n == 2
        assert check.measured_ms.median > 0
        # Dispatch and combine, forward and backward, wait for ten milliseconds each.
        assert check.simulated_ms > 40
        assert check.error == pytest.approx(check.simulated_ms / check.measured_ms.median - 1)


def test_a_model_is_measured_and_simulated(ranks: LocalRanks, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(calibration_check, "MODELS", (ModelCase(64, 32, 1, 2, 8, 2),))
    two = SimpleNamespace(run=partial(ranks.run, num_ranks=2))
    (check,) = check_models(two, SLOW.replace(ranks_per_node=2, expert_tflops=1e-6), repeats=2)
    assert check.measured_ms.n == 2
    assert check.measured_ms.median > 0
    # The 16 tokens of a rank pass 2 experts of 6 H I flops forward, and twice as many backward.
    assert check.simulated_ms > 16 * 2 * 18 * 64 * 32 / 1e6 * 1e3


def test_without_transformers_no_model_is_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(calibration_check, "find_spec", lambda name: None)
    assert check_models(SimpleNamespace(), SLOW, repeats=1) == []
