"""The protocol of one stream: requests, responses, and what the server knows of each session.

This module does no I/O, so the synchronous and the asynchronous client share it.
"""

import secrets
import time
from collections import Counter, deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum
from itertools import count, islice
from logging import getLogger
from types import MappingProxyType
from typing import Final, NamedTuple

import grpc

from retriever.backoff import Backoff
from retriever.drafter import DEFAULT, DraftRequest, Prediction, TokenIds
from retriever.errors import (
    DrainingError,
    InvalidTreeError,
    LimitExceededError,
    OutOfSequenceError,
    SessionExistsError,
    UnknownSessionError,
    VocabularyMismatchError,
)
from retriever.sequences import TokenSequence
from retriever.tree import DraftTree
from retriever.v1 import retriever_pb2 as pb
from retriever.wire.messages import (
    PACKED,
    add_step,
    addition_message,
    closing_message,
    opening_message,
    outcome_trees_from,
    pad_request,
    trees_from_messages,
)
from retriever.wire.statuses import LATE, Refusal, refusal_in


class FailOpen(StrEnum):
    """Why the server did not draft a step of a sequence.

    `DOWN`: the server cannot be reached. `BUSY`: the server has not answered an earlier step yet.
    `TIMEOUT`: the server did not answer this step in time. `LOST`: the server did not know the
    session, which is opened again. `LIMIT`: a limit was reached. `VOCABULARY`: the server is for
    another tokenizer. `REFUSED`: the server refused for another reason. `INVALID`: the response has
    no valid tree. `DRAINING`: the server is about to shut down, and no other one is available.
    """

    DOWN = "down"
    BUSY = "busy"
    TIMEOUT = "timeout"
    LOST = "lost"
    LIMIT = "limit"
    VOCABULARY = "vocabulary"
    REFUSED = "refused"
    INVALID = "invalid"
    DRAINING = "draining"


FailOpens = Counter[FailOpen]
"""Number of sequence steps without a server's draft, by reason."""

_OF_REASON: Final = {
    OutOfSequenceError.reason: FailOpen.LOST,
    SessionExistsError.reason: FailOpen.LOST,
    UnknownSessionError.reason: FailOpen.LOST,
    LATE: FailOpen.TIMEOUT,
    VocabularyMismatchError.reason: FailOpen.VOCABULARY,
    LimitExceededError.reason: FailOpen.LIMIT,
    DrainingError.reason: FailOpen.DRAINING,
}
# For servers that send no details.
_OF_CODE: Final = {
    grpc.StatusCode.ABORTED.value[0]: FailOpen.LOST,
    grpc.StatusCode.ALREADY_EXISTS.value[0]: FailOpen.LOST,
    grpc.StatusCode.DEADLINE_EXCEEDED.value[0]: FailOpen.TIMEOUT,
    grpc.StatusCode.FAILED_PRECONDITION.value[0]: FailOpen.VOCABULARY,
    grpc.StatusCode.NOT_FOUND.value[0]: FailOpen.LOST,
    grpc.StatusCode.RESOURCE_EXHAUSTED.value[0]: FailOpen.LIMIT,
}


_ON_THE_WIRE: Final = {
    reason: pb.FailOpenReason.Value(f"FAIL_OPEN_REASON_{reason.name}") for reason in FailOpen
}
_MOST: Final = (1 << 32) - 1


def add_fail_opens(message: pb.DraftStreamRequest, counts: FailOpens) -> None:
    """Add to a message how many drafts of the service were missed, by reason."""
    for reason, times in counts.items():
        message.fail_opens.add(reason=_ON_THE_WIRE[reason], count=min(times, _MOST))


def reason_of(code: int, refusal: Refusal) -> FailOpen:
    """Return the reason for a status, from its details or, without any, from its gRPC code."""
    if refusal.reason:
        return _OF_REASON.get(refusal.reason, FailOpen.REFUSED)
    return _OF_CODE.get(code, FailOpen.REFUSED)


MAX_BACKLOG_TOKENS: Final = 1 << 20
"""Most tokens of outputs queued for a server; the oldest outputs are dropped to make room for new
ones. A token takes 4 bytes of memory while a server is down."""

