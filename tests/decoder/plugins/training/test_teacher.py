from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from decoder.errors import TrainingError, UnsupportedModelError
from decoder.model.states import num_states
from decoder.model.target import Target
from decoder.plugins.training.head_start import recorded_states
from decoder.plugins.training.lessons import Lesson
from decoder.plugins.training.taught_store import Example
from decoder.plugins.training.teacher import BATCH, Teacher
from tests.decoder.decoding import MODELS, plainly, tiny_llama, tiny_mamba
from tests.decoder.plugins.training.teaching import (
    counting_llama,
    language_model_of,
    prompts_of,
    states_of,
    successors,
)
from tests.decoder.rounding import Rounding

pytestmark = pytest.mark.training

LENGTHS = [3, 11, 7, 30, 12]


def made(
    model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, stop_ids: tuple[int, ...] = ()
) -> Teacher:
    language_model = language_model_of(model, tokenizer, stop_ids)
    return Teacher(language_model, states_of(language_model))


def states_by_itself(model: PreTrainedModel, taught: Example) -> torch.Tensor:
    """Return the states of a target that reads one text alone, but for its last token."""
    numbers = recorded_states(num_states(model))
    target = Target(model, states=numbers)
    target.prefill(taught.tokens[:-1])
    return torch.cat([target.states[number] for number in numbers], dim=-1)


def assert_states_are_the_targets(model: PreTrainedModel, taught: list[Example]) -> None:
    for each in taught:
        expected = states_by_itself(model, each)
        apart = Rounding.of(model).tolerance(float(expected.abs().max()))
        torch.testing.assert_close(  # kept in bfloat16: rounded apart by one step at most
            each.states.float(), expected.bfloat16().float(), atol=apart, rtol=2**-7
        )


@pytest.mark.parametrize("kind", MODELS)
def test_answers_side_by_side_are_those_of_each_prompt_by_itself(
    kind: str, byte_tokenizer: PreTrainedTokenizerBase
) -> None:
    model = MODELS[kind](layers=3)
    teacher, prompts = made(model, byte_tokenizer), prompts_of(LENGTHS)
    taught = teacher.answer(prompts, 20)
    for each, prompt in zip(taught, prompts, strict=True):
        assert each.tokens[: each.num_prompt].tolist() == prompt.tolist()
        assert each.tokens[each.num_prompt :].tolist() == plainly(model, prompt.tolist(), 20)
        assert each.is_own
        assert each.was_asked
    assert_states_are_the_targets(model, taught)


@pytest.mark.parametrize("kind", MODELS)
def test_texts_that_are_read_have_the_targets_states(
    kind: str, byte_tokenizer: PreTrainedTokenizerBase
) -> None:
    model = MODELS[kind](layers=3)
    teacher = made(model, byte_tokenizer)
    texts = zip(prompts_of(LENGTHS), prompts_of([9, 1, 25, 4, 2], seed=1), strict=True)
    lessons = [Lesson(prompt, output, is_own=len(output) > 8) for prompt, output in texts]
    taught = teacher.read(lessons)
    for each, lesson in zip(taught, lessons, strict=True):
        assert each.tokens.tolist() == [*lesson.prompt, *lesson.output]
        assert each.num_prompt == len(lesson.prompt)
        assert (each.is_own, each.was_asked) == (lesson.is_own, False)
    assert_states_are_the_targets(model, taught)


def test_states_of_another_pass_are_not_kept_by_mistake(
    byte_tokenizer: PreTrainedTokenizerBase,
) -> None:
    """The comparison of states above finds it if one of them is of the place before."""
    model = tiny_llama(layers=3)
    teacher = made(model, byte_tokenizer)
    (taught,) = teacher.answer(prompts_of([6]), 8)
    shifted = Example(taught.tokens, 6, torch.roll(taught.states, 1, 0), is_own=True)
    with pytest.raises(AssertionError):
        assert_states_are_the_targets(model, [shifted])


