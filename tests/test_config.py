"""Declarations: round trips, refusals, fingerprints, and what every error says."""

from __future__ import annotations

import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import TypeAdapter, ValidationError

from moesys import config
from moesys.config import (
    Balance,
    ClusterSpec,
    CpSat,
    Declared,
    Ema,
    Ep,
    Eplb,
    EvenSplit,
    FlowSplit,
    Fsep,
    Greedy,
    Laer,
    Last,
    ModelShape,
    Ordered,
    Overlap,
    Pipelined,
    Predictor,
    Proportional,
    Sequential,
    Sharding,
    Split,
    Static,
    Strategy,
    WindowMean,
)

MODEL = ModelShape(hidden_size=8, intermediate_size=16, num_experts=8, top_k=2)
SIGMOID = MODEL.replace(scoring_func="sigmoid")
GROUPED = SIGMOID.replace(n_group=4, topk_group=2)
CLUSTER = ClusterSpec(num_nodes=2, ranks_per_node=2)
EP = Strategy(name="ep")

slots = st.integers(0, 9) | st.lists(st.integers(0, 9), min_size=1, max_size=4).map(tuple)
fseps = st.builds(
    Fsep,
    slots_per_rank=slots,
    prefetch_layers=st.integers(0, 3),
    delay_reshard=st.booleans(),
    reshard_after_forward=st.booleans(),
    restore=st.sampled_from(["flat", "hierarchical"]),
)
balances = st.one_of(
    st.builds(Static),
    st.builds(Eplb),
    st.builds(Laer, candidates=st.sampled_from([("even",), ("proportional",), ("even", "proportional")])),
    st.builds(Greedy, search_moves=st.integers(0, 1000)),
    st.builds(CpSat, deterministic_time=st.floats(1e-9, 1e9)),
)
freely = {
    "name": st.text(),
    "predictor": st.one_of(
        st.builds(Last),
        st.builds(WindowMean, steps=st.integers(1, 99)),
        st.builds(Ema, decay=st.floats(0, 1, exclude_max=True)),
    ),
    "split": st.sampled_from([EvenSplit(), Proportional(), FlowSplit()]),
    "overlap": st.just(Sequential()) | st.builds(Pipelined, chunks=st.integers(1, 64)),
    "replan_every": st.integers(1, 99),
    "lag": st.integers(1, 99),
}
strategies = st.one_of(
    st.builds(Strategy, sharding=fseps | st.builds(Ep, slots_per_rank=slots), balance=balances, **freely),
    st.builds(Strategy, sharding=st.just(Ep()), balance=st.just(Static()), **freely),
)
clusters = st.builds(
    lambda sizes, name, gb_per_s: ClusterSpec(
        num_nodes=len(sizes),
        ranks_per_node=sizes[0] if len(set(sizes)) == 1 else sizes,
        name=name,
        inter_node_gb_per_s=gb_per_s,
    ),
    st.lists(st.integers(1, 16), min_size=1, max_size=5).map(tuple),
    st.text(),
    st.floats(1e-3, 1e6),
)


@settings(deadline=None)
@given(strategies | clusters | st.sampled_from([MODEL, SIGMOID, GROUPED]))
def test_declarations_survive_json_and_toml(declared):
    kind = type(declared)
    for copy in (
        kind.from_json(declared.to_json()),
        kind.from_json(declared.to_json(indent=None).encode()),
        kind.from_toml(declared.to_toml()),
    ):
        assert copy == declared
        assert copy.fingerprint() == declared.fingerprint()
        assert hash(copy) == hash(declared)


@pytest.mark.parametrize("union", [Sharding, Balance, Predictor, Split, Overlap])
def test_unions_are_told_apart_by_kind(union):
    schema = TypeAdapter(union).json_schema()
    members = schema["discriminator"]["mapping"]
    assert schema["discriminator"]["propertyName"] == "kind"
    assert [f"#/$defs/{name}" for name in schema["$defs"]] == sorted(members.values())
    for kind, reference in members.items():
        assert schema["$defs"][reference.removeprefix("#/$defs/")]["properties"]["kind"]["const"] == kind


@pytest.mark.parametrize("declared", [ModelShape, ClusterSpec, Strategy])
def test_there_is_a_json_schema(declared):
    schema = declared.model_json_schema()
    assert schema["additionalProperties"] is False
    assert set(schema["properties"]) == set(declared.model_fields)
    json.dumps(schema)


def test_toml_reads_as_people_write_it():
    text = """
        name = "unified"
        sharding = { kind = "fsep", slots_per_rank = [2, 3] }
        overlap = { kind = "pipelined", chunks = 4 }
    """
    assert Strategy.from_toml(text) == Strategy(
        name="unified", sharding=Fsep(slots_per_rank=(2, 3)), overlap=Pipelined(chunks=4)
    )


