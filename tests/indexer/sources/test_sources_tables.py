import json
import sys
from pathlib import Path
from typing import Any

import pytest

from indexer.build_report import BuildTally
from indexer.errors import SourceError
from indexer.sources import SourceDocument, SourceOptions, plan, read
from tests.indexer.sources.source_reading import read_all, read_blocks, texts, write

pa = pytest.importorskip("pyarrow", reason="pyarrow is not installed: run pip install '.[index]'")
pq = pytest.importorskip("pyarrow.parquet", reason="this pyarrow has no Parquet")

ROWS = [{"text": f"row {number} " + "x" * (number % 7), "by": "MIT"} for number in range(100)]


def write_parquet(path: Path, rows: list[dict[str, Any]], **options: Any) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    pq.write_table(pa.Table.from_pylist(rows), path, **options)
    return path


def write_arrow(path: Path, rows: list[dict[str, Any]], batch: int = 10, **options: Any) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    table = pa.Table.from_pylist(rows)
    opening = options.pop("opening", pa.ipc.new_stream)
    with opening(str(path), table.schema, **options) as writer:
        writer.write_table(table, max_chunksize=batch)
    return path


def write_saved(folder: Path, shards: int = 2, **info: object) -> Path:
    """Write what `Dataset.save_to_disk` writes, as far as it matters."""
    names = [f"data-{number:05}-of-{shards:05}.arrow" for number in range(shards)]
    for number, name in enumerate(names):
        write_arrow(folder / name, ROWS[number::shards])
    state = {"_data_files": [{"filename": name} for name in names]}
    (folder / "state.json").write_text(json.dumps(state))
    (folder / "dataset_info.json").write_text(json.dumps(info))
    return folder


@pytest.mark.parametrize("compression", ["none", "snappy", "zstd"])
def test_parquet_is_read_row_by_row(compression: str, tmp_path: Path) -> None:
    path = write_parquet(tmp_path / "a.parquet", ROWS, compression=compression, row_group_size=13)
    documents, tally = read_all(path, licence_field="by")
    expected = [
        SourceDocument(f"{path}:{row}", "MIT", str(ROWS[row]["text"])) for row in range(100)
    ]
    assert documents == expected
    assert not tally.skipped
    assert len(plan([path], SourceOptions(block_bytes=1), BuildTally())) == 8


@pytest.mark.parametrize("opening", [pa.ipc.new_stream, pa.ipc.new_file])
@pytest.mark.parametrize("compression", [None, "zstd"])
def test_arrow_is_read_row_by_row(opening: Any, compression: str | None, tmp_path: Path) -> None:
    settings = pa.ipc.IpcWriteOptions(compression=compression)
    path = write_arrow(tmp_path / "a.arrow", ROWS, opening=opening, options=settings)
    documents, tally = read_all(tmp_path, licence_field="by")
    expected = [
        SourceDocument(f"{path}:{row}", "MIT", str(ROWS[row]["text"])) for row in range(100)
    ]
    assert documents == expected
    assert not tally.skipped
    assert len(plan([path], SourceOptions(block_bytes=1), BuildTally())) == 10


@pytest.mark.parametrize(
    "kind",
    [
        "string",
        "large_string",
        "string_view",
        "binary",
        "large_binary",
        "dictionary",
        "null",
        "int64",
    ],
)
def test_columns_of_all_kinds_are_read_or_counted(kind: str, tmp_path: Path) -> None:
    values = ["caf\u00e9", None, "b", "caf\u00e9", "x" * 2000]
    column = pa.array(values).dictionary_encode()
    if kind in {"null", "int64"}:
        column = pa.array([None] * 5, getattr(pa, kind)())
    elif kind != "dictionary":
        column = pa.array([value and value.encode() for value in values]).cast(getattr(pa, kind)())
    table = pa.table({"text": column})
    with pa.ipc.new_stream(str(tmp_path / "a.arrow"), table.schema) as writer:
        writer.write_table(table)
    sources = [tmp_path / "a.arrow"]
    if kind != "string_view":
        sources.append(tmp_path / "b.parquet")
        pq.write_table(table, sources[1])
    for source in sources:
        documents, tally = read_all(source, max_document_bytes=1000)
        if kind in {"null", "int64"}:
            assert (documents, tally.skipped) == ([], {"no text in field 'text'": 5})
            continue
        assert texts(documents) == {
            f"{source}:0": "caf\u00e9",
            f"{source}:2": "b",
            f"{source}:3": "caf\u00e9",
        }
        assert tally.skipped_places == {
            "no text in field 'text'": f"{source}:1",
            "too large": f"{source}:4",
        }


