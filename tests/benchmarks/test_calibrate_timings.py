"""What a calibration times is what it says: passes of experts, a block's work, messages, steps; and who else works."""

from __future__ import annotations

import itertools
from functools import partial
from types import SimpleNamespace
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st

from benchmarks.calibrate import other_work, windows
from benchmarks.calibrate import rank_timings as on_rank
from benchmarks.calibrate.block_timings import AttentionCase, ElementwiseCase
from benchmarks.calibrate.expert_passes import ExpertCase, ExpertPasses, numbers_of
from benchmarks.calibrate.fused_tiles import FusedTiles, fused_tiles
from benchmarks.calibrate.grids import LayerCase, ModelCase
from benchmarks.calibrate.model_check import check_models
from benchmarks.calibrate.other_work import OtherWork, ProcessorSeconds
from benchmarks.calibrate.step_check import STRATEGIES, check_steps
from benchmarks.calibrate.windows import Effort
from benchmarks.kernels.drawn_layer import Size
from moesys.config import ClusterSpec, DenseMlp, Gqa, LayerSpec, ModelShape, ModelSpec
from moesys.lab.ranks.pool import LocalRanks
from moesys.simulator.model.model_cost import count_model

QUICK = Effort(repeats=2, window_s=0.001)
MODEL = ModelCase(64, 32, 1, 2, 8, 2)
SLOW = ClusterSpec(memory_gb_per_s=20.0, launch_us=3.0, intra_node_gb_per_s=0.1)


# --- experts and a block ---


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_passes_are_those_of_the_experts(dtype):
    """Each layer's weights in turn, each expert's rows through its own; gradients are autograd's."""
    case = ExpertCase((5, 0, 3), 16, 24)
    numbers = numbers_of([case], dtype, torch.device("cpu"))
    passes = ExpertPasses(case, dtype, numbers)
    x_MH, dy_MH = passes._x.rows, passes._dy.rows
    first, second = itertools.islice(passes._layers, 2)
    assert not torch.equal(first.gate_up_SUH, second.gate_up_SUH)
    passes._layers = itertools.repeat(second)
    passes._h_PU = passes.forward()
    passes.call("backward")()
    gate_up, down = (of.float().requires_grad_() for of in (second.gate_up_SUH.clone(), second.down_SHI.clone()))
    rows = [torch.arange(8)[:5], torch.arange(0), torch.arange(5, 8)]
    loss = torch.zeros(())
    for slot, of in enumerate(rows):
        gate, up = (x_MH[of].float() @ gate_up[slot].t()).chunk(2, dim=1)
        y = (torch.nn.functional.silu(gate) * up) @ down[slot].t()
        loss = loss + (y * passes._weight_M[of][:, None] * dy_MH[of].float()).sum()
    loss.backward()
    tolerance = {"float32": 1e-5, "bfloat16": 0.03}[dtype]
    for found, expected in zip(passes._gradients[:2], (gate_up.grad, down.grad), strict=True):
        assert (found - expected).norm() <= tolerance * expected.norm()


def test_each_pass_computes_its_gradients_alone():
    case = ExpertCase((4,), 16, 16)
    passes = ExpertPasses(case, "float32", numbers_of([case], "float32", torch.device("cpu")))
    for matrices in passes._gradients[:2]:
        matrices.fill_(torch.nan)
    passes.call("forward")()
    passes.call("input_gradients")()
    assert passes._gradients.gate_up.isnan().all()
    passes.call("backward")()
    assert passes._gradients.gate_up.isfinite().all()
    assert passes._gradients.down.isfinite().all()


def test_a_mega_kernel_and_its_kernels_apart_are_timed_on_one_rank():
    """In Triton's interpreter, where times mean nothing."""
    calls = []

    def seconds_of(work, num_calls, device):
        calls.append(work)
        work()
        return 0.5 * num_calls

    with mock.patch.object(windows, "seconds_of", seconds_of):
        found = fused_tiles(Size("tiny", 6, 16, 16, 2, 1), "float32", QUICK, "cpu")
    assert found == FusedTiles([0.5] * 2, [0.5] * 2)
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
    assert (case.forward_bytes(4), case.backward_bytes(4)) == (counted.forward_bytes, counted.backward_bytes)
    assert case.num_kernels == sum(operation.forward_bytes > 0 for operation in counted.operations)
    scores = AttentionCase(heads, width, tokens)
    of_scores = counted.of("attention_scores")
    assert (scores.flops, scores.backward_flops) == (of_scores.flops, of_scores.input_gradient_flops)


# --- messages ---


def sends_where_it_should(between: str) -> dict[int, int]:
    """Bytes of this rank's all-to-alls to each peer, under two nodes of two."""
    sent = {}
    begin = on_rank._begin_exchange

    def spy(out, into, splits):
        for peer, num_bytes in enumerate(splits):
            sent[peer] = max(sent.get(peer, 0), num_bytes)
        return begin(out, into, splits)

    with mock.patch.object(on_rank, "_begin_exchange", spy):
        on_rank.all_to_alls((8, 16), (0, 0, 1, 1), between, 1.0, QUICK, "cpu")
    return sent


