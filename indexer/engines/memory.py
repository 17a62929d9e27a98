"""Memory: the available amount, default limits, and sizes as text."""

import os
import re
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Final

from indexer.errors import IndexerError

_UNITS: Final = {"": 1, "K": 1 << 10, "M": 1 << 20, "G": 1 << 30, "T": 1 << 40}
_SIZE: Final = re.compile(r"([0-9]+(?:\.[0-9]+)?)\s*([KMGT]?)(?:i?B)?", re.IGNORECASE)
_ENOUGH_BYTES: Final = 3 << 30
"""Enough memory for a build with segments of the usual size in this process and one worker. Sorting
takes 0.7 to 1 GB, and each process an estimated half a GB."""

_ROOT: Final = Path("/")
_GROUP_FILES: Final = {
    "": ("memory.max", "memory.current", "inactive_file"),
    "memory": ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"),
}
"""File names for each memory controller. Version 2 has one hierarchy for all controllers."""


def parse_size(text: str) -> int:
    """Return the number of bytes that `4G`, `512M`, `1.5GiB` or `1000000` mean; K is 1024.

    Raises:
        IndexerError: the text has another form, or means zero.
    """
    match = _SIZE.fullmatch(text.strip())
    size = int(float(match[1]) * _UNITS[match[2].upper()]) if match else 0
    if size < 1:
        raise IndexerError(f"{text!r} is not a size: write it like 512M or 4G")
    return size


def describe_size(num_bytes: int) -> str:
    """Return a size in the form that `parse_size` reads, rounded up to a tenth of its unit."""
    for unit in ("T", "G", "M", "K"):
        if num_bytes >= _UNITS[unit]:
            tenths = -(-num_bytes * 10 // _UNITS[unit])
            return f"{tenths // 10}.{tenths % 10}{unit}"
    return f"{num_bytes}"


def available_bytes(root: Path = _ROOT) -> int:
    """Return how many bytes of memory this process and its children could take now.

    This is what the system has left, or what the process's control group has left if that is less.

    Args:
        root: folder that contains `proc` and `sys`.
    """
    return max(min(_left_in_system(root), _left_in_groups(root)), 1)


def default_limit(root: Path = _ROOT) -> int:
    """Return how many bytes of memory a build may take by default.

    This is half of the available memory. If little is available, it is all of the available memory,
    but at most what most builds need.

    Args:
        root: as for `available_bytes`.
    """
    available = available_bytes(root)
    return max(available // 2, min(available, _ENOUGH_BYTES))


def bytes_taken() -> int:
    """Return how many bytes of memory this process takes. Mapped files do not count.

    The system can reclaim pages of mapped files.
    """
    with suppress(OSError, KeyError):
        fields = _fields(Path("/proc/self/status"))
        return (int(fields["RssAnon"]) + int(fields["RssShmem"])) << 10
    import resource  # noqa: PLC0415  (without /proc)

    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss  # the peak so far; bytes on macOS


def _fields(path: Path) -> dict[str, str]:
    """Return names and first values from a file whose lines start with a name and a colon."""
    lines = (line.partition(":") for line in path.read_text("utf-8", "replace").splitlines())
    return {name: rest.split()[0] for name, _, rest in lines if rest.split()}


def _page_bytes() -> int:
    return os.sysconf("SC_PAGE_SIZE")


def _left_in_system(root: Path) -> int:
    with suppress(OSError, KeyError):
        return int(_fields(root / "proc/meminfo")["MemAvailable"]) << 10
    return os.sysconf("SC_PHYS_PAGES") * _page_bytes()


def _left_in_groups(root: Path) -> int:
    """Return the memory that control group limits leave. Cached files do not count as used."""
    left = [1 << 62]
    for folder, (limit, used, cached) in _groups(root):
        with suppress(OSError, ValueError, KeyError):
            most, taken = (int((folder / name).read_text("ascii")) for name in (limit, used))
            stat = (folder / "memory.stat").read_text("ascii").splitlines()
            left.append(most - taken + int(dict(line.split() for line in stat)[cached]))
    return min(left)


def _groups(root: Path) -> Iterator[tuple[Path, tuple[str, str, str]]]:
    """Yield this process's control groups, each with the names of its memory files."""
    with suppress(OSError):
        for line in (root / "proc/self/cgroup").read_text("utf-8").splitlines():
            _, controllers, path = line.split(":", 2)
            if controllers in _GROUP_FILES:
                top = root / "sys/fs/cgroup" / controllers
                own = top / path.lstrip("/")
                for folder in (own, *own.parents):
                    if folder.is_relative_to(top):
                        yield folder, _GROUP_FILES[controllers]
