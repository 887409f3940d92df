"""A whole model's step: closed forms where they exist, conservation, and what may never make it slower."""

from __future__ import annotations

import re
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

import moesys as ms
from moesys.config.model_run import ModelRun, Parallelism
from moesys.config.workload import Generated
from moesys.simulator.model.model_cost import count_model
from moesys.simulator.model.model_step import ModelStep
from moesys.simulator.model.simulate_model import simulate_model, split_evenly

SMALL = ms.models.ModelSpec.from_config("qwen3-moe-small")
DENSE_FIRST = ms.models.ModelSpec.from_config("deepseek-v3-small")
# A cluster on which only products take time.
FREE = ms.ClusterSpec(
    num_nodes=2, ranks_per_node=4, intra_node_gb_per_s=1e9, inter_node_gb_per_s=1e9, expert_tflops=1.0
)
SLOW = ms.presets.h100(2).replace(ranks_per_node=4, name="")
EIGHT = ModelRun(model=SMALL, cluster=SLOW, seq_len=1024, global_batch=16)


def step_of(run: ModelRun, **changes: Any) -> ModelStep:
    return simulate_model(run.replace(**changes))


@pytest.mark.parametrize("model", [SMALL, DENSE_FIRST])
@pytest.mark.parametrize("recompute", ["none", "selective", "full"])
def test_where_only_products_count_the_step_is_their_flops(model: ms.models.ModelSpec, recompute: str) -> None:
    run = ModelRun(
        model=model, cluster=FREE, seq_len=512, global_batch=16, parallelism=Parallelism(recompute=recompute)
    )
    cost, sequences = count_model(model, 512), run.num_micro_batches * run.micro_batch
    again = sum(layer.again(recompute).flops for layer in cost.layers)
    flops = cost.flops + cost.backward_flops + again
    found = simulate_model(run)
    assert found.seconds == pytest.approx(flops * sequences / 1e12, rel=1e-6)
    assert found.mfu is None


@given(backward=st.floats(0.1, 10), attention=st.floats(0.1, 10), attention_backward=st.floats(0.1, 10))
def test_each_kind_of_product_has_its_rate(backward: float, attention: float, attention_backward: float) -> None:
    """Where only products count, a step is each kind's flops by its rate; what is not declared changes nothing."""
    own = FREE.replace(
        backward_tflops=backward, attention_tflops=attention, attention_backward_tflops=attention_backward
    )
    run = ModelRun(model=SMALL, cluster=own, seq_len=512, global_batch=16)
    cost = count_model(SMALL, 512)
    scores = [each for layer in cost.layers for each in layer.of("attention_scores").operations]
    forward, gradients = sum(of.flops for of in scores), sum(of.input_gradient_flops for of in scores)
    tera_flops = (cost.flops - forward) + (cost.backward_flops - gradients) / backward
    tera_flops += forward / attention + gradients / attention_backward
    sequences = run.num_micro_batches * run.micro_batch
    assert simulate_model(run).seconds == pytest.approx(tera_flops * sequences / 1e12, rel=1e-6)


def test_what_is_no_product_has_its_rate_there_and_back() -> None:
    """Where products take next to nothing, a step is bytes by their rates; what is not declared is the memory's."""
    quick = FREE.replace(expert_tflops=1e12, memory_gb_per_s=1.0)
    run = ModelRun(model=SMALL, cluster=quick, seq_len=512, global_batch=8)
    cost = count_model(SMALL, 512)
    routed = ("dispatch", "experts", "combine")
    rest = [cost.embedding, cost.head] + [
        layer.of(*(part for part in layer.parts if part not in routed)) for layer in cost.layers
    ]
    forward, backward = (sum(getattr(of, f"{way}_bytes") for of in rest) / 1e9 for way in ("forward", "backward"))

    def extra(**rates: float) -> float:
        """Seconds more than at the memory's rate."""
        return simulate_model(run.replace(cluster=quick.replace(**rates))).seconds - simulate_model(run).seconds

    assert extra(elementwise_gb_per_s=0.5) == pytest.approx(forward + backward, rel=1e-6)
    assert extra(elementwise_gb_per_s=0.5, elementwise_backward_gb_per_s=1.0) == pytest.approx(forward, rel=1e-6)
    assert extra(elementwise_backward_gb_per_s=0.25) == pytest.approx(3 * backward, rel=1e-6)
    optimizer = simulate_model(run).shares["optimizer"]
    assert extra(optimizer_gb_per_s=0.5) == pytest.approx(optimizer, rel=1e-6)