@pytest.mark.parametrize(
    ("declare", "message"),
    [
        (lambda: Strategy(name="x", splitt=EvenSplit()), "Extra inputs are not permitted"),
        (lambda: EP.replace(splitt=EvenSplit()), "Extra inputs are not permitted"),
        (lambda: EP.replace(sharding={"kind": "fsep", "slots": 2}), "Field required"),
        (lambda: EP.replace(overlap={"kind": "pipelined", "chunks": 2, "lanes": 1}), "Extra inputs are not permitted"),
        (lambda: Strategy.from_toml('name = "x"\nlagg = 2'), "Extra inputs are not permitted"),
        (lambda: MODEL.replace(top_k=0), "Input should be greater than or equal to 1"),
        (lambda: EP.replace(lag=0), "Input should be greater than or equal to 1"),
        (lambda: CLUSTER.replace(inter_node_gb_per_s=0), "Input should be greater than 0"),
        (lambda: MODEL.replace(dtype="float64"), "Input should be 'float32', 'bfloat16' or 'float16'"),
        (lambda: Ema(decay=1.0), "Input should be less than 1"),
        (lambda: Laer(candidates=()), "Tuple should have at least 1 item after validation, not 0"),
        (
            lambda: EP.replace(overlap={"kind": "mega_kernel"}),
            "Input tag 'mega_kernel' found using 'kind' does not match any of the expected tags: "
            "'sequential', 'pipelined'",
        ),
    ],
)
def test_what_a_field_refuses(declare, message):
    with pytest.raises(ValidationError) as error:
        declare()
    assert error.value.errors()[0]["msg"] == message


def test_declarations_are_frozen():
    with pytest.raises(ValidationError, match="Instance is frozen"):
        EP.name = "other"
    assert EP.name == "ep"


def test_replace_changes_what_it_names_and_checks_the_whole():
    fsep = EP.replace(name="fsep", sharding=Fsep(slots_per_rank=2), balance=Greedy())
    assert (fsep.name, fsep.sharding, fsep.balance, fsep.split) == ("fsep", Fsep(slots_per_rank=2), Greedy(), EP.split)
    assert EP.to_json() == Strategy(name="ep").to_json()
    with pytest.raises(ValidationError, match="balance=Greedy"):
        fsep.replace(sharding=Ep())
    with pytest.raises(ValidationError, match="asks for more experts"):
        MODEL.replace(num_experts=1)


@pytest.mark.parametrize(
    ("declare", "message"),
    [
        (
            lambda: MODEL.replace(top_k=9),
            "top_k=9 asks for more experts than num_experts=8; use top_k <= 8 or more experts",
        ),
        (
            lambda: SIGMOID.replace(n_group=3),
            "n_group=3 does not divide num_experts=8; groups hold equally many experts, so choose a divisor or "
            "n_group=1",
        ),
        (
            lambda: SIGMOID.replace(n_group=2, topk_group=4),
            "topk_group=4 is more than n_group=2; use topk_group <= 2",
        ),
        (
            lambda: GROUPED.replace(top_k=5),
            "top_k=5 is more than the 4 experts in topk_group=2 groups of 2; raise topk_group or lower top_k",
        ),
        (
            lambda: MODEL.replace(n_group=4),
            "n_group=4 with scoring_func='softmax' is not a published router; use scoring_func='sigmoid' or n_group=1",
        ),
        (
            lambda: SIGMOID.replace(n_group=8, topk_group=2),
            "n_group=8 leaves one expert a group, and a group is scored by its best two; use n_group <= 4",
        ),
        (
            lambda: MODEL.replace(router_bias_update_rate=0.001),
            "router_bias_update_rate=0.001 needs a correction bias, which scoring_func='softmax' has not; "
            "use scoring_func='sigmoid' or rate 0",
        ),
        (
            lambda: CLUSTER.replace(ranks_per_node=(8, 8, 4)),
            "ranks_per_node=[8, 8, 4] names 3 nodes but num_nodes=2; give one number a node, or one number for all",
        ),
        (
            lambda: CLUSTER.replace(ranks_per_node=0),
            "ranks_per_node=0 leaves a node without ranks; use at least 1",
        ),
        (
            lambda: CLUSTER.replace(ranks_per_node=(8, 0)),
            "ranks_per_node=(8, 0) leaves a node without ranks; use at least 1",
        ),
        (
            lambda: EP.replace(balance=Eplb()),
            "sharding=Ep() keeps every expert on its owner rank, but balance=Eplb() moves experts; "
            "use balance=Static(), Ep(slots_per_rank=...) or Fsep(slots_per_rank=...)",
        ),
    ],
)
def test_what_fields_refuse_together(declare, message):
    with pytest.raises(ValidationError) as error:
        declare()
    assert [each["msg"] for each in error.value.errors()] == [f"Value error, {message}"]


