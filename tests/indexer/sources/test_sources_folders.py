import logging
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from indexer.build_report import BuildTally
from indexer.errors import SourceError
from indexer.sources import Git, SourceOptions, plan
from tests.indexer.sources.source_reading import read_all, texts, write

needs_git = pytest.mark.skipif(shutil.which("git") is None, reason="git is not installed")


def git(folder: Path, *arguments: str) -> None:
    identity = ("-c", "user.name=a", "-c", "user.email=a@b.c", "-c", "protocol.file.allow=always")
    kept = {key: value for key, value in os.environ.items() if not key.startswith("GIT_")}
    command = ["git", *identity, "-C", str(folder), *arguments]
    subprocess.run(command, check=True, capture_output=True, env=kept)


def repository(folder: Path, **files: str) -> Path:
    folder.mkdir(parents=True)
    git(folder, "init", "-q")
    write(folder, **files)
    git(folder, "add", "-A")
    git(folder, "commit", "-q", "-m", "first")
    return folder


def names(*sources: Path, **options: object) -> list[str]:
    documents, _ = read_all(*sources, **options)
    return [Path(document.name).relative_to(sources[0]).as_posix() for document in documents]


@needs_git
def test_of_a_repository_the_tracked_files_are_read(tmp_path: Path) -> None:
    folder = repository(tmp_path / "r", b_py="b", docs__a_md="a", docs__h__b_md="b")
    (folder / "x.png").write_bytes(b"\x89PNG")
    (folder / "docs/\u00e9 \t\n.md").write_text("odd name")
    (folder / ".hidden.md").write_text("hidden")
    git(folder, "add", "-A")
    write(folder, untracked_md="no", build__made_md="no")
    tracked = ["b.py", "docs/a.md", "docs/h/b.md", "docs/\u00e9 \t\n.md"]
    assert names(folder) == tracked
    assert names(folder, git=Git.NEVER) == [
        *("b.py", "untracked.md", "build/made.md", "docs/a.md"),
        *("docs/\u00e9 \t\n.md", "docs/h/b.md"),
    ]
    _, tally = read_all(folder)
    assert tally.skipped == {"not text by its first bytes": 1}
    assert tally.skipped_places == {"not text by its first bytes": f"{folder}/x.png"}


@needs_git
def test_repositories_within_a_folder_and_submodules_are_asked_as_well(tmp_path: Path) -> None:
    inner = repository(tmp_path / "all/inner", i_md="i")
    outer = repository(tmp_path / "all/outer", o_md="o")
    git(outer, "submodule", "add", "-q", str(inner), "sub/module")
    git(outer, "commit", "-q", "-m", "second")
    for folder in (inner, outer, outer / "sub/module"):
        write(folder, untracked_md="no")
    write(tmp_path / "all", z__plain_md="plain")
    found = names(tmp_path / "all")
    assert found == ["inner/i.md", "outer/o.md", "outer/sub/module/i.md", "z/plain.md"]


