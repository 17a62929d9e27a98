import gzip
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from decoder.commands.prompts import Prompt, read_prompts
from decoder.errors import PromptFileError
from decoder.model.pretrained import LanguageModel
from indexer.sources.chats.conversations import Turn
from indexer.sources.recordings import RecordingTally


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
        (b"fine\n\xff\xff", "1 not text .*:2; save the file as UTF-8"),
        (b'{"category": "x"', "1 not JSON .*:1; Expecting .* a line that starts with {"),
        (b'{"category": "x"}', ":1: no conversation: .*: expected"),
        (b'fine\n{"category": "x", "turns": []}', ":2: malformed question: expected"),
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


def test_prompts_of_logs_are_what_models_were_given(tmp_path: Path) -> None:
    lines, array = tmp_path / "log.jsonl", tmp_path / "log.json"
    lines.write_text("".join(json.dumps(each) + "\n" for each in CONVERSATIONS))
    array.write_text(json.dumps(CONVERSATIONS))
    for path in (lines, array):
        prompts = read_prompts(path)
        assert [prompt.text for prompt in prompts] == ["one", "two", "three", "four"]
        system = Turn("system", "Be brief.")
        assert [each.turns for each in prompts] == [(system, Turn("user", "one")), (), (), ()]
    table = tmp_path / "log.csv"
    table.write_text("id,prompt\n1,one\n2,two\n")
    assert [prompt.text for prompt in read_prompts(table)] == ["one", "two"]


def test_records_without_a_prompt_are_refused_with_their_keys(tmp_path: Path) -> None:
    path = tmp_path / "log.jsonl"
    path.write_text('{"body": "x", "id": 1}\n')
    with pytest.raises(PromptFileError, match=r"log.jsonl:1: .* keys are 'body', 'id': expected"):
        read_prompts(path)
    damaged = tmp_path / "cut.json"
    damaged.write_text('[{"prompt": "x"}, {"pro')
    with pytest.raises(PromptFileError, match="not JSON"):
        read_prompts(damaged)


SAID = [("system", "a"), ("user", "b"), ("assistant", "c"), ("tool", "d"), ("assistant", "e")]
TURNS = tuple(Turn(role, text) for role, text in SAID)


def test_each_answer_of_a_conversation_is_asked_for_after_all_before_it(tmp_path: Path) -> None:
    messages = [{"role": turn.role, "content": turn.text} for turn in TURNS]
    path = tmp_path / "log.jsonl"
    unanswered = [*messages, {"role": "user", "content": "f"}]
    path.write_text(json.dumps({"messages": messages}) + "\n" + json.dumps(unanswered) + "\n")
    prompts = read_prompts(path)
    assert [(each.line, each.text, len(each.turns)) for each in prompts] == [
        *[(1, "b", 2), (1, "d", 4)],
        *[(2, "b", 2), (2, "d", 4), (2, "f", 6)],
    ]


class Templated:
    """A tokenizer whose ids are the letters of a conversation's roles and texts."""

    def __init__(self, *, is_chat: bool) -> None:
        self.chat_template = "x" if is_chat else None

    def apply_chat_template(self, messages: list[dict[str, str]], **_: object) -> str:
        return "".join(each["role"][0] + each["content"] for each in messages) + ">"

    def encode(self, text: str, **_: object) -> list[int]:
        return list(text.encode())


@pytest.mark.parametrize(
    ("use_template", "is_chat", "system", "expected"),
    [
        (True, True, None, "saubactd>"),
        (True, True, "z", "szubactd>"),
        (False, True, None, "a\n\nb\n\nc\n\nd"),
        (True, False, None, "a\n\nb\n\nc\n\nd"),
    ],
)
def test_a_prompt_with_turns_is_given_as_the_model_was_given_it(
    *, use_template: bool, is_chat: bool, system: str | None, expected: str
) -> None:
    tokenizer: Any = Templated(is_chat=is_chat)
    nothing: Any = None
    model = LanguageModel("m", nothing, tokenizer, nothing, (), use_template, system)
    prompt = Prompt("prompts", "d", turns=TURNS[:-1])
    assert bytes(prompt.encoded(model)).decode() == expected


def test_what_cannot_be_used_is_skipped_and_said(tmp_path: Path) -> None:
    path = tmp_path / "log.jsonl"
    image = {"type": "image_url", "image_url": {}}
    asked = {"role": "user", "content": ["one", image]}
    lines = [json.dumps({"messages": [asked]}), '{"messages": [{"ro', "plain words", '{"a": 1}']
    path.write_text("\n".join(lines))
    found = RecordingTally()
    assert [prompt.text for prompt in read_prompts(path, skipped=found)] == ["one"]
    assert found.skipped == {"not JSON": 2, "no conversation": 1}
    conversations, skipped = found.describe()
    assert conversations == (
        f"{path}: OpenAI messages, 1 prompt of 1 conversation; left out: 1 x image"
    )
    assert skipped.startswith(f"skipped: 2 not JSON (first: {path}:2; ")


def test_no_more_is_read_of_a_log_than_is_asked_for(tmp_path: Path) -> None:
    path = tmp_path / "log.jsonl"
    path.write_text("".join(f'{{"prompt": "{number}"}}\n' for number in range(999)))
    found = RecordingTally()
    prompts = read_prompts(path, limit=3, skipped=found)
    assert [prompt.text for prompt in prompts] == ["0", "1", "2"]
    (counted,) = found.conversations.values()
    assert counted.num_conversations == 3
