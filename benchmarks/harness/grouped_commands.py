"""GroupedCommands: help that lists commands under headings."""

from __future__ import annotations

from typing import Any

from typer.core import TyperGroup


class GroupedCommands(TyperGroup):
    """Lists commands under their ``rich_help_panel``, which help without rich leaves out."""

    def format_commands(self, ctx: Any, formatter: Any) -> None:
        limit = formatter.width - 6 - max(map(len, self.commands))
        groups: dict[str, list[tuple[str, str]]] = {}
        for name, command in self.commands.items():
            groups.setdefault(getattr(command, "rich_help_panel", ""), []).append(
                (name, command.get_short_help_str(limit))
            )
        for title, rows in groups.items():
            with formatter.section(title):
                formatter.write_dl(rows)
