"""How a command line lists and imports its commands, the options that several commands share, and how a command ends
that cannot do what it was asked to do.

Importing this module imports neither torch nor pydantic.
"""

from __future__ import annotations

import inspect
import os
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from errno import EACCES, EPERM, EROFS
from functools import wraps
from pathlib import Path
from tempfile import TemporaryFile
from typing import Annotated, Any, NamedTuple

import typer
from typer.core import TyperCommand, TyperGroup
from typer.main import get_command

from moesys.display import named, printable
from moesys.lab.ranks.process_start import RunInterruption, writes

# --- command lines ----------------------------------------------------------------------------------------------------

_HELP_OPTIONS = {"help_option_names": ["-h", "--help"]}


class _HelpPanels:
    """Shows help in rich's panels. Errors stay plain, because boxes would break their lines in a pipe."""

    def format_help(self: Any, ctx: Any, formatter: Any) -> None:
        from typer.rich_utils import rich_format_help

        for parameter in self.get_params(ctx):
            if parameter.param_type_name == "argument" or parameter.is_flag:
                # The column of types repeats an argument's name and says nothing of a flag: the help needs the room.
                parameter.display_type_rich = lambda **_: None
        rich_format_help(obj=self, ctx=ctx, markup_mode="rich")


class HelpedCommand(_HelpPanels, TyperCommand):
    """A command whose help has panels."""


class CommandPage(NamedTuple):
    """The function of a command, which returns its exit code, and the help of the command.

    function: ``module:name``, if importing its module takes long. panel: the heading under which the command is listed
    with its summary. details: paragraphs below the summary. examples: whole command lines. Text is in rich's markup,
    where square brackets are escaped.
    """

    function: str | Callable[..., Any]
    panel: str
    summary: str
    details: str = ""
    examples: tuple[str, ...] = ()

    def load(self, name: str) -> Any:
        """Imports the command, and returns it with its options."""
        function = named(self.function) if isinstance(self.function, str) else self.function
        app = typer.Typer(add_completion=False, rich_markup_mode=None)
        app.command(
            name,
            cls=HelpedCommand,
            help="\n\n".join(filter(None, (self.summary, self.details))),
            epilog="\n".join([f"Example{'s' * (len(self.examples) > 1)}:", *(f"  {line}" for line in self.examples)]),
            context_settings=_HELP_OPTIONS,
        )(_with_output(function))
        return get_command(app)


def command_line(name: str, text: str, pages: Mapping[str, CommandPage]) -> typer.Typer:
    """Returns a command line that imports a command of ``pages`` when it is called, so that ``--help`` does not wait
    for torch. A command returns its exit code, or None for 0.
    """

    class Commands(_HelpPanels, TyperGroup):
        def resolve_command(self, ctx: Any, args: list[str]) -> Any:
            called, command, rest = super().resolve_command(ctx, args)
            return called, pages[called].load(called) if called and called in pages else command, rest

    def end(code: int | None, **_: Any) -> None:
        raise typer.Exit(code or 0)

    app = typer.Typer(
        name=name,
        help=text,
        cls=Commands,
        no_args_is_help=True,
        result_callback=end,
        context_settings=_HELP_OPTIONS,
        pretty_exceptions_enable=False,
        rich_markup_mode=None,
    )
    for each, page in pages.items():
        app.command(each, short_help=page.summary, rich_help_panel=page.panel)(lambda: None)
    return app


# --- how commands end -------------------------------------------------------------------------------------------------

_NO_ACCESS = "give another path, or get access to this one"


@contextmanager
def refusing() -> Iterator[None]:
    """Prints the message of a ValueError or OSError to stderr and ends the command with code 2; after Ctrl-C in a run
    that can go on, prints how, and ends it with code 130. Of torchrun's ranks only the first one prints.

    A reader that closes the pipe, such as ``head``, is no error: it is raised again, and ``typer`` ends in silence.
    """
    try:
        yield
    except BrokenPipeError:
        raise
    except RunInterruption as stop:
        message, code = str(stop), 130
    except (ValueError, OSError) as error:
        message, code = f"Error: {_reason(error)}", 2
    else:
        return
    if writes():
        print(printable(message, keep="\n"), file=sys.stderr)
    raise typer.Exit(code)


def _reason(error: ValueError | OSError) -> str:
    # This import is here because it needs pydantic.
    from moesys.config.base import in_words

    if not (isinstance(error, OSError) and error.filename):
        return in_words(error)
    return f"{error.strerror}: {error.filename}" + f"; {_NO_ACCESS}" * (error.errno in (EACCES, EPERM, EROFS))