@pytest.mark.parametrize(
    ("slots_per_rank", "message"),
    [
        (1, "slots_per_rank=1 gives 4 slots on 4 ranks for 8 experts; use at least 2"),
        ((4, 4), "slots_per_rank names 2 ranks but the cluster has 4; give one number a rank, or one for all"),
        ((2, 2, 2, 1), "slots_per_rank=[2, 2, 2, 1] gives 7 slots for 8 experts; add at least 1"),
    ],
)
def test_slots_that_do_not_fit(slots_per_rank, message):
    for sharding in (Fsep(slots_per_rank=slots_per_rank), Ep(slots_per_rank=slots_per_rank)):
        with pytest.raises(ValueError) as error:  # noqa: PT011
            EP.replace(sharding=sharding).slots(MODEL, CLUSTER)
        assert str(error.value) == message


@pytest.mark.parametrize(
    ("sharding", "num_experts", "slots_of_ranks"),
    [
        (Ep(), 8, (2, 2, 2, 2)),
        (Ep(), 6, (2, 2, 2, 0)),
        (Ep(), 5, (2, 2, 1, 0)),
        (Ep(), 3, (1, 1, 1, 0)),
        (Ep(slots_per_rank=3), 8, (3, 3, 3, 3)),
        (Fsep(slots_per_rank=(8, 0, 0, 0)), 8, (8, 0, 0, 0)),
    ],
)
def test_slots_of_every_rank(sharding, num_experts, slots_of_ranks):
    model = MODEL.replace(num_experts=num_experts)
    assert EP.replace(sharding=sharding).slots(model, CLUSTER) == slots_of_ranks


def test_ranks_are_numbered_node_by_node():
    uneven = CLUSTER.replace(ranks_per_node=(3, 1))
    assert (uneven.num_ranks, uneven.node_sizes, uneven.node_of_rank) == (4, (3, 1), (0, 0, 0, 1))
    assert (CLUSTER.num_ranks, CLUSTER.node_sizes, CLUSTER.node_of_rank) == (4, (2, 2), (0, 0, 1, 1))


def test_an_expert_is_three_projections():
    assert MODEL.expert_parameters == 3 * 8 * 16
    assert [MODEL.replace(dtype=dtype).bytes_per_element for dtype in ("float32", "bfloat16", "float16")] == [4, 2, 2]


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
            "intra_node_gb_per_s": 1.0,
            "inter_node_gb_per_s": 1.0,
            "expert_tflops": 1.0,
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
            "lag": 2,
        },
    ),
    (Ep(slots_per_rank=2), {"slots_per_rank": None}),
    (
        Fsep(slots_per_rank=2),
        {
            "slots_per_rank": (2, 2),
            "prefetch_layers": 1,
            "delay_reshard": True,
            "reshard_after_forward": False,
            "restore": "hierarchical",
        },
    ),
    (Laer(), {"candidates": ("proportional", "even")}),
    (Greedy(), {"search_moves": 0}),
    (CpSat(), {"deterministic_time": 1.0}),
    (WindowMean(), {"steps": 4}),
    (Ema(), {"decay": 0.0}),
    (Pipelined(chunks=2), {"chunks": 3}),
]
# Names are for people; a member's kind is its type; and a reduction there is but one.
NOT_CHANGED = {(Strategy, "name"), (ClusterSpec, "name"), (Strategy, "reduction")}


def test_every_field_counts_in_the_fingerprint():
    for declared, changes in CHANGES:
        prints = {declared.fingerprint(), *(declared.replace(**{f: v}).fingerprint() for f, v in changes.items())}
        assert len(prints) == 1 + len(changes)


def test_no_field_is_missing_above():
    changed = {(type(declared), field) for declared, changes in CHANGES for field in changes}
    kinds = [kind for kind in vars(config).values() if isinstance(kind, type) and issubclass(kind, Declared)]
    everything = {(kind, field) for kind in kinds for field in kind.model_fields if field != "kind"}
    assert everything - changed == NOT_CHANGED


def test_names_do_not_count_in_the_fingerprint():
    assert EP.fingerprint() == EP.replace(name="other").fingerprint()
    assert CLUSTER.fingerprint() == CLUSTER.replace(name="other").fingerprint()
    assert len(EP.fingerprint()) == 64


def test_members_with_the_same_fields_have_their_own_fingerprints():
    members = [Static(), Eplb(), Last(), EvenSplit(), Proportional(), FlowSplit(), Sequential(), Ordered()]
    assert len({member.fingerprint() for member in members}) == len(members)


def test_a_default_written_out_has_the_same_fingerprint():
    assert Strategy(name="x", balance=Static(), lag=1).fingerprint() == Strategy(name="x").fingerprint()


def test_fingerprints_stay_what_they_are():
    """Recorded runs are found by this; if it must change, FINGERPRINT_SCHEMA counts up."""
    assert Pipelined(chunks=2).fingerprint() == ("c691f6819108dae495ac98b12dc477eade2e75bfb3aaa1d69d6cfba04892f09c")
