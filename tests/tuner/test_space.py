"""Spaces: what is a point, what is one point in several words, who is whose neighbour; and what a rank must hold."""

from __future__ import annotations

import random
from dataclasses import replace
from itertools import islice

import pytest
from tuner_cases import CLUSTERS, EP, MODEL, SPACE, changed, memory_of

from moesys import EvenSplit, FlowSplit, Greedy, MegaKernel, Pipelined, Sequential, Space
from moesys.config import ClusterSpec, Ep, Fsep, Last, Strategy, WindowMean
from moesys.tuner.space import PARTS, default_space
from moesys.tuner.tuned_workload import Setting

CLUSTER = CLUSTERS["even"]
SETTING = Setting(MODEL, CLUSTER, num_layers=2)


def test_a_space_survives_toml_and_json():
    assert Space.from_json(SPACE.to_json()) == SPACE
    assert Space.from_toml(SPACE.to_toml()) == SPACE
    values = {"overlap": ("mega_kernel",), "overlap.tile_rows": (None, 128), "overlap.fused": ("none",)}
    mega = changed(SPACE, values | {"balance": (Greedy(effort=4), "static")})
    assert Space.from_toml(mega.to_toml()) == mega
    assert Space.from_json(mega.to_json()) == mega


def test_members_that_are_listed_whole_stay_as_they_are():
    space = Space(
        {
            "sharding": ("fsep", Fsep(slots_per_rank=5, restore="hierarchical")),
            "sharding.slots_per_rank": (2, 3),
            "balance": ("static", "greedy", Greedy(effort=4)),
            "balance.max_moves": (None, 7),
        }
    )
    assert [sharding.slots_per_rank for sharding in space.values("sharding")] == [2, 3, 5]
    assert space.values("balance")[1:] == [Greedy(), Greedy(max_moves=7), Greedy(effort=4)]
    start = Strategy(name="start", sharding=Fsep(slots_per_rank=3))
    near = [one.sharding for one in space.neighbours(start, SETTING, random.Random(0))]
    assert Fsep(slots_per_rank=2) in near
    assert space.values("sharding")[2] in near


def test_recomputation_leaves_room_for_more_slots():
    setting, tokens_per_rank = Setting(MODEL, CLUSTER, num_layers=16), 20_000
    plain = Strategy(name="fsep", sharding=Fsep(slots_per_rank=3))
    gb = memory_of(plain, setting, tokens_per_rank, recompute=True).gb
    assert memory_of(plain, setting, tokens_per_rank).gb > 2 * gb
    kept, recomputed = (
        default_space(replace(setting, cluster=CLUSTER.replace(memory_gb=gb), recompute=recompute), tokens_per_rank)
        for recompute in (False, True)
    )
    assert (kept.root["sharding"], kept.root["sharding.ep.slots_per_rank"]) == (("ep",), (None,))
    slots = [recomputed.root[f"sharding.{kind}.slots_per_rank"] for kind in recomputed.root["sharding"]]
    assert slots == [(None, 2, 3), (2, 3)]


def test_points_fit_and_each_comes_once():
    space = changed(SPACE, {"sharding": ("ep", "fsep"), "sharding.fsep.slots_per_rank": (1, 2, 3)})
    points = list(space.points(SETTING))
    assert len({point.fingerprint() for point in points}) == len(points) < space.num_combinations
    for point in points:
        assert Strategy.from_json(point.to_json()) == point
        assert sum(point.slots(MODEL, CLUSTER)) >= MODEL.num_experts
    # One slot on each of 4 ranks is too few for 8 experts, and Ep without slots moves none.
    assert {point.sharding.slots_per_rank for point in points} == {None, 2, 3}
    assert all(point.balance.kind == "static" for point in points if point.sharding.kind == "ep")


