"""How many experts a rank holds: slots by number or by memory, late ones, and what does not fit."""

from __future__ import annotations

import pytest

from moesys.config import ClusterSpec, Ep, Fsep, ModelShape, Strategy

MODEL = ModelShape(hidden_size=8, intermediate_size=16, num_experts=8, top_k=2)
# An expert is 3 × 8 × 16 elements of 4 bytes.
EXPERT_GB = 1536 / 1e9
CLUSTER = ClusterSpec(num_nodes=2, ranks_per_node=2)
EP = Strategy(name="ep")


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


def test_late_slots_leave_the_others_for_every_expert():
    strategy = EP.replace(sharding=Fsep(slots_per_rank=3), late_slots=1)
    assert strategy.slots(MODEL, CLUSTER) == (3, 3, 3, 3)
    assert strategy.early_slots(MODEL, CLUSTER) == (2, 2, 2, 2)
    assert EP.early_slots(MODEL, CLUSTER) == EP.slots(MODEL, CLUSTER)
    uneven = strategy.replace(sharding=Fsep(slots_per_rank=(8, 0, 1, 3)))
    assert uneven.early_slots(MODEL, CLUSTER) == (7, 0, 0, 2)
    assert uneven.late_slots_R(MODEL, CLUSTER) == (1, 0, 1, 1)
    assert EP.late_slots_R(MODEL, CLUSTER) == ()
    by_memory = strategy.replace(sharding=Fsep(slot_gb_per_rank=(8 * EXPERT_GB, 0, EXPERT_GB, 1)), late_slots=2)
    with pytest.raises(ValueError, match="late_slots=2 are more than the 1 slots that a rank has"):
        by_memory.early_slots(MODEL, CLUSTER)


@pytest.mark.parametrize(
    ("slot_gb_per_rank", "slots_of_ranks"),
    [
        (2 * EXPERT_GB, (2, 2, 2, 2)),
        (3 * EXPERT_GB - 1e-9, (2, 2, 2, 2)),
        (1.0, (8, 8, 8, 8)),
        ((8 * EXPERT_GB, 0, EXPERT_GB, 1), (8, 0, 1, 8)),
    ],
)
def test_memory_is_as_many_slots_as_experts_fit(slot_gb_per_rank, slots_of_ranks):
    for sharding in (Fsep(slot_gb_per_rank=slot_gb_per_rank), Ep(slot_gb_per_rank=slot_gb_per_rank)):
        assert EP.replace(sharding=sharding).slots(MODEL, CLUSTER) == slots_of_ranks


@pytest.mark.parametrize("num_ranks", [1, 3, 7, 8])
def test_the_memory_that_an_error_asks_for_is_enough(num_ranks):
    model, cluster = MODEL.replace(num_experts=64, dtype="bfloat16"), ClusterSpec(ranks_per_node=num_ranks)
    with pytest.raises(ValueError, match=r"slot_gb_per_rank=0\.0 gives 0 slots") as error:
        EP.replace(sharding=Fsep(slot_gb_per_rank=0)).slots(model, cluster)
    gb = float(str(error.value).rpartition("use at least ")[2])
    slots = -(-64 // num_ranks)
    assert EP.replace(sharding=Fsep(slot_gb_per_rank=gb)).slots(model, cluster) == (slots,) * num_ranks
