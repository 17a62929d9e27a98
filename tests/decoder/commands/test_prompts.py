import gzip
import json
import subprocess
import sys
from pathlib import Path

import pytest

from decoder.commands.prompts import Prompt, read_prompts
from decoder.errors import PromptFileError


def test_limits_are_spread_evenly_over_categories(questions: Path) -> None:
    texts = [prompt.text for prompt in read_prompts(questions, 4)]
    assert texts == ["poems 0", "sums 0", "poems 1", "sums 1"]
    assert len(read_prompts(questions)) == 6


def test_plain_lines_are_prompts(tmp_path: Path) -> None:
    path = tmp_path / "prompts.txt"
    path.write_text("one\n\ntwo\n")
    assert read_prompts(path) == [Prompt("prompts", "one"), Prompt("prompts", "two")]


def test_prompts_are_utf8_in_any_locale(tmp_path: Path) -> None:
    for name, compress in (("plain", bytes), ("packed.gz", gzip.compress)):
        path = tmp_path / name
        path.write_bytes(compress("café".encode()))
        reading = f"print(ascii(read_prompts(Path({str(path)!r}))))"
        script = f"from decoder.commands.prompts import *; {reading}"
        done = subprocess.run(
            [sys.executable, "-X", "utf8=0", "-c", script],
            env={"LC_ALL": "C", "PYTHONCOERCECLOCALE": "0"},
            capture_output=True,
            text=True,
            check=True,
        )
        assert r"caf\xe9" in done.stdout


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "no prompt"),
        (b"\xff\xfe", "is not text in UTF-8"),
        (b'{"category": "x"', ":1 is not JSON"),
        (b'{"category": "x"}', ":1: expected"),
        (b'fine\n{"category": "x", "turns": []}', ":2: expected"),
        (b'{"category": 3, "turns": ["text"]}', "must be texts"),
        (b'{"category": "x", "turns": [" "]}', "must be texts"),
    ],
)
def test_malformed_prompt_files_are_refused(tmp_path: Path, content: bytes, message: str) -> None:
    path = tmp_path / "prompts"
    path.write_bytes(content)
    with pytest.raises(PromptFileError, match=message):
        read_prompts(path)


def test_missing_and_broken_files_are_refused(tmp_path: Path) -> None:
    broken = tmp_path / "broken.gz"
    broken.write_bytes(b"not gzip")
    damaged = tmp_path / "damaged.gz"
    whole = bytearray(gzip.compress(b"one\ntwo\n" * 100))
    whole[12] ^= 0xFF
    damaged.write_bytes(whole)
    cut = tmp_path / "cut.gz"
    cut.write_bytes(gzip.compress(b"one\ntwo\n" * 100)[:-10])
    for path in (broken, damaged, cut, tmp_path / "missing"):
        with pytest.raises(PromptFileError, match=path.name):
            read_prompts(path)


CONVERSATIONS = [
    {"messages": [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "one"}]},
    {"messages": [{"role": "assistant", "content": "nobody asked"}]},
    {"prompt": "two", "completion": "2"},
    {"conversations": [{"from": "human", "value": "three"}, {"from": "gpt", "value": "3"}]},
    {"request": {"messages": [{"role": "user", "content": "four"}]}, "response": None},
]


def test_prompts_of_logs_are_what_users_said_first(tmp_path: Path) -> None:
    lines, array = tmp_path / "log.jsonl", tmp_path / "log.json"
    lines.write_text("".join(json.dumps(each) + "\n" for each in CONVERSATIONS))
    array.write_text(json.dumps(CONVERSATIONS))
    for path in (lines, array):
        assert [prompt.text for prompt in read_prompts(path)] == ["one", "two", "three", "four"]
    table = tmp_path / "log.csv"
    table.write_text("id,prompt\n1,one\n2,two\n")
    assert [prompt.text for prompt in read_prompts(table)] == ["one", "two"]


def test_records_without_a_prompt_are_refused_with_their_keys(tmp_path: Path) -> None:
    path = tmp_path / "log.jsonl"
    path.write_text('{"body": "x", "id": 1}\n')
    with pytest.raises(PromptFileError, match=r"log.jsonl:1: expected .* keys are 'body', 'id'"):
        read_prompts(path)
    damaged = tmp_path / "cut.json"
    damaged.write_text('[{"prompt": "x"}, {"pro')
    with pytest.raises(PromptFileError, match="not JSON"):
        read_prompts(damaged)
