"""The notebook runs from top to bottom, and what it shows on the web is what a run showed."""

import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import nbformat
import pytest
from nbclient.exceptions import CellExecutionError
from typer.testing import CliRunner, Result

from docs.site.notebook import NOT_KEPT, NOTEBOOK, app, clean, kept, read

ROOT = Path(__file__).parents[1]
MACHINE_PATH = re.compile(r"/(?:work|tmp|home|root|usr|var|Users)/|[A-Z]:\\\\|file://")


def cells(kind: str) -> list[Any]:
    return [cell for cell in read(NOTEBOOK).cells if cell.cell_type == kind]


def is_kept(cell: Any) -> bool:
    return NOT_KEPT not in cell.metadata.get("tags", ())


def run_command(verb: str, path: Path) -> Result:
    """Run a command of the module here; its kernel is a process of its own."""
    return CliRunner().invoke(app, [verb, str(path)])


@pytest.mark.programs
def test_the_notebook_runs() -> None:
    command = [sys.executable, "-m", "docs.site.notebook", "check", str(NOTEBOOK)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert json.loads(NOTEBOOK.read_text())["nbformat"] == 4


@pytest.mark.programs
def test_a_cell_that_raises_is_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """And of one that does not, the output is kept, but for what is not to be."""
    path = tmp_path / "wrong.ipynb"
    sources = ("import sys\nprint('out')", "print('later', file=sys.stderr)\nprint('again')")
    made: Any = nbformat.v4.new_notebook(cells=[*map(nbformat.v4.new_code_cell, sources)])  # type: ignore[no-untyped-call]
    made.cells[1].metadata["tags"] = [NOT_KEPT]
    nbformat.write(made, path)  # type: ignore[no-untyped-call]
    done = run_command("keep", path)
    assert done.exit_code == 0, done.output
    outputs = [cell.outputs for cell in read(path).cells]
    assert [[each.text for each in cell] for cell in outputs] == [["out\n"], []]
    made.cells[1].source = "assert 1 + 1 == 3"
    nbformat.write(made, path)  # type: ignore[no-untyped-call]
    before = path.read_bytes()
    for verb in ("check", "keep"):
        done = run_command(verb, path)
        raised = CellExecutionError(done.output, "AssertionError", "")
        monkeypatch.setattr("docs.site.notebook.run", Mock(side_effect=raised))  # as it was
        assert done.exit_code == 1
        assert "AssertionError" in done.output
        assert path.read_bytes() == before


def test_its_outputs_are_those_of_one_run_in_order() -> None:
    found = cells("code")
    assert [cell.execution_count for cell in found] == list(range(1, len(found) + 1))
    outputs = [output for cell in found for output in cell.outputs]
    assert {output.output_type for output in outputs} <= {"stream", "display_data"}
    assert sum("image/png" in output.get("data", {}) for output in outputs) == 1
    assert all(output.name == "stdout" for output in outputs if output.output_type == "stream")
    silent = [cell.id for cell in found if is_kept(cell) and not cell.outputs]
    assert silent == []


def test_it_says_of_which_machine_its_figures_are_and_names_no_place_on_it() -> None:
    first = cells("code")[0].outputs[0].text
    assert re.search(r"\d+ cores; Python 3\.\d+", first)
    text = NOTEBOOK.read_text()
    pictures = re.compile(r'"image/png": "[^"]*"')
    assert not MACHINE_PATH.search(pictures.sub("", text))
    assert MACHINE_PATH.search('"/tmp/x"')
    assert len(text) < 150_000


def test_its_links_lead_somewhere() -> None:
    links = [link for cell in cells("markdown") for link in re.findall(r"\]\((\S+)\)", cell.source)]
    assert len(links) > 3
    for link in links:
        assert (NOTEBOOK.parent / link).is_file(), link


def test_cleaning_leaves_what_a_reader_sees() -> None:
    stream = nbformat.from_dict({"output_type": "stream", "name": "stdout", "text": "a"})  # type: ignore[no-untyped-call]
    later = nbformat.from_dict({"output_type": "stream", "name": "stdout", "text": "b"})  # type: ignore[no-untyped-call]
    warned = nbformat.from_dict({"output_type": "stream", "name": "stderr", "text": "w"})  # type: ignore[no-untyped-call]
    assert [each.text for each in kept([stream, warned, later])] == ["ab"]
    notebook = read(NOTEBOOK)
    before = json.dumps(notebook)
    clean(notebook)
    assert json.dumps(notebook) == before
