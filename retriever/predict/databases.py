"""The databases of a sequence: each finds what followed earlier occurrences of the last tokens.

All answer in one form: rows of evidence (`ROW`), each with a continuation, the length of the match
before it and the number of occurrences. `DATABASES` lists them. The kernel that drafts
(`kernels.entries.step_sequences`) queries the databases that have a stage. Other databases are
queried through their own method (`question.Database`). To add a database, write it in a separate
file with a source for its nodes (`Source.register`), and list it (`register_database`), as
`examples/known_texts.py` does.
"""

from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import cache
from threading import Event
from typing import Final, NamedTuple, cast

from retriever.drafter import SequenceOptions, TokenIds
from retriever.kernels.compiling import AHEAD, PHRASES, PREDICTIONS
from retriever.kernels.entries import CONTEXT, CORPUS, GENERATIONS, TREE
from retriever.kernels.layout import MAX_MATCH, Scratch
from retriever.predict.context import Context
from retriever.predict.grammar.forced_drafts import ForcedDrafts
from retriever.predict.phrases import MAX_PHRASE_TOKENS, PhraseCursor
from retriever.predict.pool import Pool
from retriever.predict.predictions import Predictions
from retriever.predict.question import Database, Question, SupposingDatabase
from retriever.predict.running import READER, RunningOutput, RunningOutputs, lane_fields
from retriever.predict.searched_corpus import Corpus
from retriever.tree import Source


class Run(NamedTuple):
    """Stages of a draft that one kernel call runs, and the database that is queried afterwards."""

    stages: int
    then: Database | None


@cache
def _supposes(kind: type) -> bool:
    """Return whether databases of a class are `SupposingDatabase`.

    Cached by class, because checking the protocol took a tenth of the time to open a sequence.
    """
    return issubclass(kind, SupposingDatabase)


class ForcedOutput(NamedTuple):
    """Drafts of the text that a grammar forces, and where the output starts.

    Attributes:
        drafts: forced drafts of the output.
        begins: length of the prompt.
    """

    drafts: ForcedDrafts
    begins: int


class Databases:
    """The databases of one sequence.

    Args:
        context: the sequence.
        pool: generations and learned weights, shared with the tenant's other sequences.
        corpus: the indexes, shared with all other sequences.
        learns: whether committed tokens update the pool's weights.
        phrases: the sequence's cursor in the listed phrases; None if there are none.
        predictions: texts that the caller expects in the output; None if there are none.

    Attributes:
        step: the sequence's requests to the kernel.
        forced: drafts of what a grammar forces in the sequence; None without a grammar.
        lane: the sequence's lane among the tenant's running outputs.
        runs: the kernel calls of a draft: one, unless there are databases without a stage.
        is_compiled: whether one kernel call queries all databases, from the tenant's shared data.
        appends: whether that call can also append the tokens. It cannot if the sequence writes a
            lane, because others must see its new tokens before any sequence is drafted for.
    """

    def __init__(  # noqa: PLR0913  (the databases, by name)
        self,
        context: Context,
        pool: Pool,
        corpus: Corpus,
        *,
        learns: bool = True,
        phrases: PhraseCursor | None = None,
        predictions: Predictions | None = None,
    ) -> None:
        self.context = context
        self.pool = pool
        self.corpus = corpus
        self.learns = learns
        self.phrases = phrases
        self.predictions = predictions
        self.step = context.step
        self.forced: ForcedOutput | None = None
        self.lane = READER
        self._plan()

    def _plan(self) -> None:
        """Plan the kernel calls of a draft."""
        others: dict[DatabaseKind, Database] = {}
        for kind in DATABASES:
            if kind.open is not None and (database := kind.open(self)) is not None:
                others[kind] = database
        self._others = list(others.values())
        self.runs = _runs_of(others) if others else [_ALONE]
        self.is_compiled = len(self.runs) == 1 and not self.lane.oldest_version
        self.appends = self.is_compiled and not self.lane.is_written
        self.step.join(self.lane.address)

    def force(self, drafts: ForcedDrafts | None, begins: int) -> None:
        """Draft what a grammar forces after a prompt of `begins` tokens; call before any draft."""
        self.forced = None if drafts is None else ForcedOutput(drafts, begins)

    def expect(self, predictions: Predictions) -> None:
        """Draft from these predictions from now on; they start with the previous ones."""
        if self.predictions is not None:
            predictions.go_on_from(self.predictions)
        self.predictions = predictions
        self._plan()

    def join(self, kin: SequenceOptions, *, is_shared: bool) -> None:
        """Apply the sequence's group and model versions; called before its first draft.

        Sequences of a group draft from each other's running outputs. If the pool has no running
        outputs, no other sequence drafts from this one.

        Args:
            kin: the options of the sequence.
            is_shared: whether the tenant's other sequences may also draft from it.
        """
        running = self.pool.running
        if kin.group and running is not None:
            self.lane = self._joined(running, kin, is_shared=is_shared)
        elif kin.policy_version is not None:
            self.lane = RunningOutput(None, lane_fields(kin))
        self._plan()

    def _joined(
        self, running: RunningOutputs, kin: SequenceOptions, *, is_shared: bool
    ) -> RunningOutput:
        fields = lane_fields(kin, running.join(), is_shared=is_shared)
        return RunningOutput(running, fields, self.context, len(self.context))

    def leave(self) -> None:
        """Remove the ended sequence's tokens from the running outputs."""
        self.lane.leave()
        self.pool.tidy()

    @property
    def num_bytes(self) -> int:
        """Memory of the sequence and its predictions, in bytes."""
        predicted = 0 if self.predictions is None else self.predictions.num_bytes
        return self.context.num_bytes + predicted

    @property
    def touched_bytes(self) -> int:
        """Resident memory of the sequence and its predictions, in bytes."""
        predicted = 0 if self.predictions is None else self.predictions.touched_bytes
        return self.context.touched_bytes + predicted

    def clear(self) -> None:
        """Overwrite the tokens of the sequence and its predictions."""
        self.context.clear()
        self.step.clear()
        if self.predictions is not None:
            self.predictions.clear()

    def set_corpus(self, corpus: Corpus) -> None:
        """Draft from this corpus from now on."""
        if corpus is not self.corpus:
            self.corpus = corpus
            self.step.forget_match()

    def commit(self, tokens: TokenIds) -> None:
        """Append tokens, int32[n], to the sequence."""
        if len(tokens):
            self.append(tokens)
            self.lane.commit(tokens)

    def append(self, tokens: TokenIds) -> None:
        """Append tokens, int32[n], to the sequence, but not to its lane, unlike `lane.commit`.

        Needs no lock if nothing else uses the sequence meanwhile.
        """
        self.context.commit(tokens)
        self.step.forget_match()
        for database in self._others:
            database.commit(tokens)

    def committed(self, tokens: TokenIds) -> None:
        """Register tokens, int32[n], that a kernel has appended to the sequence."""
        if not self.appends:
            for database in self._others:
                database.commit(tokens)
            self.lane.commit(tokens)

    def can_suppose(self, num_tokens: int) -> bool:
        """Return whether all databases can answer after `num_tokens` tokens that may come."""
        are_able = all(_supposes(type(each)) for each in self._others)
        return are_able and self.context.has_room(num_tokens) and AHEAD.are_wanted()

    @contextmanager
    def supposing(self, tokens: TokenIds) -> Iterator[None]:
        """Make all databases answer as if some tokens, int32[n], were committed, during the block.

        `can_suppose` must be true. Everything is undone at the end.
        """
        with ExitStack() as supposed:
            supposed.enter_context(self.context.supposing(tokens))
            last = self.context.last(MAX_PHRASE_TOKENS)
            for database in cast("list[SupposingDatabase]", self._others):
                supposed.enter_context(database.supposing(tokens, last))
            yield

    def question(self, depth: int, scratch: Scratch) -> Question:
        """Return the question to databases without a stage for a draft."""
        return Question(self.context.last(MAX_MATCH), self.corpus.tables.rarity, depth, scratch)


