"""Right trainings raise no alarm: of several hosts, in all situations that they support, and with many seeds."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path

import layer_check
import pytest
import qwen3
import small_moe
import torch

from moesys import verify
from moesys.verify.hosts import transformers_check
from moesys.verify.setup import SITUATIONS

pytestmark = [pytest.mark.timeout(900), pytest.mark.filterwarnings("ignore")]
# transformers' tensor parallelism is wrong with several micro-batches (docs/measured).
SITUATIONS_OF = {
    host: ("plain", "recomputation") if "tp" in host else ("plain", "uneven", "padding") for host in qwen3.HOSTS
}


# The usual run has, of each circumstance, the situation that has most of it; slow tests have all.
USUAL = (
    *("padding", "selective", "no_labels", "few_tokens", "one_expert", "accumulation", "frozen_routers"),
    *("tied", "two_forwards", "evaluation", "checkpoint", "dropout"),
)


@pytest.mark.parametrize("situations", [USUAL, pytest.param("all", marks=pytest.mark.slow)], ids=["usual", "all"])
def test_a_training_in_plain_torch_is_right(situations: Sequence[str] | str) -> None:
    report = verify.run(small_moe.small_moe, situations=situations)
    assert [each.name for each in report.situations if each.not_checked] == []
    report.require_right()


def test_float32_is_right() -> None:
    verify.run(small_moe.small_moe, situations=["plain", "uneven"], dtype=torch.float32).require_right()


@pytest.mark.parametrize(
    "host", [pytest.param(host, marks=() if host == "all_to_all" else pytest.mark.slow) for host in qwen3.HOSTS]
)
def test_a_host_is_right(host: str) -> None:
    situations = ("padding", "checkpoint") if host == "all_to_all" else SITUATIONS_OF[host]
    verify.run(partial(qwen3.build, host=host), situations=situations).require_right()


@pytest.mark.slow
@pytest.mark.parametrize("model", ["deepseek_v3", "gpt_oss"])
def test_a_family_without_a_file_is_right(model: str) -> None:
    """DeepSeek-V3 has latent attention and parameters that stay in float32, GPT-OSS has experts with biases."""
    build = partial(transformers_check, model=model, implementation="all_to_all", fsdp=2, ep=2)
    verify.run(build, situations=["plain", "padding"]).require_right()


@pytest.mark.slow
@pytest.mark.parametrize("host", ["ddp", "fsdp", "all_to_all", "moesys fsep"])
def test_other_seeds_are_right(host: str) -> None:
    """In one run, whose ranks start once."""
    situations = [replace(SITUATIONS["padding" if seed % 2 else "uneven"], seed=seed) for seed in range(1, 26)]
    report = verify.run(partial(qwen3.build, host=host), situations=situations)
    report.require_right()
    assert [each.verdict for each in report.situations] == 25 * ["right"]


@pytest.mark.slow
@pytest.mark.parametrize("name", layer_check.STRATEGIES)
def test_a_strategy_of_our_own_layer_is_right(name: str) -> None:
    verify.run(partial(layer_check.layer, name=name)).require_right()


@pytest.mark.slow
def test_a_loss_of_the_global_batch_is_compared_with_one_micro_batch() -> None:
    build = partial(layer_check.layer, name="ep", over="global_batch")
    plain, uneven, padding = verify.run(build, situations=["plain", "uneven", "padding"]).situations
    assert (plain.verdict, uneven.verdict, padding.verdict) == ("right", "not checked", "not checked")
    assert "one process that takes all rows as one micro-batch" in plain.notes[0]


@pytest.mark.slow
@pytest.mark.parametrize(
    "check",
    [f"titan_check.py:titan_{name}" for name in ("qwen3", "qwen3_tp", "deepseek_v3")]
    + [f"megatron_check.py:megatron_{name}" for name in ("ep", "grouped", "tp", "four")],
)
def test_a_model_of_another_trainer_is_right(check: str) -> None:
    done = checked_alone(check, "plain,uneven,padding")
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.slow
def test_expert_gradients_that_megatron_sums_are_named() -> None:
    done = checked_alone("megatron_check.py:megatron_summed", "plain")
    assert done.returncode == 1, done.stdout + done.stderr
    assert "2 × the reference on experts only: summed over 2 data ranks" in done.stdout


def checked_alone(check: str, situations: str) -> subprocess.CompletedProcess[str]:
    """Runs a check in a process of its own, as it patches the trainer."""
    file = Path(__file__).parent / check
    command = [sys.executable, "-W", "ignore", "-m", "moesys.verify", str(file), "--situations", situations]
    return subprocess.run(command, capture_output=True, text=True, check=False)
