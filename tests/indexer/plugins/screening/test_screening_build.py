"""What is screened for is in no file of an index: searched as bytes, tokens, n-grams and names."""

import gzip
import json
import random
import string
from collections.abc import Callable, Iterator
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
from transformers import PreTrainedTokenizerBase

from indexer.build import BuildOptions, build_from_texts, build_index
from indexer.change.verifying import verify_index
from indexer.errors import SourceError
from indexer.plugins.screening.exclusion import ExcludedPhrases
from indexer.plugins.screening.screen import ExcludeScope, ScreenOptions
from indexer.reader import Index
from tests.indexer.stages.phrase_twins import levels_in

Cli = Callable[..., tuple[int, str, str]]
TextsOf = Callable[[Path], dict[str, str]]
RNG = random.Random(5)
CONTROL = "control ~W7 stays"
LISTED = ["J6\u00e9Q zebra", "X3&Y vault"]
KEY = "\n".join(
    [
        "-----BEGIN PRIVATE KEY-----",
        *("".join(RNG.choices(string.ascii_letters + string.digits, k=64)) for _ in range(8)),
        "-----END PRIVATE KEY-----",
    ]
)
TOKEN = "glpat-" + "".join(RNG.choices(string.ascii_letters + string.digits, k=20))
SECRETS = [KEY, KEY.split("\n")[4], TOKEN, "ada.Z9K@example.org", "Kq4%Vz8"]
PLANTED = [*LISTED, "j6\u00c9q ZEBRA", "J6e\u0301Q zebra", *SECRETS]
NEEDLES = [needle for planted in PLANTED for needle in (planted, planted[1:-1])]


def folds(text: str) -> set[str]:
    return {text, text.lower(), text.upper()}


@pytest.fixture
def corpus(tmp_path: Path) -> Path:
    """Return a folder in which whatever must not be drafted stands, in files, rows and names."""
    folder = tmp_path / "corpus"
    (folder / "team ada.Z9K@example.org").mkdir(parents=True)
    texts = {
        "plain.md": f"{CONTROL}\nanother line\n",
        "phrase.md": f"a line\nof J6\u00e9Q zebra here\n{CONTROL}\n",
        "case.md": f"a line\nof j6\u00c9q ZEBRA here\n{CONTROL}\n",
        "accent.md": f"a line\nof J6e\u0301Q zebra here\n{CONTROL}\n",
        "X3&Y vault.md": f"{CONTROL} in a file with a name\n",
        "keys.py": f"key = '''{KEY}'''\nurl = 'db://u:Kq4%Vz8@host/x'\nagain = 'Kq4%Vz8'\n",
        "team ada.Z9K@example.org/notes.txt": f"{CONTROL}, says ada.Z9K@example.org\n" * 3,
    }
    for name, text in texts.items():
        (folder / name).write_text(text, encoding="utf-8")
    rows = [f"{CONTROL} with {TOKEN}\nand X3&Y vault", f"{CONTROL} {TOKEN}", "J6\u00e9Q zebra"]
    with gzip.open(folder / "rows.jsonl.gz", "wt", encoding="utf-8") as stream:
        stream.writelines(json.dumps({"text": row}) + "\n" for row in rows)
    return folder


def places(path: Path, needle: str, tokenizer: PreTrainedTokenizerBase) -> Iterator[str]:
    """Yield which files of an index hold a text: as bytes, or as its tokens in two or four."""
    ids = tokenizer(needle, add_special_tokens=False)["input_ids"]
    patterns = [needle.encode(), *(np.array(ids, dtype).tobytes() for dtype in ("<u2", "<u4"))]
    for file in path.rglob("*"):
        if file.is_file() and any(pattern in file.read_bytes() for pattern in patterns):
            yield file.name


def ngrams_in(path: Path) -> set[tuple[int, ...]]:
    with Index.open(path) as index:
        return {ngram for level in levels_in(index.phrases) for ngram, count in level if count > 0}


def holds(path: Path, needle: str, tokenizer: PreTrainedTokenizerBase) -> bool:
    """Say whether anything of an index holds a text; of n-grams, all of the text's."""
    ids = tokenizer(needle, add_special_tokens=False)["input_ids"]
    pairs = set(pairwise(ids))
    with Index.open(path) as index:
        names = [
            index.document_at(number, int(position)).name
            for number, segment in enumerate(index.segments)
            for position in range(len(segment.tokens) - 1)
        ]
    return (
        any(places(path, needle, tokenizer))
        or pairs <= ngrams_in(path)
        or any(needle in name for name in names)
    )


def options(scope: ExcludeScope) -> ScreenOptions:
    phrases = ExcludedPhrases(tuple(LISTED), (2, 5))
    return ScreenOptions(phrases, scope, ignore_case=True, redact=True)


