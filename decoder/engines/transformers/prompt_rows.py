"""Rows of a padded batch, each with its own prompt, processors and criteria, as if alone."""

import copy
import random
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Final, TypeVar

import numpy as np
import torch
from transformers import (
    EncoderNoRepeatNGramLogitsProcessor,
    EncoderRepetitionPenaltyLogitsProcessor,
    ExponentialDecayLengthPenalty,
    ForcedBOSTokenLogitsProcessor,
    ForcedEOSTokenLogitsProcessor,
    LogitsProcessor,
    LogitsProcessorList,
    MaxTimeCriteria,
    MinLengthLogitsProcessor,
    MinNewTokensLengthLogitsProcessor,
    PrefixConstrainedLogitsProcessor,
    PreTrainedTokenizerBase,
    RepetitionPenaltyLogitsProcessor,
    StoppingCriteria,
    StoppingCriteriaList,
    StopStringCriteria,
    SuppressTokensAtBeginLogitsProcessor,
    UnbatchedClassifierFreeGuidanceLogitsProcessor,
)

from decoder.engines.contract import differences
from decoder.errors import InvalidPromptError, UnsupportedGenerationError

_Shown = TypeVar("_Shown", bound=LogitsProcessor | StoppingCriteria)


@dataclass(frozen=True, slots=True, eq=False)
class PromptRow:
    """One row of the prompts of a call, without its padding.

    Attributes:
        number: number of the row, from 0.
        num_rows: number of rows in the call; each prompt counts `num_return_sequences` times.
        padded: int64[1, width], the row with its padding.
        num_padding: number of padding tokens before the prompt's own tokens.
    """

    number: int
    num_rows: int
    padded: torch.Tensor
    num_padding: int

    @property
    def input_ids(self) -> torch.Tensor:
        """Return int64[1, n], the row's tokens without padding."""
        return self.padded[:, self.num_padding :]

    @property
    def name(self) -> str:
        """The row's name in messages."""
        return "the prompt" if self.num_rows == 1 else f"row {self.number}"

    @property
    def is_all(self) -> bool:
        """Whether the row is the whole call and has no padding."""
        return self.num_rows == 1 and self.num_padding == 0

    def among(self, count: int) -> int:
        """Return the row's index among `count` rows, each of which represents equally many rows."""
        if count == 0 or self.num_rows % count:
            raise UnsupportedGenerationError(
                f"a logits processor holds {count} rows, but there are {self.num_rows}"
            )
        return self.number * count // self.num_rows


def prompt_rows(input_ids: torch.Tensor, mask: torch.Tensor | None) -> list[PromptRow]:
    """Return the rows of a left-padded batch.

    Args:
        input_ids: int64[rows, width], the prompts.
        mask: [rows, width], 1 for the prompts' tokens and 0 for padding; `None` for no padding.

    Raises:
        UnsupportedGenerationError: there is no row, or padding is not only on the left.
        InvalidPromptError: a row holds only padding.
    """
    if len(input_ids) == 0:
        raise UnsupportedGenerationError("the batch holds no prompt")
    padding = [0] * len(input_ids) if mask is None else _padding(input_ids, mask)
    rows = [
        PromptRow(number, len(input_ids), input_ids[number : number + 1], num_padding)
        for number, num_padding in enumerate(padding)
    ]
    for row in rows:
        if row.input_ids.shape[1] == 0:
            raise InvalidPromptError(f"{row.name} holds only padding: leave it out")
    return rows


def _padding(input_ids: torch.Tensor, mask: torch.Tensor) -> list[int]:
    """Return the number of padding tokens at the start of each row."""
    if mask.shape != input_ids.shape or not bool(((mask == 0) | (mask == 1)).all()):
        raise UnsupportedGenerationError(
            f"the attention mask must hold 0 or 1 for each of {tuple(input_ids.shape)} tokens"
        )
    shown = mask.bool()
    if bool((shown[:, :-1] & ~shown[:, 1:]).any()):
        number = int((shown[:, :-1] & ~shown[:, 1:]).any(dim=1).int().argmax())
        if not bool(shown[number, -1]):
            raise UnsupportedGenerationError(
                f"row {number} is padded on the right: pad on the left "
                "(padding_side='left' of the tokenizer)"
            )
        raise UnsupportedGenerationError(
            f"the attention mask hides tokens within row {number}: only padding on the left is "
            "supported; where no mask is passed, transformers hides tokens that equal pad_token_id"
        )
    counts: list[int] = (~shown).sum(dim=1).tolist()
    return counts


