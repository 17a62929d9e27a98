import io
import json
import os
import re
import subprocess
import sys
import time
from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path
from typing import NoReturn

import pytest
from transformers import AutoTokenizer

Cli = Callable[..., tuple[int, str, str]]
TextsOf = Callable[[Path], dict[str, str]]


@pytest.fixture
def source(tmp_path: Path) -> Path:
    folder = tmp_path / "source"
    folder.mkdir()
    (folder / "a.txt").write_text("hello hello")
    (folder / "b.txt").write_bytes(b"\0")
    return folder


@pytest.fixture
def built(cli: Cli, source: Path, tmp_path: Path, tokenizer_folder: Path) -> Path:
    path = tmp_path / "built"
    status, _, _ = cli("build", source, "-o", path, "--tokenizer", tokenizer_folder)
    assert status == 0
    return path


def test_build_reports_what_it_did(
    cli: Cli, source: Path, tmp_path: Path, tokenizer_folder: Path
) -> None:
    options = ("--tokenizer", tokenizer_folder, "--overwrite")
    status, out, err = cli("build", source, "--output", tmp_path / "x", *options)
    assert status == 0
    assert "1 document, 11 tokens in 1 segment" in out
    assert "skipped: 1 not text" in out
    done = "finding sources\nloading the tokenizer\nreading 0.0 KiB\nsorting\ncounting\n"
    assert err == done

    status, out, err = cli("build", source, "--output", tmp_path / "x", *options, "--json")
    report = json.loads(out)
    assert status == 0
    assert report.pop("seconds") >= 0
    assert report.pop("tokens_per_s") > 0
    assert set(report.pop("stage_seconds")) == {"reading", "sorting", "counting"}
    assert report.pop("skipped_places") == {"not text": f"{source}/b.txt"}
    assert report == {
        "output": str(tmp_path / "x"),
        "documents": 1,
        "tokens": 11,
        "segments": 1,
        "bytes": 11,
        "skipped": {"not text": 1},
        "dropped": 1,
        "by_content": {},
        "conversations": [],
        "screened": None,
    }


def test_options_of_build_reach_the_builder(
    cli: Cli, tmp_path: Path, tokenizer_folder: Path
) -> None:
    rows = tmp_path / "rows.jsonl"
    rows.write_text('{"body": "12345"}\n{"body": "123"}\n{"body": "12"}\n')
    limits = ("--field", "body", "--max-document-bytes", 4, "--segment-tokens", 2)
    arguments = ("-o", tmp_path / "x", "--tokenizer", tokenizer_folder, "--json", *limits)
    status, out, _ = cli("build", rows, *arguments)
    report = json.loads(out)
    assert (status, report["skipped"]) == (0, {"too large": 1})
    assert (report["documents"], report["segments"]) == (2, 2)


def test_options_for_sources_reach_the_reader(
    cli: Cli, texts_of: TextsOf, tmp_path: Path, tokenizer_folder: Path
) -> None:
    source = tmp_path / "source"
    (source / "old").mkdir(parents=True)
    (source / "a.odd").write_bytes("caf\u00e9".encode("latin-1"))
    for name in ("b.md", "c.odd", "old/d.odd"):
        (source / name).write_text(name)
    patterns = ("--include", "*.odd", "--include", "*.md", "--exclude", "c.*", "--exclude", "old/")
    meaning = (
        "--encoding",
        "latin-1",
        "--licence",
        "MIT",
        "--licence-field",
        "by",
        "--git",
        "never",
    )
    arguments = ("-o", tmp_path / "x", "--tokenizer", tokenizer_folder, *patterns, *meaning)
    assert cli("build", source, *arguments)[0] == 0
    assert texts_of(tmp_path / "x") == {f"{source}/a.odd": "caf\u00e9", f"{source}/b.md": "b.md"}
    status, _, err = cli("build", source, *arguments, "--overwrite", "--include", "!")
    assert (status, err.count("\n"), "--include" in err) == (1, 1, True)


@pytest.mark.parametrize(
    ("stdin_format", "expected"),
    [("jsonl", {"stdin:1": "one"}), ("text", {"stdin": '{"text": "one"}\n'})],
)
def test_standard_input_is_a_source(  # noqa: PLR0913, PLR0917  (fixtures)
    stdin_format: str,
    expected: dict[str, str],
    cli: Cli,
    texts_of: TextsOf,
    tmp_path: Path,
    tokenizer_folder: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(b'{"text": "one"}\n')))
    arguments = ("-o", tmp_path / "x", "--tokenizer", tokenizer_folder)
    assert cli("build", "-", *arguments, "--stdin-format", stdin_format)[0] == 0
    assert texts_of(tmp_path / "x") == expected


def test_segments_beyond_the_format_are_a_usage_error(
    cli: Cli, source: Path, tmp_path: Path
) -> None:
    status, out, err = cli("build", source, "-o", tmp_path / "x", "--segment-tokens", 2**32)
    assert (status, out) == (2, "")
    assert "4294967295" in err
    assert not (tmp_path / "x").exists()


