"""The decoding loop: draft, cut the draft to the budget, verify it in one pass, accept, commit.

The same loop decodes one sequence or many: each pass holds the drafts of all running sequences and
chunks of new sequences' prompts. Plain decoding is the loop with empty drafts.
"""

from bisect import insort
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from itertools import count
from logging import getLogger
from threading import Lock
from time import perf_counter
from typing import Final

import numpy as np
import torch
from numpy.typing import NDArray

from decoder.budget.budget import Budget, Load, PassOutcome
from decoder.drafters.following import (
    FollowingDrafter,
    NoDrafter,
    PendingPass,
    SequenceDrafter,
    Verified,
    following,
    prepare_outcomes,
)
from decoder.errors import (
    DecoderBusyError,
    DecoderError,
    GenerationStartedError,
    InvalidPromptError,
    InvalidSettingsError,
    OutOfMemoryError,
)
from decoder.model.cache import Prefix
from decoder.model.passes import Read, Reading, within_depth
from decoder.model.states import States
from decoder.model.target import Target
from decoder.observation import Clock, ObservedPass, Observer, Statistics, Watch
from decoder.sampling.verification import (
    AcceptRule,
    Choices,
    ForcingRule,
    PassContext,
    SelectingRule,
    Selection,
    accept_greedy,
)
from decoder.sampling.walk import Acceptance
from decoder.stopping import DEFAULT_MAX_NEW_TOKENS, StopRule, first_stop
from retriever.drafter import DEFAULT, Drafter, Prediction, SequenceOptions, TokenIds
from retriever.errors import InvalidRequestError, RetrieverError
from retriever.follower import DraftLimits, Followers
from retriever.limits import MAX_OUTCOMES, Limits
from retriever.predict.grammar.forced_drafts import ForcedDrafts
from retriever.sequences import TokenSequence, checked_options, checked_predictions
from retriever.tree import DraftTree

DEFAULT_PARALLEL = 8
"""Most sequences in a pass: on two cores, twice as many hardly increase throughput."""

_PIECE: Final = 64
"""Tokens of each prompt that a pass reads if it is shared with running sequences. A pass over just
these tokens takes about as long as a sequence needs for two tokens, which a pass with drafts
yields. So sharing a pass slows prompts and outputs equally. On two cores a pass of 64 rows takes
twice as long as a pass of one row."""

_SPARE: Final = 16
"""Number of nodes to request beyond those that may be verified, if drafts for likely outcomes are
requested in advance. An extra node is a likely outcome if its parent is verified. With 4, 8, 20 and
64 extra nodes, 16 outcomes covered 17%, 20%, 22% and 23% of an agent's steps; on edits and chats
the shares differ by one percentage point. If no outcome was guessed, more nodes take longer to
draft."""

_MOST_ASKED: Final = Limits().max_budget_nodes
"""Most nodes of a tree to request, extra nodes included: services refuse larger requests."""

_log = getLogger(__name__)

_MOST_READ: Final = 512
"""Most prompt tokens that one pass reads."""


@dataclass(frozen=True, slots=True, eq=False)
class Request:
    """A sequence to decode, and how to decode it.

    Attributes:
        prompt: int32[n], token ids of the prompt, n at least 1.
        max_new_tokens: most tokens to generate; the model's own limit also ends the sequence.
        options: options for the drafter: whether later sequences may use the output, what the
            output is expected to contain, which sequences it resembles, and the tenant.
        stop_rule: a rule that may end the sequence earlier.
        on_token: called with each token as soon as it is chosen; returns whether the sequence
            continues. If the callback changes the model, the rest of the pass is dropped, so that
            the change affects the next token. The callback gets no tokens after a stop token.
        observer: called with every pass, after the pass's tokens were emitted.
        accept: the rule that accepts or rejects drafted tokens; `None` for the decoder's own rule.
        drafts: whether to draft for the sequence. If not, the drafter does not see the sequence.
        budget: most nodes of the sequence's tree that a pass verifies, within the decoder's budget.
            With 0 no node is verified, but the drafter still stores the output. `None` for the
            decoder's budget only.
        past: keys and values of a prefix of the prompt; the target continues from them and does not
            read that prefix. `None` to read the whole prompt.
        hands_over: whether the finished generation stores its keys and values in its attribute
            `kept`.
    """

    prompt: Sequence[int] | TokenIds
    max_new_tokens: int = DEFAULT_MAX_NEW_TOKENS
    options: SequenceOptions = DEFAULT
    stop_rule: StopRule | None = None
    on_token: Callable[[int], bool] | None = None
    observer: Observer | None = None
    accept: AcceptRule | None = None
    drafts: bool = True
    budget: int | None = None
    past: Prefix | None = None
    hands_over: bool = False


