"""Checks whether a training, whosever it is, computes on ranks what it computes in one process.

It needs torch, and nothing else that moesys depends on.
"""

from __future__ import annotations

from moesys.verify.hosts import torchtitan_setup as torchtitan_setup
from moesys.verify.hosts import transformers_setup as transformers_setup
from moesys.verify.report import CheckReport as CheckReport
from moesys.verify.runs import CheckError as CheckError
from moesys.verify.runs import run as run
from moesys.verify.setup import Batch as Batch
from moesys.verify.setup import Setup as Setup
from moesys.verify.setup import Situation as Situation
from moesys.verify.setup import World as World
from moesys.verify.setup import check as check
from moesys.verify.setup import draw as draw