EACH_TOKENS: Final = 64
"""Overhead of an output, in tokens: the memory of its array object."""

_MAX_AT_ONCE: Final = 256
_MAX_TOKENS_AT_ONCE: Final = 1 << 14  # they add less than a millisecond to a step


class PendingCloses:
    """Closes and outputs of ended sequences that a server does not have yet, oldest first.

    Holds sessions to close, and outputs of sequences for which the server has no session.
    """

    def __init__(self) -> None:
        self._closings: deque[tuple[pb.CloseSessionRequest, TokenIds | None]] = deque()
        self._outputs: deque[TokenIds] = deque()
        self._num_tokens = 0

    def __len__(self) -> int:
        return len(self._closings) + len(self._outputs)

    @property
    def has_closings(self) -> bool:
        """Whether there are sessions to close."""
        return bool(self._closings)

    def close(
        self, wire_name: str, new_tokens: bytes = b"", output: TokenIds | None = None
    ) -> None:
        """Close a session.

        Args:
            wire_name: name of the session on the wire.
            new_tokens: ids that the server does not have yet, as bytes.
            output: int32[n], output that the server stores on close; None to store nothing.
        """
        closing = closing_message(wire_name, new_tokens, remember=output is not None)
        self._closings.append((closing, output))

    def tell(self, output: TokenIds | None) -> None:
        """Queue a whole output, int32[n]; empty or None is ignored."""
        if output is None or not len(output):
            return
        self._outputs.append(output)
        self._num_tokens += _size(output)
        while self._num_tokens > MAX_BACKLOG_TOKENS:
            self._num_tokens -= _size(self._outputs.popleft())

    def lose(self) -> None:
        """Turn pending closes into outputs, because the server has lost the sessions."""
        closings, self._closings = self._closings, deque()
        for _, output in closings:
            self.tell(output)

    def add_closings(self, message: pb.DraftStreamRequest) -> list[TokenIds]:
        """Move closes to a message; return the outputs that are lost if the message is lost."""
        outputs = []
        for _ in range(min(len(self._closings), _MAX_AT_ONCE)):
            closing, output = self._closings.popleft()
            message.closings.append(closing)
            if output is not None:
                outputs.append(output)
        return outputs

    def add_outputs(
        self, message: pb.DraftStreamRequest, wire_names: Iterable[str], fingerprint: str
    ) -> list[TokenIds]:
        """Move outputs to a message, which opens and closes a session for each; return them."""
        outputs: list[TokenIds] = []
        num_tokens = 0
        for name in islice(wire_names, min(len(self._outputs), _MAX_AT_ONCE)):
            num_tokens += _size(self._outputs[0])
            if outputs and num_tokens > _MAX_TOKENS_AT_ONCE:
                break
            output = self._outputs.popleft()
            self._num_tokens -= _size(output)
            message.openings.append(opening_message(name, output[:0], DEFAULT, fingerprint))
            message.closings.append(closing_message(name, output.tobytes(), remember=True))
            outputs.append(output)
        return outputs


def _size(output: TokenIds) -> int:
    """Return the size of an output including its overhead, in tokens."""
    return len(output) + EACH_TOKENS


_log = getLogger(__name__)


class Reply(NamedTuple):
    """The content of a response.

    Attributes:
        trees: trees by session.
        reasons: why other sessions got no tree.
        is_broken: whether the stream must be given up.
        ahead: trees for outcomes, by session, for sessions that requested drafts ahead.
    """

    trees: dict[str, DraftTree]
    reasons: dict[str, FailOpen]
    is_broken: bool = False
    ahead: Mapping[str, list[DraftTree]] = MappingProxyType({})


