"""Makes branches, lines, tables and counted nouns of an explanation's tree."""

from __future__ import annotations

from rich import box
from rich.table import Table
from rich.text import Text
from rich.tree import Tree

from moesys.lab.show.tables import figure
from moesys.simulator.simulation import COMPUTED_KINDS

MOST_SHOWN = 12


def add_head(tree: Tree, words: str) -> Tree:
    return tree.add(Text(words, style="bold"))


def add_line(tree: Tree, name: str, words: str) -> None:
    tree.add(Text.assemble((f"{name}: ", "cyan"), words))


def new_table(*columns: str) -> Table:
    table = Table(box=box.SIMPLE_HEAD, show_edge=False, pad_edge=False)
    for index, column in enumerate(columns):
        table.add_column(column, justify="right" if index else "left")
    return table


def counted(number: int, noun: str) -> str:
    return f"{number} {noun}{'s' * (number != 1)}"


def listed(noun: str, numbers: list[int]) -> str:
    if not numbers:
        return "none"
    shown = ", ".join(map(str, numbers[:MOST_SHOWN]))
    more = f" and {len(numbers) - MOST_SHOWN} more" if len(numbers) > MOST_SHOWN else ""
    return f"{noun}{'s' * (len(numbers) > 1)} {shown}{more}"


def ms_table(critical_rank: int, critical_ms: dict[str, float], mean_ms: dict[str, float]) -> Table:
    table = new_table("ms", f"rank {critical_rank}, which computes longest", "mean over ranks")
    for kind in sorted({**critical_ms, **mean_ms}, key=lambda kind: -mean_ms.get(kind, 0.0)):
        table.add_row(_kind_words(kind), *(figure(ms.get(kind, 0.0)) for ms in (critical_ms, mean_ms)))
    return table


def _kind_words(kind: str) -> str:
    return f"computes {kind.replace('_', ' ')}" if kind in COMPUTED_KINDS else f"waits for {kind}"
