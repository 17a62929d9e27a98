"""Builds phrase tables from counted n-grams, and sums the tables of several corpora.

Tables store only the shortest and most frequent n-grams. They draft about as well as all n-grams:
CREST (Ho, Park and Wang, 2024, arXiv:2408.04678) found drafts of the same length in a tenth of the
space.

Large tables are summed in another process. Summing takes seconds and several times their size in
memory, and it holds the GIL for much of the time. Drafting must not wait for it, nor keep that
memory afterwards. The sum is returned in a temporary file, which is mapped like the files of an
index.
"""

import json
import os
import subprocess
import sys
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from mmap import ACCESS_READ, mmap
from tempfile import TemporaryFile
from typing import Any, BinaryIO, Final

import numpy as np
from numpy.typing import NDArray

from indexer.errors import DamagedIndexError, IndexerError
from indexer.format.names import MAX_ORDER, POSITION_DTYPE, Tokens, separator_of
from indexer.format.phrase_tables import COUNT_SCALE, PhraseTables, encode_counts

_TOKEN_BITS: Final = np.uint64(32)


@dataclass(frozen=True, slots=True, eq=False)
class Level:
    """N-grams of one length, which form one level of a trie under construction.

    Attributes:
        parents: int64[n], the entry, in the level below, of all tokens but the last. For n-grams of
            two tokens, it is the first token itself.
        tokens: uint16[n] or uint32[n], last token of each n-gram.
        counts: int64[n] of occurrences, or uint8[n] of codes.
    """

    parents: NDArray[np.int64]
    tokens: NDArray[Any]
    counts: NDArray[Any]

    def __len__(self) -> int:
        return len(self.tokens)

    def __getitem__(self, kept: NDArray[Any]) -> "Level":
        return Level(self.parents[kept], self.tokens[kept], self.counts[kept])


def count_ngrams(tokens: Tokens, suffixes: NDArray[np.uint32]) -> list[Level]:
    """Return levels 2 to 4 of the n-grams without separator that start at sorted suffixes.

    Args:
        tokens: unsigned[t], tokens of a segment.
        suffixes: uint32[m], m ≥ 1, adjacent elements of the segment's suffix array.
    """
    separator = separator_of(tokens.dtype)
    positions = suffixes.astype(np.int64)
    # Past the end, the last token is read again. It is a separator.
    column = tokens.take(positions, mode="clip")
    parents_begin, differs = column, _changes(column)
    is_whole = column != separator
    levels = []
    for order in range(2, MAX_ORDER + 1):
        column = tokens.take(positions + (order - 1), mode="clip")
        differs |= _changes(column)
        is_whole &= column != separator
        begins = np.flatnonzero(differs)
        counts = np.diff(begins, append=len(positions))
        begins, counts = begins[is_whole[begins]], counts[is_whole[begins]]
        if order == 2:  # noqa: PLR2004  (level 1 has no entries of its own to point to)
            parents = parents_begin[begins].astype(np.int64)
        else:
            parents = np.searchsorted(parents_begin, begins, side="right") - 1
        levels.append(Level(parents, column[begins], counts))
        parents_begin = begins
    return levels


def merge_levels(parts: Sequence[list[Level]]) -> list[Level]:
    """Return the n-grams of all parts with summed counts, sorted by parent and token.

    Args:
        parts: levels 2 to 4 of each part. If there are several parts, they may be in any order.
    """
    parts = [part for part in parts if len(part[0])] or parts[:1]
    if len(parts) == 1:
        return parts[0]
    merged = []
    places = None
    for levels in zip(*parts, strict=True):
        parents = [level.parents for level in levels]
        if places is not None:
            parents = [place[each] for place, each in zip(places, parents, strict=True)]
        level, places = _merge_level(levels, parents)
        merged.append(level)
    return merged


