"""Drafting models, which extend a draft tree, and their logits for one sequence's tree.

A drafting model, called reader in the code, does two things in one pass: it proposes children of
the nodes that it reads, and it gives probabilities for the children that other sources proposed.
There are two kinds: a draft model reads tokens; a speculator also reads the target's hidden states.
"""

from collections.abc import Callable, Sequence
from contextlib import ExitStack
from logging import getLogger
from typing import TYPE_CHECKING, Protocol, TypeVar

import numpy as np
from numpy.typing import NDArray

from decoder.drafters.asking import AskingRule, DecodingPace, StepCosts
from decoder.drafters.following import Verified
from decoder.drafters.kernels.forest import NOWHERE
from decoder.drafters.kernels.readings import (
    DRAFT_MODEL,
    LIKELY,
    NUM_LIKELY_COLUMNS,
    ROOT_ROW,
    SPECULATOR,
    Readings,
    enter_rows,
)
from decoder.drafters.kernels.recycled import rank_columns
from decoder.errors import OutOfMemoryError
from retriever.drafter import TokenIds
from retriever.errors import DrafterUnavailableError, VocabularyMismatchError
from retriever.sequences import TokenSequence
from retriever.tree import Source

if TYPE_CHECKING:  # a fused drafter without drafting models does not need torch
    import torch

_log = getLogger(__name__)
_Answer = TypeVar("_Answer")


class SequenceReader(Protocol):
    """A drafting model's state for one sequence and for the draft tree after it.

    It shares the sequence with the decoding loop, which appends the committed tokens.
    """

    def begin(self) -> "torch.Tensor | None":
        """Read the newly committed tokens and drop the last tree.

        Returns:
            [1, C], the logits of `TreeReader.columns` after the last committed token. `None` if
            there are none, for example before the target's first hidden states are known.

        Raises:
            DrafterUnavailableError: the sequence is too long for the model, or memory ran out.
        """
        ...

    def read(self, tokens: list[int], parents: list[int]) -> "torch.Tensor":
        """Read nodes of the draft tree in one pass.

        Args:
            tokens: token ids of n nodes, n at least 1.
            parents: parent of each node, numbered in the order in which nodes were read since
                `begin`, or `ROOT`. If `reads_paths` is not set, no node may be the parent of
                another one of the n.

        Returns:
            [n, C], the logits after each node.
        """
        ...

    def learn(self, verified: Verified) -> None:
        """Learn from a pass of the target, before the accepted path is committed."""
        ...

    def close(self) -> None:
        """Drop all state of the sequence."""
        ...


class TreeReader(Protocol):
    """A drafting model, for any number of sequences; not thread-safe.

    Attributes:
        name: the model's name in messages.
        columns: int32[C], ascending, the token id of each column of the logits.
        max_depth: greatest depth of the nodes that are read; `None` for no limit.
        reads_paths: whether one pass can read a node together with its parent.
        states: numbers of the target's hidden states that the model needs; see
            `decoder.model.states`.
        source: label of the nodes that the model proposes.
    """

    name: str
    columns: TokenIds
    max_depth: int | None
    reads_paths: bool
    states: frozenset[int]
    source: Source

    def follow(self, sequence: TokenSequence) -> SequenceReader:
        """Return a new state for a sequence."""
        ...


class Readers:
    """The drafting models of a fused drafter, with the data that all its sequences share.

    Args:
        readers: the drafting models in the order in which they are called, the fastest first.
        costs: seconds of the passes; measured if not given.
        vocabulary: token ids from this size on may not be drafted; `None` for no limit.

    Attributes:
        all: the drafting models, in the given order.
        pace: the current time per token.
        rules: for each model, the rule that decides when to call it.
        kinds: kind of each model: `SPECULATOR` if it reads the target's hidden states, else
            `DRAFT_MODEL`.
        is_usable: for each model, whether all its logits so far were finite.
        no_readings: empty arrays of logits, the template for each sequence's arrays.

    Raises:
        VocabularyMismatchError: a drafting model proposes tokens beyond the vocabulary.
    """

    def __init__(
        self, readers: Sequence[TreeReader], costs: "StepCosts | None", vocabulary: int | None
    ) -> None:
        for reader in readers:
            _check_columns(reader, vocabulary)
        self.all = list(readers)
        self.pace = DecodingPace()
        self.rules = [AskingRule(self.pace, costs) for _ in readers]
        self.kinds = [SPECULATOR if reader.states else DRAFT_MODEL for reader in readers]
        self.is_usable = [True for _ in readers]
        self.no_readings = Readings.of(
            [reader.columns for reader in readers],
            self.kinds,
            [int(reader.source) for reader in readers],
        )

    @property
    def states(self) -> frozenset[int]:
        """Numbers of the target's hidden states that the drafting models need."""
        return frozenset[int]().union(*(reader.states for reader in self.all))


def _check_columns(reader: TreeReader, vocabulary: int | None) -> None:
    beyond = len(reader.columns) and int(reader.columns.max())
    if vocabulary is not None and beyond >= vocabulary:
        raise VocabularyMismatchError(
            f"{reader.name} drafts token {beyond}, but the model has {vocabulary} tokens: "
            "draft with one that was made for this model"
        )


