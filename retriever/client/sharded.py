"""One drafter over several servers that each hold a part of a corpus."""

from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from logging import getLogger
from threading import Lock
from typing import Any, Final, NamedTuple, Self

from numpy.typing import ArrayLike

from retriever.backoff import Backoff
from retriever.client.conversation import SequenceStep
from retriever.client.credentials import Credentials
from retriever.client.merging import merge_trees
from retriever.client.planner import checked_addresses
from retriever.client.resilient import ResilientDrafter
from retriever.client.strict import DEFAULT_TIMEOUT_S, RemoteDrafter
from retriever.drafter import DEFAULT, DraftRequest, OfOneProcess, Prediction, SequenceOptions
from retriever.errors import (
    DrafterUnavailableError,
    InvalidRequestError,
    LimitExceededError,
    OutOfSequenceError,
    RetrieverError,
    UnknownSessionError,
    VocabularyMismatchError,
)
from retriever.follower import Follower, Followers
from retriever.limits import check_session_name, checked_tokens
from retriever.sequences import (
    OpenSessions,
    TokenSequence,
    check_named_once,
    check_step,
    checked_options,
)
from retriever.tree import DraftTree


class Agreement:
    """The vocabulary that all shards must have: the stated one, or that of the first to answer.

    Args:
        fingerprint: of the caller's tokenizer; empty if unknown.
    """

    def __init__(self, fingerprint: str) -> None:
        self.fingerprint = fingerprint
        self._whose = "the tokenizer at hand"
        self._lock = Lock()

    def check(self, address: str, fingerprint: str) -> None:
        """Check the vocabulary of a shard.

        Raises:
            VocabularyMismatchError: it differs.
        """
        with self._lock:
            if not self.fingerprint:
                self.fingerprint, self._whose = fingerprint, f"shard {address}"
        if fingerprint != self.fingerprint:
            raise VocabularyMismatchError(
                f"shard {address} is of another vocabulary (fingerprint {fingerprint[:12]}\u2026) "
                f"than {self._whose} ({self.fingerprint[:12]}\u2026): "
                "build all shards with the model's own --tokenizer"
            )


_log = getLogger(__name__)

Trees = list[DraftTree | None]
"""One for each sequence of a step; None where the server has no room for the sequence."""

Connect = Callable[[str, str], RemoteDrafter]
"""Makes a client of a server from its address and the expected fingerprint."""


@dataclass(frozen=True, slots=True)
class ShardState:
    """The state of a shard.

    Attributes:
        address: of its server.
        is_up: whether the last call reached it.
        missed: steps without its drafts, because it was late or down.
        failures: failed calls and connections.
    """

    address: str
    is_up: bool
    missed: int
    failures: int


class _Connection(NamedTuple):
    """A client of a shard's server, and what the server knows of each sequence."""

    remote: RemoteDrafter
    followers: Followers
    following: dict[str, Follower]


