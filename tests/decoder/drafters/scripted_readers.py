"""Readers of trees whose logits are a function of the tokens so far."""

from collections.abc import Callable, Sequence

import numpy as np
import torch

from decoder.drafters.following import Verified
from decoder.drafters.readers import SequenceReader
from retriever.drafter import TokenIds
from retriever.sequences import TokenSequence
from retriever.tree import ROOT, Source
from tests.decoder.decoding import VOCABULARY

Script = Callable[[list[int]], dict[int, float]]
"""From the tokens so far to the logits of tokens; those of others are -9."""

SURE = 6.0


class ScriptedReader:
    """Says what a script says, and keeps to the protocol strictly."""

    def __init__(  # noqa: PLR0913  the options of a reader
        self,
        script: Script,
        *,
        columns: Sequence[int] = range(VOCABULARY),
        reads_paths: bool = False,
        max_depth: int | None = None,
        states: frozenset[int] = frozenset(),
        source: Source = Source.MODEL,
        vocabulary: int = VOCABULARY,
    ) -> None:
        self.name = "scripted reader"
        self.columns: TokenIds = np.array(sorted(columns), np.int32)
        self.max_depth = max_depth
        self.reads_paths = reads_paths
        self.states = states
        self.source = source
        self.script = script
        self._vocabulary = vocabulary
        self.open: list[ScriptedReading] = []
        self.passes: list[list[tuple[int, ...]]] = []
        self.learned: list[Verified] = []

    def follow(self, sequence: TokenSequence) -> SequenceReader:
        self.open.append(ScriptedReading(self, sequence))
        return self.open[-1]

    def logits(self, tokens: list[int]) -> torch.Tensor:
        row = torch.full((self._vocabulary,), -9.0)
        for token, logit in self.script(tokens).items():
            row[token] = logit
        return row[torch.from_numpy(self.columns).long()]


class ScriptedReading:
    def __init__(self, reader: ScriptedReader, sequence: TokenSequence) -> None:
        self._reader = reader
        self._sequence = sequence
        self._paths: list[tuple[int, ...]] | None = None

    def begin(self) -> torch.Tensor | None:
        self._paths = []
        self._reader.passes.append([])
        return self._reader.logits(self._sequence.tokens.tolist())[None]

    def read(self, tokens: list[int], parents: list[int]) -> torch.Tensor:
        assert self._paths is not None
        assert len(tokens) == len(parents) > 0
        known, before = self._paths, len(self._paths)
        for token, parent in zip(tokens, parents, strict=True):
            assert ROOT <= parent < (len(known) if self._reader.reads_paths else before)
            known.append((*(() if parent == ROOT else known[parent]), token))
        assert len(set(known)) == len(known)
        depth = self._reader.max_depth
        assert depth is None or max(map(len, known)) <= depth
        self._reader.passes.append(known[before:])
        text = self._sequence.tokens.tolist()
        return torch.stack([self._reader.logits([*text, *path]) for path in known[before:]])

    def learn(self, verified: Verified) -> None:
        self._reader.learned.append(verified)

    def close(self) -> None:
        self._reader.open.remove(self)


def counting(tokens: list[int]) -> dict[int, float]:
    """Expect the next number, and half as probably the one after that."""
    return {(tokens[-1] + 1) % VOCABULARY: SURE, (tokens[-1] + 2) % VOCABULARY: SURE - 0.7}


class Unavailable(ScriptedReader):
    """Fails for sequences that begin with a token."""

    def __init__(self, first: int, error: Exception) -> None:
        super().__init__(counting)
        self.first = first
        self.error = error

    def follow(self, sequence: TokenSequence) -> ScriptedReading:
        failing = self

        class Failing(ScriptedReading):
            def begin(self) -> torch.Tensor | None:
                if self._sequence.tokens[0] == failing.first:
                    raise failing.error
                return super().begin()

        self.open.append(Failing(self, sequence))
        return self.open[-1]
