"""Checking a call of `model.generate`: options, stopping criteria and streamers under drafts."""

import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import cache
from typing import Any, Final

import torch
from transformers import (
    EosTokenCriteria,
    GenerationConfig,
    GenerationMixin,
    LogitsProcessorList,
    MaxLengthCriteria,
    PreTrainedModel,
    StoppingCriteriaList,
)
from transformers.cache_utils import Cache, CacheLayerMixin
from transformers.generation.configuration_utils import GenerationMode
from transformers.generation.utils import GenerateDecoderOnlyOutput

from decoder.engines.contract import check_contract, differences
from decoder.engines.engine_options import check_version
from decoder.engines.transformers.prompt_rows import (
    PromptRow,
    changes_of_processors,
    own_criteria,
    prompt_rows,
)
from decoder.errors import InvalidPromptError, UnsupportedGenerationError
from decoder.model.stamp import undisturbed
from decoder.sampling.constraint import Grammar, GrammarProcessor
from retriever.drafter import Prediction

_WARPERS: Final = ("Warper", "LogitNormalization")
"""Ends of the names of processors that transformers applies behind a caller's own."""


OnTokens = Callable[[list[int]], object]
"""Called with the tokens of each pass."""

RowPredictions = Sequence[Prediction] | Sequence[Sequence[Prediction]]
"""What outputs are expected to contain: of all rows of a call, or of each row."""

_GENERATE: Final = inspect.unwrap(GenerationMixin.generate).__code__


@contextmanager
def ended_on_errors(streamer: Any) -> Iterator[None]:
    """End a streamer where the block raises: who reads from it would wait for ever."""
    try:
        yield
    except BaseException:
        if streamer is not None:
            with suppress(Exception):  # it may be what raised
                streamer.end()
        raise


def streamer_of_call() -> Any:
    """Return the streamer that the innermost `generate` around the caller was given, or `None`.

    `generate` puts the prompt into the streamer and leaves the rest to its loop, but does not pass
    it to a callable (transformers 5.24, `_extract_generation_mode_kwargs`): a reader of a
    TextIteratorStreamer would wait forever. So it is taken from that call's frame.
    """
    frame = inspect.currentframe()
    while frame is not None and frame.f_code is not _GENERATE:
        frame = frame.f_back
    return None if frame is None else frame.f_locals.get("streamer")


def pad_token_of(config: GenerationConfig) -> int | None:
    """Return the token that `generate` pads with; a stop token where none is named."""
    named: Any = config.pad_token_id
    token = getattr(config, "_pad_token_tensor", named)
    return None if token is None else int(token)


def with_constraint(
    processors: LogitsProcessorList, grammar: Grammar | None
) -> LogitsProcessorList:
    """Return processors with a grammar's, where `generate` puts a caller's own: before warpers."""
    if grammar is None:
        return processors
    names = [type(each).__name__ for each in processors]
    place = next((at for at, name in enumerate(names) if name.endswith(_WARPERS)), len(names))
    own = [*processors]
    own.insert(place, GrammarProcessor(grammar))
    return LogitsProcessorList(own)


def _hooks_before(model: PreTrainedModel) -> list[Any]:
    """Return the hooks that run before modules of a model."""
    return [hook for each in model.modules() for hook in each._forward_pre_hooks.values()]  # noqa: SLF001  no public name


