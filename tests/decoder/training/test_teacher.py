from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from decoder.errors import TrainingError, UnsupportedModelError
from decoder.model.target import Target
from decoder.training.lessons import Lesson
from decoder.training.teacher import Taught, Teacher
from tests.decoder.decoding import MODELS, VOCABULARY, plainly, tiny_llama, tiny_mamba
from tests.decoder.rounding import Rounding
from tests.decoder.training.teaching import language_model_of, prompts_of, states_of

LENGTHS = [3, 11, 7, 30, 12]


def made(
    model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, stop_ids: tuple[int, ...] = ()
) -> Teacher:
    language_model = language_model_of(model, tokenizer, stop_ids)
    return Teacher(language_model, states_of(language_model))


def states_by_itself(model: PreTrainedModel, teacher: Teacher, taught: Taught) -> torch.Tensor:
    """Return the states of a target that reads one text alone."""
    target = Target(model, states=teacher.states)
    target.prefill(taught.tokens[: len(taught.states)])
    return torch.cat([target.states[number] for number in teacher.states], dim=-1)


def assert_states_are_the_targets(
    model: PreTrainedModel, teacher: Teacher, taught: list[Taught]
) -> None:
    for each in taught:
        expected = states_by_itself(model, teacher, each)
        apart = Rounding.of(model).tolerance(float(expected.abs().max()))
        assert len(each.states) >= len(each.tokens) - 1
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
    assert_states_are_the_targets(model, teacher, taught)


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
        assert len(each.states) == len(each.tokens)
    assert_states_are_the_targets(model, teacher, taught)


def test_states_of_another_pass_are_not_kept_by_mistake(
    byte_tokenizer: PreTrainedTokenizerBase,
) -> None:
    """The comparison of states above finds it if one of them is of the place before."""
    model = tiny_llama(layers=3)
    teacher = made(model, byte_tokenizer)
    (taught,) = teacher.answer(prompts_of([6]), 8)
    shifted = Taught(taught.tokens, 6, torch.roll(taught.states, 1, 0), is_own=True)
    with pytest.raises(AssertionError):
        assert_states_are_the_targets(model, teacher, [shifted])


def test_an_answer_ends_with_its_stop_token(byte_tokenizer: PreTrainedTokenizerBase) -> None:
    model, prompts = tiny_llama(layers=3), prompts_of(LENGTHS)
    plain = [plainly(model, prompt.tolist(), 20) for prompt in prompts]
    stop = plain[1][2]
    teacher = made(model, byte_tokenizer, (stop,))
    taught = teacher.answer(prompts, 20)
    ends = [row.index(stop) + 1 if stop in row else 20 for row in plain]
    assert min(ends) < 20
    shortest = max(len(each.tokens) - each.num_prompt for each in taught)
    for each, row, end in zip(taught, plain, ends, strict=True):
        assert each.tokens[each.num_prompt :].tolist() == row[: min(end, shortest)]
    assert_states_are_the_targets(model, teacher, taught)


def test_a_batch_ends_once_few_are_left(
    byte_tokenizer: PreTrainedTokenizerBase,
) -> None:
    scripted = iter([[5, 5, 5, 5], [1, 5, 5, 5], [6, 1, 1, 5]])

    class Scripted(nn.Module):
        """Finds the tokens of the next line the likeliest."""

        def forward(self, hidden: torch.Tensor) -> torch.Tensor:
            wanted = torch.tensor(next(scripted))[:, None].expand(hidden.shape[:-1])
            return functional.one_hot(wanted, VOCABULARY).float()

    model: Any = tiny_llama(layers=3)
    model.lm_head = Scripted()
    teacher = made(model, byte_tokenizer, (1,))
    taught = teacher.answer(prompts_of([4, 5, 6, 7]), 50)
    outputs = [each.tokens[each.num_prompt :].tolist() for each in taught]
    assert outputs == [[5, 1], [5, 5, 1], [5, 5, 1], [5, 5, 5]]
    assert [len(each.tokens) - len(each.states) for each in taught] == [0, 1, 1, 1]


def test_drawn_answers_repeat_with_their_seed(byte_tokenizer: PreTrainedTokenizerBase) -> None:
    teacher, prompts = made(tiny_llama(layers=3), byte_tokenizer), prompts_of(LENGTHS)

    def drawn(seed: int) -> list[list[int]]:
        generator = torch.Generator().manual_seed(seed)
        return [each.tokens.tolist() for each in teacher.answer(prompts, 12, 1.0, generator)]

    assert drawn(1) == drawn(1)
    assert drawn(1) != drawn(2)


def test_draws_follow_the_targets_distribution(byte_tokenizer: PreTrainedTokenizerBase) -> None:
    model, (prompt,) = tiny_llama(layers=3), prompts_of([9])
    generator = torch.Generator().manual_seed(0)
    taught = made(model, byte_tokenizer).answer([prompt] * 4000, 1, 2.0, generator)
    counts = np.bincount([int(each.tokens[-1]) for each in taught], minlength=48)
    with torch.inference_mode():
        logits = model(torch.from_numpy(prompt.astype(np.int64))[None]).logits[0, -1]
    expected = torch.softmax(logits / 2.0, -1).numpy() * 4000
    is_likely = expected >= 5
    assert is_likely.sum() > 1
    error = ((counts - expected)[is_likely] ** 2 / expected[is_likely]).sum()
    assert error < 3 * is_likely.sum()


def test_answers_end_at_the_models_limit(byte_tokenizer: PreTrainedTokenizerBase) -> None:
    taught = made(tiny_llama(layers=3), byte_tokenizer).answer(prompts_of([250, 100]), 20)
    assert [len(each.tokens) for each in taught] == [256, 106]


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
    with pytest.raises(TrainingError, match=r"tiny computes states that are no finite numbers"):
        act()


def test_a_target_without_trees_cannot_teach(byte_tokenizer: PreTrainedTokenizerBase) -> None:
    with pytest.raises(UnsupportedModelError):
        Teacher(language_model_of(tiny_mamba(), byte_tokenizer), (0, 1))
