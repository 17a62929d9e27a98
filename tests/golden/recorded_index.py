"""Bytes of indexes: built at once, in several segments, with texts, added to, removed from, merged.

Every file has a checksum, and short ones their text. All of it holds on every machine.
"""

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import chdir
from hashlib import sha256
from pathlib import Path
from types import MappingProxyType
from typing import Final

from indexer.build import (
    BuildOptions,
    build_from_index,
    build_from_texts,
    build_from_tokens,
    build_index,
)
from indexer.change.changes import add_documents, compact, remove_documents
from indexer.change.choosing import list_documents
from indexer.reader import Vocabulary
from tests.golden.byte_tokenizer import byte_tokenizer
from tests.golden.record import Step, exact
from tests.golden.sections import Scope

VOCABULARY: Final = Vocabulary(50, "cd" * 32)
_LONGEST_SHOWN: Final = 5000
_SNAPSHOTS: Final = "catalog"
_LOCKS: Final = "lock"
"""In names of files that hold who wrote last, and when."""


def steps(scope: Scope) -> Iterator[Step]:
    """Yield the files of each index, and the documents that it lists."""
    for name, make in INDEXES.items():
        folder = scope.scratch / name
        folder.mkdir()
        with chdir(folder):  # names of documents are paths as they were given
            index = folder / make(Path())
        for file in sorted(index.rglob("*")):
            shown = file.relative_to(index).as_posix()
            if file.is_file() and _LOCKS not in shown:
                yield exact(f"index/{name}/{shown}", _content(file, scope.scratch))
        yield exact(
            f"index/{name}/documents",
            [[each.name, each.num_tokens] for each in list_documents(index)],
        )


def _content(file: Path, scratch: Path) -> Mapping[str, object]:
    """Return the size and the checksum of a file, and its text if it is a short one.

    A snapshot names the folder of its tokenizer, and begins with its own checksum.
    """
    content = file.read_bytes().replace(str(scratch).encode(), b"DIR")
    if file.parent.name == _SNAPSHOTS:
        content = content.partition(b"\n")[2]
    found: dict[str, object] = {"bytes": len(content), "sha256": sha256(content).hexdigest()}
    text = content.decode("ascii", "replace")
    if len(text) <= _LONGEST_SHOWN and text.replace("\n", "").isprintable():
        found["text"] = text
    return found


def _documents(count: int) -> list[tuple[str, list[int]]]:
    """Return documents that repeat one another in parts."""
    phrases = [[(7 * at + 3 * step) % VOCABULARY.size for step in range(9)] for at in range(11)]
    return [
        (f"document-{n}", [t for at in range(4) for t in phrases[(n * (at + 2)) % 11]])
        for n in range(count)
    ]


def _of_tokens(folder: Path) -> Path:
    build_from_tokens(_documents(20), folder / "index", VOCABULARY)
    return folder / "index"


def _of_large_vocabulary(folder: Path) -> Path:
    documents = [(name, [t * 2000 for t in ids]) for name, ids in _documents(6)]
    build_from_tokens(documents, folder / "index", Vocabulary(100_000, "ef" * 32))
    return folder / "index"


def _in_segments(folder: Path) -> Path:
    options = BuildOptions(segment_tokens=200)
    build_from_tokens(_documents(20), folder / "index", VOCABULARY, options)
    return folder / "index"


def _merged(folder: Path) -> Path:
    index = _in_segments(folder)
    compact(index, BuildOptions(segment_tokens=500))
    return index


def _of_texts(folder: Path) -> Path:
    texts = [("a.txt", "one two three, one two four"), ("b.txt", "one two three, ünd 日本")]
    build_from_texts(texts, folder / "index", _tokenizer(folder), BuildOptions(keep_texts=True))
    return folder / "index"


def _of_sources(folder: Path) -> Path:
    """Build from files of several kinds, in which some records are no documents."""
    sources = folder / "sources"
    (sources / "code").mkdir(parents=True)
    (sources / "code" / "main.py").write_text("def main():\n    return 1\n")
    (sources / "notes.md").write_text("# Notes\n\nThe harbour opens at seven.\n")
    (sources / "empty.txt").write_text("")
    (sources / "picture.png").write_bytes(b"\x89PNG\r\n\x1a\n\x00\x00")
    chats = [
        {"messages": [{"role": "user", "content": "When?"}, {"role": "assistant", "content": c}]}
        for c in ("At seven.", "At eight.", "At seven.")
    ]
    lines = [*map(json.dumps, chats), '{"prompt": "Where?", "output": "Here."}', "{not json"]
    (sources / "log.jsonl").write_text("\n".join(lines))
    build_index([sources], folder / "index", _tokenizer(folder))
    return folder / "index"


def _changed(folder: Path) -> Path:
    index = _of_sources(folder)
    more = folder / "more.txt"
    more.write_text("The harbour closes at nine.\n")
    add_documents(index, [more])
    remove_documents(index, patterns=["*notes.md"])
    return index


def _rebuilt(folder: Path) -> Path:
    index = _of_texts(folder)
    build_from_index(index, folder / "again", _tokenizer(folder, [("t", "h"), ("o", "n")]))
    return folder / "again"


def _tokenizer(folder: Path, merges: Sequence[tuple[str, str]] = ()) -> str:
    """Save a tokenizer; return its folder."""
    path = folder / ("other" if merges else "tokenizer")
    path.mkdir(exist_ok=True)
    byte_tokenizer(merges).save(str(path / "tokenizer.json"))
    return str(path)


INDEXES: Final[Mapping[str, Callable[[Path], Path]]] = MappingProxyType(
    {
        "of tokens": _of_tokens,
        "of a large vocabulary": _of_large_vocabulary,
        "in segments": _in_segments,
        "merged": _merged,
        "of texts": _of_texts,
        "of sources": _of_sources,
        "changed": _changed,
        "rebuilt": _rebuilt,
    }
)
"""Indexes by name, each with what makes it in a folder."""