def folder_to_write(path: Path | None) -> Path | None:
    """Raises typer.BadParameter for a folder that could not be made or written to, before anything is computed.

    Only the first of torchrun's ranks writes, so other hosts need no such folder.
    """
    if path is None or not writes():
        return path
    if os.path.exists(path) and not os.path.isdir(path):
        raise typer.BadParameter(f"{path} is a file; give the path of a folder")
    # Unlike the method of Path, the function does not raise if a folder cannot be read or a name is too long.
    there = next(folder for folder in (path, *path.parents) if os.path.exists(folder))
    try:
        TemporaryFile(dir=there).close()
    except OSError as error:
        raise typer.BadParameter(f"{there} takes no file: {error.strerror}; {_NO_ACCESS}") from None
    return path


def file_to_write(path: Path | None) -> Path | None:
    """Raises typer.BadParameter for a file that could not be written, before anything is computed."""
    if path is not None and os.path.isdir(path):
        raise typer.BadParameter(f"{path} is a folder; name a file in it")
    folder_to_write(path and path.parent)
    return path


# --- options ----------------------------------------------------------------------------------------------------------


def option(metavar: str, text: str, *names: str, **more: Any) -> Any:
    """Returns an option with a value, which its help ``text`` calls ``metavar``. ``names``: by default that of the
    parameter.
    """
    return typer.Option(*names, metavar=metavar, help=text, **more)


def flag(text: str, *names: str, **more: Any) -> Any:
    """Returns an option without a value. ``names``: by default that of the parameter, and --no- before it."""
    return typer.Option(*names, help=text, **more)


def argument(metavar: str, text: str, **more: Any) -> Any:
    return typer.Argument(metavar=metavar, help=text, **more)


# --- options of several commands --------------------------------------------------------------------------------------


ExperimentFile = Annotated[
    Path, argument("FILE", "An experiment: .json, .toml, or .py with a function that returns it.")
]
Imports = Annotated[
    list[str] | None,
    option("MODULE", "Module or .py file that defines planners which FILE names; may be repeated.", "--import"),
]
Settings = Annotated[
    list[str] | None,
    option(
        "FIELD=VALUE",
        "Change a field of FILE, as strategies.1.overlap.chunks=2 or seeds=0,1; may be repeated.",
        "--set",
    ),
]
RunFolders = Annotated[Path, option("DIR", "Folder of run folders; it is created.", "--out", "-o")]
MODEL_LAYERS_HELP = "Layers of the whole model, for its memory (default: the workload's)."
ModelLayers = Annotated[int | None, option("N", MODEL_LAYERS_HELP, min=1)]
Jobs = Annotated[int | None, option("N", "Worker processes for simulation (default: one per core).", min=1)]
CLUSTER_HELP = "Nodes x ranks per node, as 4x8; a preset and its nodes, as h100:4; or a ClusterSpec in a file."
Threads = Annotated[int, option("N", "Threads per rank.", min=1)]
# Every command that prints results has these, and they mean the same everywhere.
Wide = Annotated[bool, flag("Print all columns of tables, even if the terminal breaks them.", "--wide")]
AsJson = Annotated[bool, flag("Print the results as JSON instead of tables; nothing else goes to stdout.", "--json")]
Quiet = Annotated[bool, flag("Print only the results and errors, no progress.", "--quiet", "-q")]
OutFolder = Annotated[Path | None, option("DIR", "Folder for the results.", "--out", "-o", callback=folder_to_write)]
OutFile = Annotated[Path | None, option("FILE", "File for the result.", "--out", "-o", callback=file_to_write)]


# --- options of all commands that print results -----------------------------------------------------------------------

_OUTPUT = {"out": (OutFolder, None), "as_json": (AsJson, False), "quiet": (Quiet, False), "wide": (Wide, False)}


def _with_output(function: Callable[..., Any]) -> Callable[..., Any]:
    """Returns a command that has the options of a ``CommandOutput`` in place of its parameter ``output``, but for those
    that it has itself.
    """
    signature = inspect.signature(function, eval_str=True)
    if "output" not in signature.parameters:
        return function

    @wraps(function)
    def command(**given: Any) -> Any:
        from moesys.lab.show.sheets import CommandOutput

        found: list[Any] = [given.pop(name) if name in brought else None for name in _OUTPUT]
        return function(**given, output=CommandOutput(*found))

    brought = {name: of for name, of in _OUTPUT.items() if name not in signature.parameters}

    parameters: list[inspect.Parameter] = []
    for name, parameter in signature.parameters.items():
        options = brought if name == "output" else {name: (parameter.annotation, parameter.default)}
        for each, (annotation, default) in options.items():
            parameters.append(parameter.replace(name=each, annotation=annotation, default=default))
    command.__signature__ = signature.replace(parameters=parameters)  # type: ignore[attr-defined]
    return command
