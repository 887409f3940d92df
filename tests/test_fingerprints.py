"""Fingerprints: every field counts and no name does, and what is recorded is found again."""

from __future__ import annotations

from contextlib import suppress
from typing import Any, get_args

import pytest
from pydantic import ValidationError

from moesys import config
from moesys.balance.eplb import Eplb
from moesys.balance.even_split import EvenSplit
from moesys.balance.flow.flow_split import FlowSplit
from moesys.balance.greedy.greedy import Greedy
from moesys.balance.moon_ep import MoonEp
from moesys.balance.proportional_split import Proportional
from moesys.balance.quotas import Quotas
from moesys.balance.static import Static
from moesys.config import (
    Adaptive,
    Balance,
    ClusterSpec,
    Declared,
    DenseMlp,
    Ema,
    Ep,
    Fsep,
    Gqa,
    Last,
    LayerSpec,
    LayoutInvariant,
    Mla,
    ModelRun,
    ModelShape,
    ModelSpec,
    MoeMlp,
    Oracle,
    Ordered,
    Parallelism,
    Split,
    Strategy,
    WindowMean,
    overlap,
)
from moesys.config.overlap import MegaKernel, Pipelined, Sequential
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

# A declaration and another value for each of its fields; the other values leave the rest valid.
CHANGES = [
    (
        MODEL,
        {
            "hidden_size": 9,
            "intermediate_size": 17,
            "num_experts": 9,
            "top_k": 3,
            "dtype": "bfloat16",
            "scoring_func": "sigmoid",
            "norm_topk_prob": False,
            "routed_scaling_factor": 2.5,
            "n_shared_experts": 1,
            "router_aux_loss_coef": 0.01,
            "router_z_loss_coef": 0.001,
            "initializer_range": 0.006,
        },
    ),
    (GROUPED, {"n_group": 2, "topk_group": 3, "router_bias_update_rate": 0.001}),
    (
        CLUSTER,
        {
            "num_nodes": 3,
            "ranks_per_node": 3,
            "ranks_per_domain": 1,
            "intra_node_gb_per_s": 1.0,
            "inter_node_gb_per_s": 1.0,
            "expert_tflops": 1.0,
            "backward_tflops": 1.0,
            "attention_tflops": 1.0,
            "attention_backward_tflops": 1.0,
            "fp8_tflops": 1.0,
            "peak_tflops": 1.0,
            "memory_gb_per_s": 1.0,
            "elementwise_gb_per_s": 1.0,
            "elementwise_backward_gb_per_s": 1.0,
            "optimizer_gb_per_s": 1.0,
            "memory_gb": 1.0,
            "multiprocessors": 2,
            "tile_rows": 2,
            "tile_columns": 2,
            "copy_share": 0.5,
            "fused_rate": 0.5,
            "launch_us": 1.0,
            "flag_us": 1.0,
            "intra_node_us": 1.0,
            "inter_node_us": 1.0,
        },
    ),
    (
        EP.replace(sharding=Ep(slots_per_rank=2)),
        {
            "sharding": Fsep(slots_per_rank=2),
            "balance": Greedy(),
            "predictor": WindowMean(),
            "split": FlowSplit(),
            "overlap": Pipelined(chunks=2),
            "replan_every": 2,
            "reduction": LayoutInvariant(),
            "lag": 2,
            "late_slots": 1,
        },
    ),
    (Ep(slots_per_rank=2), {"slots_per_rank": None, "lend": "hierarchical"}),
    (Ep(slot_gb_per_rank=2), {"slot_gb_per_rank": (2.0, 2.0)}),
    (Fsep(slot_gb_per_rank=2), {"slot_gb_per_rank": (2.0, 2.0)}),
    (
        Fsep(slots_per_rank=2),
        {
            "slots_per_rank": (2, 2),
            "prefetch_layers": 1,
            "delay_reshard": True,
            "reshard_after_forward": False,
            "restore": "hierarchical",
            "reshard": "hierarchical",
        },
    ),
    (Adaptive(), {"candidates": (Last(),), "memory": 8}),
    (WindowMean(), {"steps": 4}),
    (Ema(), {"decay": 0.0}),
    (
        Gqa(num_heads=4, num_kv_heads=2, head_dim=8),
        {
            "num_heads": 2,
            "num_kv_heads": 4,
            "head_dim": 4,
            "window": 8,
            "qkv_bias": True,
            "output_bias": True,
            "qk_norm": "row",
            "sinks": True,
        },
    ),
    (
        LATENT,
        {
            "num_heads": 1,
            "q_lora_rank": 8,
            "kv_lora_rank": 4,
            "qk_nope_head_dim": 8,
            "qk_rope_head_dim": 4,
            "v_head_dim": 8,
            "bias": True,
        },
    ),
    (DenseMlp(intermediate_size=16), {"intermediate_size": 8, "gated": False}),
    (
        MoeMlp(shape=MODEL, shared_intermediate_size=8),
        {
            "shape": MODEL.replace(num_experts=4),
            "shared_intermediate_size": 16,
            "shared_gate": True,
            "expert_bias": True,
            "router_bias": True,
        },
    ),
    (LAYER, {"attention": LATENT.replace(bias=True), "mlp": MoeMlp(shape=MODEL)}),
    (
        ModelSpec(hidden_size=8, vocab_size=8, layers=(LAYER,)),
        {"hidden_size": 16, "vocab_size": 16, "tied_embeddings": True, "layers": (LAYER, LAYER), "dtype": "float32"},
    ),
    (
        RUN,
        {
            "model": RUN.model.replace(vocab_size=16),
            "cluster": RUN.cluster.replace(num_nodes=1),
            "strategy": EP.replace(overlap=Pipelined(chunks=2)),
            "parallelism": Parallelism(tensor=2),
            "seq_len": 8,
            "micro_batch": 2,
            "global_batch": 8,
            "fp8": True,
            "gradient_dtype": "bfloat16",
            "host_us": 1.0,
            "backend": "gloo",
            "optimizer": "sgd",
        },
    ),
    (RUN.replace(fp8=True, fp8_rows=True), {"fp8_rows": False}),
    (
        Parallelism(overlap_micro_batches=True),
        {"overlap_micro_batches": False},
    ),
    (
        Parallelism(pipeline=2),
        {
            "tensor": 2,
            "context": 2,
            "pipeline": 4,
            "virtual_stages": 2,
            "expert": 4,
            "schedule": "zero_bubble",
            "dense": "full",
            "recompute": "selective",
        },
    ),
    (LayoutInvariant(), {"block_rows": 128, "token_block": 64}),
    (Sequential(node_dispatch="once"), {"node_dispatch": "direct", "combine": "per_node"}),
    (Pipelined(chunks=2, node_dispatch="once"), {"chunks": 3, "node_dispatch": "direct", "combine": "per_node"}),
    (
        MegaKernel(),
        {
            "fused": "none",
            "dispatch_share": 1.0,
            "combine_share": 0.5,
            "reduce_share": 0.5,
            "granularity": "expert",
            "tile_order": "slots",
            "deduplicate": True,
            "keep_x": False,
            "overlap_weight_gradients": False,
            "fetch_rows": 16,
            "sum_tokens": 32,
            "tile_rows": 64,
            "tile_columns": 64,
            "warps": 4,
            "stages": 3,
            "programs": 1,
            "rows_cap": 3.0,
            "most_tokens": 64,
            "timeout_s": 5.0,
        },
    ),
]
# Names are for people; a member's kind is its type.
NOT_CHANGED = {(Strategy, "name"), (ClusterSpec, "name"), (ModelSpec, "name")}


