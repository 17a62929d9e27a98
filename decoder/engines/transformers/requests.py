"""Checks a call of `model.generate`, and adapts its stopping criteria and streamers to drafts."""

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
"""Suffixes of the class names of processors that transformers applies after the caller's own."""


OnTokens = Callable[[list[int]], object]
"""A function that is called with the tokens of each pass."""

RowPredictions = Sequence[Prediction] | Sequence[Sequence[Prediction]]
"""Texts that outputs are expected to contain: one list for all rows of a call, or a list for each
row."""

_GENERATE: Final = inspect.unwrap(GenerationMixin.generate).__code__


@contextmanager
def ended_on_errors(streamer: Any) -> Iterator[None]:
    """End a streamer if the block raises an error, so that its consumer does not wait forever."""
    try:
        yield
    except BaseException:
        if streamer is not None:
            with suppress(Exception):  # it may be the one that raised
                streamer.end()
        raise


def streamer_of_call() -> Any:
    """Return the streamer given to the innermost running `generate`, or `None`.

    `generate` puts the prompt into the streamer and leaves the rest to its loop, but does not pass
    the streamer to a callable (transformers 5.24, `_extract_generation_mode_kwargs`). The consumer
    of a TextIteratorStreamer would wait forever. So the streamer is read from the frame of
    `generate`.
    """
    frame = inspect.currentframe()
    while frame is not None and frame.f_code is not _GENERATE:
        frame = frame.f_back
    return None if frame is None else frame.f_locals.get("streamer")


def pad_token_of(config: GenerationConfig) -> int | None:
    """Return the id of the token that `generate` pads with; a stop token if none is named."""
    named: Any = config.pad_token_id
    token = getattr(config, "_pad_token_tensor", named)
    return None if token is None else int(token)


def with_constraint(
    processors: LogitsProcessorList, grammar: Grammar | None
) -> LogitsProcessorList:
    """Insert a grammar's processor before the warpers, where `generate` puts a caller's own."""
    if grammar is None:
        return processors
    names = [type(each).__name__ for each in processors]
    place = next((at for at, name in enumerate(names) if name.endswith(_WARPERS)), len(names))
    own = [*processors]
    own.insert(place, GrammarProcessor(grammar))
    return LogitsProcessorList(own)


def _hooks_before(model: PreTrainedModel) -> list[Any]:
    """Return the hooks that run before a model's modules."""
    return [hook for each in model.modules() for hook in each._forward_pre_hooks.values()]  # noqa: SLF001  no public name


@dataclass(frozen=True, slots=True, eq=False)
class Call:
    """The arguments that `model.generate` passes.

    Attributes:
        model: the model whose `generate` was called.
        input_ids: integers [rows, n], the prompts, padded on the left.
        processors: logits processors of the call.
        criteria: stopping criteria of the call.
        config: generation config of the call.
        streamer: streamer that gets each token; `None` for none.
        on_tokens: called with the tokens of each pass; `None` for none.
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
        """The caches to which the model writes; rarely more than one."""
        return [each for each in self.model_kwargs.values() if isinstance(each, Cache)]

    @property
    def continues(self) -> bool:
        """Whether a cache already holds tokens."""
        return any(map(holds_tokens, self.caches))

    @property
    def has_all_tokens(self) -> bool:
        """Whether `input_ids` includes the cached tokens, judged by the length of the mask."""
        mask, width = self.model_kwargs.get("attention_mask"), self.input_ids.shape[1]
        length: int = getattr(self.config, "_mask_length", width) if mask is None else mask.shape[1]
        return length == width

    @property
    def adaptation(self) -> str:
        """A change by PEFT for which whole batches must be read; empty if none."""
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
        """Decode as the model's own `generate` does, without `custom_generate`."""
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
        """Return the streamer for `generate`, or `None`."""
        if self.on_tokens is None:
            return self.streamer
        return _Teller(self.streamer, self.on_tokens)


class _Teller:
    """A streamer that calls a function with each token, and forwards the token to a streamer."""

    def __init__(self, streamer: Any, on_tokens: OnTokens) -> None:
        self._streamer, self._on_tokens = streamer, on_tokens

    def put(self, tokens: torch.Tensor) -> None:
        """Forward the next token, int64[1]."""
        if self._streamer is not None:
            self._streamer.put(tokens)
        self._on_tokens(tokens.tolist())

    def end(self) -> None:
        """Forward that the output is complete."""
        if self._streamer is not None:
            self._streamer.end()


