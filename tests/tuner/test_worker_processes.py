"""A search with worker processes: the same findings in the same order as in one process."""

from __future__ import annotations

from contextlib import closing

import pytest
from tuner_cases import CLUSTERS, EP, SMALL, changed, costs_of, drawn, session_of, setting_of

from moesys.config.overlap import MegaKernel
from moesys.lab.ranks import pool
from moesys.lab.ranks.pool import Workers
from moesys.tuner import costs as costs_module
from moesys.tuner.pick import search
from moesys.tuner.tuned_workload import SimulatedWorkload

FUSED = changed(SMALL, {"overlap": ("sequential", "mega_kernel")})


@pytest.fixture(scope="module")
def helpers():
    with pytest.MonkeyPatch.context() as patch, closing(Workers(3)) as found:
        patch.setattr(pool, "ALONE_S", 0.0)
        found._alone_until_s = 0.0
        yield found


def several_seeds(cluster: str, **changes) -> SimulatedWorkload:
    one = drawn(CLUSTERS[cluster], **changes)
    return SimulatedWorkload.of(one.model, one.cluster, one.workload, (0, 1))


@pytest.mark.parametrize(
    ("workload", "space", "starts", "memory_gb"),
    [
        pytest.param(several_seeds("slow ranks", skew=1.5), SMALL, [EP], None, marks=pytest.mark.slow),
        pytest.param(
            several_seeds("even", skew=2.0, micro_batches=2, steps=2), SMALL, [EP], 0.04, marks=pytest.mark.slow
        ),
        # Plans with too many rows are refused on the way.
        (
            drawn(CLUSTERS["even"].replace(ranks_per_domain=4), skew=3.0),
            FUSED,
            [EP.replace(overlap=MegaKernel())],
            None,
        ),
    ],
    ids=["slow ranks", "little memory", "refused"],
)
def test_the_journal_and_the_answer_are_those_of_one_process(helpers, workload, space, starts, memory_gb):
    found = []
    for processes in (None, helpers):
        costs = costs_of(workload, session_of(helpers=processes), starts, setting_of(workload, memory_gb))
        result = search(space, costs, budget=16, seed=1)
        observer = costs.session.observer
        told = [(entry.fingerprint, entry.of, entry.stage) for entry in observer.entries]
        found.append((costs.session.journal.entries(), told, observer.stages, result))
    alone, helped = found
    for one, other in zip(alone, helped, strict=True):
        assert one == other
    stages = {entry.stage for entry in alone[0]}
    assert stages >= {"simulated"} | ({"refused"} if space is FUSED else set()) | ({"pruned"} if memory_gb else set())


def test_with_worker_processes_no_point_is_looked_at_here(helpers, monkeypatch):
    def here(*arguments):
        raise AssertionError(arguments)

    workload = several_seeds("slow links")
    monkeypatch.setattr(costs_module, "_entry_of", here)
    found = search(SMALL, costs_of(workload, session_of(helpers=helpers)), budget=12, seed=0)
    assert found.ranking
