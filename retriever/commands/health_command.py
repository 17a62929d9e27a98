"""`foredraft health`: whether a service takes calls."""

import sys
from typing import Annotated

import typer

from indexer.flags import with_flags
from retriever.commands.options import clear_errors
from retriever.operations.health import TIMEOUT_S, why_not_serving
from retriever.operations.settings import CredentialSettings


@clear_errors()
@with_flags
def health(
    address: Annotated[
        str, typer.Argument(metavar="ADDRESS", help="The service: HOST:PORT or unix:PATH.")
    ],
    *,
    client: CredentialSettings,
    timeout_s: Annotated[
        float, typer.Option(min=0.001, metavar="SECONDS", help="Longest wait for the answer.")
    ] = TIMEOUT_S,
    live: Annotated[
        bool,
        typer.Option(
            "--live", help="Only check that the service answers, even while it starts or drains."
        ),
    ] = False,
) -> None:
    """Print `ready` and exit with 0 if the service takes calls, else with 1 and the reason.

    With --live it prints `alive`.
    """
    reason = why_not_serving(address, timeout_s, client.shown_credentials(), live=live)
    if reason:
        print(reason, file=sys.stderr)
        raise typer.Exit(1)
    print("alive" if live else "ready")
