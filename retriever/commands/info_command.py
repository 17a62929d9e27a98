"""`foredraft info`: describe a running service."""

from typing import Annotated

import typer

from indexer.flags import with_flags
from retriever.client.strict import RemoteDrafter
from retriever.commands.options import clear_errors
from retriever.operations.settings import CredentialSettings


@clear_errors()
@with_flags
def info(
    address: Annotated[
        str, typer.Argument(metavar="ADDRESS", help="The service: HOST:PORT or unix:PATH.")
    ],
    *,
    client: CredentialSettings,
    timeout_s: Annotated[
        float, typer.Option(min=0.001, metavar="SECONDS", help="Longest wait for the answer.")
    ] = 4.0,
) -> None:
    """Show the version, phase, models, vocabulary and limits of a service."""
    credentials = client.shown_credentials()
    with RemoteDrafter(address, timeout_s=timeout_s, credentials=credentials) as remote:
        told = remote.server_info()
    print(f"version: {told.version or 'not known'}")
    print(f"phase: {told.phase or 'not known'}")
    print(f"models: {', '.join(told.models) or 'none named'}")
    vocabulary = f"{told.vocabulary_size} tokens, fingerprint {told.vocabulary_fingerprint}"
    print(f"vocabulary: {vocabulary if told.vocabulary_fingerprint else 'not known yet'}")
    print(f"nodes without a budget: {told.default_budget_nodes or 'not known'}")
    for name, limit in sorted(told.limits.items()):
        print(f"{name}: {limit:.12g}")
