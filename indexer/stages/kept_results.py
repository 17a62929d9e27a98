"""Maps a function over tasks, and stores results for a later build in notes next to their files.

A note holds a task's result and a key. The key is a checksum of everything that the result depends
on. If the same task runs again in a later build, its result is read from the note.
"""

import hashlib
import json
import secrets
import shutil
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import cache, partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, Protocol, TypeVar, get_type_hints

from indexer.engines import Engine
from indexer.errors import writing_to
from indexer.format.names import FORMAT_VERSION
from indexer.format.output import sync_file, sync_folder, write_file

if TYPE_CHECKING:
    from pydantic import TypeAdapter

_KEY_BYTES: Final = 16
_NOTE: Final = ".done"


class Task(Protocol):
    """A task, which must be a dataclass.

    Attributes:
        folder: folder that the task writes.
        key: checksum of everything that the result depends on, see `key_of`. If empty, the result
            is not stored.
        memory_bytes: most memory that the task takes.
    """

    @property
    def folder(self) -> Path: ...  # noqa: D102  (see above)

    @property
    def key(self) -> str: ...  # noqa: D102  (see above)

    @property
    def memory_bytes(self) -> int: ...  # noqa: D102  (see above)


_Task = TypeVar("_Task", bound=Task)
_Result = TypeVar("_Result")


def key_of(*parts: object) -> str:
    """Return a checksum of values, computed from their `repr`."""
    content = repr((FORMAT_VERSION, *parts)).encode("utf-8", "backslashreplace")
    return hashlib.blake2b(content, digest_size=_KEY_BYTES).hexdigest()


def map_kept(
    engine: Engine, function: Callable[[_Task], _Result], tasks: Sequence[_Task]
) -> Iterator[_Result]:
    """Yield the results of all tasks in order. A task with a stored result does not run.

    Args:
        engine: where to run.
        function: as for `Engine.map`. Its annotated return type must contain no folder. Each call
            writes to a separate folder, because a worker that outlives a killed build may be
            writing the same task's output.
        tasks: arguments of the calls.

    Raises:
        IndexerError: as for `Engine.map`; or the disk is full, or the system denies the write.
    """
    need = max((task.memory_bytes for task in tasks), default=0)
    return engine.map(partial(_done, function), tasks, need)


def _done(function: Callable[[_Task], _Result], task: _Task) -> _Result:
    if not task.key:
        return function(task)
    form = _form_of(function)
    kept = _kept(task, form)
    if kept is not None:
        found: _Result = kept
        return found
    changed: Any = task
    own = task.folder.with_name(f"{task.folder.name}.{secrets.token_hex(4)}")
    result = function(replace(changed, folder=own))
    with writing_to(task.folder):
        _keep(task, own, form, result)
    return result


@cache
def _form_of(function: Callable[..., Any]) -> "TypeAdapter[Any]":
    """Return the adapter that writes and reads a function's results as JSON."""
    from pydantic import TypeAdapter  # noqa: PLC0415  (not needed if no result is stored)

    return TypeAdapter(get_type_hints(function, include_extras=True)["return"])


def _kept(task: Task, form: "TypeAdapter[Any]") -> Any:
    """Return the stored result of a task, or None if the task has to run."""
    try:
        note = json.loads(_note_of(task.folder).read_bytes())
        if isinstance(note, dict) and note.get("key") == task.key:
            return form.validate_python(note.get("result"))
    except (OSError, ValueError, RecursionError):  # the adapter raises ValueError
        pass
    return None


def _keep(task: Task, written: Path, form: "TypeAdapter[Any]", result: object) -> None:
    """Move a task's output to its folder, and write the note once everything is on disk.

    Existing output of the same task stays.
    """
    note = _note_of(task.folder)
    for path in written.iterdir():
        sync_file(path)
    sync_folder(written)
    if _kept(task, form) is None:
        note.unlink(missing_ok=True)
        shutil.rmtree(task.folder, ignore_errors=True)
        written.rename(task.folder)
    else:
        shutil.rmtree(written, ignore_errors=True)
    part = note.with_name(f"{written.name}.note")
    told = {"key": task.key, "result": form.dump_python(result, mode="json")}
    write_file(part, json.dumps(told).encode("ascii"))
    part.rename(note)
    sync_folder(task.folder.parent)


def remove_unfinished(scratch: Path) -> None:
    """Remove the unfinished task output that a killed build left in a folder."""
    for path in [each for each in scratch.iterdir() if each.suffix not in {"", _NOTE}]:
        shutil.rmtree(path, ignore_errors=True)


def forget_result(folder: Path) -> None:
    """Remove the note of the task that wrote a folder, so that the task runs again."""
    _note_of(folder).unlink(missing_ok=True)


def _note_of(folder: Path) -> Path:
    return folder.with_name(folder.name + _NOTE)
