"""What an experiment refuses when it is declared."""

from __future__ import annotations

import pytest

from moesys.balance.greedy.greedy import Greedy
from moesys.config import Adaptive, ClusterSpec, Fsep, ModelShape, Oracle, Predictor, Strategy
from moesys.config.experiment import Experiment
from moesys.config.member import RECORDED
from moesys.config.workload import Generated, Replay, Training, Workload
from moesys.moe.layer import MoELayer


def declared(workload: Workload, predictor: Predictor) -> Experiment:
    planned = Strategy(name="planned", sharding=Fsep(slots_per_rank=2), balance=Greedy(), predictor=predictor)
    return Experiment(
        name="tiny",
        model=ModelShape(hidden_size=16, intermediate_size=8, num_experts=4, top_k=2),
        cluster=ClusterSpec(ranks_per_node=4),
        strategies=(Strategy(name="ep"), planned),
        workload=workload,
        seeds=(0,),
    )


def test_training_refuses_an_oracle_and_names_the_strategy_that_has_it():
    with pytest.raises(ValueError, match=r"strategy 'planned': predictor=Oracle\(\) plans for loads that are still"):
        declared(Training(), Oracle())


@pytest.mark.parametrize("workload", [Generated(), Replay(trace="routing.npz")], ids=lambda workload: workload.kind)
def test_routing_that_is_known_beforehand_has_an_oracle(workload: Workload):
    assert declared(workload, Oracle()).strategies[1].predictor == Oracle()


def test_training_takes_what_the_refusal_recommends():
    assert declared(Training(), Adaptive()).source == "measured"


@pytest.mark.parametrize("seed", [2**32, 2**40 + 1])
def test_seeds_that_would_draw_what_others_draw_are_refused(seed: int):
    experiment = declared(Generated(), Adaptive()).replace(seeds=(0, 2**32 - 1))
    with pytest.raises(ValueError, match=rf"seed={seed} is out of range; use 0 <= seed < 2\*\*32"):
        experiment.replace(seeds=(0, seed))
    with pytest.raises(ValueError, match=rf"seed={seed} must be at least 0 and less than 2\*\*32"):
        MoELayer(experiment.model, Strategy(name="ep"), seed=seed)
    with pytest.raises(ValueError, match=rf"layer_index={seed} must be at least 0 and less than 2\*\*32"):
        MoELayer(experiment.model, Strategy(name="ep"), layer_index=seed)
    recorded = experiment.to_json().replace(str(2**32 - 1), str(seed))
    assert Experiment.model_validate_json(recorded, context=RECORDED).seeds == (0, seed)
