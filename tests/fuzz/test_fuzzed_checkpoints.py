"""Checkpoints and states of layers, damaged and forged."""

from __future__ import annotations

import json
import pickle
import shutil
import struct
import warnings
from pathlib import Path
from random import Random
from typing import Any

import numpy as np
import torch
from mutated_inputs import (
    Attempt,
    Reader,
    altered,
    every_reader,
    faults,
    json_bytes,
    known,
    mangled,
    refused,
    same,
)
from safetensors.torch import load_file
from torch import Tensor
from torch.distributed.checkpoint.metadata import BytesStorageMetadata

import moesys as ms
from moesys.balance.layout_schedule import LayoutSchedule
from moesys.load import LoadMatrix

# --- checkpoints --------------------------------------------------------------------------------------------------


def small_checkpoint(folder: Path) -> None:
    """Writes a model in the hub's format, in one file, and sharded beside it."""
    from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

    sizes = {"vocab_size": 8, "hidden_size": 8, "num_hidden_layers": 1, "num_attention_heads": 2, "head_dim": 4}
    sizes |= {"num_key_value_heads": 1, "num_experts": 2, "num_experts_per_tok": 1, "moe_intermediate_size": 4}
    config = Qwen3MoeConfig(**sizes, intermediate_size=4, pad_token_id=None, bos_token_id=None, eos_token_id=None)
    torch.manual_seed(0)
    model = Qwen3MoeForCausalLM(config)
    model.save_pretrained(folder / "one")
    model.save_pretrained(folder / "sharded", max_shard_size="1KB")


def tensors_in(folder: Path) -> dict[str, Tensor]:
    return {name: tensor for path in sorted(folder.glob("*.safetensors")) for name, tensor in load_file(path).items()}


def converted(source: Path, out: Path) -> None:
    from moesys.hf.convert import convert

    if out.exists():
        shutil.rmtree(out)
    with warnings.catch_warnings():
        # Of tensors that the model does not have.
        warnings.simplefilter("ignore", UserWarning)
        convert(source, out, None, lambda done, total: None)
    assert sorted(path.name for path in out.parent.iterdir() if path.name.startswith(".")) == []


def equal(one: Tensor, other: Tensor) -> bool:
    """Returns whether values are equal, of any dtype, NaN too."""
    one, other = one.to(torch.float64), other.to(torch.float64)
    return one.shape == other.shape and bool(((one == other) | (one.isnan() & other.isnan())).all())


def hub_checkpoint(folder: Path) -> Attempt:
    small_checkpoint(folder)
    (folder / "out").mkdir()
    sources = [{path: path.read_bytes() for path in (folder / name).iterdir()} for name in ("one", "sharded")]

    def attempt(draw: Random) -> None:
        wholes = draw.choice(sources)
        for path, whole in wholes.items():
            path.write_bytes(whole)
        source = next(iter(wholes)).parent
        wrong = draw.choice([path for path in wholes if path.name != "generation_config.json"])
        wrong.write_bytes(
            safetensors_bytes(draw, wholes[wrong])
            if wrong.suffix == ".safetensors"
            else json_bytes(draw, json.loads(wholes[wrong]))
        )
        if draw.random() < 0.02:
            wrong.unlink()
        with refused(wrong.name, source.name, "config.json"):
            converted(source, folder / "out" / "dcp")
            converted(folder / "out" / "dcp", folder / "out" / "back")
            before, after = tensors_in(source), tensors_in(folder / "out" / "back")
            tied = json.loads((folder / "out" / "back" / "config.json").read_text()).get("tie_word_embeddings")
            for name, tensor in before.items():
                assert equal(tensor, after[name]) if name in after else tied, name

    return attempt


def safetensors_bytes(draw: Random, data: bytes) -> bytes:
    """Returns a changed safetensors file: its header's fields, their length, or any bytes."""
    if draw.random() < 0.4:
        return mangled(draw, data)
    length = int.from_bytes(data[:8], "little")
    text = json_bytes(draw, json.loads(data[8 : 8 + length]), share=0.9)
    said = len(text) if draw.random() < 0.9 else draw.choice((0, 2**31, 2**63, length))
    return struct.pack("<Q", said) + text + data[8 + length :]


CALLS: list[str] = []


class Running:
    """A pickle that runs code where it is read."""

    def __reduce__(self) -> Any:
        return CALLS.append, ("run",)


def distributed_checkpoint(folder: Path) -> Attempt:
    small_checkpoint(folder)
    source = folder / "one.dcp"
    converted(folder / "one", source)
    (folder / "out").mkdir()
    wholes = {path: path.read_bytes() for path in source.iterdir()}
    right = tensors_in(folder / "one")

    def attempt(draw: Random) -> None:
        for path, whole in wholes.items():
            path.write_bytes(whole)
        wrong = draw.choice([path for path in wholes if path.name != "generation_config.json"])
        forged = wrong.name == ".metadata" and draw.random() < 0.7
        if forged:
            metadata = pickle.loads(wholes[wrong])
            forge(draw, metadata)
            wrong.write_bytes(pickle.dumps(metadata))
        elif wrong.name == "config.json":
            wrong.write_bytes(json_bytes(draw, json.loads(wholes[wrong])))
        else:
            wrong.write_bytes(mangled(draw, wholes[wrong]))
        with refused(wrong.name, source.name, "config.json"):
            converted(source, folder / "out" / "hub")
            found = tensors_in(folder / "out" / "hub")
            assert found.keys() <= right.keys() or wrong.name == ".metadata"
            if wrong.name == "config.json":
                assert all(equal(found[name], right[name]) for name in found)
        assert not CALLS

    return attempt


