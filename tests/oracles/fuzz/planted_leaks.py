"""Documents that tell which of them a draft came from.

A planted document is random, so that its pairs of neighbouring tokens are its own: one that is
drafted says of which document it is, and so whether that could be in the index at that moment.
"""

import math
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from itertools import pairwise
from typing import Final

import numpy as np
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerBase, PreTrainedTokenizerFast

from retriever.drafter import TokenIds
from retriever.tree import DraftTree

NUM_WORDS: Final = 32_768
FIRST_PLANTED: Final = 24_576
"""Planted documents are made of the words from here on, all other ones of those before."""

PLANTED_TOKENS: Final = 120
_PHRASES: Final = 2_000
_PHRASE_TOKENS: Final = 24
_PHRASES_OF_DOCUMENT: Final = 16

Pair = tuple[int, int]


@dataclass(slots=True)
class Life:
    """When a document could be in the index, in seconds of `time.monotonic`.

    Attributes:
        begin: before it was added.
        added: after that.
        end: after it was removed.
    """

    begin: float
    added: float
    end: float = math.inf


NEVER: Final = Life(math.inf, math.inf)
"""Of what was in no document."""


@dataclass(slots=True)
class Seen:
    """When a pair was drafted: in answer to a request sent no earlier, and arrived no later."""

    first: float
    last: float


@dataclass(frozen=True, slots=True)
class Verdict:
    """What drafted pairs say.

    Attributes:
        pairs: that were drafted, but for those of two documents, which tell nothing.
        documents: whose pairs they are.
        wrong: pairs of no document, or of none that could be in the index then.
        longest_lag_s: how long after its removal a document was drafted from.
    """

    pairs: int
    documents: int
    wrong: int
    longest_lag_s: float


def word_tokenizer(num_words: int = NUM_WORDS) -> PreTrainedTokenizerBase:
    """Return a tokenizer with a token for each of the words w0, w1 and so on."""
    words = {f"w{number}": number for number in range(num_words)}
    core = Tokenizer(models.WordLevel(words, unk_token=next(iter(words))))
    core.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return PreTrainedTokenizerFast(tokenizer_object=core)  # type: ignore[no-untyped-call]


def text_of(tokens: Iterable[int]) -> str:
    """Return the text of which the tokenizer makes these tokens."""
    return " ".join(f"w{token}" for token in tokens)


def planted(number: int) -> list[int]:
    """Return the tokens of a planted document, the same ones every time."""
    rng = np.random.default_rng((number, 1))
    tokens: list[int] = rng.integers(FIRST_PLANTED, NUM_WORDS, PLANTED_TOKENS).tolist()
    return tokens


def other_documents(num_tokens: int, seed: int = 0) -> Iterator[list[int]]:
    """Yield documents that repeat phrases of one another, until there are so many tokens."""
    rng = np.random.default_rng((seed, 2))
    phrases = (FIRST_PLANTED * rng.random((_PHRASES, _PHRASE_TOKENS)) ** 3).astype(np.int64)
    for _ in range(0, num_tokens, _PHRASES_OF_DOCUMENT * _PHRASE_TOKENS):
        yield phrases[rng.integers(0, _PHRASES, _PHRASES_OF_DOCUMENT)].reshape(-1).tolist()


def planted_pairs(tree: DraftTree, context: TokenIds) -> set[Pair]:
    """Return the pairs of planted words in a tree that its context does not hold itself."""
    tokens = tree.token_ids.tolist()
    before = [tokens[parent] if parent >= 0 else int(context[-1]) for parent in tree.parents]
    own = set(zip(context[:-1].tolist(), context[1:].tolist(), strict=True))
    pairs = set(zip(before, tokens, strict=True)) - own
    return {pair for pair in pairs if min(pair) >= FIRST_PLANTED}


def merge(seen: Iterable[Mapping[Pair, Seen]]) -> dict[Pair, Seen]:
    """Return when pairs were seen by any of several clients."""
    merged: dict[Pair, Seen] = {}
    for each in seen:
        for pair, when in each.items():
            known = merged.setdefault(pair, when)
            merged[pair] = Seen(min(known.first, when.first), max(known.last, when.last))
    return merged


def judge(seen: Mapping[Pair, Seen], lives: Mapping[int, Life], grace_s: float) -> Verdict:
    """Tell whether every pair is of a document that could be in the index when it was drafted.

    Args:
        seen: pairs, and when they were drafted.
        lives: of all documents that ever were in the index, by number; each was added once.
        grace_s: how long after its removal a document may still be drafted from.
    """
    owners: dict[Pair, list[int]] = defaultdict(list)
    for number in lives:
        tokens = planted(number)
        for pair in pairwise(tokens):
            owners[pair].append(number)
    told = {pair: owners[pair] for pair in seen if len(owners[pair]) <= 1}
    lags = [_lag(seen[pair], *[lives[number] for number in of]) for pair, of in told.items()]
    return Verdict(
        pairs=len(told),
        documents=len({number for of in told.values() for number in of}),
        wrong=sum(lag > grace_s for lag in lags),
        longest_lag_s=round(max((lag for lag in lags if lag < math.inf), default=0.0), 3),
    )


def _lag(when: Seen, life: Life = NEVER) -> float:
    """Return how long after its removal a document was drafted from; infinite before it came."""
    return max(0.0, when.last - life.end) if life.begin <= when.first else math.inf
