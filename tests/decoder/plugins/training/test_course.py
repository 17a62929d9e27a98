from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from transformers import PreTrainedTokenizerBase

from decoder.errors import HeadMismatchError, TeachingTextError, TrainingError
from decoder.model.pretrained import LanguageModel
from decoder.plugins.speculators.head_files import HeadTarget, load_head
from decoder.plugins.training import course
from decoder.plugins.training.course import Course
from decoder.plugins.training.head_start import started_head
from decoder.plugins.training.head_trainer import STAGES, HeadTrainer, Stage
from decoder.plugins.training.judging import agreement
from decoder.plugins.training.lessons import Lesson
from decoder.plugins.training.options import CourseOptions
from decoder.plugins.training.taught_store import TaughtStore
from decoder.plugins.training.teacher import Teacher
from tests.decoder.decoding import tiny_llama
from tests.decoder.plugins.training.teaching import (
    StepClock,
    counting_llama,
    language_model_of,
    prompts_of,
)

pytestmark = [pytest.mark.training, pytest.mark.usefixtures("clock")]

OPTIONS = CourseOptions(minutes=0.1, tokens=4000, max_new_tokens=24, draft_vocabulary=40)
SHORT = OPTIONS.model_copy(update={"minutes": 0.03})


@pytest.fixture
def language_model(byte_tokenizer: PreTrainedTokenizerBase) -> LanguageModel:
    return language_model_of(counting_llama(), byte_tokenizer)


def lessons_of(count: int) -> list[Lesson]:
    return [Lesson(prompt) for prompt in prompts_of([8] * count)]


def silent(_stage: str, _over: float, _told: str) -> None:
    pass


def interrupting(stage: str, times: int) -> Callable[[str, float, str], None]:
    """Return a watcher that stands for Ctrl-C in a stage."""
    left = times

    def watch(now: str, _over: float, _told: str) -> None:
        nonlocal left
        left -= now.startswith(stage)
        if not left:
            raise KeyboardInterrupt

    return watch


def noting(stages: list[str]) -> Callable[[str, float, str], None]:
    """Return a watcher that notes each stage that it is told of."""
    return lambda stage, _over, _told: stages.append(stage)


@pytest.fixture
def stores(monkeypatch: pytest.MonkeyPatch) -> dict[str, TaughtStore]:
    """What courses recorded, by the names of its folders: `taught` and `judging`."""
    made: dict[str, TaughtStore] = {}

    class Noted(TaughtStore):
        def __init__(self, directory: Path, stamp: Mapping[str, Any]) -> None:
            super().__init__(directory, stamp)
            made[directory.name] = self

    monkeypatch.setattr(course, "TaughtStore", Noted)
    return made


def files_of(folder: Path) -> dict[str, int]:
    return {path.name: path.stat().st_mtime_ns for path in folder.glob("taught-*")}


