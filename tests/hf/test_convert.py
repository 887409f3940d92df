"""``moesys convert``: from the hub's format to distributed checkpoints and back, and what it refuses."""

from __future__ import annotations

import errno
import json
import os
import pickle
import re
import resource
import shutil
import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from conftest import assert_equal, refusal
from hf_models import FAMILIES, drawn, fsep, lent, loaded, text
from safetensors.torch import load_file, save_file
from test_save_pretrained import give_freed_memory_back, large, logits, peak, tensors
from torch import Tensor
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner as Planner
from torch.distributed.checkpoint.metadata import _MEM_FORMAT_ENCODING
from torch.distributed.checkpoint.state_dict import get_model_state_dict, get_state_dict, set_model_state_dict
from typer.testing import CliRunner

import moesys as ms
from moesys.__main__ import app
from moesys.hf.convert import _SavedModel, convert
from moesys.hf.hub_files import HubFiles, errors_of_checkpoints
from moesys.lab.ranks.pool import LocalRanks
from moesys.lab.ranks.process_start import sigterm_as_ctrl_c
from moesys.lab.show import progress


def quietly(source: Path, out: Path, config: Path | None = None) -> str:
    return convert(source, out, config, lambda done, total: None)


@pytest.mark.parametrize("dtype", [torch.float32, pytest.param(torch.bfloat16, marks=pytest.mark.slow)], ids=str)
@pytest.mark.parametrize("family", FAMILIES)
def test_there_and_back_are_the_same_bits(tmp_path: Path, family: str, dtype: torch.dtype) -> None:
    """Names, dtypes and bits of every tensor, config and tokenizer; logits of plain transformers are those before."""
    hub, start, back = (tmp_path / name for name in ("hub", "start", "back"))
    drawn(family).to(dtype).save_pretrained(hub, max_shard_size="200KB")
    (hub / "tokenizer.json").write_text("{}")
    ticks: list[tuple[int, int]] = []
    assert convert(hub, start, None, lambda *tick: ticks.append(tick)) == "dcp"
    assert ticks == sorted(ticks)
    assert {done for done, total in ticks if done == total} == {ticks[-1][1]}
    assert quietly(start, back) == "hub"
    assert_equal(tensors(back), tensors(hub))
    for name in ("config.json", "generation_config.json", "tokenizer.json"):
        assert json.loads((back / name).read_text()) == json.loads((hub / name).read_text())
    torch.testing.assert_close(logits(back), logits(hub), rtol=0, atol=1e-6)


def logits_from_meta(family: str, start: Path, out: Path) -> Tensor:
    """Loads a model on the meta device as docs/transformers.md describes, and saves it with an optimizer."""
    kind, config = FAMILIES[family](12)
    with torch.device("meta"):
        model = kind._from_config(config, attn_implementation="eager").eval()
    runtime = ms.parallelize(model, fsep(2, 12))
    model.to_empty(device="cpu")
    for buffer in model.buffers():
        # Uninitialised memory may hold anything.
        buffer.data.fill_(float("nan"))
    state = get_model_state_dict(model)
    dcp.load({"model": state}, checkpoint_id=str(start))
    set_model_state_dict(model, state)
    with torch.no_grad():
        found = model(input_ids=text(7)).logits
    state, optimizer_state = get_state_dict(model, torch.optim.AdamW(model.parameters()))
    with ms.whole_folder(out) as new:
        dcp.save({"model": state, "optimizer": optimizer_state}, checkpoint_id=str(new))
    runtime.close()
    return found


@pytest.mark.parametrize("family", ["qwen3_moe", "deepseek_v3", pytest.param("gpt_oss", marks=pytest.mark.slow)])
def test_a_model_on_the_meta_device_is_loaded_whole(ranks: LocalRanks, tmp_path: Path, family: str) -> None:
    """The buffers of rotary embeddings, which no checkpoint has, are computed; what ranks save is converted back."""
    hub, start, out = (tmp_path / name for name in ("hub", "start", "out"))
    drawn(family, 12).save_pretrained(hub)
    quietly(hub, start)
    for found in ranks.run(logits_from_meta, family, start, out, num_ranks=2, timeout_s=60.0):
        torch.testing.assert_close(found, logits(hub), rtol=0, atol=1e-5)
    quietly(out, tmp_path / "tuned", hub)
    assert_equal(tensors(tmp_path / "tuned"), tensors(hub))


