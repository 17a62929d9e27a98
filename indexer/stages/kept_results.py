"""Results of tasks that an earlier build has done: notes beside what the tasks wrote.

A task whose result is kept leaves a note with the result and a key: a checksum of all that the
result depends on. The same task of a later build finds the note, and returns what it says.
"""

import hashlib
import json
import secrets
import shutil
from pathlib import Path
from typing import Any, Final

from indexer.errors import IndexerError
from indexer.format.names import FORMAT_VERSION
from indexer.format.output import sync_file, sync_folder, write_file

_KEY_BYTES: Final = 16
_NOTE: Final = ".done"


def key_of(*parts: object) -> str:
    """Return a checksum of values, by their representations."""
    content = repr((FORMAT_VERSION, *parts)).encode("utf-8", "backslashreplace")
    return hashlib.blake2b(content, digest_size=_KEY_BYTES).hexdigest()


def own_folder(folder: Path, key: str) -> Path:
    """Return where a task writes: a new folder if its result is kept, else the task's own."""
    return folder.with_name(f"{folder.name}.{secrets.token_hex(4)}") if key else folder


def kept_result(folder: Path, key: str) -> Any:
    """Return the result of the task that wrote a folder, or None if it has to run.

    Args:
        folder: which the task makes.
        key: of the task now; nothing is kept for an empty one.
    """
    if not key:
        return None
    try:
        note = json.loads(_note_of(folder).read_bytes())
    except (OSError, ValueError, RecursionError):
        return None
    is_same = isinstance(note, dict) and note.get("key") == key
    return note.get("result") if is_same else None


def keep_result(folder: Path, written: Path, key: str, result: Any) -> None:
    """Move what a task wrote to its folder, and leave the note once all is on disk.

    A worker that outlives a killed build may write the same at the same time: each writes a folder
    of its own, and what is there already stays if it is the same task's.

    Args:
        folder: which the task makes.
        written: where it is until now.
        key: of the task.
        result: made of what JSON has.

    Raises:
        IndexerError: the disk is full or refuses.
    """
    note = _note_of(folder)
    try:
        for path in written.iterdir():
            sync_file(path)
        sync_folder(written)
        if kept_result(folder, key) is None:
            note.unlink(missing_ok=True)
            shutil.rmtree(folder, ignore_errors=True)
            written.rename(folder)
        else:
            shutil.rmtree(written, ignore_errors=True)
        part = note.with_name(f"{written.name}.note")
        write_file(part, json.dumps({"key": key, "result": result}).encode("ascii"))
        part.rename(note)
        sync_folder(folder.parent)
    except OSError as error:
        raise IndexerError(f"cannot write {folder}: {error.strerror}") from error


def remove_unfinished(scratch: Path) -> None:
    """Remove what tasks had begun to write in a folder when their build was killed."""
    for path in [each for each in scratch.iterdir() if each.suffix not in {"", _NOTE}]:
        shutil.rmtree(path, ignore_errors=True)


def forget_result(folder: Path) -> None:
    """Have the task that wrote a folder run the next time."""
    _note_of(folder).unlink(missing_ok=True)


def _note_of(folder: Path) -> Path:
    return folder.with_name(folder.name + _NOTE)
