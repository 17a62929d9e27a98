"""The database of predictions: texts that the caller expects the output to contain.

They are in one store with hash chains, like the sequence itself. Each has a cursor that follows it
from its beginning and across edits. They belong to one session and are freed with it.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from itertools import accumulate
from typing import Final

import numpy as np

from retriever.drafter import Prediction, TokenIds
from retriever.kernels.chains import SEPARATOR
from retriever.kernels.cursors import LONG
from retriever.kernels.entries import collect_texts, follow_texts
from retriever.kernels.layout import TextCursors, pack
from retriever.predict.ledger import Charge
from retriever.predict.question import Question
from retriever.predict.stores import CONTEXT_LIMITS, ChainStore, store_bytes
from retriever.tree import PredictedPlace, Source

_EACH_BYTES: Final = 512
"""Memory of a prediction without its tokens: its label, its cursor and their objects."""

_SOURCE: Final = int(Source.PREDICTIONS)
_END: Final = np.array([SEPARATOR], np.int32)


def predictions_bytes(num_tokens: int, num_texts: int) -> int:
    """Return the memory of predictions with `num_tokens` in total, in bytes."""
    capacity = num_tokens + num_texts
    return store_bytes(capacity, CONTEXT_LIMITS, Source.PREDICTIONS) + _EACH_BYTES * num_texts


class Predictions:
    """The predictions of one sequence, with a cursor in each. Not thread-safe.

    Args:
        texts: the predictions, of at least one token each.
        charge: charge for their memory; returned with this object.

    Attributes:
        cursors: int64[texts, 3], see `kernels.cursors`.
        num_tokens: number of tokens in all predictions.
        num_bytes: memory of the predictions, in bytes.
    """

    def __init__(self, texts: Sequence[Prediction], charge: Charge | None = None) -> None:
        sizes = [len(text.tokens) + 1 for text in texts]
        self.num_tokens = sum(sizes) - len(sizes)
        self.num_bytes = predictions_bytes(self.num_tokens, len(texts))
        self._charge = charge
        self._labels = [text.label for text in texts]
        self._starts = np.array([0, *accumulate(sizes)], np.int64)
        self.cursors = np.zeros((len(texts), 3), np.int64)
        self.cursors[:, 0], self.cursors[:, 2] = self._starts[:-1], LONG
        self._store = ChainStore(int(self._starts[-1]), CONTEXT_LIMITS, Source.PREDICTIONS)
        cursors = TextCursors(self.cursors, self._starts)
        self._packed = pack(self._store.chains, self._store.orders, cursors)
        for text in texts:
            self._store.append(text.tokens)
            self._store.append(_END)

    def __len__(self) -> int:
        return len(self._labels)

    def texts(self) -> list[Prediction]:
        """Return the predictions; their tokens are views."""
        tokens = self._store.tokens
        spans = zip(self._starts[:-1].tolist(), (self._starts[1:] - 1).tolist(), strict=True)
        return [
            Prediction(tokens[begin:end], label)
            for label, (begin, end) in zip(self._labels, spans, strict=True)
        ]

    def go_on_from(self, earlier: "Predictions") -> None:
        """Take over the cursors of earlier predictions; this object starts with those texts."""
        self.cursors[: len(earlier)] = earlier.cursors

    def commit(self, tokens: TokenIds) -> None:
        """Move the cursors past new tokens of the sequence, int32[n]."""
        follow_texts(self._packed, tokens)

    @contextmanager
    def supposing(self, tokens: TokenIds, last: TokenIds) -> Iterator[None]:  # noqa: ARG002
        """See `SupposingDatabase`; the cursors are moved and then restored."""
        before = self.cursors.copy()
        self.commit(tokens)
        try:
            yield
        finally:
            self.cursors[:] = before

    def collect(self, question: Question, row: int) -> int:
        """Write rows of evidence from `row` on; return the first free row."""
        query, _, depth, scratch = question
        end: int = collect_texts(self._packed, _SOURCE, query, depth, scratch.packed, row)
        return end

    @property
    def touched_bytes(self) -> int:
        """Resident memory of the predictions, in bytes."""
        return self.num_bytes - self._store.num_bytes + self._store.touched_bytes

    def place_of(self, position: int) -> PredictedPlace:
        """Return the prediction that contains a position of the store, and the place in it."""
        text, begin = self._text_at(position)
        return PredictedPlace(self._labels[text], position - begin)

    def before(self, position: int) -> TokenIds:
        """Return a view, int32[n]: the tokens before a position in its text."""
        return self._store.tokens[self._text_at(position)[1] : position]

    def _text_at(self, position: int) -> tuple[int, int]:
        """Return the text that contains a position of the store, and where it starts."""
        text = int(np.searchsorted(self._starts, position, "right")) - 1
        return text, int(self._starts[text])

    def clear(self) -> None:
        """Overwrite the tokens, so that an ended sequence leaves nothing in memory."""
        self._store.clear()
