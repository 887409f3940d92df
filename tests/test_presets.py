"""Presets: the published numbers, and strategies that fit the models and the cluster they are for."""

from __future__ import annotations

import itertools
from pathlib import Path

import pytest

from moesys import ClusterSpec, Ep, EvenSplit, Fsep, Laer, Sequential, Static, Strategy, WindowMean, presets

RACKS = [presets.gb200, presets.gb300]
CLUSTERS = [presets.a100, presets.h800, presets.h100, presets.h200, presets.b200, *RACKS]


@pytest.mark.parametrize(
    ("model", "millions"),
    [
        # Sizes that LAER-MoE's artifact reports.
        (presets.LAER_E8K2, 176.2),
        (presets.LAER_E16K4, 88.1),
    ],
)
def test_experts_have_their_published_size(model, millions):
    assert model.expert_parameters / 1e6 == pytest.approx(millions, abs=0.05)


def test_coefficients_of_losses_are_those_of_transformers():
    """What else the models have is compared with their files in ``test_model_spec``."""
    from transformers import OlmoeConfig, Qwen3MoeConfig

    for model, config in ((presets.OLMOE_1B_7B, OlmoeConfig()), (presets.QWEN3_30B_A3B, Qwen3MoeConfig())):
        assert model.router_aux_loss_coef == config.router_aux_loss_coef


def test_laers_cluster_is_the_one_the_defaults_are_for():
    for field in ("intra_node_gb_per_s", "inter_node_gb_per_s", "expert_tflops"):
        assert getattr(presets.LAER_A100, field) == getattr(ClusterSpec(), field)
    assert (presets.LAER_A100.node_sizes, presets.LAER_A100.name) == ((8,) * 4, "4 x 8 A100-80GB")


@pytest.mark.parametrize("make", CLUSTERS)
def test_clusters_have_the_nodes_asked_for(make):
    cluster = make(num_nodes=3)
    ranks = 4 if make in RACKS else 8
    assert cluster.node_sizes == (ranks,) * 3
    one_node = cluster.replace(num_nodes=1, name=cluster.name.replace("3", "1", 1), ranks_per_domain=None)
    assert make().replace(ranks_per_domain=None) == one_node
    assert ClusterSpec.from_toml(cluster.to_toml()) == cluster


def test_nvlink_joins_the_trays_of_a_rack():
    assert presets.gb200(16).domain_sizes == (64,)
    assert presets.gb300(40).domain_sizes == (72, 72, 16)


# Of one GPU: dense bfloat16 TFLOP/s, NVLink GB/s one way, memory GB/s and GB by data sheet; GB/s of a node's NICs.
SHEETS = {
    "a100": (312, 300, 2039, 80, 100),
    "h800": (989.5, 200, 3350, 80, 400),
    "h100": (989.5, 450, 3350, 80, 400),
    "h200": (989.5, 450, 4800, 141, 400),
    "b200": (2250, 900, 8000, 180, 400),
    "gb200": (2250, 900, 8000, 186, 200),
    "gb300": (2500, 900, 8000, 279, 400),
}


@pytest.mark.parametrize("make", CLUSTERS)
def test_no_cluster_is_faster_than_its_data_sheet(make):
    tflops, nvlink_gb_per_s, memory_gb_per_s, memory_gb, nics_gb_per_s = SHEETS[make.__name__]
    cluster = make()
    assert 0.5 * tflops < cluster.expert_tflops < tflops
    assert 0.5 * nvlink_gb_per_s < cluster.intra_node_gb_per_s < nvlink_gb_per_s
    assert 0.9 * memory_gb_per_s < cluster.memory_gb_per_s <= memory_gb_per_s
    assert cluster.memory_gb == memory_gb
    # No sheet of GB300 was found that tells more than GB200's.
    assert cluster.peak_tflops == min(tflops, 2250)
    assert cluster.fp8_tflops is None or cluster.expert_tflops < cluster.fp8_tflops < 2 * tflops
    assert 0.8 * nics_gb_per_s < cluster.inter_node_gb_per_s < nics_gb_per_s


def test_no_newer_gpu_is_slower():
    speeds = ("expert_tflops", "memory_gb_per_s", "intra_node_gb_per_s", "inter_node_gb_per_s", "multiprocessors")
    for older, newer in itertools.pairwise(make() for make in CLUSTERS if make not in (presets.h800, presets.gb200)):
        assert all(getattr(older, speed) <= getattr(newer, speed) for speed in speeds)
    cut = presets.h100().replace(name="1 x 8 H800", intra_node_gb_per_s=presets.h800().intra_node_gb_per_s)
    assert cut == presets.h800()


def test_the_page_of_clusters_tells_their_numbers():
    page = (Path(__file__).parent.parent / "docs" / "clusters.md").read_text(encoding="utf-8")
    rows = [[cell.strip() for cell in line.split("|")[1:-1]] for line in page.splitlines() if line.startswith("|")]
    (header,) = [row for row in rows if row[0] == "field" and "`presets.h100`" in row]
    told = {row[0].strip("`"): row[1:] for row in rows if len(row) == len(header)}
    place = rows.index(["field", "all presets"])
    told |= {row[0].strip("`"): row[1:] * len(CLUSTERS) for row in rows[place:] if len(row) == 2}
    for field in set(ClusterSpec.model_fields) - {"num_nodes", "ranks_per_node", "ranks_per_domain", "name"}:
        for make, cell in zip(CLUSTERS, told.get(field, ["none"] * len(CLUSTERS)), strict=True):
            value, said = getattr(make(), field), cell.split()[0]
            if value is None:
                assert said == "none", (make.__name__, field)
            else:
                assert float(said) == pytest.approx(value, rel=1e-3), (make.__name__, field)
    assert header[1:] == [f"`presets.{make.__name__}`" for make in CLUSTERS]


def test_strategies_are_what_they_are_called():
    assert presets.ep() == Strategy(name="ep", sharding=Ep(), balance=Static(), split=EvenSplit(), overlap=Sequential())
    assert presets.fsep(3) == presets.ep().replace(name="fsep", sharding=Fsep(slots_per_rank=3))
    laer = presets.laer((2, 3))
    assert laer.name == "laer"
    assert (laer.sharding, laer.balance) == (Fsep(slots_per_rank=(2, 3)), Laer())
    assert (laer.predictor, laer.split) == (WindowMean(steps=5), EvenSplit())
