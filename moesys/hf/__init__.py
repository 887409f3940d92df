"""transformers' MoE models on the experts of this package: ``experts_implementation="moesys"``.

ms.hf.register()
model = AutoModelForCausalLM.from_pretrained(name, experts_implementation="moesys")

``WatchCallback`` watches a ``Trainer``.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from moesys.hf.registration import register

if TYPE_CHECKING:
    from moesys.hf.watch import WatchCallback as WatchCallback

__all__ = ["WatchCallback", "register"]


def __getattr__(name: str) -> Any:
    # transformers is imported when it is needed.
    if name == "WatchCallback":
        from moesys.hf.watch import WatchCallback

        return WatchCallback
    raise AttributeError(f"module 'moesys.hf' has no attribute {name!r}; it has {', '.join(__all__)}")
