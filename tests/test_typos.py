"""What people read after a typo: typos.txt has mistakes, each with its message, as a stranger would see it.

``python tests/test_typos.py`` from the root of the checkout writes the messages anew; read what changed.
"""

from __future__ import annotations

import re
import textwrap
from collections.abc import Iterator
from contextlib import chdir
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import pytest
import torch
from typer.testing import CliRunner

import moesys as ms
from moesys.__main__ import app

TYPOS = Path(__file__).with_name("typos.txt")
SHAPE = {"hidden_size": 8, "intermediate_size": 16, "num_experts": 8, "top_k": 2}
shape, ep, cluster = ms.ModelShape(**SHAPE), ms.presets.ep(), ms.presets.cpu(2)
load = ms.planning.LoadMatrix(np.ones((2, 8), dtype=np.int64))
x = torch.ones(4, 8)


def experiment(**changes: Any) -> ms.Experiment:
    fields = {"name": "small", "model": shape, "cluster": cluster, "strategies": (ep,), "workload": ms.Generated()}
    return ms.Experiment(**fields | changes)


def moesys(*arguments: str) -> str:
    """Returns what a command prints to stderr, without the box that the parser of the command line draws."""
    result = CliRunner().invoke(app, [*arguments], prog_name="moesys")
    assert result.exit_code == 2, result.output
    return re.sub("[─│╭╮╰╯]", " ", result.stderr)


def message(code: str) -> str:
    """Runs a mistake in the current folder, and returns what it raises or prints."""
    if code.startswith("$ "):
        return moesys(*code.split()[2:])
    try:
        eval(code)
    except (ValueError, TypeError, AttributeError) as error:
        return f"{type(error).__name__}: {error}"
    raise AssertionError(f"nothing is wrong with {code}")


def write_files() -> None:
    """Writes what the commands read into the current folder."""
    toml = experiment().to_toml()
    Path("small.toml").write_text(toml)
    Path("field.toml").write_text(toml.replace("replan_every", "replan_evry"))
    Path("kind.toml").write_text(toml.replace('"sequential"', '"sequental"'))
    Path("nested.toml").write_text(toml.replace("[[strategies]]", "[[experiment.strategies]]", 1))
    Path("load.csv").write_text("1,2,3,4\n4,3,2,1\n")


def with_messages(text: str) -> Iterator[str]:
    """Yields the lines of typos.txt with the messages of today."""
    for line in text.splitlines():
        if line.startswith("  "):
            continue
        yield line
        if line and not line.startswith("#"):
            words = " ".join(message(line).split())
            yield textwrap.indent("\n".join(textwrap.wrap(words, 116, break_on_hyphens=False)), "  ")


def typos() -> dict[str, str]:
    found, code = {}, ""
    for line in TYPOS.read_text(encoding="utf-8").splitlines():
        if line.startswith("  "):
            found[code] += line.removeprefix(" ")
        elif line and not line.startswith("#"):
            code = line
            found[code] = ""
    return found


@pytest.mark.parametrize(("code", "expected"), [pytest.param(*typo, id=typo[0][:60]) for typo in typos().items()])
def test_a_typo_is_answered_in_words(code: str, expected: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    write_files()
    found = " ".join(message(code).split())
    assert found == expected.strip()
    assert not re.search(r"pydantic|type=\w+_|input_value|Traceback", found)


def test_short_names_are_understood_and_never_written() -> None:
    short = ms.Strategy(name="x", sharding=ms.Ep(slots_per_rank=4), balance="greedy", overlap="sequential")
    long = ms.Strategy(name="x", sharding=ms.Ep(slots_per_rank=4), balance=ms.Greedy(), overlap=ms.Sequential())
    assert (short, short.fingerprint(), short.to_json()) == (long, long.fingerprint(), long.to_json())
    assert ms.ModelShape(**SHAPE, dtype="bf16") == ms.ModelShape(**SHAPE, dtype="bfloat16")
    assert ms.plan_layout(load, cluster, "greedy", 4) == ms.plan_layout(load, cluster, ms.Greedy(), 4)
    model = ms.models.ModelSpec.from_config("qwen3-moe-small")
    assert ms.models.ModelRun(model="qwen3-moe-small", cluster=cluster) == ms.models.ModelRun(
        model=model, cluster=cluster
    )


def test_the_package_shows_its_public_names_and_its_version() -> None:
    assert dir(ms) == sorted([*ms.__all__, "__version__"])
    project = (Path(__file__).parents[1] / "pyproject.toml").read_text()
    assert f'version = "{ms.__version__}"' in project


if __name__ == "__main__":
    with TemporaryDirectory() as folder, chdir(folder):
        write_files()
        TYPOS.write_text("\n".join(with_messages(TYPOS.read_text(encoding="utf-8"))) + "\n", encoding="utf-8")
