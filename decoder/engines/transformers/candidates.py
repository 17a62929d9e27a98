"""Chains for assisted generation of transformers, from any drafter."""

from typing import Any

import numpy as np
import torch
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
        self._accepted: list[int] = []

    def get_candidates(self, input_ids: torch.Tensor, **_: Any) -> tuple[Any, Any]:
        """Return int64[1, n + k], a sequence of int64[1, n] tokens and k candidates behind it.

        No logits: the candidates are certain, so comparing them with the target's own choices is
        exact under sampling, too.

        Raises:
            UnsupportedGenerationError: there are several sequences.
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
        """Note what was accepted, int64[1, n] in all; the drafter is told with what comes next."""
        self._accepted = input_ids[0].tolist()

    def close(self, length: int | None = None) -> None:
        """End the drafter's session with the tokens that it has not seen yet.

        Args:
            length: of the whole sequence, where it ends within what was accepted last.
        """
        session, self._session = self._session, None
        if session is not None:
            session.extend(self._accepted[len(self._tokens) : length])
            session.close()

    def _following(self, input_ids: torch.Tensor) -> DraftSession:
        """Return the session of a sequence, which knows all its tokens."""
        if len(input_ids) != 1:
            raise UnsupportedGenerationError(
                f"candidates serve one sequence at a time, not {len(input_ids)}"
            )
        tokens = input_ids[0].tolist()
        known = len(self._tokens)
        if self._session is None or tokens[:known] != self._tokens:
            self.close()
            prompt = np.array(tokens, np.int32)
            self._session = DraftSession(self._drafter, prompt, self._limits, self._backoff)
        else:
            self._session.extend(tokens[known:])
        self._tokens = self._accepted = tokens
        return self._session