def _merge_level(
    levels: Sequence[Level], parents: Sequence[NDArray[np.int64]]
) -> tuple[Level, list[NDArray[np.int64]]]:
    """Return a merged level, and the places of each part's entries in the merged level.

    Args:
        levels: this level of each part.
        parents: for each part, the parents of its entries in the merged level below.
    """
    keys = [
        each.astype(np.uint64) << _TOKEN_BITS | level.tokens
        for each, level in zip(parents, levels, strict=True)
    ]
    merged, places = np.unique(np.concatenate(keys), return_inverse=True)
    counts = np.bincount(places, np.concatenate([level.counts for level in levels]))
    level = Level(
        (merged >> _TOKEN_BITS).astype(np.int64),
        merged.astype(levels[0].tokens.dtype),
        counts.astype(np.int64),
    )
    ends = np.cumsum([len(each) for each in levels])
    return level, np.split(places, ends[:-1])


def _changes(column: NDArray[Any]) -> NDArray[np.bool_]:
    """Return, for each element, whether it differs from the previous one."""
    changes = np.ones(len(column), np.bool_)
    np.not_equal(column[1:], column[:-1], out=changes[1:])
    return changes


MIN_COUNTS: Final = (1, 2, 2)
"""Least counts of n-grams of 2, 3 and 4 tokens that get an entry, if all of these fit. These counts
equal their codes."""

_TURNS: Final = (1, 2, 0)
"""Order in which the least counts are raised if not all n-grams fit: 4 tokens, 2 tokens, then 3. On
held-out answers, this drafts better at equal size than longest first, or 4, 3, 2."""

MAX_BYTES_PER_TOKEN: Final = 2
"""Most bytes of levels 2 to 4 per token of the corpus. On 5.8M tokens of chat, pairs with at least
one occurrence and longer n-grams with at least two take 2.1 bytes per token. All n-grams take 5.4
bytes per token, for 1% more tokens per step."""

MIN_BYTES: Final = 1 << 23
"""Size that levels 2 to 4 may always have. Small corpora repeat less, and their tables cost little.
With 0.3M tokens, this size fits all n-grams. Then 36.4% instead of 34.0% are correct within the
first four guesses."""

_MAX_BYTES: Final = 2**32 - 1
"""Largest size of levels 2 to 4, in bytes; entry numbers have four bytes."""

NUM_CODES: Final = 256
"""Number of codes of counts; see `indexer.format.phrase_tables`."""

_STARTS_BYTES: Final = POSITION_DTYPE.itemsize * (MAX_ORDER - 2)
"""Bytes that `starts` take for levels without entries."""


def merge_tables(tables: Sequence[PhraseTables]) -> PhraseTables:
    """Return the tables of several corpora as one set, with all n-grams and summed counts.

    If a table has no entry for an n-gram, the n-gram counts as absent from that corpus. The result
    is no larger than all tables together, and their sizes bound the memory that this takes.

    Args:
        tables: at least one set of tables, all for one vocabulary; not changed.

    Raises:
        ValueError: there are no tables, or they are for several vocabularies.
        DamagedIndexError: a table's `starts` do not cover the next level.
    """
    if len({each.vocabulary_size for each in tables}) != 1:
        raise ValueError("phrase tables are merged for one vocabulary")
    if len(tables) == 1:
        return tables[0]
    counts = np.sum([COUNT_SCALE[each.counts[0]] for each in tables], axis=0)
    return _packed(counts, in_order(merge_levels([_levels_of(each) for each in tables])))


def size_limit(num_tokens: int) -> int:
    """Return how many bytes levels 2 to 4 may take for a corpus of this many tokens."""
    return min(max(MAX_BYTES_PER_TOKEN * num_tokens, MIN_BYTES), _MAX_BYTES)


