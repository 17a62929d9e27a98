"""The client without sockets: which server gets which part of a step, and the resulting trees."""

import math
import time
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from hashlib import blake2b
from typing import Final

import numpy as np
from numpy.typing import ArrayLike

from retriever.client.conversation import (
    OPENED_PER_S,
    Conversation,
    FailOpen,
    FailOpens,
    Reply,
    SequenceStep,
)
from retriever.client.local import LocalDrafter
from retriever.drafter import DEFAULT, Drafter, DraftRequest, Prediction, SequenceOptions
from retriever.errors import InvalidRequestError, RetrieverError, UnknownSessionError
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

    Rendezvous hashing: all clients compute the same order; adding or losing a server moves only the
    sessions that prefer it, spread evenly over the others.

    Source: Thaler and Ravishankar, "Using Name-Based Mappings to Increase Hit Rates", IEEE/ACM
    Transactions on Networking, 1998.
    """
    return sorted(addresses, key=lambda address: _score(session, address), reverse=True)


def _score(session: str, address: str) -> bytes:
    key = blake2b(address.encode(), digest_size=16).digest()
    return blake2b(session.encode(errors="surrogatepass"), digest_size=8, key=key).digest()


_NO_TOKENS = np.empty(0, np.int32)


class LocalSide:
    """Drafts locally for sequences that servers do not draft for; errors are never raised.

    A session is opened at its first local draft, and receives all tokens it has missed.

    Args:
        drafter: what drafts; True for a `LocalDrafter`, False for no local drafts.
    """

    def __init__(self, drafter: Drafter | bool) -> None:  # noqa: FBT001  (or a drafter)
        if isinstance(drafter, bool):
            chosen: Drafter | None = LocalDrafter() if drafter else None
        else:
            chosen = drafter
        self._followers = None if chosen is None else Followers(chosen)
        self._following: dict[str, Follower] = {}

    def draft(self, steps: Sequence[SequenceStep], until_s: float) -> dict[str, DraftTree]:
        """Return trees by session, where there is one.

        The first is always drafted for, others until `until_s` of `time.monotonic`.
        """
        if self._followers is None:
            return {}
        trees: dict[str, DraftTree] = {}
        for step in steps:  # one by one: an error of one must not affect others
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
        except UnknownSessionError:  # it was idle too long: the next step opens another
            follower.forget()
            raise
        follower.told(step.request.length)
        return tree


_LOCAL_SHARE: Final = 0.1
"""Share of a step's deadline that local drafts may add to it: more delays every late step."""


@dataclass(slots=True, eq=False)
class Plan:
    """One step under way.

    Attributes:
        steps: of all its sequences, in order.
        local_until_s: no local draft begins after this time.
        messages: what to send, by address.
        trees: received so far, by session.
        reasons: why a server sent none, by session.
        ahead: trees for outcomes received so far, by session.
    """

    steps: list[SequenceStep]
    local_until_s: float = math.inf
    messages: dict[str, pb.DraftStreamRequest] = field(default_factory=dict)
    trees: dict[str, DraftTree] = field(default_factory=dict)
    reasons: dict[str, FailOpen] = field(default_factory=dict)
    ahead: dict[str, list[DraftTree]] = field(default_factory=dict)

    @property
    def is_done(self) -> bool:
        """Whether no more trees are expected."""
        return len(self.trees) + len(self.reasons) >= len(self.steps)


@dataclass(slots=True)
class _Assigned:
    """A sequence and the server assigned to it.

    Attributes:
        sequence: what is committed.
        ranked: the servers in the order in which it prefers them.
        address: of its server.
        left: the server that it moves away from, which has the session still; else None.
    """

    sequence: TokenSequence
    ranked: list[str]
    address: str
    left: str | None = None


_RETURNED_TOKENS: Final = 1 << 12
"""Tokens of sequences that return to their own server with each step: opening them takes less than
a millisecond of its time, and the server reads them without another thread."""


class Moves:
    """How many tokens of sequences move in a step while their servers still answer.

    A server that is about to end is left as fast as steps allow: with each, what the next server
    reads within its deadline. Sequences return to a server that is back slowly, for nothing is lost
    meanwhile; one that no deadline is long enough for stays where it is until it ends.
    """

    def __init__(self) -> None:
        self._room = self._most = 0.0
        self._to_return = 0
        self._waits = self._has_left = False

    def begin_step(self, now_s: float, deadline_s: float) -> None:
        """Begin a step; what sequences are waiting to return is saved up for."""
        self._room = self._most = max(0.0, deadline_s - now_s) * OPENED_PER_S
        saved = self._to_return if self._waits else 0
        self._to_return = saved + _RETURNED_TOKENS
        self._waits = self._has_left = False

    def may_move(self, num_tokens: int, *, is_return: bool) -> bool:
        """Return whether a sequence moves with this step, and count it."""
        if is_return:
            if num_tokens > self._most:
                return False
            if num_tokens > min(self._to_return, self._room):
                self._waits = True
                return False
            self._to_return -= num_tokens
        elif num_tokens > self._room and self._has_left:
            return False
        self._has_left = True
        self._room -= num_tokens
        return True