def answer_with_trees(
    response: pb.DraftStreamResponse,
    requests: Sequence[DraftRequest],
    reasons: dict[str, FailOpen],
    address: str,
) -> Reply:
    """Return the content of a response that must hold a tree for each request.

    Args:
        response: response, not checked yet.
        requests: requests that it answers, in order.
        reasons: why some requests were refused, by session.
        address: address of the server, for the log.
    """
    try:
        trees = trees_from_messages(response.trees, len(requests))
        outcome_trees = outcome_trees_from(response, requests)
    except InvalidTreeError as error:
        _log.warning("draft service %s sent no trees: %s", address, error)
        invalid = {request.session: FailOpen.INVALID for request in requests}
        return Reply({}, invalid | reasons)
    got = {
        request.session: tree.prefix(request.budget_nodes)
        for request, tree in zip(requests, trees, strict=True)
        if request.session not in reasons
    }
    ahead = {
        request.session: trees
        for request, trees in zip(requests, outcome_trees, strict=True)
        if request.outcomes
    }
    return Reply(got, reasons, ahead=ahead)


_MAX_UNANSWERED: Final = 256
OPENED_PER_S: Final = 5e6
"""Number of prompt tokens that a server reads per second. Encoding them takes a quarter of the
time."""


# A server at its limit refuses until another sequence ends, so retries start at a second.
_FIRST_REFUSAL_S: Final = 1.0
_LAST_REFUSAL_S: Final = 30.0
_AGAIN_AT_ONCE: Final = frozenset({FailOpen.LOST, FailOpen.DRAINING})


class SequenceStep(NamedTuple):
    """One sequence's part of a step; the sequence already includes the new tokens."""

    request: DraftRequest
    sequence: TokenSequence


@dataclass(slots=True)
class _Known:
    """What the server knows of a session once it has processed all sent messages."""

    wire_name: str
    length: int
    is_asked: bool = False
    predictions: Sequence[Prediction] = ()


class _Sent(NamedTuple):
    """A message without an answer yet; its requests are keyed by wire name."""

    sent_s: float
    deadline_s: float
    requests: dict[str, DraftRequest]
    outputs: list[TokenIds]
    missed: FailOpens


