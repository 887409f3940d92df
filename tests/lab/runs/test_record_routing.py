"""Recording routing from training: one argument, whose path says whose and where."""

from __future__ import annotations

import numpy as np
import pytest
from runner_cases import EP, FSEP, training

from moesys.lab.runs.runner import run, trace_path
from moesys.traces import load_trace


def test_routing_goes_to_the_path_of_its_trial_also_when_it_was_recorded_before(tmp_path):
    experiment = training()
    result = run(experiment, tmp_path / "runs", record_routing=tmp_path / "{strategy}" / "{seed}.npz")
    for strategy in (EP, FSEP):
        kept = load_trace(trace_path(result.path, experiment.trial(strategy, 0)))
        recorded = load_trace(tmp_path / strategy.name / "0.npz")
        assert np.array_equal(recorded.tokens_SLRE, kept.tokens_SLRE)
        assert recorded.name == strategy.name
    again = run(experiment, tmp_path / "runs", record_routing=str(tmp_path / "baseline.npz"))
    assert again.num_run == 0
    assert load_trace(tmp_path / "baseline.npz").name == EP.name


def test_one_file_for_several_seeds_is_refused(tmp_path):
    words = r"^record_routing='routing.npz' .* one file for 2 seeds; put \{seed\} into the path, or use seeds="
    with pytest.raises(ValueError, match=words):
        run(training(seeds=(0, 1)), tmp_path, record_routing="routing.npz")
    assert not any(tmp_path.iterdir())
