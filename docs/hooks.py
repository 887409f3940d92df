"""Makes pages of the site from texts of the repository's root, whose links are relative to that."""

import re
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
PAGES = {"index.md": "README.md", "changelog.md": "CHANGELOG.md", "contributing.md": "CONTRIBUTING.md"}


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    """Returns the text of the page; files that are not part of the site are named without a link."""
    if page.file.src_uri not in PAGES:
        for made, file in PAGES.items():
            markdown = markdown.replace(f"](../{file}", f"]({made}")
        return markdown
    return site_text((ROOT / PAGES[page.file.src_uri]).read_text(encoding="utf-8"))


def site_text(text: str) -> str:
    """Returns a text of the repository's root with links as pages of ``docs/`` have them."""
    for page, file in PAGES.items():
        text = text.replace(f"]({file}", f"]({page}")
    text = re.sub(r"\]\(docs/", "](", text)
    return re.sub(r"(?<!!)\[([^\]]+)\]\((?!https?:|#)(?![^)]*\.(?:md|ipynb)(?:#[^)]*)?\))[^)]*\)", r"\1", text)
