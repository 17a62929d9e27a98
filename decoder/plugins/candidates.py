"""Chains for assisted generation of transformers, from any drafter."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from transformers import (
    GenerationConfig,
    GenerationMixin,
    LogitsProcessorList,
    PreTrainedModel,
    StoppingCriteriaList,
)
from transformers.generation.candidate_generator import CandidateGenerator

from decoder.drafters.session import Backoff, DraftLimits, DraftSession
from decoder.errors import UnsupportedGenerationError
from retriever.drafter import Drafter

DEFAULT_MAX_CANDIDATES = 10
DEFAULT_BUDGET_NODES = 64


class DrafterCandidates(CandidateGenerator):
    """Candidates from the most probable path of each draft, for one sequence at a time.

    A sequence that does not go on from the last one begins another session.

    Args:
        drafter: whom to ask; one that fails costs candidates, never tokens.
        limits: which tokens the model and the drafter know.
        max_candidates: most tokens of a path.
        budget_nodes: most nodes of the tree that the path is chosen from.
        max_length: most tokens of a sequence, candidates included.
    """

    def __init__(
        self,
        drafter: Drafter,
        limits: DraftLimits,
        *,
        max_candidates: int = DEFAULT_MAX_CANDIDATES,
        budget_nodes: int = DEFAULT_BUDGET_NODES,
        max_length: int | None = None,
    ) -> None:
        self._drafter = drafter
        self._limits = limits
        self._max_candidates = max_candidates
        self._budget_nodes = budget_nodes
        self._max_length = max_length
        self._backoff = Backoff()
        self._session: DraftSession | None = None
        self._tokens: list[int] = []

    def get_candidates(self, input_ids: torch.Tensor, **_: Any) -> tuple[Any, Any]:
        """Return int64[1, n + k], a sequence of int64[1, n] tokens and k candidates behind it.

        No logits: the candidates are certain, so comparing them with the target's own choices is
        exact under sampling, too.
        """
        session = self._following(input_ids)
        room = self._max_candidates
        if self._max_length is not None:
            room = min(room, self._max_length - input_ids.shape[1] - 1)
        if room <= 0:
            return input_ids, None
        chain = session.draft(self._budget_nodes).best_chain(room).token_ids
        return torch.cat([input_ids, input_ids.new_tensor(chain.tolist())[None]], dim=-1), None

    def update_candidate_strategy(
        self,
        input_ids: torch.Tensor,
        scores: torch.Tensor,  # noqa: ARG002  the base class names it
        num_matches: int,  # noqa: ARG002  likewise
    ) -> None:
        """Take in what was accepted, int64[1, n] in all."""
        self._following(input_ids)

    def close(self) -> None:
        """End the drafter's session with the tokens that it has not seen yet."""
        session, self._session = self._session, None
        if session is not None:
            session.close()

    def _following(self, input_ids: torch.Tensor) -> DraftSession:
        """Return the session of a sequence, which knows all its tokens."""
        tokens = input_ids[0].tolist()
        known = len(self._tokens)
        if self._session is None or tokens[:known] != self._tokens:
            self.close()
            prompt = np.array(tokens, np.int32)
            self._session = DraftSession(self._drafter, prompt, self._limits, self._backoff)
        else:
            self._session.extend(tokens[known:])
        self._tokens = tokens
        return self._session


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
    outputs that only that loop can return, such as scores and hidden states.

    Raises:
        UnsupportedGenerationError: no drafter is given.
    """
    if drafter is None:
        raise UnsupportedGenerationError(
            "assisted_generate needs a drafter: model.generate(..., drafter=...)"
        )
    vocabulary = int(model.get_input_embeddings().get_parameter("weight").shape[0])
    candidates = DrafterCandidates(
        drafter,
        DraftLimits(vocabulary),
        max_candidates=max_candidates,
        max_length=generation_config.max_length,
    )
    with _candidates_from(model, candidates):
        return GenerationMixin._assisted_decoding(  # noqa: SLF001  no public name
            model,  # type: ignore[arg-type]  # every causal model has the mixin
            input_ids,  # type: ignore[arg-type]  # a LongTensor
            logits_processor=logits_processor,
            stopping_criteria=stopping_criteria,
            generation_config=generation_config,
            **model_kwargs,
        )


@contextmanager
def _candidates_from(model: PreTrainedModel, candidates: DrafterCandidates) -> Iterator[None]:
    """Have a model's assisted generation ask a drafter, for the block's time.

    Transformers chooses the generator in a method of the model, by options that no generator
    of a user's own is among; so this one model's method is shadowed.
    """
    vars(model)["_get_candidate_generator"] = lambda **_: candidates
    try:
        yield
    finally:
        del vars(model)["_get_candidate_generator"]
        candidates.close()