def buffers_from_meta() -> tuple[str, list[float]]:
    """Returns the refusal of a buffer that transformers does not compute, and a buffer that was written in place."""
    kind, config = FAMILIES["qwen3_moe"](12)
    with torch.device("meta"):
        model = kind._from_config(config, attn_implementation="eager").eval()
        model.model.layers[1].register_buffer("mask", torch.zeros(3), persistent=False)
    runtime = ms.parallelize(model, fsep(2, 12))
    model.to_empty(device="cpu")
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.zero_()
    model.model.rotary_emb.inv_freq.fill_(0.5)
    with pytest.raises(ValueError) as error:  # noqa: PT011
        model(input_ids=text(7))
    model.model.layers[1].mask.zero_()
    model(input_ids=text(7))
    runtime.close()
    return str(error.value), model.model.rotary_emb.inv_freq.tolist()


def test_buffers_are_computed_only_where_transformers_knows_them_and_nobody_wrote_them(ranks: LocalRanks) -> None:
    for message, frequencies in ranks.run(buffers_from_meta, num_ranks=2, timeout_s=60.0):
        assert message.startswith("model.layers.1.mask is a buffer that no checkpoint has (persistent=False), and it ")
        assert set(frequencies) == {0.5}


# --- what is refused --------------------------------------------------------------------------------------

EXPERT, PROJECTIONS = "model.layers.1.mlp.experts.{}.{}_proj.weight", ("gate", "up", "down")


def changed(change: Callable[[dict[str, Tensor]], None]) -> Callable[[Path], None]:
    def make(folder: Path) -> None:
        state = load_file(folder / "model.safetensors")
        change(state)
        save_file(state, folder / "model.safetensors", metadata={"format": "pt"})

    return make


def config_says(**fields: Any) -> Callable[[Path], None]:
    def make(folder: Path) -> None:
        path = folder / "config.json"
        path.write_text(json.dumps(json.loads(path.read_text()) | fields))

    return make


