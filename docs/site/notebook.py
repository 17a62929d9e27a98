"""Runs the notebook in `examples/` from top to bottom, in a separate kernel.

`python -m docs.site.notebook keep` runs it and saves its outputs in the file, as shown on the web.
`check` runs it and saves nothing. Both end with an error if a cell raises an exception.
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
LONGEST_START_S: Final = 120  # most seconds for a kernel to start, on a busy machine
# Tag of cells whose output is not saved, because a viewer page is larger than everything else.
NOT_KEPT: Final = "not-kept"


def read(path: Path) -> Any:
    """Return a notebook."""
    return nbformat.read(path, as_version=4)  # type: ignore[no-untyped-call]


def run(notebook: Any, folder: Path) -> None:
    """Run the cells of a notebook, and store their outputs in it.

    Args:
        notebook: notebook, which is changed.
        folder: working folder of the kernel.

    Raises:
        CellExecutionError: a cell raised an exception; the message has the cell and its traceback.
    """
    commands = f"{Path(sys.executable).parent}{os.pathsep}{os.environ.get('PATH', '')}"
    with tempfile.TemporaryDirectory() as sockets:
        # IPC opens no network port that other users of the machine could connect to.
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
    """Remove what no reader wants to see: execution times, warnings and large pages."""
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
    """Return the outputs without standard error, with the pieces of each stream joined."""
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
    """Run the notebook, and save the outputs in its file."""
    notebook = _run_or_end(path)
    clean(notebook)
    nbformat.write(notebook, path)  # type: ignore[no-untyped-call]


@app.command()
def check(path: Annotated[Path, typer.Argument(help="The notebook.")] = NOTEBOOK) -> None:
    """Run the notebook without saving anything."""
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
