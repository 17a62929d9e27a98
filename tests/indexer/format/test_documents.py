from dataclasses import astuple

import numpy as np
import pytest
from hypothesis import given, strategies as st

from indexer.errors import DamagedIndexError
from indexer.format.documents import DocumentTable, DocumentTableBuilder, digest_of, join_tables
from indexer.format.records import Document
from indexer.stages.parts import kept_runs

DOCUMENTS = st.lists(
    st.tuples(
        st.text(max_size=5),
        st.sampled_from(["", "MIT", "Apache-2.0", "\u00e9"]),
        st.integers(1, 9),
        st.booleans(),
    ),
    min_size=1,
    max_size=12,
)


def table_of(documents: list[tuple[str, str, int]], start: int = 0) -> tuple[DocumentTable, int]:
    """Return a table of names, licences and lengths, and the position behind them."""
    builder = DocumentTableBuilder()
    for name, licence, length in documents:
        builder.add(Document(name, licence, start), digest_of(name.encode()))
        start += length + 1
    return builder.table(), start


def assert_same(first: DocumentTable, second: DocumentTable) -> None:
    for ours, theirs in zip(astuple(first), astuple(second), strict=True):
        assert np.array_equal(ours, theirs)
        if isinstance(ours, np.ndarray):
            assert ours.dtype == theirs.dtype


@given(parts=st.lists(DOCUMENTS, min_size=1, max_size=4))
def test_rows_that_are_joined_are_the_table_of_what_is_left(
    parts: list[list[tuple[str, str, int, bool]]],
) -> None:
    tables, offsets, left, length = [], [], [], 0
    for part in parts:
        kept = [document[:3] for document in part if document[3]]
        if kept:
            table, end = table_of([document[:3] for document in part])
            runs = kept_runs(np.array([document[3] for document in part]))
            tables.append(table.rows(runs, end))
            offsets.append(length)
            length += sum(document[2] + 1 for document in kept)
            left += kept
    if left:
        assert_same(join_tables(tables, offsets), table_of(left)[0])


def test_licences_that_no_document_has_are_left_out() -> None:
    table, end = table_of([("a", "MIT", 1), ("b", "GPL", 1), ("c", "BSD", 1), ("d", "MIT", 1)])
    joined = join_tables([table.rows([(2, 4)], end)], [0])
    assert joined.licences == ("BSD", "MIT")
    assert joined.count_licences() == {"BSD": 1, "MIT": 1}


@pytest.mark.parametrize("position", [0, 3, 4, 7, 2**32 - 1])
def test_a_position_belongs_to_the_last_document_that_starts_before_it(position: int) -> None:
    table, _ = table_of([("a", "", 3), ("b", "", 2)])
    assert table.at(position) == (0 if position < 4 else 1)


def test_records_that_no_builder_writes_are_errors() -> None:
    table, _ = table_of([("a", "MIT", 3), ("b", "", 2)])
    table.licence_ids[1] = 2
    with pytest.raises(DamagedIndexError, match="licence"):
        table.document(1)
    with pytest.raises(DamagedIndexError, match="licence"):
        table.count_licences()
    table.name_ends[0] = 9
    with pytest.raises(DamagedIndexError, match="outside"):
        table.name(0)
