"""A draft model that reads the tree of a fused draft; see `decoder.drafters.reading`."""

from collections import OrderedDict
from typing import Final

import torch

from decoder.drafters.draft_model import BranchCache, DraftModel
from decoder.drafters.following import Verified
from decoder.drafters.reading import SequenceReader
from retriever.errors import DrafterUnavailableError
from retriever.sequences import TokenSequence
from retriever.tree import ROOT, Source

_MAX_CACHES: Final = 4
"""Sequences whose keys and values are kept at once; the least recently used one is evicted, and
read again when it is drafted for."""


class ModelReader:
    """Reads whole trees in one pass, and grows on from there; a `TreeReader`.

    Args:
        model: the draft model, of the target's vocabulary.
        max_caches: sequences whose keys and values are kept at once.
    """

    max_depth: int | None = None
    reads_paths = True
    states = frozenset[int]()
    source = Source.MODEL

    def __init__(self, model: DraftModel, max_caches: int = _MAX_CACHES) -> None:
        self.model = model
        self.name = f"draft model {model.name}"
        self.columns = model.columns
        self._max_caches = max_caches
        self._cached: OrderedDict[ModelReading, BranchCache] = OrderedDict()

    def follow(self, sequence: TokenSequence) -> SequenceReader:
        """Return the reading of a sequence; see `TreeReader`."""
        return ModelReading(self, sequence)

    def cache_of(self, reading: "ModelReading") -> BranchCache:
        """Return the cache of a sequence, the one that is evicted last."""
        cache = self._cached.pop(reading, None) or BranchCache(self.model)
        self._cached[reading] = cache
        if len(self._cached) > self._max_caches:
            self._cached.popitem(last=False)
        return cache

    def forget(self, reading: "ModelReading") -> None:
        """Drop the cache of a sequence."""
        self._cached.pop(reading, None)


class ModelReading:
    """A draft model's reading of one sequence; see `SequenceReader`.

    Args:
        reader: whose it is.
        sequence: its owner extends it.
    """

    def __init__(self, reader: ModelReader, sequence: TokenSequence) -> None:
        self._reader = reader
        self._sequence = sequence
        self._num_checked = 0
        self._depths: list[int] = []

    def begin(self) -> torch.Tensor | None:
        """Read the tokens that came; see `SequenceReader.begin`."""
        length = len(self._sequence)
        self._check_room(length)
        new = self._sequence.tokens[self._num_checked :]
        if len(new) and int(new.max()) >= self._reader.model.vocabulary_size:
            raise DrafterUnavailableError(f"it does not know token {int(new.max())}")
        self._num_checked = length
        self._depths = []
        if length == 0:
            return None
        return self._reader.cache_of(self).catch_up(self._sequence.tokens)

    def read(self, tokens: list[int], parents: list[int]) -> torch.Tensor:
        """Read nodes behind the sequence; see `SequenceReader.read`."""
        for parent in parents:
            self._depths.append(1 if parent == ROOT else self._depths[parent] + 1)
        self._check_room(len(self._sequence) + max(self._depths))
        return self._reader.cache_of(self).expand(tokens, parents)

    def learn(self, verified: Verified) -> None:
        """Learn nothing: it reads tokens alone."""

    def close(self) -> None:
        """Drop the keys and values; see `SequenceReader.close`."""
        self._reader.forget(self)

    def _check_room(self, length: int) -> None:
        limit = self._reader.model.max_length
        if limit is not None and length > limit:
            raise DrafterUnavailableError(
                f"it reads sequences of at most {limit} tokens, their drafts included"
            )
