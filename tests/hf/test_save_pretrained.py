"""Saving and loading the hub's format on ranks: what comes out, what a rank holds meanwhile, what a crash leaves, and
what is refused.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from hf_models import drawn, fsep, lent, loaded, text
from safetensors.torch import load_file
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from transformers import AutoModelForCausalLM

import moesys as ms
from moesys.lab.ranks.pool import LocalRanks

# Another number than other tests have: torch keeps what it made of DTensors of one shape, with groups that are gone.
EXPERTS = 16
OWN = 14
FOUR = {"fsdp_size": 4, "ep_size": 4}
GROUPS = {"fsdp_size": 4, "ep_size": 2}
REPLICAS = {"fsdp_size": 2, "dp_replicate_size": 2, "ep_size": 2}


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """A folder with a model of a family, as transformers saves it; written when it is first asked for."""
    root = tmp_path_factory.mktemp("models")

    def folder(family: str) -> Path:
        if not (root / family).exists():
            drawn(family, EXPERTS).save_pretrained(root / family)
        return root / family

    return folder


def tensors(folder: Path) -> dict[str, Tensor]:
    return {name: tensor for path in folder.glob("*.safetensors") for name, tensor in load_file(path).items()}


def logits(folder: Path) -> Tensor:
    model = AutoModelForCausalLM.from_pretrained(folder, attn_implementation="eager").eval()
    with torch.no_grad():
        return model(input_ids=text(7)).logits


def assert_same(out: Path, folder: Path) -> None:
    found, wanted = tensors(out), tensors(folder)
    assert found.keys() == wanted.keys()
    assert all(torch.equal(found[name], tensor) for name, tensor in wanted.items())
    torch.testing.assert_close(logits(out), logits(folder), rtol=0, atol=1e-6)


def save_all(folder: Path, out: Path, cases: list[tuple[ms.Strategy, dict[str, int]]]) -> None:
    for index, (strategy, sizes) in enumerate(cases):
        ms.hf.save_pretrained(loaded(folder, strategy, sizes), out / str(index), max_shard_size="100KB")


FAMILIES = [
    "qwen3_moe",
    *(pytest.param(name, marks=pytest.mark.slow) for name in ("mixtral", "deepseek_v3", "gpt_oss")),
]


@pytest.mark.parametrize("family", FAMILIES)
def test_what_ranks_save_plain_transformers_loads(
    ranks: LocalRanks, checkpoints: Any, tmp_path: Path, family: str
) -> None:
    """Equal bits under the hub's names, in several files, on every mesh."""
    cases = [
        (lent(4, EXPERTS), FOUR),
        (fsep(4, EXPERTS), FOUR),
        (lent(2, EXPERTS), GROUPS),
        (fsep(2, EXPERTS), GROUPS),
        (fsep(2, EXPERTS), REPLICAS),
    ]
    ranks.run(save_all, checkpoints(family), tmp_path, cases, timeout_s=200.0)
    for index in range(len(cases)):
        out = tmp_path / str(index)
        assert len(list(out.glob("model-*-of-*.safetensors"))) > 1
        assert_same(out, checkpoints(family))
    assert sorted(path.name for path in tmp_path.iterdir()) == [str(index) for index in range(len(cases))]


def save_own(folder: Path, out: Path) -> None:
    for strategy in (lent(2, OWN), fsep(2, OWN)):
        model = drawn(folder.name, OWN)
        runtime = ms.parallelize(model, strategy, init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "ep")))
        ms.hf.save_pretrained(model, out / strategy.name)
        runtime.close()


@pytest.mark.parametrize("family", FAMILIES)
def test_what_a_loop_of_ones_own_saves(ranks: LocalRanks, tmp_path: Path, family: str) -> None:
    """Also where ranks have different numbers of experts."""
    drawn(family, OWN).save_pretrained(tmp_path / family)
    ranks.run(save_own, tmp_path / family, tmp_path, timeout_s=100.0)
    for name in ("lent", "fsep"):
        assert_same(tmp_path / name, tmp_path / family)