class Shard:
    """A server, what it knows of each sequence, and the thread that talks to it.

    Calls run in order. After a failure the server's sessions are dropped and calls pause
    (back-off); the next call then reconnects and opens the sessions it needs with all their tokens.

    Args:
        address: of the server.
        connect: makes a client.
        agreement: the vocabulary that it must have.

    Attributes:
        missed: steps without its drafts; counted by the caller.
        refusal: why its vocabulary is refused; None where it is not.
    """

    def __init__(self, address: str, connect: Connect, agreement: Agreement) -> None:
        self._address = address
        self._connect = connect
        self._agreement = agreement
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="foredraft-shard")
        self._connection: _Connection | None = None
        self._old: _Connection | None = None  # its sessions are not closed yet
        self._step: Future[Trees] | None = None
        self._is_up = True
        self._backoff = Backoff()
        self._failures = 0
        self.missed = 0
        self.refusal: VocabularyMismatchError | None = None

    @property
    def state(self) -> ShardState:
        """The state of the shard."""
        return ShardState(self._address, self._is_up, self.missed, self._failures)

    def open(self, session: str, sequence: TokenSequence) -> Future[bool] | None:
        """Open a session; None where the shard is down or late."""
        is_awaited = self._is_up and not self._is_late()
        job = self._submit(self._open, session, sequence)
        return job if is_awaited else None

    def draft(self, steps: Sequence[SequenceStep]) -> Future[Trees] | None:
        """Draft for a step; None where the shard is down or late.

        While an earlier step has no answer, this one is skipped; its tokens are sent with the next.
        """
        if self._is_late():
            return None
        is_awaited = self._is_up
        self._step = self._submit(self._draft, steps)
        return self._step if is_awaited else None

    def close(self, session: str, sequence: TokenSequence) -> Future[bool] | None:
        """Close a session; None where the shard is down or late."""
        is_awaited = self._is_up and not self._is_late()
        job = self._submit(self._close, session, sequence)
        return job if is_awaited else None

    def restart(self) -> None:
        """Disconnect; sessions are opened again at their next draft."""
        self._thread.submit(self._disconnect)

    def shut_down(self) -> None:
        """Disconnect once all calls have run."""
        self._thread.submit(self._disconnect)
        self._thread.submit(self._drop_old)
        self._thread.shutdown()

    def _is_late(self) -> bool:
        return self._step is not None and not self._step.done()

    def _is_paused(self) -> bool:
        return not self._is_up and not self._backoff.is_over()

    def _submit(self, job: Callable[..., Any], *arguments: Any) -> Future[Any] | None:
        return None if self._is_paused() else self._thread.submit(self._attempt, job, *arguments)

    # The methods below run in the shard's thread.

    def _attempt(self, job: Callable[..., Any], *arguments: Any) -> Any:
        """Run a call; a failure begins a back-off."""
        if self._is_paused():
            raise DrafterUnavailableError(f"shard {self._address} is down")
        try:
            result = job(*arguments)
        except VocabularyMismatchError as error:
            self.refusal = error
            self._fail(error)
            raise
        except RetrieverError as error:
            if isinstance(error, InvalidRequestError) and not isinstance(error, OutOfSequenceError):
                raise type(error)(f"shard {self._address}: {error}") from error
            self._fail(error)
            raise DrafterUnavailableError(f"shard {self._address}: {error}") from error
        self._backoff.succeed()
        return result

    def _fail(self, error: RetrieverError) -> None:
        if self._is_up:
            _log.warning("drafts go on without shard %s: %s", self._address, error)
        self._failures += 1
        self._disconnect()
        self._backoff.fail()
        self._is_up = False

    def _disconnect(self) -> None:
        """Give up the connection; its sessions are closed once there is another."""
        connection, self._connection = self._connection, None
        if connection is None:
            return
        if connection.following:
            self._drop_old()
            self._old = connection
        else:
            connection.remote.shut_down()

    def _drop_old(self) -> None:
        old, self._old = self._old, None
        if old is not None:
            old.remote.shut_down()

    def _end_stale(self) -> None:
        """Close sessions that a slow server still has; they will be opened again."""
        if self._old is None:
            return
        with suppress(RetrieverError):  # otherwise the server ends them as idle
            for session in self._old.following:
                with suppress(UnknownSessionError):
                    self._old.remote.close(session, remember=False)
        self._drop_old()

    def _connected(self) -> _Connection:
        if self._connection is None:
            remote = self._connect(self._address, self._agreement.fingerprint)
            self._connection = _Connection(remote, Followers(remote), {})
            for index in remote.list_indexes():
                self._agreement.check(self._address, index.vocabulary_fingerprint)
            self._is_up, self.refusal = True, None
            self._end_stale()
        return self._connection

    def _open(self, session: str, sequence: TokenSequence) -> bool:
        connection = self._connected()
        follower = connection.followers.follow(sequence, session)
        follower.open()
        connection.following[session] = follower
        return True

    def _draft(self, steps: Sequence[SequenceStep]) -> Trees:
        connection = self._connected()
        asked: dict[int, Follower] = {}
        for at, step in enumerate(steps):
            if (follower := self._followed(connection, step)) is not None:
                follower.tell_predictions()
                asked[at] = follower
        requests = [follower.catching_up(steps[at].request) for at, follower in asked.items()]
        trees: Trees = [None] * len(steps)
        drafted = connection.remote.draft(requests)
        for (at, follower), tree in zip(asked.items(), drafted, strict=True):
            follower.told(steps[at].request.length)
            trees[at] = tree
        return trees

    def _followed(self, connection: _Connection, step: SequenceStep) -> Follower | None:
        """Open a session unknown to the server; None where the server has no room for it."""
        session = step.request.session
        if session not in connection.following:
            try:
                self._open(session, step.sequence)
            except LimitExceededError:
                self._failures += 1
        return connection.following.get(session)

    def _close(self, session: str, sequence: TokenSequence) -> bool:
        following = self._connection.following if self._connection is not None else {}
        if session not in following:
            if not sequence.options.remember or not len(sequence.output):
                return True
            self._open(session, sequence)  # so that it receives the missed tokens
        connection = self._connected()
        follower = connection.following.pop(session)
        connection.remote.close(session, follower.unsent())
        return True


