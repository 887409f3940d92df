"""The leaderboard: places that follow from its lines, nothing scored twice, users' planners, refusals with reasons."""

from __future__ import annotations

import json
import re
import shutil
from collections import defaultdict
from concurrent.futures import Future
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from typer.testing import CliRunner
from watch_cases import assert_whole_and_alone

from benchmarks.__main__ import app
from benchmarks.leaderboard import command as leaderboard
from benchmarks.leaderboard import scores as scoring
from benchmarks.leaderboard import workloads
from benchmarks.leaderboard.planners import GROUPS, PlannerGroup, PlannerPair, named_planner
from benchmarks.leaderboard.scores import result_journal, score
from benchmarks.leaderboard.workloads import (
    FURTHER,
    GENERATED,
    SCORED,
    RoutingSetting,
    packaged_recordings,
    settings,
)
from moesys import Eplb, EvenSplit, FlexMoe, FlowSplit, Generated, Laer, MoonEp, Quotas, Static, UltraEp
from moesys.config import ClusterSpec, ModelShape
from moesys.traces import generate, save_trace

OWN = """
import numpy as np

import moesys as ms


class InTurn(ms.Balance):
    def layout(self, problem):
        rows = np.arange(sum(problem.slots_R)).reshape(len(problem.slots_R), -1)
        return ms.planning.ExpertLayout(rows % problem.load.num_experts, problem.load.num_experts)


class Loses(ms.Balance):
    def layout(self, problem):
        return ms.planning.ExpertLayout(np.zeros((len(problem.slots_R), 1), int), problem.load.num_experts)


class First(ms.Split):
    def split(self, problem):
        load, layout = problem.load, problem.layout_in_force
        tokens_RER = np.zeros((load.num_ranks, load.num_experts, load.num_ranks), dtype=int)
        for source, expert in np.argwhere(load.tokens_RE):
            holder = layout.replicas_RE[:, expert].argmax()
            tokens_RER[source, expert, holder] = load.tokens_RE[source, expert]
        return ms.planning.TokenPlan.from_dense(tokens_RER, load, layout)
"""
MODEL = ModelShape(hidden_size=64, intermediate_size=32, num_experts=8, top_k=2, dtype="bfloat16")
CLUSTER = ClusterSpec(num_nodes=2, ranks_per_node=2)
SMALL = (
    PlannerGroup("history", "on history", (PlannerPair(Static(), EvenSplit()), PlannerPair(Static(), FlowSplit()))),
    PlannerGroup("late", "a late slot", (PlannerPair(Eplb(), FlowSplit()), PlannerPair(Laer(), FlowSplit())), 1, 1),
    PlannerGroup("counts", "on counts", (PlannerPair(MoonEp(), Quotas()), PlannerPair(FlexMoe(), FlowSplit())), lag=0),
)
SETTING = RoutingSetting(GENERATED[0], "small", MODEL, "2 x 2", CLUSTER)


def make_small(patch: pytest.MonkeyPatch) -> None:
    """Makes the leaderboard one of three groups with a model and a cluster that take no time."""
    patch.setattr(workloads, "MODELS", {"small": MODEL})
    patch.setattr(workloads, "CLUSTERS", {"2 x 2": CLUSTER, "2 x 8 H100": CLUSTER, "4 x 8 H100": CLUSTER})
    patch.setattr(workloads, "_GENERATED_ON", (("small", "2 x 2"),))
    patch.setattr(workloads, "_FURTHER_ON", (("small", "2 x 2"),))
    patch.setattr(leaderboard, "GROUPS", SMALL)


@pytest.fixture(autouse=True)
def _small(monkeypatch: pytest.MonkeyPatch) -> None:
    make_small(monkeypatch)


def run(*arguments: str) -> str:
    result = CliRunner().invoke(app, ["leaderboard", "--jobs", "1", *arguments])
    assert result.exit_code == 0, result.output
    return result.output


def lines_of(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / "results.jsonl").read_text().splitlines()]


