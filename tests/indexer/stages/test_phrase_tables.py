import itertools
import random
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings, strategies as st

from indexer.build import BuildOptions, build_from_tokens
from indexer.errors import DamagedIndexError
from indexer.format.documents import DocumentTableBuilder
from indexer.format.names import token_dtype
from indexer.format.opening import Segment
from indexer.format.phrase_tables import PhraseTables
from indexer.format.table_sums import merge_tables, size_limit
from indexer.reader import Index, Vocabulary
from indexer.stages import ngram_ranges as ranges, phrase_writer
from indexer.stages.segments import first_token_starts, sort_suffixes
from tests.indexer.stages.phrase_reading import build_tables, count_of, find, successors
from tests.indexer.stages.phrase_twins import (
    count_all,
    levels_in,
    rounded,
    slow_levels,
    slow_num_bytes,
)
from tests.suite_parts import cases

Documents = list[list[int]]


def segment_of(documents: Documents, vocabulary_size: int) -> Segment:
    dtype = token_dtype(vocabulary_size)
    separator = np.iinfo(dtype).max
    tokens = np.array([token for ids in documents for token in (*ids, separator)], dtype)
    return Segment(
        "00000000",
        tokens,
        sort_suffixes(tokens),
        first_token_starts(tokens, vocabulary_size),
        DocumentTableBuilder().table(),
    )


def tables_of(
    vocabulary_size: int, *segments: Documents, stride: int = ranges.STRIDE
) -> PhraseTables:
    made = [segment_of(each, vocabulary_size) for each in segments]
    return build_tables(made, vocabulary_size, stride)


def random_documents(rng: random.Random, alphabet: Sequence[int]) -> Documents:
    """Return documents in which few tokens are frequent, and some pieces repeat."""
    weights = [1 / (rank + 1) for rank in range(len(alphabet))]
    documents: Documents = []
    for _ in range(rng.randrange(1, 12)):
        ids = rng.choices(alphabet, weights, k=rng.randrange(1, 60))
        if documents and rng.random() < 0.5:
            ids += rng.choice(documents)[: rng.randrange(1, 30)]
        documents.append(ids)
    return documents


ALPHABETS: dict[int, list[Sequence[int]]] = {
    3: [[0], [0, 1, 2]],
    50: [[49], [0, 49], range(50)],
    65535: [[0, 65534, 65533], range(10, 30)],
    65536: [[0, 65534, 65535], range(65500, 65536)],
}


@pytest.mark.seeds
@pytest.mark.parametrize("vocabulary_size", ALPHABETS)
@pytest.mark.parametrize("seed", range(cases(2, of=12)))
def test_tables_are_those_of_a_dictionary(vocabulary_size: int, seed: int) -> None:
    rng = random.Random(seed)
    stride = rng.choice([1, 2, 7, 40, 1 << 20])
    alphabet = rng.choice(ALPHABETS[vocabulary_size])
    segments = [random_documents(rng, alphabet) for _ in range(rng.randrange(1, 5))]
    built = tables_of(vocabulary_size, *segments, stride=stride)
    expected = slow_levels(count_all(list(itertools.chain(*segments))), vocabulary_size)
    assert levels_in(built) == expected
    assert {tokens.dtype for tokens in built.tokens} == {token_dtype(vocabulary_size)}


@given(
    segments=st.lists(
        st.lists(st.lists(st.integers(0, 3), min_size=1, max_size=15), min_size=1, max_size=6),
        min_size=1,
        max_size=3,
    )
)
@settings(max_examples=cases(20, of=150), deadline=None)
def test_ngrams_end_with_their_document(segments: list[Documents]) -> None:
    built = tables_of(4, *segments)
    assert levels_in(built) == slow_levels(count_all(list(itertools.chain(*segments))), 4)


def test_a_context_keeps_all_its_successors_and_what_followed_these() -> None:
    # Token t follows 50 t + 1 times, always before 51 and 52; ties are in 53's.
    often = [[50, token, 51, 52] for token in range(40) for _ in range(token + 1)]
    ties = [[53, token] for token in reversed(range(40))]
    built = tables_of(54, often, ties)
    assert levels_in(built) == slow_levels(count_all(often + ties), 54)
    seen = [(token, rounded(token + 1)) for token in range(40)]
    assert successors(built, [50]) == sorted(seen, key=lambda each: (-each[1], each[0]))
    assert successors(built, [53]) == [(token, 1) for token in range(40)]
    assert successors(built, [50, 39]) == [(51, 41)]
    assert successors(built, [50, 39, 51]) == [(52, 41)]
    assert successors(built, [50, 1]) == [(51, 2)]


