"""A rank that trains a model of transformers in a program of its own, and measures its memory.

``python -m benchmarks.harness.memory_steps ARGUMENTS``, with RANK and WORLD_SIZE; ARGUMENTS are those of ``main`` in
JSON. It prints a ``RankMemory`` in JSON. moesys is imported only where it trains.
"""

from __future__ import annotations

import importlib
import json
import os
import resource
import statistics
import sys
import time
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn

from benchmarks.harness.live_tensors import live_at_peak


class RankMemory(NamedTuple):
    """The memory of a rank, and the median of its steps after the first. libraries_mib: what its process holds before
    there is a model. live: the bytes of tensors at their peak, by part (``live_at_peak``), if they were followed.
    """

    step_ms: float
    peak_mib: float
    libraries_mib: float
    live: dict[str, int]

    @property
    def live_mib(self) -> float:
        return sum(self.live.values()) / 2**20


def resident_peak_mib() -> float:
    """Returns the largest resident memory that this process has had."""
    if sys.platform == "darwin":
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20
    # On Linux, ru_maxrss of a program is at least that of the process that started it.
    status = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
    return int(status["VmHWM"].split()[0]) / 2**10


def main(*, folder: str, inputs: str, store: str, steps: int, follows: bool, strategy: dict[str, Any] | None) -> None:
    """Trains the model in ``folder`` on the tokens and under the routing in the file ``inputs``, under ``strategy`` or
    transformers' own all_to_all. Ranks meet in the file ``store``. ``follows``: whether the tensors of one more
    step are followed.
    """
    from transformers import AutoConfig, AutoModelForCausalLM
    from transformers.distributed import DistributedConfig
    from transformers.utils.logging import disable_progress_bar

    disable_progress_bar()
    torch.set_num_threads(1)
    rank, size = (int(os.environ[name]) for name in ("RANK", "WORLD_SIZE"))
    dist.init_process_group("gloo", f"file://{store}", rank=rank, world_size=size)
    # This imports the class of the model.
    importlib.import_module(type(AutoConfig.from_pretrained(folder)).__module__.replace("configuration", "modeling"))
    name = "all_to_all" if strategy is None else _registered(strategy)
    libraries_mib = resident_peak_mib()
    sizes = DistributedConfig(fsdp_size=size, ep_size=size, ep_implementation=name)
    model = AutoModelForCausalLM.from_pretrained(
        folder, distributed_config=sizes, experts_implementation="grouped_mm", dtype=torch.float32
    ).train()
    tokens_BC, expert_LTK = torch.load(inputs)
    routers = [module for name, module in model.named_modules() if name.endswith("mlp.gate")]
    for router, expert_TK in zip(routers, expert_LTK, strict=True):
        router.register_forward_hook(_choosing(expert_TK))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)

    def step() -> None:
        model(input_ids=tokens_BC, labels=tokens_BC).loss.backward()
        optimizer.step()
        optimizer.zero_grad()

    ends = []
    for _ in range(steps):
        step()
        ends.append(time.perf_counter())
    step_ms = 1e3 * statistics.median(after - before for before, after in pairwise(ends))
    peak_mib = resident_peak_mib()
    live = live_at_peak(model, optimizer, step) if follows else {}
    print(json.dumps(RankMemory(step_ms, peak_mib, libraries_mib, dict(live))._asdict()))
    dist.destroy_process_group()


def _registered(declared: dict[str, Any]) -> str:
    """Returns the name under which transformers' models train under a strategy."""
    from moesys.balance.run_planner import warm_up
    from moesys.config import Strategy
    from moesys.hf.registration import register

    strategy = Strategy.model_validate(declared)
    if strategy.balance.is_compiled:
        warm_up()
    return register(strategy)


def _choosing(expert_TK: Tensor) -> Any:
    """Returns a hook that gives a router's tokens other experts, with weights that take the same memory."""

    def hook(router: nn.Module, _: object, output: tuple[Tensor, Tensor, Tensor]) -> tuple[Tensor, Tensor, Tensor]:
        logits_TE = output[0]
        weight_TK = logits_TE.softmax(dim=1).gather(1, expert_TK)
        return logits_TE, weight_TK / weight_TK.sum(dim=1, keepdim=True), expert_TK

    return hook


if __name__ == "__main__":
    main(**json.loads(sys.argv[1]))
