"""torchtitan's MoE models on the experts of this package, in torchtitan's own trainer:
``--override.imports 'moesys.torchtitan.experts={"strategy": "lent.toml"}'``.

Importing this package imports torchtitan, and registers three overrides: ``experts``, ``planning``, which keeps load
histories and layouts in checkpoints, and ``muon``, which trains matrices by ``Muon``.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch.distributed as dist
from torch import nn

from moesys.config import Strategy
from moesys.display import version_of
from moesys.files import read_bytes
from moesys.moe.muon import Muon
from moesys.moe.runtime import PlanningState

try:
    from torchtitan.components.checkpoint import CheckpointManager
    from torchtitan.components.checkpointer.utils import canonical_fqn
    from torchtitan.components.optimizer import OptimizersContainer
    from torchtitan.config.override import derive, override
    from torchtitan.models.common.moe import RoutedExperts

    from moesys.torchtitan.routed_experts import replaced
except ImportError as error:
    raise ImportError(
        f"torchtitan's models need torchtitan 0.3 or newer, and found is {version_of('torchtitan', 'none')} ({error}); "
        "install moesys[torchtitan]"
    ) from error

__all__ = ["experts", "muon", "planning"]


@override(target=RoutedExperts.Config, description="experts under a strategy of moesys")
def experts(
    config: RoutedExperts.Config, *, strategy: str | Mapping[str, Any], dtype: str = "bfloat16"
) -> RoutedExperts.Config:
    """Returns what runs the experts of a layer of ``config`` under a strategy.

    ``strategy``: the fields of a ``ms.Strategy``, or the path of a file of them in TOML or JSON, which only rank 0
    reads. ``dtype``: that of ``training.mixed_precision_param``, for which planners count bytes and ``MegaKernel`` has
    memory.

    Raises ValueError on all ranks for a strategy or a dtype that is not valid, and for experts that moesys does not
    run.
    """
    return replaced(config, _strategy_of(strategy), dtype)


@override(target=CheckpointManager.Config, description="load histories and layouts of moesys in checkpoints")
def planning(config: CheckpointManager.Config) -> CheckpointManager.Config:
    """Returns torchtitan's checkpoints with the ``PlanningState`` of the model beside the states of the trainer."""
    return derive(config, PlanningCheckpoints.Config)


@override(target=OptimizersContainer.Config, description="Muon for matrices, AdamW for all else")
def muon(config: OptimizersContainer.Config, **arguments: Any) -> OptimizersContainer.Config:
    """Returns torchtitan's optimizer with a ``Muon`` of each model part. ``arguments``: those of ``Muon``, as
    they are written in JSON; the settings of ``config`` are not used.
    """
    return derive(config, MuonContainer.Config, muon=arguments)


class MuonContainer(OptimizersContainer):
    """torchtitan's container of optimizers, with one ``Muon`` for each model part."""

    @dataclass(kw_only=True, slots=True)
    class Config(OptimizersContainer.Config):
        """``muon``: the arguments of ``Muon``."""

        muon: dict[str, Any] = field(default_factory=dict)

    def __init__(self, config: Config, *, model_parts: list[nn.Module]) -> None:
        self.model_parts, self.optimizers = model_parts, [Muon(part, **config.muon) for part in model_parts]
        parameters = []
        for part, optimizer in zip(model_parts, self.optimizers, strict=True):
            names = {parameter: canonical_fqn(name) for name, parameter in part.named_parameters()}
            for group in optimizer.param_groups:
                # torchtitan's checkpoints store state by these names.
                group["param_names"] = [names[parameter] for parameter in group["params"]]
                parameters += group["params"]
        self._post_init(parameters)


class PlanningCheckpoints(CheckpointManager):
    """torchtitan's checkpoints with the state ``moesys``, so that a run which is resumed on the same ranks plans as one
    that was not stopped. On other ranks, and from checkpoints without it, exclude ``moesys`` from loading.
    """

    @dataclass(kw_only=True, slots=True)
    class Config(CheckpointManager.Config):
        pass

    def __init__(self, config: Config, *, model_parts: list[nn.Module], states: dict[str, Any], **others: Any) -> None:
        states["moesys"] = PlanningState(nn.ModuleList(model_parts))
        super().__init__(config, model_parts=model_parts, states=states, **others)


def _strategy_of(given: str | Mapping[str, Any]) -> Strategy:
    if isinstance(given, Mapping):
        return Strategy.model_validate(dict(given))
    if not isinstance(given, str) or not given.endswith((".toml", ".json")):
        raise ValueError(
            f"strategy={given!r} is neither the fields of a Strategy nor a file; give an object, such as "
            '{"name": "ep"}, or a path that ends in .toml or .json'
        )
    # Text, or why there is none.
    read: list[str | None] = [None, None]
    if not dist.is_initialized() or dist.get_rank() == 0:
        try:
            read[0] = read_bytes(Path(given)).decode()
        except (OSError, ValueError) as error:
            read[1] = str(error)
    if dist.is_initialized():
        dist.broadcast_object_list(read)
    text, failure = read
    if text is None:
        raise ValueError(f"strategy={given!r} cannot be read on rank 0 ({failure}); give a path that rank 0 can read")
    return Strategy.from_toml(text) if given.endswith(".toml") else Strategy.from_json(text)
