"""Transformers' own assisted generation, with the candidates of any drafter."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Final

import torch
from transformers import (
    GenerationConfig,
    GenerationMixin,
    LogitsProcessorList,
    PreTrainedModel,
    StoppingCriteria,
    StoppingCriteriaList,
)

from decoder.drafters.session import DraftLimits
from decoder.engines.transformers.candidates import DEFAULT_MAX_CANDIDATES, DrafterCandidates
from decoder.engines.transformers.criteria import CriteriaRule
from decoder.engines.transformers.requests import check_chains, check_transformers
from decoder.engines.transformers.streaming import Stream, streamer_of_call
from decoder.engines.vocabularies import checked_vocabulary_size
from decoder.errors import UnsupportedGenerationError
from retriever.drafter import Drafter

_OF_EACH_TOKEN: Final = ("scores", "logits", "attentions", "hidden_states")


def assisted_generate(  # noqa: PLR0913  as `model.generate` calls it
    model: PreTrainedModel,
    input_ids: torch.Tensor,
    logits_processor: LogitsProcessorList,
    stopping_criteria: StoppingCriteriaList,
    generation_config: GenerationConfig,
    *,
    drafter: Drafter | None = None,
    max_candidates: int = DEFAULT_MAX_CANDIDATES,
    **model_kwargs: Any,
) -> Any:
    """Decode with chains: `model.generate(..., custom_generate=assisted_generate, drafter=...)`.

    The loop is transformers' own assisted generation; only its candidates are a drafter's. For
    outputs that only that loop can return, such as scores and hidden states. What it accepts
    behind the first token with which a stopping criterion is met is cut, as it is no part of the
    output of plain generation.

    Raises:
        UnsupportedGenerationError: no drafter is given, or the call asks for what
            chains do not serve.
        VocabularyMismatchError: the drafter is for another tokenizer.
    """
    if drafter is None:
        raise UnsupportedGenerationError(
            "assisted_generate needs a drafter: model.generate(..., drafter=...)"
        )
    check_transformers()
    check_chains(input_ids, logits_processor, generation_config, model_kwargs)
    candidates = DrafterCandidates(
        drafter,
        _limits(model, drafter),
        max_candidates=max_candidates,
        max_length=generation_config.max_length,
    )
    stream = Stream(streamer_of_call())
    watch = _TokenByToken(stopping_criteria, input_ids, stream)
    with _candidates_from(model, candidates, watch):
        output = GenerationMixin._assisted_decoding(  # noqa: SLF001  no public name
            model,  # type: ignore[arg-type]  # every causal model has the mixin
            input_ids,  # type: ignore[arg-type]  # a LongTensor
            logits_processor=logits_processor,
            stopping_criteria=StoppingCriteriaList([watch]),
            generation_config=generation_config,
            **model_kwargs,
        )
    stream.end()
    return _cut(output, watch.length, watch.length - input_ids.shape[1])


class _TokenByToken(StoppingCriteria):
    """Asks criteria after every token, though several are accepted at once.

    Args:
        criteria: of the call.
        input_ids: int64[1, n], the prompt.
        stream: is told each token that the sequence keeps.

    Attributes:
        length: tokens that the sequence keeps so far, the prompt's included.
    """

    def __init__(
        self, criteria: StoppingCriteriaList, input_ids: torch.Tensor, stream: Stream
    ) -> None:
        self._rule = CriteriaRule(criteria, input_ids)
        self._stream = stream
        self.length = input_ids.shape[1]

    def __call__(self, input_ids: torch.Tensor, scores: Any, **_: Any) -> Any:  # noqa: ARG002  the base class names it
        """Return bool[1], whether the sequence of int64[1, n] tokens ends."""
        tokens = input_ids[0, self.length :].tolist()
        kept = self._rule.num_kept(tokens)
        self._stream.put(tokens[:kept])
        self.length += len(tokens[:kept])
        return torch.tensor([kept is not None], device=input_ids.device)


@contextmanager
def _candidates_from(
    model: PreTrainedModel, candidates: DrafterCandidates, watch: _TokenByToken
) -> Iterator[None]:
    """Have a model's assisted generation ask a drafter, for the block's time.

    Transformers chooses the generator in a method of the model, by options that no generator
    of a user's own is among; so this one model's method is shadowed.
    """
    vars(model)["_get_candidate_generator"] = lambda **_: candidates
    try:
        yield
    finally:
        del vars(model)["_get_candidate_generator"]
        candidates.close(watch.length)


def _limits(model: PreTrainedModel, drafter: Drafter) -> DraftLimits:
    size = int(model.get_input_embeddings().get_parameter("weight").shape[0])
    return DraftLimits(size, checked_vocabulary_size(drafter, size))


def _cut(output: Any, length: int, num_new: int) -> Any:
    """Leave out of an output what was accepted behind the end of the sequence.

    Args:
        output: int64[1, n], or what `return_dict_in_generate` asks for.
        length: tokens to keep, the prompt's included.
        num_new: those of them that are new.
    """
    if isinstance(output, torch.Tensor):
        return output[:, :length]
    surplus = output.sequences.shape[1] - length
    if surplus:
        output.sequences = output.sequences[:, :length]
        for name in _OF_EACH_TOKEN:
            if (rows := getattr(output, name)) is not None:
                setattr(output, name, rows[:num_new])
        if output.past_key_values is not None:
            output.past_key_values.crop(-surplus)
    return output
