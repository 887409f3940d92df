"""What one rank does for the cases of whole models: training steps of transformers' models under FSDP2."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from functools import partial

import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh

from benchmarks.harness.contest import Case, Contestant, Near, Outcome, hold
from benchmarks.harness.model_steps import LENGTH, TOLERANCE, ModelSteps, new_model, plans_of, tokens_of
from benchmarks.shaped.cases import ShapedCase
from benchmarks.shaped.layers import StepMetrics
from moesys.config import Strategy
from moesys.hf.parallelize import EP, parallelize

THEIRS = "transformers"


def measure(case: ShapedCase, repeats: int) -> Mapping[str, Outcome]:
    """Times every strategy of the case. All ranks call it together. ``Outcome.metrics`` are ``StepMetrics``.

    Loss and gradients must be those of transformers' own code on each rank's whole model.
    """
    # To be compared, gradients are gathered once, however many messages that takes.
    logging.getLogger("torch.distributed.tensor._redistribute").setLevel(logging.ERROR)
    setups = {THEIRS: partial(_theirs, case)}
    setups |= {strategy.name: partial(_ours, case, strategy) for strategy in case.strategies}
    return hold(Case(setups, Near(TOLERANCE, THEIRS), before=dist.barrier), repeats)


def _theirs(case: ShapedCase) -> Contestant:
    """Returns the whole model on each rank; gradients are the mean over ranks."""
    model = new_model(case.name, case.shape.hidden_size)
    model.set_experts_implementation("grouped_mm")
    steps = _steps(case, model)

    def results() -> dict[str, Tensor]:
        found = steps.results()
        for name, result in found.items():
            if name != "loss":
                dist.all_reduce(result)
                result /= dist.get_world_size()
        return found

    return Contestant(results, {})


def _ours(case: ShapedCase, strategy: Strategy) -> Contestant:
    model = new_model(case.name, case.shape.hidden_size)
    mesh = init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=(EP,))
    parallelize(model, strategy, mesh, cluster=case.cluster)
    steps = _steps(case, model)
    return Contestant(
        steps.results, {"step": steps.step}, lambda: StepMetrics([], [[plan.to_json() for plan in plans_of(model)]])
    )


def _steps(case: ShapedCase, model: object) -> ModelSteps:
    return ModelSteps(model, tokens_of(case.num_tokens[0] // LENGTH), "skewed")
