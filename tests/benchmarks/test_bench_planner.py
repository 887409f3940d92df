"""The planners' benchmark: plans know the past only, scores are what plans do, tables and files hold them all."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from typer.testing import CliRunner

from benchmarks.__main__ import app
from benchmarks.planner import block_seconds, peer_eplb, scale, union
from benchmarks.planner import many_ranks as large
from benchmarks.planner import planner_contest as contest
from benchmarks.planner import seconds as by_seconds
from benchmarks.planner.scored_layers import Contender, moments, score_layer
from moesys.balance.greedy.relabelling import num_moves
from moesys.balance.layouts import plan_layout
from moesys.balance.predictors import LoadHistory
from moesys.balance.replay import Moment
from moesys.balance.splits import split_tokens
from moesys.config import (
    ClusterSpec,
    Ema,
    Eplb,
    EvenSplit,
    FlexMoe,
    FlowSplit,
    Greedy,
    Laer,
    Last,
    Oracle,
    Static,
    WindowMean,
    presets,
)
from moesys.config.workload import Generated
from moesys.lab.show.sheets import Sheet, terminal_table
from moesys.layout import ExpertLayout
from moesys.load import LoadMatrix
from moesys.traces import Trace, generate, save_trace

CLUSTER = ClusterSpec(num_nodes=2, ranks_per_node=4)
TRACE = generate(Generated(drift=0.5, num_layers=2, warmup=0, steps=8, tokens_per_rank=200), 8, 12, 2, seed=0)
NUMBERED = Trace(TRACE.tokens_SLRE, 2, iterations=tuple(range(0, 80, 10)))
CONTENDERS = tuple(
    Contender(balance, split, predictor)
    for balance, split, predictor in (
        (Static(), EvenSplit(), Last()),
        (Eplb(), EvenSplit(), Last()),
        (Eplb(), FlowSplit(), Last()),
        (Laer(), EvenSplit(), WindowMean(steps=3)),
        (FlexMoe(), EvenSplit(), Last()),
        (Greedy(), FlowSplit(), Ema()),
    )
)


def scores(tokens_SRE, contenders=CONTENDERS, lag=20, **changes):
    when = moments(NUMBERED.iterations, lag)
    return list(score_layer(tokens_SRE, NUMBERED.iterations, when, CLUSTER, 3, contenders, **changes))


# --- the past, and nothing else ---


def test_changing_the_future_changes_no_plan():
    tokens_SRE = NUMBERED.tokens_SLRE[:, 0]
    changed = tokens_SRE.copy()
    changed[5:] = changed[5:, :, ::-1]
    before, after = scores(tokens_SRE), scores(changed)
    # What micro-batch 5 changes is known 20 iterations later, to the plan for micro-batch 7.
    assert [one.layout for one in before if one.scored < 70] == [one.layout for one in after if one.scored < 70]
    assert [one.layout for one in before if one.scored == 70] != [one.layout for one in after if one.scored == 70]
    assert [one.max_over_mean for one in before if one.scored in (50, 60)] != [
        one.max_over_mean for one in after if one.scored in (50, 60)
    ]


def test_only_the_oracle_is_told_what_is_to_come():
    tokens_SRE = NUMBERED.tokens_SLRE[:, 0]
    oracle, last = (
        [one.max_over_mean for one in scores(tokens_SRE, [Contender(Eplb(), FlowSplit(), predictor)])]
        for predictor in (Oracle(), Last())
    )
    assert np.mean(oracle) < np.mean(last)
    told = plan_layout(LoadMatrix(tokens_SRE[5]), CLUSTER, Eplb(), 3).fingerprint()[:16]
    assert told in {one.layout for one in scores(tokens_SRE, [Contender(Eplb(), FlowSplit(), Oracle())])}


@pytest.mark.parametrize(
    ("lag", "first", "last", "every", "expected"),
    [
        (1, None, None, 1, [(1, 1), (2, 2), (3, 3), (4, 4), (5, 5), (6, 6), (7, 7)]),
        (10, None, None, 1, [(1, 1), (2, 2), (3, 3), (4, 4), (5, 5), (6, 6), (7, 7)]),
        (11, None, None, 1, [(1, 2), (2, 3), (3, 4), (4, 5), (5, 6), (6, 7)]),
        (20, 45, None, 2, [(4, 5), (6, 7)]),
        (20, 45, 60, 1, [(4, 5), (5, 6)]),
    ],
)
def test_a_lag_is_in_iterations(lag, first, last, every, expected):
    assert moments(NUMBERED.iterations, lag, first, last, every) == [Moment(*pair) for pair in expected]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"lag": 0}, "lag=0 plans on the load that is scored; use at least 1"),
        ({"lag": 80}, "no micro-batch is left to score: iterations 0 to 70 with lag=80, from_iteration=None"),
        (
            {"lag": 1, "first": 71},
            "no micro-batch is left to score: iterations 0 to 70 with lag=1, from_iteration=71",
        ),
    ],
)
def test_what_cannot_be_scored_is_refused(arguments, message):
    with pytest.raises(ValueError, match="score") as error:
        moments(NUMBERED.iterations, **arguments)
    assert str(error.value).startswith(message)


# --- scores ---


def test_a_score_is_what_the_plan_does():
    tokens_SRE = NUMBERED.tokens_SLRE[:, 1]
    found = [one for one in scores(tokens_SRE, CONTENDERS[3:4]) if one.scored in (60, 70)]
    layouts = []
    for scored, score in zip((6, 7), found, strict=True):
        history = LoadHistory(WindowMean(steps=3))
        for tokens_RE in tokens_SRE[: scored - 1]:
            history.observe(LoadMatrix(tokens_RE))
        layouts.append(plan_layout(history.predicted(), CLUSTER, Laer(), 3))
        load = LoadMatrix(tokens_SRE[scored])
        plan = split_tokens(load, layouts[-1], CLUSTER, EvenSplit(), scored)
        assert score.known == 10 * scored - 20
        assert score.layout == layouts[-1].fingerprint()[:16]
        assert score.max_over_mean == plan.max_over_mean
        assert score.inter_node_share == plan.inter_node_tokens(CLUSTER.node_of_rank) / load.total
    assert found[1].moves == num_moves(*(layout.replicas_RE for layout in layouts))


def test_the_even_split_of_eplb_knows_no_nodes():
    layout = plan_layout(LoadMatrix(TRACE.tokens_SLRE[0, 0]), CLUSTER, Eplb(), 3)
    load = LoadMatrix(TRACE.tokens_SLRE[1, 0])
    blind = Contender(Eplb(), EvenSplit(), Last()).split_over(load, layout, CLUSTER, 0)
    near = Contender(Laer(), EvenSplit(), Last()).split_over(load, layout, CLUSTER, 0)
    exact = peer_eplb.even_max_over_mean(load.tokens_E, layout)
    assert blind.max_over_mean == pytest.approx(exact, abs=8 * 12 / load.total * 8)
    assert blind.inter_node_tokens(CLUSTER.node_of_rank) > near.inter_node_tokens(CLUSTER.node_of_rank)


def test_moves_are_replicas_on_new_ranks():
    before = ExpertLayout([[0, 1], [2, 0]], num_experts=3)
    assert num_moves(before.replicas_RE, before.replicas_RE) == 0
    assert num_moves(before.replicas_RE, ExpertLayout([[1, 0], [0, 2]], num_experts=3).replicas_RE) == 0
    assert num_moves(before.replicas_RE, ExpertLayout([[2, 1], [0, 2]], num_experts=3).replicas_RE) == 1


def test_a_flow_split_has_no_gap_and_a_gap_is_never_negative():
    for one in scores(NUMBERED.tokens_SLRE[:, 0]):
        assert one.gap >= -1e-12
        if "+ flow" in one.contender:
            assert one.gap == pytest.approx(0, abs=1e-12)


def test_a_summary_is_of_all_scores():
    found = scores(NUMBERED.tokens_SLRE[:, 0], CONTENDERS[1:3])
    even, flow = contest.summarise(found)
    worst = [one.max_over_mean for one in found if "even" in one.contender]
    assert (even.num_scores, even.worst, even.max_over_mean) == (6, max(worst), pytest.approx(np.mean(worst)))
    assert flow.max_over_mean <= even.max_over_mean
    assert flow.moves == even.moves


def test_contenders_are_all_combinations_of_what_is_given():
    assert contest.contenders() == contest.DEFAULT_CONTENDERS
    chosen = contest.contenders([Eplb(), Greedy()], [], [Last(), Ema(decay=0.9)])
    assert {one.name for one in chosen} == {
        f"{balance} + {split}, {predictor}"
        for balance in ("eplb", "greedy")
        for split in ("even", "flow")
        for predictor in ("last", "ema(decay=0.9)")
    }


# --- scale ---


def fake_eplb(folder: Path) -> Path:
    """As the peer answers: experts in turn over the replicas, whatever the load."""
    (folder / "eplb.py").write_text(
        "import torch\n"
        "def rebalance_experts(weight, num_replicas, num_groups, num_nodes, num_gpus):\n"
        "    experts = torch.arange(num_replicas).remainder(weight.shape[1])\n"
        "    return experts.repeat(weight.shape[0], 1), None, None\n"
    )
    return folder


def test_sizes_are_measured_with_the_peer_beside_ours(tmp_path):
    size = scale.Size(num_experts=16, num_ranks=8, ranks_per_node=4)
    peer = peer_eplb.load_peer(fake_eplb(tmp_path))
    rows = scale.scale_rows([size], [1.0], num_seeds=2, repeats=1, tokens_per_rank=64, peer=peer)
    ours, eplb, _, theirs = rows
    assert [row.contender for row in rows] == ["greedy + flow", "eplb + even", "laer + even", "EPLB's own code"]
    assert ours.max_over_mean <= eplb.max_over_mean < theirs.max_over_mean
    assert ours.gap == pytest.approx(0)
    assert ours.duplicates == 0
    assert all(row.layout_ms > 0 and row.next_sample >= 1 and row.noisy >= 1 for row in rows)
    assert terminal_table(Sheet("", rows)).row_count == 4


def test_a_zipf_sample_has_its_exponent_in_an_order_of_its_own():
    sample = scale.zipf_sample(scale.Size(16, 8), 1.5, seed=0, tokens_per_rank=10**5)
    share_E = np.sort(sample.exact.tokens_E)[::-1] / sample.exact.total
    expected_E = np.arange(1, 17) ** -1.5
    assert np.abs(share_E - expected_E / expected_E.sum()).max() < 0.002
    assert list(sample.exact.tokens_E) != sorted(sample.exact.tokens_E, reverse=True)
    assert np.abs(sample.again.tokens_E / sample.exact.tokens_E - 1).max() < 0.02
    ratio_E = np.log(sample.noisy.tokens_E / sample.exact.tokens_E)
    assert 0.07 < ratio_E.std() < 0.25


def test_even_shares_of_replicas():
    layout = ExpertLayout([[0, 1], [0, 2]], num_experts=3)
    assert peer_eplb.even_max_over_mean(np.array([10, 1, 3]), layout) == pytest.approx(8 / 7)


def test_large_cases_report_time_and_memory():
    case = large.Large("small", num_layers=2, num_experts=8, num_ranks=8, slots=2, uniform=False)
    row = large.measure_large(case, repeats=1, contender="greedy")
    assert row.layout_ms > 0
    assert 1 <= row.max_over_mean <= row.worst
    assert terminal_table(Sheet("", [row])).row_count == 1


@pytest.mark.slow
def test_the_scale_prints_both_tables_and_writes_every_row(tmp_path, capsys):
    case = large.Large("small", num_layers=2, num_experts=8, num_ranks=8, slots=2, uniform=True)
    size = scale.Size(num_experts=8, num_ranks=4, ranks_per_node=2)
    out = tmp_path / "rows.json"
    code = scale.main(sizes=[size], cases=[case], num_seeds=1, repeats=1, peer_path=fake_eplb(tmp_path), json_path=out)
    printed, told = capsys.readouterr()
    assert code == 0
    assert printed.count("MEASURED") == 3
    assert "large [3/3] small, EPLB's own code" in told
    written = json.loads(out.read_text())
    assert [len(written[part]) for part in ("sizes", "large")] == [4 * len(scale.EXPONENTS), 3]
    again = [row for row in written["moves"] if row["exponent"] == 1.0 and row["later"] == "15 % noise"]
    eplb, greedy, budget = again
    assert greedy["after"] <= greedy["before"]
    assert budget["moves"] <= 0.15 * eplb["moves"]
    ours, quick, theirs = written["large"]
    assert ours["max_over_mean"] <= theirs["max_over_mean"] >= quick["max_over_mean"]


def test_a_peer_that_is_not_there_is_named(tmp_path):
    with pytest.raises(ValueError, match=r"has no eplb\.py; give a folder that deepseek-ai/EPLB was checked out to"):
        peer_eplb.load_peer(tmp_path)
    (tmp_path / "eplb.py").write_text("")
    with pytest.raises(ValueError, match="has no rebalance_experts"):
        peer_eplb.load_peer(tmp_path)


# --- the command ---


def run(*arguments: str) -> tuple[int, str]:
    result = CliRunner().invoke(app, ["planner", *arguments])
    return result.exit_code, " ".join(result.output.split())


def test_the_command_prints_a_table_and_writes_every_row(tmp_path):
    trace, out = str(tmp_path / "t.npz"), tmp_path / "rows.json"
    save_trace(NUMBERED, trace)
    arguments = ["--trace", trace, "--ranks-per-node", "4", "--slots", "2", "--slots", "3", "--layers", "1"]
    code, output = run(*arguments, "--every", "3", "--json", str(out))
    assert code == 0, output
    assert "MEASURED" in output
    written = json.loads(out.read_text())
    assert {row["setting"] for row in written["summaries"]} == {"2 slots", "3 slots"}
    assert len(written["summaries"]) == 2 * len(contest.DEFAULT_CONTENDERS)
    assert {(score["layer"], score["known"], score["scored"]) for score in written["scores"]} == {
        (1, known, known + 10) for known in (0, 30, 60)
    }
    assert all(score["max_over_mean"] >= 1 for score in written["scores"])


def test_seconds_are_of_every_planner_and_greedy_is_told_the_model(tmp_path, monkeypatch):
    small = by_seconds.Setting("small", presets.OLMOE_1B_7B, 2, 6)
    monkeypatch.setattr(by_seconds, "SETTINGS", (small,))
    code, output = run(
        "--seconds", "--seeds", "2", "--json", str(tmp_path / "r.json"), "--page", str(tmp_path / "r.md")
    )
    assert code == 0, output
    assert "SIMULATED" in output
    rows = json.loads((tmp_path / "r.json").read_text())["rows"]
    assert [row["planner"] for row in rows] == [planner.name for planner in by_seconds.PLANNERS]
    layer_ms = {row["planner"]: row["layer_ms"] for row in rows}
    assert all(len(samples_ms) == 2 for samples_ms in layer_ms.values())
    first = by_seconds.BASELINE
    alike = [each for each in by_seconds.PLANNERS if (each.overlap, each.sharding) == (first.overlap, first.sharding)]
    of_counts = [each.name for each in alike]
    of_counts.remove("greedy by seconds")
    assert sum(layer_ms["greedy by seconds"]) < min(sum(layer_ms[name]) for name in of_counts)
    assert "greedy by seconds" in (tmp_path / "r.md").read_text()

    run("--seconds", "--seeds", "2", "--behind", "--json", str(tmp_path / "b.json"))
    behind_ms = {row["planner"]: row["layer_ms"] for row in json.loads((tmp_path / "b.json").read_text())["rows"]}
    for planner in by_seconds.PLANNERS:
        before, after = sum(layer_ms[planner.name]), sum(behind_ms[planner.name])
        assert after == before if planner.homes else after < before


def test_blocks_cost_what_rounding_a_split_to_them_costs(tmp_path, monkeypatch):
    small = by_seconds.Setting("small", presets.OLMOE_1B_7B, 2, 6)
    monkeypatch.setattr(block_seconds, "SETTINGS", (small,))
    lost = {}
    for block_rows in (16, 4096):
        code, output = run(
            *("--seconds", "--blocks", str(block_rows), "--seeds", "1"),
            *("--json", str(tmp_path / "r.json"), "--page", str(tmp_path / "r.md")),
        )
        assert code == 0, output
        rows = json.loads((tmp_path / "r.json").read_text())["rows"]
        assert [row["planner"] for row in rows] == list(block_seconds.CHOSEN)
        # Gradients of eight bytes an element take longer, and not by their rounding to blocks.
        assert all(row["all_ms"][0] > row["blocks_ms"][0] for row in rows)
        lost[block_rows] = {row["planner"]: row["blocks_ms"][0] / row["layer_ms"][0] for row in rows}
    assert "what blocks cost a layer" in (tmp_path / "r.md").read_text()
    assert all(0.995 < ratio < 1.01 for ratio in lost[16].values())
    assert lost[4096]["greedy by seconds"] > 1.05


def test_the_union_names_the_setting_in_which_greedy_is_worst(tmp_path, monkeypatch):
    monkeypatch.setattr(union, "CLUSTERS", {"2 x 2": presets.h100(2).replace(ranks_per_node=2)})
    monkeypatch.setattr(union, "MODELS", {"small": presets.LAER_E16K4})
    code, output = run("--union", "4", "--json", str(tmp_path / "r.json"), "--page", str(tmp_path / "r.md"))
    rows = json.loads((tmp_path / "r.json").read_text())["rows"]
    above = [
        row["layer_ms"]["greedy"] / min(ms for name, ms in row["layer_ms"].items() if name != "greedy") for row in rows
    ]
    assert code == any(ratio > 1.005 for ratio in above), output
    worst = max(range(4), key=above.__getitem__)
    assert f"| all | 4 | {np.median(above):.3f} | {max(above):.3f} |" in (tmp_path / "r.md").read_text()
    assert f"{worst}: small, 2 x 2, " in (tmp_path / "r.md").read_text()


def test_the_command_takes_members_by_kind_and_as_json(tmp_path):
    save_trace(NUMBERED, tmp_path / "t.npz")
    chosen = ["--balance", "eplb", "--split", '{"kind": "flow", "max_inter_node": 0.5}', "--predictor", "oracle"]
    code, output = run("--trace", str(tmp_path / "t.npz"), "--layers", "0", *chosen)
    assert code == 0, output
    assert "eplb + flow(max_inter_node=0.5), oracle" in output


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "give one of --trace FILE, --laer, --scale, --seconds and --union N"),
        (["--laer", "--scale"], "give one of --trace FILE, --laer, --scale, --seconds and --union N"),
        (["--scale", "--slots", "3"], "--slots is not for --scale; leave it out"),
        (["--seconds", "--slots", "3"], "--slots is not for --seconds; leave it out"),
        (["--union", "3", "--seeds", "2"], "--seeds is not for --union; leave it out"),
        (["--scale", "--drift", "0.5"], "--drift is not for --scale; leave it out"),
        (["--laer", "--every", "2"], "--every is not for --laer; leave it out"),
        (["--scale", "--json", "nowhere/rows.json"], "nowhere is not a folder; make it, or write elsewhere"),
        (["--trace", "nowhere.npz"], "trace nowhere.npz does not exist"),
        (["--trace", "TRACE", "--ranks-per-node", "3"], "ranks_per_node=3 does not divide the trace's 8 ranks"),
        (["--trace", "TRACE", "--layers", "2"], "layers=[2] are not in the trace; its layers are 0 to 1"),
        (["--trace", "TRACE", "--slots", "1"], "slots=1 gives 8 slots on 8 ranks for 12 experts; use at least 2"),
        (["--trace", "TRACE", "--balance", "best"], "balance='best'"),
    ],
)
def test_what_the_command_refuses(tmp_path, arguments, message):
    save_trace(NUMBERED, tmp_path / "t.npz")
    code, output = run(*(argument.replace("TRACE", str(tmp_path / "t.npz")) for argument in arguments))
    assert code == 2
    assert message in output.replace(" │ ", " ").replace("│ │ ", "")
