"""What the ranks of a training are started with, and how their failure is told, whoever starts them."""

from __future__ import annotations

from moesys.config import ClusterSpec, ModelShape, Strategy
from moesys.config.experiment import Experiment, Trial
from moesys.config.workload import Measured, ModelTraining, Training
from moesys.lab.runs.place import TrialError

# How long ranks wait for one that failed in a place where nothing tells them.
COLLECTIVE_TIMEOUT_S = 120.0
# Read when Triton is loaded.
_INTERPRETING = {"TRITON_INTERPRET": "1"}
# Read when torch first maps peers' memory: more ranks than GPUs may use it.
_SHARING_GPUS = {"TORCH_SYMM_MEM_ALLOW_OVERLAPPING_DEVICES": "1"}


def environment_of(workload: Measured) -> dict[str, str]:
    """What ranks must have before they load anything."""
    if workload.device == "cuda":
        return _SHARING_GPUS
    return _INTERPRETING if isinstance(workload, Training) and workload.interpret else {}


def backend_of(workload: Measured, ranks_of_host: int) -> str:
    """Raises ValueError for GPUs where there are none."""
    if workload.device == "cpu":
        return "gloo"
    # Not at the top: whoever has nothing left to run need not wait for torch.
    from moesys.lab.ranks.devices import gpu_backend

    return gpu_backend(ranks_of_host)


def arguments_of(
    trial: Trial, experiment: Experiment
) -> tuple[Strategy, ModelShape, ClusterSpec, Training | ModelTraining, int]:
    assert isinstance(experiment.workload, Measured)
    return trial.strategy, experiment.model, experiment.cluster, experiment.workload, trial.seed


def of_ranks(error: Exception) -> TrialError:
    return TrialError(str(error).partition("\n")[0], str(error))