def test_bytes_that_are_not_text_are_skipped_alone(tmp_path: Path) -> None:
    raw = pa.array([b"good", b"caf\xe9", b"also good"])
    for name, column in [("a", raw), ("b", raw.view(pa.string()))]:
        pq.write_table(pa.table({"text": column}), tmp_path / f"{name}.parquet")
    documents, tally = read_all(tmp_path)
    assert [document.text for document in documents] == ["good", "also good"] * 2
    assert tally.skipped == {"not text": 2}


@pytest.mark.parametrize("suffix", ["parquet", "arrow"])
def test_a_table_without_the_column_is_an_error_if_there_is_nothing_else(
    suffix: str, tmp_path: Path
) -> None:
    writes = {"parquet": write_parquet, "arrow": write_arrow}[suffix]
    path = writes(tmp_path / f"a.{suffix}", ROWS)
    for source in (path, tmp_path):
        with pytest.raises(SourceError) as caught:
            read_all(source, field="body")
        said = "no column 'body': name one of these with --field: 'text', 'by'"
        assert str(caught.value) == f"{source}: {said}"
    write(tmp_path, b_md="b")
    documents, tally = read_all(tmp_path, field="body")
    assert [document.text for document in documents] == ["b"]
    assert tally.skipped_places == {"no column 'body'": str(path)}
    assert len(read_all(tmp_path, licence_field="nowhere")[0]) == 101


