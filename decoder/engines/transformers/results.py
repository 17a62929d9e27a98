"""Results of a call in addition to tokens: scores, logits, and a cache to continue from."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from transformers import GenerationConfig, LogitsProcessor, LogitsProcessorList
from transformers.cache_utils import Cache, DynamicCache, DynamicLayer, DynamicSlidingWindowLayer
from transformers.generation.utils import GenerateDecoderOnlyOutput

from decoder.engines.transformers.prompt_rows import PromptRow
from decoder.engines.transformers.requests import Call
from decoder.model.cache import LayerStates, Prefix
from decoder.model.user_model import taken_by


class Recorder(LogitsProcessor):
    """A logits processor that records scores and does not change them.

    Attributes:
        rows: a tensor float32[1, vocabulary] for each chosen token of an output, in order.
    """

    def __init__(self) -> None:
        self.rows: list[torch.Tensor] = []

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:  # noqa: ARG002  the base class names it
        """Record a copy, because later processors may overwrite the scores."""
        self.rows.extend(row[None] for row in scores.clone())
        return scores


@dataclass(frozen=True, slots=True)
class RowRecord:
    """The recorders of one row, before and after its processors.

    Attributes:
        logits: recorder of the model's logits; `None` if not requested.
        scores: recorder of the processed scores, from which tokens are chosen; `None` if not
            requested.
    """

    logits: Recorder | None
    scores: Recorder | None

    def around(self, processors: LogitsProcessorList) -> LogitsProcessorList:
        """Return a row's processors with the recorders before and after them."""
        recorded = [self.logits, *processors, self.scores]
        return LogitsProcessorList(each for each in recorded if each is not None)


@dataclass(frozen=True, slots=True, eq=False)
class Wanted:
    """What a call requests in addition to the tokens.

    Attributes:
        is_dict: whether to return a `GenerateDecoderOnlyOutput`.
        logits: whether to include the model's logits.
        scores: whether to include the processed scores.
        cache: the cache to fill with the sequences; `None` for none.
    """

    is_dict: bool
    logits: bool
    scores: bool
    cache: Cache | None

    @classmethod
    def of(cls, config: GenerationConfig, cache: Cache | None) -> "Wanted":
        """Return what a call requests.

        Args:
            config: config of the call.
            cache: the cache that `generate` created for the call or that the user passed.
        """
        is_dict = bool(config.return_dict_in_generate)
        is_used = is_dict or getattr(cache, "_is_user_defined", False)
        return cls(
            is_dict,
            is_dict and bool(config.output_logits),
            is_dict and bool(config.output_scores),
            cache if is_used else None,
        )

    def record(self) -> RowRecord:
        """Return recorders for a row."""
        return RowRecord(Recorder() if self.logits else None, Recorder() if self.scores else None)

    def result(
        self, sequences: torch.Tensor, new: Sequence[list[int]], records: Sequence[RowRecord]
    ) -> torch.Tensor | GenerateDecoderOnlyOutput:
        """Return what `generate` returns.

        Args:
            sequences: int64[rows, n], prompts and outputs.
            new: the output of each row.
            records: recorders of each row.
        """
        if not self.is_dict:
            return sequences
        lengths = [len(tokens) for tokens in new]
        logits = [each.logits for each in records]
        scores = [each.scores for each in records]
        of_logits: Any = _by_step(logits, lengths, sequences.device)
        of_scores: Any = _by_step(scores, lengths, sequences.device)
        given: Any = sequences  # typed as a LongTensor
        return GenerateDecoderOnlyOutput(
            sequences=given, scores=of_scores, logits=of_logits, past_key_values=self.cache
        )


def _by_step(
    recorders: Sequence[Recorder | None], lengths: Sequence[int], device: torch.device
) -> tuple[torch.Tensor, ...] | None:
    """Return float32[rows, vocabulary] for each step; zeros in rows that have already ended.

    In `generate` itself, ended rows continue and have the model's scores after padding.
    """
    kept = [each.rows for each in recorders if each is not None]
    if not kept:
        return None
    nothing = torch.zeros_like(kept[0][0])
    return tuple(
        torch.cat(
            [
                rows[step] if step < length else nothing
                for rows, length in zip(kept, lengths, strict=True)
            ]
        ).to(device)
        for step in range(max(lengths))
    )