@pytest.mark.parametrize(
    ("between", "to_RR"), [("ranks", [[1], [0], [3], [2]]), ("nodes", [[2, 3], [2, 3], [0, 1], [0, 1]])]
)
def test_an_all_to_all_stays_in_nodes_or_leaves_them(ranks: LocalRanks, between: str, to_RR: list[list[int]]):
    for sent, peers in zip(ranks.run(sends_where_it_should, between), to_RR, strict=True):
        assert sent == {peer: 16 if peer in peers else 0 for peer in range(4)}


def sizes_in_time(longest_s: float) -> list[int]:
    """Sizes measured on a link of a byte in 10 us, on which rank 1 is twice as slow."""
    pace_s = 1e-5 * (1 + dist.get_rank())

    def seconds_of(work, calls, device):
        return calls * work() * pace_s

    with mock.patch.object(windows, "seconds_of", seconds_of):
        of_size = lambda size: lambda: size  # noqa: E731
        return list(
            on_rank._growing((1, 10, 100, 1000, 10_000, 100_000), of_size, longest_s, QUICK, torch.device("cpu"))
        )


@pytest.mark.parametrize(("longest_s", "count"), [(1e-9, 3), (0.019, 3), (0.021, 4), (0.21, 5), (9.0, 6)])
def test_messages_that_would_take_too_long_are_left_out_on_all_ranks(ranks: LocalRanks, longest_s: float, count: int):
    sizes = ranks.run(sizes_in_time, longest_s, num_ranks=2)
    assert sizes == [[1, 10, 100, 1000, 10_000, 100_000][:count]] * 2


# --- steps ---


def test_steps_of_a_layer_are_measured_and_simulated(ranks: LocalRanks):
    """The simulated step follows the figures, and the measured one does not."""
    slow = SLOW.replace(ranks_per_node=4, expert_tflops=1e-4, intra_node_us=1e4)
    layer = LayerCase(ModelShape(hidden_size=16, intermediate_size=16, num_experts=4, top_k=2), 48)
    checks = check_steps(ranks, slow, [layer], repeats=2)
    assert [check.strategy for check in checks] == [strategy.name for strategy in STRATEGIES]
    for check in checks:
        assert check.measured_ms.n == 2
        assert check.measured_ms.median > 0
        # Dispatch and combine, there and back, wait for ten milliseconds each.
        assert check.simulated_ms > 40
        assert check.error == pytest.approx(check.simulated_ms / check.measured_ms.median - 1)


def test_a_model_is_measured_and_simulated(ranks: LocalRanks):
    slow = SLOW.replace(ranks_per_node=2, expert_tflops=1e-6)
    two = SimpleNamespace(run=partial(ranks.run, num_ranks=2))
    (check,) = check_models(two, slow, [MODEL], repeats=2)
    assert check.measured_ms.n == 2
    assert check.measured_ms.median > 0
    assert check.simulated_ms == pytest.approx(sum(check.shares_ms.values()))
    # 16 tokens of a rank pass 2 experts of 6 H I flops, and as much again twice.
    assert check.simulated_ms > 16 * 2 * 18 * 64 * 32 / 1e6 * 1e3
    assert check.error == pytest.approx(check.simulated_ms / check.measured_ms.median - 1)


def test_without_transformers_no_model_is_measured(monkeypatch):
    monkeypatch.setattr("benchmarks.calibrate.model_check.find_spec", lambda name: None)
    assert check_models(mock.Mock(), ClusterSpec(), [MODEL], repeats=1) == []


# --- other work ---


class Busy:
    """Four ranks on two nodes of two cores, which see ten seconds pass; on the second, others have ``others`` of it."""

    def __init__(self, others: float | None) -> None:
        self.others, self.asked = others, 0

    def run(self, fn):
        assert fn is other_work.processor_seconds
        self.asked += 1
        wall = 2 * 10.0 * self.asked
        return [ProcessorSeconds(8.0 * self.asked, self._machine(rank, wall), wall) for rank in range(4)]

    def _machine(self, rank: int, wall: float) -> float | None:
        if self.others is None:
            return None
        return 16.0 * self.asked + (self.others * wall if rank > 1 else 0)


@pytest.mark.parametrize(("others", "warned"), [(0.5, True), (0.04, True), (0.02, False), (None, False)])
def test_other_work_is_told(others, warned):
    beside = OtherWork(Busy(others), ClusterSpec(num_nodes=2, ranks_per_node=2))
    assert beside.share() == pytest.approx(others or 0)
    said = OtherWork(Busy(others), ClusterSpec(num_nodes=2, ranks_per_node=2)).warnings()
    words = f"Other work had {others or 0:.0%} of the cores meanwhile: measure again when there is none."
    assert said == [words][: int(warned)]


def test_this_process_has_its_part_of_the_machines_work(ranks: LocalRanks):
    before = other_work.processor_seconds()
    while other_work.processor_seconds().own < before.own + 0.05:
        pass
    after = other_work.processor_seconds()
    assert after.own - before.own <= after.wall - before.wall
    if other_work.STAT.exists():
        # Ticks are of a hundredth.
        assert after.machine - before.machine >= after.own - before.own - 0.03
