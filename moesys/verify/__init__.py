"""Checks whether a training, whosever it is, computes on ranks what it computes in one process.

It needs torch, and nothing else that moesys depends on.
"""

from __future__ import annotations

from moesys.verify.hosts import megatron_setup, torchtitan_setup, transformers_setup
from moesys.verify.runs import CheckError, CheckReport, run
from moesys.verify.setup import Batch, Setup, Situation, World, check, draw

__all__ = ["Batch", "CheckError", "CheckReport", "Setup", "Situation", "World", "check", "draw", "run"]
__all__ += ["megatron_setup", "torchtitan_setup", "transformers_setup"]
