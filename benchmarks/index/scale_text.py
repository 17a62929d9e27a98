"""A corpus of any size: real documents of this machine, and beyond them documents made from these.

Real text is what lies in the given folders: sources and documentation. A made document is a real
one rewritten: its paragraphs change places, some are left out, some come from another document
word for word, as text is copied, and most of its words and numbers are renamed, each to one that is
about as frequent, and everywhere in the document alike. So the frequencies of words, the repetition
within a document, and copies between documents stay about as they were, while names and their
combinations are new. What stays are the words that are most frequent, punctuation and layout: made
text is more alike than as much real text would be, and `likeness` says by how much.

Everything is written as JSON lines, one file after the other, each with a note once it is whole:
what is there is not made again.
"""

import json
import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass
from itertools import chain, count, islice, takewhile
from pathlib import Path
from typing import Final
from zlib import crc32

import numpy as np
from numpy.typing import NDArray

from benchmarks.stitching import NoTextError
from indexer.build_report import BuildTally
from indexer.format.documents import digest_of
from indexer.sources import SourceOptions, plan, read
from indexer.sources.source_options import Git

SHARD_CHARACTERS: Final = 1 << 26
"""Of a file of real text: what is made from one takes half a gigabyte of memory."""

HELD_OUT: Final = 64
"""Of so many real documents one is kept out of every index: drafts are measured on these."""

MIN_HELD_OUT: Final = 100
"""Where so many were not among the documents that are indexed, more are taken from those behind."""

MIN_CHARACTERS: Final = 200
"""Of a document: shorter ones are stubs."""

_HELD_OUT_FILE: Final = "held-out.jsonl"
_RECORDS: Final = ("*.json", "*.jsonl", "*.ndjson", "*.csv", "*.tsv", "*.parquet", "*.arrow")
_PIECES: Final = re.compile(r"[A-Za-z]+|[0-9]+|[^A-Za-z0-9]+")
_PARAGRAPH: Final = "\n\n"

_KEPT_WORDS: Final = 200
"""The most frequent words, such as keywords and articles, are never renamed."""

_RENAMED: Final = 0.7
_BAND: Final = 0.5
"""A word's replacement has its rank times e to a power up to this, either way."""

_LEFT_OUT: Final = 0.1
_COPIED: Final = 0.05
"""Of the paragraphs. With these three, two rewritings of the same documents have nearly as many
distinct n-grams as twice as many documents: of four tokens 0.46 for 0.49 of all, of sixteen 0.88
for 0.90, on 1.1 million tokens of a library's sources."""


@dataclass(frozen=True, slots=True)
class TextFile:
    """A file of a corpus.

    Attributes:
        path: of the JSON lines.
        is_made: whether its documents were made from others.
        documents: how many.
        characters: of their texts.
    """

    path: Path
    is_made: bool
    documents: int
    characters: int

    @property
    def note(self) -> Path:
        """The file that says that this one is whole."""
        return _note_of(self.path)

    def texts(self) -> Iterator[str]:
        """Yield the documents in order."""
        with self.path.open(encoding="utf-8") as lines:
            for line in lines:
                yield json.loads(line)["text"]


class TextWriter:
    """Writes files of documents, or takes them as they are if they are there already."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        folder.mkdir(parents=True, exist_ok=True)

    def below(self, name: str) -> "TextWriter":
        """Return a writer of a folder in this one's."""
        return TextWriter(self._folder / name)

    def found(self, name: str) -> TextFile | None:
        """Return a file that was written before, or None."""
        path = self._folder / name
        if not _note_of(path).exists():
            return None
        return TextFile(path, **json.loads(_note_of(path).read_text()))

    def write(self, name: str, texts: Iterable[str], *, is_made: bool) -> TextFile:
        """Write a file and then its note."""
        path = self._folder / name
        documents = characters = 0
        with path.open("w", encoding="utf-8") as file:
            for text in texts:
                file.write(json.dumps({"text": text}) + "\n")
                documents += 1
                characters += len(text)
        written = TextFile(path, is_made, documents, characters)
        fields = {key: value for key, value in asdict(written).items() if key != "path"}
        part = path.with_suffix(".part")
        part.write_text(json.dumps(fields))
        part.rename(written.note)
        return written


def _note_of(path: Path) -> Path:
    return path.with_suffix(".whole")


