import gzip
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from typer.testing import CliRunner

from retriever.client.strict import RemoteDrafter
from retriever.drafter import DraftRequest
from retriever.errors import InvalidRequestError, PhrasesError
from retriever.plugins.replay.replay_cli import app
from retriever.predict.phrases import MAX_PHRASE_TOKENS, ListedPhrases
from retriever.sessions.embedded import EmbeddedDrafter
from tests.retriever.conftest import VOCABULARY_SIZE, start_service, stop_service


def encode(text: str) -> list[int]:
    """Words as a byte-level tokenizer splits them: each with the space before it."""
    words = text.replace("\n", " \n ").replace(" ", "\0 ").split("\0")
    return [sum(word.encode()) % 40 + 1 for word in words if word.strip(" ")]


def characters(text: str) -> list[int]:
    return list(text.encode())


def continuations(phrases: ListedPhrases, context: Sequence[int]) -> list[int]:
    """The most probable continuation of a context, from listed phrases and the context alone."""
    tree = EmbeddedDrafter(phrases=phrases).draft_context(np.array(context), 64)
    tokens: list[int] = tree.best_chain(64).token_ids.tolist()
    return tokens


def write(path: Path, content: bytes) -> Path:
    path.write_bytes(gzip.compress(content) if path.suffix == ".gz" else content)
    return path


@pytest.mark.parametrize("name", ["phrases.txt", "phrases", "phrases.txt.gz"])
def test_text_is_found_at_the_start_of_a_line_and_after_a_space(tmp_path: Path, name: str) -> None:
    path = write(tmp_path / name, b"\xef\xbb\xbfDear customer\r\nyours")
    phrases = ListedPhrases.load([path], characters, 256)
    assert phrases.problems == []
    assert len(phrases) == 4
    for context in ("Dear", "x Dear", "x\nDear", "xDear"):
        assert bytes(continuations(phrases, characters(context))) == b" customer"


def test_text_that_is_encoded_apart_after_a_line_break_is_found_there(tmp_path: Path) -> None:
    """Some tokenizers put a space before every text, which a line break does not have."""

    def spaced(text: str) -> list[int]:
        return characters(f" {text}")

    path = write(tmp_path / "phrases.txt", b"Dear customer")
    phrases = ListedPhrases.load([path], spaced, 256)
    assert bytes(continuations(phrases, spaced("Hello.\nDear c"))).startswith(b"ustomer")


def test_equal_phrases_are_listed_once(tmp_path: Path) -> None:
    paths = [
        write(tmp_path / "a.jsonl", b'{"ids": [1, 2, 3]}\n{"ids": [1, 2, 3]}\n{"ids": [1, 2]}'),
        write(tmp_path / "b.jsonl.gz", b'{"ids": [1, 2, 3]}\n'),
    ]
    phrases = ListedPhrases.load(paths, None, None)
    assert (len(phrases), phrases.num_tokens, phrases.highest_token) == (2, 5, 3)


def test_json_lines_hold_line_breaks(tmp_path: Path) -> None:
    line = json.dumps({"text": '{\n  "name": "search"\n}'}).encode()
    phrases = ListedPhrases.load([write(tmp_path / "p.jsonl", line)], characters, 256)
    assert bytes(continuations(phrases, characters("call: {\n"))) == b'  "name": "search"\n}'


BAD_LINES = {
    b"": "empty",
    b"   ": "empty",
    b"[1, 2]": "neither",
    b"7": "neither",
    b'{"ids": [1, 2], "text": "a"}': "neither",
    b'{"text": 7}': "neither",
    b'{"text": null}': "neither",
    b'{"text": " "}': "empty",
    b'{"text": "\\ud800 a b"}': "surrogate",
    b'{"ids": []}': "empty",
    b'{"ids": [7]}': "single token",
    b'{"ids": "12"}': "integers",
    b'{"ids": [1.5, 2]}': "integers",
    b'{"ids": [[1], [2, 3]]}': "inhomogeneous",
    b'{"ids": {"a": 1}}': "integers",
    b'{"ids": [1, 50]}': "token id 50 is outside the vocabulary of 50",
    b'{"ids": [1, -1]}': "token id -1",
    b'{"ids": [1, 99999999999999999999999]}': "integers",
    b'{"ids": [1,': "Expecting",
    b"\xff\xfe": "not UTF-8",
    b"[" * 100_000: "recursion",
    json.dumps({"ids": [1] * (MAX_PHRASE_TOKENS + 1)}).encode(): f"at most {MAX_PHRASE_TOKENS}",
}


