"""Where ranks train: which GPU is whose, what carries messages, and what is refused. No GPU is needed to know."""

from __future__ import annotations

import pytest
import torch

import moesys as ms
from experiments import demo
from moesys.lab.ranks.process import device_of, gpu_backend
from moesys.lab.runs.declarations import load_experiment
from moesys.lab.runs.places import place_for


@pytest.fixture
def gpus(monkeypatch):
    """A machine with so many GPUs, as far as torch says."""
    monkeypatch.delenv("LOCAL_RANK", raising=False)

    def have(count: int) -> None:
        monkeypatch.setattr(torch.cuda, "device_count", lambda: count)
        monkeypatch.setattr(torch.cuda, "is_available", lambda: count > 0)

    return have


def test_gpus_are_dealt_in_turn_and_shared_where_they_are_fewer(gpus, monkeypatch):
    gpus(2)
    assert [device_of("cuda", rank).index for rank in range(5)] == [0, 1, 0, 1, 0]
    assert device_of("cpu", 3) == torch.device("cpu")
    # The second host of several.
    monkeypatch.setenv("LOCAL_RANK", "1")
    assert device_of("cuda", 8).index == 1
    assert (gpu_backend(2), gpu_backend(3)) == ("cpu:gloo,cuda:nccl", "gloo")


def test_training_on_gpus_that_are_not_there_is_refused_before_any_trial(gpus, tmp_path):
    gpus(0)
    on_gpus = demo.training_experiment()
    assert on_gpus.workload.device == "cpu"
    on_gpus = on_gpus.replace(workload=on_gpus.workload.replace(device="cuda"))
    with pytest.raises(ValueError, match="device='cuda' trains on GPUs, and torch finds none here; use device='cpu'"):
        ms.run(on_gpus, tmp_path / "runs")
    assert not (tmp_path / "runs").exists()


def test_ranks_that_share_gpus_may_map_each_others_memory(gpus, monkeypatch):
    started = {}
    monkeypatch.setattr(
        "moesys.lab.ranks.pool.LocalRanks", lambda *sizes, **options: started.update(options) or _Refusing()
    )
    gpus(1)
    experiment = demo.training_experiment()
    with pytest.raises(_StartedError):
        place_for(experiment, threads=1).run(experiment.trials()[0], experiment)
    assert started["backend"] == "gloo"
    assert started["environment"] == {"TORCH_SYMM_MEM_ALLOW_OVERLAPPING_DEVICES": "1"}


class _StartedError(Exception):
    pass


class _Refusing:
    def call(self, *_: object) -> None:
        raise _StartedError

    def close(self) -> None: ...


def test_the_demo_and_what_shows_overlap_train_where_a_gpu_is(gpus, pytestconfig):
    found = []
    for count in (0, 4):
        gpus(count)
        of = load_experiment(pytestconfig.rootpath / "experiments" / "overlap_ablation.py")
        fused = [one.name for one in of.strategies if isinstance(one.overlap, ms.MegaKernel)]
        rest = [one for one in of.strategies if not isinstance(one.overlap, ms.MegaKernel)]
        assert of.workload.device == demo.training_experiment().workload.device
        found.append((of.workload.device, fused, rest))
    # The rest is the same, so that rows can be found again.
    assert found == [("cpu", [], rest), ("cuda", ["ep/mega", "fsep/mega"], rest)]