def real_documents(paths: Sequence[Path]) -> Iterator[str]:
    """Yield the texts in folders and files that are no records, each once, in order of names."""
    tally = BuildTally()
    options = SourceOptions(exclude=_RECORDS, git=Git.NEVER)
    blocks = plan(paths, options, tally)
    seen = set()
    for document in chain.from_iterable(read(block, options, tally) for block in blocks):
        text = document.text
        if len(text) < MIN_CHARACTERS or "\0" in text or not _is_unicode(text):
            continue
        digest = digest_of(text.encode())
        if digest not in seen:
            seen.add(digest)
            yield text


def _is_unicode(text: str) -> bool:
    """Return whether a text can be written as UTF-8."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


def is_held_out(text: str) -> bool:
    """Return whether a real document is kept out of every index; depends on its text alone."""
    return crc32(text.encode()) % HELD_OUT == 0


def write_real(paths: Sequence[Path], writer: TextWriter, most: int) -> tuple[TextFile, ...]:
    """Write real documents up to a number of characters; the last file is of those held out.

    Raises:
        NoTextError: the folders hold too little text.
    """
    names = (f"real-{number:04d}.jsonl" for number in count())
    if (held_out := writer.found(_HELD_OUT_FILE)) is not None:
        found = takewhile(bool, map(writer.found, names))
        return *(file for file in found if file), held_out
    kept: list[str] = []
    others = _others(real_documents(paths), kept)
    taken = up_to(others, most)
    files = [writer.write(next(names), texts, is_made=False) for texts in _shards(taken)]
    for _ in takewhile(lambda _: len(kept) < MIN_HELD_OUT, others):
        pass
    if not files or not kept:
        raise NoTextError("the folders hold too little text: name others with --text")
    return *files, writer.write(_HELD_OUT_FILE, kept, is_made=False)


def _others(texts: Iterable[str], held_out: list[str]) -> Iterator[str]:
    for text in texts:
        if is_held_out(text):
            held_out.append(text)
        else:
            yield text


def up_to(texts: Iterable[str], most: int) -> Iterator[str]:
    """Yield texts until they reach a number of characters."""
    taken = 0
    for text in texts:
        if taken >= most:
            return
        taken += len(text)
        yield text


def _shards(texts: Iterable[str]) -> Iterator[Iterator[str]]:
    """Divide texts into runs of about `SHARD_CHARACTERS`; each is to be used before the next."""
    texts = iter(texts)
    for first in texts:
        yield up_to(chain([first], texts), SHARD_CHARACTERS)


@dataclass(frozen=True, slots=True, eq=False)
class Shard:
    """Documents as numbers of their pieces: words, numbers, and what stands between them.

    Attributes:
        pieces: each once.
        documents: int32[n] each.
        ranked: for words and for numbers, int64[m] of pieces, the most frequent first.
        ranks: int64[number of pieces], the place in its own ranking; -1 for what has none.
        kinds: int8[number of pieces], which ranking that is; -1 for none.
        ends: bool[number of pieces], which end a paragraph.
    """

    pieces: list[str]
    documents: list[NDArray[np.int32]]
    ranked: tuple[NDArray[np.int64], NDArray[np.int64]]
    ranks: NDArray[np.int64]
    kinds: NDArray[np.int8]
    ends: NDArray[np.bool_]

    @classmethod
    def of(cls, texts: Iterable[str]) -> "Shard":
        """Take documents apart."""
        numbers: dict[str, int] = {}
        documents = [
            np.array(
                [numbers.setdefault(piece, len(numbers)) for piece in _PIECES.findall(text)],
                np.int32,
            )
            for text in texts
        ]
        pieces = [*numbers]
        counts = np.bincount(np.concatenate(documents), minlength=len(pieces))
        kinds = np.array([_kind(piece) for piece in pieces], np.int8)
        ranks = np.full(len(pieces), -1, np.int64)
        ranked = []
        for kind in (0, 1):
            own = np.flatnonzero(kinds == kind)
            own = own[np.argsort(-counts[own], kind="stable")]
            ranks[own] = np.arange(len(own))
            ranked.append(own)
        ends = (kinds < 0) & np.array([_PARAGRAPH in piece for piece in pieces])
        return cls(pieces, documents, (ranked[0], ranked[1]), ranks, kinds, ends)

    def made(self, seed: Sequence[int]) -> Iterator[str]:
        """Yield a made document for each, the same ones for the same seed."""
        for number, ids in enumerate(self.documents):
            rng = np.random.default_rng([*seed, number])
            other = self.documents[int(rng.integers(len(self.documents)))]
            parts = self._rearranged(self._renamed(ids, rng), other, rng)
            yield "".join(map(self.pieces.__getitem__, np.concatenate(parts).tolist()))

    def _renamed(self, ids: NDArray[np.int32], rng: np.random.Generator) -> NDArray[np.int32]:
        """Return a document with most of its words and numbers renamed."""
        own, places = np.unique(ids, return_inverse=True)
        is_renamed = rng.random(len(own)) < _RENAMED
        factors = np.exp(rng.uniform(-_BAND, _BAND, len(own)))
        for kind, ranked in enumerate(self.ranked):
            least = 0 if kind else _KEPT_WORDS
            chosen = is_renamed & (self.kinds[own] == kind) & (self.ranks[own] >= least)
            ranks = ((self.ranks[own[chosen]] + 1) * factors[chosen]).astype(np.int64) - 1
            own[chosen] = ranked[np.clip(ranks, least, len(ranked) - 1)]
        return own[places]

    def _rearranged(
        self, ids: NDArray[np.int32], other: NDArray[np.int32], rng: np.random.Generator
    ) -> list[NDArray[np.int32]]:
        """Return its paragraphs, the first in its place and the others in any order."""
        first, *others = self._paragraphs(ids)
        copies = self._paragraphs(other)
        fates = rng.random(len(others))
        drawn = rng.integers(len(copies), size=len(others)).tolist()
        kept = [first]
        for place in rng.permutation(len(others)).tolist():
            if fates[place] < _COPIED:
                kept.append(copies[drawn[place]])
            elif fates[place] >= _COPIED + _LEFT_OUT:
                kept.append(others[place])
        return kept

    def _paragraphs(self, ids: NDArray[np.int32]) -> list[NDArray[np.int32]]:
        return np.split(ids, np.flatnonzero(self.ends[ids]) + 1)


def _kind(piece: str) -> int:
    if piece[0].isascii() and piece[0].isalpha():
        return 0
    return 1 if piece[0].isascii() and piece[0].isdigit() else -1


@dataclass(frozen=True, slots=True)
class Corpus:
    """The files of a corpus.

    Attributes:
        files: of documents that are indexed, the real ones first.
        added: of documents, made as well, that are added to the index later.
        held_out: real documents that are in none of these.
    """

    files: tuple[TextFile, ...]
    added: tuple[TextFile, ...]
    held_out: TextFile

    @property
    def made_share(self) -> float:
        """The share of all characters that was made."""
        made = sum(file.characters for file in self.files if file.is_made)
        return made / max(1, sum(file.characters for file in self.files))

    def every(self, step: int, *, real_only: bool = False) -> Iterator[str]:
        """Yield one document in so many of each file, not the same ones of all."""
        for number, file in enumerate(self.files):
            if not (real_only and file.is_made):
                yield from islice(file.texts(), number % step, None, step)


def write_made(
    real: Sequence[TextFile], writer: TextWriter, characters: int, seed: int
) -> Iterator[TextFile]:
    """Yield files of made documents, as they are written, until they have so many characters.

    Each real file is rewritten as often as it takes, every time otherwise.

    Args:
        real: files to make them from.
        writer: writes them.
        characters: of all together, to a document or so for each real file.
        seed: of all that is random.
    """
    all_real = sum(file.characters for file in real)
    for number, source in enumerate(real):
        shard: Shard | None = None
        left = characters * source.characters // max(1, all_real)
        for turn in count():
            if left <= 0:
                break
            name = f"made-{number:04d}-{turn:04d}.jsonl"
            file = writer.found(name)
            if file is None:
                shard = shard or Shard.of(source.texts())
                texts = up_to(shard.made((seed, number, turn)), left)
                file = writer.write(name, texts, is_made=True)
            left -= file.characters
            yield file


def made_sample(texts: Iterable[str], seed: int) -> list[str]:
    """Return a made document for each of some real ones."""
    return [*Shard.of(texts).made((seed,))]


def distinct_shares(ids: NDArray[np.int64], orders: Sequence[int]) -> dict[int, float]:
    """Return for lengths of n-grams the share of places whose n-gram none before has.

    Args:
        ids: int64[n], tokens.
        orders: lengths, rising.
    """
    shares = {}
    keys = np.zeros(len(ids), np.uint64)
    for order in range(1, max(orders) + 1):
        # A rolling hash of 64 bits: among millions of n-grams two hardly ever have the same.
        column = ids[order - 1 :].astype(np.uint64) + np.uint64(1)
        keys = (keys[: len(column)] ^ column) * np.uint64(0x9E3779B97F4A7C15)
        keys ^= keys >> np.uint64(29)
        if order in orders:
            shares[order] = len(np.unique(keys)) / max(1, len(keys))
    return shares
