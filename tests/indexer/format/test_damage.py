import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from transformers import PreTrainedTokenizerBase

from indexer.build import BuildOptions, build_from_texts
from indexer.errors import DamagedIndexError, FormatVersionError
from indexer.format.names import KEYS_FILE, PHRASE_FILES, SEGMENT_FILES, TOKENIZER_FILE
from indexer.format.records import FileRecord, checksum_of, encode_json
from indexer.reader import Index
from tests.retriever.warm_interpreter import run
from tests.suite_parts import draws_all_cases

ROOT = Path(__file__).parents[3]
FILES = [
    "catalog/00000000",
    *(f"segments/00000001/{name}" for name in (*SEGMENT_FILES, KEYS_FILE)),
    *(f"phrases/00000000/{name}" for name in PHRASE_FILES),
]


# Damages an index in every way, and reads all that can be read.
FUZZ = """
import json, sys
from pathlib import Path
from indexer.errors import DamagedIndexError, IndexerError
from indexer.reader import Index
from indexer.format.table_sums import merge_tables
from indexer.commands.summary import summarise
from indexer.stages.tokenise import stored_encoder
from indexer.change.verifying import verify_index
from tests.indexer.format.damages import damages
from tests.indexer.stages.phrase_reading import count_of, successors

path, other, flips, seed, verifies = Path(sys.argv[1]), Path(sys.argv[2]), *map(int, sys.argv[3:])
counts = [0, 0]

def look_at(index):
    for number, segment in enumerate(index.segments):
        for position in range(len(segment.tokens)):
            try:
                index.document_at(number, position)
            except DamagedIndexError:
                pass
        assert int(segment.tokens.sum()) + int(segment.suffixes.sum()) > 0
        for token in range(index.vocabulary.size):
            begin, end = segment.starts[token:token + 2]
            segment.suffixes[begin:end].sum()
    pairs = [(a, b) for a in range(5) for b in range(5)]
    for context in [*((a,) for a in range(index.vocabulary.size)), *pairs]:
        for token, count in successors(index.phrases, context):
            count_of(index.phrases, (*context, token))
            successors(index.phrases, (*context, token))
    merge_tables([index.phrases, index.phrases])
    list(index.documents())
    summarise(path)

for what in damages(path, other, flips, seed):
    try:
        with Index.open(path) as index:
            look_at(index)
        stored_encoder(path / "tokenizer")
        counts[0] += 1
    except IndexerError:
        counts[1] += 1
    except BaseException:
        print(what, file=sys.stderr)
        raise
    if verifies:
        assert verify_index(path).findings, what
assert verify_index(path).findings == ()
print(json.dumps(counts))
"""


def rewrite_snapshot(path: Path, change: Callable[[dict[str, Any]], object]) -> None:
    """Change what the snapshot of an index says, and its checksum to match."""
    file = path / "catalog/00000000"
    value = json.loads(file.read_bytes().partition(b"\n")[2])
    change(value)
    body = encode_json(value)
    file.write_bytes(checksum_of(body).encode() + b"\n" + body)


@pytest.mark.parametrize("name", FILES)
@pytest.mark.parametrize("size", [None, 0, 1, -4096, -1, +1])
def test_a_file_that_is_missing_or_of_another_size_is_refused(
    name: str, size: int | None, tiny_index: Path
) -> None:
    file = tiny_index / name
    content = file.read_bytes()
    if size is None:
        file.unlink()
    elif size > 0:
        file.write_bytes(content[:size] if size == 1 and len(content) > 1 else content + b"\0")
    else:
        file.write_bytes(content[: max(len(content) + size, 0)] if size else b"")
    with pytest.raises(DamagedIndexError, match=rf"{file.name}|no snapshot"):
        Index.open(tiny_index)


@pytest.mark.parametrize("num_kept", [None, 0, 100])
def test_a_stored_tokenizer_that_is_missing_or_cut_is_noticed(
    num_kept: int | None, tmp_path: Path, tokenizer: PreTrainedTokenizerBase
) -> None:
    path = tmp_path / "index"
    build_from_texts([("a", "some text")], path, tokenizer)
    file = path / TOKENIZER_FILE
    content = file.read_bytes()
    file.unlink()
    if num_kept is not None:
        file.write_bytes(content[:num_kept])
    with pytest.raises(DamagedIndexError, match=r"tokenizer (is missing|has \d+ bytes)"):
        Index.open(path)
    file.write_bytes(content)
    Index.open(path).close()