def given_prefixes(call: Call, rows: Sequence[PromptRow]) -> list[Prefix | None] | None:
    """Return the cached prefix of each row's prompt, so that it is not read again.

    Args:
        call: the call, whose cache holds tokens of its `input_ids`.
        rows: rows of the call.

    Returns:
        A prefix for each row; `None` for a row if only padding is cached. `None` instead of the
        list if only the model itself can continue from the cache.
    """
    cache, *others = call.caches
    length, width = cache.get_seq_length(), call.input_ids.shape[1]
    if others or not 0 < length < width or not _is_growing(cache):
        return None
    states: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}
    for number, layer in enumerate(cache.layers):
        keys, values = getattr(layer, "keys", None), getattr(layer, "values", None)
        if keys is None or values is None or not getattr(layer, "is_initialized", False):
            continue
        if len(keys) != len(rows) or keys.dtype != call.model.dtype:
            return None
        states[number] = (_in_slots(keys, length), _in_slots(values, length))
    return [_prefix_of(row, states, length) for row in rows]


def _in_slots(states: torch.Tensor, length: int) -> torch.Tensor:
    """Return [rows, heads, length, size], the states at the end and zeros before them."""
    return torch.nn.functional.pad(states, (0, 0, length - states.shape[-2], 0))


def _prefix_of(row: PromptRow, states: LayerStates, length: int) -> Prefix | None:
    """Return one row's part of a batch's states, without the row's padding."""
    own = slice(row.num_padding, length)
    if length <= row.num_padding:
        return None
    at = slice(row.number, row.number + 1)
    tokens = row.padded[0, own].cpu().numpy().astype("int32")
    return Prefix(tokens, {n: (k[at, :, own], v[at, :, own]) for n, (k, v) in states.items()})


def _is_growing(cache: Cache) -> bool:
    """Return whether a cache is transformers' usual cache, which grows with its input."""
    kinds = (DynamicLayer, DynamicSlidingWindowLayer)
    return type(cache) is DynamicCache and all(type(layer) in kinds for layer in cache.layers)


@torch.no_grad()
def fill(
    cache: Cache,
    call: Call,
    sequences: torch.Tensor,
    rows: Sequence[PromptRow],
    kept: Sequence[Prefix | None],
) -> None:
    """Fill a cache as `generate` would have left it: with all columns except the last.

    Keys and values that the passes computed are copied. The model itself reads the rest: the
    padding after shorter outputs, and everything if the cache is of another kind.

    Args:
        cache: a cache that is empty, or holds the prefixes with which the rows began.
        call: the call to which the cache belongs.
        sequences: int64[rows, n], prompts and outputs.
        rows: rows of the call.
        kept: tokens, keys and values of each row; `None` if nothing can be copied.
    """
    held, width = cache.get_seq_length(), sequences.shape[1] - 1
    prefixes = [each for each in kept if each is not None]
    start = held
    if len(prefixes) == len(rows) and _is_growing(cache):
        known = zip(rows, prefixes, strict=True)
        start = min(width, *(row.num_padding + len(each.tokens) for row, each in known))
    if start > held:
        for number in prefixes[0].states:
            layers = [each.states[number] for each in prefixes]
            keys, values = (
                torch.cat(
                    [
                        _columns(states[which], row, held, start)
                        for states, row in zip(layers, rows, strict=True)
                    ]
                )
                for which in range(2)
            )
            cache.update(keys, values, number)
    if start < width:
        _read(call, sequences[:, :width], width - start)


def _columns(states: torch.Tensor, row: PromptRow, first: int, end: int) -> torch.Tensor:
    """Return [1, heads, end - first, size], a row's columns in a batch; zeros for padding.

    Args:
        states: [1, heads, n, size], keys or values of the row's own tokens.
        row: the row.
        first: first column.
        end: end of the columns, exclusive.
    """
    begin = max(first - row.num_padding, 0)
    own = states[:, :, begin : max(end - row.num_padding, 0)]
    return _in_slots(own, end - first)


def _read(call: Call, sequences: torch.Tensor, num_last: int) -> None:
    """Let the model itself read the last columns into its cache, as `generate` does."""
    model, given = call.model, call.model_kwargs.get("attention_mask")
    mask = torch.ones_like(sequences)
    if given is not None:
        mask[:, : given.shape[1]] = given
    options = {**call.model_kwargs, "attention_mask": None if given is None else mask}
    if "position_ids" in taken_by(model):
        options["position_ids"] = (mask.cumsum(-1) - 1).clamp(min=0)
    preparing: Any = model
    inputs = preparing.prepare_inputs_for_generation(
        sequences,
        next_sequence_length=num_last,
        is_first_iteration=num_last == sequences.shape[1],
        **options,
    )
    model(**inputs, return_dict=True)