@dataclass(frozen=True, slots=True, eq=False)
class Call:
    """What `model.generate` hands over.

    Attributes:
        model: whose `generate` it is.
        input_ids: integers [rows, n], the prompts, padded on the left.
        processors: of the logits.
        criteria: that stop sequences.
        config: how it decodes.
        streamer: is told each token; `None` for none.
        on_tokens: is told the tokens of each pass; likewise.
        model_kwargs: further arguments of the model.
    """

    model: PreTrainedModel
    input_ids: torch.Tensor
    processors: LogitsProcessorList
    criteria: StoppingCriteriaList
    config: GenerationConfig
    streamer: Any
    on_tokens: OnTokens | None
    model_kwargs: dict[str, Any]

    @property
    def caches(self) -> list[Cache]:
        """What the model is to write to; seldom more than one."""
        return [each for each in self.model_kwargs.values() if isinstance(each, Cache)]

    @property
    def continues(self) -> bool:
        """Whether a cache holds tokens already."""
        return any(map(holds_tokens, self.caches))

    @property
    def has_all_tokens(self) -> bool:
        """Whether `input_ids` holds also what a cache holds, as the length of the mask says."""
        mask, width = self.model_kwargs.get("attention_mask"), self.input_ids.shape[1]
        length: int = getattr(self.config, "_mask_length", width) if mask is None else mask.shape[1]
        return length == width

    @property
    def adaptation(self) -> str:
        """What PEFT does to this call that only whole batches of prompts can be read with."""
        replaced: Any = vars(self.model).get("prepare_inputs_for_generation")
        kind: Any = type(self.model)
        own = kind.prepare_inputs_for_generation
        if replaced is not None and getattr(replaced, "__func__", None) is not own:
            return "prepare_inputs_for_generation was replaced, as PEFT does for virtual tokens"
        hooks = undisturbed(lambda: _hooks_before(self.model))  # other threads may change them
        if any("adapter_names" in getattr(hook, "keywords", ()) for hook in hooks):
            return "adapter_names gives each row an adapter of its own"
        return ""

    def plainly(self) -> torch.Tensor | GenerateDecoderOnlyOutput:
        """Decode as the model's own `generate` does where it is given no `custom_generate`."""
        own: Any = GenerationMixin._sample  # noqa: SLF001  no public name
        output: torch.Tensor | GenerateDecoderOnlyOutput = own(
            self.model,
            self.input_ids,
            logits_processor=self.processors,
            stopping_criteria=self.criteria,
            generation_config=self.config,
            streamer=self._listener(),
            **self.model_kwargs,
        )
        return output

    def _listener(self) -> Any:
        """Return what `generate` is to tell of each token; `None` for nobody."""
        if self.on_tokens is None:
            return self.streamer
        return _Teller(self.streamer, self.on_tokens)


class _Teller:
    """A streamer that calls a function with each token, besides another streamer."""

    def __init__(self, streamer: Any, on_tokens: OnTokens) -> None:
        self._streamer, self._on_tokens = streamer, on_tokens

    def put(self, tokens: torch.Tensor) -> None:
        """Tell the next token, int64[1]."""
        if self._streamer is not None:
            self._streamer.put(tokens)
        self._on_tokens(tokens.tolist())

    def end(self) -> None:
        """Tell that the output is complete."""
        if self._streamer is not None:
            self._streamer.end()


class Ending:
    """Stopping criteria as a decoder takes them.

    Lengths and stop tokens, which nearly every call has, become those of the decoder; only
    others are asked after every token.

    Args:
        criteria: of one call; one of them states a length, as `model.generate` sees to.
        width: tokens of each prompt, its padding included.

    Attributes:
        max_new_tokens: most tokens to generate for each prompt.
        stop_ids: tokens that end a sequence.
        others: the other criteria.
    """

    def __init__(self, criteria: StoppingCriteriaList, width: int) -> None:
        lengths = [c.max_length for c in criteria if type(c) is MaxLengthCriteria]
        stops = [c.eos_token_id for c in criteria if type(c) is EosTokenCriteria]
        known = {MaxLengthCriteria, EosTokenCriteria}
        self.others = StoppingCriteriaList(c for c in criteria if type(c) not in known)
        self.max_new_tokens = min(lengths) - width
        self.stop_ids: set[int] = {token for ids in stops for token in ids.tolist()}

    @property
    def is_at_any_length(self) -> bool:
        """Whether something may end a sequence before its limit."""
        return bool(self.stop_ids or self.others)

    def criteria(self, row: PromptRow) -> StoppingCriteriaList | None:
        """Return the other criteria for a row, if there are any."""
        if not self.others:
            return None
        return own_criteria(self.others, row)


