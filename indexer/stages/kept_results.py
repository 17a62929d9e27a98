"""A map over tasks that keeps results for a later build, as notes next to the tasks' files.

A task whose result is kept leaves a note with the result and a key, a checksum of everything that
the result depends on. The same task in a later build finds the note and returns its result.
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
    """A task; a dataclass.

    Attributes:
        folder: folder that it writes.
        key: key of everything that the result depends on, see `key_of`; if empty, nothing is kept.
        memory_bytes: most memory that it takes.
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
    """Return a checksum of values, from their representations."""
    content = repr((FORMAT_VERSION, *parts)).encode("utf-8", "backslashreplace")
    return hashlib.blake2b(content, digest_size=_KEY_BYTES).hexdigest()


def map_kept(
    engine: Engine, function: Callable[[_Task], _Result], tasks: Sequence[_Task]
) -> Iterator[_Result]:
    """Yield the results of all tasks in order; kept results do not run their tasks.

    Args:
        engine: where to run.
        function: as for `Engine.map`, annotated with its return type, which contains no folder. A
            worker that outlives a killed build may write the same task's folder at the same time,
            so each run writes to a separate folder.
        tasks: arguments of the calls.

    Raises:
        IndexerError: as for `Engine.map`, or the disk is full or refuses.
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
    from pydantic import TypeAdapter  # noqa: PLC0415  (not needed if nothing is kept)

    return TypeAdapter(get_type_hints(function, include_extras=True)["return"])


def _kept(task: Task, form: "TypeAdapter[Any]") -> Any:
    """Return the kept result of a task, or None if it has to run."""
    try:
        note = json.loads(_note_of(task.folder).read_bytes())
        if isinstance(note, dict) and note.get("key") == task.key:
            return form.validate_python(note.get("result"))
    except (OSError, ValueError, RecursionError):  # the adapter raises ValueError
        pass
    return None


def _keep(task: Task, written: Path, form: "TypeAdapter[Any]", result: object) -> None:
    """Move the output of a task to its folder, and write the note once everything is on disk.

    An existing output of the same task stays.
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
    """Remove unfinished output of tasks in a folder whose build was killed."""
    for path in [each for each in scratch.iterdir() if each.suffix not in {"", _NOTE}]:
        shutil.rmtree(path, ignore_errors=True)


def forget_result(folder: Path) -> None:
    """Make the task that wrote a folder run again the next time."""
    _note_of(folder).unlink(missing_ok=True)


def _note_of(folder: Path) -> Path:
    return folder.with_name(folder.name + _NOTE)