def prune(levels: Sequence[Level], least: Sequence[int]) -> list[Level]:
    """Return the n-grams with at least the given counts or codes, in the same order.

    Args:
        levels: levels 2 to 4; no n-gram has a higher count than its prefix. If a level is empty but
            the next level is not, parents are left unchanged.
        least: least count or code for each level; longer n-grams never have a lower one.
    """
    pruned = []
    places = None
    for level, least_count in zip(levels, least, strict=True):
        is_kept = level.counts >= least_count
        entries = level[is_kept]
        if places is not None and len(places):
            entries = Level(places[entries.parents], entries.tokens, entries.counts)
        pruned.append(entries)
        places = np.cumsum(is_kept) - 1
    return pruned


def in_order(levels: Sequence[Level]) -> list[Level]:
    """Return the same n-grams in the order of the format, with codes instead of counts.

    Args:
        levels: levels 2 to 4, each sorted by parent and token.
    """
    ordered = []
    places = None
    for level in levels:
        parents = level.parents if places is None else places[level.parents]
        codes = encode_counts(level.counts)
        order = np.argsort(parents << 8 | (NUM_CODES - 1 - codes), kind="stable")
        ordered.append(Level(parents[order], level.tokens[order], codes[order]))
        places = np.empty(len(order), np.int64)
        places[order] = np.arange(len(order))
    return ordered


