"""The client without sockets: which server gets which part of a step, and the resulting trees."""

import math
import time
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from hashlib import blake2b
from itertools import zip_longest
from threading import Lock
from typing import Final

import numpy as np
from numpy.typing import ArrayLike

from retriever.client.conversation import (
    OPENED_PER_S,
    Conversation,
    FailOpen,
    FailOpens,
    SequenceStep,
)
from retriever.client.local import LocalDrafter
from retriever.client.merging import merge_trees
from retriever.drafter import DEFAULT, Drafter, DraftRequest, Prediction, SequenceOptions
from retriever.errors import (
    InvalidRequestError,
    RetrieverError,
    UnknownSessionError,
    VocabularyMismatchError,
)
from retriever.follower import Follower, Followers
from retriever.limits import check_session_name, checked_ids, checked_tokens
from retriever.sequences import (
    OpenSessions,
    TokenSequence,
    check_named_once,
    check_step,
    checked_options,
)
from retriever.tree import DraftTree
from retriever.v1 import retriever_pb2 as pb
from retriever.wire.messages import check_wire


def ranked(session: str, addresses: Iterable[str]) -> list[str]:
    """Return the servers in the order in which a session prefers them.

    Uses rendezvous hashing. All clients compute the same order; adding or losing a server moves
    only the sessions that prefer it, spread evenly over the others.

    Source: Thaler and Ravishankar, "Using Name-Based Mappings to Increase Hit Rates", IEEE/ACM
    Transactions on Networking, 1998.
    """
    return sorted(addresses, key=lambda address: _score(session, address), reverse=True)


def _score(session: str, address: str) -> bytes:
    key = blake2b(address.encode(), digest_size=16).digest()
    return blake2b(session.encode(errors="surrogatepass"), digest_size=8, key=key).digest()


_NO_TOKENS = np.empty(0, np.int32)


class Agreement:
    """The vocabulary of servers that hold parts of one corpus: as given, or the first server's.

    Args:
        fingerprint: fingerprint of the caller's tokenizer; empty if unknown.
    """

    def __init__(self, fingerprint: str) -> None:
        self._fingerprint = fingerprint.lower()
        self._whose = "the tokenizer at hand"
        self._mismatches: dict[str, VocabularyMismatchError] = {}
        self._lock = Lock()  # each server is checked in its own thread

    def check(self, address: str, fingerprint: str) -> None:
        """Check the vocabulary of a server; its fingerprint is empty if it knows none.

        Raises:
            VocabularyMismatchError: the vocabulary differs.
        """
        fingerprint = fingerprint.lower()
        with self._lock:
            if not self._fingerprint and fingerprint:
                self._fingerprint, self._whose = fingerprint, f"shard {address}"
        self._mismatches.pop(address, None)
        if fingerprint and fingerprint != self._fingerprint:
            error = VocabularyMismatchError(
                f"shard {address} has another vocabulary (fingerprint {fingerprint[:12]}\u2026) "
                f"than {self._whose} ({self._fingerprint[:12]}\u2026): "
                "build all shards with the model's own --tokenizer"
            )
            self._mismatches[address] = error
            raise error

    def raise_mismatch(self) -> None:
        """Raise the error that `check` raised for a server, unless it was resolved since.

        Raises:
            VocabularyMismatchError: there is such an error.
        """
        for error in list(self._mismatches.values()):
            raise error.with_traceback(None)


