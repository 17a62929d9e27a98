"""What a new user stumbled over: what an index is stays with it, and is asked of later commands."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from indexer.build import (
    as_replaced,
    build_from_index,
    build_from_texts,
    build_index,
)
from indexer.change.changes import add_documents, compact, remove_documents
from indexer.change.choosing import list_documents
from indexer.change.verifying import verify_index
from indexer.commands.summary import summarise
from indexer.errors import IndexerError, TokenizerError
from indexer.plugins.screening.exclusion import ExcludedPhrases
from indexer.plugins.screening.screen import ScreenOptions
from indexer.reader import Index
from indexer.sources import SourceOptions
from indexer.stages.build_options import BuildOptions
from indexer.tokenizer import DEFAULT_MODEL, Vocabulary, load_core, vocabulary_of
from tests.indexer.conftest import Cli

SECRET = "AKIA" + "IOSFODNN7EXAMPLE"
REDACTED = BuildOptions(screen=ScreenOptions(redact=True), keep_texts=True)


def phrases(folder: Path, *listed: str) -> ExcludedPhrases:
    (folder / "phrases").write_text("\n".join(listed))
    return ExcludedPhrases.load(folder / "phrases")


def texts_of(path: Path) -> str:
    """All tokens of an index as text."""
    core = load_core(DEFAULT_MODEL)
    with Index.open(path) as index:
        ids = [
            int(each)
            for segment in index.segments
            for each in segment.tokens
            if each < index.vocabulary.size
        ]
    return str(core.decode(ids))


def test_what_is_added_to_a_redacted_index_is_redacted(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    source, index = tmp_path / "notes.md", tmp_path / "index"
    build_from_texts([("a", f"one {SECRET}")], index, DEFAULT_MODEL, REDACTED)
    source.write_text(f"two {SECRET}")
    with caplog.at_level("INFO"):
        add_documents(index, [source])
    assert SECRET not in texts_of(index)
    assert "was built with --redact" in caplog.text
    assert summarise(index).to_json()["redacted"] is True
    remove_documents(index, ["a"])
    compact(index)
    assert "screened     secrets are replaced" in summarise(index).describe()


def test_a_redacted_index_is_replaced_by_a_redacted_one(tmp_path: Path) -> None:
    source, index = tmp_path / "notes.md", tmp_path / "index"
    source.write_text(f"two {SECRET}")
    build_index([source], index, DEFAULT_MODEL, BuildOptions(screen=ScreenOptions(redact=True)))
    build_index([source], index, options=BuildOptions(overwrite=True))
    assert SECRET not in texts_of(index)
    nothing = as_replaced(tmp_path / "nothing", None, BuildOptions())
    assert nothing == (DEFAULT_MODEL, BuildOptions())


def test_a_licence_that_was_stated_is_that_of_what_is_added(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    source, index = tmp_path / "notes.md", tmp_path / "index"
    stated = SourceOptions(licence="PSF-2.0")
    for text in ("one", "two"):
        source.write_text(text)
        build_index([source], index, DEFAULT_MODEL, BuildOptions(stated, overwrite=True))
        stated = SourceOptions()  # of the index that is replaced
    source.write_text("three")
    with caplog.at_level("INFO"):
        add_documents(index, [source])
    assert "the licence is PSF-2.0, as was stated for" in caplog.text
    source.write_text("four")
    add_documents(index, [source], BuildOptions(SourceOptions(licence="MIT")))
    assert [each.licence for each in list_documents(index)] == ["PSF-2.0", "PSF-2.0", "MIT"]


def test_a_list_of_phrases_is_asked_of_whatever_is_added(tmp_path: Path) -> None:
    source, index = tmp_path / "notes.md", tmp_path / "index"
    source.write_text("new words")
    options = BuildOptions(screen=ScreenOptions(phrases(tmp_path, "secret project")))
    build_from_texts([("a", "one"), ("b", "the secret project")], index, DEFAULT_MODEL, options)
    assert [each.name for each in list_documents(index)] == ["a"]
    others = BuildOptions(screen=ScreenOptions(phrases(tmp_path, "another project")))
    for wrong in (BuildOptions(), others):
        with pytest.raises(IndexerError, match="give the same --exclude-phrases"):
            add_documents(index, [source], wrong)
    assert add_documents(index, [source], options).num_documents == 1
    assert summarise(index).to_json()["excluded_phrases"]
    snapshot = max((index / "catalog").iterdir()).read_text()
    assert "secret project" not in snapshot


def test_screening_what_comes_later_warns_of_what_was_there(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    source, index, again = (tmp_path / name for name in ("notes.md", "index", "again"))
    kept = BuildOptions(keep_texts=True)
    build_from_texts([("a", f"one {SECRET}")], index, DEFAULT_MODEL, kept)
    source.write_text(f"two {SECRET}")
    add_documents(index, [source], BuildOptions(screen=ScreenOptions(redact=True)))
    assert "documents without this screening" in caplog.text
    assert summarise(index).to_json()["redacted"] is False
    build_from_index(index, again, DEFAULT_MODEL, REDACTED)
    assert SECRET not in texts_of(again)
    assert summarise(again).to_json()["redacted"] is True


def test_versions_of_a_file_are_counted_or_replace_one_another(tmp_path: Path, cli: Cli) -> None:
    source, index = tmp_path / "notes.md", tmp_path / "index"
    build_from_texts([("a", "one"), ("b", "two")], index, DEFAULT_MODEL)
    for text, earlier in (("first", 0), ("second", 1), ("third", 2)):
        source.write_text(text)
        report = add_documents(index, [source])
        assert (report.num_earlier, report.num_replaced) == (earlier, 0)
    assert "add --replace" in report.describe()
    source.write_text("fourth")
    status, said, _ = cli("add", index, source, "--replace")
    assert (status, "replaced: 3 document(s)" in said) == (0, True)
    assert [each.name for each in list_documents(index)] == ["a", "b", str(source)]
    assert "fourth" in texts_of(index)
    assert "third" not in texts_of(index)
    assert verify_index(index).findings == ()
    report = add_documents(index, [source], BuildOptions(replace=True))
    assert (report.num_documents, report.num_replaced) == (0, 0)


def test_all_documents_may_be_replaced_at_once(tmp_path: Path) -> None:
    source, index = tmp_path / "notes.md", tmp_path / "index"
    source.write_text("old")
    build_index([source], index, DEFAULT_MODEL)
    source.write_text("new")
    assert add_documents(index, [source], BuildOptions(replace=True)).num_replaced == 1
    assert [each.name for each in list_documents(index)] == [str(source)]
    assert verify_index(index).findings == ()


def test_an_index_that_is_replaced_keeps_its_tokenizer(
    tmp_path: Path, tokenizer_folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    index, overwrite = tmp_path / "index", BuildOptions(overwrite=True)
    build_from_texts([("a", "one")], index, str(tokenizer_folder))
    before = summarise(index).vocabulary
    with caplog.at_level("INFO"):
        build_from_texts([("a", "two")], index, options=overwrite)
    assert summarise(index).vocabulary == before
    assert "as in the index that is replaced" in caplog.text
    build_from_texts([("a", "two")], index, DEFAULT_MODEL, overwrite)
    assert summarise(index).vocabulary != before


def test_a_replaced_index_whose_tokenizer_has_no_name_asks_for_one(
    tmp_path: Path, tokenizer_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    index = tmp_path / "index"
    build_from_texts([("a", "one")], index, str(tokenizer_folder))

    core = vocabulary_of(load_core(str(tokenizer_folder)))

    def nameless(*_: object) -> Vocabulary:
        return Vocabulary(core.size, core.fingerprint)

    monkeypatch.setattr("indexer.build.vocabulary_of", nameless)
    build_from_texts([("a", "one")], index, str(tokenizer_folder), BuildOptions(overwrite=True))
    with pytest.raises(TokenizerError, match="has no name: name the tokenizer"):
        build_from_texts([("a", "one")], index, options=BuildOptions(overwrite=True))


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can be another user")
def test_a_folder_that_cannot_be_read_is_skipped_and_named(tmp_path: Path, cli: Cli) -> None:
    source = tmp_path / "source"
    for name, mode in (("open", 0o755), ("closed", 0o700), ("listed", 0o744)):
        (source / name).mkdir(parents=True)
        (source / name / "a.md").write_text(f"words of {name}")
        (source / name).chmod(mode)  # of the last one, names can be read and nothing else
    modes = [
        (each, each.stat().st_mode) for each in tmp_path.parents if each.stat().st_mode & 5 != 5
    ]
    for each, mode in [*modes, (tmp_path, tmp_path.stat().st_mode)]:
        each.chmod(mode | 0o755)
    assert cli("build", source, "--dry-run")[0] == 0  # all is imported
    os.seteuid(65534)
    try:
        status, said, errors = cli("build", source, "--dry-run")
    finally:
        os.seteuid(0)
        for each, mode in modes:
            each.chmod(mode)
    assert status == 0
    assert "unreadable: Permission denied" in said
    assert "Traceback" not in errors


@pytest.mark.faults
def test_ctrl_c_says_what_is_kept_and_how_to_go_on(tmp_path: Path) -> None:
    for number in range(40):
        text = "".join(f"{number} and {each} are words\n" for each in range(30_000))
        (tmp_path / f"{number}.txt").write_text(text)
    command = [sys.executable, "-m", "foredraft", "build", str(tmp_path), "-o", "index", "--resume"]
    process = subprocess.Popen(
        command,
        stderr=subprocess.PIPE,
        text=True,
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(Path(__file__).parents[2])},
    )
    lines: Any = process.stderr
    assert any(line.startswith("reading") for line in lines)
    time.sleep(0.5)
    process.send_signal(signal.SIGINT)
    said = lines.read()
    lines.close()
    assert process.wait(60) == 130
    assert "interrupted: there is no index at index; what was read and sorted is saved" in said
    assert "the same command continues there" in said
    assert not (tmp_path / "index").exists()
