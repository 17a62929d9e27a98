"""A drafter that needs only numpy: it copies what followed the last tokens earlier in the text."""

from collections.abc import Sequence
from typing import Final

import numpy as np
from numpy.typing import ArrayLike

from retriever.drafter import DEFAULT, DraftRequest, Prediction, SequenceOptions, TokenIds
from retriever.limits import check_session_name, checked_tokens
from retriever.sequences import OpenSessions, TokenSequence, check_step, checked_options
from retriever.tree import DraftTree, Source

_NO_TOKEN: Final = -1  # separates outputs, so that no match spans two
_LONGEST_MATCH: Final = 8
_MAX_CHAIN: Final = 16
_NO_TOKENS: Final = np.empty(0, np.int32)

# Probability that the next token continues a match of this many tokens. These are rough, cautious
# figures for chat; they are never updated.
_CONFIDENCE: Final = (0.0, 0.2, 0.4, 0.55, 0.65, 0.7, 0.75, 0.8, 0.85)


class LocalDrafter:
    """Drafts one chain: the continuation of the longest, latest match; a `Drafter`.

    The method is prompt lookup, which also searches the generations. It needs no compiler and
    stores only tokens, so a client can run it in addition to a service. Not thread-safe.

    Source: Saxena, "Prompt Lookup Decoding", 2023.

    Args:
        recent_tokens: number of tokens of generations to store; the oldest are dropped.
    """

    def __init__(self, recent_tokens: int = 1 << 15) -> None:
        self._recent_tokens = recent_tokens
        self._recent = _NO_TOKENS
        self._sequences: OpenSessions[str, TokenSequence] = OpenSessions()

    def open(
        self,
        session: str,
        prompt: ArrayLike,
        options: SequenceOptions = DEFAULT,
    ) -> None:
        """Begin a sequence; see `Drafter.open`."""
        check_session_name(session)
        self._sequences.check_free(session)
        options = checked_options(options)
        sequence = TokenSequence(checked_tokens(prompt, None), options=options)
        self._sequences.add(session, sequence)

    def add_predictions(self, session: str, predictions: Sequence[Prediction]) -> None:
        """Add predictions of a sequence; see `EmbeddedDrafter.add_predictions`."""
        self._sequences.get(session).expect(predictions)

    def draft(self, requests: Sequence[DraftRequest]) -> list[DraftTree]:
        """Commit new tokens and draft for each sequence; see `Drafter.draft`."""
        sequences = [self._checked(request) for request in requests]
        for sequence, request in zip(sequences, requests, strict=True):
            sequence.extend(checked_tokens(request.new_tokens, None))
        return [
            self._draft(sequence, request)
            for sequence, request in zip(sequences, requests, strict=True)
        ]

    def close(self, session: str, new_tokens: ArrayLike | None = None) -> None:
        """End a sequence; see `Drafter.close`."""
        sequence = self._sequences.get(session)
        if new_tokens is not None:
            sequence.extend(checked_tokens(new_tokens, None))
        self._sequences.remove(session)
        if sequence.options.remember and len(sequence.output):
            joined = np.concatenate([self._recent, [np.int32(_NO_TOKEN)], sequence.output])
            self._recent = joined[-self._recent_tokens :].astype(np.int32)

    def _checked(self, request: DraftRequest) -> TokenSequence:
        sequence = self._sequences.get(request.session)
        check_step(request, len(sequence), len(request.new_tokens))
        return sequence

    def _draft(self, sequence: TokenSequence, request: DraftRequest) -> DraftTree:
        tokens = sequence.tokens
        found = [(*_continuation(tokens, tokens), Source.CONTEXT)]
        found += [
            (*_expected(sequence, each.tokens), Source.PREDICTIONS) for each in sequence.predictions
        ]
        found.append((*_continuation(tokens, self._recent), Source.GENERATIONS))
        followed, match, source = max(found, key=lambda each: each[1])  # on a tie, the first
        return _chain(followed, match, source, request)


def _expected(sequence: TokenSequence, predicted: TokenIds) -> tuple[TokenIds, int]:
    """Return the tokens that follow in a prediction, int32[k], and the length of the match.

    While the output is a prefix of the prediction, also before its first token, the draft continues
    the prediction.
    """
    done = len(sequence.output)
    if done < len(predicted) and np.array_equal(predicted[:done], sequence.output):
        return predicted[done : done + _MAX_CHAIN], _LONGEST_MATCH
    return _continuation(sequence.tokens, predicted)


def _continuation(tokens: TokenIds, text: TokenIds) -> tuple[TokenIds, int]:
    """Return int32[k], the continuation of the longest, latest match, and the match's length."""
    if len(tokens) == 0 or len(text) < 2:  # noqa: PLR2004  (a token and its successor)
        return _NO_TOKENS, 0
    ends = np.flatnonzero(text[:-1] == tokens[-1])
    length = 0
    while len(ends):
        length, kept = length + 1, ends
        if length == min(_LONGEST_MATCH, len(tokens)):
            break
        ends = ends[ends >= length]
        ends = ends[text[ends - length] == tokens[-1 - length]]
    if not length:
        return _NO_TOKENS, 0
    begin = int(kept[-1]) + 1
    return text[begin : begin + _MAX_CHAIN], length


def _chain(followed: TokenIds, match: int, source: Source, request: DraftRequest) -> DraftTree:
    """Return a tree of one path, cut at the end of a text and below the minimum probability."""
    limit = min(len(followed), request.budget_nodes)
    ends = np.flatnonzero(followed[:limit] == _NO_TOKEN)
    length = int(ends[0]) if len(ends) else limit
    matches = np.minimum(match + np.arange(length), _LONGEST_MATCH)
    probabilities = np.cumprod(np.take(_CONFIDENCE, matches)).astype(np.float32)
    length = int(np.count_nonzero(probabilities >= request.min_probability))
    return DraftTree(
        followed[:length].copy(),
        np.arange(-1, length - 1, dtype=np.int32),
        probabilities[:length],
        np.full(length, source, np.uint8),
    )
