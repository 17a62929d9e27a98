"""What goes to which server at each step, and what comes of it: the client without its sockets."""

import math
import time
from collections import Counter
from collections.abc import Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from hashlib import blake2b
from typing import Final

import numpy as np
from numpy.typing import ArrayLike

from retriever.client.conversation import Conversation, FailOpen, FailOpens, SequenceStep
from retriever.client.local import LocalDrafter
from retriever.drafter import Drafter, DraftRequest
from retriever.errors import InvalidRequestError, RetrieverError, UnknownSessionError
from retriever.follower import Follower, Followers
from retriever.limits import check_session_name, checked_ids, checked_tokens
from retriever.sequences import (
    OpenSessions,
    TokenSequence,
    check_named_once,
    check_step,
    check_wire,
)
from retriever.tree import DraftTree
from retriever.v1 import retriever_pb2 as pb


def ranked(session: str, addresses: Iterable[str]) -> list[str]:
    """Return the servers in the order in which a session prefers them.

    Rendezvous hashing: every client finds the same order by itself, a server that is added or
    lost moves only the sessions that prefer it, and the others share them evenly.

    Source: Thaler and Ravishankar, "Using Name-Based Mappings to Increase Hit Rates", IEEE/ACM
    Transactions on Networking, 1998.
    """
    return sorted(addresses, key=lambda address: _score(session, address), reverse=True)


def _score(session: str, address: str) -> bytes:
    key = blake2b(address.encode(), digest_size=16).digest()
    return blake2b(session.encode(errors="surrogatepass"), digest_size=8, key=key).digest()


_NO_TOKENS = np.empty(0, np.int32)


class LocalSide:
    """Drafts locally for sequences that others hold; nothing that goes wrong is an error.

    A session is opened there when it is first needed, and catches up with all it has missed.

    Args:
        drafter: what drafts; True for a `LocalDrafter`, False for nothing.
    """

    def __init__(self, drafter: Drafter | bool) -> None:  # noqa: FBT001  (or a drafter)
        if isinstance(drafter, bool):
            chosen: Drafter | None = LocalDrafter() if drafter else None
        else:
            chosen = drafter
        self._followers = None if chosen is None else Followers(chosen)
        self._following: dict[str, Follower] = {}

    def draft(self, steps: Sequence[SequenceStep], until_s: float) -> dict[str, DraftTree]:
        """Return trees by session, for those that there are any for.

        The first is drafted for whenever it is, others until then, by `time.monotonic`.
        """
        if self._followers is None:
            return {}
        trees: dict[str, DraftTree] = {}
        for step in steps:  # one by one: what is wrong with one is wrong with it alone
            if trees and time.monotonic() > until_s:
                break
            with suppress(RetrieverError):
                trees[step.request.session] = self._ask(self._followers, step)
        return trees

    def close(self, session: str, sequence: TokenSequence) -> None:
        """End a session; what it generated joins the recent outputs."""
        if self._followers is None:
            return
        drafter = self._followers.drafter
        follower = self._following.pop(session, None)
        with suppress(RetrieverError):
            if follower is not None and follower.is_open:
                drafter.close(session, follower.unsent())
            elif sequence.remember:
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
            (tree,) = followers.drafter.draft([follower.catching_up(step.request)])
        except UnknownSessionError:  # it was idle for too long: the next step opens another
            follower.forget()
            raise
        follower.told(step.request.length)
        return tree


_LOCAL_SHARE: Final = 0.1
"""Local drafts for many sequences may take so much of a step's time after its deadline."""


@dataclass(slots=True, eq=False)
class Plan:
    """One step under way.

    Attributes:
        steps: of all its sequences, in order.
        local_until_s: no local draft begins after that.
        messages: what to send, by address.
        trees: what has come, by session.
        reasons: why there is none from a server, by session.
    """

    steps: list[SequenceStep]
    local_until_s: float = math.inf
    messages: dict[str, pb.DraftStreamRequest] = field(default_factory=dict)
    trees: dict[str, DraftTree] = field(default_factory=dict)
    reasons: dict[str, FailOpen] = field(default_factory=dict)

    @property
    def is_done(self) -> bool:
        """Whether nothing more is to come."""
        return len(self.trees) + len(self.reasons) >= len(self.steps)


@dataclass(slots=True)
class _Assigned:
    """A sequence, and the server that drafts for it."""

    sequence: TokenSequence
    address: str


def checked_addresses(addresses: Iterable[str]) -> list[str]:
    """Return the addresses of servers that are used together.

    Raises:
        InvalidRequestError: there is none, or one twice.
    """
    listed = list(addresses)
    if not listed:
        raise InvalidRequestError("no address is given: name each draft service once")
    if len(set(listed)) != len(listed):
        raise InvalidRequestError("an address is given twice: name each draft service once")
    return listed