class Ending:
    """The stopping criteria of a call, in the form that a decoder needs.

    The decoder itself applies lengths and stop tokens, which nearly every call has; only other
    criteria are evaluated after every token.

    Args:
        criteria: criteria of one call; `model.generate` ensures that one of them limits the length.
        width: number of tokens of each prompt, including padding.

    Attributes:
        max_new_tokens: most tokens to generate for each prompt.
        stop_ids: ids of the tokens that end a sequence.
        others: all other criteria.
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
        """Whether stop tokens or criteria may end a sequence before its limit."""
        return bool(self.stop_ids or self.others)

    def criteria(self, row: PromptRow) -> StoppingCriteriaList | None:
        """Return the other criteria for a row, if there are any."""
        if not self.others:
            return None
        return own_criteria(self.others, row)


class Listeners:
    """A `StopRule` that calls, after each token, what `model.generate` calls after it.

    Any of these calls may change the model: `Decoder` checks that after each token.

    Args:
        input_ids: int64[1, n], the prompt.
        criteria: stopping criteria, called once for each token, so that they may keep state; `None`
            for none.
        streamer: a transformers `BaseStreamer`, or an object with its methods; it already has the
            prompt. `None` for none.
        scores: scores of each token so far, for the criteria; `None` if not requested.
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
        """Forward a token; return whether no criterion is met."""
        if self._streamer is not None:
            self._streamer.put(torch.tensor([token]))
        if self._criteria is not None:
            self._ids = torch.cat([self._ids, self._ids.new_tensor([[token]])], dim=-1)
            shown: Any = None if self._scores is None else tuple(self._scores)
            met: torch.Tensor = self._criteria(self._ids, shown)
            self._is_met = bool(met.any())
        return not self._is_met

    def num_kept(self, tokens: Sequence[int]) -> int | None:
        """Return the number of tokens if the last token met a criterion; otherwise `None`."""
        return len(tokens) if self._is_met else None


_SERVED_MODES: Final = (GenerationMode.GREEDY_SEARCH, GenerationMode.SAMPLE)
_UNSERVED_OUTPUTS: Final = ("output_attentions", "output_hidden_states")
_QUANTIZED: Final = "quantized"
_HARMLESS: Final = ("use_cache", "logits_to_keep", "labels")
"""Inputs that each pass sets itself, and inputs that `generate` never passes to the model."""
TESTED: Final = ">=5.23,<5.25"


def check_transformers() -> None:
    """Refuse transformers if it differs from what is needed; warn once if its version is untested.

    Raises:
        UnsupportedEngineError: there is a difference; the message names it.
    """
    check_version(TESTED, "transformers")
    check_contract(["transformers"], TESTED, _changes_of_generate(GenerationMixin.generate))


@cache
def _changes_of_generate(generate: Callable[..., Any]) -> list[str]:
    """Return how `generate` differs from what is needed and from what `streamer_of_call` reads."""
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
    """Return the rows of a call; refuse options that drafts would silently ignore.

    Args:
        input_ids: integers [batch, n], the prompts.
        config: config of the call.
        model_kwargs: inputs that `model.generate` prepared for the model; the contents of caches
            among them are checked elsewhere.

    Raises:
        UnsupportedGenerationError: the call asks for something that drafts do not support.
        InvalidPromptError: a row holds only padding.
    """
    _check_tokens(model_kwargs)
    _check_mode(config)
    if config.cache_implementation == _QUANTIZED:
        raise UnsupportedGenerationError(
            "a quantized cache rounds keys and values, but drafts are verified without rounding: "
            "leave cache_implementation out"
        )
    for name in _UNSERVED_OUTPUTS:
        if config.return_dict_in_generate and getattr(config, name, None):
            raise UnsupportedGenerationError(
                f"{name} is not available with drafts: leave it out, or leave out "
                "custom_generate to get it from generate"
            )
    return _rows_of_inputs(input_ids, model_kwargs)


