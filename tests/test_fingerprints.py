"""Fingerprints: every field counts and no name does, and what is recorded is found again."""

from __future__ import annotations

import json
from contextlib import suppress
from typing import Any, get_args

import numpy as np
import pytest
import torch

from moesys import (
    Adaptive,
    Balance,
    ClusterSpec,
    Ema,
    Ep,
    FlowSplit,
    Fsep,
    Greedy,
    Last,
    LayoutInvariant,
    MegaKernel,
    ModelShape,
    Oracle,
    Ordered,
    Pipelined,
    Sequential,
    Split,
    Static,
    Strategy,
    WindowMean,
    config,
)
from moesys.config import Declaration, DenseMlp, Gqa, LayerSpec, Mla, ModelRun, ModelSpec, MoeMlp, Parallelism, overlap
from moesys.kinds import OVERLAPS

MODEL = ModelShape(hidden_size=8, intermediate_size=16, num_experts=8, top_k=2)
GROUPED = MODEL.replace(scoring_func="sigmoid", n_group=4, topk_group=2)
CLUSTER = ClusterSpec(num_nodes=2, ranks_per_node=2)
EP = Strategy(name="ep")
LATENT = Mla(
    num_heads=2, q_lora_rank=None, kv_lora_rank=8, qk_nope_head_dim=4, qk_rope_head_dim=2, v_head_dim=4, bias=False
)
LAYER = LayerSpec(attention=LATENT, mlp=DenseMlp(intermediate_size=16))

RUN = ModelRun(
    model=ModelSpec(
        hidden_size=8, vocab_size=8, layers=(LayerSpec(attention=LATENT, mlp=MoeMlp(shape=MODEL)),) * 2, dtype="float32"
    ),
    cluster=CLUSTER.replace(fp8_tflops=1.0),
)

# Declarations of which each field has another valid value, in one of them if a kind is there more than once.
DECLARED = [
    *(MODEL, GROUPED, CLUSTER, EP.replace(sharding=Ep(slots_per_rank=2)), Ep(slots_per_rank=2), Ep(slot_gb_per_rank=2)),
    *(Fsep(slots_per_rank=2), Fsep(slot_gb_per_rank=2), Adaptive(), WindowMean(), Ema(), LATENT, LAYER),
    *(Gqa(num_heads=4, num_kv_heads=2, head_dim=8), DenseMlp(intermediate_size=16)),
    *(MoeMlp(shape=MODEL, shared_intermediate_size=8), ModelSpec(hidden_size=8, vocab_size=8, layers=(LAYER,))),
    *(RUN, RUN.replace(fp8=True, fp8_rows=True), Parallelism(overlap_micro_batches=True), Parallelism(pp=2)),
    *(LayoutInvariant(), Sequential(node_dispatch="once"), Pipelined(chunks=2, node_dispatch="once"), MegaKernel()),
]
# Planners and splits by kind, where the defaults leave a field no other valid value.
EXAMPLES = {"eplb": {"hierarchical": True}}
MEMBERS = [member(**EXAMPLES.get(kind, {})) for union in (Balance, Split) for kind, member in union.kinds().items()]
# What fields may hold beside the words that their types list.
NUMBERS = (False, True, 0, 1, 2, 3, 4, 8, 9, 16, 64, 128, 0.25, 0.5, 2.5, 64.0, (2, 2), (2.0, 2.0), None)
PARTS = (
    *(Fsep(slots_per_rank=2), Greedy(), WindowMean(), FlowSplit(), Pipelined(chunks=2), LayoutInvariant(), (Last(),)),
    *(MODEL.replace(num_experts=4), LATENT.replace(bias=True), MoeMlp(shape=MODEL), (LAYER, LAYER)),
    *(RUN.model.replace(vocab_size=16), RUN.cluster.replace(num_nodes=1), EP.replace(lag=2), Parallelism(tp=2)),
)
# Names are for people; a member's kind is its type.
NOT_CHANGED = {(Strategy, "name"), (ClusterSpec, "name"), (ModelSpec, "name")}