def tear(name: str) -> Callable[[Path], None]:
    return lambda folder: os.truncate(folder / name, (folder / name).stat().st_size // 2)


def without_expert(state: dict[str, Tensor]) -> None:
    for which in PROJECTIONS:
        del state[EXPERT.format(3, which)]


def one_expert_more(state: dict[str, Tensor]) -> None:
    state |= {EXPERT.format(8, which): state[EXPERT.format(7, which)].clone() for which in PROJECTIONS}


def of_no_number(state: dict[str, Tensor]) -> None:
    state |= {EXPERT.format(-1, which): state.pop(EXPERT.format(0, which)) for which in PROJECTIONS}


def narrow(state: dict[str, Tensor]) -> None:
    state[EXPERT.format(2, "up")] = state[EXPERT.format(2, "up")][1:].clone()


def written(name: str, text: str) -> Callable[[Path], None]:
    return lambda folder: (folder / name).write_text(text) and None


SIX, NO_NUMBER = (dict.fromkeys(("num_experts", "num_local_experts"), value) for value in (6, None))
INDEX, NORM = "model.safetensors.index.json", "model.layers.1.self_attn.q_norm.weight"
OF_ITS_OWN = '{"model_type": "mine", "auto_map": {"AutoConfig": "mine.Mine"}}'
# What is changed, and words of the error, which names files and tensors.
WRONG: dict[str, tuple[Callable[[Path], None], str]] = {
    "missing tensor": (
        changed(lambda s: s.pop(EXPERT.format(3, "gate"))),
        "hub: model.*3.gate_proj.weight is in no file",
    ),
    "missing expert": (changed(without_expert), "3.down_proj.weight is in no file: .* has 7 experts there, .* to 7 if"),
    "an expert more": (changed(one_expert_more), "safetensors: .*8.down_proj.weight is too many: .* has 9 experts"),
    "an expert of no number": (changed(of_no_number), "belongs to expert 1, and no file has expert 0"),
    "fewer layers than none": (config_says(num_hidden_layers=-1), "num_hidden_layers=-1"),
    "another number": (config_says(**SIX), "6.down_proj.weight is too many: .* has 8 experts there, and config.jso"),
    "another shape": (changed(narrow), r"safetensors: .*2.up_proj.weight has shape \[23, 48\], and .*0.up_proj.weight"),
    "another size": (config_says(moe_intermediate_size=20), r"gate_up_proj the shape \[48, 48\], and .*n \[40, 48\]"),
    "no norm": (changed(lambda s: s.pop(NORM)), r"hub: .*1.self_attn.q_norm.weight is in no file, .* tensor of \[12\]"),
    "torn": (tear("model.safetensors"), r"model.safetensors is torn at its \d+ bytes \("),
    "torn in its header": (lambda folder: os.truncate(folder / "model.safetensors", 100), "is torn at its 100 bytes"),
    "no header": (written("model.safetensors", "\x04\0\0\0\0\0\0\0null"), "is torn at its 12 bytes"),
    "no configuration": (written("config.json", "null"), "config.json is not a configuration: it has no fields"),
    "a deep configuration": (written("config.json", "[" * 10**5), "config.json is not JSON: recursion limit"),
    "no number of experts": (config_says(**NO_NUMBER), "makes no Qwen3MoeForCausalLM of config|is not read by "),
    "a model type of its own": (written("config.json", OF_ITS_OWN), "config.json is not read by .*: ValueError"),
    "too many layers": (config_says(num_hidden_layers=10**9, layer_types=None), r"=1000000000, and the checkpoint \d+"),
    "no model of architectures": (config_says(architectures=["Trainer"]), r"architectures=\['Trainer'\] and "),
    "architectures in a dict": (config_says(architectures={"0": "A"}), r"architectures=\{.*\} and |is not read by "),
    "no code": (config_says(architectures=["MyMoe"]), r"architectures=\['MyMoe'\] and .*, a model that transformers"),
    "another folder": (written(INDEX, '{"weight_map": {"a": "../../a.safetensors"}}'), "a.safetensors', which is out"),
    "an index of numbers": (written(INDEX, '{"weight_map": {"a": 3}}'), "index.json has no weight_map of tensors to f"),
}


@pytest.fixture(scope="module")
def good(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("good") / "hub"
    drawn("qwen3_moe").save_pretrained(folder)
    return folder


@pytest.mark.parametrize("what", WRONG)
def test_a_wrong_hub_folder_is_refused(good: Path, tmp_path: Path, what: str) -> None:
    change, message = WRONG[what]
    shutil.copytree(good, tmp_path / "hub")
    change(tmp_path / "hub")
    with pytest.raises(ValueError, match=message):
        ms.hf.check_checkpoint(tmp_path / "hub")
    with pytest.raises(ValueError, match=message):
        quietly(tmp_path / "hub", tmp_path / "out")
    assert [path.name for path in tmp_path.iterdir()] == ["hub"]


def load(folder: Path) -> None:
    loaded(folder, lent(2), {"fsdp_size": 2, "ep_size": 2})


def test_from_pretrained_refuses_it_on_every_rank(ranks: LocalRanks, good: Path, tmp_path: Path) -> None:
    change, message = WRONG["missing expert"]
    shutil.copytree(good, tmp_path / "hub")
    change(tmp_path / "hub")
    told = ranks.run(refusal, load, tmp_path / "hub", num_ranks=2, timeout_s=100.0)
    assert all(re.search(message, of_rank) for of_rank in told)


class RunsCode:
    """An object whose pickle makes a folder when it is read."""

    def __reduce__(self) -> tuple[Callable[..., None], tuple[str]]:
        return os.mkdir, ("code ran",)


# Sets an attribute of what the name in front of it stands for.
SETTING = pickle.dumps((None, {"is_absolute": 1}), protocol=2)[2:-1] + pickle.BUILD + pickle.STOP
CHANGES_A_CLASS = b"\x80\x02cpathlib\nPurePosixPath\n" + SETTING
CHANGES_AN_ENUM = pickle.dumps(_MEM_FORMAT_ENCODING.TORCH_CONTIGUOUS_FORMAT, protocol=2)[:-1] + SETTING


def metadata_with(change: Callable[[Any], Any]) -> Callable[[Path], None]:
    """Returns a function that replaces the metadata in a folder by what ``change`` makes of it, or its pickle."""

    def write(folder: Path) -> None:
        found = change(pickle.loads((folder / ".metadata").read_bytes()))
        (folder / ".metadata").write_bytes(found if isinstance(found, bytes) else pickle.dumps(found))

    return write


def without_pieces(found: Any) -> Any:
    first = next(iter(found.state_dict_metadata))
    found.state_dict_metadata[first].chunks.clear()
    return found


def with_a_pipe(folder: Path) -> None:
    (folder / "__0_0.distcp").unlink()
    os.mkfifo(folder / "__0_0.distcp")


def larger(found: Any) -> Any:
    each = next(each for each in found.state_dict_metadata.values() if len(each.size) == 2)
    each.size = each.chunks[0].sizes = torch.Size([10**5, 10**5])
    return found


def elsewhere(found: Any) -> Any:
    for info, path in zip(found.storage_data.values(), ("../start/__0_0.distcp", "../secret"), strict=False):
        info.relative_path = path
    return found


def of_linear(found: Any) -> Any:
    return replace(found, planner_data=torch.nn.Linear)


def link_outside(folder: Path) -> None:
    (folder / "tokenizer.json").symlink_to("/etc/hostname")


DISTRIBUTED: dict[str, tuple[Callable[[Path], None], str]] = {
    "torn": (tear("__0_0.distcp"), r"__0_0.distcp is torn or missing: it has \d+ bytes, and .metadata says at least"),
    "torn metadata": (tear(".metadata"), r"\.metadata is torn, .* \(.*\); save the checkpoint again"),
    "code in the metadata": (metadata_with(lambda _: RunsCode()), r".metadata is torn, or not .* \(it names \w+.mkdir"),
    "a class of torch's": (metadata_with(of_linear), r"\(it names torch.nn.modules.linear.Linear, which torch does"),
    "no metadata": (metadata_with(lambda _: {"a": 1}), r"\.metadata is not the metadata .*: it has a dict"),
    "pieces missing": (metadata_with(without_pieces), r"the pieces of model\.\S+ have 0 of its \d+ values; save the"),
    "a file elsewhere": (metadata_with(elsewhere), "start: the checkpoint names '../start/__0_0.distcp', which is out"),
    "a link out of it": (link_outside, "tokenizer.json is a link out of .*start, to /etc/hostname; copy the file into"),
    "a class that is changed": (metadata_with(lambda _: CHANGES_A_CLASS), "it changes <class 'pathlib.PurePosixPath'>"),
    "an enum that is changed": (metadata_with(lambda _: CHANGES_AN_ENUM), "changes <_MEM_FORMAT_ENCODING.TORCH_CONTIG"),
    "too many values": (metadata_with(larger), r"the piece of model\.\S+ at \[0, 0\] has \d{10,} values in \d+ bytes"),
    "a pipe for values": (with_a_pipe, "__0_0.distcp is no regular file; remove it, or fetch the checkpoint again"),
    "no config": (lambda folder: (folder / "config.json").unlink(), "config.json is not there; name .* by --config"),
    "another config": (config_says(**SIX), r"gate_up_proj is of shape \[8, 48, 48\], and by config.json \[6, 48, 48\]"),
    "one layer more": (config_says(num_hidden_layers=3, layer_types=None), "start has no model.layers.2.*which Qwen3"),
}


@pytest.mark.parametrize("what", DISTRIBUTED)
def test_a_wrong_distributed_checkpoint_is_refused(good: Path, tmp_path: Path, what: str) -> None:
    change, message = DISTRIBUTED[what]
    quietly(good, tmp_path / "start")
    change(tmp_path / "start")
    with pytest.raises(ValueError, match=message):
        quietly(tmp_path / "start", tmp_path / "out")
    assert [path.name for path in tmp_path.iterdir()] == ["start"]


@pytest.mark.parametrize("shared", [False, True], ids=["of the model", "of the whole cache"])
def test_a_folder_of_the_hub_s_cache_is_read_through_its_links(good: Path, tmp_path: Path, shared: bool) -> None:
    blobs, snapshot = tmp_path / "models--a--b" / "blobs", tmp_path / "models--a--b" / "snapshots" / "0123"
    shutil.copytree(good, tmp_path / "blobs" if shared else blobs)
    snapshot.mkdir(parents=True)
    blobs.mkdir(exist_ok=True)
    for path in good.iterdir():
        (snapshot / path.name).symlink_to(f"../../blobs/{path.name}")
        if shared:
            (blobs / path.name).symlink_to(f"../../blobs/{path.name}")
    assert quietly(snapshot, tmp_path / "start") == "dcp"
    assert (tmp_path / "start" / "config.json").read_bytes() == (good / "config.json").read_bytes()
    assert not (tmp_path / "start" / "config.json").is_symlink()


def test_weights_may_be_links(good: Path, tmp_path: Path) -> None:
    shutil.copytree(good, tmp_path / "hub")
    (tmp_path / "hub" / "model.safetensors").rename(tmp_path / "weights")
    (tmp_path / "hub" / "model.safetensors").symlink_to("../weights")
    assert quietly(tmp_path / "hub", tmp_path / "start") == "dcp"
    (tmp_path / "start" / "__0_0.distcp").rename(tmp_path / "values")
    (tmp_path / "start" / "__0_0.distcp").symlink_to("../values")
    assert quietly(tmp_path / "start", tmp_path / "back") == "hub"
    assert_equal(tensors(tmp_path / "back"), tensors(good))


NAMES_OF_OTHERS = {
    "Python 3.13": [(b"cpathlib\nPosixPath", b"cpathlib._local\nPosixPath")],
    "Windows": [(b"cpathlib\nPosixPath", b"cpathlib\nWindowsPath")],
    "torch 2.2": [
        (
            b"ctorch.distributed.checkpoint.metadata\nTensorProperties",
            b"ctorch.distributed._shard.sharded_tensor.metadata\nTensorProperties",
        ),
        (
            b"ctorch.distributed.checkpoint.metadata\n_MEM_FORMAT_ENCODING",
            b"ctorch.distributed._shard.sharded_tensor.metadata\nMEM_FORMAT_ENCODING",
        ),
    ],
}


@pytest.mark.parametrize("whose", NAMES_OF_OTHERS)
def test_metadata_that_other_versions_wrote_is_read(good: Path, tmp_path: Path, whose: str) -> None:
    quietly(good, tmp_path / "start")
    path = tmp_path / "start" / ".metadata"
    written = pickle.dumps(replace(pickle.loads(path.read_bytes()), planner_data=(Path("a"),)), protocol=2)
    for ours, theirs in NAMES_OF_OTHERS[whose]:
        assert ours in written
        written = written.replace(ours, theirs)
    path.write_bytes(written)
    assert quietly(tmp_path / "start", tmp_path / "back") == "hub"
    assert_equal(tensors(tmp_path / "back"), tensors(good))


def test_the_command(good: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Lines of progress in a pipe, the folder on stdout; what is there already is left alone."""
    monkeypatch.setattr(progress, "_SILENT_S", 0.0)
    done = CliRunner().invoke(app, ["convert", str(good), str(tmp_path / "start")])
    assert (done.exit_code, done.stdout) == (0, f"{tmp_path / 'start'}\n")
    lines = done.stderr.splitlines()
    assert len(lines) >= 10
    assert re.fullmatch(r"([\d.]+) of \1 MB", lines[-1])
    again = CliRunner().invoke(app, ["convert", str(good), str(tmp_path / "start")])
    assert again.exit_code == 2
    assert "is there already, and not an empty folder; give another, or remove it" in again.stderr
    neither = CliRunner().invoke(app, ["convert", str(tmp_path), str(tmp_path / "out")])
    assert neither.exit_code == 2
    assert "is neither a hub folder" in neither.stderr


def convert_until_killed(source: Path, out: Path) -> None:
    def tick(done: int, total: int) -> None:
        if 2 * done > total:
            os.kill(os.getpid(), signal.SIGKILL)

    convert(source, out, None, tick)


def test_a_killed_conversion_leaves_nothing_in_its_place(ranks: LocalRanks, good: Path, tmp_path: Path) -> None:
    (died,) = ranks.outcomes(convert_until_killed, good, tmp_path / "start", num_ranks=1)
    assert died.reason == "was killed by signal 9"
    assert not (tmp_path / "start").exists()
    quietly(good, tmp_path / "start")
    assert [path.name for path in tmp_path.iterdir()] == ["start"]


def converted(hub: Path, start: Path, back: Path) -> tuple[int, int]:
    """The most bytes that either way needs beyond what the process had."""
    give_freed_memory_back()
    quietly(hub, start)
    shutil.rmtree(start)
    with peak() as there:
        quietly(hub, start)
    with peak() as again:
        quietly(start, back)
    return there[0], again[0]


@pytest.mark.slow
def test_a_conversion_has_an_expert_at_a_time(tmp_path: Path) -> None:
    large(32, 3).save_pretrained(tmp_path / "hub")
    expert_mb = 4 * 3 * 256 * 512 / 1e6
    with LocalRanks(1) as ranks:
        [found] = ranks.run(converted, *(tmp_path / name for name in ("hub", "start", "back")), timeout_s=100.0)
    there, again = (size / 1e6 for size in found)
    print(f"{96 * expert_mb:.1f} MB of experts: {there:.1f} needed from the hub's format, {again:.1f} back")
    assert max(there, again) < 8 * expert_mb


# --- disks and interruptions --------------------------------------------------------------------------------------


@contextmanager
def full_disk(limit: int) -> Iterator[None]:
    """Files of at most ``limit`` bytes, which fail as a full disk does."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (limit, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


def raised() -> None:
    raise KeyboardInterrupt


def dropped() -> None:
    """As torch's C++ may do with an error of Python's in a callback."""
    with suppress(KeyboardInterrupt):
        signal.raise_signal(signal.SIGINT)


@pytest.fixture
def both(good: Path, tmp_path: Path) -> Path:
    """A folder with a model in both formats, where signals are as in a shell; a background job inherits others."""
    shutil.copytree(good, tmp_path / "hub")
    quietly(tmp_path / "hub", tmp_path / "start")
    signal.signal(signal.SIGINT, signal.default_int_handler)
    return tmp_path


both_ways = pytest.mark.parametrize("source", ["hub", "start"])


@both_ways
def test_a_full_disk_ends_in_a_line(both: Path, source: str) -> None:
    """torch's own error is no Exception, and has a traceback in its message."""
    with full_disk(20_000):
        result = CliRunner().invoke(app, ["convert", str(both / source), str(both / "out"), "--quiet"])
    assert (result.exit_code, result.stderr) == (2, f"Error: File too large: {both / 'out'}\n")
    assert sorted(path.name for path in both.iterdir()) == ["hub", "start"]


@both_ways
@pytest.mark.parametrize("stop", [raised, dropped])
def test_an_interruption_stays_one(both: Path, source: str, stop: Callable[[], None]) -> None:
    ticks: list[int] = []

    def tick(done: int, total: int) -> None:
        ticks.append(done)
        stop()
        assert signal.getsignal(signal.SIGINT) is not signal.default_int_handler

    with pytest.raises(KeyboardInterrupt):
        convert(both / source, both / "out", None, tick)
    assert len(ticks) == 1
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    assert sorted(path.name for path in both.iterdir()) == ["hub", "start"]


def test_an_ignored_signal_stays_ignored(good: Path, tmp_path: Path) -> None:
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        convert(good, tmp_path / "start", None, lambda *_: signal.raise_signal(signal.SIGINT))
    finally:
        signal.signal(signal.SIGINT, before)
    assert (tmp_path / "start" / ".metadata").exists()


def wrapped() -> None:
    """As torch's C++ makes another error of it."""
    try:
        signal.raise_signal(signal.SIGTERM)
    except KeyboardInterrupt as error:
        raise RuntimeError("failed in a callback") from error


@pytest.mark.parametrize("stop", [partial(signal.raise_signal, signal.SIGINT), wrapped], ids=["signal", "wrapped"])
@both_ways
def test_a_signal_within_a_piece_ends_it_at_once_and_the_next_do_not_stop_the_removal(
    both: Path, monkeypatch: pytest.MonkeyPatch, source: str, stop: Callable[[], None]
) -> None:
    pieces: list[str] = []
    remove = shutil.rmtree

    def begin(*_: object) -> torch.Tensor:
        pieces.append("begun")
        stop()
        pieces.append("read")
        return torch.zeros(1)

    def remove_slowly(*given: Any, **options: Any) -> None:
        signal.raise_signal(signal.SIGINT)
        remove(*given, **options)

    for reader in (HubFiles, _SavedModel):
        monkeypatch.setattr(reader, "read", begin)
    monkeypatch.setattr("moesys.files.shutil.rmtree", remove_slowly)
    with sigterm_as_ctrl_c(), pytest.raises(KeyboardInterrupt):
        quietly(both / source, both / "out")
    assert pieces == ["begun"]
    assert sorted(path.name for path in both.iterdir()) == ["hub", "start"]


def fails_on_one_rank(folder: Path) -> None:
    class Torn(Planner):
        def resolve_data(self, write_item: Any) -> Any:
            if dist.get_rank() == 1:
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            return super().resolve_data(write_item)

    with pytest.raises(OSError, match=rf"No space left on device: '{folder}'"), errors_of_checkpoints(folder):
        dcp.save({f"of rank {dist.get_rank()}": torch.ones(3)}, checkpoint_id=folder, planner=Torn())


def test_every_rank_raises_the_error_of_the_one_that_failed(ranks: LocalRanks, tmp_path: Path) -> None:
    ranks.run(fails_on_one_rank, tmp_path / "out", num_ranks=2, timeout_s=60.0)
