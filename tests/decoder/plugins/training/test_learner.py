import io
import math
from collections.abc import Callable
from functools import partial
from threading import Condition, Timer
from typing import Any

import numpy as np
import pytest
import torch
from torch.nn import functional
from transformers import PreTrainedTokenizerBase

from decoder.model.pretrained import LanguageModel
from decoder.model.states import FINAL, num_states
from decoder.plugins.speculators.eagle import Eagle3Head
from decoder.plugins.training import head_trainer, learner as learning
from decoder.plugins.training.head_start import trained_states
from decoder.plugins.training.head_trainer import HeadTrainer, Stage, Teaching
from decoder.plugins.training.judging import HeadAgreement
from decoder.plugins.training.learner import HeadLearner, RecentExamples
from decoder.plugins.training.online import read_messages, write_message
from decoder.plugins.training.taught_store import Example
from decoder.plugins.training.teacher import Teacher
from tests.decoder.decoding import VOCABULARY
from tests.decoder.plugins.training.teaching import (
    StepClock,
    counting_llama,
    drawn_head,
    language_model_of,
    prompts_of,
    undecided_head,
)
from tests.decoder.rounding import Rounding

pytestmark = pytest.mark.training

COLUMNS = 40
SMALL_ROUNDS = {"new_tokens": 1024, "least_judging": 200}
"""A quarter of the tokens that are enough for a round of a learner in use."""


@pytest.fixture(scope="module")
def language_model(byte_tokenizer: PreTrainedTokenizerBase) -> LanguageModel:
    return language_model_of(counting_llama(), byte_tokenizer)


@pytest.fixture(scope="module")
def examples(language_model: LanguageModel) -> list[Example]:
    states = (*trained_states(num_states(language_model.model)), FINAL)
    answers = Teacher(language_model, states).answer(prompts_of([6] * 40), 40)
    return [Example(each.tokens, each.num_prompt, each.states) for each in answers]


