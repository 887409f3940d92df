"""The benchmark in other trainers times experts whose gradients are those of the trainer's own, and refuses what cannot
run.
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from benchmarks import hosts
from benchmarks.__main__ import app


def run(*arguments: str) -> tuple[int, str]:
    result = CliRunner().invoke(app, ["hosts", *arguments])
    return result.exit_code, result.output


# tests/torchtitan/ and tests/megatron/ always compare steps.
@pytest.mark.slow
@pytest.mark.parametrize("host", hosts.HOSTS)
def test_every_strategy_trains_as_the_host_does_and_is_timed(host: str, tmp_path: Path) -> None:
    smallest = ("--host", host, "--routing", "skewed", "--sequences", "1", "--layers", "1", "--repeats", "1")
    code, output = run(*smallest, "--out", str(tmp_path))
    assert code == 0, output
    rows = {row["name"]: row for row in json.loads((tmp_path / "hosts.json").read_text())["rows"]}
    assert list(rows) == [host, "ep", "lent ep", "fsep"]
    assert all(len(row["samples_ms"]) == 1 and not row["wrong"] for row in rows.values())
    assert rows["ep"]["max_over_mean"] > rows["lent ep"]["max_over_mean"]


def test_what_cannot_run_is_refused_before_ranks_start(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hosts, "lacks_shares", lambda: "no control groups")
    monkeypatch.setattr(hosts, "measure", lambda *_: pytest.fail("it measures"))
    refused = {
        ("--ranks", "3"): "ranks=3 does not divide the 64 experts of a layer; choose 2, 4, 8, ...",
        ("--share", "0.5"): "share=0.5 needs control groups of Linux: no control groups",
        (): "torchtitan is not installed; run `make hosts`, or install moesys[torchtitan]",
    }
    for arguments, message in refused.items():
        with monkeypatch.context() as patch:
            if not arguments:
                patch.setattr("importlib.util.find_spec", lambda name: None)
            code, output = run(*arguments)
        assert code == 2
        assert message in output
