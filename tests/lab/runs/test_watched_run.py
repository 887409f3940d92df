"""A watched training is read as it was written: over ranks, over runs that began again, over torn lines."""

from __future__ import annotations

import math
from itertools import product
from pathlib import Path

import numpy as np
import pytest
from watch_cases import layer_line, step_line, write_lines, write_run

from moesys.lab.runs.watched_run import NEWEST_STEPS, read_watched_run
from moesys.step_lines import step_journal


def test_ranks_are_brought_together(tmp_path: Path) -> None:
    run = read_watched_run(write_run(tmp_path, num_steps=5, num_layers=3, num_ranks=4))
    assert (run.num_ranks, run.layers, run.steps_S.tolist()) == (4, (0, 1, 2), [0, 1, 2, 3, 4])
    for step, layer in product(range(5), range(3)):
        line = layer_line(layer, step)
        for name in ("load_p50", "load_p95", "load_max", "experts_without_tokens"):
            assert run.of_layers[name][step, layer] == getattr(line, name)
        assert run.of_layers["exposed_ms"][step, layer] == line.exposed_ms + 1.5
        assert run.of_layers["worst_exposed_ms"][step, layer] == line.exposed_ms + 3
        assert run.of_layers["plan_ms"][step, layer] == line.plan_ms + 1.5
        assert run.of_layers["restored_mib"][step, layer] == 4 * line.restored_mib + 6
    assert run.numbers["loss"].tolist() == [5 / (1 + step / 10) for step in range(5)]
    assert [run.tokens_E[layer].tolist() for layer in range(3)] == [[0, 5, 10, 15]] * 3


def test_ranks_may_have_layers_of_their_own_and_be_a_step_apart(tmp_path: Path) -> None:
    write_lines(tmp_path, [step_line(step, [0, 1]) for step in range(3)], rank=0)
    write_lines(tmp_path, [step_line(step, [5], rank=1) for step in range(4)], rank=1)
    write_lines(tmp_path, [step_line(0, [5], rank=2)], rank=2)
    run = read_watched_run(tmp_path)
    assert run.layers == (0, 1, 5)
    assert run.steps_S.tolist() == [0, 1, 2]
    assert run.of_layers["exposed_ms"][:, 2].tolist() == [61.5, 61.0, 61.0]
    assert run.of_layers["load_p50"][:, 2].tolist() == [layer_line(5, step).load_p50 for step in range(3)]


def test_steps_and_layers_that_were_not_written_are_nan(tmp_path: Path) -> None:
    write_lines(tmp_path, [step_line(0, [0, 1]), step_line(10, [1]), step_line(20, [0], loss=math.nan)])
    run = read_watched_run(tmp_path)
    assert run.steps_S.tolist() == [0, 10, 20]
    assert np.isnan(run.of_layers["load_p50"]).tolist() == [[False, False], [True, False], [False, True]]
    assert np.isnan(run.of_layers["restored_mib"]).tolist() == np.isnan(run.of_layers["load_p50"]).tolist()
    assert np.isnan(run.numbers["loss"]).tolist() == [False, False, True]


def test_of_a_run_that_began_again_its_newest_lines_count(tmp_path: Path) -> None:
    """From step 8 back to 5, and from 6 back to 2."""
    first = [step_line(step, [0], loss=1.0, events=[f"first {step}"]) for step in range(8)]
    second = [step_line(step, [0], loss=2.0, events=[f"second {step}"]) for step in (5, 6)]
    third = [step_line(step, [0], loss=3.0, events=[f"third {step}"]) for step in (2, 3)]
    write_lines(tmp_path, first + second + third)
    run = read_watched_run(tmp_path)
    assert run.steps_S.tolist() == [0, 1, 2, 3]
    assert run.numbers["loss"].tolist() == [1, 1, 3, 3]
    assert [event.what for _, event in run.events] == ["first 0", "first 1", "third 2", "third 3"]
    assert run.tokens_E[0].tolist() == [0, 4, 8, 12]


def test_a_run_that_went_on_with_fewer_ranks_has_no_lines_of_the_others(tmp_path: Path) -> None:
    write_run(tmp_path, num_steps=6, num_layers=1, num_ranks=4)
    for rank in range(2):
        write_lines(tmp_path, [step_line(step, [0], rank, num_ranks=2) for step in (3, 4, 5)], rank)
    run = read_watched_run(tmp_path)
    assert run.num_ranks == 2
    assert run.of_layers["worst_exposed_ms"][:, 0].tolist() == [13, 13, 13, 11, 11, 11]
    assert run.of_layers["restored_mib"][:, 0].tolist() == [14, 14, 14, 5, 5, 5]


def test_tokens_of_experts_are_those_of_the_newest_steps(tmp_path: Path) -> None:
    run = read_watched_run(write_run(tmp_path, num_steps=NEWEST_STEPS + 20, num_layers=1))
    assert run.tokens_E[0].tolist() == [0, NEWEST_STEPS, 2 * NEWEST_STEPS, 3 * NEWEST_STEPS]


def test_a_torn_last_line_is_none(tmp_path: Path) -> None:
    path = write_lines(tmp_path, [step_line(step, [0]) for step in range(3)])
    for kept in (1, 100):
        path.write_bytes(path.read_bytes() + step_journal(path).to_line(step_line(3, [0]))[:kept])
        assert read_watched_run(tmp_path).steps_S.tolist() == [0, 1, 2]
        path.write_bytes(path.read_bytes()[:-kept])


@pytest.mark.parametrize("broken", [b"{}\n", b"nonsense\n", b"[]\n", b'{"step":1}\n', b"\n"])
def test_a_whole_line_that_is_no_step_is_an_error(tmp_path: Path, broken: bytes) -> None:
    path = write_lines(tmp_path, [step_line(0, [0])])
    path.write_bytes(path.read_bytes() + broken + step_journal(path).to_line(step_line(1, [0])))
    with pytest.raises(ValueError, match=r"^line 2 of .*rank-0000\.jsonl is not a step of a training: .+; delete"):
        read_watched_run(tmp_path)
