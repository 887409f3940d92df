"""A MegaKernel is explained: its times, and why it would not run."""

from __future__ import annotations

import pytest
from test_explanation import FSEP, declared

from moesys import MegaKernel, Pipelined, explain


@pytest.mark.parametrize(
    "overlap",
    [
        MegaKernel(),
        MegaKernel(deduplicate=True, most_tokens=64, rows_cap=2.0),
        MegaKernel(fused="none", keep_x=False),
        Pipelined(chunks=2),
    ],
    ids=["default", "on devices", "unfused", "pipelined"],
)
def test_another_overlap_takes_another_time_for_the_same_tokens(overlap):
    fused = FSEP.replace(name="fused", overlap=overlap)
    step, plain = explain(fused, declared(fused)), explain(FSEP, declared(FSEP))
    assert f"strategy: {fused!r}" in str(step)
    parts_ms = [place.ms for place in step.critical_path]
    assert [sum(step.mean_ms.values()), sum(step.critical_ms.values()), sum(parts_ms)] == pytest.approx(
        [step.step_ms] * 3
    )
    assert step.step_ms != plain.step_ms
    assert [(of.tokens_R, of.traffic) for of in step.layers] == [(of.tokens_R, of.traffic) for of in plain.layers]


def test_a_mega_kernel_on_several_domains_is_said_not_to_run():
    fused = FSEP.replace(name="fused", overlap=MegaKernel(rows_cap=2.0))
    of = declared(fused)
    domains = len(of.cluster.domain_sizes)
    joined = of.replace(cluster=of.cluster.replace(ranks_per_domain=of.cluster.num_ranks))
    assert domains > 1
    assert "would not run: overlap=MegaKernel() reaches" in str(explain(fused, of)).replace("\n", " ")
    assert explain(fused, joined).would_not_run == ()
    small = of.replace(cluster=joined.cluster.replace(memory_gb=1e-3))
    assert explain(FSEP, small).would_not_run == ()
    (reason,) = explain(FSEP, small, model_layers=10_000).would_not_run
    assert "of 10000 layers, and has 0.001" in reason
