"""The commands that say who may use a service: tokens and certificates, each for a tenant."""

from datetime import UTC, datetime
from pathlib import Path
from typing import Annotated

import typer

from retriever.commands.options import clear_errors
from retriever.security.access import add_certificate, add_token, read_access, remove
from retriever.security.certificates import certified, read_certificates

app = typer.Typer(
    help="Say who may use a service: tokens and certificates, each for a tenant.",
    no_args_is_help=True,
)

File = Annotated[
    Path,
    typer.Option(
        "--access", metavar="FILE", help="The service's access file; made if it is not there."
    ),
]
Tenant = Annotated[str, typer.Argument(metavar="TENANT", help="For whom it acts.")]


@app.command("token")
@clear_errors()
def make_token(tenant: Tenant, access: File) -> None:
    """Make a token and print it, once: the file keeps a hash of it alone."""
    print(add_token(access, tenant))


@app.command("certificate")
@clear_errors()
def let_in(
    tenant: Tenant,
    identity: Annotated[
        str,
        typer.Argument(
            metavar="IDENTITY",
            help="DNS:NAME, URI:NAME, EMAIL:NAME, IP:ADDRESS, CN:NAME, or a certificate's file, "
            "of which the first of these is taken.",
        ),
    ],
    access: File,
) -> None:
    """Let a certificate's holder act for a tenant."""
    if Path(identity).is_file():
        now = datetime.now(UTC)
        identity = certified(read_certificates(Path(identity), now)).identities[0]
    add_certificate(access, tenant, identity)
    print(f"{identity} acts for {tenant}")


@app.command("list")
@clear_errors()
def list_credentials(access: File) -> None:
    """Show whose credentials are in the file; no secret is in it."""
    found = read_access(access)
    for name, (_, tenant) in found.tokens.items():
        print(f"token {name}\t{tenant}")
    for identity, tenant in found.certificates.items():
        print(f"certificate {identity}\t{tenant}")


@app.command("revoke")
@clear_errors()
def revoke(
    name: Annotated[
        str,
        typer.Argument(
            metavar="NAME", help="A token's name, its 16 digits, or a certificate's identity."
        ),
    ],
    access: File,
) -> None:
    """Revoke a credential; a running service notices within a second."""
    print(f"{name} acts for {remove(access, name)} no longer")
