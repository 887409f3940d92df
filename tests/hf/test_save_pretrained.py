"""Saving and loading the hub's format on ranks: what comes out, what a rank holds meanwhile, what a crash leaves, and
what is refused.
"""

from __future__ import annotations

import ctypes
import gc
import json
import os
import re
import shutil
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from conftest import assert_equal
from hf_models import drawn, fsep, lent, loaded, saved_model, text
from safetensors.torch import load_file
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from transformers import (
    AutoModelForCausalLM,
    AutoModelForSeq2SeqLM,
    Qwen3MoeConfig,
    Qwen3MoeForCausalLM,
    SwitchTransformersConfig,
    SwitchTransformersForConditionalGeneration,
)

import moesys as ms
from moesys.hf.hub_files import NewHubFiles
from moesys.hf.save import _link_other_files
from moesys.lab.ranks.pool import LocalRanks, RankError

# Another number than other tests have: torch keeps what it made of DTensors of one shape, with groups that are gone.
EXPERTS = 16
OWN = 14
FOUR = {"fsdp_size": 4, "ep_size": 4}
TWO = {"fsdp_size": 2, "ep_size": 2}
GROUPS = {"fsdp_size": 4, "ep_size": 2}
TENSORS = {"fsdp_size": 2, "tp_size": 2, "ep_size": 4}
REPLICAS = {"fsdp_size": 2, "dp_replicate_size": 2, "ep_size": 2}


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """``saved_model`` for a family of models."""
    return partial(saved_model, tmp_path_factory.mktemp("models"), EXPERTS)


def tensors(folder: Path) -> dict[str, Tensor]:
    return {name: tensor for path in folder.glob("model*.safetensors") for name, tensor in load_file(path).items()}


def logits(folder: Path) -> Tensor:
    model = AutoModelForCausalLM.from_pretrained(folder, attn_implementation="eager").eval()
    with torch.no_grad():
        return model(input_ids=text(7)).logits


def assert_same(out: Path, folder: Path) -> None:
    assert_equal(tensors(out), tensors(folder))
    torch.testing.assert_close(logits(out), logits(folder), rtol=0, atol=1e-6)


def save_all(folder: Path, out: Path, cases: list[tuple[ms.Strategy, dict[str, int]]]) -> None:
    for index, (strategy, sizes) in enumerate(cases):
        ms.hf.save_pretrained(loaded(folder, strategy, sizes), out / str(index), max_shard_size="100KB")


SLOW = [pytest.param(name, marks=pytest.mark.slow) for name in ("mixtral", "deepseek_v3", "gpt_oss")]


@pytest.mark.parametrize("family", ["qwen3_moe", *SLOW])
def test_plain_transformers_loads_what_ranks_save(
    ranks: LocalRanks, checkpoints: Any, tmp_path: Path, family: str
) -> None:
    """Equal bits under the hub's names, in several files, on every mesh."""
    cases = [(fsep(2, EXPERTS), GROUPS), (lent(4, EXPERTS), TENSORS)]
    # The family that always runs has these alone.
    cases += [] if family == "qwen3_moe" else [(lent(4, EXPERTS), FOUR), (fsep(2, EXPERTS), REPLICAS)]
    ranks.run(save_all, checkpoints(family), tmp_path, cases, timeout_s=200.0)
    for index in range(len(cases)):
        out = tmp_path / str(index)
        assert len(list(out.glob("model-*-of-*.safetensors"))) > 1
        assert_same(out, checkpoints(family))
    assert sorted(path.name for path in tmp_path.iterdir()) == [str(index) for index in range(len(cases))]


def save_own(family: str, out: Path, sizes: tuple[int, ...], num_experts: int) -> None:
    for strategy in (lent(2, num_experts), fsep(2, num_experts)):
        model = drawn(family, num_experts)
        mesh = init_device_mesh("cpu", sizes, mesh_dim_names=("dp", "ep")[-len(sizes) :])
        runtime = ms.parallelize(model, strategy, mesh)
        ms.hf.save_pretrained(model, out / strategy.name)
        runtime.close()