@pytest.mark.parametrize("suffix", ["parquet", "arrow"])
def test_without_pyarrow_a_table_says_what_to_install(
    suffix: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / f"a.{suffix}"
    path.write_bytes(b"")
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    with pytest.raises(
        SourceError, match=r"needs pyarrow: run `pip install 'foredraft\[index\]'`$"
    ):
        read_all(path)
    write(tmp_path, b_md="b")
    documents, tally = read_all(tmp_path)
    assert len(documents) == tally.skipped.total() == 1


def test_damaged_tables_are_counted_and_what_came_before_stays(tmp_path: Path) -> None:
    parquet = write_parquet(
        tmp_path / "a.parquet", ROWS, row_group_size=10, compression="none", use_dictionary=False
    ).read_bytes()
    arrow = write_arrow(tmp_path / "a.arrow", ROWS).read_bytes()
    for name, content in [("a.parquet", parquet), ("a.arrow", arrow)]:
        form = {"a.parquet": "Parquet", "a.arrow": "Arrow"}[name]
        for damaged in (b"", b"PAR1", content[:-9], content[: len(content) // 2], b"\0" * 999):
            (tmp_path / name).write_bytes(damaged)
            documents, tally = read_all(tmp_path / name)
            whole_batches = len(documents) % 10 == 0
            assert whole_batches
            if len(documents) < 100:  # what ends an Arrow stream may be missing
                assert tally.skipped == {f"unreadable: damaged {form}": 1}
    (tmp_path / "a.arrow").write_bytes(arrow[: len(arrow) // 2])
    assert 30 <= len(read_all(tmp_path / "a.arrow")[0]) <= 50


@pytest.mark.parametrize("suffix", ["parquet", "arrow"])
def test_no_byte_that_is_wrong_ends_the_process(suffix: str, tmp_path: Path) -> None:
    writes = {"parquet": write_parquet, "arrow": write_arrow}[suffix]
    path = writes(tmp_path / f"a.{suffix}", ROWS[:20])
    content = path.read_bytes()
    options = SourceOptions()
    for position in range(0, len(content), 7):
        changed = bytearray(content)
        changed[position] ^= 0xFF
        path.write_bytes(changed)
        tally = BuildTally()
        try:
            blocks = plan([path], options, tally)
        except SourceError as error:
            assert "no column" in str(error)  # noqa: PT017  (not every damage is one)
            continue
        documents = read_blocks(blocks, options, tally)
        assert all(isinstance(document.text, str) for document in documents)
        assert len(documents) == 20 or tally.skipped


def test_tables_that_vanish_or_shrink_after_planning_are_counted(tmp_path: Path) -> None:
    write_arrow(tmp_path / "c.arrow", ROWS)
    for name in ("a", "b"):
        write_parquet(tmp_path / f"{name}.parquet", ROWS, row_group_size=10)
        write_arrow(tmp_path / f"{name}.arrow", ROWS)
    options = SourceOptions(block_bytes=1)
    tally = BuildTally()
    blocks = plan([tmp_path], options, tally)
    (tmp_path / "a.parquet").unlink()
    (tmp_path / "a.arrow").unlink()
    write_parquet(tmp_path / "b.parquet", ROWS[:10])
    write_arrow(tmp_path / "c.arrow", [{"other": "x"}])
    write_arrow(tmp_path / "b.arrow", ROWS[:10])
    documents = read_blocks(blocks, options, tally)
    assert len(documents) == 20
    assert tally.skipped["unreadable: No such file or directory"] == 20
    assert tally.skipped["unreadable: damaged Parquet"] == 9
    assert tally.skipped["no column 'text'"] == 10


def test_of_a_saved_dataset_the_rows_are_read_and_nothing_else(tmp_path: Path) -> None:
    folder = write_saved(tmp_path / "saved", license="cc0-1.0")
    write_arrow(folder / "cache-0123456789abcdef.arrow", ROWS)
    write(tmp_path, a_md="a")
    for source in (folder, tmp_path):
        documents, tally = read_all(source)
        rows = [document for document in documents if ".arrow" in document.name]
        assert [row.text for row in rows] == [r["text"] for r in [*ROWS[::2], *ROWS[1::2]]]
        assert rows[0] == SourceDocument(
            f"{folder}/data-00000-of-00002.arrow:0", "cc0-1.0", str(ROWS[0]["text"])
        )
        assert len(documents) - len(rows) == (source == tmp_path)
        assert not tally.skipped


def test_of_saved_splits_those_that_are_listed_are_read_in_order(tmp_path: Path) -> None:
    for split in ("test", "train", "unlisted"):
        write_saved(tmp_path / split, shards=1)
    (tmp_path / "dataset_dict.json").write_text('{"splits": ["train", "test", "../..", "gone"]}')
    documents, _ = read_all(tmp_path)
    splits = [Path(document.name).parent.name for document in documents]
    assert splits == ["train"] * 100 + ["test"] * 100


@pytest.mark.parametrize(
    "state",
    ["{", "[]", "{}", '{"_data_files": 1}', '{"_data_files": [1, {"filename": "../x.arrow"}, {}]}'],
)
def test_damaged_lists_of_saved_datasets_are_counted(state: str, tmp_path: Path) -> None:
    write_arrow(tmp_path / "x.arrow", ROWS)
    folder = write_saved(tmp_path / "all/saved")
    (folder / "state.json").write_text(state)
    write(tmp_path / "all", dataset__dict_json=state)
    documents, tally = read_all(tmp_path / "all")
    assert all(".arrow" not in document.name for document in documents)
    assert tally.skipped.total() == ("filename" not in state)


def test_what_the_datasets_library_saves_is_read(tmp_path: Path) -> None:
    datasets = pytest.importorskip(
        "datasets", reason="datasets is not installed: run pip install '.[dev]'"
    )
    data = datasets.Dataset.from_list(ROWS)
    data.save_to_disk(tmp_path / "one", num_shards=3)
    datasets.DatasetDict({"train": data, "test": data.select(range(5))}).save_to_disk(
        tmp_path / "splits"
    )
    documents, tally = read_all(tmp_path / "one", licence_field="by")
    assert [(document.text, document.licence) for document in documents] == [
        (row["text"], "MIT") for row in ROWS
    ]
    assert not tally.skipped
    documents, tally = read_all(tmp_path / "splits")
    assert [document.text for document in documents] == [row["text"] for row in [*ROWS, *ROWS[:5]]]
    assert not tally.skipped


def test_a_long_row_group_is_read_in_little_memory(tmp_path: Path) -> None:
    path = tmp_path / "a.parquet"
    table = pa.table({"text": [f"{number}" + "x" * 100_000 for number in range(1000)]})
    pq.write_table(table, path, use_dictionary=False, write_batch_size=8)  # pages of a few rows
    del table
    pool = pa.default_memory_pool()
    before = pool.bytes_allocated()
    options = SourceOptions()
    peak = 0
    (block,) = plan([path], options, BuildTally())
    for _ in read(block, options, BuildTally()):
        peak = max(peak, pool.bytes_allocated() - before)
    assert 0 < peak < 16 << 20
