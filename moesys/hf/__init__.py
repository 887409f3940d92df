"""transformers' MoE models on the experts of this package: ``experts_implementation="moesys"``.

ms.hf.register()
model = AutoModelForCausalLM.from_pretrained(name, experts_implementation="moesys")

``save_pretrained`` saves a model that ranks share, ``check_checkpoint`` looks at a folder before it is loaded,
``align_routing`` prepares the routes of a rollout for replay, ``WatchCallback`` watches a ``Trainer``, and
``ResumableTrainer`` is one that resumes.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from moesys.hf.registration import register

if TYPE_CHECKING:
    from moesys.hf.checkpoint_check import check_checkpoint as check_checkpoint
    from moesys.hf.routing_replay import align_routing as align_routing
    from moesys.hf.save import save_pretrained as save_pretrained
    from moesys.hf.trainer import ResumableTrainer as ResumableTrainer
    from moesys.hf.trainer import WatchCallback as WatchCallback

__all__ = ["ResumableTrainer", "WatchCallback", "align_routing", "check_checkpoint", "register", "save_pretrained"]

# What imports transformers, when it is asked for.
_MODULE_OF = {
    "ResumableTrainer": "moesys.hf.trainer",
    "WatchCallback": "moesys.hf.trainer",
    "align_routing": "moesys.hf.routing_replay",
    "check_checkpoint": "moesys.hf.checkpoint_check",
    "save_pretrained": "moesys.hf.save",
}


def __getattr__(name: str) -> Any:
    if name in _MODULE_OF:
        return getattr(import_module(_MODULE_OF[name]), name)
    raise AttributeError(f"module 'moesys.hf' has no attribute {name!r}; it has {', '.join(__all__)}")
