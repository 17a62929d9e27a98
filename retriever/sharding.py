"""A corpus whose segments are spread over several servers, as one drafter."""

from collections.abc import Iterable, Sequence
from concurrent.futures import Future, wait
from dataclasses import replace
from functools import partial
from threading import Lock
from typing import Any, Final, Self

from numpy.typing import ArrayLike

from retriever.agreement import Agreement
from retriever.client import DEFAULT_TIMEOUT_S, RemoteDrafter
from retriever.drafter import DraftRequest
from retriever.errors import (
    DrafterUnavailableError,
    InvalidRequestError,
    LimitExceededError,
    OutOfSequenceError,
    SessionExistsError,
    UnknownSessionError,
    VocabularyMismatchError,
)
from retriever.limits import check_session_name, checked_tokens
from retriever.merging import merge_trees
from retriever.remote.credentials import Credentials
from retriever.shards import Shard, ShardState, Trees
from retriever.tracking import TrackedSequence, TrackedStep
from retriever.tree import DraftTree

DEFAULT_DEADLINE_S: Final = 0.02
"""How long a step waits for shards, in seconds."""

_Job = Future[Any] | None


class ShardedDrafter:
    """Drafts from several servers that each hold a part of a corpus; a `Drafter`.

    Every step goes to all servers at the same time, and what they answer within the deadline is
    merged. A server that is late, down or gone costs its evidence and never the step: what it has
    missed is sent with the next step that reaches it, and one that was lost is tried again, at
    growing intervals, and told the whole sequence. Where none answers, trees are empty.

    All servers learn from all sequences, so that each drafts as well as alone, and recent outputs
    survive the loss of any. Safe to call from any thread.

    Args:
        addresses: of the servers, `host:port` or `unix:/path`; at least one, each once.
        deadline_s: longest wait of a step or of a close, in seconds.
        timeout_s: longest wait of `open`, and what a server may take for any answer before it
            counts as lost, in seconds.
        vocabulary_fingerprint: of the tokenizer at hand. If not given, servers must agree among
            themselves.
        credentials: what to show to all of them, and whom to trust.

    Raises:
        CredentialsError: a file of the credentials cannot be used.
        InvalidRequestError: there is no address, or one twice.
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
        self._sequences: dict[str, TrackedSequence] = {}
        self._lock = Lock()
        agreement = Agreement(vocabulary_fingerprint)
        client = partial(_client, timeout_s=timeout_s, credentials=credentials)
        self._shards = [Shard(address, client, agreement) for address in _checked(addresses)]

    @property
    def shards(self) -> tuple[ShardState, ...]:
        """How each shard does, in the order of their addresses."""
        return tuple(shard.state for shard in self._shards)

    def open(self, session: str, prompt: ArrayLike, *, remember: bool = True) -> None:
        """Begin a sequence; see `Drafter.open`. Servers that cannot be reached are no error.

        Raises:
            VocabularyMismatchError: a shard, which is named, is of another vocabulary.
        """
        check_session_name(session)
        sequence = TrackedSequence(checked_tokens(prompt, None), remember=remember)
        with self._lock:
            if session in self._sequences:
                raise SessionExistsError(f"session {session!r} is open already")
            self._sequences[session] = sequence
        try:
            _await([shard.open(session, sequence) for shard in self._shards], self._timeout_s)
            for shard in self._shards:
                if shard.refusal is not None:
                    raise shard.refusal
        except InvalidRequestError:
            self.close(session)
            raise

    def draft(self, requests: Sequence[DraftRequest]) -> list[DraftTree]:
        """Commit new tokens and draft for each sequence; see `Drafter.draft`.

        It is never an error that servers cannot be reached.
        """
        with self._lock:
            steps = self._checked_steps(requests)
            for step in steps:
                step.sequence.extend(step.request.new_tokens.tolist())
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
        """End a sequence; see `Drafter.close`. Servers that are late end it on their own."""
        tokens = checked_tokens([] if new_tokens is None else new_tokens, None)
        with self._lock:
            sequence = self._sequence(session)
            del self._sequences[session]
            sequence.extend(tokens.tolist())
        _await([shard.close(session, sequence) for shard in self._shards], self._deadline_s)

    def shut_down(self) -> None:
        """Close the connections, once servers know what was closed."""
        for shard in self._shards:
            shard.shut_down()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.shut_down()

    def _sequence(self, session: str) -> TrackedSequence:
        if session not in self._sequences:
            raise UnknownSessionError(f"no session {session!r} is open: open it first")
        return self._sequences[session]

    def _checked_steps(self, requests: Sequence[DraftRequest]) -> list[TrackedStep]:
        if len({request.session for request in requests}) != len(requests):
            raise InvalidRequestError("a step names one session twice")
        return [self._checked_step(request) for request in requests]

    def _checked_step(self, request: DraftRequest) -> TrackedStep:
        sequence = self._sequence(request.session)
        tokens = checked_tokens(request.new_tokens, None)
        if len(sequence) + len(tokens) != request.length:
            raise OutOfSequenceError(
                f"session {request.session!r} has {len(sequence)} tokens and the request brings "
                f"{len(tokens)}, but states a length of {request.length}: a step was lost or "
                "repeated; close the session and open it again"
            )
        return TrackedStep(replace(request, new_tokens=tokens), sequence)

    def _take_back(self, steps: list[TrackedStep], jobs: Sequence[_Job]) -> None:
        """Keep nothing of a step that is at fault, nor let a shard that took it in."""
        for step in steps:
            step.sequence.shorten(step.request.length - len(step.request.new_tokens))
        for shard, job in zip(self._shards, jobs, strict=True):
            if job is None or not job.done() or job.exception() is None:
                shard.restart()


def connect(
    addresses: Sequence[str],
    *,
    deadline_s: float = DEFAULT_DEADLINE_S,
    vocabulary_fingerprint: str = "",
    credentials: Credentials | None = None,
) -> "RemoteDrafter | ShardedDrafter":
    """Return a client of one service, or of several that each hold a part of a corpus.

    Args:
        addresses: of the services.
        deadline_s: longest wait of a step for one of several, in seconds.
        vocabulary_fingerprint: of the tokenizer at hand; empty if it is not known.
        credentials: what to show, and whom to trust; None for services that ask for nothing.

    Raises:
        CredentialsError: a file of the credentials cannot be used.
        InvalidRequestError: there is no address, or one twice.
    """
    if len(addresses) == 1:
        return RemoteDrafter(
            addresses[0], vocabulary_fingerprint=vocabulary_fingerprint, credentials=credentials
        )
    return ShardedDrafter(
        addresses,
        deadline_s=deadline_s,
        vocabulary_fingerprint=vocabulary_fingerprint,
        credentials=credentials,
    )


def _await(jobs: Sequence[_Job], timeout_s: float) -> list[Any]:
    """Return what was answered in time, None for each shard that did not answer.

    Raises:
        InvalidRequestError: a shard finds what was asked at fault.
        LimitExceededError: it is beyond the limits of all that answered.
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


def _checked(addresses: Iterable[str]) -> list[str]:
    listed = list(addresses)
    if not listed:
        raise InvalidRequestError("no address is given: name at least one draft service")
    if len(set(listed)) != len(listed):
        raise InvalidRequestError("an address is given twice: its evidence would count twice")
    return listed