def forge(draw: Random, metadata: Any) -> None:
    """Changes fields of a checkpoint's metadata."""
    weird = (None, -1, 0, 1, 2**40, 2**62, 2**70, 1.5, "x", "../x", [], (), torch.Size([2**40]), Running())
    name = draw.choice(list(metadata.state_dict_metadata))
    tensor = metadata.state_dict_metadata[name]
    index = draw.choice(list(metadata.storage_data))
    chunk, info, properties = draw.choice(tensor.chunks), metadata.storage_data[index], tensor.properties
    places = [(chunk, "offsets"), (chunk, "sizes"), (tensor, "size"), (tensor, "chunks"), (properties, "dtype")]
    places += [(info, field) for field in ("relative_path", "offset", "length", "transform_descriptors")]
    places += [(metadata, field) for field in ("state_dict_metadata", "storage_data", "planner_data", "storage_meta")]
    places += [(metadata.state_dict_metadata, name), (metadata.storage_data, index)]
    at, field = draw.choice(places)
    sizes = () if isinstance(at, dict) else getattr(at, field)
    value = draw.choice((*weird, chunk.sizes, tensor.size, torch.float16, torch.int64, BytesStorageMetadata()))
    if isinstance(sizes, torch.Size) and draw.random() < 0.7:
        which = draw.randrange(len(sizes))
        value = torch.Size([*sizes[:which], draw.choice((0, 1, 2, 3, 2**33)), *sizes[which + 1 :]])
    if not isinstance(at, dict):
        object.__setattr__(at, field, value)
    elif draw.random() < 0.5:
        del at[field]
    else:
        at[field] = value


def planning_state(folder: Path) -> Attempt:
    """What a layer's state dict has of load history and layouts."""
    cluster = ms.ClusterSpec(num_nodes=2, ranks_per_node=2)
    model = ms.ModelShape(hidden_size=8, intermediate_size=8, num_experts=6, top_k=2)
    loads = [LoadMatrix(np.random.default_rng(step).integers(0, 50, (4, 6))) for step in range(6)]
    predictors = (ms.Last(), ms.WindowMean(steps=3), ms.Ema(), ms.Adaptive())
    strategies = [
        ms.Strategy(name="x", sharding=ms.Fsep(slots_per_rank=3), balance=ms.Eplb(), predictor=predictor, lag=2)
        for predictor in predictors
    ]
    states = []
    for strategy in strategies:
        schedule = LayoutSchedule(0, strategy, model, cluster)
        for load in loads[:3]:
            schedule.commit(agreed=True)
            schedule.observe(load)
        states.append(json.loads(json.dumps(schedule.state_dict(0.0))))

    def attempt(draw: Random) -> None:
        which = draw.randrange(len(states))
        schedule = LayoutSchedule(0, strategies[which], model, cluster)
        state = altered(draw, states[which])
        # Texts stand for raw JSON, of which there is none in a dict.
        if not isinstance(state, dict) or "\\u0001" in json.dumps(state):
            return
        with refused("state"):
            schedule.load_state_dict(state)
            again = json.loads(json.dumps(schedule.state_dict(0.0)))
            assert schedule.events or same(again, known(state, again))
            for load in loads[3:]:
                schedule.commit(agreed=schedule.ready(0.0))
                schedule.observe(load)

    return attempt


def layer_state(folder: Path) -> Attempt:
    """What ``Experts`` of one rank load as their extra state, and ``MoELayer`` as its tensors."""
    shape = ms.ModelShape(hidden_size=8, intermediate_size=8, num_experts=4, top_k=2)
    layer = ms.MoELayer(shape, ms.Strategy(name="ep"))
    text, tensors = layer.experts.get_extra_state(), layer.full_state_dict()

    def attempt(draw: Random) -> None:
        if draw.random() < 0.7:
            state: Any = json_bytes(draw, json.loads(text)).decode("utf-8", "surrogateescape")
            with refused("state"):
                layer.experts.set_extra_state(state)
                assert layer.experts.counted_E.tolist() == json.loads(state)["counted"]
            return
        changed: dict[Any, Any] = dict(tensors)
        name = draw.choice(list(changed))
        tensor = changed[name]
        others = (tensor[:1], tensor.to(torch.int64), tensor.mT, tensor.flatten(), None, 3, "x", tensor.tolist())
        changed[name] = draw.choice((*others, tensor * float("nan"), torch.empty(0), tensor.to(torch.complex64)))
        if draw.random() < 0.2:
            del changed[name]
            changed[draw.choice(("x", 3, None))] = tensor
        with refused(*map(str, tensors), kinds=(ValueError, KeyError, TypeError)):
            layer.load_full_state_dict(changed)
            assert all(
                torch.equal(value, torch.as_tensor(changed[name]).to(value.dtype)) or name
                for name, value in layer.full_state_dict().items()
            )

    return attempt


@every_reader(hub_checkpoint, distributed_checkpoint, planning_state, layer_state)
def test_what_others_wrote_is_read_rightly_or_refused(reader: Reader, seeds: range, tmp_path: Path) -> None:
    assert not faults(reader, seeds, tmp_path)