@pytest.mark.parametrize("family", ["qwen3_moe", *SLOW])
def test_what_a_loop_of_ones_own_saves(ranks: LocalRanks, tmp_path: Path, family: str) -> None:
    """Also where ranks have different numbers of experts."""
    drawn(family, OWN).save_pretrained(tmp_path / family)
    ranks.run(save_own, family, tmp_path, (2, 2), OWN, timeout_s=100.0)
    for name in ("lent", "fsep"):
        assert_same(tmp_path / name, tmp_path / family)


# --- what is written is what the model has -----------------------------------------------------------------------

HEAD, EMBEDDING = "lm_head.weight", "model.embed_tokens.weight"


def with_head(shared: bool, configured: bool) -> Any:
    """A model whose head shares the embedding, or does not, whatever its configuration says about it."""
    model = drawn("qwen3_moe", EXPERTS)
    model.config.tie_word_embeddings = configured
    if shared:
        model.lm_head.weight = model.model.embed_tokens.weight
    return model


def save_heads(out: Path) -> None:
    for shared in (True, False):
        for configured in (True, False):
            model = with_head(shared, configured)
            runtime = ms.parallelize(model, fsep(2, EXPERTS))
            # The head is changed, so that an untied one differs from a copied or newly drawn one.
            with torch.no_grad():
                model.lm_head.weight.add_(0.125)
            ms.hf.save_pretrained(model, out / f"{shared} {configured}")
            runtime.close()
    for strategy in (lent(2, EXPERTS), fsep(2, EXPERTS)):
        again = loaded(out / "False True", strategy, TWO)
        ms.hf.save_pretrained(again, out / strategy.name)


def test_a_head_is_tied_as_the_tensors_are(ranks: LocalRanks, tmp_path: Path) -> None:
    """The configuration does not decide; a reloaded model computes what the saved one did."""
    ranks.run(save_heads, tmp_path, num_ranks=2, timeout_s=100.0)
    for shared in (True, False):
        for configured in (True, False):
            model = with_head(shared, configured).eval()
            with torch.no_grad():
                model.lm_head.weight.add_(0.125)
                wanted = model(input_ids=text(7)).logits
            out = tmp_path / f"{shared} {configured}"
            torch.testing.assert_close(logits(out), wanted, rtol=0, atol=1e-6)
            assert (HEAD in tensors(out)) == (not (shared and configured))
            assert torch.equal(tensors(out)[EMBEDDING], model.model.embed_tokens.weight)
    for again in ("lent", "fsep"):
        assert_same(tmp_path / again, tmp_path / "False True")


def test_each_of_several_tied_tensors_is_judged_by_itself(tmp_path: Path) -> None:
    sizes = {"vocab_size": 64, "d_model": 16, "d_ff": 32, "d_kv": 8, "num_heads": 2, "num_experts": 4}
    layers = {"num_layers": 2, "num_decoder_layers": 2, "num_sparse_encoder_layers": 1, "num_sparse_decoder_layers": 1}
    model = SwitchTransformersForConditionalGeneration(SwitchTransformersConfig(**sizes, **layers))
    model.save_pretrained(tmp_path / "theirs")
    ms.hf.save_pretrained(model, tmp_path / "tied")
    assert tensors(tmp_path / "tied").keys() == tensors(tmp_path / "theirs").keys()
    model.decoder.embed_tokens.weight = nn.Parameter(model.shared.weight.detach() + 1)
    ms.hf.save_pretrained(model, tmp_path / "out")
    more = tensors(tmp_path / "out").keys() - tensors(tmp_path / "tied").keys()
    assert more == {"decoder.embed_tokens.weight"}
    found = AutoModelForSeq2SeqLM.from_pretrained(tmp_path / "out").state_dict()
    assert all(torch.equal(found[name], each) for name, each in model.state_dict().items())