def test_products_in_float8_have_one_rate_both_ways() -> None:
    fast = FREE.replace(fp8_tflops=2.0)
    run = ModelRun(model=SMALL, cluster=fast, seq_len=512, global_batch=16, fp8=True)
    narrow = simulate_model(run)
    # The router alone is not in float8.
    slower = simulate_model(run.replace(cluster=fast.replace(backward_tflops=0.9)))
    assert 1 < slower.seconds / narrow.seconds < 1.05


@pytest.mark.parametrize("tensor", [1, 2, 4])
@pytest.mark.parametrize("context", [1, 2])
def test_groups_share_the_products(tensor: int, context: int) -> None:
    """Tokens of a step are the same, so products are: data-parallel ranks have as many sequences more."""
    parallel = Parallelism(tp=tensor, cp=context)
    run = ModelRun(model=SMALL, cluster=FREE, seq_len=512, global_batch=16, parallelism=parallel)
    assert run.groups.data * tensor * context == 8
    # Of more ranks than heads of keys each has one.
    own_keys = SMALL.replace(
        layers=tuple(
            layer.replace(attention=layer.attention.replace(num_kv_heads=max(2, tensor))) for layer in SMALL.layers
        )
    )
    alone = run.replace(model=own_keys, parallelism=Parallelism())
    assert simulate_model(run).seconds == pytest.approx(simulate_model(alone).seconds, rel=1e-6)


def test_a_pipeline_of_equal_parts_has_the_bubble_of_its_schedule() -> None:
    model = SMALL.replace(layers=SMALL.layers[:1] * 8, vocab_size=1)
    run = ModelRun(model=model, cluster=FREE, seq_len=512, global_batch=16, parallelism=Parallelism(pp=4))
    whole = run.replace(parallelism=Parallelism())
    assert run.num_micro_batches == 8
    # The same work on a quarter of the ranks each, and 3 of 11 turns empty.
    assert simulate_model(run).seconds == pytest.approx(simulate_model(whole).seconds * 11 / 8, rel=1e-3)
    interleaved = run.replace(parallelism=Parallelism(pp=4, vp=2))
    assert simulate_model(interleaved).seconds == pytest.approx(simulate_model(whole).seconds * 9.5 / 8, rel=1e-3)


def test_shares_add_up() -> None:
    for parallel in (Parallelism(), Parallelism(pp=2), Parallelism(ep=4, dense="full", recompute="full")):
        run = EIGHT.replace(parallelism=parallel)
        step = simulate_model(run, Generated(skew=1.0, warmup=1), draws=2)
        for draw in step.draws:
            assert sum(draw.shares.values()) == pytest.approx(draw.seconds)
            assert min(draw.shares.values()) > -1e-9
        low, high = step.interval
        assert low <= high
        assert step.seconds >= low


