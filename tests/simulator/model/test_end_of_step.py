"""What comes behind the last micro-batch: gradients share links with rows of backward; ends sum tied embeddings."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

import moesys as ms
from moesys.config.model_run import ModelRun, Parallelism
from moesys.simulator.model.model_step import SimulatedPart
from moesys.simulator.model.model_units import Ring, Units
from moesys.simulator.model.pipeline import PartSeconds
from moesys.simulator.model.simulate_model import EndOfStep, simulate_model

SMALL = ms.models.ModelSpec.from_config("qwen3-moe-small")
LINKS = ms.ClusterSpec(num_nodes=2, ranks_per_node=2, intra_node_gb_per_s=10, inter_node_gb_per_s=5, expert_tflops=1e12)
LAYERS = 20
RUN = ModelRun(
    model=SMALL.replace(layers=SMALL.layers[:1] * LAYERS),
    cluster=LINKS,
    parallelism=Parallelism(ep=2, dense="replicated"),
    seq_len=64,
)
END = EndOfStep(RUN, Units.of(RUN))
SHARE = st.floats(0.0, 1.0)


def gradient_seconds() -> tuple[float, float]:
    """Of all gradients, of links inside domains and of NICs."""
    units = END.units.of_stage([range(LAYERS)])
    dense = 4 * sum(unit.parameters for unit in units)
    experts = 4 * sum(unit.operations.of("experts").parameters for unit in units) / 2
    # All ranks sum what is dense; each node has all experts, so that NICs alone carry their gradients, of two ranks.
    inside = 2 * 0.75 * dense / 10e9
    nics = 2 * (0.75 * dense + 2 * 0.5 * experts) / 5e9
    return inside, nics


def shown(backward: float, inside: float, nics: float) -> float:
    busy = PartSeconds(0.0, inside), PartSeconds(0.0, nics)
    part = SimulatedPart(PartSeconds(0.0, backward), busy, {})
    return END.seconds([range(LAYERS)], [part])["gradients and parameters"]


@given(times=st.floats(0.0, 3.0), inside=SHARE, nics=SHARE)
def test_gradients_move_where_rows_leave_links_idle(times: float, inside: float, nics: float) -> None:
    """Each link carries rows and gradients one beside the other, and no more than it can."""
    asked = gradient_seconds()
    backward = times * max(asked)
    found = shown(backward, inside * backward, nics * backward)
    # The last of 20 layers has nothing to hide behind.
    hidden = 0.95 * backward
    expected = max(0.0, asked[0] - hidden * (1 - inside), asked[1] - hidden * (1 - nics))
    assert found == pytest.approx(expected, rel=1e-9, abs=1e-12)
    assert found >= shown(backward, 0.0, 0.0) - 1e-12
    # Nothing is carried faster than at a link's full rate.
    for link, share in zip(asked, (inside, nics), strict=True):
        assert backward + found >= link + share * backward - 1e-12 - 0.05 * backward


def test_rows_slow_gradients_on_the_same_nics() -> None:
    """Experts of a group on two nodes: rows cross, and so do gradients."""
    slow = RUN.replace(cluster=LINKS.replace(expert_tflops=20.0), seq_len=512)
    across = slow.replace(parallelism=Parallelism(ep=4, dense="replicated"))
    (draw,) = simulate_model(across).draws
    rows = draw.parts[0][0].busy[1].backward
    assert rows > 0
    ring = Ring.of_dense(across)
    held = 4 * sum(unit.parameters for unit in Units.of(across).of_part(range(LAYERS)))
    asked = 2 * ring.busy_seconds(held, LINKS)[1]
    left = asked - 0.95 * (draw.parts[0][0].seconds.backward - rows)
    assert 0 < left < asked
    assert draw.shares["gradients and parameters"] == pytest.approx(left, rel=1e-6)


@pytest.mark.parametrize("dense", ["replicated", "full"])
def test_ends_of_a_pipeline_sum_tied_gradients(dense: str) -> None:
    """Two ranks of a node have a pair each, and an all-reduce of two passes every byte once."""
    model = SMALL.replace(tied_embeddings=True)
    run = RUN.replace(model=model, parallelism=Parallelism(pp=2, dense=dense))
    held = 4 * model.vocab_size * model.hidden_size / (2 if dense == "full" else 1)
    expected = 2 * held / 5e9
    assert simulate_model(run).shares["tied embeddings"] == pytest.approx(expected)
    assert simulate_model(run.replace(model=SMALL)).shares["tied embeddings"] == 0
    one = run.replace(parallelism=Parallelism(dense=dense))
    assert simulate_model(one).shares["tied embeddings"] == 0
    # Stages between the ends have nothing to do with it.
    deep = run.replace(model=model.replace(layers=model.layers[:1] * 4), parallelism=Parallelism(pp=4))
    end = EndOfStep(deep, Units.of(deep))
    zero = PartSeconds(0.0, 0.0)
    part = SimulatedPart(zero, (zero, zero), {})
    found = [end.seconds([range(stage, stage + 1)], [part])["tied embeddings"] for stage in range(4)]
    assert found[1] == found[2] == 0
    assert found[0] == found[3] > 0


def optimizer_seconds(run: ModelRun) -> float:
    return EndOfStep(run, Units.of(run)).seconds([range(LAYERS)], [NOTHING])["optimizer"]


NO_TIME = PartSeconds(0.0, 0.0)
NOTHING = SimulatedPart(NO_TIME, (NO_TIME, NO_TIME), {})


def test_muon_is_products_or_messages_whichever_takes_longer() -> None:
    """Counted by hand: five steps of 4m²n + 2m³ flops, shared out, and under ``Fsep`` slices there and back."""
    layer = SMALL.layers[0]
    H, I, E = SMALL.hidden_size, layer.mlp.shape.intermediate_size, layer.mlp.shape.num_experts
    heads, kv_heads, width = layer.attention.num_heads, layer.attention.num_kv_heads, layer.attention.head_dim
    assert layer.mlp.shared is None

    def flops(rows: int, columns: int) -> int:
        m, n = min(rows, columns), max(rows, columns)
        return 5 * (2 * m * m * n + 2 * m * m * m + 2 * m * m * n)

    dense = LAYERS * (2 * flops(heads * width, H) + 2 * flops(kv_heads * width, H))
    experts = LAYERS * 3 * E * flops(I, H)
    slow = RUN.replace(cluster=LINKS.replace(expert_tflops=1e-3), optimizer="muon")
    fsep = ms.Strategy(name="fsep", sharding=ms.Fsep(slots_per_rank=E))
    # Every rank has all dense matrices; two ranks of a node share the experts, and the other node has copies.
    products_s = (dense + experts / 2) / 1e9
    moved = slow.replace(optimizer="adam_bf16")
    for strategy in (slow.strategy, fsep):
        changed = {"strategy": strategy}
        found = optimizer_seconds(slow.replace(**changed)) - optimizer_seconds(moved.replace(**changed))
        assert found == pytest.approx(products_s, rel=1e-6)
    sharded = {"parallelism": Parallelism(ep=2, dense="optimizer")}
    found = optimizer_seconds(slow.replace(**sharded)) - optimizer_seconds(moved.replace(**sharded))
    assert found == pytest.approx((dense / 4 + experts / 4) / 1e9, rel=1e-6)
    # With products that take no time, each of the two ranks sends the other a half of its half of all experts, twice.
    quick = RUN.replace(optimizer="muon")
    sent = SMALL.bytes_per_element * LAYERS * 3 * E * I * H / 2 / 2
    found = optimizer_seconds(quick.replace(strategy=fsep)) - optimizer_seconds(quick)
    assert found == pytest.approx(2 * sent / 10e9, rel=1e-3)


def test_muon_keeps_one_moment_of_what_it_trains() -> None:
    ends = 4 * 2 * SMALL.vocab_size * SMALL.hidden_size
    of_adam, of_muon = (
        simulate_model(RUN.replace(optimizer=name)).peak.parts["optimizer"] for name in ("adam", "muon")
    )
    bf16 = simulate_model(RUN.replace(optimizer="adam_bf16")).peak.parts["optimizer"]
    assert of_muon == pytest.approx(bf16 + ends, rel=1e-3)
    assert of_muon < of_adam
