"""Reads the metadata of the model in a GGUF file, without its tensors."""

import mmap
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

_MAGIC: Final = b"GGUF"
_VERSIONS: Final = (2, 3)
_SCALARS: Final = dict(enumerate("BbHhIif?", start=0)) | {10: "Q", 11: "q", 12: "d"}
"""Maps the format's type numbers to `struct` letters."""
_STRING, _ARRAY = 8, 9


def read_metadata(path: Path) -> dict[str, Any]:
    """Return a file's metadata: numbers, strings, and lists of numbers or strings.

    Raises:
        OSError: the file cannot be read.
        ValueError: the file is not a GGUF file of a known version, or ends too early.
    """
    with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as content:
        reading = _Reading(content)
        if content[:4] != _MAGIC or reading.scalar("I", 4) not in _VERSIONS:
            raise ValueError(f"{path} is not a GGUF file of version 2 or 3")
        reading.scalar("Q")  # number of tensors
        try:
            return dict(reading.pair() for _ in range(reading.scalar("Q")))
        except struct.error as error:
            raise ValueError(f"{path} ends too early") from error


class _Reading:
    """A position in a file. It advances with every value that is read."""

    def __init__(self, content: mmap.mmap) -> None:
        self._content = content
        self._position = 0

    def scalar(self, letter: str, position: int | None = None) -> Any:
        start = self._position if position is None else position
        form = f"<{letter}"
        self._position = start + struct.calcsize(form)
        return struct.unpack_from(form, self._content, start)[0]

    def string(self) -> str:
        size = self.scalar("Q")
        begin, self._position = self._position, self._position + size
        if self._position > len(self._content):
            raise struct.error
        return self._content[begin : self._position].decode("utf-8")

    def pair(self) -> tuple[str, Any]:
        return self.string(), self._value(self.scalar("I"))

    def _value(self, kind: int) -> Any:
        if kind != _ARRAY:
            return self._reader(kind)()
        inner, count = self.scalar("I"), self.scalar("Q")
        if inner in _SCALARS:
            form = f"<{count}{_SCALARS[inner]}"
            begin = self._position
            self._position += struct.calcsize(form)
            return list(struct.unpack_from(form, self._content, begin))
        read = self._reader(inner)
        return [read() for _ in range(count)]

    def _reader(self, kind: int) -> Callable[[], Any]:
        if kind == _STRING:
            return self.string
        if kind not in _SCALARS:
            raise ValueError(f"GGUF metadata of type {kind} is unknown")
        return lambda: self.scalar(_SCALARS[kind])