def words_in(annotation: Any) -> list[str]:
    """Returns the strings that literals in a type allow."""
    inner = [word for part in get_args(annotation) for word in words_in(part)]
    return inner + [part for part in get_args(annotation) if isinstance(part, str)]


def changed(declared: Declaration, field: str) -> Declaration | None:
    """Returns the declaration with another valid value of one field, None if there is none among those tried."""
    words = words_in(type(declared).model_fields[field].annotation)
    for value in (*words, *((word,) for word in words), *NUMBERS, *PARTS):
        with suppress(ValueError, TypeError, AttributeError):
            if (other := declared.replace(**{field: value})) != declared:
                return other
    return None


def changes_of(declared: Declaration) -> dict[str, Declaration]:
    """Returns the declaration with another value of each field that has one, by field."""
    fields = [name for name in type(declared).model_fields if (type(declared), name) not in NOT_CHANGED]
    return {name: other for name in fields if name != "kind" and (other := changed(declared, name)) is not None}


@pytest.mark.parametrize("declared", [*DECLARED, *MEMBERS], ids=lambda declared: type(declared).__name__)
def test_every_field_counts_in_the_fingerprint(declared):
    changes = changes_of(declared)
    assert len({declared.fingerprint(), *(other.fingerprint() for other in changes.values())}) == 1 + len(changes)


def numbers_like(value: Any) -> list[Any]:
    """Returns a number, or a tuple of numbers, as numpy and torch have them; nothing for other values."""
    flat = value if isinstance(value, tuple) else (value,)
    if not flat or not all(isinstance(each, int | float) for each in flat):
        return []
    inner = tuple(np.asarray(each)[()] for each in value) if isinstance(value, tuple) else np.asarray(value)[()]
    return [np.asarray(value), inner, torch.tensor(value, dtype=torch.float64 if float in map(type, flat) else None)]


@pytest.mark.parametrize("declared", [*DECLARED, *MEMBERS], ids=lambda declared: type(declared).__name__)
def test_every_field_takes_numbers_of_numpy_and_torch_as_those_of_python(declared):
    for one in (declared, *changes_of(declared).values()):
        for field in type(one).model_fields:
            for value in numbers_like(getattr(one, field)):
                other = one.replace(**{field: value})
                assert (other, other.to_json(), repr(other)) == (one, one.to_json(), repr(one)), (field, value)


def test_no_field_is_missing_above():
    compared = {(type(declared), field) for declared in (*DECLARED, *MEMBERS) for field in changes_of(declared)}
    kinds = [kind for kind in vars(config).values() if isinstance(kind, type) and issubclass(kind, Declaration)]
    kinds += [getattr(overlap, name) for name, _ in OVERLAPS.values()] + [type(member) for member in MEMBERS]
    everything = {(kind, field) for kind in kinds for field in kind.model_fields if field != "kind"}
    assert everything - compared == NOT_CHANGED


def test_names_and_defaults_written_out_do_not_count_in_the_fingerprint():
    for declared in (EP, CLUSTER):
        assert declared.fingerprint() == declared.replace(name="other").fingerprint()
    assert len(EP.fingerprint()) == 64
    assert Strategy(name="x", balance=Static(), lag=1).fingerprint() == Strategy(name="x").fingerprint()


def test_members_with_the_same_fields_have_their_own_fingerprints():
    members = [*MEMBERS, Last(), Oracle(), Sequential(), Ordered(), LayoutInvariant()]
    assert len({member.fingerprint() for member in members}) == len(members)


def test_fingerprints_stay_what_they_are():
    """Recorded runs are found by this; if it must change, FINGERPRINT_SCHEMA counts up."""
    # Before lent experts could travel ahead.
    lent = Ep(slots_per_rank=2)
    assert lent.fingerprint() == "3112d8d9ee04a57765dd1e8ce0a7d0fb74e7a98c12007adb469021a2a48fa15a"
    assert json.loads(lent.to_json()).keys() == {"kind", "slots_per_rank", "slot_gb_per_rank", "lend"}
    assert Pipelined(chunks=2).fingerprint() == ("4feed17e3f2cf818dd715d3a9504811cf56888365fd192ea070a93a2912a0d3e")
