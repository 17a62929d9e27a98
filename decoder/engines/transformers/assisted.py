"""Transformers' own assisted generation, with the candidates of any drafter."""

from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from typing import Any, Final

import numpy as np
import torch
from transformers import (
    GenerationConfig,
    GenerationMixin,
    LogitsProcessorList,
    PreTrainedModel,
    StoppingCriteria,
    StoppingCriteriaList,
)
from transformers.generation.candidate_generator import CandidateGenerator

from decoder.drafters.following import SequenceDrafter, follow
from decoder.engines.contract import check_contract, differences
from decoder.engines.engine_options import checked_vocabulary_size
from decoder.engines.transformers.requests import (
    TESTED,
    Listeners,
    caches_of,
    check_chains,
    check_transformers,
    streamer_of_call,
)
from decoder.errors import UnsupportedGenerationError
from decoder.model.ranks import refuse_shared
from retriever.drafter import Drafter, TokenIds
from retriever.follower import DraftLimits, Followers
from retriever.sequences import TokenSequence

DEFAULT_MAX_CANDIDATES = 10
"""As many as prompt lookup proposes in transformers' documentation."""

DEFAULT_BUDGET_NODES = 64
"""Nodes of the tree that a path is taken from: a path of 10 tokens and its main alternatives."""

DEFAULT_MIN_PROBABILITY = 0.05
"""Half of the candidates, and 99% of the tokens per step: see benchmarks/README.md."""


class DrafterCandidates(CandidateGenerator):
    """Candidates from the most probable path of each draft, for one sequence at a time.

    A sequence that does not continue the last one begins another session.

    Args:
        drafter: gives the drafts; a failure costs candidates, never tokens.
        limits: which tokens the model and the drafter know.
        max_candidates: most tokens of a path.
        min_probability: a path ends before a token that is accepted less probably than this.
        budget_nodes: most nodes of the tree that the path is chosen from.
        max_length: most tokens of a sequence, candidates included.
    """

    def __init__(  # noqa: PLR0913  all but two are options
        self,
        drafter: Drafter,
        limits: DraftLimits,
        *,
        max_candidates: int = DEFAULT_MAX_CANDIDATES,
        min_probability: float = DEFAULT_MIN_PROBABILITY,
        budget_nodes: int = DEFAULT_BUDGET_NODES,
        max_length: int | None = None,
    ) -> None:
        self._followers = Followers(drafter, limits)
        self._max_candidates = max_candidates
        self._min_probability = min_probability
        self._budget_nodes = budget_nodes
        self._max_length = max_length
        self._sequence: TokenSequence | None = None
        self._drafting: SequenceDrafter | None = None
        self._accepted = _tokens_of(torch.empty(0))

    def get_candidates(self, input_ids: torch.Tensor, **_: Any) -> tuple[Any, Any]:
        """Return int64[1, n + k], a sequence of int64[1, n] tokens and k candidates behind it.

        No logits: the candidates are certain, so comparing them with the target's own choices is
        exact under sampling, too.

        Raises:
            UnsupportedGenerationError: there are several sequences.
        """
        drafting = self._following(input_ids)
        room = self._max_candidates
        if self._max_length is not None:
            room = min(room, self._max_length - input_ids.shape[1] - 1)
        if room <= 0:
            return input_ids, None
        path = drafting.draft(self._budget_nodes).best_chain(room)
        chain = path.token_ids[path.probabilities >= self._min_probability].tolist()
        return torch.cat([input_ids, input_ids.new_tensor(chain)[None]], dim=-1), None

    def update_candidate_strategy(
        self,
        input_ids: torch.Tensor,
        scores: torch.Tensor,  # noqa: ARG002  the base class names it
        num_matches: int,  # noqa: ARG002  as above
    ) -> None:
        """Note the accepted sequence, int64[1, n]; the next call tells the drafter."""
        self._accepted = _tokens_of(input_ids[0])

    def close(self, length: int | None = None) -> None:
        """End the drafter's session, with the tokens that it has not seen yet.

        Args:
            length: of the whole sequence, where it ends within the tokens accepted last.
        """
        drafting, self._drafting = self._drafting, None
        if drafting is not None and self._sequence is not None:
            self._sequence.extend(self._accepted[len(self._sequence) : length])
            drafting.close()

    def _following(self, input_ids: torch.Tensor) -> SequenceDrafter:
        """Return the drafter of a sequence, up to date with its tokens."""
        if len(input_ids) != 1:
            raise UnsupportedGenerationError(
                f"candidates serve one sequence at a time, not {len(input_ids)}"
            )
        tokens = _tokens_of(input_ids[0])
        if self._drafting is None or self._sequence is None or not self._sequence.begins(tokens):
            self.close()
            self._sequence = TokenSequence(tokens)
            self._drafting = follow(self._followers, self._sequence)
        else:
            self._sequence.extend(tokens[len(self._sequence) :])
        self._accepted = tokens
        return self._drafting


