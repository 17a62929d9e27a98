import io
import pickle
import random
import sys
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path

import pytest

from indexer.build_report import BuildTally
from indexer.errors import SourceError
from indexer.sources import SourceBlock, SourceDocument, SourceOptions, StdinFormat, plan, read
from tests.indexer.sources.source_reading import json_lines, read_all, read_blocks, texts, write


def mixed(folder: Path, generator: random.Random) -> Path:
    """Make a folder of small files and of lines of all lengths, some of which are no documents."""
    for number in range(generator.randrange(6)):
        write(folder, **{f"{number}_md": "x" * generator.randrange(3000)})
    for name in ("a", "b"):
        rows: list[object] = []
        for number in range(generator.randrange(60)):
            text = "\u00e9\n" * generator.choice([0, 1, 10, 300, 3000])
            rows.append(generator.choice([{"text": text}, {"no": number}, "", "{", {"text": "y"}]))
        content = json_lines(*rows)
        kept = content if generator.random() < 0.5 else content.rstrip("\n")
        write(folder, **{f"{name}_jsonl": kept})
    return folder


@pytest.mark.parametrize("seed", range(25))
def test_blocks_in_order_hold_what_one_block_holds(seed: int, tmp_path: Path) -> None:
    generator = random.Random(seed)
    source = mixed(tmp_path, generator)
    whole = SourceOptions(max_document_bytes=4000)
    tally = BuildTally()
    blocks = plan([source], whole, tally)
    assert len(blocks) == 1
    expected = read_blocks(blocks, whole, tally)
    for block_bytes in (1, 100, 5000, 20_000):
        options = SourceOptions(max_document_bytes=4000, block_bytes=block_bytes)
        counted = BuildTally()
        blocks = plan([source], options, counted)
        assert read_blocks(blocks, options, counted) == expected
        assert counted == tally
        assert sum(block.num_bytes for block in blocks) == tally.num_bytes_found


def test_blocks_are_of_about_the_size_that_is_asked_for(tmp_path: Path) -> None:
    rows = [{"text": "x" * 100} for _ in range(10_000)]
    write(tmp_path, a_jsonl=json_lines(*rows), **{f"f{number:03}_md": "" for number in range(100)})
    tally = BuildTally()
    blocks = plan([tmp_path], SourceOptions(block_bytes=100_000), tally)
    sizes = [block.num_bytes for block in blocks]
    assert sum(sizes) == tally.num_bytes_found == (tmp_path / "a.jsonl").stat().st_size
    cuts = [size for size in sizes if size]
    assert all(100_000 <= size < 100_200 for size in cuts[:-1])
    assert max(len(block.pieces) for block in blocks) == 100_000 // 4096


def test_line_numbers_in_pieces_are_those_of_the_file(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    path.write_text(json_lines(*({"text": str(line)} for line in range(1, 50_001))))
    options = SourceOptions(block_bytes=75_000)
    blocks = plan([path], options, BuildTally())
    assert len(blocks) > 8
    for block in reversed(blocks):  # each by itself
        for document in read(block, options, BuildTally()):
            assert document.name == f"{path}:{document.text}"


def read_elsewhere(
    block: SourceBlock, options: SourceOptions
) -> tuple[list[SourceDocument], dict[str, int]]:
    tally = BuildTally()
    return list(read(block, options, tally)), dict(tally.skipped)


def test_blocks_are_read_in_other_processes(tmp_path: Path) -> None:
    write(tmp_path, a_md="a", b_jsonl=json_lines({"text": "b"}, "{"))
    options = SourceOptions(block_bytes=1)
    blocks = plan([tmp_path], options, BuildTally())
    assert pickle.loads(pickle.dumps(blocks)) == blocks  # noqa: S301  (our own)
    with ProcessPoolExecutor(1, get_context("spawn")) as pool:
        futures = [pool.submit(read_elsewhere, block, options) for block in blocks]
        found = [future.result() for future in futures]
    assert found == [read_elsewhere(block, options) for block in blocks]
    assert [document.text for documents, _ in found for document in documents] == ["a", "b"]


def test_files_that_vanish_or_change_after_planning_do_no_harm(tmp_path: Path) -> None:
    rows = json_lines(*({"text": f"row {number}"} for number in range(100)))
    write(tmp_path, a_md="a", b_jsonl=rows, c_jsonl=rows, d_jsonl=rows, z_md="z")
    options = SourceOptions(block_bytes=500)
    tally = BuildTally()
    blocks = plan([tmp_path], options, tally)
    (tmp_path / "a.md").unlink()
    (tmp_path / "b.jsonl").unlink()
    (tmp_path / "c.jsonl").write_text(rows[:700])
    (tmp_path / "d.jsonl").write_text(rows + rows)
    found = texts(read_blocks(blocks, options, tally))
    assert tally.skipped["unreadable: No such file or directory"] >= 2
    assert found[f"{tmp_path}/z.md"] == "z"
    assert not any("b.jsonl" in name for name in found)
    assert [found[f"{tmp_path}/d.jsonl:{line}"] for line in (1, 100)] == ["row 0", "row 99"]
    assert len(found) < 1 + 50 + 101
    assert tally.num_bytes_read == tally.num_bytes_found


def standard_input(monkeypatch: pytest.MonkeyPatch, content: bytes) -> None:
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(content)))


def test_standard_input_is_json_lines_or_a_text(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    content = json_lines({"text": "a"}, {"text": "b", "by": "MIT"}).encode()
    scratch = [tmp_path / name for name in ("one", "two", "three", "four")]
    for folder in scratch:
        folder.mkdir()
    sources: list[Path | str] = ["-", Path("-")]
    for folder, source in zip(scratch, sources, strict=False):
        standard_input(monkeypatch, content)
        options = SourceOptions(licence_field="by", block_bytes=5)
        blocks = plan([source], options, BuildTally(), folder)
        assert len(blocks) == 2
        assert read_blocks(blocks, options, BuildTally()) == [
            SourceDocument("stdin:1", "", "a"),
            SourceDocument("stdin:2", "MIT", "b"),
        ]
    for folder, limit, skipped in [
        (scratch[2], len(content), {}),
        (scratch[3], 5, {"too large": 1}),
    ]:
        standard_input(monkeypatch, content)
        options = SourceOptions(
            stdin_format=StdinFormat.TEXT, max_document_bytes=limit, licence="L"
        )
        tally = BuildTally()
        documents = read_blocks(plan(["-"], options, tally, folder), options, tally)
        assert tally.skipped == skipped
        assert documents == ([] if skipped else [SourceDocument("stdin", "L", content.decode())])


def test_standard_input_that_cannot_be_kept_is_an_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    standard_input(monkeypatch, b"")
    for sources, scratch, said in [
        (["-"], None, "no folder to keep"),
        (["-"], tmp_path / "nowhere", "No such file"),
        (["-", "-"], tmp_path, "name - once"),
    ]:
        with pytest.raises(SourceError, match=said):
            plan(sources, SourceOptions(), BuildTally(), scratch)
    monkeypatch.setattr(sys, "stdin", None)
    with pytest.raises(SourceError, match="no standard input"):
        plan(["-"], SourceOptions(), BuildTally(), tmp_path)


def test_a_file_called_like_standard_input_is_read_by_its_path(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "-").write_text("a file")
    monkeypatch.chdir(tmp_path)
    documents, _ = read_all("./-")
    assert [document.text for document in documents] == ["a file"]