@pytest.fixture(scope="module")
def played(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a planner of a user's own and a board. It stays as it is."""
    folder = tmp_path_factory.mktemp("played")
    (folder / "mine.py").write_text(OWN)
    with pytest.MonkeyPatch.context() as patch:
        make_small(patch)
        run("--quick", "--seeds", "1", "--out", str(folder / "out"), "--planner", f"{folder / 'mine.py'}:InTurn")
    return folder


@pytest.fixture
def board(played: Path, tmp_path: Path) -> Path:
    """A copy of the board."""
    shutil.copytree(played, tmp_path, dirs_exist_ok=True)
    return tmp_path / "out"


# --- a whole board ---


def geometric(values: Any) -> float:
    return float(np.exp(np.mean(np.log(list(values)))))


def test_places_follow_from_the_lines_alone(board: Path) -> None:
    """Counted here from the file, by the words of the page: no code of the board's."""
    page, num_rows = markdown(board), 0
    for group in SMALL:
        ms: dict[Any, dict[str, float]] = defaultdict(dict)
        for line in lines_of(board):
            if line["group"] == group.name and not line["scores"]["cannot"]:
                where = line["workload"], line["model"], line["cluster"], line["sample"]
                waited_ms = 0.0 if line["lag"] else float(np.median(line["scores"]["planning_ms"]))
                ms[where][line["planner"]] = float(np.mean(line["scores"]["layer_ms"])) + waited_ms
        everywhere = set.intersection(*(set(of) for of in ms.values()))
        scores = {planner: geometric(of[planner] for of in ms.values()) for planner in everywhere}
        measured = "" if group.lag else ", with the MEASURED time of planning"
        section = page.split(f"## SIMULATED: {group.name}{measured}\n")[1].split("\n## ")[0]
        rows = [re.split(r" *\| *", row.strip("| ")) for row in re.findall(r"^\| .+ \|$", section, re.MULTILINE)][2:]
        ranked = {row[1]: (int(row[0]), float(row[2].split()[0])) for row in rows if row[0].isdigit()}
        places = list(ranked)
        for words in re.findall("The same in every score: (.+)[.]", section):
            for first, *same in (names.split(" = ") for names in words.split("; ")):
                ranked |= dict.fromkeys(same, ranked[first])
        assert set(ranked) == everywhere
        for planner, (place, ratio) in ranked.items():
            assert ratio == pytest.approx(scores[planner] / min(scores.values()), abs=6e-4)
            assert place == 1 + sum(scores[other] < scores[planner] * (1 - 1e-12) for other in places)
            num_rows += 1
    assert num_rows > 3


def test_plans_that_a_layer_waits_for_are_timed_when_no_worker_computes(monkeypatch: pytest.MonkeyPatch) -> None:
    class Crew:
        num_workers, are_due, is_there = 2, True, True

        def submit(self, *_: Any) -> Future:
            (answer := Future()).set_result(["beside others"] * self.is_there)
            return answer

        def close(self) -> None:
            self.is_there = False

    crew = Crew()
    monkeypatch.setattr(scoring, "simulating_workers", lambda *_: crew)
    tasks = [
        SimpleNamespace(group=group, results=lambda: ["beside others" if crew.is_there else "alone"])
        for group in GROUPS
    ]
    found = [(task.group.lag, *of) for task, of in scoring._scored_tasks(tasks[::-1], 2)]
    assert sorted(found, reverse=True) == [(1, "beside others"), (1, "beside others"), (0, "alone")]
    assert found[-1] == (0, "alone")


def markdown(folder: Path) -> str:
    """Returns the page without the escapes of names."""
    return (folder / "leaderboard.md").read_text().replace("\\", "")


def test_one_s_named_planner_is_on_the_board_whose_page_is_whole(board: Path) -> None:
    for group in SMALL:
        own = [line for line in lines_of(board) if line["planner"].startswith("mine:InTurn")]
        assert {line["planner"].split(" + ")[1] for line in own if line["group"] == group.name} <= {"even", "flow"}
        assert all(line["scores"]["cannot"] == "" for line in own)
    page, html = markdown(board), (board / "leaderboard.html").read_text()
    assert "mine:InTurn + flow" in page
    # Who cannot plan has a reason and no place.
    reason = r"2 of 2 settings: balance=FlexMoe\(max_moves=10\) counts"
    assert re.search(rf"^\| +\| flex_moe \+ flow \|.*\| {reason}", page, re.MULTILINE)
    assert len(re.findall(r"Yours: mine:InTurn \+ \w+ is in place \d+ of \d+\.", html)) == len(SMALL)
    assert html.count(" (yours)") == html.count("<svg") == len(SMALL)
    assert_whole_and_alone(html)
    assert ": the fastest is " in html.partition("<table")[0]
    assert '<p class="note">python -m benchmarks leaderboard ' in html
    assert "`" not in html


def test_a_planner_that_fails_everywhere_ends_with_1_and_its_reason(tmp_path: Path) -> None:
    (tmp_path / "failing.py").write_text(OWN)
    arguments = ["--quick", "--seeds", "1", "--out", str(tmp_path / "out"), "--planner"]
    result = CliRunner().invoke(app, ["leaderboard", *arguments, f"{tmp_path / 'failing.py'}:Loses"])
    assert result.exit_code == 1
    reason = "balance=failing:Loses: layout(problem) raised ValueError: no rank holds experts [1, 2, 3, 4, 5, 6, 7]"
    assert f"failing:Loses (2 pairs) cannot plan in 2 of 2 settings: {reason}" in result.stdout
    assert "--quick checks that planners run and is no ranking" in result.stdout
    again = CliRunner().invoke(app, ["leaderboard", *arguments, f"{tmp_path / 'failing.py'}:InTurn"])
    assert again.exit_code == 0
    assert re.search(r"out has \d+ results already, which are not scored again\.", again.stderr)


# --- resuming ---


def test_a_torn_last_line_is_played_again_and_no_other(board: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    whole = lines_of(board)
    with (board / "results.jsonl").open("r+b") as file:
        file.truncate((board / "results.jsonl").stat().st_size - 40)
    scored: list[PlannerPair] = []

    def counting(setting: RoutingSetting, group: PlannerGroup, pairs: list[PlannerPair], sample: int) -> Any:
        scored.extend(pairs)
        return score(setting, group, pairs, sample)

    monkeypatch.setattr(scoring, "score", counting)
    mine = f"{board.parent / 'mine.py'}:InTurn"
    run("--quick", "--seeds", "1", "--out", str(board), "--planner", mine)
    assert len(scored) == 1
    again = lines_of(board)
    assert again[:-1] == whole[:-1]
    assert again[-1]["key"] == whole[-1]["key"]
    assert again[-1]["scores"]["layer_ms"] == whole[-1]["scores"]["layer_ms"]


def test_another_source_is_another_planner(tmp_path: Path) -> None:
    keys = []
    for shift in (0, 1):
        (tmp_path / f"of_{shift}.py").write_text(OWN.replace("rows %", f"(rows + {shift}) %"))
        own = named_planner(f"{tmp_path / f'of_{shift}.py'}:InTurn")
        found = scoring.results([SETTING], [SMALL[0].with_planners([own])], 1, tmp_path)
        keys.append({result.key for result in found})
    assert len(keys[0]) == len(keys[1])
    # All but those of the two splits over the user's layouts.
    assert len(keys[0] & keys[1]) == len(keys[0]) - 2


def test_a_line_that_is_none_is_named(tmp_path: Path) -> None:
    path = tmp_path / "results.jsonl"
    path.write_text('{"schema": 1}\n')
    with pytest.raises(ValueError, match=r"line 1 of .* is not a result: .*scores is missing.*; delete the line"):
        list(result_journal(tmp_path).read())
    path.write_text('{"schema": 9}\n')
    with pytest.raises(ValueError, match="it has schema 9, and this moesys reads schema 1"):
        list(result_journal(tmp_path).read())


# --- scoring ---


def test_scores_are_those_of_the_plan() -> None:
    """Static, whose layout and bytes one can count by hand."""
    [(_, scores)] = score(SETTING, SMALL[0], (PlannerPair(Static(), EvenSplit()),), 0)
    slots, R = SMALL[0].slots(MODEL, CLUSTER), CLUSTER.num_ranks
    assert slots == 3
    held_bytes = 2 * MODEL.expert_parameters
    assert scores.restored_gb == pytest.approx([slots * R * held_bytes * (R - 1) / R / 1e9] * SCORED)
    assert scores.copies == [0] * SCORED
    assert all(1 <= of <= R for of in scores.max_over_mean)
    assert all(0 < share < 1 for share in scores.crossing)
    state = 16 * MODEL.num_experts * MODEL.expert_parameters / R / 1e9
    assert min(scores.memory_gb) > state


def test_lent_experts_are_counted() -> None:
    [(_, moon)] = score(SETTING, SMALL[2], (PlannerPair(MoonEp(), Quotas()),), 0)
    assert moon.max_over_mean == pytest.approx([1.0] * SCORED, abs=1e-3)
    for copies, gb in zip(moon.copies, moon.restored_gb, strict=True):
        assert copies == pytest.approx(round(copies))
        assert gb == pytest.approx(copies * 2 * MODEL.expert_parameters / 1e9)


@pytest.mark.parametrize(("name", "busiest"), [("W0", 1), ("W2", 3.25), ("W3", 1), ("W5", 2)])
def test_forced_balance_by_hand(name: str, busiest: float) -> None:
    """Plain experts on links without cost: a layer takes as long as its busiest rank, here ``busiest`` of the mean."""
    model = ModelShape(hidden_size=4096, intermediate_size=16384, num_experts=32, top_k=4, dtype="bfloat16")
    cluster = ClusterSpec(ranks_per_node=4, intra_node_gb_per_s=1e9, intra_node_us=0)
    [routing] = [one for one in FURTHER if one.name.startswith(name)]
    setting = RoutingSetting(routing, "large", model, "4", cluster)
    plain = PlannerGroup("plain", "without copies", (PlannerPair(Static(), EvenSplit()),), lag=0, slots_per_rank=8)
    [(_, scores)] = score(setting, plain, plain.pairs, 0)
    shares = np.array(scores.forced_ms) / scores.layer_ms
    assert shares == pytest.approx(1 / busiest, rel=1e-6 if name == "W0" else 0.05)


@pytest.mark.parametrize("ranks", [6, 16])
def test_without_experts_on_every_rank_there_is_no_forced_balance(ranks: int) -> None:
    """Plain experts live two on a rank, on 4 of 6 ranks, or one on a rank, on 8 of 16."""
    setting = replace(SETTING, cluster=ClusterSpec(ranks_per_node=ranks))
    [(_, scores)] = score(setting, SMALL[0], (PlannerPair(Static(), EvenSplit()),), 0)
    assert (scores.forced_ms, len(scores.layer_ms)) == ([], SCORED)


def test_a_split_of_one_s_own_goes_over_all_layouts(tmp_path: Path) -> None:
    (tmp_path / "splitting.py").write_text(OWN)
    own = named_planner(f"{tmp_path / 'splitting.py'}:First")
    group = SMALL[1].with_planners([own])
    assert [pair.name for pair in group.pairs[2:]] == ["eplb + splitting:First", "laer + splitting:First"]
    found = dict(score(SETTING, group, group.pairs[2:3], 0))
    assert next(iter(found.values())).cannot == ""


def test_a_planner_is_named_by_its_module_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "module_of_mine.py").write_text(OWN)
    monkeypatch.syspath_prepend(tmp_path)
    assert named_planner("module_of_mine:InTurn") == named_planner("module_of_mine.InTurn")
    with pytest.raises(ValueError, match="efort") as error:
        named_planner('{"kind": "greedy", "efort": 4}')
    assert "ms.Split" not in str(error.value)


# --- what takes part ---


def test_workloads_are_chosen_by_name(tmp_path: Path) -> None:
    chosen = ["W2 hot rank", "samples of few prompts"]
    options = [word for name in chosen for word in ("--workload", name)]
    run("--quick", "--seeds", "1", "--out", str(tmp_path / "out"), *options)
    assert {line["workload"] for line in lines_of(tmp_path / "out")} == set(chosen)
    page = markdown(tmp_path / "out")
    assert "--workload 'W2 hot rank'" in page
    section = page.split("## history: by workload\n")[1].split("\n## ")[0]
    assert re.search(r"^\| W2 hot rank \| static \+ \w+ \| \d+\.\d \|$", section, re.MULTILINE)


def test_a_trace_is_replayed_alone_under_other_conditions(tmp_path: Path) -> None:
    """A trace of another shape, on a given model and cluster, with a lag, slots and a predictor."""
    drawn = Generated(num_layers=1, tokens_per_rank=64, warmup=0, steps=9, drift=0.5)
    save_trace(generate(drawn, 4, 16, 4, 0), tmp_path / "ours.npz")
    shape = {"num_local_experts": 16, "num_experts_per_tok": 4, "hidden_size": 64, "intermediate_size": 32}
    fields = {"model_type": "mixtral", "num_hidden_layers": 1, "vocab_size": 99, **shape}
    fields |= {"num_attention_heads": 2, "num_key_value_heads": 2}
    (tmp_path / "config.json").write_text(json.dumps(fields))
    arguments = ["--seeds", "1", "--trace", str(tmp_path / "ours.npz"), "--traces-only", "--cluster", "2x2"]
    arguments += ["--model", str(tmp_path / "config.json"), "--planner", '{"kind": "greedy", "effort": 4}']
    layer_ms = []
    for number, changes in enumerate(([], ["--lag", "4"], ["--slots", "6"], ["--lag", "4", "--predictor", "oracle"])):
        run(*arguments, "--out", str(tmp_path / str(number)), *changes)
        lines = lines_of(tmp_path / str(number))
        assert {(line["workload"], line["cluster"]) for line in lines} == {("ours, given", "2x2")}
        [line] = [line for line in lines if line["planner"] == "greedy(effort=4) + flow" and line["group"] == "late"]
        assert line["slots"] == (6 if "--slots" in changes else 5)
        layer_ms.append(tuple(line["scores"]["layer_ms"]))
        page = (tmp_path / str(number) / "leaderboard.md").read_text()
        assert " ".join(["--seeds 1", *changes]).split(" --")[-1] in page
    assert len(set(layer_ms)) == 4


def test_all_kinds_of_planners_and_splits_take_part(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.undo()
    from moesys.config import Balance, Split

    taking_part = [pair for group in GROUPS for pair in group.pairs]
    assert {pair.balance.kind for pair in taking_part} == set(Balance.kinds())
    assert {pair.split.kind for pair in taking_part} == set(Split.kinds())
    everywhere = settings(models={}, clusters={})
    assert len(everywhere) == 49
    assert {setting.routing.name for setting in everywhere} == {
        *(one.name for one in packaged_recordings()),
        *(drawn.name for drawn in (*GENERATED, *FURTHER)),
    }
    for group in GROUPS:
        assert len({pair.name for pair in group.pairs}) == len(group.pairs)
        for setting in everywhere:
            assert group.slots(setting.model, setting.cluster) * setting.cluster.num_ranks >= setting.model.num_experts


def test_planners_that_need_more_slots_say_so() -> None:
    [(_, scores)] = score(SETTING, SMALL[0], (PlannerPair(MoonEp(), FlowSplit()),), 0)
    assert "2 experts live there and it may borrow 2; use slots_per_rank of at least 4" in scores.cannot
    [(_, ultra)] = score(SETTING, SMALL[0], (PlannerPair(UltraEp(), FlowSplit()),), 0)
    assert ultra.cannot == ""
