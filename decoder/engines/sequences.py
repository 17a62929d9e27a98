"""Token sequences that are known by what they hold, and not by a name."""

from collections.abc import Iterator
from typing import Final

import numpy as np

from retriever.drafter import TokenIds

_TAIL: Final = 8
"""Last tokens that a sequence is looked up by, before all of it is compared."""

_Key = tuple[int, bytes]


class TokenSequence:
    """A copy of the tokens of one sequence, and how far a drafter knows them.

    Args:
        tokens: int32[n], all of it so far; copied.
        num_prompt: how many of them are the prompt.
        slot: where the engine keeps it.

    Attributes:
        num_prompt: as given.
        slot: where the engine kept it when it was last seen.
        name: of the drafter's session; None while it has none.
        num_sent: tokens that the drafter knows.
        is_refused: whether the drafter finds the sequence at fault, so that it is not asked again.
        call: the number of the call that it was last seen in.
        seen_s: when that was, in seconds of a clock of the caller's.
    """

    __slots__ = (
        "_buffer",
        "_length",
        "call",
        "is_refused",
        "name",
        "num_prompt",
        "num_sent",
        "seen_s",
        "slot",
    )

    def __init__(self, tokens: TokenIds, num_prompt: int, slot: int) -> None:
        self._buffer = np.empty(len(tokens) + len(tokens) // 4 + 64, np.int32)
        self._buffer[: len(tokens)] = tokens
        self._length = len(tokens)
        self.num_prompt = num_prompt
        self.slot = slot
        self.name: str | None = None
        self.num_sent = 0
        self.is_refused = False
        self.call = 0
        self.seen_s = 0.0

    def __len__(self) -> int:
        return self._length

    @property
    def tokens(self) -> TokenIds:
        """int32[n], a view."""
        return self._buffer[: self._length]

    @property
    def unsent(self) -> TokenIds:
        """int32[m], a copy of what the drafter does not know."""
        return self._buffer[self.num_sent : self._length].copy()

    @property
    def num_bytes(self) -> int:
        """Memory of the tokens, in bytes."""
        return self._buffer.nbytes

    def is_sendable(self, drafter_vocabulary: int | None) -> bool:
        """Tell whether a drafter has all tokens that it does not know yet; None: it takes all."""
        return drafter_vocabulary is None or bool((self.unsent < drafter_vocabulary).all())

    def begins(self, tokens: TokenIds) -> bool:
        """Tell whether int32[n] begins with this sequence: all tokens are compared."""
        return len(tokens) >= self._length and bool((self.tokens == tokens[: self._length]).all())

    def extend(self, tokens: TokenIds) -> None:
        """Append int32[m]."""
        length = self._length + len(tokens)
        if length > len(self._buffer):
            grown = np.empty(length + length // 2, np.int32)
            grown[: self._length] = self.tokens
            self._buffer = grown
        self._buffer[self._length : length] = tokens
        self._length = length


class SequenceIndex:
    """Finds the sequence that a row of tokens goes on from.

    Sequences are filed by their length and last tokens. Whatever is found there is compared from
    its first token to its last, so that a sequence never goes on as another one. Comparing reads
    4 bytes a token: some microseconds for 32k tokens.
    """

    def __init__(self) -> None:
        self._filed: dict[_Key, list[TokenSequence]] = {}
        self._num_sequences = 0

    def __len__(self) -> int:
        return self._num_sequences

    def __iter__(self) -> Iterator[TokenSequence]:
        for filed in self._filed.values():
            yield from filed

    def add(self, sequence: TokenSequence) -> None:
        """File a sequence."""
        self._filed.setdefault(_key(sequence.tokens), []).append(sequence)
        self._num_sequences += 1

    def remove(self, sequence: TokenSequence) -> None:
        """Take a sequence out; it must not have changed since it was filed."""
        key = _key(sequence.tokens)
        filed = [each for each in self._filed[key] if each is not sequence]
        if filed:
            self._filed[key] = filed
        else:
            del self._filed[key]
        self._num_sequences -= 1

    def extend(self, sequence: TokenSequence, tokens: TokenIds) -> None:
        """Append int32[m] to a sequence that is filed."""
        self.remove(sequence)
        sequence.extend(tokens)
        self.add(sequence)

    def exact(self, tokens: TokenIds, slot: int, call: int) -> TokenSequence | None:
        """Return a sequence that equals int32[n]; the slot's own where several do.

        Args:
            tokens: what it must hold.
            slot: where the engine keeps the row.
            call: sequences that were seen in this call belong to other rows.
        """
        found: TokenSequence | None = None
        for each in self._filed.get(_key(tokens), ()):
            if each.call != call and each.begins(tokens):
                if each.slot == slot:
                    return each
                if found is None:
                    found = each
        return found

    def longest(self, tokens: TokenIds, slot: int, call: int) -> TokenSequence | None:
        """Return the longest sequence that int32[n] begins with; else as `exact`."""
        free = [each for each in self if each.call != call and len(each) <= len(tokens)]
        free.sort(key=lambda each: (len(each), each.slot == slot), reverse=True)
        return next((each for each in free if each.begins(tokens)), None)


def _key(tokens: TokenIds) -> _Key:
    return len(tokens), tokens[-_TAIL:].tobytes()
