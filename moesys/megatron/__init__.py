"""Megatron-Core's MoE models on the experts of this package: ``experts(spec, strategy)`` in a model's specification.

Importing this package imports Megatron-Core.
"""

from __future__ import annotations

from importlib.metadata import PackageNotFoundError, version

try:
    from moesys.megatron.moe_layer import StrategyMoELayer, experts
except ImportError as error:
    try:
        _found = version("megatron-core")
    except PackageNotFoundError:
        _found = "none"
    raise ImportError(
        f"Megatron's models need megatron-core 0.19 or newer, and found is {_found} ({error}); install moesys[megatron]"
    ) from error

__all__ = ["StrategyMoELayer", "experts"]
