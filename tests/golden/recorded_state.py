"""The state folder of a service: what is kept of tenants, deleted, and drafted after a restart."""

import struct
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final

import lmdb
import numpy as np

from indexer.reader import Vocabulary
from retriever.drafter import DraftRequest, SequenceOptions
from retriever.limits import Limits
from retriever.sessions.embedded import EmbeddedDrafter
from tests.golden.record import Step, exact, tree_step
from tests.golden.sections import Scope

VOCABULARY: Final = Vocabulary(70_000, "12" * 32)
_TENANTS: Final = ("", "acme", "umbrella")
_CHECKSUM: Final = 4
_TIME: Final = struct.calcsize("<d")
_DATED: Final = (b"o", b"r")
"""What keys of outputs and of findings begin with: their values begin with a time."""
_LEARNED: Final = b"s"
"""What keys of learned weights begin with, which hold sums of floats."""


def steps(scope: Scope) -> Iterator[Step]:
    """Yield what is on disk after sessions, after deletions, and what is drafted from it then."""
    folder = scope.scratch / "state"
    with _drafter(folder) as drafter:
        _converse(drafter)
    yield from _records("state/after sessions", folder, scope)
    with _drafter(folder) as drafter:
        for tenant in _TENANTS:
            yield _draft(drafter, f"state/drafts after a restart/{tenant or 'no tenant'}", tenant)
        drafter.delete("umbrella")
        drafter.delete("acme", "acme-1")
    yield from _records("state/after deletions", folder, scope)
    with _drafter(folder) as drafter:
        for tenant in _TENANTS:
            yield _draft(drafter, f"state/drafts after deletions/{tenant or 'no tenant'}", tenant)


@contextmanager
def _drafter(folder: Path) -> Iterator[EmbeddedDrafter]:
    drafter = EmbeddedDrafter(state=folder, limits=Limits(), vocabulary=VOCABULARY)
    try:
        yield drafter
    finally:
        drafter.shut_down()


def _output(number: int) -> list[int]:
    return [(number * 977 + at * at * 31) % VOCABULARY.size for at in range(24)]


def _converse(drafter: EmbeddedDrafter) -> None:
    """Hold two sessions of each tenant, in which it drafts and learns; one is not remembered."""
    for tenant in _TENANTS:
        for number in range(3):
            session, output = f"{tenant or 'none'}-{number}", _output(number + len(tenant))
            drafter.open(
                session,
                output[:4],
                SequenceOptions(
                    tenant=tenant,
                    remember=number < 2,
                    policy_version=number if tenant == "acme" else None,
                ),
            )
            drafter.draft([DraftRequest(session, np.array(output[4:20], np.int32), 20, 8)])
            drafter.close(session, output[20:])


def _draft(drafter: EmbeddedDrafter, name: str, tenant: str) -> Step:
    session = f"{name}"
    prompt = _output(1 + len(tenant))[:8]
    drafter.open(session, prompt, SequenceOptions(tenant=tenant, remember=False))
    (tree,) = drafter.draft([DraftRequest(session, np.empty(0, np.int32), len(prompt), 16)])
    drafter.close(session)
    return tree_step(name, tree, 16)


def _records(name: str, folder: Path, scope: Scope) -> Iterator[Step]:
    """Yield the names of the files, and every record of the log without times and checksums."""
    files = sorted(path.relative_to(folder).as_posix() for path in folder.rglob("*"))
    yield exact(f"{name}/files", files)
    (file,) = folder.glob("*.mdb")
    options = {"subdir": False, "readonly": True, "lock": False}
    with lmdb.open(str(file), **options) as log, log.begin() as reading:
        for key, value in reading.cursor():
            shown = key.hex() if not key.isascii() else repr(key)[2:-1]
            yield exact(f"{name}/{shown}", _shown(key, value, scope))


def _shown(key: bytes, value: bytes, scope: Scope) -> Mapping[str, Any]:
    content = value[_CHECKSUM:]
    if key[:1] in _DATED:
        content = content[_TIME:]
    if scope.is_portable and key[:1] == _LEARNED:
        return {"bytes": len(content)}
    return {"bytes": len(content), "hex": content.hex()}
