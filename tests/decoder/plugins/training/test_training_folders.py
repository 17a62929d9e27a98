import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from transformers import PreTrainedTokenizerBase

from decoder.errors import HeadFileError, TeachingTextError
from decoder.plugins.speculators.head_folders import folder_lock
from decoder.plugins.training.course import Course
from decoder.plugins.training.lessons import Lesson
from decoder.plugins.training.options import CourseOptions
from decoder.plugins.training.taught_store import Example
from decoder.plugins.training.teacher import Teacher
from tests.decoder.decoding import tiny_llama
from tests.decoder.plugins.training.teaching import language_model_of, prompts_of

OPTIONS = CourseOptions(minutes=0.02, tokens=2500, max_new_tokens=24, draft_vocabulary=40)


def course(
    tokenizer: PreTrainedTokenizerBase, output: Path, lessons: list[Lesson] | None = None
) -> Course:
    given = lessons or [Lesson(prompt) for prompt in prompts_of([8] * 40)]
    model = language_model_of(tiny_llama(layers=3), tokenizer)
    return Course(model, given, output, OPTIONS, lambda *_: None)


def test_a_head_that_could_not_be_written_is_told_before_anything_is_recorded(
    tmp_path: Path, byte_tokenizer: PreTrainedTokenizerBase, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "head"
    file.write_text("")
    with pytest.raises(HeadFileError, match="is a file: name"):
        course(byte_tokenizer, file)
    with pytest.raises(HeadFileError, match=r"cannot be written.*name another"):
        course(byte_tokenizer, file / "head")

    def read_only(*_: Any, **__: Any) -> str:
        raise OSError(30, "Read-only file system")

    monkeypatch.setattr(tempfile, "mkdtemp", read_only)
    with pytest.raises(HeadFileError, match=r"Read-only file system.*name another"):
        course(byte_tokenizer, tmp_path / "other")


def test_a_folder_that_can_be_written_is_left_as_it_was(
    tmp_path: Path, byte_tokenizer: PreTrainedTokenizerBase
) -> None:
    (tmp_path / "head").mkdir()
    course(byte_tokenizer, tmp_path / "head")
    assert [path.name for path in tmp_path.iterdir()] == ["head"]
    assert not list((tmp_path / "head").iterdir())


def test_two_trainings_do_not_share_a_folder(
    tmp_path: Path, byte_tokenizer: PreTrainedTokenizerBase, monkeypatch: pytest.MonkeyPatch
) -> None:
    waiting = course(byte_tokenizer, tmp_path / "head")
    with folder_lock(tmp_path / "head.training"), pytest.raises(HeadFileError, match="in use"):
        waiting.run([])
    asked: list[int] = []

    def answer(*_: object) -> None:
        asked.append(1)
        raise KeyboardInterrupt

    monkeypatch.setattr(Teacher, "answer", answer)
    with pytest.raises(KeyboardInterrupt):
        waiting.run([])
    with pytest.raises(KeyboardInterrupt):  # the lock ended with the first
        waiting.run([])
    assert len(asked) == 2


def test_copies_are_taught_once(
    tmp_path: Path, byte_tokenizer: PreTrainedTokenizerBase, monkeypatch: pytest.MonkeyPatch
) -> None:
    read: list[bytes] = []

    def note(_: Teacher, lessons: list[Lesson]) -> list[Example]:
        read.extend(each.output.tobytes() for each in lessons)
        return []

    monkeypatch.setattr(Teacher, "read", note)
    monkeypatch.setattr(Teacher, "answer", lambda *_: list[Example]())
    lessons = [
        Lesson(prompt, np.full(4, number, np.int32))
        for number, prompt in enumerate(prompts_of([8] * 40))
    ]
    with pytest.raises(TeachingTextError, match="0 tokens are too few"):
        course(byte_tokenizer, tmp_path / "head", lessons * 50).run([])
    assert len(read) == len(set(read)) > 30
    with pytest.raises(TeachingTextError, match="1 different prompts"):
        course(byte_tokenizer, tmp_path / "head", lessons[:1] * 10_000)