class Listeners:
    """What `model.generate` calls between two tokens, called between the same two: a `StopRule`.

    Any of it may change the model: `Decoder` looks after each token.

    Args:
        input_ids: int64[1, n], the prompt.
        criteria: they see each token once, so they may have a memory; `None` for none.
        streamer: transformers' `BaseStreamer`, or what has its methods; it has the prompt already.
            `None` for none.
        scores: what criteria are shown of each token so far; `None` where nobody asks for it.
    """

    def __init__(
        self,
        input_ids: torch.Tensor,
        criteria: StoppingCriteriaList | None,
        streamer: Any,
        scores: Sequence[torch.Tensor] | None = None,
    ) -> None:
        self._ids = input_ids
        self._criteria = criteria
        self._streamer = streamer
        self._scores = scores
        self._is_met = False

    def on_token(self, token: int) -> bool:
        """Tell a token; return whether no criterion is met."""
        if self._streamer is not None:
            self._streamer.put(torch.tensor([token]))
        if self._criteria is not None:
            self._ids = torch.cat([self._ids, self._ids.new_tensor([[token]])], dim=-1)
            shown: Any = None if self._scores is None else tuple(self._scores)
            met: torch.Tensor = self._criteria(self._ids, shown)
            self._is_met = bool(met.any())
        return not self._is_met

    def num_kept(self, tokens: Sequence[int]) -> int | None:
        """Keep all tokens that were told: the last of them meets a criterion, or none does."""
        return len(tokens) if self._is_met else None


_SERVED_MODES: Final = (GenerationMode.GREEDY_SEARCH, GenerationMode.SAMPLE)
_UNSERVED_OUTPUTS: Final = ("output_attentions", "output_hidden_states")
_QUANTIZED: Final = "quantized"
_HARMLESS: Final = ("use_cache", "logits_to_keep", "labels")
"""What passes state for themselves, and what `generate` never hands to the model."""
TESTED: Final = ">=5.23,<5.25"


def check_transformers() -> None:
    """Refuse a transformers that calls us otherwise; warn once if its version was not tested.

    Raises:
        UnsupportedEngineError: something differs; the message says what.
    """
    check_version(TESTED, "transformers")
    check_contract(["transformers"], TESTED, _changes_of_generate(GenerationMixin.generate))


@cache
def _changes_of_generate(generate: Callable[..., Any]) -> list[str]:
    """Return what differs in this `generate`, of which `streamer_of_call` reads a variable, too."""
    length, stop = MaxLengthCriteria(max_length=1), EosTokenCriteria(eos_token_id=1)
    return [
        *differences(
            inspect.unwrap(generate),
            parameters=["custom_generate", "streamer"],
            called="generate",
        ),
        *differences(GenerationMode, attributes=[mode.name for mode in _SERVED_MODES]),
        *differences(GenerationConfig, attributes=["get_generation_mode"]),
        *differences(length, attributes=["max_length"]),
        *differences(stop, attributes=["eos_token_id"]),
        *changes_of_processors(),
    ]


def checked_rows(
    input_ids: torch.Tensor, config: GenerationConfig, model_kwargs: dict[str, Any]
) -> list[PromptRow]:
    """Return the rows of a call; refuse options that would be ignored in silence.

    Args:
        input_ids: integers [batch, n], the prompts.
        config: of the call.
        model_kwargs: what `model.generate` prepared for the model; what a cache among it holds is
            for the caller to look at.

    Raises:
        UnsupportedGenerationError: the call asks for what drafts do not serve.
        InvalidPromptError: a row holds padding alone.
    """
    _check_tokens(model_kwargs)
    _check_mode(config)
    if config.cache_implementation == _QUANTIZED:
        raise UnsupportedGenerationError(
            "a quantized cache rounds what the model has read, and drafts are verified without: "
            "leave cache_implementation out"
        )
    for name in _UNSERVED_OUTPUTS:
        if config.return_dict_in_generate and getattr(config, name, None):
            raise UnsupportedGenerationError(
                f"{name}: trees are verified without keeping them; leave it out, or "
                "custom_generate, which is what generate returns them without"
            )
    return _rows_of_inputs(input_ids, model_kwargs)


def check_listeners(num_rows: int, streamer: Any, on_tokens: OnTokens | None) -> None:
    """Refuse listeners where several sequences would talk at once.

    Raises:
        UnsupportedGenerationError: there are several, and somebody listens.
    """
    if num_rows > 1 and (streamer is not None or on_tokens is not None):
        raise UnsupportedGenerationError(
            f"a streamer and on_tokens are told of one sequence, and there are {num_rows}: "
            "leave them out"
        )