def test_inspect_tells_what_an_index_holds(cli: Cli, built: Path) -> None:
    status, out, err = cli("inspect", built)
    assert (status, err) == (0, "")
    shown = out
    assert re.search(r"tokens\s+11 in 1 segment", out)
    assert re.search(r"6 of 2 .*, 3 of 3 .*, 2 of 4 .* 1, 2, 2 times\n\s+1,366 bytes, 124.18", out)

    status, out, _ = cli("inspect", built, "--json")
    summary = json.loads(out)
    assert status == 0
    files = [file.stat().st_size for file in built.rglob("*")]
    folders = [file.stat().st_size for file in built.rglob("*") if file.is_dir()]
    assert summary.pop("bytes") == sum(files) - sum(folders)
    assert len(summary.pop("fingerprint")) == 64
    assert Path(summary.pop("tokenizer")).is_dir()
    changed = summary.pop("changed")
    assert abs(datetime.fromisoformat(changed).timestamp() - time.time()) < 3600
    [snapshot] = (built / "catalog").iterdir()
    os.utime(snapshot, (0, 0))
    assert datetime.fromisoformat(json.loads(cli("inspect", built, "--json")[1])["changed"]) == (
        datetime.fromtimestamp(0, UTC)
    )
    assert f"changed      {changed}" in shown
    assert summary.pop("phrases") == {
        "ngrams": [6, 3, 2],
        "min_counts": [1, 2, 2],
        "bytes": 257 + 4 * (258 + 7 + 4) + 3 * (6 + 3 + 2),
        "bytes_per_token": 124.182,
        "uncounted_tokens": 0,
    }
    assert summary == {
        "path": str(built),
        "format_version": 4,
        "redacted": False,
        "excluded_phrases": None,
        "snapshot": 0,
        "tokens": 11,
        "documents": 1,
        "licences": {"": 1},
        "keeps_texts": False,
        "segments": [{"name": "00000000", "documents": 1, "tokens": 11}],
        "vocabulary_size": 257,
    }


def test_verify_ends_with_status_1_when_anything_is_wrong(cli: Cli, built: Path) -> None:
    assert cli("verify", built)[:2] == (0, f"{built}: sound (1 segment(s) checked)\n")
    assert json.loads(cli("verify", built, "--samples", 1, "--json")[1])["ok"] is True
    (built / "segments/00000000/tokens").unlink()
    status, out, _ = cli("verify", built)
    assert (status, "tokens is missing" in out) == (1, True)
    status, out, _ = cli("verify", built, "--json")
    assert (status, json.loads(out)["ok"]) == (1, False)
    assert len(json.loads(out)["findings"]) == 1


def test_errors_are_one_line_on_stderr_before_a_tokenizer_is_loaded(
    cli: Cli, built: Path, source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def never(*_: object, **__: object) -> NoReturn:
        raise AssertionError("loading takes seconds")

    monkeypatch.setattr(AutoTokenizer, "from_pretrained", never)
    empty = tmp_path / "empty"
    empty.mkdir()
    (empty / "a.txt").touch()
    for arguments in [
        ("build", tmp_path / "nowhere", "-o", tmp_path / "x"),
        ("build", source, "-o", tmp_path / "x", "--tokenizer", tmp_path / "nowhere"),
        ("build", source, "-o", built),
        ("build", "--from", built, "-o", tmp_path / "x"),
        ("build", "--from", tmp_path / "nowhere", "-o", tmp_path / "x"),
        ("add", built, tmp_path / "nowhere"),
        ("add", tmp_path / "nowhere", source),
        ("remove", built, "--document", "nobody"),
        ("remove", built, "--document", "nobody", "--dry-run"),
        ("remove", built, "--matching", "*"),
        ("compact", source),
        ("documents", tmp_path / "nowhere"),
        ("build", empty, "-o", tmp_path / "x"),
        ("build", source, "-o", source / "a.txt" / "x"),
        ("build", source, "-o", tmp_path / "x", "--tokenizer", source / "a.txt"),
        ("inspect", tmp_path / "nowhere"),
        ("inspect", source / "a.txt"),
        ("verify", source),
    ]:
        status, out, err = cli(*arguments)
        assert (status, out) == (1, "")
        assert re.fullmatch(r"(finding sources\n(loading the tokenizer\n)?)?error: [^\n]+\n", err)
    assert not (tmp_path / "x").exists()


def test_a_file_is_no_index_and_is_said_to_be_one(cli: Cli, source: Path) -> None:
    file = source / "a.txt"
    for command in ("inspect", "verify"):
        assert cli(command, file) == (1, "", f"error: {file} is a file: an index is a folder\n")


def test_the_module_runs_as_a_program(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "indexer", "inspect", str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (1, "")
    assert done.stderr == f"error: {tmp_path} is a folder but not an index\n"


def test_help_names_every_command_and_option(cli: Cli) -> None:
    for arguments in [
        ("--help",),
        *(
            (command, "--help")
            for command in ("build", "add", "remove", "compact", "documents", "inspect", "verify")
        ),
    ]:
        status, out, _ = cli(*arguments)
        assert (status, "Usage" in out) == (0, True)
