"""moesys plan: loads and clusters from files, a plan that can be read back, a certificate that holds."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from typer.testing import CliRunner

from moesys import ClusterSpec, Generated, presets
from moesys.__main__ import app
from moesys.balance.flow.max_load import min_max_load
from moesys.balance.plan import LayerPlan
from moesys.lab.commands.plan_load import read_load
from moesys.lab.runs.declarations import balance_of, cluster_of, predictor_of, split_of
from moesys.traces import generate, save_trace

TRACE = generate(Generated(num_layers=2, warmup=0, steps=3, tokens_per_rank=100), 8, 12, 2, seed=0)
TOKENS_RE = TRACE.tokens_SLRE[2, 1]


@pytest.fixture
def loads(tmp_path: Path) -> Path:
    """A folder with one load in every form."""
    save_trace(TRACE, tmp_path / "load.npz")
    np.save(tmp_path / "load.npy", TOKENS_RE)
    np.savetxt(tmp_path / "load.csv", TOKENS_RE, delimiter=",", fmt="%d")
    (tmp_path / "load.json").write_text(json.dumps(TOKENS_RE.tolist()))
    return tmp_path


def run(*arguments: object) -> tuple[int, str]:
    result = CliRunner().invoke(app, ["plan", *map(str, arguments)])
    return result.exit_code, result.output


# --- what it reads ---


def test_every_form_of_a_load_is_the_same_load_and_a_trace_gives_its_last_micro_batch_and_first_layer(loads):
    for form in ("npy", "csv", "json"):
        assert np.array_equal(read_load(loads / f"load.{form}").tokens_RE, TOKENS_RE)
    for (step, layer), chosen in (((2, 0), {}), ((2, 1), {"layer": 1}), ((0, 1), {"micro_batch": 0, "layer": 1})):
        assert np.array_equal(read_load(loads / "load.npz", **chosen).tokens_RE, TRACE.tokens_SLRE[step, layer])


def test_clusters_and_members_are_a_shorthand_json_or_a_file(tmp_path):
    spec = ClusterSpec(num_nodes=2, ranks_per_node=(3, 5))
    (tmp_path / "a.json").write_text(spec.to_json())
    (tmp_path / "a.toml").write_text(spec.to_toml())
    assert cluster_of("4x8") == ClusterSpec(num_nodes=4, ranks_per_node=8)
    assert (cluster_of("h200:16"), cluster_of("b200")) == (presets.h200(16), presets.b200(1))
    assert cluster_of(str(tmp_path / "a.json")) == cluster_of(str(tmp_path / "a.toml")) == spec
    assert (balance_of("eplb").kind, split_of("even").kind) == ("eplb", "even")
    assert balance_of('{"kind": "flex_moe", "max_moves": 3}').max_moves == 3
    assert predictor_of('{"kind": "ema", "decay": 0.25}').decay == 0.25


# --- what it gives ---


def test_the_plan_is_printed_as_a_tree_and_read_back_from_its_file(loads):
    out = loads / "plans" / "plan.json"
    code, output = run("--load", loads / "load.csv", "--cluster", "2x4", "--slots", 3, "--out", out)
    assert code == 0, output
    plan = LayerPlan.from_json(out.read_text())
    certificate = json.loads(out.read_text())["certificate"]
    assert np.array_equal(plan.load.tokens_RE, TOKENS_RE)
    assert plan.layout.num_slots == 3
    assert certificate["max_tokens"] == plan.tokens.tokens_R.max()
    assert certificate["layout_bound"] == min_max_load(plan.load, plan.layout)
    for rank, tokens in enumerate(plan.tokens.tokens_R.tolist()):
        assert f"rank {rank}: {tokens} tokens: expert" in output
    for words in ("node 0:", "node 1:", "certificate: max/mean", "busiest rank:", "any layout: at least", str(out)):
        assert words in output
    assert [file.name for file in out.parent.iterdir()] == ["plan.json"]


def test_a_previous_plan_is_where_the_next_one_begins(loads):
    """Slots are one more than needed by default."""
    first, second = loads / "first.json", loads / "second.json"
    chosen = ("--cluster", "2x4", "--balance", '{"kind": "flex_moe", "max_moves": 1}')
    assert run("--load", loads / "load.csv", *chosen, "--out", first)[0] == 0
    code, output = run("--load", loads / "load.npz", *chosen, "--previous", first, "--out", second)
    assert code == 0, output
    before, after = (LayerPlan.from_json(file.read_text()).layout for file in (first, second))
    assert before.num_slots == 3
    moved = int(np.maximum(after.replicas_RE - before.replicas_RE, 0).sum())
    assert moved <= 1
    assert f"moves: {moved} replicas" in output
    # Fields that differ from their defaults tell two planners of one kind apart.
    assert "load.npz: flex_moe(max_moves=1) + flow, " in output


def test_of_a_large_cluster_only_extremes_are_shown(tmp_path):
    np.save(tmp_path / "load.npy", np.random.default_rng(0).integers(0, 9, (160, 8)))
    code, output = run("--load", tmp_path / "load.npy", "--cluster", "20x8", "--balance", "static", "--split", "even")
    assert code == 0, output
    assert output.count("├── rank ") + output.count("└── rank ") <= 2 * 20
