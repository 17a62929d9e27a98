"""The commands that define who may use a service: tokens and certificates, each for a tenant."""

import json
from collections.abc import Iterator
from datetime import UTC, datetime
from pathlib import Path
from typing import Annotated

import typer

from indexer.flags import AsJson, CommandLine
from retriever.commands.options import clear_errors
from retriever.security.access import (
    Access,
    Grant,
    Scope,
    add_certificate,
    add_token,
    read_access,
    remove,
    set_scopes,
)
from retriever.security.certificates import certified, read_certificates

app = CommandLine(
    "Say who may use a service: tokens and certificates, each for a tenant.", epilog=None
)

File = Annotated[
    Path,
    typer.Option(
        "--access", metavar="FILE", help="The service's access file; created if it does not exist."
    ),
]
Tenant = Annotated[
    str, typer.Argument(metavar="TENANT", help="The tenant that the credential acts for.")
]
MaybeTenant = Annotated[
    str,
    typer.Argument(
        metavar="[TENANT]", help="The credential's tenant; optional with the scope admin alone."
    ),
]
Scopes = Annotated[
    list[Scope],
    typer.Option(
        "--scope",
        metavar="SCOPE",
        help="What the credential may do: draft; delete (the tenant's data); admin (administering "
        "the service, all tenants' data included). Repeatable.",
    ),
]
Name = Annotated[
    str | None,
    typer.Option(
        metavar="NAME", help="Name in logs. Default: the token's digits, or the identity."
    ),
]
Which = Annotated[
    str,
    typer.Argument(
        metavar="NAME",
        help="A token's name, its 16 digits; a certificate's identity; or the name given with "
        "--name.",
    ),
]


@app.command("token")
@clear_errors()
def make_token(
    access: File,
    tenant: MaybeTenant = "",
    scope: Scopes = [Scope.DRAFT],  # noqa: B006  (typer reads it)
    name: Name = None,
) -> None:
    """Make a token and print it once: the file stores only a hash of it."""
    print(add_token(access, tenant, scope, name))


@app.command("certificate")
@clear_errors()
def let_in(
    tenant: Tenant,
    identity: Annotated[
        str,
        typer.Argument(
            metavar="IDENTITY",
            help="DNS:NAME, URI:NAME, EMAIL:NAME, IP:ADDRESS, CN:NAME, or a certificate file, "
            "from which the first of these is taken.",
        ),
    ],
    access: File,
    scope: Scopes = [Scope.DRAFT],  # noqa: B006  (typer reads it)
    name: Name = None,
) -> None:
    """Let the holder of a certificate act for a tenant."""
    if Path(identity).is_file():
        now = datetime.now(UTC)
        identity = certified(read_certificates(Path(identity), now)).identities[0]
    add_certificate(access, tenant, identity, scope, name)
    print(f"{identity} acts for {tenant}")


@app.command("list")
@clear_errors()
def list_credentials(access: File, as_json: AsJson = False) -> None:
    """List the credentials in the file and what they may do; the list has no secrets."""
    rows = [*_rows(read_access(access, by_operator=True))]
    if as_json:
        print(json.dumps(rows, ensure_ascii=False))
        return
    for row in ({key: key.upper() for key in rows[0]}, *rows) if rows else ():
        print("\t".join(row.values()))


def _rows(access: Access) -> Iterator[dict[str, str]]:
    """Yield one row per credential."""
    tokens = ((name, grant) for name, (_, grant) in access.tokens.items())
    kinds = {"token": tokens, "certificate": access.certificates.items()}
    for kind, grants in kinds.items():
        for credential, grant in grants:
            yield {
                "kind": kind,
                "credential": credential,
                "tenant": grant.tenant,
                "scopes": ",".join(scope for scope in Scope if scope in grant.scopes),
                "added": grant.added,
                "name": grant.name if grant.name != credential else "",
            }


@app.command("scopes")
@clear_errors()
def change_scopes(name: Which, access: File, scope: Scopes) -> None:
    """Set what a credential may do; takes effect in a running service within a second."""
    before = set_scopes(access, name, scope)
    now = ",".join(each for each in Scope if each in scope)
    print(f"{name} of {_holder(before)} is for {now}")


@app.command("revoke")
@clear_errors()
def revoke(name: Which, access: File) -> None:
    """Revoke a credential; takes effect in a running service within a second."""
    print(f"{name} acts for {_holder(remove(access, name))} no longer")


def _holder(grant: Grant) -> str:
    return grant.tenant or "its operator"
