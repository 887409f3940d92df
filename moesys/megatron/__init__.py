"""Megatron-Core's MoE models on the experts of this package: ``experts(spec, strategy)`` in a model's specification.

Importing this package imports Megatron-Core.
"""

from __future__ import annotations

from moesys.display import version_of

try:
    from moesys.megatron.moe_layer import StrategyMoELayer, experts
except ImportError as error:
    raise ImportError(
        f"Megatron's models need megatron-core 0.19 or newer, and found is {version_of('megatron-core', 'none')} "
        f"({error}); install moesys[megatron]"
    ) from error

__all__ = ["StrategyMoELayer", "experts"]