def test_micro_batches_side_by_side_hide_what_each_waits_for() -> None:
    """For a layer more that is held. All that is computed remains."""
    cluster = SLOW.replace(intra_node_gb_per_s=40.0, inter_node_us=0.0)
    for parallel in (Parallelism(ep=4), Parallelism(pp=2, vp=2, ep=4)):
        model = SMALL.replace(layers=SMALL.layers[:1] * 4)
        run = EIGHT.replace(cluster=cluster, model=model, global_batch=32, parallelism=parallel)
        plain = simulate_model(run)
        found = simulate_model(run.replace(parallelism=parallel.replace(overlap_micro_batches=True)))
        assert found.seconds < 0.95 * plain.seconds
        layer = count_model(model, 1024).layers[0].saved_bytes()
        assert found.peak.activations == plain.peak.activations + layer
        for name in ("experts", "attention and dense layers", "permute"):
            assert found.shares[name] == pytest.approx(plain.shares[name])
        assert min(found.shares.values()) > -1e-9
        assert found.shares["token all-to-all"] < plain.shares["token all-to-all"]
        assert sum(found.shares.values()) == pytest.approx(found.seconds)


def test_a_slower_network_and_skewed_routing_are_slower() -> None:
    seconds = step_of(EIGHT).seconds
    assert step_of(EIGHT, cluster=SLOW.replace(inter_node_gb_per_s=10.0)).seconds > seconds
    # Groups inside nodes send nothing between them but gradients.
    assert step_of(EIGHT, parallelism=Parallelism(ep=4)).seconds < seconds
    skewed = simulate_model(EIGHT, Generated(skew=1.5, warmup=1), draws=1)
    assert skewed.seconds > seconds
    assert skewed.draws[0].max_over_mean > 1.2


def test_memory_is_what_shapes_say() -> None:
    """Of one stage: 2 + 4 bytes of every parameter that a rank has, 12 of those whose states it keeps."""
    cost = count_model(SMALL, 1024)
    experts = sum(layer.of("experts").parameters for layer in cost.layers)
    dense = cost.parameters - experts
    step = step_of(EIGHT, parallelism=Parallelism(ep=4, dense="replicated"))
    (memory,) = step.memory
    owned = dense + experts / 4
    assert memory.weights == 2 * dense
    assert memory.slots == 2 * experts / 4
    assert memory.gradients == 4 * owned
    assert memory.optimizer == 12 * owned
    assert memory.activations == pytest.approx(sum(layer.saved_bytes() for layer in cost.layers))
    assert memory.logits == cost.head.saved_bytes()
    sharded = step_of(EIGHT, parallelism=Parallelism(ep=4, dense="optimizer")).memory[0]
    assert sharded.optimizer == 12 * (dense / 8 + experts / 4 / 2)
    assert sharded.gradients == memory.gradients
    full = step_of(EIGHT, parallelism=Parallelism(ep=4, dense="full")).memory[0]
    assert full.gradients == 4 * (dense / 8 + experts / 4)
    assert full.weights < sharded.weights
    halved = step_of(EIGHT, parallelism=Parallelism(ep=4, tp=2, dense="replicated")).memory[0]
    assert halved.weights == 2 * dense / 2
    assert halved.activations == memory.activations / 2
    again = step_of(EIGHT, parallelism=Parallelism(ep=4, recompute="full", dense="replicated")).memory[0]
    assert again.activations < memory.activations


def test_heads_of_keys_are_divided_or_every_rank_has_one() -> None:
    """SMALL has 4 heads, of which 2 share one of keys: of two ranks each has one, and so has each of four."""
    attention = SMALL.layers[0].attention
    assert (attention.num_heads, attention.num_kv_heads) == (4, 2)
    two, four = (
        step_of(EIGHT, parallelism=Parallelism(tp=size, dense="replicated")).memory[0].weights for size in (2, 4)
    )
    of_keys = 2 * 2 * SMALL.hidden_size * attention.head_dim * SMALL.num_layers
    # All else is halved once more.
    assert four - of_keys == (two - of_keys) / 2


def test_early_stages_hold_more_micro_batches() -> None:
    model = SMALL.replace(layers=SMALL.layers[:1] * 8)
    memory = step_of(EIGHT, model=model, parallelism=Parallelism(pp=4)).memory
    held = [stage.activations for stage in memory]
    assert held == [held[-1] * count for count in (4, 3, 2, 1)]


