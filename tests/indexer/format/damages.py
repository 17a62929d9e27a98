"""Damages an index in every way that leaves its files where they are, one after the other."""

import random
from collections.abc import Iterator
from pathlib import Path

_PAGE = 4096


def damages(path: Path, other: Path, flips: int, seed: int) -> Iterator[str]:
    """Yield what is wrong with the index at `path` while it is; it is sound in the end.

    Args:
        path: of the index.
        other: of another index, whose files take the places of those of the first one.
        flips: of a byte, in each file.
        seed: of what is flipped.
    """
    rng = random.Random(seed)
    files = sorted(each for each in path.rglob("*") if each.is_file() and each.stat().st_size)
    for file in files:
        content = file.read_bytes()
        contents = [(f"flip {i}", flipped(content, rng)) for i in range(flips)]
        contents += [
            ("cut", content[: rng.randrange(len(content))]),
            ("cut at the end", content[:-1]),
            ("zeros", bytes(len(content))),
            ("ones", b"\xff" * len(content)),
            ("a page of zeros", bytes(min(_PAGE, len(content))) + content[_PAGE:]),
            ("turned round", content[::-1]),
            *((f"that of {each}", each.read_bytes()) for each in others(file, path, other)),
        ]
        for what, damaged in contents:
            if damaged != content:
                replace_file(file, damaged)
                yield f"{file.relative_to(path)}: {what}"
        replace_file(file, content)


def replace_file(file: Path, content: bytes) -> None:
    """Put a new file in the place of one that may still be mapped."""
    file.unlink()
    file.write_bytes(content)


def flipped(content: bytes, rng: random.Random) -> bytes:
    """Return content with bits of one byte flipped, at the ends more often than elsewhere."""
    place = rng.choice([0, len(content) - 1, *(rng.randrange(len(content)) for _ in range(8))])
    damaged = bytearray(content)
    damaged[place] ^= rng.randrange(1, 256)
    return bytes(damaged)


def others(file: Path, path: Path, other: Path) -> Iterator[Path]:
    """Yield files of the same name, or kind, that might be taken for this one."""
    places = [*path.rglob(file.name), *other.rglob(file.name)]
    places += file.parent.glob(f"{file.name[:-1]}?")  # of another level
    yield from (each for each in places if each != file and each.is_file())
