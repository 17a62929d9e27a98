"""Slow and obvious twins of the compiled kernels that collect and weigh rows of evidence."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache

import numpy as np

from retriever.kernels.chains import SEPARATOR, bucket_of as hash_ngram
from retriever.kernels.layout import MAX_MATCH, RECENT_SIZE, Scratch
from retriever.kernels.phrase_matching import MAX_BEGINNINGS
from retriever.tree import Source


@dataclass(frozen=True)
class Row:
    continuation: tuple[int, ...]
    match: int
    count: float = 1.0
    source: int = 0
    weight: float = 0.0
    similarity: float = 1.0


def fill(scratch: Scratch, rows: Sequence[Row]) -> None:
    """Write rows where kernels read them."""
    for index, row in enumerate(rows):
        scratch.continuations[index, : len(row.continuation)] = row.continuation
        out = scratch.rows[index]
        out["length"], out["match"], out["source"] = len(row.continuation), row.match, row.source
        out["count"], out["weight"], out["similarity"] = row.count, row.weight, row.similarity


def match_length(tokens: Sequence[int], position: int, oldest: int, query: Sequence[int]) -> int:
    length = 0
    while (
        length < len(query)
        and position - length >= oldest
        and tokens[position - length] == query[-1 - length]
    ):
        length += 1
    return length


def copy_from(tokens: Sequence[int], begin: int, *, wrap: bool, depth: int) -> tuple[int, ...]:
    copied: list[int] = []
    period = tokens[begin:]
    for offset in range(depth):
        if not wrap and offset >= len(period):
            break
        token = period[offset % len(period)]
        if token == SEPARATOR:
            break
        copied.append(token)
    return tuple(copied)


def similarity_of(before: Sequence[int], separator: int, recent: Mapping[int, float]) -> float:
    """The square of one plus the rarity of the recent tokens among the last 16 of a document."""
    document = list(before[-16:])
    while separator in document:
        document = document[document.index(separator) + 1 :]
    return float((1 + sum(recent.get(token % RECENT_SIZE, 0.0) for token in document)) ** 2)


def recent_tokens(query: Sequence[int], rarity: Sequence[float]) -> dict[int, float]:
    """What `mark_recent` notes: the last of those that share a place stays."""
    known = dict(enumerate(rarity))
    return {token % RECENT_SIZE: known.get(token, 0.5) for token in query}


def chain_rows(
    tokens: Sequence[int],
    query: Sequence[int],
    *,
    oldest: int,
    num_buckets: int,
    orders: Sequence[int],
    max_rows: Sequence[int],
    wrap: bool,
    depth: int,
    recent: Mapping[int, float] | None = None,
) -> list[Row]:
    """What `collect_chains` finds after `tokens` were appended to an empty store."""
    rows: list[Row] = []
    too_long = len(query) + 1
    for order, most in zip(orders, max_rows, strict=True):
        if len(query) < order:
            continue
        wanted = bucket_of(query[-order:], num_buckets)
        found = 0
        chain = [
            position
            for position in range(order - 1, len(tokens))
            if SEPARATOR not in tokens[position - order + 1 : position + 1]
            and bucket_of(tokens[position - order + 1 : position + 1], num_buckets) == wanted
        ]
        for position in [p for p in reversed(chain) if p >= oldest][: 4 * most]:
            match = match_length(tokens, position, oldest, query)
            if position + 1 == len(tokens) or not order <= match < too_long or found == most:
                continue
            continuation = copy_from(tokens, position + 1, wrap=wrap, depth=depth)
            if continuation:
                before = tokens[oldest : position + 1 - match]
                similarity = similarity_of(before, SEPARATOR, recent or {})
                rows.append(Row(continuation, match, similarity=similarity))
                found += 1
        too_long = order
    return rows


def linked(
    tokens: Sequence[int], size: int, orders: Sequence[int]
) -> tuple[list[list[int]], list[list[int]]]:
    """The newest position of every bucket, and from every place of the ring the way back."""
    heads = [[-1] * (size // 2) for _ in orders]
    links = [[0] * size for _ in orders]
    for row, order in enumerate(orders):
        document = 0
        for position, token in enumerate(tokens):
            links[row][position % size] = 0
            if token == SEPARATOR:
                document = position + 1
            if position - order + 1 < document:
                continue
            bucket = bucket_of(tokens[position - order + 1 : position + 1], size // 2)
            if heads[row][bucket] >= 0 and position - heads[row][bucket] < size:
                links[row][position % size] = position - heads[row][bucket]
            heads[row][bucket] = position
    return heads, links


def bucket_of(ngram: Sequence[int], num_buckets: int) -> int:
    """The hash itself is taken as given; what chains make of it is not."""
    return _bucket_of(tuple(ngram), num_buckets)


@lru_cache(maxsize=1 << 17)
def _bucket_of(ngram: tuple[int, ...], num_buckets: int) -> int:
    """Of each n-gram once: twins ask for the same ones again and again."""
    return int(hash_ngram(np.array(ngram, np.int32), 0, -1, len(ngram), num_buckets))


def sort_suffixes(tokens: Sequence[int], separator: int) -> list[int]:
    positions = [p for p, token in enumerate(tokens) if token != separator]
    return sorted(positions, key=lambda position: list(tokens[position:]))


def suffix_keys(
    tokens: Sequence[int], separator: int, suffixes: Sequence[int], size: int, stride: int
) -> list[int]:
    """What the indexer keeps as keys: the tokens behind the first one, as digits of a number."""
    bits = size.bit_length()
    keys = []
    for position in suffixes[::stride]:
        behind = [size if token == separator else token for token in tokens[position + 1 :]]
        digits = [*behind, *[size] * 64][: 64 // bits]
        keys.append(sum(digit << bits * place for place, digit in enumerate(reversed(digits))))
    return keys


def suffix_rows(
    tokens: Sequence[int],
    separator: int,
    query: Sequence[int],
    *,
    recent: Mapping[int, float],
    longest: int,
    shortest: int,
    samples: int,
    enough: int,
    depth: int,
) -> tuple[list[Row], int, int]:
    """What `collect_suffixes` finds."""
    suffixes = sort_suffixes(tokens, separator)
    rows: list[Row] = []
    found = 0
    for length in range(min(longest, len(query)), shortest - 1, -1):
        pattern = list(query[-length:])
        hits = [p for p in suffixes if list(tokens[p : p + length]) == pattern]
        if not hits:
            continue
        found = found or length
        read = min(len(hits), samples)
        for position in [hits[len(hits) * sample // read] for sample in range(read)]:
            longer = length < len(query) and position > 0
            if longer and tokens[position - 1] == query[-length - 1]:
                continue
            document = list(tokens[position + length :])
            end = document.index(separator) if separator in document else len(document)
            continuation = tuple(document[: min(end, depth)])
            if continuation:
                similarity = similarity_of(tokens[:position], separator, recent)
                rows.append(Row(continuation, length, len(hits) / read, similarity=similarity))
        if len(hits) >= enough:
            return rows, found, length
    return rows, found, shortest


def phrase_rows(
    phrases: Sequence[tuple[int, ...]], context: Sequence[int], *, max_rows: int, depth: int
) -> list[Row]:
    """What `collect_phrases` finds: every phrase is asked whether the context ends with it."""
    listed = sorted(set(phrases))
    rows: list[Row] = []
    known: set[int] = set()
    num_beginnings = 0
    for length in range(len(context), 0, -1):
        end = tuple(context[-length:])
        going_on = [i for i, p in enumerate(listed) if len(p) > length and p[:length] == end]
        if going_on and num_beginnings < MAX_BEGINNINGS and len(rows) < max_rows:
            num_read = min(len(going_on), max_rows - len(rows))
            for phrase in [going_on[len(going_on) * n // num_read] for n in range(num_read)]:
                if phrase not in known:
                    rest = listed[phrase][length : length + depth]
                    rows.append(Row(rest, min(length, MAX_MATCH), 1 / num_read, Source.PHRASES))
            known.update(going_on)
            num_beginnings += 1
    return rows


def weights(rows: Sequence[Row], trust: Sequence[float], escape: float) -> list[float]:
    """What `weigh_rows` sets."""
    left = 1.0
    result = [0.0] * len(rows)
    for match in sorted({row.match for row in rows}, reverse=True):
        level = [index for index, row in enumerate(rows) if row.match == match]
        count = sum(rows[index].count * trust[rows[index].source] for index in level)
        share = left * count / (count + escape / match)
        for index in level:
            result[index] = share * rows[index].count * trust[rows[index].source] / count
        left -= share
    return result
