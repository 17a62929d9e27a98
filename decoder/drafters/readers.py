"""The models that read the trees of a fused drafter, and what they said of one sequence's tree."""

from collections.abc import Callable, Sequence
from contextlib import ExitStack
from logging import getLogger
from typing import TYPE_CHECKING, TypeVar

import numpy as np
from numpy.typing import NDArray

from decoder.drafters.asking import AskingRule, Pace, StepCosts
from decoder.drafters.following import Verified
from decoder.drafters.kernels.forest import NOWHERE
from decoder.drafters.kernels.readings import (
    DRAFT_MODEL,
    LIKELY,
    MAX_READ,
    NUM_LIKELY_COLUMNS,
    ROOT_ROW,
    SPECULATOR,
    Readings,
    enter_rows,
)
from decoder.drafters.kernels.recycled import rank_columns
from decoder.drafters.reading import SequenceReader, TreeReader
from decoder.errors import OutOfMemoryError
from retriever.errors import DrafterUnavailableError, VocabularyMismatchError
from retriever.sequences import TokenSequence

if TYPE_CHECKING:  # a fused drafter without readers needs none
    import torch

_log = getLogger(__name__)
_Said = TypeVar("_Said")


class Readers:
    """The readers of a fused drafter, and what all its sequences share of them.

    Args:
        readers: in the order in which they are asked, the quickest first.
        costs: what their passes cost; measured if not given.
        vocabulary: tokens that may be drafted lie below it; `None` for no limit.

    Attributes:
        all: as given.
        pace: of decoding.
        rules: when each is asked.
        kinds: of each, `SPECULATOR` if it reads the target's states, else `DRAFT_MODEL`.
        is_usable: whether each has said nothing but numbers so far.
        no_readings: of no sequence; others are made from it.

    Raises:
        VocabularyMismatchError: a reader proposes tokens beyond the vocabulary.
    """

    def __init__(
        self, readers: Sequence[TreeReader], costs: "StepCosts | None", vocabulary: int | None
    ) -> None:
        for reader in readers:
            _check_columns(reader, vocabulary)
        self.all = list(readers)
        self.pace = Pace()
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
        """Numbers of the target's states that they need."""
        return frozenset[int]().union(*(reader.states for reader in self.all))

    def follow(self, sequence: TokenSequence) -> "ReadTree":
        """Return the reading of a sequence by all that are usable."""
        return ReadTree(self, sequence)


def _check_columns(reader: TreeReader, vocabulary: int | None) -> None:
    beyond = len(reader.columns) and int(reader.columns.max())
    if vocabulary is not None and beyond >= vocabulary:
        raise VocabularyMismatchError(
            f"{reader.name} drafts token {beyond}, and the model has {vocabulary}: "
            "draft with one that was made for this model"
        )