def save_mixed(out: Path) -> None:
    for family in ("qwen3_moe", "deepseek_v3"):
        model = drawn(family, EXPERTS).bfloat16()
        gate = model.model.layers[1].mlp.gate
        if family == "qwen3_moe":
            gate.float()
            gate.weight.data.add_(1e-4)
        else:
            gate.e_score_correction_bias = gate.e_score_correction_bias.float() + 1e-4
        if dist.get_rank() == 0:
            torch.save(model.state_dict(), out / f"{family}.pt")
        runtime = ms.parallelize(model, fsep(2, EXPERTS))
        ms.hf.save_pretrained(model, out / family)
        runtime.close()


def test_each_tensor_has_its_dtype_and_none_is_rounded_when_it_is_loaded(ranks: LocalRanks, tmp_path: Path) -> None:
    """The configuration's dtype is float32 for a float32 router, but not for what transformers keeps in float32."""
    ranks.run(save_mixed, tmp_path, num_ranks=2, timeout_s=100.0)
    for family, dtype in (("qwen3_moe", "float32"), ("deepseek_v3", "bfloat16")):
        assert json.loads((tmp_path / family / "config.json").read_text())["dtype"] == dtype
        saved = torch.load(tmp_path / f"{family}.pt")
        found = AutoModelForCausalLM.from_pretrained(tmp_path / family).state_dict()
        assert all(torch.equal(found[name].double(), each.double()) for name, each in saved.items())
        in_files = tensors(tmp_path / family)
        assert {each.dtype for each in in_files.values()} == {torch.bfloat16, torch.float32}
        assert sum(each.dtype == torch.float32 for each in in_files.values()) == 1


# --- a rank that dies, and a disk that is full ------------------------------------------------------------------


def save_and_die(folder: Path, out: Path, strategy: ms.Strategy, victim: int, error: bool) -> None:
    """Saves other weights than ``out`` has; one rank dies, or cannot write, when it has written some of its tensors."""
    model = loaded(folder, strategy, TWO)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(1.0)
    write, left = NewHubFiles.write, iter(range(5))

    def dying(files: NewHubFiles, folder: Path, name: str, tensor: Tensor, row: int = 0) -> None:
        if dist.get_rank() == victim and next(left, None) is None:
            if error:
                raise OSError("no space left")
            os.kill(os.getpid(), signal.SIGKILL)
        write(files, folder, name, tensor, row)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(NewHubFiles, "write", dying)
        ms.hf.save_pretrained(model, out)


def save_again(folder: Path, out: Path) -> None:
    ms.hf.save_pretrained(loaded(folder, lent(2, EXPERTS), TWO), out)


@pytest.mark.parametrize(
    ("victim", "error", "message"),
    [
        pytest.param(1, False, "rank 1 was killed by signal 9", marks=pytest.mark.slow),
        pytest.param(0, False, "rank 0 was killed by signal 9", marks=pytest.mark.slow),
        (1, True, "rank 1 failed, and nothing is written: OSError: no space"),
    ],
    ids=["killed", "first killed", "disk full"],
)
def test_the_earlier_checkpoint_stays_whole(
    ranks: LocalRanks, checkpoints: Any, tmp_path: Path, victim: int, error: bool, message: str
) -> None:
    folder, out = checkpoints("qwen3_moe"), tmp_path / "out"
    shutil.copytree(folder, out)
    (out / "logs").mkdir()
    others = ("logs/one", "logs/model.safetensors", "logs/config.json", "adapter_model.safetensors", "tokenizer.json")
    for name in others:
        (out / name).write_text("{}")
    with pytest.raises(RankError, match=message):
        ranks.run(save_and_die, folder, out, fsep(2, EXPERTS), victim, error, num_ranks=2, timeout_s=100.0)
    assert_same(out, folder)
    ranks.run(save_again, folder, out, num_ranks=2, timeout_s=100.0)
    assert_same(out, folder)
    wanted = {path.name for path in folder.iterdir()} | {"tokenizer.json", "logs", "adapter_model.safetensors"}
    assert {path.name for path in out.iterdir()} == wanted
    assert all((out / name).read_text() == "{}" for name in others)
    assert [path.name for path in tmp_path.iterdir()] == ["out"]


# --- what a rank holds --------------------------------------------------------------------------------------


