"""The benchmarks that run after the GPU checks. They write into the folder of the report."""

from __future__ import annotations

import importlib.util
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Mapping
from pathlib import Path

import pytest
import torch
from gpu_ranks import GpuRank

pytestmark = pytest.mark.gpu(layer="measured")

ROOT = Path(__file__).parents[2]
# Peers of the kernels benchmark, and the packages that they are imported as. It always times torch's grouped_mm.
PEERS = {"scattermoe": "scattermoe", "liger": "liger_kernel", "sonicmoe": "sonicmoe"}
# The options limit each command to a part of ten minutes; without them the same commands measure everything.
KERNELS = ("benchmarks", "kernels", "--size", "qwen3-30b", "--routing", "uniform", "--repeats", "5", "--no-extras")
OVERLAP = ("benchmarks", "overlap", "--part", "mega", "--repeats", "3")
CALIBRATE = ("moesys", "calibrate", "--device", "cuda", "--repeats", "2")
# A Qwen3-MoE with the widths of Qwen3-30B-A3B, and a toy for a rehearsal.
MODEL = {"vocab_size": 32_000, "hidden_size": 2048, "num_hidden_layers": 4, "num_attention_heads": 32, "head_dim": 128}
MODEL |= {"num_key_value_heads": 4, "num_experts": 128, "num_experts_per_tok": 8, "moe_intermediate_size": 768}
TOY = {"vocab_size": 64, "hidden_size": 64, "num_hidden_layers": 1, "num_attention_heads": 2, "head_dim": 16}
TOY |= {"num_key_value_heads": 1, "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
BATCH, TOY_BATCH = (4, 4096), (2, 16)
WARM_UPS, STEPS = 4, 7
# The largest relative difference of a first loss, in bfloat16.
LOSS_TOLERANCE = 1e-4
LAST_LINES = 12


@pytest.mark.gpu(limit_s=120, ranks="first", after=("experts",))
def test_bench_kernels(gpu: GpuRank) -> str:
    """The time of experts on this GPU, beside grouped_mm and the peers that are installed."""
    gpu.require_gpu("rehearse it by TRITON_INTERPRET=1 python -m benchmarks kernels --device cpu")
    found = installed_peers()
    peers = [option for name, folder in found.items() for option in ("--peer", f"{name}={folder}")]
    _run([*KERNELS, *peers, "--out", str(gpu.folder)])
    missing = [name for name in PEERS if name not in found]
    says = f"kernels.md: beside {', '.join(['grouped_mm', *found])}"
    return says + (f"; not installed: {', '.join(missing)}" if missing else "")


@pytest.mark.gpu(limit_s=120, ranks="first", after=("experts", "rounds on one gpu"))
def test_bench_overlap(gpu: GpuRank) -> str:
    """The communication that MegaKernels hide, on virtual ranks of one GPU over paced links."""
    gpu.require_gpu("rehearse it by TRITON_INTERPRET=1 python -m benchmarks overlap --part mega --device cpu")
    _run([*OVERLAP, "--out", str(gpu.folder)])
    return "overlap_mega.md: virtual ranks over paced links"


@pytest.mark.gpu(limit_s=180, ranks="together", after=("device",))
def test_bench_calibrate(gpu: GpuRank) -> str:
    """The speeds of GPUs and links, which simulations of this machine need."""
    gpu.require_gpu("measure this machine's CPU ranks by moesys calibrate")
    # Ranks that share a GPU would measure each other.
    alone = gpu.num_gpus == 1 and "WORLD_SIZE" not in os.environ
    if alone and gpu.rank:
        return "only the first rank measures"
    _run([*CALIBRATE, "--out", str(gpu.folder)], _torchrun_variables(gpu, 1 if alone else gpu.num_ranks))
    return "cluster.toml: a ClusterSpec, for simulations of this machine"


@pytest.mark.gpu(limit_s=120, ranks="first", after=("experts",))
def test_bench_model(gpu: GpuRank) -> str:
    """The time of a step of a transformers model with moesys' experts, beside its own grouped_mm."""
    pytest.importorskip("transformers", reason="transformers is not installed")
    import moesys as ms

    losses, medians_ms, says = [], [], []
    for name in ("grouped_mm", ms.hf.register()):
        first_loss, of_steps_ms = _model_steps(gpu, name)
        losses.append(first_loss)
        medians_ms.append(statistics.median(of_steps_ms))
        peak_mib = 0 if gpu.rehearsed else torch.cuda.max_memory_allocated() / 2**20
        says.append(
            f"{name} {medians_ms[-1]:.1f} [{min(of_steps_ms):.1f}, {max(of_steps_ms):.1f}] ms, {peak_mib:.0f} MiB"
        )
    assert losses[1] == pytest.approx(losses[0], rel=LOSS_TOLERANCE), f"first losses are {losses}"
    if gpu.rehearsed:
        return "equal first losses"
    return f"{'; '.join(says)}; {medians_ms[0] / medians_ms[1]:.2f} times as fast"


def _model_steps(gpu: GpuRank, experts: str) -> tuple[float, list[float]]:
    """Trains on random tokens in bfloat16. Returns the loss of the first step, and the times of those after a few."""
    from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

    sizes, batch, device = (TOY, TOY_BATCH, gpu.device) if gpu.rehearsed else (MODEL, BATCH, gpu.device)
    torch.manual_seed(0)
    config = Qwen3MoeConfig(**sizes, norm_topk_prob=True)
    with device:
        model = Qwen3MoeForCausalLM._from_config(config, experts_implementation=experts, dtype=torch.bfloat16)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)
    ids = torch.randint(0, config.vocab_size, batch, generator=torch.Generator().manual_seed(1)).to(device)
    losses, times_ms = [], []
    if not gpu.rehearsed:
        torch.cuda.reset_peak_memory_stats()
    for _ in range(1 if gpu.rehearsed else WARM_UPS + STEPS):
        begin_s = time.perf_counter()
        loss = model(input_ids=ids, labels=ids).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        losses.append(loss.item())
        if not gpu.rehearsed:
            torch.cuda.synchronize()
        times_ms.append(1e3 * (time.perf_counter() - begin_s))
    return losses[0], times_ms[-STEPS:]


