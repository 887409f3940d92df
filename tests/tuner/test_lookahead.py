"""A search that others help: the same findings in the same order, whatever they find out ahead."""

from __future__ import annotations

from contextlib import closing

import pytest
from tuner_cases import CLUSTERS, EP, SMALL, changed, costs_of, drawn, setting_of

from moesys.balance.greedy.greedy import Greedy
from moesys.config import Fsep, MegaKernel, Strategy
from moesys.lab.runs import workers
from moesys.lab.runs.tuning import SimulatedWorkload
from moesys.lab.runs.workers import Workers
from moesys.tuner.costs import ladder
from moesys.tuner.journal import Journal
from moesys.tuner.lookahead import Look, Lookahead, look_at
from moesys.tuner.search import Search
from moesys.tuner.step_costs import Seen
from moesys.tuner.workload import MOST_BYTES

FUSED = changed(SMALL, {"overlap": ("sequential", "mega_kernel")})


@pytest.fixture(scope="module")
def helpers():
    with pytest.MonkeyPatch.context() as patch, closing(Workers(3)) as found:
        patch.setattr(workers, "ALONE_S", 0.0)
        found._alone_until_s = 0.0
        yield found


def several_seeds(cluster: str, **changes) -> SimulatedWorkload:
    one = drawn(CLUSTERS[cluster], **changes)
    return SimulatedWorkload.of(one.model, one.cluster, one.workload, (0, 1))


@pytest.mark.parametrize(
    ("workload", "space", "starts", "memory_gb"),
    [
        (several_seeds("slow ranks", skew=1.5), SMALL, [EP], None),
        (
            several_seeds("slow links", skew=0.5),
            SMALL,
            [EP, EP.replace(name="f", sharding=Fsep(slots_per_rank=4))],
            None,
        ),
        (several_seeds("even", skew=2.0, micro_batches=2, steps=2), SMALL, [EP], 0.04),
        # Plans with too many rows are refused on the way.
        (
            drawn(CLUSTERS["even"].replace(ranks_per_domain=4), skew=3.0),
            FUSED,
            [EP.replace(overlap=MegaKernel())],
            None,
        ),
    ],
    ids=["slow ranks", "slow links", "little memory", "refused"],
)
def test_the_journal_and_the_answer_are_those_of_a_search_alone(helpers, workload, space, starts, memory_gb):
    found = []
    for lookahead in (None, Lookahead(helpers, workload)):
        costs = costs_of(workload, setting=setting_of(workload, memory_gb), lookahead=lookahead)
        search = Search(space, starts, costs, budget=16, seed=1)
        result = search.run()
        around = search.around(Strategy(name="p", sharding=Fsep(slots_per_rank=2), balance=Greedy()), result)
        order = [one.fingerprint() for one in search.by_glance(starts[0])]
        told = [(entry.fingerprint, entry.of, entry.stage) for entry in costs.told.entries]
        found.append((costs.journal.entries(), told, costs.told.stages, result, around, order))
    alone, helped = found
    for one, other in zip(alone, helped, strict=True):
        assert one == other
    stages = {entry.stage for entry in alone[0]}
    assert stages >= {"simulated", "refused" if space is FUSED else "pruned"}


def test_nothing_is_found_out_here_that_helpers_were_asked_for(helpers):
    workload = several_seeds("slow links")
    walked = []

    class Here(SimulatedWorkload):
        def walk(self, strategy, seed):
            walked.append(strategy.fingerprint())
            return super().walk(strategy, seed)

    here = Here(**{name: getattr(workload, name) for name in workload.__dataclass_fields__})
    costs = costs_of(here, Journal(None, {}), lookahead=Lookahead(helpers, workload))
    Search(SMALL, [EP], costs, budget=12, seed=0).run()
    # What is the same under every strategy is asked of one.
    assert len(walked) <= 2


def test_a_look_ends_with_a_bound_above_the_best_and_goes_on_from_what_is_known():
    workload = several_seeds("slow ranks", skew=1.5)
    whole, nothing = ladder(workload)[-1], Seen({}, {})
    seen = look_at(workload, MOST_BYTES, Look(EP, whole, None, nothing))
    assert {seed: len(ms) for seed, ms in seen.steps_ms.items()} == {0: 4, 1: 4}
    pruned = look_at(workload, MOST_BYTES + 1, Look(EP, whole, 1e-9, nothing))
    assert {seed: len(ms) for seed, ms in pruned.bounds_ms.items()} == {0: 4, 1: 4}
    assert not any(pruned.steps_ms.values())
    marked = Seen({}, {0: [-1.0, *seen.steps_ms[0][1:]], 1: [-2.0]})
    again = look_at(workload, MOST_BYTES + 2, Look(EP, whole, None, marked))
    assert again.steps_ms == {0: marked.steps_ms[0], 1: [-2.0, *seen.steps_ms[1][1:]]}