class LocalSide:
    """Drafts locally for sequences without a server's draft; never raises errors.

    A session is opened at its first local draft, with all tokens so far.

    Args:
        drafter: drafter to use; True for a `LocalDrafter`, False for no local drafts.
    """

    def __init__(self, drafter: Drafter | bool) -> None:  # noqa: FBT001  (or a drafter)
        if isinstance(drafter, bool):
            chosen: Drafter | None = LocalDrafter() if drafter else None
        else:
            chosen = drafter
        self._followers = None if chosen is None else Followers(chosen)
        self._following: dict[str, Follower] = {}

    def draft(self, steps: Sequence[SequenceStep], until_s: float) -> dict[str, DraftTree]:
        """Return the trees that were drafted, by session.

        The first session always gets a draft; the others get one until `until_s` of
        `time.monotonic`.
        """
        if self._followers is None:
            return {}
        trees: dict[str, DraftTree] = {}
        for step in steps:  # one at a time: an error in one must not affect others
            if trees and time.monotonic() > until_s:
                break
            with suppress(RetrieverError):
                trees[step.request.session] = self._ask(self._followers, step)
        return trees

    def close(self, session: str, sequence: TokenSequence) -> None:
        """End a session; its output joins the generations."""
        if self._followers is None:
            return
        drafter = self._followers.drafter
        follower = self._following.pop(session, None)
        with suppress(RetrieverError):
            if follower is not None and follower.is_open:
                drafter.close(session, follower.unsent())
            elif sequence.options.remember:
                drafter.open(session, _NO_TOKENS)
                drafter.close(session, sequence.output.copy())

    def _ask(self, followers: Followers, step: SequenceStep) -> DraftTree:
        name = step.request.session
        follower = self._following.get(name)
        if follower is None:
            follower = self._following[name] = followers.follow(step.sequence, name)
        if not follower.is_open:
            follower.open()
        try:
            follower.tell_predictions()
            (tree,) = followers.drafter.draft([follower.catching_up(step.request)])
        except UnknownSessionError:  # idle for too long: the next step opens a new one
            follower.forget()
            raise
        follower.told(step.request.length)
        return tree


_LOCAL_SHARE: Final = 0.1
"""Share of a step's deadline that local drafts may add to it; more would delay every late step."""


@dataclass(slots=True)
class _Part:
    """One server's part of a step.

    Attributes:
        steps: steps of the sequences at this server, by session.
        message: message to send; None if the server gets no request, or its stream is gone.
        reasons: why there is no tree, by session.
        trees: trees that the server has sent, by session.
        ahead: trees for outcomes that the server has sent, by session.
        is_awaited: whether the server's answer is still outstanding.
    """

    steps: dict[str, SequenceStep] = field(default_factory=dict)
    message: pb.DraftStreamRequest | None = None
    reasons: dict[str, FailOpen] = field(default_factory=dict)
    trees: Mapping[str, DraftTree] = field(default_factory=dict)
    ahead: Mapping[str, list[DraftTree]] = field(default_factory=dict)
    is_awaited: bool = False

    def lose(self) -> None:
        """Note that the server's stream is gone."""
        if self.message is not None:
            for session in self.steps.keys() - self.trees.keys():
                self.reasons.setdefault(session, FailOpen.DOWN)
        self.message, self.is_awaited = None, False


@dataclass(slots=True, eq=False)
class Plan:
    """One step in progress.

    Attributes:
        steps: steps of all its sequences, in order.
        local_until_s: no local draft starts after this time.
        parts: parts of the step, by address.
    """

    steps: list[SequenceStep]
    local_until_s: float = math.inf
    parts: dict[str, _Part] = field(default_factory=dict)

    def is_done(self) -> bool:
        """Return whether no more trees are expected."""
        return all(not part.is_awaited for part in self.parts.values())


@dataclass(slots=True)
class _Placed:
    """A sequence and its servers.

    Attributes:
        sequence: committed tokens.
        ranked: servers in the order in which it prefers them.
        servers: servers that draft for it: one of several replicas, or all that hold parts.
    """

    sequence: TokenSequence
    ranked: list[str]
    servers: Sequence[str]


def checked_addresses(addresses: Iterable[str]) -> list[str]:
    """Return the checked addresses of servers that are used together.

    Raises:
        InvalidRequestError: there is no address, or a duplicate.
    """
    listed = list(addresses)
    if not listed:
        raise InvalidRequestError("no address is given: name each draft service once")
    if len(set(listed)) != len(listed):
        raise InvalidRequestError("an address is given twice: name each draft service once")
    return listed


