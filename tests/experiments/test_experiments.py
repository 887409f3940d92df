"""Every experiment loads, is fair to its baseline, fits on a page, and runs in small."""

from __future__ import annotations

import inspect
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import moesys as ms
from moesys.lab.runs.comparison import JUDGED_STEPS, Comparison, compare_records
from moesys.lab.runs.declarations import load_experiment

FOLDER = Path(__file__).parents[2] / "experiments"
FILES = sorted({*FOLDER.glob("*.py")} - {FOLDER / "demo.py"})
PAGE_LINES = 60

every_file = pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
# Others train too, in seconds.
SLOW = ("convergence", "mega_interpret", "overlap_ablation", "real_models")
every_file_in_small = pytest.mark.parametrize(
    "path",
    [pytest.param(path, marks=pytest.mark.slow) if path.stem in SLOW else path for path in FILES],
    ids=lambda path: path.stem,
)


def in_small(experiment: ms.Experiment) -> ms.Experiment:
    """The same strategies, in seconds: a narrow model, few tokens, one seed, and of a training as many steps as show a
    wrong gradient. Weights are large, so that few tokens are near a tie.
    """
    model = experiment.model.replace(hidden_size=16, intermediate_size=16, initializer_range=0.1)
    if isinstance(experiment.workload, ms.models.ModelTraining):
        model = experiment.model
        workload = experiment.workload.replace(context=16, batch=1, warmup=0, steps=JUDGED_STEPS)
    elif isinstance(experiment.workload, ms.Training):
        # The interpreter takes seconds a step.
        steps = 2 if experiment.workload.interpret else JUDGED_STEPS
        # As many tokens as a block of LayoutInvariant has, where that is.
        context = 16 if experiment.workload.interpret else 32
        small = {"num_heads": 2, "context": context, "batch": 1, "warmup": 0, "steps": steps}
        workload = experiment.workload.replace(**small)
    else:
        workload = experiment.workload.replace(tokens_per_rank=512, warmup=1, steps=2)
    return experiment.replace(model=model, workload=workload, seeds=(0,), repeat_baseline=False)


def compared(experiment: ms.Experiment, out: Path) -> Comparison:
    result = ms.run(experiment, out)
    assert [record.trace for record in result.failed] == []
    return compare_records(experiment, result.records)


def module_of(name: str) -> ModuleType:
    module = ModuleType(name)
    exec(compile((FOLDER / f"{name}.py").read_bytes(), name, "exec"), vars(module))
    return module


def test_there_are_the_experiments_that_the_docs_name() -> None:
    assert [path.stem for path in FILES] == [
        "convergence",
        "mega_interpret",
        "overlap_ablation",
        "own_planner",
        "real_models",
        "rebalance_ablation",
        "skew_sweep",
        "unified_vs_parts",
    ]


@every_file
def test_an_experiment_is_a_page_that_asks_a_question_and_leaves_no_rank_idle(path: Path) -> None:
    text, experiment = path.read_text(encoding="utf-8"), load_experiment(path)
    assert len(text.splitlines()) <= PAGE_LINES
    assert inspect.getdoc(module_of(path.stem)).splitlines()[0].endswith("?")
    assert f"\n{experiment.source.capitalize()}" in text
    # No strategy shines because another leaves ranks idle.
    for strategy in experiment.strategies:
        assert min(strategy.slots(experiment.model, experiment.cluster)) > 0, strategy.name


@every_file_in_small
def test_an_experiment_runs_in_small_and_compares_all_its_strategies(path: Path, tmp_path: Path) -> None:
    experiment = in_small(load_experiment(path))
    comparison = compared(experiment, tmp_path)
    assert comparison.source == experiment.source
    assert {row.strategy for row in comparison.rows} == set(experiment.strategies)
    assert all(row.n == 1 and row.median("step_ms") > 0 for row in comparison.rows)
    if experiment.source == "measured":
        assert [row.name for row in comparison.rows if row.agreement and not row.agreement.holds] == []
        exact = [row.agreement.exact for row in comparison.rows if row.agreement]
        assert exact == [path.stem in ("convergence", "real_models")] * len(exact)
    if path.stem == "mega_interpret":
        assert [row.agreement.bit_equal for row in comparison.rows if row is not comparison.baseline] == [True] * 3
    if path.stem == "overlap_ablation":
        by_name = {row.name: row.losses[0] for row in comparison.rows}
        for sharding in ("ep", "fsep"):
            assert all(by_name[f"{sharding}/{chunks}"] == by_name[sharding] for chunks in (2, 4, 8))


def test_the_flow_split_never_leaves_more_imbalance_than_the_even_split_over_the_same_layouts(tmp_path: Path) -> None:
    ablation = in_small(load_experiment(FOLDER / "rebalance_ablation.py")).replace(
        cluster=ms.ClusterSpec(num_nodes=2, ranks_per_node=4), seeds=(0, 1, 2)
    )
    rows = {row.name: row for row in compared(ablation, tmp_path).rows}
    for seed in ablation.seeds:
        even, flow = (np.array(rows[name].samples["load_max_over_mean"][seed]) for name in ("laer+even", "laer+flow"))
        assert (flow <= even).all()
        assert flow.mean() < even.mean()


def test_a_planner_of_ones_own_beats_eplb_under_either_split(tmp_path: Path) -> None:
    experiment = load_experiment(FOLDER / "own_planner.py")
    few = experiment.workload.replace(num_layers=1, warmup=2, steps=4)
    rows = {row.name: row for row in compared(experiment.replace(workload=few, seeds=(0, 1)), tmp_path).rows}
    for split in ("even", "flow"):
        for metric in ("step_ms", "inter_node_share"):
            assert rows[f"own+{split}"].median(metric) < rows[f"eplb+{split}"].median(metric)


node_slots = st.lists(st.lists(st.integers(0, 3), min_size=1, max_size=3), min_size=1, max_size=3)


@given(node_slots.filter(lambda slots: any(map(any, slots))), st.data())
def test_a_planner_of_ones_own_has_a_layout_for_any_nodes_and_slots(slots, data):
    slots_R = [count for of_node in slots for count in of_node]
    E = data.draw(st.integers(1, sum(slots_R)))
    tokens = st.lists(st.integers(0, 9), min_size=E, max_size=E)
    load = ms.planning.LoadMatrix(data.draw(st.lists(tokens, min_size=len(slots_R), max_size=len(slots_R))))
    cluster = ms.ClusterSpec(num_nodes=len(slots), ranks_per_node=tuple(map(len, slots)))
    layout = ms.plan_layout(load, cluster, module_of("own_planner").NodeByNode(), slots_R)
    # Where each node has room, each holds every expert.
    if min(map(sum, slots)) >= E:
        nodes = np.array(cluster.node_of_rank)
        assert all(layout.replicas_RE[nodes == node].any(axis=0).all() for node in range(len(slots)))


def test_the_sweep_is_the_experiment_at_every_skew_each_with_a_folder_of_its_own() -> None:
    sweep = module_of("skew_sweep")
    experiments = sweep.experiments()
    assert [experiment.workload.skew for experiment in experiments] == list(sweep.SKEWS)
    assert len({experiment.name for experiment in experiments}) == len(sweep.SKEWS)
    assert sweep.experiment() in experiments
