"""The sequences of an engine, kept up to date with a drafter, and drafts for those of a step.

At every step an engine shows rows: the tokens of the sequences that run. Where it names the request
of a row, its sequence goes by the name and ends with the request. Where it does not, it does not
tell either when a sequence begins, ends, is aborted, or waits for memory: then a row goes on with
the sequence whose tokens it begins with.
"""

import math
import time
from collections.abc import Callable, Container, Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np

from decoder.engines.request_fields import PLAIN, RequestFields
from retriever.drafter import Drafter, TokenIds
from retriever.follower import DraftLimits, Follower, Followers
from retriever.sequences import TokenSequence
from retriever.tree import DraftTree


@dataclass(frozen=True, slots=True)
class NamedRequest:
    """A request that the engine names.

    Attributes:
        name: no other request that runs has it.
        state: the engine's own object for it: one request, one object. It tells a request from a
            later one of the same name.
        fields: what the request states. Nothing is kept of one that wants no drafts.
    """

    name: str | int
    state: object = None
    fields: RequestFields = PLAIN


@dataclass(frozen=True, slots=True)
class EngineRow:
    """One running sequence, as an engine shows it in a step.

    Attributes:
        tokens: int32[n], the sequence; where `first` is not 0, its last tokens alone. A view that
            the engine may write to afterwards.
        num_prompt: how many tokens of the sequence are the prompt, if it begins with this row. A
            row without a request goes on with the sequence of exactly these tokens.
        budget_nodes: most nodes of its draft; with 0 the drafter is told of the tokens alone.
        request: whose row it is, where the engine names requests.
        first: tokens that come before `tokens`; 0 without a request.
        earlier: returns int32[first] or more, these tokens, where they can be known.
    """

    tokens: TokenIds
    num_prompt: int
    budget_nodes: int
    request: NamedRequest | None = None
    first: int = 0
    earlier: Callable[[], TokenIds] | None = None

    @property
    def fields(self) -> RequestFields:
        """What its request states."""
        return PLAIN if self.request is None else self.request.fields

    def known(self) -> tuple[TokenIds, int]:
        """Return int32[m], all that can be known of the sequence, and how many tokens cannot."""
        earlier = self.earlier() if self.first and self.earlier is not None else self.tokens[:0]
        if len(earlier) < self.first:
            return self.tokens, self.first
        return np.concatenate([earlier[: self.first], self.tokens]), 0


@dataclass(frozen=True, slots=True)
class SequenceLimits:
    """Limits of the sequences that are held, and of the time that drafts take.

    Attributes:
        max_sequences: held at once; the least recently seen one is ended for another.
        max_tokens: tokens of all of them, 4 to 8 bytes each besides the drafter's own memory.
        idle_steps: a sequence counts as ended after so many steps in a row without it, if it has no
            name. Engines may show only a part of their sequences in each step.
        idle_s: such a sequence counts as ended after so many seconds without it.
        vocabulary_size: a token at or beyond it ends the drafts for its sequence; None where the
            drafter takes all tokens.
        deadline_s: a step opens as many sessions, and asks for as many drafts, as have lately
            fitted into so many seconds, at least one of each; None where the drafter keeps a
            deadline itself.
        min_probability: less probable nodes are not drafted.
    """

    max_sequences: int = 2048
    max_tokens: int = 1 << 24
    idle_steps: int = 8
    idle_s: float = 10.0
    vocabulary_size: int | None = None
    deadline_s: float | None = None
    min_probability: float = 0.0


_TAIL: Final = 8
"""Last tokens that a sequence is looked up by, before all of it is compared: few enough to hash at
every step, and enough that sequences of one length seldom share them."""

_INERTIA: Final = 0.9
"""Weight of earlier steps in the mean time of a draft: about the last ten steps count, so that one
pause of the machine does not cut the next steps' drafts for long."""

_Key = tuple[int, bytes] | str | int


