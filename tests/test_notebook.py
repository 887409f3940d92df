"""The tour in ``docs/notebook.ipynb`` runs, and its outputs are those that it has been committed with.

``python tests/test_notebook.py`` runs it and writes the outputs. No Jupyter is needed: the value of the last line of a
cell is shown as text and HTML, and open figures as pictures.
"""

from __future__ import annotations

import ast
import base64
import io
import json
import subprocess
import sys
from contextlib import redirect_stdout
from pathlib import Path
from typing import Any

NOTEBOOK = Path(__file__).parents[1] / "docs" / "notebook.ipynb"
MOST_BYTES = 100_000


def run_cell(source: str, names: dict[str, Any]) -> list[dict[str, Any]]:
    """Returns the outputs of a cell, as a notebook has them."""
    import matplotlib.pyplot as plt

    tree, printed, shown = ast.parse(source), io.StringIO(), None
    last = ast.Expression(tree.body.pop().value) if isinstance(tree.body[-1], ast.Expr) else None
    with redirect_stdout(printed):
        exec(compile(tree, "cell", "exec"), names)
        if last is not None:
            shown = eval(compile(last, "cell", "eval"), names)
    outputs: list[dict[str, Any]] = []
    if text := printed.getvalue():
        outputs.append({"output_type": "stream", "name": "stdout", "text": text.splitlines(True)})
    if shown is not None and not source.rstrip().endswith(";"):
        data = {"text/plain": repr(shown).splitlines(True)}
        if hasattr(shown, "_repr_html_"):
            data["text/html"] = shown._repr_html_().splitlines(True)
        outputs.append({"output_type": "execute_result", "execution_count": None, "metadata": {}, "data": data})
    for number in plt.get_fignums():
        picture = io.BytesIO()
        plt.figure(number).savefig(picture, format="png", dpi=50)
        data = {"image/png": base64.b64encode(picture.getvalue()).decode(), "text/plain": ["<Figure>"]}
        outputs.append({"output_type": "display_data", "metadata": {}, "data": data})
        plt.close(number)
    return outputs


def executed(notebook: dict[str, Any]) -> dict[str, Any]:
    """Returns the notebook with the outputs of its cells, which are run from top to bottom."""
    names: dict[str, Any] = {"__name__": "__main__"}
    for count, cell in enumerate((each for each in notebook["cells"] if each["cell_type"] == "code"), start=1):
        cell["execution_count"], cell["outputs"] = count, run_cell("".join(cell["source"]), names)
        for output in cell["outputs"]:
            if "execution_count" in output:
                output["execution_count"] = count
    return notebook


def texts(cell: dict[str, Any]) -> list[tuple[str, ...]]:
    """Returns what a cell shows, without pictures, and without HTML that moesys does not make."""
    found = []
    for output in cell["outputs"]:
        data = output.get("data", {"text/plain": output.get("text")})
        plain = "".join(data["text/plain"])
        found.append((plain, "".join(data.get("text/html", ())) if plain.startswith("<") else ""))
    return found


def test_the_notebook_runs_and_its_outputs_are_current(tmp_path: Path) -> None:
    written = json.loads(NOTEBOOK.read_text())
    command = [sys.executable, __file__, str(tmp_path / "executed.ipynb")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stderr
    now = json.loads((tmp_path / "executed.ipynb").read_text())
    for before, after in zip(written["cells"], now["cells"], strict=True):
        if before["cell_type"] == "code":
            assert texts(before) == texts(after), "run python tests/test_notebook.py, which writes the outputs"
    forms = {form for cell in now["cells"] for output in cell.get("outputs", ()) for form in output.get("data", ())}
    assert {"text/html", "image/png"} <= forms
    assert NOTEBOOK.stat().st_size < MOST_BYTES


if __name__ == "__main__":
    import matplotlib

    matplotlib.use("agg")
    target = Path(sys.argv[1]) if sys.argv[1:] else NOTEBOOK
    target.write_text(json.dumps(executed(json.loads(NOTEBOOK.read_text())), indent=1, ensure_ascii=False) + "\n")