def test_bad_lines_are_reported_by_number_and_the_rest_is_loaded(tmp_path: Path) -> None:
    lines = [line for bad in BAD_LINES for line in (bad, b'{"ids": [1, 2, 3]}')]
    path = write(tmp_path / "p.jsonl", b"\n".join([*lines, b'{"ids": [4, 5, 6]}']))
    phrases = ListedPhrases.load([path], encode, 50)
    assert len(phrases) == 2
    assert [problem.line for problem in phrases.problems] == list(range(1, len(lines), 2))
    assert {problem.path for problem in phrases.problems} == {path}
    for problem, reason in zip(phrases.problems, BAD_LINES.values(), strict=True):
        assert reason in problem.reason
    summary = list(phrases.summary())
    assert summary[0] == f"warning: {path}, line 1: empty"
    assert summary[-2] == f"warning: {len(BAD_LINES) - 10} more lines were left out"
    assert summary[-1].startswith("listed phrases: 2 (6 tokens, ")


def test_bad_lines_of_text_are_reported_too(tmp_path: Path) -> None:
    content = b"\nword\nword \xff word\n" + b"a " * MAX_PHRASE_TOKENS + b"a\ngood words\n"
    phrases = ListedPhrases.load([write(tmp_path / "p.txt", content)], encode, 50)
    assert [problem.line for problem in phrases.problems] == [1, 2, 3, 4]
    assert len(phrases) > 0
    without = ListedPhrases.load([tmp_path / "p.txt"], None, None)
    assert len(without) == 0
    assert "needs a tokenizer" in without.problems[-1].reason


def test_longest_phrase_is_taken(tmp_path: Path) -> None:
    ids = [number % 40 for number in range(MAX_PHRASE_TOKENS)]
    path = write(tmp_path / "p.jsonl", json.dumps({"ids": ids}).encode())
    phrases = ListedPhrases.load([path], None, 50)
    assert phrases.num_tokens == MAX_PHRASE_TOKENS
    assert continuations(phrases, ids[:-5])[:5] == ids[-5:]


def test_unreadable_files_are_a_clear_error(tmp_path: Path) -> None:
    damaged = tmp_path / "p.jsonl.gz"
    damaged.write_bytes(gzip.compress(b'{"ids": [1, 2]}\n' * 99)[:-9])
    not_compressed = tmp_path / "q.txt.gz"
    not_compressed.write_bytes(b"some text")
    for path in (damaged, not_compressed, tmp_path, tmp_path / "none.txt"):
        with pytest.raises(PhrasesError, match="cannot be read"):
            ListedPhrases.load([path], encode, 50)


def test_phrases_of_another_vocabulary_are_refused(index: Path) -> None:
    phrases = ListedPhrases([(1, VOCABULARY_SIZE)])
    with pytest.raises(InvalidRequestError, match="list it as text"):
        EmbeddedDrafter.open_indexes([index], phrases=phrases)


def replay(*arguments: object) -> Any:
    return CliRunner().invoke(app, ["replay", *map(str, arguments), "--json"])


def test_replay_takes_phrases(tmp_path: Path, index: Path) -> None:
    row = {"prompt_ids": [9], "output_ids": [1, 2, 3, 4, 5, 6]}
    traces = write(tmp_path / "t.jsonl", json.dumps(row).encode())
    listed = write(tmp_path / "p.jsonl", b'{"ids": [1, 2, 3, 4, 5, 6]}\n{"ids": [1, 50]}\n')
    result = replay(traces, "--phrases", listed, "--index", index)
    assert result.exit_code == 0
    assert json.loads(result.stdout)["accepted_by_source"]["phrases"] > 0
    assert f"warning: {listed}, line 2: token id 50 is outside" in result.stderr
    assert "listed phrases: 1 (6 tokens" in result.stderr
    assert json.loads(replay(traces, "--phrases", listed).stdout)["steps"] == 2
    missing = replay(traces, "--phrases", tmp_path / "none")
    assert missing.exit_code == 1
    assert "cannot be read" in missing.stderr


def test_service_drafts_from_phrases(tmp_path: Path) -> None:
    listed = write(tmp_path / "p.jsonl", b'{"ids": [1, 2, 3, 4]}')
    process, address = start_service("--phrases", str(listed), "--address", "127.0.0.1:0")
    drafter = RemoteDrafter(address, timeout_s=30)
    drafter.open("s", np.array([9, 1], np.int32))
    tree = drafter.draft([DraftRequest("s", np.array([2], np.int32), 3, 8)])[0]
    drafter.shut_down()
    stop_service(process)
    assert tree.token_ids.tolist() == [3, 4]