def test_rows_in_float8_go_to_experts_and_come_home_wide() -> None:
    """Where only links take time, and rows alone use them: half of the rows' way is 132 of 256 bytes."""
    links = ms.ClusterSpec(num_nodes=1, ranks_per_node=4, intra_node_gb_per_s=1.0, expert_tflops=1e12, fp8_tflops=1e12)
    run = EIGHT.replace(cluster=links, fp8=True)
    wide, narrow = (simulate_model(run.replace(fp8_rows=narrow)) for narrow in (False, True))
    name = "token all-to-all"
    assert narrow.shares[name] == pytest.approx(wide.shares[name] * (132 / 256 + 1) / 2, rel=1e-3)
    # In backward of a whole layer that runs again they go twice.
    again = run.replace(parallelism=Parallelism(recompute="full"))
    wide, narrow = (simulate_model(again.replace(fp8_rows=narrow)) for narrow in (False, True))
    assert narrow.shares[name] == pytest.approx(wide.shares[name] * (132 / 256 + 1) / 2, rel=1e-3)


def test_narrowing_takes_the_memorys_time() -> None:
    """All operands and gradients of float8 products, and nothing else."""
    memory = FREE.replace(fp8_tflops=1.0, memory_gb_per_s=100.0)
    run = EIGHT.replace(cluster=memory)
    wide, narrow = simulate_model(run), simulate_model(run.replace(fp8=True))
    cost = count_model(SMALL, 1024, fp8=True)
    products = [each for layer in cost.layers for each in layer.operations if each.flops]
    num_bytes = sum(each.forward_bytes + each.backward_bytes for each in products)
    assert num_bytes > 0
    assert narrow.seconds - wide.seconds == pytest.approx(2 * num_bytes / 1e11, rel=1e-2)


def test_out_of_memory_is_a_verdict() -> None:
    step = step_of(EIGHT)
    assert step.verdict == ""
    tight = step_of(EIGHT, cluster=SLOW.replace(memory_gb=step.peak.gb / 2))
    assert re.match(r"out of memory: a rank of stage 0 holds [\d.]+ GB, and has", tight.verdict)


def test_what_would_not_run_is_a_verdict() -> None:
    mega = EIGHT.strategy.replace(overlap=ms.MegaKernel())
    assert "reaches the ranks of one domain" in step_of(EIGHT, strategy=mega).verdict
    inside = EIGHT.replace(strategy=mega, parallelism=Parallelism(ep=4))
    assert simulate_model(inside).verdict == ""
    assert "rows_cap=2" in simulate_model(inside, Generated(skew=3.0, warmup=1), draws=1).verdict


def test_parts_are_as_even_as_they_can_be() -> None:
    assert split_evenly([1, 1, 1, 1], 2) == [range(0, 2), range(2, 4)]
    assert split_evenly([1, 1, 1, 3], 2) == [range(0, 3), range(3, 4)]
    assert split_evenly([5, 1, 1, 1], 3) == [range(0, 1), range(1, 3), range(3, 4)]
    # The costliest part is the last layer's; the others are even all the same.
    assert [len(part) for part in split_evenly([4.0] * 93 + [18.5], 24)] == [5] + [4] * 22 + [1]


def test_selective_is_not_what_blocks_with_a_shared_expert_do() -> None:
    again = Parallelism(recompute="selective")
    assert "run all of a layer again" in step_of(EIGHT, model=DENSE_FIRST, parallelism=again).remark
    assert step_of(EIGHT, model=DENSE_FIRST).remark == ""
    assert step_of(EIGHT, parallelism=again).remark == ""