def predictions_by_row(predictions: RowPredictions, num_rows: int) -> list[Sequence[Prediction]]:
    """Return the predictions of each row.

    Raises:
        InvalidPromptError: there are lists of them, and not one for each row.
    """
    of_all = [each for each in predictions if isinstance(each, Prediction)]
    of_rows = [each for each in predictions if not isinstance(each, Prediction)]
    if not of_rows:
        return [of_all] * num_rows
    if of_all or len(of_rows) != num_rows:
        raise InvalidPromptError(
            f"predictions are a list for all rows, or a list for each of the {num_rows} rows "
            "(num_return_sequences counts, too)"
        )
    return of_rows


def _check_mode(config: GenerationConfig) -> None:
    """Refuse other ways of decoding."""
    mode = config.get_generation_mode()
    if mode not in _SERVED_MODES:
        raise UnsupportedGenerationError(
            f"drafts serve greedy decoding and sampling, not {mode.value}: leave its settings out"
        )


def _check_tokens(model_kwargs: dict[str, Any]) -> None:
    if model_kwargs.get("inputs_embeds") is not None:
        raise UnsupportedGenerationError(
            "drafts continue token ids: pass input_ids alone, without inputs_embeds"
        )


def _rows_of_inputs(input_ids: torch.Tensor, model_kwargs: dict[str, Any]) -> list[PromptRow]:
    """Return the rows; refuse what says more of the prompt than its tokens and their padding.

    Inputs are judged by what they hold: releases of transformers add some, and rename others.
    """
    inputs = {name: value for name, value in model_kwargs.items() if name not in _HARMLESS}
    rows = prompt_rows(input_ids, inputs.pop("attention_mask", None))
    for name, value in inputs.items():
        if not isinstance(value, Cache) and not _adds_nothing(name, value, rows):
            raise UnsupportedGenerationError(
                f"only input_ids are served, with positions 0, 1, 2, … and without token types, "
                f"not this {name}: leave it out"
            )
    return rows


def holds_tokens(cache: Cache) -> bool:
    """Return whether a cache has seen tokens, by keys and values or by recurrent state."""
    layers = getattr(cache, "layers", None)
    return layers is None or any(map(_layer_holds_tokens, layers))  # none: a cache of caches


def _layer_holds_tokens(layer: Any) -> bool:
    states = getattr(layer, "has_previous_state", {})
    has_state = any(states.values()) if isinstance(states, Mapping) else bool(states)
    return has_state or (isinstance(layer, CacheLayerMixin) and bool(layer.get_seq_length()))


def _adds_nothing(name: str, value: object, rows: Sequence[PromptRow]) -> bool:
    """Return whether a model's input says no more than the tokens of the rows do.

    Nothing is said by `None`, by what is empty, by a cache that has seen no tokens, by positions
    that count from 0, and by token types of 0. A flag may say anything.
    """
    if isinstance(value, Cache):
        return not holds_tokens(value)
    if isinstance(value, Mapping):
        return all(_adds_nothing(key, each, rows) for key, each in value.items())
    if isinstance(value, list | tuple):
        return all(_adds_nothing(name, each, rows) for each in value)
    if isinstance(value, torch.Tensor):
        return value.numel() == 0 or _is_known(name, value, rows)
    return value is None


def _is_known(name: str, value: torch.Tensor, rows: Sequence[PromptRow]) -> bool:
    """Return whether a tensor holds positions that count from 0, or token types of 0."""
    if value.is_floating_point() or value.dtype == torch.bool:
        return False
    if "position" in name:
        planes = value if value.dim() == 3 else [value]  # noqa: PLR2004  (some count time and place)
        return all(_are_counted(plane, row) for plane in planes for row in rows)
    return "type_ids" in name and value.dim() == 2 and not bool(value.any())  # noqa: PLR2004  rows, width


def _are_counted(positions: torch.Tensor, row: PromptRow) -> bool:
    """Return whether the positions of a row's tokens count from 0; those of padding are any.

    Args:
        positions: [rows, width], or [1, width] or [width] for all.
        row: of the batch.
    """
    given = positions[None] if positions.dim() == 1 else positions
    if given.shape not in {(1, row.padded.shape[1]), (row.num_rows, row.padded.shape[1])}:
        return False
    own = given[row.among(len(given)), row.num_padding :].long()
    return torch.equal(own, torch.arange(len(own), device=own.device))