def check_listeners(num_rows: int, streamer: Any, on_tokens: OnTokens | None) -> None:
    """Refuse a streamer or `on_tokens` if there are several sequences.

    Raises:
        UnsupportedGenerationError: there are several sequences, and a streamer or `on_tokens`.
    """
    if num_rows > 1 and (streamer is not None or on_tokens is not None):
        raise UnsupportedGenerationError(
            f"a streamer and on_tokens take one sequence, but there are {num_rows}: leave them out"
        )


def predictions_by_row(predictions: RowPredictions, num_rows: int) -> list[Sequence[Prediction]]:
    """Return the predictions of each row.

    Raises:
        InvalidPromptError: there are lists, but not exactly one list for each row.
    """
    of_all = [each for each in predictions if isinstance(each, Prediction)]
    of_rows = [each for each in predictions if not isinstance(each, Prediction)]
    if not of_rows:
        return [of_all] * num_rows
    if of_all or len(of_rows) != num_rows:
        raise InvalidPromptError(
            f"predictions must be a list for all rows, or a list for each of the {num_rows} rows "
            "(counting num_return_sequences)"
        )
    return of_rows


def _check_mode(config: GenerationConfig) -> None:
    """Refuse unsupported generation modes."""
    mode = config.get_generation_mode()
    if mode not in _SERVED_MODES:
        raise UnsupportedGenerationError(
            f"drafts support greedy decoding and sampling, not {mode.value}: omit its settings"
        )


def _check_tokens(model_kwargs: dict[str, Any]) -> None:
    if model_kwargs.get("inputs_embeds") is not None:
        raise UnsupportedGenerationError(
            "drafts continue token ids: pass input_ids alone, without inputs_embeds"
        )


def _rows_of_inputs(input_ids: torch.Tensor, model_kwargs: dict[str, Any]) -> list[PromptRow]:
    """Return the rows; refuse inputs that add anything to the prompt's tokens and padding.

    Inputs are judged by their values, because new releases of transformers add and rename inputs.
    """
    inputs = {name: value for name, value in model_kwargs.items() if name not in _HARMLESS}
    rows = prompt_rows(input_ids, inputs.pop("attention_mask", None))
    for name, value in inputs.items():
        if not isinstance(value, Cache) and not _adds_nothing(name, value, rows):
            raise UnsupportedGenerationError(
                f"drafts support only input_ids with positions 0, 1, 2, … and no token types, "
                f"not this {name}: leave it out"
            )
    return rows


def holds_tokens(cache: Cache) -> bool:
    """Return whether a cache holds tokens, as keys and values or as recurrent state."""
    layers = getattr(cache, "layers", None)
    return layers is None or any(map(_layer_holds_tokens, layers))  # no layers: a cache of caches


def _layer_holds_tokens(layer: Any) -> bool:
    states = getattr(layer, "has_previous_state", {})
    has_state = any(states.values()) if isinstance(states, Mapping) else bool(states)
    return has_state or (isinstance(layer, CacheLayerMixin) and bool(layer.get_seq_length()))


def _adds_nothing(name: str, value: object, rows: Sequence[PromptRow]) -> bool:
    """Return whether a model's input adds nothing to the tokens of the rows.

    `None`, empty values, a cache without tokens, positions that count from 0, and token types of 0
    add nothing. Flags are refused, because they may mean anything.
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
    """Return whether a tensor holds positions that count from 0 or token types of 0."""
    if value.is_floating_point() or value.dtype == torch.bool:
        return False
    if "position" in name:
        planes = value if value.dim() == 3 else [value]  # noqa: PLR2004  (some count time and place)
        return all(_are_counted(plane, row) for plane in planes for row in rows)
    return "type_ids" in name and value.dim() == 2 and not bool(value.any())  # noqa: PLR2004  rows, width


def _are_counted(positions: torch.Tensor, row: PromptRow) -> bool:
    """Return whether a row's positions count from 0; positions of padding do not matter.

    Args:
        positions: integers [rows, width], or [1, width] or [width] for all rows.
        row: the row to check.
    """
    given = positions[None] if positions.dim() == 1 else positions
    if given.shape not in {(1, row.padded.shape[1]), (row.num_rows, row.padded.shape[1])}:
        return False
    own = given[row.among(len(given)), row.num_padding :].long()
    return torch.equal(own, torch.arange(len(own), device=own.device))
