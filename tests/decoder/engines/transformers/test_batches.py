"""Batches in `model.generate`: each row has the output that it has alone, and drafts of its own."""

from collections.abc import Callable, Sequence
from itertools import product
from threading import Lock
from typing import Any

import pytest
import torch
from transformers import (
    LogitsProcessor,
    LogitsProcessorList,
    PreTrainedModel,
    RepetitionPenaltyLogitsProcessor,
    StoppingCriteria,
    StoppingCriteriaList,
    TextStreamer,
)
from transformers.generation.streamers import BaseStreamer
from transformers.generation.utils import GenerateDecoderOnlyOutput

from decoder.budget.budget import MeasuredBudget
from decoder.budget.costs import CostSurface
from decoder.engines.transformers.custom_generate import Foredraft, foredraft_generate
from decoder.engines.transformers.prompt_rows import own_copy
from decoder.errors import InvalidPromptError, InvalidSettingsError, UnsupportedGenerationError
from tests.decoder.decoding import (
    MODELS,
    VOCABULARY,
    Guess,
    ScriptedDrafter,
    at_random,
    nothing,
    oracle,
    plainly,
    prompt_of,
    tiny_llama,
    tiny_mamba,
)
from tests.decoder.engines.transformers.batched import (
    NEW_TOKENS,
    PAD,
    PROMPTS,
    foredraft,
    generated,
    padded,
)
from tests.decoder.engines.transformers.generating import EndsAfter
from tests.decoder.sampling.remembering import Remembering
from tests.suite_parts import draws_all_cases

STOPS = [5, 11, 17, 23, 29, 31, 37, 41]
"""So many that rows end at different lengths."""


def joined_alone(
    model: PreTrainedModel, prompts: Sequence[list[int]], options: Callable[[int], dict[str, Any]]
) -> list[list[int]]:
    """Return what transformers generates for each prompt alone, as a batch would look."""
    outputs = []
    for number, prompt in enumerate(prompts):
        output = generated(model, [prompt], do_sample=False, **options(number))
        outputs.append(output[0, len(prompt) :].tolist())
    longest = max(map(len, outputs))
    rows: list[list[int]] = padded(prompts)["input_ids"].tolist()
    return [
        [*row, *new, *[PAD] * (longest - len(new))] for row, new in zip(rows, outputs, strict=True)
    ]


def truths(model: PreTrainedModel, prompts: Sequence[list[int]] = PROMPTS) -> list[list[int]]:
    return [[*prompt, *plainly(model, prompt, NEW_TOKENS)] for prompt in prompts]


def of_all(sequences: Sequence[list[int]], num_nodes: int = 12) -> Guess:
    """Draft what comes, of several sequences, among wrong branches."""
    guesses = [(tokens, oracle(tokens, num_nodes)) for tokens in sequences]

    def guess(tokens: list[int], budget: int) -> Any:
        for sequence, drafts in guesses:
            if sequence[: len(tokens)] == tokens:
                return drafts(tokens, budget)
        return at_random(num_nodes)(tokens, budget)

    return guess


ONLY_ALONE: list[dict[str, Any]] = [
    {"prefix_allowed_tokens_fn": lambda _, ids: range(len(ids) % 2, VOCABULARY, 2)},
    {"encoder_no_repeat_ngram_size": 2, "encoder_repetition_penalty": 1.4},
]
"""Options that see padding in transformers' own batches."""


OF_EVERY_MODEL: list[dict[str, Any]] = [{}, {"eos_token_id": STOPS}, {"guidance_scale": 1.7}]
"""Options under which the model itself is read in another way, or for another length."""

OF_LOGITS: list[dict[str, Any]] = [
    {"repetition_penalty": 1.3, "no_repeat_ngram_size": 3, "bad_words_ids": [[9]]},
    {"min_new_tokens": 6, "eos_token_id": STOPS, "begin_suppress_tokens": [11, 12]},
    {"sequence_bias": [[[5], 3.0]], "forced_eos_token_id": 9},
    {"exponential_decay_length_penalty": (2, 1.5), "eos_token_id": STOPS},
    *ONLY_ALONE,
]
"""Options that change logits, whichever model they are of."""

MADE = [*MODELS.values(), tiny_mamba]