def test_drawn_points_are_points_of_the_space_in_an_order_by_chance():
    values = {"sharding": ("ep",), "sharding.slots_per_rank": (None, 3), "split": ("even", "proportional")}
    space = changed(SPACE, values)
    points = {point.fingerprint() for point in space.points(SETTING)}
    drawn = [point.fingerprint() for point in space.drawn(SETTING, random.Random(0))]
    assert len(set(drawn)) == len(drawn)
    assert set(drawn) == points
    again, other = (
        [point.fingerprint() for point in islice(space.drawn(SETTING, random.Random(seed)), 20)] for seed in (0, 1)
    )
    assert again == drawn[:20]
    assert other != again


def test_what_changes_nothing_is_said_in_one_way():
    wordy = Strategy(
        name="wordy",
        sharding=Fsep(slots_per_rank=2, prefetch_layers=7, restore="hierarchical", reshard="hierarchical"),
        predictor=WindowMean(),
        split=FlowSplit(),
        replan_every=4,
        lag=2,
    )
    plain = SETTING.plainest(wordy)
    assert plain.predictor == Last()
    assert (plain.replan_every, plain.lag, plain.split) == (1, 1, EvenSplit())
    assert plain.sharding == wordy.sharding.replace(prefetch_layers=1)
    one_node = Setting(MODEL, ClusterSpec(ranks_per_node=4), num_layers=2)
    assert one_node.plainest(wordy).sharding.flat
    once = wordy.replace(overlap=Pipelined(chunks=2, node_dispatch="once", combine="per_node"))
    assert one_node.plainest(once).overlap == Pipelined(chunks=2), "there is no node to cross to"
    assert SETTING.plainest(once).overlap == once.overlap
    lent = wordy.replace(sharding=Ep(slots_per_rank=3, prefetch_layers=7, lend="hierarchical"))
    assert SETTING.plainest(lent).sharding == lent.sharding.replace(prefetch_layers=1)
    assert one_node.plainest(lent).sharding == Ep(slots_per_rank=3, prefetch_layers=1)
    kept = wordy.replace(sharding=Fsep(slots_per_rank=3), balance=Greedy())
    assert SETTING.plainest(kept).fingerprint() == kept.fingerprint()


def test_neighbours_differ_in_one_field_or_are_of_another_kind():
    start = Strategy(
        name="start", sharding=Fsep(slots_per_rank=3), balance=Greedy(), split=FlowSplit(), overlap=Pipelined(chunks=2)
    )
    near = list(SPACE.neighbours(start, SETTING, random.Random(0)))
    assert len({one.fingerprint() for one in near} - {start.fingerprint()}) == len(near)
    by_part = {part: [one for one in near if getattr(one, part) != getattr(start, part)] for part in PARTS}
    fsep = [one.sharding for one in by_part["sharding"] if one.sharding.kind == "fsep"]
    changes = [{"slots_per_rank": 2}, {"slots_per_rank": 4}, {"prefetch_layers": 1}, {"delay_reshard": True}]
    assert fsep == [start.sharding.replace(**change) for change in changes]
    assert {one.sharding.kind for one in by_part["sharding"]} == {"ep", "fsep"}
    assert [one.overlap for one in by_part["overlap"]] == [Sequential(), Pipelined(chunks=4), Pipelined(chunks=8)]
    assert {one.balance.kind for one in by_part["balance"]} == {"static", "eplb"}
    for one in near:
        changed = {part for part in PARTS if one in by_part[part]}
        # A balance that stays has no use for a predictor, and experts that stay have one rank to send rows to.
        assert len(changed - {"predictor", "split", "balance"}) <= 1


def test_fields_of_mega_kernels_that_exclude_each_other_are_no_points():
    overlaps = Space(
        {"overlap": ("mega_kernel",), "overlap.fused": ("both", "none"), "overlap.combine_share": (0.0, 0.5)}
    ).values("overlap")
    assert MegaKernel(fused="none", combine_share=0.0) in overlaps
    assert all(overlap.fused == "both" for overlap in overlaps if overlap.combine_share)
    assert len(overlaps) == 3


