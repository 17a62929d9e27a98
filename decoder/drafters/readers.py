"""Models that read a draft tree while it grows, and their readings of one sequence's tree.

Such a model does two things in one pass: it proposes children of the nodes that it reads, and it
gives probabilities for the children that other sources proposed. One kind is a draft model, which
reads tokens; another is a speculator, which also reads the target's hidden states.
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

if TYPE_CHECKING:  # a fused drafter without readers does not need torch
    import torch

_log = getLogger(__name__)
_Answer = TypeVar("_Answer")


class SequenceReader(Protocol):
    """A model's reading of one sequence and of the tree drafted after it.

    It shares the sequence with the decoding loop, which commits to it.
    """

    def begin(self) -> "torch.Tensor | None":
        """Catch up with the committed sequence and drop the last tree.

        Returns:
            [1, C], logits over `TreeReader.columns` after the last committed token; `None` if there
            is no prediction, for example before the target's first states are known.

        Raises:
            DrafterUnavailableError: the sequence is too long for the model, or memory ran out.
        """
        ...

    def read(self, tokens: list[int], parents: list[int]) -> "torch.Tensor":
        """Read nodes after the sequence in one pass.

        Args:
            tokens: tokens of n nodes, at least one.
            parents: their parents, numbered in the order in which nodes were read since `begin`, or
                `ROOT`. If `reads_paths` is not set, the n nodes are not parents of one another.

        Returns:
            [n, C], logits after each node.
        """
        ...

    def learn(self, verified: Verified) -> None:
        """Learn from a pass of the target, before its path is committed."""
        ...

    def close(self) -> None:
        """Forget the sequence."""
        ...


class TreeReader(Protocol):
    """A model that reads trees, for any number of sequences; not thread-safe.

    Attributes:
        name: name in messages.
        columns: int32[C], ascending, the token that each column of its logits stands for.
        max_depth: nodes deeper than this are not read; `None` for no limit.
        reads_paths: whether a node and its parent can be read in one pass.
        states: numbers of the target's hidden states that it needs; see `decoder.model.states`.
        source: label of its own proposals.
    """

    name: str
    columns: TokenIds
    max_depth: int | None
    reads_paths: bool
    states: frozenset[int]
    source: Source

    def follow(self, sequence: TokenSequence) -> SequenceReader:
        """Return a new reading of a sequence."""
        ...


class Readers:
    """The readers of a fused drafter, with the state that all its sequences share.

    Args:
        readers: readers in the order in which they are asked, the fastest first.
        costs: costs of their passes; measured if not given.
        vocabulary: upper bound of the token ids that may be drafted; `None` for no limit.

    Attributes:
        all: the readers as given.
        pace: pace of decoding.
        rules: decide when each reader is asked.
        kinds: kind of each reader, `SPECULATOR` if it reads the target's states, else
            `DRAFT_MODEL`.
        is_usable: whether each reader has given only finite logits so far.
        no_readings: empty readings, from which those of sequences are made.

    Raises:
        VocabularyMismatchError: a reader proposes tokens beyond the vocabulary.
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
        """Numbers of the target's hidden states that they need."""
        return frozenset[int]().union(*(reader.states for reader in self.all))


def _check_columns(reader: TreeReader, vocabulary: int | None) -> None:
    beyond = len(reader.columns) and int(reader.columns.max())
    if vocabulary is not None and beyond >= vocabulary:
        raise VocabularyMismatchError(
            f"{reader.name} drafts token {beyond}, but the model has {vocabulary} tokens: "
            "draft with one that was made for this model"
        )


class ReadTree:
    """Each reader's readings of the tree drafted after a sequence.

    A reader that fails is not used any more: for this sequence if it is unavailable, for all
    sequences if its logits are not finite. The others continue.

    Args:
        readers: readers shared by all sequences.
        sequence: the sequence, which its owner extends.

    Attributes:
        readings: logits and rows that were read.
        num_rows: int64[readers], rows that each has read for this draft, the root's first.
        num_failures: number of readers that failed.
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
        """Return int32[readers], the row of the last committed token; `NOWHERE` if not read."""
        return np.where(self.num_rows > 0, ROOT_ROW, NOWHERE).astype(np.int32)

    def present(self) -> list[int]:
        """Return the numbers of the readers that can be asked."""
        usable = self._readers.is_usable
        return [n for n, member in enumerate(self._members) if member is not None and usable[n]]

    def num_behind(self, number: int) -> int:
        """Return how many tokens the sequence has grown since a reader was last asked."""
        return len(self._sequence) - self._num_known[number]

    def drop(self) -> None:
        """Drop what was read."""
        self.num_rows[:] = 0

    def begin(self, number: int) -> bool:
        """Let a reader catch up with the sequence; return whether it has a prediction."""
        self._num_known[number] = len(self._sequence)
        logits = self._answer(number, lambda member: member.begin())
        return self._enter(number, np.zeros(1, np.int32), np.full(1, NOWHERE, np.int32), logits)

    def read(self, number: int, tokens: NDArray[np.int32], parents: NDArray[np.int32]) -> bool:
        """Let a reader read nodes; return whether it did.

        Args:
            number: number of the reader.
            tokens: int32[n], at least one.
            parents: int32[n], rows of their parents; the nodes' own rows are the next ones.
        """
        behind = (parents - 1).tolist()  # without the root's row
        logits = self._answer(number, lambda member: member.read(tokens.tolist(), behind))
        return self._enter(number, tokens, parents, logits)

    def learn(self, verified: Verified) -> None:
        """Let all readers learn from a pass of the target."""
        for number in self.present():
            self._answer(number, lambda member: member.learn(verified))

    def close(self) -> None:
        """Let all readers forget the sequence."""
        with ExitStack() as members:
            for member in self._members:
                if member is not None:
                    members.callback(member.close)
        self._members = [None for _ in self._members]
        self.readings = self._readers.no_readings
        self.drop()

    def _answer(self, number: int, ask: Callable[[SequenceReader], _Answer]) -> _Answer | None:
        """Return a reader's answer; one that is unavailable is left out from now on."""
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
        """Store rows of logits; return whether there are any and all are finite."""
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
        """Stop using a reader for good."""
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
    """Return the errors after which a sequence continues without a reader."""
    import torch  # noqa: PLC0415  (loaded by the reader, if there is one)

    return DrafterUnavailableError, OutOfMemoryError, torch.OutOfMemoryError
