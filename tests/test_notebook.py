"""The tour in ``docs/notebook.ipynb`` runs in a kernel, and its outputs are those that it has been committed with.

``python tests/test_notebook.py`` runs it and writes the outputs.
"""

from __future__ import annotations

import base64
import io
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

NOTEBOOK = Path(__file__).parents[1] / "docs" / "notebook.ipynb"
MOST_BYTES = 120_000
# The least standard deviation of the grey values, from 0 to 1, of a picture that shows something.
LEAST_CONTRAST = 0.05


def run_notebook(target: Path) -> None:
    """Runs the cells from top to bottom in a kernel, and writes the notebook with their outputs to ``target``."""
    import nbformat
    from nbclient import NotebookClient

    notebook = nbformat.read(NOTEBOOK, as_version=4)
    metadata = dict(notebook["metadata"])
    small = ["--InlineBackend.print_figure_kwargs={'dpi': 50}"]
    NotebookClient(notebook, timeout=240, kernel_name="python3", record_timing=False, extra_arguments=small).execute()
    # The kernel adds its version of Python.
    notebook["metadata"] = nbformat.from_dict(metadata)
    for cell in notebook["cells"]:
        if cell["cell_type"] == "code":
            # The first run of an installation says on stderr that it compiles.
            cell["outputs"] = [output for output in cell["outputs"] if output.get("name") != "stderr"]
    nbformat.write(notebook, target)


def texts(cell: dict[str, Any]) -> list[tuple[str, ...]]:
    """Returns what a cell shows, without pictures, and without HTML that moesys does not make."""
    found = []
    for output in cell["outputs"]:
        data = output.get("data", {"text/plain": output.get("text")})
        plain = "".join(data["text/plain"])
        found.append((plain, "".join(data.get("text/html", ())) if plain.startswith("<") else ""))
    return found


def contrast(picture: str) -> float:
    """Returns the standard deviation of the grey values of a PNG in base64."""
    from matplotlib.image import imread

    return float(imread(io.BytesIO(base64.b64decode(picture)))[..., :3].mean(axis=-1).std())


def test_the_notebook_runs_and_its_outputs_are_current(tmp_path: Path) -> None:
    written = json.loads(NOTEBOOK.read_text())
    command = [sys.executable, __file__, str(tmp_path / "executed.ipynb")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    now = json.loads((tmp_path / "executed.ipynb").read_text())
    num_plots = 0
    for before, after in zip(written["cells"], now["cells"], strict=True):
        if before["cell_type"] == "code":
            assert texts(before) == texts(after), "run python tests/test_notebook.py, which writes the outputs"
            source = "".join(after["source"])
            pictures = [output["data"]["image/png"] for output in after["outputs"] if "image/png" in output["data"]]
            assert len(pictures) == source.count(".plot("), source
            assert all(contrast(picture) > LEAST_CONTRAST for picture in pictures), source
            num_plots += len(pictures)
    assert num_plots >= 4
    assert NOTEBOOK.stat().st_size < MOST_BYTES


if __name__ == "__main__":
    run_notebook(Path(sys.argv[1]) if sys.argv[1:] else NOTEBOOK)