@pytest.mark.seeds
@pytest.mark.parametrize(
    ("make", "options"),
    [
        *product(MADE, OF_EVERY_MODEL),
        *product(MADE if draws_all_cases() else [tiny_llama], OF_LOGITS),
    ],
)
def test_each_row_has_the_output_that_it_has_alone(
    make: Callable[[], PreTrainedModel], options: dict[str, Any]
) -> None:
    model = make()
    expected = joined_alone(model, PROMPTS, lambda _: options)
    if options not in ONLY_ALONE:
        assert generated(model, PROMPTS, do_sample=False, **options).tolist() == expected
    width = max(map(len, PROMPTS))
    sequences = [[*prompt, *row[width:]] for prompt, row in zip(PROMPTS, expected, strict=True)]
    drafter = ScriptedDrafter(of_all(sequences))
    plugin = foredraft(model, drafter)
    output = generated(model, PROMPTS, do_sample=False, custom_generate=plugin, **options)
    assert output.tolist() == expected
    assert output.dtype == torch.int64
    assert not drafter.open_sessions
    if make is not tiny_mamba:  # its own `generate` decodes it
        assert len(drafter.closed) == len(PROMPTS)
        assert plugin.statistics.num_passes < plugin.statistics.num_tokens


@pytest.mark.parametrize("parallel", [1, 2, 8])
def test_some_rows_wait_for_others(parallel: int) -> None:
    model = tiny_llama()
    prompts = [prompt_of(1 + number % 5, seed=number) for number in range(9)]
    sequences = truths(model, prompts)
    plugin = foredraft(model, ScriptedDrafter(of_all(sequences)), parallel=parallel)
    output = generated(model, prompts, custom_generate=plugin, return_dict_in_generate=True)
    assert isinstance(output, GenerateDecoderOnlyOutput)
    width = NEW_TOKENS + max(map(len, prompts))
    expected = [[PAD] * (width - len(each)) + each for each in sequences]
    assert output.sequences.tolist() == expected
    assert plugin.statistics.num_tokens == len(prompts) * NEW_TOKENS


def test_lengths_count_padding_as_in_transformers() -> None:
    model = tiny_llama()
    options = {"max_length": 22, "min_length": 17, "eos_token_id": STOPS}
    expected = generated(model, PROMPTS, do_sample=False, **options)
    plugin = foredraft(model, ScriptedDrafter(at_random()))
    output = generated(model, PROMPTS, do_sample=False, custom_generate=plugin, **options)
    assert output.tolist() == expected.tolist()
    assert output.shape[1] <= 22
    fewer = {**options, "min_length": 0}
    assert generated(model, PROMPTS, do_sample=False, **fewer).tolist() != expected.tolist()


def test_a_single_prompt_may_be_padded() -> None:
    model = tiny_llama()
    ids, mask = torch.tensor([[PAD, PAD, *PROMPTS[1]]]), torch.tensor([[0, 0, *[1] * 12]])
    generate: Any = model.generate
    options = {"attention_mask": mask, "max_new_tokens": NEW_TOKENS, "pad_token_id": PAD}
    told: list[int] = []
    plugin = foredraft(model, ScriptedDrafter(at_random()))
    output = generate(ids, custom_generate=plugin, on_tokens=told.extend, **options)
    assert told == plainly(model, PROMPTS[1], NEW_TOKENS)
    assert output.tolist() == [ids[0].tolist() + told] == generate(ids, **options).tolist()


def test_a_row_is_told_by_its_number() -> None:
    model = tiny_llama()

    def allowed(number: int, _ids: torch.Tensor) -> list[int]:
        return list(range(10 * number + 4, 10 * number + 14))

    options: dict[str, Any] = {"prefix_allowed_tokens_fn": allowed, "do_sample": False}
    expected = generated(model, PROMPTS, **options)
    plugin = foredraft(model, ScriptedDrafter(at_random()), parallel=2)
    output = generated(model, PROMPTS, custom_generate=plugin, **options)
    assert output.tolist() == expected.tolist()


