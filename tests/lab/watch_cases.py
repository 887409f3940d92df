"""Folders of watched trainings, written line by line as ``Watch`` does; and what holds for every page."""

from __future__ import annotations

import re
import xml.etree.ElementTree as ET
from collections.abc import Iterable, Sequence
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import numpy as np

from moesys.step_lines import EventLine, LayerLine, StepLine, step_file, step_journal

NUM_EXPERTS = 4


def layer_line(layer: int, step: int, rank: int = 0, tokens_E: Sequence[int] = ()) -> LayerLine:
    """Numbers that tell layer, step and rank."""
    load = 1 + ((7 * step + 3 * layer) % 11) / 8
    return LayerLine(
        layer=layer,
        micro_batches=2,
        load_p50=load,
        load_p95=load + 0.25,
        load_max=load + 0.5,
        experts_without_tokens=(step + layer) % 3,
        exposed_ms=10.0 * (layer + 1) + rank,
        plan_ms=0.5 + rank,
        restored_mib=2.0 + rank,
        tokens_E=tuple(tokens_E),
    )


def step_line(
    step: int,
    layers: Iterable[int],
    rank: int = 0,
    *,
    num_ranks: int = 8,
    loss: float | None = None,
    events: Sequence[str] = (),
) -> StepLine:
    tokens_E = np.arange(NUM_EXPERTS).tolist() if rank == 0 else ()
    return StepLine(
        step=step,
        num_ranks=num_ranks,
        time_s=1_700_000_000.0 + step,
        step_ms=100.0 + step % 7,
        numbers={"loss": 5 / (1 + step / 10) if loss is None else loss},
        layers=tuple(layer_line(layer, step, rank, tokens_E) for layer in layers),
        events=tuple(EventLine(0, step, what) for what in events),
    )


def write_run(folder: Path, num_steps: int, num_layers: int, num_ranks: int = 1) -> Path:
    for rank in range(num_ranks):
        lines = [step_line(step, range(num_layers), rank, num_ranks=num_ranks) for step in range(num_steps)]
        write_lines(folder, lines, rank)
    return folder


def write_lines(folder: Path, lines: Iterable[StepLine], rank: int = 0) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    journal = step_journal(step_file(folder, rank))
    for line in lines:
        journal.append(line, sync=False)
    return journal.path


class WellFormed(HTMLParser):
    """Raises where a tag is closed that is not open; what is left open stays in ``open``."""

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []

    def handle_starttag(self, tag: str, attributes: Any) -> None:
        if tag != "meta":
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag


def assert_whole_and_alone(page: str) -> None:
    """Well-formed, and nothing in it comes from elsewhere."""
    parser = WellFormed()
    parser.feed(re.sub(r"<svg.*?</svg>", "", page, flags=re.DOTALL))
    parser.close()
    assert parser.open == []
    for svg in re.findall(r"<svg.*?</svg>", page, re.DOTALL):
        ET.fromstring(svg)
    # The names of XML's vocabularies are no addresses, and figures refer only to their own parts and pixels.
    text = re.sub(r'xmlns(:\w+)?="[^"]*"', "", page)
    assert not re.search(r"https?:|\bsrc=|@import|<script|\bnan\b|\binf\b", text)
    assert all(of.startswith(("#", "data:image/png;base64,")) for of in re.findall(r'href="([^"]*)"', text))
    assert all(of.startswith("#") for of in re.findall(r"url\(([^)]*)\)", text))