def test_pairs_that_occur_once_have_an_entry_and_longer_ngrams_do_not() -> None:
    once, twice = [0, 1, 2, 3], [4, 5, 6, 7]
    built = tables_of(8, [once], [twice, twice])
    assert built.num_entries == (8, 6, 2, 1)
    assert [successors(built, once[:length]) for length in (1, 2, 3)] == [[(1, 1)], [], []]
    assert [successors(built, twice[:length]) for length in (1, 2, 3)] == [
        [(5, 2)],
        [(6, 2)],
        [(7, 2)],
    ]
    assert count_of(built, once[2:]) == 1


@pytest.mark.parametrize("stride", [1, 40, 180])
def test_very_frequent_tokens_are_divided_and_the_tables_are_the_same(stride: int) -> None:
    rng = random.Random(stride)
    documents = [[7, *rng.choices(range(15), k=rng.randrange(1, 9))] for _ in range(40)]
    documents += [[7, 7, *rng.choices(range(15), k=5)] for _ in range(40)]
    documents += [[7, 7, 7, rng.randrange(15), 3] for _ in range(40)]
    documents += [[9, 8]] * 50  # a frequent pair that nothing follows
    segments = [segment_of(documents[number::3], 15) for number in range(3)]
    planned = list(ranges.plan_ranges(segments, 15, stride))
    lengths = {len(each.prefix) for each in planned}
    assert max(lengths) == (1 if stride == 180 else 2)
    for each in planned:
        sizes = [len(level) for level in ranges.count_range(segments, each, 15, stride)]
        assert sizes[0] <= stride or each.end - each.begin == 1
        assert sizes[2] <= max(stride, 15)
    built = build_tables(segments, 15, stride)
    assert levels_in(built) == slow_levels(count_all(documents), 15)


def test_one_context_may_have_the_whole_vocabulary_for_successors() -> None:
    built = tables_of(70_000, [[69_999, token] for token in range(70_000)])
    assert successors(built, [69_999]) == [(token, 1) for token in range(70_000)]
    assert successors(merge_tables([built, built]), [69_999]) == [
        (token, 2) for token in range(70_000)
    ]


