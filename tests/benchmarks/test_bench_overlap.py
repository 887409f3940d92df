"""The benchmark of overlap over paced links: it times strategies with equal bits, and nothing else."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from benchmarks.__main__ import app
from benchmarks.paced_overlap import PARTS, paced_steps


@pytest.mark.slow
@pytest.mark.parametrize(
    ("part", "names"),
    [
        ("chunks", ["sequential", *(f"pipelined {n}" for n in (2, 4, 8))]),
        ("copies", ["lent on demand", "lent ahead", "lent ahead, delay"]),
    ],
)
def test_a_part_is_measured_over_links_of_a_chosen_pace(tmp_path: Path, part: str, names: list[str]) -> None:
    path = tmp_path / "overlap.json"
    arguments = ["overlap", "--part", part, "--tokens", "32", "--repeats", "1", "--out", str(tmp_path)]
    result = CliRunner().invoke(app, arguments)
    assert result.exit_code == 0, result.output
    assert "MEASURED: overlap over paced links" in result.output
    found = json.loads(path.read_text())
    assert found["paces"][0]["gb_per_s"] > 0
    assert [row["strategy"]["name"] for row in found["rows"]] == names
    for row in found["rows"]:
        assert (row["wrong"], len(row["samples_ms"])) == ("", 1)
        assert row["blocked_ms"] == sum(row["exposed_ms"].values())


def test_tokens_and_experts_of_linked_layers_have_a_link_each() -> None:
    links: Any = ("tokens", "experts")
    steps = paced_steps(PARTS[0], PARTS[0].strategies[0], links)
    channels = [(each.experts.token_channel, each.experts.store.channel) for each in steps.layers]
    assert [tuple(channel.link for channel in of_layer) for of_layer in channels] == [links]
    steps.close()