def least_codes(histograms: NDArray[np.int64], token_bytes: int, max_bytes: int) -> list[int]:
    """Return the least code for each of levels 2 to 4 with which all levels fit.

    Starting from `MIN_COUNTS`, the codes for n-grams of 4, 2 and 3 tokens are raised by one in
    turn, until the remaining n-grams fit or none remain.

    Args:
        histograms: int64[3, 256], number of entries of levels 2 to 4, by code.
        token_bytes: size of a token.
        max_bytes: most bytes of tokens, codes and starts of all three levels.
    """
    steps = np.arange(len(histograms) * NUM_CODES)
    least = [
        np.minimum(min_count + (steps + len(histograms) - 1 - turn) // len(histograms), NUM_CODES)
        for min_count, turn in zip(MIN_COUNTS, _TURNS, strict=True)
    ]
    num_from = np.pad(np.cumsum(histograms[:, ::-1], axis=1)[:, ::-1], ((0, 0), (0, 1)))
    sizes = _STARTS_BYTES + sum(
        _entry_bytes(number, token_bytes) * num_from[number, codes]
        for number, codes in enumerate(least)
    )
    step = min(int(np.searchsorted(-sizes, -max_bytes)), len(steps) - 1)
    return [int(codes[step]) for codes in least]


def _entry_bytes(number: int, token_bytes: int) -> int:
    is_last = number == MAX_ORDER - 2
    return token_bytes + 1 + (0 if is_last else POSITION_DTYPE.itemsize)


def _packed(counts: NDArray[np.int64], levels: Sequence[Level]) -> PhraseTables:
    sizes = [len(counts), *(len(level) for level in levels)]
    return PhraseTables(
        tuple(_starts(level.parents, size) for level, size in zip(levels, sizes[:-1], strict=True)),
        (levels[0].tokens[:0], *(level.tokens for level in levels)),
        (encode_counts(counts), *(level.counts for level in levels)),
    )


def _starts(parents: NDArray[np.int64], num_parents: int) -> NDArray[np.uint32]:
    num_children = np.bincount(parents, minlength=num_parents)
    return np.concatenate([[0], np.cumsum(num_children)]).astype(POSITION_DTYPE)


def _levels_of(tables: PhraseTables) -> list[Level]:
    if any(np.any(starts[1:] < starts[:-1]) for starts in tables.starts):
        raise DamagedIndexError(
            "the phrase tables of an index are damaged: `foredraft verify` finds which"
        )
    return [
        Level(
            np.repeat(np.arange(len(starts) - 1), np.diff(starts)),
            tables.tokens[number],
            COUNT_SCALE[tables.counts[number]],
        )
        for number, starts in enumerate(tables.starts, start=1)
    ]


SMALL_BYTES: Final = 1 << 20
"""Tables of at most this total size, in bytes, are summed in this process, because starting another
process takes longer."""

_ALIGNMENT: Final = 64
"""Alignment of arrays in the file, in bytes: a cache line, and more than any dtype needs."""

_DAMAGED: Final = 10  # an exit status that Python itself never uses
_PRIORITY: Final = 10
"""Niceness of the summing process, so that drafting has priority."""


Layout = list[tuple[str, str, int]]
"""Name, dtype and length of each array in a file, in order."""


def sum_tables(tables: Sequence[PhraseTables], small_bytes: int = SMALL_BYTES) -> PhraseTables:
    """Return the tables of several corpora as one set; see `merge_tables`.

    Large tables are summed in another process.

    Raises:
        DamagedIndexError: a table's `starts` do not cover the next level.
        IndexerError: there is not enough memory, or not enough space for temporary files.
    """
    if len(tables) == 1 or sum(each.num_bytes for each in tables) <= small_bytes:
        return merge_tables(tables)
    try:
        with TemporaryFile() as terms, TemporaryFile() as result:
            layouts = [_write(terms, each) for each in tables]
            return _map(result, [_add_up(terms, layouts, result)])[0]
    except OSError as error:
        raise IndexerError(
            f"phrase tables cannot be summed: {error.strerror}; TMPDIR names the folder for "
            "temporary files"
        ) from error


def _add_up(terms: BinaryIO, layouts: list[Layout], result: BinaryIO) -> Layout:
    """Let a child process read the tables and write their sum; return the sum's layout."""
    files = (terms.fileno(), result.fileno())
    command = [sys.executable, "-m", __name__, *map(str, files), json.dumps(layouts)]
    path = os.pathsep.join(filter(None, sys.path))
    done = subprocess.run(  # noqa: S603  (our own module)
        command,
        capture_output=True,
        text=True,
        pass_fds=files,
        env={**os.environ, "PYTHONPATH": path},
        check=False,
    )
    if done.returncode == _DAMAGED:
        raise DamagedIndexError(done.stdout.strip())
    if done.returncode != 0:
        reason = (done.stderr.strip().splitlines() or [f"status {done.returncode}"])[-1]
        raise IndexerError(f"phrase tables could not be summed: {reason}")
    return [(name, dtype, size) for name, dtype, size in json.loads(done.stdout)]


def _write(file: BinaryIO, tables: PhraseTables) -> Layout:
    """Append the arrays of tables to a file; return their layout."""
    arrays = tables.files()
    for array in arrays.values():
        file.write(np.ascontiguousarray(array).view(np.uint8).data)
        file.write(bytes(-array.nbytes % _ALIGNMENT))
    file.flush()
    return [(name, array.dtype.str, array.size) for name, array in arrays.items()]


def _map(file: BinaryIO, layouts: Sequence[Layout]) -> list[PhraseTables]:
    """Return the tables that were written to a file, mapped into memory."""
    content = mmap(file.fileno(), 0, access=ACCESS_READ)
    tables, begin = [], 0
    for layout in layouts:
        arrays: dict[str, NDArray[Any]] = {}
        for name, dtype, size in layout:
            arrays[name] = np.frombuffer(content, dtype, size, begin)
            begin += arrays[name].nbytes + -arrays[name].nbytes % _ALIGNMENT
        tables.append(PhraseTables.of_files(arrays))
    return tables


def _main(terms: str, result: str, layouts: str) -> int:
    with suppress(OSError):  # a systemd unit may forbid a change of priority
        os.nice(_PRIORITY)
    with os.fdopen(int(terms), "rb") as terms_file, os.fdopen(int(result), "wb") as result_file:
        try:
            added = merge_tables(_map(terms_file, json.loads(layouts)))
        except DamagedIndexError as error:
            print(error)  # noqa: T201  (to the parent)
            return _DAMAGED
        print(json.dumps(_write(result_file, added)))  # noqa: T201  (as above)
    return 0


if __name__ == "__main__":
    sys.exit(_main(*sys.argv[1:]))