class Planner:
    """Keeps all sequences, sends each to its server, and fills in for servers that are away.

    Args:
        addresses: of the servers; at least one, each once.
        fingerprint: of the tokenizer at hand; empty if it is not known.
        local: what drafts while a server does not; True for a `LocalDrafter`, False for nothing.
        pads: whether messages are padded, so that their size tells little.

    Attributes:
        conversations: by address.
        fail_opens: steps of sequences that went on without a server's draft, by reason.

    Raises:
        InvalidRequestError: there is no address, or one twice.
    """

    def __init__(
        self,
        addresses: Iterable[str],
        fingerprint: str,
        local: Drafter | bool,  # noqa: FBT001  (or a drafter)
        *,
        pads: bool = False,
    ) -> None:
        self.conversations = {
            each: Conversation(each, fingerprint, pads=pads)
            for each in checked_addresses(addresses)
        }
        self._fail_opens: FailOpens = Counter()
        self._placed: OpenSessions[str, _Assigned] = OpenSessions()
        self._under_way: set[Plan] = set()
        self._local = LocalSide(local)

    @property
    def fail_opens(self) -> FailOpens:
        """A copy of the counts."""
        return sum((each.fail_opens for each in self.conversations.values()), self._fail_opens)

    def open(self, session: str, prompt: ArrayLike, *, remember: bool) -> None:
        """Begin a sequence; servers are told with its first step."""
        check_session_name(session)
        self._placed.check_free(session)
        sequence = TokenSequence(checked_tokens(prompt, None), remember=remember)
        self._placed.add(session, _Assigned(sequence, ranked(session, self.conversations)[0]))

    def plan(self, requests: Sequence[DraftRequest], now_s: float, deadline_s: float) -> Plan:
        """Note the new tokens of a step; return what is to be sent.

        Raises:
            UnknownSessionError: a session is not open.
            InvalidRequestError: a request is at fault; nothing of the step is kept.
        """
        check_named_once(requests)
        found = [self._checked(request) for request in requests]
        plan = Plan([], deadline_s + _LOCAL_SHARE * max(0.0, deadline_s - now_s))
        by_server: dict[str, list[SequenceStep]] = {}
        for request, assigned in zip(requests, found, strict=True):
            assigned.sequence.extend(request.new_tokens)
            step = SequenceStep(request, assigned.sequence)
            plan.steps.append(step)
            by_server.setdefault(self._server_of(request.session, assigned), []).append(step)
        for address, steps in by_server.items():
            self._ask(plan, address, steps, now_s, deadline_s)
        self._under_way.add(plan)
        return plan

    def take(self, address: str, response: pb.DraftStreamResponse) -> bool:
        """Take in what a server answered; return whether its stream is broken."""
        answer = self.conversations[address].settle(response)
        for plan in self._under_way:
            awaited = plan.messages.get(address)
            if awaited is not None and awaited.sequence_number == response.sequence_number:
                plan.trees |= answer.trees
                plan.reasons |= answer.reasons
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
        """Return the trees of a step, in order, locally made where no server's has come."""
        self._under_way.discard(plan)
        missing = [step for step in plan.steps if step.request.session not in plan.trees]
        local = self._local.draft(missing, plan.local_until_s)
        for step in missing:
            name = step.request.session
            self._miss(name, plan.reasons.get(name, FailOpen.TIMEOUT))
            plan.trees[name] = local[name] if name in local else DraftTree.empty()
        return [plan.trees[step.request.session] for step in plan.steps]

    def close(self, session: str, new_tokens: ArrayLike | None, *, remember: bool) -> None:
        """End a sequence; its server is told with the next message.

        Raises:
            UnknownSessionError: the session is not open.
        """
        ids = checked_ids([] if new_tokens is None else new_tokens, None)
        assigned = self._placed.remove(session)
        assigned.sequence.extend(ids)
        assigned.sequence.remember = assigned.sequence.remember and remember
        self.conversations[assigned.address].close(session, assigned.sequence)
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

    def _server_of(self, session: str, assigned: _Assigned) -> str:
        """Return the server of a session; it moves if its own is away and another is not."""
        if not self.conversations[assigned.address].is_up:
            for address in ranked(session, self.conversations):
                if self.conversations[address].is_up:
                    assigned.address = address
                    break
        return assigned.address

    def _miss(self, session: str, reason: FailOpen) -> None:
        """Count a draft that was gone without; its server is told of it, too."""
        self._fail_opens[reason] += 1
        address = self._address_of(session)
        if address is not None:
            self.conversations[address].missed[reason] += 1

    def _address_of(self, session: str) -> str | None:
        assigned = self._placed.find(session)
        return assigned.address if assigned is not None else None

    def _checked(self, request: DraftRequest) -> _Assigned:
        """Return whose request it is, if nothing is wrong with it."""
        assigned = self._placed.get(request.session)
        num_new = len(checked_ids(request.new_tokens, None))
        check_wire(request)
        check_step(request, len(assigned.sequence), num_new)
        return assigned