def test_each_row_has_its_own_negative_prompt_and_ignored_length() -> None:
    model = tiny_llama()
    negative = torch.tensor([prompt_of(4, seed=number) for number in range(len(PROMPTS))])
    ignored = torch.tensor([9, 2, 11, 8])  # of the padded rows
    padding = [12 - len(prompt) for prompt in PROMPTS]

    def of_row(number: int) -> dict[str, Any]:
        left = max(int(ignored[number]) - padding[number], 0)
        return {
            "guidance_scale": 2.0,
            "negative_prompt_ids": negative[number : number + 1],
            "logits_processor": LogitsProcessorList([RepetitionPenaltyLogitsProcessor(3.0, left)]),
        }

    penalty = RepetitionPenaltyLogitsProcessor(3.0, ignored)
    plugin = foredraft(model, ScriptedDrafter(at_random()))
    output = generated(
        model,
        PROMPTS,
        custom_generate=plugin,
        guidance_scale=2.0,
        negative_prompt_ids=negative,
        logits_processor=LogitsProcessorList([penalty]),
    )
    assert output.tolist() == joined_alone(model, PROMPTS, of_row)
    assert output.tolist() != joined_alone(model, PROMPTS, lambda _: {"guidance_scale": 2.0})


class EndsAtThird(StoppingCriteria):
    """Ends a sequence at the third of its tokens that can be divided by three."""

    def __init__(self) -> None:
        self.count = 0

    def __call__(self, input_ids: torch.Tensor, _scores: Any, **_: Any) -> Any:
        self.count += int(input_ids[0, -1]) % 3 == 0
        return torch.tensor([self.count >= 3])


def test_processors_and_criteria_with_a_memory_remember_one_row() -> None:
    model = tiny_llama()

    def options(_: int) -> dict[str, Any]:
        return {
            "logits_processor": LogitsProcessorList([Remembering()]),
            "stopping_criteria": StoppingCriteriaList([EndsAtThird()]),
        }

    expected = joined_alone(model, PROMPTS, options)
    assert any(row[-1] == PAD for row in expected)
    given = options(0)
    plugin = foredraft(model, ScriptedDrafter(at_random()), parallel=3)
    output = generated(model, PROMPTS, custom_generate=plugin, **given)
    assert output.tolist() == expected
    assert not given["logits_processor"][0].seen


def test_copies_share_models_and_random_numbers() -> None:
    class Noisy(LogitsProcessor):
        def __init__(self) -> None:
            self.model, self.source = torch.nn.Linear(2, 2), torch.Generator()
            self.seen: list[int] = []

        def __call__(self, _ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
            return scores + 20 * torch.rand(scores.shape, generator=self.source)

    noisy = Noisy()
    copied = own_copy(noisy)
    assert copied.model is noisy.model
    assert copied.source is noisy.source
    assert copied.seen is not noisy.seen
    model = tiny_llama()
    plugin = foredraft(model, ScriptedDrafter(nothing))
    output = generated(
        model,
        [PROMPTS[0]] * 3,
        custom_generate=plugin,
        logits_processor=LogitsProcessorList([noisy]),
    )
    assert len({tuple(row) for row in output.tolist()}) == 3


def test_rows_end_by_their_criteria_and_are_padded() -> None:
    model = tiny_llama()
    token = truths(model)[1][-6]
    options: dict[str, Any] = {"eos_token_id": VOCABULARY - 1, "do_sample": False}

    def criteria() -> StoppingCriteriaList:
        return StoppingCriteriaList([EndsAfter(token)])

    expected = generated(model, PROMPTS, stopping_criteria=criteria(), **options)
    plugin = foredraft(model, ScriptedDrafter(of_all(truths(model))))
    output = generated(
        model, PROMPTS, custom_generate=plugin, stopping_criteria=criteria(), **options
    )
    assert output.tolist() == expected.tolist()
    assert (output[:, -1] == PAD).any()


def test_figures_of_all_rows_are_added_up() -> None:
    model = tiny_llama()
    costs = CostSurface((0, 64), (1, 64), ((1.0, 1.0), (1.0, 1.0)))  # s, far above these passes'
    plugin = Foredraft(model, ScriptedDrafter(of_all(truths(model))), budget=MeasuredBudget(costs))
    generated(model, PROMPTS, do_sample=False, custom_generate=plugin)
    assert plugin.statistics.num_tokens == len(PROMPTS) * NEW_TOKENS
    assert plugin.statistics.total_s > 0
    assert plugin.speedup.plain_s > plugin.speedup.own_s
    assert plugin.speedup.num_passes == plugin.statistics.num_passes - len(PROMPTS)


@pytest.mark.parametrize(
    ("mask", "error", "message"),
    [
        ([[1, 1, 1], [1, 1, 0]], UnsupportedGenerationError, "row 1 is padded on the right"),
        ([[1, 0, 1], [1, 1, 1]], UnsupportedGenerationError, "hides tokens within row 0"),
        ([[1, 1, 1], [0, 0, 0]], InvalidPromptError, "row 1 holds only padding"),
        ([[1, 1, 2], [1, 1, 1]], UnsupportedGenerationError, "0 or 1"),
    ],
)
def test_padding_elsewhere_is_refused(mask: Any, error: type[Exception], message: str) -> None:
    model = tiny_llama()
    drafter = ScriptedDrafter(nothing)
    generate: Any = model.generate
    with pytest.raises(error, match=message):
        generate(
            torch.tensor([[4, 5, 6], [7, 8, 9]]),
            attention_mask=torch.tensor(mask),
            max_new_tokens=3,
            pad_token_id=PAD,
            custom_generate=foredraft(model, drafter),
        )
    assert not drafter.closed


class Heard(BaseStreamer):
    def put(self, value: torch.Tensor) -> None:
        """Nothing is to be done."""

    def end(self) -> None:
        """Nothing is to be done."""


class Locked(LogitsProcessor):
    def __init__(self) -> None:
        self.lock = Lock()

    def __call__(self, _ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        return scores


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"streamer": Heard()}, UnsupportedGenerationError, "one sequence, but there are 4"),
        ({"on_tokens": print}, UnsupportedGenerationError, "one sequence, but there are 4"),
        (
            {"logits_processor": LogitsProcessorList([Locked()])},
            UnsupportedGenerationError,
            "Locked cannot be copied",
        ),
        (
            {
                "pad_token_id": None,
                "stopping_criteria": StoppingCriteriaList([EndsAfter(VOCABULARY)]),
            },
            UnsupportedGenerationError,
            "pass pad_token_id",
        ),
    ],
)
def test_what_batches_are_not_served_with_is_refused(
    options: dict[str, Any], error: type[Exception], message: str
) -> None:
    model, drafter = tiny_llama(), ScriptedDrafter(nothing)
    with pytest.raises(error, match=message):
        generated(model, PROMPTS, custom_generate=foredraft(model, drafter), **options)
    assert not drafter.open_sessions
    assert not drafter.closed


