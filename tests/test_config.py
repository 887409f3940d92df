"""Declarations: round trips, refusals, and what every error says."""

from __future__ import annotations

import json
import math
import re
import subprocess
import sys
from typing import get_args

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import TypeAdapter

import moesys as ms
from moesys.config import ModelSpec, Overlap, Predictor, Sharding
from moesys.config.member import RECORDED
from moesys.display import CONTROL
from moesys.kinds import OVERLAPS

MODEL = ms.ModelShape(hidden_size=8, intermediate_size=16, num_experts=8, top_k=2)
SIGMOID = MODEL.replace(scoring_func="sigmoid")
GROUPED = SIGMOID.replace(n_group=4, topk_group=2)
CLUSTER = ms.ClusterSpec(num_nodes=2, ranks_per_node=2)
EP = ms.Strategy(name="ep")

slots = st.integers(0, 9) | st.lists(st.integers(0, 9), min_size=1, max_size=4).map(tuple)
gigabytes = st.floats(0, 1e3) | st.lists(st.floats(0, 1e3), min_size=1, max_size=4).map(tuple)
holds = st.builds(dict, slots_per_rank=slots) | st.builds(dict, slot_gb_per_rank=gigabytes)
travelling = {"prefetch_layers": st.integers(0, 3), "delay_reshard": st.booleans()}
fseps = st.builds(
    lambda held, **fields: ms.Fsep(**held, **fields),
    holds,
    **travelling,
    reshard_after_forward=st.booleans(),
    restore=st.sampled_from(["flat", "hierarchical"]),
    reshard=st.sampled_from(["flat", "hierarchical"]),
)
eps = st.builds(lambda held, **fields: ms.Ep(**held, **fields), holds, **travelling)
within = st.sampled_from(["cluster", "node", "domain"])
balances = st.one_of(
    st.builds(ms.Static),
    st.builds(ms.Eplb),
    st.builds(ms.Eplb, num_groups=st.integers(1, 8), hierarchical=st.just(True)),
    st.builds(ms.FlexMoe, max_moves=st.integers(0, 99)),
    st.builds(ms.MoonEp)
    | st.builds(ms.Llep, alpha=st.floats(1, 2))
    | st.builds(ms.UltraEp, min_tokens=st.integers(1, 2048)),
    st.builds(ms.FasterMoe, gb_per_s=st.floats(0.1, 100)),
    st.builds(ms.Laer, candidates=st.sampled_from([("even",), ("proportional",), ("even", "proportional")])),
    st.builds(
        ms.Greedy,
        effort=st.integers(0, 9),
        min_replicas=st.integers(1, 3),
        replicas_within=within,
        max_moves=st.none() | st.integers(0, 99),
        move_tokens=st.integers(0, 99),
        deadline_ms=st.none() | st.floats(1e-3, 1e3),
    ),
    st.builds(
        ms.CpSat, deterministic_time=st.floats(1e-9, 1e9), min_replicas=st.integers(1, 3), replicas_within=within
    ),
)
single_predictors = st.one_of(
    st.builds(ms.Last),
    st.builds(ms.WindowMean, steps=st.integers(1, 99)),
    st.builds(ms.Ema, decay=st.floats(0, 1, exclude_max=True)),
)
names = st.text(min_size=1, max_size=200).filter(lambda text: not CONTROL.search(text))
freely = {
    "name": names,
    "predictor": st.one_of(
        single_predictors,
        st.builds(
            ms.Adaptive,
            candidates=st.lists(single_predictors, min_size=1, max_size=3).map(tuple),
            memory=st.integers(1, 99),
        ),
        st.builds(ms.Oracle),
    ),
    "split": st.one_of(
        st.sampled_from([ms.EvenSplit(), ms.Proportional()]),
        st.builds(ms.FlowSplit, traffic=st.sampled_from(["fast", "exact"]), max_inter_node=st.none() | st.floats(0, 1)),
    ),
    "overlap": st.just(ms.Sequential())
    | st.builds(ms.Pipelined, chunks=st.integers(1, 64))
    | st.builds(ms.MegaKernel, dispatch_share=st.floats(0, 1), tile_columns=st.none() | st.just(64)),
    "replan_every": st.integers(1, 99),
    "lag": st.integers(1, 99),
}
strategies = st.one_of(
    st.builds(ms.Strategy, sharding=fseps | eps, balance=balances, **freely),
    st.builds(ms.Strategy, sharding=st.just(ms.Ep()), balance=st.just(ms.Static()), **freely),
)
clusters = st.builds(
    lambda sizes, name, gb_per_s: ms.ClusterSpec(
        num_nodes=len(sizes),
        ranks_per_node=sizes[0] if len(set(sizes)) == 1 else sizes,
        ranks_per_domain=math.gcd(*sizes),
        name=name,
        inter_node_gb_per_s=gb_per_s,
    ),
    st.lists(st.integers(1, 16), min_size=1, max_size=5).map(tuple),
    names,
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


@pytest.mark.parametrize("union", [Sharding, ms.Balance, Predictor, ms.Split, Overlap])
def test_unions_are_told_apart_by_kind(union):
    schema = TypeAdapter(union).json_schema()
    if union in (ms.Balance, ms.Split):
        # or a class of one's own, whose kind is its import path
        kinds, own = schema["anyOf"]
        assert not any(re.fullmatch(own["properties"]["kind"]["pattern"], kind) for kind in union.kinds())
        schema |= kinds
    members = schema["discriminator"]["mapping"]
    assert schema["discriminator"]["propertyName"] == "kind"
    assert [f"#/$defs/{name}" for name in schema["$defs"]] == sorted(members.values())
    for kind, reference in members.items():
        assert schema["$defs"][reference.removeprefix("#/$defs/")]["properties"]["kind"]["const"] == kind


@pytest.mark.parametrize("declared", [ms.ModelShape, ModelSpec, ms.ClusterSpec, ms.Strategy])
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
    assert ms.Strategy.from_toml(text) == ms.Strategy(
        name="unified", sharding=ms.Fsep(slots_per_rank=(2, 3)), overlap=ms.Pipelined(chunks=4)
    )


def test_declarations_are_frozen_and_replace_changes_what_it_names():
    with pytest.raises(ValueError, match="name cannot be changed, as declarations are frozen; make a copy"):
        EP.name = "other"
    fsep = EP.replace(name="fsep", sharding=ms.Fsep(slots_per_rank=2), balance=ms.Greedy())
    assert (fsep.name, fsep.sharding, fsep.balance, fsep.split) == (
        "fsep",
        ms.Fsep(slots_per_rank=2),
        ms.Greedy(),
        EP.split,
    )
    assert EP.to_json() == ms.Strategy(name="ep").to_json()


@pytest.mark.parametrize(
    ("ranks_per_node", "ranks_per_domain", "domain_sizes"),
    [
        ((8, 4), None, (8, 4)),
        ((8, 4), 4, (4, 4, 4)),
        ((8, 4), 12, (12,)),
        ((8, 4), (8, 2, 2), (8, 2, 2)),
        ((2, 2, 4), 4, (4, 4)),
        ((2, 2, 3), (4, 3), (4, 3)),
        ((1,), 1, (1,)),
    ],
)
def test_domains_are_parts_of_nodes_or_whole_nodes(ranks_per_node, ranks_per_domain, domain_sizes):
    cluster = ms.ClusterSpec(
        num_nodes=len(ranks_per_node), ranks_per_node=ranks_per_node, ranks_per_domain=ranks_per_domain
    )
    assert cluster.domain_sizes == domain_sizes
    assert [cluster.domain_of_rank.count(domain) for domain in range(len(domain_sizes))] == list(domain_sizes)
    assert list(cluster.domain_of_rank) == sorted(cluster.domain_of_rank)


def test_ranks_are_numbered_node_by_node_and_an_expert_is_three_projections():
    for cluster, expected in ((CLUSTER.replace(ranks_per_node=(3, 1)), (0, 0, 0, 1)), (CLUSTER, (0, 0, 1, 1))):
        assert (cluster.num_ranks, cluster.node_of_rank) == (4, expected)
        assert cluster.node_sizes == (expected.count(0), expected.count(1))
    assert MODEL.expert_parameters == 3 * 8 * 16
    assert [MODEL.replace(dtype=dtype).bytes_per_element for dtype in ("float32", "bfloat16", "float16")] == [4, 2, 2]


def test_the_table_of_kinds_has_every_member():
    """The public names, the command line and the pages follow from it."""
    overlaps = [(member.model_fields["kind"].default, member.__name__) for member in get_args(get_args(Overlap)[0])]
    assert overlaps == [(kind, name) for kind, (name, _) in OVERLAPS.items()]
    for union in (ms.Balance, ms.Split):
        found = [(member.model_fields["kind"].default, member.__name__) for member in union.kinds().values()]
        assert found == [(kind, name) for kind, (name, _) in union.table.items()]


# Persian has a character that joins nothing, Japanese a wide space.
@pytest.mark.parametrize("name", ["größer: 日本 (2×)", "می\u200cخواهم", "全角\u3000空白", "a\u00a0b"])
def test_a_name_may_be_of_any_language(name):
    assert ms.Strategy(name=name).name == ms.ClusterSpec(name=name).name == name


def test_names_and_seeds_that_were_recorded_before_they_were_checked_are_read():
    assert ms.Strategy.model_validate({"name": "a\tb"}, context=RECORDED).name == "a\tb"
    fields = {"name": "x", "model": MODEL, "cluster": CLUSTER, "strategies": (EP,), "workload": ms.Generated()}
    assert ms.Experiment.model_validate(fields | {"seeds": (2**40,)}, context=RECORDED).seeds == (2**40,)


def test_a_cluster_that_was_asked_for_its_nodes_is_the_same_declaration():
    asked, fresh = ms.ClusterSpec(num_nodes=2, ranks_per_node=2), ms.ClusterSpec(num_nodes=2, ranks_per_node=2)
    assert asked.node_of_rank == (0, 0, 1, 1)
    assert (asked, hash(asked), asked.to_json()) == (fresh, hash(fresh), fresh.to_json())
    assert asked.replace(num_nodes=3).node_of_rank == (0, 0, 1, 1, 2, 2)


@pytest.mark.parametrize(
    ("name", "hint"),
    [
        ("LoadMatrix", "it is ms.planning.LoadMatrix"),
        ("ModelSpec", "it is ms.models.ModelSpec"),
        ("vllm_trace", "it is ms.traces.vllm_trace"),
        ("greedyy", "its public names are in moesys.__all__; did you mean 'Greedy'?"),
    ],
)
def test_a_name_of_another_public_module_is_named_there(name: str, hint: str) -> None:
    with pytest.raises(AttributeError, match=re.escape(f"module 'moesys' has no attribute {name!r}; {hint}") + "$"):
        getattr(ms, name)


def test_only_one_name_is_suggested_and_a_call_is_written_without_the_simulator_too() -> None:
    code = (
        "import sys\nsys.modules['moesys.simulator'] = None\nimport moesys as ms\nfrom moesys.config import ModelSpec\n"
        "try: ms.Strategy(name='one', sharding=ModelSpec)\nexcept ValueError as error: print(error)\n"
        "try: ms.ModelSpec\nexcept AttributeError as error: print(error)\nms.Strateg"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert "ModelSpec is a class; write moesys.config.model_spec.ModelSpec(" in done.stdout
    assert "module 'moesys' has no attribute 'ModelSpec'; its public names are in moesys.__all__" in done.stdout
    assert done.stderr.splitlines()[-1].lower().count("did you mean") == 1