def test_answers_end_with_their_stop_token_and_all_once_few_are_left(
    byte_tokenizer: PreTrainedTokenizerBase,
) -> None:
    model, chain = counting_llama(), [47]
    for _ in range(22):
        chain.append(int(successors()[chain[-1]]))
    prompts = [np.array(chain[:length], np.int32) for length in (5, 20, 11, 18, 15)]
    plain = [plainly(model, prompt.tolist(), 20) for prompt in prompts]
    stop = chain[22]
    taught = made(model, byte_tokenizer, (stop,)).answer(prompts, 20)
    ends = [row.index(stop) + 1 if stop in row else 20 for row in plain]
    *_, last_but_one, last = sorted(ends)  # one of five is fewer than 35%
    assert min(ends) < last_but_one < last
    for each, row, end in zip(taught, plain, ends, strict=True):
        assert each.tokens[each.num_prompt :].tolist() == row[: min(end, last_but_one)]
    assert_states_are_the_targets(model, taught)


@pytest.mark.parametrize("num_shared", [7, 70])
def test_what_prompts_share_is_recorded_of_each(
    num_shared: int, byte_tokenizer: PreTrainedTokenizerBase
) -> None:
    model, shared = tiny_llama(layers=3), prompts_of([num_shared], seed=3)[0]
    prompts = [np.concatenate([shared, each]) for each in prompts_of([4] * (BATCH + 5))]
    teacher = made(model, byte_tokenizer)
    assert_states_are_the_targets(model, teacher.answer(prompts, 3))
    assert_states_are_the_targets(model, teacher.read([Lesson(each) for each in prompts]))


def test_drawn_answers_repeat_with_their_seed(byte_tokenizer: PreTrainedTokenizerBase) -> None:
    teacher, prompts = made(tiny_llama(layers=3), byte_tokenizer), prompts_of(LENGTHS)

    def drawn(seed: int) -> list[list[int]]:
        return [each.tokens.tolist() for each in teacher.answer(prompts, 12, 1.0, seed)]

    assert drawn(1) == drawn(1)
    assert drawn(1) != drawn(2)


def test_draws_follow_the_targets_distribution(byte_tokenizer: PreTrainedTokenizerBase) -> None:
    model, (prompt,) = tiny_llama(layers=3), prompts_of([9])
    taught = made(model, byte_tokenizer).answer([prompt] * 600, 1, 2.0)
    counts = np.bincount([int(each.tokens[-1]) for each in taught], minlength=48)
    with torch.inference_mode():
        logits = model(torch.from_numpy(prompt.astype(np.int64))[None]).logits[0, -1]
    expected = torch.softmax(logits / 2.0, -1).numpy() * 600
    is_likely = expected >= 5
    assert is_likely.sum() > 1
    error = ((counts - expected)[is_likely] ** 2 / expected[is_likely]).sum()
    assert error < 3 * is_likely.sum()


def test_answers_end_at_the_models_limit(byte_tokenizer: PreTrainedTokenizerBase) -> None:
    taught = made(tiny_llama(layers=3), byte_tokenizer).answer(prompts_of([250, 100]), 20)
    assert [len(each.tokens) for each in taught] == [256, 120]


@pytest.mark.parametrize("asks", [True, False])
def test_states_that_are_no_numbers_are_refused(
    asks: bool,  # noqa: FBT001  a parameter of the test
    byte_tokenizer: PreTrainedTokenizerBase,
) -> None:
    model: Any = tiny_llama(layers=3)
    model.model.layers[1].mlp.down_proj.weight.data[3] = torch.nan
    teacher = made(model, byte_tokenizer)
    act: Callable[[], Any] = (
        (lambda: teacher.answer(prompts_of([5]), 4))
        if asks
        else (lambda: teacher.read([Lesson(prompts_of([5])[0])]))
    )
    with pytest.raises(TrainingError, match=r"tiny computes states that are not finite"):
        act()


def test_a_target_without_trees_cannot_teach(byte_tokenizer: PreTrainedTokenizerBase) -> None:
    with pytest.raises(UnsupportedModelError):
        Teacher(language_model_of(tiny_mamba(), byte_tokenizer), (0, 1))