class Decoder:
    """Decodes sequences with a target model and a drafter.

    Args:
        target: the model that decides the output.
        drafter: proposes the drafts to verify; with `NoDrafter`, the decoder decodes without
            drafts.
        budget: decides how many nodes of the drafts are verified.
        accept: the rule that accepts or rejects drafted tokens, greedily or by sampling.
        stop_ids: ids of the tokens that end a sequence; the output includes the token that ended
            it.
        drafter_vocabulary: size of the drafter's vocabulary if the model's is larger; a token
            beyond it ends drafting for the token's sequence.
        num_ahead: for each sequence, the number of likely outcomes of a pass for which the drafter
            prepares drafts while the pass runs, at most 64; 0 to request drafts only after the
            pass.

    Attributes:
        followers: followers of the drafter; decoders with the same followers share its back-off.
    """

    def __init__(  # noqa: PLR0913  the last four are options
        self,
        target: Target,
        drafter: Drafter,
        budget: Budget,
        accept: AcceptRule = accept_greedy,
        stop_ids: Iterable[int] = (),
        *,
        drafter_vocabulary: int | None = None,
        num_ahead: int = 0,
    ) -> None:
        if not 0 <= num_ahead <= MAX_OUTCOMES:
            raise InvalidSettingsError(
                f"num_ahead must lie between 0 and {MAX_OUTCOMES}, not {num_ahead}"
            )
        self.target = target
        self.drafter = drafter
        self.budget = budget
        self.accept = _checked_rule(accept)
        self.stop_ids = frozenset(stop_ids)
        limits = DraftLimits(target.vocabulary_size, drafter_vocabulary)
        self.followers = Followers(drafter, limits)
        self.num_ahead = num_ahead
        if num_ahead:
            prepare_outcomes()
        self._lock = Lock()
        self._numbers = count()

    def generate(
        self,
        prompt: Sequence[int] | TokenIds,
        max_new_tokens: int = DEFAULT_MAX_NEW_TOKENS,
        options: SequenceOptions = DEFAULT,
        *,
        stop_rule: StopRule | None = None,
        observer: Observer | None = None,
    ) -> "Generation":
        """Prepare a sequence; iterate over the result to decode it.

        Args: see `Request`.

        Raises:
            InvalidPromptError: the prompt is empty, contains invalid token ids or reaches the
                model's length limit; or a prediction, a group or a version is invalid.
            InvalidSettingsError: `max_new_tokens` is negative.
        """
        return self.prepare(Request(prompt, max_new_tokens, options, stop_rule, observer=observer))

    def generate_many(
        self, requests: Iterable[Request], parallel: int = DEFAULT_PARALLEL
    ) -> Iterator[tuple["Generation", list[int]]]:
        """Decode many sequences, several at a time; outputs are the same as if decoded one by one.

        The next request starts when a place is free. A failure ends only its own sequence: its
        `error` is set, and the other sequences continue. Leaving the iteration ends all sequences.

        Args:
            requests: the sequences in the order in which they start; an iterator is advanced one
                request at a time.
            parallel: most sequences decoded at the same time.

        Yields:
            A generation and its next tokens, once for each pass that it took part in. With its last
            item, which may have no tokens, `is_over` is set. `number` counts the requests from 0.

        Raises:
            InvalidSettingsError: `parallel` is less than one.
            DecoderBusyError: the decoder is already decoding.
            OutOfMemoryError: there is not enough memory for a single sequence.
        """
        if parallel < 1:
            raise InvalidSettingsError(f"parallel must be 1 or more, not {parallel}")
        waiting = (self._admissible(number, each) for number, each in enumerate(requests))
        with self.reserved():
            yield from _decoded(self, waiting, parallel)

    def prepare(self, request: Request) -> "Generation":
        """Prepare a sequence; see `generate`."""
        if request.max_new_tokens < 0:
            raise InvalidSettingsError(
                f"max_new_tokens must be 0 or more, not {request.max_new_tokens}"
            )
        self._check_budget(request.budget)
        if request.accept is not None:
            _checked_rule(request.accept)
        tokens = self.target.checked_prompt(request.prompt)
        try:
            size = self.target.vocabulary_size
            options = checked_options(request.options, size, keeps_tenants=True)
        except InvalidRequestError as error:
            raise InvalidPromptError(str(error)) from error
        request = replace(request, options=options)
        return Generation(self, request, tokens, next(self._numbers))

    def _check_budget(self, budget: int | None) -> None:
        if budget is not None and budget < 0:
            raise InvalidSettingsError(f"the budget must be 0 nodes or more, not {budget}")
        most = min(self.target.max_nodes, getattr(self.budget, "max_nodes", self.target.max_nodes))
        if budget is not None and budget > most:
            _log.warning(
                "a request's budget of %d nodes is cut to %d, the most that a pass verifies",
                budget,
                most,
            )

    def _admissible(self, number: int, request: Request) -> "Generation":
        """Prepare a sequence; an invalid sequence is over at once, with its error set."""
        try:
            generation = self.prepare(request)
        except DecoderError as error:
            nothing = np.empty(0, np.int32)
            generation = Generation(self, request, nothing, number)
            generation.fail(error)
        generation.number = number
        return generation

    @contextmanager
    def reserved(self) -> Iterator[None]:
        """Hold the target during the block: only one loop at a time may use the target's places.

        Raises:
            DecoderBusyError: another loop holds the target.
        """
        if not self._lock.acquire(blocking=False):
            raise DecoderBusyError("another sequence is being decoded: finish or close it first")
        try:
            yield
        finally:
            self._lock.release()