def _tokens_of(ids: torch.Tensor) -> TokenIds:
    """Return int32[n] of int64[n], on the host."""
    return ids.cpu().numpy().astype(np.int32)


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
    min_probability: float = DEFAULT_MIN_PROBABILITY,
    **model_kwargs: Any,
) -> Any:
    """Decode with chains: `model.generate(..., custom_generate=assisted_generate, drafter=...)`.

    The loop is transformers' own assisted generation with a drafter's candidates. It is for
    outputs that only that loop returns, such as scores and hidden states. Tokens that it accepts
    behind the first one that meets a stopping criterion are cut, as plain generation has none.

    Raises:
        UnsupportedGenerationError: no drafter is given, or the call asks for what
            chains do not serve.
        UnsupportedModelError: the model's weights are divided over processes.
        VocabularyMismatchError: the drafter is for another tokenizer.
    """
    if drafter is None:
        raise UnsupportedGenerationError(
            "assisted_generate needs a drafter: model.generate(..., drafter=...)"
        )
    check_transformers()
    check_contract(["transformers"], TESTED, _changes_of_assisted_generation(CandidateGenerator))
    refuse_shared(model, "assisted_generate takes no")
    check_chains(model, input_ids, logits_processor, generation_config, model_kwargs)
    candidates = DrafterCandidates(
        drafter,
        _limits(model, drafter),
        max_candidates=max_candidates,
        min_probability=min_probability,
        max_length=generation_config.max_length,
    )
    streamer = streamer_of_call()
    watch = _TokenByToken(Listeners(input_ids, stopping_criteria, streamer), input_ids.shape[1])
    with _candidates_from(model, candidates, watch):
        output = GenerationMixin._assisted_decoding(  # noqa: SLF001  no public name
            model,  # type: ignore[arg-type]  # every causal model has the mixin
            input_ids,  # type: ignore[arg-type]  # a LongTensor
            logits_processor=logits_processor,
            stopping_criteria=StoppingCriteriaList([watch]),
            generation_config=generation_config,
            **model_kwargs,
        )
    if streamer is not None:
        streamer.end()
    return _cut(output, watch.length, watch.length - input_ids.shape[1])


@cache
def _changes_of_assisted_generation(asked: type) -> list[str]:
    """Return what differs in transformers' own loop and in the class that it asks candidates of."""
    mixin = GenerationMixin
    return [
        *differences(
            asked,
            attributes=["get_candidates", "update_candidate_strategy"],
            implemented_by=DrafterCandidates,
        ),
        *differences(mixin, attributes=["_get_candidate_generator"]),
        *differences(
            getattr(mixin, "_assisted_decoding", None),
            parameters=["logits_processor", "stopping_criteria", "generation_config"],
            called="GenerationMixin._assisted_decoding",
        ),
    ]


class _TokenByToken(StoppingCriteria):
    """Applies criteria after every token, even if several are accepted at once.

    Args:
        listeners: told each token that the sequence keeps.
        length: tokens of the prompt.

    Attributes:
        length: tokens that the sequence keeps so far, the prompt's included.
    """

    def __init__(self, listeners: Listeners, length: int) -> None:
        self._listeners = listeners
        self.length = length

    def __call__(self, input_ids: torch.Tensor, scores: Any, **_: Any) -> Any:  # noqa: ARG002  the base class names it
        """Return bool[1], whether the sequence of int64[1, n] tokens ends."""
        goes_on = True
        for token in input_ids[0, self.length :].tolist():
            goes_on = self._listeners.on_token(token)
            self.length += 1
            if not goes_on:
                break
        return torch.tensor([not goes_on], device=input_ids.device)


@contextmanager
def _candidates_from(
    model: PreTrainedModel, candidates: DrafterCandidates, watch: _TokenByToken
) -> Iterator[None]:
    """Have a model's assisted generation ask a drafter during the block.

    Transformers chooses the generator in a method of the model, and has no option for a user's
    own; so the method is replaced on this model.
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
    """Cut an output to the end of the sequence.

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
        for cache in caches_of(output.values()):
            cache.crop(-surplus)
    return output