def test_gradients_in_bfloat16_take_half_the_room_and_half_the_way() -> None:
    # Rows stay in their node, gradients do not.
    parallel = Parallelism(ep=4, dense="replicated")
    run = EIGHT.replace(cluster=SLOW.replace(inter_node_gb_per_s=0.01), parallelism=parallel)
    whole, half = simulate_model(run), simulate_model(run.replace(gradient_dtype="bfloat16"))
    assert half.peak.gradients == whole.peak.gradients / 2
    name = "gradients and parameters"
    # Backward hides as much of either.
    assert 0 < half.shares[name] < whole.shares[name] / 2


def test_a_slow_host_is_what_a_pass_takes_and_a_fast_one_hides() -> None:
    one = EIGHT.replace(global_batch=8)
    alone = simulate_model(one)
    # Started operations of a step, as a host that is the slowest of all has it.
    started = simulate_model(one.replace(host_us=1e6)).draws[0].parts[0][0].seconds
    assert started.forward % 1 == pytest.approx(0.0, abs=1e-6)
    assert started.backward > started.forward > SMALL.num_layers
    assert simulate_model(one.replace(host_us=1e-3)).seconds == pytest.approx(alone.seconds, rel=1e-9)
    assert simulate_model(one.replace(host_us=1e6)).shares["host"] > 0.9 * (started.forward + started.backward)


@pytest.mark.parametrize("layers", [1, 3])
def test_a_pair_of_micro_batches_on_one_rank_waits_for_nothing(layers: int) -> None:
    alone = ms.ClusterSpec(ranks_per_node=1, expert_tflops=0.37, memory_gb_per_s=11.3, launch_us=3.3)
    model = SMALL.replace(layers=(SMALL.layers[0],) * layers)
    for sequences in (3, 5, 7, 9):
        run = ModelRun(model=model, cluster=alone, seq_len=64, global_batch=sequences)
        paired = step_of(run, parallelism=Parallelism(overlap_micro_batches=True))
        assert paired.seconds == pytest.approx(simulate_model(run).seconds)


@given(copy_share=st.floats(0, 0.95), tflops=st.floats(0.02, 1), seed=st.integers(0, 3))
def test_a_pair_is_not_slower_than_one_after_another_where_messages_slow_products(
    copy_share: float, tflops: float, seed: int
) -> None:
    overlap = (ms.Sequential(), ms.Pipelined(chunks=2), ms.Pipelined(chunks=4), ms.Pipelined(chunks=8))[seed]
    near = ms.ClusterSpec(ranks_per_node=2, expert_tflops=tflops, intra_node_gb_per_s=0.05, copy_share=copy_share)
    strategy = ms.Strategy(name="any", overlap=overlap)
    run = ModelRun(model=SMALL, cluster=near, seq_len=256, global_batch=12, strategy=strategy)
    paired = step_of(run, parallelism=Parallelism(overlap_micro_batches=True))
    assert paired.seconds <= simulate_model(run).seconds * (1 + 1e-9)


@given(optimizer=st.floats(0.01, 10), tied=st.booleans(), seq_len=st.sampled_from([64, 2048]))
def test_no_share_is_below_nothing_and_ends_that_share_embeddings_meet(
    optimizer: float, tied: bool, seq_len: int
) -> None:
    pair = ms.ClusterSpec(num_nodes=2, ranks_per_node=1, expert_tflops=0.1, optimizer_gb_per_s=optimizer)
    run = ModelRun(
        model=SMALL.replace(tied_embeddings=tied),
        cluster=pair,
        seq_len=seq_len,
        global_batch=4,
        parallelism=Parallelism(pp=2, dense="replicated"),
    )
    found = simulate_model(run)
    assert min(found.shares.values()) >= -1e-9 * found.seconds
    assert sum(found.shares.values()) == pytest.approx(found.seconds)
    if tied:
        slower_end_s = max(spans[-1][2] for spans in found.draws[0].pipeline.spans)
        assert found.seconds >= slower_end_s + found.shares["tied embeddings"]