def _checked_rule(accept: AcceptRule) -> AcceptRule:
    if not callable(accept):
        raise InvalidSettingsError(
            f"accept must be a rule, not {accept!r}: accept_rule(SamplingSettings(...)) makes one, "
            "and accept_greedy is the default"
        )
    return accept


class Generation:
    """One sequence, decoded once: each iteration yields the tokens of one pass.

    If the iteration ends early, by an error or by closing it, the drafter's session ends too.

    Attributes:
        number: number of the request, counted from 0.
        statistics: counts and times so far; a shared pass counts with this sequence's share of it.
        error: the error that ended the sequence early.
        is_over: whether the sequence has ended.
        drafter: the sequence's drafter, once it has started.
        past: the `past` of the sequence's request.
        kept: the finished sequence's keys and values, if they were requested and are available.
    """

    drafter: SequenceDrafter

    def __init__(self, decoder: Decoder, request: Request, prompt: TokenIds, number: int) -> None:
        self.number = number
        self.statistics = Statistics()
        self.error: Exception | None = None
        self.is_over = False
        self.past = request.past
        self.kept: Prefix | None = None
        self._hands_over = request.hands_over
        self._decoder = decoder
        self._accept = request.accept or decoder.accept
        self._on_token = request.on_token
        self._sequence = TokenSequence(prompt, options=request.options)
        self._followers = decoder.followers if request.drafts else Followers(NoDrafter())
        self._max_nodes = 0 if not request.drafts else request.budget
        self._remaining = decoder.target.room(len(prompt), request.max_new_tokens)
        self._random_number = number
        self._forced: ForcedDrafts | None = None
        if request.drafts and isinstance(self._accept, ForcingRule):
            self._forced = self._accept.forced(request.options.tenant)
        self._watch = Watch(request.stop_rule, request.observer)
        self._clock = Clock(self.statistics)
        self._has_started = self._has_begun = False

    def __iter__(self) -> Iterator[list[int]]:
        if self._has_started:
            raise GenerationStartedError(
                "a generation is decoded once: call Decoder.generate for another one"
            )
        self._has_started = True
        return self._steps()

    def stop(self) -> None:
        """End the sequence before the next pass."""
        self._remaining = 0

    def add_predictions(self, predictions: Sequence[Prediction]) -> None:
        """Add texts that the rest of the output is expected to contain, for later drafts.

        Raises:
            InvalidPromptError: a prediction is empty, too long, or contains invalid token ids.
        """
        size = self._decoder.target.vocabulary_size
        try:
            self._sequence.expect(checked_predictions(predictions, size))
        except InvalidRequestError as error:
            raise InvalidPromptError(str(error)) from error

    def _steps(self) -> Iterator[list[int]]:
        with self._decoder.reserved():
            for _, tokens in _decoded(self._decoder, iter([self]), 1):
                if tokens:
                    yield tokens
        if self.error is not None:
            raise self.error

    def take(self, tokens: list[int], statistics: Statistics, error: str | None) -> None:
        """Adopt the output that another process decoded; see `decoder.model.ranks`."""
        self._sequence.extend(tokens)
        self.statistics.add(statistics)
        if self._on_token is not None:
            deque(map(self._on_token, tokens), maxlen=0)
        if tokens:  # the rule collects the text; its result is already known
            first_stop(tokens, (), self._watch.stop_rule)
        if error is not None:
            self.fail(DecoderError(error))
        self.is_over = True

    # The methods below are for the loop.

    @property
    def is_wanted(self) -> bool:
        """Whether the sequence continues with another token."""
        return self._remaining > 0 and self.error is None

    @property
    def tokens(self) -> TokenIds:
        """Return int32[n], a view of the committed tokens, prompt included."""
        return self._sequence.tokens

    @property
    def remembers(self) -> bool:
        """Whether later sequences may use this sequence's keys and values."""
        return self._sequence.options.remember

    @property
    def max_depth(self) -> int:
        """Most drafted tokens that a pass may accept."""
        return self._remaining - 1

    def nodes_within(self, num_nodes: int) -> int:
        """Return how many nodes the request allows a pass to verify, at most `num_nodes`."""
        return num_nodes if self._max_nodes is None else min(num_nodes, self._max_nodes)

    @property
    def is_drafted(self) -> bool:
        """Whether passes may verify a tree for this sequence."""
        return self.max_depth > 0 and self._max_nodes != 0

    def nodes_to_ask(self, num_nodes: int) -> int:
        """Return how many nodes to request from the drafter to have `num_nodes` to verify.

        With a grammar, more nodes are requested, because the grammar forbids some of them.
        """
        within = self.nodes_within(num_nodes)
        if self._forced is None:
            return within
        return min(self._forced.nodes_to_ask(within), _MOST_ASKED)

    def forced(self, tree: DraftTree, num_nodes: int) -> DraftTree:
        """Add the tokens that the grammar forces to a tree, and remove those that it forbids."""
        if self._forced is None:
            return tree
        generated = self.tokens[self._sequence.num_prompt :]
        return self._forced.improved(tree, generated, self.nodes_within(num_nodes))

    def begin(self) -> None:
        """Open a session with the drafter unless it is already open.

        Raises:
            RetrieverError: the drafter refuses the prompt.
        """
        if not self._has_begun:
            with self.statistics.drafting():
                drafting = following(self._followers)
                self.drafter = drafting.follow(self._sequence, self._followers.limits)
            self._has_begun = True

    def accepted(self, tree: DraftTree, read: Read) -> Acceptance:
        """Return the accepted path of a tree and the target's next token."""
        return self._accept(tree, read.logits, self._context(read.choices))

    def selection(self, tree: DraftTree) -> Selection | None:
        """Return the selection for the pass itself to make, if the accept rule can state it."""
        if not isinstance(self._accept, SelectingRule):
            return None
        return self._accept.selection(tree, self._context())

    def _context(self, choices: Choices | None = None) -> PassContext:
        sequence = self._sequence
        number, num_prompt = self._random_number, sequence.num_prompt
        goes_on = None if self._on_token is None else self._goes_on
        return PassContext(number, sequence.tokens, num_prompt, choices, goes_on)

    def _goes_on(self, token: int) -> bool:
        """Report a chosen token; return whether the pass's later results are still valid."""
        if token < 0 or self._on_token is None:  # no token is possible
            return False
        goes_on = self._on_token(token) and token not in self._decoder.stop_ids
        return goes_on and not self._decoder.target.has_changed()

    def commit(self, tree: DraftTree, path: NDArray[np.int64], next_token: int) -> list[int]:
        """Commit and return the accepted tokens, up to the token limit or the first stop."""
        tokens = [*tree.token_ids[path].tolist(), next_token][: self._remaining]
        end = first_stop(tokens, self._decoder.stop_ids, self._watch.stop_rule)
        tokens = tokens[:end]
        self._remaining = 0 if end is not None else self._remaining - len(tokens)
        self._sequence.extend(tokens)
        self.statistics.record(tree, path[: len(tokens)], len(tokens))
        return tokens

    def show(self, row: "_Row") -> None:
        """Show a pass to the observer."""
        if self._watch.observer is not None:
            path, times = row.path[: len(row.tokens)], self._clock.split()
            num_sequences = max(row.num_verified, 1)
            self._watch.observer(
                ObservedPass(
                    row.drafted, row.tree, path, row.tokens, times, num_sequences, row.pass_width
                )
            )

    def fail(self, error: Exception) -> None:
        """Record the error that ends the sequence early; only the first error counts."""
        self.error = self.error or error

    def take_over(self, target: Target, place: int) -> None:
        """Store the keys and values if requested; clear the place unless it may be reused."""
        if self._hands_over:
            try:
                self.kept = target.held(place)
            except OutOfMemoryError as error:
                self.fail(error)
        if not self.remembers or self.past is not None:
            target.reset(place)

    def end(self) -> None:
        """End the drafter's session."""
        self.is_over = True
        if not self._has_begun:
            return
        self._has_begun = False
        with self.statistics.drafting():
            try:
                self.drafter.close()
            except RetrieverError as error:
                self.fail(error)
        self.statistics.num_failures = self.drafter.num_failures