def installed_peers() -> dict[str, Path]:
    """Returns the folder that holds each peer's package."""
    specs = {name: importlib.util.find_spec(package) for name, package in PEERS.items()}
    return {
        name: Path(spec.submodule_search_locations[0]).parent
        for name, spec in specs.items()
        if spec is not None and spec.submodule_search_locations
    }


def _torchrun_variables(gpu: GpuRank, num_ranks: int) -> Mapping[str, str]:
    """Returns the variables by which torchrun tells a rank who it is."""
    return {
        "RANK": str(gpu.rank),
        "WORLD_SIZE": str(num_ranks),
        "LOCAL_RANK": os.environ.get("LOCAL_RANK", str(gpu.rank)),
        "LOCAL_WORLD_SIZE": os.environ.get("LOCAL_WORLD_SIZE", str(num_ranks)),
        "MASTER_ADDR": os.environ.get("MASTER_ADDR", "127.0.0.1"),
        "MASTER_PORT": str(int(os.environ.get("MASTER_PORT", "29511")) + 1),
        "TORCHELASTIC_USE_AGENT_STORE": "False",
    }


def _run(words: list[str], variables: Mapping[str, str] | None = None) -> None:
    """Runs a command in the checkout; what it prints goes into the log of the check."""
    done = subprocess.run(
        [sys.executable, "-m", *words],
        cwd=ROOT,
        env={**os.environ, **(variables or {})},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        check=False,
    )
    print(done.stdout)
    last = "\n".join(done.stdout.rstrip().splitlines()[-LAST_LINES:])
    assert done.returncode == 0, f"python -m {' '.join(words[:2])} ended with code {done.returncode}:\n{last}"