@dataclass(frozen=True, slots=True, eq=False)
class DatabaseKind:
    """An entry of the list of databases.

    Attributes:
        source: marks the rows of the database.
        trust: weight of one of its occurrences relative to other databases, before mixing. Learned
            weights correct it: doubling or halving it changes little.
        open: returns the database for a sequence, given the sequence's other databases, or None if
            the sequence has none. Called again when a sequence gets predictions or joins a group. A
            registered database belongs to the process and has its own data.
        stage: the kernel stage that queries the database, if there is no `open`.
    """

    source: Source
    trust: float
    open: Callable[[Databases], Database | None] | None = None
    stage: int = 0


def _predictions_of(databases: Databases) -> Predictions | None:
    expected = databases.predictions
    return expected if expected is not None and PREDICTIONS.are_wanted() else None


def _phrases_of(databases: Databases) -> PhraseCursor | None:
    listed = databases.phrases
    return listed if listed is not None and PHRASES.are_wanted() else None


# The sequence itself predicts better than other texts, and listed phrases are meant to recur.
# Learned weights correct these values: doubling or halving a trust changed tokens per step by less
# than 0.2% (docs/decisions/2026-11-21-mixing.md).
DATABASES: Final = [
    DatabaseKind(Source.CONTEXT, 6.0, stage=CONTEXT),
    DatabaseKind(Source.PREDICTIONS, 3.0, _predictions_of),
    DatabaseKind(Source.GENERATIONS, 0.6, stage=GENERATIONS),
    DatabaseKind(Source.SIBLINGS, 2.5),  # queried with generations
    DatabaseKind(Source.PHRASES, 12.0, _phrases_of),
    DatabaseKind(Source.CORPUS, 0.35, stage=CORPUS),
]
"""All databases, in the order of queries and of the kernel's stages. The sequence is first, because
its stage marks its recent tokens for the others."""


_IS_FINAL: Final = Event()


def finish_list() -> None:
    """Close the list of databases, because a drafter uses the list as it is when it is created."""
    _IS_FINAL.set()


_ALONE: Final = Run(sum(kind.stage for kind in DATABASES) + TREE, None)
"""The single kernel call of a draft if all databases have a stage."""


def _runs_of(others: Mapping[DatabaseKind, Database]) -> list[Run]:
    """Return the kernel calls of a draft; databases without a stage are queried in between."""
    runs, current = [], 0
    for kind in DATABASES:
        if kind in others:
            runs.append(Run(current, others[kind]))
            current = 0
        current += kind.stage
    return [*runs, Run(current + TREE, None)]


def register_database(kind: DatabaseKind) -> None:
    """Add a database to all drafters of the process, before any is created.

    Raises:
        ValueError: another database has this source, or a drafter has been created.
    """
    if any(kind.source == other.source for other in DATABASES):
        raise ValueError(f"a database with the source {kind.source.label} is registered already")
    if _IS_FINAL.is_set():
        raise ValueError("a database must be registered before the first drafter is made")
    DATABASES.append(kind)
