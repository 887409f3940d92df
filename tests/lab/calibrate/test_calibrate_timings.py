"""A calibration times what it says: passes of experts, the work of a block, MegaKernels, flags, and messages."""

from __future__ import annotations

from types import SimpleNamespace
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st

from moesys.config import DenseMlp, Gqa, LayerSpec, ModelSpec
from moesys.kernels.symmetric.heap import Heap, Region
from moesys.kernels.symmetric.signals import PeerTimeoutError
from moesys.lab.calibrate import timings
from moesys.lab.calibrate.gpu_timings import fused_tiles, ping_pong
from moesys.lab.calibrate.timings import AttentionCase, Effort, ElementwiseCase, ExpertCase, Pool
from moesys.lab.ranks.pool import LocalRanks
from moesys.simulator.model.model_cost import count_model
from moesys.torch_private import MOST_CYCLES_PER_S

QUICK = Effort(repeats=2, window_s=0.001)
CPU = torch.device("cpu")


# --- experts and a block ---


def test_each_pass_computes_its_gradients_alone():
    case = ExpertCase((4,), 16, 16)
    pool = Pool([case], "float32", CPU)
    calls = case.calls(pool)
    pool.gradients_N.fill_(torch.nan)
    calls["forward"]()
    calls["input_gradients"]()
    assert pool.gradients_N.isnan().all()
    calls["backward"]()
    assert pool.gradients_N.isfinite().all()


def test_a_mega_kernel_and_its_kernels_apart_are_timed_on_one_rank():
    """In Triton's interpreter, where times mean nothing."""
    calls = []

    def seconds_of(work, num_calls, device, held_s=0.0):
        calls.append(work)
        work()
        return 0.5 * num_calls

    with mock.patch.object(timings, "seconds_of", seconds_of):
        found = fused_tiles((6, 16, 16, 2, 1), "float32", QUICK, "cpu")
    assert found == {"apart": [0.5] * 2, "fused": [0.5] * 2}
    assert len(set(calls)) == 2


@given(tokens=st.integers(1, 64), heads=st.integers(1, 6), width=st.sampled_from([2, 8, 64]))
def test_a_block_has_the_work_that_whole_models_count(tokens, heads, width):
    """A dense layer as wide as H, with as many heads of keys as of queries."""
    H = heads * width
    attention = Gqa(num_heads=heads, num_kv_heads=heads, head_dim=width)
    layer = LayerSpec(attention=attention, mlp=DenseMlp(intermediate_size=H))
    model = ModelSpec(hidden_size=H, vocab_size=8, layers=(layer,), dtype="float32")
    (counted,) = count_model(model, tokens).layers
    case = ElementwiseCase(tokens, H)
    assert case.num_bytes("forward", 4) == counted.forward_bytes
    assert case.num_bytes("backward", 4) == counted.backward_bytes
    assert case.num_kernels == sum(operation.forward_bytes > 0 for operation in counted.operations)
    scores, of_scores = AttentionCase(heads, width, tokens), counted.of("attention_scores")
    assert (scores.flops("forward"), scores.flops("backward")) == (of_scores.flops, of_scores.backward_flops)


@pytest.mark.parametrize("call_s", [0.005, 0.25])
def test_a_gpu_is_held_while_the_host_launches(monkeypatch, call_s):
    """Its clock starts behind the hold and ends behind the last call; the host's own time does not count."""
    order: list[str] = []

    class Event(SimpleNamespace):
        record = staticmethod(lambda: order.append("record"))
        synchronize = staticmethod(lambda: order.append("wait"))
        query = staticmethod(lambda: False)
        elapsed_time = staticmethod(lambda _: 2e3 * call_s)

    monkeypatch.setattr(torch.cuda, "Event", Event)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    monkeypatch.setattr(torch.cuda, "_sleep", lambda cycles: order.append(f"hold {cycles:.0f}"))
    window = Effort(repeats=1, window_s=2 * call_s)
    assert timings.timed([lambda: order.append("call")], window, torch.device("cuda")) == [[call_s]]
    warm_up = ["record", "call", "call", "record", "wait"]
    cycles = min(1.2 * 2 * call_s, 0.05) * MOST_CYCLES_PER_S
    assert order == [*warm_up, *warm_up, f"hold {cycles:.0f}", "call", *warm_up]