def joined(input_ids: torch.Tensor, new: Sequence[list[int]], pad: int | None) -> torch.Tensor:
    """Return int64[rows, width + n], prompts and outputs; shorter outputs are padded.

    Args:
        input_ids: int64 or int32[rows, width], the prompts.
        new: token ids of each row's output.
        pad: id of the padding token; not needed if all outputs are equally long.
    """
    longest = max(map(len, new))
    rows = [[*tokens, *[pad] * (longest - len(tokens))] for tokens in new]
    return torch.cat(
        [input_ids, torch.tensor(rows, dtype=torch.int64, device=input_ids.device)], dim=-1
    )


def own_processors(processors: Iterable[LogitsProcessor], row: PromptRow) -> LogitsProcessorList:
    """Return the processors for one row, which see only that row's tokens.

    Transformers' own processors are adjusted to the row. Other processors are copied, so that a
    stateful processor remembers only one row; see `own_copy`.

    Args:
        processors: processors of the call.
        row: the row.
    """
    if row.is_all:
        return LogitsProcessorList(processors)
    return LogitsProcessorList(
        _own_processor(each, row) for each in processors if _has_part(each, row)
    )


def own_criteria(criteria: StoppingCriteriaList, row: PromptRow) -> StoppingCriteriaList:
    """Return the stopping criteria for one row: copies, except of transformers' own."""
    if row.num_rows == 1:
        return criteria
    return StoppingCriteriaList(
        each if type(each) in _WITHOUT_MEMORY else own_copy(each) for each in criteria
    )


_WITHOUT_MEMORY: Final = frozenset({MaxTimeCriteria, StopStringCriteria})
_SHARED: Final = (
    torch.nn.Module,
    PreTrainedTokenizerBase,
    torch.Generator,
    np.random.Generator,
    np.random.RandomState,
    random.Random,
)


def own_copy(shown: _Shown) -> _Shown:
    """Return a deep copy of a processor or criterion.

    Models, tokenizers and random generators in it are shared; with copies of a generator, each row
    would get the same random numbers.

    Raises:
        UnsupportedGenerationError: the processor or criterion cannot be copied.
    """
    held = vars(shown).values() if hasattr(shown, "__dict__") else ()
    kept: dict[int, Any] = {id(value): value for value in held if isinstance(value, _SHARED)}
    try:
        return copy.deepcopy(shown, kept)
    except Exception as error:
        raise UnsupportedGenerationError(
            f"{type(shown).__name__} cannot be copied for each row of a batch ({error}): "
            "call generate for each row"
        ) from error


def _has_part(processor: LogitsProcessor, row: PromptRow) -> bool:
    """Return whether a processor can have an effect in a row.

    A first token is forced only after a prompt of one token; in transformers a padded prompt is
    never that short.
    """
    return not (row.num_padding and type(processor) is ForcedBOSTokenLogitsProcessor)


def _own_processor(processor: LogitsProcessor, row: PromptRow) -> LogitsProcessor:
    adjust = _ADJUSTED.get(type(processor))
    if adjust is None:
        return processor if row.num_rows == 1 else own_copy(processor)
    own = copy.copy(processor)
    adjust(own, row)
    return own