def _decoded(
    decoder: Decoder, waiting: Iterator[Generation], num_places: int
) -> Iterator[tuple[Generation, list[int]]]:
    """Decode; if processes share a model, the first one sends its outputs to the others."""

    def steps(waiting: Iterator[Generation]) -> Iterator[tuple[Generation, list[int]]]:
        return _Batch(decoder, waiting, num_places).steps()

    ranks = decoder.target.ranks
    return steps(waiting) if ranks is None else ranks.steps(steps, waiting, decoder.target)


@dataclass(slots=True, eq=False)
class _Row:
    """A running sequence and its part in the last pass.

    Attributes:
        generation: the sequence's generation.
        place: number of the place that holds the sequence's keys and values.
        num_prompt: number of tokens to read first; after a restart, they include generated tokens.
        num_read: number of prompt tokens read so far.
        pieces: hidden states of the prompt chunks that were read.
        proposed: the tree that the drafter returned.
        drafted: the part of `proposed` that the target can verify.
        reading: the sequence's input to the pass.
        path: int64[k], the accepted nodes.
        next_token: the target's token after the accepted nodes; `None` if the pass yielded none.
        tokens: the tokens that the pass added to the sequence.
        learn_s: seconds that the drafter spent learning from the pass.
        num_verified: number of sequences whose trees the pass verified.
        pass_width: number of tokens in the pass, over all sequences.
    """

    generation: Generation
    place: int
    num_prompt: int
    num_read: int = 0
    pieces: list[States] = field(default_factory=list)
    proposed: DraftTree = field(default_factory=DraftTree.empty)
    drafted: DraftTree = field(default_factory=DraftTree.empty)
    reading: Reading | None = None
    path: NDArray[np.int64] = field(default_factory=lambda: np.empty(0, np.int64))
    next_token: int | None = None
    tokens: list[int] = field(default_factory=list)
    learn_s: float = 0.0
    num_verified: int = 0
    pass_width: int = 1

    @property
    def is_verified(self) -> bool:
        """Whether the pass verifies a tree, even an empty one, and reads no prompt chunk."""
        return self.reading is not None and self.reading.tree is not None

    @property
    def is_accepted(self) -> bool:
        """Whether a path of the tree was accepted, which the target has to commit."""
        return self.is_verified and self.next_token is not None

    @property
    def is_going(self) -> bool:
        """Whether the whole prompt was read, so that a draft can be verified."""
        return self.num_unread == 0

    @property
    def num_unread(self) -> int:
        """Number of prompt tokens that are still to be read."""
        return self.num_prompt - self.num_read

    @property
    def tree(self) -> DraftTree:
        """The tree to verify; empty if the pass reads a prompt chunk."""
        tree = None if self.reading is None else self.reading.tree
        return DraftTree.empty() if tree is None else tree

    @property
    def width(self) -> int:
        """The sequence's number of rows in the pass."""
        return 0 if self.reading is None else len(self.reading.tokens)

    def read_next(self, size: int) -> None:
        """Set the pass's input to the next chunk of the prompt."""
        tokens = self.generation.tokens[self.num_read : self.num_read + size]
        self._take(Reading(self.place, tokens))

    def verify(self, tree: DraftTree) -> None:
        """Set the pass's input to the sequence's last token and a tree after it."""
        self._take(Reading.of(self.place, int(self.generation.tokens[-1]), tree))

    @property
    def may_go_on_drafted(self) -> bool:
        """Whether the next pass may verify a tree for this sequence."""
        return self.generation.max_depth > 1 and self.generation.is_drafted

    def asking(self, *, selects: bool) -> Reading | None:
        """Return the pass's input, with the selection that the pass itself can make, if any."""
        reading = self.reading
        if reading is None or not selects or len(reading.tokens) < self.num_unread:
            return reading
        return replace(reading, selection=self.generation.selection(self.tree))

    def under_way(self, num_outcomes: int) -> PendingPass:
        """Return the sequence's part in the running pass, for drafting its likely outcomes."""
        generation = self.generation
        most = generation.max_depth - 1
        return PendingPass(generation.tokens, self.proposed, self.tree, num_outcomes, most)

    def note_piece(self, states: States) -> None:
        """Record that a prompt chunk was read."""
        self.num_read += self.width
        self.pieces.append(states)

    def verified(self, read: Read, next_token: int) -> Verified:
        """Return the sequence's part of the pass and the result."""
        states = read.states
        last_token = int(self.generation.tokens[-1])
        pieces, self.pieces = self.pieces, []
        if pieces and self.generation.statistics.num_passes:  # restarted and read again
            states = {number: rows[-1:] for number, rows in states.items()}
        elif len(pieces) > 1:
            states = {number: torch.cat([each[number] for each in pieces]) for number in states}
        return Verified(
            last_token, self.tree, read.logits, self.path, next_token, states, read.choices
        )

    def _take(self, reading: Reading) -> None:
        self.reading, self.path = reading, np.empty(0, np.int64)
        self.next_token, self.tokens, self.learn_s = None, [], 0.0