def in_small_rounds(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let batches have a quarter of their size, too."""
    for module in (learning, head_trainer):
        monkeypatch.setattr(module, "BATCH_TOKENS", 1024)


def sent_target(language_model: LanguageModel) -> Teaching:
    output: Any = language_model.model.get_output_embeddings()  # type: ignore[no-untyped-call]  # not typed there
    embedding = language_model.model.get_input_embeddings().get_parameter("weight")
    embed = partial(functional.embedding, weight=embedding.detach())
    return Teaching(embed, output.weight.detach()[:COLUMNS])


def learner_of(
    language_model: LanguageModel, head: Eagle3Head, examples: list[Example], **options: Any
) -> HeadLearner:
    options = SMALL_ROUNDS | options
    made = HeadLearner(head, sent_target(language_model), max_bytes=1 << 24, **options)
    for example in examples:
        made.take(example)
    return made


def weights(head: Eagle3Head) -> dict[str, torch.Tensor]:
    return {name: value.clone() for name, value in head.state_dict().items()}


def assert_equal(found: dict[str, torch.Tensor], wanted: dict[str, torch.Tensor]) -> None:
    assert all(torch.equal(found[name], wanted[name]) for name in wanted)


def judged(monkeypatch: pytest.MonkeyPatch, *worths: float) -> None:
    """Let heads be found worth so much, in the order in which they are judged."""
    left = iter(worths)

    class Found(HeadAgreement):
        worth = property(lambda _: next(left))

    found = Found.__new__(Found)
    monkeypatch.setattr(learning, "agreement", lambda *_: found)


def test_the_sent_target_says_what_the_target_says(language_model: LanguageModel) -> None:
    sent, model = sent_target(language_model), Teaching.of(language_model, torch.arange(COLUMNS))
    last = torch.randn(3, 5, 32)
    base: Any = language_model.model.base_model
    rounding = Rounding(torch.float32, width=32, operations=2)
    rounding.check(sent.logits(base.norm(last)), model.logits(last))
    tokens = torch.randint(VOCABULARY, (2, 7))
    assert torch.equal(sent.embeddings(tokens), model.embeddings(tokens))


def test_a_head_learns_from_what_comes(
    language_model: LanguageModel, examples: list[Example], monkeypatch: pytest.MonkeyPatch
) -> None:
    in_small_rounds(monkeypatch)
    learner = learner_of(language_model, undecided_head(language_model, COLUMNS), examples)
    found = []
    for made in learner.rounds():
        found.append(made)
        if len(found) == 3:
            break
        for example in examples:
            learner.take(example)
    assert all(each.after >= each.before for each in found)
    assert found[-1].after > found[0].before + 0.3
    assert found[0].is_new


def test_a_head_that_predicts_less_is_rolled_back(
    language_model: LanguageModel, examples: list[Example], monkeypatch: pytest.MonkeyPatch
) -> None:
    in_small_rounds(monkeypatch)
    head = drawn_head(language_model, COLUMNS)
    before = weights(head)
    judged(monkeypatch, 1.0, 0.9)
    made = next(learner_of(language_model, head, examples).rounds())
    assert (made.before, made.after, made.is_new) == (1.0, 1.0, False)
    assert_equal(weights(head), before)


def test_the_head_as_given_comes_back_where_what_was_learned_is_worth_less(
    language_model: LanguageModel, examples: list[Example], monkeypatch: pytest.MonkeyPatch
) -> None:
    in_small_rounds(monkeypatch)
    given, learned = drawn_head(language_model, COLUMNS, 1), drawn_head(language_model, COLUMNS, 2)
    judged(monkeypatch, 1.0, 0.9, 1.2)
    learner = learner_of(language_model, learned, examples, first=weights(given))
    made = next(learner.rounds())
    assert made.is_new
    assert_equal(weights(learned), weights(given))


def test_a_step_that_is_no_number_is_undone(
    language_model: LanguageModel, examples: list[Example], monkeypatch: pytest.MonkeyPatch
) -> None:
    in_small_rounds(monkeypatch)
    head = drawn_head(language_model, COLUMNS)
    before = weights(head)
    broken = Example(examples[0].tokens, 0, torch.full_like(examples[0].states, torch.nan))
    learner = learner_of(language_model, head, examples)
    for number in range(5):
        learner.take(broken if number < 4 else examples[0])
    made = next(learner.rounds())
    assert all(bool(each.isfinite().all()) for each in weights(head).values())
    assert made.is_new or weights(head).keys() == before.keys()


def test_nothing_is_trained_before_enough_has_come_or_after_the_end(
    language_model: LanguageModel, examples: list[Example]
) -> None:
    head = drawn_head(language_model, COLUMNS)
    before = weights(head)
    told = [len(each.tokens) - each.num_prompt for each in examples]
    num_judging = sum(told[5::6])
    num_taught = sum(told) - num_judging
    for lacking in ({"new_tokens": num_taught + 1}, {"least_judging": num_judging + 1}):
        learner = learner_of(language_model, head, examples, **lacking)
        ending = Timer(0.05, learner.end)
        ending.start()
        assert list(learner.rounds()) == []
        ending.join()
        assert list(learner.rounds()) == []
    assert_equal(weights(head), before)  # a round that had begun would have changed it


def test_a_share_of_the_time_is_kept(
    language_model: LanguageModel, examples: list[Example], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Three times as long as each step and each judgement takes, which here the test says."""
    in_small_rounds(monkeypatch)
    step_s, judging_s = 1.0, 2.0
    clock, rests = StepClock(0.0), list[float]()
    found = HeadAgreement(np.full((4, 3), 0.5), np.full(4, 300))

    def train(_trainer: HeadTrainer, _stage: Stage, _s: float, on_step: Any) -> None:
        clock.go_on(step_s)
        while on_step(0.0, 1.0):
            clock.go_on(step_s)

    def judge(*_: object) -> HeadAgreement:
        clock.go_on(judging_s)
        return found

    wait_for = Condition.wait_for

    def rest(changed: Condition, is_so: Callable[[], bool], timeout: float | None = None) -> bool:
        if timeout is None:
            return wait_for(changed, is_so)
        rests.append(timeout)
        return False

    monkeypatch.setattr(learning, "time", clock)
    monkeypatch.setattr(HeadTrainer, "train", train)
    monkeypatch.setattr(learning, "agreement", judge)
    monkeypatch.setattr(Condition, "wait_for", rest)
    head = drawn_head(language_model, COLUMNS)
    next(learner_of(language_model, head, examples, share=0.25).rounds())
    taught = sum(len(each.tokens) for count, each in enumerate(examples, 1) if count % 6)
    num_steps = math.ceil(2 * taught / 1024)
    assert rests == [3 * step_s] * num_steps + [3 * judging_s] * 2  # two heads are judged


def test_the_oldest_sequences_are_dropped_beyond_the_bytes(examples: list[Example]) -> None:
    size = examples[0].states.numel() * 2
    held = RecentExamples(3 * size)
    for example in examples[:5]:
        held.add(example)
    copied = held.copy()
    held.add(examples[5])
    assert [copied[number] is examples[2 + number] for number in range(3)] == [True] * 3
    assert held[2] is examples[5]
    assert held.lengths().tolist() == [len(each.tokens) for each in examples[3:6]]
    tiny = RecentExamples(1)
    tiny.add(examples[0])
    assert len(tiny) == 1


def test_messages_come_as_they_were_sent_and_a_torn_one_ends_them() -> None:
    stream = io.BytesIO()
    sent = {"tokens": torch.arange(5), "states": torch.randn(2, 3).bfloat16()}
    for _ in range(2):
        write_message(stream, sent)
    whole = stream.getvalue()
    for size in (len(whole), len(whole) - 1):
        found = list(read_messages(io.BytesIO(whole[:size])))
        assert len(found) == (2 if size == len(whole) else 1)
        assert all(torch.equal(found[0][name], sent[name]) for name in sent)
