"""The notebook in `examples/`, run from top to bottom in a kernel of its own.

`python -m docs.site.notebook keep` runs it and keeps its outputs in the file, as readers on the
web see them; `check` runs it and keeps nothing. Either ends with an error where a cell raises.
"""

import os
import sys
import tempfile
from pathlib import Path
from typing import Annotated, Any, Final

import nbformat
import typer
from nbclient import NotebookClient
from nbclient.exceptions import CellExecutionError
from traitlets.config import Config

NOTEBOOK: Final = Path(__file__).parents[2] / "examples" / "first_index.ipynb"
LONGEST_CELL_S: Final = 600
LONGEST_START_S: Final = 120  # of a kernel, on a machine that is busy
# Tag of cells whose output is seen where they run: a page of the viewer is larger than all else.
NOT_KEPT: Final = "not-kept"


def read(path: Path) -> Any:
    """Return a notebook."""
    return nbformat.read(path, as_version=4)  # type: ignore[no-untyped-call]


def run(notebook: Any, folder: Path) -> None:
    """Run the cells of a notebook, and put their outputs into it.

    Args:
        notebook: is changed.
        folder: where its kernel works.

    Raises:
        CellExecutionError: a cell raised; the message has the cell and its traceback.
    """
    commands = f"{Path(sys.executable).parent}{os.pathsep}{os.environ.get('PATH', '')}"
    with tempfile.TemporaryDirectory() as sockets:
        # No port that others on the machine could ask.
        transport = {"transport": "ipc", "ip": f"{sockets}/kernel"}
        client = NotebookClient(
            notebook,
            timeout=LONGEST_CELL_S,
            startup_timeout=LONGEST_START_S,
            kernel_name="python3",
            resources={"metadata": {"path": str(folder)}},
            config=Config(KernelManager=transport),
        )
        client.execute(env={**os.environ, "PATH": commands, "NO_COLOR": "1", "COLUMNS": "100"})


def clean(notebook: Any) -> None:
    """Leave what a reader wants to see: no times of execution, no warnings, no large pages."""
    notebook.metadata = nbformat.from_dict(  # type: ignore[no-untyped-call]
        {
            "kernelspec": {"display_name": "Python 3", "language": "python", "name": "python3"},
            "language_info": {"name": "python"},
        }
    )
    for cell in notebook.cells:
        cell.metadata.pop("execution", None)
        if cell.cell_type == "code":
            cell.outputs = [] if NOT_KEPT in cell.metadata.get("tags", ()) else kept(cell.outputs)


def kept(outputs: list[Any]) -> list[Any]:
    """Return outputs without what was written to standard error, in whole streams."""
    found: list[Any] = []
    for output in outputs:
        if output.output_type == "stream" and output.name == "stderr":
            continue
        if found and output.output_type == "stream" == found[-1].output_type:
            found[-1].text += output.text
        else:
            found.append(output)
    return found


app: Final = typer.Typer(no_args_is_help=True, add_completion=False)


@app.command()
def keep(path: Annotated[Path, typer.Argument(help="The notebook.")] = NOTEBOOK) -> None:
    """Run it, and keep the outputs in its file."""
    notebook = _run_or_end(path)
    clean(notebook)
    nbformat.write(notebook, path)  # type: ignore[no-untyped-call]


@app.command()
def check(path: Annotated[Path, typer.Argument(help="The notebook.")] = NOTEBOOK) -> None:
    """Run it, and keep nothing."""
    _run_or_end(path)


def _run_or_end(path: Path) -> Any:
    notebook = read(path)
    try:
        run(notebook, path.parent)
    except CellExecutionError as error:
        raise SystemExit(f"error: a cell of {path.name} raised:\n{error}") from error
    return notebook


if __name__ == "__main__":
    app()