@needs_git
def test_git_is_asked_for_the_folder_whatever_the_environment_says(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = repository(tmp_path / "one", a_md="a")
    other = repository(tmp_path / "other", b_md="b")
    monkeypatch.setenv("GIT_DIR", str(other / ".git"))
    monkeypatch.setenv("GIT_INDEX_FILE", str(other / ".git/index"))
    assert names(folder) == ["a.md"]


@needs_git
def test_a_repository_runs_no_program_of_its_own(tmp_path: Path) -> None:
    folder = repository(tmp_path / "r", a_md="a")
    git(folder, "config", "core.fsmonitor", f"touch {tmp_path}/ran; false")
    assert names(folder) == ["a.md"]
    assert not (tmp_path / "ran").exists()


@needs_git
def test_tracked_files_that_are_gone_or_became_links_are_counted(tmp_path: Path) -> None:
    folder = repository(tmp_path / "r", a_md="a", b_md="b", c_md="c")
    (folder / "a.md").unlink()
    (folder / "b.md").unlink()
    (folder / "b.md").symlink_to(tmp_path / "outside.md")
    (tmp_path / "outside.md").write_text("outside")
    documents, tally = read_all(folder)
    assert list(texts(documents).values()) == ["c"]
    assert tally.skipped == {"unreadable: No such file or directory": 1, "symbolic link": 1}


@needs_git
def test_a_damaged_repository_is_an_error_if_named_and_counted_if_found(tmp_path: Path) -> None:
    folder = repository(tmp_path / "all/r", a_md="a")
    write(tmp_path / "all", b_md="b")
    (folder / ".git/index").write_bytes(b"damaged")
    with pytest.raises(SourceError, match=r"git does not list .*/r: .*: .*--git never$") as caught:
        read_all(folder)
    assert "\n" not in str(caught.value)
    documents, tally = read_all(tmp_path / "all")
    assert list(texts(documents).values()) == ["b"]
    assert tally.skipped_places == {"unreadable: git does not list the files": str(folder)}
    assert names(folder, git=Git.NEVER) == ["a.md"]


@needs_git
def test_without_git_folders_are_walked_and_that_is_noted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    folder = repository(tmp_path / "r", a_md="a")
    write(folder, untracked_md="u")
    monkeypatch.setenv("PATH", str(tmp_path))
    caplog.set_level(logging.INFO)
    monkeypatch.setattr(logging.getLogger("indexer"), "propagate", True)
    plan([folder], SourceOptions(), BuildTally())
    assert caplog.messages == [
        f"git is not installed: untracked files of {folder} are read as well"
    ]
    assert names(folder) == ["a.md", "untracked.md"]


def test_an_empty_git_folder_makes_no_repository(tmp_path: Path) -> None:
    write(tmp_path, a_md="a")
    (tmp_path / ".git").mkdir()
    assert names(tmp_path) == ["a.md"]


def test_patterns_choose_among_the_files_of_folders(tmp_path: Path) -> None:
    write(tmp_path, a_md="a", b_py="b", docs__c_md="c", docs__old__d_md="d")
    (tmp_path / "docs/e.odd").write_bytes(b"e\0dd")
    assert names(tmp_path, include=("*.md",)) == ["a.md", "docs/c.md", "docs/old/d.md"]
    assert names(tmp_path, include=("/*.md", "*.odd")) == ["a.md", "docs/e.odd"]
    assert names(tmp_path, exclude=("docs/",)) == ["a.md", "b.py"]
    assert names(tmp_path, exclude=("*.md", "!c.md")) == ["b.py", "docs/c.md"]
    chosen = {"include": ("docs/",), "exclude": ("docs/old", "*.odd")}
    assert names(tmp_path, **chosen) == ["docs/c.md"]
    _, tally = read_all(tmp_path, **chosen)
    assert tally.skipped == {"not included by a pattern": 2, "excluded by a pattern": 2}


@needs_git
def test_patterns_hold_for_tracked_files_as_well(tmp_path: Path) -> None:
    folder = repository(tmp_path / "r", a_md="a", docs__c_md="c", docs__old__d_md="d")
    assert names(folder, include=("*.md",), exclude=("docs/old/",)) == ["a.md", "docs/c.md"]
    assert names(tmp_path, exclude=("/docs",)) == ["r/a.md", "r/docs/c.md", "r/docs/old/d.md"]
    assert names(tmp_path, exclude=("/r/docs",)) == ["r/a.md"]


def test_patterns_do_not_concern_files_that_are_named(tmp_path: Path) -> None:
    write(tmp_path, a_md="a")
    documents, _ = read_all(tmp_path / "a.md", include=("*.py",), exclude=("*.md",))
    assert list(texts(documents).values()) == ["a"]


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"include": ("!",)}, "--include"),
        ({"exclude": ("\\",)}, "--exclude"),
        ({"encoding": "klingon"}, "'klingon'"),
        ({"encoding": "base64"}, "'base64'"),
        ({"encoding": "a\0"}, "encoding"),
        ({"block_bytes": 0}, "block_bytes"),
        ({"max_document_bytes": 0}, "max_document_bytes"),
    ],
)
def test_options_that_mean_nothing_are_an_error_of_one_line(
    options: dict[str, object], said: str
) -> None:
    with pytest.raises(SourceError, match=said) as caught:
        SourceOptions(**options)  # type: ignore[arg-type]
    assert len(str(caught.value).splitlines()) == 1


def test_sources_may_be_named_from_where_one_stands(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write(tmp_path, a_md="a", in__b_md="b")
    monkeypatch.chdir(tmp_path / "in")
    assert list(texts(read_all(".")[0])) == ["b.md"]
    assert list(texts(read_all("..")[0])) == ["../a.md", "../in/b.md"]
    documents, tally = read_all("../a.md", "..", tmp_path)
    assert list(texts(documents)) == ["../a.md", "../in/b.md"]
    assert tally.skipped == {"named twice": 3}


def test_folders_may_be_nested_as_deep_as_paths_are_long(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    for _ in range(sys.getrecursionlimit() + 50):
        Path("d").mkdir()
        os.chdir("d")
    Path("a.md").write_text("deep")
    os.chdir(tmp_path)
    documents, _ = read_all("d")
    assert [document.text for document in documents] == ["deep"]
    subprocess.run(["rm", "-r", "d"], check=True)  # shutil's is recursive


def test_names_that_are_not_utf_8_are_shown_with_replacements(tmp_path: Path) -> None:
    Path(os.fsdecode(os.fsencode(tmp_path) + b"/caf\xe9.md")).write_text("a")
    documents, _ = read_all(tmp_path)
    assert texts(documents) == {f"{tmp_path}/caf\ufffd.md": "a"}
    documents[0].name.encode()


def test_a_folder_that_cannot_be_read_is_counted_with_its_place(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write(tmp_path, a_md="a", locked__b_md="b")
    plain = os.scandir

    def refusing(path: str) -> object:  # root may read everything, so pretend
        if Path(path).name == "locked":
            raise PermissionError(13, "Permission denied", str(path))
        return plain(path)

    monkeypatch.setattr(os, "scandir", refusing)
    documents, tally = read_all(tmp_path)
    assert list(texts(documents).values()) == ["a"]
    assert tally.skipped_places == {"unreadable: Permission denied": f"{tmp_path}/locked"}