@pytest.mark.parametrize("scope", ExcludeScope)
def test_nothing_that_is_screened_for_is_in_an_index(
    scope: ExcludeScope, corpus: Path, tmp_path: Path, tokenizer: PreTrainedTokenizerBase
) -> None:
    path = tmp_path / "x.index"
    report = build_index([corpus], path, tokenizer, BuildOptions(screen=options(scope)))
    assert holds(path, CONTROL, tokenizer)
    for needle in {folded for planted in NEEDLES for folded in folds(planted)}:
        assert not holds(path, needle, tokenizer), needle
    for planted in LISTED:  # their first characters pair up nowhere else
        ids = tokenizer(planted[:3], add_special_tokens=False)["input_ids"]
        assert not set(pairwise(ids)) & ngrams_in(path)
    said = report.describe() + json.dumps(report.to_json(), ensure_ascii=False)
    assert not any(needle in said for needle in NEEDLES)
    assert verify_index(path, 10).findings == ()
    assert report.tally.screened is not None
    assert report.tally.screened.secrets.keys() >= {"private-key", "gitlab-pat", "email-address"}


def test_what_is_not_screened_for_is_found_by_the_same_search(
    corpus: Path, tmp_path: Path, tokenizer: PreTrainedTokenizerBase
) -> None:
    path = tmp_path / "x.index"
    build_index([corpus], path, tokenizer)
    for needle in [CONTROL, *NEEDLES]:
        assert holds(path, needle, tokenizer), needle
    assert set(places(path, TOKEN, tokenizer)) == {"tokens"}
    assert "document_names" in set(places(path, "X3&Y vault", tokenizer))


def test_the_report_counts_by_phrase_and_kind(
    corpus: Path, tmp_path: Path, tokenizer: PreTrainedTokenizerBase
) -> None:
    screen = options(ExcludeScope.DOCUMENT)
    report = build_index([corpus], tmp_path / "x", tokenizer, BuildOptions(screen=screen))
    assert report.tally.skipped["excluded phrase"] == 6
    screened = report.to_json()["screened"]
    assert screened["documents_by_phrase"] == {"2": 4, "5": 2}
    assert screened["documents_excluded"] == 6
    assert screened["documents_redacted"] == 3
    assert screened["secrets"]["email-address"] == 4
    assert "6 documents left out by the list's line 2: 4, line 5: 2" in report.describe()


def test_documents_of_which_nothing_stays_are_empty(
    tmp_path: Path, tokenizer: PreTrainedTokenizerBase, texts_of: TextsOf
) -> None:
    screen = ScreenOptions(ExcludedPhrases(("cut",), (1,)), ExcludeScope.LINE)
    documents = [("a", "cut me"), ("b", "keep\ncut\nkeep too"), ("c", "\ncut\n")]
    report = build_from_texts(documents, tmp_path / "x", tokenizer, BuildOptions(screen=screen))
    assert report.tally.skipped == {"empty": 2}
    assert texts_of(tmp_path / "x") == {"b": "keep\nkeep too"}
    with pytest.raises(SourceError, match="no document to index: skipped 1 empty"):
        build_from_texts(documents[:1], tmp_path / "y", tokenizer, BuildOptions(screen=screen))


def test_builds_without_screening_say_nothing_of_it(
    tmp_path: Path, tokenizer: PreTrainedTokenizerBase
) -> None:
    report = build_from_texts([("a", "text")], tmp_path / "x", tokenizer)
    assert report.to_json()["screened"] is None
    assert "screened" not in report.describe()


def test_the_command_line_screens(
    corpus: Path, tmp_path: Path, tokenizer_folder: Path, cli: Cli
) -> None:
    listed = tmp_path / "listed"
    listed.write_text("# two\n" + "\n".join(LISTED) + "\n", encoding="utf-8")
    path = tmp_path / "x.index"
    arguments = ["build", corpus, "-o", path, "--tokenizer", tokenizer_folder, "--json"]
    screening = ["--exclude-phrases", listed, "--exclude-ignore-case", "--redact"]
    status, out, _ = cli(*arguments, *screening, "--exclude-scope", "line")
    assert status == 0
    screened = json.loads(out)["screened"]
    assert screened["lines_by_phrase"] == {"2": 4, "3": 1}
    assert screened["documents_by_phrase"] == {"3": 1}
    assert screened["secrets"]["gitlab-pat"] == 2


def test_the_command_line_refuses_a_list_that_is_not_whole(
    corpus: Path, tmp_path: Path, cli: Cli
) -> None:
    listed = tmp_path / "listed"
    listed.write_bytes(b"fine\n\xff\n")
    status, _, err = cli("build", corpus, "-o", tmp_path / "x", "--exclude-phrases", listed)
    assert status == 1
    assert err == f"error: line 2 of {listed} is not UTF-8: fix it; nothing was excluded\n"
    assert not (tmp_path / "x").exists()
