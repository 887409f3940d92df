"""Files of an earlier release are read, and give what they gave then."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import numpy as np
import pytest
import release_files
from release_files import FSEP, SAVED_STEPS, STEPS, command, load_checkpoint, simulated, tokens_of, train, trained
from table_cases import LONG_FRACTION
from typer.main import get_command
from typer.testing import CliRunner

import moesys as ms
from moesys.__main__ import app
from moesys.lab.ranks.pool import LocalRanks
from moesys.traces import load_trace

RELEASE = Path(__file__).with_name("files") / "4f9672e"


@pytest.fixture
def release(tmp_path: Path) -> Path:
    """A copy, in which commands may write."""
    return Path(shutil.copytree(RELEASE, tmp_path / "release"))


def test_declarations_are_read() -> None:
    assert ms.Strategy.from_toml((RELEASE / "fsep.toml").read_text()) == FSEP
    for experiment in (simulated(), trained()):
        assert ms.Experiment.from_json((RELEASE / f"{experiment.name}.json").read_text()) == experiment


@pytest.mark.parametrize(("field", "value"), [("shaped_links", True), ("cpus_per_host", 0.5)])
def test_fields_that_are_gone_are_refused_by_name(field: str, value: object) -> None:
    declared = json.loads((RELEASE / "trained.json").read_text())
    declared["workload"][field] = value
    with pytest.raises(ValueError, match=f"has no field '?{field}"):
        ms.Experiment.model_validate(declared)


@pytest.mark.parametrize("name", ["simulated", "trained"])
def test_a_run_folder_is_gone_on_with(release: Path, name: str) -> None:
    """All trials are recorded there, so that none runs again and no new folder is made."""
    folders = sorted((release / "runs").glob("*/"))
    records = {folder: (folder / "records.jsonl").read_text() for folder in folders}
    command("run", release / f"{name}.json", "--out", release / "runs")
    assert sorted((release / "runs").glob("*/")) == folders
    assert {folder: (folder / "records.jsonl").read_text() for folder in folders} == records


def test_a_run_folder_is_compared(release: Path) -> None:
    (folder,) = (release / "runs").glob("simulated-*")
    here, there = command("compare", folder, "--json"), (RELEASE / "compared.json").read_text()
    shortened = [LONG_FRACTION.sub(lambda found: f"{float(found[0]):.12g}", text) for text in (here, there)]
    of_now, of_release = map(json.loads, shortened)
    # Its words are others now.
    assert of_now.pop("machine").split(", ")[:2] == of_release.pop("machine").split(", ")[:2]
    # The field is newer, and tables had a sign-flip test besides the interval.
    assert of_now["experiment"]["workload"].pop("optimizer") == "adam"
    for row in of_release["rows"]:
        assert row["speedup"] is None or row["speedup"].pop("p") > 0
    assert of_now == of_release


def test_a_trace_is_replayed(release: Path) -> None:
    (trained_folder,) = (release / "runs").glob("trained-*")
    (kept,) = (trained_folder / "traces").glob("62878a1ca970-*.npz")
    trace = load_trace(release / "fsep.npz")
    assert trace.digest == load_trace(kept).digest
    replayed = simulated().replace(
        cluster=ms.ClusterSpec(ranks_per_node=2),
        workload=ms.Replay(trace=str(release / "fsep.npz"), warmup=1),
        seeds=(0,),
    )
    assert len(ms.run(replayed, release / "replayed").records) == 2


def test_a_plan_is_the_layout_in_force(release: Path) -> None:
    old = json.loads((release / "plan.json").read_text())
    arguments = ("plan", "--load", release / "load.npy", "--cluster", "2x2", "--slots", 2)
    command(*arguments, "--previous", release / "plan.json", "--out", release / "new.json")
    assert json.loads((release / "new.json").read_text())["expert_RS"] == old["expert_RS"]


def test_a_journal_of_another_release_is_set_aside(release: Path) -> None:
    arguments = ["tune", release / "simulated.json", "--out", release / "tuned", "--budget", 8, "--jobs", 1]
    result = CliRunner().invoke(app, [*map(str, arguments)])
    assert "journal" in result.output
    assert result.exit_code == 2


def resumed(folder: str) -> tuple[list[float], list[str]]:
    model, optimizer = load_checkpoint(folder, FSEP)
    losses = train(model, optimizer, range(SAVED_STEPS, STEPS))
    return losses, [event.what for layer in model.moe for event in layer.experts.schedule.events]


def output(folder: str, strategy: ms.Strategy) -> float:
    model, _ = load_checkpoint(folder, strategy)
    return model(tokens_of(0, 0)).square().sum().item()


def test_a_checkpoint_is_resumed_and_loaded_on_other_ranks_under_another_sharding(release: Path, ranks: LocalRanks):
    """The last bit may differ on another machine, whose BLAS sums in another order."""
    found = ranks.run(resumed, str(release / "checkpoint"), num_ranks=2)
    there = [float.fromhex(word) for word in (release / "losses.txt").read_text().split()]
    for rank, (losses, events) in enumerate(found):
        np.testing.assert_allclose(losses, there[STEPS * rank :][SAVED_STEPS:STEPS], rtol=1e-5)
        assert events == []
    assert release_files.SHAPE.num_experts == 4
    four = ranks.run(output, str(release / "checkpoint"), ms.Strategy(name="ep"))
    two = ranks.run(output, str(release / "checkpoint"), FSEP, num_ranks=2)
    np.testing.assert_allclose(four, two[0], rtol=1e-5)


def test_public_names_and_commands_remain() -> None:
    """All but those that moved experts to other owners, the bound in seconds, and classes of results; some in modules
    of their own. The demo is a program of the checkout.
    """
    names, modules = (RELEASE / "public_names.txt").read_text().split(), (ms, ms.models, ms.planning, ms.traces)
    results = (
        "Comparison Declared LayerMetrics MoERuntime PathPart RestOfStep RunResult Simulation Span Timeline TuneResult"
    )
    gone = "SecondsCertificate certify_seconds compare_records gather_loads move_homes plan_homes plan_layouts"
    found = [name for name in names if not any(hasattr(module, name) for module in modules)]
    assert found == sorted([*results.split(), *gone.split(), "replica_budget", "simulation"])
    commands = "run compare bisect explain simulate tune plan report convert doctor"
    assert set(commands.split()) <= set(get_command(app).commands)