@pytest.mark.seeds
@pytest.mark.parametrize("vocabulary_size", [40, 70_000])
@pytest.mark.parametrize("seed", range(cases(1, of=4)))
def test_the_rarest_ngrams_of_each_length_go_in_turn_until_the_rest_fits(
    vocabulary_size: int, seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    rng = random.Random(seed)
    documents = [ids for _ in range(cases(3, of=6)) for ids in random_documents(rng, range(12))]
    counts = count_all(documents)
    token_bytes = token_dtype(vocabulary_size).itemsize
    kept = slow_levels(counts, vocabulary_size)
    whole = slow_num_bytes(kept, token_bytes)
    sizes = set()
    for max_bytes in [0, 8, 9, *rng.sample(range(whole), cases(2, of=12)), whole - 1, whole]:
        monkeypatch.setattr(phrase_writer, "size_limit", lambda _, limit=max_bytes: limit)
        stride = rng.choice([9, 50, 1 << 20])
        built = tables_of(vocabulary_size, documents[::2], documents[1::2], stride=stride)
        expected = slow_levels(
            counts, vocabulary_size, max_bytes=max_bytes, token_bytes=token_bytes
        )
        assert levels_in(built) == expected
        beyond = built.num_bytes - built.counts[0].nbytes - built.starts[0].nbytes
        assert beyond == slow_num_bytes(expected, token_bytes)
        assert beyond <= max(max_bytes, 8)
        sizes.add(built.num_entries[1:])
    assert len(sizes) > 3
    assert {(0, 0, 0), tuple(map(len, kept[1:]))} < sizes


def test_a_size_limit_costs_first_ngrams_of_four_tokens_then_of_two_then_of_three(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    documents = [
        [times, times + 4, times + 8, times + 12] for times in (1, 2, 3) for _ in range(times)
    ]
    counts = count_all(documents)
    whole = slow_num_bytes(slow_levels(counts, 30), 2)
    entries = []
    for missing_bytes in (0, 1, 3, 4, 25):
        monkeypatch.setattr(phrase_writer, "size_limit", lambda _, less=missing_bytes: whole - less)
        entries.append(tables_of(30, documents).num_entries[1:])
    assert entries == [(9, 4, 2), (9, 4, 1), (9, 4, 1), (6, 4, 1), (6, 2, 1)]


def test_the_size_limit_follows_the_corpus_between_a_floor_and_what_can_be_numbered() -> None:
    assert [size_limit(n) for n in (0, 1, 2**22)] == [2**23] * 3
    assert size_limit(2**22 + 1) == 2**23 + 2
    assert size_limit(10**10) == 2**32 - 1


def test_what_is_built_is_what_a_reader_finds(tmp_path: Path) -> None:
    rng = random.Random(8)
    documents = [ids for _ in range(5) for ids in random_documents(rng, range(20))]
    for number, (vocabulary_size, segment_tokens) in enumerate([(20, 100), (66_000, 10**6)]):
        path = tmp_path / f"{number}"
        named = [(f"{place}", ids) for place, ids in enumerate(documents)]
        options = BuildOptions(segment_tokens=segment_tokens)
        build_from_tokens(named, path, Vocabulary(vocabulary_size, "aa"), options)
        with Index.open(path) as index:
            assert (len(index.segments) > 3) == (segment_tokens == 100)
            assert levels_in(index.phrases) == slow_levels(count_all(documents), vocabulary_size)


def test_equal_corpora_give_equal_bytes_however_they_are_divided(tmp_path: Path) -> None:
    rng = random.Random(4)
    named = [("x", ids) for _ in range(4) for ids in random_documents(rng, range(9))]
    contents = []
    for number, segment_tokens in enumerate([10**6, 10**6, 30, 1]):
        path = tmp_path / f"{number}"
        options = BuildOptions(segment_tokens=segment_tokens)
        build_from_tokens(named, path, Vocabulary(9, "aa"), options)
        files = sorted((path / "phrases").rglob("*"))
        contents.append([(each.name, each.read_bytes()) for each in files if each.is_file()])
    assert len(contents[0]) == 10
    assert contents.count(contents[0]) == 4


@pytest.mark.seeds
def test_merged_tables_sum_the_counts_that_tables_kept() -> None:
    for seed in range(cases(4, of=20)):
        rng = random.Random(seed)
        parts = [
            tables_of(60, [ids for _ in range(3) for ids in random_documents(rng, range(50))])
            for _ in range(rng.randrange(1, 4))
        ]
        counts: Counter[tuple[int, ...]] = Counter()
        for part in parts:
            counts.update(dict(itertools.chain(*levels_in(part))))
        merged = merge_tables(parts)
        assert levels_in(merged) == slow_levels(counts, 60)
        assert merged.num_bytes <= sum(part.num_bytes for part in parts)


def test_merging_takes_tables_of_one_vocabulary_that_are_sound() -> None:
    two, three = tables_of(2, [[0, 1, 0, 1]]), tables_of(3, [[0, 1, 0, 1]])
    assert merge_tables([two]) is two
    for wrong in ([], [two, three]):
        with pytest.raises(ValueError, match="one vocabulary"):
            merge_tables(wrong)
    starts = (two.starts[0], np.array([7, 0], np.uint32), two.starts[2])
    with pytest.raises(DamagedIndexError, match="verify"):
        merge_tables([two, PhraseTables(starts, two.tokens, two.counts)])


def test_empty_tables_answer_and_merge() -> None:
    for vocabulary_size, dtype in [(5, np.uint16), (70_000, np.uint32)]:
        empty = PhraseTables.empty(vocabulary_size, np.dtype(dtype))
        assert empty.num_entries == (vocabulary_size, 0, 0, 0)
        assert empty.num_bytes == vocabulary_size + 4 * (vocabulary_size + 3)
        assert {tokens.dtype for tokens in empty.tokens} == {np.dtype(dtype)}
        assert (successors(empty, [1]), count_of(empty, [1]), find(empty, [1])) == ([], 0, 1)
        full = tables_of(vocabulary_size, [[0, 1, 0, 1]])
        assert levels_in(merge_tables([empty, full, empty])) == levels_in(full)


def test_lookups_outside_the_tables_find_nothing() -> None:
    built = tables_of(3, [[0, 1, 2, 0, 1], [0, 1, 2, 0]])
    assert successors(built, [0]) == [(1, 3)]
    assert count_of(built, [0]) == 4
    assert count_of(built, [0, 1, 2, 0]) == 2
    for context in ([], [3], [-1], [0, 3], [0, -1], [0, 2], [0, 1, 2, 0], [0, 1, 2, 0, 1]):
        assert successors(built, context) == []
    for ngram in ([], [3], [-1], [0, 2], [0, 1, 2, 0, 1]):
        assert find(built, ngram) is None
        assert count_of(built, ngram) == 0


def test_all_arrays_are_read_only_wherever_they_come_from(tiny_index: Path) -> None:
    empty = PhraseTables.empty(1000, np.dtype(np.uint16))
    with Index.open(tiny_index) as index:
        mapped = index.phrases
    assert all(mapped.num_entries)
    for each in (mapped, empty, merge_tables([mapped, mapped])):
        for array in (*each.starts, *each.tokens, *each.counts):
            assert type(array) is np.ndarray
            assert not array.flags.writeable
            assert array.flags.c_contiguous
            assert array.flags.aligned
