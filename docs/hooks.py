"""Makes parts of pages from other texts.

On the site, some pages are texts of the repository's root, whose links are relative to that. In ``strategy.md``, the
tables of fields are made from the descriptions in the classes, and in ``api.md`` the tables of names from the
docstrings: ``python -m docs.hooks`` writes them.
"""

import ast
import inspect
import itertools
import pydoc
import re
import typing
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
PAGES = {"index.md": "README.md", "changelog.md": "CHANGELOG.md", "contributing.md": "CONTRIBUTING.md"}
FIELDS = re.compile(r"(<!-- fields: ([\w, ]+) -->\n).*?(?=<!-- end -->)", re.DOTALL)
NAMES = re.compile(r"(<!-- names: (\w[\w-]*) -->\n).*?(?=<!-- end -->)", re.DOTALL)
BOUNDS = (("ge", "≥ {:g}"), ("gt", "> {:g}"), ("le", "≤ {:g}"), ("lt", "< {:g}"), ("multiple_of", "multiple of {:g}"))


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    """Returns the text of the page; files that are not part of the site are named without a link."""
    if page.file.src_uri not in PAGES:
        for made, file in PAGES.items():
            markdown = markdown.replace(f"](../{file}", f"]({made}")
        return re.sub(r"\[([^\]]+)\]\(\.\./moesys/[^)]*\)", r"\1", markdown)
    return site_text((ROOT / PAGES[page.file.src_uri]).read_text(encoding="utf-8"))


def site_text(text: str) -> str:
    """Returns a text of the repository's root with links as pages of ``docs/`` have them."""
    for page, file in PAGES.items():
        text = text.replace(f"]({file}", f"]({page}")
    text = re.sub(r"\]\(docs/", "](", text)
    return re.sub(r"(?<!!)\[([^\]]+)\]\((?!https?:|#)(?![^)]*\.(?:md|ipynb)(?:#[^)]*)?\))[^)]*\)", r"\1", text)


def with_fields(text: str, classes: dict[str, Any]) -> str:
    """Returns a text whose tables between ``<!-- fields: NAMES -->`` and ``<!-- end -->`` are those of the classes."""
    return FIELDS.sub(
        lambda found: found[1] + "".join(f"\n{_table(classes[name])}\n" for name in found[2].split(", ")), text
    )


def with_names(text: str) -> str:
    """Returns a text whose tables between ``<!-- names: PAGE -->`` and ``<!-- end -->`` list what a page of
    ``docs/api`` documents, except declarations that ``docs/strategy.md`` has: each name, which leads to its file, and
    the first sentence of its docstring.
    """
    return NAMES.sub(lambda found: f"{found[1]}\n{_names(ROOT / 'docs' / 'api' / f'{found[2]}.md')}\n", text)


def _names(page: Path) -> str:
    from moesys.config import Declaration

    declared = (ROOT / "docs" / "strategy.md").read_text(encoding="utf-8")
    lines = ["| name | meaning |", "|---|---|"]
    for path in re.findall(r"^::: (\S+)$", page.read_text(encoding="utf-8"), re.MULTILINE):
        value = pydoc.locate(path)
        if (
            isinstance(value, type)
            and issubclass(value, Declaration)
            and re.search(rf"[`.]{value.__name__}`", declared)
        ):
            continue
        said = " ".join((inspect.getdoc(value) or "").partition("\n\n")[0].split())
        sentence = re.split(r"(?<=[.:;]) ", said)[0].rstrip(".:;").replace("``", "`").replace("|", "\\|")
        name, module = path.rpartition(".")[2], inspect.getmodule(value) if callable(value) else value
        file = Path(inspect.getsourcefile(module) or "").relative_to(ROOT).as_posix()
        lines.append(f"| [`{name}`](../{file}) | {sentence} |")
    return "\n".join(lines) + "\n"


def described_fields(declared: Any) -> dict[str, str]:
    """Returns the fields that a class declares itself, each with its description or the string below it."""
    (body,) = [node.body for node in ast.parse(inspect.getsource(declared)).body if isinstance(node, ast.ClassDef)]
    found = {}
    for field, below in itertools.zip_longest(body, body[1:]):
        match field:
            case ast.AnnAssign(target=ast.Name(id=name)) if name in declared.model_fields and name != "kind":
                text = declared.model_fields[name].description
                match below:
                    case ast.Expr(value=ast.Constant(value=str(string))) if not text:
                        text = string
                found[name] = text or ""
    return found


def _table(declared: Any) -> str:
    lines = [f"| `{declared.__name__}` | default | values | meaning |", "|---|---|---|---|"]
    # Private base classes are on no page, so that their fields are shown where they are inherited.
    for base in [declared, *(base for base in declared.__mro__ if base.__name__.startswith("_"))]:
        for name, about in described_fields(base).items():
            field = declared.model_fields[name]
            about = about[0].lower() + about[1:] if about[1:2].islower() else about
            meaning = " ".join(about.replace("``", "`").removesuffix(".").split())
            lines.append(f"|`{name}`|{_default(field)}|{_values(field)}|{meaning}|")
    return "\n".join(lines) + "\n"


def _default(field: Any) -> str:
    default = field.default
    if field.is_required():
        return ""
    if isinstance(default, dict):
        return f'`"{next(iter(default.values()))}"`'
    if isinstance(default, str):
        return f'`"{default}"`'
    return f"`{default!r}`".replace("'", '"')


def _values(field: Any) -> str:
    found = [
        text.format(value)
        for bound, text in BOUNDS
        for value in [getattr(each, bound, None) for each in field.metadata]
        if value is not None
    ]
    choices = [value for value in _literals(field.annotation) if not isinstance(value, bool)]
    return ", ".join([f'`"{choice}"`' for choice in choices if choice != field.default] + found)


def _literals(annotation: Any) -> list[Any]:
    if typing.get_origin(annotation) is typing.Literal:
        return list(typing.get_args(annotation))
    return [choice for part in typing.get_args(annotation) for choice in _literals(part)]


def _write() -> None:
    import moesys as ms
    from moesys import config
    from moesys.config import workload

    page = ROOT / "docs" / "strategy.md"
    text = page.read_text(encoding="utf-8")
    classes = {}
    for name in {name for found in FIELDS.finditer(text) for name in found[2].split(", ")}:
        classes[name] = next(getattr(module, name) for module in (workload, config, ms) if hasattr(module, name))
    page.write_text(with_fields(text, classes), encoding="utf-8")
    page = ROOT / "docs" / "api.md"
    page.write_text(with_names(page.read_text(encoding="utf-8")), encoding="utf-8")


if __name__ == "__main__":
    _write()
