"""Rows and pairs, simulated beside what is published of them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

from benchmarks.published.throughput_rows import PublishedRow
from moesys.lab.show.sheets import Column


@dataclass(frozen=True)
class Found:
    """A row, simulated. ``by_preset``, ``by_constants``, ``by_rate``: tokens a second and GPU, of presets as they are,
    with the fitted constants, and of the baseline. ``gb``: of the rank that holds most.
    """

    published_row: PublishedRow
    by_preset: float
    by_constants: float
    by_rate: float
    gb: float
    verdict: str

    @property
    def row(self) -> Annotated[int, Column("row")]:
        return self.published_row.row

    @property
    def release(self) -> Annotated[str, Column("release")]:
        return self.published_row.release

    @property
    def of(self) -> Annotated[str, Column("model, GPUs, precision")]:
        row = self.published_row
        return f"{row.model}, {row.gpus} {row.system.upper()}, {row.precision}"

    @property
    def shape(self) -> Annotated[str, Column("TP PP VP EP, micro-batch")]:
        row = self.published_row
        return f"{row.tensor} {row.pipeline} {row.virtual_stages} {row.expert}, {row.micro_batch}"

    @property
    def graph(self) -> Annotated[str, Column("graph")]:
        return "whole" if self.published_row.whole_graph else ""

    @property
    def fitted(self) -> Annotated[str, Column("fitted on")]:
        return "yes" if self.published_row.fitted else ""

    @property
    def published(self) -> Annotated[float, Column("published", ",.0f")]:
        return self.published_row.tokens_s_gpu

    @property
    def tokens(self) -> Annotated[float, Column("simulated", ",.0f")]:
        return self.by_constants

    @property
    def error(self) -> Annotated[float, Column("error %", "+.1f", 100)]:
        return self.by_constants / self.published - 1

    @property
    def preset_error(self) -> Annotated[float, Column("by preset %", "+.1f", 100)]:
        return self.by_preset / self.published - 1

    @property
    def rate_error(self) -> Annotated[float, Column("baseline %", "+.1f", 100)]:
        return self.by_rate / self.published - 1

    @property
    def memory(self) -> Annotated[str, Column("GB counted, of")]:
        have = self.published_row.cluster.memory_gb or 0.0
        return f"{self.gb:.0f}, {have:.0f}" + (" (out)" if self.verdict else "")


@dataclass(frozen=True)
class Pair:
    """Two configurations of a model on the same GPUs."""

    before: Found
    after: Found

    @property
    def rows(self) -> Annotated[str, Column("rows")]:
        return f"{self.before.row}, {self.after.row}"

    @property
    def of(self) -> Annotated[str, Column("model, system")]:
        row = self.before.published_row
        return f"{row.model}, {row.system.upper()}"

    @property
    def change(self) -> Annotated[str, Column("what changes")]:
        before, after = self.before.published_row, self.after.published_row
        names = {
            "precision": "",
            "global_batch": "batch ",
            "micro_batch": "micro-batch ",
            "tensor": "TP",
            "pipeline": "PP",
            "virtual_stages": "VP",
            "expert": "EP",
        }
        return ", ".join(
            f"{short}{getattr(before, name)} to {getattr(after, name)}"
            for name, short in names.items()
            if getattr(before, name) != getattr(after, name)
        )

    @property
    def fitted(self) -> Annotated[str, Column("fitted on")]:
        return self.before.fitted

    @property
    def published(self) -> Annotated[float, Column("published ratio", ".2f")]:
        return self.after.published / self.before.published

    @property
    def ratio(self) -> Annotated[float, Column("simulated", ".2f")]:
        return self.after.by_constants / self.before.by_constants

    @property
    def error(self) -> Annotated[float, Column("error %", "+.1f", 100)]:
        return self.ratio / self.published - 1

    @property
    def preset_error(self) -> Annotated[float, Column("by preset %", "+.1f", 100)]:
        return self.after.by_preset / self.before.by_preset / self.published - 1

    @property
    def rate_error(self) -> Annotated[float, Column("baseline %", "+.1f", 100)]:
        return self.after.by_rate / self.before.by_rate / self.published - 1
