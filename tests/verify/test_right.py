"""Right trainings raise no alarm: of several hosts, in all situations that they support, and with many seeds."""

from __future__ import annotations

from functools import partial

import pytest
import qwen3
import small_moe

from moesys import verify

pytestmark = [pytest.mark.timeout(900), pytest.mark.filterwarnings("ignore")]
# transformers' tensor parallelism is wrong with several micro-batches (docs/measured).
SITUATIONS = {
    host: ("plain", "recomputation") if "tp" in host else ("plain", "uneven", "padding") for host in qwen3.HOSTS
}


def test_a_training_in_plain_torch_is_right_in_all_situations() -> None:
    report = verify.run(small_moe.small_moe, situations="all")
    assert [each.name for each in report.situations if each.not_checked] == []
    report.require_right()


def test_float32_is_right() -> None:
    import torch

    verify.run(small_moe.small_moe, situations=["plain", "uneven"], dtype=torch.float32).require_right()


@pytest.mark.parametrize(
    "host",
    [pytest.param(host, marks=() if host in ("fsdp", "all_to_all") else pytest.mark.slow) for host in qwen3.HOSTS],
)
def test_a_host_is_right(host: str) -> None:
    situations = (
        SITUATIONS[host] if host != "all_to_all" else ("plain", "uneven", "padding", "recomputation", "checkpoint")
    )
    verify.run(partial(qwen3.build, host=host), situations=situations).require_right()


@pytest.mark.slow
@pytest.mark.parametrize("host", ["ddp", "fsdp", "all_to_all", "moesys fsep"])
def test_other_seeds_are_right(host: str) -> None:
    for seed in range(1, 26):
        situation = "padding" if seed % 2 else "uneven"
        verify.run(partial(qwen3.build, host=host), situations=[situation], seed=seed).require_right()