class EngineSequences:
    """Keeps a drafter up to date with the sequences of an engine, and drafts for them.

    A row of a named request goes on with that request's sequence; one without a name with a
    sequence only if it begins with all of its tokens, compared one by one. Then only the new tokens
    reach the drafter. In one step no two rows share a sequence; rows without names that have equal
    tokens may take each other's.

    The output of a sequence is remembered when it ends, also when it was aborted: it is the model's
    own text. Errors of the drafter cost drafts: a sequence that it refuses is not drafted for, and
    after a failure sessions are opened again; see `Followers`. For any other error there is
    `EngineGuard`. Not safe for use from several threads.

    Args:
        drafter: gives the drafts, in one call for all rows of a step.
        limits: of the sequences and of time.
        clock: seconds, monotonic.
    """

    def __init__(
        self,
        drafter: Drafter,
        limits: SequenceLimits | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._limits = limits or SequenceLimits()
        known = DraftLimits(drafter_vocabulary=self._limits.vocabulary_size)
        self._followers = Followers(drafter, known, raises_refusals=False, clock=clock)
        self._deadline_s = math.inf if self._limits.deadline_s is None else self._limits.deadline_s
        self._clock = clock
        self._held = _HeldSequences()
        self._num_tokens = 0
        self._step = 0
        self._turn = 0
        self._draft_s = 0.0

    def __len__(self) -> int:
        """Count the sequences that are held."""
        return len(self._held)

    @property
    def num_tokens(self) -> int:
        """Tokens of the sequences that are held."""
        return self._num_tokens

    @property
    def num_failures(self) -> int:
        """Calls that the drafter refused or did not answer."""
        return self._followers.num_failures

    def step(self, rows: Sequence[EngineRow]) -> list[DraftTree]:
        """Return a tree for each row, in order; empty where there is none, or no room for it."""
        held = self._take_in(rows)
        trees = [DraftTree.empty()] * len(rows)
        wanted = [
            (at, each.follower)
            for at, each in enumerate(held)
            if each is not None and not each.follower.is_over()
        ]
        if not wanted or not self._followers.backoff.is_over():
            return trees
        chosen = [wanted[at] for at in self._in_turns(len(wanted))]
        self._followers.open([each for _, each in chosen], self._clock() + self._deadline_s)
        asked = {at: (each, rows[at].budget_nodes) for at, each in chosen if each.is_open}
        for at, tree in zip(asked, self._ask(list(asked.values())), strict=True):
            trees[at] = tree
        return trees

    def note(self, rows: Sequence[EngineRow]) -> None:
        """Note a step without drafts; the drafter is told with the next draft, or at the end."""
        self._take_in(rows)

    def end(self, name: str | int, tokens: TokenIds | None = None) -> None:
        """End the sequence of a request; its output is remembered.

        Args:
            name: of the request; an unknown one is ignored.
            tokens: int32[n], all of its tokens, where more were generated than were shown.
        """
        held = self._held.named(name)
        if held is None:
            return
        rest = None if tokens is None else held.behind(tokens, 0)
        if rest is not None:
            self._extend(held, rest)
        self._end(held)

    def end_others(self, running: Container[str | int]) -> None:
        """End the sequences of named requests that no longer run; a request may run unseen."""
        for held in self._held.all():
            if held.request is not None and held.request.name not in running:
                self._end(held)

    def close(self) -> None:
        """End all sequences; their outputs are remembered."""
        for held in self._held.all():
            self._end(held)

    def abandon(self) -> None:
        """Drop all sequences, in any state, without ending them in order; never raises."""
        self._followers.abandon(held.follower for held in self._held.all())
        self._held = _HeldSequences()
        self._num_tokens = 0

    def _take_in(self, rows: Sequence[EngineRow]) -> list["_HeldSequence | None"]:
        """Return the sequence of each row, up to date; None without one."""
        self._step += 1
        now_s = self._clock()
        held = [self._follow(row, now_s) for row in rows]
        self._end_unseen(now_s)
        return held

    def _follow(self, row: EngineRow, now_s: float) -> "_HeldSequence | None":
        held, new = self._found(row)
        if not row.fields.drafts:
            return None
        held = self._begin(row) if held is None else self._go_on(held, new)
        if held is not None:
            held.step, held.seen_s = self._step, now_s
        return held

    def _found(self, row: EngineRow) -> tuple["_HeldSequence | None", TokenIds]:
        """Return the sequence that a row goes on with, if any, and the row's tokens behind it.

        A request's sequence that its row does not go on with is ended.
        """
        if row.request is None:
            before = row.tokens[: row.num_prompt]
            return self._held.of_tokens(before, self._step), row.tokens[row.num_prompt :]
        held = self._held.named(row.request.name)
        if held is None:
            return None, row.tokens
        new = held.behind(row.tokens, row.first)
        if new is not None and held.is_of(row.request):
            return held, new
        self._end(held)
        return None, row.tokens

    def _begin(self, row: EngineRow) -> "_HeldSequence | None":
        """Return a new sequence; None where there is no room for it."""
        tokens, first = row.known()
        if not self._can_hold(tokens, is_new=True):
            return None
        num_prompt = min(row.num_prompt, len(tokens)) if first == 0 else len(tokens)
        follower = self._followers.follow(row.fields.begin(tokens, num_prompt))
        held = _HeldSequence(follower, row.request, first)
        self._held.add(held)
        self._num_tokens += len(tokens)
        return held

    def _go_on(self, held: "_HeldSequence", new: TokenIds) -> "_HeldSequence | None":
        """Return a sequence with its new tokens; None where there is no room for them."""
        held.step = self._step  # no other row's in this step, and not to be ended for one
        if not self._can_hold(new, is_new=False):
            return None
        self._extend(held, new)
        return held

    def _extend(self, held: "_HeldSequence", new: TokenIds) -> None:
        self._held.remove(held)  # filed by its tokens, if it has no name
        held.sequence.extend(new)
        self._held.add(held)
        self._num_tokens += len(new)

    def _end(self, held: "_HeldSequence") -> None:
        self._held.remove(held)
        self._num_tokens -= len(held.sequence)
        held.follower.close()

    def _can_hold(self, tokens: TokenIds, *, is_new: bool) -> bool:
        """Return whether tokens are ids and there is room, or can be by ending others.

        The least recently seen sequences are ended, and none that was seen in this step.
        """
        if len(tokens) and tokens.min() < 0:
            return False
        while (
            len(self._held) + is_new > self._limits.max_sequences
            or self._num_tokens + len(tokens) > self._limits.max_tokens
        ):
            unseen = [each for each in self._held.all() if each.step < self._step]
            if not unseen:
                return False
            self._end(min(unseen, key=lambda each: each.step))
        return True

    def _end_unseen(self, now_s: float) -> None:
        """End sequences without names that have not been seen for too long."""
        last_step, last_s = self._step - self._limits.idle_steps, now_s - self._limits.idle_s
        for held in self._held.all():
            is_unseen = held.request is None and held.step < self._step
            if is_unseen and (held.step <= last_step or held.seen_s < last_s):
                self._end(held)

    def _in_turns(self, num_wanted: int) -> list[int]:
        """Return which to ask for: as many as the deadline allows, taking turns."""
        order = [(self._turn + at) % num_wanted for at in range(num_wanted)]
        if self._draft_s > 0 and self._deadline_s < num_wanted * self._draft_s:
            order = order[: max(1, int(self._deadline_s / self._draft_s))]
        self._turn = 0 if len(order) == num_wanted else self._turn + len(order)
        return order

    def _ask(self, asked: Sequence[tuple[Follower, int]]) -> list[DraftTree]:
        """Draft for open sessions, and note how long that takes where it succeeds."""
        failures, start_s = self.num_failures, self._clock()
        trees = self._followers.draft(asked, self._limits.min_probability)
        if asked and self.num_failures == failures:
            draft_s = (self._clock() - start_s) / len(asked)
            self._draft_s += (1 - _INERTIA) * (draft_s - self._draft_s)
        return trees


@dataclass(slots=True, eq=False)
class _HeldSequence:
    """A sequence with a copy of its tokens, and what keeps the drafter up to date with it.

    Attributes:
        follower: of the sequence.
        request: whose it is, where the engine names requests.
        first: tokens that come before those of the sequence, and are not known.
        step: the number of the step that it was last seen in.
        seen_s: when that was, in seconds.
    """

    follower: Follower
    request: NamedRequest | None
    first: int = 0
    step: int = 0
    seen_s: float = 0.0

    @property
    def sequence(self) -> TokenSequence:
        """Its tokens."""
        return self.follower.sequence

    @property
    def key(self) -> _Key:
        return _key(self.sequence.tokens) if self.request is None else self.request.name

    def is_of(self, request: NamedRequest) -> bool:
        return self.request is not None and self.request.state is request.state

    def behind(self, tokens: TokenIds, first: int) -> TokenIds | None:
        """Return those of int32[n], shown from a place on, that are new; None if others differ."""
        known = self.sequence.tokens
        begin = max(first - self.first, 0)
        shown = tokens[max(self.first - first, 0) :]
        num_known = len(known) - begin
        if not 0 <= num_known <= len(shown) or (known[begin:] != shown[:num_known]).any():
            return None
        return shown[num_known:]


class _HeldSequences:
    """Sequences by their names, or where there are none, by their length and last tokens.

    Those found by tokens are compared from the first to the last, so that a row never goes on with
    another sequence. Comparing reads 4 bytes a token: some microseconds for 32k tokens.
    """

    def __init__(self) -> None:
        self._filed: dict[_Key, list[_HeldSequence]] = {}
        self._num = 0

    def __len__(self) -> int:
        return self._num

    def all(self) -> list[_HeldSequence]:
        """Return all, in a list of its own: what is filed may change meanwhile."""
        return [held for filed in self._filed.values() for held in filed]

    def add(self, held: _HeldSequence) -> None:
        self._filed.setdefault(held.key, []).append(held)
        self._num += 1

    def remove(self, held: _HeldSequence) -> None:
        filed = self._filed[held.key]
        filed.remove(held)
        if not filed:
            del self._filed[held.key]
        self._num -= 1

    def named(self, name: str | int) -> _HeldSequence | None:
        return next(iter(self._filed.get(name, ())), None)

    def of_tokens(self, tokens: TokenIds, step: int) -> _HeldSequence | None:
        """Return a sequence that equals int32[n], and that no row had in this step."""
        filed = self._filed.get(_key(tokens), ())
        return next(
            (each for each in filed if each.step != step and each.sequence.begins(tokens)), None
        )


def _key(tokens: TokenIds) -> _Key:
    return len(tokens), tokens[-_TAIL:].tobytes()