DEFAULT_DEADLINE_S: Final = 0.02
"""How long a step waits for shards, in seconds: longer keeps late evidence, shorter bounds the
delay of a step by a slow shard."""

_Job = Future[Any] | None


class ShardedDrafter(OfOneProcess):
    """Drafts from several servers that each hold a part of a corpus; a `Drafter`.

    Every step goes to all servers at once, and answers within the deadline are merged. A server
    that is late or down costs its evidence, never the step: missed tokens are sent with the next
    step that reaches it. A lost server is retried at growing intervals and receives the whole
    sequence. Where no server answers, trees are empty.

    All servers learn from all sequences, so that each drafts as well as alone, and generations
    survive the loss of any. Thread-safe.

    Args:
        addresses: of the servers, `host:port` or `unix:/path`; at least one, each once.
        deadline_s: longest wait of a step or of a close, in seconds.
        timeout_s: longest wait of `open`, and for any answer before a server counts as lost, in
            seconds.
        vocabulary_fingerprint: of the caller's tokenizer. If not given, servers must agree with
            each other.
        credentials: to send to all servers and to verify them with.

    Raises:
        CredentialsError: a file of the credentials cannot be used.
        InvalidRequestError: no address, or a duplicate.
    """

    def __init__(
        self,
        addresses: Iterable[str],
        *,
        deadline_s: float = DEFAULT_DEADLINE_S,
        timeout_s: float = DEFAULT_TIMEOUT_S,
        vocabulary_fingerprint: str = "",
        credentials: Credentials | None = None,
    ) -> None:
        self._deadline_s = deadline_s
        self._timeout_s = timeout_s
        self._sequences: OpenSessions[str, TokenSequence] = OpenSessions()
        self._lock = Lock()
        agreement = Agreement(vocabulary_fingerprint)
        client = partial(_client, timeout_s=timeout_s, credentials=credentials)
        self._shards = [
            Shard(address, client, agreement) for address in checked_addresses(addresses)
        ]

    @property
    def shards(self) -> tuple[ShardState, ...]:
        """The state of each shard, in the order of the addresses."""
        return tuple(shard.state for shard in self._shards)

    def open(
        self,
        session: str,
        prompt: ArrayLike,
        options: SequenceOptions = DEFAULT,
    ) -> None:
        """Begin a sequence; see `Drafter.open`.

        Unreachable servers are not an error.

        Raises:
            VocabularyMismatchError: a shard has another vocabulary; the message names it.
        """
        check_session_name(session)
        options = checked_options(options)
        sequence = TokenSequence(checked_tokens(prompt, None), options=options)
        with self._lock:
            self._sequences.add(session, sequence)
        try:
            _await([shard.open(session, sequence) for shard in self._shards], self._timeout_s)
            for shard in self._shards:
                if shard.refusal is not None:
                    raise shard.refusal
        except InvalidRequestError:
            self.close(session)
            raise

    def add_predictions(self, session: str, predictions: Sequence[Prediction]) -> None:
        """Add what a sequence is expected to contain; see `EmbeddedDrafter.add_predictions`.

        Servers are told with its next step.
        """
        with self._lock:
            self._sequences.get(session).expect(predictions)

    def draft(self, requests: Sequence[DraftRequest]) -> list[DraftTree]:
        """Commit new tokens and draft for each sequence; see `Drafter.draft`.

        Unreachable servers are not an error.
        """
        with self._lock:
            check_named_once(requests)
            steps = [self._checked_step(request) for request in requests]
            for step in steps:
                step.sequence.extend(step.request.new_tokens)
            jobs = [shard.draft(steps) for shard in self._shards]
            try:
                answers: list[Trees | None] = _await(jobs, self._deadline_s)
            except InvalidRequestError:
                self._take_back(steps, jobs)
                raise
        for shard, answer in zip(self._shards, answers, strict=True):
            shard.missed += answer is None
        return [
            merge_trees(
                [tree for trees in answers if trees and (tree := trees[at]) is not None],
                request.budget_nodes,
                request.min_probability,
            )
            for at, request in enumerate(requests)
        ]

    def close(self, session: str, new_tokens: ArrayLike | None = None) -> None:
        """End a sequence; see `Drafter.close`. Late servers end it later."""
        tokens = checked_tokens([] if new_tokens is None else new_tokens, None)
        with self._lock:
            sequence = self._sequences.remove(session)
            sequence.extend(tokens)
        _await([shard.close(session, sequence) for shard in self._shards], self._deadline_s)

    def shut_down(self) -> None:
        """Close the connections, once pending closes are sent."""
        for shard in self._shards:
            shard.shut_down()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.shut_down()

    def _checked_step(self, request: DraftRequest) -> SequenceStep:
        sequence = self._sequences.get(request.session)
        tokens = checked_tokens(request.new_tokens, None)
        check_step(request, len(sequence), len(tokens))
        return SequenceStep(request._replace(new_tokens=tokens), sequence)

    def _take_back(self, steps: list[SequenceStep], jobs: Sequence[_Job]) -> None:
        """Take back a faulty step, also from shards that accepted it."""
        for step in steps:
            step.sequence.shorten(step.request.length - len(step.request.new_tokens))
        for shard, job in zip(self._shards, jobs, strict=True):
            if job is None or not job.done() or job.exception() is None:
                shard.restart()


