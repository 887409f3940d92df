"""The benchmark of whole models: it times what computes as transformers does, and nothing else."""

from __future__ import annotations

import json
from functools import partial
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from typer.testing import CliRunner

from benchmarks import whole_models
from benchmarks.__main__ import app
from benchmarks.harness import model_steps
from benchmarks.harness.contest import Near
from benchmarks.harness.live_tensors import live_at_peak
from moesys.lab.ranks.pool import LocalRanks
from moesys.moe.experts import experts_of


def run(*arguments: str) -> tuple[int, str]:
    result = CliRunner().invoke(app, ["models", *arguments])
    return result.exit_code, result.output


# tests/hf/test_expert_parallel.py always compares what strategies compute, and test_bench_layer.py times.
@pytest.mark.slow
@pytest.mark.parametrize("options", [("--hidden", "64"), ("--memory",)])
def test_every_strategy_trains_a_model_as_transformers_does_and_is_timed(tmp_path, options, monkeypatch):
    monkeypatch.setattr(whole_models, "MEMORY_PROCESSES", 1)
    out = tmp_path / "models.json"
    only = ("--model", "qwen3-moe", "--routing", "skewed", "--sequences", "1")
    code, output = run(*only, "--repeats", "1", "--out", str(tmp_path), *options)
    assert code == 0, output
    assert ("peak MiB" in output) == ("--memory" in options)
    assert "MEASURED" in output
    found = json.loads(out.read_text())
    rows = {row["name"]: row for row in found["rows"]}
    assert list(rows) == [whole_models.THEIRS, *(strategy.name for strategy in model_steps.strategies(2))]
    assert all(len(row["samples_ms"]) == 1 and not row["wrong"] for row in rows.values())
    assert rows["ep"]["max_over_mean"] > 1.2
    assert rows["lent ep"]["max_over_mean"] < 1.1
    memory = {row["name"]: row for row in found["memory"]}
    if "--memory" in options:
        assert list(memory) == list(rows)
        assert memory["ep"]["peak_mib"] > memory["ep"]["live_mib"] + memory["ep"]["libraries_mib"]
        assert memory[whole_models.THEIRS]["libraries_mib"] < memory["ep"]["libraries_mib"]
        assert {"slots", "exchange", "experts", "parameters"} <= memory["fsep"]["live"].keys()


@pytest.mark.slow
def test_lora_is_timed_beside_a_full_step_and_peft(tmp_path, monkeypatch):
    monkeypatch.setattr(whole_models, "LORA_SIZES", ((4, 64),))
    code, output = run("--lora", "4", "--sequences", "1", "--repeats", "1", "--out", str(tmp_path))
    assert code == 0, output
    rows = json.loads((tmp_path / "models.json").read_text())["rows"]
    assert [row["name"] for row in rows] == [whole_models.FULL, whole_models.PEFT, whole_models.LORA]
    assert all(len(row["samples_ms"]) == 1 and row["live_mib"] for row in rows)


def live_of_rank(part: whole_models.Part, folder: Path) -> dict[str, float]:
    """The most bytes of tensors that live at the same time on this rank, by contestant, in MiB."""
    found = {}
    for name, strategy in whole_models._contestants(dist.get_world_size()).items():
        steps = whole_models._steps(part, folder, strategy)
        # Layouts settle.
        for _ in range(2):
            steps.step()
        found[name] = sum(live_at_peak(steps.model, steps.optimizer, steps.step).values()) / 2**20
        pools = {id(pool) for each in experts_of(steps.model) for pool in (each.shards.memory, each.context.memory)}
        assert len(pools) == (strategy is not None)
    return found


@pytest.mark.slow
def test_no_more_tensors_live_than_under_all_to_all_and_in_slots(ranks: LocalRanks, tmp_path: Path) -> None:
    """Layers of one model use the same pages in turn, and rows go home in the memory of what was computed."""
    part = whole_models.Part("qwen3-moe", "skewed", sequences=4)
    model = model_steps.new_model(part.model)
    model.save_pretrained(tmp_path / "model")
    num_layers, expert_mib = model.config.num_hidden_layers, 3 * model_steps.HIDDEN * 512 * 4 / 2**20
    found = ranks.run(live_of_rank, part, tmp_path / "model", num_ranks=2, timeout_s=280.0)
    live_mib = {name: max(each[name] for each in found) for name in found[0]}
    # A rank computes the same tokens under both.
    assert all(each["ep"] <= each[whole_models.THEIRS] for each in found), found
    most_mib = {
        # Two slots beyond a rank's own experts keep what is lent from forward to backward.
        "lent ep": 2 * num_layers * expert_mib,
        "lent ep, pipelined": 2 * num_layers * expert_mib,
        # Six slots, of one layer at a time.
        "fsep": 6 * expert_mib,
    }
    for name, slots_mib in most_mib.items():
        assert live_mib[name] <= live_mib[whole_models.THEIRS] + slots_mib, live_mib


def add_over(rows: torch.Tensor) -> None:
    rows + rows
    torch.cat([rows, rows, rows])


def test_bytes_that_live_at_the_same_time_are_counted() -> None:
    model = torch.nn.Linear(1000, 10, bias=False)
    optimizer = torch.optim.SGD(model.parameters(), momentum=0.5)
    rows = torch.zeros(5000)
    live = live_at_peak(model, optimizer, partial(add_over, rows))
    # What was added is freed when rows are joined.
    assert live == {"parameters": 40_000, "other": 20_000 + 60_000}


@pytest.mark.parametrize(
    ("module", "part"),
    [
        *(("some_test", "other"), ("moesystem.moe.store", "other"), ("moesys.moe.layer", "experts")),
        *(("moesys.moe.store", "slots"), ("moesys.overlap.comm.channel", "exchange")),
        ("transformers.models.olmoe.modeling_olmoe", "rest"),
        ("torch.distributed.fsdp._fully_shard._fsdp_param", "fsdp"),
    ],
)
def test_parts_of_bytes_do_not_depend_on_where_a_checkout_lies(module: str, part: str) -> None:
    names = {"__name__": module, "torch": torch}
    exec(compile("def step(): torch.zeros(7)", f"/home/me/transformers/moesys/{module}.py", "exec"), names)
    model = torch.nn.Linear(10, 10, bias=False)
    live = live_at_peak(model, torch.optim.SGD(model.parameters()), names["step"])
    assert live == {"parameters": 400, part: 28}


def test_another_gradient_is_not_timed() -> None:
    agrees = Near(model_steps.TOLERANCE, whole_models.THEIRS)
    wanted = {"loss": torch.ones(()), "weight": torch.ones(3)}
    assert agrees("all_to_all", wanted) == ""
    assert agrees("same", dict(wanted)) == ""
    assert agrees("lost", wanted | {"weight": torch.full((3,), torch.nan)}) == "weight differs from all_to_all by inf"
    assert agrees("other", wanted | {"weight": torch.tensor([1.0, 1.0, 1.001])}) == (
        "weight differs from all_to_all by 5.8e-04"
    )


def test_balanced_routing_is_even_and_skewed_is_not(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.distributed, "get_rank", lambda: 0)
    even, skewed = (
        model_steps.routing_of(routing, 2, 1024)[0].flatten().bincount() for routing in model_steps.ROUTINGS
    )
    assert even.max() == even.min()
    assert skewed.max() > 3 * skewed.min()