def test_an_interrupted_training_goes_on_and_its_head_loads(
    language_model: LanguageModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    lessons, output = lessons_of(160), tmp_path / "head"
    recorded = tmp_path / "head.training" / "taught"
    with pytest.raises(KeyboardInterrupt):
        Course(language_model, lessons, output, OPTIONS, interrupting("recording", 2)).run(["a"])
    first = files_of(recorded)
    assert len(first) == 2
    with pytest.raises(KeyboardInterrupt):
        Course(language_model, lessons, output, OPTIONS, interrupting("training", 3)).run(["a"])
    second = files_of(recorded)
    assert second.items() > first.items()
    assert not output.exists()
    elsewhere = tmp_path / "other"
    with pytest.raises(KeyboardInterrupt):  # recorded without an interruption
        Course(language_model, lessons, elsewhere, OPTIONS, interrupting("training", 1)).run(["a"])
    for path in recorded.glob("taught-*"):
        whole = load_file(tmp_path / "other.training" / "taught" / path.name)
        assert torch.equal(load_file(path)["tokens"], whole["tokens"])

    def never(*_: object) -> None:
        raise AssertionError("what was recorded is recorded again")

    monkeypatch.setattr(Teacher, "answer", never)
    outcome = Course(language_model, lessons, output, OPTIONS, silent).run(["a"])
    assert files_of(recorded) == second
    assert outcome.after.worth > outcome.before.worth
    target = HeadTarget.of(language_model.model, "tiny", language_model.vocabulary)
    loaded = load_head(output, target)
    assert loaded.origin.trained_on == ("a",)
    other = HeadTarget.of(tiny_llama(layers=3), "other", language_model.vocabulary)
    with pytest.raises(HeadMismatchError):
        load_head(output, other)
    again = Course(language_model, lessons, output, OPTIONS, interrupting("training", 1)).run(["a"])
    assert again.after.worth == outcome.after.worth
    told: list[str] = []
    longer = OPTIONS.model_copy(update={"minutes": 2 * OPTIONS.minutes})
    more = Course(language_model, lessons, output, longer, noting(told)).run(["a"])
    assert set(told) == {"training on its own outputs"}
    assert more.after.worth >= outcome.after.worth
    assert files_of(recorded) == second


def test_training_goes_on_with_the_part_that_was_under_way(
    language_model: LanguageModel, tmp_path: Path
) -> None:
    """However it ended: nothing is written in the end. With a damaged file it begins again."""
    lessons, output = lessons_of(160), tmp_path / "head"
    options = OPTIONS.model_copy(update={"minutes": 0.15})
    told: list[tuple[str, float]] = []

    def killing(stage: str, over: float, _told: str) -> None:
        if stage == f"training {STAGES[1].name}" and over > 0.2:
            raise RuntimeError("killed")

    def noting_how_far(stage: str, over: float, _told: str) -> None:
        told.append((stage, over))

    with pytest.raises(RuntimeError, match="killed"):
        Course(language_model, lessons, output, options, killing).run([])
    Course(language_model, lessons, output, options, noting_how_far).run([])
    stage, over = told[0]
    assert stage == f"training {STAGES[1].name}"
    assert over > 0.12
    told.clear()
    (tmp_path / "head.training" / "head.safetensors").write_bytes(b"half")
    Course(language_model, lessons, output, SHORT, noting_how_far).run([])
    assert f"training {STAGES[0].name}" in dict(told)


def test_starting_and_judging_are_a_part_of_the_minutes(
    language_model: LanguageModel,
    tmp_path: Path,
    clock: StepClock,
    stores: dict[str, TaughtStore],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A head that is finished stays so, however much quicker its next start is."""
    delay_s, taken = 0.6, list[tuple[str, float]]()

    def slowed(work: Callable[..., Any]) -> Callable[..., Any]:
        def run(*given: object) -> object:
            clock.go_on(delay_s)
            return work(*given)

        return run

    def train(_: HeadTrainer, stage: Stage, seconds: float, *_on_step: object) -> None:
        taken.append((stage.name, seconds))

    monkeypatch.setattr(course, "started_head", slowed(started_head))
    monkeypatch.setattr(course, "agreement", slowed(agreement))
    monkeypatch.setattr(Teacher, "answer", slowed(Teacher.answer))
    monkeypatch.setattr(HeadTrainer, "train", train)
    options = OPTIONS.model_copy(update={"minutes": 0.3})
    lessons, output = lessons_of(160), tmp_path / "head"
    Course(language_model, lessons, output, options, silent).run([])
    left = 18.0 - min(stores["taught"].seconds, 9.0)
    first_stage, second_stage = (stage.name for stage in STAGES)
    assert [name for name, _ in taken] == [first_stage, second_stage]
    # Answers to judge by, the start, and judgements: before, and behind each stage.
    assert left / 2 <= sum(seconds for _, seconds in taken) <= left - 5 * delay_s
    taken.clear()
    delay_s = 0.0
    Course(language_model, lessons, output, options, silent).run([])
    assert not taken
    Course(
        language_model, lessons, output, options.model_copy(update={"minutes": 0.31}), silent
    ).run([])
    assert [name for name, _ in taken] == [second_stage]


def test_no_held_out_prompt_is_taught(
    language_model: LanguageModel, tmp_path: Path, stores: dict[str, TaughtStore]
) -> None:
    outcome = Course(language_model, lessons_of(160), tmp_path / "head", SHORT, silent).run([])
    judging = {lesson.prompt.tobytes() for lesson in outcome.judging}
    assert judging
    store = stores["taught"]
    examples = [store[number] for number in range(len(store))]
    taught = {each.tokens[: each.num_prompt].tobytes() for each in examples}
    assert taught
    assert not taught & judging


def test_outputs_without_prompts_are_held_out_by_themselves(
    language_model: LanguageModel, tmp_path: Path
) -> None:
    lead = np.array([5], np.int32)
    outputs = [Lesson(lead, each, is_own=True) for each in prompts_of([40] * 80)]
    outcome = Course(language_model, outputs, tmp_path / "head", SHORT, silent).run([])
    assert 0 < len(outcome.judging) < 80
    assert outcome.num_own == outcome.num_taught == 40 * (80 - len(outcome.judging))


@pytest.mark.parametrize("repeated", [False, True])
def test_too_few_texts_are_refused(
    repeated: bool,  # noqa: FBT001  a parameter of the test
    language_model: LanguageModel,
    tmp_path: Path,
) -> None:
    lessons = lessons_of(1) * 500 if repeated else lessons_of(5)
    with pytest.raises(TeachingTextError, match=r"^[15] different prompts .* too few"):
        Course(language_model, lessons, tmp_path / "head", OPTIONS, silent)


def test_too_little_that_was_recorded_is_refused(
    language_model: LanguageModel, tmp_path: Path
) -> None:
    outputs = [Lesson(each, each[:2]) for each in prompts_of([5] * 40)]
    options = CourseOptions(minutes=0.1, max_new_tokens=1)
    with pytest.raises(TeachingTextError, match="tokens are too few"):
        Course(language_model, outputs, tmp_path / "head", options, silent).run([])


def test_a_target_whose_states_are_no_numbers_is_refused(
    byte_tokenizer: PreTrainedTokenizerBase, tmp_path: Path
) -> None:
    model = tiny_llama(layers=3)
    with torch.no_grad():
        next(model.parameters())[:] = torch.nan
    broken = language_model_of(model, byte_tokenizer)
    with pytest.raises(TrainingError, match="not finite"):
        Course(broken, lessons_of(40), tmp_path / "head", OPTIONS, silent).run([])