@pytest.mark.parametrize("name", ["catalog", "segments", "segments/00000000", "phrases"])
def test_a_half_copied_index_is_refused(name: str, tiny_index: Path) -> None:
    shutil.rmtree(tiny_index / name)
    with pytest.raises(DamagedIndexError, match="missing"):
        Index.open(tiny_index)


def test_a_snapshot_of_zeros_is_refused(tiny_index: Path) -> None:
    file = tiny_index / "catalog/00000000"
    file.write_bytes(bytes(file.stat().st_size))
    with pytest.raises(DamagedIndexError, match="damaged"):
        Index.open(tiny_index)


@pytest.mark.parametrize(("place", "value"), [(0, 1), (0, 2**32 - 1), (1000, 0), (1000, 8)])
def test_starts_that_do_not_divide_the_suffixes_are_refused(
    place: int, value: int, tiny_index: Path
) -> None:
    file = tiny_index / "segments/00000001/starts"
    starts = np.fromfile(file, np.uint32)
    starts[place] = value
    starts.tofile(file)
    with pytest.raises(DamagedIndexError, match=r"00000001/starts is damaged"):
        Index.open(tiny_index)


@pytest.mark.parametrize(
    ("name", "place", "value"),
    [
        *(("starts1", place, value) for place, value in [(0, 1), (1000, 0), (1000, 9)]),
        *(("starts2", place, value) for place, value in [(0, 1), (-1, 0), (-1, 2**32 - 1)]),
        *(("starts3", place, value) for place, value in [(0, 1), (-1, 0), (-1, 7)]),
    ],
)
def test_phrase_tables_whose_levels_do_not_meet_are_refused(
    name: str, place: int, value: int, tiny_index: Path
) -> None:
    file = tiny_index / "phrases/00000000" / name
    starts = np.fromfile(file, np.uint32)
    starts[place] = value
    starts.tofile(file)
    with pytest.raises(DamagedIndexError, match=r"phrases/00000000"):
        Index.open(tiny_index)


@pytest.mark.parametrize("name", PHRASE_FILES)
def test_phrase_tables_of_other_sizes_than_their_neighbours_are_refused(
    name: str, tiny_index: Path
) -> None:
    file = tiny_index / "phrases/00000000" / name
    file.write_bytes(file.read_bytes() * 2)
    record = FileRecord.of_file(file).encode()
    rewrite_snapshot(tiny_index, lambda value: value["phrases"]["files"].update({name: record}))
    with pytest.raises(DamagedIndexError, match="contradict"):
        Index.open(tiny_index)


@pytest.mark.seeds
@pytest.mark.parametrize(
    ("flips", "verifies"), [(60, 0), (3, 1)] if draws_all_cases() else [(1, 1)]
)
def test_no_damage_crashes_a_reader_and_verify_finds_each(
    flips: int, verifies: int, tmp_path: Path, tokenizer: PreTrainedTokenizerBase
) -> None:
    options = BuildOptions(segment_tokens=100, keep_texts=True)
    for name in "ab":
        texts = [(f"{name}{i}", f"{name}bcabc{i}" * (3 + i)) for i in range(4)]
        build_from_texts(texts, tmp_path / name, tokenizer, options)
    arguments = (tmp_path / "a", tmp_path / "b", flips, 11, verifies)
    done = run("-c", FUZZ, *arguments, cwd=ROOT)
    assert done.returncode == 0, done.stderr
    opened, refused = json.loads(done.stdout)
    assert min(opened, refused) > 50


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("vocabulary", None),
        ("vocabulary", []),
        ("vocabulary", {"size": 1000}),
        ("segments", None),
        ("segments", [{"name": "../../etc", "documents": 1, "tokens": 1, "files": {}}]),
        ("phrases", None),
        ("phrases", []),
        ("phrases", {"files": {}, "name": "00000000"}),
        ("tokenizer", 7),
    ],
)
def test_records_that_no_builder_writes_are_refused(
    key: str, value: object, tiny_index: Path
) -> None:
    rewrite_snapshot(tiny_index, lambda snapshot: snapshot.update({key: value}))
    with pytest.raises(DamagedIndexError, match="record"):
        Index.open(tiny_index)


@pytest.mark.parametrize("version", [2, 3, 5, None, "3", 3.5])
def test_another_format_is_refused_with_advice(version: object, tiny_index: Path) -> None:
    rewrite_snapshot(tiny_index, lambda snapshot: snapshot.update({"format": version, "new": []}))
    with pytest.raises(FormatVersionError, match=r"version .*, .* version 4: build it again"):
        Index.open(tiny_index)