class Planner:
    """Keeps all sequences, plans messages to their servers, and drafts locally for missing servers.

    The servers are replicas, and each sequence is at one of them. Or each server holds a part of a
    corpus, every sequence is at all servers, and their drafts are merged.

    Args:
        addresses: addresses of the servers; at least one, each once.
        fingerprint: fingerprint of the caller's tokenizer; empty if unknown.
        local: drafter to use if no server drafts; True for a `LocalDrafter`, False for no local
            drafts.
        are_parts: whether each server holds a part of a corpus.
        pads: whether messages are padded to hide their size.
        clock: returns monotonic seconds, for pauses after refusals.

    Attributes:
        conversations: conversations by address.
        vocabulary: vocabulary that all servers must have, if they hold parts of one corpus;
            otherwise None.

    Raises:
        InvalidRequestError: there is no address, or a duplicate.
    """

    def __init__(  # noqa: PLR0913  (all but three are given by name)
        self,
        addresses: Iterable[str],
        fingerprint: str,
        local: Drafter | bool,  # noqa: FBT001  (or a drafter)
        *,
        are_parts: bool = False,
        pads: bool = False,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.conversations = {
            each: Conversation(each, fingerprint, pads=pads, clock=clock)
            for each in checked_addresses(addresses)
        }
        self.vocabulary = Agreement(fingerprint) if are_parts else None
        self._fail_opens: FailOpens = Counter()
        self._placed: OpenSessions[str, _Placed] = OpenSessions()
        self._under_way: set[Plan] = set()
        self._local = LocalSide(local)
        self._room = 0.0  # tokens of sequences that may still leave draining servers in this step

    @property
    def fail_opens(self) -> FailOpens:
        """Number of sequence steps without a server's draft, by reason; a copy."""
        return sum((each.fail_opens for each in self.conversations.values()), self._fail_opens)

    def open(
        self,
        session: str,
        prompt: ArrayLike,
        options: SequenceOptions = DEFAULT,
    ) -> None:
        """Begin a sequence; servers learn of the sequence with its first step.

        Sequences of a group go to the same server, so that they draft from one another.

        Raises:
            VocabularyMismatchError: a server that holds a part has another vocabulary.
        """
        check_session_name(session)
        self._placed.check_free(session)
        if self.vocabulary is not None:
            self.vocabulary.raise_mismatch()
        options = checked_options(options)
        sequence = TokenSequence(checked_tokens(prompt, None), options=options)
        order = ranked(options.group or session, self.conversations)
        servers = order[:1] if self.vocabulary is None else order
        self._placed.add(session, _Placed(sequence, order, servers))

    def add_predictions(self, session: str, predictions: Sequence[Prediction]) -> None:
        """Add predictions of a sequence; servers get them with the next step.

        Raises: the errors of `EmbeddedDrafter.add_predictions`.
        """
        self._placed.get(session).sequence.expect(predictions)

    def plan(self, requests: Sequence[DraftRequest], now_s: float, deadline_s: float) -> Plan:
        """Note the new tokens of a step; return the messages to send.

        Raises:
            UnknownSessionError: a session is not open.
            InvalidRequestError: a request is faulty; the step has no effect.
        """
        check_named_once(requests)
        found = [self._checked(request) for request in requests]
        plan = Plan([], deadline_s + _LOCAL_SHARE * max(0.0, deadline_s - now_s))
        self._room = max(0.0, deadline_s - now_s) * OPENED_PER_S
        for request, placed in zip(requests, found, strict=True):
            placed.sequence.extend(request.new_tokens)
            step = SequenceStep(request, placed.sequence)
            plan.steps.append(step)
            if self.vocabulary is None:
                self._move_if_needed(request.session, placed)
            for address in placed.servers:
                part = plan.parts.get(address) or plan.parts.setdefault(address, _Part())
                part.steps[request.session] = step
        for address, part in plan.parts.items():
            self._ask(part, self.conversations[address], now_s, deadline_s)
        self._under_way.add(plan)
        return plan

    def take(self, address: str, response: pb.DraftStreamResponse) -> bool:
        """Process a server's response; return whether its stream is broken."""
        answer = self.conversations[address].settle(response)
        for plan in self._under_way:
            part = plan.parts.get(address)
            sent = None if part is None else part.message
            if part and sent and sent.sequence_number == response.sequence_number:
                part.trees, part.ahead = answer.trees, answer.ahead
                part.reasons |= answer.reasons
                part.is_awaited = False
        return answer.is_broken

    def lose(self, address: str) -> None:
        """Note that a server's stream is gone."""
        self.conversations[address].lose()
        for plan in self._under_way:
            if address in plan.parts:
                plan.parts[address].lose()

    def finish(self, plan: Plan) -> list[DraftTree]:
        """Return the trees of a step, in order; drafted locally if no server's tree has arrived."""
        self._under_way.discard(plan)
        came: dict[str, list[DraftTree]] = {}
        for address, part in plan.parts.items():
            for name in part.steps:
                if name in part.trees:
                    came.setdefault(name, []).append(part.trees[name])
                else:
                    self._miss(address, part.reasons.get(name, FailOpen.TIMEOUT))
        local: dict[str, DraftTree] = {}
        if len(came) < len(plan.steps):
            missing = [step for step in plan.steps if step.request.session not in came]
            local = self._local.draft(missing, plan.local_until_s)
        trees = []
        for request, _ in plan.steps:
            found = came.get(request.session)
            if found is None:
                trees.append(local.get(request.session, DraftTree.empty()))
            elif len(found) == 1:
                trees.append(found[0])
            else:
                trees.append(merge_trees(found, request.budget_nodes, request.min_probability))
        return trees

    def finish_ahead(self, plan: Plan) -> list[list[DraftTree]]:
        """Return the trees for the outcomes of a step, in order; none if no answer has arrived.

        Missing trees are neither drafted locally nor counted: the next step requests them.
        """
        self._under_way.discard(plan)
        return [
            [
                merge_trees(
                    [tree for tree in trees if tree is not None],
                    request.budget_nodes,
                    request.min_probability,
                )
                for trees in zip_longest(
                    *(part.ahead.get(request.session, []) for part in plan.parts.values())
                )
            ]
            for request, _ in plan.steps
        ]

    def server_of(self, session: str) -> str:
        """Return the address of a session's server; of several servers, the first.

        Raises:
            UnknownSessionError: the session is not open.
        """
        return self._placed.get(session).servers[0]

    def close(self, session: str, new_tokens: ArrayLike | None, *, remember: bool) -> None:
        """End a sequence; its servers get the close with the next message.

        Raises:
            UnknownSessionError: the session is not open.
        """
        ids = checked_ids([] if new_tokens is None else new_tokens, None)
        placed = self._placed.remove(session)
        placed.sequence.extend(ids)
        if not remember:
            placed.sequence.options = replace(placed.sequence.options, remember=False)
        for address in placed.servers:
            self.conversations[address].close(session, placed.sequence)
        for conversation in self.conversations.values():
            conversation.forget_refusal(session)
        self._local.close(session, placed.sequence)

    def _ask(
        self, part: _Part, conversation: Conversation, now_s: float, deadline_s: float
    ) -> None:
        """Make the message for a server's part of a step, unless the server can take no request."""
        why_not = conversation.why_not(now_s)
        if why_not is None and now_s >= deadline_s:
            why_not = FailOpen.TIMEOUT
        if why_not is not None:
            part.reasons = dict.fromkeys(part.steps, why_not)
            return
        steps = list(part.steps.values())
        part.message, part.reasons = conversation.ask(steps, now_s, deadline_s)
        part.is_awaited = len(part.reasons) < len(part.steps)

    def _miss(self, address: str, reason: FailOpen) -> None:
        """Count a missed draft, here and for the report to its server."""
        self._fail_opens[reason] += 1
        self.conversations[address].missed[reason] += 1

    def _move_if_needed(self, session: str, placed: _Placed) -> None:
        """Move a session to the first replica that would draft for it, if its own would not.

        If no replica would, the session stays where it is. A draining replica still answers, so
        only as many sessions leave it per step as other replicas can read within that step.
        """
        current = self.conversations[placed.servers[0]]
        if current.takes(session):
            return
        best = next((each for each in placed.ranked if self.conversations[each].takes(session)), "")
        if not best:
            return
        if current.is_up and current.knows(session):
            if self._room <= 0:
                return
            self._room -= len(placed.sequence)
        current.drop(session)
        placed.servers = (best,)

    def _checked(self, request: DraftRequest) -> _Placed:
        """Return the sequence of a request and its servers, after checking the request."""
        placed = self._placed.get(request.session)
        num_new = len(checked_ids(request.new_tokens, None))
        check_wire(request)
        check_step(request, len(placed.sequence), num_new)
        return placed
