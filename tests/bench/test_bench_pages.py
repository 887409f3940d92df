"""Pages of simulated benches."""

from __future__ import annotations

from pathlib import Path

import pytest

from moesys.bench import pages


def test_a_page_is_written_whatever_becomes_of_its_reader(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made = pages.table("SIMULATED: a table", ("what", "how much"))
    made.add_row("something", "1.0")
    printed = pages.print_full

    def closed(*shown: object, file: object = None) -> None:
        if file is None:
            raise BrokenPipeError
        printed(*shown, file=file)

    monkeypatch.setattr(pages, "print_full", closed)
    with pytest.raises(BrokenPipeError):
        pages.show([(made, ["a note"])], "a subject", ["An introduction."], "stem", tmp_path)
    (written,) = tmp_path.iterdir()
    assert written.name.startswith("stem_simulated_")
    assert "something" in written.read_text()