class ReadTree:
    """What each reader said of the tree that is being drafted behind a sequence.

    A reader that fails says nothing any more: for this sequence where it is not available, for
    all where what it gives is no number. Others go on.

    Args:
        readers: shared by all sequences.
        sequence: its owner extends it.

    Attributes:
        readings: what was said.
        num_failures: of readers.
    """

    def __init__(self, readers: Readers, sequence: TokenSequence) -> None:
        self._readers = readers
        self._members: list[SequenceReader | None] = []
        self._sequence = sequence
        self._num_known = [0 for _ in readers.all]
        self._num_rows = np.zeros(len(readers.all), np.int64)
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
        """Return int32[readers], the row of the last committed token, where it was read."""
        return np.where(self._num_rows > 0, ROOT_ROW, NOWHERE).astype(np.int32)

    def present(self) -> list[int]:
        """Return the numbers of the readers that can be asked."""
        usable = self._readers.is_usable
        return [n for n, member in enumerate(self._members) if member is not None and usable[n]]

    def room(self, number: int) -> int:
        """Return how many more nodes a reader can read in this draft."""
        return MAX_READ + 1 - int(self._num_rows[number])

    def next_row(self, number: int) -> int:
        """Return the row of the next node that a reader reads."""
        return int(self._num_rows[number])

    def num_behind(self, number: int) -> int:
        """Return how many tokens of the sequence a reader was not asked about yet."""
        return len(self._sequence) - self._num_known[number]

    def drop(self) -> None:
        """Drop what was read."""
        self._num_rows[:] = 0

    def begin(self, number: int) -> bool:
        """Have a reader catch up with the sequence; return whether it has anything to say."""
        self._num_known[number] = len(self._sequence)
        logits = self._said(number, lambda member: member.begin())
        root = np.array([0], np.int32), np.array([NOWHERE], np.int32)
        return logits is not None and self._enter(number, *root, logits)

    def read(self, number: int, tokens: NDArray[np.int32], parents: NDArray[np.int32]) -> bool:
        """Have a reader read nodes; return whether it did.

        Args:
            number: of the reader.
            tokens: int32[n], at least one.
            parents: int32[n], rows of their parents; the nodes' own rows are the next ones.
        """
        behind = (parents - 1).tolist()  # without the root's row
        logits = self._said(number, lambda member: member.read(tokens.tolist(), behind))
        return logits is not None and self._enter(number, tokens, parents, logits)

    def learn(self, verified: Verified) -> None:
        """Show a pass of the target to all readers."""
        for number in self.present():
            self._said(number, lambda member: member.learn(verified))

    def close(self) -> None:
        """Have all readers forget the sequence."""
        with ExitStack() as members:
            for member in self._members:
                if member is not None:
                    members.callback(member.close)
        self._members = [None for _ in self._members]
        self.readings = self._readers.no_readings
        self.drop()

    def _said(self, number: int, ask: Callable[[SequenceReader], _Said]) -> _Said | None:
        """Return a reader's answer; one that is not available is left out from now on."""
        member = self._members[number]
        if member is None:
            return None
        try:
            return ask(member)
        except _unavailable() as error:
            self._leave_out(number)
            _log.warning("a sequence goes on without %s: %s", self._name(number), error)
            return None

    def _enter(
        self,
        number: int,
        tokens: NDArray[np.int32],
        parents: NDArray[np.int32],
        logits: "torch.Tensor",
    ) -> bool:
        """Keep rows of logits; return whether they are numbers."""
        first, readings = int(self._num_rows[number]), self.readings
        end, width = first + len(tokens), logits.shape[-1]
        rows = readings.logits[number, first:end, :width]
        rows[:] = logits.detach().float().cpu().numpy()
        likely = np.empty((len(tokens), min(NUM_LIKELY_COLUMNS, width)), np.int32)
        rank_columns(np.ascontiguousarray(rows).view(np.int32), likely)
        readings.rows[number, first:end, LIKELY : LIKELY + likely.shape[1]] = likely
        if not enter_rows(readings, number, first, tokens, parents):
            self._distrust(number)
            return False
        self._num_rows[number] = end
        return True

    def _distrust(self, number: int) -> None:
        """Leave a reader out for good."""
        if self._readers.is_usable[number]:
            self._readers.is_usable[number] = False
            _log.warning(
                "%s gives logits that are no numbers: drafts go on without it",
                self._name(number),
            )
        self._leave_out(number)

    def _leave_out(self, number: int) -> None:
        member, self._members[number] = self._members[number], None
        self._num_rows[number] = 0
        self.num_failures += 1
        if member is not None:
            member.close()

    def _name(self, number: int) -> str:
        return self._readers.all[number].name


def _unavailable() -> tuple[type[Exception], ...]:
    """Return the errors after which a sequence goes on without a reader."""
    import torch  # noqa: PLC0415  (loaded by the reader, if there is one)

    return DrafterUnavailableError, OutOfMemoryError, torch.OutOfMemoryError
