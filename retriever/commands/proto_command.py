"""`foredraft proto`: write the contract of this installation, for clients in any language."""

from importlib.resources import files
from pathlib import Path
from typing import Annotated, Final

import typer

from indexer.flags import with_flags
from retriever.commands.options import clear_errors

_FILES: Final = {
    "retriever/v1/retriever.proto": "retriever.v1",
    "retriever/v1/admin.proto": "retriever.v1",
    "google/rpc/status.proto": "google.rpc",
    "google/rpc/error_details.proto": "google.rpc",
}
"""Names of files under a contract folder, and the packages that contain them."""


@clear_errors()
@with_flags
def proto(
    *,
    output: Annotated[
        Path, typer.Option(metavar="DIR", help="A folder; created if it does not exist.")
    ],
) -> None:
    """Write the contract, from which protoc makes a client in any language.

    Also writes the google.rpc messages that describe a refusal. Prints the names of the files.
    """
    for name, package in _FILES.items():
        written = output / name
        written.parent.mkdir(parents=True, exist_ok=True)
        written.write_bytes((files(package) / written.name).read_bytes())
        print(written)
