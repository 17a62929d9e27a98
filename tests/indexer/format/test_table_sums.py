"""Adding up phrase tables in another process."""

import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from indexer.build import build_from_tokens
from indexer.errors import DamagedIndexError, IndexerError
from indexer.format.phrase_tables import PhraseTables
from indexer.format.table_sums import merge_tables
from indexer.reader import Index, Vocabulary, sum_tables


@pytest.fixture(params=[40, 70_000])
def tables(request: pytest.FixtureRequest, tmp_path: Path) -> list[PhraseTables]:
    """Of three corpora, one of which has no n-gram of more than a token."""
    rng = np.random.default_rng(5)
    opened = []
    for number, length in enumerate((300, 1, 500)):
        path = tmp_path / str(number)
        documents = [("d", rng.integers(0, 40, length) * (request.param // 40))]
        build_from_tokens(documents, path, Vocabulary(request.param, "ab" * 32))
        opened.append(Index.open(path).phrases)
    return opened


def test_the_sum_of_another_process_is_the_same(tables: list[PhraseTables]) -> None:
    expected, found = merge_tables(tables).files(), sum_tables(tables, small_bytes=0).files()
    assert list(found) == list(expected)
    for name, array in found.items():
        assert (array.dtype, array.flags.writeable) == (expected[name].dtype, False)
        np.testing.assert_array_equal(array, expected[name])
    assert sum(map(len, found.values())) > 500


def test_small_tables_and_single_ones_start_no_process(
    tables: list[PhraseTables], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(subprocess, "run", None)
    np.testing.assert_array_equal(
        sum_tables(tables, small_bytes=1 << 30).counts[1], merge_tables(tables).counts[1]
    )
    assert sum_tables(tables[:1], small_bytes=0) is tables[0]


def test_damage_is_told_by_the_other_process(tables: list[PhraseTables]) -> None:
    one = tables[0]
    starts = (one.starts[0][::-1].copy(), *one.starts[1:])
    with pytest.raises(DamagedIndexError, match=r"damaged: `foredraft verify`"):
        sum_tables([PhraseTables(starts, one.tokens, one.counts), tables[2]], small_bytes=0)


def test_what_fails_otherwise_is_told_in_one_line(
    tables: list[PhraseTables], monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: Any, **__: Any) -> "subprocess.CompletedProcess[str]":
        return subprocess.CompletedProcess([], 1, "", "Traceback\n\nMemoryError: no room\n")

    with monkeypatch.context() as patched:
        patched.setattr(subprocess, "run", fail)
        with pytest.raises(IndexerError, match="could not be summed: MemoryError: no room"):
            sum_tables(tables, small_bytes=0)
    monkeypatch.setattr(sys, "executable", "/nowhere")
    with pytest.raises(IndexerError, match="No such file"):
        sum_tables(tables, small_bytes=0)


def test_a_priority_that_cannot_be_lowered_is_left(
    tables: list[PhraseTables], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As under the unit's filter of system calls; before, nothing was added up there."""
    (tmp_path / "sitecustomize.py").write_text(
        "import os\ndef nice(_):\n    raise PermissionError(1, 'forbidden')\nos.nice = nice\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    assert sum_tables(tables, small_bytes=0).num_entries == sum_tables(tables).num_entries
