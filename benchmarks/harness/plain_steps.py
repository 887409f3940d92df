"""A rank that trains a model under transformers' own expert parallelism in a process that does not import moesys.

``python -m benchmarks.harness.plain_steps FOLDER INPUTS STEPS STORE``, with RANK and WORLD_SIZE: loads the model in
FOLDER, trains it on the tokens and under the routing in the file INPUTS, and prints the peak of its memory and that of
the libraries, in MiB. Ranks meet in the file STORE.
"""

from __future__ import annotations

import importlib
import os
import resource
import sys
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn


def resident_peak_mib() -> float:
    """Returns the largest resident memory that this process has had."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / (2**20 if sys.platform == "darwin" else 2**10)


def main(folder: str, inputs: str, steps: int, store: str) -> None:
    from transformers import AutoConfig, AutoModelForCausalLM
    from transformers.distributed import DistributedConfig
    from transformers.utils.logging import disable_progress_bar

    disable_progress_bar()
    torch.set_num_threads(1)
    rank, size = (int(os.environ[name]) for name in ("RANK", "WORLD_SIZE"))
    dist.init_process_group("gloo", f"file://{store}", rank=rank, world_size=size)
    # This imports the class of the model.
    importlib.import_module(type(AutoConfig.from_pretrained(folder)).__module__.replace("configuration", "modeling"))
    libraries_mib = resident_peak_mib()
    sizes = DistributedConfig(fsdp_size=size, ep_size=size, ep_implementation="all_to_all")
    model = AutoModelForCausalLM.from_pretrained(
        folder, distributed_config=sizes, experts_implementation="grouped_mm", dtype=torch.float32
    ).train()
    tokens_BC, expert_LTK = torch.load(inputs)
    routers = [module for name, module in model.named_modules() if name.endswith("mlp.gate")]
    for router, expert_TK in zip(routers, expert_LTK, strict=True):
        router.register_forward_hook(_choosing(expert_TK))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)
    for _ in range(steps):
        model(input_ids=tokens_BC, labels=tokens_BC).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    print(resident_peak_mib(), libraries_mib)
    dist.destroy_process_group()


def _choosing(expert_TK: Tensor) -> Any:
    """Returns a hook that gives a router's tokens other experts, with weights that take the same memory."""

    def hook(router: nn.Module, _: object, output: tuple[Tensor, Tensor, Tensor]) -> tuple[Tensor, Tensor, Tensor]:
        logits_TE = output[0]
        weight_TK = logits_TE.softmax(dim=1).gather(1, expert_TK)
        return logits_TE, weight_TK / weight_TK.sum(dim=1, keepdim=True), expert_TK

    return hook


if __name__ == "__main__":
    folder, inputs, steps, store = sys.argv[1:]
    main(folder, inputs, int(steps), store)