def test_every_field_counts_in_the_fingerprint():
    for declared, changes in CHANGES:
        prints = {declared.fingerprint(), *(declared.replace(**{f: v}).fingerprint() for f, v in changes.items())}
        assert len(prints) == 1 + len(changes)


# Planners and splits by kind, where the defaults leave a field no other valid value.
EXAMPLES = {"eplb": {"hierarchical": True}}
MEMBERS = [member(**EXAMPLES.get(kind, {})) for union in (Balance, Split) for kind, member in union.kinds().items()]


def words_in(annotation: Any) -> list[str]:
    """Returns the strings that literals in a type allow."""
    inner = [word for part in get_args(annotation) for word in words_in(part)]
    return inner + [part for part in get_args(annotation) if isinstance(part, str)]


def changed(member: Declared, field: str) -> Declared:
    """Returns the member with another valid value of one field."""
    words = words_in(type(member).model_fields[field].annotation)
    for value in (*words, *((word,) for word in words), False, True, 0, 1, 2, 9, 0.25, 2.5):
        if value != getattr(member, field):
            with suppress(ValidationError):
                return member.replace(**{field: value})
    raise AssertionError(f"{field} of {member!r} needs an example")


@pytest.mark.parametrize("member", MEMBERS, ids=lambda member: member.kind)
def test_every_field_of_a_planner_or_split_counts(member):
    fields = [field for field in type(member).model_fields if field != "kind"]
    assert len({member.fingerprint(), *(changed(member, field).fingerprint() for field in fields)}) == 1 + len(fields)


def test_no_field_is_missing_above():
    in_changes = {(type(declared), field) for declared, changes in CHANGES for field in changes}
    kinds = [kind for kind in vars(config).values() if isinstance(kind, type) and issubclass(kind, Declared)]
    kinds += [getattr(overlap, name) for name, _ in OVERLAPS.values()]
    everything = {(kind, field) for kind in kinds for field in kind.model_fields if field != "kind"}
    assert everything - in_changes == NOT_CHANGED


def test_names_do_not_count_in_the_fingerprint():
    assert EP.fingerprint() == EP.replace(name="other").fingerprint()
    assert CLUSTER.fingerprint() == CLUSTER.replace(name="other").fingerprint()
    assert len(EP.fingerprint()) == 64


def test_members_with_the_same_fields_have_their_own_fingerprints():
    members = [
        Static(),
        Eplb(),
        MoonEp(),
        Last(),
        Oracle(),
        EvenSplit(),
        Proportional(),
        FlowSplit(),
        Quotas(),
        Sequential(),
        Ordered(),
        LayoutInvariant(),
    ]
    assert len({member.fingerprint() for member in members}) == len(members)


def test_a_default_written_out_has_the_same_fingerprint():
    assert Strategy(name="x", balance=Static(), lag=1).fingerprint() == Strategy(name="x").fingerprint()


def test_fingerprints_stay_what_they_are():
    """Recorded runs are found by this; if it must change, FINGERPRINT_SCHEMA counts up."""
    assert Pipelined(chunks=2).fingerprint() == ("4feed17e3f2cf818dd715d3a9504811cf56888365fd192ea070a93a2912a0d3e")