def test_at_least_one_row_at_a_time() -> None:
    options = {"custom_generate": foredraft_generate, "drafter": ScriptedDrafter(nothing)}
    with pytest.raises(InvalidSettingsError, match="parallel must be 1 or more, not 0"):
        generated(tiny_llama(), PROMPTS, parallel=0, **options)


def test_text_streamers_refuse_batches_themselves(byte_tokenizer: Any) -> None:
    model = tiny_llama()
    streamer = TextStreamer(byte_tokenizer)
    with pytest.raises(ValueError, match="batch size 1"):
        generated(
            model,
            PROMPTS,
            streamer=streamer,
            custom_generate=foredraft(model, ScriptedDrafter(nothing)),
        )


def test_one_invalid_row_is_named_before_any_is_decoded() -> None:
    model = tiny_llama()
    drafter = ScriptedDrafter(nothing)
    prompts = [[4, 5], [6, VOCABULARY], [7, 8]]
    with pytest.raises(InvalidPromptError, match=r"row 1: .*vocabulary of 48"):
        generated(model, prompts, custom_generate=foredraft(model, drafter))
    assert not drafter.closed


class Raising(StoppingCriteria):
    """Raises at the eighth token of a prompt of seven."""

    def __call__(self, input_ids: torch.Tensor, _scores: Any, **_: Any) -> Any:
        if input_ids[0, :7].tolist() == PROMPTS[3] and input_ids.shape[1] == 15:
            raise RuntimeError("a criterion")
        return torch.tensor([False])


def test_a_criterion_that_raises_ends_all_and_the_next_call_works() -> None:
    model = tiny_llama()
    drafter = ScriptedDrafter(of_all(truths(model)))
    plugin = foredraft(model, drafter, parallel=3)
    with pytest.raises(RuntimeError, match="a criterion") as raised:
        generated(
            model,
            PROMPTS,
            custom_generate=plugin,
            stopping_criteria=StoppingCriteriaList([Raising()]),
        )
    assert raised.value.__notes__ == ["in row 3 of 4"]
    assert not drafter.open_sessions
    assert plugin.statistics.num_tokens > 0
    output = generated(model, PROMPTS, custom_generate=plugin)
    assert output.tolist() == joined_alone(model, PROMPTS, lambda _: {})