class Conversation:
    """The state of all sequences at one server.

    Messages are numbered. A session has at most one step in flight; tokens committed before its
    answer are sent with the next step. On a new stream every session is opened again, with all its
    tokens and under an unguessable name.

    Args:
        address: address of the server, for the log.
        fingerprint: fingerprint of the caller's tokenizer; empty if unknown.
        pads: whether messages are padded to hide their size.
        clock: returns monotonic seconds, for pauses after refusals.

    Attributes:
        is_up: whether the stream is up.
        is_draining: whether the server has announced that it is about to shut down.
        fail_opens: counts of refused messages that no caller waits for.
        missed: counts of missed drafts that were not reported to the server yet.
    """

    def __init__(
        self,
        address: str,
        fingerprint: str,
        *,
        pads: bool = False,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.is_up = self.is_draining = False
        self.fail_opens: FailOpens = Counter()
        self.missed: FailOpens = Counter()
        self._pads = pads
        self._clock = clock
        self._address = address
        self._fingerprint = fingerprint
        self._number = 0
        self._names = count()
        self._prefix = ""
        self._known: dict[str, _Known] = {}
        self._sent: dict[int, _Sent] = {}
        self._closes = PendingCloses()
        self._refused: dict[str, Backoff] = {}
        self._unpredicted: set[str] = set()  # sessions whose predictions may have been refused

    def begin(self) -> None:
        """Start on a new stream, on which the server knows no session."""
        self.lose()
        self.is_up, self._number = True, 0
        self.is_draining = False
        self._refused.clear()
        self._unpredicted.clear()
        self._prefix = secrets.token_urlsafe(12)

    def lose(self) -> None:
        """Note that the stream and all the server's sessions are gone."""
        self.is_up = False
        self._closes.lose()
        for sent in self._sent.values():
            self.missed += sent.missed
            for output in sent.outputs:
                self._closes.tell(output)
        self._sent.clear()
        self._known.clear()

    @property
    def takes_all(self) -> bool:
        """Whether the server would draft for any session, because it has not refused one lately."""
        return self.is_up and not self.is_draining and not self._refused

    def takes(self, session: str) -> bool:
        """Return whether the server would open a session or continue it."""
        if not self.is_up or self.is_draining:
            return False
        refused = self._refused.get(session)
        return refused is None or refused.is_over()

    def knows(self, session: str) -> bool:
        """Return whether the server has a session, as far as the client knows."""
        return session in self._known

    def forget_refusal(self, session: str) -> None:
        """Forget that the server refused a session that has now ended."""
        self._refused.pop(session, None)
        self._unpredicted.discard(session)

    def drop(self, session: str) -> None:
        """End a session that another server has taken over; this server stores nothing of it."""
        known = self._known.pop(session, None)
        if known is not None:
            self._closes.close(known.wire_name)

    def oldest_unanswered_s(self) -> float | None:
        """Return the time of the oldest unanswered message; None if there is none."""
        for sent in self._sent.values():
            return sent.sent_s
        return None

    def why_not(self, now_s: float) -> FailOpen | None:
        """Return why no request can be sent now; None if one can."""
        if not self.is_up:
            return FailOpen.DOWN
        if not self._sent:
            return None
        is_late = any(sent.requests and sent.deadline_s < now_s for sent in self._sent.values())
        return FailOpen.BUSY if is_late or len(self._sent) >= _MAX_UNANSWERED else None

    def ask(
        self, steps: Sequence[SequenceStep], now_s: float, deadline_s: float
    ) -> tuple[pb.DraftStreamRequest, dict[str, FailOpen]]:
        """Return a message for steps, and the reason for each session that was left out of it."""
        message = self._message()
        message.timeout_us = max(1, int((deadline_s - now_s) * 1e6))
        left_out: dict[str, FailOpen] = {}
        requests: dict[str, DraftRequest] = {}
        room = (deadline_s - now_s) * OPENED_PER_S
        for request, sequence in steps:
            name = request.session
            known = self._known.get(name)
            if known is None and self.is_draining:
                left_out[name] = FailOpen.DRAINING
                continue
            size = len(sequence) + sequence.num_predicted if known is None else 0
            if known is None and (not message.openings or size <= room):
                room -= size
                known = self._open(name, sequence, message)
            if known is None or known.is_asked:
                is_refused = known is None and name in self._refused
                left_out[name] = FailOpen.LIMIT if is_refused else FailOpen.BUSY
                continue
            if known.predictions is not sequence.predictions:
                self._add_predictions(name, known, sequence, message)
            add_step(message, request, known.wire_name, sequence.bytes_since(known.length))
            known.length, known.is_asked = request.length, True
            requests[known.wire_name] = request
        outputs = self._closes.add_closings(message)
        self._note(message, now_s, deadline_s, requests, outputs)
        return message, left_out

    def close(self, session: str, sequence: TokenSequence) -> None:
        """End a session; the server learns of it with the next message."""
        known = self._known.pop(session, None)
        output = sequence.output.copy() if sequence.options.remember else None
        if known is None:
            self._closes.tell(output)
        elif known.is_asked or output is None:
            # The server may not have recorded the last step, so the whole output is sent.
            self._closes.close(known.wire_name)
            self._closes.tell(output)
        else:
            missed = sequence.bytes_since(known.length)
            self._closes.close(known.wire_name, missed, output)

    def rest(self, now_s: float) -> pb.DraftStreamRequest | None:
        """Return a message with pending closes and outputs; None if none can be sent now."""
        if not len(self._closes) or self.why_not(now_s):
            return None
        if self.is_draining and not self._closes.has_closings:
            return None  # outputs wait for the next server at this address
        message = self._message()
        outputs = self._closes.add_closings(message)
        if not message.closings:
            names = (self._wire_name() for _ in count())
            outputs = self._closes.add_outputs(message, names, self._fingerprint)
        self._note(message, now_s, now_s, {}, outputs)
        return message

    def settle(self, response: pb.DraftStreamResponse) -> Reply:
        """Process a response."""
        self.is_draining = response.is_draining
        sent = self._sent.pop(response.sequence_number, None)
        if sent is None:
            return Reply({}, {})
        requests = list(sent.requests.values())
        for request in requests:
            if known := self._known.get(request.session):
                known.is_asked = False
        reasons: dict[str, FailOpen] = {}
        outputs = sent.outputs
        for status in response.statuses:
            refusal = refusal_in(status.details)
            reason = reason_of(status.code, refusal)
            if status.session_id:
                refused = sent.requests.get(status.session_id)
                names = [] if refused is None else [refused.session]
                if reason is FailOpen.DRAINING and refused is None:
                    self._tell_again(outputs)  # all: draining began before the message was read
                    continue
                self._refuse(names, reason, status.message, refusal.retry_after_s)
                reasons |= dict.fromkeys(names, reason)
            elif reason is FailOpen.LOST:
                return Reply({}, {}, is_broken=True)
            elif reason is not FailOpen.TIMEOUT:
                asked = [request.session for request in requests]
                self._tell_again(outputs if reason is FailOpen.LIMIT else [])  # not processed
                self._refuse(asked, reason, status.message, refusal.retry_after_s)
                return Reply({}, dict.fromkeys(asked, reason))
        return answer_with_trees(response, requests, reasons, self._address)

    def _tell_again(self, outputs: list[TokenIds]) -> None:
        """Queue the outputs of a refused message, and empty the list: none may be queued twice."""
        while outputs:
            self._closes.tell(outputs.pop())

    def _refuse(
        self, names: list[str], reason: FailOpen, text: str, retry_after_s: float | None
    ) -> None:
        """Close refused sessions, to be reopened later, after a pause in most cases.

        After a refusal for a limit, they are reopened without predictions, which may have been too
        long for the server.
        """
        pauses = reason not in _AGAIN_AT_ONCE
        if pauses:
            _log.warning("draft service %s refuses: %.300r", self._address, text)
            self.fail_opens[reason] += not names
        for name in names:
            known = self._known.pop(name, None)
            if known is not None:
                self._closes.close(known.wire_name)
                if reason is FailOpen.LIMIT and known.predictions:
                    self._unpredicted.add(name)
            if pauses:
                backoff = self._refused.get(name)
                if backoff is None:
                    pause = Backoff(_FIRST_REFUSAL_S, _LAST_REFUSAL_S, clock=self._clock)
                    backoff = self._refused[name] = pause
                backoff.fail(least_s=min(retry_after_s or 0.0, _LAST_REFUSAL_S))

    def _open(
        self, name: str, sequence: TokenSequence, message: pb.DraftStreamRequest
    ) -> _Known | None:
        refused = self._refused.get(name)
        if refused is not None and not refused.is_over():
            return None
        known = self._known[name] = _Known(self._wire_name(), sequence.num_prompt)
        known.predictions = sequence.predictions
        predictions = () if name in self._unpredicted else tuple(known.predictions)
        options = replace(sequence.options, predictions=predictions)
        opening = opening_message(
            known.wire_name,
            sequence.prompt,
            options,
            self._fingerprint,
        )
        message.openings.append(opening)
        return known

    def _add_predictions(
        self,
        name: str,
        known: _Known,
        sequence: TokenSequence,
        message: pb.DraftStreamRequest,
    ) -> None:
        """Send the predictions that the server does not know yet; they are the last ones."""
        added = sequence.predictions[len(known.predictions) :]
        known.predictions = sequence.predictions
        if name not in self._unpredicted:
            message.predictions.append(addition_message(known.wire_name, added))

    def _note(
        self,
        message: pb.DraftStreamRequest,
        now_s: float,
        deadline_s: float,
        requests: dict[str, DraftRequest],
        outputs: list[TokenIds],
    ) -> None:
        """Complete a message before sending, and record its content."""
        missed = self.missed
        if missed:
            self.missed = Counter()
            add_fail_opens(message, missed)
        if self._pads:
            pad_request(message)
        self._sent[self._number] = _Sent(now_s, deadline_s, requests, outputs, missed)

    def _message(self) -> pb.DraftStreamRequest:
        self._number += 1
        return pb.DraftStreamRequest(sequence_number=self._number, tree_form=PACKED)

    def _wire_name(self) -> str:
        return f"{self._prefix}/{next(self._names)}"
