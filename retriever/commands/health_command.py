"""`foredraft health`: whether a service takes calls."""

import sys
from typing import Annotated

import typer

from retriever.commands.options import CredentialsFile, clear_errors, credentials_of
from retriever.operations.health import TIMEOUT_S, why_not_serving


def health(
    address: Annotated[
        str, typer.Argument(metavar="ADDRESS", help="Of the service: HOST:PORT or unix:PATH.")
    ],
    credentials: CredentialsFile = None,
    timeout_s: Annotated[
        float, typer.Option(min=0.001, metavar="SECONDS", help="How long it may take to answer.")
    ] = TIMEOUT_S,
) -> None:
    """End with 0 if the service takes calls, and with 1 and the reason if it does not."""
    with clear_errors():
        reason = why_not_serving(address, timeout_s, credentials_of(credentials))
    if reason:
        print(reason, file=sys.stderr)
        raise typer.Exit(1)