def test_every_field_of_a_union_can_be_searched_or_has_a_reason():
    """A field that is added to a strategy must be given values, or be named here."""
    not_speed = {"rows_cap", "most_tokens", "timeout_s", "slot_gb_per_rank"}
    values = {"sharding": ("ep", "fsep"), "sharding.slots_per_rank": (2,), "overlap": ("mega_kernel", "pipelined")}
    space = Space(values | {"overlap.chunks": (2,)})
    for member in (EP.sharding, Fsep(slots_per_rank=1), MegaKernel(), Pipelined(chunks=2)):
        part = "sharding" if isinstance(member, Ep | Fsep) else "overlap"
        assert set(space.choices(part, member.kind)) == set(type(member).model_fields) - not_speed - {"kind"}
    assert set(PARTS) == set(Strategy.model_fields) - {"name", "reduction"}


def test_the_default_space_keeps_to_memory_ranks_and_layers():
    wide = default_space(SETTING, 512)
    assert set(wide.by_kind("sharding")) == {"ep", "fsep"}
    # MegaKernels do not reach the other node.
    assert set(wide.by_kind("overlap")) == {"sequential", "pipelined"}
    joined = default_space(replace(SETTING, cluster=CLUSTER.replace(ranks_per_domain=CLUSTER.num_ranks)), 512)
    assert set(joined.by_kind("overlap")) == {"sequential", "pipelined", "mega_kernel"}
    slots = wide.root["sharding.fsep.slots_per_rank"]
    assert (min(slots), max(slots)) == (2, 4)
    assert set(wide.root["sharding.restore"]) == set(wide.root["sharding.reshard"]) == {"flat", "hierarchical"}
    fits = memory_of(Strategy(name="f", sharding=Fsep(slots_per_rank=3)), SETTING, 512).gb
    tight = default_space(replace(SETTING, cluster=CLUSTER.replace(memory_gb=fits)), 512)
    assert max(tight.root["sharding.fsep.slots_per_rank"]) == 3
    alone = default_space(Setting(MODEL, ClusterSpec(), 1), 512, mega_kernels=False)
    assert set(alone.by_kind("sharding")) == {"ep"}
    assert set(alone.by_kind("overlap")) == {"sequential", "pipelined"}


def test_memory_of_a_rank_by_hand():
    P = 3 * 256 * 512
    fsep = Strategy(name="f", sharding=Fsep(slots_per_rank=3, prefetch_layers=1, delay_reshard=True))
    memory = memory_of(fsep, SETTING, tokens_per_rank=100)
    of_rows = 2 * 100 * 2 * (256 + 2 * 512) * 2
    found = memory.state_bytes, memory.slot_bytes, memory.gradient_bytes, memory.row_bytes
    assert found == (16 * 8 * (P // 4) * 2, 2 * 3 * P * 2, 2 * 3 * P * 4, of_rows)
    assert memory.gb == pytest.approx(sum(found) / 1e9)
    one_layer = memory_of(Strategy(name="f", sharding=Fsep(slots_per_rank=3)), SETTING, 100, recompute=True)
    assert (one_layer.slot_bytes, one_layer.row_bytes * 2) == (3 * P * 2, of_rows)
    fused, again = (
        memory_of(EP.replace(overlap=MegaKernel(keep_x=kept)), SETTING, tokens_per_rank=100) for kept in (True, False)
    )
    assert (fused.shared_bytes, fused.gradient_bytes) == ((2 * 100 + 100 * 2) * 256 * 2, 0)
    assert fused.row_bytes - again.row_bytes == SETTING.num_layers * 100 * 2 * 256 * 2


@pytest.mark.parametrize("part", ["balance", "split", "overlap", "predictor"])
def test_a_part_that_is_not_listed_has_the_default_of_a_strategy(part: str):
    assert Space({"sharding": ("ep",)}).values(part) == [getattr(EP, part)]