def checked_addresses(addresses: Iterable[str]) -> list[str]:
    """Return the checked addresses of servers that are used together.

    Raises:
        InvalidRequestError: no address, or a duplicate.
    """
    listed = list(addresses)
    if not listed:
        raise InvalidRequestError("no address is given: name each draft service once")
    if len(set(listed)) != len(listed):
        raise InvalidRequestError("an address is given twice: name each draft service once")
    return listed


class Planner:
    """Keeps all sequences, plans messages to their servers, and drafts locally for missing servers.

    Args:
        addresses: of the servers; at least one, each once.
        fingerprint: of the caller's tokenizer; empty if unknown.
        local: drafts where a server does not; True for a `LocalDrafter`, False for no local drafts.
        pads: whether messages are padded to hide their size.
        clock: seconds, monotonic, for pauses after refusals.

    Attributes:
        conversations: by address.
        fail_opens: count of sequence steps without a server's draft, by reason.

    Raises:
        InvalidRequestError: no address, or a duplicate.
    """

    def __init__(
        self,
        addresses: Iterable[str],
        fingerprint: str,
        local: Drafter | bool,  # noqa: FBT001  (or a drafter)
        *,
        pads: bool = False,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.conversations = {
            each: Conversation(each, fingerprint, pads=pads, clock=clock)
            for each in checked_addresses(addresses)
        }
        self._moving: set[str] = set()
        self._moves = Moves()
        self._fail_opens: FailOpens = Counter()
        self._placed: OpenSessions[str, _Assigned] = OpenSessions()
        self._under_way: set[Plan] = set()
        self._local = LocalSide(local)

    @property
    def fail_opens(self) -> FailOpens:
        """A copy of the counts."""
        return sum((each.fail_opens for each in self.conversations.values()), self._fail_opens)

    def open(
        self,
        session: str,
        prompt: ArrayLike,
        options: SequenceOptions = DEFAULT,
    ) -> None:
        """Begin a sequence; servers are told with its first step.

        Sequences of a group have the same server, so that they draft from one another.
        """
        check_session_name(session)
        self._placed.check_free(session)
        options = checked_options(options)
        sequence = TokenSequence(checked_tokens(prompt, None), options=options)
        order = ranked(options.group or session, self.conversations)
        self._placed.add(session, _Assigned(sequence, order, order[0]))

    def add_predictions(self, session: str, predictions: Sequence[Prediction]) -> None:
        """Add what a sequence is expected to contain; servers are told with its next step.

        Raises: as `EmbeddedDrafter.add_predictions`.
        """
        self._placed.get(session).sequence.expect(predictions)

    def plan(self, requests: Sequence[DraftRequest], now_s: float, deadline_s: float) -> Plan:
        """Note the new tokens of a step; return the messages to send.

        Raises:
            UnknownSessionError: a session is not open.
            InvalidRequestError: a request is faulty; nothing of the step is kept.
        """
        check_named_once(requests)
        found = [self._checked(request) for request in requests]
        plan = Plan([], deadline_s + _LOCAL_SHARE * max(0.0, deadline_s - now_s))
        by_server: dict[str, list[SequenceStep]] = {}
        self._moves.begin_step(now_s, deadline_s)
        open_to_all = {each for each, server in self.conversations.items() if server.takes_all}
        for request, assigned in zip(requests, found, strict=True):
            assigned.sequence.extend(request.new_tokens)
            step = SequenceStep(request, assigned.sequence)
            plan.steps.append(step)
            address = assigned.address
            if address != assigned.ranked[0] or address not in open_to_all:
                address = self._server_of(request.session, assigned, now_s)
            by_server.setdefault(address, []).append(step)
        for address, steps in by_server.items():
            self._ask(plan, address, steps, now_s, deadline_s)
        self._under_way.add(plan)
        return plan

    def take(self, address: str, response: pb.DraftStreamResponse) -> bool:
        """Process a server's response; return whether its stream is broken."""
        answer = self.conversations[address].settle(response)
        if self._moving:
            self._settle_moves(address, answer)
        for plan in self._under_way:
            awaited = plan.messages.get(address)
            if awaited is not None and awaited.sequence_number == response.sequence_number:
                plan.trees |= answer.trees
                plan.reasons |= answer.reasons
                plan.ahead |= answer.ahead
        return answer.is_broken

    def lose(self, address: str) -> None:
        """Note that a server's stream is gone."""
        self.conversations[address].lose()
        for plan in self._under_way:
            if plan.messages.pop(address, None) is not None:
                for step in plan.steps:
                    name = step.request.session
                    if name not in plan.trees and self._address_of(name) == address:
                        plan.reasons.setdefault(name, FailOpen.DOWN)

    def finish(self, plan: Plan) -> list[DraftTree]:
        """Return the trees of a step, in order; drafted locally where no server's tree has come."""
        self._under_way.discard(plan)
        missing = [step for step in plan.steps if step.request.session not in plan.trees]
        local = self._local.draft(missing, plan.local_until_s)
        for step in missing:
            name = step.request.session
            self._miss(name, plan.reasons.get(name, FailOpen.TIMEOUT))
            plan.trees[name] = local[name] if name in local else DraftTree.empty()
        return [plan.trees[step.request.session] for step in plan.steps]

    def finish_ahead(self, plan: Plan) -> list[list[DraftTree]]:
        """Return the trees for the outcomes of a step, in order; none where no answer has come.

        What is missing is not drafted locally and not counted: the step that follows asks for it.
        """
        self._under_way.discard(plan)
        return [plan.ahead.get(step.request.session, []) for step in plan.steps]

    def server_of(self, session: str) -> str:
        """Return the address of the server that a session is assigned to.

        Raises:
            UnknownSessionError: the session is not open.
        """
        return self._placed.get(session).address

    def close(self, session: str, new_tokens: ArrayLike | None, *, remember: bool) -> None:
        """End a sequence; its server is told with the next message.

        Raises:
            UnknownSessionError: the session is not open.
        """
        ids = checked_ids([] if new_tokens is None else new_tokens, None)
        assigned = self._placed.remove(session)
        assigned.sequence.extend(ids)
        if not remember:
            assigned.sequence.options = replace(assigned.sequence.options, remember=False)
        self.conversations[assigned.address].close(session, assigned.sequence)
        self._leave(session, assigned)
        for conversation in self.conversations.values():
            conversation.forget_refusal(session)
        self._local.close(session, assigned.sequence)

    def _ask(
        self, plan: Plan, address: str, steps: list[SequenceStep], now_s: float, deadline_s: float
    ) -> None:
        conversation = self.conversations[address]
        why_not = conversation.why_not(now_s)
        if why_not is None and now_s >= deadline_s:
            why_not = FailOpen.TIMEOUT
        if why_not is not None:
            plan.reasons |= {step.request.session: why_not for step in steps}
            return
        plan.messages[address], left_out = conversation.ask(steps, now_s, deadline_s)
        plan.reasons |= left_out

    def _server_of(self, session: str, assigned: _Assigned, now_s: float) -> str:
        """Return the server of a session: the first that takes it, in the session's own order.

        It moves at once where its server would not answer. Where the server still answers, because
        it drains or only stands in for one that is back, the move waits for its turn.
        """
        current = self.conversations[assigned.address]
        takes = current.takes(session)
        if takes and assigned.address == assigned.ranked[0]:
            return assigned.address
        best = next(
            (each for each in assigned.ranked if self.conversations[each].takes(session)), None
        )
        if best is None:  # one that drains still answers for the sessions that it has
            if not current.is_up:
                self._move_back(session, assigned)
            return assigned.address
        if best == assigned.address:
            return best
        if current.is_up and current.knows(session):
            is_late = self.conversations[best].why_not(now_s) is not None
            if is_late or not self._moves.may_move(len(assigned.sequence), is_return=takes):
                return assigned.address
        self._move(session, assigned, best)
        return best

    def _move(self, session: str, assigned: _Assigned, address: str) -> None:
        """Assign a session to another server; the old one has it until the new one has answered."""
        before, assigned.address = assigned.address, address
        if assigned.left is not None:  # the server that it was moving to did not answer
            self.conversations[before].drop(session)
            if assigned.left == address:
                self._moving.discard(session)
                assigned.left = None
        elif self.conversations[before].knows(session):
            self._moving.add(session)
            assigned.left = before

    def _move_back(self, session: str, assigned: _Assigned) -> None:
        """Assign a session to the server that it was about to leave, if that has it still."""
        if assigned.left is not None and self.conversations[assigned.left].knows(session):
            self._move(session, assigned, assigned.left)

    def _leave(self, session: str, assigned: _Assigned) -> None:
        """Close a moved session on the server that it has left, which remembers nothing of it."""
        if assigned.left is not None:
            self.conversations[assigned.left].drop(session)
            assigned.left = None
            self._moving.discard(session)

    def _settle_moves(self, address: str, answer: Reply) -> None:
        """Complete the moves to a server that has answered; take back those that it refuses."""
        for session in self._moving & (answer.trees.keys() | answer.reasons.keys()):
            assigned = self._placed.get(session)
            if assigned.address != address:
                continue
            if session in answer.trees:
                self._leave(session, assigned)
            elif not self.conversations[address].knows(session):
                self._move_back(session, assigned)

    def _miss(self, session: str, reason: FailOpen) -> None:
        """Count a missed draft, also for the report to its server."""
        self._fail_opens[reason] += 1
        address = self._address_of(session)
        if address is not None:
            self.conversations[address].missed[reason] += 1

    def _address_of(self, session: str) -> str | None:
        assigned = self._placed.find(session)
        return assigned.address if assigned is not None else None

    def _checked(self, request: DraftRequest) -> _Assigned:
        """Return the assigned sequence of a valid request."""
        assigned = self._placed.get(request.session)
        num_new = len(checked_ids(request.new_tokens, None))
        check_wire(request)
        check_step(request, len(assigned.sequence), num_new)
        return assigned