# --- flags ---


def plays(pair: tuple[int, int]) -> int:
    """Returns the last epoch of this rank's own flag."""
    heap = flag_heap()
    ping_pong(heap, pair, 1, 3)
    ping_pong(heap, pair, 4, 2)
    dist.barrier()
    return int(heap.own("flag")[0])


def flag_heap() -> Heap:
    return Heap.of_group({"flag": Region((1,), torch.int32)}, dist.group.WORLD, CPU)


@pytest.mark.parametrize("pair", [(0, 1), (2, 0)])
def test_two_ranks_answer_each_other_and_others_do_not_wait(ranks: LocalRanks, pair: tuple[int, int]) -> None:
    assert ranks.run(plays, pair, num_ranks=3) == [5 if rank in pair else 0 for rank in range(3)]


def gives_up(pair: tuple[int, int]) -> str:
    heap = flag_heap()
    heap.world[2] = 10
    said = ""
    if dist.get_rank() == pair[0]:
        with pytest.raises(PeerTimeoutError) as raised:
            ping_pong(heap, pair, 1, 1)
        said = str(raised.value)
    dist.barrier()
    return said


def test_a_rank_that_plays_alone_gives_up(ranks: LocalRanks) -> None:
    said, _ = ranks.run(gives_up, (0, 1), num_ranks=2)
    assert "for rank 1 in publish: flag 0 is at epoch 0, not 1" in said


# --- messages ---


NODE_R = torch.tensor([0, 0, 1, 1])
NEAR_RR = ((NODE_R[:, None] == NODE_R) & ~torch.eye(4, dtype=torch.bool)).numpy()


def sends_where_it_should(peers_RR) -> dict[int, int]:
    """Returns the bytes that this rank's all-to-alls send to each peer."""
    sent = {}
    begin = timings.exchange

    def spy(received, out, out_counts, in_counts, group):
        for peer, num_bytes in enumerate(in_counts):
            sent[peer] = max(sent.get(peer, 0), num_bytes)
        return begin(received, out, out_counts, in_counts, group)

    with mock.patch.object(timings, "exchange", spy):
        timings.all_to_alls((8, 16), peers_RR, 1.0, QUICK, "cpu")
    return sent


def test_an_all_to_all_sends_to_its_peers_alone(ranks: LocalRanks):
    for sent, peers_R in zip(ranks.run(sends_where_it_should, NEAR_RR), NEAR_RR, strict=True):
        assert sent == {peer: 16 if peers_R[peer] else 0 for peer in range(4)}


def sizes_in_time(longest_s: float) -> list[int]:
    """Returns the sizes measured on a link that takes 10 us per byte, or 20 us on rank 1."""
    pace_s = 1e-5 * (1 + dist.get_rank())

    def seconds_of(work, calls, device, held_s=0.0):
        return calls * work() * pace_s

    def exchange(size, peers_R, device):
        return lambda: SimpleNamespace(wait=lambda: size)

    with mock.patch.multiple(timings, seconds_of=seconds_of, _exchange=exchange):
        sizes = (1, 10, 100, 1000, 10_000, 100_000)
        return list(timings.all_to_alls(sizes, NEAR_RR, longest_s, QUICK, "cpu"))


@pytest.mark.parametrize(("longest_s", "count"), [(1e-9, 3), (0.019, 3), (0.021, 4), (0.21, 5), (9.0, 6)])
def test_messages_that_would_take_too_long_are_left_out_on_all_ranks(ranks: LocalRanks, longest_s: float, count: int):
    sizes = ranks.run(sizes_in_time, longest_s, num_ranks=2)
    assert sizes == [[1, 10, 100, 1000, 10_000, 100_000][:count]] * 2