class _Batch:
    """Decodes sequences together, in shared passes, until all are over.

    Args:
        decoder: holds the target, the drafter and the budget.
        waiting: sequences to decode, in the order in which they start.
        num_places: most sequences decoded at the same time.
    """

    def __init__(self, decoder: Decoder, waiting: Iterator[Generation], num_places: int) -> None:
        self._drafting = following(decoder.followers)
        self._ahead = _Ahead(self._drafting, decoder.num_ahead) if decoder.num_ahead else None
        self._target, self._budget = decoder.target, decoder.budget
        self._waiting = waiting
        self._returned: deque[Generation] = deque()
        self._rows: list[_Row] = []
        self._free = list(range(num_places))
        self._reads_in_pieces = num_places > 1 and decoder.target.packs

    def steps(self) -> Iterator[tuple[Generation, list[int]]]:
        """Admit, draft, verify, accept and commit, until all sequences are over."""
        self._target.renew()
        self._target.make_places(len(self._free))
        try:
            while (over := self._admitted()) or self._rows:
                yield from ((generation, []) for generation in over)
                for row in self._step():
                    is_over = self._has_ended(row)
                    if row.tokens or is_over:
                        yield row.generation, row.tokens
                    if not self._is_shown(row) and is_over:
                        yield row.generation, []
        finally:
            self._leave()

    def _step(self) -> list[_Row]:
        """Run one pass; return the rows that took part in it, ordered by place."""
        began_s = perf_counter()
        rows, load = self._planned()
        draft_s = self._draft(rows, load)
        read_s = perf_counter()
        passed = self._read(rows)
        for row, read in passed:
            self._accept(row, read)
        self._target.commit_all([(row.place, row.path) for row, _ in passed if row.is_accepted])
        target_s = perf_counter() - read_s
        for row, read in passed:
            self._commit(row, read)
        whole_s, rows = perf_counter() - began_s, [row for row, _ in passed]
        self._learn(rows, load, target_s, whole_s - target_s - draft_s)
        _charge(rows, draft_s, target_s, whole_s)
        return rows

    def _planned(self) -> tuple[list[_Row], Load]:
        """Choose the rows of the next pass and how many tokens of each prompt it reads."""
        contexts = [len(row.generation.tokens) for row in self._rows if row.is_going]
        unread = [row for row in self._rows if not row.is_going]
        sizes = [row.num_unread for row in unread]
        most_rows = self._target.most_rows
        if self._reads_in_pieces:
            sizes = _shares(sizes, _room_to_read(len(unread), len(contexts), most_rows))
        for row, size in zip(unread, sizes, strict=True):
            row.read_next(size)
        rows = [row for row in self._rows if row.is_going or row.width]
        return rows, Load(contexts, sum(sizes), most_rows)

    def _draft(self, rows: Sequence[_Row], load: Load) -> float:
        """Draft a tree for each row whose prompt was read; return the seconds that this took."""
        if self._ahead is not None:
            self._ahead.begin_drafting()
        going = [row for row in rows if row.is_going]
        for row in going:
            row.verify(DraftTree.empty())
            row.proposed = row.drafted = row.tree
        asked = [row for row in going if row.generation.is_drafted]
        max_nodes = min(self._budget.ask(load), self._target.max_nodes) if asked else 0
        if max_nodes == 0:
            return 0.0
        began_s = perf_counter()
        num_nodes = max_nodes if self._ahead is None else self._ahead.nodes_to_ask(max_nodes)
        trees = self._drafting.draft_together(
            [(row.generation.drafter, row.generation.nodes_to_ask(num_nodes)) for row in asked]
        )
        trees = [
            row.generation.forced(tree, num_nodes) for row, tree in zip(asked, trees, strict=True)
        ]
        draft_s = perf_counter() - began_s
        for row, tree in zip(asked, trees, strict=True):
            row.proposed = tree
            allowed = tree.prefix(row.generation.nodes_within(max_nodes))
            fitting = within_depth(allowed, row.generation.max_depth)
            row.drafted = self._target.fitting(fitting)
        shares = self._budget.share([row.drafted for row in going], load, draft_s)
        for row, tree in zip(going, shares, strict=True):
            row.verify(tree)
        return draft_s

    def _read(self, rows: list[_Row]) -> list[tuple[_Row, Read]]:
        """Run the pass for all rows; if memory runs out, retry with smaller trees or fewer rows."""
        if self._ahead is not None:
            self._ahead.begin_pass(rows)
        while rows:
            try:
                asked = (row.asking(selects=self._target.pads_passes) for row in rows)
                reads = self._target.read([reading for reading in asked if reading is not None])
            except OutOfMemoryError as error:
                rows = self._lightened(rows, error)
            else:
                return list(zip(rows, reads, strict=True))
        return []

    def _lightened(self, rows: list[_Row], error: OutOfMemoryError) -> list[_Row]:
        """Return rows that need less memory: with halved trees, or without the latest sequence."""
        if any(len(row.tree) for row in rows):
            self._budget.halve()
            for row in rows:
                if row.is_going:
                    row.verify(row.tree.prefix(len(row.tree) // 2))
            return rows
        latest = max(self._rows, key=lambda row: row.generation.number)
        if len(self._rows) == 1:
            latest.generation.fail(error)
            return []
        self._rows.remove(latest)
        self._free.clear()
        self._returned.appendleft(latest.generation)
        return [row for row in rows if row is not latest]

    def _accept(self, row: _Row, read: Read) -> None:
        """Accept a path of the tree, unless the pass read only a prompt chunk."""
        if not row.is_going:
            row.note_piece(read.states)
            if row.num_unread:
                return
        try:
            row.path, row.next_token = row.generation.accepted(row.tree, read)
        except Exception as error:  # noqa: BLE001  an error in a rule ends only its own sequence
            row.generation.fail(error)

    def _learn(self, rows: Sequence[_Row], load: Load, seconds: float, other_s: float) -> None:
        """Let the budget learn from the pass if every running sequence got a result."""
        outcomes = [
            PassOutcome(row.tree, row.path, row.next_token)
            for row in rows
            if row.is_accepted and row.next_token is not None
        ]
        if outcomes and len(outcomes) == len(load.contexts):
            self._budget.learn(outcomes, load, seconds, other_s)

    def _commit(self, row: _Row, read: Read) -> None:
        """Let the drafter learn from the pass, and commit the pass's tokens."""
        if row.next_token is None:
            return
        generation, began_s = row.generation, perf_counter()
        try:
            generation.drafter.learn(row.verified(read, row.next_token))
            row.learn_s = perf_counter() - began_s
            row.tokens = generation.commit(row.tree, row.path, row.next_token)
        except Exception as error:  # noqa: BLE001  a stop rule's error ends only its own sequence
            generation.fail(error)

    def _admitted(self) -> list[Generation]:
        """Fill the free places; return the sequences that are over without another pass."""
        over = [row.generation for row in list(self._rows) if self._has_ended(row)]
        while self._free and (generation := self._next()) is not None:
            row = _Row(generation, self._place_for(generation), len(generation.tokens))
            insort(self._rows, row, key=lambda each: each.place)
            if generation.is_wanted:
                self._begin(row)
            if self._has_ended(row):
                over.append(generation)
        return over

    def _place_for(self, generation: Generation) -> int:
        """Take the free place that holds the longest prefix of the sequence."""
        place = self._target.best_place(generation.tokens, self._free)
        self._free.remove(place)
        return place

    def _next(self) -> Generation | None:
        return self._returned.popleft() if self._returned else next(self._waiting, None)

    def _begin(self, row: _Row) -> None:
        generation, past = row.generation, row.generation.past
        if past is None:
            row.num_read = self._target.resume(generation.tokens, row.place)
        else:
            row.num_read = self._target.adopt(past, row.place)
        try:
            row.generation.begin()
        except RetrieverError as error:
            row.generation.fail(error)

    def _has_ended(self, row: _Row) -> bool:
        """Return whether a sequence is over; if it is, free its place."""
        if row.generation.is_wanted:
            return False
        self._rows.remove(row)
        self._free.append(row.place)
        row.generation.take_over(self._target, row.place)
        row.generation.end()
        return True

    def _is_shown(self, row: _Row) -> bool:
        """Show a pass to the sequence's observer; return whether the observer raised no error."""
        try:
            if row.tokens:
                row.generation.show(row)
        except Exception as error:  # noqa: BLE001  as above
            row.generation.fail(error)
            return False
        return True

    def _leave(self) -> None:
        """End the remaining sequences, after the last pass or when the caller leaves early."""
        self._target.release()
        for generation in (*(row.generation for row in self._rows), *self._returned):
            generation.end()


class _Ahead:
    """Requests drafts for the likely outcomes of a pass while the pass runs.

    If the actual outcome is among them, its draft is ready when the pass ends, and the loop need
    not wait for the drafter. For any other outcome, a draft is requested after the pass, as usual.
    """

    def __init__(self, drafting: FollowingDrafter, num_outcomes: int) -> None:
        self._drafting, self._num_outcomes = drafting, num_outcomes
        self._num_asked = 0
        self._pass_began_s: float | None = None
        self._busy_s = 0.0

    def begin_drafting(self) -> None:
        """Record how long the last pass took, and forget what was requested before it."""
        if self._pass_began_s is not None:
            self._busy_s = perf_counter() - self._pass_began_s
        self._num_asked = 0

    def nodes_to_ask(self, max_nodes: int) -> int:
        """Return how many nodes per tree to request if a pass may verify `max_nodes`."""
        self._num_asked = max(max_nodes, min(max_nodes + _SPARE, _MOST_ASKED))
        return self._num_asked

    def begin_pass(self, rows: Sequence[_Row]) -> None:
        """Request drafts for a pass's likely outcomes, if drafts were requested before the pass."""
        asked = [
            (row.generation.drafter, self._num_asked, row.under_way(self._num_outcomes))
            for row in rows
            if self._num_asked and row.is_verified and row.may_go_on_drafted
        ]
        if asked:
            self._drafting.ask_ahead(asked, self._busy_s)
        self._pass_began_s = perf_counter()


def _room_to_read(num_unread: int, num_going: int, most_rows: int | None) -> int:
    """Return how many prompt tokens a pass reads, within the most rows that CUDA graphs hold."""
    if num_going == 0:
        return _MOST_READ
    room = min(_PIECE * num_unread, _MOST_READ)
    return room if most_rows is None else max(min(room, most_rows - num_going), 1)


def _shares(wanted: Sequence[int], room: int) -> list[int]:
    """Divide the room evenly, up to each wanted size, so that no prompt waits for a long one."""
    shares = list(wanted)
    for done, at in enumerate(sorted(range(len(wanted)), key=wanted.__getitem__)):
        shares[at] = min(wanted[at], -(-room // (len(wanted) - done)))
        room -= shares[at]
    return shares


def _charge(rows: Sequence[_Row], draft_s: float, target_s: float, whole_s: float) -> None:
    """Divide drafting time equally among verified sequences, and pass time by their rows."""
    num_drafted = sum(row.is_verified for row in rows)
    width = sum(row.width for row in rows)
    host_s = whole_s - draft_s - target_s - sum(row.learn_s for row in rows)
    for row in rows:
        row.num_verified, row.pass_width = num_drafted, width
        statistics = row.generation.statistics
        drafted_s = row.learn_s + (draft_s / num_drafted if row.is_verified else 0.0)
        passed_s = target_s * row.width / width
        statistics.draft_s += drafted_s
        statistics.target_s += passed_s
        statistics.prompt_s += 0.0 if row.is_verified else passed_s
        statistics.total_s += drafted_s + passed_s + host_s / len(rows)
