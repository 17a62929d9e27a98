"""What the files of an index hold."""

from pathlib import Path


def contents_of(path: Path) -> dict[str, bytes]:
    """Return all files of an index."""
    files = (file for file in path.rglob("*") if file.is_file())
    return {str(file.relative_to(path)): file.read_bytes() for file in files}


def contents_but_lock(path: Path) -> dict[str, bytes]:
    """Return the files of an index, except for the lock, which says nothing of what it holds."""
    files = (file for file in path.rglob("*") if file.is_file() and file.name != "writer.lock")
    return {str(file.relative_to(path)): file.read_bytes() for file in files}
