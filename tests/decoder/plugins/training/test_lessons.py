import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from decoder.errors import TeachingTextError
from decoder.model.pretrained import LanguageModel
from decoder.plugins.training.lessons import Lesson, from_outputs, held_out, read_lessons
from indexer.sources.recordings import RecordingTally
from tests.decoder.plugins.training.teaching import prompts_of


def read(
    path: Path, language_model: LanguageModel, records: list[Any], max_tokens: int = 100
) -> tuple[list[tuple[str, str]], RecordingTally]:
    """Write records, or lines, and return prompts and outputs of the lessons as texts."""
    lines = [each if isinstance(each, str) else json.dumps(each) for each in records]
    path.write_text("\n".join(lines) + "\n")
    tally = RecordingTally()
    decode: Any = language_model.tokenizer.decode
    lessons = read_lessons([path], language_model, tally, max_tokens)
    return [(decode(each.prompt), decode(each.output)) for each in lessons], tally


def turns(*texts: str) -> dict[str, Any]:
    roles = ("user", "assistant")
    return {
        "messages": [{"role": roles[n % 2], "content": text} for n, text in enumerate(texts)],
    }


def test_every_kind_of_record_teaches(tmp_path: Path, language_model: LanguageModel) -> None:
    records = [
        turns("one", "first", "two", "second"),
        turns("alone"),
        turns("a", "b", "c"),
        {"text": "a document"},
        {"turns": ["asked", "more"], "category": "sums"},
        {"messages": turns("said", "told")["messages"], "text": "the same, formatted"},
    ]
    found, tally = read(tmp_path / "texts.jsonl", language_model, records)
    assert found == [
        ("one", "first"),
        ("one\n\nfirst\n\ntwo", "second"),
        ("alone", ""),
        ("a", "b"),
        ("a\n\nb\n\nc", ""),
        ("a document", ""),
        ("asked", ""),
        ("said", "told"),
    ]
    assert not tally.num_dropped


def test_lines_of_text_are_prompts(tmp_path: Path, language_model: LanguageModel) -> None:
    found, _ = read(tmp_path / "lines.txt", language_model, ["one", "", "two", {"text": "three"}])
    assert found == [("one", ""), ("two", ""), ("three", "")]


def test_damaged_records_are_counted_with_their_place(
    tmp_path: Path, language_model: LanguageModel
) -> None:
    found, tally = read(
        tmp_path / "texts.jsonl", language_model, [turns("a", "b"), "{broken", {"other": 1}]
    )
    assert found == [("a", "b")]
    assert tally.num_dropped == 2
    told = tally.describe()[-1]
    assert "texts.jsonl" in told
    assert "no conversation" in told
    assert "expected keys are" in told


def test_prompts_keep_their_end_and_outputs_their_beginning(
    tmp_path: Path, language_model: LanguageModel
) -> None:
    found, _ = read(
        tmp_path / "texts.jsonl", language_model, [turns("abcdefgh", "ijklmnop")], max_tokens=3
    )
    assert found == [("fgh", "ijk")]


def test_a_missing_file_is_told(tmp_path: Path, language_model: LanguageModel) -> None:
    with pytest.raises(TeachingTextError, match="there is no such file"):
        list(read_lessons([tmp_path / "none"], language_model, RecordingTally(), 10))


def test_kept_outputs_are_the_models_own(language_model: LanguageModel) -> None:
    outputs = [np.array(each, np.int32) for each in ([5, 6, 7], [], [8])]
    found = list(from_outputs(outputs, language_model, 2))
    assert [each.output.tolist() for each in found] == [[5, 6], [8]]
    assert all(each.is_own and len(each.prompt) for each in found)
    assert found[0].key != found[1].key


def test_who_is_held_out_depends_on_the_prompts_alone() -> None:
    prompts = prompts_of([6] * 2000)
    lessons = [Lesson(prompt) for prompt in prompts]
    taught, judging = held_out(lessons, 0.1)
    assert 120 < len(judging) < 280
    assert len(taught) + len(judging) == 2000
    keys = {lesson.key for lesson in judging}
    answered = [Lesson(prompt, prompt[:2]) for prompt in reversed(prompts[:1500])]
    _, again = held_out(answered + lessons[:700], 0.1)
    assert {lesson.key for lesson in again} <= keys
    assert not {lesson.key for lesson in held_out(answered, 0.1)[0]} & keys


def test_later_questions_of_a_conversation_are_held_out_with_its_first(
    tmp_path: Path, language_model: LanguageModel
) -> None:
    path = tmp_path / "texts.jsonl"
    path.write_text(json.dumps(turns("one", "first", "two", "second", "three")))
    found = list(read_lessons([path], language_model, RecordingTally(), 100))
    assert len(found) == 3
    plain = Lesson(np.array(language_model.encode("one"), np.int32))
    assert {lesson.key for lesson in found} == {plain.key}