@contextmanager
def peak() -> Iterator[list[int]]:
    """Gives a list that has, behind the block, the most bytes that this process had beyond those it began with."""

    def held() -> int:
        # What is no file's: pages of mapped checkpoints are the system's to drop.
        return 1024 * int(re.search(r"RssAnon:\s+(\d+)", Path("/proc/self/status").read_text())[1])  # type: ignore[index]

    found: list[int] = []
    begin, ended = held(), threading.Event()

    def watch() -> None:
        most = 0
        while not ended.wait(0.0005):
            most = max(most, held())
        found.append(most - begin)

    thread = threading.Thread(target=watch)
    thread.start()
    try:
        yield found
    finally:
        ended.set()
        thread.join()


def give_freed_memory_back() -> None:
    """Has freed memory count no more, from now on in this process: each block of 16 KiB or more is mapped by itself."""
    M_MMAP_THRESHOLD = -3
    ctypes.CDLL(None).mallopt(M_MMAP_THRESHOLD, 1 << 14)


def large(num_experts: int, layers: int) -> Any:
    config = Qwen3MoeConfig(
        vocab_size=96,
        hidden_size=256,
        num_hidden_layers=layers,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
        num_experts=num_experts,
        num_experts_per_tok=2,
        moe_intermediate_size=512,
    )
    return Qwen3MoeForCausalLM(config)


def load_and_save(folder: Path, small: Path, out: Path, strategy: ms.Strategy) -> tuple[int, int, int]:
    """Bytes: of this rank's parameters; the most it held beyond what it had, while loading; and while saving."""
    give_freed_memory_back()
    # What the first load and save need besides weights.
    ms.hf.save_pretrained(loaded(small, strategy, FOUR), out)
    gc.collect()
    with peak() as loading:
        model = loaded(folder, strategy, FOUR)
    share = sum(each.to_local().nbytes for each in model.parameters())
    with peak() as saving:
        ms.hf.save_pretrained(model, out)
    return share, loading[0], saving[0]


@pytest.mark.slow
def test_no_rank_holds_all_experts_of_a_layer(tmp_path: Path) -> None:
    """Beside its own part of the model a rank needs for loading less than half a layer, for saving some experts."""
    E = 32
    large(E, 3).save_pretrained(tmp_path / "large")
    large(8, 1).save_pretrained(tmp_path / "small")
    layer_mb = 4 * E * 3 * 256 * 512 / 1e6
    folders = [tmp_path / name for name in ("large", "small", "out")]
    # Ranks of its own: where unwritten memory is filled, no model is without.
    with LocalRanks(4) as ranks:
        for strategy in (lent(4, E), fsep(4, E)):
            for found in ranks.run(load_and_save, *folders, strategy, timeout_s=200.0):
                kept, loading, saving = (size / 1e6 for size in found)
                print(
                    f"{strategy.name}: {layer_mb:.1f} MB are the experts of a layer; a rank keeps {kept:.1f}, "
                    f"needs {loading - kept:.1f} more to load and {saving:.1f} to save"
                )
                assert loading < kept + layer_mb / 2
                assert saving < layer_mb / 4


@pytest.mark.timeout(60)
@pytest.mark.parametrize("has_hard_links", [True, False])
def test_links_and_pipes_of_the_earlier_folder_are_not_followed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, has_hard_links: bool
) -> None:
    old, new = tmp_path / "old", tmp_path / "new"
    (old / "inside").mkdir(parents=True)
    (old / "inside" / "notes").write_text("mine")
    new.mkdir()
    links = {"data": tmp_path, "here": ".", "inside/up": "..", "gone": "step-100", "zero": "/dev/zero"}
    for name, target in links.items():
        (old / name).symlink_to(target)
    os.mkfifo(old / "pipe")
    if not has_hard_links:

        def refuse(*_: object) -> None:
            raise OSError("no hard links")

        monkeypatch.setattr(os, "link", refuse)
    _link_other_files(old, new)
    assert {name: (new / name).readlink() for name in links} == {name: Path(target) for name, target in links.items()}
    assert (new / "inside" / "notes").read_text() == "mine"
    assert (new / "pipe").exists() == has_hard_links