def connect(
    addresses: str | Sequence[str],
    *,
    deadline_s: float = DEFAULT_DEADLINE_S,
    vocabulary_fingerprint: str = "",
    credentials: Credentials | None = None,
) -> "RemoteDrafter | ShardedDrafter | ResilientDrafter":
    """Return a client of one service, of several that each hold a part of a corpus, or of replicas.

    Args:
        addresses: of the services; a string is the address of one. Addresses with commas between
            them, in one string, are replicas: each session is at one of them.
        deadline_s: longest wait of a step for one of several, in seconds.
        vocabulary_fingerprint: of the caller's tokenizer; empty if unknown.
        credentials: to send and to verify the server with; None for services that need none.

    Raises:
        CredentialsError: a file of the credentials cannot be used.
        InvalidRequestError: no address, a duplicate, or replicas of a part of a corpus.
    """
    listed = [addresses] if isinstance(addresses, str) else addresses
    if any("," in each for each in listed):
        if len(listed) > 1:
            raise InvalidRequestError(
                "parts of a corpus have no replicas: name one service for each part, or the "
                "replicas of a whole corpus in one address, with commas"
            )
        replicas = ResilientDrafter(
            [each.strip() for each in listed[0].split(",")],
            deadline_s=deadline_s,
            vocabulary_fingerprint=vocabulary_fingerprint,
            credentials=credentials,
        )
        replicas.wait(DEFAULT_TIMEOUT_S)
        return replicas
    if len(listed) == 1:
        return RemoteDrafter(
            listed[0], vocabulary_fingerprint=vocabulary_fingerprint, credentials=credentials
        )
    return ShardedDrafter(
        listed,
        deadline_s=deadline_s,
        vocabulary_fingerprint=vocabulary_fingerprint,
        credentials=credentials,
    )


def _await(jobs: Sequence[_Job], timeout_s: float) -> list[Any]:
    """Return the answers in time, None for each shard without one.

    Raises:
        InvalidRequestError: a shard refuses the request as invalid.
        LimitExceededError: it exceeds the limits of all shards that answered.
    """
    wait([job for job in jobs if job is not None], timeout_s)
    answers: list[Any] = []
    beyond: list[LimitExceededError] = []
    for job in jobs:
        try:
            answers.append(job.result() if job is not None and job.done() else None)
        except (DrafterUnavailableError, VocabularyMismatchError):
            answers.append(None)
        except LimitExceededError as error:
            answers.append(None)
            beyond.append(error)
    if beyond and not any(answers):
        raise beyond[0]
    return answers


def _client(
    address: str, fingerprint: str, *, timeout_s: float, credentials: Credentials | None
) -> RemoteDrafter:
    return RemoteDrafter(
        address,
        timeout_s=timeout_s,
        vocabulary_fingerprint=fingerprint,
        credentials=credentials,
    )