def changes_of_processors() -> list[str]:
    """Return how transformers' processors differ from what this module adjusts."""
    held: list[tuple[LogitsProcessor, str]] = [
        (ExponentialDecayLengthPenalty((1, 1.0), 0, 1), "regulation_start"),
        (ForcedEOSTokenLogitsProcessor(1, [0]), "max_length"),
        (MinLengthLogitsProcessor(1, [0]), "min_length"),
        (MinNewTokensLengthLogitsProcessor(1, 1, [0]), "prompt_length_to_skip"),
        (PrefixConstrainedLogitsProcessor(lambda *_: [0], 1), "_prefix_allowed_tokens_fn"),
        (RepetitionPenaltyLogitsProcessor(1.0), "prompt_ignore_length"),
        (SuppressTokensAtBeginLogitsProcessor([0], 0), "begin_index"),
    ]
    return [
        sentence
        for processor, name in held
        for sentence in differences(processor, attributes=[name])
    ]


def _count_padding(name: str) -> Callable[[Any, PromptRow], None]:
    """Return a function that adjusts a length for the row's missing padding.

    Args:
        name: name of the processor's attribute that holds the length.
    """

    def adjust(processor: Any, row: PromptRow) -> None:
        setattr(processor, name, getattr(processor, name) - row.num_padding)

    return adjust


def _ignore_own_length(processor: Any, row: PromptRow) -> None:
    """Adjust the ignored length, so that the same tokens of the row are ignored."""
    ignored = processor.prompt_ignore_length
    if isinstance(ignored, torch.Tensor):
        ignored = int(ignored[row.among(len(ignored))])
    if ignored is not None:
        processor.prompt_ignore_length = max(ignored - row.num_padding, 0)


def _take_own_prompt(processor: Any, row: PromptRow) -> None:
    given = processor.encoder_input_ids
    own = given[row.among(len(given))][None]
    processor.encoder_input_ids = row.input_ids if torch.equal(own, row.padded) else own


def _take_own_ngrams(processor: Any, row: PromptRow) -> None:
    """Use only the n-grams of the row's prompt, without those of its padding."""
    size, given = processor.ngram_size, processor.generated_ngrams
    own = [given[row.among(len(given))]]
    is_of_prompt = own == _ngrams(size, row.padded)
    processor.generated_ngrams = _ngrams(size, row.input_ids) if is_of_prompt else own
    processor.batch_size = 1


def _ngrams(size: int, ids: torch.Tensor) -> Any:
    made: Any = EncoderNoRepeatNGramLogitsProcessor(size, ids)  # type: ignore[arg-type]  # a LongTensor
    return made.generated_ngrams


def _tell_number(processor: Any, row: PromptRow) -> None:
    """Pass the row's number to the function, because the row's index in its batch is now 0."""
    function = processor._prefix_allowed_tokens_fn  # noqa: SLF001  no public name
    processor._prefix_allowed_tokens_fn = lambda _, tokens: function(row.number, tokens)  # noqa: SLF001


def _take_own_context(processor: Any, row: PromptRow) -> None:
    """Use the row's own negative prompt, and remember only this row."""
    context = dict(processor.unconditional_context)
    for name in ("input_ids", "attention_mask"):
        if context[name] is not None:
            at = row.among(len(context[name]))
            context[name] = context[name][at : at + 1]
    processor.unconditional_context = context


_ADJUSTED: Final[dict[type, Callable[[Any, PromptRow], None]]] = {
    EncoderNoRepeatNGramLogitsProcessor: _take_own_ngrams,
    EncoderRepetitionPenaltyLogitsProcessor: _take_own_prompt,
    ExponentialDecayLengthPenalty: _count_padding("regulation_start"),
    ForcedEOSTokenLogitsProcessor: _count_padding("max_length"),
    MinLengthLogitsProcessor: _count_padding("min_length"),
    MinNewTokensLengthLogitsProcessor: _count_padding("prompt_length_to_skip"),
    PrefixConstrainedLogitsProcessor: _tell_number,
    RepetitionPenaltyLogitsProcessor: _ignore_own_length,
    SuppressTokensAtBeginLogitsProcessor: _count_padding("begin_index"),
    UnbatchedClassifierFreeGuidanceLogitsProcessor: _take_own_context,
}
"""Functions that adjust copies of transformers' processors to a row, by the processor's class."""
