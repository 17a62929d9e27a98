import json
import re
from collections.abc import Callable
from pathlib import Path

import pytest

Cli = Callable[..., tuple[int, str, str]]


@pytest.fixture
def source(tmp_path: Path) -> Path:
    folder = tmp_path / "source"
    folder.mkdir()
    (folder / "a.txt").write_text("hello hello")
    (folder / "b.txt").write_text("good bye " * 20)
    return folder


@pytest.fixture
def built(cli: Cli, source: Path, tmp_path: Path, tokenizer_folder: Path) -> Path:
    path = tmp_path / "built"
    arguments = ("-o", path, "--tokenizer", tokenizer_folder, "--keep-texts")
    assert cli("build", source, *arguments)[0] == 0
    return path


def test_add_reports_what_it_did_and_shows_that_it_moves(
    cli: Cli, built: Path, tmp_path: Path
) -> None:
    (tmp_path / "c.jsonl").write_text('{"body": "new"}\n{"body": "hello hello"}\n')
    status, out, err = cli("add", built, tmp_path / "c.jsonl", "--field", "body")
    assert status == 0
    assert re.fullmatch(
        rf"{built}: added 1 document, 3 tokens in \d+\.\d s; 2 segments now\n"
        r"skipped: 1 exact duplicate \(first: \S+c\.jsonl:2\)\n",
        out,
    )
    assert err == "finding sources\nreading 0.0 KiB\nsorting\ncounting\n"

    arguments = ("add", built, tmp_path / "c.jsonl", "--field", "body", "--keep-duplicates")
    status, out, _ = cli(*arguments, "--max-document-bytes", 5, "--segment-tokens", 1, "--json")
    report = json.loads(out)
    assert status == 0
    assert report.pop("seconds") >= 0
    assert report == {
        "path": str(built),
        "added": 1,
        "tokens": 3,
        "segments": 3,
        "older_snapshots": 0,
        "skipped": {"too large": 1},
        "skipped_places": {"too large": f"{tmp_path}/c.jsonl:2"},
        "dropped": 1,
        "by_content": {},
        "replaced": 0,
        "earlier_versions": 1,
        "conversations": [],
        "screened": None,
    }


def test_remove_lists_what_would_go_and_removes_what_is_named(
    cli: Cli, built: Path, source: Path
) -> None:
    arguments = ("remove", built, "--document", source / "a.txt", "--dry-run")
    status, out, _ = cli(*arguments)
    assert status == 0
    assert out == (
        f"       11  -             {source}/a.txt\n1 document, 11 tokens would be removed\n"
    )
    assert json.loads(cli(*arguments, "--json")[1]) == {
        "documents": [{"name": f"{source}/a.txt", "licence": "", "tokens": 11}]
    }
    assert "documents    2" in cli("inspect", built)[1]

    status, out, _ = cli("remove", built, "--matching", "*/a.*", "--matching", "*a.txt", "--json")
    assert (status, json.loads(out)["removed"], json.loads(out)["tokens"]) == (0, 1, 11)
    assert cli("documents", built)[1] == f"      180  -             {source}/b.txt\n"


def test_remove_without_a_name_is_a_usage_error(cli: Cli, built: Path) -> None:
    status, out, err = cli("remove", built)
    assert (status, out) == (2, "")
    assert "--matching" in err


def test_documents_lists_names_that_match(cli: Cli, built: Path, source: Path) -> None:
    status, out, _ = cli("documents", built, "--json")
    assert status == 0
    assert [json.loads(line) for line in out.splitlines()] == [
        {"name": f"{source}/a.txt", "licence": "", "tokens": 11},
        {"name": f"{source}/b.txt", "licence": "", "tokens": 180},
    ]
    out = cli("documents", built, "--matching", "*b.txt", "--matching", "x")[1]
    assert out.splitlines() == [f"      180  -             {source}/b.txt"]
    assert cli("documents", built, "--matching", "x")[:2] == (0, "")


def test_compact_merges_and_inspect_tells_of_it(cli: Cli, built: Path, tmp_path: Path) -> None:
    (tmp_path / "c.txt").write_text("new")
    cli("add", built, tmp_path / "c.txt")
    out = cli("inspect", built)[1]
    assert "snapshot 1\n" in out
    assert re.search(r"texts +kept\n", out)
    assert re.search(r"3 of unknown licence", out)
    assert re.search(r"00000001   3 of 1 document", out)
    assert re.search(r" 3 tokens added since they were counted", out)

    status, out, _ = cli("compact", built, "--segment-tokens", 10)
    assert (status, "0 segments fewer" in out) == (0, True)
    assert json.loads(cli("compact", built, "--json")[1])["merged"] == 1
    summary = json.loads(cli("inspect", built, "--json")[1])
    assert summary["snapshot"] == 3
    assert summary["phrases"]["uncounted_tokens"] == 0
    assert summary["segments"] == [{"name": "00000002", "documents": 3, "tokens": 194}]


def test_build_keeps_duplicates_and_texts_where_asked(
    cli: Cli, source: Path, tmp_path: Path, tokenizer_folder: Path
) -> None:
    (source / "c.txt").write_text("hello hello")
    arguments = ("--tokenizer", tokenizer_folder, "--json")
    report = json.loads(cli("build", source, "-o", tmp_path / "x", *arguments)[1])
    assert (report["documents"], report["skipped"]) == (2, {"exact duplicate": 1})
    keep = ("--keep-duplicates", "--keep-texts")
    report = json.loads(cli("build", source, "-o", tmp_path / "y", *arguments, *keep)[1])
    assert (report["documents"], report["skipped"]) == (3, {})
    assert json.loads(cli("inspect", tmp_path / "y", "--json")[1])["keeps_texts"] is True


def test_build_from_an_index_needs_no_sources(
    cli: Cli, built: Path, source: Path, tmp_path: Path, tokenizer_folder: Path
) -> None:
    arguments = ("-o", tmp_path / "x", "--tokenizer", tokenizer_folder)
    status, out, err = cli("build", "--from", built, *arguments)
    assert (status, "2 documents, 191 tokens" in out) == (0, True)
    assert err == "loading the tokenizer\nreading 0.1 KiB\nsorting\ncounting\n"
    assert cli("documents", tmp_path / "x") == cli("documents", built)
    for sources in ([source, "--from", built], []):
        status, out, err = cli("build", *sources, *arguments, "--overwrite")
        assert (status, out) == (2, "")
        assert "name sources" in err


@pytest.mark.plugin("indexer.plugins.screening")
def test_what_is_added_and_what_is_built_again_is_screened(
    cli: Cli, built: Path, tmp_path: Path, tokenizer_folder: Path
) -> None:
    (tmp_path / "phrases.txt").write_text("good bye\n")
    (tmp_path / "c.txt").write_text("good bye for now")
    (tmp_path / "d.txt").write_text("good day")
    screened = ("--exclude-phrases", tmp_path / "phrases.txt")
    _, out, _ = cli("add", built, tmp_path / "c.txt", tmp_path / "d.txt", *screened, "--json")
    report = json.loads(out)
    assert (report["added"], report["skipped"]) == (1, {"excluded phrase": 1})
    arguments = ("--from", built, "-o", tmp_path / "x", "--tokenizer", tokenizer_folder)
    assert cli("build", *arguments, *screened)[0] == 0
    names = [line.split()[-1] for line in cli("documents", tmp_path / "x")[1].splitlines()]
    assert [Path(name).name for name in names] == ["a.txt", "d.txt"]
