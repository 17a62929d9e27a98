"""Opening a log of generations: is it whole, of this version, and of the tokenizer at hand?"""

import logging
from typing import Final

import lmdb

from retriever.errors import StateError, VocabularyMismatchError
from retriever.generations_log import records
from retriever.generations_log.files import LogFiles
from retriever.generations_log.store import LogOptions, LogStore

REFUSALS: Final = (lmdb.Error, OSError)
"""What the disk and LMDB raise."""

_LOGGER: Final = logging.getLogger(__name__)
_DAMAGE: Final = (
    lmdb.CorruptedError,
    lmdb.InvalidError,
    lmdb.PageNotFoundError,
    lmdb.VersionMismatchError,
)


def open_store(files: LogFiles, fingerprint: str, options: LogOptions) -> tuple[LogStore, str]:
    """Open the store in locked files; a damaged one is set aside and a new one begun.

    Args:
        files: where it is.
        fingerprint: of the tokenizer whose tokens will come; empty if it is not known.
        options: how the log is kept.

    Returns:
        The store, and the fingerprint of the tokenizer that it is for; empty if it is not known.

    Raises:
        StateError: the disk refuses, or a newer version wrote it.
        VocabularyMismatchError: it holds outputs of another tokenizer.
    """
    files.make_whole()
    try:
        store = _open_whole(files, options)
        try:
            _check_format(store, files)
            if files.writable:
                files.sync_names()
            return store, _checked_fingerprint(store, files, fingerprint)
        except BaseException:
            store.close()
            raise
    except REFUSALS as error:
        raise StateError(
            f"the log {files.data} cannot be opened: {error}; free space and permissions, or "
            "choose another state directory"
        ) from error


def _open_whole(files: LogFiles, options: LogOptions) -> LogStore:
    try:
        store = LogStore(files.data, options, writable=files.writable)
        if store.is_empty or _is_introduced(store):
            return store
        store.close()
        reason = "it does not say of what tokenizer it is"
    except _DAMAGE as error:
        if not files.writable:
            raise
        reason = str(error)
    aside = files.set_aside()
    _LOGGER.warning(
        "the log of generations %s is damaged (%s) and was set aside as %s; drafts start cold",
        files.data,
        reason,
        aside.name,
    )
    return LogStore(files.data, options)


def _is_introduced(store: LogStore) -> bool:
    keys = (records.FORMAT_KEY, records.FINGERPRINT_KEY)
    return all(store.record(key) is not None for key in keys)


def _check_format(store: LogStore, files: LogFiles) -> None:
    version = store.record(records.FORMAT_KEY)
    if version is None and files.writable:
        version = bytes([records.FORMAT_VERSION])
        store.put({records.FORMAT_KEY: version, records.FINGERPRINT_KEY: b""})
    if version is not None and version != bytes([records.FORMAT_VERSION]):
        raise StateError(
            f"{files.data} has format version {version.hex()}, and this is version "
            f"{records.FORMAT_VERSION}: upgrade foredraft, or choose another state directory"
        )


def _checked_fingerprint(store: LogStore, files: LogFiles, fingerprint: str) -> str:
    known = (store.record(records.FINGERPRINT_KEY) or b"").decode()
    if fingerprint in {"", known}:
        return known
    if known or store.has_outputs():
        named = f"with the fingerprint {known[:12]}\u2026" if known else "that was not named"
        raise VocabularyMismatchError(
            f"the state directory {files.data.parent} holds outputs of a tokenizer {named} "
            f"and not of {fingerprint[:12]}\u2026: give each tokenizer a directory of its own"
        )
    if files.writable:
        store.put({records.FINGERPRINT_KEY: fingerprint.encode()})
    return fingerprint