class ReadTree:
    """The logits of all drafting models for the draft tree of one sequence.

    A drafting model that fails is no longer used: for this sequence if it is unavailable, for all
    sequences if its logits are not finite. The other models continue.

    Args:
        readers: the drafting models, shared by all sequences.
        sequence: the sequence, which its owner extends.

    Attributes:
        readings: the logits of the nodes read so far.
        num_rows: int64[readers], number of rows that each model has read for this draft, the root
            included.
        num_failures: number of drafting models that failed.
    """

    def __init__(self, readers: Readers, sequence: TokenSequence) -> None:
        self._readers = readers
        self._members: list[SequenceReader | None] = []
        self._sequence = sequence
        self._num_known = [0 for _ in readers.all]
        self.num_rows = np.zeros(len(readers.all), np.int64)
        self.num_failures = 0
        with ExitStack() as opened:
            for number, reader in enumerate(readers.all):
                member = reader.follow(sequence) if readers.is_usable[number] else None
                self._members.append(member)
                if member is not None:
                    opened.callback(member.close)
            opened.pop_all()
        self.readings = readers.no_readings.unread() if readers.all else readers.no_readings

    def root_rows(self) -> NDArray[np.int32]:
        """Return int32[readers], each model's row of the last committed token, or `NOWHERE`."""
        return np.where(self.num_rows > 0, ROOT_ROW, NOWHERE).astype(np.int32)

    def present(self) -> list[int]:
        """Return the numbers of the drafting models that are still usable."""
        usable = self._readers.is_usable
        return [n for n, member in enumerate(self._members) if member is not None and usable[n]]

    def num_behind(self, number: int) -> int:
        """Return how many tokens were committed since a drafting model was last called."""
        return len(self._sequence) - self._num_known[number]

    def drop(self) -> None:
        """Drop all rows that were read."""
        self.num_rows[:] = 0

    def begin(self, number: int) -> bool:
        """Let a drafting model read the newly committed tokens; return whether it gave logits."""
        self._num_known[number] = len(self._sequence)
        logits = self._answer(number, lambda member: member.begin())
        return self._enter(number, np.zeros(1, np.int32), np.full(1, NOWHERE, np.int32), logits)

    def read(self, number: int, tokens: NDArray[np.int32], parents: NDArray[np.int32]) -> bool:
        """Let a drafting model read nodes; return whether it succeeded.

        Args:
            number: number of the drafting model.
            tokens: int32[n], token ids of the nodes, n at least 1.
            parents: int32[n], row of each node's parent; the nodes themselves get the next free
                rows.
        """
        behind = (parents - 1).tolist()  # without the root's row
        logits = self._answer(number, lambda member: member.read(tokens.tolist(), behind))
        return self._enter(number, tokens, parents, logits)

    def learn(self, verified: Verified) -> None:
        """Let all drafting models learn from a pass of the target."""
        for number in self.present():
            self._answer(number, lambda member: member.learn(verified))

    def close(self) -> None:
        """Let all drafting models drop the sequence."""
        with ExitStack() as members:
            for member in self._members:
                if member is not None:
                    members.callback(member.close)
        self._members = [None for _ in self._members]
        self.readings = self._readers.no_readings
        self.drop()

    def _answer(self, number: int, ask: Callable[[SequenceReader], _Answer]) -> _Answer | None:
        """Call a drafting model and return its result; if it is unavailable, stop using it."""
        member = self._members[number]
        if member is None:
            return None
        try:
            return ask(member)
        except _unavailable() as error:
            self._leave_out(number)
            name = self._readers.all[number].name
            _log.warning("a sequence continues without %s: %s", name, error)
            return None

    def _enter(
        self,
        number: int,
        tokens: NDArray[np.int32],
        parents: NDArray[np.int32],
        logits: "torch.Tensor | None",
    ) -> bool:
        """Store rows of logits; return whether there are rows and all of them are finite."""
        if logits is None:
            return False
        first, readings = int(self.num_rows[number]), self.readings
        end, width = first + len(tokens), logits.shape[-1]
        rows = readings.logits[number, first:end, :width]
        rows[:] = logits.detach().float().cpu().numpy()
        likely = np.empty((len(tokens), min(NUM_LIKELY_COLUMNS, width)), np.int32)
        rank_columns(np.ascontiguousarray(rows).view(np.int32), likely)
        readings.rows[number, first:end, LIKELY : LIKELY + likely.shape[1]] = likely
        if not enter_rows(readings, number, first, tokens, parents):
            self._distrust(number)
            return False
        self.num_rows[number] = end
        return True

    def _distrust(self, number: int) -> None:
        """Stop using a drafting model, for all sequences."""
        if self._readers.is_usable[number]:
            self._readers.is_usable[number] = False
            name = self._readers.all[number].name
            _log.warning("%s gives logits that are not finite: drafts continue without it", name)
        self._leave_out(number)

    def _leave_out(self, number: int) -> None:
        member, self._members[number] = self._members[number], None
        self.num_rows[number] = 0
        self.num_failures += 1
        if member is not None:
            member.close()


def _unavailable() -> tuple[type[Exception], ...]:
    """Return the errors after which a sequence continues without a drafting model."""
    import torch  # noqa: PLC0415  (a drafting model has loaded it)

    return DrafterUnavailableError, OutOfMemoryError, torch.OutOfMemoryError
